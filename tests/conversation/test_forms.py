"""Messages are converted to the form that the template reads.

- Text parts give the same ids as a string, JSON text the same as a mapping, and None the same as no content.
- Messages in a form that the template reads are not changed.
- Changes are reported; content without a text form is refused by name.
"""

import functools
import json
from types import SimpleNamespace
from typing import Any

import pytest

from tests.assets import family_dir
from tests.conversations import ASK, CONVERSATIONS, HI, SIMPLE, SUNNY, SYS, assistant, call, result, system, text, user
from tests.support import PYTHON_FORMATS, SPECIAL, make_renderer, rotating, tokenizer_json_for
from tokentrace import InputError, Renderer, TokentraceError, create_renderer
from tokentrace.conversation.forms import MEDIA_PARTS, Silence, adapt
from tokentrace.tokens import Tokenizer

STRING_ONLY = ["qwen2.5", "qwen3", "llama-3.1", "nemotron-3-nano", "gpt-oss", "deepseek-v3", "deepseek-v3.1"]
"""Templates that drop a list of parts, print it as a Python literal, or fail on it."""


def reads(content: Any = (), calls: Any = (), alone: tuple[Silence, ...] = tuple(Silence)) -> Any:
    """The facts about a template that `adapt` uses."""
    form = SimpleNamespace(**{"text": True, "parts": False, "mapping": False} | dict(content))
    call_forms = SimpleNamespace(**{"mapping": True, "text": True, "silence": tuple(Silence)} | dict(calls))
    return SimpleNamespace(content=lambda role: form, calls=call_forms, alone=alone)


SILENT: list[dict[str, Any]] = [way.fields for way in Silence]
STRINGS, PARTS = reads(), reads({"text": False, "parts": True})
MAPPINGS, JSON_TEXT = reads(calls={"text": False}), reads(calls={"mapping": False})


# -- without a template


def test_text_parts_are_joined_for_a_template_that_reads_strings() -> None:
    adapted = adapt([user(text("One.", "Two."))], STRINGS)
    assert adapted.messages == [user("One.\nTwo.")]
    change = adapted.changes[0]
    assert (change.message, change.field, change.after) == (0, "content", "One.\nTwo.")
    assert str(change).startswith("message 0, content: text parts joined: ")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        *(({"type": kind, kind: "x"}, f"'{kind}'.*not supported") for kind in sorted(MEDIA_PARTS)),
        *(({kind: "x"}, f"'{kind}'.*not supported") for kind in sorted(MEDIA_PARTS)),
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
            adapt([SYS, user([*text("What is this?"), part])], forms)
        assert caught.value.message == 1
        assert (caught.value.field or "").startswith("content.1")


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


@pytest.mark.parametrize("content", SILENT)
@pytest.mark.parametrize("way", Silence)
def test_no_content_is_written_as_the_template_reads_it(content: dict[str, Any], way: Silence) -> None:
    for extra, forms in (
        ({"tool_calls": [call("now", {})]}, reads(calls={"silence": (way,)})),
        ({}, reads(alone=(way,))),
    ):
        adapted = adapt([{"role": "assistant", **content, **extra}], forms)
        assert adapted.messages == [{"role": "assistant", **way.fields, **extra}]
        assert len(adapted.changes) == (content != way.fields)


# -- with templates, and a vocabulary of bytes


@functools.cache
def renderer_of(family: str, **settings: Any) -> Renderer:
    source = "" if family in PYTHON_FORMATS else (family_dir(family) / "chat_template.jinja").read_text("utf-8")
    tokenizer = Tokenizer(tokenizer_json_for(source), variables=SPECIAL, fast=False)
    template = PYTHON_FORMATS.get(family, source)
    return create_renderer(tokenizer, "default", chat_template=template, lost="ignore", **settings)


def as_parts(messages: list[Any], *as_text: str) -> list[Any]:
    return [
        row | {"content": text(row["content"])} if row["content"] and row["role"] not in as_text else row
        for row in messages
    ]


