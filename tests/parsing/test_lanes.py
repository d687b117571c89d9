"""Tokens that go by without waking the parser: every event is the one that the parser itself would report."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import make_renderer, rotating
from tokentrace.errors import InputError
from tokentrace.parsing.output import Output
from tokentrace.parsing.parser import StreamingParser

FAMILIES = [
    "qwen3",
    "qwen3.5",
    "glm-4.5",
    "minimax-m2",
    "deepseek-v3.2",
    "kimi-k2",
    "llama-3.1",
    "mistral-nemo",
    "gpt-oss",
]
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "write", "description": "Write.", "parameters": PARAMETERS}}
TEXT = 'Köln:\n\n  if x < "1":\n\treturn </tool\n}] 日本 🙂👩‍👩‍👧 \\n \\" e\u0301 <parameter=text> <|x|>\n'


def written(renderer: Any, reasoning: str, content: str, text: str) -> list[list[int]]:
    """What a model writes in two turns, as the template has them."""
    given = "call00000" if "mistral" in renderer.tokenizer.name else "functions.write:0"
    call = {"id": given, "type": "function", "function": {"name": "write", "arguments": {"text": text}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "reasoning_content": reasoning, "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": given, "content": "done"},
        {"role": "assistant", "reasoning_content": reasoning, "content": content},
    ]
    rendered = renderer.render(messages, tools=[TOOL])
    return [rendered.token_ids[turn.start : turn.stop] for turn in rendered.turns]


def stream(parser: StreamingParser, chunks: Sequence[Sequence[int]]) -> Iterator[Any]:
    yield from (parser.feed(chunk) for chunk in chunks)
    yield parser.finish()


def cut(ids: list[int], chooser: random.Random) -> list[list[int]]:
    """Ids in pieces, of which most have one."""
    chunks, at = [], 0
    while at < len(ids):
        size = chooser.choice([1, 1, 1, 1, 1, 2, 3, 17])
        chunks.append(ids[at : at + size])
        at += size
    return chunks


@pytest.mark.parametrize("family", rotating(FAMILIES, "lanes", 2))
def test_every_event_is_the_parsers_own(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = make_renderer(family)
    size = renderer.tokenizer.vocabulary.size
    control = [token.id for token in renderer.tokenizer.vocabulary.control.values()]
    chooser = random.Random(family)
    for round_ in rotating(range(12), family, 3):
        turns = written(renderer, TEXT * 2, TEXT + "more", TEXT * 3)
        ids = [*turns[0], *turns[1]] if round_ % 2 else turns[round_ % 4 // 2]
        for _ in range(round_):  # hostile: anything may stand anywhere
            other = chooser.choice([chooser.randrange(size), chooser.choice(control), size + 5])
            at = chooser.randrange(len(ids))
            ids[at : at + chooser.randint(0, 2)] = [other]
        chunks = cut(ids, chooser)
        found = list(stream(renderer.streaming_parser(tools=[TOOL]), chunks))
        with monkeypatch.context() as patch:
            patch.setattr(Output, "lane", lambda *_: None)
            assert found == list(stream(renderer.streaming_parser(tools=[TOOL]), chunks))
        assert found[-1][-1].response == renderer.parse_response(ids, tools=[TOOL])


@pytest.mark.parametrize("family", ["qwen3", "gpt-oss", "qwen3.5"])
def test_most_tokens_go_by(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    woken = 0
    wake = StreamingParser._wake

    def count(self: StreamingParser) -> None:
        nonlocal woken
        woken += 1
        wake(self)

    monkeypatch.setattr(StreamingParser, "_wake", count)
    renderer = make_renderer(family)
    plain = "The quick brown fox jumps over the lazy dog, again and again; nobody knows why. " * 20
    for ids in written(renderer, plain, plain, plain):
        woken = 0
        list(stream(renderer.streaming_parser(tools=[TOOL]), [[index] for index in ids]))
        assert woken < len(ids) / 8


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=80), data=st.data())
def test_any_text_in_any_pieces(text: str, data: st.DataObject) -> None:
    renderer = make_renderer("qwen3")
    ids = renderer.tokenizer.encode_plain([f"ok {text}"])[0].tolist()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    chunks = [ids[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    found = [event for events in stream(renderer.streaming_parser(), chunks) for event in events]
    assert found[-1].response == renderer.parse_response(ids)
    said = "".join(event.text for event in found[:-1] if hasattr(event, "text"))
    assert said == found[-1].response.content + (found[-1].response.reasoning_content or "")


WRONG = [["a"], [None], [[1]], "ab", [1.5, "x"], [1.0], [True], [-1], [2**31], np.array([1.5]), np.array([2**40])]


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40), seed=st.integers(0, 2**32), wrong=st.sampled_from(WRONG))
def test_what_is_no_id_is_refused_and_changes_nothing(text: str, seed: int, wrong: Any) -> None:
    """Ids that are wrong, alone or after some that are not, in the midst of any text: as if nobody had fed them."""
    renderer = make_renderer("qwen3")
    chooser = random.Random(seed)
    ids = renderer.tokenizer.encode(f'one two three four {text}<tool_call>\n{{"name": "a", five six {text}')
    parser, events = renderer.streaming_parser(), []
    for chunk in cut(ids, chooser):
        events += parser.feed(chunk)
        if chooser.random() < 0.3:
            with pytest.raises(InputError, match="ids"):
                parser.feed([*chunk, *wrong] if type(wrong) is list and chooser.random() < 0.5 else wrong)
    expected = renderer.streaming_parser()
    assert parser.response == renderer.parse_response(ids)
    said, undisturbed = ("".join(getattr(one, "text", "") for one in some) for some in (events, expected.feed(ids)))
    assert said == undisturbed


def test_ids_may_come_as_any_iterable() -> None:
    renderer = make_renderer("qwen3")
    ids = renderer.tokenizer.encode("one two")
    for form in (tuple, np.array, iter, lambda some: (index for index in some), lambda some: map(np.int64, some)):
        parser = renderer.streaming_parser()
        parser.feed(form(ids[:1]))
        parser.feed(form(ids[1:]))
        assert parser.response.content + (parser.response.reasoning_content or "") == "one two"
