"""``%`` and ``str.format`` inside a template: the text as Python makes it, with the trace kept or given up.

A format can make a character of a number (``%c``, ``{:c}``), and a number does not say whose character it is. So
only conversions that are known to print what they are given leave text as the template's own; any other, and any
that is put together at run time, makes the whole of unknown origin.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from jinja2.sandbox import SandboxedEscapeFormatter, SandboxedFormatter

from .budget import check_pieces, check_size, made, weigh
from .origin import UNKNOWN
from .strings import TracedStr, join_traced, plain_text, traced
from .traced import is_traced, text_of

_PERCENT: Final = re.compile(r"%(?:%|(\([^()%]*\))?[-+ #0]*\d*(?:\.\d+)?[hlL]?([sdiouxXeEfFgGra]))")
"""A conversion that prints what it is given. Its name holds no parentheses: Python would look for the matching one."""
_SPEC: Final = re.compile(r"(?:.?[<>=^])?[-+ ]?z?#?0?\d*[,_]?(?:\.\d+)?[bdeEfFgGnosxX%]?", re.DOTALL)
_NUMBER_TEXT: Final = 400
"""More characters than a float prints without being asked for digits."""


def percent_format(template: str, values: Any) -> str:
    """``template % values``, traced piece by piece for bare ``%s`` and ``%d``, else of unknown origin."""
    plain = plain_text(template)
    fields = _percent_fields(plain)
    _check_percent(plain, fields, values)
    text = str.__mod__(plain, values)
    check_size(len(text))
    if fields is not None and not is_traced(template) and not is_traced(values):
        made(len(text))
        return text
    pieces = _percent_pieces(template, values)
    if pieces is not None:
        whole = join_traced(pieces)
        if whole == text:
            return whole
    return traced(text, UNKNOWN)


def _percent_fields(template: str) -> list[re.Match[str]] | None:
    """The conversions of a format string, or None if one is not known to print what it is given."""
    check_pieces(template.count("%"))
    fields: list[re.Match[str]] = []
    at = template.find("%")
    while at >= 0:
        field = _PERCENT.match(template, at)
        if field is None:
            return None
        fields.append(field)
        at = template.find("%", field.end())
    return fields


def _check_percent(template: str, fields: list[re.Match[str]] | None, values: Any) -> None:
    """Refuse widths and repetitions that would print gigabytes."""
    size = len(template) + template.count("%") * _NUMBER_TEXT
    size += _numbers(template) if fields is None else sum(_numbers(field[0]) for field in fields)
    whole = weigh(values)
    if not isinstance(values, Mapping):
        given = values if isinstance(values, tuple) else (values,)
        size += whole + sum(abs(value) for value in given if fields is None and isinstance(value, int))
    elif fields is None:
        size += template.count("%") * whole
    else:
        names = Counter(field[1][1:-1] for field in fields if field[1])
        size += whole + sum(times * weigh(values.get(name)) for name, times in names.items())
    check_size(size)


def _percent_pieces(template: str, values: Any) -> list[str] | None:
    """The pieces of a format string with plain ``%s`` and ``%d`` only, else None."""
    given = iter(values if isinstance(values, tuple) else (values,))
    pieces: list[str] = []
    at = 0
    while (found := template.find("%", at)) >= 0:
        pieces.append(template[at:found])
        code = template[found + 1 : found + 2]
        if code == "%":
            pieces.append(template[found : found + 1])
        elif code in ("s", "d", "i"):
            value = next(given, _percent_pieces)
            if value is _percent_pieces:
                return None
            pieces.append(text_of(value))
        else:
            return None
        at = found + 2
    pieces.append(template[at:])
    return pieces


def _numbers(text: str) -> int:
    return sum(int(digits[:12]) for digits in re.findall(r"\d+", text))


class _Checked(SandboxedFormatter):
    """Formats field by field: each is weighed before it is printed, and what was not proven is noted."""

    size = 0
    doubtful = False

    def convert_field(self, value: Any, conversion: Any) -> Any:
        weigh(value)
        self.doubtful = self.doubtful or is_traced(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        self.doubtful = self.doubtful or is_traced(value) or _SPEC.fullmatch(format_spec) is None
        check_size(self.size + _numbers(format_spec) + weigh(value))
        text = str.__str__(super().format_field(value, format_spec))
        self.size += len(text)
        check_size(self.size)
        return text


class _CheckedMarkup(_Checked, SandboxedEscapeFormatter):
    pass


def str_format(environment: Any, template: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """``template.format(…)`` or ``.format_map(…)``, traced piece by piece where every field is bare."""
    args, kwargs = _arguments(name, args, kwargs)
    check_pieces(template.count("{"))
    formatter = _Checked(environment)
    text = formatter.vformat(plain_text(template), args, kwargs)
    if not formatter.doubtful and not is_traced(template):
        made(len(text))
        return text
    pieces = _format_pieces(template, args, kwargs) if name == "format" and not is_traced(template) else None
    whole = join_traced(pieces) if pieces is not None else None
    return whole if whole is not None and whole == text else traced(text, UNKNOWN)


def markup_format(environment: Any, template: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> TracedStr:
    """The same for markup, which escapes what it is given: of unknown origin."""
    args, kwargs = _arguments(name, args, kwargs)
    check_pieces(template.count("{"))
    return traced(_CheckedMarkup(environment, escape=template.escape).vformat(str(template), args, kwargs), UNKNOWN)


def _arguments(name: str, args: tuple[Any, ...], kwargs: Any) -> tuple[tuple[Any, ...], Any]:
    """The positional and the named arguments; ``format_map`` takes the latter as a mapping."""
    if name == "format":
        return args, kwargs
    if kwargs or len(args) != 1:
        raise TypeError("format_map() takes exactly one argument")
    return (), args[0]


def _format_pieces(template: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str] | None:
    """The pieces where every field is a bare ``{}``, ``{0}`` or ``{name}``."""
    pieces: list[str] = []
    automatic = 0
    try:
        for literal, name, spec, conversion in string.Formatter().parse(plain_text(template)):
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
    return pieces
