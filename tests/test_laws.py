"""Laws of rendering, checked for every family on hostile text.

- No control token comes from a field of an untrusted role or from a schema, and none that ends or begins a turn from
  an assistant's field; with no trusted role, none from any field.
- The control tokens of a conversation are those of its scaffold, whatever text its fields hold.
- Ids, messages, fields and mask have one entry per token; only assistants sample.
- The ids spell the rendered text.
- Every word of a field that reaches the output is credited to that field, and text credited to a field occurs in it.
  A schema that the template writes as JSON is one field.
"""

import itertools
import json
import os
import re
import unicodedata
from collections import Counter
from operator import eq
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.assets import FAMILIES
from tests.conversations import assistant, call, result, system, tool, user
from tests.support import load_family, make_renderer, per_family
from tokentrace import InputError, RenderedTokens, Renderer, TemplateError
from tokentrace.template import KEY

SHORT = -(-500 // len(FAMILIES))
LONG = -(-100_000 // len(FAMILIES))


@per_family
def control_texts(family: str) -> list[str]:
    """The control tokens of a vocabulary, without the many reserved, numbered ones."""
    texts = sorted(load_family(family).vocabulary.control, key=lambda text: (len(text), text))
    unnumbered = [text for text in texts if not any(char.isdigit() for char in text)]
    return unnumbered[:60] or texts[:60]


# -- conversations


AWKWARD = [
    *("<think>", "</think>", "<tool_call>", "</tool_response>", "{{ x }}", "user", "|", "<", ">", '"', "\\"),
    *("\n\n", "\n", " ", "  ", "\0", "▁", "e\u0301", "\u1112\u1161\u11ab", "日本", "🙂", "ſ", "'ſ", "\u200d", "\ufeff"),
]


def hostile(family: str) -> st.SearchStrategy[str]:
    """Text with many control tokens of the family, pieces of them, and awkward Unicode."""
    controls = control_texts(family)
    pieces = sorted({text[:cut] for text in controls for cut in (2, len(text) // 2)} | {text[2:] for text in controls})
    part = st.sampled_from(controls) | st.sampled_from([p for p in pieces if p]) | st.sampled_from(AWKWARD)
    return st.lists(part | st.text(max_size=4).filter(encodable), max_size=5).map("".join)


def encodable(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


@st.composite
def conversations(draw: st.DrawFn, family: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None, bool]:
    text = hostile(family)
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append(system(draw(text)))
    tools = None
    with_tools = draw(st.booleans())
    if with_tools:
        properties = {draw(text): {"type": "string", "description": draw(text)}}
        tools = [tool("look_up", draw(text), properties, [])]
    for _ in range(draw(st.integers(1, 3))):
        messages.append(user(draw(text)))
        reply = assistant(draw(text), reasoning=draw(st.none() | text))
        if with_tools and draw(st.booleans()):
            arguments = {draw(text): draw(text), "n": draw(st.integers(-5, 5)), "deep": {"k": [draw(text), None]}}
            tool_call = call(draw(st.just("look_up") | text), arguments)
            messages += [reply | {"tool_calls": [tool_call]}, result(draw(text))]
            reply = assistant(draw(text))
        if draw(st.booleans()):
            messages.append(reply)
    return messages, tools, draw(st.booleans())


def reword(value: Any, counter: list[int]) -> Any:
    """The same conversation with all free text replaced by harmless words."""
    if isinstance(value, str):
        counter[0] += 1
        return f"word{counter[0]}" if value.strip() else value
    if isinstance(value, dict):
        literal = ("role", "type", "id", "tool_call_id")
        fixed_keys = ("type", "function", "name", "description", "parameters", "properties", "arguments", "content")
        fixed_keys += ("role", "id", "tool_call_id", "tool_calls", "reasoning_content", "n", "deep", "k")
        return {
            key if key in fixed_keys else reword(key, counter): item if key in literal else reword(item, counter)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [reword(item, counter) for item in value]
    return value


def attempt(renderer: Renderer, messages: Any, tools: Any, prompt: bool) -> RenderedTokens | None:
    """The rendering; None if the template refuses the conversation."""
    try:
        return renderer.render(messages, tools=tools, add_generation_prompt=prompt)
    except (TemplateError, InputError):
        return None


def source_of(origin: Any, messages: Any, tools: Any) -> Any:
    """The value of the field an origin names."""
    value: Any = {"messages": messages, "tools": tools}
    for key in origin:
        if key == KEY:
            return origin[-2]
        value = value[key]
    return value


def forms(value: Any) -> list[str]:
    """The spellings of a value that a rendering may contain."""
    if isinstance(value, str):
        return [value, *(json.dumps(value, ensure_ascii=ascii)[1:-1] for ascii in (True, False))]
    return [
        str(value),
        *(json.dumps(value, ensure_ascii=ascii, indent=n) for ascii in (True, False) for n in (None, 2, 4)),
    ]


def json_forms(value: Any) -> list[str]:
    """A whole value as ``tojson`` writes it, with any of the options that templates set."""
    options = itertools.product((True, False), (None, 2, 4), (None, (",", ":")), (True, False))
    return [
        json.dumps(value, ensure_ascii=ascii, indent=indent, separators=separators, sort_keys=is_sorted)
        for ascii, indent, separators, is_sorted in options
    ]


def check_forgery(family: str, messages: Any, tools: Any, prompt: bool) -> None:
    untrusted = {"user", "tool"}
    rendered = attempt(make_renderer(family), messages, tools, prompt)
    if rendered is not None:
        for origin, control in zip(rendered.origins, rendered.control.tolist(), strict=True):
            if control and origin is not None:
                assert origin[0] == "messages", origin
                assert messages[origin[1]]["role"] not in untrusted, origin
        bounds = turn_bounds(family)
        of_assistants = [
            index
            for index, origin in zip(rendered.token_ids, rendered.origins, strict=True)
            if origin is not None and origin[0] == "messages" and origin[2:] != ("role",)
            if messages[origin[1]]["role"] == "assistant"
        ]
        assert not bounds & set(of_assistants)
        check_shape(family, rendered, messages)
    guarded = attempt(make_renderer(family, trusted=[]), messages, tools, prompt)
    if guarded is None:
        assert rendered is None
        return
    assert rendered is not None
    assert guarded.text == rendered.text
    check_shape(family, guarded, messages)
    assert not [origin for origin, control in zip(guarded.origins, guarded.control, strict=True) if control and origin]
    counter = [0]
    harmless = attempt(make_renderer(family, trusted=[]), reword(messages, counter), reword(tools, counter), prompt)
    if harmless is None or scaffold(harmless) != scaffold(guarded):  # the template depends on the text of the fields
        return
    assert Counter(harmless.ids[harmless.control].tolist()) == Counter(guarded.ids[guarded.control].tolist())


@per_family
def turn_bounds(family: str) -> frozenset[int]:
    """Control tokens that end a turn, or occur in a user's turn."""
    renderer = make_renderer(family)
    question = renderer.render([{"role": "user", "content": "question"}])
    frame = renderer.grammar().reasoning  # a template may write its tags after a question, but no turn ends with them
    tags = {renderer.tokenizer.token_id(tag.strip()) for tag in (frame.open, frame.close) if frame} if frame else set()
    return frozenset({*renderer.get_stop_token_ids(), *question.ids[question.control].tolist()}) - tags


def scaffold(rendered: RenderedTokens) -> list[str]:
    return [text for text, _, origin in rendered.rendering.spans() if origin is None]


def check_shape(family: str, rendered: RenderedTokens, messages: Any) -> None:
    count = len(rendered.ids)
    for entries in (rendered.token_ids, rendered.message_indices, rendered.sampled, rendered.fields, rendered.origins):
        assert len(entries) == count
    assert len(rendered.control) == len(rendered.messages) == len(rendered.mask) == count
    vocabulary = load_family(family).vocabulary
    expected = unicodedata.normalize("NFC", rendered.text) if vocabulary.nfc else rendered.text
    assert rendered.decode() == expected or ("▁" in rendered.text and vocabulary.spaced)
    for at in rendered.mask.nonzero()[0].tolist():
        assert messages[rendered.message_indices[at]]["role"] == "assistant"


def check_credit(messages: Any, tools: Any, rendered: RenderedTokens) -> None:
    """Text credited to a field occurs in that field."""
    for text, _, origin in rendered.rendering.spans():
        if origin is None or origin[0] not in ("messages", "tools"):
            continue
        if len(origin) > 2 and origin[2] == "reasoning_content" and text == "None":
            continue
        value = source_of(origin, messages, tools)
        if isinstance(value, (dict, list)) and origin[-1] != "arguments":
            is_punctuation = not set(text) - set('{}[],: \n"')  # around fields of their own
            is_schema = origin[0] == "tools" and text in json_forms(value)  # one field, and all of it
            assert is_punctuation or is_schema, (text, origin)
            continue
        assert any(text in form or text.strip('"') in form for form in forms(value)), (text, origin)


def law(family: str) -> Any:
    @given(st.data())
    def check(data: st.DataObject) -> None:
        messages, tools, prompt = data.draw(conversations(family))
        check_forgery(family, messages, tools, prompt)
        rendered = attempt(make_renderer(family), messages, tools, prompt)
        if rendered is not None:
            check_credit(messages, tools, rendered)

    return check


@pytest.mark.parametrize("examples", [SHORT, pytest.param(LONG, marks=pytest.mark.long)], ids=["short", "long"])
def test_laws(any_family: str, examples: int) -> None:
    examples = int(os.environ.get("TOKENTRACE_EXAMPLES", examples))
    settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))(law(any_family))()


# -- every word of a field is credited to it

WORDS = {
    ("messages", 0, "content"): "alpha\ue000bravo",
    ("messages", 1, "content"): "charlie delta",
    ("messages", 2, "reasoning_content"): "echo foxtrot",
    ("messages", 2, "content"): "golf\nhotel",
    ("messages", 2, "tool_calls", 0, "function", "name"): "india",
    ("messages", 2, "tool_calls", 0, "function", "arguments"): "juliett kilo",
    ("messages", 3, "content"): "lima mike",
    ("messages", 4, "content"): "november oscar",
    ("tools", 0, "function", "name"): "papa",
    ("tools", 0, "function", "description"): "quebec romeo",
    ("tools", 0, "function", "parameters", "properties", "sierra", KEY): "sierra",
}
"""One or two words for every field, none of which occurs in a template."""


def marked() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    word = {origin[2:] if origin[0] == "tools" else origin[1:]: text for origin, text in WORDS.items()}
    tool_call = call("india", {"tango": "juliett kilo"})
    messages = [
        system(word[0, "content"]),
        user(word[1, "content"]),
        assistant(word[2, "content"], tool_call, reasoning=word[2, "reasoning_content"]),
        result(word[3, "content"]),
        assistant(word[4, "content"]),
    ]
    properties = {"sierra": {"type": "string", "description": "x"}}
    return messages, [tool("papa", word["function", "description"], properties, [])]


def test_every_word_is_credited_to_its_field(any_family: str) -> None:
    family = any_family
    messages, tools = marked()
    rendered = attempt(make_renderer(family), messages, tools, False)
    if rendered is None:  # templates without tools, or without a system message
        messages = [
            {key: value for key, value in row.items() if key != "tool_calls"}
            for row in messages
            if row["role"] != "tool"
        ]
        rendered = attempt(make_renderer(family), messages, None, False)
    if rendered is None:
        messages = messages[1:3]
        rendered = attempt(make_renderer(family), messages, None, False)
    assert rendered is not None
    checked = 0
    for origin, text in WORDS.items():
        for word in text.split():
            for at in map(re.Match.start, re.finditer(re.escape(word), rendered.text)):
                first, stop = rendered.encoded.tokens_touching(at + 1, at + len(word) - 1)
                for token in range(first, stop):
                    if rendered.encoded.position(token) < at:  # it begins in the scaffold: ``: lima``
                        continue
                    credited = rendered.origins[token]
                    assert credited is not None, (family, word, rendered.tokens()[token])
                    assert credited[0] == origin[0], (family, word, credited)
                    if "sierra" in credited:
                        assert credited[-2:] == ("sierra", KEY) or credited[-1] in ("properties", "parameters")
                    elif origin[0] == "tools" or len(messages) == 5:
                        assert all(map(eq, credited, origin)), (family, word, credited)
                    checked += 1
    assert checked >= 3
