"""Evidence in what was sampled: reasoning on one side only, ids that the client lost, another stop token."""

from __future__ import annotations

from typing import Final

import numpy as np

from ..study.turns import common_prefix
from ..tokens.alignment import Hunk
from ..tokens.tokenizer import Ids
from .break_case import Case, Evidence, counted
from .finding import Cause
from .resync import next_hunk
from .texts import quoted, text_of

_ALIKE: Final = 12
"""Characters that texts share where they go on alike."""

# -- reasoning


def stripped_reasoning(case: Case) -> Evidence | None:
    """A block of reasoning, empty or not, past which both sides go on alike."""
    ours, theirs, _ = case.sides()
    at = len(case.text.lead)
    for opening, closing in case.markup.reasoning:
        for one, other, lost in ((ours, theirs, True), (theirs, ours, False)):
            found = _block(one, other, at, opening, closing, case.text.ended or not lost)
            if found is None:
                continue
            body, end = found
            verb = "is in the stream and not in the next prompt" if lost else "is in the next prompt only"
            size = f"reasoning of {len(body.strip()):,} characters" if body.strip() else "an empty block of reasoning"
            detail = f"{size} ({quoted(opening + body + closing)}) {verb}"
            return Evidence(Cause.STRIPPED_REASONING, detail, _without(case, one, end) if lost else None)
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
    if close < 0 and len(body.strip()) >= _ALIKE and body.strip()[:_ALIKE] in other[at:]:
        return None  # both say it: a tag alone is not a block
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
    return (body, end) if common_prefix(after, rest.lstrip()) >= min(_ALIKE, len(after)) else None


def _without(case: Case, text: str, end: int) -> Hunk:
    """The difference that ends where the text goes on after a block, which may repeat what comes after it."""
    lead = len(case.text.lead)
    solid = len(text) - len(text[end:].lstrip())
    at = case.hunk.other_start
    after = case.token_after(end - lead)
    for stop in (after, case.token_after(solid - lead)):
        for shared in range(4):  # a little of what follows may be before the difference: <|channel|>
            met = stop + shared
            if shared > at or at >= len(case.prompt) or met >= len(case.stream):
                break
            begun = np.array_equal(case.stream[stop:met], case.prompt[at - shared : at])
            if begun and case.stream[met] == case.prompt[at]:
                return Hunk(case.hunk.start, met, at, at)
    return next_hunk(case.stream, case.prompt, case.hunk.start, at, beyond=after)


# -- endings


def lost_by_client(case: Case, anchor: Ids, shown: Evidence) -> Evidence | None:
    """A client that lost part of the stream: it explains the break where the break lies in what was lost."""
    size = min(len(anchor), len(case.stream))
    wrong = np.flatnonzero(anchor[:size] != case.stream[:size])
    zeroed = len(wrong) and not anchor[:size][wrong].any()
    if len(wrong) and not zeroed:
        return None
    kept = int(wrong[0]) if zeroed else size
    if kept > case.hunk.start or (not zeroed and kept == len(case.stream)):
        return None
    lost = len(wrong) if zeroed else len(case.stream) - kept
    what = f"has zeros for {lost:,} ids of the stream" if zeroed else f"ends {lost:,} ids before the stream does"
    if not len(anchor):
        what = "is empty"
    seen = "" if shown.cause is Cause.UNKNOWN else f"; rendering it again then shows: {shown.cause}"
    detail = f"the client's anchor {what}, so the history could not be carried on from its ids{seen}"
    return Evidence(Cause.ZEROED_ANCHOR, detail, shown.hunk)


def lost_completion(case: Case) -> Evidence | None:
    """No stream at all, zeros for ids, or the last completion missing whole."""
    if not len(case.stream):
        return Evidence(Cause.ZEROED_ANCHOR, "the stream is empty, though there was a request before")
    at, region = case.hunk.start, case.region
    following = case.prompt[case.hunk.other_start : case.hunk.other_start + 8]
    if len(following) >= 4 and not following[:4].any() and case.stream[at : at + 4].all():
        return Evidence(Cause.ZEROED_ANCHOR, "the next prompt has zeros where the stream has ids")
    if region is None or region.last is None or region.last[0] < at:
        return None
    begun = text_of(case.vocabulary, case.stream[at : min(region.last[0], at + 64)]).strip()
    if begun and begun not in {opening for opening, _ in case.markup.reasoning}:  # which the prompt had opened
        return None
    completion = case.stream[region.last[0] : region.last[1]]
    solid = next((index for index in following.tolist() if case.vocabulary.token_bytes(index).strip()), None)
    if solid is None or solid not in case.turns.structural or solid in completion[:-1].tolist() or len(completion) < 2:
        return None
    name = case.vocabulary.token_bytes(solid).decode("utf-8", "replace")
    missing = f"the last completion, {counted(len(completion))}, is missing whole"
    return Evidence(Cause.ZEROED_ANCHOR, f"{missing}: the next prompt has {name} where it began")


def stop_token(case: Case) -> Evidence | None:
    """Another control token where a completion ends."""
    at, other = case.hunk.start, case.hunk.other_start
    region = case.region
    end = len(case.stream) if region is None else region.completion[1] if region.completion is not None else -1
    if at != end - 1 or other == len(case.prompt):
        return None
    tokens = int(case.stream[at]), int(case.prompt[other])
    if not case.turns.structural.issuperset(tokens):
        return None
    ours, theirs = (case.vocabulary.added[index].text for index in tokens)
    hunk = Hunk(at, at + 1, other, other + 1) if at + 1 == len(case.stream) else None
    return Evidence(Cause.STOP_TOKEN, f"the turn ended with {ours}, and the next prompt has {theirs} there", hunk)
