"""What bare text means, by the tool's JSON schema: one ladder of rules for all families that write text between tags.

In these formats a string is written as it is and everything else as JSON; some templates write ``True``, ``False`` and
``None``. The first rung that holds decides:

1. A value that the schema lists (``enum``, ``const``): the text itself, where it is a listed string; else the value
   that the text spells, where that is listed. ``1`` is not ``true``; ``1.0`` is ``1``.
2. Only strings are admitted: the text, exactly, listed or not, quotes and all. So it can be passed on as it arrives.
3. The text spells a value, other than a string, of a type that is admitted: that value. ``5.0`` is an integer, 5, where
   numbers are not admitted. Where null is admitted and strings are not, the empty text is null.
4. Strings are admitted: the text, exactly. What is in quotes keeps them.
5. Nothing is said: the value that the text spells, unless that is a string, which would have been written bare; else
   the text, exactly.
6. Neither strings nor what the text spells are admitted: the value it spells, be it a string in quotes; checking types
   is left to the tool. If it spells none, the text, and that is not sure to be meant.

A text *spells* a value, with white space around it or not, if it is JSON, or ``True``, ``False`` or ``None``; where
objects or arrays are admitted, also if it is one as Python's repr() writes it.

Types are what ``type``, ``nullable``, ``enum`` and ``const`` say, united over ``anyOf`` and ``oneOf``, intersected over
``allOf`` and what stands beside it; ``$ref`` is followed within the tool's own schema. A listed value that the type
beside it forbids does not count. What cannot be understood, contradicts itself or goes in circles admits anything.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import islice
from typing import Any, Final
from urllib.parse import unquote

from ..computed import computed
from ..conversation.values import finite, no_constant, unique

_STEPS: Final = 1000
"""Schemas that are looked into to understand one. Long lists of values count as several."""
_LISTED: Final = 64
"""Listed values that count as one schema."""
_DEPTH: Final = 32
"""How deep `anyOf`, `allOf` and `$ref` are followed. Ends circles."""
_LITERAL: Final = 100_000
"""Characters of the longest text that is read as Python writes it."""
_EXACT: Final = 2**53
"""Below it, every integer is a float."""

_TYPES: Final[dict[type, str]] = {
    type(None): "null",
    bool: "boolean",  # before int, which it is a kind of
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
_BRACKETED: Final = frozenset({"object", "array"})
_WORDS: Final = {"True": True, "False": False, "None": None}
_SPACE: Final = " \t\n\r"


# -- the ladder


def read_value(text: str, schema: Schema | None) -> tuple[Any, bool]:
    """The value that bare text stands for, and whether that is sure to be what the schema means. Never raises.

    >>> read_value("42", Schema({"type": "integer"}))
    (42, True)
    >>> read_value("42", Schema({"type": "string"}))
    ('42', True)
    >>> read_value("many", Schema({"type": "integer"}))
    ('many', False)
    """
    admitted = _ANYTHING if schema is None else schema.admitted
    types, listed = admitted.types, admitted.listed
    text_admitted = types is None or "string" in types
    if (schema is not None and schema.only_text) or any(isinstance(one, str) and one == text for one in listed):
        return text, True
    try:
        value = _spelled(text, types)
    except ValueError:
        if not text_admitted and types is not None and "null" in types and not text.strip(_SPACE):
            return None, True
        return text, text_admitted
    for one in listed:
        if _same(value, one):
            return (type(one)(value) if isinstance(one, int | float) else value), True
    if not isinstance(value, str) and _admits(types, value):
        whole = isinstance(value, float) and types is not None and "number" not in types
        return (int(value) if whole else value), True
    return (text if text_admitted else value), True


def _spelled(text: str, types: frozenset[str] | None) -> Any:
    """The value that a text spells. ValueError if none."""
    text = text.strip(_SPACE)
    if text in _WORDS:
        return _WORDS[text]
    try:
        return read_json(text)
    except ValueError:
        if types is None or not types & _BRACKETED:
            raise
    return _read_literal(text)


# -- text to values

_DECODER: Final = json.JSONDecoder(parse_constant=no_constant, parse_float=finite)


def read_json(text: str) -> Any:
    """The value of a JSON text. Of equal keys the last one counts.

    ValueError for everything else: also for NaN and infinities, numbers out of range, and nesting that is too deep.
    """
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


_OBJECT: Final = json.JSONDecoder(object_pairs_hook=unique, parse_constant=no_constant, parse_float=finite)


def read_object(text: str) -> tuple[dict[str, Any], int]:
    """The JSON object that a text begins with, and where it ends. ValueError as by `read_json`, and for equal keys."""
    try:
        return _OBJECT.raw_decode(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


_LITERAL_TEXT: Final = re.compile(
    r"""[\[{](?:[\[\]{}:,\s]|'(?:[^'\\\n]|\\.)*+'|"(?:[^"\\\n]|\\.)*+"|-?[0-9]++(?:\.[0-9]*+)?+(?:[eE][+-]?[0-9]++)?+|True|False|None)*+""",
)
"""What literals of JSON's kind are made of. Anything else is not shown to Python's parser, which warns of much."""
_ESCAPE: Final = re.compile(r"""(\\(?:[\\'"abfnrtvxuU]|0(?![0-7])))|\\""")


