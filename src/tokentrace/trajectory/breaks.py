"""Why a prompt does not begin with the stream so far: `explain_break` names the cause and shows the tokens.

Causes are claimed on evidence only, the most specific first. What shows none is `BreakCause.UNKNOWN`.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import TrajectoryError
from ..tokens.kinds import Kind
from ..tokens.tokenizer import Ids, Tokenizer
from ..tokens.vocabulary import Vocabulary
from .token_diff import (
    BACK,
    DiffOp,
    DiffRow,
    Hunk,
    TextWindow,
    as_ids,
    common_prefix,
    diff_lines,
    diff_rows,
    hunks_after,
    next_hunk,
    one_line,
    remerged,
    shared_start,
    shared_tail,
    spell,
    text_window,
)


class BreakCause(StrEnum):
    """Why the next prompt is no extension of the stream. The value is its name for people."""

    BOOLEAN_CASE = "boolean or None case"
    BPE_REMERGE = "BPE re-merge"
    JSON_FORMAT = "JSON spacing or key order"
    EMPTY_PARAMETER = "empty or missing parameter"
    STRIPPED_REASONING = "stripped reasoning"
    ZEROED_ANCHOR = "zeroed anchor after truncation"
    REWRITTEN_CALL = "scaffold rewrote the tool call"
    CHANGED_TOOLS = "changed tools"
    CHANGED_SYSTEM = "changed system"
    COMPACTION = "compaction"
    STOP_TOKEN = "another stop token"
    WHITESPACE = "whitespace"
    UNKNOWN = "unknown"


_BRIDGE: Final = "keep the sampled ids and bridge to the next turn; do not render the history again"
_BRANCH: Final = "the model now sees another context: begin a new branch here, or keep the history as it was"

ADVICE: Final[Mapping[BreakCause, str]] = {
    BreakCause.BOOLEAN_CASE: _BRIDGE,
    BreakCause.BPE_REMERGE: _BRIDGE,
    BreakCause.JSON_FORMAT: _BRIDGE,
    BreakCause.EMPTY_PARAMETER: _BRIDGE,
    BreakCause.WHITESPACE: _BRIDGE,
    BreakCause.STOP_TOKEN: _BRIDGE,
    BreakCause.STRIPPED_REASONING: "bridge to the next turn, or render with preserve_all_thinking=True",
    BreakCause.ZEROED_ANCHOR: "keep the ids of a turn that is too long; cut samples when they are made, not the record",
    BreakCause.REWRITTEN_CALL: (
        "the history holds a call the model did not make, which no bridge can mend: switch the repair off in the "
        "scaffold, or begin a new branch here"
    ),
    BreakCause.CHANGED_TOOLS: _BRANCH,
    BreakCause.CHANGED_SYSTEM: _BRANCH,
    BreakCause.COMPACTION: _BRANCH,
    BreakCause.UNKNOWN: "compare the two requests; pass before= and after= to have their messages compared",
}


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

    `tokenizer` is a `Tokenizer`, or what has one (a `Renderer`). `sampled` (or `kinds`) marks the tokens of the
    stream that were sampled: with it the report names the region, and a completion that is missing can be told
    from a history that was rewritten. `reasoning` are the texts that open and close reasoning, where they are none
    of the usual ones. `anchor` is what the client took for the stream. `before` and `after` are the conversations
    of the two requests (``{"messages": […], "tools": […]}``): changed tools, changed system messages and
    compaction are then proven by comparing them.

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
    ours, theirs = as_ids(stream, "stream"), as_ids(next_prompt, "next_prompt")
    mask = _mask(sampled, kinds, len(ours))
    vocabulary = _vocabulary(tokenizer)
    position = common_prefix(ours, theirs)
    if position == len(ours) and (len(ours) or not len(theirs) or (mask is None and before is None)):
        return None
    hunk = next_hunk(ours, theirs, position, position)
    turns = _Turns.of(vocabulary)
    tags = REASONING_TAGS if reasoning is None else (reasoning, *REASONING_TAGS)
    case = _Case(
        ours,
        theirs,
        vocabulary,
        turns,
        hunk,
        text_window(vocabulary, ours, theirs, hunk),
        Region.at(mask, position),
        tags,
        before,
        after,
    )
    finding = _explain(case)
    if anchor is not None:
        finding = _anchor(case, as_ids(anchor, "anchor"), finding) or finding
    hunk = finding.hunk or hunk
    later = []
    covered = _token_after(case, finding.until - len(case.text.lead))
    for further in islice(hunks_after(hunk, ours, theirs), _LATER):
        if further.stream < covered:
            continue
        text = text_window(vocabulary, ours, theirs, further, back=1024, forward=4096)
        region = Region.at(mask, further.stream)
        case_of = replace(case, hunk=further, text=text, region=region, before=None, after=None)
        later.append(_explain(case_of).cause)
    before_text, after_text = _excerpts(case, hunk)
    return Break(
        cause=finding.cause,
        position=position,
        stream_length=len(ours),
        prompt_length=len(theirs),
        stream_range=(position, hunk.stream_stop),
        prompt_range=(position, hunk.prompt_stop),
        before_text=before_text,
        after_text=after_text,
        detail=finding.detail,
        advice=ADVICE[finding.cause],
        region=None if case.region is None else case.region.name,
        tokens=diff_rows(vocabulary, ours, theirs, hunk),
        later=tuple(later),
    )


_LATER: Final = 8
"""Further differences that are looked into."""


def _vocabulary(tokenizer: Any) -> Vocabulary:
    found = tokenizer if isinstance(tokenizer, Tokenizer) else getattr(tokenizer, "tokenizer", None)
    if not isinstance(found, Tokenizer):
        raise TrajectoryError(f"tokenizer must be a Tokenizer or a Renderer, not a {type(tokenizer).__name__}")
    return found.vocabulary


def _mask(sampled: Any, kinds: Any, size: int) -> npt.NDArray[np.bool_] | None:
    if sampled is None and kinds is None:
        return None
    mask = np.asarray(sampled, np.bool_) if sampled is not None else np.asarray(kinds) == Kind.SAMPLED
    if mask.shape != (size,):
        name = "sampled" if sampled is not None else "kinds"
        raise TrajectoryError(f"{name} has shape {mask.shape}, the stream {size} tokens; give one entry per token")
    return mask


def _excerpts(case: _Case, hunk: Hunk, around: int = 16, most: int = 400) -> tuple[str, str]:
    def excerpt(ids: Ids, start: int, stop: int) -> str:
        if stop - start <= most:
            return spell(case.vocabulary, ids[max(0, start - around) : stop + around]).decode("utf-8", "replace")
        head = spell(case.vocabulary, ids[max(0, start - around) : start + most // 2]).decode("utf-8", "replace")
        tail = spell(case.vocabulary, ids[stop - most // 2 : stop + around]).decode("utf-8", "replace")
        return f"{head} … {stop - start - most:,} tokens … {tail}"

    return (
        excerpt(case.stream, hunk.stream, hunk.stream_stop),
        excerpt(case.prompt, hunk.prompt, hunk.prompt_stop),
    )


# -- what a check is given


@dataclass(frozen=True, slots=True)
class Region:
    """The part of a stream that a token lies in."""

    name: str
    completion: tuple[int, int] | None
    """The completion it lies in, if it does."""
    last: tuple[int, int] | None
    """The stream's last completion."""
    first_prompt: bool

    @classmethod
    def at(cls, mask: npt.NDArray[np.bool_] | None, position: int) -> Region | None:
        """The region of a token; None where nobody knows what was sampled."""
        if mask is None:
            return None
        edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
        starts, stops = edges[::2], edges[1::2]
        number = int(np.searchsorted(starts, position, side="right"))
        last = (int(starts[-1]), int(stops[-1])) if len(starts) else None
        if not number:
            return cls("first prompt", None, last, True)
        if position < stops[number - 1]:
            return cls(f"completion {number}", (int(starts[number - 1]), int(stops[number - 1])), last, False)
        return cls(f"context after completion {number}", None, last, False)


