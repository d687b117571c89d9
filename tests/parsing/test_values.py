"""Reading bare text by a tool's schema: the rules one by one, the types of schemas, laws, hostile schemas."""

import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokentrace.values.schema import Schema, Tools, read_json, read_value

DEEP = 100_000
TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")


def typed(value: Any) -> Any:
    """A value with the type of everything in it: `==` takes 1, 1.0 and True for the same."""
    if isinstance(value, dict):
        return {key: typed(one) for key, one in value.items()}
    if isinstance(value, list):
        return [typed(one) for one in value]
    return type(value), value


def check(text: str, schema: Any, value: Any, certain: bool = True) -> None:
    read = read_value(text, None if schema is None else Schema(schema))
    assert (typed(read[0]), read[1]) == (typed(value), certain)


ONLY_TEXT: list[Any] = [
    {"type": "string"}, {"type": "string", "enum": ["a", 1, None]}, {"enum": ["a", "b"]}, {"const": "a"},
    {"anyOf": [{"type": "string"}, {"const": "a"}]},
    {"allOf": [{"type": ["string", "null"]}, {"type": ["string", "integer"]}]},
    {"$ref": "#/$defs/s", "$defs": {"s": {"type": "string"}}},
]  # fmt: skip


@pytest.mark.parametrize("schema", ONLY_TEXT, ids=json.dumps)
@given(
    text=st.text() | st.sampled_from(["", " ", "a", '"a"', "1", "null", "None", "True", "{}", "{'a': 1}", "\n  x\n\n"])
)
def test_where_only_strings_are_admitted_every_text_is_itself(schema: Any, text: str) -> None:
    read = Schema(schema)
    assert read.only_text
    assert read_value(text, read) == (text, True)


READ = [
    ("42", "integer", 42), ("5.0", "integer", 5), ("5.0", "number", 5.0), ("5", "number", 5),
    ("5.0", ["integer", "string"], 5), ("5.5", ["integer", "string"], "5.5"),
    ("1e20", ["integer", "string"], "1e20"),  # whole, but a float does not identify one integer
    ("true", "boolean", True), ("True", "boolean", True), ("null", "null", None), ("None", "null", None),
    ("None", ["string", "null"], None), ("Nonesuch", ["string", "null"], "Nonesuch"),
    ("True", ["string", "integer"], "True"), ("42", ["string", "integer"], 42),
    ("042", ["string", "integer"], "042"), ('"42"', ["string", "integer"], '"42"'),
    (" x ", ["string", "integer"], " x "), ("", ["string", "null"], ""), ("", "null", None),
    ("\n", ["integer", "null"], None), ('{"a": [1, null]}', "object", {"a": [1, None]}),
    ("[1, 2.0, true]", "array", [1, 2.0, True]), ("[one]", ["string", "array"], "[one]"),
    ("{'a': True, 'b': None}", "object", {"a": True, "b": None}), ("['x',]", "array", ["x"]),
    (r"['\d+', 'C:\new\\', '\1', 'é\x41']", "array", [r"\d+", "C:\new\\", r"\1", "éA"]),
    ("NaN", ["number", "string"], "NaN"), ("1e999", ["number", "string"], "1e999"),
    # JSON of a type that is not admitted is kept
    ('"five"', "integer", "five"), ("5.5", "integer", 5.5), ("true", "integer", True), ("None", "integer", None),
]  # fmt: skip
UNCERTAIN = [("five", "integer"), ("", "integer"), ("{'a': 1}", "integer"), ("9" * 5000, "integer")]
NO_LITERALS = [
    "{1: 2}", "{'a', 'b'}", "{'a': 1e999}", "[b'x']", "['a'] + ['b']", "[__import__('os')]", "['line\nbreak']",
    "[" + "9" * 5000 + ", 'a']", "['a'" + " " * 100_000 + "]", "[" * DEEP + "'a'" + "]" * DEEP,
]  # fmt: skip
"""Python that is no plain object or array."""
UNTYPED = [
    ("hello", "hello"), ("", ""), ("42", 42), ("true", True), ("None", None), ('{"a": 1}', {"a": 1}),
    ('"x"', '"x"'), ("{'a': 1}", "{'a': 1}"), ("2024-01-01", "2024-01-01"), ("NaN", "NaN"), ("[" * DEEP, "[" * DEEP),
]  # fmt: skip


def test_text_is_read_by_the_types_that_are_admitted() -> None:
    for text, types, value in READ:
        check(text, {"type": types}, value)
        branches = [types] if isinstance(types, str) else types
        named = {one: {"type": one} for one in branches}
        check(text, {"anyOf": list(named.values())}, value)
        check(text, {"oneOf": [{"$ref": f"#/$defs/{one}"} for one in branches], "$defs": named}, value)


def test_text_that_spells_nothing_admitted_is_itself_and_certain_only_where_text_is_admitted() -> None:
    for text, types in (*UNCERTAIN, *((text, ["object", "array"]) for text in NO_LITERALS)):
        check(text, {"type": types}, text, certain=False)
    for text in NO_LITERALS:
        check(text, {"type": ["object", "array", "string"]}, text)


