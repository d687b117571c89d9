"""Settings that keep reasoning and write history unaltered, for every family's template over the whole matrix."""

from typing import Any

import pytest

from tests.conversations import CONVERSATIONS, Conversation, assistant, call, result, user
from tests.diagnose.brute import source_of
from tests.support import JINJA_FAMILIES, over_bytes, per_family, rendered, rotating, some
from tokentrace import RenderedTokens, Renderer, TokentraceError
from tokentrace.conversation import Change

NEVER_SHOW = {
    *("qwen2.5", "qwq-32b", "qwen3-instruct-2507", "qwen3-vl", "qwen3-coder", "deepseek-v3", "deepseek-r1"),
    *("deepseek-v3.1", "kimi-k2", "llama-3.1", "llama-3.2", "mistral-nemo", "gemma-3"),
}
"""Families whose templates never show ``reasoning_content``, in any turn of any conversation."""


@per_family
def renderer(family: str, setting: str = "") -> Renderer:
    return over_bytes(source_of(family), **({setting: True} if setting else {}))


def render(family: str, setting: str, messages: Any, tools: Any = None) -> RenderedTokens | None:
    try:
        return renderer(family, setting).render(messages, tools=tools)
    except TokentraceError:
        return None


def render_whole(family: str, setting: str, conversation: Conversation) -> RenderedTokens | None:
    outcome = rendered(renderer(family, setting), conversation)
    return outcome if isinstance(outcome, RenderedTokens) else None


def text_of(rendered: RenderedTokens, message: int, field: str = "reasoning_content") -> str:
    spans = rendered.rendering.spans()
    return "".join(text for text, _, origin in spans if origin == ("messages", message, field))


def of_history(rendered: RenderedTokens) -> list[Change]:
    """Changes made to history; a change made to a message before it is rendered names its field."""
    return [change for change in rendered.changes if change.field is None]


def few(key: str) -> list[tuple[str, Conversation]]:
    name = "reasoning_in_history"
    return [(name, CONVERSATIONS[name]), *rotating(CONVERSATIONS.items(), key, 8)]


def is_subsequence(short: str, long: str) -> bool:
    characters = iter(long)
    return all(character in characters for character in short)


@pytest.mark.parametrize("family", JINJA_FAMILIES)
def test_all_reasoning_is_kept_and_text_is_only_added(family: str) -> None:
    wrong, thoughts = [], 0
    for name, conversation in few(f"kept {family}"):
        plain = render_whole(family, "", conversation)
        full = render_whole(family, "preserve_all_thinking", conversation)
        if plain is None or full is None:
            assert plain is full
            continue
        for index, message in enumerate(conversation.messages):
            thought = (message.get("reasoning_content") or "").strip()
            if message["role"] == "assistant" and thought:
                thoughts += 1
                noted = any(note.startswith(f"message {index}: no context makes") for note in full.notes)
                if (thought in text_of(full, index)) is (family in NEVER_SHOW) or noted is not (family in NEVER_SHOW):
                    wrong.append((name, index, full.notes))
        changes = of_history(full)
        if not is_subsequence(plain.text, full.text) or bool(changes) is not (plain.text != full.text):
            wrong.append((name, plain.text, full.text))
        if [change.message for change in changes] != sorted({change.message for change in changes}):
            wrong.append((name, changes))
    assert thoughts
    assert not wrong, some(wrong)


