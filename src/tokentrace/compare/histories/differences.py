"""What differs between two views of a conversation, exactly, and which messages those tokens come from.

Ids are aligned message by message. What is left out of a `Comparison` is the same on both sides, so either side can be
made from the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from ...study.seams import BridgeRefusal
from ...tokens.alignment import Hunk, align, common_prefix, common_suffix
from ...tokens.tokenizer import Ids
from ...tokens.visible import counted


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

    `ids`, `messages` (-1 for none) and `fields` (their names) have one entry per token.
    """

    ids: Ids
    messages: npt.NDArray[np.int32]
    fields: npt.NDArray[np.object_]
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
            yield first, last, int(self.messages[first]), self.fields[first]

    def count(self, message: int, name: str) -> int:
        """How many tokens came from this field of this message."""
        return int(((self.messages == message) & (self.fields == name)).sum())

    def joined(self, rest: Shown) -> Shown:
        """This, all of it as a prompt, and then the rest."""
        return Shown(
            np.concatenate([self.ids, rest.ids]),
            np.concatenate([self.messages, rest.messages]),
            np.concatenate([self.fields, rest.fields]),
            len(self),
        )

    def cut(self, start: int, stop: int, prompt: int = 0) -> Shown:
        """The tokens from `start` to `stop`, the first `prompt` of them as a prompt."""
        at = slice(start, stop)
        return Shown(self.ids[at], self.messages[at], self.fields[at], prompt)


@dataclass(frozen=True, slots=True)
class FieldTokens:
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
    parts: tuple[FieldTokens, ...]
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


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The moment the model is asked for a message; `message` is None for the turn that is still to come.

    `training` is None where the row holds no such turn. `refusal` says why the rollout could not go on from the step
    before: it is a break, and what the rollout shows was rendered anew.
    """

    index: int
    message: int | None
    production: Shown
    rollout: Shown
    training: Shown | None
    refusal: BridgeRefusal | None
    branch: int
    """Which of the rollout's streams this step is part of."""
    comparisons: tuple[Comparison, ...]

    def shown(self, view: View | str) -> Shown | None:
        """What a view holds here."""
        found: Shown | None = getattr(self, View(view).value)
        return found

    def compare(self, left: View | str, right: View | str) -> Comparison | None:
        """The comparison of two views, its sides as in `PAIRS`; None where one of them holds no such turn."""
        wanted = {View(left), View(right)}
        return next((found for found in self.comparisons if {found.left, found.right} == wanted), None)

    @property
    def equal(self) -> bool:
        """Whether all views hold the same."""
        return self.training is not None and all(found.equal for found in self.comparisons)


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
        return f"{whose}: {counted(found.left)} in {left}, {counted(found.right)} in {right}"
    count, total, has, lacks = (
        (found.left, found.right_total, left, right) if found.left else (found.right, found.left_total, right, left)
    )
    return f"{whose}: {counted(count)} shown in {has}, {'not' if total else 'absent'} in {lacks}"


# -- aligning


def differing(one: Shown, other: Shown) -> Iterator[tuple[bool, Hunk]]:
    """What differs, in order, and whether in the turn itself: prompt against prompt, message against message."""
    blocks = _blocks(one, other)
    for block, ((start, other_start), (stop, other_stop)) in enumerate(blocks):
        for hunk in align(one.ids[start:stop], other.ids[other_start:other_stop]):
            yield block == len(blocks) - 1, hunk.moved(start, other_start)


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
