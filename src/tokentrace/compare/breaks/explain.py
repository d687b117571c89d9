"""`explain_break`: the checks, the most specific first, and the report they end in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...errors import TokentraceError, TrajectoryError, shown
from ...settings import instance
from ...tokens.differences import common_prefix
from ...tokens.ids import check_ids
from ...tokens.kinds import Kind
from ...tokens.tokenizer import Ids, Tokenizer
from ...tokens.vocabulary import Vocabulary
from ..token_diff import DiffOp, DiffRow, diff_lines, diff_rows, hunks_after, next_hunk, one_line, text_of, text_window
from .calls import changed_call, lost_call
from .case import Case, Finding, Region, quoted
from .causes import ADVICE, BreakCause
from .context import compaction, cut_short, system, tools
from .conversations import compared
from .endings import lost_by_client, lost_completion, stop_token
from .markup import CALL_TAGS, REASONING_TAGS
from .reasoning import reasoning as stripped_reasoning
from .spelling import boolean, json_format, remerge, whitespace
from .turn_heads import TurnHeads

CHECKS: Final[tuple[Callable[[Case], Finding | None], ...]] = (
    remerge,
    stripped_reasoning,
    lost_completion,
    stop_token,
    compaction,
    boolean,
    json_format,
    changed_call,
    whitespace,
    tools,
    system,
    lost_call,
    cut_short,
)
"""What is looked for, the most specific first."""

_LATER: Final = 8
"""Further differences that are looked into."""


@dataclass(frozen=True, slots=True)
class Break:
    """Where and why a prompt stops to follow the stream. ``str()`` of it is a report to read.

    `position` is the first id that differs. `stream_range` and `prompt_range` are the tokens that stand against
    each other until both sides agree again (they begin at `position`). `before_text` and `after_text` are the
    same as text, with a little around them, cut short where long. `region` says in which part of the stream it
    lies, where that is known; completions are counted from 1. `later` are the causes of further differences
    up to the end of the stream (the first few). `tokens` is the diff in rows.
    """

    cause: BreakCause
    position: int
    stream_length: int
    prompt_length: int
    stream_range: tuple[int, int]
    prompt_range: tuple[int, int]
    before_text: str
    after_text: str
    detail: str
    advice: str
    region: str | None
    tokens: tuple[DiffRow, ...]
    later: tuple[BreakCause, ...] = ()

    def __str__(self) -> str:
        where = "" if self.region is None else f" ({self.region})"
        lines = [
            f"break at token {self.position:,} of {self.stream_length:,}{where}: {self.cause}",
            f"  {one_line(self.detail)}",
        ]
        last = self.tokens[-1] if self.tokens else None
        more = last.count if last is not None and last.op is DiffOp.EQUAL and last.start == self.stream_range[1] else 0
        ended = (self.stream_range[1] + more >= self.stream_length, self.prompt_range[1] + more >= self.prompt_length)
        lines += [f"  {line}" for line in diff_lines(self.tokens, ended)]
        if self.later:
            said = [str(cause) if n == 1 else f"{cause} × {n}" for cause, n in Counter(self.later).items()]
            lines.append(f"  further on: {', '.join(said)}")
        return "\n".join([*lines, f"  to do: {self.advice}"])


def explain_break(
    stream: Sequence[int] | Ids,
    next_prompt: Sequence[int] | Ids,
    tokenizer: Any,
    *,
    sampled: Sequence[bool] | npt.NDArray[np.bool_] | None = None,
    kinds: Sequence[int] | npt.NDArray[np.uint8] | None = None,
    reasoning: tuple[str, str] | None = None,
    anchor: Sequence[int] | Ids | None = None,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> Break | None:
    """Where and why `next_prompt` does not begin with `stream`; None where it does.

    `tokenizer` is a `Tokenizer`, or a `Renderer`, whose grammar then says how reasoning and calls are set off.
    `sampled` (or `kinds`) marks the tokens of the stream that were sampled: with it the report names the region, and
    a completion that is missing can be told from a history that was rewritten. `reasoning` are the texts that open
    and close reasoning, where they are none of the usual ones. `anchor` is what the client took for the stream.
    `before` and `after` are the conversations of the two requests (``{"messages": […], "tools": […]}``): changed
    tools, changed system messages and compaction are then proven by comparing them.

    Every prompt begins with an empty stream. Where `sampled`, `kinds` or `before` say that there was a request
    before, it is a zeroed anchor. TrajectoryError where the arguments are no ids, or do not fit each other.

    >>> from tokentrace import create_renderer
    >>> from tokentrace.pocket import POCKET
    >>> tokenizer = create_renderer(POCKET).tokenizer
    >>> stream = tokenizer.encode('<tool_call>\\n{"name": "rm", "arguments": {"dry_run": false}}\\n</tool_call><|end|>')
    >>> prompt = tokenizer.encode('<tool_call>\\n{"name": "rm", "arguments": {"dry_run": False}}\\n</tool_call><|end|>')
    >>> found = explain_break(stream, prompt, tokenizer)
    >>> found.cause.value, found.detail
    ('boolean or None case', "the stream has `false`, the next prompt `False`: the value went through Python's str()")
    >>> explain_break(stream, stream, tokenizer) is None
    True
    """
    ours = check_ids(stream, "stream", error=TrajectoryError)
    theirs = check_ids(next_prompt, "next_prompt", error=TrajectoryError)
    mask = _mask(sampled, kinds, len(ours))
    for name, request in (("before", before), ("after", after)):
        if request is not None:
            instance(name, request, Mapping, TrajectoryError)  # type: ignore[type-abstract]
    if reasoning is not None and not _are_tags(reasoning):
        raise TrajectoryError(f"reasoning is two strings, what opens it and what closes it, not {shown(reasoning)}")
    vocabulary = _vocabulary(tokenizer)
    own_reasoning, own_calls = _own_tags(tokenizer)
    position = common_prefix(ours, theirs)
    if position == len(ours) and (len(ours) or not len(theirs) or (mask is None and before is None)):
        return None
    hunk = next_hunk(ours, theirs, position, position)
    case = Case(
        stream=ours,
        prompt=theirs,
        vocabulary=vocabulary,
        turns=TurnHeads.of(vocabulary),
        hunk=hunk,
        text=text_window(vocabulary, ours, theirs, hunk),
        region=Region.at(mask, position),
        tags=(*([] if reasoning is None else [reasoning]), *own_reasoning, *REASONING_TAGS),
        call_tags=(*own_calls, *CALL_TAGS),
        before=before,
        after=after,
    )
    finding = _explain(case)
    if anchor is not None:
        finding = lost_by_client(case, check_ids(anchor, "anchor", error=TrajectoryError), finding) or finding
    case = replace(case, hunk=finding.hunk or hunk)
    before_text, after_text = _excerpts(case)
    return Break(
        cause=finding.cause,
        position=position,
        stream_length=len(ours),
        prompt_length=len(theirs),
        stream_range=(position, case.hunk.stream_stop),
        prompt_range=(position, case.hunk.prompt_stop),
        before_text=before_text,
        after_text=after_text,
        detail=finding.detail,
        advice=ADVICE[finding.cause],
        region=None if case.region is None else case.region.name,
        tokens=diff_rows(vocabulary, ours, theirs, case.hunk),
        later=tuple(_later(case, finding, mask)),
    )


# -- stages


def _explain(case: Case) -> Finding:
    found = next((finding for check in CHECKS if (finding := check(case)) is not None), None)
    return compared(case, found or _unknown(case))


def _unknown(case: Case) -> Finding:
    ours, theirs = case.hunk_texts()
    if not theirs and case.hunk.prompt == len(case.prompt):
        ids = len(case.stream) - case.hunk.stream
        return Finding(
            BreakCause.UNKNOWN,
            f"the next prompt ends where the stream goes on for {ids:,} tokens: a request was repeated, or the "
            "history taken back",
        )
    role = case.turns.role(case.stream, case.hunk.stream)
    of = f" in text of the {role}" if role else ""
    return Finding(
        BreakCause.UNKNOWN, f"the stream has {quoted(ours)}, the next prompt {quoted(theirs)}{of}; nothing shows why"
    )


def _later(case: Case, finding: Finding, mask: npt.NDArray[np.bool_] | None) -> Iterator[BreakCause]:
    """The causes of the next few differences, but for those in what the finding compared as a whole."""
    covered = case.token_after(finding.until - len(case.text.lead))
    for hunk in islice(hunks_after(case.hunk, case.stream, case.prompt), _LATER):
        if hunk.stream >= covered:
            text = text_window(case.vocabulary, case.stream, case.prompt, hunk, back=1024, forward=4096)
            region = Region.at(mask, hunk.stream)
            yield _explain(replace(case, hunk=hunk, text=text, region=region, before=None, after=None)).cause


def _excerpts(case: Case, around: int = 16, most: int = 400) -> tuple[str, str]:
    def excerpt(ids: Ids, start: int, stop: int) -> str:
        first = max(0, start - around)
        if stop - start <= most:
            return text_of(case.vocabulary, ids[first : stop + around])
        head = text_of(case.vocabulary, ids[first : start + most // 2])
        tail = text_of(case.vocabulary, ids[stop - most // 2 : stop + around])
        return f"{head} … {stop - start - most:,} tokens … {tail}"

    hunk = case.hunk
    return excerpt(case.stream, hunk.stream, hunk.stream_stop), excerpt(case.prompt, hunk.prompt, hunk.prompt_stop)


# -- input


def _are_tags(given: Any) -> bool:
    return isinstance(given, (tuple, list)) and len(given) == 2 and all(isinstance(one, str) and one for one in given)


def _mask(sampled: Any, kinds: Any, size: int) -> npt.NDArray[np.bool_] | None:
    if sampled is None and kinds is None:
        return None
    try:
        mask = np.asarray(sampled, np.bool_) if sampled is not None else np.asarray(kinds) == Kind.SAMPLED
    except Exception as error:
        raise TrajectoryError(f"sampled (or kinds) must have one entry per token: {error}") from None
    if mask.shape != (size,):
        name = "sampled" if sampled is not None else "kinds"
        raise TrajectoryError(f"{name} has shape {mask.shape}, the stream {size} tokens; give one entry per token")
    return mask


def _own_tags(renderer: Any) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The texts that open and close reasoning, and calls, where a renderer knows its template's."""
    if not callable(getattr(renderer, "grammar", None)):
        return [], []
    try:
        grammar = renderer.grammar()
    except TokentraceError:
        return [], []
    frame, calls = grammar.reasoning, grammar.calls
    reasoning = [(frame.open, frame.close)] if frame is not None and frame.open else []
    opening, closing = (calls.open.strip(), calls.close.strip()) if calls is not None else ("", "")
    return reasoning, [(opening, closing)] if opening and closing else []


def _vocabulary(tokenizer: Any) -> Vocabulary:
    found = tokenizer if isinstance(tokenizer, Tokenizer) else getattr(tokenizer, "tokenizer", None)
    if not isinstance(found, Tokenizer):
        raise TrajectoryError(f"tokenizer must be a Tokenizer or a Renderer, not a {type(tokenizer).__name__}")
    return found.vocabulary
