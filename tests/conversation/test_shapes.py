"""Conversations in other shapes become OpenAI's: what each rule makes of them, and what is refused and where.

Anthropic's messages here are held against the types of its own client.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from anthropic.types import MessageParam, TextBlock, TextBlockParam, ToolParam, ToolUseBlock
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage
from pydantic import TypeAdapter, ValidationError

from tests.parsing.test_shapes import RESPONSES
from tokentrace import InputError
from tokentrace.conversation.messages import check_messages, check_tools
from tokentrace.conversation.shapes import (
    Shape,
    from_anthropic,
    from_openai,
    from_sharegpt,
    openai_messages,
    openai_tools,
    shape_of,
    with_system,
)
from tokentrace.parsing.shapes import openai_message

USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "hi"}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def think(said: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": said, "signature": "c2lnbmVk"}


def use(id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": arguments}


def result(id: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, **({} if content is None else {"content": content}), **more}


def call(name: str, arguments: Any, id: str | None = None) -> dict[str, Any]:
    """A call in OpenAI's shape."""
    function = {"name": name, "arguments": arguments}
    return {**({} if id is None else {"id": id}), "type": "function", "function": function}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


# -- Anthropic

REDACTED = {"type": "redacted_thinking", "data": "ZW5jcnlwdGVk"}
CACHED = {"cache_control": {"type": "ephemeral"}}

ANTHROPIC: dict[str, tuple[list[Any], list[dict[str, Any]]]] = {
    "strings": (
        [USER, {"role": "assistant", "content": "hello"}],
        [USER, {"role": "assistant", "content": "hello"}],
    ),
    "text blocks are one text with nothing in between": (
        [user(text("a "), text("b")), assistant(text("c"), text("d"))],
        [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "cd"}],
    ),
    "thinking is reasoning": (
        [USER, assistant(think("hm, "), think("yes"), text("x"))],
        [USER, {"role": "assistant", "content": "x", "reasoning_content": "hm, yes"}],
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
    "thinking that is not shown is no reasoning": (
        [USER, assistant(think(""), text("x"))],
        [USER, {"role": "assistant", "content": "x"}],
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
    "only calls: the content is empty, not None": (
        [USER, assistant(use("a", "f"))],
        [USER, {"role": "assistant", "content": "", "tool_calls": [call("f", {}, "a")]}],
    ),
    "results, then text": (
        [user(result("a", "1"), result("b", "2"), text("go on"))],
        [
            {"role": "tool", "tool_call_id": "a", "content": "1"},
            {"role": "tool", "tool_call_id": "b", "content": "2"},
            {"role": "user", "content": "go on"},
        ],
    ),
    "text, result, texts": (
        [user(text("first"), result("a", "1"), text("la"), text("st"))],
        [
            {"role": "user", "content": "first"},
            {"role": "tool", "tool_call_id": "a", "content": "1"},
            {"role": "user", "content": "last"},
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
    "server tools stay": (
        [
            USER,
            assistant({"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}}, text("x")),
        ],
        [
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}},
                    text("x"),
                ],
            },
        ],
    ),
    "cache control, citations and signatures are left out": (
        [user(text("a", **CACHED)), assistant(text("b", citations=None), use("c", "f") | CACHED)],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "tool_calls": [call("f", {}, "c")]},
        ],
    ),
    "a system message among them": (
        [USER, {"role": "system", "content": [text("be "), text("nice")]}],
        [USER, {"role": "system", "content": "be nice"}],
    ),
    "nothing said": (
        [user(), assistant()],
        [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}],
    ),
}
"""By the rule it shows: what is given, and what is made of it."""


def exhaust(value: Any) -> None:
    """Walk all of a validated value: pydantic looks into an Iterable only as it is read."""
    if isinstance(value, Mapping):
        for inner in value.values():
            exhaust(inner)
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for inner in value:
            exhaust(inner)


MESSAGES_OF_ANTHROPIC = TypeAdapter(list[MessageParam])
"""Lives as long as what it validates, which is read only later."""


