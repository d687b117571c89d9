"""``%`` and ``str.format`` inside a template.

A format string with bare fields only (``%s``, ``%d``, ``{}``, ``{name}``) keeps the trace. The text of any other is of
unknown origin: a format can make a character of a number (``%c``, ``{:c}``), and a number does not say whose
character it is.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping
from typing import Any, Final

from jinja2.sandbox import SandboxedEscapeFormatter, SandboxedFormatter
from markupsafe import Markup

from .budget import TooLarge, check_size, weigh
from .strings import join_traced, plain_text, promoted
from .traced import TracedMarkup, is_traced, opaque, text_of

_MAX_FIELDS: Final = 10_000
"""Fields of one format string: Python's search for a closing parenthesis is quadratic."""
_NUMBER_TEXT: Final = 400
"""More characters than a float prints if no digits are asked for."""
_PERCENT: Final = re.compile(r"%([%sdi])")
_WIDTHS: Final = re.compile(r"%(?:\([^)]*\))?([^a-zA-Z%]*)")


def percent_format(template: str, values: Any) -> str:
    """``template % values``."""
    text = plain_text(template)
    fields = text.count("%")
    _check_fields(fields)
    repeats = fields if isinstance(values, Mapping) else 1
    widths = _numbers(" ".join(_WIDTHS.findall(text)))
    check_size(len(text) + fields * _NUMBER_TEXT + widths + repeats * weigh(values))
    if "*" in text:
        check_size(sum(abs(value) for value in _arguments(values) if isinstance(value, int)))
    result = (Markup(text) if isinstance(template, TracedMarkup) else text) % values
    check_size(len(result))
    return _followed(result, template, lambda: _percent_pieces(promoted(template), values))


def _arguments(values: Any) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) else (values,)


def _percent_pieces(template: Any, values: Any) -> Iterator[str]:
    arguments = iter(_arguments(values))
    start = 0
    for field in _PERCENT.finditer(template):
        yield template[start : field.start()]
        yield template[field.start() : field.start() + 1] if field[1] == "%" else text_of(next(arguments, ""))
        start = field.end()
    yield template[start:]


def str_format(environment: Any, template: str, name: str, args: tuple[Any, ...], kwargs: Any) -> str:
    """``template.format(…)``, or ``.format_map(…)`` if that is its `name`."""
    if name == "format_map":
        if kwargs or len(args) != 1:
            raise TypeError("format_map() takes exactly one argument")
        kwargs, args = args[0], ()
    text = plain_text(template)
    _check_fields(text.count("{"))
    if isinstance(template, TracedMarkup):
        formatter: _Formatter = _MarkupFormatter(environment, escape=Markup.escape)
    else:
        formatter = _Formatter(environment)
    result = formatter.vformat(text, args, kwargs)
    result = Markup(result) if isinstance(template, TracedMarkup) else result
    return _followed(result, template, lambda: _format_pieces(text, args, kwargs))


def _format_pieces(template: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[str]:
    automatic = iter(args)
    for literal, name, _, _ in string.Formatter().parse(template):
        yield literal
        if name is not None:
            value = next(automatic, "") if name == "" else args[int(name)] if name.isdigit() else kwargs.get(name)
            yield text_of(value)


def _followed(result: str, template: str, pieces: Any) -> str:
    """`result` with the trace of its `pieces`, if they make the same text; else of unknown origin."""
    if not isinstance(result, Markup) and not is_traced(template):
        try:
            whole = join_traced(pieces())
        except (LookupError, ValueError, AttributeError, TypeError):
            whole = None
        if whole is not None and whole == result:
            return whole
    return opaque(result)  # type: ignore[no-any-return]


def _check_fields(count: int) -> None:
    if count > _MAX_FIELDS:
        raise TooLarge(f"a format string has {count} fields (limit {_MAX_FIELDS})")


def _numbers(text: str) -> int:
    return sum(int(digits[:12]) for digits in re.findall(r"\d+", text))


class _Formatter(SandboxedFormatter):
    """Checks the size of each field before it is printed."""

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
