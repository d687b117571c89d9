"""Jinja's filters and tests over traced values.

A filter is rewritten here, or it hands out what it was given as it was given, or else what it makes out of traced
values is of unknown origin: text, numbers, and text and numbers in containers. There is no fourth way, so no filter
can launder text. Each pays for the size of what it goes through (`budget.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import GeneratorType
from typing import Any, Final

from jinja2.filters import do_title, do_truncate, do_xmlattr
from jinja2.utils import pass_environment, pass_eval_context

from .budget import (
    TooLarge,
    check_bits,
    check_pieces,
    check_size,
    counted,
    dear,
    listed,
    looked_at,
    spend,
    weigh,
    weigh_key,
)
from .formatting import percent_format
from .jsonify import dumps
from .markup import TracedMarkup, as_markup, escaped
from .origin import UNKNOWN, InTurn, Origin
from .strings import TracedStr, join_traced, mapped, plain_text, promoted, with_runs
from .traced import TracedBool, TracedDict, TracedInt, TracedList, TracedNone, doubted, is_traced, plain, text_of

_MAX_COUNT: Final = 1_000_000
_MAX_DIGITS: Final = 10_000

_AS_IT_IS: Final = frozenset({"attr", "count", "d", "default", "first", "last", "length", "random", "reverse"})
"""Filters that hand out a part of their input, or its length, and cost next to nothing."""
_ONE_BY_ONE: Final = frozenset(
    ("batch", "items", "map", "reject", "rejectattr", "select", "selectattr", "slice"),
)
"""Filters that hand out their input item by item (what ``map`` does to an item, it does through a filter)."""
_REGROUPING: Final = frozenset({"batch", "items", "slice"})
_ALL_AT_ONCE: Final = frozenset({"dictsort", "groupby", "max", "min", "sort", "unique"})
"""Filters that hand out their input in another order: they compare or hash all of it."""
_SPELLING: Final = frozenset({"striptags"})
"""Filters that make letters of digits (``&#60;`` is ``<``): counts are digits, and a user decides on counts."""
_QUADRATIC: Final = frozenset({"pprint", "striptags", "sum", "urlize", "wordwrap"})
"""Filters whose time may grow with the square of their input."""


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return dumps(
        value,
        ensure_ascii=bool(ensure_ascii),
        indent=indent if isinstance(indent, str) else plain(indent),
        separators=separators,
        sort_keys=bool(sort_keys),
    )


def _join(context: Any, value: Any, d: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        from jinja2.filters import make_attrgetter

        value = map(make_attrgetter(context.environment, attribute), value)
    pieces: list[str] = []
    separator = text_of(d)
    size = 0
    for index, item in enumerate(value):
        text = text_of(item)
        size += len(separator) + len(text)
        if index:
            pieces.append(separator)
        pieces.append(text)
        check_size(size)
    check_pieces(len(pieces))
    return join_traced(pieces)


def _indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    if not isinstance(s, str):
        raise TypeError(f"cannot indent a {type(s).__name__}")
    if not isinstance(width, str):
        check_size(width)
    margin = width if isinstance(width, str) else " " * width
    lines = join_traced((s, "\n")).splitlines()
    check_size(len(margin) * len(lines))
    pieces: list[str] = [margin] if first else []
    for index, line in enumerate(lines):
        if index:
            pieces.append("\n")
            if line or blank:
                pieces.append(margin)
        pieces.append(line)
    return join_traced(pieces)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise TypeError("can't handle positional and keyword arguments at the same time")
    return percent_format(text_of(value), kwargs or args)


def _trim(value: Any, chars: str | None = None) -> str:
    return (value if type(value) is TracedStr else _soft(value)).strip(chars)


def _soft(value: Any) -> str:
    """Any value as text; markup stays markup."""
    return value if isinstance(value, TracedMarkup) else promoted(text_of(value))


def _changing_case(name: str) -> Callable[[Any], str]:
    def method(value: Any) -> str:
        return getattr(_soft(value), name)()  # type: ignore[no-any-return]

    method.__qualname__ = name
    return method


def _safe(value: Any) -> str:
    return as_markup(text_of(value))


def _wordcount(function: Callable[[Any], Any], value: Any) -> Any:
    text = text_of(value)
    check_pieces(len(text) >> 1)  # a list of all the words is made
    return function(text)


def _title(value: Any) -> str:
    text = text_of(value)
    check_pieces(len(text) >> 2)
    return mapped(text, do_title) if isinstance(text, TracedStr) else do_title(text)


def _center(value: Any, width: int = 80) -> str:
    return _soft(value).center(width)


def _escape(value: Any) -> str:
    return value if isinstance(value, TracedMarkup) else as_markup(escaped(text_of(value)))


def _forceescape(value: Any) -> str:
    text = text_of(value)
    return as_markup(escaped(with_runs(plain_text(text), promoted(text).runs)))


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text = promoted(text_of(value))
    return text.replace(text_of(old), text_of(new), -1 if count is None else count)


def _truncate(
    environment: Any, s: Any, length: int = 255, killwords: bool = False, end: str = "...", leeway: int | None = None
) -> str:
    text = promoted(s) if isinstance(s, str) else s
    return do_truncate(environment, text, length, killwords, end, leeway)


def _xmlattr(context: Any, d: Any, autospace: bool = True) -> str:
    weigh(d)
    text = do_xmlattr(context, {key: plain(value) for key, value in d.items()}, autospace)
    return doubted(text) if text and is_traced(d) else text


_REWRITTEN: Final[dict[str, Callable[..., Any]]] = {
    "tojson": tojson,
    "join": pass_eval_context(_join),
    "indent": _indent,
    "format": _format,
    "title": _title,
    "center": _center,
    "string": text_of,
    "safe": _safe,
    "e": _escape,
    "escape": _escape,
    "forceescape": _forceescape,
    "replace": _replace,
    "truncate": pass_environment(_truncate),
    "xmlattr": pass_eval_context(_xmlattr),
    "trim": _trim,
    **{name: _changing_case(name) for name in ("upper", "lower", "capitalize")},
    "list": listed,
}


def traced_filters(originals: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """The filters of the tracing environment: same names, same text, traces kept or marked unknown."""
    return {name: _REWRITTEN.get(name) or _guarded(name, function) for name, function in originals.items()}


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if name in _AS_IT_IS:
        return function
    if name == "wordcount":
        return functools.partial(_wordcount, function)
    if name in _ONE_BY_ONE:
        return _surrounded(name, function, _count_items, _handed_out)
    if name in _ALL_AT_ONCE:
        return _surrounded(name, function, _weigh_items, _handed_out)
    return _surrounded(name, function, _weigh_given, _doubt_result)


def _surrounded(
    name: str,
    function: Callable[..., Any],
    charge: Callable[[str, list[Any], dict[str, Any]], None],
    finish: Callable[[str, Any, list[Any]], Any],
) -> Callable[..., Any]:
    """A filter that is charged for what it is given (`charge` may replace it), and whose result is seen to."""
    before = _machinery(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        given = list(args[before:])
        charge(name, given, kwargs)
        return finish(name, function(*args[:before], *given, **kwargs), [*given, *kwargs.values()])

    return wrapper


def _count_items(name: str, given: list[Any], kwargs: dict[str, Any]) -> None:
    if name in _REGROUPING:
        _check_counts(given[1:], kwargs, _MAX_COUNT)
    elif given and given[0]:  # items that are dropped count as well
        given[0] = counted(given[0])


def _handed_out(name: str, result: Any, given: list[Any]) -> Any:
    return (
        counted(result) if name in _REGROUPING or (type(result) is GeneratorType and name in _ALL_AT_ONCE) else result
    )


def _weigh_items(name: str, given: list[Any], kwargs: dict[str, Any]) -> None:
    """Comparing n items takes n log n comparisons, each of which may go through all of an item."""
    if given and not isinstance(given[0], (str, Mapping)):
        given[0] = listed(given[0])
    for value in (*given, *kwargs.values()):
        size = weigh(value)
        parts = len(value) if isinstance(value, (list, dict)) else 1
        spend((size * parts.bit_length() >> 8) + parts)
        check_pieces(size >> 3)  # keys to compare by are made of all the text
        for part in value if isinstance(value, list) else ():
            weigh_key(part)


def _weigh_given(name: str, given: list[Any], kwargs: dict[str, Any]) -> None:
    if name == "round":
        _check_counts(given[1:], kwargs, _MAX_DIGITS)
    values = (*given, *kwargs.values())
    size = sum(map(weigh, values))
    if name in _QUADRATIC:
        dear(size)
        check_size(size * max(1, *(len(value) for value in values[1:] if isinstance(value, str)), 1))


def _doubt_result(name: str, result: Any, given: list[Any]) -> Any:
    """Whatever comes of traced values is of unknown origin."""
    if isinstance(result, int):
        check_bits(result.bit_length())
    return doubted(result) if name in _SPELLING or any(map(is_traced, given)) else result


def _machinery(function: Callable[..., Any]) -> int:
    """How many arguments Jinja itself puts before the value: its context, or its environment."""
    return 0 if getattr(function, "jinja_pass_arg", None) is None else 1


def _check_counts(args: list[Any], kwargs: Mapping[str, Any], most: int) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > most:
            raise TooLarge(f"{value} is too large an argument for a filter")


# -- tests


def within(item: Any, container: Any) -> bool:
    """``item in container``, paid for: a search through text, or a comparison with each item."""
    if type(container) is TracedDict and type(item) is str:
        return dict.__contains__(container, item)
    if isinstance(container, (str, bytes)):
        if len(container) > 4096:
            looked_at(container)
    elif isinstance(container, (list, tuple)):
        if len(container) > 64 or isinstance(item, (list, tuple, dict)):
            size = weigh(item)
            spend((len(container) >> 4) + (len(container) * size >> 12))
            if isinstance(item, (list, tuple, dict)):
                weigh(container)
    else:
        weigh_key(item)
    return item in container


def _boolean(value: Any) -> bool:
    return value is True or value is False or isinstance(value, TracedBool)


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not _boolean(value)


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, (TracedNone, TracedBool)) or isinstance(other, (TracedNone, TracedBool)):
        return plain(value) is plain(other)
    if value is other:
        return True
    if isinstance(value, TracedInt) and plain(value) is plain(other):
        return True
    origin = _whole_origin(value)
    return (
        origin not in (None, UNKNOWN)
        and type(value) is type(other)
        and origin == _whole_origin(other)
        and value == other
    )


def _whole_origin(value: Any) -> Origin | None:
    """The field that a boxed value is, or may be: the same field may be boxed twice."""
    if isinstance(value, TracedStr):
        origin = value.runs[0][1] if len(value.runs) == 1 else None
        return origin.origin if isinstance(origin, InTurn) else origin
    return value.origin if isinstance(value, (TracedDict, TracedList, TracedInt)) else None


_SAFE_KINDS: Final = frozenset({str, TracedStr, int, float, bool, type(None), TracedInt, TracedBool, TracedNone})


def _weighing(function: Callable[..., bool]) -> Callable[..., bool]:
    """A test that may go through all of what it is given."""
    before = _machinery(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> bool:
        spend(1)
        for value in (*args[before:], *kwargs.values()):
            if type(value) not in _SAFE_KINDS or (isinstance(value, str) and len(value) > 4096):
                weigh(value)
                weigh_key(value)
        return function(*args, **kwargs)

    return wrapper


_LOOKING: Final = frozenset(
    (
        *("boolean", "callable", "defined", "escaped", "even", "false", "float", "integer", "iterable", "mapping"),
        *("none", "number", "odd", "sameas", "sequence", "string", "true", "undefined"),
    )
)
"""Tests that look at what a value is, not at what is in it."""


def traced_tests(originals: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., bool]]:
    """The tests of the tracing environment. A test's answer is a truth, which is the template's own."""
    tests = {**originals, **_TRACED_TESTS}
    return {name: test if name in _LOOKING or name == "in" else _weighing(test) for name, test in tests.items()}


_TRACED_TESTS: Final[dict[str, Callable[..., bool]]] = {
    "none": lambda value: value is None or isinstance(value, TracedNone),
    "true": lambda value: value is True or (isinstance(value, TracedBool) and bool(value)),
    "false": lambda value: value is False or (isinstance(value, TracedBool) and not value),
    "boolean": _boolean,
    "integer": _integer,
    "in": within,
    "sameas": _same,
}
