"""Why a prompt does not begin with the stream so far: a cause, and the tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import TrajectoryError, kind_of
from ..show.alignment import Hunk
from ..show.document import Card, Contrasts, Document
from ..showing import ShowsItself
from ..tokens.ids import check_ids, common_prefix
from ..tokens.tokenizer import Ids, Tokenizer
from .break_checks import Case, Match, explain
from .conversation_diff import changed_tools, find_cause
from .finding import Cause, Finding
from .message_keys import chain
from .token_text import AROUND, Parts, contrast, hunks, one_line

_LATER: Final = 8
"""Further differences that are explained."""
_CONTEXT: Final = frozenset(
    {Cause.CHANGED_TOOLS, Cause.CHANGED_SYSTEM, Cause.COMPACTION, Cause.REWRITTEN_CALL, Cause.UNKNOWN}
)
"""Causes that comparing the conversations proves or disproves."""


@dataclass(frozen=True, slots=True, eq=False)
class Break(ShowsItself):
    """Where and why a prompt leaves the stream. ``str()`` of it is a report to read.

    `position` is the first id that differs; both ranges end where the sides agree again.
    `region` is a part of the stream, ``completion 2`` say. `later` are the next few causes.
    """

    cause: Cause
    words: str
    position: int
    stream_range: tuple[int, int]
    prompt_range: tuple[int, int]
    region: str | None
    later: tuple[Cause, ...]
    stream: Ids
    prompt: Ids
    tokenizer: Tokenizer

    @property
    def advice(self) -> str:
        """What to do."""
        return self.cause.advice

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        names = ("cause", "words", "position", "region", "advice", "stream_range", "prompt_range", "later")
        return {name: getattr(self, name) for name in names}

    def parts(self) -> Parts:
        """The tokens of the stream and of the prompt around the difference."""
        hunk = Hunk(*self.stream_range, *self.prompt_range)
        return contrast(self.tokenizer.vocabulary, self.stream, self.prompt, hunk, fine=True)

    def __str__(self) -> str:
        parts = self.parts()
        lines = {"stream": "", "next prompt": ""}
        for left, right in parts:
            for name, side in zip(lines, (left, left if right is None else right), strict=True):
                text = [one_line(text) for _, text in side]
                lines[name] += "".join(text if right is None else (f"[{one}]" for one in text))
        first = next((pair for pair in parts if pair[1] is not None), ([], []))
        ids = [", ".join(f"{index} ({one_line(text)})" for index, text in (side or [])[:6]) for side in first]
        ellipsis = "… " if self.position > AROUND else ""
        out = [f"break at token {self.position:,} of {len(self.stream):,}"]
        out[0] += f"{f' ({self.region})' if self.region else ''}: {self.cause}"
        out += [f"  {one_line(self.words)}", *(f"  {name:<12} {ellipsis}{line}" for name, line in lines.items())]
        out.append(f"  {'':<12} {' -> '.join(side or 'nothing' for side in ids)}")
        if self.later:
            times = [str(cause) if n == 1 else f"{cause} × {n}" for cause, n in Counter(self.later).items()]
            out.append(f"  further on: {', '.join(times)}")
        return "\n".join([*out, f"  to do: {self.advice}"])

    def add_to(self, contrasts: Contrasts, name: str) -> str:
        """Add the difference to a document; returns the link to it."""
        first = max(0, self.position - AROUND)
        names = ("stream", "next prompt")
        return contrasts.add_parts(name, self.parts(), names, self.words, first, self.tokenizer)

    def document(self, tokenizer: Tokenizer | None = None) -> Document:
        """The document of the break."""
        contrasts = Contrasts()
        self.add_to(contrasts, "stream → next prompt")
        return Document(
            f"Break: {self.cause}",
            "tokentrace check",
            summary=[self.words, f"To do: {self.advice}"],
            cards=[
                Card("At token", f"{self.position:,}", f"of {len(self.stream):,}"),
                Card("Next prompt", f"{len(self.prompt):,}", "tokens"),
                Card("Where", self.region or "–"),
                Card("Further on", f"{len(self.later)}", ", ".join(dict.fromkeys(map(str, self.later)))),
            ],
            **contrasts.content(),
        )


def explain_break(
    stream: Sequence[int] | Ids,
    next_prompt: Sequence[int] | Ids,
    tokenizer: Any,
    *,
    sampled: Sequence[bool] | npt.NDArray[np.bool_] | None = None,
    anchor: Sequence[int] | Ids | None = None,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> Break | None:
    """Where and why `next_prompt` does not begin with `stream`; None if it does.

    `tokenizer` is a `Tokenizer` or, better, a `Renderer`, whose parser then reads the calls.
    `sampled` marks the sampled tokens of the stream, `anchor` are the ids that the client took for
    it. `before` and `after` are the conversations of the two requests (``{"messages": […],
    "tools": […]}``, the first with its reply if known), which are then compared.

    An empty stream is a break only if `sampled` or `before` say that there was a request.
    Raises TrajectoryError for arguments that are not ids, or do not fit each other.

    >>> from tokentrace import create_renderer
    >>> from tokentrace.pocket import POCKET
    >>> tokenizer = create_renderer(POCKET).tokenizer
    >>> stream = tokenizer.encode('<tool_call>\\n{"name": "rm", "arguments": {"dry_run": false}}\\n</tool_call><|end|>')
    >>> prompt = tokenizer.encode('<tool_call>\\n{"name": "rm", "arguments": {"dry_run": False}}\\n</tool_call><|end|>')
    >>> broken = explain_break(stream, prompt, tokenizer)
    >>> str(broken.cause), broken.words
    ('boolean or None case', "the stream has `false`, the next prompt `False`: the value went through Python's str()")
    >>> explain_break(stream, stream, tokenizer) is None
    True
    """
    ours = check_ids(stream, "stream", error=TrajectoryError)
    theirs = check_ids(next_prompt, "next_prompt", error=TrajectoryError)
    for name, request in (("before", before), ("after", after)):
        if request is not None and not isinstance(request, Mapping):
            raise TrajectoryError(f"{name} must be a mapping with messages, not {kind_of(request)}")
    try:
        mask = None if sampled is None else np.asarray(sampled, np.bool_)
    except (TypeError, ValueError) as error:
        raise TrajectoryError(f"sampled must be one bool per token, not {kind_of(sampled)}") from error
    if mask is not None and mask.shape != ours.shape:
        words = f"sampled has shape {mask.shape}, the stream {len(ours)} tokens; give one entry per token"
        raise TrajectoryError(words)
    if not isinstance(tokenizer, Tokenizer) and not isinstance(getattr(tokenizer, "tokenizer", None), Tokenizer):
        raise TrajectoryError(f"tokenizer must be a Tokenizer or a Renderer, not {kind_of(tokenizer)}")
    position = common_prefix(ours, theirs)
    if position == len(ours) and (len(ours) or not len(theirs) or (mask is None and before is None)):
        return None
    case = Case(ours, theirs, tokenizer, next(hunks(ours, theirs, position, position)), mask)
    match = _prove(explain(case), before, after)
    if anchor is not None:
        match = _lost_by_client(match, check_ids(anchor, "anchor", error=TrajectoryError), ours, position)
    hunk = match.hunk or case.hunk
    return Break(
        match.cause,
        match.words,
        position,
        (position, hunk.stop),
        (position, hunk.other_stop),
        case.region,
        tuple(_later(case, hunk, match.covered, mask)),
        ours,
        theirs,
        case.tokenizer,
    )


def _prove(match: Match, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> Match:
    """What the tokens suggest, proven or disproven by the two conversations."""
    if match.cause not in _CONTEXT or before is None or after is None:
        return match
    change = conversation_change(before, after)
    vague = (Cause.RETRY,) if match.cause is Cause.UNKNOWN else (Cause.RETRY, Cause.SUB_AGENT)
    if change is not None and change.cause not in vague:
        return match._replace(cause=change.cause, words=change.words)
    no_tools = before.get("tools") is None and after.get("tools") is None
    proven = match.cause in (Cause.UNKNOWN, Cause.REWRITTEN_CALL) or (match.cause is Cause.CHANGED_TOOLS and no_tools)
    if change is not None or proven:
        return match
    words = f"it looks like {match.cause}, but messages and tools of both requests are the same: {match.words}"
    return match._replace(cause=Cause.UNKNOWN, words=words)


def _lost_by_client(match: Match, anchor: Ids, stream: Ids, position: int) -> Match:
    """A client whose anchor ends before the break, or has zeros there."""
    same = common_prefix(anchor, stream)
    if same > position or same == len(stream) or anchor[same:].any():
        return match
    words = f"the client's anchor has {same:,} of {len(stream):,} ids, so it rendered the history again: {match.cause}"
    return match._replace(cause=Cause.ZEROED_ANCHOR, words=words)


def conversation_change(
    before: Mapping[str, Any], after: Mapping[str, Any], recent: Sequence[Sequence[Any]] = ()
) -> Finding | None:
    """What changed in messages and tools between two requests; None if nothing did."""
    try:
        recorded, sent = before.get("messages") or (), after.get("messages") or ()
        ours, theirs = (chain(b"", messages)[1:] for messages in (sent, recorded))
        pairs = enumerate(zip(ours, theirs, strict=False))
        shared = next((at for at, (one, other) in pairs if one != other), min(len(ours), len(theirs)))
        tools, tools_before = list(after.get("tools") or ()), list(before.get("tools") or ())
        if shared == len(recorded):
            return changed_tools(tools, tools_before) if tools != tools_before else None
        return find_cause(sent, recorded, shared, recent=recent)
    except (AttributeError, TypeError, ValueError, RecursionError):  # their messages may hold anything
        return None


def _later(case: Case, hunk: Hunk, covered: int, mask: Any) -> Iterator[Cause]:
    """The causes of the next few differences after what was compared as a whole."""
    for later in islice(hunks(case.stream, case.prompt, hunk.stop, hunk.other_stop), _LATER):
        if covered <= later.start < len(case.stream):
            yield explain(Case(case.stream, case.prompt, case.model, later, mask, back=1024, forward=4096)).cause
