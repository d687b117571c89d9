"""`explain_break`: the checks, the most specific first, and the report they end in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import TrajectoryError, kind_of, shown
from ..settings import instance
from ..show.document import Document
from ..showing import ShowsItself
from ..tokens.ids import check_ids, common_prefix
from ..tokens.kinds import Kind
from ..tokens.tokenizer import Ids, Tokenizer
from .break_calls import changed_call, lost_call
from .break_case import Case, Evidence, Region
from .break_completions import lost_by_client, lost_completion, stop_token, stripped_reasoning
from .break_context import changed_system, changed_tools, compaction, compared, cut_short, first_token, no_token
from .break_markup import Markup
from .break_spelling import boolean, json_format, remerge, whitespace
from .finding import Cause
from .resync import hunks
from .texts import DiffOp, DiffRow, TextWindow, diff_lines, diff_rows, one_line, quoted, text_of

CHECKS: Final[tuple[Callable[[Case], Evidence | None], ...]] = (
    no_token,
    first_token,
    remerge,
    stripped_reasoning,
    lost_completion,
    stop_token,
    compaction,
    boolean,
    json_format,
    changed_call,
    whitespace,
    changed_tools,
    changed_system,
    lost_call,
    cut_short,
)
"""What is looked for, the most specific first."""

_LATER: Final = 8
"""Further differences that are looked into."""


@dataclass(frozen=True, slots=True)
class Break(ShowsItself):
    """Where and why a prompt stops to follow the stream. ``str()`` of it is a report to read.

    `position` is the first id that differs. `stream_range` and `prompt_range` are the tokens in which
    they differ until both sides agree again (they begin at `position`). `before_text` and `after_text` are the
    same as text, with a little around them, cut short where long. `region` says in which part of the stream it
    lies, where that is known; completions are counted from 1. `later` are the causes of further differences
    up to the end of the stream (the first few). `tokens` is the diff in rows.
    """

    cause: Cause
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
    later: tuple[Cause, ...] = ()

    def document(self, tokenizer: Any = None) -> Document:
        """Return the report as a document."""
        from .break_document import break_document

        return break_document(self, tokenizer)

    def to_json(self) -> dict[str, Any]:
        """What it says, as JSON can hold it; `tokens` aside."""
        plain = ("position", "region", "detail", "advice")
        return {
            "cause": str(self.cause),
            **{name: getattr(self, name) for name in plain},
            "stream_range": list(self.stream_range),
            "prompt_range": list(self.prompt_range),
            "before": self.before_text,
            "after": self.after_text,
            "later": [str(cause) for cause in self.later],
        }

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
    and close reasoning, where they are not among the usual ones. `anchor` is what the client took for the stream.
    `before` and `after` are the conversations of the two requests (``{"messages": […], "tools": […]}``): changed
    tools, changed system messages and compaction are then proven by comparing them.

    Every prompt begins with an empty stream. Where `sampled`, `kinds` or `before` say that there was a request
    before, it is a zeroed anchor. TrajectoryError where the arguments are not ids, or do not fit each other.

    >>> from tokentrace import create_renderer
    >>> from tokentrace.pocket import POCKET
    >>> tokenizer = create_renderer(POCKET).tokenizer
    >>> stream = tokenizer.encode('<tool_call>\\n{"name": "rm", "arguments": {"dry_run": false}}\\n</tool_call><|end|>')
    >>> prompt = tokenizer.encode('<tool_call>\\n{"name": "rm", "arguments": {"dry_run": False}}\\n</tool_call><|end|>')
    >>> found = explain_break(stream, prompt, tokenizer)
    >>> str(found.cause), found.detail
    ('boolean or None case', "the stream has `false`, the next prompt `False`: the value went through Python's str()")
    >>> explain_break(stream, stream, tokenizer) is None
    True
    """
    ours, theirs = (
        check_ids(stream, "stream", error=TrajectoryError),
        check_ids(next_prompt, "next_prompt", error=TrajectoryError),
    )
    mask = _mask(sampled, kinds, len(ours))
    for name, request in (("before", before), ("after", after)):
        if request is not None:
            instance(name, request, Mapping, TrajectoryError)  # type: ignore[type-abstract]
    if reasoning is not None and not _are_tags(reasoning):
        raise TrajectoryError(f"reasoning is two strings, what opens it and what closes it, not {shown(reasoning)}")
    if not isinstance(tokenizer, Tokenizer) and not isinstance(getattr(tokenizer, "tokenizer", None), Tokenizer):
        raise TrajectoryError(f"tokenizer must be a Tokenizer or a Renderer, not {kind_of(tokenizer)}")
    position = common_prefix(ours, theirs)
    if position == len(ours) and (len(ours) or not len(theirs) or (mask is None and before is None)):
        return None
    case = Case.at(position, ours, theirs, Markup.of(tokenizer, reasoning), mask)
    case = replace(case, before=before, after=after)
    evidence = explain(case)
    if anchor is not None:
        evidence = lost_by_client(case, check_ids(anchor, "anchor", error=TrajectoryError), evidence) or evidence
    case = replace(case, hunk=evidence.hunk or case.hunk)
    before_text, after_text = _excerpts(case)
    return Break(
        cause=evidence.cause,
        position=position,
        stream_length=len(ours),
        prompt_length=len(theirs),
        stream_range=(position, case.hunk.stop),
        prompt_range=(position, case.hunk.other_stop),
        before_text=before_text,
        after_text=after_text,
        detail=evidence.detail,
        advice=evidence.cause.advice,
        region=None if case.region is None else case.region.name,
        tokens=diff_rows(case.vocabulary, ours, theirs, case.hunk),
        later=tuple(_later(case, evidence, mask)),
    )


