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
        text, ends = rendering.text, rendering.closed.ends
        wide = range(len(ends)) if rendering.wide is None else sorted(set(rendering.wide))
        places = [(ends[span - 1] if span else 0, ends[span]) for span in wide]
        places = [(start, end) for start, end in places if not text[start:end].isascii()]
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

    def character(self, position: int) -> int:
        """The character that stands at a position in bytes."""
        before = int((self._starts + self._more[:-1]).searchsorted(position, "left"))
        character = position - int(self._more[before])
        if before and character < self._ends[before - 1]:  # inside a wide span
            start, end = int(self._starts[before - 1]), int(self._ends[before - 1])
            raw = self._text[start:end].encode("utf-8")
            character = start + len(raw[: position - start - int(self._more[before - 1])].decode("utf-8", "ignore"))
        return character

    def near(self, positions: Positions) -> Positions:
        """For each position in bytes, a character of the span that it stands in."""
        before = (self._starts + self._more[:-1]).searchsorted(positions, "left")
        found: Positions = positions - self._more[before]
        np.copyto(found, self._starts[before - 1], where=(before > 0) & (found < self._ends[before - 1]))
        return found
