"""What every view shows: pieces of one origin, the text of each token made visible, counts, stop tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePath
from typing import Final

import numpy as np

from ..rendering.rendered import RenderedTokens
from ..study.turns import common_prefix
from ..template.chat_template import REASONING_FIELDS
from ..tokens.ids import segments
from ..tokens.tokenizer import Tokenizer
from ..viewer.document import HUES, token_columns


class PieceKind(StrEnum):
    """Where a token comes from, as coarsely as a colour can say it. The value is its name for people."""

    SYSTEM = "system"
    USER = "user"
    REASONING = "reasoning"
    ASSISTANT = "assistant"
    CALLS = "tool calls"
    RESULT = "tool results"
    TOOLS = "tool schemas"
    VARIABLES = "template variables"
    SCAFFOLD = "scaffold"
    PROMPT = "generation prompt"
    UNKNOWN = "unknown"


KINDS: Final = tuple(PieceKind)

_BY_ROLE: Final = {
    "system": PieceKind.SYSTEM,
    "developer": PieceKind.SYSTEM,
    "assistant": PieceKind.ASSISTANT,
    "tool": PieceKind.RESULT,
    "function": PieceKind.RESULT,
    "ipython": PieceKind.RESULT,
}


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens ``start`` to ``stop`` that share origin, message, and whether they are sampled."""

    start: int
    stop: int
    kind: PieceKind
    message: int
    role: str | None
    field: str
    sampled: bool


def template_name(tokenizer: Tokenizer) -> str:
    """The name of the model whose template a page is about: the last part of a path or of a name on the hub."""
    return PurePath(tokenizer.name).name


def pieces(rendered: RenderedTokens, limit: int | None = None) -> Iterator[Piece]:
    """The tokens in order, cut wherever origin, message or the mask changes; the first `limit` of them."""
    end = len(rendered) if limit is None else min(limit, len(rendered))
    for span in rendered.spans():
        if span.start >= end:
            return
        kind = kind_of(span.role, span.field)
        stop = min(span.stop, end)
        mask = rendered.mask[span.start : stop]
        for first, last in segments(mask):
            at = span.start + first
            yield Piece(at, span.start + last, kind, span.message, span.role, span.field, bool(mask[first]))


_BY_FIELD: Final = {
    "generation_prompt": PieceKind.PROMPT,
    "scaffold": PieceKind.SCAFFOLD,
    "synthetic_close": PieceKind.SCAFFOLD,
    "role": PieceKind.SCAFFOLD,
    "tool_calls": PieceKind.CALLS,
    "tools": PieceKind.TOOLS,
    "kwargs": PieceKind.VARIABLES,
    "unknown": PieceKind.UNKNOWN,
    "": PieceKind.UNKNOWN,
    **dict.fromkeys(REASONING_FIELDS, PieceKind.REASONING),
}


def kind_of(role: str | None, field: str) -> PieceKind:
    """The kind of a token by the name of its field, and by its message's role where the field does not say."""
    known = _BY_FIELD.get(field.split(".", maxsplit=1)[0])
    return known or (PieceKind.UNKNOWN if role is None else _BY_ROLE.get(role, PieceKind.USER))


def hue_of(role: str | None, field: str) -> int:
    """The colour of such a token on a page."""
    kind = kind_of(role, field)
    return HUES["generation" if kind is PieceKind.PROMPT else kind.name.lower()]


@dataclass(frozen=True, slots=True)
class MessageBlock:
    """Consecutive pieces of one message."""

    message: int
    role: str | None
    pieces: list[Piece]

    @property
    def title(self) -> str:
        """Whose block it is, in a word or two."""
        if self.role is not None:
            return self.role
        return "prompt" if self.pieces[0].kind is PieceKind.PROMPT else "template"

    @property
    def tokens(self) -> int:
        return self.pieces[-1].stop - self.pieces[0].start

    @property
    def sampled(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces if piece.sampled)


def blocks(rendered: RenderedTokens, limit: int | None = None) -> list[MessageBlock]:
    out: list[MessageBlock] = []
    for piece in pieces(rendered, limit):
        if not out or out[-1].message != piece.message:
            out.append(MessageBlock(piece.message, piece.role, []))
        out[-1].pieces.append(piece)
    return out


def counts(rendered: RenderedTokens) -> dict[PieceKind, tuple[int, int]]:
    """Tokens and sampled tokens of each kind that occurs."""
    totals = dict.fromkeys(KINDS, (0, 0))
    for piece in pieces(rendered):
        size = piece.stop - piece.start
        tokens, sampled = totals[piece.kind]
        totals[piece.kind] = (tokens + size, sampled + (size if piece.sampled else 0))
    return {kind: total for kind, total in totals.items() if total[0]}


def stops(rendered: RenderedTokens) -> dict[str | None, list[int]]:
    """The messages that each stop token ended; None for turns that nothing ended."""
    found: dict[str | None, list[int]] = {}
    for turn in rendered.turns:
        text = None if turn.stop_token is None else rendered.decode(slice(turn.stop - 1, turn.stop))
        found.setdefault(text, []).append(turn.message)
    return found


def listed(numbers: list[int], most: int = 8) -> str:
    """``"2, 4, 6"``, cut short where there are many."""
    shown = ", ".join(map(str, numbers[:most]))
    return shown if len(numbers) <= most else f"{shown} … {numbers[-1]}"


def meaning(rendered: RenderedTokens) -> str:
    """What the mask says of a token, for people."""
    return "sampled by the model" if rendered.mask_means == "sampled" else "carries loss"


def message_count(rendered: RenderedTokens) -> int:
    """How many messages have tokens."""
    return len(np.unique(rendered.messages[rendered.messages >= 0]))


# -- text


def token_texts(rendered: RenderedTokens, limit: int | None = None) -> list[str]:
    """The text to show for each token of a rendering."""
    texts: list[str] = token_columns(rendered.tokenizer, rendered.ids[:limit])["texts"]
    return texts


def edited(before: str, after: str, around: int = 40) -> tuple[str, str, str, str]:
    """What a change took out and put in, with a little of the text before and after: (lead, out, in, rest)."""
    shared = common_prefix(before, after)
    tail = common_prefix(before[shared:][::-1], after[shared:][::-1])
    lead = before[max(0, shared - around) : shared]
    rest = before[len(before) - tail : len(before) - tail + around]
    return lead, before[shared : len(before) - tail], after[shared : len(after) - tail], rest