# -- stages


def explain(case: Case) -> Evidence:
    """The cause of one difference, and what shows it."""
    found = next((evidence for check in CHECKS if (evidence := check(case)) is not None), None)
    return compared(case, found or _unknown(case))


def _unknown(case: Case) -> Evidence:
    ours, theirs = case.hunk_texts()
    if not theirs and case.hunk.other_start == len(case.prompt):
        ids = len(case.stream) - case.hunk.start
        return Evidence(
            Cause.UNKNOWN,
            f"the next prompt ends where the stream goes on for {ids:,} tokens: a request was repeated, or the "
            "history taken back",
        )
    role = case.turns.role(case.stream, case.hunk.start)
    of = f" in text of the {role}" if role else ""
    return Evidence(
        Cause.UNKNOWN, f"the stream has {quoted(ours)}, the next prompt {quoted(theirs)}{of}; nothing shows why"
    )


def _later(case: Case, evidence: Evidence, mask: npt.NDArray[np.bool_] | None) -> Iterator[Cause]:
    """The causes of the next few differences, but for those in what was compared as a whole."""
    covered = case.token_after(evidence.until - len(case.text.lead))
    for hunk in islice(hunks(case.stream, case.prompt, case.hunk.stop, case.hunk.other_stop), _LATER):
        if covered <= hunk.start < len(case.stream):
            text = TextWindow.around(case.vocabulary, case.stream, case.prompt, hunk, back=1024, forward=4096)
            region = Region.at(mask, hunk.start)
            yield explain(replace(case, hunk=hunk, text=text, region=region, before=None, after=None)).cause


def _excerpts(case: Case, around: int = 16, most: int = 400) -> tuple[str, str]:
    def excerpt(ids: Ids, start: int, stop: int) -> str:
        first = max(0, start - around)
        if stop - start <= most:
            return text_of(case.vocabulary, ids[first : stop + around])
        head = text_of(case.vocabulary, ids[first : start + most // 2])
        tail = text_of(case.vocabulary, ids[stop - most // 2 : stop + around])
        return f"{head} … {stop - start - most:,} tokens … {tail}"

    start, stop, other_start, other_stop = case.hunk
    return excerpt(case.stream, start, stop), excerpt(case.prompt, other_start, other_stop)


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
