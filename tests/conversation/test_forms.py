"""Whatever form messages are in, the template receives the one that it reads.

- Content as text parts gives the ids of the same text as a string; so do JSON-string arguments and None for no content.
- What is in a form that the template reads passes through untouched.
- Changes are reported; what has no text form is refused by name.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conversations import ASK, CONVERSATIONS, HI, SIMPLE, SUNNY, SYS, assistant, call, result, system, text, user
from tests.support import make_renderer
from tokentrace import InputError, Renderer, TokentraceError
from tokentrace.conversation.forms import MEDIA_PARTS, Silence, adapt

STRING_ONLY = ["qwen2.5", "qwen3", "llama-3.1", "nemotron-3-nano", "gpt-oss", "deepseek-v3", "deepseek-v3.1"]
"""Templates that empty a list of parts, print it as Python does, or fail on it."""
MINIMAX = ("minimax-m2", "tool")
"""A template that reads parts, and writes a newline after each."""


def reads(content: Any = (), calls: Any = (), alone: tuple[Silence, ...] = tuple(Silence)) -> Any:
    """A template as `adapt` sees one."""
    form = SimpleNamespace(**{"text": True, "parts": False, "mapping": False} | dict(content))
    of_calls = SimpleNamespace(**{"mapping": True, "text": True, "silence": tuple(Silence)} | dict(calls))
    return SimpleNamespace(content=lambda role: form, calls=of_calls, alone=alone)


STRINGS, PARTS = reads(), reads({"text": False, "parts": True})
MAPPINGS, JSON_TEXT = reads(calls={"text": False}), reads(calls={"mapping": False})


# -- the stage, without a template


def test_text_parts_are_joined_for_a_template_that_reads_strings() -> None:
    adapted = adapt([user(text("One.", "Two."))], STRINGS)
    assert adapted.messages == [user("One.\nTwo.")]
    change = adapted.changes[0]
    assert (change.message, change.field, change.after) == (0, "content", "One.\nTwo.")
    assert str(change).startswith("message 0, content: text parts joined: ")


@pytest.mark.parametrize("kind", sorted(MEDIA_PARTS))
def test_media_is_refused_by_name(kind: str) -> None:
    with pytest.raises(InputError, match=f"'{kind}'.*not supported yet") as caught:
        adapt([SYS, user([*text("What is this?"), {"type": kind, kind: "x"}])], STRINGS)
    assert (caught.value.message, caught.value.field) == (1, "content.1")
    with pytest.raises(InputError, match=f"'{kind}'"):
        adapt([user([{kind: "x"}])], PARTS)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "tool_use", "name": "f", "input": {}}, "openai_messages"),
        ({"type": "thinking", "thinking": "hm"}, "reasoning_content"),
        ({"type": "hologram"}, "unknown type 'hologram'"),
        ({}, "without a type"),
        ({"type": "text"}, "is missing"),
    ],
)
def test_parts_of_another_type_are_refused_by_name(part: dict[str, Any], words: str) -> None:
    for forms in (STRINGS, PARTS):
        with pytest.raises(InputError, match=words) as caught:
            adapt([user([part])], forms)
        assert caught.value.message == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("{", "not valid JSON"),
        ("[1]", "JSON of a list"),
        ('{"a": 1, "a": 2}', "'a' comes twice"),
        ('{"a": NaN}', "NaN"),
        ('{"a": 1e999}', "larger than any float"),
        ('{"a": ' + "1" * 5000 + "}", "not valid JSON"),
        ('{"a":' * 3000 + "1" + "}" * 3000, "nested"),
        ('{"a":' * 300 + "1" + "}" * 300, "nested"),
    ],
)
def test_json_text_that_is_no_object_is_refused_with_what_to_do(arguments: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        adapt([ASK, assistant("", call("add", arguments))], MAPPINGS)
    assert (caught.value.message, caught.value.field) == (1, "tool_calls.0.function.arguments")
    assert adapt([ASK, assistant("", call("add", arguments))], JSON_TEXT).changes == []


@pytest.mark.parametrize("content", [{"content": ""}, {"content": None}, {}], ids=["empty", "null", "absent"])
@pytest.mark.parametrize("way", list(Silence))
def test_no_content_is_written_as_the_template_reads_it(content: dict[str, Any], way: Silence) -> None:
    expected: Any = {Silence.EMPTY: {"content": ""}, Silence.NULL: {"content": None}, Silence.ABSENT: {}}
    for extra, forms in (
        ({"tool_calls": [call("now", {})]}, reads(calls={"silence": (way,)})),
        ({}, reads(alone=(way,))),
    ):
        adapted = adapt([{"role": "assistant", **content, **extra}], forms)
        assert adapted.messages == [{"role": "assistant", **expected[way], **extra}]
        assert len(adapted.changes) == (content != expected[way])


# -- with templates


def ids(renderer: Renderer, messages: Any, tools: Any = None) -> Any:
    try:
        return renderer.render_ids(messages, tools=tools)
    except TokentraceError as error:
        return type(error)


def test_one_text_part_gives_the_ids_of_the_text(any_family: str) -> None:
    renderer = make_renderer(any_family)
    for messages in (
        [HI],
        [SYS, HI],
        [HI, assistant("I am a model.")],
        [SYS, HI, assistant("I am a model."), user("Which?")],
        [ASK, assistant("Let me look.", call("get_weather", {"city": "Paris"})), result("sunny")],
        [ASK, assistant("", call("get_weather", {"city": "Paris"})), SUNNY, assistant("Sunny.")],
    ):
        parts = [
            row | {"content": text(row["content"])} if row["content"] and (any_family, row["role"]) != MINIMAX else row
            for row in messages
        ]
        assert ids(renderer, parts, SIMPLE) == ids(renderer, messages, SIMPLE)


@pytest.mark.parametrize("family", STRING_ONLY)
def test_several_text_parts_give_the_ids_of_the_joined_text(family: str) -> None:
    renderer = make_renderer(family)
    parts = [system(text("Be", "brief.")), user(text("One.", "Two.")), assistant(text("Three.", "Four."))]
    plain = [row | {"content": "\n".join(part["text"] for part in row["content"])} for row in parts]
    rendered = renderer.render(parts)
    assert rendered.token_ids == renderer.render_ids(plain)
    assert [change.field for change in rendered.changes] == ["content"] * 3
    assert "Two." in rendered.decode(rendered.select(message=1, field="content"))


def test_json_arguments_give_the_ids_of_the_mapping(any_family: str) -> None:
    renderer = make_renderer(any_family)
    arguments = {"city": "Paris", "n": 2.5, "deep": {"k": [1, None]}, "ok": True}
    both = [[ASK, assistant("", call("get_weather", form)), SUNNY] for form in (arguments, json.dumps(arguments))]
    mapping, as_text = (ids(renderer, messages, SIMPLE) for messages in both)
    assert mapping == as_text
    if any_family not in ("gemma-3",):
        assert isinstance(mapping, list)


def test_no_content_is_never_a_word(any_family: str) -> None:
    renderer = make_renderer(any_family)
    silences: list[dict[str, Any]] = [{"content": ""}, {"content": None}, {}]
    calls = {"tool_calls": [call("get_weather", {"city": "Paris"})]}
    beside = [
        ids(renderer, [ASK, {"role": "assistant", **silence, **calls}, SUNNY], SIMPLE)
        for silence in (*silences, {"content": []})
    ]
    alone = [ids(renderer, [HI, {"role": "assistant", **silence}, user("Are you there?")]) for silence in silences]
    for results in (beside, alone):
        assert all(result == results[0] for result in results)
        if results is alone or isinstance(results[0], list):
            assert "None" not in renderer.tokenizer.decode(results[0])


def test_what_the_template_reads_passes_untouched(any_family: str) -> None:
    """Adapting twice is adapting once, and what was not changed is the very same object."""
    renderer = make_renderer(any_family)
    for row in CONVERSATIONS.values():
        try:
            adapted = renderer.adapt_messages(row.messages, tools=row.tools)
        except InputError:
            continue
        again = renderer.adapt_messages(adapted.messages, tools=row.tools)
        assert again.changes == []
        assert all(one is other for one, other in zip(again.messages, adapted.messages, strict=True))
        if not adapted.changes:
            assert adapted.messages == row.messages


def test_media_is_refused_unless_messages_stay_as_they_are(any_family: str) -> None:
    picture = [user([{"type": "image"}, *text("What is this?")])]
    with pytest.raises(InputError, match=r"'image'.*not supported yet"):
        make_renderer(any_family).render(picture)
    assert make_renderer(any_family, messages="as_given").adapt_messages(picture).changes == []


def test_a_role_that_the_template_prints_is_accepted(any_family: str) -> None:
    renderer = make_renderer(any_family)
    messages = [HI, {"role": "critic-2", "content": "Too long."}]
    if ids(renderer, messages) is InputError:
        return
    rendered = renderer.render(messages)
    assert rendered.decode(rendered.select(message=1, field="role")) == "critic-2"
    assert "Too long." in rendered.decode(rendered.select(message=1, field="content"))


@pytest.mark.parametrize("calls", [None, []])
def test_no_calls_are_no_calls(family: str, calls: Any) -> None:
    """OpenAI's messages have ``tool_calls: None``, those of inference servers ``[]``."""
    renderer = make_renderer(family)
    plain = [user("q"), assistant("hello"), user("z")]
    assert renderer.render_ids([plain[0], {**plain[1], "tool_calls": calls}, plain[2]]) == renderer.render_ids(plain)
