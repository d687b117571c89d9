"""Where the characters of a text stand in its UTF-8.

Most text is ASCII, one byte a character. Only *wide* spans, which hold more than that, move what comes after them. So
they are all that is kept: of a thousand spans a handful is wide.
"""

from __future__ import annotations

import unicodedata
from typing import Any

import numpy as np
import numpy.typing as npt

from ..template.trace import Rendering

Positions = npt.NDArray[np.signedinteger[Any]]


class BytePositions:
    """Positions in characters as positions in bytes, and back. UnicodeEncodeError for text that has no UTF-8."""

    def __init__(self, rendering: Rendering) -> None:
        text, ends = rendering.text, rendering.ends
        spans = zip([0, *ends], ends, strict=False)  # one start too many
        places = [(start, end) for start, end in spans if not text[start:end].isascii()]
        more = [len(text[start:end].encode("utf-8")) - (end - start) for start, end in places]
        self._text = text
        self._starts, self._ends = np.asarray(places, np.int32).reshape(-1, 2).T.copy()
        self._more = np.asarray([0, *more], np.int32).cumsum(dtype=np.int32)
        """How many bytes more than characters there are before each wide span, and after the last."""
        self.total = len(text) + int(self._more[-1])
        """How many bytes the text has."""

    def is_composed(self) -> bool:
        """Whether the text is in Unicode's composed form (NFC)."""
        # a few characters more, because marks compose with what stands before them
        return all(
            unicodedata.is_normalized("NFC", self._text[max(0, start - 8) : end])
            for start, end in zip(self._starts.tolist(), self._ends.tolist(), strict=True)
        )

    def of(self, characters: Positions) -> Positions:
        """Positions of characters as positions in bytes."""
        before = self._starts.searchsorted(characters, "left")
        found: Positions = characters + self._more[before]
        for at in ((before > 0) & (characters < self._ends[before - 1])).nonzero()[0].tolist():  # inside a wide span
            start, more = int(self._starts[before[at] - 1]), int(self._more[before[at] - 1])
            found[at] = start + more + len(self._text[start : characters[at]].encode("utf-8"))
        return found

    def characters(self, positions: Positions) -> Positions:
        """For each position in bytes, the character that stands there."""
        before = (self._starts + self._more[:-1]).searchsorted(positions, "left")
        found: Positions = positions - self._more[before]
        inside = (before > 0) & (found < self._ends[before - 1])
        for span in set((before[inside] - 1).tolist()):
            start, end = int(self._starts[span]), int(self._ends[span])
            raw = np.frombuffer(self._text[start:end].encode("utf-8") + b"x", np.uint8)
            begins = (raw & 0xC0) != 0x80
            begun = np.concatenate((np.zeros(1, np.int32), begins.cumsum(dtype=np.int32)))
            own = inside & (before - 1 == span)
            at = positions[own] - start - self._more[span]
            found[own] = start + begun[at] - ~begins[at]  # one that has only begun is not counted
        return found
