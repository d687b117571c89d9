"""Where ids differ, tokens as text, and the turns that they lie in."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterator
from itertools import accumulate
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ..show.alignment import Hunk, align
from ..show.document import HUES, Contrast, Track, token_columns
from ..show.visible import visible
from ..tokens.ids import common_prefix, common_suffix
from ..tokens.tokenizer import Ids, Tokenizer
from ..tokens.vocabulary import Vocabulary

READ: Final = 65_536
"""Tokens before and after a difference that are read as text."""
_AROUND: Final = 12
"""Equal tokens shown on either side of a difference."""
_LIMIT: Final = 256
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


def spell(vocabulary: Vocabulary, ids: Ids) -> bytes:
    return b"".join(map(vocabulary.token_bytes, ids.tolist()))


def quoted(text: str, limit: int = 48) -> str:
    """Text for a sentence: on one line, cut if it is long."""
    text = visible(text[: limit + 1]).replace("\n", "⏎").replace("\t", "⇥")
    if not text:
        return "nothing"
    return f"`{text}`" if len(text) <= limit else f"`{text[:limit]}…`"


def contrast(tokenizer: Tokenizer, one: Ids, other: Ids, hunk: Hunk, names: tuple[str, str]) -> Contrast:
    """The tokens of both sides in and around a difference."""
    lead = one[max(0, hunk.start - _AROUND) : hunk.start]
    sides = [side[:_LIMIT] for side in hunk.sides(one, other)]
    same = common_prefix(one[hunk.stop : hunk.stop + _AROUND], other[hunk.other_stop :])
    after = one[hunk.stop : hunk.stop + same]

    def track(side: Ids, start: int) -> Track:
        ids = np.concatenate([lead, side, after])
        hues = np.full(len(ids), HUES["plain"], np.uint8)
        return Track("", ids, hues, first=max(0, start - len(lead)), **token_columns(tokenizer, ids))

    parts = [part.moved(len(lead), len(lead)) for part in align(*sides)]
    return Contrast(track(sides[0], hunk.start), track(sides[1], hunk.other_start), parts, names)


# -- differences


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


def spelled_alike(vocabulary: Vocabulary, stream: Ids, prompt: Ids, hunk: Hunk) -> Hunk | None:
    """The start of a difference in which other tokens spell the same bytes, or None.

    A token that both sides share must follow it, or the end of the stream: next to a change of the
    text, other merges are only its consequence.
    """
    sides = [[*map(vocabulary.token_bytes, side[:READ].tolist())] for side in hunk.sides(stream, prompt)]
    same = common_prefix(*(np.frombuffer(b"".join(side), np.uint8) for side in sides))
    ours, theirs = ([*accumulate(map(len, side))] for side in sides)
    for end in sorted({*ours} & {*theirs}):
        at = hunk.start + bisect_left(ours, end) + 1
        other = hunk.other_start + bisect_left(theirs, end) + 1
        if 0 < end <= same and (at == len(stream) or (other < len(prompt) and stream[at] == prompt[other])):
            return Hunk(hunk.start, at, hunk.other_start, other)
    return None


# -- turns


class TurnHeads:
    """Control tokens that begin turns, by their names; `structural` are all but `tags`."""

    def __init__(self, tokenizer: Tokenizer, tags: Collection[str] = ()) -> None:
        self.tokenizer, self.named, self.structural = tokenizer, dict[int, str](), set[int]()
        heads = []
        for text, token in tokenizer.vocabulary.control.items():
            match = _NAMED_HEAD.fullmatch(text)
            role = _OTHER_HEADS.get(text) or (match[1].lower() if match else None)
            if role:
                self.named[token.id] = role
            if role or _HEAD.match(text):
                heads.append(token.id)
            if heads[-1:] == [token.id] or (token.special and text not in tags):
                self.structural.add(token.id)
        self.heads = np.asarray(heads, np.int32)

    def count(self, ids: Ids) -> int:
        return int(np.isin(ids, self.heads).sum())

    def role(self, ids: Ids, at: int) -> str | None:
        """The role of the turn that a token lies in; None if no head tells."""
        start = max(0, at - READ)
        for index in reversed((np.flatnonzero(np.isin(ids[start : at + 1], self.heads)) + start).tolist()):
            match = _ROLE.match(self.tokenizer.decode(ids[index + 1 : index + 5]))
            if match:
                return "tool" if match[2] else match[1]
            if int(ids[index]) in self.named:
                return self.named[int(ids[index])]
        return None