@dataclass(frozen=True, slots=True)
class _Case:
    stream: Ids
    prompt: Ids
    vocabulary: Vocabulary
    turns: _Turns
    hunk: Hunk
    text: TextWindow
    region: Region | None
    tags: Sequence[tuple[str, str]]
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None

    def sides(self) -> tuple[str, str, int]:
        """Both texts with what is before them, and the first character that differs."""
        lead = self.text.lead
        return lead + self.text.stream, lead + self.text.prompt, len(lead) + self.text.shared

    def hunk_texts(self) -> tuple[str, str]:
        """The text of the difference alone (of a long one, its beginning)."""
        ours = self.stream[self.hunk.stream : min(self.hunk.stream_stop, self.hunk.stream + 4096)]
        theirs = self.prompt[self.hunk.prompt : min(self.hunk.prompt_stop, self.hunk.prompt + 4096)]
        texts = [spell(self.vocabulary, ids).decode("utf-8", "replace") for ids in (ours, theirs)]
        return texts[0], texts[1]


@dataclass(frozen=True, slots=True)
class _Finding:
    cause: BreakCause
    detail: str
    hunk: Hunk | None = None
    """A better idea of what differs than that of the diff."""
    until: int = 0
    """Where the value or the call ends that was compared as a whole, as a character of `_Case.sides`."""


def _explain(case: _Case) -> _Finding:
    found = next((finding for check in _CHECKS if (finding := check(case)) is not None), None)
    found = found or _unknown(case)
    if found.cause in _GUESSED and case.before is not None and case.after is not None:
        return _compared(case, found)
    return found


def _unknown(case: _Case) -> _Finding:
    ours, theirs = case.hunk_texts()
    if not theirs and case.hunk.prompt == len(case.prompt):
        ids = len(case.stream) - case.hunk.stream
        return _Finding(
            BreakCause.UNKNOWN,
            f"the next prompt ends where the stream goes on for {ids:,} tokens: a request was repeated, or the "
            "history taken back",
        )
    role = case.turns.role(case, case.hunk.stream)
    of = f" in text of the {role}" if role else ""
    return _Finding(
        BreakCause.UNKNOWN,
        f"the stream has {_quoted(ours)}, the next prompt {_quoted(theirs)}{of}; nothing shows why",
    )


def _quoted(text: str, most: int = 48) -> str:
    text = one_line(text)
    if not text:
        return "nothing"
    return f"`{text}`" if len(text) <= most else f"`{text[:most]}…`"


# -- same text, other tokens


