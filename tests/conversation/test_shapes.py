"""Conversations in other shapes become OpenAI's; Anthropic's are validated with its client's types."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tests.support import examples
from tokentrace import InputError
from tokentrace.conversation.messages import check_messages, check_tools
from tokentrace.conversation.responses import from_responses
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

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "hi"}}
REDACTED = {"type": "redacted_thinking", "data": "ZW5jcnlwdGVk"}
CACHED = {"cache_control": {"type": "ephemeral"}}
CALL = json.dumps({"name": "f", "arguments": {}})


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def think(words: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": words, "signature": "c2lnbmVk"}


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


def turn(speaker: Any, value: Any, **more: Any) -> dict[str, Any]:
    return {"from": speaker, "value": value, **more}


def validate(kind: Any, value: Any) -> None:
    """Check all of a value against a client's type: pydantic validates an Iterable only while it is read."""

    def exhaust(part: Any) -> None:
        if isinstance(part, Mapping):
            part = part.values()
        if isinstance(part, Iterable) and not isinstance(part, str):
            for inner in part:
                exhaust(inner)

    adapter: TypeAdapter[Any] = TypeAdapter(kind)  # must outlive the values that it validates
    exhaust(adapter.validate_python(value, strict=True))


def attempt(convert: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """The result, or the InputError; other exceptions are failures."""
    try:
        return convert(*arguments, **settings)
    except InputError as error:
        return error


# -- conversion of messages


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def answer(id: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content, **more}


ANTHROPIC: dict[str, tuple[list[Any], list[dict[str, Any]]]] = {
    "text blocks are one text with nothing in between": (
        [user(text("a "), text("b")), assistant(text("c"), text("d"))],
        [message("user", "a b"), message("assistant", "cd")],
    ),
    "redacted thinking is left out": (
        [USER, assistant(REDACTED, think("a"), text("x")), USER, assistant(REDACTED, text("y"))],
        [USER, message("assistant", "x", reasoning_content="a"), USER, message("assistant", "y")],
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
            message("assistant", "see", reasoning_content="t")
            | {"tool_calls": [call("f", {"city": "Bern"}, "toolu_1"), call("g", {}, "toolu_2")]},
            answer("toolu_1", "rain", name="f"),
            answer("toolu_2", "ok", name="g"),
            message("assistant", "done"),
        ],
    ),
    "text, results, then text": (
        [user(text("look"), result("a", "1"), result("b", "2"), text("go on"))],
        [message("user", "look"), answer("a", "1"), answer("b", "2"), message("user", "go on")],
    ),
    "results: none, empty, failed, and not failed": (
        [user(result("a"), result("b", []), result("c", "no", is_error=True), result("d", "ok", is_error=False))],
        [answer("a", ""), answer("b", ""), answer("c", "no", is_error=True), answer("d", "ok")],
    ),
    "images and documents stay": (
        [user(text("see", **CACHED), {**IMAGE, **CACHED}, text("?")), user(result("a", [IMAGE]), DOCUMENT)],
        [message("user", [text("see"), IMAGE, text("?")]), answer("a", [IMAGE]), message("user", [DOCUMENT])],
    ),
    "cache control, citations and signatures are left out": (
        [user(text("a", **CACHED)), assistant(text("b", citations=None), use("c", "f") | CACHED)],
        [message("user", "a"), message("assistant", "b", tool_calls=[call("f", {}, "c")])],
    ),
}
"""Anthropic's messages and OpenAI's, by rule."""


@pytest.mark.parametrize("name", ANTHROPIC)
def test_anthropics_blocks_become_messages(name: str) -> None:
    from anthropic.types import MessageParam

    messages, expected = ANTHROPIC[name]
    validate(list[MessageParam], messages)
    before = json.dumps(messages)
    assert from_anthropic(messages) == expected
    assert json.dumps(messages) == before, "the input is not changed"
    assert check_messages(expected) == expected


