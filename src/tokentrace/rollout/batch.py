"""Rows of a dataset as tasks, and many rollouts at once: in groups, with a limit on how many are under way."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..conversation.place import Place, is_list
from ..conversation.values import parse_json
from ..data.conversations import COMPLETIONS, MESSAGES, Conversation, conversation_of, table_row
from ..errors import ContinuationError, InputError, shown
from ..settings import instance, whole
from .calling import together
from .ends import End
from .loop import Agent, Rollout, Task
from .patience import EngineDown, Patience
from .store import RolloutStore
from .tools import BaseTool

_READ: Final = frozenset(
    {
        *MESSAGES,
        *COMPLETIONS,
        "prompt",
        "system",
        "tools",
        "functions",
        "tools_kwargs",
        "interaction_kwargs",
        "tool_selection",
    }
)
_OURS: Final = frozenset({"reward", "group", "member", "task"})
"""What a rollout's metadata says of itself; a column of that name becomes ``data_reward`` and so on."""
MAX_SEED: Final = 2**62


@dataclass(slots=True)
class Summary:
    """The results of a run of rollouts, in numbers."""

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
    """How many of the prompt tokens were in the engine's cache; None where no engine said."""
    rewards: list[float] = field(default_factory=list)
    seconds: float = 0.0
    """Of this run alone, without those that an earlier one took."""
    resumed: int = 0
    """Rollouts that an earlier run finished. They are counted in all of the above."""
    resumed_sampled: int = 0

    @classmethod
    def of(cls, store: RolloutStore) -> Summary:
        """What an earlier run has finished."""
        summary = cls()
        for row in store.finished:
            summary.add(row["metrics"])
        summary.resumed, summary.resumed_sampled = summary.rollouts, summary.sampled
        return summary

    def add(self, metrics: dict[str, Any]) -> None:
        """Count a rollout by its metrics."""
        self.rollouts += 1
        self.ends[str(metrics["end"])] += 1
        for name in ("turns", "tokens", "sampled", "samples", "breaks", "tool_calls", "tool_errors", "malformed_turns"):
            setattr(self, name, getattr(self, name) + metrics[name])
        self.prompt_tokens += metrics.get("prompt_tokens") or 0
        cached = metrics.get("cached_tokens")
        if cached is not None:
            self.cached_tokens = (self.cached_tokens or 0) + cached
        if metrics["reward"] is not None:
            self.rewards.append(float(metrics["reward"]))

    @property
    def reward(self) -> float:
        """The mean reward; NaN where no rollout has one."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else math.nan

    @property
    def samples_per_rollout(self) -> float:
        return self.samples / self.rollouts if self.rollouts else math.nan

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens of this run a second."""
        return (self.sampled - self.resumed_sampled) / self.seconds if self.seconds else math.nan

    def described(self) -> dict[str, Any]:
        """As JSON can hold it."""
        left_out = ("ends", "rewards", "resumed_sampled")
        out = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in left_out}
        out |= {"ends": dict(self.ends), "reward": None if math.isnan(self.reward) else self.reward}
        out["samples_per_rollout"] = self.samples_per_rollout if self.rollouts else None
        out["tokens_per_second"] = None if math.isnan(self.tokens_per_second) else self.tokens_per_second
        return out