def _remerge(case: _Case) -> _Finding | None:
    hunk = remerged(case.vocabulary, case.stream, case.prompt, case.hunk)
    if hunk is None:
        return None
    ours = case.stream[hunk.stream : hunk.stream_stop].tolist()
    theirs = case.prompt[hunk.prompt : hunk.prompt_stop].tolist()
    text = _quoted(spell(case.vocabulary, case.stream[hunk.stream : hunk.stream_stop]).decode("utf-8", "replace"))
    detail = f"the same text {text} is {_tokens(len(ours))} in the stream and {_tokens(len(theirs))} in the next prompt"
    for one, other, where in ((ours, theirs, "stream"), (theirs, ours, "next prompt")):
        control = [index for index in one if index in case.vocabulary.added and index not in other]
        if control:
            name = case.vocabulary.added[control[0]].text
            detail += f": {name} is a control token in the {where} and plain text in the other"
            break
    else:
        detail += ": it was decoded and encoded again"
    return _Finding(BreakCause.BPE_REMERGE, detail, hunk)


def _tokens(count: int) -> str:
    return "one token" if count == 1 else f"{count:,} tokens"


# -- the anchor


def _anchor(case: _Case, anchor: Ids, shown: _Finding) -> _Finding | None:
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
    return _Finding(BreakCause.ZEROED_ANCHOR, detail, shown.hunk)


def _zeroed(case: _Case) -> _Finding | None:
    if not len(case.stream):
        return _Finding(BreakCause.ZEROED_ANCHOR, "the stream is empty, though there was a request before")
    at, region = case.hunk.stream, case.region
    zeros = case.prompt[case.hunk.prompt : case.hunk.prompt + 4]
    if len(zeros) == 4 and not zeros.any() and case.stream[at : at + 4].all():
        return _Finding(BreakCause.ZEROED_ANCHOR, "the next prompt has zeros where the stream has ids")
    if region is None or region.last is None or region.last[0] < at:
        return None
    begun = spell(case.vocabulary, case.stream[at : min(region.last[0], at + 64)]).decode("utf-8", "replace").strip()
    if begun and begun not in {opening for opening, _ in case.tags}:  # reasoning that the prompt had opened
        return None
    completion = case.stream[region.last[0] : region.last[1]]
    rest = case.prompt[case.hunk.prompt : case.hunk.prompt + 8].tolist()
    solid = next((index for index in rest if case.vocabulary.token_bytes(index).strip()), None)
    if solid is None or solid not in case.turns.structural or solid in completion[:-1].tolist() or len(completion) < 2:
        return None
    name = case.vocabulary.token_bytes(solid).decode("utf-8", "replace")
    return _Finding(
        BreakCause.ZEROED_ANCHOR,
        f"the last completion, {_tokens(len(completion))}, is missing whole: the next prompt has {name} where it began",
    )


def _stop_token(case: _Case) -> _Finding | None:
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
    return _Finding(BreakCause.STOP_TOKEN, said, hunk)


# -- reasoning