SPEAKERS = {
    "system": ["system"],
    "user": ["human", "user"],
    "assistant": ["gpt", "assistant", "chatgpt", "bing", "bard", "model"],
    "tool": ["observation", "tool", "function_response", "tool_response", "function"],
}
ALONE = message("assistant", "", tool_calls=[call("f", {})])
SAYING = {"gpt": "see", "function_call": CALL, "observation": "r"}
ORDER = ("gpt", "function_call", "function_call", "observation", "function_call", "gpt", "gpt")
CALLS: list[tuple[Any, list[Any]]] = [
    ('{"name": "f", "arguments": {"a": null}}', [call("f", {"a": None})]),
    ('{"name": "f", "arguments": "{\\"a\\": 1}"}', [call("f", '{"a": 1}')]),
    ('[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', [call("f", {}), call("g", {})]),
    ('{"id": "c1", "type": "function", "name": "f", "arguments": {}}', [call("f", {}, "c1")]),
    ('{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {}}}', [call("f", {}, "c1")]),
    ({"name": "f", "arguments": {}}, [call("f", {})]),
    ([{"name": "f", "arguments": {}}], [call("f", {})]),
]
SHAREGPT: list[tuple[list[Any], list[Any]]] = [
    *(([turn(name, "x")], [message(role, "x")]) for role, names in SPEAKERS.items() for name in names),
    *(
        (
            [turn("human", "hi"), turn(speaker, value), turn("observation", "r")],
            [USER, message("assistant", "", tool_calls=calls), message("tool", "r")],
        )
        for speaker in ("function_call", "tool_call")
        for value, calls in CALLS
    ),
    (  # calls after calls, and after results, are new messages
        [turn(speaker, SAYING[speaker]) for speaker in ORDER],
        [{**ALONE, "content": "see"}, ALONE, message("tool", "r"), ALONE, *[message("assistant", "see")] * 2],
    ),
    ([turn("gpt", "see", weight=0), turn("function_call", CALL, weight=0)], [ALONE | {"content": "see", "weight": 0}]),
]


@pytest.mark.parametrize(("turns", "messages"), SHAREGPT)
def test_sharegpts_turns_become_messages(turns: list[Any], messages: list[Any]) -> None:
    assert from_sharegpt(turns) == messages


def test_openais_messages_are_returned_unchanged() -> None:
    messages = [
        {"role": "system", "content": [text("x")]},
        {"role": "user", "content": [text("a"), {"type": "image_url", "image_url": {"url": "u"}}]},
        {"role": "assistant", "content": None, "tool_calls": [call("f", '{"a": 1}')], "function_call": None},
        {"role": "function", "name": "f", "content": "r"},
        {"role": "critic", "content": 3, "function_call": "not an assistant's"},
    ]
    converted = from_openai(messages)
    assert len(converted) == len(messages)
    assert all(ours is theirs for ours, theirs in zip(converted, messages, strict=True))


BARE = {"name": "f", "description": "d", "parameters": SCHEMA}
OPENAI_TOOL = {"type": "function", "function": BARE}


@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        ({"name": "f", "description": "d", "input_schema": SCHEMA}, OPENAI_TOOL),
        ({"type": "custom", "name": "f", "description": "d", "input_schema": SCHEMA, **CACHED}, OPENAI_TOOL),
        ({"name": "f", "input_schema": SCHEMA}, {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}),
    ],
)
def test_anthropics_tools_become_openais(tool: dict[str, Any], expected: dict[str, Any]) -> None:
    from anthropic.types import ToolParam

    validate(ToolParam, tool)
    assert openai_tools([tool]) == openai_tools(json.dumps([tool])) == openai_tools([tool], wrap=True) == [expected]
    assert check_tools([expected]) == [expected]


# -- the system prompt


@pytest.mark.parametrize("system", ["be nice", [text("be "), text("nice", **CACHED)]])
def test_the_system_prompt_goes_first(system: Any) -> None:
    from anthropic.types import TextBlockParam

    validate(str | list[TextBlockParam], system)
    first = {"role": "system", "content": "be nice"}
    assert from_anthropic([USER], system) == [first, USER]
    assert from_sharegpt([{"from": "human", "value": "hi"}], system) == [first, USER]
    for content in ("be nice", [text("be "), "nice"]):
        assert with_system([message("system", content), USER], system) == [message("system", content), USER]
    for content in ("be nasty", None, [text("be"), {"type": "image"}], [{"text": 3}]):
        with pytest.raises(InputError, match=r"^system: differs"):
            with_system([message("system", content), USER], system)


