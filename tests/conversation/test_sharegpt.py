"""Conversations in ShareGPT's shape become messages."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conversation.blocks import (
    CALL,
    USER,
    call,
    turn,
)
from tokentrace import InputError
from tokentrace.conversation.shapes import (
    from_sharegpt,
)

# -- ShareGPT


@pytest.mark.parametrize(
    ("role", "speakers"),
    {
        "system": ["system"],
        "user": ["human", "user"],
        "assistant": ["gpt", "assistant", "chatgpt", "bing", "bard", "model"],
        "tool": ["observation", "tool", "function_response", "tool_response", "function"],
    }.items(),
)
def test_who_speaks(role: str, speakers: list[str]) -> None:
    for speaker in speakers:
        assert from_sharegpt([turn(speaker, "x")]) == [{"role": role, "content": "x"}]


@pytest.mark.parametrize("speaker", ["function_call", "tool_call"])
@pytest.mark.parametrize(
    ("value", "calls"),
    [
        ('{"name": "f", "arguments": {"a": null}}', [call("f", {"a": None})]),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', [call("f", '{"a": 1}')]),
        ('[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', [call("f", {}), call("g", {})]),
        ('{"id": "c1", "type": "function", "name": "f", "arguments": {}}', [call("f", {}, "c1")]),
        ('{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {}}}', [call("f", {}, "c1")]),
        ({"name": "f", "arguments": {}}, [call("f", {})]),
        ([{"name": "f", "arguments": {}}], [call("f", {})]),
    ],
)
def test_a_turn_of_calls(speaker: str, value: Any, calls: list[Any]) -> None:
    made = from_sharegpt([turn("human", "hi"), turn(speaker, value), turn("observation", "r")])
    assert made == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "r"},
    ]


def test_calls_after_calls_and_after_others_are_messages_of_their_own() -> None:
    turns = [
        turn("gpt", "see"),
        turn("function_call", CALL),
        turn("function_call", CALL),
        turn("observation", "r"),
        turn("function_call", CALL),
        turn("gpt", "done"),
        turn("gpt", "really"),
    ]
    alone = {"role": "assistant", "content": "", "tool_calls": [call("f", {})]}
    assert from_sharegpt(turns) == [
        {**alone, "content": "see"},
        alone,
        {"role": "tool", "content": "r"},
        alone,
        {"role": "assistant", "content": "done"},
        {"role": "assistant", "content": "really"},
    ]


def test_turns_that_are_one_message_have_to_agree_on_what_is_trained() -> None:
    both = from_sharegpt([turn("gpt", "see", weight=0), turn("function_call", CALL, weight=0)])
    assert both == [{"role": "assistant", "content": "see", "weight": 0, "tool_calls": [call("f", {})]}]
    for said, called in [({"weight": 0}, {"weight": 1}), ({"train": False}, {}), ({}, {"train": True})]:
        with pytest.raises(InputError, match="differs") as caught:
            from_sharegpt([turn("gpt", "see", **said), turn("function_call", CALL, **called)])
        assert (caught.value.message, caught.value.field) == (1, next(iter(said | called)))
    with pytest.raises(InputError, match="reasoning_content: differs"):
        from_sharegpt([turn("gpt", "x", reasoning_content="a"), turn("function_call", CALL, reasoning_content="b")])


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (turn("narrator", "x"), "from"),
        ({"value": "x"}, "from"),
        ({"from": "human"}, "value"),
        (turn("human", {"a": 1}), "value"),
        (turn("gpt", [3]), "value.0"),
        (turn("human", None, tool_calls=[call("f", {})]), "value"),
        (turn("gpt", "x", tool_calls=[{}]), "tool_calls.0.name"),
        (turn("function_call", "f()"), "value"),
        (turn("function_call", '{"arguments": {}}'), "value.0.name"),
        (turn("function_call", '[{"name": "f", "arguments": {}}, {"name": "f"}]'), "value.1.arguments"),
        (turn("function_call", '{"name": "f", "arguments": [1]}'), "value.0.arguments"),
        (turn("function_call", '{"name": "f", "arguments": {}, "parameters": {"a": 1}}'), "value.0"),
        (turn("function_call", CALL, tool_calls=[call("f", {})]), "tool_calls"),
        (None, None),
    ],
)
def test_sharegpts_errors_name_the_message_and_the_field(bad: Any, field: str | None) -> None:
    with pytest.raises(InputError) as caught:
        from_sharegpt([turn("human", "hi"), bad])
    assert (caught.value.message, caught.value.field) == (1, field)