def test_between_tool_calls_keeps_the_exchange_under_way_only() -> None:
    """QwQ-like: reasoning is shown in the last message only, so a tool exchange loses it."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last and "
        "m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    messages = [
        *(user("one"), assistant("a", reasoning="first"), user("two"), assistant("b", reasoning="second")),
        *(result("result"), assistant("c", reasoning="third")),
    ]
    thoughts = {}
    for setting in ("", "preserve_thinking_between_tool_calls", "preserve_all_thinking"):
        rendered = over_bytes(source, **({setting: True} if setting else {})).render(messages)
        thoughts[setting] = [text_of(rendered, index) for index in (1, 3, 5)]
    assert thoughts == {
        "": ["", "", "third"],
        "preserve_thinking_between_tool_calls": ["", "second", "third"],
        "preserve_all_thinking": ["first", "second", "third"],
    }


def test_kept_reasoning_is_sampled() -> None:
    conversation = CONVERSATIONS["reasoning_in_history"]
    tokens = render("qwen3", "preserve_all_thinking", conversation.messages)
    assert tokens is not None
    assert tokens.mask[tokens.select(message=1, field="reasoning_content")].all()
    assert not tokens.mask[tokens.select(role="user")].any()


@pytest.mark.parametrize("family", JINJA_FAMILIES)
def test_patched_history_is_append_only_or_a_note_says_why_not(family: str) -> None:
    wrong, proven = [], 0
    for name, conversation in few(f"patched {family}"):
        whole = render_whole(family, "use_patched", conversation)
        for count in range(2, len(conversation.messages)) if whole else ():
            part = render(family, "use_patched", conversation.messages[:count], conversation.tools)
            if part is None or whole is None or conversation.messages[count - 1]["role"] != "assistant":
                continue
            if whole.text.startswith(part.text):
                proven += 1
            elif not any("not append-only" in note for note in whole.notes):
                wrong.append((name, count, part.text, whole.text))
    assert proven
    assert not wrong, some(wrong)


@pytest.mark.parametrize("family", JINJA_FAMILIES)
def test_changes_are_listed_exactly_where_a_patched_turn_differs_from_the_shipped(family: str) -> None:
    wrong = []
    for name, conversation in few(f"changed {family}"):
        shipped = render_whole(family, "", conversation)
        patched = render_whole(family, "use_patched", conversation)
        if patched is None:
            continue
        if shipped is None:
            if not any(note.startswith("the shipped template refuses") for note in patched.notes):
                wrong.append((name, patched.notes))
        elif bool(of_history(patched)) is not (shipped.text != patched.text):
            wrong.append((name, shipped.text, patched.text, patched.changes))
        elif any(row.before not in shipped.text or row.after not in patched.text for row in of_history(patched)):
            wrong.append((name, patched.changes))
    assert not wrong, some(wrong)


def calling(arguments: Any) -> list[dict[str, Any]]:
    return [user("q"), assistant("", call("lookup", arguments))]


@pytest.mark.parametrize("family", ["qwen3", "kimi-k2.5", "llama-3.1", "gpt-oss", "deepseek-v3.1"])
def test_arguments_given_as_json_stay_as_they_were(family: str) -> None:
    arguments = '{"b":1.50,  "a" : [ true,null ]}'
    patched = render(family, "use_patched", calling(arguments))
    assert patched is not None
    assert arguments in patched.text


@pytest.mark.parametrize("family", ["qwen3-coder", "nemotron-3-nano", "qwen3.5", "glm-4.5", "minimax-m2"])
def test_values_of_tagged_arguments_are_spelled_as_in_json(family: str) -> None:
    for arguments in ({"flag": True, "none": None, "n": 2}, '{"flag": true,"none":null, "n": 2}'):
        patched = render(family, "use_patched", calling(arguments))
        assert patched is not None
        spans = [(text, origin[-1]) for text, _, origin in patched.rendering.spans() if origin]
        assert [text for text, name in spans if name in ("flag", "none", "n")] == ["true", "null", "2"]
    patched = render(family, "use_patched", calling('{"list": [1,2 ,  3], "map":{"x":1}}'))
    assert patched is not None
    assert "[1,2 ,  3]" in patched.text
    assert '{"x":1}' in patched.text


@pytest.mark.parametrize("family", ["qwen3", "glm-4.5", "gemma-3", "llama-3.1", "qwen3-coder"])
def test_white_space_that_templates_strip_is_put_back(family: str) -> None:
    patched = render(family, "use_patched", [user("q"), assistant("\n\n  answer \n"), user("r")])
    assert patched is not None
    assert text_of(patched, 1, "content") == "\n\n  answer \n"