# -- errors and their positions

REFUSED: dict[Callable[..., Any], list[tuple[Any, int | None, str | None]]] = {
    from_openai: [
        ([USER, message("assistant", "x", function_call="f")], 1, "function_call"),
        ([USER, message("assistant", "x", function_call={"arguments": "{}"})], 1, "function_call.name"),
        ([USER, message("assistant", "x", function_call={"name": "f", "arguments": 3})], 1, "function_call.arguments"),
        ([message("assistant", "x", function_call={"name": "f"}, tool_calls=[call("f", {})])], 0, "function_call"),
    ],
    from_anthropic: [
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
        ([message("assistant", "x", tool_calls=[call("f", {})])], 0, "tool_calls"),
        ([USER, None], 1, None),
        ("hi", None, None),
    ],
    from_sharegpt: [
        *(
            ([turn("human", "hi"), bad], 1, field)
            for bad, field in [
                (turn("narrator", "x"), "from"),
                ({"value": "x"}, "from"),
                ({"from": "human"}, "value"),
                (turn("human", {"a": 1}), "value"),
                (turn("gpt", [3]), "value.0"),
                (turn("human", None, tool_calls=[call("f", {})]), "value"),
                (turn("gpt", "x", tool_calls=[{}]), "tool_calls.0.name"),
                (turn("function_call", "f()"), "value"),
                (turn("function_call", '{"arguments": {}}'), "value.0.name"),
                (turn("function_call", '[{"name": "f", "arguments": {}}, {"name": "f"}]'), "value.1.arguments"),
                (turn("function_call", '{"name": "f", "arguments": [1]}'), "value.0.arguments"),
                (turn("function_call", '{"name": "f", "arguments": {}, "parameters": {"a": 1}}'), "value.0"),
                (turn("function_call", CALL, tool_calls=[call("f", {})]), "tool_calls"),
                (None, None),
            ]
        ),
        *(  # turns that become one message must agree on what is trained
            ([turn("gpt", "see", **first), turn("function_call", CALL, **second)], 1, next(iter(first | second)))
            for first, second in [
                *(({"weight": 0}, {"weight": 1}), ({"train": False}, {}), ({}, {"train": True})),
                ({"reasoning_content": "a"}, {"reasoning_content": "b"}),
            ]
        ),
    ],
    openai_tools: [
        ('{"name": "f"}', None, "tools"),
        ([3], None, "tools.0"),
        ([OPENAI_TOOL, {"type": "function"}], None, "tools.1.name"),
        ([{"type": "web_search_20250305", "name": "web_search"}], None, "tools.0.input_schema"),
        ([{"name": "f", "input_schema": "{}"}], None, "tools.0.input_schema"),
    ],
}


@pytest.mark.parametrize("convert", REFUSED)
def test_errors_name_the_message_and_the_field(convert: Callable[..., Any]) -> None:
    for value, index, field in REFUSED[convert]:
        error = attempt(convert, value)
        assert isinstance(error, InputError), value
        assert (error.message, error.field) == (index, field)


# -- detecting the shape


MISTRAL = assistant({"type": "thinking", "thinking": [text("hm")]}, text("x"))
RESULT = {"role": "tool", "tool_call_id": "a", "content": "r"}


