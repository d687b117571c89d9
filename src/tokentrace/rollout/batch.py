"""Rows of a dataset as tasks, and many rollouts at once: in groups, with so many under way and no more."""

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

from ..conversation.shapes import parsed_json
from ..data.conversations import COMPLETIONS, MESSAGES, Conversation, conversation_of
from ..errors import InputError
from .loop import Agent, Rollout, Task
from .store import RolloutStore
from .tools import BaseTool

_READ: Final = frozenset(
    {*MESSAGES, *COMPLETIONS, "prompt", "system", "tools", "functions", "tools_kwargs", "interaction_kwargs"}
)
_OURS: Final = frozenset({"reward", "group", "member", "task"})
"""What a rollout's metadata says of itself; a column of that name becomes ``data_reward`` and so on."""


@dataclass(slots=True)
class Summary:
    """What a run of rollouts came to."""

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
    rewards: list[float] = field(default_factory=list)
    seconds: float = 0.0
    """Of this run; what an earlier one finished took its own."""
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


def row_task(row: Any, tools: Sequence[BaseTool] = (), *, name: str = "") -> Task:
    """A row of a dataset as a task: its conversation up to the last message that is not the assistant's.

    ``tools_kwargs`` and ``interaction_kwargs``, of the row or its ``extra_info``, go to the tools' `create` and the
    interaction; ``tools`` chooses among the tools by name; all other columns go to the metadata.
    """
    columns = {"messages": row} if isinstance(row, list) else dict(row) if isinstance(row, Mapping) else row
    if isinstance(columns, dict) and "prompt" in columns and not any(columns.get(n) for n in (*MESSAGES, *COMPLETIONS)):
        said = columns.pop("prompt")
        columns["messages"] = [{"role": "user", "content": said}] if isinstance(said, str) else said
    found = conversation_of(columns)
    if found.variables:
        raise InputError("a task has no template variables of its own: set them under renderer.kwargs")
    by_name = {tool.name: tool for tool in tools}
    wanted = [str(one.get("function", one).get("name")) for one in found.tools or ()]
    if missing := [one for one in wanted if one not in by_name]:
        raise InputError(f"there is no tool {missing[0]!r}; there are: {', '.join(by_name) or 'none'}", field="tools")
    extra = columns.get("extra_info")
    both = {**(extra if isinstance(extra, Mapping) else {}), **columns}
    rest = {key: value for key, value in columns.items() if key not in _READ}
    return Task(
        messages=_prompt(found),
        name=name,
        tools=[by_name[one] for one in wanted] or None,
        tool_settings={key: one.get("create_kwargs", one) for key, one in _mapping(both, "tools_kwargs").items()},
        interaction_settings=_mapping(both, "interaction_kwargs"),
        metadata=json.loads(json.dumps({f"data_{k}" if k in _OURS else k: v for k, v in rest.items()}, default=str)),
    )


def _prompt(found: Conversation) -> list[Mapping[str, Any]]:
    messages = found.messages[: found.completion_from]
    while messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    if not messages:
        raise InputError("there is no message that a model could answer")
    return list(messages)


def _mapping(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = row.get(key)
    value = parsed_json(value, key) if isinstance(value, str) and value.strip() else value or {}
    if not isinstance(value, Mapping) or (
        key == "tools_kwargs" and not all(isinstance(v, Mapping) for v in value.values())
    ):
        raise InputError(
            "must be a mapping of settings" + (" for each tool" if key == "tools_kwargs" else ""), field=key
        )
    return dict(value)


def grouped(tasks: Iterable[Task], count: int) -> Iterator[Task]:
    """Each task so many times, as a group: the same prompt under names of its own."""
    for number, task in enumerate(tasks):
        name = task.name or f"task-{number:05d}"
        for at in range(count):
            metadata = {**task.metadata, "group": name, "member": at}
            yield dataclasses.replace(task, name=f"{name}-{at}" if count > 1 else name, metadata=metadata)


async def run_rollouts(
    agent: Agent,
    tasks: Iterable[Task],
    *,
    concurrency: int = 64,
    store: RolloutStore | None = None,
    done: Callable[[Rollout], None] | None = None,
    seed: int | None = None,
) -> Summary:
    """Run tasks, `concurrency` at a time; tasks that the store has finished are skipped and counted.

    Each rollout is stored when it ends. Cancelling (Ctrl-C) ends those under way and keeps what is finished. With a
    `seed` each rollout samples with one of its own, which depends on the seed and its place among the tasks alone.
    Tasks that are stored need names of their own. What the store, `done` or cancelled work raises ends the run.
    """
    if concurrency < 1:
        raise InputError(f"{concurrency} rollouts at a time are none")
    summary = Summary() if store is None else Summary.of(store)
    began = time.monotonic()
    waiting = enumerate(tasks)

    async def work() -> None:
        for number, task in waiting:
            if store is not None and store.is_finished(task.name):
                continue  # its number is counted all the same, and with it the seeds of those after it
            if store is not None:
                store.start(task.name)
            rollout = await agent.run(task, seed=None if seed is None else seed + 1_000_003 * number)
            if store is not None:
                await _kept(asyncio.create_task(asyncio.to_thread(store.finish, rollout)))
            summary.add(rollout.metrics())
            summary.seconds = time.monotonic() - began
            if done is not None:
                done(rollout)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    except ExceptionGroup as failed:  # the first is why, the others are the same again
        raise failed.exceptions[0] from failed
    summary.seconds = time.monotonic() - began
    return summary


async def _kept(writing: asyncio.Task[None]) -> None:
    """Wait until a rollout is on the disk, even when cancelled: a thread cannot be stopped half-way."""
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await writing
        raise
