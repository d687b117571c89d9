"""Mask differences: which tokens of a row are trained and should not be, or should be and are not; whose, and what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...tokens.alignment import Hunk
from ...tokens.tokenizer import Ids
from .columns import Mask
from .expected import GENERATION_PROMPT, NOBODY, PART_NAMES, Expected
from .turn_marks import TurnMarks

ADDED: Final = "added tokens"
"""The part of tokens that the expected row does not have."""
PADDING: Final = "padding"


@dataclass(frozen=True, slots=True)
class MaskDifference:
    """Tokens of one role and part that are trained and should not be (`trained`), or the other way round.

    `role` is ``template`` for tokens of no message. `position` is the first of them, in the row as it is given.
    """

    role: str
    part: str
    trained: bool
    tokens: int
    messages: int
    """How many messages they belong to."""
    position: int

    def __str__(self) -> str:
        return difference_words(self.role, self.part, self.trained, self.tokens, self.messages)


def difference_words(role: str, part: str, trained: bool, tokens: int, messages: int) -> str:
    """``stop token of 3 assistant turns not trained (3 tokens)``."""
    name = {"stop": "stop token", "content": "text"}.get(part, part)
    turns = f" of {messages:,} {role} turn{'' if messages == 1 else 's'}" if messages and role != NOBODY else ""
    said = "trained" if trained else "not trained"
    return f"{name}{turns} {said} ({tokens:,} token{'' if tokens == 1 else 's'})"


def mask_differences(
    expected: Expected, found: Ids, mask: Mask, differing: Sequence[Hunk], start: int = 0
) -> list[MaskDifference]:
    """How a row's mask differs from the expected one, wherever the ids are the same; `start` tokens stood before it.

    Where ids differ, nothing can be said of single tokens: there only a stretch counts that is trained in place of one
    that is not at all, or the other way round.
    """
    groups: dict[tuple[str, str, bool], list[tuple[int, int]]] = {}
    for at, other, size in _same(differing, len(expected.ids), len(found)):
        wrong = np.flatnonzero(expected.mask[at : at + size] != mask[other : other + size])
        for offset in wrong.tolist():
            message = int(expected.sample.messages[at + offset])
            part = PART_NAMES[int(expected.parts[at + offset])]
            key = (expected.role(message), part, not expected.mask[at + offset])
            groups.setdefault(key, []).append((other + offset, message))
    for hunk in differing:
        wanted, there = expected.mask[hunk.start : hunk.stop], mask[hunk.other_start : hunk.other_stop]
        if len(there) and bool(wanted.any()) != bool(there.any()):
            message, role, _ = expected.place(hunk.start)
            part = PART_NAMES[int(expected.parts[hunk.start])] if len(wanted) else ADDED
            positions = np.flatnonzero(there if there.any() else np.ones_like(there))
            key = (role if len(wanted) else NOBODY, part, bool(there.any()))
            groups.setdefault(key, []).extend((hunk.other_start + at, message) for at in positions.tolist())
    return _sorted(groups, start)


def read_differences(
    marks: TurnMarks, ids: Ids, mask: Mask, start: int = 0, *, last: bool = False
) -> list[MaskDifference]:
    """The same for a row of which nothing but the ids is known; `last`: the last turn alone is to be trained."""
    turns = list(marks.turns(ids))
    wanted = np.zeros(len(ids), np.bool_)
    parts = np.full(len(ids), "context", dtype=object)
    numbers = np.full(len(ids), -1, np.int32)
    for number, turn in enumerate(turns):
        wanted[turn.start : turn.stop] = not last or number == len(turns) - 1
        numbers[turn.mark : turn.stop] = number
        parts[turn.mark : turn.start] = GENERATION_PROMPT
        parts[turn.start : turn.stop] = "turn"
        if turn.ended:
            parts[turn.stop - 1] = "stop"
    groups: dict[tuple[str, str, bool], list[tuple[int, int]]] = {}
    for at in np.flatnonzero(wanted != mask).tolist():
        role = "assistant" if numbers[at] >= 0 else NOBODY
        groups.setdefault((role, str(parts[at]), not wanted[at]), []).append((at, int(numbers[at])))
    return _sorted(groups, start)


def shift(expected: Mask, found: Mask) -> int:
    """By how many tokens a mask is moved against the expected one: 1, -1, or 0 where it is not just moved."""
    if len(expected) != len(found) or np.array_equal(expected, found) or not expected.any():
        return 0
    if np.array_equal(expected[:-1], found[1:]) and not found[0]:
        return 1
    return -1 if np.array_equal(expected[1:], found[:-1]) and not found[-1] else 0


def _same(differing: Sequence[Hunk], size: int, other_size: int) -> Iterator[tuple[int, int, int]]:
    """The stretches that both sides have: where they begin on either, and how long they are."""
    at = other = 0
    for hunk in differing:
        yield at, other, hunk.start - at
        at, other = hunk.stop, hunk.other_stop
    yield at, other, min(size - at, other_size - other)


def _sorted(groups: dict[tuple[str, str, bool], list[tuple[int, int]]], start: int) -> list[MaskDifference]:
    out = []
    for (role, part, trained), places in groups.items():
        messages = {message for _, message in places if message >= 0}
        first = min(at for at, _ in places)
        out.append(MaskDifference(role, part, trained, len(places), len(messages), start + first))
    return sorted(out, key=lambda found: found.position)
