"""Reading bytes that arrive bit by bit.

A parser is a generator: it reads what is there, and yields where it cannot go on without more. So the code reads like
a parser of a whole text, and what it has said is never taken back, because it only says what is certain. Every byte is
looked at a bounded number of times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A part of a parser: yields while it waits for more, and comes to a result."""

Say = Callable[[int, int], None]
"""Takes bytes ``start`` to ``stop`` that are certain."""

_ESCAPE, _CONTROL = 0x5C, 0xFF
_SPACES: Final = re.compile(rb"\s*")


class Found(NamedTuple):
    """A mark, where it stands, and where the text before it ends (without the white space that goes with it)."""

    kind: str
    text: int
    start: int
    stop: int


class Plain(Protocol):
    """A place in which some pieces of text change nothing about what a parser does."""

    def step(self, held: bytes, piece: bytes) -> tuple[Plain, bytes] | None:
        """The place after a piece and what is held back there, where `held` was before; None for the parser to look."""


@dataclass(frozen=True, slots=True, eq=False)
class Brackets:
    """How brackets and strings are written in a notation."""

    opening: bytes
    closing: bytes
    outside: re.Pattern[bytes]
    """Finds the next bracket, quote or control token, or what the notation does not have."""
    inside: Mapping[int, re.Pattern[bytes]]
    """By quote: matches a string up to its closing quote, a control token, or what no string has."""
    strict: bool
    """Whether a control token outside of strings is an error; else only one that ends calls."""

    def follow(self, data: bytes | bytearray, at: int, quote: int, depth: int) -> tuple[int, int, int, bool]:
        """Go on in a string with this quote, if any, and in so many brackets: to where, in what, and whether for more.

        Stops before what closes all, and before what the notation does not have; or where there is no more, which may
        be before half of an escape.
        """
        while True:
            match = self.inside[quote].match(data, at) if quote else self.outside.search(data, at)
            at = len(data) if match is None else match.end() if quote else match.start()
            if at == len(data) or (quote and data[at] == _ESCAPE and at + 1 == len(data)):
                return at, quote, depth, True
            byte = data[at]
            if quote and byte == quote and depth:
                quote = 0
            elif not quote and byte in self.inside:
                quote = byte
            elif not quote and byte in self.opening:
                depth += 1
            elif not quote and byte in self.closing and depth > 1:
                depth -= 1
            else:
                return at, quote, depth, False
            at += 1


class Enclosed(NamedTuple):
    """Text inside of brackets, and there inside of a string where there is a quote."""

    notation: Brackets
    quote: int
    depth: int

    def step(self, held: bytes, piece: bytes) -> tuple[Plain, bytes] | None:
        data = held + piece
        at, quote, depth, wanting = self.notation.follow(data, 0, self.quote, self.depth)
        return (Enclosed(self.notation, quote, depth), data[at:]) if wanting else None


class Waiting(NamedTuple):
    """What a parser does with more text while it waits: pieces that are plain are said, up to what is held back."""

    plain: Plain
    say: Say
    held: int
    """From where on bytes have not been said."""


class Marks:
    """A set of marks to look for, each with a kind and with the white space that belongs to it when it is before it."""

    def __init__(self, marks: Iterable[tuple[str, bytes]], pads: Mapping[str, bytes] | None = None) -> None:
        pads = pads or {}
        self.kinds: dict[bytes, str] = {}
        for kind, mark in marks:
            if mark:
                self.kinds.setdefault(mark, kind)
        self.pads = {kind: pad for kind, pad in pads.items() if pad}
        ordered = sorted(self.kinds, key=len, reverse=True)
        self.pattern = re.compile(b"|".join(map(re.escape, ordered))) if ordered else None
        whole = {self.pads.get(kind, b"") + mark for mark, kind in self.kinds.items()} | set(self.kinds)
        self._begun = {mark[:length] for mark in whole for length in range(1, len(mark))}
        self._longest = max(map(len, self._begun), default=0)
        self._lasts = frozenset(mark[-1] for mark in self._begun)

    def step(self, held: bytes, piece: bytes) -> tuple[Plain, bytes] | None:
        """See `Plain`: a piece is plain if no mark ends in it.

        What is held is the longest end of all that came before which may begin a mark, so what is held next is an end
        of that and the piece.
        """
        data = held + piece
        if self.pattern is not None and self.pattern.search(data):
            return None
        return self, data[self.held(data, 0) :] if data and data[-1] in self._lasts else b""

    def held(self, data: bytearray | bytes, start: int) -> int:
        """From where on `data` may be the beginning of a mark that has not arrived in full."""
        if not data or data[-1] not in self._lasts:
            return len(data)
        for length in range(min(self._longest, len(data) - start), 0, -1):
            if bytes(data[-length:]) in self._begun:
                return len(data) - length
        return len(data)

    def begins(self, data: bytearray, start: int) -> bool:
        """Whether a longer mark may still come of what stands at `start`."""
        return self.reaches(data, start) and bytes(data[start:]) in self._begun

    def reaches(self, data: bytearray, start: int) -> bool:
        """Whether the end is near enough for a mark from `start` on to go beyond it."""
        return len(data) - start <= self._longest


