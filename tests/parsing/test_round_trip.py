"""Parsing inverts rendering: a message is read back as it was, except for fields that `find_unreadable` reports."""

import functools
import json
import unicodedata
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import support
from tests.conversations import assistant, call, tool
from tests.parsing.test_streaming import messages
from tests.study.cases import as_text
from tests.support import examples
from tokentrace import Renderer, TokentraceError
from tokentrace.parsing.readback import Unreadable, UnreadableKind
from tokentrace.parsing.response import ParsedResponse

make_renderer = functools.partial(support.make_renderer, messages="as_given")
"""Renderers that pass messages to the template unaltered."""

USER = {"role": "user", "content": "question"}
Message = dict[str, Any]

_TYPES = {str: "string", int: "integer", bool: "boolean", float: "number", dict: "object", list: "array"}
_TYPES[type(None)] = "null"


def schemas(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tools whose parameters have the types of the call's arguments."""
    functions = [one["function"] for one in message.get("tool_calls", [])]
    types = {
        one["name"]: {key: {"type": _TYPES[type(some)]} for key, some in one["arguments"].items()} for one in functions
    }
    return [tool(name, "a tool", some, []) for name, some in (types or {"tool": {}}).items()]


def normalised(some: Any, renderer: Renderer) -> Any:
    """Text as the tokenizer normalizes it: some compose Unicode before encoding, which cannot be undone."""
    if not renderer.tokenizer.vocabulary.nfc:
        return some
    return json.loads(unicodedata.normalize("NFC", json.dumps(some, ensure_ascii=False)))


def round_trip(
    renderer: Renderer, message: Message, tools: list[dict[str, Any]] | None
) -> tuple[ParsedResponse, list[Unreadable]] | None:
    """Render, cut the assistant's tokens out, parse. None where the template refuses the message."""
    for form in (message, as_text(message)):  # where the template wants JSON
        try:
            rendered = renderer.render([USER, form], tools=tools)
        except TokentraceError:
            continue
        if not rendered.turns:
            return None
        turn = rendered.turns[-1]
        ids, prompt = rendered.token_ids[turn.start : turn.stop], rendered.token_ids[: turn.start]
        parsed = renderer.parse_response(ids, tools=tools, prompt_ids=prompt)
        return parsed, renderer.find_unreadable([USER, form], tools=tools)
    return None


def reported(entry: Unreadable) -> tuple[str, str]:
    """A reported field without its indices, and the kind of the report."""
    parts = [part for part in entry.field.split(".") if not part.isdigit() and part not in ("tool_calls", "function")]
    return parts[0] if parts else "calls", entry.kind.value


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), with_tools=st.booleans())
def test_what_is_rendered_is_read_back(any_family: str, data: st.DataObject, with_tools: bool) -> None:
    renderer = make_renderer(any_family, trusted=())
    message = normalised(data.draw(messages(any_family)), renderer)
    tools = schemas(message) if with_tools else None
    trip = round_trip(renderer, message, tools)
    if trip is None:
        return
    parsed, unreadable = trip
    fields = {entry.field for entry in unreadable}
    assert "content" in fields or parsed.content == (message["content"] or "")
    assert "reasoning_content" in fields or (parsed.reasoning_content or "") == (message.get("reasoning_content") or "")
    assert unreadable or parsed.open is None
    if "tool_calls" not in fields:
        functions = [call["function"] for call in message.get("tool_calls", [])]
        for at, (function, read) in enumerate(zip(functions, parsed.tool_calls, strict=True)):
            field = f"tool_calls.{at}.function"
            assert f"{field}.name" in fields or read.name == function["name"]
            for key, some in function["arguments"].items() if f"{field}.arguments" not in fields else ():
                assert f"{field}.arguments.{key}" in fields or repr((read.arguments or {})[key]) == repr(some)
    assert {reported(entry) for entry in unreadable} <= LOSSY[any_family]


def either(*fields: str) -> set[tuple[str, str]]:
    return {(field, kind.value) for field in fields for kind in UnreadableKind}


NO_IDS = {("id", "dropped")}
NO_REASONING = {("reasoning_content", "dropped")}
TRIMS = NO_IDS | either("content", "reasoning_content")
"""Content and reasoning are trimmed, or content that holds ``</think>`` is cut there."""
IN_LETTERS = TRIMS | either("arguments", "calls") | {("name", "changed")}
"""Some delimiters are letters, which text may spell, and bare values need a schema to tell their type."""
LOSSY: dict[str, set[tuple[str, str]]] = {
    **dict.fromkeys(
        ["qwen2.5", "qwen3-instruct-2507", "qwen3-vl", "deepseek-v3.2", "deepseek-v4"], NO_IDS | NO_REASONING
    ),
    **dict.fromkeys(["kimi-k2", "kimi-k2.5", "mistral-nemo"], NO_REASONING),
    **dict.fromkeys(["qwq-32b", "qwen3", "qwen3-thinking-2507", "deepseek-r1", "deepseek-v3.1"], TRIMS),
    **dict.fromkeys(["qwen3-coder", "qwen3.5", "qwen3.5-nothink", "qwen3.6", "nemotron-3-nano"], IN_LETTERS),
    **{f"glm-{one}": TRIMS | either("arguments") for one in ("4.5", "4.6", "4.7", "4.7-flash", "5", "5.1", "5.2")},
    "minimax-m2": IN_LETTERS,
    "minimax-m3": TRIMS | either("arguments", "calls"),
    "deepseek-v3": NO_REASONING | {("calls", "dropped")},
    **dict.fromkeys(["llama-3.1", "llama-3.2"], NO_IDS | NO_REASONING | either("content", "calls")),
    "gpt-oss": TRIMS | either("calls"),
    "gemma-3": NO_REASONING | either("content") | {("calls", "dropped")},
}
"""What templates lose or make ambiguous: the only exceptions."""


