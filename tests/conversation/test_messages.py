"""Checks of conversations: valid shapes pass, suspicious ones get remarks. Invalid ones: `test_bad_input.py`."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conversations import CONVERSATIONS, assistant, call, user
from tests.support import examples
from tokentrace import create_renderer
from tokentrace.conversation.messages import check_messages, check_tools, conversation_remarks
from tokentrace.data import TokenizeSettings, tokenize_rows
from tokentrace.data.tokenizing import Counts
from tokentrace.pocket import POCKET


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_every_conversation_of_the_matrix_passes_unchanged(name: str) -> None:
    row = CONVERSATIONS[name]
    checked = check_messages(row.messages)
    assert all(mine is theirs for mine, theirs in zip(checked, row.messages, strict=True))
    assert check_tools(row.tools) == row.tools


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant"},
        {"role": "assistant", "content": None, "tool_calls": None},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "assistant", "content": "", "tool_calls": ({"function": {"name": "f", "arguments": "{}"}},)},
        {"role": "assistant", "content": "", "reasoning_content": None, "thinking": ""},
        {"role": "tool", "content": {"any": "object"}},
        {"role": "user", "content": ["plain", {"type": "text", "text": "x"}, {"type": "image"}]},
        {"role": "user", "content": "", "more": object()},
    ],
)
def test_shapes_that_pass(message: dict[str, Any]) -> None:
    assert check_messages([message]) == [message]


# -- remarks

ANSWER = assistant("It is sunny.")
NAMES = st.sampled_from(["get_weather", "add", "now"])
BROKEN = ['{"city": "C3', "nonsense", '{"x": NaN}', "[1]", '"text"', "{} {}"]


@st.composite
def turns(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rounds of calls, answered by id or in order, as in data sets."""
    messages: list[dict[str, Any]] = [user("hi")]
    for number in range(draw(st.integers(1, 3))):
        names = draw(st.lists(NAMES, min_size=1, max_size=3))
        with_ids, with_names = draw(st.booleans()), draw(st.booleans())
        arguments = draw(st.sampled_from([{"a": 1}, '{"a": 1}', "", "{}"]))
        calls = [call(name, arguments, f"call-{number}-{at}") for at, name in enumerate(names)]
        results = [
            {"role": "tool", "content": "7"}
            | ({"tool_call_id": entry["id"]} if with_ids else {})
            | ({"name": entry["function"]["name"]} if with_names else {})
            for entry in calls
        ]
        if not with_ids:
            for entry in calls:
                entry.pop("id")
        order = draw(st.permutations(results)) if with_ids else results
        messages += [assistant("", *calls), *order]
    return [*messages, ANSWER]


@given(turns())
@settings(deadline=None, max_examples=examples(60))
def test_matching_calls_and_results_have_no_remarks(messages: list[dict[str, Any]]) -> None:
    assert list(conversation_remarks(messages)) == []


@given(turns(), st.data())
@settings(deadline=None, max_examples=examples(60))
def test_a_mismatch_has_one_remark_with_its_position(messages: list[dict[str, Any]], data: st.DataObject) -> None:
    messages = copy.deepcopy(messages)
    index = data.draw(st.sampled_from([at for at, one in enumerate(messages) if one["role"] in ("assistant", "tool")]))
    message = messages[index]
    if message["role"] == "tool":
        field = data.draw(st.sampled_from([key for key in message if key in ("tool_call_id", "name")] or ["content"]))
        message[field] = "another"
    elif message.get("tool_calls"):
        at = data.draw(st.integers(0, len(message["tool_calls"]) - 1))
        field = f"tool_calls.{at}.function.arguments"
        message["tool_calls"][at]["function"]["arguments"] = data.draw(st.sampled_from(BROKEN))
    else:
        field, message["content"] = "content", data.draw(st.sampled_from([None, ""]))
    remarks = list(conversation_remarks(messages))
    if message["role"] == "tool" and field == "content":
        assert remarks == []
    else:
        assert [remark.partition(": ")[0] for remark in remarks] == [f"message {index}, {field}"]


@pytest.mark.parametrize("arguments", BROKEN)
def test_a_render_and_a_row_carry_the_remarks(arguments: str) -> None:
    messages = [user("hi"), assistant("", call("f", arguments, "a")), {"role": "tool", "content": "7", "name": "g"}]
    messages += [{"role": "tool", "content": "7", "tool_call_id": "b"}, {"role": "assistant", "content": None}]
    notes = list(conversation_remarks(messages))
    assert len(notes) == 4
    assert set(notes) <= set(create_renderer(POCKET).silent().render(messages).notes)
    counts = Counts()
    for one in tokenize_rows(TokenizeSettings(str(POCKET), lost="ignore"), [{"messages": json.dumps(messages)}] * 2):
        counts.add(one)
    assert {note.partition(": ")[2] for note in notes} <= {note for note, count in counts.notes.items() if count == 2}
    [parsed] = tokenize_rows(TokenizeSettings(str(POCKET), parse_arguments=True), [{"messages": messages}])
    assert parsed.bad is not None
    assert (parsed.bad.kind, parsed.bad.message) == ("InputError", 1)
    assert parsed.bad.field == "tool_calls.0.function.arguments"
