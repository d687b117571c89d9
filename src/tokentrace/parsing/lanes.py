"""Text that goes by: while a parser waits in the midst of text, most tokens change nothing but that there is more.

For such a token it is known beforehand what is reported, and what is held back because a delimiter may begin with it.
A `Lane` has that by token id, for one place in a grammar and one text held back; it is filled as tokens come up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..tokens.ids import INT32_MAX
from .events import ArgumentsDelta, ContentDelta, ReasoningDelta

if TYPE_CHECKING:
    from .reader import Plain

Delta = ReasoningDelta | ContentDelta | ArgumentsDelta
MOST_LANES: Final = 1024
"""Lanes that are kept for a vocabulary. Each has at most an entry for every token."""


class DeltaMaker(NamedTuple):
    """How text that goes by is reported: the event, with what it says before the text, and how the text is written."""

    event: Callable[..., Delta]
    before: tuple[Any, ...] = ()
    written: Callable[[str], str] | None = None

    def make(self, text: str) -> Delta:
        return self.event(*self.before, text)


class Lane(dict[int, "tuple[Delta | None, Lane] | None"]):
    """By token: what is reported and the lane after it; None for a token that the parser has to look at."""

    __slots__ = ("_lanes", "_plain", "held", "telling")

    def __init__(self, lanes: Lanes, plain: Plain, telling: DeltaMaker, held: bytes) -> None:
        super().__init__()
        self._lanes, self._plain, self.telling, self.held = lanes, plain, telling, held

    def __missing__(self, index: int) -> tuple[Delta | None, Lane] | None:
        if not 0 <= index <= INT32_MAX:  # not a token id: the parser says so
            return None
        piece, telling = self._lanes.pieces[index], self.telling
        step = None
        if (after := self._plain.step(self.held, piece)) is not None:
            plain, held = after
            said = self.held + piece
            try:
                text = (said[: -len(held)] if held else said).decode()
            except UnicodeDecodeError:
                pass
            else:
                text = telling.written(text) if telling.written else text
                same = plain == self._plain and held == self.held
                lane = self if same else self._lanes.lane(plain, telling, held)
                step = (telling.make(text) if text else None), lane
        self[index] = step
        return step


class Lanes:
    """The lanes of a vocabulary, made when they are first asked for; bounded."""

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self.pieces = pieces
        """The bytes of each token."""
        self._known: dict[tuple[Plain, DeltaMaker, bytes], Lane] = {}

    def lane(self, plain: Plain, telling: DeltaMaker, held: bytes) -> Lane:
        """The lane of a place, a way to report, and what is held back there."""
        known = self._known.get((plain, telling, held))
        if known is None:
            if len(self._known) >= MOST_LANES:
                self._known.clear()
            known = self._known[plain, telling, held] = Lane(self, plain, telling, held)
        return known
