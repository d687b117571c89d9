"""Turn dataset rows into tasks, and run many rollouts at once."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any

from ..data.conversations import COMPLETIONS, MESSAGES, TOOLS, conversation_of, table_row
from ..errors import ContinuationError, InputError, brief
from ..settings import instance, whole
from ..values.place import Place, is_list
from ..values.plain import parse_json
from .calling import together
from .ends import End
from .loop import Agent, Rollout, Task
from .patience import EngineDown, Patience
from .record import plain_json
from .store import RolloutStore
from .tools import BaseTool

_SETTINGS = ("tools_kwargs", "interaction_kwargs")
_READ = {*MESSAGES, *COMPLETIONS, *TOOLS, *_SETTINGS, "prompt", "system", "tool_selection"}
_RESERVED = frozenset({"reward", "group", "member", "task", "rollout"})
"""Columns that are renamed: ``reward`` becomes ``data_reward``, and so on."""


@dataclass(slots=True)
class Summary:
    """Totals over a run."""

    rollouts: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    tokens: int = 0
    sampled: int = 0
    samples: int = 0
    breaks: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    malformed_turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    rewards: list[float] = field(default_factory=list)
    seconds: float = 0.0
    resumed: int = 0
    resumed_sampled: int = 0

    @classmethod
    def of(cls, store: RolloutStore | None) -> Summary:
        summary = cls()
        for row in [] if store is None else store.finished:
            summary.add(row["metrics"])
        summary.resumed, summary.resumed_sampled = summary.rollouts, summary.sampled
        return summary

    def add(self, metrics: dict[str, Any]) -> None:
        self.rollouts += 1
        self.ends[str(metrics["end"])] += 1
        for one in fields(self):
            value = None if one.name == "seconds" else metrics.get(one.name)
            if value is not None:
                setattr(self, one.name, (getattr(self, one.name) or 0) + value)
        if metrics["reward"] is not None:
            self.rewards.append(float(metrics["reward"]))

    @property
    def reward(self) -> float:
        return sum(self.rewards) / len(self.rewards) if self.rewards else math.nan

    def described(self) -> dict[str, Any]:
        values = asdict(self) | {"ends": dict(self.ends)}
        del values["rewards"], values["resumed_sampled"]
        new = self.sampled - self.resumed_sampled
        values["reward"] = self.reward if self.rewards else None
        values["samples_per_rollout"] = self.samples / self.rollouts if self.rollouts else None
        values["tokens_per_second"] = new / self.seconds if self.seconds else None
        return values


def row_task(row: Any, tools: Sequence[BaseTool] = (), *, name: str = "", from_json: bool = False) -> Task:
    """Turn a dataset row into a task: its conversation up to the model's answer.

    ``tools_kwargs`` and ``interaction_kwargs``, from the row or its ``extra_info``, go to the
    tools and the interaction. ``tools`` or ``tool_selection`` selects tools by name. Other
    columns become metadata. Drops nulls that a table may have filled in, unless the row was
    read `from_json`.
    """
    row = {"messages": row} if isinstance(row, list) else row
    if not isinstance(row, Mapping):
        raise InputError(f"a row must be a mapping or a list of messages, not {brief(row)}")
    columns = dict(row)
    if not from_json:
        columns |= table_row({key: row[key] for key in row if key in _READ or key == "extra_info"})[0]
    if "prompt" in row and not any(columns.get(key) for key in (*MESSAGES, *COMPLETIONS)):
        prompt = columns.pop("prompt")
        columns["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    conversation = conversation_of(columns)
    if conversation.variables:
        raise InputError("a row cannot set template variables: set them under renderer.kwargs")
    messages = list(conversation.messages[: conversation.completion_from])
    while messages and messages[-1].get("role") == "assistant":
        messages.pop()
    if not messages:
        raise InputError("there is no message that a model could answer")
    extra = columns.get("extra_info")
    both = dict(extra) if isinstance(extra, Mapping) else {}
    both |= {key: value for key, value in columns.items() if value is not None}
    settings: dict[str, Any] = {}
    for key in _SETTINGS:
        value = both.get(key) or {}
        if isinstance(value, str) and value.strip():
            value = parse_json(value, Place(field=key))
        if not isinstance(value, Mapping):
            raise InputError("must be a mapping of settings", field=key)
        settings[key] = value
    selection = both.get("tool_selection") or ()
    if not is_list(selection) or (selection and conversation.tools):
        raise InputError(
            "must be a list of names, and cannot be combined with tools", field="tool_selection"
        )
    schemas = [schema.get("function", schema) for schema in conversation.tools or ()]
    names = [*map(str, selection), *(str(schema.get("name")) for schema in schemas)]
    by_name = {tool.name: tool for tool in tools}
    if missing := [one for one in names if one not in by_name]:
        available = ", ".join(by_name) or "none"
        raise InputError(f"there is no tool {missing[0]!r}; there are: {available}", field="tools")
    other = {key: plain_json(value) for key, value in row.items() if key not in _READ}
    metadata = {f"data_{key}" if key in _RESERVED else str(key): value for key, value in other.items()}
    chosen = [by_name[one] for one in names] or None
    return Task(messages, name, chosen, settings["tools_kwargs"], settings["interaction_kwargs"], metadata)


def grouped(tasks: Iterable[Task], count: int) -> Iterator[Task]:
    """Yield each task `count` times, as a group of different names."""
    count = whole("the size of a group", count, least=1, error=InputError)
    for number, task in enumerate(tasks):
        name = _named(task, number).name
        for at in range(count):
            metadata = {**task.metadata, "group": name, "member": at}
            yield replace(task, name=f"{name}-{at}" if count > 1 else name, metadata=metadata)


def named(tasks: Iterable[Task]) -> Iterator[Task]:
    """Yield tasks, unnamed ones named by position. Raises InputError if two share a name."""
    if not isinstance(tasks, Iterable):
        raise InputError(f"tasks must be a list of tasks, not {brief(tasks)}")
    places: dict[str, int] = {}
    for number, task in enumerate(tasks):
        task = _named(task, number)
        if number != (first := places.setdefault(task.name, number)):
            both = f"tasks {first} and {number} (counted from 0) are both called {brief(task.name)}"
            raise InputError(f"{both}: rename one, or use grouped(tasks, n) to run each task n times")
        yield task


def _named(task: Any, number: int) -> Task:
    if not isinstance(task, Task):
        raise InputError(f"task {number} is {brief(task)}, not a Task; row_task makes one from a row")
    return task if task.name else replace(task, name=f"task-{number:05d}")


async def run_rollouts(
    agent: Agent,
    tasks: Iterable[Task],
    *,
    concurrency: int = 64,
    store: RolloutStore | None = None,
    done: Callable[[Rollout], None] | None = None,
    seed: int | None = None,
    patience: Patience | None = None,
    continue_aborted: bool = False,
) -> Summary:
    """Run tasks, `concurrency` at a time. Those that are finished in the store only count.

    A rollout's seed depends on `seed` and its position among the tasks. While the engine does not
    answer, all wait for as long as `patience` allows; then EngineDown ends the run.
    `continue_aborted` continues aborted and interrupted rollouts, or notes why not. Raises
    InputError for duplicate names, and if a rollout cancelled its own task.
    """
    instance("agent", agent, Agent, InputError)
    waiting = patience or Patience()
    if continue_aborted:
        if store is None:
            raise InputError("continue_aborted needs a store with the rollouts to continue")
        store.run_again([End.ABORT])

    async def run(number: int, task: Task, seed: int | None) -> Rollout:
        if store is None:
            return await agent.run(task, seed=seed, patience=waiting)
        under_way, notes = list[Rollout](), list[str]()
        start = partial(agent.run, task, started=under_way.append, seed=seed, patience=waiting)
        earlier = await asyncio.to_thread(store.recorded, task) if continue_aborted else None
        try:
            if earlier is not None:
                try:
                    return await start(resumed=earlier)
                except ContinuationError as error:
                    notes.append(f"started over: {error}")
            await asyncio.to_thread(store.start, task.name)
            rollout = await start()
            rollout.notes += notes
            return rollout
        except (EngineDown, asyncio.CancelledError):
            if under_way and under_way[-1].turns:
                store.keep(under_way[-1])
            raise

    return await run_all(run, tasks, concurrency=concurrency, store=store, done=done, seed=seed)


async def run_all(
    run: Callable[[int, Task, int | None], Awaitable[Rollout]],
    tasks: Iterable[Task],
    *,
    concurrency: int,
    store: RolloutStore | None,
    done: Callable[[Rollout], None] | None,
    seed: int | None,
) -> Summary:
    concurrency = whole("concurrency", concurrency, least=1, error=InputError)
    seed = None if seed is None else whole("seed", seed, least=0, most=2**62, error=InputError)
    summary, began = Summary.of(store), time.monotonic()
    waiting = enumerate(list(named(tasks)) if isinstance(tasks, Sequence) else named(tasks))
    running: set[str] = set()

    async def work() -> None:
        for number, task in waiting:
            if store is not None and store.is_finished(task.name):
                continue  # its number still counts for the seeds of later tasks
            running.add(task.name)
            rollout = await run(number, task, rollout_seed(seed, number))
            if store is not None:
                writing = asyncio.create_task(asyncio.to_thread(store.finish, rollout))
                try:
                    await asyncio.shield(writing)
                except asyncio.CancelledError:
                    await writing
                    raise
            running.remove(task.name)
            summary.add(rollout.metrics())
            summary.seconds = time.monotonic() - began
            if done is not None:
                done(rollout)

    await together(work() for _ in range(concurrency))
    if running:  # a TaskGroup treats a cancelled worker as done
        names = ", ".join(map(brief, sorted(running)[:3]))
        raise InputError(f"a tool, user or reward cancelled {len(running)} rollouts, such as {names}")
    summary.seconds = time.monotonic() - began
    return summary


def rollout_seed(seed: int | None, number: int) -> int | None:
    return None if seed is None else seed + 1_000_003 * number
