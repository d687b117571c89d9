"""What real families write reaches the clients of both APIs whole, streamed and not, calls that fail included."""

from __future__ import annotations

import contextlib
import itertools
import json
from typing import Any

import jiter

from tests.gateway import test_chat, test_messages
from tests.gateway.answers import FAMILIES, head_of, renderer, told_message, written
from tests.parsing.forms import families


@families(FAMILIES)
def test_streams_are_the_answers(any_family: str) -> None:
    made = renderer(any_family)
    for text, allowed in itertools.product(FAMILIES[any_family], (True, False)):
        choice = written(made, text, stops=not text.endswith(("<|call|>", "<|return|>")))
        head = head_of(made, calls_allowed=allowed, logprobs=0)

        message = test_chat.check(head, choice)["choices"][0]["message"]
        if allowed:
            assert message == told_message(choice)

        blocks = test_messages.check(head, choice)["content"]
        thought = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
        assert thought == message.get("reasoning_content", "")
        calls = {call["id"]: call["function"] for call in message.get("tool_calls", [])}
        for block in blocks:
            if block["type"] == "tool_use":
                function = calls.pop(block["id"])
                assert block["name"] == function["name"]
                read = read_by_client(function["arguments"])
                try:
                    assert block["input"] == read == json.loads(function["arguments"])
                except ValueError:
                    assert block["input"].items() <= read.items()
        assert not any(function["arguments"].startswith("{") for function in calls.values())
        if not calls:
            text = "".join(block["text"] for block in blocks if block["type"] == "text")
            assert text == (message["content"] or "")


def read_by_client(arguments: str) -> dict[str, Any]:
    """What Anthropic's client can read of arguments at most."""
    for length in range(len(arguments), 0, -1):
        with contextlib.suppress(ValueError):
            found: dict[str, Any] = jiter.from_json(arguments[:length].encode(), partial_mode=True)
            return found
    raise AssertionError(arguments)
