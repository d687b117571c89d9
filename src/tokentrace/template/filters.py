"""Jinja's filters and tests over traced values.

A filter is listed by name as keeping the trace by itself, or rewritten here, or else wrapped so that text it
makes out of traced values is of unknown origin. There is no fourth way, so no filter can launder text.
"""

from __future__ import annotations

import functools
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Final

from jinja2.filters import do_sum, do_title, do_truncate, do_wordwrap, do_xmlattr
from jinja2.tests import test_float, test_in, test_number
from jinja2.utils import pass_environment, pass_eval_context

from .jsonify import dumps
from .traced import (
    UNKNOWN,
    TooLarge,
    TracedBool,
    TracedInt,
    TracedMarkup,
    TracedNone,
    TracedStr,
    as_markup,
    check_pieces,
    check_size,
    escaped,
    is_traced_deep,
    join_traced,
    mapped,
    percent_format,
    plain,
    text_of,
    traced,
    with_runs,
)

_MAX_COUNT: Final = 1_000_000
_PERCENT_FIELD: Final = re.compile(r"%(?:\([^)]*\))?([^a-zA-Z%(]*)")
CODE_POINT: Final = re.compile(r"c\}")
"""The end of a field like ``{:c}``, which makes a character of a number."""

KEEPS_TRACE: Final = frozenset(
    (
        *(
            "abs",
            "attr",
            "batch",
            "capitalize",
            "count",
            "d",
            "default",
            "dictsort",
            "first",
            "float",
            "groupby",
        ),
        *("int", "items", "last", "length", "list", "lower", "map", "max", "min", "random", "reject"),
        *(
            "rejectattr",
            "reverse",
            "round",
            "select",
            "selectattr",
            "slice",
            "sort",
            "trim",
        ),
        *("unique", "upper", "wordcount"),
    )
)
"""Filters made of methods and slices of their input: traced in, traced out."""


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
        indent=plain(indent),
        separators=separators,
        sort_keys=bool(sort_keys),
    )