PARIS = call("get_weather", {"city": "Paris"})
PLAIN: list[list[Any]] = [
    [HI],
    [SYS, HI, assistant("I am a model."), user("Which?")],
    [HI, assistant("I am a model.")],
    [ASK, assistant("Let me look.", PARIS), result("sunny")],
    [ASK, assistant("", PARIS), SUNNY, assistant("Sunny.")],
]
ARGUMENTS = {"city": "Paris", "n": 2.5, "deep": {"k": [1, None]}, "ok": True}
SAME: dict[str, list[list[Any]]] = {
    "arguments": [
        [ASK, assistant("", call("get_weather", form)), SUNNY] for form in (ARGUMENTS, json.dumps(ARGUMENTS))
    ],
    "nothing beside calls": [
        [ASK, {"role": "assistant", **nothing, "tool_calls": [PARIS]}, SUNNY] for nothing in (*SILENT, {"content": []})
    ],
    "nothing alone": [[HI, {"role": "assistant", **nothing}, user("Are you there?")] for nothing in SILENT],
    "no calls": [
        [user("q"), {**assistant("hello"), **calls}, user("z")]
        for calls in ({}, {"tool_calls": None}, {"tool_calls": []})
    ],
}
"""One conversation in several forms, by name."""


def test_every_form_gives_the_same_ids(any_family: str) -> None:
    renderer = renderer_of(any_family)

    def ids(messages: Any) -> Any:
        try:
            return renderer.render_ids(messages, tools=SIMPLE)
        except TokentraceError as error:
            return type(error)

    as_text = ["tool"] if any_family == "minimax-m2" else []  # it reads parts, and writes a newline after each
    for forms in (*SAME.values(), *([plain, as_parts(plain, *as_text)] for plain in PLAIN)):
        first, *remaining = map(ids, forms)
        assert all(ids_of_form == first for ids_of_form in remaining), forms[0]
        assert isinstance(first, list) or any_family == "gemma-3", (first, forms[0])
        assert first is InputError or not isinstance(first, list) or "None" not in renderer.tokenizer.decode(first)


@pytest.mark.parametrize("family", STRING_ONLY)
def test_several_text_parts_give_the_ids_of_the_joined_text(family: str) -> None:
    renderer = renderer_of(family)
    parts = [system(text("Be", "brief.")), user(text("One.", "Two.")), assistant(text("Three.", "Four."))]
    plain = [row | {"content": "\n".join(part["text"] for part in row["content"])} for row in parts]
    rendered = renderer.render(parts)
    assert rendered.token_ids == renderer.render_ids(plain)
    assert [change.field for change in rendered.changes] == ["content"] * 3
    assert "Two." in rendered.decode(rendered.select(message=1, field="content"))


def test_messages_that_the_template_reads_are_not_changed(any_family: str) -> None:
    """A second call of `adapt_messages` changes nothing and returns the same objects."""
    renderer = renderer_of(any_family)
    for row in rotating(CONVERSATIONS.values(), any_family, 2):
        try:
            adapted = renderer.adapt_messages(row.messages, tools=row.tools)
        except InputError:
            continue
        again = renderer.adapt_messages(adapted.messages, tools=row.tools)
        assert again.changes == []
        assert all(one is other for one, other in zip(again.messages, adapted.messages, strict=True))
        if not adapted.changes:
            assert adapted.messages == row.messages


def test_media_is_refused_unless_messages_are_as_given(any_family: str) -> None:
    picture = [user([{"type": "image"}, *text("What is this?")])]
    with pytest.raises(InputError, match=r"'image'.*not supported"):
        renderer_of(any_family).render(picture)
    assert renderer_of(any_family, messages="as_given").adapt_messages(picture).changes == []


def test_a_role_that_the_template_prints_is_accepted(any_family: str) -> None:
    try:
        rendered = renderer_of(any_family).render([HI, {"role": "critic-2", "content": "Too long."}])
    except InputError:
        return
    assert rendered.decode(rendered.select(message=1, field="role")) == "critic-2"
    assert "Too long." in rendered.decode(rendered.select(message=1, field="content"))


def test_a_result_of_records_keeps_all_fields() -> None:
    renderer = make_renderer("qwen3")
    records = [{"title": "First", "text": None}, {"type": ["a", "b"]}, {"type": "dir"}, {"type": "file", "path": "a"}]
    text = renderer.render([user("Hi."), {"role": "tool", "content": records}]).text
    assert json.dumps(records) in text
