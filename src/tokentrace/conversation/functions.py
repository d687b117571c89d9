"""Python functions as tools: a JSON schema from a signature, its type hints and its docstring.

Where transformers makes a schema of a function, this is the same one, so that a template shows the model the same text.
A function that it refuses (without a docstring, with a parameter that is not described or has no hint) has one here
too: what is not said is left out, and a parameter without a hint is a string.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Final

from ..errors import InputError

_TYPES: Final[dict[Any, str]] = {
    **{str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"},
    **{list: "array", tuple: "array", dict: "object"},
}
_SECTIONS: Final = ("Args:", "Arguments:", "Parameters:", "Returns:", "Raises:")
_PARAMETERS: Final = _SECTIONS[:3]
_DESCRIBED: Final = re.compile(r"\s*(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_CHOICES: Final = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def function_schema(function: Callable[..., Any], name: str | None = None) -> dict[str, Any]:
    """A tool schema from a function's signature, type hints and docstring (``Args:`` describes parameters).

    >>> def add(a: int, b: int = 0) -> int:
    ...     '''Add two numbers.
    ...
    ...     Args:
    ...         a: The first one.
    ...     '''
    ...     return a + b
    >>> function_schema(add)["function"]["parameters"]["properties"]["a"]
    {'type': 'integer', 'description': 'The first one.'}
    """
    called = getattr(function, "__name__", "operation")
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:
        raise InputError(f"{called}: its type hints cannot be read ({error})") from None
    description, described, returned = _docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required: list[str] = []
    for at, parameter in enumerate(inspect.signature(function).parameters.values()):
        if at == 0 and parameter.name in ("self", "cls") and parameter.annotation is parameter.empty:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise InputError(f"{called}: *{parameter.name} cannot be a tool's parameter")
        schema = _type_schema(hints.get(parameter.name, str))
        properties[parameter.name] = _with_description(schema, described.get(parameter.name), called)
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    made: dict[str, Any] = {"name": name or called, "description": description, "parameters": parameters}
    if "return" in hints:
        made["return"] = _type_schema(hints["return"])
        if returned:
            made["return"]["description"] = returned
    return {"type": "function", "function": made}


@functools.lru_cache(maxsize=256)
def _known_schema(function: Callable[..., Any]) -> dict[str, Any]:
    return function_schema(function)


def known_schema(function: Callable[..., Any], field: str) -> dict[str, Any]:
    """`function_schema`, made once a function; its InputError names the field."""
    try:
        return _known_schema(function)
    except InputError as error:
        raise InputError(error.problem, field=field) from None


def _with_description(schema: dict[str, Any], text: str | None, called: str) -> dict[str, Any]:
    if text is None:
        return schema
    choices = _CHOICES.search(text)
    if choices:
        try:
            found = json.loads(choices[1])
        except ValueError:
            raise InputError(f"{called}: the choices {choices[1][:80]!r} are not a JSON list") from None
        schema["enum"] = [one.strip() if isinstance(one, str) else one for one in found]
        text = text[: choices.start()].strip()
    schema["description"] = text
    return schema


def _docstring(text: str) -> tuple[str, dict[str, str], str]:
    """What a docstring says of the function, of each parameter, and of what is returned."""
    sections: dict[str, list[str]] = {"": []}
    current = ""
    for line in text.strip().split("\n"):
        name = line.strip()
        if name in _SECTIONS and name not in sections:
            current = "Args:" if name in _PARAMETERS else name
            sections[current] = []
        else:
            sections[current].append(line)
    described: dict[str, str] = {}
    last = ""
    for line in filter(str.strip, sections.get("Args:", ())):
        match = _DESCRIBED.match(line)
        if match:
            last = match[1]
            described[last] = match[2].strip()
        elif last:
            described[last] = f"{described[last]} {line.strip()}".strip()
    returned = "\n".join(sections.get("Returns:", ())).strip()
    return "\n".join(sections[""]).strip(), described, returned


def _type_schema(hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        return {} if hint is Any else {"type": _TYPES.get(hint, "object") if isinstance(hint, type) else "object"}
    if origin in (typing.Union, types.UnionType):
        return _union(arguments)
    if origin is typing.Literal:
        kinds = dict.fromkeys(_TYPES.get(type(one), "string") for one in arguments)
        return {"type": next(iter(kinds)) if len(kinds) == 1 else list(kinds), "enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _type_schema(arguments[0])}
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is ...:
            return {"type": "array", "items": _type_schema(arguments[0])}
        return {"type": "array", "prefixItems": [_type_schema(one) for one in arguments]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type_schema(arguments[1])}
    return {"type": "object"}


def _union(arguments: tuple[Any, ...]) -> dict[str, Any]:
    some = [_type_schema(one) for one in arguments if one is not type(None)]
    schema: dict[str, Any]
    if len(some) == 1:
        schema = some[0]
    elif all(one.keys() == {"type"} and isinstance(one["type"], str) for one in some):
        names = sorted({one["type"] for one in some})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": some}
    if type(None) in arguments:
        schema["nullable"] = True
    return schema