@pytest.mark.parametrize("schema", [None, {}, {"type": 5}])
def test_without_types_json_is_a_value_and_the_rest_is_text(schema: Any) -> None:
    for text, value in UNTYPED:
        check(text, schema, value)


# -- the types that schemas admit


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"type": "string", "enum": ["a"], "nullable": True}, {"string", "null"}),
        ({"$ref": "#/$defs/n", "nullable": True, "$defs": {"n": {"type": "integer"}}}, {"integer", "null"}),
        (
            {"anyOf": [{"type": "integer"}, {"anyOf": [{"type": "array"}, {"const": True}]}]},
            {"integer", "array", "boolean"},
        ),
        ({"allOf": [{"type": "number"}, {"type": ["integer", "string"]}]}, {"integer"}),
        ({"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"object"}),
        ({"enum": [1, 2.5, None, True, [], {}]}, {"integer", "number", "null", "boolean", "array", "object"}),
        ({"$ref": "#/definitions/a~1b~0c%20d", "definitions": {"a/b~c d": {"type": "null"}}}, {"null"}),
        ({"type": "array", "anyOf": [{"$ref": "#/allOf/0"}], "allOf": [{"minItems": 1}]}, {"array"}),
        ({"nullable": True}, None),
        ({"type": "string", "allOf": [{"type": "integer"}]}, None),  # contradicts itself
        ({"$ref": "#"}, None),
        ({"$ref": "#anchor", "$defs": {}}, None),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, None),
        ({"$ref": "#/anyOf/x", "anyOf": [{"type": "null"}]}, {"null"}), ({"type": ["string", "text"]}, None),
        ({"anyOf": []}, None), ({"anyOf": [{"type": "string"}, 5]}, None), (5, None),
    ],
)  # fmt: skip
def test_types_that_a_schema_admits(schema: Any, types: set[str] | None) -> None:
    assert Schema(schema).types == types


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}, {"integer"}),
        ({"properties": {"b": {"type": "integer"}}, "additionalProperties": {"type": "string"}}, {"string"}),
        ({"anyOf": [{"properties": {"a": {"type": one}}} for one in ("null", "string")]}, {"null", "string"}),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, {"object"}),
        ({"type": "object", "properties": {"a": {"$ref": "#anchor"}}}, None),
        ({"properties": {"a": True}}, None),
        ({"properties": {"a": None}}, None),
    ],
)
def test_a_property_is_what_all_branches_say_of_it(schema: Any, types: set[str] | None) -> None:
    declared = Schema(schema).property("a")
    assert declared is not None
    assert declared.types == types


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}}}
PARAMETERS["$defs"] = {"days": {"type": "integer"}}


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
        {"function": {"name": "weather", "parameters": PARAMETERS}},
        {"name": "weather", "parameters": PARAMETERS},
        {"type": "function", "name": "weather", "parameters": PARAMETERS},
        {"name": "weather", "input_schema": PARAMETERS, "parameters": None},
        {"name": "weather", "parameters": {"$ref": "#/$defs/all", "$defs": {"all": PARAMETERS} | PARAMETERS["$defs"]}},
    ],
    ids="-".join,
)
def test_tools_of_every_shape_declare_the_same(tool: Any) -> None:
    tools = Tools([tool])
    assert (tools.declared_any, tools.knows("weather"), tools.knows("whether")) == (True, True, False)
    assert tools.declared("weather") == {"city", "days"}
    values = [read_value("3", tools.parameter("weather", key)) for key in ("city", "days")]
    assert values == [("3", True), (3, True)]


ROWS: list[Any] = [{"name": "f", "parameters": None}, {"name": "e", "input_schema": 5}]


@pytest.mark.parametrize("rows", [None, [], (), ROWS, [{"name": "f", "parameters": PARAMETERS}]])
def test_undeclared_parameters_and_unknown_tools_have_no_schema(rows: Any) -> None:
    tools = Tools(rows)
    assert (tools.declared_any, tools.knows("f"), tools.knows("g")) == (bool(rows), True, not rows)
    assert [tools.parameter(name, key) for name, key in (("f", "zip"), ("g", "city"), (None, "city"))] == [None] * 3
    assert tools.declared("g") == tools.declared(None) == frozenset()
    assert tools.declared("f") == (set() if rows is ROWS or not rows else {"city", "days"})


