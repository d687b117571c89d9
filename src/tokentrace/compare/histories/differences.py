"""What differs between two columns of tokens, exactly, and whose tokens those are.

Ids are aligned message by message, and within a message in time that grows with its length. What is left out of a
`Comparison` is the same on both sides, so either side can be made from the other.
"""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from ...tokens.differences import common_prefix, common_suffix
from ...tokens.tokenizer import Ids
from ...tokens.visible import counted

Cut = tuple[int, int, int, int]
"""A difference as positions: start and stop on the left, start and stop on the right."""

_FINE: Final = 1 << 18
"""Pairs of tokens up to which a difference is searched one token with another."""
_GRAMS: Final = (1, 8, 32)
"""Lengths of the runs by which longer stretches are anchored: a run that occurs once on either side."""


class View(StrEnum):
    """Who is shown the conversation."""

    PRODUCTION = "production"
    """The engine behind an API, which renders the shipped template anew at every turn."""
    ROLLOUT = "rollout"
    """The policy while it is sampled for training: a stream that is only ever appended to."""
    TRAINING = "training"
    """One row over the whole conversation, as supervised fine-tuning renders it."""


PAIRS: Final = (
    (View.PRODUCTION, View.ROLLOUT),
    (View.PRODUCTION, View.TRAINING),
    (View.ROLLOUT, View.TRAINING),
)


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """What one view holds when a turn is done: `prompt` tokens of prompt, then the turn.

    `ids`, `messages` (-1 for none) and `fields` (indices into `names`) have one entry per token.
    """

    ids: Ids
    messages: npt.NDArray[np.int32]
    fields: npt.NDArray[np.int32]
    names: Sequence[str]
    prompt: int

    def __len__(self) -> int:
        return len(self.ids)

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int, str]]:
        """The tokens from `start` to `stop` as runs of one message and field: (start, stop, message, field)."""
        if start >= stop:
            return
        messages, fields = self.messages[start:stop], self.fields[start:stop]
        cuts = np.flatnonzero((messages[1:] != messages[:-1]) | (fields[1:] != fields[:-1])) + start + 1
        for first, last in pairwise([start, *cuts.tolist(), stop]):
            yield first, last, int(self.messages[first]), self.names[self.fields[first]]

    def count(self, message: int, name: str) -> int:
        """How many tokens came from this field of this message."""
        return int(((self.messages == message) & (self.fields == self.names.index(name))).sum())


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens `start` to `stop` of one view that came from one field of one message."""

    start: int
    stop: int
    message: int
    role: str | None
    field: str
    text: str

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Run:
    """One side of a difference: tokens `start` to `stop` of its view. It may be empty."""

    start: int
    stop: int
    ids: tuple[int, ...]
    parts: tuple[Part, ...]
    text: str

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two views part: one holds `left` where the other holds `right`. `in_turn`: in the turn itself."""

    left: Run
    right: Run
    in_turn: bool


