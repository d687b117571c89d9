"""The parts of a turn that carry loss are what the parser reads."""

from __future__ import annotations

import pytest

from tests.conversations import (
    ASK,
    HI,
    PARIS,
    SIMPLE,
    Conversation,
    assistant,
)
from tests.samples.family_rows import (
    make_renderer,
    rows,
    sample_of,
)
from tokentrace.tokens.kinds import Part

pytestmark = pytest.mark.filterwarnings("ignore::tokentrace.samples.TurnStartWarning")
"""The tests of that warning catch it themselves."""
# -- parts, held against the parser


NO_REASONING = {
    "qwen2.5": "knows no reasoning",
    "qwen3-instruct-2507": "knows no reasoning",
    "qwen3-vl": "knows no reasoning",
    "qwen3-coder": "knows no reasoning",
    "deepseek-v3": "knows no reasoning",
    "deepseek-r1": "leaves all reasoning out, of the last turn too",
    "deepseek-v3.1": "leaves all reasoning out, of the last turn too",
    "kimi-k2": "knows no reasoning",
    "llama-3.1": "knows no reasoning",
    "llama-3.2": "knows no reasoning",
    "mistral-nemo": "knows no reasoning",
    "gemma-3": "knows no reasoning",
}
"""Families whose turns have no part that is reasoning."""
INLINE = {
    "inline_alone": Conversation([HI, assistant("<think>\nHm, hm.\n</think>\n\n")]),
    "inline_and_answer": Conversation([HI, assistant("<think>\nHm, hm.\n</think>\n\nHello!")]),
    "inline_and_call": Conversation([ASK, assistant("<think>\nHm, hm.\n</think>\n\n", PARIS)], SIMPLE),
    "inline_content_and_call": Conversation([ASK, assistant("<think>\nHm, hm.\n</think>\n\nLook.", PARIS)], SIMPLE),
}
"""Reasoning between tags in the content, with all that can follow it."""
BY_FIELD = {"reasoning_content": Part.REASONING, "content": Part.CONTENT, "tool_calls": Part.TOOL_CALLS}
WRITTEN_OTHERWISE = {
    "gpt-oss": "content beside a call is written in the channel for reasoning",
    **dict.fromkeys(("deepseek-v3", "deepseek-r1"), "content that is None is printed as text before a call"),
}
"""Families whose templates write a field where the parser reads another part."""


def test_the_parts_that_the_parser_reads_are_the_fields_that_the_trace_shows(any_family: str) -> None:
    kinds: set[int] = set()
    differing: list[str] = []
    for name, (_, tokens, sample) in rows(any_family).items():
        assert sample.parts is not None
        for turn in tokens.turns:
            own = sample.parts[turn.start : turn.stop]
            closed = turn.stop_token is not None and turn.start < turn.stop
            assert (own == Part.STOP).nonzero()[0].tolist() == ([len(own) - 1] if closed else []), name
            assert set(own.tolist()) <= {Part.REASONING, Part.CONTENT, Part.TOOL_CALLS, Part.STOP}, name
            kinds |= set(own.tolist())
            for at in range(turn.start, turn.stop):
                expected = BY_FIELD.get(tokens.fields[at].split(".")[0])
                if expected is not None and sample.parts[at] != expected and "</think>" not in tokens.text:
                    differing.append(f"{name}, token {at}: {tokens.fields[at]} is {Part(sample.parts[at]).name}")
    assert not differing or any_family in WRITTEN_OTHERWISE, differing[:5]
    assert kinds >= {Part.CONTENT, Part.STOP}
    assert (Part.TOOL_CALLS in kinds) == (any_family != "gemma-3")  # whose template has no tools
    assert (Part.REASONING in kinds) == (any_family not in NO_REASONING)


def test_inline_reasoning_is_reasoning_whatever_follows() -> None:
    """The template takes it apart and writes its tags anew, so that nothing but the text is the message's own."""
    renderer = make_renderer("qwen3")
    for name, conversation in INLINE.items():
        sample = sample_of(renderer, conversation, parts=["reasoning"])
        shown = renderer.tokenizer.decode(sample.ids[sample.mask])
        assert shown == "<think>\nHm, hm.\n</think>\n\n", name
