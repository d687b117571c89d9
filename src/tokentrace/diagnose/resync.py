"""Where two sequences of ids agree again after a difference.

`show.alignment.align` is exact, token by token. `next_hunk` takes one difference and finds where
both sides agree for a while, not where single tokens happen to be the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..show.alignment import Hunk, run_hashes
from ..tokens.ids import common_prefix, common_suffix
from ..tokens.tokenizer import Ids

_GRAM: Final = 8
"""Tokens that have to agree in a row."""
_FIRST_WINDOW: Final = 64
_CANDIDATES: Final = 64
"""Places of agreement tried in each window, the nearest first."""
_TAIL: Final = 16
"""Tokens at the end of a sequence by which it is searched in another."""


def next_hunk(one: Ids, other: Ids, at: int, other_at: int, *, beyond: int = 0) -> Hunk:
    """The difference that begins at these two tokens and includes `one` up to `beyond`.

    After it both sides agree for at least one token, or it reaches to the end of `one`; if they
    never agree again, to the end of both. The nearest place of agreement wins, but the farther
    away, the longer the agreement has to be: a few tokens of template recur everywhere.
    """
    start = max(at, beyond)
    window = _FIRST_WINDOW
    while True:
        left, right = one[start : start + window], other[other_at : other_at + window]
        place = _agreement(one[start:], other[other_at:], left, right)
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
    """The differences from two tokens on, what `other` adds at its end included."""
    while True:
        same = common_prefix(one[at:], other[other_at:])
        at, other_at = at + same, other_at + same
        if at == len(one) or other_at == len(other):
            if at < len(one) or other_at < len(other):
                yield Hunk(at, len(one), other_at, len(other))
            return
        hunk = next_hunk(one, other, at, other_at)
        yield hunk
        at, other_at = hunk.stop, hunk.other_stop


def _agreement(one: Ids, other: Ids, left: Ids, right: Ids) -> tuple[int, int] | None:
    """Where both agree again, within the windows at their beginnings."""
    _, of_left, of_right = np.intersect1d(run_hashes(left, _GRAM), run_hashes(right, _GRAM), return_indices=True)
    for index in np.lexsort((of_left, of_left + of_right))[:_CANDIDATES].tolist():
        a, b = int(of_left[index]), int(of_right[index])
        run = common_prefix(one[a:], other[b:])
        if b + run == len(other) and 2 * run < len(one) - a:
            continue  # a generation prompt, which is like any other
        if run >= min(64, max(_GRAM, (a + b) // 4)) or (a + run == len(one) and run >= _GRAM):
            return a, b
    return None


def _last_tokens(left: Ids, right: Ids) -> tuple[int, int] | None:
    """Where the last few tokens of `left` are in `right`: too few to hash."""
    for size in range(min(_GRAM - 1, len(left)), 0, -1):
        near = right if size > 1 else right[:_GRAM]  # one token alone may be any
        places = occurrences(near, left[len(left) - size :])
        if len(places):
            return len(left) - size, int(places[0])
    return None


def occurrences(ids: Ids, part: Ids) -> npt.NDArray[Any]:
    """Where a few tokens are among ids; nowhere if there are none."""
    count = len(ids) - len(part) + 1
    if count <= 0 or not len(part):
        return np.zeros(0, np.intp)
    same = np.ones(count, np.bool_)
    for offset, index in enumerate(part.tolist()):
        same &= ids[offset : offset + count] == index
    return np.flatnonzero(same)


def up_to_shared_end(one: Ids, other: Ids, at: int) -> Hunk | None:
    """All that differs after `at` as one hunk, if the end of `one` is in `other`."""
    size = min(_TAIL, len(one) - at)
    if size < _GRAM:
        return None
    ends = occurrences(other[at:], one[-size:])[:_CANDIDATES] + at + size
    pairs = ((common_suffix(one[at:], other[at:end]), end) for end in ends.tolist())
    run, end = max(pairs, default=(0, 0))
    return Hunk(at, len(one) - run, at, end - run) if run else None
