"""Statistics of a file of samples: lengths, trained tokens, and how they are distributed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .tables import read_tables
from .tokenizing import without_place

QUANTILES: Final = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class Bar:
    """Samples of `low` to `high` tokens (both included)."""

    low: int
    high: int
    samples: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts of a file, and its lengths: `length_counts` says how many samples have each."""

    samples: int
    tokens: int
    trained: int
    messages: int
    length_counts: tuple[tuple[int, int], ...]
    trained_counts: tuple[tuple[int, int], ...]
    notes: tuple[tuple[str, int], ...] = ()
    """How many samples each note is about, without the messages it names; the most frequent first."""

    def lengths(self) -> dict[float, int]:
        """The length at each of `QUANTILES`."""
        return _quantiles(self.length_counts)

    def trained_lengths(self) -> dict[float, int]:
        """The number of trained tokens at each of `QUANTILES`."""
        return _quantiles(self.trained_counts)

    def histogram(self, bars: int = 14) -> list[Bar]:
        """Samples by length, in steps that are round numbers."""
        if not self.length_counts:
            return []
        longest = self.length_counts[-1][0]
        step = _round_up(max(1, -(-longest // bars)))
        found: list[Bar] = []
        for low in range(0, longest + 1, step):
            some = [(length, count) for length, count in self.length_counts if low <= length < low + step]
            samples, tokens = sum(count for _, count in some), sum(length * count for length, count in some)
            found.append(Bar(low, low + step - 1, samples, tokens))
        return found


def _round_up(step: int) -> int:
    """The next of 1, 2, 4, 5 or 8 times a power of ten."""
    power = 1
    while True:
        for one in (1, 2, 4, 5, 8):
            if one * power >= step:
                return one * power
        power *= 10


def _quantiles(counts: Iterable[tuple[int, int]]) -> dict[float, int]:
    rows = list(counts)
    if not rows:
        return {}
    values = np.asarray([value for value, _ in rows])
    reached = np.cumsum([count for _, count in rows])
    places = {share: int(np.searchsorted(reached, max(1, share * reached[-1]))) for share in QUANTILES}
    return {share: int(values[min(place, len(values) - 1)]) for share, place in places.items()}


def statistics(path: str | Path) -> Statistics:
    """The statistics of a file of samples; of Parquet, only the columns with counts are read."""
    wanted = ["num_tokens", "num_trained", "num_messages", "notes"]
    lengths: Counter[int] = Counter()
    trained: Counter[int] = Counter()
    notes: Counter[str] = Counter()
    samples = messages = 0
    for batch in read_tables(path, wanted):
        samples += batch.num_rows
        messages += int(_numbers(batch, "num_messages").sum())
        lengths.update(_numbers(batch, "num_tokens").tolist())
        trained.update(_numbers(batch, "num_trained").tolist())
        for said in batch.column("notes").to_pylist():
            notes.update({without_place(note) for note in said or ()})
    return Statistics(
        samples=samples,
        tokens=sum(length * count for length, count in lengths.items()),
        trained=sum(length * count for length, count in trained.items()),
        messages=messages,
        length_counts=tuple(sorted(lengths.items())),
        trained_counts=tuple(sorted(trained.items())),
        notes=tuple(sorted(notes.items(), key=lambda item: (-item[1], item[0]))),
    )


def _numbers(batch: Any, name: str) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = batch.column(name).to_numpy(zero_copy_only=False).astype(np.int64)
    return found
