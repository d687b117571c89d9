"""Deviations: where the ids of a row are not the expected ones, and why, as far as it can be told mechanically.

Differences are found as `explain_break` finds them. What the expected rendering knows of its tokens comes first
(whose they are, which of them end turns, what was declared); for what is left, `explain_break` is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from ...compare.breaks import Break, BreakCause, explain_break
from ...compare.breaks.case import quoted
from ...compare.breaks.turn_heads import TurnHeads
from ...compare.token_diff import Hunk, next_hunk, text_of, token_text
from ...rendering.renderer import Renderer
from ...tokens.differences import common_prefix
from ...tokens.kinds import Part
from ...tokens.tokenizer import Ids
from ...tokens.visible import visible
from .expected import Expected
from .turn_marks import TurnMarks

_MOST: Final = 8
"""Differences of a row that are explained."""

_SHOWN: Final = 24
_AROUND: Final = 6
"""Tokens shown of a difference, and on either side of it."""


class Cause(StrEnum):
    """Why a row is not what it is expected to be. The value is its name for people."""

    BOS_DOUBLED = "BOS token doubled"
    BOS_ADDED = "BOS token added"
    BOS_MISSING = "BOS token missing"
    SYSTEM_ADDED = "system prompt added that the conversation does not have"
    SYSTEM_MISSING = "the template's default system prompt missing"
    SYSTEM_TEXT = "other system text"
    REASONING_LEFT_OUT = "reasoning left out"
    REASONING_KEPT = "reasoning kept that the template leaves out"
    GENERATION_PROMPT = "generation prompt at the end"
    LAST_WHITESPACE = "white space at the end added or missing"
    END_ADDED = "end token added"
    END_MISSING = "end token missing"
    END_OTHER = "another end token"
    TOOLS_MISSING = "tools missing"
    TOOLS_OTHER = "other tools"
    CONTROL_AS_TEXT = "control token spelled as text"
    TEXT_AS_CONTROL = "text turned into a control token"
    DRIFT = "other encoding of the same text"
    WHITESPACE = "white space"
    JSON = "the same JSON written another way"
    BOOLEAN = "true, false or null written another way"
    CALL = "another tool call"
    MESSAGES = "messages missing"
    CUT = "cut"
    NO_TOKEN = "an id that the vocabulary does not have"
    TEXT = "other text"
    MASK_SHIFTED = "mask shifted by one"


_BY_BREAK: Final = {
    BreakCause.BOOLEAN_CASE: Cause.BOOLEAN,
    BreakCause.JSON_FORMAT: Cause.JSON,
    BreakCause.EMPTY_PARAMETER: Cause.CALL,
    BreakCause.REWRITTEN_CALL: Cause.CALL,
    BreakCause.CHANGED_TOOLS: Cause.TOOLS_OTHER,
    BreakCause.CHANGED_SYSTEM: Cause.SYSTEM_TEXT,
    BreakCause.COMPACTION: Cause.MESSAGES,
    BreakCause.STOP_TOKEN: Cause.END_OTHER,
    BreakCause.WHITESPACE: Cause.WHITESPACE,
}


@dataclass(frozen=True, slots=True)
class Deviation:
    """A difference: the row holds `found` where `expected` belongs. `str()` of it is a sentence.

    `position` is the first token that differs, in the row as it is given; `expected_position` in the expected row.
    `message` (-1: none), `role` and `field` are those of the expected token there. The texts are single tokens, at
    most a few of them, `lead` and `rest` what both sides hold around the difference.
    """

    cause: Cause
    position: int
    expected_position: int
    message: int
    role: str
    field: str
    detail: str
    lead: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    rest: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"token {self.position:,}: {self.cause}: {self.detail}"


def hunks(expected: Ids, found: Ids) -> Iterator[Hunk]:
    """All that differs, in order; outside of it the ids are the same."""
    at = other = 0
    while True:
        hunk = _next(expected, found, at, other)
        if hunk is None:
            return
        yield hunk
        at, other = hunk.stream_stop, hunk.prompt_stop


def _next(expected: Ids, found: Ids, at: int, other: int) -> Hunk | None:
    same = common_prefix(expected[at:], found[other:])
    at, other = at + same, other + same
    if at == len(expected):
        return Hunk(at, at, other, len(found), False) if other < len(found) else None
    if other == len(found):
        return Hunk(at, len(expected), other, other, False)
    return next_hunk(expected, found, at, other)


class Explainer:
    """Says why rows differ, with what one renderer knows of its template."""

    def __init__(self, renderer: Renderer, marks: TurnMarks) -> None:
        tokenizer = renderer.tokenizer
        self._renderer = renderer
        self._vocabulary = tokenizer.vocabulary
        self._heads = TurnHeads.of(tokenizer.vocabulary)
        self._marks = marks
        self._bos = tokenizer.token_id(tokenizer.variables.get("bos_token", ""))
        self._ends = frozenset({*renderer.get_stop_token_ids(), *renderer.turn_stop_ids()})

    def explain(self, expected: Expected, found: Ids, start: int = 0) -> list[Deviation]:
        """What differs, the first few places of it; `start` tokens stood before `found` in the row."""
        whole = self._cut_before(expected, found, start)
        if whole is not None:
            return [whole]
        out: list[Deviation] = []
        at = other = 0
        while len(out) < _MOST:
            hunk = _next(expected.ids, found, at, other)
            if hunk is None:
                break
            cause, hunk = self._cause(expected, found, hunk)
            out.append(self._told(cause, expected, found, hunk, start))
            at, other = hunk.stream_stop, hunk.prompt_stop
        return out

    # -- causes

    def _cause(self, expected: Expected, found: Ids, hunk: Hunk) -> tuple[Cause, Hunk]:
        """Why they differ, and a better idea of where, if there is one."""
        for check in self._checks:
            cause = check(self, expected, found, hunk)
            if cause is not None:
                return cause, hunk
        at, other = hunk.stream, hunk.prompt
        mended = np.concatenate((expected.ids[:at], found[other:]))
        broken = explain_break(expected.ids, mended, self._renderer, kinds=expected.sample.kinds)
        if broken is None:
            return Cause.TEXT, hunk
        stop, other_stop = broken.stream_range[1], broken.prompt_range[1] - at + other
        better = Hunk(at, stop, other, other_stop, hunk.meets) if (stop, other_stop) != (at, other) else hunk
        return self._named(broken, expected, found, better), better

    def _named(self, broken: Break, expected: Expected, found: Ids, hunk: Hunk) -> Cause:
        ours, theirs = hunk.sides(expected.ids, found)
        if broken.cause is BreakCause.BPE_REMERGE:
            control = self._vocabulary.is_control
            here, there = (set(side[control[side]].tolist()) for side in (ours, theirs))
            if here - there:
                return Cause.CONTROL_AS_TEXT
            return Cause.TEXT_AS_CONTROL if there - here else Cause.DRIFT
        if broken.cause is BreakCause.STRIPPED_REASONING:
            return Cause.REASONING_LEFT_OUT if len(ours) > len(theirs) else Cause.REASONING_KEPT
        if broken.cause is BreakCause.CHANGED_SYSTEM and not expected.has_system:
            roles = self._heads.role(expected.ids, hunk.stream), self._heads.role(found, hunk.prompt)
            if "system" in roles and roles[0] != roles[1]:
                return Cause.SYSTEM_MISSING if roles[0] == "system" else Cause.SYSTEM_ADDED
        return _BY_BREAK.get(broken.cause, Cause.TEXT)

    def _unknown_id(self, expected: Expected, found: Ids, hunk: Hunk) -> Cause | None:
        theirs = found[hunk.prompt : hunk.prompt_stop]
        return Cause.NO_TOKEN if any(map(self._is_none, theirs.tolist())) else None

    def _is_none(self, index: int) -> bool:
        """Whether there is no such token."""
        return not 0 <= index < self._vocabulary.size

    def _begin(self, expected: Expected, found: Ids, hunk: Hunk) -> Cause | None:
        ours, theirs = hunk.sides(expected.ids, found)
        if self._bos is None or hunk.stream > 1 or hunk.prompt > 1:
            return None
        if not len(ours) and len(theirs) and (theirs == self._bos).all():
            return Cause.BOS_DOUBLED if expected.ids[0] == self._bos else Cause.BOS_ADDED
        return Cause.BOS_MISSING if ours.tolist() == [self._bos] and not len(theirs) else None

    def _end(self, expected: Expected, found: Ids, hunk: Hunk) -> Cause | None:
        ours, theirs = hunk.sides(expected.ids, found)
        last = hunk.stream_stop == len(expected.ids) and hunk.prompt_stop == len(found)
        if last and not len(ours) and self._marks.is_prompt(theirs):
            return Cause.GENERATION_PROMPT
        lost, new = self._ending(ours), self._ending(theirs)
        if lost is None or new is None:
            if last and not len(theirs):
                return Cause.CUT
            return None
        if lost and new:
            return Cause.END_OTHER
        if lost or new:
            return Cause.END_MISSING if lost else Cause.END_ADDED
        return Cause.LAST_WHITESPACE if last else None

    def _ending(self, ids: Ids) -> bool | None:
        """Whether ids hold a token that ends turns, and but for white space nothing else; None: they hold more."""
        ends = [index in self._ends for index in ids.tolist()]
        blank = all(
            end or not self._vocabulary.token_bytes(index).strip()
            for index, end in zip(ids.tolist(), ends, strict=True)
        )
        return any(ends) if blank else None

    def _system(self, expected: Expected, found: Ids, hunk: Hunk) -> Cause | None:
        """A system prompt of the template's own that one side has and the other has not."""
        ours, theirs = hunk.sides(expected.ids, found)
        if expected.has_system or bool(len(ours)) == bool(len(theirs)):
            return None
        if len(theirs):
            role = self._heads.role(found, hunk.prompt)
            first = not (expected.sample.messages[: hunk.stream] > 0).any()
            turn = role in ("system", "developer") and self._heads.count(theirs) > 0 and len(theirs) > 3
            return Cause.SYSTEM_ADDED if first and turn else None
        here = slice(hunk.stream, hunk.stream_stop)
        if not (expected.parts[here] == Part.SCAFFOLD).all():
            return None
        nobody = expected.sample.messages[here] < 0
        named = self._heads.role(expected.ids, hunk.stream) == "system"
        turn = named and self._heads.count(ours) > 0 and len(ours) > 3
        return Cause.SYSTEM_MISSING if turn or 2 * int(nobody.sum()) > len(nobody) else None

    def _tools(self, expected: Expected, found: Ids, hunk: Hunk) -> Cause | None:
        """Tools stand in the difference: all of them, with little instead, or some, with nothing instead."""
        declared = expected.parts == Part.TOOLS
        inside = int(declared[hunk.stream : hunk.stream_stop].sum())
        instead = hunk.prompt_stop - hunk.prompt
        if inside and inside == int(declared.sum()) and 2 * instead < inside:
            return Cause.TOOLS_MISSING
        return Cause.TOOLS_OTHER if inside and not instead else None

    def _reasoning(self, expected: Expected, found: Ids, hunk: Hunk) -> Cause | None:
        """Nothing but reasoning with its tags stands in the difference, and nothing instead of it."""
        if hunk.prompt_stop > hunk.prompt or hunk.stream_stop == hunk.stream:
            return None
        own = expected.parts[hunk.stream : hunk.stream_stop] == Part.REASONING
        return Cause.REASONING_LEFT_OUT if own.all() else None

    _checks: Final[tuple[Callable[..., Cause | None], ...]] = (
        _unknown_id,
        _begin,
        _reasoning,
        _end,
        _tools,
        _system,
    )
    """What is looked for before `explain_break` is asked."""

    # -- rows that are a part of the expected one

    def _cut_before(self, expected: Expected, found: Ids, start: int) -> Deviation | None:
        """A row that is the end of the expected one."""
        lost = len(expected.ids) - len(found)
        if lost <= 0 or not np.array_equal(expected.ids[lost:], found):
            return None
        hunk = Hunk(0, lost, 0, 0, True)
        cause = self._begin(expected, found, hunk)
        owners = expected.sample.messages
        if cause is None and not (owners[:lost] >= 0).any() and owners[lost] >= 0:
            declared = (expected.parts[:lost] == Part.TOOLS).any()
            cause = Cause.TOOLS_MISSING if declared else Cause.SYSTEM_MISSING
        return self._told(cause or Cause.CUT, expected, found, hunk, start)

    # -- in words

    def _told(self, cause: Cause, expected: Expected, found: Ids, hunk: Hunk, start: int) -> Deviation:
        message, role, field = expected.place(hunk.stream)
        ours, theirs = hunk.sides(expected.ids, found)
        after = found[hunk.prompt_stop : hunk.prompt_stop + _AROUND]
        if cause is Cause.CUT:
            detail = self._cut_words(expected, hunk)
        else:
            where = expected.whereabouts(hunk.stream)
            one, other = (quoted(text_of(self._vocabulary, side[:256])) for side in (ours, theirs))
            if cause is Cause.NO_TOKEN:
                other = f"id {next(index for index in theirs.tolist() if self._is_none(index))}"
            detail = f"{where}: expected {one}, found {other}"
        return Deviation(
            cause=cause,
            position=start + hunk.prompt,
            expected_position=hunk.stream,
            message=message,
            role=role,
            field=field,
            detail=detail,
            lead=self.texts(found[max(0, hunk.prompt - _AROUND) : hunk.prompt]),
            expected=self.texts(ours),
            found=self.texts(theirs),
            rest=self.texts(after[: common_prefix(after, expected.ids[hunk.stream_stop :])]),
        )

    def _cut_words(self, expected: Expected, hunk: Hunk) -> str:
        total, lost = len(expected.ids), hunk.stream_stop - hunk.stream
        cut = hunk.stream_stop if hunk.stream == 0 else hunk.stream
        which = "last" if hunk.stream == 0 else "first"
        said = f"the {which} {total - lost:,} of {total:,} tokens are there, {lost:,} are missing"
        messages = expected.sample.messages
        if not 0 < cut < total or messages[cut - 1] != messages[cut]:
            return f"{said}; the cut falls between messages"
        said += f"; the cut falls into {expected.whereabouts(cut)}"
        scaffold = (expected.parts == Part.SCAFFOLD) | (expected.parts == len(Part))
        if scaffold[cut - 1] and scaffold[cut]:
            said += " and leaves half of what the template writes there"
        elif (
            expected.parts[cut] in (Part.TOOL_CALLS, Part.REASONING) and expected.parts[cut - 1] == expected.parts[cut]
        ):
            said += ", which is left unclosed"
        return said

    def texts(self, ids: Ids) -> tuple[str, ...]:
        """Tokens for people, each on its own, at most a few."""
        shown = [
            _shown(token_text(self._vocabulary, index)) if not self._is_none(index) else f"⟨id {index}⟩"
            for index in ids[:_SHOWN].tolist()
        ]
        return (*shown, f"… {len(ids) - _SHOWN:,} more") if len(ids) > _SHOWN else tuple(shown)


def _shown(text: str) -> str:
    """A token as `plain_view` shows it; one that is long for its text, cut."""
    text = repr(visible(text[:200]))[1:-1]
    return text if len(text) <= 80 else text[:79] + "…"
