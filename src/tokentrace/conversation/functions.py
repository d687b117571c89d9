"""Python functions as tools: a JSON schema from a signature, its type hints and its docstring.

It is transformers' schema. Functions that transformers refuses work too: missing descriptions are left out, and a
parameter without a hint is a string.
"""

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
_PARAMETER: Final = re.compile(r"\s*(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
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
    title = getattr(function, "__name__", "operation")
    if title == "<lambda>" and not name:
        raise InputError("a lambda has no name to call it by; use a function with a name")
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:
        raise InputError(f"{title}: its type hints cannot be read ({error})") from None
    sections = _docstring_sections(inspect.getdoc(function) or "")
    descriptions: dict[str, str] = {}
    last = ""
    for line in filter(str.strip, sections.get("Args:", [])):
        if match := _PARAMETER.match(line):
            last, descriptions[match[1]] = match[1], match[2].strip()
        elif last:
            descriptions[last] = f"{descriptions[last]} {line.strip()}".strip()
    properties: dict[str, Any] = {}
    required: list[str] = []
    for at, parameter in enumerate(inspect.signature(function).parameters.values()):
        if at == 0 and parameter.name in ("self", "cls") and parameter.annotation is parameter.empty:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise InputError(f"{title}: *{parameter.name} cannot be a tool's parameter")
        schema = _type_schema(hints.get(parameter.name, str))
        properties[parameter.name] = _with_description(schema, descriptions.get(parameter.name), title)
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, **({"required": required} if required else {})}
    description = "\n".join(sections[""]).strip()
    schema = {"name": name or title, "description": description, "parameters": parameters}
    if "return" in hints:
        schema["return"] = _type_schema(hints["return"])
        if returned := "\n".join(sections.get("Returns:", ())).strip():
            schema["return"]["description"] = returned
    return {"type": "function", "function": schema}


cached_schema = functools.lru_cache(maxsize=256)(function_schema)


def _with_description(schema: dict[str, Any], text: str | None, title: str) -> dict[str, Any]:
    if text is None:
        return schema
    choices = _CHOICES.search(text)
    if choices:
        try:
            values = json.loads(choices[1])
        except ValueError:
            raise InputError(f"{title}: the choices {choices[1][:80]!r} are not a JSON list") from None
        schema["enum"] = [value.strip() if isinstance(value, str) else value for value in values]
        text = text[: choices.start()].strip()
    schema["description"] = text
    return schema


def _docstring_sections(text: str) -> dict[str, list[str]]:
    """The lines of a docstring by section; the description is section ``""``."""
    sections: dict[str, list[str]] = {"": []}
    current = ""
    for line in text.strip().split("\n"):
        name = line.strip()
        if name in _SECTIONS and name not in sections:
            current = "Args:" if name in _SECTIONS[:3] else name
            sections[current] = []
        else:
            sections[current].append(line)
    return sections


def _type_schema(hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        return {} if hint is Any else {"type": _TYPES.get(hint, "object") if isinstance(hint, type) else "object"}
    if origin in (typing.Union, types.UnionType):
        return _union(arguments)
    if origin is typing.Literal:
        kinds = dict.fromkeys(_TYPES.get(type(value), "string") for value in arguments)
        return {"type": next(iter(kinds)) if len(kinds) == 1 else list(kinds), "enum": list(arguments)}
    if origin is list or (origin is tuple and len(arguments) == 2 and arguments[1] is ...):
        return {"type": "array", "items": _type_schema(arguments[0])}
    if origin is tuple:
        return {"type": "array", "prefixItems": [_type_schema(argument) for argument in arguments]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type_schema(arguments[1])}
    return {"type": "object"}


def _union(arguments: tuple[Any, ...]) -> dict[str, Any]:
    members = [_type_schema(argument) for argument in arguments if argument is not type(None)]
    schema: dict[str, Any] = {"anyOf": members}
    if len(members) == 1:
        schema = members[0]
    elif all(member.keys() == {"type"} and isinstance(member["type"], str) for member in members):
        names = sorted({member["type"] for member in members})
        schema = {"type": names[0] if len(names) == 1 else names}
    return {**schema, "nullable": True} if type(None) in arguments else schema
