"""JSON values and tool calls as they stand in text."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

# -- JSON values

_DECODER: Final = json.JSONDecoder()
_OPENERS: Final = 64
"""Braces and brackets before a character that are tried as the beginning of a JSON value."""


def openers(text: str, at: int) -> Iterator[int]:
    """Where a JSON value may begin that holds this character, the nearest first."""
    found = (index for index in range(min(at, len(text) - 1), -1, -1) if text[index] in "{[")
    return islice(found, _OPENERS)


def value_at(text: str, start: int) -> tuple[Any, int] | None:
    """The JSON value that begins here and its end; also as Python's repr() writes it."""
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        pass
    written = text[start : start + 4096]
    stop = max(written.find("}\n"), written.find("}<"), written.find("]\n"), written.find("]<")) + 1
    written = written[: stop or None]
    if "'" not in written or "\\" in written:  # a warning about escapes is not ours to print
        return None
    try:
        return ast.literal_eval(written), start + len(written)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None


def same_value(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same. ``1`` and ``1.0`` are, ``1`` and ``true`` are not; nor does order count
    among keys. A string that holds the JSON of the other value is the same, written twice.
    """
    pairs = [(one, other)]
    while pairs:
        a, b = pairs.pop()
        if isinstance(a, str) != isinstance(b, str):
            text, value = (a, b) if isinstance(a, str) else (b, a)
            parsed = value_at(text, 0) if isinstance(value, (dict, list)) else None
            if parsed is None or parsed[1] != len(text):
                return False
            pairs.append((parsed[0], value))
        elif isinstance(a, dict) and isinstance(b, dict):
            if a.keys() != b.keys():
                return False
            pairs += [(a[key], b[key]) for key in a]
        elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
            if len(a) != len(b):
                return False
            pairs += zip(a, b, strict=True)
        elif isinstance(a, bool) != isinstance(b, bool) or a != b:
            return False
    return True


# -- tool calls


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A tool call as it stands in text. `stray` counts closing tags of parameters that close nothing."""

    name: str
    arguments: dict[str, Any]
    stray: int = 0
    declared: bool = True
    """Whether arguments are given at all, be they empty."""


_FUNCTION: Final = re.compile(r'<(?:｜DSML｜)?(?:function=|invoke name=)"?([^">\n]{0,256})"?>')
_PARAMETER: Final = re.compile(r'<(?:｜DSML｜)?parameter(?:=| name=)"?([^">\n]{0,256})"?[^>\n]{0,256}>')
_PARAMETER_END: Final = re.compile(r"</(?:｜DSML｜)?parameter>")
_ARG: Final = re.compile(r"<arg_key>([^<\n]{0,256})</arg_key>\s{0,16}<arg_value>")
_ARG_END: Final = re.compile(r"</arg_value>")
_NAMED: Final = re.compile(r"\s*(?:function<｜tool▁sep｜>)?([^\s{<\[]+)")


def written_call(text: str, start: int, opening: str, closing: str) -> WrittenCall | None:
    """The call that is opened at `start`, or None where it is not whole or not understood."""
    stop = text.find(closing, start + len(opening))
    if stop < 0:
        return None
    body = text[start + len(opening) : stop]
    function = _FUNCTION.search(text, start, stop)
    if function:
        pairs, stray = _pairs(text[function.end() : stop], _PARAMETER, _PARAMETER_END)
        return WrittenCall(function[1].strip(), pairs, stray)
    name = _NAMED.match(body)
    if "<arg_key>" in body or (name and opening == "<tool_call>"):
        pairs, stray = _pairs(body, _ARG, _ARG_END)
        return WrittenCall(name[1] if name else "", pairs, stray)
    brace = body.find("{")
    value = value_at(body, brace) if brace >= 0 else None
    if value is None or not isinstance(value[0], dict):
        return None
    found = value[0]
    if name:
        return WrittenCall(name[1], found)
    key = "parameters" if "parameters" in found else "arguments"
    arguments = value_of(found.get(key))
    if not isinstance(arguments, dict):
        if arguments:
            return None
        arguments = {}
    return WrittenCall(str(found.get("name", "")), arguments, declared=key in found)


def value_of(given: Any) -> Any:
    """The value that a string of JSON writes; anything else as it is."""
    found = value_at(given, 0) if isinstance(given, str) else None
    return given if found is None else found[0]


def function_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a tool or a call says of its function, be it below ``function`` or not."""
    function = row.get("function")
    return function if isinstance(function, Mapping) else row


def _pairs(body: str, opening: re.Pattern[str], closing: re.Pattern[str]) -> tuple[dict[str, Any], int]:
    """Parameters by name, and how many closing tags close none. One pass, whatever the text."""
    pairs: dict[str, Any] = {}
    stray, ends = 0, iter([*closing.finditer(body), None])
    end = next(ends)
    after = 0
    for match in opening.finditer(body):
        if match.start() < after:
            continue
        while end is not None and end.start() < match.end():
            stray, end = stray + 1, next(ends)
        if end is None:
            break
        pairs[match[1].strip()] = body[match.end() : end.start()]
        after, end = end.end(), next(ends)
    return pairs, stray + (0 if end is None else 1 + sum(left is not None for left in ends))
