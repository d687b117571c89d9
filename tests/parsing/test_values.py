"""What bare text means by a tool's schema: the rungs of the ladder one by one, what schemas admit, hostile ones."""

from __future__ import annotations

import copy
import json
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parsing.typed_values import DEEP, check
from tokentrace.parsing.values import Schema, read_value

# -- rung 1: values that are listed


class Unit(StrEnum):
    CELSIUS = "celsius"


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("auto", {"enum": ["auto", 1]}, "auto"),
        ("1", {"enum": ["auto", 1]}, 1),
        ("1", {"enum": ["1", 1]}, "1"),  # the text itself comes first
        ("1", {"type": ["string", "integer"], "enum": ["1", "2"]}, "1"),
        ("null", {"enum": ["null", None]}, "null"),
        ('"auto"', {"enum": ["auto", 1]}, "auto"),
        ("2", {"type": "integer", "enum": [1, 2, 3]}, 2),
        ("2", {"enum": [1, 2, 3]}, 2),
        ("\n2\n", {"enum": [1, 2, 3]}, 2),
        ("2.0", {"enum": [1, 2, 3]}, 2),
        ("2", {"enum": [1.5, 2.0]}, 2.0),
        ("2.0", {"type": "number", "enum": [2]}, 2),
        ("true", {"enum": [1, True]}, True),
        ("1", {"enum": [True, 1]}, 1),
        ("True", {"enum": [1, True]}, True),
        ("None", {"enum": ["a", None]}, None),
        ("null", {"enum": ["a", None]}, None),
        ("x", {"const": "x"}, "x"),
        ("5", {"const": 5}, 5),
        ("null", {"const": None}, None),
        ("[1, 2]", {"enum": [[1, 2], "x"]}, [1, 2]),
        ("{'a': True}", {"enum": [{"a": True}, "x"]}, {"a": True}),
        ("5", {"anyOf": [{"const": "5"}, {"type": "integer"}]}, "5"),
        ("5", {"oneOf": [{"enum": ["4", "5"]}, {"type": "integer"}]}, "5"),
        ("6", {"oneOf": [{"enum": ["4", "5"]}, {"type": "integer"}]}, 6),
        ("5", {"anyOf": [{"$ref": "#/$defs/fives"}, {"type": "integer"}], "$defs": {"fives": {"const": "5"}}}, "5"),
        ("5", {"allOf": [{"enum": ["5", 6]}, {"enum": ["5", 7]}], "type": ["string", "integer"]}, "5"),
        ("auto", {"anyOf": [{"const": "auto"}, {}]}, "auto"),
        ('"auto"', {"anyOf": [{"const": "auto"}, {}]}, "auto"),
        ("celsius", {"enum": [Unit.CELSIUS, 1]}, "celsius"),
    ],
)
def test_a_listed_value_is_found_by_its_text_or_by_what_the_text_spells(text: str, schema: Any, value: Any) -> None:
    check(text, schema, value)


@pytest.mark.parametrize(
    ("text", "schema", "value", "sure"),
    [
        ("1", {"enum": [True, "x"]}, "1", True),
        ("true", {"enum": [1, "x"]}, "true", True),
        ("[true]", {"enum": [[1]]}, [True], True),
        ("7", {"enum": [1, 2]}, 7, True),
        ("seven", {"enum": [1, 2]}, "seven", False),
        ("c", {"enum": ["a", 1]}, "c", True),
        (" a ", {"enum": ["a", 1]}, " a ", True),
        ("[1]", {"enum": [{"a": 1}, [1, 2]]}, [1], True),
        ('{"a": 1}', {"enum": [{"b": 1}]}, {"a": 1}, True),
    ],
)
def test_what_is_not_listed_is_read_by_type(text: str, schema: Any, value: Any, sure: bool) -> None:
    check(text, schema, value, sure)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("1", {"type": "string", "enum": [1, 2]}, "1"),
        ("1", {"type": "integer", "enum": ["1", "2"]}, 1),
        ("null", {"type": "string", "enum": ["a", None]}, "null"),
        ("1", {"allOf": [{"type": "integer"}, {"enum": ["1", 1]}]}, 1),
    ],
)
def test_a_listed_value_that_its_type_forbids_does_not_count(text: str, schema: Any, value: Any) -> None:
    check(text, schema, value)


