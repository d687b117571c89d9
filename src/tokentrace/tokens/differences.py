"""What differs between two sequences of token ids: how far they agree, and the parts in which they do not.

Everything here costs time that grows with the length of the ids and no faster: ids are compared one with another in
windows of `WINDOW` alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Iterator, Sequence
from enum import StrEnum
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from .tokenizer import Ids
from .vocabulary import Vocabulary

WINDOW: Final = 256
"""How many items on each side a diff looks at together."""

Part = tuple[int, int, int, int]
"""``one[a:b]`` stands where ``other[c:d]`` does."""

Item = TypeVar("Item", bound=Hashable)


class Difference(StrEnum):
    """What differs where ids do."""

    DRIFT = "drift"
    """The ids alone: both spell the same bytes."""
    WHITESPACE = "whitespace"
    """Newlines, tabs, carriage returns and spaces."""
    TEXT = "text"
    """More than that."""


def spell(vocabulary: Vocabulary, ids: Ids) -> bytes:
    """The bytes that tokens stand for."""
    return b"".join(map(vocabulary.token_bytes, ids.tolist()))


def difference(vocabulary: Vocabulary, one: Ids, other: Ids) -> Difference:
    """In what ids differ. Compared as bytes: half a character decodes to U+FFFD, whichever it is half of."""
    left, right = spell(vocabulary, one), spell(vocabulary, other)
    if left == right:
        return Difference.DRIFT
    bare = left.translate(None, b"\n\t\r ") == right.translate(None, b"\n\t\r ")
    return Difference.WHITESPACE if bare else Difference.TEXT


def common_prefix(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> int:
    """How many items two arrays begin with alike. Looks little further than that."""
    size = min(len(one), len(other))
    step, at = 64, 0
    while at < size:
        stop = min(at + step, size)
        differs = one[at:stop] != other[at:stop]
        if differs.any():
            return at + int(differs.argmax())
        at, step = stop, step * 4
    return size


def common_suffix(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> int:
    """How many items two arrays end with alike."""
    return common_prefix(one[::-1], other[::-1])


def differing(vocabulary: Vocabulary, one: Ids, other: Ids) -> Iterator[Part]:
    """The parts that differ, in order, found first between control tokens, then token by token."""
    whole = _trimmed(one, other, (0, len(one), 0, len(other)))
    if whole is None:
        return
    control = [token.id for token in vocabulary.control.values()]
    left, right = (_blocks(ids, control) for ids in (one[whole[0] : whole[1]], other[whole[2] : whole[3]]))
    left_at, right_at = (np.cumsum([0, *map(len, blocks)]).tolist() for blocks in (left, right))
    for a, b, c, d in unequal(left, right):
        coarse = (whole[0] + left_at[a], whole[0] + left_at[b], whole[2] + right_at[c], whole[2] + right_at[d])
        part = _trimmed(one, other, coarse)
        if part is None:
            continue
        here, there = one[part[0] : part[1]], other[part[2] : part[3]]
        if spell(vocabulary, here) == spell(vocabulary, there):  # not to be torn into halves that spell different text
            yield part
            continue
        for e, f, g, h in unequal(here.tolist(), there.tolist()):
            yield part[0] + e, part[0] + f, part[2] + g, part[2] + h


def _trimmed(one: Ids, other: Ids, part: Part) -> Part | None:
    """A part without what both sides begin and end with; None if nothing is left."""
    here, there = one[part[0] : part[1]], other[part[2] : part[3]]
    head = common_prefix(here, there)
    if head == len(here) == len(there):
        return None
    tail = common_suffix(here[head:], there[head:])
    return part[0] + head, part[1] - tail, part[2] + head, part[3] - tail


def _blocks(ids: Ids, control: Sequence[int]) -> list[tuple[int, ...]]:
    """Ids cut before every control token."""
    cuts = np.flatnonzero(np.isin(ids, control))
    return [tuple(block.tolist()) for block in np.split(ids, cuts) if len(block)]


def unequal(one: Sequence[Item], other: Sequence[Item]) -> Iterator[Part]:
    """What a diff finds to be different, looking at a window at a time: the cost grows with the length, no faster.

    A window ends where both sides agree in its first half, where the choice does not hang on what lies behind it.
    Where nothing agrees in a whole window, the rest is one part.
    """
    at, other_at = 0, 0
    while at < len(one) or other_at < len(other):
        left, right = one[at : at + WINDOW], other[other_at : other_at + WINDOW]
        agreed = difflib.SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks()[:-1]
        if at + len(left) == len(one) and other_at + len(right) == len(other):
            agreed.append(difflib.Match(len(left), len(right), 0))
        elif agreed:
            agreed = [match for match in agreed if max(match.a, match.b) < WINDOW // 2] or agreed[:1]
        else:
            agreed = [difflib.Match(len(one) - at, len(other) - other_at, 0)]
        a, b = 0, 0
        for match in agreed:
            if match.a > a or match.b > b:
                yield at + a, at + match.a, other_at + b, other_at + match.b
            a, b = match.a + match.size, match.b + match.size
        at, other_at = at + a, other_at + b
