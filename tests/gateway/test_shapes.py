"""Messages made of parsed completions: what they say, and that the clients' own types take them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from anthropic.types import Message
from openai.types.chat import ChatCompletionMessage
from openai.types.responses import ResponseOutputItem
from pydantic import BaseModel, TypeAdapter

from tokentrace.conversation.messages import check_messages
from tokentrace.gateway.shapes import anthropic_message, anthropic_stop_reason, responses_items
from tokentrace.parsing.messages import expressible, history_message, numbered_call_id, openai_message
from tokentrace.parsing.response import (
    CallStatus,
    Finish,
    ParsedPart,
    ParsedResponse,
    ParsedToolCall,
    PartKind,
    TokenRange,
)

Said = tuple[PartKind, str] | ParsedToolCall


def think(text: str) -> Said:
    return PartKind.REASONING, text


def say(text: str) -> Said:
    return PartKind.CONTENT, text


def call(
    name: str | None,
    arguments: dict[str, Any] | None,
    status: CallStatus = CallStatus.OK,
    *,
    text: str | None = None,
    id: str | None = None,
) -> ParsedToolCall:
    """An attempt at a call; `respond` gives it its index and span."""
    text = json.dumps(arguments) if text is None else text
    raw = f"<call>{name}{text}</call>"
    problem = "" if status is CallStatus.OK else status.value
    return ParsedToolCall(-1, name, arguments, text, id, status, problem, raw, {}, TokenRange(0, 0))


def respond(*said: Said, finish: Finish = Finish.STOP) -> ParsedResponse:
    """The response that says these things in this order, a token for every character."""
    parts: list[ParsedPart] = []
    calls: list[ParsedToolCall] = []
    at = 0
    for item in said:
        if isinstance(item, ParsedToolCall):
            span = TokenRange(at, at + len(item.raw))
            fields = {name: getattr(item, name) for name in ParsedToolCall.__slots__}
            parts.append(ParsedPart(PartKind.TOOL_CALL, item.raw, span, len(calls)))
            calls.append(ParsedToolCall(**{**fields, "index": len(calls), "span": span}))
        else:
            span = TokenRange(at, at + len(item[1]))
            parts.append(ParsedPart(item[0], item[1], span))
        at = span.stop
    reasoning = [part.text for part in parts if part.kind is PartKind.REASONING]
    return ParsedResponse(
        content="".join(part.text for part in parts if part.kind is PartKind.CONTENT),
        reasoning_content="".join(reasoning) if reasoning else None,
        tool_calls=calls,
        finish=finish,
        stop_token=None if finish is Finish.LENGTH else 2,
        open=None,
        parts=parts,
    )


BROKEN = call("f", None, CallStatus.INVALID_JSON, text='{"a": ')
NAMELESS = call(None, {"a": 1}, CallStatus.MISSING_NAME)
TRUNCATED = call("f", None, CallStatus.TRUNCATED, text='{"city": "Zür')
UNKNOWN = call("g", {"b": 2}, CallStatus.UNKNOWN_TOOL)
TWICE = call("f", {"a": 2}, CallStatus.DUPLICATE_ARGUMENT, text='{"a": 1, "a": 2}')

RESPONSES = {
    "nothing": respond(),
    "content": respond(say("Hello.")),
    "reasoning": respond(think("Hm."), finish=Finish.LENGTH),
    "reasoning, content, two calls": respond(
        think("Which city?"), say("Let me see."), call("f", {"city": "Bern"}), call("g", {"n": [1, 2.5, None]})
    ),
    "calls only": respond(call("f", {"a": 1}), call("f", {"a": 1})),
    "content after calls": respond(say("First"), call("f", {"a": 1}), say("then "), say("this.")),
    "unicode": respond(think("数える\u2028🧮"), say("née\r\n\x85𝄞\x00"), call("größe", {"ключ": "ü\n\"'🧮"})),
    "escaped unicode": respond(call("f", {"a": "é🧮"}, text='{"a": "\\u00e9\\ud83e\\uddee"}')),
    "no arguments": respond(call("f", {})),
    "reasoning between calls": respond(think("a"), call("f", {}), think("b"), say("c"), think("d"), call("g", {})),
    "an id of its own": respond(call("f", {}, id="functions.f:0"), call("f", {})),
    "nameless between": respond(say("a"), call("f", {"a": 1}), NAMELESS, say("b"), NAMELESS, say("c"), call("g", {})),
    "only nameless": respond(NAMELESS),
    "truncated content": respond(call("f", {}), say("and th"), finish=Finish.LENGTH),
    "truncated call": respond(think("Hm."), say("See"), call("f", {"a": 1}), TRUNCATED, finish=Finish.LENGTH),
    "only a truncated call": respond(TRUNCATED, finish=Finish.LENGTH),
    "unclosed, and on it goes": respond(
        call("f", None, CallStatus.UNCLOSED, text='{"a": 1'), say("Oh."), say(" Well.")
    ),
    "unknown tool": respond(say("x"), UNKNOWN),
    "argument twice": respond(TWICE, call("f", {})),
    "empty texts": respond(think(""), say(""), call("f", {}), think("a"), say(""), think("b"), say("")),
}
"""By name; whatever JSON is broken in them could go on."""


def assert_no_extras(model: BaseModel, allowed: frozenset[str] = frozenset()) -> None:
    """No field, at any depth, that the type does not declare."""
    assert set(model.model_extra or ()) <= allowed
    for value in dict(model).values():
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, BaseModel):
                assert_no_extras(inner)


@pytest.mark.parametrize("name", RESPONSES)
def test_openai_takes_the_message(name: str) -> None:
    message = openai_message(RESPONSES[name])
    model = ChatCompletionMessage.model_validate(message, strict=True)
    assert_no_extras(model, frozenset({"reasoning_content"}))
    assert model.to_dict() == message
    for made in message.get("tool_calls", []):
        assert isinstance(json.loads(made["function"]["arguments"]), dict)


@pytest.mark.parametrize("make", [openai_message, history_message])
@pytest.mark.parametrize("name", RESPONSES)
def test_the_message_can_go_back_into_a_conversation(name: str, make: Callable[..., dict[str, Any]]) -> None:
    message = make(RESPONSES[name])
    assert check_messages([message]) == [message]


@pytest.mark.parametrize("name", RESPONSES)
def test_anthropic_takes_the_message(name: str) -> None:
    response = RESPONSES[name]
    message = {
        **anthropic_message(response),
        "id": "msg_0",
        "type": "message",
        "model": "m",
        "stop_reason": anthropic_stop_reason(response),
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }
    model = Message.model_validate(message, strict=True)
    assert_no_extras(model)
    assert model.to_dict() == message


@pytest.mark.parametrize("name", RESPONSES)
def test_responses_takes_the_items(name: str) -> None:
    items = responses_items(RESPONSES[name])
    models = TypeAdapter(list[ResponseOutputItem]).validate_python(items, strict=True)
    assert [model.type for model in models] == [item["type"] for item in items]
    for model in models:
        assert_no_extras(model)
    assert [model.to_dict() for model in models] == items
    assert len({item["id"] for item in items}) == len(items)


@pytest.mark.parametrize("name", RESPONSES)
def test_all_shapes_say_the_same(name: str) -> None:
    response = RESPONSES[name]
    openai = openai_message(response)
    blocks = anthropic_message(response)["content"]
    items = responses_items(response)

    assert "".join(block.get("text", "") for block in blocks) == (openai["content"] or "")
    assert "".join(block.get("thinking", "") for block in blocks) == openai.get("reasoning_content", "")
    assert len(items) == len(blocks)
    texts = [item["content"][0]["text"] for item in items if "content" in item]
    assert texts == [block.get("text") or block.get("thinking") for block in blocks if block["type"] != "tool_use"]

    calls = [
        (made["id"], made["function"]["name"], json.loads(made["function"]["arguments"]))
        for made in openai.get("tool_calls", [])
    ]
    assert calls == [(b["id"], b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
    assert calls == [
        (item["call_id"], item["name"], json.loads(item["arguments"]))
        for item in items
        if item["type"] == "function_call"
    ]


def test_openai_message() -> None:
    assert openai_message(RESPONSES["reasoning, content, two calls"]) == {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning_content": "Which city?",
        "tool_calls": [
            {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": '{"city": "Bern"}'}},
            {"id": "call00001", "type": "function", "function": {"name": "g", "arguments": '{"n": [1, 2.5, null]}'}},
        ],
    }
    assert openai_message(RESPONSES["nothing"]) == {"role": "assistant", "content": ""}
    assert openai_message(RESPONSES["calls only"])["content"] is None


def test_arguments_are_text_as_written() -> None:
    written = openai_message(respond(TWICE))["tool_calls"][0]["function"]["arguments"]
    assert written == '{"a": 1, "a": 2}'


def test_anthropic_message() -> None:
    assert anthropic_message(RESPONSES["reasoning between calls"]) == {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "a", "signature": ""},
            {"type": "tool_use", "id": "call00000", "name": "f", "input": {}},
            {"type": "thinking", "thinking": "b", "signature": ""},
            {"type": "text", "text": "c"},
            {"type": "thinking", "thinking": "d", "signature": ""},
            {"type": "tool_use", "id": "call00001", "name": "g", "input": {}},
        ],
    }


def test_responses_items() -> None:
    assert responses_items(respond(think("a"), say("b"), call("f", {"x": 1}), say("c"), finish=Finish.LENGTH)) == [
        {
            "type": "reasoning",
            "id": "rs_00000",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "a"}],
        },
        {
            "type": "message",
            "id": "msg_00001",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "b", "annotations": []}],
        },
        {
            "type": "function_call",
            "id": "fc_00002",
            "call_id": "call00000",
            "name": "f",
            "arguments": '{"x": 1}',
            "status": "completed",
        },
        {
            "type": "message",
            "id": "msg_00003",
            "role": "assistant",
            "status": "incomplete",
            "content": [{"type": "output_text", "text": "c", "annotations": []}],
        },
    ]


def test_neighbours_are_one_and_what_is_left_out_does_not_part_them() -> None:
    response = respond(say("a"), say("b"), NAMELESS, say(""), say("c"), think(""), say("d"))
    assert anthropic_message(response)["content"] == [{"type": "text", "text": "abcd"}]
    assert [item["content"][0]["text"] for item in responses_items(response)] == ["abcd"]


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ([say("a"), say("b")], "incomplete"),
        ([say("a"), say("")], "incomplete"),
        ([say("a"), TRUNCATED], "completed"),
        ([say("a"), think("b")], "completed"),
    ],
)
def test_a_message_is_incomplete_if_it_was_cut_off_inside(said: list[Said], status: str) -> None:
    assert responses_items(respond(*said, finish=Finish.LENGTH))[0]["status"] == status
    assert responses_items(respond(*said))[0]["status"] == "completed"


@pytest.mark.parametrize("status", CallStatus)
def test_which_calls_are_said(status: CallStatus) -> None:
    response = respond(say("x"), call("f", {"a": 1}, status))
    said = status in {"ok", "unknown_tool", "duplicate_argument"}
    assert expressible(response.tool_calls[0]) == said
    assert ("tool_calls" in openai_message(response)) == said
    assert len(anthropic_message(response)["content"]) == len(responses_items(response)) == 1 + said


@pytest.mark.parametrize("attempt", [call(None, {}, CallStatus.UNKNOWN_TOOL), call("f", None, CallStatus.UNKNOWN_TOOL)])
def test_a_call_needs_a_name_and_arguments_to_be_said(attempt: ParsedToolCall) -> None:
    assert not expressible(attempt)


def test_what_clients_are_not_told_does_not_move_into_the_content() -> None:
    response = respond(say("x"), BROKEN)
    assert openai_message(response) == {"role": "assistant", "content": "x"}
    assert response.tool_calls[0].raw == BROKEN.raw


@pytest.mark.parametrize("attempt", [BROKEN, NAMELESS, TRUNCATED, TWICE])
def test_what_is_no_call_stands_in_the_conversation_where_it_was_written(attempt: ParsedToolCall) -> None:
    good = call("f", {})
    response = respond(think("Hm."), say("x"), attempt, say("y"), good)
    message = history_message(response)
    assert message["content"] == f"x{attempt.raw}y"
    assert message["reasoning_content"] == "Hm."
    assert [made["id"] for made in message["tool_calls"]] == ["call00001"]
    assert "tool_calls" not in history_message(respond(attempt))


@pytest.mark.parametrize("name", RESPONSES)
def test_a_conversation_has_the_same_message_where_all_calls_are_calls(name: str) -> None:
    response = RESPONSES[name]
    if all(some.status in ("ok", "unknown_tool") for some in response.tool_calls):
        assert history_message(response) == openai_message(response)
        blank = dataclasses.replace(response, reasoning_content="")
        assert history_message(blank) == {**openai_message(blank), "reasoning_content": ""}


def test_ids() -> None:
    response = RESPONSES["an id of its own"]
    assert [made["id"] for made in openai_message(response)["tool_calls"]] == ["functions.f:0", "call00001"]
    named = openai_message(response, call_id="turn3_{}".format)["tool_calls"]
    assert [made["id"] for made in named] == ["functions.f:0", "turn3_1"]
    assert anthropic_message(response, call_id="turn3_{}".format)["content"][1]["id"] == "turn3_1"
    assert responses_items(response, call_id="turn3_{}".format)[1]["call_id"] == "turn3_1"


def test_ids_count_the_attempts_that_are_left_out() -> None:
    ids = [made["id"] for made in openai_message(RESPONSES["nameless between"])["tool_calls"]]
    assert ids == ["call00000", "call00003"]


@pytest.mark.parametrize("index", [0, 7, 99_999])
def test_made_up_ids_please_mistral(index: int) -> None:
    assert len(numbered_call_id(index)) == 9
    assert numbered_call_id(index).isalnum()


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (respond(say("x")), "end_turn"),
        (respond(call("f", {})), "tool_use"),
        (respond(UNKNOWN), "end_turn"),
        (respond(BROKEN), "end_turn"),
        (respond(call("f", {}), finish=Finish.LENGTH), "max_tokens"),
    ],
)
def test_stop_reasons(response: ParsedResponse, reason: str) -> None:
    assert anthropic_stop_reason(response) == reason


def test_a_message_has_the_logprobs_of_all_its_parts() -> None:
    def told(span: TokenRange) -> list[dict[str, Any]]:
        return [{"at": at} for at in range(*span)]

    items = responses_items(respond(think("a"), say("bc"), say("d")), logprobs=told)
    assert items[1]["content"][0]["logprobs"] == [{"at": 1}, {"at": 2}, {"at": 3}]
    assert "logprobs" not in items[0]["content"][0]


def test_an_empty_message_stands_for_nothing_at_all() -> None:
    assert responses_items(respond()) == []
    (item,) = responses_items(respond(), never_empty=True, item_id=lambda kind, at: f"{kind}-{at}")
    assert (item["id"], item["content"][0]["text"]) == ("msg-0", "")
