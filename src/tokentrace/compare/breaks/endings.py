"""Evidence at the end of a completion: ids that the client lost, and another stop token."""

from __future__ import annotations

import numpy as np

from ...tokens.tokenizer import Ids
from ..token_diff import Hunk, text_of
from .case import Case, Finding, counted
from .causes import BreakCause


def lost_by_client(case: Case, anchor: Ids, shown: Finding) -> Finding | None:
    """A client that lost part of the stream: it explains the break where the break lies in what was lost."""
    size = min(len(anchor), len(case.stream))
    wrong = np.flatnonzero(anchor[:size] != case.stream[:size])
    zeroed = len(wrong) and not anchor[:size][wrong].any()
    if len(wrong) and not zeroed:
        return None
    kept = int(wrong[0]) if zeroed else size
    if kept > case.hunk.stream or (not zeroed and kept == len(case.stream)):
        return None
    lost = len(wrong) if zeroed else len(case.stream) - kept
    what = f"has zeros for {lost:,} ids of the stream" if zeroed else f"ends {lost:,} ids before the stream does"
    if not len(anchor):
        what = "is empty"
    seen = "" if shown.cause is BreakCause.UNKNOWN else f"; rendering it again then shows: {shown.cause}"
    detail = f"the client's anchor {what}, so the history could not be carried on from its ids{seen}"
    return Finding(BreakCause.ZEROED_ANCHOR, detail, shown.hunk)


def lost_completion(case: Case) -> Finding | None:
    """No stream at all, zeros for ids, or the last completion missing whole."""
    if not len(case.stream):
        return Finding(BreakCause.ZEROED_ANCHOR, "the stream is empty, though there was a request before")
    at, region = case.hunk.stream, case.region
    zeros = case.prompt[case.hunk.prompt : case.hunk.prompt + 4]
    if len(zeros) == 4 and not zeros.any() and case.stream[at : at + 4].all():
        return Finding(BreakCause.ZEROED_ANCHOR, "the next prompt has zeros where the stream has ids")
    if region is None or region.last is None or region.last[0] < at:
        return None
    begun = text_of(case.vocabulary, case.stream[at : min(region.last[0], at + 64)]).strip()
    if begun and begun not in {opening for opening, _ in case.tags}:  # reasoning that the prompt had opened
        return None
    completion = case.stream[region.last[0] : region.last[1]]
    rest = case.prompt[case.hunk.prompt : case.hunk.prompt + 8].tolist()
    solid = next((index for index in rest if case.vocabulary.token_bytes(index).strip()), None)
    if solid is None or solid not in case.turns.structural or solid in completion[:-1].tolist() or len(completion) < 2:
        return None
    name = case.vocabulary.token_bytes(solid).decode("utf-8", "replace")
    missing = f"the last completion, {counted(len(completion))}, is missing whole"
    return Finding(BreakCause.ZEROED_ANCHOR, f"{missing}: the next prompt has {name} where it began")


def stop_token(case: Case) -> Finding | None:
    """Another control token where a completion ends."""
    at, theirs = case.hunk.stream, case.prompt[case.hunk.prompt : case.hunk.prompt + 1].tolist()
    region = case.region
    end = len(case.stream) if region is None else region.completion[1] if region.completion is not None else -1
    if at != end - 1 or not theirs:
        return None
    ours = int(case.stream[at])
    if ours not in case.turns.structural or theirs[0] not in case.turns.structural:
        return None
    names = [case.vocabulary.added[index].text for index in (ours, theirs[0])]
    hunk = Hunk(at, at + 1, case.hunk.prompt, case.hunk.prompt + 1, True) if at + 1 == len(case.stream) else None
    said = f"the turn ended with {names[0]}, and the next prompt has {names[1]} there"
    return Finding(BreakCause.STOP_TOKEN, said, hunk)
