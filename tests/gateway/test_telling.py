"""What a client is told in events is what it is told whole: attempts with a name are calls, all others are text."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jiter
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gateway.test_shapes import RESPONSES, Said, call, respond, say
from tests.gateway.test_sse import SAID, tell
from tests.parsing.forms import TOOLS, answered, ids_of
from tests.parsing.test_render_back import BAD
from tests.parsing.test_streaming import renderer
from tests.support import examples
from tokentrace import Renderer
from tokentrace.gateway.shapes import anthropic_message
from tokentrace.gateway.telling import ToldEvents, told_response
from tokentrace.parsing.events import ArgumentsDelta, CallNamed, ContentDelta, Done, Event, ReasoningDelta
from tokentrace.parsing.messages import history_message, openai_message
from tokentrace.parsing.response import CallStatus, ParsedResponse, PartKind


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


def told_in_pieces(events: list[Event], seed: int, **how: bool) -> list[Event]:
    rng, telling, told = random.Random(seed), ToldEvents(**how), list[Event]()
    while events:
        size = rng.randint(0, 3)
        told += telling.feed(events[:size])
        events = events[size:]
    assert not telling.calling
    return told


def named_as_calls(response: ParsedResponse) -> list[tuple[str, str]]:
    """What is to be told: calls by name and text, everything else as it was written."""
    found: list[tuple[str, str]] = []
    for part in response.parts:
        attempt = None if part.call is None else response.tool_calls[part.call]
        if attempt is not None and attempt.name is not None:
            found.append((f"call {attempt.index} {attempt.name} {attempt.id}", attempt.arguments_text))
        elif part.lead + part.text:
            kind = "ReasoningDelta" if part.kind is PartKind.REASONING else "ContentDelta"
            found.append((kind, part.lead + part.text))
    groups = itertools.groupby(found, key=lambda one: one[0])
    return [(kind, "".join(text for _, text in group)) for kind, group in groups]


def read_by_anthropic(found: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    """What Anthropic's client has: it reads the pieces of an input as far as they go."""
    return [
        (kind, jiter.from_json(text.encode(), partial_mode=True) if kind.startswith("call ") else text)
        for kind, text in found
    ]


def check(response: ParsedResponse, seed: int = 0) -> None:
    told = told_response(response)
    assert parts_of(told) == named_as_calls(response)
    uncalled = told_response(response, calls_allowed=False)
    assert uncalled.tool_calls == []
    raw = "".join(p.lead + p.text for p in response.parts if p.kind is not PartKind.REASONING)
    assert uncalled.content == raw
    for allowed, whole in ((True, told), (False, uncalled)):
        assert told_response(whole) == whole
        assert openai_message(whole).get("content") == (whole.content or (None if whole.tool_calls else ""))
        assert len(openai_message(whole).get("tool_calls", ())) == len(whole.tool_calls)
        events = told_in_pieces(tell(response, seed), seed, calls_allowed=allowed)
        assert added_up(events) == parts_of(whole)
        assert ToldEvents(calls_allowed=allowed).feed(events) == events
    objects = told_response(response, objects=True)
    assert told_response(objects, objects=True) == objects
    streamed = added_up(told_in_pieces(tell(response, seed), seed, objects=True))
    assert read_by_anthropic(streamed) == read_by_anthropic(parts_of(objects))
    assert [json.loads(made.arguments_text) for made in objects.tool_calls] == [
        made.arguments for made in objects.tool_calls
    ]


@pytest.mark.parametrize("name", RESPONSES)
def test_events_are_the_whole(name: str) -> None:
    check(RESPONSES[name])


@settings(max_examples=examples(200), deadline=None)
@given(said=SAID, seed=st.integers(0, 2**32))
def test_whatever_was_said(said: list[Said], seed: int) -> None:
    check(respond(*said), seed)


BROKEN = call("f", None, CallStatus.INVALID_JSON, text='{"a": 1, "b": "x" y')


