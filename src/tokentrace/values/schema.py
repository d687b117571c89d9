"""What bare text means by the tool's JSON schema, in formats that write strings as they are.

The first rule that applies counts:

1. Only strings are allowed: the text, as it arrives.
2. The text spells a value, not a string, of an allowed type: that value. ``5.0`` is 5 where
   only integers are.
3. Strings are allowed, or the schema says nothing: the text.
4. Otherwise: the value it spells; null for empty text, if allowed; else the text, uncertain.

Unclear, contradictory or circular parts of a schema allow every type.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from ..computed import computed
from .place import fields_of
from .plain import finite, no_constant

Types = frozenset[str] | None
"""JSON types; None means any. ``number`` includes ``integer``."""

_LONGEST_LITERAL = 100_000
_EXACT = 2**53
"""Below this, floats represent every integer exactly."""
_NAMES = ("null", "boolean", "integer", "number", "string", "array", "object")
_TYPES: dict[type, str] = dict(zip((type(None), bool, int, float, str, list, dict), _NAMES, strict=True))
_WORDS = {"True": True, "False": False, "None": None}
JSON_SPACE = " \t\n\r"


def read_value(text: str, schema: Schema | None) -> tuple[Any, bool]:
    """The value of a bare text, and whether that is certain. Never raises."""
    if schema is not None and schema.only_text:
        return text, True
    types, stripped = None if schema is None else schema.types, text.strip(JSON_SPACE)
    text_allowed = types is None or "string" in types
    try:
        value = _spelled(stripped, types)
    except ValueError:
        is_null = not (text_allowed or stripped) and "null" in (types or ())
        return (None, True) if is_null else (text, text_allowed)
    if isinstance(value, float) and types is not None and "number" not in types:
        value = int(value) if "integer" in types and value.is_integer() and abs(value) < _EXACT else value
    if not isinstance(value, str) and (types is None or _TYPES.get(type(value)) in types):
        return value, True
    return (text if text_allowed else value), True


def _spelled(text: str, types: Types) -> Any:
    """The value that a text spells in JSON or Python. Raises ValueError."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        return read_json(text)
    except ValueError:
        literal = types is not None and types & {"object", "array"} and len(text) <= _LONGEST_LITERAL
        if not literal or not _LITERAL_TEXT.fullmatch(text):
            raise
    try:
        value = ast.literal_eval(_ESCAPE.sub(lambda match: match[1] or r"\\", text))
    except (SyntaxError, TypeError, RecursionError, MemoryError, SystemError) as error:
        raise ValueError("no literal") from error
    if not isinstance(value, (dict, list)) or json.loads(json.dumps(value, allow_nan=False)) != value:
        raise ValueError("no literal of JSON's kind")
    return value


