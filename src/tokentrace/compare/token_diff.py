"""Where two streams of ids part and where they meet again, as ids, as text, and as rows to show.

Cost follows the size of the difference: windows grow until both sides agree again, and nothing compares every
token of one side with every token of the other, but for a few hundred tokens around a difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from typing import Final

import numpy as np
import numpy.typing as npt

from ..tokens.differences import WINDOW, common_prefix, common_suffix, spell, unequal
from ..tokens.tokenizer import Ids
from ..tokens.visible import visible
from ..tokens.vocabulary import Vocabulary

_GRAM: Final = 8
"""Tokens that have to agree in a row before two sides may count as in step again."""

_FIRST_WINDOW: Final = 64
_CANDIDATES: Final = 64
"""Places of agreement that are looked at in each window, the nearest first."""

_TAIL: Final = 16
"""Tokens at the end of a stream by which it is looked for in a prompt."""

_AROUND: Final = 12
"""Equal tokens shown on either side of a difference."""

_SHOWN: Final = 40
"""Tokens shown of a longer run of removed or added ones."""

BACK: Final = 65_536
FORWARD: Final = 65_536
"""Tokens before and after a difference that are read as text."""


# -- where they meet again


@dataclass(frozen=True, slots=True)
class Hunk:
    """A difference: the stream has `stream` to `stream_stop` where the prompt has `prompt` to `prompt_stop`.

    Before it both sides agree. After it they agree for at least one token, or the stream is at its end, or they
    never agree again (`meets` is False) and it reaches to the end of both.
    """

    stream: int
    stream_stop: int
    prompt: int
    prompt_stop: int
    meets: bool

    def sides(self, stream: Ids, prompt: Ids) -> tuple[Ids, Ids]:
        """The ids that stand against each other."""
        return stream[self.stream : self.stream_stop], prompt[self.prompt : self.prompt_stop]


def next_hunk(stream: Ids, prompt: Ids, at: int, prompt_at: int, *, beyond: int = 0) -> Hunk:
    """The difference that begins at these two tokens; it takes in at least the stream's tokens up to `beyond`.

    The nearest place of agreement wins, but the farther away, the longer the agreement has to be: a few tokens
    of template recur everywhere.
    """
    start = max(at, beyond)
    window = _FIRST_WINDOW
    while True:
        left, right = stream[start : start + window], prompt[prompt_at : prompt_at + window]
        found = _meeting(stream, prompt, start, prompt_at, left, right)
        if found is None and start + window >= len(stream):
            found = _tail(left, right)
        if found is not None:
            a, b = start + found[0], prompt_at + found[1]
            while a > start and b > prompt_at and stream[a - 1] == prompt[b - 1]:
                a, b = a - 1, b - 1
            return Hunk(at, a, prompt_at, b, True)
        if start + window >= len(stream) and prompt_at + window >= len(prompt):
            return Hunk(at, len(stream), prompt_at, len(prompt), False)
        window *= 4


def _grams(ids: Ids) -> npt.NDArray[np.uint64]:
    """A hash of every run of `_GRAM` tokens. Equal hashes are looked at again, so a collision costs only time."""
    count = len(ids) - _GRAM + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    mixed = (ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(29)
    out = np.zeros(count, np.uint64)
    for offset in range(_GRAM):
        out = out * np.uint64(0x100000001B3) + mixed[offset : offset + count]
    return out


def _meeting(stream: Ids, prompt: Ids, at: int, prompt_at: int, left: Ids, right: Ids) -> tuple[int, int] | None:
    _, of_left, of_right = np.intersect1d(_grams(left), _grams(right), return_indices=True)
    if not len(of_left):
        return None
    distance = of_left + of_right
    for index in np.argsort(distance, kind="stable")[:_CANDIDATES].tolist():
        a, b = int(of_left[index]), int(of_right[index])
        run = common_prefix(stream[at + a :], prompt[prompt_at + b :])
        ended = at + a + run == len(stream)
        if prompt_at + b + run == len(prompt) and 2 * run < len(stream) - at - a:
            continue  # a generation prompt, which is like any other
        if run >= min(64, max(_GRAM, (a + b) // 4)) or (ended and run >= _GRAM):
            return a, b
    return None


def _tail(left: Ids, right: Ids) -> tuple[int, int] | None:
    """Where the stream's last few tokens stand on the other side: too few for a gram."""
    for size in range(min(_GRAM - 1, len(left)), 0, -1):
        count = len(right) - size + 1 if size > 1 else min(_GRAM, len(right))  # one token alone may be any
        if count <= 0:
            continue
        same = np.ones(count, np.bool_)
        for offset, index in enumerate(left[len(left) - size :].tolist()):
            same &= right[offset : offset + count] == index
        if same.any():
            return len(left) - size, int(same.argmax())
    return None


def shared_tail(stream: Ids, prompt: Ids, at: int) -> Hunk | None:
    """All that differs as one hunk, from token `at` of both to where the stream's end stands in the prompt.

    None where the last tokens of the stream (`_TAIL` of them) are not in the prompt after `at`.
    """
    size = min(_TAIL, len(stream) - at)
    if size < _GRAM:
        return None
    ends = np.flatnonzero(prompt[at:] == stream[-1]) + at
    for offset in range(1, size):
        ends = ends[ends - offset >= at]
        ends = ends[prompt[ends - offset] == stream[-1 - offset]]
    best = (0, 0)
    for end in ends[:_CANDIDATES].tolist():
        run = common_suffix(stream[at:], prompt[at : end + 1])
        best = max(best, (run, end))
    run, end = best
    return Hunk(at, len(stream) - run, at, end + 1 - run, True) if run else None