def test_an_attempt_with_a_name_is_a_call_and_one_without_is_text() -> None:
    nameless = call(None, {}, CallStatus.MISSING_NAME)
    told = told_response(respond(call("f", {}), nameless, BROKEN, call("g", {"a": 1}), say("done")))
    assert [made.index for made in told.tool_calls] == [0, 2, 3]
    assert told.content == nameless.raw + "done"
    made = openai_message(told)["tool_calls"]
    assert [one["function"]["name"] for one in made] == ["f", "f", "g"]
    assert [one["id"] for one in made] == ["call00000", "call00002", "call00003"]
    assert made[1]["function"]["arguments"] == BROKEN.arguments_text


def test_an_object_has_what_can_be_read_of_broken_arguments() -> None:
    """A string ends where something follows that can follow it: here that is not certain."""
    told = told_response(respond(BROKEN), objects=True)
    assert anthropic_message(told)["content"][0]["input"] == {"a": 1}
    assert openai_message(told)["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    no_object = call("f", None, CallStatus.MALFORMED, text="[1]")
    assert told_response(respond(no_object), objects=True).content == no_object.raw


def test_what_goes_into_a_conversation_of_our_own_does_not_change() -> None:
    assert history_message(respond(BROKEN)) == {"role": "assistant", "content": BROKEN.raw}


def token_by_token(made: Renderer, text: str) -> tuple[ParsedResponse, list[list[Event]]]:
    ids = [*ids_of(made, (text,)), made.get_stop_token_ids()[0]]
    parser, telling = made.streaming_parser(tools=TOOLS, prompt_ids=answered(made)), ToldEvents()
    told = [telling.feed(parser.feed([one])) for one in ids]
    told.append([event for event in telling.feed(parser.finish()) if not isinstance(event, Done)])
    return parser.response, told


@pytest.mark.parametrize("family", BAD)
def test_real_attempts_are_calls_with_the_arguments_that_were_written(family: str) -> None:
    response, told = token_by_token(renderer(family), "Let me see.\n" + BAD[family])
    [made] = told_response(response).tool_calls
    assert (made.name, made.ok) == ("look", False)
    events = [event for one in told for event in one]
    assert added_up(events) == named_as_calls(response)
    assert added_up(events)[-1] == (f"call 0 look {made.id}", made.arguments_text)


LONG = "one two three four " * 20
LONG_CALLS = {
    "qwen3": f'<tool_call>\n{{"name": "look", "arguments": {{"place": "{LONG}"}}}}\n</tool_call>',
    "qwen3-coder": f"<tool_call>\n<function=look>\n<parameter=place>\n{LONG}\n</parameter>\n</function>\n</tool_call>",
    "kimi-k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
    f'{{"place": "{LONG}"}}<|tool_call_end|><|tool_calls_section_end|>',
    "mistral-nemo": f'[TOOL_CALLS][{{"name": "look", "arguments": {{"place": "{LONG}"}}, "id": "abcdefghi"}}]',
}


@pytest.mark.parametrize("family", LONG_CALLS)
def test_a_long_argument_is_told_while_it_is_sampled(family: str) -> None:
    response, told = token_by_token(renderer(family), LONG_CALLS[family])
    telling = [at for at, events in enumerate(told) if any(isinstance(event, ArgumentsDelta) for event in events)]
    assert len(telling) > 40
    assert telling[0] < len(told) // 4
    assert response.tool_calls[0].ok
    assert added_up([event for one in told for event in one]) == parts_of(told_response(response))


def test_an_id_that_is_written_after_the_arguments_is_not_told() -> None:
    response, _ = token_by_token(renderer("mistral-nemo"), LONG_CALLS["mistral-nemo"])
    assert (response.tool_calls[0].id, response.tool_calls[0].late_id) == ("abcdefghi", True)
    assert told_response(response).tool_calls[0].id is None


def test_an_id_that_is_written_before_them_is() -> None:
    response, _ = token_by_token(renderer("kimi-k2"), LONG_CALLS["kimi-k2"])
    assert told_response(response).tool_calls[0].id == "functions.look:0"
