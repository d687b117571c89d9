"""Evidence that a block of reasoning is on one side only."""

from __future__ import annotations

import numpy as np

from ..token_diff import Hunk, next_hunk, shared_start
from .case import Case, Finding, quoted
from .causes import BreakCause


def reasoning(case: Case) -> Finding | None:
    """A block of reasoning, empty or not, past which both sides go on alike."""
    ours, theirs, _ = case.sides()
    at = len(case.text.lead)
    for opening, closing in case.tags:
        for one, other, lost in ((ours, theirs, True), (theirs, ours, False)):
            found = _block(one, other, at, opening, closing, case.text.ended or not lost)
            if found is None:
                continue
            body, end = found
            verb = "is in the stream and not in the next prompt" if lost else "is in the next prompt only"
            size = f"reasoning of {len(body.strip()):,} characters" if body.strip() else "an empty block of reasoning"
            detail = f"{size} ({quoted(opening + body + closing)}) {verb}"
            return Finding(BreakCause.STRIPPED_REASONING, detail, _without(case, one, end) if lost else None)
    return None


def _block(one: str, other: str, at: int, opening: str, closing: str, whole: bool) -> tuple[str, int] | None:
    """A block of reasoning that `one` has around character `at`, and `other` has not: its body and its end.

    Past the block both have to go on alike; of reasoning that was emptied, the tags may be left. `whole` says that
    `one` is all there is: reasoning that it does not close ends with it.
    """
    begin = one.find(opening, max(0, at - len(opening) + 1), at + len(opening) + 8)
    if begin < 0 or one[at:begin].strip():
        begin = one.rfind(opening, 0, at)
        if begin < 0 or closing in one[begin:at]:
            return None
    start = begin + len(opening)
    close = one.find(closing, start)
    if close < 0 and not whole:
        return None
    body, end = (one[start:close], close + len(closing)) if close >= 0 else (one[start:], len(one))
    after = one[end:].lstrip()
    if start <= at and other.startswith(opening, begin):
        stop = other.find(closing, start)
        if not body.strip() or stop < 0 or other[start:stop].strip():
            return None
        rest = other[stop + len(closing) :]
        end = close if close >= 0 else end
    else:
        rest = other[min(begin, at) :].lstrip().removeprefix(closing)
    if rest.startswith(opening):
        return None
    return (body, end) if shared_start(after, rest.lstrip()) >= min(12, len(after)) else None


def _without(case: Case, text: str, end: int) -> Hunk:
    """The difference that ends where the text goes on after a block, which may repeat what comes after it."""
    lead = len(case.text.lead)
    solid = len(text) - len(text[end:].lstrip())
    at = case.hunk.prompt
    after = case.token_after(end - lead)
    for stop in (after, case.token_after(solid - lead)):
        for shared in range(4):  # of what follows, a little may stand before the difference: <|channel|>
            met = stop + shared
            if shared > at or at >= len(case.prompt) or met >= len(case.stream):
                break
            begun = np.array_equal(case.stream[stop:met], case.prompt[at - shared : at])
            if begun and case.stream[met] == case.prompt[at]:
                return Hunk(case.hunk.stream, met, at, at, True)
    return next_hunk(case.stream, case.prompt, case.hunk.stream, at, beyond=after)