def read_json(text: str, members: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of strict JSON; `members` makes objects. Raises ValueError."""
    decoder = _DECODER if members is None else json.JSONDecoder(object_pairs_hook=members, **_STRICT)
    try:
        return decoder.decode(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


_STRICT: dict[str, Any] = {"parse_constant": no_constant, "parse_float": finite}
_DECODER = json.JSONDecoder(**_STRICT)
_LITERAL_TEXT = re.compile(
    r"""[\[{](?:[\[\]{}:,\s]|'(?:[^'\\\n]|\\.)*+'|"(?:[^"\\\n]|\\.)*+"|-?[0-9]++(?:\.[0-9]*+)?+(?:[eE][+-]?[0-9]++)?+|True|False|None)*+"""
)
"""What may reach Python's parser."""
_ESCAPE = re.compile(r"""(\\(?:[\\'"abfnrtvxuU]|0(?![0-7])))|\\""")


class Schema:
    """The schema of one value: anything. Never raises."""

    def __init__(self, node: Any, root: Any = None) -> None:
        self._node, self._root = node, node if root is None else root

    @computed
    def types(self) -> Types:
        try:
            return _types(self._node, self._root, {})
        except RecursionError:
            return None

    @computed
    def only_text(self) -> bool:
        """True if only strings are allowed: every text then means itself."""
        return self.types == frozenset({"string"})

    def keys(self) -> frozenset[str]:
        declared = (fields_of(node.get("properties")) or {} for node in self._nodes())
        return frozenset(key for some in declared for key in some if isinstance(key, str))

    def items(self) -> Schema | None:
        """The schema of an array's items, if stated."""
        return self._combined(node.get("items") for node in self._nodes() if "prefixItems" not in node)

    def property(self, key: str) -> Schema | None:
        """The schema of a property, declared or not, if stated."""
        stated: list[Any] = []
        for node in self._nodes():
            properties, undeclared = node.get("properties"), node.get("additionalProperties")
            if isinstance(properties, Mapping) and key in properties:
                stated.append({} if properties[key] is None else properties[key])
            elif isinstance(undeclared, Mapping) and "patternProperties" not in node:
                stated.append(undeclared)
        return self._combined(stated)

    def _combined(self, nodes: Iterable[Any]) -> Schema | None:
        stated = [node for node in nodes if node is not None]
        return Schema({"anyOf": stated}, self._root) if stated else None

    def _nodes(self) -> Iterator[Mapping[Any, Any]]:
        """This schema, then each other that it applies to the same value."""
        pending, seen = [self._node], set[int]()
        while pending:
            node = pending.pop()
            if isinstance(node, Mapping) and id(node) not in seen:
                seen.add(id(node))
                yield node
                pending += [*_joined(node, self._root), *_entries(node, "anyOf"), *_entries(node, "oneOf")]


def _types(node: Any, root: Any, memo: dict[int, Types]) -> Types:
    """The types a schema allows. With `memo`, cycles end, and every node is read once."""
    if not isinstance(node, Mapping) or id(node) in memo:
        return memo.get(id(node))
    memo[id(node)] = None
    named = node.get("type")
    names = [named] if isinstance(named, str) else _entries(node, "type")
    if not names or not all(isinstance(name, str) and name in _NAMES for name in names):
        values = [node["const"]] if "const" in node else _entries(node, "enum")
        names = [_TYPES.get(type(value), "") for value in values]
    stated = frozenset(names) | ({"integer"} if "number" in names else set())
    types: Types = stated if stated and "" not in stated else None
    statements = [_types(other, root, memo) for other in _joined(node, root)]
    for word in ("anyOf", "oneOf"):
        branches = [_types(branch, root, memo) for branch in _entries(node, word)]
        statements.append(None if None in branches else frozenset().union(*filter(None, branches)))
    for statement in statements:  # types that both allow; any, if there is none
        types = types & statement or None if types and statement else types or statement or None
    if types is not None and node.get("nullable") is True:
        types |= {"null"}
    memo[id(node)] = types
    return types


def _joined(node: Mapping[Any, Any], root: Any) -> list[Any]:
    return [*([_target(root, node["$ref"])] if "$ref" in node else []), *_entries(node, "allOf")]


def _entries(node: Mapping[Any, Any], word: str) -> Sequence[Any]:
    value = node.get(word)
    return value if isinstance(value, (list, tuple)) else ()


def _target(root: Any, reference: Any) -> Any:
    """What a reference within the root points to, or None."""
    start, *path = unquote(reference).split("/") if isinstance(reference, str) else [""]
    node = root if start == "#" else None
    for part in path:
        if isinstance(node, (list, tuple)):
            node = node[int(part)] if re.fullmatch("[0-9]{1,6}", part) and int(part) < len(node) else None
        else:
            node = (
                node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
            )
    return node


class Tools:
    """Schemas by name, of checked tools in OpenAI's or Anthropic's shape."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        self._schemas: dict[str | None, Schema] = {}
        for tool in tools or ():
            function = fields_of(tool.get("function", tool)) or {}
            parameters = function.get("parameters") or function.get("input_schema")
            self._schemas[function.get("name")] = Schema(parameters)
        self.declared_any = bool(self._schemas)

    def declares(self, name: str | None) -> bool:
        return name in self._schemas

    def knows(self, name: str) -> bool:
        return not self.declared_any or name in self._schemas

    def parameter(self, name: str | None, key: str) -> Schema | None:
        """The schema of a parameter, if declared."""
        return self._schemas[name].property(key) if name in self._schemas else None

    def declared(self, name: str | None) -> frozenset[str]:
        """The names of a tool's declared parameters."""
        return self._schemas[name].keys() if name in self._schemas else frozenset()
