"""Whether a grammar reads back what its template writes. One that does not has to say so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ..formats.grammar import TurnGrammar
from ..study.probes import call
from ..template.chat_template import REASONING_FIELDS
from ..template.trace import Rendering
from .response import ParsedResponse

MISREAD: Final = "not all that the template writes is read back"

_THOUGHT: Final = {"reasoning_content": "a thought"}
_ONE: Final = {"tool_calls": [call(1, {"key": "value", "more": 7})]}
_TWO: Final = {"tool_calls": [call(1, {"key": "value"}), call(2, {"more": True})]}
PROOFS: Final[Mapping[str, Mapping[str, Any]]] = {
    "an answer": {"content": "an answer"},
    "an answer with reasoning": {"content": "an answer", **_THOUGHT},
    "a call": {"content": "", **_ONE},
    "an answer and a call": {"content": "an answer", **_ONE},
    "two calls": {"content": "", **_TWO},
    "reasoning and two calls": {"content": "", **_THOUGHT, **_TWO},
}
"""Turns that a grammar has to read back as far as the template writes them."""


def parts_of(message: Mapping[str, Any]) -> frozenset[str]:
    """Which parts a message has: content, reasoning, calls, and several of these."""
    count = len(message.get("tool_calls") or ())
    return frozenset(
        part
        for part, there in {
            "content": message.get("content"),
            "reasoning": any(message.get(name) for name in REASONING_FIELDS),
            "calls": count > 0,
            "several calls": count > 1,
        }.items()
        if there
    )


def misread(name: str, rendering: Rendering, parsed: ParsedResponse, grammar: TurnGrammar) -> Iterator[tuple[str, str]]:
    """What was read otherwise than the trace says it was written, of one of the proofs: the part, and the proof."""
    spans = [(text, origin.path) for text, _, origin in rendering.spans() if origin and origin.message == 1]
    said = "".join(text for text, own in spans if own[:1] == ("content",))
    thought = "".join(text for text, own in spans if own and own[0] in REASONING_FIELDS)
    if grammar.channels is None:  # there, a template may write content as reasoning
        if parsed.content != said:
            yield "content", name
        if (grammar.reasoning is not None or not grammar.notes) and (parsed.reasoning_content or "") != thought:
            yield "reasoning", name
    shown = {own[1] for _, own in spans if own[:1] == ("tool_calls",) and own[-1] in ("name", "id")}
    if len(parsed.calls) != len(shown) or len(parsed.tool_calls) != len(shown):
        yield "calls", name
