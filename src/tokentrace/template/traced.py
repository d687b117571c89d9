"""Values that remember where they came from.

A template is run with its messages wrapped in these types. A ``TracedStr`` is a ``str`` that also carries
*runs*: ``(end, origin)`` pairs that cover it without gaps. An origin is

- a path such as ``("messages", 2, "content")``: the text came from that field;
- ``None``: the template itself wrote it (scaffold);
- a `TurnScaffold`: scaffold that is known to belong to a message (it went through a buffer of the template);
- ``UNKNOWN``: it was derived from fields in a way that cannot be followed. Never trusted, never credited.

Every method that cuts, joins or maps text keeps the runs exact, or says UNKNOWN. So do numbers: what is computed
from a field's number is a number of unknown origin. Counts (lengths, positions) are the template's own.
"""

from __future__ import annotations

import bisect
import codecs
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import GeneratorType
from typing import Any, Final, SupportsIndex, TypeAlias, cast

from markupsafe import Markup

from .budget import check_count, check_pieces, check_size, dear, made, searched, spend, weigh
from .origin import KEY, UNKNOWN, Origin, TurnScaffold

Run: TypeAlias = tuple[int, Origin | None]
Runs: TypeAlias = tuple[Run, ...]

_new: Callable[[type[TracedStr], str], TracedStr]
_slice = str.__getitem__


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
            return traced(_slice(self, slice(None)) * times, self.runs[0][1])
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

    def lstrip(self, chars: str | None = None, /) -> TracedStr:
        if chars is not None and len(chars) > 64:
            searched(self, chars)
        return cut(self, len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> TracedStr:
        if chars is not None and len(chars) > 64:
            searched(self, chars)
        return cut(self, 0, len(str.rstrip(self, chars)))

    def strip(self, chars: str | None = None, /) -> TracedStr:
        if chars is not None and len(chars) > 64:
            searched(self, chars)
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
        lines = str.splitlines(self, True)
        check_pieces(len(lines))
        for whole, part in zip(lines, str.splitlines(self, keepends), strict=True):
            out.append(cut(self, at, at + len(part)))
            at += len(whole)
        return out

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        str.partition("", sep)  # refuses what is no separator
        at = str.find(self, sep)
        if at < 0:
            return self, "", ""
        return cut(self, 0, at), cut(self, at, at + len(sep)), cut(self, at + len(sep), len(self))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        str.partition("", sep)
        searched(self, sep)
        at = str.rfind(self, sep)
        if at < 0:
            return "", "", self
        return cut(self, 0, at), cut(self, at, at + len(sep)), cut(self, at + len(sep), len(self))

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
        text = str.zfill(_slice(self, slice(None)), width)
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

    def lower(self) -> TracedStr:
        return mapped(self, str.lower)

    def upper(self) -> TracedStr:
        return mapped(self, str.upper)

    def casefold(self) -> TracedStr:
        return mapped(self, str.casefold)

    def swapcase(self) -> TracedStr:
        return mapped(self, str.swapcase)

    def title(self) -> TracedStr:
        return mapped(self, str.title)

    def capitalize(self) -> TracedStr:
        return mapped(self, str.capitalize)

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

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> TracedBytes:
        _check_codec(encoding, len(self))
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
        return str, (_slice(self, slice(None)),)


_new = str.__new__
_BACKWARDS: Final = slice(None, None, -1)


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
    starts = [0, *(end for end, _ in source.runs[:-1])]
    runs = tuple(
        (size - start, origin) for start, (_, origin) in zip(reversed(starts), reversed(source.runs), strict=True)
    )
    return with_runs(_slice(source, _BACKWARDS), runs if size else ())


def _check_codec(encoding: str, size: int) -> None:
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


class TracedMarkup(TracedStr):
    """What ``|safe`` and ``|escape`` give: text that escapes whatever plain text is added to it, as Markup does."""

    __slots__ = ()

    def __html__(self) -> TracedMarkup:
        return self

    def __repr__(self) -> str:
        return f"Markup({str.__repr__(self)})"

    def __add__(self, other: str) -> TracedStr:
        return as_markup(join_traced((self, escaped(other)))) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> TracedStr:
        return as_markup(join_traced((escaped(other), self))) if isinstance(other, str) else NotImplemented

    def __getitem__(self, key: SupportsIndex | slice) -> TracedStr:
        return as_markup(TracedStr.__getitem__(self, key))

    def __mod__(self, values: Any) -> str:
        return as_markup(traced(str(Markup(_slice(self, slice(None))) % values), UNKNOWN))

    def strip(self, chars: str | None = None, /) -> TracedStr:
        return as_markup(TracedStr.strip(self, chars))

    def lower(self) -> TracedStr:
        return as_markup(TracedStr.lower(self))

    def upper(self) -> TracedStr:
        return as_markup(TracedStr.upper(self))

    def capitalize(self) -> TracedStr:
        return as_markup(TracedStr.capitalize(self))

    def method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A method of Markup: text it is given is escaped, text it returns is markup."""
        if name in ("striptags", "unescape"):
            dear(len(self))
        own: Any = None
        mine = getattr(traced_copy(self), name, None)
        if mine is not None:  # asked first: it knows what is too large
            with contextlib.suppress(TypeError):
                own = mine(*(escaped(value) if isinstance(value, str) else value for value in args), **kwargs)
        result = getattr(Markup(_slice(self, slice(None))), name)(*args, **kwargs)
        if not isinstance(result, (str, list, tuple)):
            return doubted(result) if isinstance(result, bytes) else result
        if own != result:
            own = traced(result, UNKNOWN) if isinstance(result, str) else [traced(part, UNKNOWN) for part in result]
        return as_markup(own) if isinstance(own, str) else type(result)(map(as_markup, own))


_ESCAPES: Final = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "'": "&#39;", '"': "&#34;"}


def traced_copy(text: TracedStr) -> TracedStr:
    return with_runs(_slice(text, slice(None)), text.runs)


def as_markup(text: str) -> TracedMarkup:
    self = str.__new__(TracedMarkup, _slice(text, slice(None)))
    self.runs = text.runs if isinstance(text, TracedStr) else traced(text, None).runs
    return self


def escaped(text: str) -> str:
    """The text with HTML's characters escaped, unless it is markup already."""
    if isinstance(text, TracedMarkup) or not any(char in text for char in _ESCAPES):
        return text
    check_pieces(len(text))
    return join_traced([derived(char, _ESCAPES.get(char, char)) for char in text])


class TracedBytes(bytes):
    """What ``str.encode`` gives inside a template: whatever is made of it is of unknown origin."""

    def __getitem__(self, key: Any) -> Any:
        return doubted(bytes.__getitem__(self, key))

    def __iter__(self) -> Iterator[Any]:
        check_pieces(len(self))
        return map(doubted, bytes.__iter__(self))

    def __add__(self, other: Any) -> Any:
        return doubted(bytes.__add__(self, other))

    def __radd__(self, other: Any) -> Any:
        return doubted(other + bytes(memoryview(self))) if isinstance(other, bytes) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> Any:
        return doubted(bytes.__mul__(self, count))

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> Any:
        return doubted(bytes.__mod__(self, values))

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        _check_codec(encoding, len(self))
        return traced(bytes.decode(self, encoding, errors), UNKNOWN)


# -- numbers, booleans, None


class TracedInt(int):
    origin: Origin = UNKNOWN

    def __str__(self) -> str:
        return traced(int.__repr__(self), self.origin)


class TracedFloat(float):
    origin: Origin = UNKNOWN

    def __str__(self) -> str:
        return traced(float.__repr__(self), self.origin)


class TracedBool(int):
    """A boolean with an origin. ``bool`` cannot be subclassed; the tests of the environment know this type."""

    origin: Origin = UNKNOWN

    def __str__(self) -> str:
        return traced("True" if self else "False", self.origin)

    def __repr__(self) -> str:
        return "True" if self else "False"


def _doubt_results(kind: type[int] | type[float]) -> None:
    """Whatever is computed from a traced number is a number of unknown origin."""

    def doubting(computed: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *values: doubted(computed(*values))

    base = kind.__mro__[1]
    both = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "divmod")
    for name in ("neg", "pos", "abs", "round", "trunc", "floor", "ceil", *both, *(f"r{name}" for name in both)):
        computed = getattr(base, f"__{name}__", None)
        if computed is not None:
            setattr(kind, f"__{name}__", doubting(computed))


for _kind in (TracedInt, TracedFloat, TracedBool):
    _doubt_results(_kind)


class TracedNone:
    """None with an origin. Equal to None and false, and ``is none`` in a template."""

    __slots__ = ("origin",)

    def __init__(self, origin: Origin) -> None:
        self.origin = origin

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, TracedNone)

    def __hash__(self) -> int:
        return hash(None)

    def __str__(self) -> str:
        return traced("None", self.origin)

    def __repr__(self) -> str:
        return "None"


