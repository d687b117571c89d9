"""Check that a grammar reads back what its own template writes. A note says where it does not."""

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


def misread_parts(
    name: str, rendering: Rendering, parsed: ParsedResponse, grammar: TurnGrammar
) -> Iterator[tuple[str, str]]:
    """Parts of a proof that are read otherwise than the trace shows them: the part, and the proof."""
    spans = [(text, origin.path) for text, _, origin in rendering.spans() if origin and origin.message == 1]
    content = "".join(text for text, path in spans if path[:1] == ("content",))
    reasoning = "".join(text for text, path in spans if path and path[0] in REASONING_FIELDS)
    if grammar.channels is None:  # there, a template may write content as reasoning
        if parsed.content != content:
            yield "content", name
        if (grammar.reasoning is not None or not grammar.notes) and (parsed.reasoning_content or "") != reasoning:
            yield "reasoning", name
    calls = {path[1] for _, path in spans if path[:1] == ("tool_calls",) and path[-1] in ("name", "id")}
    if not len(parsed.calls) == len(parsed.tool_calls) == len(calls):
        yield "calls", name
