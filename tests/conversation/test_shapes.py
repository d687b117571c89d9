"""Conversations in other shapes become OpenAI's: what each rule makes of them, and what is refused and where.

Anthropic's messages here are held against the types of its own client.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tests.conversation.blocks import (
    CACHED,
    CALL,
    USER,
    assistant,
    call,
    exhaust,
    text,
    think,
    turn,
    use,
    user,
)
from tests.support import examples
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

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
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
    from anthropic.types import ToolParam

    adapter = TypeAdapter(ToolParam)
    exhaust(adapter.validate_python(tool, strict=True))
    assert openai_tools([tool]) == openai_tools(json.dumps([tool])) == openai_tools([tool], wrap=True) == [made]
    assert check_tools([made]) == [made]


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ('{"name": "f"}', "tools"),
        ([3], "tools.0"),
        ([OPENAI_TOOL, {"type": "function"}], "tools.1.name"),
        ([{"type": "web_search_20250305", "name": "web_search"}], "tools.0.input_schema"),
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


def test_messages_of_any_shape_become_openais() -> None:
    assert openai_messages([turn("human", "hi")]) == [USER]
    assert openai_messages([USER, assistant(think("x"), text("y"))])[1]["reasoning_content"] == "x"
    assert openai_messages([USER, assistant(think("x"))], Shape.OPENAI) == [USER, assistant(think("x"))]
    assert openai_messages([user(text("a"), text("b"))]) == [user(text("a"), text("b"))]
    assert openai_messages([user(text("a"), text("b"))], Shape.ANTHROPIC) == [{"role": "user", "content": "ab"}]


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
@settings(deadline=None, max_examples=examples(400))
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
@settings(deadline=None, max_examples=examples(400))
def test_any_json_becomes_tools_or_an_input_error(tools: Any, wrap: bool) -> None:
    for given_as in (tools, json.dumps(tools)):
        made = attempt(openai_tools, given_as, wrap=wrap)
        if isinstance(made, InputError):
            assert (made.field or "").startswith("tools")
        else:
            assert check_tools(made) == made
