"""How two sequences of token ids go together: how far they agree, where they differ, where they meet again.

`align` is exact: all that differs, token by token. `next_hunk` looks at one difference and asks where both sides are
in step again, not where single tokens happen to be the same. Neither takes time that grows with the square of the
length: every token of one side is compared with every token of the other only in stretches of a few hundred.
"""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ..tokens.ids import common_prefix, common_suffix
from ..tokens.tokenizer import Ids

_FINE: Final = 1 << 18
"""Pairs of tokens up to which a difference is searched one token with another."""
_ANCHORS: Final = (1, 8, 32)
"""Lengths of the runs by which longer stretches are anchored: a run that occurs once on either side."""
_GRAM: Final = 8
"""Tokens that have to agree in a row before two sides may count as in step again."""
_FIRST_WINDOW: Final = 64
_CANDIDATES: Final = 64
"""Places of agreement that are looked at in each window, the nearest first."""
_TAIL: Final = 16
"""Tokens at the end of a sequence by which it is looked for in another."""


Item = TypeVar("Item", bound=np.generic)


class Hunk(NamedTuple):
    """A difference: one side has its tokens `start` to `stop` where the other has `other_start` to `other_stop`."""

    start: int
    stop: int
    other_start: int
    other_stop: int

    def sides(self, one: npt.NDArray[Item], other: npt.NDArray[Item]) -> tuple[npt.NDArray[Item], npt.NDArray[Item]]:
        """What each side has there: of the ids, or of anything else that has one entry per token."""
        return one[self.start : self.stop], other[self.other_start : self.other_stop]

    def moved(self, by: int, other_by: int) -> Hunk:
        """The same difference in longer sequences, where so many tokens come before."""
        return Hunk(self.start + by, self.stop + by, self.other_start + other_by, self.other_stop + other_by)


def _hashes(ids: Ids, length: int) -> npt.NDArray[np.uint64]:
    """A hash of every run of `length` ids. What has equal hashes is compared, so a collision costs only time."""
    count = max(0, len(ids) - length + 1)
    out = np.zeros(count, np.uint64)
    for at in range(length):
        out = out * np.uint64(0x100000001B3) + ids[at : at + count].astype(np.uint64)
    return out


# -- all that differs


def align(one: Ids, other: Ids) -> Iterator[Hunk]:
    """All that differs, in order. Outside of the hunks both sides hold the same ids in the same order."""
    todo = [Hunk(0, len(one), 0, len(other))]
    while todo:
        hunk = _trimmed(one, other, todo.pop())
        here, there = hunk.sides(one, other)
        if not len(here) and not len(there):
            continue
        if len(here) and len(there) and len(here) * len(there) <= _FINE:
            matcher = difflib.SequenceMatcher(None, here.tolist(), there.tolist(), autojunk=False)
            for tag, *cut in matcher.get_opcodes():
                if tag != "equal":
                    yield Hunk(*cut).moved(hunk.start, hunk.other_start)
            continue
        found = _anchors(here, there) if len(here) and len(there) else []
        if not found:
            yield hunk
            continue
        bounds = [(0, 0), *found, (len(here), len(there))]
        parts = [Hunk(a, b, c, d).moved(hunk.start, hunk.other_start) for (a, c), (b, d) in pairwise(bounds)]
        todo += reversed(parts)


def _trimmed(one: Ids, other: Ids, hunk: Hunk) -> Hunk:
    """A hunk without what both sides begin and end with."""
    here, there = hunk.sides(one, other)
    head = common_prefix(here, there)
    tail = common_suffix(here[head:], there[head:])
    return Hunk(hunk.start + head, hunk.stop - tail, hunk.other_start + head, hunk.other_stop - tail)


def _anchors(one: Ids, other: Ids) -> list[tuple[int, int]]:
    """Pairs of positions, rising on both sides, of runs that occur once on either side."""
    for length in _ANCHORS:
        if min(len(one), len(other)) < length:
            break
        (left, at), (right, there) = _unique(one, length), _unique(other, length)
        _, first, second = np.intersect1d(left, right, assume_unique=True, return_indices=True)
        pairs = sorted(zip(at[first].tolist(), there[second].tolist(), strict=True))
        pairs = [(a, b) for a, b in pairs if one[a] == other[b]]  # a hash says equal: look
        if pairs:
            return _rising(pairs)
    return []


def _unique(ids: Ids, length: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.intp]]:
    """The hashes of runs of `length` ids that occur once, and where."""
    values, index, counts = np.unique(_hashes(ids, length), return_index=True, return_counts=True)
    return values[counts == 1], index[counts == 1]