def test_a_value_never_shares_structure_with_the_schema() -> None:
    schema = {"enum": [{"a": [1]}]}
    kept = copy.deepcopy(schema)
    value, _ = read_value('{"a": [1]}', Schema(schema))
    value["a"].append(2)
    assert schema == kept


# -- rung 2: only strings


ONLY_TEXT: list[Any] = [
    {"type": "string"},
    {"type": ["string"]},
    {"type": "string", "enum": ["a", "b"]},
    {"type": "string", "enum": ["a", 1, None]},
    {"enum": ["a", "b"]},
    {"const": "a"},
    {"anyOf": [{"type": "string"}, {"const": "a"}]},
    {"allOf": [{"type": ["string", "null"]}, {"type": ["string", "integer"]}]},
    {"allOf": [{"description": "x"}], "type": "string"},
    {"$ref": "#/$defs/s", "$defs": {"s": {"type": "string"}}},
    {"$ref": "elsewhere.json", "type": "string"},
    {"type": "string", "nullable": False},
    {"type": "string", "minLength": 5, "pattern": "("},
]


@pytest.mark.parametrize("schema", ONLY_TEXT, ids=json.dumps)
@given(
    text=st.text() | st.sampled_from(["", " ", "a", '"a"', "1", "null", "None", "True", "{}", "{'a': 1}", "\n  x\n\n"])
)
def test_where_only_strings_are_admitted_every_text_is_itself(schema: Any, text: str) -> None:
    read = Schema(schema)
    assert read.only_text
    assert read.types == {"string"}
    assert read_value(text, read) == (text, True)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {"type": ["string", "null"]},
        {"type": "string", "nullable": True},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"anyOf": [{"type": "string"}, {}]},
        {"enum": ["a", None]},
        {"enum": ["a", object()]},
        {"type": "str"},
        {"$ref": "#/$defs/missing"},
    ],
)
def test_what_may_be_no_string_cannot_be_passed_on_before_its_end(schema: Any) -> None:
    assert not Schema(schema).only_text


# -- rungs 3 and 4: types, strings among them or not


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("42", "integer", 42),
        ("\n42\n", "integer", 42),
        ("5.0", "integer", 5),
        ("-0.0", "integer", 0),
        ("1e3", "integer", 1000),
        ("5.0", "number", 5.0),
        ("5.0", ["integer", "number"], 5.0),
        ("5", "number", 5),
        ("5.0", ["integer", "string"], 5),
        ("5.5", ["integer", "string"], "5.5"),
        ("1e20", ["integer", "string"], "1e20"),  # whole, but no float tells which integer was meant
        ("true", "boolean", True),
        ("True", "boolean", True),
        ("False", "boolean", False),
        (" False\n", "boolean", False),
        ("null", "null", None),
        ("None", "null", None),
        ("null", ["string", "null"], None),
        ("None", ["string", "null"], None),
        ("Nonesuch", ["string", "null"], "Nonesuch"),
        ("none", ["string", "null"], "none"),
        ("true", ["string", "null"], "true"),
        ("True", ["string", "integer"], "True"),
        ("1", ["string", "boolean"], "1"),
        ("42", ["string", "integer"], 42),
        ("42", ["string", "null"], "42"),
        ("042", ["string", "integer"], "042"),
        ('"42"', ["string", "integer"], '"42"'),
        (" x ", ["string", "integer"], " x "),
        ("", ["string", "null"], ""),
        ("", "null", None),
        ("", ["integer", "null"], None),
        ("\n", ["integer", "null"], None),
        ('{"a": [1, null]}', "object", {"a": [1, None]}),
        ('\n{\n  "a": 1\n}\n', "object", {"a": 1}),
        ("[1, 2.0, true]", "array", [1, 2.0, True]),
        ("[1]", ["string", "array"], [1]),
        ("[1]", ["string", "object"], "[1]"),
        ("[one]", ["string", "array"], "[one]"),
        ("{'a': True, 'b': None}", "object", {"a": True, "b": None}),
        ("\n['x', \"it's\"]\n", "array", ["x", "it's"]),
        ("['x']", ["string", "array"], ["x"]),
        ("['x',]", "array", ["x"]),
        ("['x']", "object", ["x"]),
        (r"['\d+', 'C:\new\\', '\1', 'é\x41']", "array", [r"\d+", "C:\new\\", r"\1", "éA"]),
        ("\u00a05", ["integer", "string"], "\u00a05"),
        ("true", ["number", "string"], "true"),
        ("NaN", ["number", "string"], "NaN"),
        ("1e999", ["number", "string"], "1e999"),
    ],
)
def test_text_is_read_by_the_types_that_are_admitted(text: str, types: Any, value: Any) -> None:
    check(text, {"type": types}, value)
    branches = [types] if isinstance(types, str) else types
    check(text, {"anyOf": [{"type": one} for one in branches]}, value)
    check(text, {"oneOf": [{"$ref": f"#/$defs/{one}"} for one in branches], "$defs": by_name(branches)}, value)