# -- containers


class TracedDict(dict[Any, Any]):
    """A dict whose keys and values are traced. Values are wrapped when they are first looked at."""

    __slots__ = ("memo", "origin", "raw")
    origin: Origin
    raw: dict[Any, Any]
    """What was wrapped."""
    memo: dict[Any, Any]
    """JSON already made of it, by options; only set where the same dict is rendered again and again."""

    def __getitem__(self, key: Any) -> Any:
        value = dict.__getitem__(self, key)
        if type(value) not in TRACED_TYPES:
            value = wrap(value, Origin(self.origin + (key if type(key) is str else plain(key),)))
            dict.__setitem__(self, key, value)
        return value

    def get(self, key: Any, default: Any = None, /) -> Any:
        return self[key] if dict.__contains__(self, key) else default

    def __iter__(self) -> Iterator[Any]:
        return (self._key(key) for key in dict.__iter__(self))

    def __reversed__(self) -> Iterator[Any]:
        return (self._key(key) for key in dict.__reversed__(self))

    def _key(self, key: Any) -> Any:
        return traced(key, Origin(self.origin + (key, KEY))) if type(key) is str else key

    def keys(self) -> Any:
        check_pieces(len(self))
        return dict.fromkeys(self).keys()

    def values(self) -> Any:
        check_pieces(len(self))
        return _Values(self)

    def items(self) -> Any:
        check_pieces(len(self))
        return {key: self[key] for key in self}.items()

    def copy(self) -> dict[Any, Any]:
        check_pieces(len(self))
        return {key: self[key] for key in self}

    def __or__(self, other: Any) -> Any:
        return {**self.copy(), **other}

    def __ror__(self, other: Any) -> Any:
        return {**other, **self.copy()}

    def __str__(self) -> str:
        return traced(dict.__repr__(self), self.origin)


