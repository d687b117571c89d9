"""What real families write reaches the clients of both APIs whole, streamed and not, calls that fail included."""

from __future__ import annotations

import itertools

from tests.gateway import test_chat, test_messages
from tests.gateway.answers import FAMILIES, head_of, renderer, written
from tests.parsing.forms import families
from tokentrace.parsing.shapes import history_message


@families(FAMILIES)
def test_streams_are_the_answers(any_family: str) -> None:
    made = renderer(any_family)
    for text, allowed in itertools.product(FAMILIES[any_family], (True, False)):
        choice = written(made, text, stops=not text.endswith(("<|call|>", "<|return|>")))
        told = history_message(choice.reply.response, call_id=choice.reply.call_id)
        calls = [call["function"]["name"] for call in told.get("tool_calls", []) if allowed]
        head = head_of(made, calls_allowed=allowed, logprobs=0)

        message = test_chat.check(head, choice)["choices"][0]["message"]
        assert [call["function"]["name"] for call in message.get("tool_calls", [])] == calls
        if allowed:
            assert message["content"] == told["content"]

        blocks = test_messages.check(head, choice)["content"]
        assert [block["name"] for block in blocks if block["type"] == "tool_use"] == calls
        assert "".join(block["text"] for block in blocks if block["type"] == "text") == (message["content"] or "")
        thought = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
        assert thought == message.get("reasoning_content", "")