class Reader:
    """Bytes that have arrived, and how far they have been read."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.at = 0
        self.ended = False
        self.waiting: Waiting | None = None
        """Set where text may go by without waking the parser."""
        self.passed = 0
        """How far it went by, for the parser that wakes."""

    def sees(self, mark: bytes, at: int | None = None) -> Reading[bool]:
        """Whether `mark` stands at a position."""
        at = self.at if at is None else at
        while True:
            there = bytes(self.data[at : at + len(mark)])
            if there == mark:
                return True
            if self.ended or not mark.startswith(there):
                return False
            yield

    def sees_any(self, marks: Iterable[bytes], at: int | None = None) -> Reading[bool]:
        """Whether one of `marks` stands at a position."""
        for mark in marks:
            if (yield from self.sees(mark, at)):
                return True
        return False

    def sees_all(self, pieces: Iterable[bytes], at: int | None = None) -> Reading[int | None]:
        """Where a delimiter that stands at a position ends, white space within it being free; None if it does not."""
        at = self.at if at is None else at
        for piece in pieces:
            at = yield from self.past_space(at)
            if not (yield from self.sees(piece, at)):
                return None
            at += len(piece)
        return at

    def skip_all(self, pieces: Iterable[bytes]) -> Reading[bool]:
        """Go past a delimiter if it stands here; whether it does."""
        past = yield from self.sees_all(pieces)
        self.at = past if past is not None else self.at
        return past is not None

    def breaks_off(self, pieces: Iterable[bytes]) -> bool:
        """Whether all there will be ends inside a delimiter."""
        return self.ended and b"".join(pieces).startswith(b"".join(self.data[self.at :].split()))

    def past_space(self, at: int | None = None) -> Reading[int]:
        """The first position that is not white space."""
        at = self.at if at is None else at
        while True:
            match = _SPACES.match(self.data, at)
            at = match.end() if match else at
            if at < len(self.data) or self.ended:
                return at
            yield

    def skip(self, pad: bytes) -> Reading[bool]:
        """Go past `pad` if it is there in full."""
        if pad and (yield from self.sees(pad)):
            self.at += len(pad)
            return True
        return False

    def find(self, marks: Marks, say: Say | None = None) -> Reading[Found | None]:
        """The next mark, and go to it; at the end of all there is None.

        `say` is given what stands before it, as soon as that is certain.
        """
        start = said = scan = self.at
        while True:
            match = marks.pattern.search(self.data, scan) if marks.pattern is not None else None
            held = len(self.data)
            if not self.ended and (match is None or marks.reaches(self.data, match.start())):
                held = marks.held(self.data, said)
            if match is not None and match.start() < held:
                kind = marks.kinds[match[0]]
                text = match.start()
                pad = marks.pads.get(kind, b"")
                if pad and self.data.endswith(pad, start, text):
                    text -= len(pad)
                if say is not None and text > said:
                    say(said, text)
                self.at = match.start()
                return Found(kind, text, match.start(), match.end())
            elif self.ended:
                self.at = len(self.data)
                if say is not None and self.at > said:
                    say(said, self.at)
                return None
            else:
                scan = held
                if match is None and say is not None:  # else a longer mark may come of the one found
                    if held > said:
                        say(said, held)
                        said = held
                    self.waiting = Waiting(marks, say, held)
            yield
            if self.passed > said:
                said = scan = self.passed

    def enclosed(self, notation: Brackets, ends: Iterable[bytes], say: Say | None = None) -> Reading[bool]:
        """Go past what the bracket or quote here encloses; whether it is closed.

        Stops at one of `ends`, and at what the notation does not have. `say` is given what is certain.
        """
        data, said, at = self.data, self.at, self.at
        quote = depth = 0
        while True:
            at, quote, depth, wanting = notation.follow(data, at, quote, depth)
            if wanting:
                stop = len(data) if self.ended else at
                if say is not None and stop > said:
                    say(said, stop)
                self.at = said = stop
                if self.ended:
                    return False
                if say is not None:
                    self.waiting = Waiting(Enclosed(notation, quote, depth), say, stop)
                yield
                self.at = said = max(said, self.passed)
            elif data[at] == _CONTROL and (quote or not notation.strict) and not (yield from self.sees_any(ends, at)):
                at += 1
            else:
                whole = data[at] == quote if quote else data[at] in notation.closing
                self.at = at + 1 if whole else at
                if say is not None:
                    say(said, self.at)
                return whole
