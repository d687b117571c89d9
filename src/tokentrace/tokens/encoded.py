"""Encoded: ids, and where in the text each of them stands."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ..computed import computed
from ..template.trace import Rendering
from .ordinals import Counted
from .positions import BytePositions, Positions
from .tokenizer import Ids
from .vocabulary import Vocabulary

Number = TypeVar("Number", bound=np.generic)

_NEAR: Final = 64
"""Characters after a control token within which tokens are counted one by one."""


class TokenPlaces(NamedTuple):
    """Where tokens stand in a text: in bytes, or in characters.

    Where they follow one another without a gap, as they nearly always do, `ends` says it all.
    """

    ends: Positions
    units: BytePositions | None = None
    """Of what `ends` are positions in bytes; None if they are positions of characters."""
    starts: Positions | None = None
    """Where each begins, if there are gaps."""
    begins: Positions | None = None
    """Where what each token spells begins, without white space that it absorbs; None if it absorbs none."""


class Encoded:
    """Ids, and where each stands in the text: worked out when it is asked for.

    Where the control tokens were counted (`tokens.ordinals`), positions near one of them are found from there.
    """

    def __init__(
        self,
        ids: Ids,
        rendering: Rendering,
        vocabulary: Vocabulary,
        layout: TokenPlaces | Callable[[], TokenPlaces],
        counted: Counted | None = None,
        kept: Sequence[tuple[int, str]] = (),
    ) -> None:
        self.ids = ids
        self.rendering = rendering
        self._vocabulary = vocabulary
        self._layout = layout
        self._counted = counted
        self.kept = kept
        """Control tokens that stayed text, as what spells them is not trusted: the span of each, and the token."""
        self._counts: npt.NDArray[np.intp] | None = None

    @property
    def layout(self) -> TokenPlaces:
        """Where all tokens stand."""
        if callable(self._layout):
            self._layout = self._layout()
        return self._layout

    @property
    def ends(self) -> Positions:
        """Where each token ends."""
        return self.layout.ends

    @computed
    def starts(self) -> Positions:
        """Where each token begins."""
        ends, _, starts, _ = self.layout
        return np.concatenate((np.zeros(1, ends.dtype), ends))[:-1] if starts is None else starts

    @computed
    def spans(self) -> npt.NDArray[np.int32]:
        """The span in which each token begins."""
        ends = self.rendering.ends
        return self._of_tokens(np.arange(len(ends), dtype=np.int32), ends, self._tokens_in(ends))

    def per_token(self, of_spans: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """What is known of each span of the rendering, for each token that begins in it."""
        ends = self.rendering.ends
        if self._counts is None:
            self._counts = self._tokens_in(ends)
        return self._of_tokens(of_spans, ends, self._counts)

    def _of_tokens(
        self, of_spans: npt.NDArray[Number], ends: list[int], counts: npt.NDArray[np.intp]
    ) -> npt.NDArray[Number]:
        begins = self.layout.begins
        if begins is None:
            return np.repeat(of_spans, counts)
        last = max(len(ends) - 1, 0)
        return of_spans[np.minimum(np.searchsorted(np.asarray(ends, np.int64), begins, "right"), last)]

    def _tokens_in(self, ends: list[int]) -> npt.NDArray[np.intp]:
        """How many tokens begin in each of the spans that end there, where tokens follow one another."""
        bounds = np.empty(len(ends) + 1, np.intp)
        bounds[:1], bounds[1:] = 0, self._after(self._positions(ends))
        bounds[-1] = len(self.ids) if ends else 0
        return bounds[1:] - bounds[:-1]

    # -- control tokens

    @computed
    def control(self) -> npt.NDArray[np.bool_]:
        """True where a token is a control token."""
        return self._vocabulary.is_control[self.ids]

    @property
    def counted(self) -> Counted:
        """The control tokens, and where they stand in the text."""
        if self._counted is None:
            at = self._vocabulary.find_control(self.ids)
            starts, ends, units = self.starts[at], self.ends[at], self.layout.units
            if units is not None:
                starts, ends = units.characters(starts), units.characters(ends)
            rows = (self.ids[at], starts, ends)
            self._counted = Counted(at.tolist(), *(row.tolist() for row in rows))
        return self._counted

    # -- positions

    def position(self, token: int) -> int:
        """Where a token begins, as a character position of the text; one past the last is where the text ends."""
        if token >= len(self.ids):
            return len(self.rendering.text)
        start, units = self.starts[token : token + 1], self.layout.units
        return int(start[0] if units is None else units.characters(start)[0])

    def first_touching(self, positions: Sequence[int]) -> list[int]:
        """For each character position, the first token that ends after it."""
        return [touching for touching, _ in self.places(positions)]

    def first_after(self, positions: Sequence[int]) -> list[int]:
        """For each character position, the first token that begins at it or later."""
        return [after for _, after in self.places(positions)]

    def places(self, positions: Sequence[int]) -> list[tuple[int, int]]:
        """Both, for each position."""
        if callable(self._layout) and self._counted is not None:
            near = self._near(self._counted, positions)
            if near is not None:
                return near
        wanted = self._positions(positions)
        return list(zip(self._touching(wanted).tolist(), self._after(wanted).tolist(), strict=True))

    def _near(self, counted: Counted, positions: Sequence[int]) -> list[tuple[int, int]] | None:
        """The same where each position is that of a control token, or comes soon after one; else None.

        Text from there to the position, and what comes next, has to be ASCII: then a character is a byte, and nothing
        composes.
        """
        found: list[tuple[int, int]] = []
        text, lengths = self.rendering.text, self._vocabulary.small_lengths
        at, _, starts, ends = counted
        for position in positions:
            next_one = bisect.bisect_left(starts, position)
            if next_one < len(starts) and starts[next_one] == position:
                found.append((at[next_one], at[next_one]))
                continue
            place, token = (ends[next_one - 1], at[next_one - 1] + 1) if next_one else (0, 0)
            if not 0 <= position - place <= _NEAR or not text[place : position + 1].isascii():
                return None
            for number in self.ids[token : token + position - place].tolist():  # each has a character at least
                if not lengths[number]:
                    return None
                place += lengths[number]
                token += 1
                if place >= position:
                    break
            if place < position:
                return None
            found.append((token - (place > position), token))
        return found

    def _touching(self, positions: Positions) -> npt.NDArray[np.intp]:
        return self.layout.ends.searchsorted(positions, "right")

    def _after(self, positions: Positions) -> npt.NDArray[np.intp]:
        ends, _, starts, _ = self.layout
        if starts is not None:
            return starts.searchsorted(positions, "left")
        found = ends.searchsorted(positions, "left") + (positions > 0)  # it begins where one ends
        return np.minimum(found, len(self.ids), out=found)

    def _positions(self, characters: Sequence[int]) -> Positions:
        """Positions of characters as `ends` counts them."""
        ends, units, _, _ = self.layout
        positions = np.asarray(characters, ends.dtype)  # of one type with what is searched, which is else copied
        return positions if units is None else units.of(positions)

    def tokens_touching(self, start: int, end: int) -> tuple[int, int]:
        """The half-open range of tokens that hold a character of ``text[start:end]``."""
        (first, _), (_, stop) = self.places([start, end])
        return first, max(first, stop)
