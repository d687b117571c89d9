"""Turns of gpt-oss, parsed by token, held against openai-harmony's own parsers."""

from __future__ import annotations

from typing import Any

import openai_harmony as harmony
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parsing.harmony_turns import (
    FIXTURE,
    TOOLS,
    TURNS,
    Said,
    Spoken,
    check,
    completion,
    of_messages,
    ours,
    turns,
)
from tests.support import make_renderer
from tokentrace import Renderer
from tokentrace.parsing.response import Finish

pytestmark = pytest.mark.xdist_group("gpt-oss")


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return make_renderer("gpt-oss")


# -- what both say


def theirs(encoding: harmony.HarmonyEncoding, ids: list[int]) -> list[Said]:
    return of_messages(encoding.parse_messages_from_completion_tokens(ids, harmony.Role.ASSISTANT))


# -- completions that openai-harmony writes


@pytest.mark.parametrize("name", TURNS)
def test_what_harmony_renders_is_parsed_as_harmony_does(
    name: str, encoding: harmony.HarmonyEncoding, renderer: Renderer
) -> None:
    spoken = TURNS[name]
    ids = completion(encoding, spoken)
    expected = [said for one in spoken for said in one.said]
    assert theirs(encoding, ids) == expected
    assert ours(check(renderer, encoding, ids)) == expected


@pytest.mark.parametrize("end", ["<|end|>", "<|return|>", "<|call|>"])
@pytest.mark.parametrize("name", TURNS)
def test_every_end_closes_every_message(
    name: str, end: str, encoding: harmony.HarmonyEncoding, renderer: Renderer
) -> None:
    """openai-harmony accepts each of them after each kind of message, and so a call closed with another is OK."""
    ids = completion(encoding, TURNS[name], end)
    response = check(renderer, encoding, ids)
    assert ours(response) == theirs(encoding, ids)
    assert response.open is None
    assert response.unread is None
    stopped = None if end == "<|end|>" else ids[-1]
    assert response.stop_token == stopped
    assert response.finish is (Finish.LENGTH if stopped is None else Finish.STOP)
    closed = renderer.parse_response(completion(encoding, TURNS[name]))
    assert [call.status for call in response.tool_calls] == [call.status for call in closed.tool_calls]


ends = st.sampled_from([None, "<|return|>", "<|call|>", "<|end|>"])


@FIXTURE
@given(spoken=turns, end=ends)
def test_any_turn_is_parsed_as_harmony_does(
    spoken: list[Spoken], end: str | None, encoding: harmony.HarmonyEncoding, renderer: Renderer
) -> None:
    ids = completion(encoding, spoken, end)
    expected = theirs(encoding, ids)
    assert expected == [said for one in spoken for said in one.said]
    assert ours(check(renderer, encoding, ids)) == expected


MESSAGES: list[dict[str, Any]] = [
    {"content": "yo"},
    {"content": "yo </think>\n", "reasoning_content": "hmm\n"},
    {
        "reasoning_content": "look",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}],
    },
    {"content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]},
]


@pytest.mark.parametrize("message", MESSAGES)
def test_what_the_template_renders(
    message: dict[str, Any], encoding: harmony.HarmonyEncoding, renderer: Renderer
) -> None:
    rendered = renderer.render([{"role": "user", "content": "hi"}, {"role": "assistant", **message}], tools=TOOLS)
    ids = rendered.ids[rendered.mask].tolist()
    response = check(renderer, encoding, ids, tools=TOOLS)
    assert ours(response) == theirs(encoding, ids)
    assert response.content == message.get("content", "")
    assert response.reasoning_content == message.get("reasoning_content")
    functions = [call["function"] for call in message.get("tool_calls", [])]
    assert [(call.name, call.arguments) for call in response.calls] == [(f["name"], f["arguments"]) for f in functions]
    assert response.stop_token == ids[-1]
