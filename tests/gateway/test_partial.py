"""What passes of an unfinished object is what Anthropic's client reads, whatever the text and however it is cut."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jiter
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import examples
from tokentrace.gateway.partial import PartialObject

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(), VALUES, max_size=3)
JUNK = ['"', ",", "}", "]", "{", "x", "\n", "\\", "0", "-", "\\ud800", ":", "NaN", " ", "1e999", "\\u12"]


def passed(text: str, seed: int) -> PartialObject:
    """The text in pieces. After each the client reads what has passed, to the same value."""
    rng, read, told, at = random.Random(seed), PartialObject(), "", 0
    while at < len(text):
        size = rng.randint(1, 6)
        told += read.feed(text[at : at + size])
        at += size
        assert text.startswith(told)
        if told:
            found = jiter.from_json(told.encode("utf-8", "surrogatepass"), partial_mode=True)
            assert json.dumps(found) == json.dumps(read.value())
    assert told == read.text
    whole = PartialObject()
    assert (whole.feed(text), whole.broken) == (told, read.broken)
    return read


TEXTS = st.builds(
    json.dumps, ARGUMENTS, ensure_ascii=st.booleans(), indent=st.sampled_from([None, 1])
)  # fmt: skip


@settings(max_examples=examples(150), deadline=None)
@given(text=TEXTS, seed=st.integers(0, 2**32))
def test_whole_objects_pass_whole(text: str, seed: int) -> None:
    read = passed(text, seed)
    assert read.closed
    assert read.text == text
    assert read.value() == json.loads(text)


@settings(max_examples=examples(150), deadline=None)
@given(text=TEXTS, share=st.floats(0, 1), seed=st.integers(0, 2**32))
def test_cut_off_objects_are_not_broken(text: str, share: float, seed: int) -> None:
    read = passed(text[: int(share * len(text))], seed)
    assert not read.broken
    assert read.closed == (share == 1)


@settings(max_examples=examples(300), deadline=None)
@given(text=TEXTS, share=st.floats(0, 1), junk=st.sampled_from(JUNK), seed=st.integers(0, 2**32))
def test_whatever_is_wrong_the_client_reads_on(text: str, share: float, junk: str, seed: int) -> None:
    at = int(share * len(text))
    passed(text[:at] + junk + text[at + seed % 2 :], seed)


@settings(max_examples=examples(100), deadline=None)
@given(text=st.text('{}[]":,\\ntrue1.5e-u0d8 ', max_size=40), seed=st.integers(0, 2**32))
def test_any_text(text: str, seed: int) -> None:
    passed(text, seed)
    passed("{" + text, seed)


@pytest.mark.parametrize(
    ("text", "told", "value"),
    [
        ('{"a": 1, "b": "He said "hi""}', '{"a": 1, "b": "He said ', {"a": 1}),
        ('{"a": "x", "b": ', '{"a": "x", "b":', {"a": "x"}),
        ('{"a": 12', '{"a":', {}),
        ('{"a": tru}', '{"a":', {}),
        ('{"a": [1, 2', '{"a": [1,', {"a": [1]}),
        ('{"a": 1} and more', '{"a": 1}', {"a": 1}),
        ('{"a": 1, }', '{"a": 1,', {"a": 1}),
        ("[1]", "", {}),
        ("", "", {}),
    ],
)
def test_what_passes(text: str, told: str, value: object) -> None:
    read = passed(text, 0)
    assert (read.text, read.value(), read.closed) == (told, value, False)


def test_deep_nesting_breaks_where_the_client_still_reads() -> None:
    read = passed('{"a": ' + "[" * 500, 0)
    assert read.broken
    assert json.dumps(read.value()).count("[") == 99


def test_pieces_of_a_string_pass_as_they_come() -> None:
    read = PartialObject()
    told = [read.feed(piece) for piece in ['{"a": "', "one", " two", "\\", 'n"', "}"]]
    assert told == ['{"a": "', "one", " two", "", "\\n", '"}']
    assert list(itertools.accumulate(told))[-1] == '{"a": "one two\\n"}'
