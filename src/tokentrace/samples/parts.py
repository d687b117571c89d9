"""Parts: what each token of a conversation says, the delimiters inside an assistant's turn included."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import TokentraceError
from ..formats.grammar import TurnGrammar
from ..rendering.rendered import RenderedTokens
from ..rendering.renderer import Renderer
from ..template.chat_template import REASONING_FIELDS
from ..template.origin import Origin
from ..tokens.kinds import Kind, Part
from ..tokens.tokenizer import Ids

Parts = npt.NDArray[np.uint8]

_BY_FIELD: Final[dict[str, int]] = {
    "role": int(Part.SCAFFOLD),
    "content": int(Part.CONTENT),
    "tool_calls": int(Part.TOOL_CALLS),
    **dict.fromkeys(REASONING_FIELDS, int(Part.REASONING)),
}
_SCAFFOLD_CODE: Final = int(Part.SCAFFOLD)
_OTHER_CODE: Final = int(Part.OTHER)
_SCAFFOLD: Final = bytes([Part.SCAFFOLD])
_KIND_OF_PART: Final = np.asarray([Kind.SCAFFOLD if part is Part.SCAFFOLD else Kind.CONTEXT for part in Part], np.uint8)
"""The kind of a token that nobody samples."""


class PartFinder:
    """Finds the parts of conversations that one renderer rendered.

    A token of a field has that field's part. Scaffold that an assistant samples belongs to what it opens or closes:
    ``<think>`` and ``</think>`` to the reasoning, ``<tool_call>`` to the calls; where one stretch of it closes
    reasoning and opens something else, the grammar tells where the one ends.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._vocabulary = renderer.tokenizer.vocabulary
        self._grammars: dict[bool, TurnGrammar] = {}
        self._closes: dict[tuple[bool, bytes], int] = {}

    def arrays(self, rendered: RenderedTokens, tools: bool = False) -> dict[str, npt.NDArray[Any]]:
        """The message, the `Part` and the `Kind` of each token, by the names that a `Sample` has for them."""
        codes = bytes(
            _SCAFFOLD_CODE if origin is None else _field_part(origin) for origin in rendered.rendering.origins
        )
        parts: Parts = rendered.per_token(np.frombuffer(codes, np.uint8))
        kinds = _KIND_OF_PART.take(parts)
        kinds[rendered.mask] = Kind.SAMPLED
        reasoning = self._grammar(tools).reasoning if rendered.turns else None
        is_inline = reasoning is not None and bool(reasoning.close) and reasoning.close in rendered.text
        for turn in rendered.turns:
            stop = turn.stop
            if turn.stop_token is not None and turn.start < stop:
                stop -= 1
                parts[stop] = Part.STOP
            ids, own = rendered.ids[turn.start : stop], parts[turn.start : stop]
            if is_inline:
                self._mark_inline(rendered, turn.start, own, tools)
            self._settle_scaffold(ids, own, tools)
        return {"messages": rendered.messages, "parts": parts, "kinds": kinds}

    def _mark_inline(self, rendered: RenderedTokens, start: int, parts: Parts, tools: bool) -> None:
        """Mark reasoning that is part of the content, up to its closing tag (which the template may have written)."""
        reasoning = self._grammar(tools).reasoning
        codes = parts.tobytes()
        first = codes.find(Part.CONTENT)
        if reasoning is None or not reasoning.close or first < 0 or Part.REASONING in codes:
            return
        calls = codes.find(Part.TOOL_CALLS, first)
        last = calls if calls >= 0 else len(codes)
        ends, spans = rendered.rendering.ends, rendered.span_indices
        span = int(spans[start + first])
        begin, end = ends[span - 1] if span else 0, ends[int(spans[start + last - 1])]
        text, tag = rendered.rendering.text, reasoning.open.strip()
        close = text.find(reasoning.close, begin, end)
        before = text[max(0, begin - 64) : begin].rstrip()
        if close >= 0 and (before.endswith(tag) or text.find(tag, begin, close) >= 0):
            closed = self._closed_by(rendered.ids[start + first : start + last], reasoning.close)
            parts[first : first + closed] = Part.REASONING

    def _settle_scaffold(self, ids: Ids, parts: Parts, tools: bool) -> None:
        """Give each stretch of scaffold inside a turn to what it opens or closes."""
        codes = parts.tobytes()
        start = codes.find(Part.SCAFFOLD)
        while start >= 0:
            stop = len(codes) - len(codes[start:].lstrip(_SCAFFOLD))
            left = Part(parts[start - 1]) if start else None
            right = Part(codes[stop]) if stop < len(codes) else None
            if left is Part.TOOL_CALLS:
                parts[start:stop] = Part.TOOL_CALLS
            else:
                cut = start + self._closed(ids[start:stop], tools)
                if cut == start and left is Part.REASONING and right is not Part.TOOL_CALLS:
                    cut = stop  # no known tag closes it: all of this belongs to the reasoning
                parts[start:cut] = left or Part.REASONING  # Harmony ends reasoning and content alike
                after = right or left
                if after is None or (after is Part.REASONING and cut > start):
                    after = Part.CONTENT
                parts[cut:stop] = after
            start = codes.find(Part.SCAFFOLD, stop)

    def _closed(self, ids: Ids, tools: bool) -> int:
        """How many tokens of a stretch of scaffold belong to the reasoning that it closes; 0 where it closes none."""
        key = (tools, ids.tobytes())
        found = self._closes.get(key)
        if found is None:
            if len(self._closes) > 1000:
                self._closes.clear()
            grammar = self._grammar(tools)
            found = 0
            if grammar.channels is not None:
                found = self._closed_by(ids, grammar.channels.end)
            elif grammar.reasoning is not None and grammar.reasoning.close:
                found = self._closed_by(ids, grammar.reasoning.close)
            self._closes[key] = found
        return found

    def _closed_by(self, ids: Ids, close: str) -> int:
        """How many tokens spell everything up to a closing tag and the white space after it; 0 without one."""
        spelled = [self._vocabulary.token_bytes(index) for index in ids.tolist()]
        before, found, _ = b"".join(spelled).partition(close.encode())
        if not found:
            return 0
        length, count = len(before) + len(found), 0
        while length > 0:
            length -= len(spelled[count])
            count += 1
        while count < len(spelled) and not spelled[count].strip():
            count += 1
        return count

    def _grammar(self, tools: bool) -> TurnGrammar:
        if tools not in self._grammars:
            try:
                self._grammars[tools] = self._renderer.grammar([] if tools else None)
            except TokentraceError:  # a template that refuses every turn that it is shown
                self._grammars[tools] = TurnGrammar()
        return self._grammars[tools]


def _field_part(origin: Origin) -> int:
    if origin.field is not None:
        return _BY_FIELD.get(origin.field, _OTHER_CODE)
    return Part.TOOLS if origin.source == "tools" else _OTHER_CODE
