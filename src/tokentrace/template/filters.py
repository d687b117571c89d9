"""Jinja's filters and tests, and format strings, over traced values.

A filter is rewritten here, or hands out its input. The result of any other is of unknown origin if
its input is traced: no filter can launder text.
"""

import contextlib
import functools
import re
import string
from collections.abc import Callable, Iterator, Mapping
from types import GeneratorType
from typing import Any

from jinja2.filters import make_attrgetter
from jinja2.sandbox import SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import pass_eval_context
from markupsafe import Markup

from .budget import TooLarge, check_size, counted, listed, step, weigh, weighed
from .jsonify import JsonOptions, dumps
from .strings import FILTER_METHODS, join_traced, join_with, plain_text, promoted
from .traced import TRACED_TYPES, TracedMarkup, as_markup, derived, is_traced, opaque, plain, text_of

_MAX_COUNT = 1_000_000
"""The largest number that a filter takes as an argument."""
_MAX_SLOW = 20_000
_SLOW = frozenset({"pprint", "striptags", "sum", "urlize", "wordwrap"})
"""Filters that may take quadratic time; their input is limited to `_MAX_SLOW`."""
_AS_IT_IS = frozenset({"attr", "count", "d", "default", "first", "last", "length", "random", "reverse"})
_LAZY = frozenset({"batch", "items", "map", "reject", "rejectattr", "select", "selectattr", "slice"})
"""Filters that yield their input item by item (``map``: only through another filter)."""
_SORTING = frozenset({"dictsort", "groupby", "max", "min", "sort", "unique"})
_ESCAPING = frozenset({"e", "escape", "forceescape", "striptags"})
"""Filters that may make a character of a number: ``&#60;`` is ``<``."""


def _tojson(
    value: Any,
    ensure_ascii: Any = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: Any = False,
) -> str:
    indent = indent if isinstance(indent, str) else plain(indent)
    options = JsonOptions(bool(ensure_ascii), indent, separators and tuple(separators), bool(sort_keys))
    return dumps(value, options)


@pass_eval_context
def _join(context: Any, value: Any, d: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(context.environment, attribute), value)
    return join_with(text_of(d), map(text_of, counted(value)))


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise TypeError("can't handle positional and keyword arguments at the same time")
    return percent_format(text_of(value), kwargs or args)


def _method(name: str) -> Callable[..., str]:
    def call(value: Any, chars: str | None = None) -> str:
        result: str = getattr(promoted(text_of(value)), name)(*(() if chars is None else (chars,)))
        return as_markup(result) if hasattr(value, "__html__") else result

    return call


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    return promoted(text_of(value)).replace(text_of(old), text_of(new), -1 if count is None else count)


_REWRITTEN: dict[str, Callable[..., Any]] = {
    "tojson": _tojson,
    "join": _join,
    "format": _format,
    "string": text_of,
    "safe": lambda value: as_markup(text_of(value)),
    "replace": _replace,
    **{name: _method(method) for name, method in FILTER_METHODS.items()},
    "list": listed,
}


def traced_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """One of Jinja's filters, rewritten, or with a result of unknown origin."""
    if name in _REWRITTEN or name in _AS_IT_IS:
        return _REWRITTEN.get(name, function)
    context = int(hasattr(function, "jinja_pass_arg"))  # arguments that Jinja itself puts first

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        values = list(args[context:])
        numbers = [abs(value) for value in (*values[1:], *kwargs.values()) if isinstance(value, int)]
        if max(numbers, default=0) > _MAX_COUNT and (name not in _LAZY or name in ("batch", "slice")):
            raise TooLarge(f"{max(numbers)} is too large an argument for a filter")
        if name in _LAZY:
            if values and values[0] and name != "items":
                values[0] = counted(values[0])
            return function(*args[:context], *values, **kwargs)
        if values and not isinstance(values[0], (str, Mapping)) and (name in _SORTING or name == "sum"):
            values[0] = listed(values[0])
        size = weigh([*values, *kwargs.values()])
        if name in _SLOW and size > _MAX_SLOW:
            raise TooLarge(f"a slow filter got a value of {size} characters (limit {_MAX_SLOW})")
        result = function(*args[:context], *values, **kwargs)
        if name in _SORTING:
            return counted(result) if isinstance(result, GeneratorType) else result
        if name in _ESCAPING:
            return opaque(result)
        return derived(result, *values, *kwargs.values())

    return guarded


