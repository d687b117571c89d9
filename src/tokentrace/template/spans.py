"""Rendered text as spans: pieces of text with their origins."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

from .origin import Origin

Span = tuple[str, int, Origin | None]
"""A piece of text, the message in whose turn it was written, and where it came from."""


@dataclass(slots=True)
class Rendering:
    """Rendered text as spans. Span k is ``text[ends[k-1]:ends[k]]``.

    `turns[k]` is the message in whose turn the span was written (-1: outside every turn), `origins[k]` the field its
    text came from (None: the template wrote it). `generation` holds the character ranges inside the template's own
    ``{% generation %}`` tags. `tail` is where the text after the last turn starts: the generation prompt, if any.
    """

    text: str
    ends: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    origins: list[Origin | None] = field(default_factory=list)
    generation: list[tuple[int, int]] = field(default_factory=list)
    tail: int = 0

    @property
    def last_field(self) -> int:
        """Where the last text that came from a message ends."""
        for end, origin in zip(reversed(self.ends), reversed(self.origins), strict=True):
            if origin is not None and origin.source == "messages":
                return end
        return 0

    def begin_tail(self, position: int) -> None:
        """Start the tail at `position`; splits the span there if necessary."""
        self.tail = position
        at = bisect.bisect_left(self.ends, position)
        if position > 0 and at < len(self.ends) and self.ends[at] != position:
            self.ends.insert(at, position)
            self.turns.insert(at, self.turns[at])
            self.origins.insert(at, self.origins[at])

    def until(self, stop: int) -> Rendering:
        """The rendering of the first `stop` characters."""
        count = bisect.bisect_left(self.ends, stop) + 1 if stop else 0
        return Rendering(
            self.text[:stop],
            [min(end, stop) for end in self.ends[:count]],
            self.turns[:count],
            self.origins[:count],
            [(start, min(end, stop)) for start, end in self.generation if start < stop],
            min(self.tail, stop),
        )

    def spans(self, start: int = 0, stop: int | None = None) -> list[Span]:
        """``[(text, turn, origin), …]`` of the text from `start` to `stop`."""
        text, ends = self.text, self.ends
        start, stop = max(start, 0), len(text) if stop is None else stop
        window = slice(bisect.bisect_right(ends, start), bisect.bisect_left(ends, stop) + 1)
        ends = ends[window]
        rows = zip([start, *ends], ends, self.turns[window], self.origins[window], strict=False)  # one start too many
        return [(text[begin : min(end, stop)], turn, origin) for begin, end, turn, origin in rows if begin < stop]

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Rendering:
        """Put spans together; the tail starts after the last turn."""
        rendering = cls("")
        texts: list[str] = []
        end = 0
        for text, turn, origin in spans:
            if text:
                end += len(text)
                texts.append(text)
                rendering.ends.append(end)
                rendering.turns.append(turn)
                rendering.origins.append(origin)
                rendering.tail = end if turn >= 0 else rendering.tail
        rendering.text = "".join(texts)
        return rendering

    def __repr__(self) -> str:
        return f"Rendering({self.text!r}, {len(self.ends)} spans)"
