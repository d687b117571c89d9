"""What schemas and tools admit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parsing.typed_values import check
from tokentrace.parsing.values import Schema, Tools, read_value

# -- what schemas admit


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"type": "string", "enum": ["a"], "nullable": True}, {"string", "null"}),
        ({"$ref": "#/$defs/n", "nullable": True, "$defs": {"n": {"type": "integer"}}}, {"integer", "null"}),
        ({"type": ["string", "null"], "enum": ["a"]}, {"string", "null"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"integer", "null"}),
        (
            {"anyOf": [{"type": "integer"}, {"anyOf": [{"type": "array"}, {"const": True}]}]},
            {"integer", "array", "boolean"},
        ),
        ({"allOf": [{"type": "number"}, {"type": ["integer", "string"]}]}, {"integer"}),
        ({"allOf": [{"type": "number"}, {"type": "number"}]}, {"number"}),
        ({"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"object"}),
        ({"enum": [1, 2.5, None, True, [], {}]}, {"integer", "number", "null", "boolean", "array", "object"}),
        ({"$ref": "#/definitions/a~1b~0c%20d", "definitions": {"a/b~c d": {"type": "null"}}}, {"null"}),
        ({"type": "array", "anyOf": [{"$ref": "#/allOf/0"}], "allOf": [{"minItems": 1}]}, {"array"}),
        ({"nullable": True}, None),
        ({"type": "string", "allOf": [{"type": "integer"}]}, None),  # contradicts itself
        ({"$ref": "#"}, None),
        ({"$ref": "#anchor", "$defs": {}}, None),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, None),
        ({"$ref": "#/anyOf/x", "anyOf": [{"type": "null"}]}, {"null"}),
        ({"type": []}, None),
        ({"type": ["string", "text"]}, None),
        ({"type": [["string"]]}, None),
        ({"anyOf": []}, None),
        ({"anyOf": "string"}, None),
        ({"anyOf": [{"type": "string"}, 5]}, None),
        ({"enum": []}, None),
        ({"enum": "ab"}, None),
        (5, None),
    ],
)
def test_types_that_a_schema_admits(schema: Any, types: set[str] | None) -> None:
    assert Schema(schema).types == types


def test_nullable_parameters_take_null_in_either_spelling_and_nothing_else_for_it() -> None:
    for schema in (
        {"type": "string", "nullable": True},
        {"type": ["string", "null"]},
        {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    ):
        check("null", schema, None)
        check("None", schema, None)
        check("nil", schema, "nil")
        check("", schema, "")


NODE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
}


def test_nested_schemas_are_found_through_references_and_branches() -> None:
    schema = Schema({"type": "array", "items": {"$ref": "#/$defs/node"}, "$defs": {"node": NODE}})
    node = schema.items()
    for _ in range(100):
        assert node is not None
        assert node.types >= {"object"}
        name = node.property("name")
        assert name is not None
        assert name.only_text
        assert node.property("other") is None
        assert node.items() is None
        node = node.property("next")


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}, {"integer"}),
        ({"properties": {"b": {"type": "integer"}}, "additionalProperties": {"type": "string"}}, {"string"}),
        ({"anyOf": [{"properties": {"a": {"type": one}}} for one in ("null", "string")]}, {"null", "string"}),
        ({"allOf": [{"properties": {"a": {"type": ["null", one]}}} for one in ("array", "string")]}, {"null"}),
        ({"allOf": [{"properties": {"a": {"title": "A"}}}, {"properties": {"a": {"type": "null"}}}]}, {"null"}),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, {"object"}),
        ({"type": "object", "properties": {"a": {"$ref": "#anchor"}}}, None),
        ({"properties": {"a": True}}, None),
        ({"properties": {"a": None}}, None),
    ],
)
def test_a_property_is_what_all_branches_say_of_it(schema: Any, types: set[str] | None) -> None:
    found = Schema(schema).property("a")
    assert found is not None
    assert found.types == types


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": []},
        {"properties": {"b": {}}},
        {"additionalProperties": True},
        {"additionalProperties": {"type": "string"}, "patternProperties": {"(": {}}},
        {"anyOf": [5, {"properties": 5}]},
        [],
    ],
)
def test_of_other_properties_nothing_is_said(schema: Any) -> None:
    assert Schema(schema).property("a") is None


def test_items_that_differ_by_place_have_no_one_schema() -> None:
    assert Schema({"items": [{"type": "string"}]}).items() is None
    assert Schema({"prefixItems": [{"type": "null"}], "items": {"type": "string"}}).items() is None


# -- tools


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}}}
PARAMETERS["$defs"] = {"days": {"type": "integer"}}


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
        {"function": {"name": "weather", "parameters": PARAMETERS}},
        {"name": "weather", "parameters": PARAMETERS},
        {"type": "function", "name": "weather", "parameters": PARAMETERS},
        {"name": "weather", "input_schema": PARAMETERS},
        {"name": "weather", "parameters": {"$ref": "#/$defs/all", "$defs": {"all": PARAMETERS} | PARAMETERS["$defs"]}},
    ],
    ids="-".join,
)
def test_tools_of_every_shape_declare_the_same(tool: Any) -> None:
    tools = Tools([tool])
    assert tools.declared_any
    assert tools.knows("weather")
    assert not tools.knows("whether")
    assert tools.declared("weather") == {"city", "days"}
    city, days = tools.parameter("weather", "city"), tools.parameter("weather", "days")
    assert city is not None
    assert city.only_text
    assert days is not None
    assert days.types == {"integer"}
    assert read_value("3", city) == ("3", True)
    assert read_value("3", days) == (3, True)


def test_of_undeclared_parameters_and_unknown_tools_nothing_is_said() -> None:
    tools = Tools([{"name": "weather", "parameters": PARAMETERS}])
    for name, key in (("weather", "zip"), ("whether", "city"), (None, "city")):
        assert tools.parameter(name, key) is None
    assert tools.declared("whether") == tools.declared(None) == frozenset()
    assert read_value("07 ", tools.parameter("weather", "zip")) == ("07 ", True)
    assert read_value("7", tools.parameter("weather", "zip")) == (7, True)


@pytest.mark.parametrize("nothing", [None, [], ()])
def test_without_tools_every_name_may_be_one(nothing: Any) -> None:
    tools = Tools(nothing)
    assert not tools.declared_any
    assert tools.knows("anything")
    assert tools.parameter("anything", "a") is None
    assert tools.declared("anything") == frozenset()


def test_the_last_of_two_tools_of_one_name_counts() -> None:
    tools = Tools([{"name": "f", "parameters": {"properties": {key: {}}}} for key in "ab"])
    assert tools.declared("f") == {"b"}


def test_what_is_no_tool_is_left_out() -> None:
    rows: list[Any] = [5, None, {}, {"name": 5}, {"function": 5}, {"function": {}}, {"name": "f", "parameters": 5}]
    tools = Tools(rows)
    assert tools.declared_any
    assert tools.knows("f")
    assert not tools.knows("5")
    assert tools.declared("f") == frozenset()
