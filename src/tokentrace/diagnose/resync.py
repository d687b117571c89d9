"""Where two sequences of ids are in step again after a difference.

`show.alignment.align` is exact, token by token. `next_hunk` looks at one difference and finds where both sides agree
for a while again, not where single tokens happen to be the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from ..show.alignment import Hunk, run_hashes
from ..tokens.ids import common_prefix, common_suffix
from ..tokens.tokenizer import Ids

_GRAM: Final = 8
"""Tokens that have to agree in a row before two sides may count as in step again."""
_FIRST_WINDOW: Final = 64
_CANDIDATES: Final = 64
"""Places of agreement tried in each window, the nearest first."""
_TAIL: Final = 16
"""Tokens at the end of a sequence by which it is searched in another."""


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
        place = _agreement(one, other, start, other_at, left, right)
        if place is None and start + window >= len(one):
            place = _last_tokens(left, right)
        if place is not None:
            a, b = start + place[0], other_at + place[1]
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


def _agreement(one: Ids, other: Ids, at: int, other_at: int, left: Ids, right: Ids) -> tuple[int, int] | None:
    """Where windows that begin at these two tokens are in step, counted from there."""
    _, of_left, of_right = np.intersect1d(run_hashes(left, _GRAM), run_hashes(right, _GRAM), return_indices=True)
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
    """All that differs from token `at` of both on as one hunk, up to where the end of `one` is in `other`.

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