def row_task(row: Any, tools: Sequence[BaseTool] = (), *, name: str = "", from_json: bool = False) -> Task:
    """A row of a dataset as a task: its conversation up to the last message that is not the assistant's.

    ``tools_kwargs`` and ``interaction_kwargs``, of the row or its ``extra_info``, go to the tools and the
    interaction; ``tools`` or ``tool_selection`` chooses among the tools by name; all other columns go to the metadata.
    Nulls that a table may have filled in are left out of all that is read here (`data.conversations.table_row`), unless
    the row was read `from_json`.
    """
    given = {"messages": row} if isinstance(row, list) else dict(row) if isinstance(row, Mapping) else row
    columns = given
    if isinstance(given, dict) and not from_json:
        read = {key: value for key, value in given.items() if key in _READ or key == "extra_info"}
        columns = {**given, **table_row(read)[0]}
    if isinstance(columns, dict) and "prompt" in columns and not any(columns.get(n) for n in (*MESSAGES, *COMPLETIONS)):
        said = columns.pop("prompt")
        columns["messages"] = [{"role": "user", "content": said}] if isinstance(said, str) else said
    found = conversation_of(columns)
    if found.variables:
        raise InputError("a task has no template variables of its own: set them under renderer.kwargs")
    by_name = {tool.name: tool for tool in tools}
    extra = columns.get("extra_info")
    both = {**(extra if isinstance(extra, Mapping) else {}), **{k: v for k, v in columns.items() if v is not None}}
    chosen = both.get("tool_selection") or ()
    if not is_list(chosen) or (chosen and found.tools):
        raise InputError("must be a list of names, and not be there beside tools", field="tool_selection")
    wanted = [str(one.get("function", one).get("name")) for one in found.tools or ()] or [*map(str, chosen)]
    if missing := [one for one in wanted if one not in by_name]:
        raise InputError(f"there is no tool {missing[0]!r}; there are: {', '.join(by_name) or 'none'}", field="tools")
    rest = {key: value for key, value in given.items() if key not in _READ}
    return Task(
        messages=_prompt(found),
        name=name,
        tools=[by_name[one] for one in wanted] or None,
        tool_settings=_mapping(both, "tools_kwargs"),
        interaction_settings=_mapping(both, "interaction_kwargs"),
        metadata=_metadata({f"data_{key}" if key in _OURS else key: value for key, value in rest.items()}),
    )


def _metadata(columns: dict[str, Any]) -> dict[str, Any]:
    """Columns as JSON can hold them: what it cannot hold becomes text, NaN and infinities among it."""
    try:
        text = json.dumps(columns, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"its columns cannot be kept as metadata: {error}") from error
    found: dict[str, Any] = json.loads(text, parse_constant=str)
    return found


def _prompt(found: Conversation) -> list[Mapping[str, Any]]:
    messages = found.messages[: found.completion_from]
    while messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    if not messages:
        raise InputError("there is no message that a model could answer")
    return list(messages)