def anthropic_takes(messages: Any) -> None:
    exhaust(MESSAGES_OF_ANTHROPIC.validate_python(messages, strict=True))


def test_the_oracle_refuses_what_is_not_anthropics() -> None:
    with pytest.raises(ValidationError):
        anthropic_takes([user({"type": "tool_result", "content": "no id"})])


@pytest.mark.parametrize("name", ANTHROPIC)
def test_anthropics_own_types_take_what_is_given(name: str) -> None:
    anthropic_takes(ANTHROPIC[name][0])


@pytest.mark.parametrize("name", ANTHROPIC)
def test_anthropics_blocks_become_messages(name: str) -> None:
    messages, made = ANTHROPIC[name]
    before = json.dumps(messages)
    assert from_anthropic(messages) == made
    assert json.dumps(messages) == before, "the input is not changed"
    assert check_messages(made) == made


@pytest.mark.parametrize("name", RESPONSES)
def test_a_parsed_response_comes_back_from_anthropics_shape(name: str) -> None:
    response = RESPONSES[name]
    message = openai_message(response)
    for call in message.get("tool_calls", []):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    [made] = from_anthropic([response.to_anthropic()])
    assert made == {**message, "content": message["content"] or ""}


def test_objects_of_the_client_are_taken_as_blocks() -> None:
    blocks = [
        TextBlock(type="text", text="see", citations=None),
        ToolUseBlock(type="tool_use", id="a", name="f", input={"x": 1}),
    ]
    made = from_anthropic([{"role": "assistant", "content": blocks}])
    assert made == [{"role": "assistant", "content": "see", "tool_calls": [call("f", {"x": 1}, "a")]}]


def test_a_result_has_the_name_of_a_call_that_came_before_only() -> None:
    messages = [user(result("a", "1")), assistant(use("a", "f")), user(result("a", "2"), result("b", "3"))]
    assert [message.get("name") for message in from_anthropic(messages)] == [None, None, "f", None]


def test_what_is_trained_is_kept_on_every_message_made() -> None:
    given = [user(text("x"), result("a", "1")) | {"weight": 0}, assistant(text("y")) | {"train": False, "id": "msg"}]
    assert from_anthropic(given) == [
        {"role": "user", "content": "x", "weight": 0},
        {"role": "tool", "tool_call_id": "a", "content": "1", "weight": 0},
        {"role": "assistant", "content": "y", "train": False},
    ]


def test_ids_are_not_made_up() -> None:
    given = [assistant({"type": "tool_use", "name": "f", "input": {}}), user({"type": "tool_result", "content": "1"})]
    assert from_anthropic(given) == [
        {"role": "assistant", "content": "", "tool_calls": [call("f", {})]},
        {"role": "tool", "content": "1"},
    ]