REASONING_TAGS: Final = (
    ("<think>", "</think>"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<reasoning>", "</reasoning>"),
    ("<thinking>", "</thinking>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought\n", "<channel|>"),
    ("<unused94>thought\n", "<unused95>"),
)
"""Texts that open and close reasoning."""


def _reasoning(case: _Case) -> _Finding | None:
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
            detail = f"{size} ({_quoted(opening + body + closing)}) {verb}"
            if not lost:
                return _Finding(BreakCause.STRIPPED_REASONING, detail)
            return _Finding(BreakCause.STRIPPED_REASONING, detail, _without(case, one, end))
    return None


def _without(case: _Case, text: str, end: int) -> Hunk:
    """The difference that ends where the text goes on after a block, which may repeat what comes after it."""
    lead = len(case.text.lead)
    solid = len(text) - len(text[end:].lstrip())
    at = case.hunk.prompt
    for stop in (_token_after(case, end - lead), _token_after(case, solid - lead)):
        for shared in range(4):  # of what follows, a little may stand before the difference: <|channel|>
            met = stop + shared
            if shared > at or at >= len(case.prompt) or met >= len(case.stream):
                break
            begun = np.array_equal(case.stream[stop:met], case.prompt[at - shared : at])
            if begun and case.stream[met] == case.prompt[at]:
                return Hunk(case.hunk.stream, met, at, at, True)
    return next_hunk(
        case.stream, case.prompt, case.hunk.stream, case.hunk.prompt, beyond=_token_after(case, end - lead)
    )


def _block(one: str, other: str, at: int, opening: str, closing: str, whole: bool) -> tuple[str, int] | None:
    """A block of reasoning that `one` has around character `at`, and `other` has not: its body and its end.

    Past the block both have to go on alike; of reasoning that was emptied, the tags may be left.
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
    if start <= at and other.startswith(opening, begin):
        stop = other.find(closing, start)
        emptied = body.strip() and stop >= 0 and not other[start:stop].strip()
        rest = other[stop + len(closing) :] if emptied else None
        after = one[end:]
        end = close if close >= 0 else end
    else:
        rest = other[min(begin, at) :].lstrip().removeprefix(closing)
        after = one[end:]
    if rest is None or rest.startswith(opening):
        return None
    after, rest = after.lstrip(), rest.lstrip()
    return (body, end) if shared_start(after, rest) >= min(12, len(after)) else None


def _token_after(case: _Case, characters: int) -> int:
    """The stream's token that begins so many characters after the difference."""
    size = len(case.text.stream[:characters].encode("utf-8", "surrogatepass"))
    at, seen = case.hunk.stream, 0
    while seen < size and at < len(case.stream):
        seen += len(case.vocabulary.token_bytes(int(case.stream[at])))
        at += 1
    return at


# -- values


_NAMES_OF_VALUES: Final = {frozenset(pair) for pair in (("true", "True"), ("false", "False"), ("null", "None"))}
_WORD_BEFORE: Final = re.compile(r"[A-Za-z]*\Z")
_WORD: Final = re.compile(r"[A-Za-z]*")
_VALUE_FOLLOWS: Final = re.compile(r"(?:[>:\[,=({]\s*|\n)\Z")
_VALUE_ENDS: Final = re.compile(r"\s*(?:[<,\]})]|\Z)|[ \t]*\n")


def _boolean(case: _Case) -> _Finding | None:
    ours, theirs, at = case.sides()
    tail = _WORD_BEFORE.search(ours[max(0, at - 16) : at])
    start = at - len(tail[0]) if tail else at
    one, other = (_WORD.match(text, start) for text in (ours, theirs))
    if one is None or other is None or frozenset((one[0], other[0])) not in _NAMES_OF_VALUES:
        return None
    if not _VALUE_FOLLOWS.search(ours[max(0, start - 64) : start]):
        return None
    if not (_VALUE_ENDS.match(ours, one.end()) and _VALUE_ENDS.match(theirs, other.end())):
        return None
    how = "the value went through Python's str()" if other[0][0].isupper() else "the value went through JSON"
    return _Finding(BreakCause.BOOLEAN_CASE, f"the stream has `{one[0]}`, the next prompt `{other[0]}`: {how}")


_DECODER: Final = json.JSONDecoder()
_OUTSIDE_STRINGS: Final = re.compile(r'("(?:[^"\\]|\\.)*")|\s+', re.DOTALL)
_OPENERS: Final = 64
"""Braces and brackets before a difference that are tried as the beginning of a JSON value."""


def _json(case: _Case) -> _Finding | None:
    ours, theirs, at = case.sides()
    for start in _openers(ours, at):
        one, other = _value(ours, start), _value(theirs, start)
        if one is None or other is None or one[1] <= at or other[1] <= at:
            continue
        found = _same_json(ours[start : one[1]], theirs[start : other[1]], one[0], other[0])
        return found and replace(found, until=one[1])
    return None


def _openers(text: str, at: int) -> Iterator[int]:
    """Where a JSON value may begin that holds this character, the nearest first."""
    found = (index for index in range(min(at, len(text) - 1), -1, -1) if text[index] in "{[")
    return islice(found, _OPENERS)


def _value(text: str, start: int) -> tuple[Any, int] | None:
    """The JSON value that begins here and its end; also as Python's repr() writes it."""
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        pass
    written = text[start : start + 4096]
    stop = max(written.find("}\n"), written.find("}<"), written.find("]\n"), written.find("]<")) + 1
    written = written[: stop or None]
    if "'" not in written or "\\" in written:  # a warning about escapes is not ours to print
        return None
    try:
        return ast.literal_eval(written), start + len(written)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None


def _same_json(ours: str, theirs: str, one: Any, other: Any) -> _Finding | None:
    if not same_value(one, other):
        return None
    squeezed = [_OUTSIDE_STRINGS.sub(lambda match: match[1] or "", text) for text in (ours, theirs)]
    try:
        plain = json.dumps(one) == json.dumps(other)
        ordered = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        plain = ordered = False
    if squeezed[0] == squeezed[1]:
        how = "with other spacing"
    elif ('\\"' in ours) != ('\\"' in theirs) and not plain:
        how = "inside a string on one side"
    elif plain:
        how = "with other escapes" if "\\" in ours + theirs else "with its values spelled another way"
        how = "as Python writes it" if "'" in theirs and "'" not in ours else how
    elif ordered:
        how = "with its keys in another order"
    else:
        how = "with its values spelled another way"
    return _Finding(
        BreakCause.JSON_FORMAT,
        f"the same JSON is written {how}: the stream has {_quoted(ours)}, the next prompt {_quoted(theirs)}",
    )


def same_value(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same. ``1`` and ``1.0`` are, ``1`` and ``true`` are not; nor does order count
    among keys. A string that holds the JSON of the other value is the same, written twice.
    """
    pairs = [(one, other)]
    while pairs:
        a, b = pairs.pop()
        if isinstance(a, str) != isinstance(b, str):
            text, value = (a, b) if isinstance(a, str) else (b, a)
            parsed = _value(text, 0) if isinstance(value, (dict, list)) else None
            if parsed is None or parsed[1] != len(text):
                return False
            pairs.append((parsed[0], value))
        elif isinstance(a, dict) and isinstance(b, dict):
            if a.keys() != b.keys():
                return False
            pairs += [(a[key], b[key]) for key in a]
        elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
            if len(a) != len(b):
                return False
            pairs += zip(a, b, strict=True)
        elif isinstance(a, bool) != isinstance(b, bool) or a != b:
            return False
    return True


# -- tool calls


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A tool call as it stands in text. `stray` counts closing tags of parameters that close nothing."""

    name: str
    arguments: dict[str, Any]
    stray: int = 0
    declared: bool = True
    """Whether arguments are given at all, be they empty."""


CALL_TAGS: Final = (
    ("<tool_call>", "</tool_call>"),
    ("<function=", "</function>"),
    ("<invoke name=", "</invoke>"),
    ("<｜DSML｜invoke name=", "</｜DSML｜invoke>"),
    ("<|tool_call_begin|>", "<|tool_call_end|>"),
    ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    (" to=functions.", "<|call|>"),
    ("[TOOL_CALLS]", "</s>"),
)
"""Texts that open and close a tool call."""

_FUNCTION: Final = re.compile(r'<(?:｜DSML｜)?(?:function=|invoke name=)"?([^">\n]{0,256})"?>')
_PARAMETER: Final = re.compile(r'<(?:｜DSML｜)?parameter(?:=| name=)"?([^">\n]{0,256})"?[^>\n]{0,256}>')
_PARAMETER_END: Final = re.compile(r"</(?:｜DSML｜)?parameter>")
_ARG: Final = re.compile(r"<arg_key>([^<\n]{0,256})</arg_key>\s{0,16}<arg_value>")
_ARG_END: Final = re.compile(r"</arg_value>")
_NAMED: Final = re.compile(r"\s*(?:function<｜tool▁sep｜>)?([^\s{<\[]+)")


def written_call(text: str, start: int, opening: str, closing: str) -> WrittenCall | None:
    """The call that is opened at `start`, or None where it is not whole or not understood."""
    stop = text.find(closing, start + len(opening))
    if stop < 0:
        return None
    body = text[start + len(opening) : stop]
    function = _FUNCTION.search(text, start, stop)
    if function:
        pairs, stray = _pairs(text[function.end() : stop], _PARAMETER, _PARAMETER_END)
        return WrittenCall(function[1].strip(), pairs, stray)
    name = _NAMED.match(body)
    if "<arg_key>" in body or (name and opening == "<tool_call>"):
        pairs, stray = _pairs(body, _ARG, _ARG_END)
        return WrittenCall(name[1] if name else "", pairs, stray)
    brace = body.find("{")
    value = _value(body, brace) if brace >= 0 else None
    if value is None or not isinstance(value[0], dict):
        return None
    found = value[0]
    if name:
        return WrittenCall(name[1], found)
    key = "parameters" if "parameters" in found else "arguments"
    arguments = found.get(key)
    if isinstance(arguments, str):
        parsed = _value(arguments, 0)
        arguments = parsed[0] if parsed is not None else arguments
    if not isinstance(arguments, dict):
        if arguments:
            return None
        arguments = {}
    return WrittenCall(str(found.get("name", "")), arguments, declared=key in found)


def _pairs(body: str, opening: re.Pattern[str], closing: re.Pattern[str]) -> tuple[dict[str, Any], int]:
    """Parameters by name, and how many closing tags close none. One pass, whatever the text."""
    pairs: dict[str, Any] = {}
    stray, ends = 0, iter([*closing.finditer(body), None])
    end = next(ends)
    after = 0
    for match in opening.finditer(body):
        if match.start() < after:
            continue
        while end is not None and end.start() < match.end():
            stray, end = stray + 1, next(ends)
        if end is None:
            break
        pairs[match[1].strip()] = body[match.end() : end.start()]
        after, end = end.end(), next(ends)
    return pairs, stray + (0 if end is None else 1 + sum(left is not None for left in ends))


def _call(case: _Case) -> _Finding | None:
    ours, theirs, at = case.sides()
    opened = [(ours.rfind(opening, 0, at), opening, closing) for opening, closing in CALL_TAGS]
    start, opening, closing = max(opened)
    if start < 0 or ours.find(closing, start, at) >= 0 or (case.region is not None and case.region.first_prompt):
        return None
    one, other = (written_call(text, start, opening, closing) for text in (ours, theirs))
    if one is None or other is None:
        return None
    if one.name != other.name:
        said = f"the model called `{one.name}`, the next prompt has a call of `{other.name}`"
        found: _Finding | None = _Finding(BreakCause.REWRITTEN_CALL, said)
    else:
        found = _arguments(one, other)
    return found and replace(found, until=ours.find(closing, start + len(opening)) + len(closing))


_EMPTY: Final = ("", "null", "None", "{}", "[]")


def _arguments(one: WrittenCall, other: WrittenCall) -> _Finding | None:
    changed = [
        key
        for key in one.arguments
        if key in other.arguments and not same_value(one.arguments[key], other.arguments[key])
    ]
    for key in changed:
        a, b = one.arguments[key], other.arguments[key]
        said = f"argument `{key}` of `{one.name}` is {_quoted(_spelled(a).strip())} in the stream and "
        said += _quoted(_spelled(b).strip())
        said += " in the next prompt"
        if isinstance(a, bool) != isinstance(b, bool) and str(a).lower() == str(b).lower():
            return _Finding(BreakCause.BOOLEAN_CASE, f"{said}: a boolean became a string, or a string a boolean")
        if isinstance(a, str) and isinstance(b, str) and a.split() == b.split():
            return _Finding(BreakCause.WHITESPACE, f"{said}: only white space differs")
        return _Finding(BreakCause.REWRITTEN_CALL, said)
    for some, others, has, lacks in ((one, other, "stream", "next prompt"), (other, one, "next prompt", "stream")):
        for key, value in some.arguments.items():
            if key not in others.arguments:
                empty = "empty " if _spelled(value).strip() in _EMPTY else ""
                return _Finding(
                    BreakCause.EMPTY_PARAMETER,
                    f"the {has} gives `{one.name}` the {empty}argument `{key}`, the {lacks} does not",
                )
    if one.stray != other.stray:
        has = "stream" if one.stray > other.stray else "next prompt"
        return _Finding(
            BreakCause.EMPTY_PARAMETER,
            f"only the {has} has a closing tag in the call of `{one.name}` that closes no parameter",
        )
    if one.declared != other.declared:
        has = "stream" if one.declared else "next prompt"
        return _Finding(BreakCause.EMPTY_PARAMETER, f"only the {has} writes out that `{one.name}` takes no arguments")
    if list(one.arguments) != list(other.arguments):
        return _Finding(
            BreakCause.JSON_FORMAT, f"the arguments of `{one.name}` are the same, with their keys in another order"
        )
    return None


def _spelled(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _lost_call(case: _Case) -> _Finding | None:
    if case.region is not None and case.region.completion is None:
        return None
    ours, theirs = case.hunk_texts()
    for opening, closing in CALL_TAGS:
        start = ours.find(opening)
        if start >= 0 and opening not in theirs and closing not in theirs:
            call = written_call(ours, start, opening, closing)
            if call is not None:
                return _Finding(
                    BreakCause.REWRITTEN_CALL, f"the model called `{call.name}`, and the next prompt has no such call"
                )
    return None


# -- white space


def _whitespace(case: _Case) -> _Finding | None:
    one, other = case.text.stream[case.text.shared :], case.text.prompt[case.text.shared :]
    rest, others = one.lstrip(), other.lstrip()
    if len(rest) == len(one) and len(others) == len(other):
        return None
    size = min(8, len(_dense(rest))) if case.text.ended else 8
    if _dense(rest)[:size] != _dense(others)[:size]:
        return None
    a, b = one[: len(one) - len(rest)], other[: len(other) - len(others)]
    return _Finding(
        BreakCause.WHITESPACE, f"only white space differs: the stream has {_quoted(a)}, the next prompt {_quoted(b)}"
    )


def _dense(text: str) -> str:
    return "".join(text[:256].split())


# -- the context around the completions


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


@dataclass(frozen=True, slots=True)
class _Turns:
    """The control tokens that begin turns, and those that hold a conversation together."""

    named: Mapping[int, str]
    """Heads that name their role."""
    heads: npt.NDArray[np.int32]
    """All heads."""
    structural: frozenset[int]
    """Control tokens other than tags in the text of a turn."""

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> _Turns:
        named, heads, structural = {}, [], set()
        for text, token in vocabulary.control.items():
            match = _NAMED_HEAD.fullmatch(text)
            role = _OTHER_HEADS.get(text) or (match[1].lower() if match else None)
            if role:
                named[token.id] = role
            if role or _HEAD.match(text):
                heads.append(token.id)
            if token.special and not any(text in pair for pair in (*REASONING_TAGS, *CALL_TAGS)):
                structural.add(token.id)
        return cls(named, np.asarray(heads, np.int32), frozenset(structural | set(heads)))

    def role(self, case: _Case, at: int, *, prompt: bool = False) -> str | None:
        """The role of the turn that a token lies in (or is the name of); None where no head tells."""
        ids = case.prompt if prompt else case.stream
        start = max(0, at - BACK)
        for index in reversed((np.flatnonzero(np.isin(ids[start : at + 1], self.heads)) + start).tolist()):
            text = spell(case.vocabulary, ids[index + 1 : index + 5]).decode("utf-8", "replace")
            match = _ROLE.match(text)
            if match:
                return "tool" if match[2] else match[1]
            if int(ids[index]) in self.named:
                return self.named[int(ids[index])]
        return None

    def lead(self, case: _Case) -> str:
        """What stands before the difference in its own turn."""
        start = max(0, case.hunk.stream - BACK)
        ids = case.stream[start : case.hunk.stream]
        heads = np.flatnonzero(np.isin(ids, self.heads))
        return spell(case.vocabulary, ids[heads[-1] :] if len(heads) else ids).decode("utf-8", "replace")

    def before_user(self, case: _Case) -> bool:
        """Whether nothing but a first user's turn comes next: formats without a head for system text begin so."""
        heads = np.flatnonzero(np.isin(case.stream[: case.hunk.stream + BACK], self.heads))
        first = int(heads[0]) if len(heads) else -1
        return first > case.hunk.stream and self.named.get(int(case.stream[first])) == "user"

    def skipped(self, case: _Case) -> Hunk | None:
        """What differs if the prompt goes on with a later turn of the stream, two turns long at the least."""
        at, prompt_at = case.hunk.stream, case.hunk.prompt
        heads = np.flatnonzero(np.isin(case.stream, self.heads))
        ahead = int(np.searchsorted(heads, at))
        begun = at - int(heads[ahead - 1]) if ahead else 0
        if not ahead or begun > prompt_at:
            return None
        for head in heads[ahead : ahead + 1024].tolist():
            run = common_prefix(case.stream[head:], case.prompt[prompt_at - begun :])
            ended = head + run == len(case.stream)
            if run > begun and (ended or self.count(case.stream[head + 1 : head + run]) >= 2):
                return Hunk(at, head + begun, prompt_at, prompt_at, True)
        return None

    def count(self, ids: Ids) -> int:
        """How many turns begin among the ids."""
        return int(np.isin(ids, self.heads).sum())


TOOL_SECTIONS: Final = (
    ("<tools>", "</tools>"),
    ("tool_declare<|im_middle|>", "<|im_end|>"),
    ("namespace functions {", "} // namespace functions"),
    ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    ("<functions>", "</functions>"),
    ("Calls to these tools must go to the commentary channel", "<|end|>"),
    ("\n## Tools\n", "<｜User｜>"),
)
"""Texts between which templates declare tools."""


def _compaction(case: _Case) -> _Finding | None:
    """Turns that are gone: up to a later turn, up to what the stream ends with, or in this difference."""
    whole = shared_tail(case.stream, case.prompt, case.hunk.stream) if case.hunk.stream == case.hunk.prompt else None
    found = _fewer_turns(case, case.turns.skipped(case), 1) or _fewer_turns(case, whole, 1)
    found = found or _fewer_turns(case, case.hunk, 2)
    if found is not None:
        return found
    ours = case.stream[case.hunk.stream : case.hunk.stream_stop]
    theirs = case.prompt[case.hunk.prompt : case.hunk.prompt_stop]
    outside = case.region is not None and case.region.completion is None and not case.region.first_prompt
    if outside and case.hunk.meets and not case.turns.count(ours) and len(ours) >= max(64, 4 * len(theirs)):
        role = case.turns.role(case, case.hunk.stream) or "context"
        return _Finding(BreakCause.COMPACTION, f"{_sizes(ours, theirs)}: text of the {role} was cut or cleared")
    return None


def _fewer_turns(case: _Case, hunk: Hunk | None, least: int) -> _Finding | None:
    if hunk is None:
        return None
    ours, theirs = case.stream[hunk.stream : hunk.stream_stop], case.prompt[hunk.prompt : hunk.prompt_stop]
    turns = case.turns.count(ours)
    if turns < least or turns <= case.turns.count(theirs) or len(ours) < 2 * len(theirs):
        return None
    if turns == 1 and case.turns.role(case, hunk.stream) in ("system", "developer"):
        return None  # only that message is gone
    why = "messages are missing, or something shorter stands for them"
    return _Finding(BreakCause.COMPACTION, f"{_sizes(ours, theirs)}: {why}", hunk)


def _sizes(ours: Ids, theirs: Ids) -> str:
    left = _tokens(len(theirs)) if len(theirs) else "nothing"
    return f"{_tokens(len(ours))} of history are {left} in the next prompt"


def _cut_short(case: _Case) -> _Finding | None:
    """A prompt that is much shorter from here on, whatever little it has in common with the rest of the stream."""
    rest = Hunk(case.hunk.stream, len(case.stream), case.hunk.prompt, len(case.prompt), False)
    return _fewer_turns(case, rest, 2)


def _tools(case: _Case) -> _Finding | None:
    if case.region is not None and case.region.completion is not None:
        return None
    roles = {case.turns.role(case, case.hunk.stream), case.turns.role(case, case.hunk.prompt, prompt=True)}
    ours, theirs = case.hunk_texts()
    differ = f"the declared tools differ: the stream has {_quoted(ours)}, the next prompt {_quoted(theirs)}"
    if _schema(case):
        return _Finding(BreakCause.CHANGED_TOOLS, differ)
    if not roles & {"system", "developer", None}:  # anybody may write of tools
        return None
    turn = case.turns.lead(case)
    for opening, closing in TOOL_SECTIONS:
        begun = turn.rfind(opening)
        if begun >= 0 and closing not in turn[begun:]:
            return _Finding(BreakCause.CHANGED_TOOLS, differ)
        if (opening in ours) != (opening in theirs):
            if opening in case.text.stream and opening in case.text.prompt:
                moved = "the template declares the tools at another place in the next prompt"
                return _Finding(BreakCause.UNKNOWN, f"{moved}: {_quoted(ours)} stands against {_quoted(theirs)}")
            one, other = ("stream", "next prompt") if opening in ours else ("next prompt", "stream")
            return _Finding(BreakCause.CHANGED_TOOLS, f"the {one} declares tools here, the {other} does not")
    return None


def _schema(case: _Case) -> bool:
    """Whether the difference lies in the JSON of a function's declaration."""
    ours, theirs, at = case.sides()
    for text in (ours, theirs):
        for start in _openers(text, at):
            value = _value(text, start)
            if value is not None and value[1] > at and isinstance(value[0], dict):
                function = value[0].get("function")
                row = function if isinstance(function, dict) else value[0]
                if "name" in row and ("parameters" in row or "description" in row):
                    return True
    return False


def _system(case: _Case) -> _Finding | None:
    if case.region is not None and case.region.completion is not None:
        return None
    ours, theirs = case.hunk_texts()
    roles = [case.turns.role(case, case.hunk.stream), case.turns.role(case, case.hunk.prompt, prompt=True)]
    if roles == [None, None] and case.turns.before_user(case):
        roles = ["system", "system"]
    if not {"system", "developer"} & set(roles):
        return None
    if roles[0] == roles[1]:
        said = f"the {roles[0]} text differs: the stream has {_quoted(ours)}, the next prompt {_quoted(theirs)}"
    else:
        said = f"the stream has a {roles[0]} message where the next prompt has a {roles[1]} message"
    return _Finding(BreakCause.CHANGED_SYSTEM, said)


_CHECKS: Final[tuple[Callable[[_Case], _Finding | None], ...]] = (
    _remerge,
    _reasoning,
    _zeroed,
    _stop_token,
    _compaction,
    _boolean,
    _json,
    _call,
    _whitespace,
    _tools,
    _system,
    _lost_call,
    _cut_short,
)
"""What is looked for, the most specific first."""


# -- the two conversations


_GUESSED: Final = frozenset(
    {
        BreakCause.CHANGED_TOOLS,
        BreakCause.CHANGED_SYSTEM,
        BreakCause.COMPACTION,
        BreakCause.REWRITTEN_CALL,
        BreakCause.EMPTY_PARAMETER,
        BreakCause.UNKNOWN,
    }
)
"""Causes that comparing the conversations can prove or disprove."""


def _compared(case: _Case, found: _Finding) -> _Finding:
    """What the text shows, held against the two conversations."""
    before, after = case.before or {}, case.after or {}
    first, second = _messages(before), _messages(after)
    early = case.region is None or case.region.first_prompt
    shown = found.cause in (BreakCause.REWRITTEN_CALL, BreakCause.EMPTY_PARAMETER)
    tools = _changed_tools(before.get("tools"), after.get("tools"))
    if tools and not shown and (early or found.cause is BreakCause.CHANGED_TOOLS):
        return replace(found, cause=BreakCause.CHANGED_TOOLS, detail=tools)
    systems = [[row for row in rows if row.get("role") in ("system", "developer")] for rows in (first, second)]
    if not _equal(*systems) and not shown and (early or found.cause is BreakCause.CHANGED_SYSTEM):
        said = f"the system messages of the two requests differ: {found.detail}"
        return replace(found, cause=BreakCause.CHANGED_SYSTEM, detail=said)
    differs = next((n for n, rows in enumerate(zip(first, second, strict=False)) if not _equal(*rows)), None)
    if differs is None and len(second) >= len(first):
        return _disproven(found)
    at = len(second) if differs is None else differs
    gone = len(first) - len(second)
    ahead = next((n for n in range(at + 1, len(first)) if at < len(second) and _equal(first[n], second[at])), None)
    if ahead is not None or gone > 0:
        count = ahead - at if ahead is not None else gone
        missing = "a message is missing" if count == 1 else f"{count} messages are missing"
        said = f"{missing} from message {at} on: the history was cut or summarised"
        return replace(found, cause=BreakCause.COMPACTION, detail=said)
    one, other = first[at], second[at]
    if not _equal(_calls(one), _calls(other)):
        said = f"message {at} has other tool calls than it had: {found.detail}"
        return replace(found, cause=BreakCause.REWRITTEN_CALL, detail=said)
    if found.cause in (BreakCause.CHANGED_TOOLS, BreakCause.CHANGED_SYSTEM):
        return _disproven(found)
    if found.cause is BreakCause.UNKNOWN:
        return replace(found, detail=f"message {at} ({one.get('role')}) is not what it was: {found.detail}")
    return found


def _disproven(found: _Finding) -> _Finding:
    same = {
        BreakCause.CHANGED_TOOLS: "the tools of both requests are the same, but the template wrote them another way",
        BreakCause.COMPACTION: "the next request has all messages of the one before, but the prompt is shorter",
    }
    if found.cause is BreakCause.CHANGED_SYSTEM:
        note = "though the system messages are the same: the template, or a variable of it such as the date, changed"
        return replace(found, detail=f"{found.detail}, {note}")
    if found.cause in same:
        return _Finding(BreakCause.UNKNOWN, f"{same[found.cause]}: {found.detail}", found.hunk)
    return found


def _messages(conversation: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    rows = conversation.get("messages") or ()
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, Iterable) else []


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # whatever a caller's own types do when compared
        return False


def _calls(message: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Names and arguments of a message's calls; arguments as values, be they written as a string or not."""
    calls = []
    for row in _mappings(message.get("tool_calls")):
        function = row.get("function")
        function = function if isinstance(function, Mapping) else row
        arguments = function.get("arguments")
        parsed = _value(arguments, 0) if isinstance(arguments, str) and arguments else None
        calls.append((function.get("name"), arguments if parsed is None else parsed[0]))
    return calls


def _mappings(rows: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(rows, Iterable) and not isinstance(rows, (str, bytes, Mapping)):
        yield from (row for row in rows if isinstance(row, Mapping))


def _changed_tools(before: Any, after: Any) -> str | None:
    """What became of the tools; None where they are the same."""
    first, second = list(_mappings(before)), list(_mappings(after))
    if _equal(first, second):
        return None
    names: list[dict[str, Mapping[str, Any]]] = [{}, {}]
    for rows, known in ((first, names[0]), (second, names[1])):
        for row in rows:
            function = row.get("function")
            known[str((function if isinstance(function, Mapping) else row).get("name"))] = row
    said = [f"`{name}` was added" for name in names[1] if name not in names[0]]
    said += [f"`{name}` was removed" for name in names[0] if name not in names[1]]
    said += [
        f"`{name}` changed" for name in names[0] if name in names[1] and not _equal(names[0][name], names[1][name])
    ]
    return "the tools of the two requests differ: " + (", ".join(said) or "their order changed")