def _read_literal(text: str) -> dict[str, Any] | list[Any]:
    """An object or array as Python writes it. ValueError for everything else. Backslashes that escape nothing stay."""
    if len(text) > _LITERAL or not _LITERAL_TEXT.fullmatch(text):
        raise ValueError("no literal")
    try:
        value = ast.literal_eval(_ESCAPE.sub(lambda match: match[1] or r"\\", text))
    except (SyntaxError, TypeError, RecursionError, MemoryError, SystemError) as error:
        raise ValueError("no literal") from error
    if not isinstance(value, (dict, list)) or not _is_json(value):
        raise ValueError("no literal of JSON's kind")
    return value


def _is_json(value: Any) -> bool:
    """Whether JSON can write a value as it is."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(one) for key, one in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return math.isfinite(value) if isinstance(value, float) else value is None or isinstance(value, (str, int))


# -- values and types


def _type_of(value: Any) -> str | None:
    """The JSON type of a value; None if JSON has no such value. A float is a number, be it whole or not."""
    return next((name for kind, name in _TYPES.items() if isinstance(value, kind)), None)


def _admits(types: frozenset[str] | None, value: Any) -> bool:
    """Whether a value is of one of these types. Floats that are whole, and surely so, are integers as well."""
    if types is None or _type_of(value) in types:
        return True
    if isinstance(value, float):
        return "integer" in types and value.is_integer() and abs(value) < _EXACT
    return isinstance(value, int) and not isinstance(value, bool) and "number" in types


def _same(value: Any, other: Any) -> bool:
    """Whether a value that was read is the same as another. ``1`` and ``1.0`` are, ``1`` and ``true`` are not."""
    pairs = [(value, other)]
    while pairs:
        one, other = pairs.pop()
        if isinstance(one, dict) and isinstance(other, dict):
            if one.keys() != other.keys():
                return False
            pairs += [(one[key], other[key]) for key in one]
        elif isinstance(one, list) and isinstance(other, list):
            if len(one) != len(other):
                return False
            pairs += zip(one, other, strict=True)
        elif _key(one) != _key(other):
            return False
    return True


def _key(value: Any) -> tuple[str | None, Any]:
    """Equal for scalars that are the same; for anything else, only for the very same."""
    kind = _type_of(value)
    if kind is None or kind in _BRACKETED:
        return kind, id(value)
    return ("number" if kind == "integer" else kind), value


# -- schemas


@dataclass(frozen=True, slots=True)
class _Admitted:
    """Types that a schema admits (None: any; ``number`` admits integers), and values that it lists among others."""

    types: frozenset[str] | None
    listed: tuple[Any, ...] = ()


_ANYTHING: Final = _Admitted(None)


class Schema:
    """The schema of one value, with the root that its references lead into (itself, if none is given).

    Takes anything for a schema and never raises; what it does not understand admits anything.
    """

    def __init__(self, node: Any, root: Any = None) -> None:
        self._node = node
        self._root = node if root is None else root

    @computed
    def admitted(self) -> _Admitted:
        """Types and listed values."""
        return _admitted(self._node, self._root, iter(range(_STEPS)), 0)

    @computed
    def only_text(self) -> bool:
        """Whether only strings are admitted: every text then means itself, and need not be whole to be passed on."""
        return self.admitted.types == frozenset({"string"})

    def keys(self) -> frozenset[str]:
        """The properties that are declared, in any branch."""
        found = (node.get("properties") for node in _in_place(self._node, self._root))
        return frozenset(key for some in found if isinstance(some, Mapping) for key in some if isinstance(key, str))

    def items(self) -> Schema | None:
        """The schema of each item of an array; None if nothing is said, or items differ by place."""
        return self._nested(_items_of)

    def property(self, key: str) -> Schema | None:
        """The schema of one property, or of those that are not declared; None if nothing is said."""
        return self._nested(lambda node: _property_of(node, key))

    def _nested(self, pick: Callable[[Mapping[Any, Any]], Any]) -> Schema | None:
        node = _nested(self._node, self._root, pick, iter(range(_STEPS)), 0)
        return None if node is None else Schema(node, self._root)


def _admitted(node: Any, root: Any, steps: Iterator[int], depth: int) -> _Admitted:
    """What a schema admits: all that stands side by side in it holds at once."""
    if next(steps, None) is None or depth > _DEPTH or not isinstance(node, Mapping):
        return _ANYTHING

    def below(other: Any) -> _Admitted:
        return _admitted(other, root, steps, depth + 1)

    spent = len(_entries(node.get("enum"))) // _LISTED
    next(islice(steps, spent, spent), None)
    parts = [_stated(node), *map(below, _joined(node, root))]
    parts += [_either([below(branch) for branch in branches]) for branches in _branches(node)]
    admitted = reduce(_both, parts)
    if node.get("nullable") is True and admitted.types is not None:
        return _Admitted(admitted.types | {"null"}, admitted.listed)
    return admitted


def _stated(node: Mapping[Any, Any]) -> _Admitted:
    """What a schema says without others: types, or those of the values it lists."""
    types = _named_types(node.get("type"))
    listed = (node["const"],) if "const" in node else _entries(node.get("enum"))
    if types is None and listed:
        kinds = frozenset(map(_type_of, listed))
        types = None if None in kinds else frozenset(kind for kind in kinds if kind)
    return _Admitted(types, tuple(one for one in listed if _type_of(one) and _admits(types, one)))


def _named_types(named: Any) -> frozenset[str] | None:
    names = (named,) if isinstance(named, str) else _entries(named)
    if not names or not all(isinstance(name, str) and name in _TYPES.values() for name in names):
        return None
    return frozenset(names)


def _both(one: _Admitted, other: _Admitted) -> _Admitted:
    """What two schemas admit that hold at once; anything, if that is nothing."""
    if one.types is None or other.types is None:
        types = other.types if one.types is None else one.types
    else:
        kinds = one.types | other.types
        types = frozenset(kind for kind in kinds if _cover(one.types, kind) and _cover(other.types, kind))
        if not types:
            return _ANYTHING
    kept = one if one.listed else other
    listed = kept.listed
    if one.listed and other.listed:
        keys = set(map(_key, other.listed))
        listed = tuple(value for value in listed if _key(value) in keys)
    if types != kept.types:
        listed = tuple(value for value in listed if _admits(types, value))
    return _Admitted(types, listed)


def _cover(types: frozenset[str], kind: str) -> bool:
    return kind in types or (kind == "integer" and "number" in types)


def _either(branches: list[_Admitted]) -> _Admitted:
    """What one of several schemas admits."""
    if not branches:
        return _ANYTHING
    listed = {_key(value): value for branch in branches for value in branch.listed}
    stated = [branch.types for branch in branches if branch.types is not None]
    types = frozenset[str]().union(*stated) if len(stated) == len(branches) else None
    return _Admitted(types, tuple(listed.values()))


def _nested(
    node: Any, root: Any, pick: Callable[[Mapping[Any, Any]], Any], steps: Iterator[int], depth: int
) -> Mapping[Any, Any] | None:
    """The schema that `pick` finds in a schema, put together from all branches; None if it finds none."""
    if next(steps, None) is None or depth > _DEPTH:
        return {}
    if not isinstance(node, Mapping):
        return None

    def below(others: Sequence[Any]) -> list[Mapping[Any, Any] | None]:
        return [_nested(other, root, pick, steps, depth + 1) for other in others]

    own = pick(node)
    parts = [own if own is None or isinstance(own, Mapping) else {}, *below(_joined(node, root))]
    parts += [_composed("anyOf", below(branches)) for branches in _branches(node)]
    return _composed("allOf", parts)


def _composed(word: str, nodes: list[Mapping[Any, Any] | None]) -> Mapping[Any, Any] | None:
    distinct = list({id(node): node for node in nodes if node is not None}.values())
    if len(distinct) > 1:
        return {word: distinct}
    return distinct[0] if distinct else None


def _property_of(node: Mapping[Any, Any], key: str) -> Any:
    properties = node.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return {} if properties[key] is None else properties[key]
    others = node.get("additionalProperties")
    return others if isinstance(others, Mapping) and "patternProperties" not in node else None


def _items_of(node: Mapping[Any, Any]) -> Any:
    items = node.get("items")
    return items if isinstance(items, Mapping) and "prefixItems" not in node else None


def _in_place(node: Any, root: Any) -> Iterator[Mapping[Any, Any]]:
    """A schema and those that say more about the same value, each once."""
    waiting, seen = [node], set[int]()
    while waiting and len(seen) < _STEPS:
        node = waiting.pop()
        if isinstance(node, Mapping) and id(node) not in seen:
            seen.add(id(node))
            yield node
            waiting += _joined(node, root)
            waiting += [branch for branches in _branches(node) for branch in branches]


def _joined(node: Mapping[Any, Any], root: Any) -> list[Any]:
    """The schemas that hold besides this one."""
    referred = [_target(root, node["$ref"])] if "$ref" in node else []
    return [*referred, *_entries(node.get("allOf"))]


def _branches(node: Mapping[Any, Any]) -> list[Sequence[Any]]:
    """The alternatives of a schema: one of each list holds."""
    return [_entries(node[word]) for word in ("anyOf", "oneOf") if word in node]


def _entries(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _target(root: Any, reference: Any) -> Any:
    """What a reference within the root leads to; None if nowhere."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(root, Mapping):
            root = root.get(key)
        elif isinstance(root, (list, tuple)) and re.fullmatch("[0-9]{1,6}", key) and int(key) < len(root):
            root = root[int(key)]
        else:
            return None
    return root