@pytest.mark.parametrize(
    ("messages", "index", "field"),
    [
        ([USER, {"role": "tool", "content": "x"}], 1, "role"),
        ([{"content": "x"}], 0, "role"),
        ([{"role": ["user"], "content": "x"}], 0, "role"),
        ([USER, {"role": "assistant"}], 1, "content"),
        ([{"role": "user", "content": 3}], 0, "content"),
        ([user("text")], 0, "content.0"),
        ([user({"text": "x"})], 0, "content.0.type"),
        ([user(text("a"), {"type": "text"})], 0, "content.1.text"),
        ([user({"type": "other", "text": 1})], 0, "content.0.text"),
        ([user(think("x"))], 0, "content.0"),
        ([user(use("a", "f"))], 0, "content.0"),
        ([assistant(result("a", "x"))], 0, "content.0"),
        ([{"role": "system", "content": [REDACTED]}], 0, "content.0"),
        ([assistant({"type": "thinking", "thinking": [text("x")]})], 0, "content.0.thinking"),
        ([assistant({"type": "tool_use", "id": "a", "name": "f"})], 0, "content.0.input"),
        ([assistant({"type": "tool_use", "id": "a", "name": "f", "input": "{}"})], 0, "content.0.input"),
        ([assistant({"type": "tool_use", "id": "a", "input": {}})], 0, "content.0.name"),
        ([assistant({"type": "tool_use", "id": 1, "name": "f", "input": {}})], 0, "content.0.id"),
        ([user({"type": "tool_result", "tool_use_id": 1})], 0, "content.0.tool_use_id"),
        ([user(result("a", [use("b", "f")]))], 0, "content.0.content.0"),
        ([user(result("a", {"text": "x"}))], 0, "content.0.content"),
        ([user(result("a", "x", is_error="yes"))], 0, "content.0.is_error"),
        ([{"role": "assistant", "content": "x", "tool_calls": [call("f", {})]}], 0, "tool_calls"),
        ([USER, {"role": "assistant", "content": "x", "reasoning_content": "y"}], 1, "reasoning_content"),
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
    adapter = TypeAdapter(str | list[TextBlockParam])
    exhaust(adapter.validate_python(system, strict=True))
    said = {"role": "system", "content": "be nice"}
    assert from_anthropic([USER], system) == [said, USER]
    assert from_sharegpt([{"from": "human", "value": "hi"}], system) == [said, USER]
    assert with_system([USER], system) == [said, USER]


@pytest.mark.parametrize("system", [None, "", [], [text("")]])
def test_no_system_prompt(system: Any) -> None:
    assert from_anthropic([USER], system) == [USER]


@pytest.mark.parametrize("content", ["be nice", [text("be "), "nice"]])
def test_a_system_prompt_said_twice_is_said_once(content: Any) -> None:
    messages = [{"role": "system", "content": content}, USER]
    assert with_system(messages, "be nice") == messages


@pytest.mark.parametrize("content", ["be nasty", None, [text("be"), {"type": "image"}], [{"text": 3}]])
def test_two_system_prompts_that_differ_are_refused(content: Any) -> None:
    with pytest.raises(InputError, match=r"^system: differs"):
        with_system([{"role": "system", "content": content}, USER], "be nice")


@pytest.mark.parametrize(
    ("system", "field"),
    [(3, "system"), ({"text": "x"}, "system"), ([IMAGE], "system"), (["x"], "system.0"), ([think("x")], "system.0")],
)
def test_what_is_no_system_prompt(system: Any, field: str) -> None:
    with pytest.raises(InputError) as caught:
        from_anthropic([USER], system)
    assert (caught.value.message, caught.value.field) == (None, field)


# -- ShareGPT


def turn(speaker: Any, value: Any, **more: Any) -> dict[str, Any]:
    return {"from": speaker, "value": value, **more}


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


CALL = json.dumps({"name": "f", "arguments": {}})


def test_calls_right_after_what_the_assistant_says_are_of_the_same_message() -> None:
    made = from_sharegpt([turn("human", "hi"), turn("gpt", "see", reasoning_content="hm"), turn("function_call", CALL)])
    said = {"role": "assistant", "content": "see", "reasoning_content": "hm", "tool_calls": [call("f", {})]}
    assert made == [USER, said]


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


def test_fields_of_a_turn_that_are_a_messages_own_are_kept() -> None:
    turns = [
        turn("human", "hi", markdown=None, text="<p>hi", name="ann"),
        turn("gpt", None, weight=0, reasoning_content="hm", tool_calls=[call("f", {}, "c1")]),
        turn("tool", {"any": "object"}, name="f", tool_call_id="c1", weight=None),
        turn("gpt", "x", train=True),
    ]
    assert from_sharegpt(turns) == [
        {"role": "user", "content": "hi", "name": "ann"},
        {
            "role": "assistant",
            "content": "",
            "weight": 0,
            "reasoning_content": "hm",
            "tool_calls": [call("f", {}, "c1")],
        },
        {"role": "tool", "content": {"any": "object"}, "name": "f", "tool_call_id": "c1"},
        {"role": "assistant", "content": "x", "train": True},
    ]


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (turn("narrator", "x"), "from"),
        (turn(None, "x"), "from"),
        (turn([], "x"), "from"),
        ({"value": "x"}, "from"),
        ({"from": "human"}, "value"),
        (turn("human", 3), "value"),
        (turn("human", {"a": 1}), "value"),
        (turn("gpt", [3]), "value.0"),
        (turn("human", None, tool_calls=[call("f", {})]), "value"),
        (turn("gpt", "x", reasoning_content=3), "reasoning_content"),
        (turn("gpt", "x", tool_calls=[{}]), "tool_calls.0.name"),
        (turn("function_call", None), "value.0"),
        (turn("function_call", "f()"), "value"),
        (turn("function_call", "[" * 100_000), "value"),
        (turn("function_call", "9" * 10_000), "value"),
        (turn("function_call", "[]"), "value"),
        (turn("function_call", '["f"]'), "value.0"),
        (turn("function_call", '{"arguments": {}}'), "value.0.name"),
        (turn("function_call", '[{"name": "f", "arguments": {}}, {"name": "f"}]'), "value.1.arguments"),
        (turn("function_call", '{"name": "f", "arguments": [1]}'), "value.0.arguments"),
        (turn("function_call", '{"name": "f", "arguments": {}, "parameters": {"a": 1}}'), "value.0"),
        (turn("function_call", '{"name": "f", "arguments": {}, "id": 3}'), "value.0.id"),
        (turn("function_call", '{"function": "f"}'), "value.0"),
        (turn("function_call", CALL, tool_calls=[call("f", {})]), "tool_calls"),
        (None, None),
    ],
)
def test_sharegpts_errors_name_the_message_and_the_field(bad: Any, field: str | None) -> None:
    with pytest.raises(InputError) as caught:
        from_sharegpt([turn("human", "hi"), bad])
    assert (caught.value.message, caught.value.field) == (1, field)


