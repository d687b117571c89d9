"""A turn cut off anywhere is closed: with its close it parses as the part that was sampled, and ends there."""

import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.assets import FAMILIES
from tests.conversations import assistant, call, tool, user
from tests.formats.small import made_up_renderer, small_renderer
from tests.parsing.test_injection import SEPARATORS
from tests.parsing.test_streaming import pieces
from tests.support import examples, over_bytes
from tokentrace import BridgedTokens, Renderer, TokentraceError
from tokentrace.parsing.response import Finish, PartKind
from tokentrace.tokens import Kind

TOOLS = [tool("look", "Looks.", {"a": {"type": "string"}, "n": {"type": "integer"}}, ["a"])]
ASK, BYE = user("Hi."), user("Bye.")
QUIET: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck)}
ODD = ["\U000f0019", "\U00100000", "<b>", "</b>", "<a=", "é", "🎉", "\ufffd", "\n", " ", "words " * 40]
"""Odd texts, some in the private planes: they must never turn into control tokens."""


def texts(renderer: Renderer) -> st.SearchStrategy[str]:
    controls = sorted(renderer.tokenizer.vocabulary.control)[:100]
    fragments = [*pieces(renderer.grammar(TOOLS)) * 2, *SEPARATORS, *ODD * 2, *controls]
    return st.lists(st.sampled_from(fragments), min_size=1, max_size=5).map("".join)


def check_cut(renderer: Renderer, data: st.DataObject) -> None:
    """Any turn, cut anywhere, some of it in the prompt: the close is the same, and the turn parses back."""
    text = texts(renderer)
    calls = [call("look", {"a": data.draw(text), "n": 1}, "call00001")] if data.draw(st.booleans()) else []
    message = assistant(data.draw(text), *calls, reasoning=data.draw(text))
    try:
        rendered = renderer.render([ASK, message], tools=TOOLS)
        prompted = renderer.render_ids([ASK], tools=TOOLS, add_generation_prompt=True)
    except TokentraceError:
        return
    start = len(prompted) if rendered.token_ids[: len(prompted)] == prompted else rendered.turns[-1].start
    prompt, turn = rendered.token_ids[:start], rendered.token_ids[start : rendered.turns[-1].stop]
    if renderer.parse_response(turn, tools=TOOLS, prompt_ids=prompt).stop_token is not None:
        turn = turn[:-1]
    stop = data.draw(st.integers(0, len(turn)))
    before = renderer.parse_response(turn[:stop], tools=TOOLS, prompt_ids=prompt)
    if before.finish is Finish.STOP:  # the text of the message has ended the turn before
        return
    bridged = renderer.bridge(prompt, turn[:stop], [BYE], tools=TOOLS)
    if not isinstance(bridged, BridgedTokens):
        return
    prefilled = data.draw(st.integers(0, stop)) if renderer.grammar(TOOLS).head else 0
    again = renderer.bridge([*prompt, *turn[:prefilled]], turn[prefilled:stop], [BYE], tools=TOOLS)
    assert isinstance(again, BridgedTokens)
    assert again.token_ids == bridged.token_ids
    check_reading(renderer, prompt, turn[:stop], bridged)


def check_reading(renderer: Renderer, prompt: list[int], ids: list[int], bridged: BridgedTokens) -> None:
    """With its close a turn has ended and parses as before: no additional call, and no other text."""
    grammar = renderer.grammar(TOOLS)
    closed = int((bridged.kinds == Kind.SYNTHETIC).sum())
    new = bridged.new_ids.tolist()
    before = renderer.parse_response(ids, tools=TOOLS, prompt_ids=prompt)
    after = renderer.parse_response([*ids, *new[:closed]], tools=TOOLS, prompt_ids=prompt)
    if grammar.channels is not None and not closed:  # the message has ended, and the next may have begun
        return
    if grammar.channels is not None:  # each message has an end, and only the last one a stop token
        assert renderer.tokenizer.decode([*ids, *new[:closed]][-1:]) == grammar.channels.end
    elif after.finish is not Finish.STOP:  # the next turn's head is the stop token
        after = renderer.parse_response([*ids, *new[: closed + 1]], tools=TOOLS, prompt_ids=prompt)
        assert after.stop_token == new[closed]
    assert after.open is None or (grammar.calls is not None and not grammar.calls.close)
    assert after.open is not PartKind.REASONING
    assert (after.reasoning_content or "").rstrip() == (before.reasoning_content or "").rstrip()
    if grammar.calls is None or not grammar.calls.outline().startswith("{"):  # else half a call counts only at the end
        assert after.content.rstrip() == before.content.rstrip()
        assert len(after.tool_calls) == len(before.tool_calls)
        for one, other in zip(before.tool_calls, after.tool_calls, strict=True):
            assert one.name in (None, other.name)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cut_off_turn_of_any_family_parses_back_with_its_close(name: str) -> None:
    renderer = small_renderer(name, trusted=[], lost="ignore")
    settings(max_examples=examples(100), **QUIET)(given(st.data())(lambda data: check_cut(renderer, data)))()


