"""A difference between two sequences of ids as text, and as rows of tokens to show."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from ..study.turns import common_prefix as same_start
from ..tokens.alignment import Hunk, align
from ..tokens.ids import common_prefix
from ..tokens.tokenizer import Ids
from ..tokens.visible import visible
from ..tokens.vocabulary import Vocabulary

_AROUND: Final = 12
"""Equal tokens shown on either side of a difference."""
_SHOWN: Final = 40
"""Tokens shown of a longer run of removed or added ones."""
_FINE: Final = 256
"""Tokens of a difference up to which single equal tokens in it are shown as equal."""

READ: Final = 65_536
"""Tokens before and after a difference that are read as text."""


# -- text


def spell(vocabulary: Vocabulary, ids: Ids) -> bytes:
    """The bytes that tokens stand for."""
    return b"".join(map(vocabulary.token_bytes, ids.tolist()))


def text_of(vocabulary: Vocabulary, ids: Ids) -> str:
    """The text of tokens, for people: bytes that are not UTF-8 become U+FFFD."""
    return spell(vocabulary, ids).decode("utf-8", "replace")


def token_text(vocabulary: Vocabulary, index: int) -> str:
    """A token's text on its own; bytes in hexadecimal where they are not whole characters."""
    raw = vocabulary.token_bytes(index)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return f"⟨{raw.hex(' ')}⟩"


def one_line(text: str) -> str:
    """Text on one line, with nothing in it that a terminal would act upon."""
    return visible(text).replace("\n", "⏎").replace("\t", "⇥")


def quoted(text: str, most: int = 48) -> str:
    """Text for a sentence: on one line, cut short where long."""
    text = one_line(text[: most + 1])  # which is never shorter
    if not text:
        return "nothing"
    return f"`{text}`" if len(text) <= most else f"`{text[:most]}…`"


@dataclass(frozen=True, slots=True)
class TextWindow:
    """A difference as text: what comes before it on both sides, and how each goes on from the first other token."""

    lead: str
    stream: str
    prompt: str
    shared: int
    """Characters that both go on with alike: ``" false"`` and ``" False"`` share the space."""
    ended: bool
    """Whether `stream` reaches the end of the stream, and not merely of the window."""

    @classmethod
    def around(
        cls, vocabulary: Vocabulary, stream: Ids, prompt: Ids, hunk: Hunk, *, back: int = READ, forward: int = READ
    ) -> TextWindow:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        lead = decoder.decode(spell(vocabulary, stream[max(0, hunk.start - back) : hunk.start]))
        begun = decoder.getstate()[0]  # of a character that goes on after the first other token
        ours = (begun + spell(vocabulary, stream[hunk.start : hunk.start + forward])).decode("utf-8", "replace")
        theirs = begun + spell(vocabulary, prompt[hunk.other_start : hunk.other_start + forward])
        other = theirs.decode("utf-8", "replace")
        return cls(lead, ours, other, same_start(ours, other), hunk.start + forward >= len(stream))