class _Values(list[Any]):
    """``dict.values()`` of a traced dict; prints as the real one does."""

    def __init__(self, source: TracedDict) -> None:
        super().__init__(source[key] for key in dict.__iter__(source))

    def __repr__(self) -> str:
        return f"dict_values({list.__repr__(self)})"


class TracedList(list[Any]):
    """A list whose items are traced (they are wrapped at once)."""

    __slots__ = ("origin",)
    origin: Origin

    def __str__(self) -> str:
        return traced(list.__repr__(self), self.origin)


class TracedTuple(tuple[Any, ...]):
    """A tuple whose items are traced; it prints as one, where a list would print as a list."""

    origin: Origin = UNKNOWN

    def __str__(self) -> str:
        return traced(tuple.__repr__(self), self.origin)


class UnknownRange(list[Any]):
    """``range(…)`` up to a number of a field: its numbers are of unknown origin. Prints as the real one does."""

    def __init__(self, source: range) -> None:
        super().__init__(map(doubted, source))
        self.source = source

    def __getitem__(self, key: Any) -> Any:
        return UnknownRange(self.source[key]) if isinstance(key, slice) else list.__getitem__(self, key)

    def __repr__(self) -> str:
        return repr(self.source)


TRACED_TYPES: Final = frozenset(
    {TracedStr, TracedDict, TracedList, TracedTuple, TracedInt, TracedFloat, TracedBool, TracedNone}
)


def wrap(value: Any, origin: Origin) -> Any:
    """`value` with its origin. What is not JSON-like is reduced to it first, as transformers does."""
    kind = type(value)
    if kind is str:
        return traced(value, origin)
    if kind is dict:
        result = TracedDict(value)
        result.origin = origin
        result.raw = value
        return result
    if kind is list or kind is tuple:
        wrapped = [wrap(item, Origin(origin + (index,))) for index, item in enumerate(value)]
        items = TracedList(wrapped) if kind is list else TracedTuple(wrapped)
        items.origin = origin
        return items
    if value is None:
        return TracedNone(origin)
    number: TracedBool | TracedInt | TracedFloat
    if kind is bool:
        number = TracedBool(value)
    elif kind is int:
        number = TracedInt(value)
    elif kind is float:
        number = TracedFloat(value)
    elif kind in TRACED_TYPES:
        return value
    else:
        return wrap(json_like(value), origin)
    number.origin = origin
    return number