@pytest.mark.parametrize(
    ("messages", "shape"),
    [
        ([USER], Shape.OPENAI),
        ([user(text("a"), text("b"))], Shape.OPENAI),
        ([turn("human", "x")], Shape.SHAREGPT),
        ([{"role": "user", "content": "x", "from": "web"}], Shape.OPENAI),
        ([USER, assistant(use("a", "f"))], Shape.ANTHROPIC),
        ([USER, assistant(think("x"), text("y"))], Shape.ANTHROPIC),
        ([USER, MISTRAL], Shape.OPENAI),
        ([USER, assistant(think("x")) | {"tool_calls": [call("f", {})]}, RESULT], Shape.OPENAI),
        ([USER, assistant(think("x")), RESULT], Shape.OPENAI),
        ([None, [3], {"content": [None, {"type": []}]}], Shape.OPENAI),
    ],
)
def test_the_shape_is_what_the_messages_show(messages: Any, shape: Shape) -> None:
    assert shape_of(messages) is shape
    assert attempt(openai_messages, messages) == attempt(openai_messages, messages, shape) or None in messages
    assert openai_messages([user(text("a"), text("b"))], Shape.ANTHROPIC) == [{"role": "user", "content": "ab"}]


# -- hostile input

WORDS = [
    *("role", "content", "from", "value", "type", "text", "thinking", "id", "name", "input", "tool_use_id", "is_error"),
    *("user", "assistant", "system", "tool", "human", "gpt", "observation", "tool_use", "tool_result", "image"),
    *("redacted_thinking", "tool_calls", "function", "arguments", "weight", "reasoning_content", "{}", "[]"),
    *(CALL, "input_schema", "parameters", "custom", "message", "reasoning", "function_call", "function_call_output"),
    *("item_reference", "input_text", "output_text", "refusal", "input_image", "c1", "msg_a_1", "rs_b_0"),
    *("tokentrace-x", "call_id", "output", "summary", "encrypted_content"),
]
SHORT = st.text(max_size=5) | st.sampled_from(WORDS)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | SHORT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(SHORT, inner, max_size=5),
    max_leaves=25,
)
BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image"])},
    optional={
        **dict.fromkeys(("text", "thinking", "id", "tool_use_id", "name"), SHORT | JSON),
        "input": st.dictionaries(SHORT, JSON, max_size=2) | JSON,
        "content": JSON | st.lists(st.builds(text, SHORT), max_size=2),
        "is_error": st.booleans() | JSON,
    },
)
NEARLY = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system"]) | JSON,
        "content": SHORT | st.lists(BLOCK, max_size=4) | JSON,
        "from": st.sampled_from(["human", "gpt", "function_call", "observation", "system"]) | JSON,
        "value": st.sampled_from(["x", CALL, f"[{CALL}]"]) | JSON,
        "type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output", "item_reference"]),
        **dict.fromkeys(("weight", "tool_calls", "function_call", "id", "call_id", "output", "summary"), JSON | SHORT),
    },
)
HOSTILE = JSON | st.lists(JSON, max_size=4) | st.lists(NEARLY, max_size=4)


@given(messages=HOSTILE, system=st.none() | st.lists(BLOCK, max_size=2) | JSON, open_calls=st.booleans())
@settings(deadline=None, max_examples=examples(500))
def test_any_json_becomes_messages_or_an_input_error(messages: Any, system: Any, open_calls: bool) -> None:
    for converted in (
        attempt(from_anthropic, messages, system),
        attempt(from_sharegpt, messages, system),
        attempt(from_responses, messages, open_calls=open_calls),
    ):
        if isinstance(converted, InputError):
            assert converted.message is None or 0 <= converted.message < len(messages)
        else:
            assert check_messages(converted) == converted
    converted = attempt(from_openai, messages)
    if not isinstance(converted, InputError):
        assert len(converted) == len(messages)
        attempt(with_system, converted, system)
    attempt(openai_messages, messages, shape_of(messages))


@given(tools=JSON | st.lists(NEARLY, max_size=3), wrap=st.booleans())
@settings(deadline=None, max_examples=examples(400))
def test_any_json_becomes_tools_or_an_input_error(tools: Any, wrap: bool) -> None:
    for source in (tools, json.dumps(tools)):
        converted = attempt(openai_tools, source, wrap=wrap)
        if isinstance(converted, InputError):
            assert (converted.field or "").startswith("tools")
        else:
            assert check_tools(converted) == converted