def spelled_alike(vocabulary: Vocabulary, stream: Ids, prompt: Ids, hunk: Hunk) -> Hunk | None:
    """The part at the beginning of a difference in which other tokens spell the same bytes, if there is one.

    At least one token that both sides have must follow it, or the end: where the text itself changes next to
    it, other merges are that change's doing.
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
            added = vocabulary.token_bytes(ours[a])
            left, a = left + added, a + 1
        elif b < len(theirs):
            added = vocabulary.token_bytes(theirs[b])
            right, b = right + added, b + 1
        else:
            return None
        if not added:  # an id that the vocabulary does not have: nobody knows what it spells
            return None
        size = min(len(left), len(right))
        if left[:size] != right[:size]:
            return None
        left, right = left[size:], right[size:]


# -- rows to show


class DiffOp(StrEnum):
    """What became of the tokens of a row."""

    EQUAL = "equal"
    REMOVED = "removed"
    """In the stream only."""
    ADDED = "added"
    """In the next prompt only."""
    SKIPPED = "skipped"
    """Tokens of a long removed or added run that are not listed; `count` says how many."""


@dataclass(frozen=True, slots=True)
class DiffRow:
    """Neighbouring tokens with one fate.

    `start` is where they begin: in the stream, or in the next prompt where they were added. A skipped row has
    the place of the run it is part of, a count, and no tokens.
    """

    op: DiffOp
    start: int
    ids: tuple[int, ...]
    texts: tuple[str, ...]
    count: int


def diff_rows(vocabulary: Vocabulary, stream: Ids, prompt: Ids, hunk: Hunk) -> tuple[DiffRow, ...]:
    """The difference, token by token, with a few equal tokens around it."""

    def row(op: DiffOp, ids: Ids, start: int) -> DiffRow:
        listed = ids.tolist()
        return DiffRow(op, start, tuple(listed), tuple(token_text(vocabulary, index) for index in listed), len(listed))

    def run(op: DiffOp, ids: Ids, start: int) -> Iterable[DiffRow]:
        if len(ids) <= _SHOWN:
            return [row(op, ids, start)] if len(ids) else []
        head, tail = _SHOWN * 3 // 4, _SHOWN // 4
        skipped = DiffRow(DiffOp.SKIPPED, start + head, (), (), len(ids) - head - tail)
        return [row(op, ids[:head], start), skipped, row(op, ids[len(ids) - tail :], start + len(ids) - tail)]

    ours, theirs = hunk.sides(stream, prompt)
    first = max(0, hunk.start - _AROUND)
    rows = [*run(DiffOp.EQUAL, stream[first : hunk.start], first)]
    fine = max(len(ours), len(theirs)) <= _FINE
    at = 0
    for a, b, c, d in align(ours, theirs) if fine else [Hunk(0, len(ours), 0, len(theirs))]:
        rows += run(DiffOp.EQUAL, ours[at:a], hunk.start + at)
        rows += run(DiffOp.REMOVED, ours[a:b], hunk.start + a)
        rows += run(DiffOp.ADDED, theirs[c:d], hunk.other_start + c)
        at = b
    rows += run(DiffOp.EQUAL, ours[at:], hunk.start + at)
    after = stream[hunk.stop : hunk.stop + _AROUND]
    same = common_prefix(after, prompt[hunk.other_stop : hunk.other_stop + _AROUND])
    return (*rows, *run(DiffOp.EQUAL, after[:same], hunk.stop))


def diff_lines(rows: Iterable[DiffRow], ended: tuple[bool, bool]) -> list[str]:
    """The rows as two lines of text, changed tokens in brackets, and a third with the ids of the first change.

    `ended` says whether the stream and the next prompt end where the rows do.
    """
    lines: dict[DiffOp, list[str]] = {DiffOp.REMOVED: [], DiffOp.ADDED: []}
    changed: dict[DiffOp, list[str]] = {DiffOp.REMOVED: [], DiffOp.ADDED: []}
    rows = list(rows)
    last = DiffOp.EQUAL
    closed = False
    for number, row in enumerate(rows):
        if row.op is DiffOp.EQUAL:
            text = one_line("".join(row.texts))
            for line in lines.values():
                line.append(text if len(text) <= 120 else "…" + text[-100:] if not number else text[:100] + "…")
            closed = closed or bool(number)
            continue
        if row.op is DiffOp.SKIPPED:
            lines[last].append(f" … {row.count:,} tokens … ")
            continue
        last = row.op
        lines[row.op] += [f"[{one_line(text)}]" for text in row.texts]
        if not closed:
            changed[row.op] += [f"{index} ({one_line(text)})" for index, text in zip(row.ids, row.texts, strict=True)]
    ids = [", ".join(some[:6]) + (", …" if len(some) > 6 else "") or "nothing" for some in changed.values()]
    begun = "… " if rows and rows[0].start else ""
    out = []
    for name, line, end in zip(("stream", "next prompt"), lines.values(), ended, strict=True):
        out.append(f"{name:<12} {begun}{''.join(line)}{'' if end else ' …'}")
    return [*out, f"{'':<12} {' -> '.join(ids)}"]
