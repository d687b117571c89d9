"""Many rollouts at once, in groups, with so many under way and no more."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .loop import Agent, Rollout, Task
from .store import RolloutStore


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

    def described(self) -> dict[str, Any]:
        """As JSON can hold it."""
        out = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("ends", "rewards")}
        out |= {"ends": dict(self.ends), "reward": None if math.isnan(self.reward) else self.reward}
        out["samples_per_rollout"] = self.samples_per_rollout if self.rollouts else None
        out["tokens_per_second"] = self.sampled / self.seconds if self.seconds else None
        return out


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
    """
    summary = Summary()
    began = time.monotonic()
    waiting = enumerate(tasks)

    async def work() -> None:
        for number, task in waiting:
            if store is not None and store.is_finished(task.name):
                continue
            if store is not None:
                store.start(task.name)
            rollout = await agent.run(task, seed=None if seed is None else seed + 1_000_003 * number)
            if store is not None:
                await asyncio.to_thread(store.finish, rollout)
            summary.add(rollout.metrics())
            summary.seconds = time.monotonic() - began
            if done is not None:
                done(rollout)

    if store is not None:
        for row in store.finished:
            summary.add(row["metrics"])
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    summary.seconds = time.monotonic() - began
    return summary
