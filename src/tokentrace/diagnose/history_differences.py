"""What differs between two views of a conversation, exactly, and which messages those tokens come from.

Ids are aligned message by message. What is left out of a `Comparison` is the same on both sides, so either side can be
made from the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..study.seams import BridgeRefusal
from ..tokens.alignment import Hunk, align
from ..tokens.ids import common_prefix, common_suffix, segments
from ..tokens.tokenizer import Ids
from ..tokens.visible import counted


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


Columns = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]


class Shown:
    """What one view holds when a turn is done: `prompt` tokens of prompt, then the turn.

    `ids`, `messages` (-1 for none) and `fields` (their names) have one entry per token. Steps share what they hold
    alike: the first `shared` tokens are those of what it comes `after`, and arrays are put together when asked for.
    """

    __slots__ = ("_after", "_own", "_shared", "prompt")

    def __init__(
        self,
        ids: Ids,
        messages: npt.NDArray[np.int32],
        fields: npt.NDArray[np.object_],
        prompt: int,
        after: Shown | None = None,
        shared: int = 0,
    ) -> None:
        self._own: Columns = (ids, messages, fields)
        self._after, self._shared = after, shared
        self.prompt = prompt

    @property
    def ids(self) -> Ids:
        return self._joined(0)

    @property
    def messages(self) -> npt.NDArray[np.int32]:
        return self._joined(1)

    @property
    def fields(self) -> npt.NDArray[np.object_]:
        return self._joined(2)

    def _joined(self, column: int) -> npt.NDArray[Any]:
        if self._after is None:
            return self._own[column]
        pieces, stop, shown = [], len(self), self
        while True:
            pieces.append(shown._own[column][: max(0, stop - shown._shared)])
            stop = min(stop, shown._shared)
            if shown._after is None:
                return np.concatenate(pieces[::-1])
            shown = shown._after

    def __len__(self) -> int:
        return self._shared + len(self._own[0])

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int, str]]:
        """The tokens from `start` to `stop` as runs of one message and field: (start, stop, message, field)."""
        if start >= stop:
            return
        messages, fields = self.messages[start:stop], self.fields[start:stop]
        for first, last in segments(messages, fields):
            yield start + first, start + last, int(messages[first]), fields[first]

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
class DifferenceSide:
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

    left: DifferenceSide
    right: DifferenceSide
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


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Two views at one step. Outside of `differences` they hold the same ids in the same order.

    What differs as it did at the step before is not held again: the first `kept` differences are those of `before`.
    """

    left: View
    right: View
    sides: tuple[Shown, Shown]
    own: tuple[Difference, ...]
    kept: int
    before: Comparison | None
    left_tokens: int
    """How many tokens of the left view the right one has not."""
    right_tokens: int
    """How many tokens of the right view the left one has not."""
    roles: Sequence[str]

    @property
    def differences(self) -> tuple[Difference, ...]:
        pieces, wanted, at = [self.own], self.kept, self
        while wanted and at.before is not None:
            at = at.before
            pieces.append(at.own[: max(0, wanted - at.kept)])
            wanted = min(wanted, at.kept)
        return tuple(chain.from_iterable(reversed(pieces)))

    @property
    def equal(self) -> bool:
        return not self.own and not self.kept

    @property
    def first(self) -> int | None:
        """The first position that differs, the same on both sides."""
        return None if self.equal else self.differences[0].left.start

    @property
    def fields(self) -> tuple[FieldCount, ...]:
        """What differs, by the field that it comes from."""
        counts: dict[tuple[int, str], list[int]] = {}
        for found in self.differences:
            for side, run in enumerate((found.left, found.right)):
                for part in run.parts:
                    counts.setdefault((part.message, part.field), [0, 0])[side] += len(part)
        columns = [(shown.messages, shown.fields) for shown in self.sides if counts]
        out = []
        for (message, name), (left, right) in counts.items():
            totals = [int(((messages == message) & (fields == name)).sum()) for messages, fields in columns]
            role = self.roles[message] if message >= 0 else None
            out.append(FieldCount(message, role, name, left, right, *totals))
        return tuple(out)

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


def _patched(ids: list[int], changes: Iterable[tuple[DifferenceSide, DifferenceSide]]) -> list[int]:
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
    _, blocks = Aligner().blocks(one, other, (0, 0))
    for number, block in enumerate(blocks):
        for hunk in aligned(one, other, block):
            yield number == len(blocks) - 1, hunk


Block = tuple[tuple[int, int], tuple[int, int]]
"""Where a stretch begins on both sides, and where it ends."""


def aligned(one: Shown, other: Shown, block: Block) -> Iterator[Hunk]:
    """What differs in one block."""
    (start, other_start), (stop, other_stop) = block
    for hunk in align(one.ids[start:stop], other.ids[other_start:other_stop]):
        yield hunk.moved(start, other_start)


class Aligner:
    """Two views cut into blocks, step after step: those that stand before all that changed are the same as before."""

    def __init__(self) -> None:
        self._prompts = (0, 0)
        self._head = 0
        self._starts: tuple[dict[int, int], dict[int, int]] = ({}, {})
        """Where each message begins, on either side, in order."""
        self._cuts: list[tuple[int, int]] = []

    def blocks(self, one: Shown, other: Shown, stable: tuple[int, int]) -> tuple[int, list[Block]]:
        """Both sides cut where the same message begins with the same id, and how many blocks are as they were.

        `stable` says how many tokens of either side are as they were. What the prompts begin and end with alike is not
        cut: it is the same, whoever it belongs to. The last block is the turn.
        """
        before, self._prompts = self._prompts, (one.prompt, other.prompt)
        prompts = self._prompts
        stable = (min(stable[0], before[0], prompts[0]), min(stable[1], before[1], prompts[1]))
        left, right = one.ids[: one.prompt], other.ids[: other.prompt]
        if self._head >= min(stable):  # what differed first may have changed
            self._head = min(stable)
            self._head += common_prefix(left[self._head :], right[self._head :])
        tail = common_suffix(left[self._head :], right[self._head :])
        for shown, starts, known in zip((one, other), self._starts, stable, strict=True):
            while starts and starts[last := next(reversed(starts))] >= known:
                del starts[last]
            begun, first = np.unique(shown.messages[known : shown.prompt], return_index=True)
            for message, start in sorted(zip(begun.tolist(), first.tolist(), strict=True), key=lambda item: item[1]):
                starts.setdefault(message, known + start)
        cuts = [(self._head, self._head)]
        for message, at in self._starts[0].items():
            there = self._starts[1].get(message, -1)
            if message < 0 or at <= cuts[-1][0] or there <= cuts[-1][1]:
                continue
            if at < prompts[0] - tail and there < prompts[1] - tail and left[at] == right[there]:
                cuts.append((at, there))
        same = 0
        for cut, known_cut in zip(cuts, self._cuts, strict=False):
            if cut != known_cut or cut[0] > stable[0] or cut[1] > stable[1]:
                break
            same += 1
        self._cuts = cuts
        return max(0, same - 1), list(pairwise([*cuts, prompts, (len(one), len(other))]))
