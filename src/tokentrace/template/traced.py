"""Values that remember where they came from: *boxed* values.

A ``TracedStr`` has an origin for each character; numbers, None and containers have one. An
origin is

- a path such as ``("messages", 2, "content")``: the value came from that field;
- ``None``: the template itself wrote it (scaffold);
- an `InTurn`: any of these, in a message's turn, through a buffer of the template;
- ``UNKNOWN``: derived from fields in a way that cannot be followed. Never trusted, never
  credited.

A number computed from a field's is UNKNOWN. Counts (lengths, positions) are the template's own.
"""

from collections.abc import Iterator
from types import GeneratorType
from typing import Any, cast

from markupsafe import Markup, escape

from ..values.plain import json_like
from .budget import charge, check_bits, check_items, check_size, weigh
from .origin import KEY, UNKNOWN, InTurn, Origin
from .strings import TracedStr, join_traced, plain_text, promoted, traced, with_runs


def _print(self: Any) -> str:
    return traced(repr(self), self.origin)


class TracedInt(int):
    origin: Origin = UNKNOWN
    __str__ = _print


class TracedFloat(float):
    origin: Origin = UNKNOWN
    __str__ = _print


class TracedBool(int):
    """A boolean, as ``bool`` cannot be subclassed. The environment's tests know this type."""

    origin: Origin = UNKNOWN
    __str__ = _print

    def __repr__(self) -> str:
        return "True" if self else "False"


class TracedNone:
    """None with an origin: equal to None, false, and ``is none`` in a template."""

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


class TracedDict(dict[Any, Any]):
    """A dict with traced keys and values, wrapped on first read. `raw`: plain, `texts`: its JSON."""

    __slots__ = ("origin", "raw", "texts")
    origin: Origin
    raw: dict[Any, Any]
    texts: dict[Any, str]

    def __getitem__(self, key: Any) -> Any:
        value = dict.__getitem__(self, key)
        if type(value) not in TRACED_TYPES:
            value = wrap(value, Origin(self.origin + (plain(key),)))
            dict.__setitem__(self, key, value)
        return value

    def get(self, key: Any, default: Any = None, /) -> Any:
        return self[key] if dict.__contains__(self, key) else default

    def __iter__(self) -> Iterator[Any]:
        return map(self._key, dict.__iter__(self))

    def __reversed__(self) -> Iterator[Any]:
        return map(self._key, dict.__reversed__(self))

    def _key(self, key: Any) -> Any:
        return traced(key, self.origin.at(key, KEY)) if type(key) is str else key

    def copy(self) -> dict[Any, Any]:
        check_items(len(self))
        return {key: self[key] for key in self}

    def keys(self) -> Any:
        return self.copy().keys()

    def values(self) -> Any:
        return self.copy().values()

    def items(self) -> Any:
        return self.copy().items()

    __str__ = _print


class TracedList(list[Any]):
    __slots__ = ("origin", "raw", "texts")
    origin: Origin
    raw: list[Any]
    texts: dict[Any, str]
    __str__ = _print


class TracedMarkup(TracedStr):
    """The result of ``|safe`` and ``|escape``. Like Markup, it escapes added plain text."""

    __slots__ = ()

    def __html__(self) -> str:
        return plain_text(self)

    def __getitem__(self, key: Any) -> TracedStr:
        return as_markup(super().__getitem__(key))

    def __repr__(self) -> str:
        return f"Markup({str.__repr__(self)})"

    def __add__(self, other: str) -> TracedStr:
        return as_markup(join_traced((self, _escaped(other)))) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> TracedStr:
        return as_markup(join_traced((_escaped(other), self))) if isinstance(other, str) else NotImplemented


def as_markup(text: str) -> TracedMarkup:
    self = str.__new__(TracedMarkup, plain_text(text))
    self.runs = promoted(text).runs
    return self


def _escaped(text: str) -> str:
    if isinstance(text, TracedMarkup):
        return text
    result = str(escape(plain_text(text)))
    return text if result == text else opaque(result) if is_traced(text) else result


