"""Conversion of dataset rows to conversations: columns, refusals, and round trips through Parquet."""

import dataclasses
import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conversation.test_shapes import BARE, HOSTILE, JSON, OPENAI_TOOL, attempt, call, turn
from tests.support import examples
from tokentrace import InputError
from tokentrace.conversation.messages import Message
from tokentrace.data.conversations import Columns, Conversation, conversation_of, table_row, without_nulls

USER: Message = {"role": "user", "content": "hi"}
ANSWER: Message = {"role": "assistant", "content": "hello"}
SYSTEM: Message = {"role": "system", "content": "be nice"}
TALK = [USER, ANSWER]
TURNS = [turn("human", "hi"), turn("gpt", "hello")]


def refusal(row: Any, columns: Columns | None = None) -> InputError:
    with pytest.raises(InputError) as caught:
        conversation_of(row, columns or Columns())
    return caught.value


# -- messages


@pytest.mark.parametrize("column", ["messages", "conversations", "conversation"])
@pytest.mark.parametrize("messages", [TALK, TURNS, tuple(TALK), json.dumps(TALK), json.dumps(TURNS)])
def test_messages_of_any_shape_and_usual_column(column: str, messages: Any) -> None:
    assert conversation_of({"id": 7, column: messages}) == Conversation(TALK, None)


@pytest.mark.parametrize("value", ["not JSON", "{}", 3, {"role": "user"}, [], "[]", "null"])
def test_a_column_without_messages_is_refused(value: Any) -> None:
    assert refusal({"conversations": value}).field == "conversations"


# -- prompt and completion


@pytest.mark.parametrize("column", ["completion", "response"])
@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        *(("hi", "hello"), ("hi", [ANSWER]), ([USER], "hello"), ([USER], [ANSWER])),
        *(("hi", TURNS[1:]), (TURNS[:1], "hello"), (TURNS[:1], TURNS[1:])),
    ],
)
def test_prompt_and_completion(column: str, prompt: Any, completion: Any) -> None:
    conversation = conversation_of({"prompt": prompt, column: completion})
    assert conversation == Conversation(TALK, None, completion_from=1)


# -- tools, system, variables


def test_bare_schemas_become_tools_in_functions_and_sharegpt_rows() -> None:
    assert conversation_of({"messages": TALK, "tools": [BARE]}).tools == [BARE]
    assert conversation_of({"messages": TALK, "functions": [BARE]}).tools == [OPENAI_TOOL]
    assert conversation_of({"messages": TURNS, "tools": [BARE]}).tools == [OPENAI_TOOL]


def test_a_system_column_is_put_first_unless_already_there() -> None:
    assert conversation_of({"messages": TALK, "system": "be nice"}).messages == [SYSTEM, *TALK]
    assert conversation_of({"messages": [SYSTEM, *TALK], "system": "be nice"}).messages == [SYSTEM, *TALK]
    assert refusal({"messages": [SYSTEM, *TALK], "system": "be nasty"}).field == "system"


# -- columns by name


@pytest.mark.parametrize("role", [field.name for field in dataclasses.fields(Columns)])
def test_a_named_column_that_is_missing_is_refused(role: str) -> None:
    row = {"prompt": "hi", "completion": "hello"} if role in ("prompt", "completion") else {"messages": TALK}
    error = refusal(row, Columns(**{role: "nowhere"}))
    assert error.field == "nowhere"
    assert f"with {', '.join(row)}" in error.problem


# -- nulls

CALLS = [
    call("weather", {"city": "Bern", "days": 3}, "a"),
    call("search", {"query": "x", "filters": {"site": "y"}, "tags": ["p", None]}, "b"),
]
ROWS = [
    {
        "messages": [
            USER,
            {"role": "assistant", "reasoning_content": "hm", "tool_calls": CALLS},
            {"role": "tool", "tool_call_id": "a", "name": "weather", "content": "rain"},
            ANSWER,
        ],
        "tools": [
            OPENAI_TOOL,
            {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}},
        ],
    },
    {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call("now", {})], "weight": 0}]},
    {"messages": TALK, "system": "be nice"},
]


def through_parquet(rows: list[Any]) -> list[Any]:
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.table({name: [row.get(name) for row in rows] for name in names})
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return pq.read_table(buffer).to_pylist()


def test_rows_survive_parquet() -> None:
    read = through_parquet(ROWS)
    assert read != ROWS
    assert read[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["query"] is None, "Parquet fills in None"
    assert [without_nulls(row) for row in read] == ROWS
    for row, row_before in zip(read, ROWS, strict=True):
        assert conversation_of(without_nulls(row)) == conversation_of(row_before)


# -- null values: filled in by a table, or real

LEAF = st.none() | st.integers(0, 9) | st.sampled_from(["", "Paris"])
ARGUMENTS = st.dictionaries(st.sampled_from("abcd"), LEAF | st.dictionaries(st.sampled_from("xy"), LEAF), max_size=3)


@given(all_arguments=st.lists(ARGUMENTS, min_size=2, max_size=4), as_text=st.booleans())
@settings(deadline=None, max_examples=examples(60))
def test_a_table_never_adds_an_argument_and_notes_removed_ones(
    all_arguments: list[dict[str, Any]], as_text: bool
) -> None:
    """Rows read from an Arrow table have no new keys and no added nulls, and removed nulls get a note."""
    rows = [
        {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call("f", arguments)]}]}
        for arguments in ([json.dumps(one) for one in all_arguments] if as_text else all_arguments)
    ]
    try:
        read = through_parquet(rows)
    except pa.ArrowException:  # values of two types in one column, or no key at all
        return
    for row, row_read in zip(rows, read, strict=True):
        restored, notes = table_row(row_read)
        expected = row["messages"][1]["tool_calls"][0]["function"]["arguments"]
        actual = restored["messages"][1]["tool_calls"][0]["function"].get("arguments", {})
        if as_text:
            assert (actual, notes) == (expected, ())
        else:
            assert actual == without_nulls(expected) or without_empty(actual) == without_empty(without_nulls(expected))
            assert notes or expected == without_nulls(expected), "a null that was meant is not lost in silence"


def without_empty(value: Any) -> Any:
    """Parquet has no structs without fields."""
    if not isinstance(value, dict):
        return value
    return {key: inner for key, one in value.items() if (inner := without_empty(one)) != {}}


# -- hostile input

NAMES = st.sampled_from(["messages", "conversations", "prompt", "completion", "response", "tools", "functions"])
ROW = st.dictionaries(NAMES | st.sampled_from(["system", "chat_template_kwargs"]), HOSTILE, max_size=5)
COLUMNS = st.builds(Columns, messages=st.none() | NAMES, tools=st.none() | NAMES, prompt=st.none() | NAMES)


@given(row=JSON | ROW | HOSTILE, columns=st.just(Columns()) | COLUMNS, encoded=st.booleans())
@settings(deadline=None, max_examples=examples(400))
def test_any_row_is_a_conversation_or_an_input_error(row: Any, columns: Columns, encoded: bool) -> None:
    if encoded and isinstance(row, dict):
        row = {name: json.dumps(value) for name, value in row.items()}
    for candidate in (row, without_nulls(row)):
        conversation = attempt(conversation_of, candidate, columns)
        if not isinstance(conversation, InputError):
            assert conversation.messages
            assert conversation.tools != []
            assert conversation.completion_from is None or 0 < conversation.completion_from < len(conversation.messages)