def _join(context: Any, value: Any, d: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        from jinja2.filters import make_attrgetter

        value = map(make_attrgetter(context.environment, attribute), value)
    pieces: list[str] = []
    separator = text_of(d)
    for index, item in enumerate(value):
        if index:
            pieces.append(separator)
        pieces.append(text_of(item))
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
    template = text_of(value)
    check_percent(template, kwargs or args)
    return percent_format(template, kwargs or args)


def _title(value: Any) -> str:
    text = text_of(value)
    return mapped(text, do_title) if isinstance(text, TracedStr) else do_title(text)


def _center(value: Any, width: int = 80) -> str:
    return _promote(text_of(value)).center(width)


def _promote(text: str) -> TracedStr:
    return text if isinstance(text, TracedStr) else traced(text, None)


def _safe(value: Any) -> str:
    return as_markup(text_of(value))


def _escape(value: Any) -> str:
    return value if isinstance(value, TracedMarkup) else as_markup(escaped(text_of(value)))


def _forceescape(value: Any) -> str:
    text = text_of(value)
    return as_markup(escaped(with_runs(str.__getitem__(text, slice(None)), _promote(text).runs)))


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text = _promote(text_of(value))
    return text.replace(text_of(old), text_of(new), -1 if count is None else count)


def _truncate(
    environment: Any, s: Any, length: int = 255, killwords: bool = False, end: str = "...", leeway: int | None = None
) -> str:
    text = _promote(s) if isinstance(s, str) else s
    return do_truncate(environment, text, length, killwords, end, leeway)


def _wordwrap(environment: Any, s: str, width: int = 79, *args: Any, **kwargs: Any) -> str:
    between = kwargs.get("wrapstring", args[1] if len(args) > 1 else None)
    if between is not None and len(between) > 100:
        check_size(len(s) * len(between))
    text = do_wordwrap(environment, s, width, *args, **kwargs)
    return traced(text, UNKNOWN) if text and (is_traced_deep(s) or is_traced_deep(between)) else text


def _sum(environment: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    if isinstance(start, (list, tuple)) and attribute is None:
        iterable = list(iterable)
        check_pieces(sum(len(item) for item in iterable if isinstance(item, (list, tuple))))
    return do_sum(environment, iterable, attribute, start)


def _xmlattr(context: Any, d: Any, autospace: bool = True) -> str:
    text = do_xmlattr(context, {key: plain(value) for key, value in d.items()}, autospace)
    return traced(text, UNKNOWN) if text and is_traced_deep(d) else text


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
    "wordwrap": pass_environment(_wordwrap),
    "sum": pass_environment(_sum),
    "xmlattr": pass_eval_context(_xmlattr),
}


def traced_filters(originals: MutableMapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """The filters of the tracing environment: same names, same text, traces kept or marked unknown."""
    table = dict(_REWRITTEN)
    for name, function in originals.items():
        if name in ("batch", "slice", "round"):
            table[name] = _limited(function)
        elif name not in table and name not in KEEPS_TRACE:
            table[name] = _loose(function)
    return table


def _loose(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if isinstance(result, str) and not isinstance(result, TracedStr) and result:
            values = (*args, *kwargs.values())
            if any(is_traced_deep(value) for value in values if not _is_machinery(value)):
                return traced(str.__getitem__(result, slice(None)), UNKNOWN)
        return result

    return wrapper


def _is_machinery(value: Any) -> bool:
    """Jinja hands its own context or environment to some filters as their first argument."""
    return type(value).__module__.startswith(("jinja2.", "tokentrace.template.environment"))


def _limited(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for value in (*args[1:], *kwargs.values()):
            if isinstance(value, int) and abs(value) > _MAX_COUNT:
                raise TooLarge(f"{value} is too large an argument for a filter")
        return function(*args, **kwargs)

    return wrapper


# -- format strings


def check_percent(template: str, values: Any) -> None:
    """Refuse widths and repetitions that would print gigabytes."""
    size = len(template) + sum(map(_numbers, _PERCENT_FIELD.findall(template)))
    if isinstance(values, Mapping):
        names = Counter(re.findall(r"%\(([^)]*)\)", template))
        size += sum(times * _size(values.get(name)) for name, times in names.items())
    else:
        queue = values if isinstance(values, tuple) else (values,)
        size += sum(map(_size, queue))
        if "*" in template:
            size += sum(abs(value) for value in queue if isinstance(value, int))
    check_size(size)


def check_format(template: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """The same for ``str.format`` and ``format_map``, where a width may be an argument itself."""
    if len(args) == 1 and isinstance(args[0], Mapping) and not kwargs:
        kwargs = args[0]
    given: list[Any] = [*args, *kwargs.values()]
    largest = max(map(_size, given), default=0)
    size = len(template)
    for _, name, spec, _ in string.Formatter().parse(str.__getitem__(template, slice(None))):
        if name is None:
            continue
        value = kwargs.get(name) if not name.isdigit() else args[int(name)] if int(name) < len(args) else None
        size += largest if value is None else _size(value)
        size += _numbers(spec or "")
        if "{" in (spec or ""):  # whatever is given may end up as a width
            size += sum(_numbers(str(part)) for part in given)
    check_size(size)


def _numbers(text: str) -> int:
    return sum(int(digits[:12]) for digits in re.findall(r"\d+", text))


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str) else 0


def format_pieces(template: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str] | None:
    """The pieces of ``template.format(…)`` where every field is a bare ``{}``, ``{0}`` or ``{name}``."""
    pieces: list[str] = []
    automatic = 0
    try:
        for literal, name, spec, conversion in string.Formatter().parse(str.__getitem__(template, slice(None))):
            pieces.append(literal)
            if name is None:
                continue
            if spec or conversion:
                return None
            if name == "":
                value, automatic = args[automatic], automatic + 1
            elif name.isdigit():
                value = args[int(name)]
            elif name in kwargs:
                value = kwargs[name]
            else:
                return None
            pieces.append(text_of(value))
    except (ValueError, IndexError):
        return None
    if isinstance(template, TracedStr) and any(origin is not None for _, origin in template.runs):
        return None
    return pieces


# -- tests that look at the identity or the type of a value


def _boolean(value: Any) -> bool:
    return value is True or value is False or isinstance(value, TracedBool)


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not _boolean(value)


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, (TracedNone, TracedBool)) or isinstance(other, (TracedNone, TracedBool)):
        return plain(value) is plain(other)
    if isinstance(value, (TracedStr, TracedInt)):
        return plain(value) is plain(other) or value is other
    return value is other


TRACED_TESTS: Final[dict[str, Callable[..., bool]]] = {
    "none": lambda value: value is None or isinstance(value, TracedNone),
    "true": lambda value: value is True or (isinstance(value, TracedBool) and bool(value)),
    "false": lambda value: value is False or (isinstance(value, TracedBool) and not value),
    "boolean": _boolean,
    "integer": _integer,
    "float": test_float,
    "number": test_number,
    "in": test_in,
    "sameas": _same,
}
