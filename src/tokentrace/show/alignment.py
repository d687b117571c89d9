"""The differences between two sequences of token ids, without comparing all pairs."""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from ..tokens.ids import common_prefix, common_suffix
from ..tokens.tokenizer import Ids

_FINE = 1 << 18  # the most pairs of tokens to compare one by one
# lengths of runs that occur exactly once on each side, and anchor longer stretches
_ANCHORS = (1, 8, 32)

Column = npt.NDArray[Any]


class Hunk(NamedTuple):
    """A difference: tokens `start` to `stop` of one, `other_start` to `other_stop` of the other."""

    start: int
    stop: int
    other_start: int
    other_stop: int

    def sides(self, one: Column, other: Column) -> tuple[Column, Column]:
        """Both sides' entries there: ids, or any column with one entry per token."""
        return one[self.start : self.stop], other[self.other_start : self.other_stop]

    def moved(self, by: int, other_by: int) -> Hunk:
        """The same difference in sequences with this many tokens before it."""
        return Hunk(
            self.start + by, self.stop + by, self.other_start + other_by, self.other_stop + other_by
        )


def align(one: Ids, other: Ids) -> Iterator[Hunk]:
    """All differences in order. Outside the hunks, both sides have the same ids in the same order."""
    todo = [Hunk(0, len(one), 0, len(other))]
    while todo:
        hunk = _trimmed(one, other, todo.pop())
        here, there = hunk.sides(one, other)
        if len(here) * len(there) <= _FINE:
            matcher = difflib.SequenceMatcher(None, here.tolist(), there.tolist(), autojunk=False)
            for tag, *cut in matcher.get_opcodes():
                if tag != "equal":
                    yield Hunk(*cut).moved(hunk.start, hunk.other_start)
            continue
        anchors = _anchors(here, there)
        if not anchors:
            yield hunk
            continue
        bounds = [(0, 0), *anchors, (len(here), len(there))]
        parts = [
            Hunk(a, b, c, d).moved(hunk.start, hunk.other_start) for (a, c), (b, d) in pairwise(bounds)
        ]
        todo += reversed(parts)


def hunks(one: Ids, other: Ids, at: int = 0, other_at: int = 0) -> Iterator[Hunk]:
    """The differences from positions `at` and `other_at` on, with what `other` adds at its end.

    A few equal tokens do not end a difference, since a template's tokens recur everywhere: the
    larger it is, the more of them it may contain.
    """
    while True:
        same = common_prefix(one[at:], other[other_at:])
        at, other_at = at + same, other_at + same
        if at == len(one) and other_at == len(other):
            return
        hunk = _first_hunk(one, other, at, other_at)
        yield hunk
        at, other_at = hunk.stop, hunk.other_stop


def _first_hunk(one: Ids, other: Ids, at: int, other_at: int) -> Hunk:
    window = 8192
    while True:
        for part in align(one[at : at + window], other[other_at : other_at + window]):
            stop, other_stop = at + part.stop, other_at + part.other_stop
            same = common_prefix(one[stop:], other[other_stop:])
            least = min(64, max(8, (part.stop + part.other_stop) // 4))
            if same >= least or 0 < same == len(one) - stop:
                return Hunk(at, stop, other_at, other_stop)
        if at + window >= len(one) and other_at + window >= len(other):
            return Hunk(at, len(one), other_at, len(other))
        window *= 4


def up_to_shared_end(one: Ids, other: Ids, at: int) -> Hunk | None:
    """All that differs after `at` as one hunk, if `other` contains the end of `one`."""
    size = min(16, len(one) - at)
    if size < 8 or len(other) - at < size:
        return None
    windows = sliding_window_view(other[at:], size)
    ends = np.flatnonzero((windows == one[-size:]).all(1))[:64] + at + size
    pairs = ((common_suffix(one[at:], other[at:end]), end) for end in ends.tolist())
    run, end = max(pairs, default=(0, 0))
    return Hunk(at, len(one) - run, at, end - run) if run else None


def _trimmed(one: Ids, other: Ids, hunk: Hunk) -> Hunk:
    here, there = hunk.sides(one, other)
    head = common_prefix(here, there)
    tail = common_suffix(here[head:], there[head:])
    return Hunk(hunk.start + head, hunk.stop - tail, hunk.other_start + head, hunk.other_stop - tail)


def _anchors(one: Ids, other: Ids) -> list[tuple[int, int]]:
    """The positions, rising on both sides, of runs that occur exactly once on each side."""
    for length in _ANCHORS:
        if min(len(one), len(other)) < length:
            break
        (left, at), (right, there) = _unique(one, length), _unique(other, length)
        _, first, second = np.intersect1d(left, right, assume_unique=True, return_indices=True)
        pairs = sorted(zip(at[first].tolist(), there[second].tolist(), strict=True))
        pairs = [(a, b) for a, b in pairs if one[a] == other[b]]  # equal hashes may differ
        if pairs:
            return _rising(pairs)
    return []


def _unique(ids: Ids, length: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.intp]]:
    """The hashes of runs that occur once, and their positions. A collision only costs time."""
    count = len(ids) - length + 1
    hashes = np.zeros(count, np.uint64)
    for at in range(length):
        hashes = hashes * np.uint64(0x100000001B3) + ids[at : at + count].astype(np.uint64)
    values, index, counts = np.unique(hashes, return_index=True, return_counts=True)
    return values[counts == 1], index[counts == 1]


def _rising(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest subsequence of pairs that rises on both sides."""
    tails, ends, before = list[int](), list[int](), list[int]()
    for index, (_, there) in enumerate(pairs):
        at = bisect_left(tails, there)
        before.append(ends[at - 1] if at else -1)
        tails[at : at + 1] = [there]
        ends[at : at + 1] = [index]
    rising, index = [], ends[-1]
    while index >= 0:
        rising.append(pairs[index])
        index = before[index]
    return rising[::-1]