def by_name(types: list[str]) -> dict[str, Any]:
    return {one: {"type": one} for one in types}


@pytest.mark.parametrize(
    "text",
    [
        "  indented",
        "trailing  ",
        "\n\nlines\n\n",
        "\tdef f():\n\t\treturn 1\n",
        "\r\n",
        " ",
        "",
        "\u00a0x\u00a0",
        '"quoted"',
        "'quoted'",
    ],
)
@pytest.mark.parametrize(
    "schema", [{"type": "string"}, {"type": ["string", "null"]}, {"type": ["string", "integer"]}, {}, None]
)
def test_strings_keep_the_white_space_and_quotes_around_them(text: str, schema: Any) -> None:
    check(text, schema, text)


@pytest.mark.parametrize(
    "text",
    [
        "{1: 2}",
        "{'a', 'b'}",
        "[1], [2]",
        "['a': 1]",
        "{'a': 1e999}",
        "[b'x']",
        "[r'x']",
        "['a'] + ['b']",
        "[f'x']",
        "[('a', 'b')]",
        "[__import__('os')]",
        "['\\x4']",
        "['\x00']",
        "['\ud800']",
        "['line\nbreak']",
        "{['a']: 1}",
        "[1_0]",
        "[1if 1else 2]",
        "['a'] # why",
        "[01]",
        "[" + "9" * 5000 + ", 'a']",
        "['a'" + " " * 100_000 + "]",
        "[" * DEEP + "'a'" + "]" * DEEP,
        "[" * 150 + "'a'" + "]" * 150 + "]",
        "[" + "-" * DEEP + "1]",
    ],
    ids=lambda text: text[:20],
)
def test_python_that_is_no_plain_object_or_array_stays_text(text: str) -> None:
    check(text, {"type": ["object", "array"]}, text, sure=False)
    check(text, {"type": ["object", "array", "string"]}, text)


# -- rung 5: nothing said


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("hello", "hello"),
        ("hello world\n", "hello world\n"),
        ("", ""),
        ("42", 42),
        ("4.0", 4.0),
        ("-1", -1),
        ("true", True),
        ("null", None),
        ("True", True),
        ("False", False),
        ("None", None),
        ('{"a": 1}', {"a": 1}),
        (" [1] ", [1]),
        ('"x"', '"x"'),
        ("{'a': 1}", "{'a': 1}"),
        ("2024-01-01", "2024-01-01"),
        ("007", "007"),
        ("1_000", "1_000"),
        ("NaN", "NaN"),
        ("Infinity", "Infinity"),
        ("[" * DEEP, "[" * DEEP),
        ("9" * 5000, "9" * 5000),
    ],
    ids=lambda value: repr(value)[:20],
)
@pytest.mark.parametrize("schema", [None, {}, True, {"type": 5}, {"description": "what"}])
def test_where_nothing_is_said_json_is_a_value_and_the_rest_is_text(text: str, value: Any, schema: Any) -> None:
    check(text, schema, value)


# -- rung 6: another type than admitted


@pytest.mark.parametrize(
    ("text", "types", "value", "sure"),
    [
        ('"five"', "integer", "five", True),
        ("[5]", "integer", [5], True),
        ("5.5", "integer", 5.5, True),
        ("1e20", "integer", 1e20, True),
        ("true", "integer", True, True),
        ("None", "integer", None, True),
        ("1", "boolean", 1, True),
        ("five", "integer", "five", False),
        (" five\n", "integer", " five\n", False),
        ("TRUE", "boolean", "TRUE", False),
        ("", "integer", "", False),
        ("{'a': 1}", "integer", "{'a': 1}", False),
        ('{"a": ', "object", '{"a": ', False),
        ("9" * 5000, "integer", "9" * 5000, False),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_another_type_than_admitted_is_passed_on_and_plain_text_is_not_sure(
    text: str, types: Any, value: Any, sure: bool
) -> None:
    check(text, {"type": types}, value, sure)