def test_an_unknown_speaker_is_told_who_is_known() -> None:
    with pytest.raises(
        InputError, match=r"^message 0, from: 'narrator' is not a known speaker; use one of .*\bgpt, human,"
    ):
        from_sharegpt([turn("narrator", "x")])


# -- OpenAI


def test_openais_messages_stay_the_very_same() -> None:
    messages = [
        {"role": "system", "content": [text("x")]},
        {"role": "user", "content": [text("a"), {"type": "image_url", "image_url": {"url": "u"}}]},
        {"role": "assistant", "content": None, "tool_calls": [call("f", '{"a": 1}')], "function_call": None},
        {"role": "function", "name": "f", "content": "r"},
        {"role": "critic", "content": 3, "function_call": "not an assistant's"},
    ]
    made = from_openai(messages)
    assert len(made) == len(messages)
    assert all(mine is theirs for mine, theirs in zip(made, messages, strict=True))


def test_a_function_call_of_old_becomes_a_tool_call() -> None:
    function = {"name": "f", "arguments": '{"a": 1}'}
    given = [USER, {"role": "assistant", "content": None, "function_call": function, "weight": 1}]
    made = from_openai(given)
    assert made == [
        USER,
        {"role": "assistant", "content": None, "weight": 1, "tool_calls": [{"type": "function", "function": function}]},
    ]
    assert "function_call" in given[1], "the input is not changed"