def within(item: Any, container: Any) -> bool:
    if not isinstance(item, str):
        weigh(item)
    if isinstance(container, (list, tuple)):
        step(len(container) >> 6)
    return item in container


def _is_same(value: Any, other: Any) -> bool:
    """``value is sameas other``: the same field may have been boxed twice."""
    is_boxed = type(value) in TRACED_TYPES and type(value) is type(other)
    return plain(value) is plain(other) or (is_boxed and bool(value == other))


_TRACED_TESTS: dict[str, Callable[..., bool]] = {
    "none": lambda value: plain(value) is None,
    "true": lambda value: plain(value) is True,
    "false": lambda value: plain(value) is False,
    "boolean": lambda value: isinstance(plain(value), bool),
    "integer": lambda value: isinstance(plain(value), int) and not isinstance(plain(value), bool),
    "in": within,
    "sameas": _is_same,
}


def traced_test(name: str, test: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(test)
    def weighing(*args: Any, **kwargs: Any) -> bool:
        step()
        for value in args:
            weighed(value)
        return test(*args, **kwargs)

    return _TRACED_TESTS.get(name, weighing)


# Only bare fields (``%s``, ``{}``, ``{name}``) keep the trace: ``%c`` turns a number into text.
_MAX_FIELDS = 10_000
_NUMBER_TEXT = 400
"""More characters than a float prints without an explicit precision."""
_PERCENT = re.compile(r"%([%sdi])")
_WIDTHS = re.compile(r"%(?:\([^)]*\))?([^a-zA-Z%]*)")


def percent_format(template: str, values: Any) -> str:
    text = plain_text(template)
    fields = text.count("%")
    _check_fields(fields)
    arguments = values if isinstance(values, tuple) else (values,)
    widths = _numbers(" ".join(_WIDTHS.findall(text)))
    if "*" in text:
        widths += sum(abs(value) for value in arguments if isinstance(value, int))
    repeats = fields if isinstance(values, Mapping) else 1
    check_size(len(text) + fields * _NUMBER_TEXT + widths + repeats * weigh(values))
    result = (Markup(text) if isinstance(template, TracedMarkup) else text) % values
    check_size(len(result))

    def pieces() -> Iterator[str]:
        remaining, start = iter(arguments), 0
        for field in _PERCENT.finditer(text):
            yield text[start : field.start()]
            yield "%" if field[1] == "%" else text_of(next(remaining, ""))
            start = field.end()
        yield text[start:]

    return _followed(result, template, pieces)


def str_format(environment: Any, template: str, name: str, args: tuple[Any, ...], kwargs: Any) -> str:
    if name == "format_map":
        if kwargs or len(args) != 1:
            raise TypeError("format_map() takes exactly one argument")
        kwargs, args = args[0], ()
    text = plain_text(template)
    _check_fields(text.count("{"))
    if isinstance(template, TracedMarkup):
        result: str = Markup(
            _MarkupFormatter(environment, escape=Markup.escape).vformat(text, args, kwargs)
        )
    else:
        result = _Formatter(environment).vformat(text, args, kwargs)

    def pieces() -> Iterator[str]:
        automatic = iter(args)
        for literal, key, _, _ in string.Formatter().parse(text):
            yield literal
            if key is not None:
                value = (
                    next(automatic, "") if not key else args[int(key)] if key.isdigit() else kwargs.get(key)
                )
                yield text_of(value)

    return _followed(result, template, pieces)


def _followed(result: str, template: str, pieces: Callable[[], Iterator[str]]) -> str:
    if not isinstance(result, Markup) and not is_traced(template):
        with contextlib.suppress(LookupError, ValueError, AttributeError, TypeError):
            whole = join_traced(pieces())
            if whole == result:
                return whole
    return opaque(result)  # type: ignore[no-any-return]


def _check_fields(count: int) -> None:
    if count > _MAX_FIELDS:
        raise TooLarge(f"a format string has {count} fields (limit {_MAX_FIELDS})")


def _numbers(text: str) -> int:
    return sum(int(digits[:12]) for digits in re.findall(r"\d+", text))


class _Formatter(SandboxedFormatter):
    size = 0

    def convert_field(self, value: Any, conversion: Any) -> Any:
        weigh(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        check_size(self.size + _numbers(format_spec) + weigh(value))
        text = str.__str__(super().format_field(value, format_spec))
        self.size += len(text)
        check_size(self.size)
        return text


class _MarkupFormatter(_Formatter, SandboxedEscapeFormatter):
    pass
