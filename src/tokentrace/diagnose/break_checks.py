"""The checks of `explain_break`: the first that fits gives the cause of a difference."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from functools import cached_property
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import TokentraceError
from ..formats.dialects import REASONING
from ..formats.grammar import Channels
from ..parsing.response import ParsedResponse, ParsedToolCall
from ..show.alignment import Hunk
from ..show.visible import counted
from ..study.turns import common_prefix as shared_text
from ..tokens.ids import common_prefix, runs
from ..tokens.tokenizer import Ids, Tokenizer
from .finding import Cause
from .token_text import READ, TurnHeads, hunks, quoted, spelled_alike, text_of, up_to_shared_end, window

_ALIKE: Final = 12
"""Characters that texts must share to go on alike."""
_HARMONY: Final = Channels()
REASONING_TAGS: Final[tuple[tuple[str, str], ...]] = (
    *((frame.open, frame.close) for frame in REASONING.values() if frame is not None),
    (_HARMONY.opening(_HARMONY.reasoning), f"{_HARMONY.end}{_HARMONY.start}assistant"),
    ("◁think▷", "◁/think▷"),
    ("<reasoning>", "</reasoning>"),
    ("<thinking>", "</thinking>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought\n", "<channel|>"),
    ("<unused94>thought\n", "<unused95>"),
)
"""Texts that open and close reasoning."""
_TOOL_SECTIONS: Final = (
    ("<tools>", "</tools>"),
    ("tool_declare<|im_middle|>", "<|im_end|>"),
    ("namespace functions {", "} // namespace functions"),
    ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    ("<functions>", "</functions>"),
    ("Calls to these tools must go to the commentary channel", "<|end|>"),
    ("\n## Tools\n", "<｜User｜>"),
)
"""Texts between which templates declare tools."""
_INSTRUCTIONS: Final = frozenset({"system", "developer"})


class Match(NamedTuple):
    """A cause. `quotes` show it, if the difference itself does not.

    `hunk` corrects the range of the difference; up to `covered` all of the stream was compared.
    """

    cause: Cause
    quotes: tuple[str, str] | None = None
    hunk: Hunk | None = None
    covered: int = 0


class Case:
    """One difference between a stream and the next prompt, as tokens and as text.

    `ours` and `theirs` are text around it that begins alike; `at` is the first character that
    differs. `completion` is the one that it lies in; `region` is None if nobody knows what was sampled.
    """

    def __init__(
        self,
        stream: Ids,
        prompt: Ids,
        model: Any,
        hunk: Hunk,
        mask: npt.NDArray[np.bool_] | None,
        back: int = READ,
        forward: int = READ,
    ) -> None:
        self.stream, self.prompt, self.model, self.hunk = stream, prompt, model, hunk
        self.tokenizer: Tokenizer = model if isinstance(model, Tokenizer) else model.tokenizer
        self.vocabulary = self.tokenizer.vocabulary
        self.completions = [] if mask is None else runs(mask)
        number = sum(start <= hunk.start for start, _ in self.completions)
        before = self.completions[number - 1] if number else (0, 0)
        self.completion = before if hunk.start < before[1] else None
        where = "" if self.completion else "context after "
        self.region = None if mask is None else f"{where}completion {number}" if number else "first prompt"
        self.lead, ours, theirs = window(self.vocabulary, stream, prompt, hunk, back, forward)
        self.ours, self.theirs = self.lead + ours, self.lead + theirs
        self.at = len(self.lead) + shared_text(ours, theirs)
        self.ended = hunk.start + forward >= len(stream)
        self.sides = hunk.sides(stream, prompt)

    @cached_property
    def heads(self) -> TurnHeads:
        return TurnHeads.of(self.vocabulary, {tag for pair in self.reasoning for tag in pair})

    @cached_property
    def roles(self) -> tuple[str | None, str | None]:
        """The roles of the turns that the difference lies in."""
        hunk = self.hunk
        return self.heads.role(self.stream, hunk.start), self.heads.role(self.prompt, hunk.other_start)

    @cached_property
    def reasoning(self) -> tuple[tuple[str, str], ...]:
        """The tags of the renderer's grammar, then those in use."""
        try:
            frame = None if self.model is self.tokenizer else self.model.grammar().reasoning
        except TokentraceError:
            frame = None
        return (*(((frame.open, frame.close),) if frame is not None and frame.open else ()), *REASONING_TAGS)

    def token_at(self, character: int) -> int:
        """The stream's token at a character of `ours`."""
        size, seen, at = len(self.ours[len(self.lead) : character].encode("utf-8", "surrogatepass")), 0, self.hunk.start
        while seen < size and at < len(self.stream):
            seen += len(self.vocabulary.token_bytes(int(self.stream[at])))
            at += 1
        return at

    def parsed_turns(self) -> list[ParsedResponse]:
        """The completion around the difference, and what the prompt has there; or nothing."""
        if self.model is self.tokenizer or self.completion is None:
            return []
        start, stop = self.completion
        stops = np.isin(self.prompt[self.hunk.other_start :], [*self.model.get_stop_token_ids()])
        end = self.hunk.other_start + (int(stops.argmax()) + 1 if stops.any() else len(stops))
        try:
            sides = self.stream[start:stop], self.prompt[start:end]
            return [self.model.parse_response(side, prompt_ids=self.stream[:start]) for side in sides]
        except TokentraceError:
            return []

    def words(self, match: Match) -> str:
        """The sentence about a match: what its cause means, and what both sides have."""
        sides = (match.hunk or self.hunk).sides(self.stream, self.prompt)
        texts = match.quotes or tuple(text_of(self.vocabulary, side[:64]) for side in sides)
        sizes = ["" if match.quotes or not len(side) else f" ({counted(len(side))})" for side in sides]
        ours, theirs = (f"{quoted(text)}{size}" for text, size in zip(texts, sizes, strict=True))
        role = self.roles[0] or self.roles[1]
        turn = f" in the turn of the {role}" if role and not self.completion else ""
        if match.cause is Cause.UNKNOWN and self.hunk.other_start == len(self.prompt):
            gone = counted(len(self.stream) - self.hunk.start)
            return f"the prompt ends {gone} before the stream: a repeated request, or one taken back"
        meaning = (match.cause.meaning or str(match.cause)).rstrip(".")
        return f"{meaning}: the stream has {ours}{turn}, the next prompt {theirs}"


