"""Parts: what each token of a conversation is, delimiters inside an assistant's turn included."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import TokentraceError
from ..parsing.response import PartKind
from ..rendering.rendered import RenderedTokens
from ..rendering.renderer import Renderer
from ..template.chat_template import REASONING_FIELDS
from ..template.origin import Origin
from ..tokens.ids import runs
from ..tokens.kinds import Kind, Part

_BY_FIELD: Final = {
    "role": Part.SCAFFOLD,
    "content": Part.CONTENT,
    "tool_calls": Part.TOOL_CALLS,
    **dict.fromkeys(REASONING_FIELDS, Part.REASONING),
}
_BY_KIND: Final = {
    PartKind.REASONING: Part.REASONING,
    PartKind.CONTENT: Part.CONTENT,
    PartKind.TOOL_CALL: Part.TOOL_CALLS,
    PartKind.STOP: Part.STOP,
}
_IS_FIELD: Final = np.asarray([part in (Part.CONTENT, Part.REASONING, Part.TOOL_CALLS) for part in Part], np.bool_)
_KIND_OF_PART: Final = np.asarray([Kind.SCAFFOLD if part is Part.SCAFFOLD else Kind.CONTEXT for part in Part], np.uint8)
"""The kind of a token that nobody samples."""


def part_columns(renderer: Renderer, rendered: RenderedTokens, tools: bool = False) -> dict[str, npt.NDArray[Any]]:
    """The message, the `Part` and the `Kind` of each token, by the names of a `Sample`'s columns.

    A token of a field has that field's part. The parser tells the parts of scaffold inside sampled turns, and which
    content is reasoning.
    """
    codes = [_field_part(origin) for origin in rendered.rendering.origins]
    parts = rendered.encoded.per_token(np.asarray(codes, np.uint8))
    kinds = _KIND_OF_PART.take(parts)
    kinds[rendered.mask] = Kind.SAMPLED
    for turn in rendered.turns:
        prompt, completion = rendered.ids[: turn.start], rendered.ids[turn.start : turn.stop]
        try:
            parsed = renderer.parse_response(completion, tools=[] if tools else None, prompt_ids=prompt)
        except TokentraceError:  # a template that refuses every turn has no grammar
            continue
        turn_parts = parts[turn.start : turn.stop]
        traced = turn_parts.copy()
        for kind, span in parsed.regions:
            turn_parts[slice(*span)] = _BY_KIND[kind]
        _restore_fields(turn_parts, traced)
        if turn.stop_token is not None and len(turn_parts):
            turn_parts[turn_parts == Part.STOP] = Part.CONTENT
            turn_parts[-1] = Part.STOP
    return {"messages": rendered.messages, "parts": parts, "kinds": kinds}


def _restore_fields(parsed: npt.NDArray[np.uint8], traced: npt.NDArray[np.uint8]) -> None:
    """Give tokens of a field its part where the parser read another one, and scaffold beside them that of a neighbour.

    Text may spell a delimiter: ``<tool_call>`` in content opens no call, ``</think>`` in reasoning does not end it.
    """
    is_field = _IS_FIELD.take(traced)
    if not (traced == Part.REASONING).any():  # else content has none
        is_field &= (traced != Part.CONTENT) | (parsed != Part.REASONING)
    misread = is_field & (parsed != traced)
    if not misread.any():
        return
    parsed[is_field] = traced[is_field]
    for start, stop in runs(~is_field):
        before, after = slice(max(0, start - 1), start), slice(stop, stop + 1)
        if misread[before].any() or misread[after].any():
            closed = [part for part in traced[before] if part != Part.CONTENT]
            parsed[start:stop] = [*closed, *traced[after], Part.CONTENT][0]


def _field_part(origin: Origin | None) -> Part:
    if origin is None:
        return Part.SCAFFOLD
    if origin.field is not None:
        return _BY_FIELD.get(origin.field, Part.OTHER)
    return Part.TOOLS if origin.source == "tools" else Part.OTHER
