"""Spans: rendered text with its origins, and blocks of them that always come together."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .origin import Origin
from .strings import Run

Span = tuple[str, int, Origin | None]
"""A piece of text, the message in whose turn it was written, and where it came from."""


class Block(Origin):
    """The origin of a text of many runs that comes again and again: a tool's schema, as JSON.

    It is that of the tool, or of all of them, and knows the runs. In a `Rendering` it stands for one span until
    somebody asks for those inside of it: nothing that a render itself looks at differs between them.
    """

    runs: tuple[Run, ...]
    tools: frozenset[Any]
    """The numbers of the tools of which it shows something."""


class KnownRuns(tuple[Run, ...]):
    """The runs of a text that is kept and printed again and again, with the block that they are."""

    block: Block


def known_runs(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Runs of a text that will be printed again: as a block, if they are many and all of them come from tools."""
    if len(runs) < 4 or any(origin is None or origin[:1] != ("tools",) or len(origin) < 2 for _, origin in runs):
        return tuple(runs)
    known = KnownRuns(runs)
    tools = frozenset(origin[1] for _, origin in runs if origin is not None)
    known.block = Block(("tools", *(tools if len(tools) == 1 else ())))
    known.block.runs = tuple(runs)
    known.block.tools = tools
    return known


class Spans(NamedTuple):
    """Where spans end, in whose turn each was written (-1: outside every turn), and where its text came from."""

    ends: list[int]
    turns: list[int]
    origins: list[Origin | None]


class Rendering:
    """Rendered text as spans. Span k is ``text[ends[k-1]:ends[k]]``.

    `turns[k]` is the message in whose turn the span was written (-1: outside every turn), `origins[k]` the
    field its text came from (None: the template wrote it). `generation` holds the character ranges that the
    template's own ``{% generation %}`` tags enclose. `tail` is where the text after the last turn begins:
    the generation prompt, if one was asked for. `wide` are the spans of `closed` that hold more than ASCII, where that
    is known.

    `closed` are the same spans with each `Block` as one. They may not be changed.
    """

    __slots__ = ("_closed", "_open", "generation", "tail", "text", "wide")

    def __init__(
        self,
        text: str,
        ends: list[int] | None = None,
        turns: list[int] | None = None,
        origins: list[Origin | None] | None = None,
        generation: list[tuple[int, int]] | None = None,
        tail: int = 0,
        wide: list[int] | None = None,
        *,
        blocks: bool = False,
    ) -> None:
        self.text = text
        self.generation = generation if generation is not None else []
        self.tail = tail
        self.wide = wide
        lists = (ends, turns, origins)
        self._closed = Spans(*([] if given is None else given for given in lists))  # type: ignore[arg-type]
        self._open = None if blocks else self._closed

    @property
    def closed(self) -> Spans:
        return self._closed

    def _opened(self) -> Spans:
        """All spans, those in blocks too."""
        if self._open is None:
            ends, turns, origins = self._open = Spans([], [], [])
            start, last, after_block = 0, -1, False
            for end, turn, origin in zip(*self._closed, strict=True):
                is_block = isinstance(origin, Block)
                runs = origin.runs if isinstance(origin, Block) else ((end - start, origin),)
                if (is_block or after_block) and origins and turn == last and origins[-1] == runs[0][1]:  # as `collect`
                    del ends[-1], turns[-1], origins[-1]
                ends += [start + stop for stop, _ in runs]
                turns += [turn] * len(runs)
                origins += [inner for _, inner in runs]
                start, last, after_block = end, turn, is_block
        return self._open

    def _only(self, spans: Spans) -> None:
        """Let the spans be these; no block is among them."""
        self._closed = self._open = spans
        self.wide = None

    @property
    def ends(self) -> list[int]:
        return self._opened().ends

    @property
    def turns(self) -> list[int]:
        return self._opened().turns

    @turns.setter
    def turns(self, turns: list[int]) -> None:
        self._only(self._opened()._replace(turns=turns))

    @property
    def origins(self) -> list[Origin | None]:
        return self._opened().origins

    @origins.setter
    def origins(self, origins: list[Origin | None]) -> None:
        self._only(self._opened()._replace(origins=origins))

    @property
    def last_field(self) -> int:
        """Where the last text that came from a message ends."""
        for end, origin in zip(reversed(self._closed.ends), reversed(self._closed.origins), strict=True):
            if origin is not None and origin.source == "messages":
                return end
        return 0

    def begin_tail(self, position: int) -> None:
        """Let the tail begin at `position`, in the middle of a span if need be."""
        self.tail = position
        self._only(self._opened())
        at = bisect.bisect_left(self.ends, position)
        if position > 0 and at < len(self.ends) and self.ends[at] != position:
            self.ends.insert(at, position)
            self.turns.insert(at, self.turns[at])
            self.origins.insert(at, self.origins[at])

    def until(self, stop: int) -> Rendering:
        """The rendering without what comes after `stop`."""
        count = bisect.bisect_left(self.ends, stop) + 1
        return Rendering(
            self.text[:stop],
            [min(end, stop) for end in self.ends[:count]] if stop else [],
            self.turns[:count] if stop else [],
            self.origins[:count] if stop else [],
            [(start, min(end, stop)) for start, end in self.generation if start < stop],
            min(self.tail, stop),
        )

    def spans(self, start: int = 0, stop: int | None = None) -> list[Span]:
        """``[(text, turn, origin), …]`` of the text from `start` to `stop`."""
        text, ends = self.text, self.ends
        if start <= 0 and stop is None:
            rows = zip([0, *ends], ends, self.turns, self.origins, strict=False)  # one start too many
            return [(text[begin:end], turn, origin) for begin, end, turn, origin in rows]
        start, stop = max(start, 0), len(text) if stop is None else stop
        some = slice(bisect.bisect_right(ends, start), bisect.bisect_left(ends, stop) + 1)
        rows = zip([start, *ends[some]], ends[some], self.turns[some], self.origins[some], strict=False)
        return [(text[begin : min(end, stop)], turn, origin) for begin, end, turn, origin in rows if begin < stop]

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Rendering:
        """A rendering that is put together from spans; its tail begins after the last turn."""
        made = cls("")
        texts: list[str] = []
        end = 0
        for text, turn, origin in spans:
            if text:
                end += len(text)
                texts.append(text)
                made.ends.append(end)
                made.turns.append(turn)
                made.origins.append(origin)
                made.tail = end if turn >= 0 else made.tail
        made.text = "".join(texts)
        return made

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rendering):
            return NotImplemented
        return (self.text, self._opened(), self.generation, self.tail) == (
            *(other.text, other._opened(), other.generation, other.tail),
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Rendering({self.text!r}, {len(self._opened().ends)} spans)"
