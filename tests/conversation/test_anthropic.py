"""Conversations in Anthropic's shape become messages."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.conversation.blocks import (
    CACHED,
    REDACTED,
    USER,
    assistant,
    call,
    exhaust,
    result,
    text,
    think,
    use,
    user,
)
from tokentrace import InputError
from tokentrace.conversation.messages import check_messages
from tokentrace.conversation.shapes import (
    from_anthropic,
    from_sharegpt,
    with_system,
)

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "hi"}}
# -- Anthropic


ANTHROPIC: dict[str, tuple[list[Any], list[dict[str, Any]]]] = {
    "text blocks are one text with nothing in between": (
        [user(text("a "), text("b")), assistant(text("c"), text("d"))],
        [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "cd"}],
    ),
    "redacted thinking is left out": (
        [USER, assistant(REDACTED, think("a"), text("x")), USER, assistant(REDACTED, text("y"))],
        [
            USER,
            {"role": "assistant", "content": "x", "reasoning_content": "a"},
            USER,
            {"role": "assistant", "content": "y"},
        ],
    ),
    "calls and their results": (
        [
            USER,
            assistant(think("t"), text("see"), use("toolu_1", "f", city="Bern"), use("toolu_2", "g")),
            user(result("toolu_1", "rain"), result("toolu_2", [text("o"), text("k")])),
            assistant(text("done")),
        ],
        [
            USER,
            {
                "role": "assistant",
                "content": "see",
                "reasoning_content": "t",
                "tool_calls": [call("f", {"city": "Bern"}, "toolu_1"), call("g", {}, "toolu_2")],
            },
            {"role": "tool", "tool_call_id": "toolu_1", "name": "f", "content": "rain"},
            {"role": "tool", "tool_call_id": "toolu_2", "name": "g", "content": "ok"},
            {"role": "assistant", "content": "done"},
        ],
    ),
    "results, then text": (
        [user(result("a", "1"), result("b", "2"), text("go on"))],
        [
            {"role": "tool", "tool_call_id": "a", "content": "1"},
            {"role": "tool", "tool_call_id": "b", "content": "2"},
            {"role": "user", "content": "go on"},
        ],
    ),
    "results: none, empty, failed, and not failed": (
        [user(result("a"), result("b", []), result("c", "no", is_error=True), result("d", "ok", is_error=False))],
        [
            {"role": "tool", "tool_call_id": "a", "content": ""},
            {"role": "tool", "tool_call_id": "b", "content": ""},
            {"role": "tool", "tool_call_id": "c", "content": "no", "is_error": True},
            {"role": "tool", "tool_call_id": "d", "content": "ok"},
        ],
    ),
    "images and documents stay": (
        [user(text("see", **CACHED), {**IMAGE, **CACHED}, text("?")), user(result("a", [IMAGE]), DOCUMENT)],
        [
            {"role": "user", "content": [text("see"), IMAGE, text("?")]},
            {"role": "tool", "tool_call_id": "a", "content": [IMAGE]},
            {"role": "user", "content": [DOCUMENT]},
        ],
    ),
    "cache control, citations and signatures are left out": (
        [user(text("a", **CACHED)), assistant(text("b", citations=None), use("c", "f") | CACHED)],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "tool_calls": [call("f", {}, "c")]},
        ],
    ),
}
"""By the rule it shows: what is given, and what is made of it."""


@cache
def messages_of_anthropic() -> TypeAdapter[Any]:
    from anthropic.types import MessageParam

    return TypeAdapter(list[MessageParam])


"""Lives as long as what it validates, which is read only later."""


def anthropic_accepts(messages: Any) -> None:
    exhaust(messages_of_anthropic().validate_python(messages, strict=True))


@pytest.mark.parametrize("name", ANTHROPIC)
def test_anthropics_blocks_become_messages(name: str) -> None:
    messages, made = ANTHROPIC[name]
    anthropic_accepts(messages)
    before = json.dumps(messages)
    assert from_anthropic(messages) == made
    assert json.dumps(messages) == before, "the input is not changed"
    assert check_messages(made) == made


@pytest.mark.parametrize(
    ("messages", "index", "field"),
    [
        ([USER, {"role": "tool", "content": "x"}], 1, "role"),
        ([{"role": "user", "content": 3}], 0, "content"),
        ([user("text")], 0, "content.0"),
        ([user({"text": "x"})], 0, "content.0.type"),
        ([user(text("a"), {"type": "text"})], 0, "content.1.text"),
        ([user(think("x"))], 0, "content.0"),
        ([assistant({"type": "thinking", "thinking": [text("x")]})], 0, "content.0.thinking"),
        ([assistant({"type": "tool_use", "id": "a", "name": "f"})], 0, "content.0.input"),
        ([assistant({"type": "tool_use", "id": "a", "input": {}})], 0, "content.0.name"),
        ([user(result("a", [use("b", "f")]))], 0, "content.0.content.0"),
        ([user(result("a", "x", is_error="yes"))], 0, "content.0.is_error"),
        ([{"role": "assistant", "content": "x", "tool_calls": [call("f", {})]}], 0, "tool_calls"),
        ([USER, None], 1, None),
        ("hi", None, "messages"),
    ],
)
def test_anthropics_errors_name_the_message_and_the_field(messages: Any, index: int | None, field: str | None) -> None:
    with pytest.raises(InputError) as caught:
        from_anthropic(messages)
    assert (caught.value.message, caught.value.field) == (index, field)


# -- the system prompt


@pytest.mark.parametrize("system", ["be nice", [text("be "), text("nice", **CACHED)]])
def test_the_system_prompt_goes_first(system: Any) -> None:
    from anthropic.types import TextBlockParam

    adapter: TypeAdapter[Any] = TypeAdapter(str | list[TextBlockParam])
    exhaust(adapter.validate_python(system, strict=True))
    said = {"role": "system", "content": "be nice"}
    assert from_anthropic([USER], system) == [said, USER]
    assert from_sharegpt([{"from": "human", "value": "hi"}], system) == [said, USER]
    assert with_system([USER], system) == [said, USER]


@pytest.mark.parametrize("content", ["be nice", [text("be "), "nice"]])
def test_a_system_prompt_said_twice_is_said_once(content: Any) -> None:
    messages = [{"role": "system", "content": content}, USER]
    assert with_system(messages, "be nice") == messages


@pytest.mark.parametrize("content", ["be nasty", None, [text("be"), {"type": "image"}], [{"text": 3}]])
def test_two_system_prompts_that_differ_are_refused(content: Any) -> None:
    with pytest.raises(InputError, match=r"^system: differs"):
        with_system([{"role": "system", "content": content}, USER], "be nice")
