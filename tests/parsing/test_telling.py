"""What a client is told is what the conversation goes on with, whole and in events."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parsing.forms import TOOLS, answered, ids_of
from tests.parsing.test_render_back import BAD
from tests.parsing.test_shapes import RESPONSES, Said, call, respond, say
from tests.parsing.test_sse import SAID, tell
from tests.parsing.test_streaming import renderer
from tokentrace.parsing.events import ArgumentsDelta, CallFinished, CallNamed, ContentDelta, Event, ReasoningDelta
from tokentrace.parsing.response import CallStatus, ParsedResponse, PartKind
from tokentrace.parsing.shapes import history_message, openai_message
from tokentrace.parsing.telling import ToldEvents, told_response


def added_up(events: list[Event]) -> list[tuple[str, str]]:
    """Texts and calls in order; neighbours of one kind are one."""
    found: list[tuple[str, str]] = []
    for event in events:
        match event:
            case ContentDelta(text) | ReasoningDelta(text) if text:
                found.append((type(event).__name__, text))
            case CallNamed(index, name, id):
                found.append((f"call {index} {name} {id}", ""))
            case ArgumentsDelta(_, text):
                found[-1] = (found[-1][0], found[-1][1] + text)
    groups = itertools.groupby(found, key=lambda one: one[0])
    return [(kind, "".join(text for _, text in group)) for kind, group in groups]


def parts_of(response: ParsedResponse) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for part in response.parts:
        if part.call is not None:
            made = response.tool_calls[part.call]
            found.append((f"call {made.index} {made.name} {made.id}", made.arguments_text))
        elif part.text:
            found.append(("ContentDelta" if part.kind is PartKind.CONTENT else "ReasoningDelta", part.text))
    groups = itertools.groupby(found, key=lambda one: one[0])
    return [(kind, "".join(text for _, text in group)) for kind, group in groups]


def told_in_pieces(events: list[Event], seed: int, *, calls_allowed: bool) -> list[Event]:
    rng, telling, told = random.Random(seed), ToldEvents(calls_allowed=calls_allowed), list[Event]()
    while events:
        size = rng.randint(0, 3)
        told += telling.feed(events[:size])
        events = events[size:]
    assert not telling.holding
    return told


def check(response: ParsedResponse, seed: int = 0) -> None:
    told = told_response(response)
    in_history = history_message(response)
    if not in_history.get("reasoning_content", "x"):
        del in_history["reasoning_content"]
    assert openai_message(told) | {"content": told.content} == in_history | {"content": in_history["content"] or ""}
    assert told_response(told) == told
    uncalled = told_response(response, calls_allowed=False)
    assert uncalled.tool_calls == []
    raw = "".join(p.lead + p.text for p in response.parts if p.kind is not PartKind.REASONING)
    assert uncalled.content == raw
    for allowed, whole in ((True, told), (False, uncalled)):
        events = told_in_pieces(tell(response, seed), seed, calls_allowed=allowed)
        assert added_up(events) == parts_of(whole)
        assert ToldEvents(calls_allowed=allowed).feed(events) == events


@pytest.mark.parametrize("name", RESPONSES)
def test_what_is_told_is_what_the_history_has(name: str) -> None:
    check(RESPONSES[name])


@settings(max_examples=200, deadline=None)
@given(said=SAID, seed=st.integers(0, 2**32))
def test_whatever_was_said(said: list[Said], seed: int) -> None:
    check(respond(*said), seed)


def test_an_attempt_between_calls_is_text_and_the_calls_keep_their_index() -> None:
    broken = call("f", None, CallStatus.INVALID_JSON, text="{")
    told = told_response(respond(call("f", {}), broken, call("g", {"a": 1}), say("done")))
    assert [made.index for made in told.tool_calls] == [0, 2]
    assert told.content == broken.raw + "done"
    assert [made["function"]["name"] for made in openai_message(told)["tool_calls"]] == ["f", "g"]
    assert openai_message(told)["tool_calls"][1]["id"] == "call00002"


@pytest.mark.parametrize("family", ["qwen3", "qwen3-coder"])
def test_real_attempts_come_as_they_were_written(family: str) -> None:
    """Token by token, with the white space that the grammar writes before a call."""
    made = renderer(family)
    ids = [*ids_of(made, ("Let me see.\n" + BAD[family],)), made.get_stop_token_ids()[0]]
    parser, telling = made.streaming_parser(tools=TOOLS, prompt_ids=answered(made)), ToldEvents()
    events = [event for one in ids for event in telling.feed(parser.feed([one]))]
    events += telling.feed(parser.finish())
    assert parser.response.tool_calls
    assert not any(isinstance(event, CallNamed | CallFinished) for event in events)
    text = "".join(event.text for event in events if isinstance(event, ContentDelta))
    assert text == told_response(parser.response).content == history_message(parser.response)["content"]
    assert text == "Let me see.\n" + BAD[family]
