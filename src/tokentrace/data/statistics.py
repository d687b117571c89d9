"""Statistics of a file of samples: counts, lengths and trained tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..show.document import Document, Table
from ..show.visible import counted
from ..tokens.tokenizer import Tokenizer
from .tables import read_tables
from .tokenizing import without_place

QUANTILES: Final = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts of a file, and the tokens of its samples at each of `QUANTILES`."""

    samples: int
    tokens: int
    trained: int
    messages: int
    lengths: Mapping[float, int]
    trained_lengths: Mapping[float, int]
    notes: tuple[tuple[str, int], ...] = ()
    """How many samples have each note, without the messages it names; the most frequent first."""

    def document(self, _: Tokenizer | None = None) -> Document:
        """Return the counts and quantiles as a document."""
        names = {0.0: "least", 0.5: "median", 1.0: "most"}
        share = 100 * self.trained / self.tokens if self.tokens else 0
        rows = [
            [label, *(f"{value:,}" for value in quantiles.values())]
            for label, quantiles in (("tokens", self.lengths), ("trained", self.trained_lengths))
        ]
        head = ["a sample", *(names.get(quantile, f"{100 * quantile:.0f} %") for quantile in self.lengths)]
        return Document(
            "Statistics",
            summary=[
                f"{counted(self.samples, 'sample')}, {counted(self.tokens)}, {self.trained:,} trained ({share:.1f} %), "
                f"{counted(self.messages, 'message')}"
            ],
            notes=[f"{counted(count, 'sample')}: {note}" for note, count in self.notes],
            tables=[Table("Lengths", head, rows)],
        )


def statistics(path: str | Path) -> Statistics:
    """Return the statistics of a file of samples. Of Parquet, only the columns with counts are read."""
    names = ("num_tokens", "num_trained", "num_messages")
    columns: list[list[int]] = [[] for _ in names]
    notes: Counter[str] = Counter()
    for batch in read_tables(path, [*names, "notes"]):
        for name, values in zip(names, columns, strict=True):
            values += batch.column(name).to_pylist()
        for row_notes in batch.column("notes").to_pylist():
            notes.update({without_place(note) for note in row_notes or ()})
    lengths, trained, messages = columns
    ranked = tuple(sorted(notes.items(), key=lambda item: (-item[1], item[0])))
    totals = (sum(lengths), sum(trained), sum(messages))
    return Statistics(len(lengths), *totals, _quantiles(lengths), _quantiles(trained), ranked)


def _quantiles(values: list[int]) -> dict[float, int]:
    ordered = sorted(values)
    places = {quantile: max(math.ceil(quantile * len(ordered)), 1) - 1 for quantile in QUANTILES}
    return {quantile: ordered[place] for quantile, place in places.items()} if ordered else {}
