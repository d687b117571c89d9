"""Measuring CPU time: each library handles some conversations in a row, and the libraries run in random order."""

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
"""Conversations that a library handles before the next library runs: real programs use one library."""


@dataclass(slots=True)
class Spent:
    """Seconds of CPU time, of all threads, of each run of a call."""

    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def worst(self) -> float:
        """The 99th percentile, or the maximum of fewer than a hundred values."""
        ordered = sorted(self.values)
        return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]

    @property
    def first(self) -> float:
        """The median of the calls that ran right after another library, when the CPU caches held its data."""
        return statistics.median(self.values[::IN_A_ROW])


def cpu_time(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Run a call, and return its seconds of CPU time, of all threads, and its result."""
    start = time.process_time_ns()
    result = call(*arguments)
    return (time.process_time_ns() - start) / 1e9, result


def take_turns(jobs: Sequence[Mapping[str, Call]], order: random.Random) -> list[dict[str, tuple[float, Any]]]:
    """Run each call of each job once, name by name in random order, so that disturbances hit all names alike.

    Garbage is collected before each name, outside of the measured time.
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
    """Exclude existing objects from garbage collection, whose cost would otherwise grow with what is loaded."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