@dataclass(frozen=True, slots=True)
class FieldCount:
    """How many tokens of one field of one message differ, of how many there are, on either side."""

    message: int
    role: str | None
    field: str
    left: int
    right: int
    left_total: int
    right_total: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two views at one step. Outside of `differences` they hold the same ids in the same order."""

    left: View
    right: View
    differences: tuple[Difference, ...]
    fields: tuple[FieldCount, ...]

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def first(self) -> int | None:
        """The first position that differs, the same on both sides."""
        return self.differences[0].left.start if self.differences else None

    @property
    def left_tokens(self) -> int:
        """How many tokens of the left view the right one has not."""
        return sum(len(found.left) for found in self.differences)

    @property
    def right_tokens(self) -> int:
        """How many tokens of the right view the left one has not."""
        return sum(len(found.right) for found in self.differences)

    def right_from(self, left_ids: Iterable[int]) -> list[int]:
        """The ids of the right view, given those of the left."""
        return _patched(list(left_ids), ((found.left, found.right) for found in self.differences))

    def left_from(self, right_ids: Iterable[int]) -> list[int]:
        """The ids of the left view, given those of the right."""
        return _patched(list(right_ids), ((found.right, found.left) for found in self.differences))

    def lines(self) -> list[str]:
        """What differs, field by field, in words."""
        return [_field_line(found, self.left, self.right) for found in self.fields]


def _patched(ids: list[int], changes: Iterable[tuple[Run, Run]]) -> list[int]:
    out: list[int] = []
    at = 0
    for old, new in changes:
        out += ids[at : old.start]
        out += new.ids
        at = old.stop
    return out + ids[at:]


def _field_line(found: FieldCount, left: View, right: View) -> str:
    whose = f"{found.field} of message {found.message}" if found.message >= 0 else found.field
    if found.left and found.right:
        return f"{whose}: {counted(found.left, 'token')} in {left}, {counted(found.right, 'token')} in {right}"
    count, total, has, lacks = (
        (found.left, found.right_total, left, right) if found.left else (found.right, found.left_total, right, left)
    )
    return f"{whose}: {counted(count, 'token')} shown in {has}, {'not' if total else 'absent'} in {lacks}"


# -- aligning


def differing(one: Shown, other: Shown) -> Iterator[tuple[bool, Cut]]:
    """What differs, in order, and whether in the turn itself: prompt against prompt, message against message."""
    blocks = _blocks(one, other)
    for block, ((start, other_start), (stop, other_stop)) in enumerate(blocks):
        for a, b, c, d in _align(one.ids[start:stop], other.ids[other_start:other_stop]):
            yield block == len(blocks) - 1, (start + a, start + b, other_start + c, other_start + d)


def _blocks(one: Shown, other: Shown) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Both sides cut where the same message begins with the same id. The last block is the turn.

    What the prompts begin and end with alike is not cut: it is the same, whoever it belongs to.
    """
    left, right = one.ids[: one.prompt], other.ids[: other.prompt]
    head = common_prefix(left, right)
    tail = common_suffix(left[head:], right[head:])
    cuts = [(head, head)]
    starts = [
        dict(
            zip(*(found.tolist() for found in np.unique(side.messages[: side.prompt], return_index=True)), strict=True)
        )
        for side in (one, other)
    ]
    for message, at in sorted(starts[0].items(), key=lambda item: item[1]):
        there = starts[1].get(message, -1)
        if message < 0 or at <= cuts[-1][0] or there <= cuts[-1][1]:
            continue
        if at < one.prompt - tail and there < other.prompt - tail and left[at] == right[there]:
            cuts.append((at, there))
    cuts += [(one.prompt, other.prompt), (len(one), len(other))]
    return list(pairwise(cuts))


def _align(one: Ids, other: Ids) -> Iterator[Cut]:
    """Where two stretches of ids differ. Exact, in time that grows with their length and not with its square."""
    todo = [(0, len(one), 0, len(other))]
    while todo:
        start, stop, other_start, other_stop = todo.pop()
        same = common_prefix(one[start:stop], other[other_start:other_stop])
        start, other_start = start + same, other_start + same
        same = common_suffix(one[start:stop], other[other_start:other_stop])
        stop, other_stop = stop - same, other_stop - same
        size, other_size = stop - start, other_stop - other_start
        if not size and not other_size:
            continue
        if size and other_size and size * other_size <= _FINE:
            yield from _fine(one, other, start, stop, other_start, other_stop)
            continue
        found = _anchors(one[start:stop], other[other_start:other_stop]) if size and other_size else []
        if not found:
            yield start, stop, other_start, other_stop
            continue
        bounds = [(start, other_start), *((start + a, other_start + b) for a, b in found), (stop, other_stop)]
        todo += [(a, b, c, d) for (a, c), (b, d) in pairwise(bounds)][::-1]


def _fine(one: Ids, other: Ids, start: int, stop: int, other_start: int, other_stop: int) -> Iterator[Cut]:
    left, right = one[start:stop].tolist(), other[other_start:other_stop].tolist()
    for tag, a, b, c, d in difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if tag != "equal":
            yield start + a, start + b, other_start + c, other_start + d


def _anchors(one: Ids, other: Ids) -> list[tuple[int, int]]:
    """Pairs of positions, rising on both sides, of runs that occur once on either side."""
    for length in _GRAMS:
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
    hashes = np.zeros(len(ids) - length + 1, np.uint64)
    for at in range(length):
        hashes = hashes * np.uint64(0x100000001B3) + ids[at : len(ids) - length + 1 + at].astype(np.uint64)
    values, index, counts = np.unique(hashes, return_index=True, return_counts=True)
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