PLAIN_TYPES: dict[type, type] = {
    **{TracedList: list, TracedInt: int, TracedFloat: float},
    **{TracedBool: int, TracedNone: type(None), TracedStr: str, TracedMarkup: Markup},
}
"""The plain types that templates see instead of ours, except for dicts."""
TRACED_TYPES = frozenset({*PLAIN_TYPES, TracedDict} - {TracedMarkup})
_TRACED = tuple(TRACED_TYPES - {TracedStr})
_NUMBERS: dict[type, Any] = {bool: TracedBool, int: TracedInt, float: TracedFloat}


def wrap(value: Any, origin: Origin) -> Any:
    """`value` with its origin; converted first if not JSON-like, as in transformers."""
    kind = type(value)
    if kind is str:
        return traced(value, origin)
    if kind is dict:
        result = TracedDict(value)
        result.origin, result.raw = origin, value
        return result
    if kind is list or kind is tuple:
        wrapped = [wrap(item, Origin(origin + (index,))) for index, item in enumerate(value)]
        if kind is tuple:  # it prints differently from a list
            return tuple(wrapped)
        items = TracedList(wrapped)
        items.origin, items.raw = origin, value
        return items
    if value is None:
        return TracedNone(origin)
    if kind in _NUMBERS:
        number = _NUMBERS[kind](value)
        number.origin = origin
        return number
    if kind in TRACED_TYPES:
        return value
    return wrap(json_like(value, f"<{kind.__name__}>"), origin)  # a harmless name if JSON has no equivalent


def plain(value: Any) -> Any:
    if isinstance(value, TracedStr):
        return plain_text(value)
    for base, kind in _NUMBERS.items():
        if isinstance(value, kind):
            return base(value)
    return None if isinstance(value, TracedNone) else value


def is_traced(value: Any) -> bool:
    """True if any part of `value` carries a trace, or cannot be inspected."""
    seen: set[int] = set()

    def has_trace(part: Any) -> bool:
        if isinstance(part, TracedStr):
            return any(origin is not None for _, origin in part.runs)
        if isinstance(part, _TRACED):
            return True
        if part is None or isinstance(part, (str, int, float, range)) or id(part) in seen:
            return False
        seen.add(id(part))  # a template can nest a list in itself many times over
        if isinstance(part, dict):
            return any(map(has_trace, dict.keys(part))) or any(map(has_trace, dict.values(part)))
        return any(map(has_trace, part)) if isinstance(part, (list, tuple, set, frozenset)) else True

    return has_trace(value)


def derived(result: Any, *values: Any) -> Any:
    """The result of an operation, UNKNOWN for traced `values`. Raises TooLarge."""
    if isinstance(result, int):
        check_bits(result.bit_length())
    return opaque(result) if is_traced(values) else result


def opaque(value: Any) -> Any:
    """`value` with text and numbers of unknown origin, except for parts that come from a field."""
    kind = type(value)
    if isinstance(value, TracedStr):
        text = with_runs(plain_text(value), tuple((end, _doubt(origin)) for end, origin in value.runs))
        return as_markup(text) if kind is TracedMarkup else text
    if isinstance(value, Markup):
        return as_markup(traced(str(value), UNKNOWN))
    if isinstance(value, str):
        return traced(value, UNKNOWN)
    if kind in _NUMBERS:
        return value if kind is bool else _NUMBERS[kind](value)
    if kind in (list, tuple, set, frozenset):
        check_items(len(value))
        return kind(map(opaque, value))
    if kind is range:
        return [opaque(number) for number in value]
    if kind is dict:
        check_items(len(value))
        return {opaque(key): opaque(item) for key, item in value.items()}
    if kind is GeneratorType or isinstance(value, (map, filter, zip, reversed)):
        return map(opaque, value)
    return value


def _doubt(origin: Origin | None) -> Origin:
    if isinstance(origin, InTurn):
        return origin if origin.origin is not None else InTurn.within(UNKNOWN, origin.turn)
    return UNKNOWN if origin is None else origin


def text_of(value: Any) -> str:
    """``str(value)`` with its trace."""
    kind = type(value)
    if kind is TracedStr or kind is str:
        return cast(str, value)
    if isinstance(value, TracedStr):
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
    charge(len(text))
    return text
