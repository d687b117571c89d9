"""Streams of OpenAI's Responses, put together by the client's own accumulator, are the items that `shapes` makes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.gateway.test_shapes import RESPONSES, TRUNCATED, Said, assert_no_extras, call, respond, say, think
from tests.gateway.test_sse import SAID, tell
from tests.support import examples
from tokentrace.gateway.responses_sse import ResponsesEvents
from tokentrace.gateway.shapes import responses_items
from tokentrace.gateway.telling import told_response
from tokentrace.parsing.events import Event
from tokentrace.parsing.response import Finish, ParsedResponse

WIRE_EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
NAMES = {"reasoning": "response.reasoning_text", "message": "response.output_text"}


def whole(items: list[dict[str, Any]]) -> dict[str, Any]:
    """The rest of a response, as far as its type insists on it."""
    fixed = {"object": "response", "created_at": 0.0, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
    return {**fixed, "id": "resp_0", "model": "m", "output": items}


def stream(response: ParsedResponse, seed: int, **options: Any) -> list[dict[str, Any]]:
    writer, rng, events = ResponsesEvents(**options), random.Random(seed), tell(response, seed)
    said = [writer.numbered("response.created", response=whole([]))]
    while events:
        size = rng.randint(0, 3)
        said += writer.feed(events[:size])
        events = events[size:]
    items = responses_items(response, never_empty=True)
    return [*said, *writer.close(items), writer.numbered("response.completed", response=whole(items))]


def put_together(wire: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items as they are done. Checks that each is announced, written and done in that order, as its deltas say."""
    assert [event["sequence_number"] for event in wire] == list(range(len(wire)))
    begun: list[dict[str, Any]] = []
    written: dict[int, str] = {}
    done: dict[int, dict[str, Any]] = {}
    for event in wire[1:-1]:
        at = event["output_index"]
        assert at not in done
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert at == len(begun)
                begun.append(event["item"])
            case "content_part.added":
                assert event["part"]["text"] == ""
                written[at] = ""
            case "function_call_arguments.delta" | "output_text.delta" | "reasoning_text.delta" as name:
                assert name.startswith(begun[at]["type"]) or event["type"] == f"{NAMES[begun[at]['type']]}.delta"
                assert event["delta"]
                written[at] = written.get(at, "") + event["delta"]
            case "function_call_arguments.done":
                assert event["arguments"] == written.get(at, "")
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == written[at]
            case "content_part.done":
                assert event["part"]["text"] == written[at]
            case "output_item.done":
                item = done[at] = event["item"]
                assert item["id"] == begun[at]["id"]
                text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
                assert text == written.get(at, "")
        assert event.get("item_id", begun[at]["id"]) == begun[at]["id"]
    assert set(done) == set(range(len(begun)))
    return [done[at] for at in range(len(begun))]


def check_client(wire: list[dict[str, Any]]) -> None:
    """The official client takes every event, and has the items in the end."""
    state: ResponseStreamState[None] = ResponseStreamState(text_format=omit, input_tools=omit)
    for event in wire:
        model = WIRE_EVENT.validate_python(event, strict=True)
        assert model.type == event["type"]
        assert_no_extras(model)
        state.handle_event(model)
    final = state._completed_response
    assert final is not None
    told = [{key: value for key, value in item.to_dict().items() if key != "parsed_arguments"} for item in final.output]
    assert [item["id"] for item in told] == [item["id"] for item in wire[-1]["response"]["output"]]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", RESPONSES)
def test_events_are_the_items(name: str, seed: int) -> None:
    response = told_response(RESPONSES[name])
    wire = stream(response, seed)
    assert put_together(wire) == responses_items(response, never_empty=True)
    check_client(wire)


@settings(max_examples=examples(100), deadline=None)
@given(said=SAID, finish=st.sampled_from(Finish), seed=st.integers(0, 2**32), hold=st.booleans())
def test_whatever_a_parser_says(said: list[Said], finish: Finish, seed: int, hold: bool) -> None:
    response = told_response(respond(*said, finish=finish))
    wire = stream(response, seed, hold_messages=hold)
    assert put_together(wire) == responses_items(response, never_empty=True)
    check_client(wire)


def test_items_follow_one_another() -> None:
    """An item is done before the next one begins."""
    wire = stream(respond(think("a"), say("b"), call("f", {})), 0)
    about = [(event["type"].removeprefix("response."), event.get("output_index")) for event in wire]
    assert [each for each in about if "delta" not in each[0]] == [
        ("created", None),
        ("output_item.added", 0),
        ("content_part.added", 0),
        ("reasoning_text.done", 0),
        ("content_part.done", 0),
        ("output_item.done", 0),
        ("output_item.added", 1),
        ("content_part.added", 1),
        ("output_text.done", 1),
        ("content_part.done", 1),
        ("output_item.done", 1),
        ("output_item.added", 2),
        ("function_call_arguments.done", 2),
        ("output_item.done", 2),
        ("completed", None),
    ]


def test_a_call_is_announced_when_its_name_is_certain_and_is_incomplete_if_it_fails() -> None:
    response = respond(say("a"), TRUNCATED, finish=Finish.LENGTH)
    items = put_together(stream(response, 0))
    assert [(item["type"], item["status"]) for item in items] == [
        ("message", "completed"),
        ("function_call", "incomplete"),
    ]
    assert items[1]["arguments"] == TRUNCATED.arguments_text  # type: ignore[union-attr]


def test_what_was_not_fed_is_said_at_the_end() -> None:
    response = respond(think("a"), say("bcd"), call("f", {"x": 1}))
    events: list[Event] = tell(respond(think("a"), say("b")))
    writer, items = ResponsesEvents(), responses_items(response)
    wire = [writer.numbered("response.created", response=whole([])), *writer.feed(events), *writer.close(items)]
    assert put_together([*wire, writer.numbered("response.completed", response=whole(items))]) == items


def test_messages_that_are_held_are_done_at_the_end_and_may_have_more() -> None:
    response = respond(say("a"), call("f", {}))
    items = responses_items(
        response, logprobs=lambda span: [{"token": "a", "logprob": -1.0}] * (span.stop - span.start)
    )
    writer = ResponsesEvents(hold_messages=True)
    before = writer.feed(tell(response))
    after = writer.close(items)
    assert [event["item"]["type"] for event in before if event["type"] == "response.output_item.done"] == [
        "function_call"
    ]
    done = {event["type"]: event for event in after}
    assert done["response.output_text.done"]["logprobs"] == [{"token": "a", "logprob": -1.0}]
    assert done["response.output_item.done"]["item"] == items[0]
