"""The quick ways of a render give what the plain ones give: positions, trust, turns, checks, tools.

A render looks at what is touched by a control token, at assistants' turns, at messages that are not of the usual form.
The plain ways look at everything, one after another; they are written out here.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from tests.conversations import CONVERSATIONS
from tests.support import (
    JINJA_FAMILIES,
    PYTHON_FORMATS,
    SPECIAL,
    make_renderer,
    rotating,
    some,
    templates_of_trl,
    tokenizer_json_for,
)
from tokentrace import RenderedTokens, Renderer, TokentraceError, create_renderer
from tokentrace.conversation import messages
from tokentrace.pocket import POCKET
from tokentrace.rendering import renderer as renderer_module
from tokentrace.study.turns import TurnSpan, turn_spans
from tokentrace.template.spans import Rendering
from tokentrace.tokens import Tokenizer
from tokentrace.tokens.encoded import Encoded
from tokentrace.tokens.positions import BytePositions

FAMILIES = [*JINJA_FAMILIES, *PYTHON_FORMATS]

FRAGMENTS = (
    *("hello world", "x" * 40, "\n\n", "  ", " \t", "/no_think", '{"a": 1}', "<|im_", "end|>", "|>", "<"),
    *("<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|user|>", "[INST]"),
    *("<|eot_id|>", "<|end|>", "<s>", "</s>", "<｜User｜>", "<start_of_turn>", "</tool_response>"),
    *("café", "cafe\u0301", "\u0301", "\u1112\u1161\u11ab", "日本語", "👩\u200d👩\u200d👧", "ſ", "\u00a0"),
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"f{at}",
            "description": said,
            "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": said}}},
        },
    }
    for at, said in enumerate(("reads é", "writes <|im_end|>", "plain"))
]


def hostile(seed: int) -> tuple[list[dict[str, Any]], Any]:
    """A conversation of odd texts, in odd forms, and its tools."""
    dice = random.Random(seed)

    def text() -> str:
        return "".join(dice.choices(FRAGMENTS, k=dice.randrange(5)))

    talk: list[dict[str, Any]] = [{"role": "system", "content": text()}] if dice.random() < 0.5 else []
    for _ in range(dice.randrange(1, 4)):
        parts = [{"type": "text", "text": text()}, {"type": "text", "text": text()}]
        talk.append({"role": "user", "content": dice.choice([text(), text(), text(), parts])})
        said: dict[str, Any] = {"role": "assistant", "content": dice.choice([text(), text(), "", None])}
        if dice.random() < 0.5:
            said[dice.choice(["reasoning_content", "reasoning", "thinking"])] = text()
        if dice.random() < 0.1:
            said["extra"] = text()
        talk.append(said)
        if dice.random() < 0.4:
            nested = {"key": text(), "n": 3, "list": [1, "é"], "inner": {"a": None}}
            arguments = dice.choice([{"key": text()}, {"key": text(), "n": 1.5}, nested, '{"key": "v"}', "", {}, None])
            function = {"name": dice.choice(["f0", "f1", ""]), "arguments": arguments}
            said["tool_calls"] = [{"id": "call00001", "type": "function", "function": function}]
            content = dice.choice([text(), {"result": text()}, [1, 2]])
            talk.append({"role": "tool", "tool_call_id": "call00001", "name": "f0", "content": content})
            if dice.random() < 0.7:
                talk.append({"role": "assistant", "content": text()})
    return talk, dice.choice([None, None, TOOLS, []])


def renders(renderer: Renderer, key: str) -> Iterator[tuple[str, Any, Any, RenderedTokens]]:
    """Renders of the matrix and of hostile conversations, without those that are refused."""
    given = [(name, row.messages, row.tools) for name, row in rotating(CONVERSATIONS.items(), key, 12)]
    given += [(f"hostile {seed}", *hostile(seed)) for seed in rotating(range(240), key, 20)]
    for at, (name, talk, tools) in enumerate(given):
        try:
            yield name, talk, tools, renderer.render(talk, tools=tools, add_generation_prompt=bool(at % 2))
        except TokentraceError:
            continue


def trl_renderer(name: str) -> Renderer:
    source = templates_of_trl()[name]
    tokenizer = Tokenizer(tokenizer_json_for(source), variables=SPECIAL, fast=False)
    return create_renderer(tokenizer, "default", chat_template=source, lost="ignore")


# -- the plain ways


def plain_spans(rendered: RenderedTokens) -> list[int] | None:
    """The span that the first byte of each token lies in; None where the tokens do not spell the text."""
    rendering, vocabulary = rendered.rendering, rendered._tokenizer.vocabulary
    spelled = [vocabulary.token_bytes(index) for index in rendered.ids.tolist()]
    if b"".join(spelled) != rendering.text.encode():
        return None
    ends = list(itertools.accumulate(len(text.encode()) for text, _, _ in rendering.spans()))
    out, at, span = [], 0, 0
    for piece in spelled:
        while at >= ends[span]:
            span += 1
        out.append(span)
        at += len(piece)
    return out


def plain_turns(rendering: Rendering) -> list[TurnSpan]:
    """Every turn, span by span."""
    out: list[TurnSpan] = []
    current: TurnSpan | None = None
    start = 0
    for end, turn, origin in zip(rendering.ends, rendering.turns, rendering.origins, strict=True):
        if turn < 0:
            current = None
        else:
            if current is None or current.message != turn:
                current = TurnSpan(turn, start, end, -1, start, out[-1].message if out else -1)
                out.append(current)
            current.end = end
            if origin is not None and not origin.is_role:
                current.body = start if current.body < 0 else current.body
                current.body_end = end
        start = end
    for turn_span in out:
        turn_span.body = turn_span.end if turn_span.body < 0 else turn_span.body
    return out


def forged(rendered: RenderedTokens, talk: Any, spans: list[int]) -> list[Any]:
    """Control tokens in text of users, tools and schemas."""
    rendering = rendered.rendering
    found = []
    for at in np.flatnonzero(rendered.control).tolist():
        first, stop = spans[at], spans[at + 1] if at + 1 < len(spans) else len(rendering.ends) - 1
        for origin in rendering.origins[first : max(first + 1, stop)]:
            of_tools = origin is not None and origin.source in ("tools", "?")
            role = None if origin is None or origin.message is None else talk[origin.message]["role"]
            if of_tools or (role in ("user", "tool") and origin is not None and not origin.is_role):
                found.append((at, origin))
    return found


def differences(renderer: Renderer, key: str) -> Iterator[str]:
    for name, talk, _, rendered in renders(renderer, key):
        rendering, encoded = rendered.rendering, rendered._encoded
        spans = plain_spans(rendered)
        if spans is not None:
            if encoded.spans.tolist() != spans:
                yield f"{name}: spans"
            if forged(rendered, talk, spans):
                yield f"{name}: forged {forged(rendered, talk, spans)}"
        plain = plain_turns(rendering)
        if turn_spans(rendering) != plain:
            yield f"{name}: turns"
        own = {at for at, row in enumerate(talk) if row["role"] == "assistant"}
        if turn_spans(rendering, own) != [turn for turn in plain if turn.message in own]:
            yield f"{name}: turns of assistants"
        starts, ends = encoded.starts.tolist(), encoded.ends.tolist()
        places = rendering.ends if len(rendering.text) > 400 else range(len(rendering.text) + 1)
        uncounted = Encoded(encoded.ids, rendering, renderer.tokenizer.vocabulary, encoded.layout)
        if encoded.counted != uncounted.counted:
            yield f"{name}: control tokens"
        for place in places:
            unit = place if encoded.layout.units is None else len(rendering.text[:place].encode())
            touching = next((at for at, end in enumerate(ends) if end > unit), len(ends))
            after = next((at for at, start in enumerate(starts) if start >= unit), len(starts))
            near = encoded._near(encoded.counted, [place]) if encoded.layout.starts is None else None
            if encoded.places([place]) != [(touching, after)] or near not in (None, [(touching, after)]):
                yield f"{name}: position {place}"


@pytest.mark.parametrize("family", rotating(FAMILIES, "quick", 2))
def test_quick_ways_on_shipped_templates(family: str) -> None:
    found = list(differences(make_renderer(family), family))
    assert not found, some(found)


@pytest.mark.parametrize("name", rotating(sorted(templates_of_trl()), "quick", 10))
def test_quick_ways_on_other_templates(name: str) -> None:
    found = list(differences(trl_renderer(name), name))
    assert not found, some(found)


def test_there_is_something_to_compare() -> None:
    """The conversations above reach what they are for: forged tokens, lost text, wide text that is all right."""
    seen = list(renders(create_renderer(POCKET, lost="ignore"), "pocket"))
    assert any(rendered.lost for *_, rendered in seen)
    assert any(not rendered.text.isascii() and plain_spans(rendered) is not None for *_, rendered in seen)
    controls = set(create_renderer(POCKET).tokenizer.vocabulary.control)
    assert any(token in rendered.text for *_, rendered in seen for token in controls)


# -- positions


def test_positions_in_bytes_and_back() -> None:
    pieces = ["plain", "é", "x", "日本", "y" * 9, "👩\u200d👧 z", "end"]
    for count in range(1, len(pieces) + 1):
        rendering = Rendering.of([(piece, 0, None) for piece in pieces[:count]])
        if rendering.text.isascii():
            continue
        units, raw = BytePositions(rendering), rendering.text.encode()
        assert units.total == len(raw)
        places = np.arange(len(rendering.text) + 1, dtype=np.int32)
        assert units.of(places).tolist() == [len(rendering.text[:place].encode()) for place in places]
        found = units.characters(np.arange(len(raw) + 1, dtype=np.int32)).tolist()
        assert found == [len(raw[:at].decode("utf-8", "ignore")) for at in range(len(raw) + 1)]


# -- messages


def outcome(run: Any) -> Any:
    try:
        return run()
    except TokentraceError as error:
        return type(error), str(error)


ODD_MESSAGES: list[Any] = [
    {"role": "user"},
    {"role": "user", "content": None},
    {"role": "user", "content": 3},
    {"role": "nobody", "content": "x"},
    {"role": ["user"], "content": "x"},
    {"content": "x"},
    "user",
    {"role": "assistant"},
    {"role": "assistant", "content": "x", "reasoning": 3},
    {"role": "assistant", "content": "x", "tool_calls": "call"},
    {"role": "assistant", "content": "x", "tool_calls": [{"function": {"arguments": {}}}]},
    {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]},
    {"role": "assistant", "content": "x", "tool_calls": [{"name": "f", "arguments": {"a": 1}}]},
    {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {1: 2}}}]},
    {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {"a": {1}}}}]},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": " "}}]},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "no json"}}]},
    {"role": "assistant", "content": None, "tool_calls": []},
    OrderedDict(role="user", content="x"),
]


@pytest.mark.parametrize("family", ["qwen3", "glm-4.5", "gpt-oss", "mistral-nemo", "llama-3.1", "deepseek-v3.1"])
def test_messages_are_checked_and_adapted_alike(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = make_renderer(family)
    given = [[{"role": "user", "content": "hi"}, odd] for odd in ODD_MESSAGES] + [
        hostile(seed)[0] for seed in range(40)
    ]
    given += [conversation.messages for conversation in CONVERSATIONS.values()]

    def both(talk: Any) -> Any:
        checked, adapted = renderer._read(renderer.study(), talk, None)
        return checked, adapted.messages, adapted.changes, adapted.wrapped

    quick = [outcome(lambda talk=talk: both(copy.deepcopy(talk))) for talk in given]
    monkeypatch.setattr(messages, "_is_plain", lambda message: False)
    monkeypatch.setattr(renderer_module, "are_read_as_they_are", lambda *_: False)
    plain = [outcome(lambda talk=talk: both(copy.deepcopy(talk))) for talk in given]
    assert quick == plain


# -- tools


def printed(renderer: Renderer, tools: Any) -> str:
    return renderer.render_text([{"role": "user", "content": "hi"}], tools=tools).text


def tool(value: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "default": value}}}]


def test_tools_are_known_by_what_they_are_now() -> None:
    """A caller may change a list of tools that was rendered before, and change it back."""
    renderer = make_renderer("qwen3")
    tools = tool({"a": "first"})
    first = printed(renderer, tools)
    tools[0]["function"]["parameters"]["default"]["a"] = "second"
    second = printed(renderer, tools)
    assert "first" in first
    assert second == first.replace("first", "second")
    assert printed(renderer, tool({"a": "first"})) == first
    assert printed(renderer, copy.deepcopy(tools)) == second


def test_tools_that_are_equal_for_python_are_told_apart() -> None:
    renderer = make_renderer("qwen3")
    shown = [1, 1.0, True, "1", None, [1], [1.0], {"a": 1, "b": 2}, {"b": 2, "a": 1}]
    values = [*shown, *shown]
    written = ['"default": ' + one for one in ("1}", "1.0}", "true}", '"1"}', "null}", "[1]}", "[1.0]}")]
    written += ['{"a": 1, "b": 2}', '{"b": 2, "a": 1}']
    for value, expected in zip(values, [*written, *written], strict=True):
        assert expected in printed(renderer, tool(value))


def test_tools_of_other_types_are_not_mistaken_for_known_ones() -> None:
    """`marshal` writes an array as its bytes: nothing that holds one is remembered by them."""
    as_given = make_renderer("qwen3", messages="as_given")
    numbers = np.asarray([1, 2], np.int16)
    texts = [outcome(lambda value=value: printed(as_given, tool(value))) for value in (numbers, numbers.view(np.uint8))]
    again = [outcome(lambda value=value: printed(as_given, tool(value))) for value in (numbers.view(np.uint8), numbers)]
    assert texts == again[::-1]
    plain = printed(as_given, tool({"a": 1}))
    assert printed(as_given, tool(OrderedDict(a=1))) == plain

    class Text(str):
        """A text of another type, which prints as one."""

    assert printed(as_given, tool({Text("a"): 1})) == plain
    functions: Mapping[str, Any] = {"a": 1}
    assert printed(as_given, tuple(tool(functions))) == plain


def test_a_parser_asks_tools_as_they_are_now() -> None:
    renderer = make_renderer("qwen3")
    tools = tool("x")
    ids = renderer.tokenizer.encode('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>')

    def status() -> str:
        return str(renderer.parse_response(ids, tools=tools).tool_calls[0].status)

    known = status()
    tools[0]["function"]["name"] = "g"
    assert (known, status()) == ("ok", "unknown_tool")
    tools[0]["function"]["name"] = "f"
    assert status() == "ok"
