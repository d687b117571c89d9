"""Streams put together by the clients' own accumulators are the messages that `shapes` makes."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk
from pydantic import TypeAdapter

from tests.gateway.test_shapes import RESPONSES, TRUNCATED, Said, assert_no_extras, call, respond, say, think
from tests.support import examples
from tokentrace.gateway.shapes import anthropic_message, anthropic_stop_reason
from tokentrace.gateway.sse import OPENAI_END, AnthropicEvents, OpenAIChunks, encode_sse
from tokentrace.parsing.events import (
    ArgumentsDelta,
    CallFinished,
    CallNamed,
    CallStarted,
    ContentDelta,
    Done,
    Event,
    ReasoningDelta,
)
from tokentrace.parsing.messages import openai_message
from tokentrace.parsing.response import CallStatus, Finish, ParsedResponse, ParsedToolCall, PartKind

WIRE_EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)


def cut(text: str, rng: random.Random) -> list[str]:
    """The text in pieces, some of them empty."""
    at = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(0, 4)))
    return [text[start:stop] for start, stop in itertools.pairwise([0, *at, len(text)])]


def tell(response: ParsedResponse, seed: int = 0) -> list[Event]:
    """The events of a parser that ends with this response."""
    rng = random.Random(seed)
    events: list[Event] = []
    for part in response.parts:
        if part.call is not None:
            events += tell_call(response.tool_calls[part.call], rng)
        else:
            delta = ReasoningDelta if part.kind is PartKind.REASONING else ContentDelta
            events += [delta(piece) for piece in cut(part.text, rng)]
    return [*events, Done(response)]


def tell_call(attempt: ParsedToolCall, rng: random.Random) -> list[Event]:
    index = attempt.index
    named = [] if attempt.name is None else [CallNamed(index, attempt.name, attempt.id)]
    arguments = [ArgumentsDelta(index, piece) for piece in cut(attempt.arguments_text, rng)]
    return [CallStarted(index), *named, *arguments, CallFinished(index, attempt)]


def in_batches(stream: OpenAIChunks | AnthropicEvents, events: list[Event], seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    said: list[dict[str, Any]] = []
    while events:
        size = rng.randint(0, 3)
        said += stream.feed(events[:size])
        events = events[size:]
    return said


def openai_stream(response: ParsedResponse, seed: int = 0) -> list[dict[str, Any]]:
    return in_batches(OpenAIChunks(id="chatcmpl-0", model="m", created=17), tell(response, seed), seed)


def anthropic_stream(response: ParsedResponse, seed: int = 0) -> list[dict[str, Any]]:
    stream = AnthropicEvents(id="msg_0", model="m", input_tokens=11)
    stream.output_tokens = 5
    return in_batches(stream, tell(response, seed), seed)


def kept_ids(response: ParsedResponse) -> set[str]:
    return {made["id"] for made in openai_message(response).get("tool_calls", [])}


def as_openai_message(accumulated: dict[str, Any], response: ParsedResponse) -> dict[str, Any]:
    """What a client has in the end, less the calls that it should not have been told of."""
    keys = {"role", "content", "reasoning_content"}
    message = {"content": None} | {key: value for key, value in accumulated.items() if key in keys}
    calls = [
        {
            "id": made["id"],
            "type": made["type"],
            "function": {"name": made["function"]["name"], "arguments": made["function"]["arguments"]},
        }
        for made in accumulated.get("tool_calls") or []
        if made["id"] in kept_ids(response)
    ]
    return message | ({"tool_calls": calls} if calls else {})


def as_anthropic_blocks(accumulated: list[dict[str, Any]], response: ParsedResponse) -> list[dict[str, Any]]:
    """What a client has in the end, less the calls that it should not have been told of."""
    blocks: list[dict[str, Any]] = []
    for block in accumulated:
        if block["type"] == "tool_use" and block["id"] not in kept_ids(response):
            continue
        if blocks and block["type"] == blocks[-1]["type"] != "tool_use":
            key = "text" if block["type"] == "text" else "thinking"
            blocks[-1] = {**block, key: blocks[-1][key] + block[key]}
        else:
            blocks.append(block)
    return blocks


def check_openai(response: ParsedResponse, seed: int) -> None:
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    chunks = openai_stream(response, seed)
    for chunk in chunks:
        model = ChatCompletionChunk.model_validate(chunk, strict=True)
        assert_no_extras(model.choices[0].delta, frozenset({"reasoning_content"}))
        state.handle_chunk(model)
    assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    final = state.current_completion_snapshot
    assert final.choices[0].finish_reason == response.finish_reason
    accumulated = final.choices[0].message.to_dict()
    assert as_openai_message(accumulated, response) == openai_message(response)

    announced = accumulated.get("tool_calls") or []
    named = [attempt for attempt in response.tool_calls if attempt.name is not None]
    assert [made["function"]["name"] for made in announced] == [attempt.name for attempt in named]
    assert [made["function"]["arguments"] for made in announced] == [attempt.arguments_text for attempt in named]


def check_anthropic(response: ParsedResponse, seed: int) -> None:
    events = anthropic_stream(response, seed)
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        model = WIRE_EVENT.validate_python(event, strict=True)
        assert_no_extras(model)
        snapshot = accumulate_event(event=model, current_snapshot=snapshot, json_bufs=buffers)
    message = snapshot.to_dict()
    assert as_anthropic_blocks(message["content"], response) == anthropic_message(response)["content"]
    assert message["stop_reason"] == anthropic_stop_reason(response)
    assert message["usage"] == {"input_tokens": 11, "output_tokens": 5}
    check_order(events)


def check_order(events: list[dict[str, Any]]) -> None:
    """One message, its blocks one after the other, each with at least its start and its stop."""
    types = [event["type"] for event in events]
    assert types[0] == "message_start"
    assert types[-2:] == ["message_delta", "message_stop"]
    count, is_open = -1, False
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            count, is_open = count + 1, True
        assert is_open
        assert event["index"] == count
        is_open = event["type"] != "content_block_stop"
    assert not is_open


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", RESPONSES)
def test_openai_puts_the_chunks_together(name: str, seed: int) -> None:
    check_openai(RESPONSES[name], seed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", RESPONSES)
def test_anthropic_puts_the_events_together(name: str, seed: int) -> None:
    check_anthropic(RESPONSES[name], seed)


NAMES = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(), VALUES, max_size=3)
CUT_SHORT = [CallStatus.UNCLOSED, CallStatus.TRUNCATED]
WHOLE = [status for status in CallStatus if status not in CUT_SHORT and status is not CallStatus.MISSING_NAME]


@st.composite
def attempts(draw: st.DrawFn) -> Said:
    arguments = draw(ARGUMENTS)
    text = json.dumps(arguments, ensure_ascii=draw(st.booleans()))
    match draw(st.sampled_from(["whole", "cut short", "nameless"])):
        case "whole":
            return call(draw(NAMES), arguments, draw(st.sampled_from(WHOLE)), text=text)
        case "cut short":
            short = text[: draw(st.integers(0, len(text) - 1))]
            return call(draw(NAMES), None, draw(st.sampled_from(CUT_SHORT)), text=short)
    return call(None, arguments, CallStatus.MISSING_NAME)


SAID = st.lists(st.builds(think, st.text()) | st.builds(say, st.text()) | attempts(), max_size=8)


@settings(max_examples=examples(200), deadline=None)
@given(said=SAID, finish=st.sampled_from(Finish), seed=st.integers(0, 2**32))
def test_whatever_a_parser_says_the_clients_put_together(said: list[Said], finish: Finish, seed: int) -> None:
    response = respond(*said, finish=finish)
    check_openai(response, seed)
    check_anthropic(response, seed)


@settings(max_examples=examples(200), deadline=None)
@given(said=SAID, seed=st.integers(0, 2**32))
def test_frames_are_the_payload(said: list[Said], seed: int) -> None:
    for payload in openai_stream(respond(*said), seed):
        head, data = encode_sse(payload)[:6], encode_sse(payload)[6:]
        assert head == "data: "
        assert data.endswith("\n\n")
        assert len(data.splitlines()) == 2
        assert json.loads(data) == payload


def deltas(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in chunks]


def test_chunks() -> None:
    stream = OpenAIChunks(id="chatcmpl-0", model="m", created=17)
    response = respond(think("a"), call("f", {}))
    events = [CallNamed(0, "f", None), ArgumentsDelta(0, "{}"), CallFinished(0, response.tool_calls[0])]
    chunks = stream.feed([ReasoningDelta("a"), CallStarted(0), *events]) + stream.feed([Done(response)])
    assert chunks[-1] == {
        "id": "chatcmpl-0",
        "object": "chat.completion.chunk",
        "created": 17,
        "model": "m",
        "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}],
    }
    announced = {"index": 0, "id": "call00000", "type": "function", "function": {"name": "f", "arguments": ""}}
    assert deltas(chunks) == [
        {"role": "assistant"},
        {"reasoning_content": "a"},
        {"tool_calls": [announced]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
        {},
    ]


def test_indices_of_chunks_count_the_calls_announced_and_ids_the_attempts() -> None:
    announced = [
        delta["tool_calls"][0]
        for delta in deltas(openai_stream(RESPONSES["nameless between"]))[1:]
        if delta.get("tool_calls")
    ]
    assert {(made["index"], made["id"]) for made in announced if "id" in made} == {(0, "call00000"), (1, "call00003")}


def test_wire_events() -> None:
    stream = AnthropicEvents(id="msg_0", model="m", input_tokens=3)
    response = respond(say("a"), call("f", {}))
    events = [CallNamed(0, "f", None), ArgumentsDelta(0, "{}"), CallFinished(0, response.tool_calls[0])]
    said = stream.feed([ContentDelta("a"), CallStarted(0), *events])
    stream.output_tokens = 4
    said += stream.feed([Done(response)])
    assert said == [
        {
            "type": "message_start",
            "message": {
                "id": "msg_0",
                "type": "message",
                "role": "assistant",
                "model": "m",
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {"input_tokens": 3, "output_tokens": 0},
            },
        },
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "content_block_start",
            "index": 1,
            "content_block": {"type": "tool_use", "id": "call00000", "name": "f", "input": {}},
        },
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": "{}"}},
        {"type": "content_block_stop", "index": 1},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": {"output_tokens": 4},
        },
        {"type": "message_stop"},
    ]


def test_the_first_feed_opens_the_stream_even_with_nothing() -> None:
    chunks = OpenAIChunks(id="a", model="m", created=0)
    assert deltas(chunks.feed([])) == [{"role": "assistant"}]
    assert chunks.feed([]) == []
    events = AnthropicEvents(id="a", model="m")
    assert [event["type"] for event in events.feed([])] == ["message_start"]
    assert events.feed([]) == []


def test_a_nameless_attempt_leaves_no_trace_and_does_not_part_the_text_around_it() -> None:
    response = respond(say("a"), call(None, {"x": 1}, CallStatus.MISSING_NAME), say("b"))
    assert all("tool_calls" not in delta for delta in deltas(openai_stream(response)))
    starts = [event for event in anthropic_stream(response) if event["type"] == "content_block_start"]
    assert [start["content_block"]["type"] for start in starts] == ["text"]


def test_an_announced_call_that_fails_is_there_but_is_no_reason_to_run_anything() -> None:
    response = respond(TRUNCATED)
    chunks = openai_stream(response)
    assert any("tool_calls" in delta for delta in deltas(chunks))
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert "tool_calls" not in openai_message(response)
    assert anthropic_stream(response)[-2]["delta"]["stop_reason"] == "end_turn"


def test_ids_are_the_models_or_the_callers() -> None:
    events = [CallStarted(0), CallNamed(0, "f", "own"), CallStarted(1), CallNamed(1, "g", None)]
    chunks = OpenAIChunks(id="a", model="m", created=0, call_id="turn3_{}".format).feed(events)
    assert [delta["tool_calls"][0]["id"] for delta in deltas(chunks)[1:]] == ["own", "turn3_1"]
    said = AnthropicEvents(id="a", model="m", call_id="turn3_{}".format).feed(events)
    starts = [event["content_block"]["id"] for event in said if event["type"] == "content_block_start"]
    assert starts == ["own", "turn3_1"]


def test_an_id_written_after_the_arguments_comes_too_late_for_the_stream() -> None:
    response = respond(call("f", {}, id="own"))
    chunks = OpenAIChunks(id="a", model="m", created=0).feed([CallStarted(0), CallNamed(0, "f", None), Done(response)])
    assert deltas(chunks)[1]["tool_calls"][0]["id"] == "call00000"
    assert openai_message(response)["tool_calls"][0]["id"] == "own"


def test_a_frame() -> None:
    assert encode_sse({"a": "ü", "b": [1, None]}) == 'data: {"a":"ü","b":[1,null]}\n\n'
    assert encode_sse({}, event="ping") == "event: ping\ndata: {}\n\n"


@pytest.mark.parametrize(
    "text", ["\n", "\r\n", "\x0b\x0c\x1c\x1d\x1e", "\x85", "\u2028\u2029", "\ud83e", "\udfff\ud800"]
)
def test_a_frame_is_utf8_and_its_data_one_line(text: str) -> None:
    frame = encode_sse({text: f"a{text}b"})
    frame.encode()
    assert len(frame.splitlines()) == 2
    assert json.loads(frame.removeprefix("data: ")) == {text: f"a{text}b"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_frame_is_json(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode_sse({"a": value})


def serve(body: str) -> httpx2.Client:
    """A client to which everything is answered with this stream."""
    headers = {"content-type": "text/event-stream"}
    return httpx2.Client(
        transport=httpx2.MockTransport(lambda _: httpx2.Response(200, headers=headers, content=body.encode()))
    )


@pytest.mark.parametrize("name", RESPONSES)
def test_openais_client_reads_the_frames(name: str) -> None:
    response = RESPONSES[name]
    body = "".join(map(encode_sse, openai_stream(response))) + OPENAI_END
    client = openai.OpenAI(api_key="none", base_url="http://localhost", http_client=serve(body))
    with client, client.chat.completions.stream(model="m", messages=[{"role": "user", "content": "x"}]) as stream:
        message = stream.until_done().current_completion_snapshot.choices[0].message
    assert as_openai_message(message.to_dict(), response) == openai_message(response)


@pytest.mark.parametrize("name", RESPONSES)
def test_anthropics_client_reads_the_frames(name: str) -> None:
    response = RESPONSES[name]
    body = "".join(encode_sse(event, event=event["type"]) for event in anthropic_stream(response))
    client = anthropic.Anthropic(api_key="none", base_url="http://localhost", http_client=serve(body))
    messages: Any = [{"role": "user", "content": "x"}]
    with client, client.messages.stream(model="m", max_tokens=9, messages=messages) as stream:
        message = stream.get_final_message()
    assert as_anthropic_blocks(message.to_dict()["content"], response) == anthropic_message(response)["content"]
    assert message.stop_reason == anthropic_stop_reason(response)
