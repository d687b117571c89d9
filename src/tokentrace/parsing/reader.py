"""Reading bytes piece by piece: a parser is a generator that yields where it needs more.

It reports only what is certain, and looks at every byte a bounded number of times.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from encodings.utf_8 import IncrementalDecoder
from functools import partial
from typing import NamedTuple, TypeVar

from .marked import MarkedBytes

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A part of a parser: yields to wait for bytes, and returns a result."""
Pieces = tuple[bytes, ...]
"""A delimiter: any white space may be between its pieces."""
Kinds = list[tuple[str, bytes]]
"""Delimiters, each after its kind."""

_ESCAPE, _CONTROL = 0x5C, 0xFF
_REMEMBERED = 20_000
_SPACES = re.compile(rb"\s*")


class Report:
    """Receives certain text: the reader's bytes by place, or decoded (`put`)."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.decoder = IncrementalDecoder("replace")

    def __call__(self, start: int, stop: int) -> None:
        self.put(self.decoder.decode(self.reader.marked.visible(self.reader.data[start:stop])))

    def put(self, text: str) -> None:
        raise NotImplementedError

    def done(self) -> None:
        self.put(self.decoder.decode(b"", final=True))


class Match(NamedTuple):
    """A delimiter. The text before it ends at `text`, before its white space."""

    kind: str
    text: int
    start: int
    stop: int


Plain = tuple[str, bytes] | None
"""A token's text, and its last bytes if they may begin a delimiter; None: parse it."""


def _plain(piece: bytes, stop: int) -> Plain:
    try:
        return piece[:stop].decode(), piece[stop:]
    except UnicodeDecodeError:
        return None


class Delimiters:
    """Delimiters to look for. `pads` is the white space before them, by kind."""

    def __init__(self, kinds: Kinds, pads: Mapping[str, bytes] | None = None) -> None:
        # the first kind counts
        self.kinds = {delimiter: kind for kind, delimiter in reversed(kinds) if delimiter}
        self.pads = pads or {}
        ordered = sorted(self.kinds, key=len, reverse=True)
        self.pattern = re.compile(b"|".join(map(re.escape, ordered)) or b"(?!)")
        padded = {*self.kinds, *(self.pads.get(kind, b"") + text for text, kind in self.kinds.items())}
        prefixes = {text[:length] for text in padded for length in range(1, len(text))}
        self._pending = re.compile(b"(?:" + b"|".join(map(re.escape, sorted(prefixes))) + rb")\Z")
        self.longest = max(map(len, prefixes), default=0)
        self._last_bytes = frozenset(prefix[-1] for prefix in prefixes)
        self.plain = functools.lru_cache(_REMEMBERED)(self._plain)

    def _plain(self, piece: bytes) -> Plain:
        special = _CONTROL in piece or self.pattern.search(piece)
        return None if special else _plain(piece, self.pending(piece, 0))

    def pending(self, data: bytes | bytearray, start: int) -> int:
        """Where an incomplete delimiter may begin; the end of the data if nowhere."""
        if not data or data[-1] not in self._last_bytes:  # the usual case
            return len(data)
        match = self._pending.search(data, max(start, len(data) - self.longest))
        return match.start() if match else len(data)


@dataclass(frozen=True, eq=False)
class Notation:
    """How brackets and strings are written. If `strict`, control tokens outside them are errors.

    `outside` finds brackets, quotes and what is not allowed; `strings` match strings, by quote.
    """

    opening: bytes
    closing: bytes
    outside: re.Pattern[bytes]
    strings: Mapping[int, re.Pattern[bytes]]
    strict: bool = False

    def next(self, quote: int, data: bytes | bytearray, at: int) -> int:
        """The next byte that matters, in a string with this quote or outside of strings (0)."""
        if quote:
            match = self.strings[quote].match(data, at)
            return match.end() if match else at
        match = self.outside.search(data, at)
        return match.start() if match else len(data)


@functools.lru_cache(_REMEMBERED)
def _plain_in(notation: Notation, quote: int, piece: bytes) -> Plain:
    stop = notation.next(quote, piece, 0)
    return _plain(piece, stop) if piece[stop:] in (b"", b"\\") else None


