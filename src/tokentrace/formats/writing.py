"""Writes tool calls in a given grammar: the reverse of parsing."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError, brief
from .grammar import CallGrammar, Channels, Style, Value

_TYPES = {type(None): "null", bool: "boolean", str: "string", list: "array", dict: "object"}
"""The JSON schema names of types; anything else is a number."""


def write_calls(grammar: CallGrammar, calls: Sequence[Mapping[str, Any]], *, beside: bool = False) -> str:
    """Calls (``{"name": …, "arguments": {…}, "id": …}``) as the template would write them.

    `beside`: content comes before them. Raises InputError naming a call that lacks a field of
    the grammar. Leaves out other fields that a template writes (a call's type).
    """
    if not calls:
        return ""
    bodies = (f"{grammar.open}{_body(grammar, call, at)}{grammar.close}" for at, call in enumerate(calls))
    section = f"{grammar.section_open}{grammar.separator.join(bodies)}{grammar.section_close}"
    return f"{grammar.before if beside else ''}{section}{grammar.after}"


def write_messages(channels: Channels, calls: Sequence[Mapping[str, Any]], content: str) -> str:
    """Content, then a call, each in a message. Raises InputError for two calls."""
    if len(calls) > 1:
        problem = f"there are {len(calls)}, but a turn with channels ends with its first call"
        raise InputError(problem, field="tool_calls")
    text = ""
    if content:
        head = channels.call if calls else channels.content
        text = f"{channels.opening(head or channels.content)}{content}"
        text += f"{channels.end}{channels.start}assistant" if calls else ""
    for call in calls:
        arguments = _arguments(call, 0)
        text += channels.call_text(_field(call, "name", 0), arguments)
    return text


def _body(grammar: CallGrammar, call: Mapping[str, Any], at: int) -> str:
    arguments = _arguments(call, at)
    if grammar.style is Style.JSON_CALL:
        return _json(grammar, _object(grammar, call, arguments, at))
    if grammar.style is Style.PYTHON:
        pairs = ", ".join(f"{key}={_bracketed(grammar, value)}" for key, value in arguments.items())
        return f"{_field(call, 'name', at)}({pairs})"
    inside, head = "", "".join(f"{lead}{_field(call, field, at)}" for lead, field in grammar.head)
    if grammar.style is Style.JSON_ARGUMENTS:
        inside = _json(grammar, arguments)
    elif grammar.style is Style.PAIRS:
        opens = dict(grammar.typed_opens) | ({"string": grammar.string_open} if grammar.string_open else {})
        for key, value in arguments.items():
            kind = next((name for kind, name in _TYPES.items() if isinstance(value, kind)), "number")
            opened = opens.get(kind, grammar.value_open)
            inside += f"{grammar.key_open}{key}{opened}{_value(grammar, value)}{grammar.value_close}"
    elif grammar.style is Style.BRACES:
        pairs = ",".join(f"{key}:{_bracketed(grammar, value)}" for key, value in arguments.items())
        return f"{head}{{{pairs}}}"
    else:
        inside = "".join(_element(grammar, key, value) for key, value in arguments.items())
    return f"{head}{grammar.begin}{inside}{grammar.end}"


def _arguments(call: Mapping[str, Any], at: int) -> Mapping[str, Any]:
    if not isinstance(call, Mapping):
        raise InputError(f"must be a mapping, not {brief(call)}", field=f"tool_calls.{at}")
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise InputError(f"is not JSON: {error}", field=f"tool_calls.{at}.arguments") from None
    if not isinstance(arguments, Mapping):
        raise InputError("must be a mapping", field=f"tool_calls.{at}.arguments")
    return arguments


def _field(call: Mapping[str, Any], field: str, at: int) -> str:
    if field in ("number", "index"):
        return str(at + (field == "number"))
    value = call.get(field)
    if not isinstance(value, str):
        raise InputError("is missing, but this grammar writes it", field=f"tool_calls.{at}.{field}")
    return value


def _object(grammar: CallGrammar, call: Mapping[str, Any], arguments: Any, at: int) -> dict[str, Any]:
    if grammar.named_key:
        return {_field(call, "name", at): arguments}
    out: dict[str, Any] = {}
    for field, path in grammar.keys:
        inner = out
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = arguments if field == "arguments" else _field(call, field, at)
    return out


def _json(grammar: CallGrammar, value: Any) -> str:
    return json.dumps(value, ensure_ascii=grammar.ascii)


def _value(grammar: CallGrammar, value: Any) -> str:
    if isinstance(value, str):
        if grammar.strings is Value.CDATA:
            return f"<![CDATA[{value}]]>" if "<" in value or "&" in value else value
        return value if grammar.strings is Value.BARE else _json(grammar, value)
    if grammar.others is Value.PYTHON and (value is None or isinstance(value, bool)):
        return str(value)
    return _json(grammar, value)


def _element(grammar: CallGrammar, key: str, value: Any) -> str:
    if isinstance(value, Mapping):
        text = "".join(_element(grammar, inner, some) for inner, some in value.items())
    elif isinstance(value, list):
        text = "".join(_element(grammar, grammar.item, some) for some in value)
    else:
        text = "" if value is None else _value(grammar, value)
    return (
        f"{grammar.key_open}{key}{grammar.value_open}{text}{grammar.value_close}{key}{grammar.value_open}"
    )


def _bracketed(grammar: CallGrammar, value: Any) -> str:
    """A value as in Python, or in braces with special quotes."""
    python = grammar.style is Style.PYTHON
    comma, colon = (", ", ": ") if python else (",", ":")
    if grammar.others is Value.QUOTED and not isinstance(value, str):
        value = _json(grammar, value)
    if isinstance(value, str):
        return _json(grammar, value) if python else f"{grammar.quote}{value}{grammar.quote}"
    if isinstance(value, Mapping):
        keys = {key: _json(grammar, key) if python else key for key in value}
        members = (f"{keys[key]}{colon}{_bracketed(grammar, some)}" for key, some in value.items())
        return f"{{{comma.join(members)}}}"
    if isinstance(value, list):
        return "[" + comma.join(_bracketed(grammar, some) for some in value) + "]"
    return _value(grammar, value)