def json_like(value: Any) -> Any:
    """The JSON-like value that stands for `value` in a template; an inert ``"<Type>"`` where there is none."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list):
        return list(value)
    if isinstance(value, tuple):
        return tuple(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):
        return dict(value.model_dump())
    if callable(getattr(value, "item", None)) and getattr(value, "shape", None) == ():
        return value.item()  # a NumPy scalar
    return f"<{type(value).__name__}>"


def plain(value: Any) -> Any:
    """The value without its trace (for keys of paths and for error texts)."""
    if isinstance(value, TracedStr):
        return _slice(value, slice(None))
    if isinstance(value, TracedBool):
        return bool(value)
    if isinstance(value, TracedInt):
        return int(value)
    if isinstance(value, TracedFloat):
        return float(value)
    if isinstance(value, TracedNone):
        return None
    return value


_TRACED: Final = (
    *(TracedStr, TracedDict, TracedList, TracedTuple, TracedNone, TracedBytes, TracedInt, TracedFloat, TracedBool),
)


def is_traced(value: Any) -> bool:
    """Whether any part of `value` carries a trace, or may: what cannot be looked into is not vouched for.

    Looks at each part once, however often it is shared: a template can nest a list in itself many times over.
    """
    if isinstance(value, _TRACED):
        return not isinstance(value, TracedStr) or any(origin is not None for _, origin in value.runs)
    if value is None or isinstance(value, (str, int, float)):
        return False
    seen: set[int] = set()
    queue = [value]
    walked = 0
    while queue:
        part = queue.pop()
        walked += 1
        if isinstance(part, TracedStr):
            if any(origin is not None for _, origin in part.runs):
                return True
            continue
        if isinstance(part, _TRACED):
            return True
        if part is None or isinstance(part, (str, int, float, range)) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, dict):
            queue += dict.keys(part)
            queue += dict.values(part)
        elif isinstance(part, (list, tuple, set, frozenset)):
            queue += part
        else:
            return True
    spend(walked >> 2)
    return False


def doubted(value: Any) -> Any:
    """`value`, made out of traced values in a way that nobody has proven to keep the trace: text and numbers in it
    are of unknown origin. Parts that are known to come from a field stay that field's."""
    kind = type(value)
    if isinstance(value, TracedStr):
        scaffold = (type(None), TurnScaffold)
        runs = tuple((end, UNKNOWN if type(origin) in scaffold else origin) for end, origin in value.runs)
        if runs == value.runs:
            return value
        text = with_runs(_slice(value, slice(None)), runs)
        return as_markup(text) if kind is TracedMarkup else text
    if value is None or kind is bool or kind in TRACED_TYPES:
        return value
    if isinstance(value, str):
        return traced(_slice(value, slice(None)), UNKNOWN)
    if isinstance(value, int):
        return TracedInt(value)
    if isinstance(value, float):
        return TracedFloat(value)
    if isinstance(value, bytes):
        return value if kind is TracedBytes else TracedBytes(value)
    if kind in (list, tuple, set, frozenset):
        check_pieces(len(value))
        return kind(map(doubted, value))
    if kind is dict:
        check_pieces(len(value))
        return {doubted(key): doubted(item) for key, item in value.items()}
    if kind is GeneratorType or isinstance(value, (map, filter, zip, reversed)):
        return map(doubted, value)
    return value


def text_of(value: Any) -> str:
    """What ``str(value)`` prints, with its trace: the one way a value becomes text inside a template."""
    kind = type(value)
    if kind is TracedStr or kind is str:
        return cast(str, value)
    if isinstance(value, TracedStr):  # what a generation tag wrote
        return with_runs(_slice(value, slice(None)), value.runs)
    if value is None or isinstance(value, (int, float)):
        return str(value)
    weigh(value)
    text = str(value)
    check_size(len(text))
    if type(text) is TracedStr:
        return text
    if is_traced(value):
        return traced(text, UNKNOWN)
    made(len(text))
    return text
