"""What a row is expected to be: its ids and mask, and whose each token is, in words."""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
import numpy.typing as npt

from ...samples.sample import Sample
from ...tokens.kinds import Part

NOBODY: Final = "template"
"""The role of tokens that belong to no message."""

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

    def whereabouts(self, at: int) -> str:
        """The same in words: ``message 2 (user), content``."""
        message, role, field = self.place(at)
        return (
            f"message {message} ({role}), {field}"
            if message >= 0
            else field
            if at >= len(self.ids)
            else "the template's own text"
        )
