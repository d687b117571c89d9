"""Text that knows where each of its characters came from.

Methods keep the runs exact, or mark the text UNKNOWN. A plain ``str`` joined to it is scaffold.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex

from .budget import SMALL, charge, check_items, check_search, check_size
from .origin import UNKNOWN, Origin

Run = tuple[int, Origin | None]
Runs = tuple[Run, ...]

_slice = str.__getitem__
_BACKWARDS = slice(None, None, -1)


class TracedStr(str):
    """A ``str`` whose `runs`, pairs of an end and an origin, cover it without gaps.

    All other methods return plain values; the environment marks their text as UNKNOWN.
    """

    __slots__ = ("runs",)
    runs: Runs

    def __str__(self) -> str:  # Jinja calls str() on what it prints; this keeps the trace
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (plain_text(self),)

    def __add__(self, other: str) -> TracedStr:
        return join_traced((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> TracedStr:  # tried before str.__add__, as TracedStr is a subclass
        return join_traced((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> TracedStr:
        times = max(0, count.__index__())
        check_size(len(self) * times)
        if len(self.runs) <= 1:
            return traced(plain_text(self) * times, self.runs[0][1] if self.runs else None)
        check_items(times * len(self.runs))
        return join_traced((self,) * times)

    __rmul__ = __mul__

    def join(self, parts: Iterable[str], /) -> TracedStr:
        return join_with(self, parts)

    def __getitem__(self, key: SupportsIndex | slice) -> TracedStr:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step == 1:
                return cut(self, start, max(start, stop))
            if key == _BACKWARDS:
                return join_traced([traced(text[::-1], origin) for text, origin in runs_of(self)][::-1])
            check_items(len(range(start, stop, step)))
            return join_traced([cut(self, at, at + 1) for at in range(start, stop, step)])
        at = range(len(self))[key]
        return cut(self, at, at + 1)

    def __iter__(self) -> Iterator[str]:
        check_items(len(self))
        for at in range(len(self)):
            yield cut(self, at, at + 1)

    def lstrip(self, chars: str | None = None, /) -> TracedStr:
        check_search(self, chars or "")
        return cut(self, len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> TracedStr:
        check_search(self, chars or "")
        return cut(self, 0, len(str.rstrip(self, chars)))

    def strip(self, chars: str | None = None, /) -> TracedStr:
        return self.rstrip(chars).lstrip(chars)

    def removeprefix(self, prefix: str, /) -> TracedStr:
        return cut(self, len(prefix) if self.startswith(prefix) else 0, len(self))

    def removesuffix(self, suffix: str, /) -> TracedStr:
        return cut(self, 0, len(self) - len(suffix) if self.endswith(suffix) else len(self))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        self._check_pieces(sep)
        return self._located(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        check_search(self, sep or "")
        self._check_pieces(sep)
        return self._located(str.rsplit(self, sep, maxsplit), sep)

    def _check_pieces(self, sep: str | None) -> None:
        check_items(self.count(sep) if sep else sum(map(self.count, " \n\t")))

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return tuple(self._located(str.partition(self, sep), ""))  # type: ignore[return-value]

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        check_search(self, sep)
        return tuple(self._located(str.rpartition(self, sep), ""))  # type: ignore[return-value]

    def _located(self, parts: Iterable[str], sep: str | None) -> list[str]:
        """Cut out `parts`, which follow one another with `sep` or (None) white space between them."""
        out: list[str] = []
        start = 0
        for part in parts:
            start = str.index(self, part, start) if sep is None else start
            out.append(cut(self, start, start + len(part)))
            start += len(part) + len(sep or "")
        return out

    def splitlines(self, keepends: bool = False) -> list[str]:
        check_items(self.count("\n"))
        out: list[str] = []
        start = 0
        for whole, part in zip(str.splitlines(self, True), str.splitlines(self, keepends), strict=True):
            out.append(cut(self, start, start + len(part)))
            start += len(whole)
        return out

    def replace(self, old: str, new: str, /, count: SupportsIndex = -1) -> TracedStr:
        times, limit = self.count(old), count.__index__()
        if not times:
            return self
        check_size(len(self) + (times if limit < 0 else min(times, limit)) * (len(new) - len(old)))
        if old:
            return join_with(new, self.split(old, limit))
        return traced(str.replace(self, old, new, limit), UNKNOWN)


def _case_mapping(function: Callable[[str], str]) -> Callable[[TracedStr], TracedStr]:
    """Map by position if the length stays, else run by run, else to UNKNOWN text."""

    @functools.wraps(function)
    def method(self: TracedStr) -> TracedStr:
        text = function(plain_text(self))
        if len(text) == len(self):
            return with_runs(text, self.runs)
        whole = join_traced([traced(function(part), origin) for part, origin in runs_of(self)])
        return whole if whole == text else traced(text, UNKNOWN)

    return method


# text from methods that are not listed here is UNKNOWN
_CASES = ("capitalize", "casefold", "lower", "swapcase", "title", "upper")
for _name in _CASES:
    setattr(TracedStr, _name, _case_mapping(getattr(str, _name)))

TRACED_METHODS = frozenset(name for name in vars(TracedStr) if name[0] != "_" and name != "runs")
CUTTING_METHODS = frozenset((*_CASES, "strip", "lstrip", "rstrip", "removeprefix", "removesuffix"))
"""Traced methods whose result keeps the text's origin: a part of it, or another case."""
_SEARCHES = ("count", "endswith", "find", "index", "rfind", "rindex", "startswith")
ASKING_METHODS = frozenset((*_SEARCHES, *(name for name in dir(str) if name.startswith("is"))))
"""Methods that return a count, a position or a boolean."""
FILTER_METHODS = {"trim": "strip", "upper": "upper", "lower": "lower", "capitalize": "capitalize"}
"""Filters that are methods, too."""