# -- ids


def no_token(case: Case) -> Match | None:
    wrong = [side[side >= case.vocabulary.size] for side in case.sides]
    first, second = (f"id {ids[0]}" if len(ids) else "" for ids in wrong)
    return Match(Cause.NO_TOKEN, (first, second)) if first or second else None


def first_token(case: Case) -> Match | None:
    """The first control token on one side only, with the same tokens after it."""
    if case.hunk.start > 1 or min(len(case.stream), len(case.prompt)) < 2:
        return None
    for one, other, cause in (
        (case.stream, case.prompt, Cause.BOS_MISSING),
        (case.prompt, case.stream, Cause.BOS_ADDED),
    ):
        same = common_prefix(one[1:], other)
        if int(one[0]) in case.vocabulary.added and same >= min(len(one) - 1, len(other), 8):
            return Match(cause)
    return None


def remerge(case: Case) -> Match | None:
    hunk = spelled_alike(case.vocabulary, case.stream, case.prompt, case.hunk)
    return None if hunk is None else Match(Cause.BPE_REMERGE, hunk=hunk)


# -- reasoning and endings


def stripped_reasoning(case: Case) -> Match | None:
    """A block of reasoning on one side, after which both sides go on alike."""
    for opening, closing in case.reasoning:
        for one, other, lost in ((case.ours, case.theirs, True), (case.theirs, case.ours, False)):
            block = _block(one, other, len(case.lead), opening, closing)
            if block is None or (block[1] == len(one) and lost and not case.ended):
                continue
            body, end = block
            quotes = (opening + body + closing, "")
            hunk = _up_to(case, case.token_at(end)) if lost else None
            return Match(Cause.STRIPPED_REASONING, quotes if lost else quotes[::-1], hunk)
    return None


