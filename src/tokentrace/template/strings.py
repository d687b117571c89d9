"""Text that knows where each of its characters came from.

Every method that cuts, joins or maps text keeps the runs exact, or says UNKNOWN. A plain ``str`` that is joined with
traced text is the template's own: scaffold.
"""

from __future__ import annotations

import bisect
import codecs
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, SupportsIndex, TypeAlias, cast

from .budget import check_count, check_pieces, check_size, dear, made, searched
from .origin import UNKNOWN, Origin

Run: TypeAlias = tuple[int, Origin | None]
Runs: TypeAlias = tuple[Run, ...]

_new: Callable[[type[TracedStr], str], TracedStr]
_slice = str.__getitem__
_BACKWARDS: Final = slice(None, None, -1)
_SMALL: Final = 1024
"""Text up to this size is paid for by the step that makes it (see `budget`)."""


class TracedStr(str):
    """A ``str`` that knows the origin of each of its characters."""

    __slots__ = ("runs",)
    runs: Runs

    # -- joining

    def __str__(self) -> str:  # Jinja calls str() on what it prints; this keeps the trace
        return self

    def __add__(self, other: str) -> TracedStr:
        return join_traced((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> TracedStr:  # tried before str.__add__, as TracedStr is a subclass
        return join_traced((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> TracedStr:
        times = count.__index__()
        check_size(len(self) * times)
        if len(self.runs) == 1:
            return traced(plain_text(self) * times, self.runs[0][1])
        check_pieces(times)
        return join_traced((self,) * times)

    __rmul__ = __mul__

    def join(self, parts: Iterable[str], /) -> TracedStr:
        return join_with(self, parts)

    # -- cutting

    def __getitem__(self, key: SupportsIndex | slice) -> TracedStr:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step == 1:
                return cut(self, start, max(start, stop))
            if key == _BACKWARDS:
                return _reversed(self)
            check_pieces(len(range(start, stop, step)))
            return join_traced([cut(self, at, at + 1) for at in range(start, stop, step)])
        index = key.__index__()
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError("string index out of range")
        return cut(self, index, index + 1)

    def __iter__(self) -> Iterator[str]:
        for at in range(len(self)):
            if at & 1023 == 1023:
                check_count(at)
            yield cut(self, at, at + 1)

    def _search_many(self, chars: str) -> None:
        if len(chars) > 64:
            searched(self, chars)

    def lstrip(self, chars: str | None = None, /) -> TracedStr:
        if chars is not None:
            self._search_many(chars)
        return cut(self, len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> TracedStr:
        if chars is not None:
            self._search_many(chars)
        return cut(self, 0, len(str.rstrip(self, chars)))

    def strip(self, chars: str | None = None, /) -> TracedStr:
        if chars is not None:
            self._search_many(chars)
        end = len(str.rstrip(self, chars))
        if end == len(self) and len(str.lstrip(self, chars)) == end:
            return self
        return cut(self, min(end, len(self) - len(str.lstrip(self, chars))), end)

    def removeprefix(self, prefix: str, /) -> TracedStr:
        return cut(self, len(prefix) if self.startswith(prefix) else 0, len(self))

    def removesuffix(self, suffix: str, /) -> TracedStr:
        end = len(self) - len(suffix) if suffix and self.endswith(suffix) else len(self)
        return cut(self, 0, end)

    def _pieces(self, parts: list[str], gap: int | None, *, backwards: bool = False) -> list[str]:
        """Locate `parts` in self, in order; `gap` characters apart, or (None) by looking for them."""
        check_pieces(len(parts))
        if gap is None:
            return self._located(parts, backwards)
        out, at = [], 0
        for part in parts:
            out.append(cut(self, at, at + len(part)))
            at += len(part) + gap
        return cast(list[str], out)

    def _located(self, parts: list[str], backwards: bool) -> list[str]:
        out: list[str] = []
        if backwards:
            stop = len(self)
            for part in reversed(parts):
                at = str.rindex(self, part, 0, stop)
                out.append(cut(self, at, at + len(part)))
                stop = at
            return out[::-1]
        at = 0
        for part in parts:
            at = str.index(self, part, at)
            out.append(cut(self, at, at + len(part)))
            at += len(part)
        return out

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        if sep:
            check_pieces(str.count(self, sep))
        return self._pieces(str.split(self, sep, maxsplit), len(sep) if sep else None)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        if sep:
            searched(self, sep)
        return self._pieces(str.rsplit(self, sep, maxsplit), len(sep) if sep else None, backwards=True)

    def splitlines(self, keepends: bool = False) -> list[str]:
        out: list[str] = []
        at = 0
        check_pieces(str.count(self, "\n"))
        lines = str.splitlines(self, True)
        check_pieces(len(lines))
        for whole, part in zip(lines, str.splitlines(self, keepends), strict=True):
            out.append(cut(self, at, at + len(part)))
            at += len(whole)
        return out

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        str.partition("", sep)  # refuses what cannot separate
        at = str.find(self, sep)
        return self._parted(at, at + len(sep)) if at >= 0 else (self, "", "")

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        str.partition("", sep)
        searched(self, sep)
        at = str.rfind(self, sep)
        return self._parted(at, at + len(sep)) if at >= 0 else ("", "", self)

    def _parted(self, start: int, stop: int) -> tuple[str, str, str]:
        return cut(self, 0, start), cut(self, start, stop), cut(self, stop, len(self))

    # -- replacing and padding

    def replace(self, old: str, new: str, /, count: SupportsIndex = -1) -> TracedStr:
        limit = count.__index__()
        times = str.count(self, old)
        if not times:
            return self
        check_size(len(self) + (times if limit < 0 else min(times, limit)) * (len(new) - len(old)))
        if old:
            return join_with(new, self.split(old, limit))
        check_pieces(2 * len(self))
        pieces: list[str] = []  # an empty `old` matches before every character and at the end
        for at, char in enumerate(self):
            pieces += [new, char] if limit < 0 or at < limit else [char]
        if limit < 0 or limit > len(self):
            pieces.append(new)
        return join_traced(pieces)

    def center(self, width: SupportsIndex, fill: str = " ", /) -> TracedStr:
        check_size(width.__index__())
        padding = len(str.center(self, width, fill)) - len(self)
        left = padding // 2 + (padding & width.__index__() & 1)
        return join_traced((fill * left, self, fill * (padding - left)))

    def ljust(self, width: SupportsIndex, fill: str = " ", /) -> TracedStr:
        check_size(width.__index__())
        return join_traced((self, fill * (len(str.ljust(self, width, fill)) - len(self))))

    def rjust(self, width: SupportsIndex, fill: str = " ", /) -> TracedStr:
        check_size(width.__index__())
        return join_traced((fill * (len(str.rjust(self, width, fill)) - len(self)), self))

    def zfill(self, width: SupportsIndex, /) -> TracedStr:
        check_size(width.__index__())
        text = str.zfill(plain_text(self), width)
        sign = 1 if self[:1] in ("+", "-") and len(text) > len(self) else 0
        return join_traced((self[:sign], text[sign : len(text) - len(self) + sign], self[sign:]))

    def expandtabs(self, tabsize: SupportsIndex = 8) -> TracedStr:
        check_size(str.count(self, "\t") * max(0, tabsize.__index__()) + len(self))
        pieces: list[str] = []
        column = 0
        for char in self:
            if char == "\t":
                step = tabsize.__index__()
                spaces = step - column % step if step > 0 else 0
                pieces.append(" " * spaces)
                column += spaces
            else:
                pieces.append(char)
                column = 0 if char in "\n\r" else column + 1
        return join_traced(pieces)

    # -- mapping characters

    def translate(self, table: Any, /) -> TracedStr:
        pieces: list[str] = []
        size = 0
        for char in self:
            try:
                piece = table[ord(char)]
            except LookupError:
                piece = char
            if isinstance(piece, int):  # a number does not say whose character it is
                piece = traced(chr(piece), UNKNOWN)
            elif piece is None:
                continue
            elif not isinstance(piece, str):
                raise TypeError("character mapping must return integer, None or str")
            size += len(piece)
            check_size(size)
            pieces.append(piece)
        return join_traced(pieces)

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        from .traced import TracedBytes

        check_codec(encoding, len(self))
        result = TracedBytes(str.encode(self, encoding, errors))
        made(len(result))
        return result

    # -- formatting

    def __mod__(self, values: Any) -> str:
        from .formatting import percent_format

        return percent_format(self, values)

    def __rmod__(self, template: Any) -> str:
        from .formatting import percent_format

        return percent_format(template, self) if isinstance(template, str) else NotImplemented

    def __format__(self, spec: str) -> TracedStr:
        return derived(self, str.__format__(self, spec))

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (plain_text(self),)


_new = str.__new__


def _mapping_case(function: Callable[[str], str]) -> Callable[[TracedStr], TracedStr]:
    @functools.wraps(function)
    def method(self: TracedStr) -> TracedStr:
        return mapped(self, function)

    return method


for _name in ("capitalize", "casefold", "lower", "swapcase", "title", "upper"):
    setattr(TracedStr, _name, _mapping_case(getattr(str, _name)))


def plain_text(text: str) -> str:
    """The text without its trace."""
    return _slice(text, slice(None))


def promoted(text: str) -> TracedStr:
    """A constant of the template as a traced string, so that what it is joined with keeps its trace."""
    return text if isinstance(text, TracedStr) else traced(text, None)


def traced(text: str, origin: Origin | None) -> TracedStr:
    """`text` as a traced string of one origin."""
    self = _new(TracedStr, text)
    size = len(text)
    self.runs = ((size, origin),) if size else ()
    if size > _SMALL:
        _pay(self)
    return self


def with_runs(text: str, runs: Runs) -> TracedStr:
    self = _new(TracedStr, text)
    self.runs = runs
    if len(text) > _SMALL:
        _pay(self)
    return self


def _pay(text: TracedStr) -> None:
    """Charge for a text that was made, and for its runs."""
    size = len(text)
    made((size if text.isascii() else 4 * size) + 128 * len(text.runs))


def _reversed(source: TracedStr) -> TracedStr:
    size = len(source)
    if not size:
        return source
    starts = [0, *(end for end, _ in source.runs[:-1])]
    runs = tuple(
        (size - start, origin) for start, (_, origin) in zip(reversed(starts), reversed(source.runs), strict=True)
    )
    return with_runs(_slice(source, _BACKWARDS), runs)


def check_codec(encoding: str, size: int) -> None:
    """Two of Python's codecs are quadratic."""
    if size > 64 and codecs.lookup(encoding).name in ("idna", "punycode"):
        dear(size)


def derived(source: str, text: str) -> TracedStr:
    """`text` was made from `source` by a step that does not keep positions."""
    if not isinstance(source, TracedStr):
        return traced(text, None)
    origins = {origin for _, origin in source.runs}
    return traced(text, origins.pop() if len(origins) == 1 else (UNKNOWN if origins else None))


def mapped(source: TracedStr, function: Callable[[str], str]) -> TracedStr:
    """A case mapping: position by position where the length stays, else run by run, else UNKNOWN."""
    text = function(source)
    if len(text) == len(source):
        return with_runs(text, source.runs)
    pieces, start = [], 0
    for end, origin in source.runs:
        pieces.append(traced(function(_slice(source, slice(start, end))), origin))
        start = end
    whole = join_traced(pieces)
    return whole if whole == text else derived(source, text)


def cut(source: TracedStr, start: int, stop: int) -> TracedStr:
    """``source[start:stop]`` for 0 <= start <= stop <= len(source)."""
    runs = source.runs
    if start == 0 and stop == len(source):
        return source
    self = _new(TracedStr, _slice(source, slice(start, stop)))
    if start == stop:
        self.runs = ()
    elif len(runs) == 1:
        self.runs = ((stop - start, runs[0][1]),)
    else:
        first = bisect.bisect_left(runs, (start + 1,))  # the first run that ends behind `start`
        last = bisect.bisect_left(runs, (stop,), first)  # and the first that reaches `stop`
        self.runs = (*((end - start, origin) for end, origin in runs[first:last]), (stop - start, runs[last][1]))
    if stop - start > _SMALL:
        _pay(self)
    return self


def join_traced(parts: Iterable[str]) -> TracedStr:
    """The parts after one another; plain strings count as scaffold."""
    parts = list(parts)
    runs: list[Run] = []
    at = 0
    last: Any = traced  # no origin is ever this
    for part in parts:
        if not part:
            continue
        if isinstance(part, TracedStr):
            for end, origin in part.runs:
                if origin == last:
                    runs[-1] = (at + end, origin)
                else:
                    runs.append((at + end, origin))
                    last = origin
            at += len(part)
        else:
            at += len(part)
            if last is None:
                runs[-1] = (at, None)
            else:
                runs.append((at, None))
                last = None
    check_size(at)
    self = _new(TracedStr, "".join(parts))
    self.runs = tuple(runs)
    if at > _SMALL:
        _pay(self)
    return self


def join_with(separator: str, parts: Iterable[Any]) -> TracedStr:
    pieces: list[str] = []
    for index, part in enumerate(parts):
        if not isinstance(part, str):
            raise TypeError(f"sequence item {index}: expected str instance, {type(part).__name__} found")
        if index:
            pieces.append(separator)
        pieces.append(part)
    check_pieces(len(pieces))
    return join_traced(pieces)
