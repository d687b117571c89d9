"""The parts of a turn that carry loss are what the parser reads."""

from __future__ import annotations

from collections.abc import Iterator

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
from tests.support import rendered
from tokentrace import RenderedTokens, Renderer, Sample
from tokentrace.parsing.response import PartKind
from tokentrace.study.sampling import SampledTurn
from tokentrace.tokens.kinds import Part

pytestmark = pytest.mark.filterwarnings("ignore::tokentrace.samples.TurnStartWarning")
"""The tests of that warning catch it themselves."""
# -- parts, held against the parser


BLANK = "white space after the closing tag of reasoning: part of the reasoning here, of the content to the parser"
STOP = "the parser counts the stop token to the call that it ends"
CHANNEL = "content beside a call stands in the channel for reasoning, and the parser reads what it is written as"
UNOPENED = "the template writes these calls with no opening delimiter, and the parser takes the closing one for text"
PARSED_OTHERWISE: dict[str, set[str]] = {
    "qwq-32b": {BLANK},
    **{key: {BLANK} for key in ("glm-4.5", "glm-4.6", "glm-4.7", "glm-4.7-flash", "glm-5", "glm-5.1", "glm-5.2")},
    "minimax-m2": {BLANK},
    "deepseek-v3.2": {BLANK},
    "deepseek-v4": {BLANK},
    "kimi-k2.5": {BLANK},
    "nemotron-3-nano": {BLANK},
    "gpt-oss": {STOP, CHANNEL},
    "deepseek-v3": {UNOPENED},
    "deepseek-r1": {UNOPENED},
}
"""Where parts differ from what the parser reads."""
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
BY_KIND = {
    PartKind.REASONING: Part.REASONING,
    PartKind.CONTENT: Part.CONTENT,
    PartKind.TOOL_CALL: Part.TOOL_CALLS,
}


def test_parts_are_what_the_parser_reads(any_family: str) -> None:
    renderer = make_renderer(any_family)
    shown = dict(rows(any_family))
    for name, conversation in INLINE.items():
        tokens = rendered(renderer, conversation)
        if isinstance(tokens, RenderedTokens):
            shown[name] = (conversation, tokens, sample_of(renderer, conversation))
    found: dict[str, str] = {}
    kinds = set()
    for name, (conversation, tokens, sample) in shown.items():
        for turn in tokens.turns:
            for cause, part in differences(renderer, conversation, tokens, sample, turn):
                found.setdefault(cause, f"{name}, message {turn.message}")
                kinds.add(part)
    assert set(found) - {""} == PARSED_OTHERWISE.get(any_family, set()), found
    assert kinds >= {Part.CONTENT, Part.STOP}
    assert (Part.TOOL_CALLS in kinds) == (any_family != "gemma-3")  # whose template has no tools
    assert (Part.REASONING in kinds) == (any_family not in NO_REASONING)


def differences(
    renderer: Renderer, conversation: Conversation, tokens: RenderedTokens, sample: Sample, turn: SampledTurn
) -> Iterator[tuple[str, Part]]:
    """For each part that the parser reads in a turn, why its tokens are of another part, or ``""``."""
    assert sample.parts is not None
    own = sample.parts[turn.start : turn.stop]
    ids = tokens.ids[turn.start : turn.stop]
    parsed = renderer.parse_response(ids, tools=conversation.tools, prompt_ids=tokens.ids[: turn.start])
    for part in parsed.parts:
        want = BY_KIND[part.kind]
        for at in range(*part.span):
            yield "" if own[at] == want else cause_of(renderer, sample, turn, at, want), want
    closed = turn.stop_token is not None and turn.start < turn.stop
    assert (own == Part.STOP).nonzero()[0].tolist() == ([len(own) - 1] if closed else [])
    assert set(own.tolist()) <= {Part.REASONING, Part.CONTENT, Part.TOOL_CALLS, Part.STOP}
    if closed:
        yield "", Part.STOP


def cause_of(renderer: Renderer, sample: Sample, turn: SampledTurn, at: int, want: Part) -> str:
    """Why a token is not of the part that the parser gives it; else the token and both parts."""
    assert sample.parts is not None
    own = sample.parts[turn.start : turn.stop]
    text = renderer.tokenizer.decode([int(sample.ids[turn.start + at])])
    if own[at] == Part.REASONING and want is Part.CONTENT and not text.strip():
        return BLANK
    if own[at] == Part.STOP and want is Part.TOOL_CALLS and at == len(own) - 1:
        return STOP
    if own[at] == Part.CONTENT and want is Part.REASONING and Part.TOOL_CALLS in own:
        return CHANNEL
    opening = renderer.tokenizer.token_id("<｜tool▁calls▁begin｜>")
    if text == "<｜tool▁calls▁end｜>" and opening not in sample.ids[turn.start : turn.stop]:
        return UNOPENED
    return f"{text!r} is {Part(own[at]).name}, and {want.name} to the parser"


def test_inline_reasoning_is_reasoning_whatever_follows() -> None:
    """The template takes it apart and writes its tags anew, so that nothing but the text is the message's own."""
    renderer = make_renderer("qwen3")
    for name, conversation in INLINE.items():
        sample = sample_of(renderer, conversation, parts=["reasoning"])
        shown = renderer.tokenizer.decode(sample.ids[sample.mask])
        assert shown == "<think>\nHm, hm.\n</think>\n\n", name