def hunks_after(hunk: Hunk, stream: Ids, prompt: Ids) -> Iterator[Hunk]:
    """The differences that follow, up to the end of the stream."""
    while hunk.meets:
        same = common_prefix(stream[hunk.stream_stop :], prompt[hunk.prompt_stop :])
        at, prompt_at = hunk.stream_stop + same, hunk.prompt_stop + same
        if at >= len(stream):
            return
        hunk = next_hunk(stream, prompt, at, prompt_at)
        yield hunk


# -- as text


@dataclass(frozen=True, slots=True)
class TextWindow:
    """A difference as text: what stands before it on both sides, and how each goes on from the first other token."""

    lead: str
    stream: str
    prompt: str
    shared: int
    """Characters that both go on with alike: ``" false"`` and ``" False"`` share the space."""
    ended: bool
    """Whether `stream` reaches the end of the stream, and not merely of the window."""


def text_window(
    vocabulary: Vocabulary, stream: Ids, prompt: Ids, hunk: Hunk, *, back: int = BACK, forward: int = FORWARD
) -> TextWindow:
    lead = spell(vocabulary, stream[max(0, hunk.stream - back) : hunk.stream])
    cut = len(lead) - _unfinished(lead)
    rest = lead[cut:]
    ours = (rest + spell(vocabulary, stream[hunk.stream : hunk.stream + forward])).decode("utf-8", "replace")
    theirs = (rest + spell(vocabulary, prompt[hunk.prompt : hunk.prompt + forward])).decode("utf-8", "replace")
    ended = hunk.stream + forward >= len(stream)
    return TextWindow(lead[:cut].decode("utf-8", "replace"), ours, theirs, shared_start(ours, theirs), ended)


def text_of(vocabulary: Vocabulary, ids: Ids) -> str:
    """The text of tokens, for people: bytes that are no UTF-8 become U+FFFD."""
    return spell(vocabulary, ids).decode("utf-8", "replace")


def shared_start(first: str, second: str) -> int:
    """How many characters two texts begin with alike."""
    size, at, step = min(len(first), len(second)), 0, 256
    while at < size:
        if first[at : at + step] == second[at : at + step]:
            at, step = at + step, step * 4
        elif step == 1:
            return at
        else:
            step = max(1, step // 4)
    return size


def _unfinished(raw: bytes) -> int:
    """The bytes at the end that begin a character and do not end it."""
    for back in range(1, min(4, len(raw) + 1)):
        byte = raw[-back]
        if byte & 0xC0 != 0x80:
            length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if length > back else 0
    return 0


def remerged(vocabulary: Vocabulary, stream: Ids, prompt: Ids, hunk: Hunk) -> Hunk | None:
    """The part at the beginning of a difference in which other tokens spell the same bytes, if there is one.

    At least one token that both sides have must follow it, or the end: where the text itself changes next to
    it, other merges are that change's doing.
    """
    ours = stream[hunk.stream : min(hunk.stream_stop, hunk.stream + BACK)].tolist()
    theirs = prompt[hunk.prompt : min(hunk.prompt_stop, hunk.prompt + BACK)].tolist()
    a = b = 0
    left = right = b""
    while True:
        if a and b and left == right:
            end = hunk.stream + a == len(stream)
            met = hunk.stream + a < len(stream) and hunk.prompt + b < len(prompt)
            if end or (met and stream[hunk.stream + a] == prompt[hunk.prompt + b]):
                return Hunk(hunk.stream, hunk.stream + a, hunk.prompt, hunk.prompt + b, True)
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
    rows = [*run(DiffOp.EQUAL, stream[max(0, hunk.stream - _AROUND) : hunk.stream], max(0, hunk.stream - _AROUND))]
    fine = max(len(ours), len(theirs)) <= WINDOW
    at = 0
    for a, b, c, d in unequal(ours.tolist(), theirs.tolist()) if fine else [(0, len(ours), 0, len(theirs))]:
        rows += run(DiffOp.EQUAL, ours[at:a], hunk.stream + at)
        rows += run(DiffOp.REMOVED, ours[a:b], hunk.stream + a)
        rows += run(DiffOp.ADDED, theirs[c:d], hunk.prompt + c)
        at = b
    rows += run(DiffOp.EQUAL, ours[at:], hunk.stream + at)
    if hunk.meets:
        after = stream[hunk.stream_stop : hunk.stream_stop + _AROUND]
        same = common_prefix(after, prompt[hunk.prompt_stop : hunk.prompt_stop + _AROUND])
        rows += run(DiffOp.EQUAL, after[:same], hunk.stream_stop)
    return tuple(rows)


def token_text(vocabulary: Vocabulary, index: int) -> str:
    """A token's text on its own; bytes in hexadecimal where they are no whole characters."""
    raw = vocabulary.token_bytes(index)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return f"⟨{raw.hex(' ')}⟩"


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
    for name, line, end in zip_longest(("stream", "next prompt"), lines.values(), ended):
        out.append(f"{name:<12} {begun}{''.join(line or ())}{'' if end else ' …'}")
    return [*out, f"{'':<12} {' -> '.join(ids)}"]


def one_line(text: str) -> str:
    """Text on one line, with nothing in it that a terminal would act upon."""
    return visible(text).replace("\n", "⏎").replace("\t", "⇥")
