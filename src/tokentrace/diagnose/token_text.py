"""Tokens as text: for sentences, for lines that people read, and around a difference."""

from __future__ import annotations

import codecs
from typing import Final

from ..show.alignment import Hunk
from ..show.visible import visible
from ..tokens.tokenizer import Ids
from ..tokens.vocabulary import Vocabulary

READ: Final = 65_536
"""Tokens before and after a difference that are read as text."""


def spell(vocabulary: Vocabulary, ids: Ids) -> bytes:
    """The bytes that tokens stand for."""
    return b"".join(map(vocabulary.token_bytes, ids.tolist()))


def text_of(vocabulary: Vocabulary, ids: Ids) -> str:
    """The text of tokens; invalid UTF-8 becomes U+FFFD."""
    return spell(vocabulary, ids).decode("utf-8", "replace")


def token_text(vocabulary: Vocabulary, index: int) -> str:
    """A token's own text; its bytes in hexadecimal if they are not whole characters."""
    raw = vocabulary.token_bytes(index)
    try:
        return raw.decode("utf-8") if raw or 0 <= index < vocabulary.size else f"⟨id {index}⟩"
    except UnicodeDecodeError:
        return f"⟨{raw.hex(' ')}⟩"


def one_line(text: str) -> str:
    """Text on one line, with nothing that a terminal would act upon."""
    return visible(text).replace("\n", "⏎").replace("\t", "⇥")


def quoted(text: str, limit: int = 48) -> str:
    """Text for a sentence: on one line, cut if it is long."""
    text = one_line(text[: limit + 1])
    if not text:
        return "nothing"
    return f"`{text}`" if len(text) <= limit else f"`{text[:limit]}…`"


def window(
    vocabulary: Vocabulary, stream: Ids, prompt: Ids, hunk: Hunk, back: int = READ, forward: int = READ
) -> tuple[str, str, str]:
    """The text before a difference, and how each side goes on from its first token."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    lead = decoder.decode(spell(vocabulary, stream[max(0, hunk.start - back) : hunk.start]))
    partial = decoder.getstate()[0]  # the first bytes of a character that both sides complete
    sides = stream[hunk.start : hunk.start + forward], prompt[hunk.other_start : hunk.other_start + forward]
    ours, theirs = ((partial + spell(vocabulary, side)).decode("utf-8", "replace") for side in sides)
    return lead, ours, theirs


def spelled_alike(vocabulary: Vocabulary, stream: Ids, prompt: Ids, hunk: Hunk) -> Hunk | None:
    """The part at the start of a difference in which other tokens spell the same bytes, or None.

    A token that both sides share must follow it, or the end of the stream: next to a change of the text, other merges
    are only its consequence.
    """
    ours, theirs = (side[:READ].tolist() for side in hunk.sides(stream, prompt))
    a = b = 0
    left = right = b""
    while True:
        if a and b and left == right:
            at, other = hunk.start + a, hunk.other_start + b
            if at == len(stream) or (other < len(prompt) and stream[at] == prompt[other]):
                return Hunk(hunk.start, at, hunk.other_start, other)
        if len(left) <= len(right) and a < len(ours):
            raw = vocabulary.token_bytes(ours[a])
            left, a = left + raw, a + 1
        elif b < len(theirs):
            raw = vocabulary.token_bytes(theirs[b])
            right, b = right + raw, b + 1
        else:
            return None
        size = min(len(left), len(right))
        if not raw or left[:size] != right[:size]:
            return None
        left, right = left[size:], right[size:]