def test_messages_of_openais_client_are_taken() -> None:
    message = ChatCompletionMessage(role="assistant", content="x")
    assert from_openai([USER, message]) == [USER, {"role": "assistant", "content": "x"}]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"function_call": "f"}, "function_call"),
        ({"function_call": {"arguments": "{}"}}, "function_call.name"),
        ({"function_call": {"name": "f", "arguments": 3}}, "function_call.arguments"),
        ({"function_call": {"name": "f"}, "tool_calls": [call("f", {})]}, "function_call"),
    ],
)
def test_a_function_call_that_is_none(message: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        from_openai([USER, {"role": "assistant", "content": "x", **message}])
    assert (caught.value.message, caught.value.field) == (1, field)


# -- tools

BARE = {"name": "f", "description": "d", "parameters": SCHEMA}
OPENAI_TOOL = {"type": "function", "function": BARE}


@pytest.mark.parametrize(
    ("tool", "made"),
    [
        ({"name": "f", "description": "d", "input_schema": SCHEMA}, OPENAI_TOOL),
        ({"type": "custom", "name": "f", "description": "d", "input_schema": SCHEMA, **CACHED}, OPENAI_TOOL),
        ({"name": "f", "input_schema": SCHEMA}, {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}),
    ],
)
def test_anthropics_tools_become_openais(tool: dict[str, Any], made: dict[str, Any]) -> None:
    adapter = TypeAdapter(ToolParam)
    exhaust(adapter.validate_python(tool, strict=True))
    assert openai_tools([tool]) == openai_tools(json.dumps([tool])) == openai_tools([tool], wrap=True) == [made]
    assert check_tools([made]) == [made]


def test_openais_tools_stay_as_they_are() -> None:
    flat = {"type": "function", **BARE}
    assert openai_tools([OPENAI_TOOL, BARE, flat]) == [OPENAI_TOOL, BARE, flat]
    assert openai_tools([OPENAI_TOOL, BARE, flat], wrap=True) == [OPENAI_TOOL] * 3


@pytest.mark.parametrize(("tools", "made"), [(None, None), ("", None), (" \n", None), ("null", None), ([], [])])
def test_no_tools(tools: Any, made: Any) -> None:
    assert openai_tools(tools) == made


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ("none of them", "tools"),
        ('{"name": "f"}', "tools"),
        (3, "tools"),
        ([3], "tools.0"),
        ([OPENAI_TOOL, {"type": "function"}], "tools.1.name"),
        ([{"type": "web_search_20250305", "name": "web_search"}], "tools.0.input_schema"),
        ([{"type": "custom", "name": "f"}], "tools.0.input_schema"),
        ([{"type": ["x"], "name": "f"}], "tools.0.input_schema"),
        ([{"name": "f", "input_schema": "{}"}], "tools.0.input_schema"),
    ],
)
def test_what_is_no_tools(tools: Any, field: str) -> None:
    with pytest.raises(InputError) as caught:
        openai_tools(tools)
    assert (caught.value.message, caught.value.field) == (None, field)


# -- which shape it is

MISTRAL = assistant({"type": "thinking", "thinking": [text("hm")]}, text("x"))
RESULT = {"role": "tool", "tool_call_id": "a", "content": "r"}


@pytest.mark.parametrize(
    ("messages", "shape"),
    [
        ([USER], Shape.OPENAI),
        ([user(text("a"), text("b"))], Shape.OPENAI),
        ([user(text("a"), {"type": "image_url", "image_url": {"url": "u"}})], Shape.OPENAI),
        ([turn("human", "x")], Shape.SHAREGPT),
        ([{"from": "human"}], Shape.SHAREGPT),
        ([USER, turn("human", "x", role=None)], Shape.SHAREGPT),
        ([{"role": "user", "content": "x", "from": "web"}], Shape.OPENAI),
        ([{"role": "user", "content": "x", "from": None, "value": None}], Shape.OPENAI),
        ([USER, assistant(use("a", "f"))], Shape.ANTHROPIC),
        ([user(result("a", "x"))], Shape.ANTHROPIC),
        ([USER, assistant(think("x"), text("y"))], Shape.ANTHROPIC),
        ([USER, assistant(REDACTED, text("y"))], Shape.ANTHROPIC),
        ([USER, MISTRAL], Shape.OPENAI),
        ([{"role": "system", "content": [think("x")]}, USER], Shape.OPENAI),
        ([USER, assistant(think("x")) | {"tool_calls": [call("f", {})]}, RESULT], Shape.OPENAI),
        ([USER, assistant(think("x")), RESULT], Shape.OPENAI),
        ([], Shape.OPENAI),
        (None, Shape.OPENAI),
        ([None, [3], {"content": [None, {"type": []}]}], Shape.OPENAI),
    ],
)
def test_the_shape_is_what_the_messages_show(messages: Any, shape: Shape) -> None:
    assert shape_of(messages) is shape


