"""Python functions as tools: a JSON schema from a signature, its type hints and its docstring.

The schema is transformers', but descriptions may be missing, and no hint means a string.
"""

import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ..errors import InputError

_TYPES: dict[Any, str] = {
    **{str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"},
    **dict.fromkeys((list, tuple, set, frozenset, Sequence, Iterable, Collection), "array"),
    **dict.fromkeys((dict, Mapping), "object"),
}
_SECTION = re.compile(r"^[ \t]*(Args|Arguments|Parameters|Returns|Raises):[ \t]*$", re.MULTILINE)
_PARAMETER = re.compile(r"^[ \t]*(\w+)[ \t]*(?:\([^)\n]*\))?:", re.MULTILINE)
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def function_schema(function: Callable[..., Any], name: str | None = None) -> dict[str, Any]:
    """A tool schema from a function's signature and docstring (``Args:`` describes parameters).

    >>> def add(a: int, b: int = 0) -> int:
    ...     "Add two numbers."
    >>> function_schema(add)["function"]["parameters"]
    {'type': 'object', 'properties': {'a': {'type': 'integer'}, 'b': {'type': 'integer'}}, 'required': ['a']}
    """
    title = getattr(function, "__name__", "operation")
    if title == "<lambda>" and not name:
        raise InputError("a lambda has no name to call it by; use a function with a name")
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:
        raise InputError(f"{title}: its type hints cannot be read ({error})") from None
    description, sections = _split(_SECTION, inspect.getdoc(function) or "")
    arguments = next((sections[key] for key in ("Args", "Arguments", "Parameters") if key in sections), "")
    _, descriptions = _split(_PARAMETER, arguments)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for at, parameter in enumerate(inspect.signature(function).parameters.values()):
        if at == 0 and parameter.name in ("self", "cls") and parameter.annotation is parameter.empty:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise InputError(f"{title}: *{parameter.name} cannot be a tool's parameter")
        schema = _type_schema(hints.get(parameter.name, str))
        text = descriptions.get(parameter.name)
        properties[parameter.name] = schema | ({} if text is None else _described(text, title))
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {
        "type": "object",
        "properties": properties,
        **({"required": required} if required else {}),
    }
    schema = {"name": name or title, "description": description, "parameters": parameters}
    if "return" in hints:
        schema["return"] = _type_schema(hints["return"])
        if sections.get("Returns"):
            schema["return"]["description"] = sections["Returns"]
    return {"type": "function", "function": schema}


cached_schema = functools.lru_cache(maxsize=256)(function_schema)


def _split(heading: re.Pattern[str], text: str) -> tuple[str, dict[str, str]]:
    first, *pieces = heading.split(text)
    return first.strip(), dict(zip(pieces[::2], map(str.strip, pieces[1::2]), strict=True))


def _described(text: str, title: str) -> dict[str, Any]:
    text = re.sub(r"\s*\n\s*", " ", text)
    choices = _CHOICES.search(text)
    if choices is None:
        return {"description": text}
    try:
        values = list(json.loads(choices[1]))
    except (ValueError, TypeError):
        raise InputError(f"{title}: the choices {choices[1][:80]!r} are not a JSON list") from None
    enum = [value.strip() if isinstance(value, str) else value for value in values]
    return {"enum": enum, "description": text[: choices.start()].strip()}


def _type_schema(hint: Any) -> dict[str, Any]:
    kind, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if hint is Any:
        return {}
    if kind in (typing.Union, types.UnionType):
        return _union(inner)
    if kind is typing.Literal:
        kinds = list(dict.fromkeys(_TYPES.get(type(value), "string") for value in inner))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(inner)}
    schema: dict[str, Any] = {"type": _TYPES.get(kind, "object") if isinstance(kind, type) else "object"}
    if kind in (dict, Mapping) and inner:
        schema["additionalProperties"] = _type_schema(inner[1])
    elif inner and schema["type"] == "array" and (kind is not tuple or inner[1:] == (...,)):
        schema["items"] = _type_schema(inner[0])
    elif kind is tuple and inner:
        schema["prefixItems"] = [_type_schema(item) for item in inner]
    return schema


def _union(members: tuple[Any, ...]) -> dict[str, Any]:
    schemas = [_type_schema(member) for member in members if member is not type(None)]
    schema: dict[str, Any] = {"anyOf": schemas}
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(one.keys() == {"type"} and isinstance(one["type"], str) for one in schemas):
        names = sorted({one["type"] for one in schemas})
        schema = {"type": names[0] if len(names) == 1 else names}
    return {**schema, "nullable": True} if type(None) in members else schema