def plain_text(text: str) -> str:
    return _slice(text, slice(None))


def with_runs(text: str, runs: Runs) -> TracedStr:
    self = str.__new__(TracedStr, text)
    self.runs = runs
    if len(text) > SMALL:
        charge((len(text) if text.isascii() else 4 * len(text)) + 128 * len(runs))
    return self


def traced(text: str, origin: Origin | None) -> TracedStr:
    return with_runs(text, ((len(text), origin),) if text else ())


def promoted(text: str) -> TracedStr:
    return text if isinstance(text, TracedStr) else traced(text, None)


def runs_of(text: TracedStr) -> Iterator[tuple[str, Origin | None]]:
    start = 0
    for end, origin in text.runs:
        yield _slice(text, slice(start, end)), origin
        start = end


def cut(source: TracedStr, start: int, stop: int) -> TracedStr:
    runs = source.runs
    if start == 0 and stop == len(source):
        return source
    if len(runs) > 1 and start < stop:
        first = bisect.bisect_left(runs, (start + 1,))  # the first run that ends after `start`
        last = bisect.bisect_left(runs, (stop,), first)  # and the first that reaches `stop`
        runs = (*((end - start, origin) for end, origin in runs[first:last]), (stop - start, runs[last][1]))
    else:
        runs = ((stop - start, runs[0][1]),) if start < stop else ()
    return with_runs(_slice(source, slice(start, stop)), runs)


def join_traced(parts: Iterable[str]) -> TracedStr:
    parts = list(parts)
    runs: list[Run] = []
    start = 0
    last: Any = traced  # no origin is ever this
    for part in parts:
        for end, origin in (
            part.runs if isinstance(part, TracedStr) else ((len(part), None),) if part else ()
        ):
            if origin == last:
                runs[-1] = (start + end, origin)
            else:
                runs.append((start + end, origin))
                last = origin
        start += len(part)
    check_size(start)
    return with_runs("".join(parts), tuple(runs))


def join_with(separator: str, parts: Iterable[Any]) -> TracedStr:
    pieces: list[str] = []
    size = 0
    for index, part in enumerate(parts):
        if not isinstance(part, str):
            raise TypeError(f"sequence item {index}: expected str instance, {type(part).__name__} found")
        pieces += (separator, part) if index else (part,)
        size += len(separator) + len(part)
        check_size(size)
    check_items(len(pieces))
    return join_traced(pieces)
