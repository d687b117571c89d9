"""A turn with holes: one stretch of a rendering, written in one message's turn, as scaffold and fields.

Every question about a turn (its outline, its grammar, its control tokens, the fields it shows) reads this view.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..template.origin import Origin
from ..template.trace import Rendering


class Piece(NamedTuple):
    """Text with its origin; scaffold has none."""

    text: str
    origin: Origin | None

    @property
    def is_scaffold(self) -> bool:
        return self.origin is None


@dataclass(frozen=True, slots=True)
class TurnView:
    """What was written in the turn of a message; -1 is outside of all turns."""

    message: int
    pieces: tuple[Piece, ...]


def turn_views(rendering: Rendering) -> Iterator[TurnView]:
    """The turns of a rendering and what is between them, in order. A message has several if others interrupt it."""
    for message, spans in itertools.groupby(rendering.spans(), key=lambda span: span[1]):
        yield TurnView(message, tuple(Piece(text, origin) for text, _, origin in spans))


def turn_pieces(rendering: Rendering | None, message: int) -> Iterator[Piece]:
    """All pieces of one message's turn; none if the template refused it."""
    for view in turn_views(rendering) if rendering is not None else ():
        if view.message == message:
            yield from view.pieces