def test_messages_of_any_shape_become_openais() -> None:
    assert openai_messages([turn("human", "hi")]) == [USER]
    assert openai_messages([USER, assistant(think("x"), text("y"))])[1]["reasoning_content"] == "x"
    assert openai_messages([USER, assistant(think("x"))], Shape.OPENAI) == [USER, assistant(think("x"))]
    assert openai_messages([user(text("a"), text("b"))]) == [user(text("a"), text("b"))]
    assert openai_messages([user(text("a"), text("b"))], Shape.ANTHROPIC) == [{"role": "user", "content": "ab"}]


@pytest.mark.parametrize("convert", [from_openai, from_anthropic, from_sharegpt, openai_messages])
@pytest.mark.parametrize("messages", [[], (), None, "hi", b"hi", {"role": "user"}, 3])
def test_what_is_no_list_of_messages(convert: Callable[[Any], Any], messages: Any) -> None:
    with pytest.raises(InputError):
        convert(messages)


# -- hostile input

WORDS = [
    *("role", "content", "from", "value", "type", "text", "thinking", "id", "name", "input", "tool_use_id", "is_error"),
    *("user", "assistant", "system", "tool", "human", "gpt", "function_call", "observation", "tool_use", "tool_result"),
    *("redacted_thinking", "image", "tool_calls", "function", "arguments", "weight", "reasoning_content", "{}", "[]"),
    *('{"name": "f", "arguments": {}}', "input_schema", "parameters", "custom"),
]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(WORDS)
KEYS = st.sampled_from(WORDS) | st.text(max_size=5)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=25
)
BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image"])},
    optional={
        "text": st.text(max_size=3) | JSON,
        "thinking": st.text(max_size=3) | JSON,
        "id": st.text(max_size=3) | JSON,
        "tool_use_id": st.text(max_size=3) | JSON,
        "name": st.text(max_size=3) | JSON,
        "input": st.dictionaries(st.text(max_size=3), JSON, max_size=2) | JSON,
        "content": JSON | st.lists(st.builds(text, st.text(max_size=3)), max_size=2),
        "is_error": st.booleans() | JSON,
    },
)
NEARLY = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system"]) | JSON,
        "content": st.text(max_size=3) | st.lists(BLOCK, max_size=4) | JSON,
        "from": st.sampled_from(["human", "gpt", "function_call", "observation", "system"]) | JSON,
        "value": st.sampled_from(["x", CALL, f"[{CALL}]"]) | JSON,
        "weight": JSON,
        "tool_calls": JSON,
        "function_call": JSON,
    },
)
HOSTILE = JSON | st.lists(JSON, max_size=4) | st.lists(NEARLY, max_size=4)


def attempt(convert: Callable[..., Any], *given: Any, **settings: Any) -> Any:
    """What is made of the input, or the InputError; anything else that is raised is a failure."""
    try:
        return convert(*given, **settings)
    except InputError as error:
        return error


@given(messages=HOSTILE, system=st.none() | st.lists(BLOCK, max_size=2) | JSON)
@settings(deadline=None, max_examples=400)
def test_any_json_becomes_messages_or_an_input_error(messages: Any, system: Any) -> None:
    for convert in (from_anthropic, from_sharegpt):
        made = attempt(convert, messages, system)
        if isinstance(made, InputError):
            assert made.message is None or 0 <= made.message < len(messages)
        else:
            assert check_messages(made) == made
    made = attempt(from_openai, messages)
    if not isinstance(made, InputError):
        assert len(made) == len(messages)
        attempt(with_system, made, system)
    attempt(openai_messages, messages, shape_of(messages))


@given(tools=JSON | st.lists(NEARLY, max_size=3), wrap=st.booleans())
@settings(deadline=None, max_examples=400)
def test_any_json_becomes_tools_or_an_input_error(tools: Any, wrap: bool) -> None:
    for given_as in (tools, json.dumps(tools)):
        made = attempt(openai_tools, given_as, wrap=wrap)
        if isinstance(made, InputError):
            assert (made.field or "").startswith("tools")
        else:
            assert check_tools(made) == made
