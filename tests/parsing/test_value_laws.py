"""Values: strict JSON, laws for any text and schema, schemas without end."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.parsing.typed_values import DEEP, check, typed
from tokentrace.parsing.values import Schema, Tools, read_json, read_value

TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")
# -- strict JSON


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


def test_the_last_of_equal_keys_counts() -> None:
    assert read_json('{"a": 1, "a": 2}') == {"a": 2}


# -- laws


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


@given(value=VALUES)
def test_listing_a_value_admits_it(value: Any) -> None:
    check(json.dumps(value), {"enum": ["other", value]}, value)


@given(text=st.text(), schema=st.sampled_from([{"type": sorted({"string", one})} for one in TYPES]))
def test_text_among_other_types_is_itself_or_what_it_spells(text: str, schema: Any) -> None:
    value, sure = read_value(text, Schema(schema))
    assert sure
    if isinstance(value, str):
        assert value == text
    else:
        assert type_of(value) in {*schema["type"], "integer"}


WORDS = ["type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "nullable", "properties", "items", "a", "$defs"]
REFERENCES = [
    "#",
    "#/$defs/a",
    "#/properties/a",
    "#/anyOf/0",
    "#/allOf/0",
    "#/$defs/a/items",
    "#/-1",
    "other",
    "#/a/~2",
]
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
        value, sure = read_value(text, one)
        types = None if one is None else one.types
        assert types is None or (types and types <= set(TYPES))
        assert sure or (value == text and types is not None and "string" not in types)
        assert not (one is not None and one.only_text) or value == text
        assert isinstance(value, float) is False or math.isfinite(value)
        if value != text:
            json.dumps(value, allow_nan=False)


@given(tool=GARBAGE, parameters=GARBAGE, text=TEXTS)
def test_no_tool_raises(tool: Any, parameters: Any, text: str) -> None:
    rows: list[Any] = [tool, {"name": "f", "parameters": parameters}, {"name": "g", "input_schema": parameters}]
    tools = Tools(rows)
    assert tools.declared("f") == tools.declared("g")
    assert all(isinstance(key, str) for key in tools.declared("f"))
    for key in ("a", *tools.declared("f")):
        one, other = (read_value(text, tools.parameter(name, key)) for name in "fg")
        assert (typed(one[0]), one[1]) == (typed(other[0]), other[1])
    assert all(tools.parameter("f", key) is not None for key in tools.declared("f"))


# -- schemas without end


def chain(word: str, length: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(length):
        schema = {word: [schema]}
    return schema


def doubling(word: str, length: int) -> Any:
    """Every definition refers twice to the next: as many ways as 2 to the power of the length."""
    definitions: Any = {str(i): {word: [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(length)}
    return {"$ref": "#/$defs/0", "$defs": definitions | {str(length): {"type": "string"}}}


def knot(word: str) -> Any:
    schema: Any = {"type": "string"}
    schema[word] = [schema, schema, {"properties": {"a": schema}}]
    return schema


@pytest.mark.parametrize("word", ["anyOf", "oneOf", "allOf"])
def test_schemas_without_end_admit_what_is_understood_of_them(word: str) -> None:
    assert Schema(chain(word, 20)).only_text
    assert Schema(chain(word, DEEP)).types is None
    assert Schema(doubling(word, 5)).only_text
    assert Schema(doubling(word, 60)).types is None
    assert Schema(doubling(word, 60)).property("a") is not None  # something unknown may be said of it
    assert Schema(knot(word)).only_text
    circle = {word: [{"$ref": "#"}, {"$ref": "#"}], "properties": {"a": {"type": "null"}}}
    assert Schema(circle).types is None
    assert Tools([{"name": "f", "parameters": circle}]).declared("f") == {"a"}
    assert Tools([{"name": "f", "parameters": knot(word)}]).declared("f") == {"a"}
    assert Tools([{"name": "f", "parameters": chain(word, DEEP)}]).declared("f") == frozenset()


def test_long_lists_of_values_and_branches_are_understood() -> None:
    names = [f"name {i}" for i in range(20_000)]
    assert Schema({"allOf": [{"enum": names}, {"enum": names[::-1]}]}).only_text
    numbers = Schema({"anyOf": [{"const": i} for i in range(500)]})
    assert numbers.types == {"integer"}
    assert read_value("499.0", numbers) == (499, True)


def test_long_lists_that_are_referred_to_again_and_again_are_given_up() -> None:
    definitions = {"names": {"enum": [str(i) for i in range(10_000)]}}
    assert Schema({"anyOf": [{"$ref": "#/$defs/names"}] * 5, "$defs": definitions}).only_text
    assert Schema({"anyOf": [{"$ref": "#/$defs/names"}] * 20, "$defs": definitions}).types is None


def test_a_list_that_holds_itself_is_no_value_of_a_text() -> None:
    itself: list[Any] = []
    itself.append(itself)
    check("[[[1]]]", {"enum": [itself]}, [[[1]]])
