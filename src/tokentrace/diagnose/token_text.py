"""Where ids differ, tokens as text, and the turns that they lie in."""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from ..show.alignment import Hunk, align
from ..show.document import Tokens
from ..show.visible import counted, visible
from ..tokens.ids import common_prefix, common_suffix
from ..tokens.tokenizer import Ids
from ..tokens.vocabulary import Vocabulary

READ: Final = 65_536
"""Tokens before and after a difference that are read as text."""
AROUND: Final = 12
"""Equal tokens shown on either side of a difference."""
_LIMIT: Final = 40
"""Tokens shown of one side of a difference."""
_ROLE: Final = re.compile(
    r"\s*(system|developer|user|assistant|tool|ipython|model|functions\.)(?![\w.])|\s*(functions)\."
)
_HEAD: Final = re.compile(r"(?!.*end)(?:.*start|.*turn|.*header|.*role|\]~b\])")
_NAMED_HEAD: Final = re.compile(
    r"[<\[]?[|｜]?(?:im_)?(system|developer|user|assistant|observation)[|｜]?>", re.IGNORECASE
)
_OTHER_HEADS: Final = {
    "[INST]": "user",
    "[SYSTEM_PROMPT]": "system",
    "[TOOL_RESULTS]": "tool",
    "<｜tool▁output▁begin｜>": "tool",
    "<｜tool▁calls▁begin｜>": "assistant",
}

Parts = tuple[tuple[Tokens, Tokens | None], ...]
"""Tokens of two sides, in order; None: the same."""


def spell(vocabulary: Vocabulary, ids: Ids) -> bytes:
    return b"".join(map(vocabulary.token_bytes, ids.tolist()))


def text_of(vocabulary: Vocabulary, ids: Ids) -> str:
    """The text of tokens; invalid UTF-8 becomes U+FFFD."""
    return spell(vocabulary, ids).decode("utf-8", "replace")


def quoted(text: str, limit: int = 48) -> str:
    """Text for a sentence: on one line, cut if it is long."""
    text = visible(text[: limit + 1]).replace("\n", "⏎").replace("\t", "⇥")
    if not text:
        return "nothing"
    return f"`{text}`" if len(text) <= limit else f"`{text[:limit]}…`"


def hunks(one: Ids, other: Ids, at: int = 0, other_at: int = 0) -> Iterator[Hunk]:
    """The differences from two tokens on, what `other` adds at its end included.

    After each, both sides agree for a while: a few equal tokens between two differences are
    part of one, and the larger it is, the more may be, since tokens of a template recur everywhere.
    """
    while True:
        same = common_prefix(one[at:], other[other_at:])
        at, other_at = at + same, other_at + same
        if at == len(one) and other_at == len(other):
            return
        hunk = _first_hunk(one, other, at, other_at)
        yield hunk
        at, other_at = hunk.stop, hunk.other_stop


def _first_hunk(one: Ids, other: Ids, at: int, other_at: int) -> Hunk:
    window = 8192
    while True:
        for part in align(one[at : at + window], other[other_at : other_at + window]):
            stop, other_stop = at + part.stop, other_at + part.other_stop
            same = common_prefix(one[stop:], other[other_stop:])
            least = min(64, max(8, (part.stop + part.other_stop) // 4))
            if same >= least or 0 < same == len(one) - stop:
                return Hunk(at, stop, other_at, other_stop)
        if at + window >= len(one) and other_at + window >= len(other):
            return Hunk(at, len(one), other_at, len(other))
        window *= 4


def up_to_shared_end(one: Ids, other: Ids, at: int) -> Hunk | None:
    """All that differs after `at` as one hunk, if the end of `one` is in `other`."""
    size = min(16, len(one) - at)
    if size < 8 or len(other) - at < size:
        return None
    windows = sliding_window_view(other[at:], size)
    ends = np.flatnonzero((windows == one[-size:]).all(1))[:64] + at + size
    pairs = ((common_suffix(one[at:], other[at:end]), end) for end in ends.tolist())
    run, end = max(pairs, default=(0, 0))
    return Hunk(at, len(one) - run, at, end - run) if run else None


def contrast(vocabulary: Vocabulary, one: Ids, other: Ids, hunk: Hunk, *, fine: bool) -> Parts:
    """The tokens of both sides in and around a difference; `fine` aligns those in it."""

    def tokens(ids: Ids) -> Tokens:
        pairs = []
        for index in ids[:_LIMIT].tolist():
            raw = vocabulary.token_bytes(index)
            try:
                text = raw.decode("utf-8") if raw or 0 <= index < vocabulary.size else f"⟨id {index}⟩"
            except UnicodeDecodeError:  # not whole characters
                text = f"⟨{raw.hex(' ')}⟩"
            pairs.append((index, text))
        return [*pairs, (-1, f" … {counted(len(ids) - _LIMIT)} … ")] if len(ids) > _LIMIT else pairs

    ours, theirs = hunk.sides(one, other)
    fine = fine and max(len(ours), len(theirs)) <= 256
    at = 0
    parts: list[tuple[Tokens, Tokens | None]] = [(tokens(one[max(0, hunk.start - AROUND) : hunk.start]), None)]
    for part in align(ours, theirs) if fine else [Hunk(0, len(ours), 0, len(theirs))]:
        left, right = part.sides(ours, theirs)
        parts += [(tokens(ours[at : part.start]), None), (tokens(left), tokens(right))]
        at = part.stop
    same = common_prefix(one[hunk.stop : hunk.stop + AROUND], other[hunk.other_stop :])
    parts += [(tokens(ours[at:]), None), (tokens(one[hunk.stop : hunk.stop + same]), None)]
    return tuple(pair for pair in parts if any(pair))


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
    """The start of a difference in which other tokens spell the same bytes, or None.

    A token that both sides share must follow it, or the end of the stream: next to a change of the
    text, other merges are only its consequence.
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


@dataclass(frozen=True, slots=True)
class TurnHeads:
    """Control tokens that begin turns (`named` tell the role); `structural` are all but tags."""

    vocabulary: Vocabulary
    named: Mapping[int, str]
    heads: npt.NDArray[np.int32]
    structural: frozenset[int]

    @classmethod
    def of(cls, vocabulary: Vocabulary, tags: Collection[str] = ()) -> TurnHeads:
        """The heads of a vocabulary, by their names; `tags` are control tokens inside turns."""
        named, heads, structural = {}, [], set()
        for text, token in vocabulary.control.items():
            match = _NAMED_HEAD.fullmatch(text)
            role = _OTHER_HEADS.get(text) or (match[1].lower() if match else None)
            if role:
                named[token.id] = role
            if role or _HEAD.match(text):
                heads.append(token.id)
            if token.special and text not in tags:
                structural.add(token.id)
        return cls(vocabulary, named, np.asarray(heads, np.int32), frozenset(structural | set(heads)))

    def count(self, ids: Ids) -> int:
        return int(np.isin(ids, self.heads).sum())

    def role(self, ids: Ids, at: int) -> str | None:
        """The role of the turn that a token lies in; None if no head tells."""
        start = max(0, at - READ)
        for index in reversed((np.flatnonzero(np.isin(ids[start : at + 1], self.heads)) + start).tolist()):
            match = _ROLE.match(text_of(self.vocabulary, ids[index + 1 : index + 5]))
            if match:
                return "tool" if match[2] else match[1]
            if int(ids[index]) in self.named:
                return self.named[int(ids[index])]
        return None
