"""WriteLog: the writes of a trajectory in order, 36 bytes each."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .buffers import Buffer
from .turns import LogprobKind, VersionSpan


class LogRow(NamedTuple):
    """One write. Contexts have no `detail`: -1."""

    branch: int
    start: int
    stop: int
    first: int
    """The number of its first message, or where it holds none, of the next one."""
    messages: int
    """How many messages the branch holds after it."""
    sampled: int
    """How many sampled tokens its branch owned before it: where its logprobs lie."""
    cached: int
    """How many ids of the prompt the engine had cached; -1 where it is not known, and for contexts."""
    detail: int
    spans_stop: int

    @property
    def is_turn(self) -> bool:
        return self.detail >= 0


class Detail(NamedTuple):
    """What most turns of a rollout have in common; kept once for all that are equal."""

    finish_reason: str
    version: str | int | tuple[VersionSpan, ...] | None
    sampling_json: str | None
    continues: bool
    logprobs_kind: LogprobKind


class WriteLog:
    """Every write, as a row of numbers; message spans and details beside them."""

    def __init__(self) -> None:
        self._rows: Buffer[np.int32] = Buffer(np.int32, len(LogRow._fields))
        self._spans: Buffer[np.int32] = Buffer(np.int32, 3)
        self._details: list[Detail] = []
        self._numbers: dict[Detail, int] = {}
        self._last: LogRow | None = None

    def reserve(self, spans: int) -> None:
        """Make room for one write with so many spans."""
        self._rows.reserve(1)
        self._spans.reserve(spans)

    def add(self, *numbers: int, detail: Detail | None, spans: npt.NDArray[np.int32] | None) -> int:
        """Record a write, a turn where it has a `detail`, by the first numbers of its row; returns its own number."""
        number = -1
        if detail is not None:
            number = self._numbers.setdefault(detail, len(self._details))
            if number == len(self._details):
                self._details.append(detail)
        if spans is not None and len(spans):
            self._spans.push(spans, len(spans))
        self._last = LogRow._make((*numbers, number, len(self._spans)))
        self._rows.push(self._last, 1)
        return len(self._rows) - 1

    def row(self, write: int) -> LogRow:
        if self._last is not None and write == len(self._rows) - 1:
            return self._last
        return LogRow(*self._rows.view()[write].tolist())

    def rows(self, writes: array[int]) -> list[LogRow]:
        return [LogRow(*row) for row in self._rows.view()[np.asarray(writes, np.intp)].tolist()]

    def spans(self, write: int) -> npt.NDArray[np.int32]:
        """The spans of one write: rows of start, stop, message."""
        ends = self._rows.view()[max(write - 1, 0) : write + 1, -1].tolist()
        return self._spans.view(ends[0] if write else 0, ends[-1])

    def detail(self, row: LogRow) -> Detail:
        return self._details[row.detail]

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes + self._spans.nbytes

    def __len__(self) -> int:
        return len(self._rows)
