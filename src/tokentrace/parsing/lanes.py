"""Text that goes by: while a parser waits in the midst of text, most tokens change nothing but that there is more.

For such a token it is known beforehand what is reported, and what is held back because a delimiter may begin with it.
A `Lane` has that by token id, for one place in a grammar and one text held back; it is filled as tokens come up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Final

from .events import ArgumentsDelta, ContentDelta, ReasoningDelta

if TYPE_CHECKING:
    from .reader import Plain

Delta = ReasoningDelta | ContentDelta | ArgumentsDelta
MOST_LANES: Final = 256
"""Lanes that are kept for a vocabulary. Each has at most an entry for every token."""


class Lane(dict[int, "tuple[Delta | None, Lane] | None"]):
    """By token: what is reported and the lane after it; None for a token that the parser has to look at."""

    __slots__ = ("_lanes", "_pieces", "_plain", "_written", "held", "make")

    def __init__(
        self,
        lanes: dict[bytes, Lane],
        held: bytes,
        plain: Plain,
        pieces: Mapping[int, bytes],
        make: Callable[[str], Delta],
        written: Callable[[str], str] | None,
    ) -> None:
        super().__init__()
        self._lanes, self.held, self._plain, self._pieces = lanes, held, plain, pieces
        self.make, self._written = make, written
        lanes[held] = self

    def __missing__(self, index: int) -> tuple[Delta | None, Lane] | None:
        step = self._step(self._pieces[index])
        self[int(index)] = step
        return step

    def _step(self, piece: bytes) -> tuple[Delta | None, Lane] | None:
        held = self._plain.step(self.held, piece)
        if held is None:
            return None
        data = self.held + piece
        try:
            text = data[: len(data) - len(held)].decode()
        except UnicodeDecodeError:
            return None
        lane = self.beside(held)
        return (self.make(self._written(text) if self._written else text) if text else None), lane

    def beside(self, held: bytes) -> Lane:
        """The lane of the same place where this is held back."""
        known = self._lanes.get(held)  # an empty one is falsy
        return Lane(self._lanes, held, self._plain, self._pieces, self.make, self._written) if known is None else known


class Lanes:
    """The lanes of a vocabulary, made when they are first asked for; bounded."""

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._pieces = pieces
        self._known: dict[tuple[Plain, Hashable], dict[bytes, Lane]] = {}

    def lane(
        self,
        plain: Plain,
        kind: Hashable,
        held: bytes,
        make: Callable[[str], Delta],
        written: Callable[[str], str] | None = None,
    ) -> Lane:
        """The lane of a place, a kind of report, and what is held back there."""
        if len(self._known) >= MOST_LANES:
            self._known.clear()
        lanes = self._known.setdefault((plain, kind), {})
        known = lanes.get(held)
        return Lane(lanes, held, plain, self._pieces, make, written) if known is None else known
