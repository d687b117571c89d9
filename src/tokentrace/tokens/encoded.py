"""Encoded: ids, and where in the text each of them is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ..computed import computed
from ..template.trace import Rendering
from .control import Positions
from .tokenizer import Ids

Number = TypeVar("Number", bound=np.generic)


class ControlTokens(NamedTuple):
    """The control tokens of a text: their indices and ids, and where they start and end, in characters."""

    at: list[int]
    ids: list[int]
    starts: list[int]
    ends: list[int]


@dataclass(eq=False)
class Encoded:
    """Ids, and the characters of the text at which each token starts and ends. Tokens may share a character."""

    ids: Ids
    rendering: Rendering
    control: npt.NDArray[np.bool_]
    """True where a token is a control token."""
    starts: Positions
    ends: Positions
    begins: Positions | None = None
    """Where the text that each token spells starts, without white space that it absorbs (None: `starts`)."""
    forged: Sequence[tuple[int, str]] = ()
    """Control tokens that stayed text as it is not trusted: the span of each, and the token."""

    @computed
    def spans(self) -> npt.NDArray[np.int32]:
        """The span in which each token begins."""
        return self.per_token(np.arange(len(self.rendering.ends), dtype=np.int32))

    def per_token(self, of_spans: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """A value for each span of the rendering, for each token that begins in it."""
        return np.repeat(of_spans, self._tokens_in_spans)

    @computed
    def _tokens_in_spans(self) -> npt.NDArray[np.intp]:
        ends, begins = self.rendering.ends, self.starts if self.begins is None else self.begins
        bounds = np.zeros(len(ends) + 1, np.intp)
        bounds[1:] = begins.searchsorted(np.asarray(ends, begins.dtype), "left")
        bounds[-1] = len(self.ids) if ends else 0
        return bounds[1:] - bounds[:-1]

    @computed
    def control_tokens(self) -> ControlTokens:
        """The control tokens, and where they are."""
        at = self.control.nonzero()[0]
        columns = (at, self.ids[at], self.starts[at], self.ends[at])
        return ControlTokens(*(column.tolist() for column in columns))

    # -- positions

    def position(self, token: int) -> int:
        """The character at which a token starts; for one past the last, the end of the text."""
        return int(self.starts[token]) if token < len(self.ids) else len(self.rendering.text)

    def first_touching(self, positions: Sequence[int]) -> list[int]:
        """For each character position, the first token that ends after it."""
        return list(map(int, self.ends.searchsorted(np.asarray(positions, self.ends.dtype), "right")))

    def first_after(self, positions: Sequence[int]) -> list[int]:
        """For each character position, the first token that starts at it or later."""
        return list(map(int, self.starts.searchsorted(np.asarray(positions, self.starts.dtype), "left")))

    def tokens_touching(self, start: int, end: int) -> tuple[int, int]:
        """The half-open range of tokens that contain a character of ``text[start:end]``."""
        first = self.first_touching([start])[0]
        return first, max(first, self.first_after([end])[0])