def _mapping(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = row.get(key)
    value = parse_json(value, Place(field=key)) if isinstance(value, str) and value.strip() else value or {}
    if not isinstance(value, Mapping) or (
        key == "tools_kwargs" and not all(isinstance(v, Mapping) for v in value.values())
    ):
        raise InputError(
            "must be a mapping of settings" + (" for each tool" if key == "tools_kwargs" else ""), field=key
        )
    return dict(value)


def grouped(tasks: Iterable[Task], count: int) -> Iterator[Task]:
    """Each task `count` times, as a group: the same prompt, each time under another name."""
    count = whole("the size of a group", count, least=1, error=InputError)
    return (member for number, task in enumerate(tasks) for member in _group(task, number, count))


def _group(task: Task, number: int, count: int) -> Iterator[Task]:
    name = _named(task, number).name
    for at in range(count):
        metadata = {**task.metadata, "group": name, "member": at}
        yield dataclasses.replace(task, name=f"{name}-{at}" if count > 1 else name, metadata=metadata)


def named(tasks: Iterable[Task]) -> Iterator[Task]:
    """The tasks, each with a name: one without is called by its place, ``task-00007``.

    The store, tools and groups tell rollouts apart by their names, so a name that is there twice is an InputError.
    """
    places: dict[str, int] = {}
    for number, task in enumerate(tasks):
        task = _named(task, number)
        if task.name in places:
            both = f"tasks {places[task.name]} and {number} (counted from 0) are both called {shown(task.name)}"
            raise InputError(
                f"{both}: give each a name of its own, or none; grouped(tasks, n) makes n rollouts of each task"
            )
        places[task.name] = number
        yield task


def _named(task: Any, number: int) -> Task:
    if not isinstance(task, Task):
        raise InputError(f"task {number} is {shown(task)}, not a Task; row_task makes one of a row of a dataset")
    return task if task.name else dataclasses.replace(task, name=f"task-{number:05d}")


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
    """Run tasks, `concurrency` at a time; tasks that the store has finished are skipped and counted.

    Each rollout is stored when it ends. Cancelling (Ctrl-C) ends those under way and keeps what is finished. With a
    `seed` each rollout samples with another seed, which depends only on this one and on its place among the tasks.
    Tasks without names are called by their place; a name that is there twice is refused, before anything is run where
    `tasks` is a list. While the engine does not answer all rollouts wait, for as long as `patience` says (ten minutes
    by default); then `EngineDown` ends the run. So does what the store, `done` or cancelled work raises. A rollout that
    a tool, simulated user or reward cancelled together with the task that runs it is an InputError at the end.

    With `continue_aborted`, rollouts of which the store has the beginning are continued and not sampled anew: those
    that were aborted, and those that were under way when a run ended. One that cannot be continued is run anew, and
    a note says why.
    """
    instance("agent", agent, Agent, InputError)
    if not isinstance(tasks, Iterable):
        raise InputError(f"tasks must be a list of tasks, not {shown(tasks)}")
    if store is not None:
        instance("store", store, RolloutStore, InputError)
    patience = Patience() if patience is None else instance("patience", patience, Patience, InputError)
    concurrency = whole("concurrency", concurrency, least=1, error=InputError)
    seed = None if seed is None else whole("seed", seed, least=0, most=MAX_SEED, error=InputError)
    if continue_aborted:
        if store is None:
            raise InputError("continue_aborted needs a store, which has the rollouts to go on with")
        store.run_again([End.ABORT])
    summary = Summary() if store is None else Summary.of(store)
    began = time.monotonic()
    waiting = enumerate(list(named(tasks)) if isinstance(tasks, Sequence) else named(tasks))
    running: set[str] = set()

    async def work() -> None:
        for number, task in waiting:
            if store is not None and store.is_finished(task.name):
                continue  # its number still counts for the seeds of those after it
            task_seed = rollout_seed(seed, number)
            running.add(task.name)
            if store is None:
                rollout = await agent.run(task, seed=task_seed, patience=patience)
            else:
                rollout = await _run_and_store(agent, task, task_seed, patience, store, continue_aborted)
            running.remove(task.name)
            summary.add(rollout.metrics())
            summary.seconds = time.monotonic() - began
            if done is not None:
                done(rollout)

    await together(work() for _ in range(concurrency))
    if running:  # a TaskGroup takes a worker that was cancelled for one that is done
        names = ", ".join(map(shown, sorted(running)[:3])) + (", …" if len(running) > 3 else "")
        raise InputError(f"{len(running)} rollouts did not end, a tool, user or reward cancelled their tasks: {names}")
    summary.seconds = time.monotonic() - began
    return summary


async def _run_and_store(
    agent: Agent, task: Task, seed: int | None, patience: Patience, store: RolloutStore, continues: bool
) -> Rollout:
    """Run a task and store it; what there is of it if it is cancelled or the engine is down."""
    earlier = await asyncio.to_thread(store.recorded, task) if continues else None
    under_way: list[Rollout] = []
    notes: list[str] = []
    try:
        if earlier is not None:
            try:
                rollout = await agent.run(task, resumed=earlier, grown=under_way.append, seed=seed, patience=patience)
            except ContinuationError as error:
                earlier, notes = None, [f"run anew: {error}"]
        if earlier is None:
            await asyncio.to_thread(store.start, task.name)
            rollout = await agent.run(task, grown=under_way.append, seed=seed, patience=patience)
            rollout.notes += notes
    except (EngineDown, asyncio.CancelledError):
        if under_way and under_way[-1].turns:
            store.keep(under_way[-1])
        raise
    await write_finished(store, rollout)
    return rollout


async def write_finished(store: RolloutStore, rollout: Rollout) -> None:
    """Store a rollout in a thread, even if this task is cancelled meanwhile."""
    writing = asyncio.create_task(asyncio.to_thread(store.finish, rollout))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await writing
        raise


def rollout_seed(seed: int | None, number: int) -> int | None:
    """The seed of the rollout at this place among the tasks of a run."""
    return None if seed is None else seed + 1_000_003 * number
