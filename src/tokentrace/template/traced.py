"""Values that remember where they came from.

A template is run with its messages wrapped in these types. A ``TracedStr`` is a ``str`` that also carries
*runs*: ``(end, origin)`` pairs that cover it without gaps. An origin is

- a path such as ``("messages", 2, "content")``: the text came from that field;
- ``None``: the template itself wrote it (scaffold);
- an `InTurn`: any of these, in the turn of a message (the text went through a buffer of the template);
- ``UNKNOWN``: it was derived from fields in a way that cannot be followed. Never trusted, never credited.

Every method that cuts, joins or maps text keeps the runs exact, or says UNKNOWN. So do numbers: what is computed
from a field's number is a number of unknown origin. Counts (lengths, positions) are the template's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import GeneratorType
from typing import Any, Final, Protocol, cast

from ..conversation.values import json_like
from .budget import check_pieces, check_size, made, spend, weigh
from .markup import TracedMarkup, as_markup
from .origin import KEY, UNKNOWN, InTurn, Origin
from .strings import TracedStr, check_codec, plain_text, traced, with_runs


class _Printed(Protocol):
    origin: Origin


def _print(self: _Printed) -> str:
    """What ``str(…)`` gives of a value that came from a field: text of that field."""
    return traced(repr(self), self.origin)


# -- numbers, booleans, None, bytes


class TracedInt(int):
    origin: Origin = UNKNOWN
    __str__ = _print


class TracedFloat(float):
    origin: Origin = UNKNOWN
    __str__ = _print


class TracedBool(int):
    """A boolean with an origin. ``bool`` cannot be subclassed; the tests of the environment know this type."""

    origin: Origin = UNKNOWN
    __str__ = _print

    def __repr__(self) -> str:
        return "True" if self else "False"


class TracedBytes(bytes):
    """What ``str.encode`` gives inside a template: whatever is made of it is of unknown origin."""

    def __iter__(self) -> Iterator[Any]:
        check_pieces(len(self))
        return map(doubted, bytes.__iter__(self))

    def __radd__(self, other: Any) -> Any:
        return doubted(other + bytes(memoryview(self))) if isinstance(other, bytes) else NotImplemented

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        check_codec(encoding, len(self))
        return traced(bytes.decode(self, encoding, errors), UNKNOWN)


def _doubt_results(kind: type, names: Iterable[str]) -> None:
    """Whatever is computed from a traced number, or made of bytes, is of unknown origin."""

    def doubting(computed: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *values: doubted(computed(*values))

    for name in names:
        computed = getattr(kind.__mro__[1], f"__{name}__", None)
        if computed is not None:
            setattr(kind, f"__{name}__", doubting(computed))


_BOTH_SIDES: Final = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "divmod")
for _kind in (TracedInt, TracedFloat, TracedBool):
    _doubt_results(_kind, ("neg", "pos", "abs", "round", "trunc", "floor", "ceil", *_BOTH_SIDES))
    _doubt_results(_kind, (f"r{name}" for name in _BOTH_SIDES))
_doubt_results(TracedBytes, ("getitem", "add", "mul", "rmul", "mod"))


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

    __str__ = _print

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

    __str__ = _print


class _Values(list[Any]):
    """``dict.values()`` of a traced dict; prints as the real one does."""

    def __init__(self, source: TracedDict) -> None:
        super().__init__(source[key] for key in dict.__iter__(source))

    def __repr__(self) -> str:
        return f"dict_values({list.__repr__(self)})"


class TracedList(list[Any]):
    """A list whose items are traced (they are wrapped at once)."""

    __slots__ = ("memo", "origin")
    origin: Origin
    memo: dict[Any, Any]
    """As a `TracedDict` has it; also what loops wrote of it (see `remembered`)."""

    __str__ = _print


class TracedTuple(tuple[Any, ...]):
    """A tuple whose items are traced; it prints as one, where a list would print as a list."""

    origin: Origin = UNKNOWN

    __str__ = _print


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
        return wrap(json_like(value, f"<{kind.__name__}>"), origin)  # an inert name where JSON has nothing for it
    number.origin = origin
    return number


def plain(value: Any) -> Any:
    """The value without its trace (for keys of paths and for error texts)."""
    if isinstance(value, TracedStr):
        return plain_text(value)
    for kind, base in ((TracedBool, bool), (TracedInt, int), (TracedFloat, float)):
        if isinstance(value, kind):
            return base(value)
    return None if isinstance(value, TracedNone) else value


_TRACED: Final = (*TRACED_TYPES, TracedBytes)


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
    """`value`, made out of traced values in a way that is not proven to keep the trace: text and numbers in it
    are of unknown origin. Parts that are known to come from a field stay that field's."""
    kind = type(value)
    if isinstance(value, TracedStr):
        runs = tuple((end, _doubted_origin(origin)) for end, origin in value.runs)
        if runs == value.runs:
            return value
        text = with_runs(plain_text(value), runs)
        return as_markup(text) if kind is TracedMarkup else text
    if value is None or kind is bool or kind in TRACED_TYPES:
        return value
    if isinstance(value, str):
        return traced(plain_text(value), UNKNOWN)
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


def _doubted_origin(origin: Origin | None) -> Origin:
    if isinstance(origin, InTurn):
        return origin if origin.origin is not None else InTurn.within(UNKNOWN, origin.turn)
    return UNKNOWN if origin is None else origin


def text_of(value: Any) -> str:
    """What ``str(value)`` prints, with its trace: the one way a value becomes text inside a template."""
    kind = type(value)
    if kind is TracedStr or kind is str:
        return cast(str, value)
    if isinstance(value, TracedStr):  # what a generation tag wrote
        return with_runs(plain_text(value), value.runs)
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