@pytest.mark.parametrize(
    ("prefilled", "sampled"),
    [("<think>\n" + "word " * 80, "."), ("<think>\nHm.", "word " * 5000), ("<think>\n" + "word " * 5000, "Hm.")],
)
def test_reasoning_is_closed_however_far_back_it_began(prefilled: str, sampled: str) -> None:
    renderer = small_renderer("qwen3")
    encode = renderer.tokenizer.encode
    prompt = [*renderer.render_ids([ASK], add_generation_prompt=True), *encode(prefilled)]
    bridged = renderer.bridge(prompt, encode(sampled), [BYE])
    assert isinstance(bridged, BridgedTokens)
    close = renderer.tokenizer.decode(bridged.new_ids[bridged.kinds == Kind.SYNTHETIC])
    assert close == "\n</think>\n\n<|im_end|>"


WIDE = (
    "{% for m in messages %}＜{{ m.role }}｜{{ m.content }}｜終｜{% endfor %}"
    "{% if add_generation_prompt %}＜assistant｜{% endif %}"
)


def test_a_delimiter_of_wide_characters_is_closed_between_them() -> None:
    """The tokenizer has one token per byte, so the turn is also cut within characters."""
    renderer = over_bytes(WIDE)
    prompt = renderer.render_ids([ASK], add_generation_prompt=True)
    turn = [*"Yes｜終｜".encode()]
    for stop in range(len(turn) + 1):
        bridged = renderer.bridge(prompt, turn[:stop], [BYE])
        assert isinstance(bridged, BridgedTokens)
        text = renderer.tokenizer.decode(bridged.new_ids.tolist())
        assert "｜終｜＜user｜Bye.｜終｜＜assistant｜".endswith(text), (stop, text)
        assert len(text) >= len("＜user｜Bye.｜終｜＜assistant｜") + len("｜終｜") * (stop <= 3)


PLANNED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<a>{% if m.tool_calls %}<q>{{ m.plan }}</q><c>"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}</c>{% else %}<x>{{ m.content }}</x>{% endif %}"
    "</s>{% else %}<u>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
ADDRESSED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.reasoning_content %}<s>assistant to=self<m>"
    "{{ m.reasoning_content }}<e>{% endif %}<s>assistant to=user<m>{{ m.content }}</s>{% else %}<s>user<m>"
    "{{ m.content }}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}<s>assistant{% endif %}"
)
CUTS = [
    *((PLANNED, *cut) for cut in (
        ("", "<x></x></s>"), ("<x>Yes", "</x></s>"), ("<q>Hm", "</q><x></x></s>"), ("<q>Hm</q>", "<x></x></s>"),
        ("<q>Hm</q><c>", "</c></s>"), ("<x>Yes</x>", "</s>"),
    )),
    *((ADDRESSED, *cut) for cut in (
        ("", " to=user<m></s>"), (" to=user", "<m></s>"), (" to=user<m>Hel", "</s>"),
        (" to=self<m>Hm", "<e><s>assistant to=user<m></s>"), (" to=self<m>Hm<e>", "<s>assistant to=user<m></s>"),
        (" to=self<m>Hm<e><s>", "assistant to=user<m></s>"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("template", "sampled", "closed"), CUTS)
def test_an_answer_that_was_not_opened_is_closed_as_an_empty_one(template: str, sampled: str, closed: str) -> None:
    renderer = made_up_renderer(template, *re.findall("</?.>", PLANNED + ADDRESSED))
    prompt = renderer.render_ids([ASK], add_generation_prompt=True)
    bridged = renderer.bridge(prompt, renderer.tokenizer.encode(sampled), [BYE])
    assert isinstance(bridged, BridgedTokens)
    assert renderer.tokenizer.decode(bridged.new_ids[bridged.kinds == Kind.SYNTHETIC]) == closed


CALLS_ALONE = (
    "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}{% elif m.role == 'tool' %}<r>{{ m.content }}"
    "{% elif m.content is none %}<a>{% for c in m.tool_calls %}<call>{{ c.function.name }}<sep>"
    "{{ '```' + c.function.arguments + '```' }}<end>{% endfor %}{% else %}<a>{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def test_a_delimiter_that_only_the_grammar_shows_ends_no_turn() -> None:
    """The template writes calls only if there is no content, and no stop token after them, as DeepSeek's do."""
    renderer = made_up_renderer(CALLS_ALONE, "<u>", "<a>", "<r>", "<call>", "<sep>", "<end>")
    prompt = renderer.render_ids([ASK], tools=TOOLS, add_generation_prompt=True)
    message = {"role": "assistant", "content": None, "tool_calls": [call("look", {"a": "x"})]}
    turn = renderer.render_ids([ASK, message], tools=TOOLS)[len(prompt) :]
    for stop in range(1, len(turn)):
        bridged = renderer.bridge(prompt, turn[:stop], [BYE], tools=TOOLS)
        assert isinstance(bridged, BridgedTokens)
        text = renderer.tokenizer.decode(bridged.new_ids)
        assert "<end>" in text, (renderer.tokenizer.decode(turn[:stop]), text)
