"""How a figure is taken: CPU time of calls, some in a row, while those who are called take turns in random order."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Call = Callable[[], Any]

IN_A_ROW = 4
"""Conversations that a library handles before it is the next one's turn: a program uses one library."""


@dataclass(slots=True)
class Spent:
    """Seconds of CPU time, of all threads, that a call took each time."""

    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def worst(self) -> float:
        """The 99th percentile; of fewer than a hundred values the largest."""
        ordered = sorted(self.values)
        return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]

    @property
    def least(self) -> float:
        return min(self.values)

    @property
    def first(self) -> float:
        """The median of those that ran right after the other libraries, of which the caches were full."""
        return statistics.median(self.values[::IN_A_ROW])


def cpu_time(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Seconds of CPU time, of all threads, that a call takes, and what it returns."""
    start = time.process_time_ns()
    result = call(*arguments)
    return (time.process_time_ns() - start) / 1e9, result


def take_turns(jobs: Sequence[Mapping[str, Call]], order: random.Random) -> list[dict[str, tuple[float, Any]]]:
    """Each call of each job once: by name, in an order that is drawn, so what disturbs the machine disturbs all alike.

    Garbage of those before is collected first, at nobody's cost.
    """
    names = list(jobs[0])
    order.shuffle(names)
    results: list[dict[str, tuple[float, Any]]] = [{} for _ in jobs]
    for name in names:
        gc.collect()
        for calls, result in zip(jobs, results, strict=True):
            result[name] = cpu_time(calls[name])
    return results


@contextmanager
def settled() -> Iterator[None]:
    """What was loaded before is left out of garbage collections, which would else cost more the more is loaded."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