EXAMPLE = assistant("answer", call("tool_0", {"path": "x"}, "functions.tool_0:0"), reasoning="thought")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3", []),
        ("qwen2.5", [("reasoning_content", UnreadableKind.DROPPED)]),
        ("kimi-k2", [("reasoning_content", UnreadableKind.DROPPED)]),
        ("deepseek-v3", [("reasoning_content", UnreadableKind.DROPPED), ("tool_calls", UnreadableKind.DROPPED)]),
    ],
)
def test_what_a_template_drops_is_reported(name: str, expected: list[tuple[str, UnreadableKind]]) -> None:
    unreadable = make_renderer(name).find_unreadable([USER, EXAMPLE])
    assert [(entry.field, entry.kind) for entry in unreadable if entry.field != "tool_calls.0.id"] == expected
    assert all(entry.message == 1 and entry.why for entry in unreadable)


def test_control_tokens_in_an_assistants_text_are_read_as_such_only_where_it_is_trusted() -> None:
    message = {"role": "assistant", "content": "use <tool_call> here"}
    trusting, literal = make_renderer("qwen3"), make_renderer("qwen3", trusted=())
    assert {entry.field for entry in trusting.find_unreadable([USER, message])} == {"content", "tool_calls"}
    assert literal.find_unreadable([USER, message]) == []


@pytest.mark.parametrize("name", ["qwq-32b", "deepseek-r1", "minimax-m2"])
@pytest.mark.parametrize("content", ["<think>\n", "<think>\nfoo", "<think>\n\n</thin"])
def test_letters_that_spell_the_end_of_a_prompt_are_content(name: str, content: str) -> None:
    """The prompt ends with the token ``<think>``; the same text in ordinary tokens is sampled content."""
    literal = make_renderer(name, trusted=())
    parsed, unreadable = round_trip(literal, {"role": "assistant", "content": content}, None) or pytest.fail("refused")
    assert parsed.content == content
    assert unreadable == []


_QUOTED = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{%- for c in m.tool_calls or [] %}<tool_call>[{{ c.function.name }}("
    "{%- for k, v in c.function.arguments.items() %}{{ k }}='{{ v }}'{{ ', ' if not loop.last }}{% endfor %})]"
    "</tool_call>{%- endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUOTED = {"chat_template": _QUOTED}
"""Strings in quotes, with nothing escaped."""
INDENTED = (
    "{%- for m in messages %}{% if m.role == 'tool' %}{{ m.content }}{% else %}<|im_start|>{{ m.role }}\n"
    "{{ '  ' if loop.index0 and messages[loop.index0 - 1].role == 'tool' else '' }}{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""White space before the answer to a tool's result."""


def calling(name: str = "tool_0", arguments: Any = None) -> Message:
    call = {"type": "function", "function": {"name": name, "arguments": arguments or {"path": "x"}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("name", "settings", "message", "field", "why"),
    [
        ("qwen3", QUOTED, calling(arguments={"path": "a\\b"}), "arguments.path", r"'a\\b' is read as 'a\x08'"),
        ("qwen3", QUOTED, calling(arguments={"path": "it's"}), "arguments", "is read as a call that is"),
        ("qwen3", {}, calling(arguments={"count": float("inf")}), "arguments", "Infinity is not JSON"),
        ("qwen3", {}, calling(arguments="[1]"), "arguments", "[1] is read as a call that is malformed"),
        ("deepseek-v3.1", {}, calling(arguments="oops"), "arguments", "'oops' is read as a call that is invalid_json"),
        ("llama-3.1", {}, calling('f"x'), "", "['f\"x'] is read as []"),
        ("qwen3-coder", {}, calling("f\n"), "name", r"'f\n' is read as 'f'"),
        ("qwen3", {}, {"role": "assistant", "content": "e\u0301"}, "content", r"'e\u0301' is read as '\xe9'"),
        ("qwen3", {}, calling(arguments={"path": "e\u0301"}), "arguments.path", r"'e\u0301' is read as '\xe9'")
    ]
)  # fmt: skip
def test_what_is_not_read_back_equal_is_reported_with_both_sides(
    name: str, settings: dict[str, Any], message: Message, field: str, why: str
) -> None:
    unreadable = make_renderer(name, **settings).find_unreadable([USER, message])
    [entry] = [one for one in unreadable if one.field.removeprefix("tool_calls").removeprefix(".0.function.") == field]
    assert why in entry.why


def test_white_space_of_the_template_that_lands_in_content_is_reported() -> None:
    renderer = make_renderer("qwen3", chat_template=INDENTED)
    answer = {"role": "assistant", "content": "done"}
    messages = [USER, {"role": "assistant", "content": "so"}, {"role": "tool", "content": "r"}, answer]
    [entry] = renderer.find_unreadable(messages)
    assert (entry.message, entry.field, entry.kind) == (3, "content", UnreadableKind.CHANGED)
    assert entry.why == "'done' is read as '  done'"
    assert renderer.find_unreadable([USER, answer]) == []