# -- laws


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "x", "'a'", "[1,]", "{a: 1}", "01", "1.", "+1", "1 2", "True", "None", '"\n"', "\ufeff1", "\u00a01"),
        *("NaN", "Infinity", "-Infinity", "[NaN]", "1e999", "[-1e999]", "[" * DEEP, '{"a":' * DEEP, "9" * 5000),
        "[" * DEEP + "]" * DEEP,
    ],
    ids=lambda text: text[:20],
)
def test_what_is_not_strict_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read_json(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(JSON, st.sampled_from([None, 2]), st.booleans())
def test_json_is_read_as_it_was_written(value: Any, indent: int | None, ascii_only: bool) -> None:
    assert typed(read_json(json.dumps(value, indent=indent, ensure_ascii=ascii_only))) == typed(value)


def type_of(value: Any) -> str:
    names = {type(None): "null", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return names[type(value)]


VALUES = JSON.filter(lambda value: not isinstance(value, str))
SPACE = st.text(" \t\n\r", max_size=3)


@given(value=VALUES, more=st.sets(st.sampled_from(TYPES)), before=SPACE, after=SPACE)
@example(value=5.0, more={"integer"}, before="", after="")
def test_json_of_an_admitted_type_is_that_value(value: Any, more: set[str], before: str, after: str) -> None:
    text = before + json.dumps(value) + after
    check(text, {"type": sorted(more | {type_of(value)})}, value)
    check(text, {"anyOf": [{"type": one} for one in sorted(more | {type_of(value)})]}, value)


@given(st.lists(JSON, max_size=4) | st.dictionaries(st.text(), JSON, max_size=4), st.booleans())
def test_what_repr_writes_is_that_value_where_its_type_is_admitted(value: Any, strings_too: bool) -> None:
    check(repr(value), {"type": [type_of(value), "string"] if strings_too else type_of(value)}, value)


@given(text=st.text(), schema=st.sampled_from([{"type": sorted({"string", one})} for one in TYPES]))
def test_text_among_other_types_is_itself_or_what_it_spells(text: str, schema: Any) -> None:
    value, certain = read_value(text, Schema(schema))
    assert certain
    if isinstance(value, str):
        assert value == text
    else:
        assert type_of(value) in {*schema["type"], "integer"}


WORDS = ["type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "nullable", "properties", "items", "a", "$defs"]
REFERENCES = [
    "#", "#/$defs/a", "#/properties/a", "#/anyOf/0", "#/allOf/0", "#/$defs/a/items", "#/-1", "other", "#/a/~2",
]  # fmt: skip
GARBAGE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1, 2)
    | st.floats()
    | st.sampled_from([*TYPES, *REFERENCES, "a", "", b"x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(st.sampled_from(WORDS) | st.sampled_from([None, 5]), inner, max_size=5)
        | st.fixed_dictionaries({}, optional={"$ref": st.sampled_from(REFERENCES), "$defs": inner, "anyOf": inner})
    ),
    max_leaves=25,
)
TEXTS = st.text() | JSON.map(json.dumps) | JSON.map(repr) | st.text("[]{}'\":,\\1Tne- ", max_size=20)


@given(text=TEXTS, schema=GARBAGE)
def test_no_schema_and_no_text_raises(text: str, schema: Any) -> None:
    read = Schema(schema)
    for one in (read, read.property("a"), read.items()):
        value, certain = read_value(text, one)
        types = None if one is None else one.types
        assert types is None or (types and types <= set(TYPES))
        assert certain or (value == text and types is not None and "string" not in types)
        assert not (one is not None and one.only_text) or value == text
        assert isinstance(value, float) is False or math.isfinite(value)
        if value != text:
            json.dumps(value, allow_nan=False)


@given(parameters=GARBAGE, text=TEXTS)
def test_no_tool_raises(parameters: Any, text: str) -> None:
    tools = Tools([{"name": "f", "parameters": parameters}, {"name": "g", "input_schema": parameters}])
    assert tools.declared("f") == tools.declared("g")
    assert all(isinstance(key, str) for key in tools.declared("f"))
    for key in ("a", *tools.declared("f")):
        one, other = (read_value(text, tools.parameter(name, key)) for name in "fg")
        assert (typed(one[0]), one[1]) == (typed(other[0]), other[1])
    assert all(tools.parameter("f", key) is not None for key in tools.declared("f"))


def chain(word: str, length: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(length):
        schema = {word: [schema]}
    return schema


def doubling(word: str, length: int) -> Any:
    """Every definition refers twice to the next, so there are 2 ** length paths."""
    definitions: Any = {str(i): {word: [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(length)}
    return {"$ref": "#/$defs/0", "$defs": definitions | {str(length): {"type": "string"}}}


def knot(word: str) -> Any:
    schema: Any = {"type": "string"}
    schema[word] = [schema, schema, {"properties": {"a": schema}}]
    return schema


@pytest.mark.parametrize("word", ["anyOf", "oneOf", "allOf"])
def test_schemas_without_end_are_read_in_time(word: str) -> None:
    assert Schema(chain(word, 20)).only_text
    assert Schema(chain(word, DEEP)).types is None
    assert Schema(doubling(word, 60)).only_text
    assert Schema(knot(word)).types in (None, {"string"})
    circle = {word: [{"$ref": "#"}, {"$ref": "#"}], "properties": {"a": {"type": "null"}}}
    assert Schema(circle).types is None
    assert Tools([{"name": "f", "parameters": circle}]).declared("f") == {"a"}
    assert Tools([{"name": "f", "parameters": knot(word)}]).declared("f") == {"a"}