def _block(one: str, other: str, at: int, opening: str, closing: str) -> tuple[str, int] | None:
    """The body and the end of reasoning around `at` that only `one` has; `other` may have empty tags."""
    begin = one.rfind(opening, 0, at + 2 * len(opening) + 8)
    start = begin + len(opening)
    if begin < 0 or one[at:begin].strip() or closing in one[start:at]:
        return None
    body, close, after = one[start:].partition(closing)
    following = other[min(begin, at) :].lstrip()
    if empty := following.startswith(opening):
        following = following.removeprefix(opening).lstrip()
        if not body.strip() or not following.startswith(closing):
            return None
    following, after = following.removeprefix(closing).lstrip(), after.lstrip()
    if not close and len(body.strip()) >= _ALIKE and body.strip()[:_ALIKE] in other[at:]:
        return None  # both have the text: only the tag differs
    end = start + len(body) + (0 if empty else len(close))
    goes_on = shared_text(after, following) >= min(_ALIKE, len(after))
    return (body, end) if goes_on and not following.startswith(opening) else None


def _up_to(case: Case, end: int) -> Hunk:
    """The difference up to this token of the stream, or to where both sides agree after it."""
    start, at = case.hunk.start, case.hunk.other_start
    after = next(hunks(case.stream, case.prompt, end, at), Hunk(end, end, at, at))
    agree = (after.start, after.other_start) != (end, at)
    return Hunk(start, end, at, at) if agree else Hunk(start, after.stop, at, after.other_stop)


def lost_completion(case: Case) -> Match | None:
    """An empty stream, zeros instead of ids, or the last completion missing whole."""
    at, last = case.hunk.start, next(reversed(case.completions), None)
    following = case.prompt[case.hunk.other_start : case.hunk.other_start + 8]
    zeros = len(following) >= 4 and not following[:4].any() and case.stream[at : at + 4].all()
    if zeros or not len(case.stream):
        return Match(Cause.ZEROED_ANCHOR)
    if last is None or last[0] < at:
        return None
    opened = text_of(case.vocabulary, case.stream[at : min(last[0], at + 64)]).strip()
    if opened and opened not in {opening for opening, _ in case.reasoning}:  # which the prompt may have opened
        return None
    completion = case.stream[slice(*last)].tolist()
    solid = next((index for index in following.tolist() if case.vocabulary.token_bytes(index).strip()), None)
    if solid not in case.heads.structural or solid in completion[:-1] or len(completion) < 2:
        return None
    return Match(Cause.ZEROED_ANCHOR)


def stop_token(case: Case) -> Match | None:
    at, other = case.hunk.start, case.hunk.other_start
    end = len(case.stream) if case.region is None else case.completion[1] if case.completion else -1
    if at != end - 1 or other == len(case.prompt):
        return None
    tokens = case.stream[at : at + 1], case.prompt[other : other + 1]
    if not case.heads.structural.issuperset(np.concatenate(tokens).tolist()):
        return None
    hunk = Hunk(at, at + 1, other, other + 1) if at + 1 == len(case.stream) else None
    ours, theirs = (text_of(case.vocabulary, token) for token in tokens)
    return Match(Cause.STOP_TOKEN, (ours, theirs), hunk)


# -- the context: messages, tools, system text


