"""What a row should be, and how its mask differs: tokens that are trained and should not be, or the reverse."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ...samples.sample import Sample
from ...tokens.alignment import Hunk
from ...tokens.kinds import Part
from ...tokens.tokenizer import Ids
from .columns import Mask
from .turn_marks import TurnMarks

NOBODY: Final = "template"
"""The role of tokens that belong to no message."""
ADDED: Final = "added tokens"
"""The part of tokens that the expected row does not have."""
PADDING: Final = "padding"
GENERATION_PROMPT: Final = "generation prompt"
PART_NAMES: Final = {
    **{int(part): part.name.lower().replace("_", " ") for part in Part},
    len(Part): GENERATION_PROMPT,
}
"""What a token says, by code: the parts, and the prompt before an assistant's turn."""


class Expected:
    """The row that a conversation gives, with the rendering that it comes from."""

    def __init__(self, sample: Sample) -> None:
        assert sample.rendered is not None, "it comes from a SampleBuilder"
        self.ids = sample.ids
        self.mask = sample.mask
        self.sample = sample
        self._rendered = sample.rendered
        self._offset = sample.offset

    @functools.cached_property
    def parts(self) -> npt.NDArray[np.uint8]:
        """What each token says, as a key of `PART_NAMES`."""
        given = self.sample.parts
        codes = np.zeros(len(self.ids), np.uint8) if given is None else given.copy()
        for turn in self._rendered.turns:
            before = slice(0, max(0, turn.start - self._offset))
            own = (self.sample.messages[before] == turn.message) & (codes[before] == Part.SCAFFOLD)
            codes[before][own] = len(Part)
        return codes

    def role(self, message: int) -> str:
        return self._rendered.role(message) or NOBODY

    @functools.cached_property
    def has_system(self) -> bool:
        """Whether the conversation brings a system message."""
        return any(self.role(at) in ("system", "developer") for at in np.unique(self.sample.messages).tolist())

    def place(self, at: int) -> tuple[int, str, str]:
        """The message of a token (-1: none), its role and its field."""
        if at >= len(self.ids):
            return -1, NOBODY, "after the end"
        message = int(self.sample.messages[at])
        fields = self._rendered.fields
        field = fields[at + self._offset] if at + self._offset < len(fields) else "scaffold"
        if field == "scaffold":
            field = PART_NAMES[int(self.parts[at])]
        return message, self.role(message), field

    def place_words(self, at: int) -> str:
        """The same in words: ``message 2 (user), content``."""
        message, role, field = self.place(at)
        if message >= 0:
            return f"message {message} ({role}), {field}"
        return field if at >= len(self.ids) else "the template's own text"


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


_Wrong = tuple[str, str, bool, int, int]
"""A token whose mask is wrong: role, part, whether it is trained, its position, its message."""


def mask_differences(
    expected: Expected, found: Ids, mask: Mask, differing: Sequence[Hunk], start: int = 0
) -> list[MaskDifference]:
    """How a row's mask differs from the expected one, wherever the ids are the same; `start` tokens came before it.

    Where ids differ, nothing can be said of single tokens: there only a stretch counts that is trained in place of one
    that is not at all, or the other way round.
    """
    wrong: list[_Wrong] = []
    at = other = 0
    for hunk in (*differing, Hunk(len(expected.ids), len(expected.ids), len(found), len(found))):
        size = min(hunk.start - at, hunk.other_start - other)
        for offset in np.flatnonzero(expected.mask[at : at + size] != mask[other : other + size]).tolist():
            message = int(expected.sample.messages[at + offset])
            part = PART_NAMES[int(expected.parts[at + offset])]
            trained = not expected.mask[at + offset]
            wrong.append((expected.role(message), part, trained, other + offset, message))
        at, other = hunk.stop, hunk.other_stop
    for hunk in differing:
        wanted, there = hunk.sides(expected.mask, mask)
        if len(there) and bool(wanted.any()) != bool(there.any()):
            message, role, _ = expected.place(hunk.start)
            part = PART_NAMES[int(expected.parts[hunk.start])] if len(wanted) else ADDED
            positions = np.flatnonzero(there if there.any() else np.ones_like(there)) + hunk.other_start
            whose = role if len(wanted) else NOBODY
            wrong += [(whose, part, bool(there.any()), position, message) for position in positions.tolist()]
    return _counted(wrong, start)


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
    return _counted(
        (
            ("assistant" if numbers[at] >= 0 else NOBODY, str(parts[at]), not wanted[at], at, int(numbers[at]))
            for at in np.flatnonzero(wanted != mask).tolist()
        ),
        start,
    )


def padding_differences(positions: Sequence[int]) -> list[MaskDifference]:
    """The same for padding that is trained, at these positions of the row."""
    return _counted(((NOBODY, PADDING, True, at, -1) for at in positions), 0)


def _counted(wrong: Iterable[_Wrong], start: int) -> list[MaskDifference]:
    """Tokens of one role and part together, in the order of the first of each."""
    groups: dict[tuple[str, str, bool], list[tuple[int, int]]] = {}
    for role, part, trained, at, message in wrong:
        groups.setdefault((role, part, trained), []).append((at, message))
    out = []
    for key, places in groups.items():
        messages = {message for _, message in places if message >= 0}
        out.append(MaskDifference(*key, len(places), len(messages), start + min(places)[0]))
    return sorted(out, key=lambda found: found.position)


def shift(expected: Mask, found: Mask) -> int:
    """By how many tokens a mask is moved against the expected one: 1, -1, or 0 where it is not just moved."""
    if len(expected) != len(found) or np.array_equal(expected, found) or not expected.any():
        return 0
    if np.array_equal(expected[:-1], found[1:]) and not found[0]:
        return 1
    return -1 if np.array_equal(expected[1:], found[:-1]) and not found[-1] else 0
