"""``tojson`` writes what ``json.dumps`` writes, each scalar credited to its own field."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentrace.template.budget import TooLarge
from tokentrace.template.jsonify import JsonOptions, dumps
from tokentrace.template.origin import KEY, UNKNOWN, Origin
from tokentrace.template.strings import TracedStr, join_traced, traced
from tokentrace.template.traced import wrap

texts = st.text(st.characters(codec="utf-8") | st.sampled_from('"\\/\n\t\x00\x7f\u2028<>&é😀'), max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
options = st.fixed_dictionaries(
    {},
    optional={
        "ensure_ascii": st.booleans(),
        "indent": st.none() | st.integers(-1, 6) | st.sampled_from(["", "\t", "> "]),
        "separators": st.none() | st.tuples(st.sampled_from([",", ", ", " ;"]), st.sampled_from([":", ": ", "="])),
        "sort_keys": st.booleans(),
    },
)
ROOT = Origin.of(3, "field")


def expected(value: Any, chosen: dict[str, Any]) -> str:
    return json.dumps(value, **{"ensure_ascii": False} | chosen)


@given(values, options)
def test_the_text_is_that_of_json_dumps(value: Any, chosen: dict[str, Any]) -> None:
    got = dumps(wrap(value, ROOT), JsonOptions(**chosen))
    assert got == expected(value, chosen)
    assert got == dumps(value, JsonOptions(**chosen))
    assert isinstance(got, TracedStr)
    assert got.runs[-1][0] == len(got)
    assert [end for end, _ in got.runs] == sorted({end for end, _ in got.runs})
    if value != "":  # an empty string has no character to be credited
        assert all(origin is not None and origin[: len(ROOT)] == ROOT for _, origin in got.runs)


@given(values, options)
def test_arguments_are_one_field(value: Any, chosen: dict[str, Any]) -> None:
    origin = Origin.of(3, "tool_calls", 0, "function", "arguments")
    arguments = {"value": value, "more": [value]}
    got = dumps(wrap(arguments, origin), JsonOptions(**chosen))
    assert got == expected(arguments, chosen)
    assert got.runs == ((len(got), origin),)
    outer = dumps({"name": "f", "arguments": wrap(arguments, origin)}, JsonOptions(**chosen))
    assert outer == expected({"name": "f", "arguments": arguments}, chosen)


@given(
    st.dictionaries(scalars.filter(lambda key: not (isinstance(key, float) and math.isnan(key))), scalars, max_size=4),
    options,
)
def test_keys_of_every_kind(value: dict[Any, Any], chosen: dict[str, Any]) -> None:
    try:
        text = expected(value, chosen)
    except TypeError:  # keys that cannot be sorted
        with pytest.raises(TypeError):
            dumps(wrap(value, ROOT), JsonOptions(**chosen))
        return
    assert dumps(wrap(value, ROOT), JsonOptions(**chosen)) == text
    assert dumps(value, JsonOptions(**chosen)) == text


@given(st.lists(st.tuples(texts, st.sampled_from([None, ROOT, UNKNOWN])), max_size=5), st.booleans())
def test_strings_of_several_origins_are_escaped_run_by_run(parts: list[tuple[str, Any]], ensure_ascii: bool) -> None:
    whole = join_traced([traced(text, origin) for text, origin in parts])
    got = dumps([whole], JsonOptions(ensure_ascii))
    assert got == json.dumps(["".join(text for text, _ in parts)], ensure_ascii=ensure_ascii)
    for origin in (ROOT, UNKNOWN):
        credited = "".join(
            str.__getitem__(got, slice(start, end))
            for start, (end, found) in zip([0, *(end for end, _ in got.runs)], got.runs, strict=False)
            if found == origin
        )
        own = [json.dumps(text, ensure_ascii=ensure_ascii)[1:-1] for text, found in parts if found == origin]
        assert credited.strip('"') == "".join(own).strip('"')


def test_each_scalar_is_credited_to_its_own_field() -> None:
    got = dumps(wrap({"a": "x", "b": [1, None]}, ROOT))
    starts = [0, *(end for end, _ in got.runs)]
    spans = [(got[start:end], origin) for start, (end, origin) in zip(starts, got.runs, strict=False)]
    assert spans == [
        ("{", ROOT),
        ('"a"', (*ROOT, "a", KEY)),
        (": ", ROOT),
        ('"x"', (*ROOT, "a")),
        (", ", ROOT),
        ('"b"', (*ROOT, "b", KEY)),
        (": ", ROOT),
        ("[", (*ROOT, "b")),
        ("1", (*ROOT, "b", 0)),
        (", ", (*ROOT, "b")),
        ("null", (*ROOT, "b", 1)),
        ("]", (*ROOT, "b")),
        ("}", ROOT),
    ]


def test_what_the_template_built_is_scaffold_around_what_it_was_given() -> None:
    got = dumps({"role": traced("x", ROOT), "n": 1})
    assert [origin for _, origin in got.runs] == [None, ROOT, None]


@pytest.mark.parametrize("name", ["field", "arguments"])
def test_gigantic_indents_are_refused(name: str) -> None:
    value = wrap({"a": [1, 2, {"b": 3}]}, Origin.of(0, name))
    for indent in (10**12, 10**7, "x" * 10**7):
        with pytest.raises(TooLarge):
            dumps(value, JsonOptions(indent=indent))


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        dumps({"a": object()})
    with pytest.raises(TypeError, match="keys must be"):
        dumps({(1, 2): 1})
