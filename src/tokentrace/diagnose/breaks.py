"""Why a prompt does not begin with the stream so far: a cause, and the tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from ..errors import TrajectoryError, kind_of
from ..show.alignment import Hunk, hunks
from ..show.document import Contrast, Document
from ..show.results import excerpt
from ..show.terminal import plain_view
from ..showing import ShowsItself
from ..tokens.ids import check_ids, common_prefix
from ..tokens.tokenizer import Ids, Tokenizer
from .break_checks import Case
from .conversation_diff import changed_tools, find_cause
from .finding import Cause, Finding
from .message_keys import chain, shared_prefix
from .records import Line, Mask

_LATER = 8
_CONTEXT = frozenset(
    {Cause.CHANGED_TOOLS, Cause.CHANGED_SYSTEM, Cause.COMPACTION, Cause.REWRITTEN_CALL, Cause.UNKNOWN}
)


@dataclass(frozen=True, slots=True, eq=False)
class Break(ShowsItself):
    """Where and why a prompt diverges from the stream. ``str()`` gives a readable report.

    `position` is the first id that differs; both ranges end where the sides agree again.
    `region`: such as ``completion 2``. `later` has the next few causes.
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
        return self.cause.advice

    def to_json(self) -> dict[str, Any]:
        names = ("cause", "words", "position", "region", "advice", "stream_range", "prompt_range", "later")
        return {"extends": False} | {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        return plain_view(self)

    def contrast(self, name: str = "stream → next prompt") -> Contrast:
        hunk, names = Hunk(*self.stream_range, *self.prompt_range), ("stream", "next prompt")
        return replace(excerpt(self.tokenizer, self.stream, self.prompt, hunk, names), name=name)

    def document(self, tokenizer: Tokenizer | None = None) -> Document:
        later = ", ".join(dict.fromkeys(map(str, self.later)))
        region = f" ({self.region})" if self.region else ""
        place = f"break at token {self.position:,} of {len(self.stream):,}{region}"
        summary = [f"{place}: {self.cause}", self.words]
        summary += [f"further on: {later}"] * bool(later) + [f"to do: {self.advice}"]
        title, contrasts = f"Break: {self.cause}", [self.contrast()]
        return Document(title, "tokentrace check", summary=summary, tone="bad", contrasts=contrasts)


def explain_break(
    stream: Sequence[int] | Ids,
    next_prompt: Sequence[int] | Ids,
    tokenizer: Any,
    *,
    sampled: Sequence[bool] | Mask | None = None,
    anchor: Sequence[int] | Ids | None = None,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> Break | None:
    """Find where and why `next_prompt` does not begin with `stream`; None if it does.

    `tokenizer` is a `Tokenizer` or, better, a `Renderer`, whose parser then reads calls.
    `sampled` marks the stream's sampled tokens. `anchor` has the ids that the client took for
    the stream. `before` and `after` are the conversations of both requests (``{"messages": […],
    "tools": […]}``, the first with its reply if known).

    An empty stream is a break only if `sampled` or `before` shows that there was a request.
    Raises TrajectoryError if arguments are malformed or contradict each other.

    >>> from tokentrace import create_renderer
    >>> from tokentrace.pocket import POCKET
    >>> tokenizer = create_renderer(POCKET).tokenizer
    >>> stream, prompt = (tokenizer.encode(f'{{"dry_run": {word}}}<|end|>') for word in ("false", "False"))
    >>> explain_break(stream, prompt, tokenizer).cause
    <Cause.BOOLEAN_CASE: 'boolean_case'>
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
        problem = f"sampled has shape {mask.shape}, the stream {len(ours)} tokens; pass one entry per token"
        raise TrajectoryError(problem)
    if not isinstance(getattr(tokenizer, "tokenizer", tokenizer), Tokenizer):
        raise TrajectoryError(f"tokenizer must be a Tokenizer or a Renderer, not {kind_of(tokenizer)}")
    position = common_prefix(ours, theirs)
    if position == len(ours) and (len(ours) or not len(theirs) or (mask is None and before is None)):
        return None
    case = Case(ours, theirs, tokenizer, next(hunks(ours, theirs, position, position)), mask)
    match = case.explain()
    cause, words = match.cause, case.words(match)
    if cause in _CONTEXT and before is not None and after is not None:
        cause, words = _prove(cause, words, before, after)
    anchored = ours if anchor is None else check_ids(anchor, "anchor", error=TrajectoryError)
    same = common_prefix(anchored, ours)
    if same <= position and same < len(ours) and not anchored[same:].any():
        words = f"the client's anchor has {same:,} of {len(ours):,} ids"
        cause, words = Cause.ZEROED_ANCHOR, f"{words}; it rendered the history again: {cause}"
    hunk = match.hunk or case.hunk
    later = [
        Case(ours, theirs, tokenizer, one, mask, reach=4096).explain().cause
        for one in islice(hunks(ours, theirs, hunk.stop, hunk.other_stop), _LATER)
        if match.covered <= one.start < len(ours)
    ]
    ranges = (position, hunk.stop), (position, hunk.other_stop)
    return Break(cause, words, position, *ranges, case.region, tuple(later), ours, theirs, case.tokenizer)


def _prove(cause: Cause, words: str, before: Line, after: Line) -> tuple[Cause, str]:
    change = conversation_change(before, after)
    if change is not None:
        vague = {Cause.RETRY} if cause is Cause.UNKNOWN else {Cause.RETRY, Cause.SUB_AGENT}
        return (cause, words) if change.cause in vague else (change.cause, change.words)
    no_tools = before.get("tools") is None and after.get("tools") is None
    if cause in (Cause.UNKNOWN, Cause.REWRITTEN_CALL) or (cause is Cause.CHANGED_TOOLS and no_tools):
        return cause, words
    words = f"it looks like {cause}, but messages and tools of both requests are the same: {words}"
    return Cause.UNKNOWN, words


def conversation_change(before: Line, after: Line, recent: Sequence[Sequence[Any]] = ()) -> Finding | None:
    """What changed in messages and tools between two requests; None if nothing did."""
    try:
        recorded, sent = before.get("messages") or (), after.get("messages") or ()
        shared = shared_prefix(chain(b"", sent)[1:], chain(b"", recorded)[1:])
        tools, tools_before = list(after.get("tools") or ()), list(before.get("tools") or ())
        if shared == len(recorded):
            return changed_tools(tools, tools_before) if tools != tools_before else None
        return find_cause(sent, recorded, shared, recent=recent)
    except (AttributeError, TypeError, ValueError, RecursionError):  # messages may hold anything
        return None