class Reader:
    """The bytes that arrived, and how far they were read (`at`) and reported."""

    def __init__(self, marked: MarkedBytes, data: bytes = b"", *, ended: bool = False) -> None:
        self.marked, self.data, self.ended = marked, bytearray(data), ended
        self.base = len(data)
        self.at = self.reported = 0
        self.plain: Callable[[bytes], Plain] | None = None
        """Reads tokens that need not resume the parser; reports their text."""
        self.report, self.pending = Report(self), b""
        """All bytes before `pending` were reported."""

    def text(self, start: int, stop: int) -> str:
        return self.marked.text(self.data[start:stop])

    def sees(self, text: bytes, at: int | None = None) -> Reading[bool]:
        at = self.at if at is None else at
        while True:
            there = bytes(self.data[at : at + len(text)])
            if there == text:
                return True
            if self.ended or not text.startswith(there):
                return False
            yield

    def sees_all(self, pieces: Pieces, at: int | None = None) -> Reading[int | None]:
        """Where the delimiter at a position ends; None if there is none."""
        at = self.at if at is None else at
        for piece in pieces:
            at = yield from self.past_space(at)
            if not (yield from self.sees(piece, at)):
                return None
            at += len(piece)
        return at

    def sees_one(self, sequences: Iterable[Pieces], at: int | None = None) -> Reading[bool]:
        """True if one of several delimiters is at a position."""
        for pieces in sequences:
            if (yield from self.sees_all(pieces, at)) is not None:
                return True
        return False

    def skip_all(self, pieces: Pieces) -> Reading[bool]:
        """Go past a delimiter if it is here; True if it is."""
        past = yield from self.sees_all(pieces)
        self.at = past if past is not None else self.at
        return past is not None

    def skip(self, pad: bytes) -> Reading[bool]:
        """Go past `pad` if all of it is here; True if it is."""
        if pad and (yield from self.sees(pad)):
            self.at += len(pad)
            return True
        return False

    def past_space(self, at: int | None = None) -> Reading[int]:
        return self.past(_SPACES, at)

    def past(self, pattern: re.Pattern[bytes], at: int | None = None) -> Reading[int]:
        """The end of bytes that match a pattern, perhaps in several pieces."""
        at = self.at if at is None else at
        while True:
            match = pattern.match(self.data, at)
            at = match.end() if match else at
            if at < len(self.data) or self.ended:
                return at
            yield

    @property
    def exhausted(self) -> bool:
        return self.ended and self.at == len(self.data)

    def find(self, delimiters: Delimiters, report: Report | None = None) -> Reading[Match | None]:
        """Go to the next delimiter, or to the end (None), and report the text before it."""
        data, start = self.data, self.at
        self.reported = scan = start
        while True:
            match = delimiters.pattern.search(data, scan)
            if match is None and self.ended:
                self._report(report, len(data), final=True)
                self.at = len(data)
                return None
            pending = len(data)
            if not self.ended and (match is None or pending - match.start() <= delimiters.longest):
                pending = delimiters.pending(data, self.reported)
            if match is not None and match.start() < pending:
                kind, text = delimiters.kinds[match[0]], match.start()
                pad = delimiters.pads.get(kind, b"")
                if pad and data.endswith(pad, start, text):
                    text -= len(pad)
                self._report(report, text, final=True)
                self.at = match.start()
                return Match(kind, text, match.start(), match.end())
            if match is None:  # else it may still become a longer delimiter
                self._report(report, pending)
                self._wait(report, delimiters.plain)
            scan = pending
            yield
            scan = max(scan, self.reported)

    def _report(self, report: Report | None, stop: int, *, final: bool = False) -> None:
        if report is not None and stop > self.reported:
            report(self.reported, stop)
            self.reported = stop
        if report is not None and final:
            report.done()

    def _wait(self, report: Report | None, plain: Callable[[bytes], Plain]) -> None:
        """Let tokens be read without resuming the parser."""
        if report is not None and self.reported >= self.base and not report.decoder.buffer:
            self.plain, self.report, self.pending = plain, report, bytes(self.data[self.reported :])

    def enclosed(
        self, notation: Notation, ends: list[Pieces], report: Report | None = None
    ) -> Reading[bool]:
        """Go past what the bracket or quote here encloses; True if it is closed.

        Stops at one of `ends`, and at what the notation does not allow.
        """
        data, at = self.data, self.at
        self.reported, quote, depth = at, 0, 0
        while True:
            at = notation.next(quote, data, at)
            if at == len(data) or (quote and data[at] == _ESCAPE and at + 1 == len(data)):
                at = len(data) if self.ended else at
                self._report(report, at, final=self.ended)
                self.at = at
                if self.ended:
                    return False
                self._wait(report, partial(_plain_in, notation, quote))
                yield
                at = max(at, self.reported)
                continue
            byte = data[at]
            if quote and byte == quote and depth:
                quote = 0
            elif not quote and byte in notation.strings:
                quote = byte
            elif not quote and byte in notation.opening:
                depth += 1
            elif not quote and byte in notation.closing and depth > 1:
                depth -= 1
            elif (
                byte != _CONTROL or (notation.strict and not quote) or (yield from self.sees_one(ends, at))
            ):
                closed = byte == quote if quote else byte in notation.closing
                self.at = at + 1 if closed else at
                self._report(report, self.at, final=True)
                return closed
            at += 1