def compaction(case: Case) -> Match | None:
    """Turns that are gone, or a text that was cut."""
    heads = np.flatnonzero(np.isin(case.stream, case.heads.heads))
    past = case.stream[: heads[-1]] if len(heads) else case.stream  # the last turn may be rendered another way
    for stream in (case.stream, past):
        whole = up_to_shared_end(stream, case.prompt, case.hunk.start)
        if whole is not None and _has_fewer_turns(case, whole, 1):
            return Match(Cause.COMPACTION, hunk=whole)
    ours, theirs = case.sides
    between = (case.region or "").startswith("context") and case.hunk.stop < len(case.stream)
    cut = between and not case.heads.count(ours) and len(ours) >= max(64, 4 * len(theirs))
    return Match(Cause.COMPACTION) if cut or _has_fewer_turns(case, case.hunk, 2) else None


def cut_short(case: Case) -> Match | None:
    whole = Hunk(case.hunk.start, len(case.stream), case.hunk.other_start, len(case.prompt))
    return Match(Cause.COMPACTION, hunk=whole) if _has_fewer_turns(case, whole, 2) else None


def _has_fewer_turns(case: Case, hunk: Hunk, least: int) -> bool:
    ours, theirs = hunk.sides(case.stream, case.prompt)
    turns = case.heads.count(ours)
    if turns < least or turns <= case.heads.count(theirs) or len(ours) < 2 * len(theirs):
        return False
    return turns > 1 or case.heads.role(case.stream, hunk.start) not in _INSTRUCTIONS


def changed_tools(case: Case) -> Match | None:
    """Other tools, or none, where a template declares them."""
    if case.completion or (_INSTRUCTIONS.isdisjoint(case.roles) and None not in case.roles):
        return None  # anybody may write about tools
    ours, theirs = (text_of(case.vocabulary, side[:4096]) for side in case.sides)
    for opening, closing in _TOOL_SECTIONS:
        start = case.lead.rfind(opening)
        if start >= 0 and closing not in case.lead[start:]:
            return Match(Cause.CHANGED_TOOLS)
        if (opening in ours) != (opening in theirs):
            moved = opening in case.ours and opening in case.theirs  # to another place in the prompt
            return Match(Cause.UNKNOWN if moved else Cause.CHANGED_TOOLS)
    return None


def changed_system(case: Case) -> Match | None:
    if case.completion or _INSTRUCTIONS.isdisjoint(case.roles):
        return None
    return Match(Cause.CHANGED_SYSTEM)


# -- values

_LITERAL: Final = re.compile(r"(?:[>:\[,=({]\s*|\n)(true|false|null|True|False|None)(?=\s*(?:[<,\]})]|\Z)|[ \t]*\n)")
"""A word of JSON or Python in the place of a value."""
_PYTHON: Final = {"true": "True", "false": "False", "null": "None"}
_DECODER: Final = json.JSONDecoder()
_OPENERS: Final = 64
"""Braces and brackets before a difference that are tried as the start of a JSON value."""


def boolean(case: Case) -> Match | None:
    """A word of JSON on one side and one of Python on the other, as a value."""
    near = (_LITERAL.finditer(text, max(0, case.at - 80)) for text in (case.ours, case.theirs))
    one, other = (next((match for match in matches if match.end(1) >= case.at), None) for matches in near)
    if one is None or other is None or not one.start(1) == other.start(1) <= case.at:
        return None
    if other[1] != _PYTHON.get(one[1]) and one[1] != _PYTHON.get(other[1]):
        return None
    return Match(Cause.BOOLEAN_CASE, (one[1], other[1]))


def json_format(case: Case) -> Match | None:
    """A JSON value around the difference that is whole and the same on both sides."""
    places = (at for at in range(min(case.at, len(case.ours) - 1), -1, -1) if case.ours[at] in "{[")
    for start in islice(places, _OPENERS):
        one, other = _value_at(case.ours, start), _value_at(case.theirs, start)
        if one is None or other is None or min(one[1], other[1]) <= case.at:
            continue
        if not _same_value(one[0], other[0]):
            return None
        quotes = case.ours[start : one[1]], case.theirs[start : other[1]]
        return Match(Cause.JSON_FORMAT, quotes, covered=case.token_at(one[1]))
    return None