def _rising(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest choice of pairs that rises on both sides."""
    tails: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for index, (_, there) in enumerate(pairs):
        at = bisect_left(tails, there)
        before.append(ends[at - 1] if at else -1)
        tails[at : at + 1] = [there]
        ends[at : at + 1] = [index]
    out = []
    index = ends[-1]
    while index >= 0:
        out.append(pairs[index])
        index = before[index]
    return out[::-1]


# -- where both are in step again


def next_hunk(one: Ids, other: Ids, at: int, other_at: int, *, beyond: int = 0) -> Hunk:
    """The difference that begins at these two tokens; it takes in at least the tokens of `one` up to `beyond`.

    After it both sides agree for at least one token, or it reaches to the end of `one`; if they never agree again, to
    the end of both. The nearest place of agreement wins, but the farther away, the longer the agreement has to be: a
    few tokens of template recur everywhere.
    """
    start = max(at, beyond)
    window = _FIRST_WINDOW
    while True:
        left, right = one[start : start + window], other[other_at : other_at + window]
        found = _meeting(one, other, start, other_at, left, right)
        if found is None and start + window >= len(one):
            found = _last_tokens(left, right)
        if found is not None:
            a, b = start + found[0], other_at + found[1]
            while a > start and b > other_at and one[a - 1] == other[b - 1]:
                a, b = a - 1, b - 1
            return Hunk(at, a, other_at, b)
        if start + window >= len(one) and other_at + window >= len(other):
            return Hunk(at, len(one), other_at, len(other))
        window *= 4


def hunks(one: Ids, other: Ids, at: int = 0, other_at: int = 0) -> Iterator[Hunk]:
    """The differences from two tokens on, one after the other, as `next_hunk` finds them.

    The last one is what only `other` has, if it goes on where `one` ends.
    """
    while True:
        same = common_prefix(one[at:], other[other_at:])
        at, other_at = at + same, other_at + same
        if at == len(one) and other_at == len(other):
            return
        if at == len(one) or other_at == len(other):
            yield Hunk(at, len(one), other_at, len(other))
            return
        hunk = next_hunk(one, other, at, other_at)
        yield hunk
        at, other_at = hunk.stop, hunk.other_stop


def _meeting(one: Ids, other: Ids, at: int, other_at: int, left: Ids, right: Ids) -> tuple[int, int] | None:
    """Where windows that begin at these two tokens are in step, counted from there."""
    _, of_left, of_right = np.intersect1d(_hashes(left, _GRAM), _hashes(right, _GRAM), return_indices=True)
    for index in np.lexsort((of_left, of_left + of_right))[:_CANDIDATES].tolist():
        a, b = int(of_left[index]), int(of_right[index])
        run = common_prefix(one[at + a :], other[other_at + b :])
        ended = at + a + run == len(one)
        if other_at + b + run == len(other) and 2 * run < len(one) - at - a:
            continue  # a generation prompt, which is like any other
        if run >= min(64, max(_GRAM, (a + b) // 4)) or (ended and run >= _GRAM):
            return a, b
    return None


def _last_tokens(left: Ids, right: Ids) -> tuple[int, int] | None:
    """Where the last few tokens of `left` are in `right`: too few to hash."""
    for size in range(min(_GRAM - 1, len(left)), 0, -1):
        count = len(right) - size + 1 if size > 1 else min(_GRAM, len(right))  # one token alone may be any
        if count <= 0:
            continue
        same = np.ones(count, np.bool_)
        for offset, index in enumerate(left[len(left) - size :].tolist()):
            same &= right[offset : offset + count] == index
        if same.any():
            return len(left) - size, int(same.argmax())
    return None


def up_to_shared_end(one: Ids, other: Ids, at: int) -> Hunk | None:
    """All that differs from token `at` of both on as one hunk, up to where the end of `one` is found in `other`.

    None where the last tokens of `one` (`_TAIL` of them) are not in `other` after `at`.
    """
    size = min(_TAIL, len(one) - at)
    if size < _GRAM:
        return None
    ends = np.flatnonzero(other[at:] == one[-1]) + at
    for offset in range(1, size):
        ends = ends[ends - offset >= at]
        ends = ends[other[ends - offset] == one[-1 - offset]]
    run, end = max(
        ((common_suffix(one[at:], other[at : end + 1]), end) for end in ends[:_CANDIDATES].tolist()), default=(0, 0)
    )
    return Hunk(at, len(one) - run, at, end + 1 - run) if run else None