# -- tools


class Tools:
    """Schemas by name, of tools in the shape of OpenAI (nested or flat) or Anthropic.

    Takes anything for a tool and never raises; what has no name is left out. Of equal names the last one counts. No
    tools and an empty list are the same: nothing is known, and every name may be one.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        entries = tuple(tools or ()) if isinstance(tools, Sequence) else ()
        self.given = bool(entries)
        """Whether there are any."""
        self._schemas = {name: schema for entry in entries for name, schema in _declaration(entry)}
        self._parameters: dict[tuple[str | None, str], Schema] = {}

    def knows(self, name: str) -> bool:
        """Whether a tool has this name; True where none are given."""
        return not self.given or name in self._schemas

    def parameter(self, name: str | None, key: str) -> Schema | None:
        """The schema of one parameter; None if nothing is said about it, or there is no such tool."""
        if (name, key) not in self._parameters:
            schema = None if name is None else self._schemas.get(name)
            found = None if schema is None else schema.property(key)
            if found is None or len(self._parameters) > 10_000:
                return found
            self._parameters[name, key] = found
        return self._parameters[name, key]

    def declared(self, name: str | None) -> frozenset[str]:
        """The names of the declared parameters; none if there is no such tool."""
        schema = None if name is None else self._schemas.get(name)
        return frozenset() if schema is None else schema.keys()


NO_TOOLS: Final = Tools(None)


def schemas_of(tools: Sequence[Mapping[str, Any]] | None) -> Tools:
    """Tools; the same ones come again and again, and what was found out about them is kept."""
    if not tools:
        return NO_TOOLS
    try:
        return _remembered(json.dumps(tools))
    except (TypeError, ValueError, RecursionError):
        return Tools(tools)


@lru_cache(maxsize=64)
def _remembered(tools: str) -> Tools:
    return Tools(json.loads(tools))


def _declaration(tool: Any) -> Iterator[tuple[str, Schema]]:
    """The name of a tool and the schema of its parameters, if it is one."""
    if not isinstance(tool, Mapping):
        return
    function = tool.get("function")
    function = function if isinstance(function, Mapping) else tool
    name = function.get("name")
    if isinstance(name, str):
        stated = (function[word] for word in ("parameters", "input_schema") if isinstance(function.get(word), Mapping))
        yield name, Schema(next(stated, {}))