def _value_at(text: str, start: int) -> tuple[Any, int] | None:
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


def _same_value(one: Any, other: Any) -> bool:
    """True if two values are equal in JSON, or one is a string that holds the other."""
    if isinstance(one, str) != isinstance(other, str):
        text, value = (one, other) if isinstance(one, str) else (other, one)
        parsed = _value_at(text, 0) if isinstance(value, (dict, list)) else None
        return parsed is not None and parsed[1] == len(text) and _same_value(parsed[0], value)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(map(_same_value, one.values(), map(other.get, one)))
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same_value, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def changed_call(case: Case) -> Match | None:
    """A call of the completion that the prompt has in another form, or lacks."""
    calls = [[call for call in turn.tool_calls if call.name] for turn in case.parsed_turns()]
    if not calls or case.completion is None:
        return None
    ours, theirs = calls
    match = next(filter(None, map(_compare_calls, ours, theirs)), None)
    if match is None and len(ours) > len(theirs):
        match = Match(Cause.REWRITTEN_CALL, (str(ours[len(theirs)].name), ""))
    return None if match is None else match._replace(covered=case.completion[1])


def _compare_calls(one: ParsedToolCall, other: ParsedToolCall) -> Match | None:
    if one.name != other.name:
        return Match(Cause.REWRITTEN_CALL, (str(one.name), str(other.name)))
    ours, theirs = (dict(call.raw_arguments or call.arguments or {}) for call in (one, other))
    for key in ours.keys() & theirs.keys():
        if not _same_value(ours[key], theirs[key]):
            return _changed_value(key, ours[key], theirs[key])
    for key in ours.keys() ^ theirs.keys():
        here, there = (_spelled(key, values[key]) if key in values else "" for values in (ours, theirs))
        return Match(Cause.EMPTY_PARAMETER, (here, there))
    if list(ours) != list(theirs):
        return Match(Cause.JSON_FORMAT)
    if (one.arguments is None) != (other.arguments is None) or "".join(one.raw.split()) != "".join(other.raw.split()):
        return Match(Cause.EMPTY_PARAMETER, (one.raw, other.raw))
    return None


def _changed_value(key: str, one: Any, other: Any) -> Match:
    cause = Cause.REWRITTEN_CALL
    if isinstance(one, bool) != isinstance(other, bool) and str(one).lower() == str(other).lower():
        cause = Cause.BOOLEAN_CASE
    if isinstance(one, str) and isinstance(other, str) and one.split() == other.split():
        cause = Cause.WHITESPACE
    return Match(cause, (_spelled(key, one), _spelled(key, other)))


def _spelled(key: str, value: Any) -> str:
    return f"{key}={json.dumps(value, ensure_ascii=False, default=str)}"


def whitespace(case: Case) -> Match | None:
    one, other = case.ours[case.at :], case.theirs[case.at :]
    ours, theirs = one.lstrip(), other.lstrip()
    if len(ours) == len(one) and len(theirs) == len(other):
        return None
    solid, other_solid = ("".join(text[:256].split()) for text in (ours, theirs))
    size = min(8, len(solid)) if case.ended else 8
    if solid[:size] != other_solid[:size]:
        return None
    return Match(Cause.WHITESPACE, (one[: len(one) - len(ours)], other[: len(other) - len(theirs)]))


CHECKS: Final[tuple[Callable[[Case], Match | None], ...]] = (
    *(no_token, first_token, remerge, stripped_reasoning, lost_completion, stop_token, compaction),
    *(boolean, json_format, changed_call, whitespace, changed_tools, changed_system, cut_short),
)
"""The most specific first."""


def explain(case: Case) -> Match:
    for check in CHECKS:
        with contextlib.suppress(RecursionError):  # JSON may be nested as deeply as anybody likes
            if (match := check(case)) is not None:
                return match
    return Match(Cause.UNKNOWN)
