"""Deviations: where the ids of a row are not the expected ones, and why, as far as it can be told mechanically.

What the expected rendering knows of its tokens comes first (their message and field, which of them end turns, which
declare tools); what is left is explained as breaks are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...diagnose.break_case import Case
from ...diagnose.break_markup import Markup
from ...diagnose.breaks import explain
from ...diagnose.finding import Cause
from ...diagnose.resync import hunks
from ...diagnose.texts import quoted, text_of, token_text
from ...rendering.renderer import Renderer
from ...tokens.alignment import Hunk
from ...tokens.ids import common_prefix
from ...tokens.kinds import Kind, Part
from ...tokens.tokenizer import Ids
from ...tokens.visible import visible
from .masks import Expected
from .turn_marks import TurnMarks

_MOST: Final = 8
"""Differences of a row that are explained."""

_SHOWN: Final = 24
_AROUND: Final = 6
"""Tokens shown of a difference, and on either side of it."""

_IN_ROWS: Final = {
    Cause.REWRITTEN_CALL: Cause.REWRITTEN_CALL,
    Cause.EMPTY_PARAMETER: Cause.REWRITTEN_CALL,
    Cause.ZEROED_ANCHOR: Cause.UNKNOWN,
}
"""What causes of breaks come to in rows, which nobody carried on from a stream."""


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


class Explainer:
    """Says why rows differ, with what one renderer knows of its template."""

    def __init__(self, renderer: Renderer, marks: TurnMarks) -> None:
        tokenizer = renderer.tokenizer
        self._vocabulary = tokenizer.vocabulary
        self._markup = Markup.of(renderer)
        self._heads = self._markup.turns
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
            hunk = next(hunks(expected.ids, found, at, other), None)
            if hunk is None:
                break
            cause, hunk = self._cause(expected, found, hunk)
            out.append(self._told(cause, expected, found, hunk, start))
            at, other = hunk.stop, hunk.other_stop
        return out

    # -- causes

    def _cause(self, expected: Expected, found: Ids, hunk: Hunk) -> tuple[Cause, Hunk]:
        """Why they differ, and a better idea of where, if there is one."""
        for check in self._checks:
            cause = check(self, expected, found, hunk)
            if cause is not None:
                return cause, hunk
        at, other = hunk.start, hunk.other_start
        if at == len(expected.ids):
            return Cause.UNKNOWN, hunk
        mended = np.concatenate((expected.ids[:at], found[other:]))
        case = Case.at(at, expected.ids, mended, self._markup, expected.sample.kinds == Kind.SAMPLED)
        evidence = explain(case)
        _, stop, _, other_stop = evidence.hunk or case.hunk
        better = Hunk(at, stop, other, other_stop - at + other)
        return self._named(evidence.cause, expected, found, better), better

    def _named(self, cause: Cause, expected: Expected, found: Ids, hunk: Hunk) -> Cause:
        ours, theirs = hunk.sides(expected.ids, found)
        if cause is Cause.BPE_REMERGE:
            control = self._vocabulary.is_control
            here, there = (set(side[control[side]].tolist()) for side in (ours, theirs))
            if here - there:
                return Cause.CONTROL_AS_TEXT
            return Cause.TEXT_AS_CONTROL if there - here else Cause.BPE_REMERGE
        if cause is Cause.STRIPPED_REASONING:
            return Cause.STRIPPED_REASONING if len(ours) > len(theirs) else Cause.REASONING_KEPT
        if cause is Cause.CHANGED_SYSTEM and not expected.has_system:
            roles = self._heads.role(expected.ids, hunk.start), self._heads.role(found, hunk.other_start)
            if "system" in roles and roles[0] != roles[1]:
                return Cause.SYSTEM_MISSING if roles[0] == "system" else Cause.SYSTEM_ADDED
        return _IN_ROWS.get(cause, cause)

    def _unknown_id(self, expected: Expected, found: Ids, hunk: Hunk) -> Cause | None:
        theirs = found[hunk.other_start : hunk.other_stop]
        return Cause.NO_TOKEN if any(map(self._is_unknown, theirs.tolist())) else None

    def _is_unknown(self, index: int) -> bool:
        return not 0 <= index < self._vocabulary.size

    def _begin(self, expected: Expected, found: Ids, hunk: Hunk) -> Cause | None:
        ours, theirs = hunk.sides(expected.ids, found)
        if self._bos is None or hunk.start > 1 or hunk.other_start > 1:
            return None
        if not len(ours) and len(theirs) and (theirs == self._bos).all():
            return Cause.BOS_DOUBLED if expected.ids[0] == self._bos else Cause.BOS_ADDED
        return Cause.BOS_MISSING if ours.tolist() == [self._bos] and not len(theirs) else None

    def _end(self, expected: Expected, found: Ids, hunk: Hunk) -> Cause | None:
        ours, theirs = hunk.sides(expected.ids, found)
        last = hunk.stop == len(expected.ids) and hunk.other_stop == len(found)
        if last and not len(ours) and self._marks.is_prompt(theirs):
            return Cause.GENERATION_PROMPT
        lost, new = self._ending(ours), self._ending(theirs)
        if lost is None or new is None:
            if last and not len(theirs):
                return Cause.CUT
            return None
        if lost and new:
            return Cause.STOP_TOKEN
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
            role = self._heads.role(found, hunk.other_start)
            first = not (expected.sample.messages[: hunk.start] > 0).any()
            turn = role in ("system", "developer") and self._heads.count(theirs) > 0 and len(theirs) > 3
            return Cause.SYSTEM_ADDED if first and turn else None
        here = slice(hunk.start, hunk.stop)
        if not (expected.parts[here] == Part.SCAFFOLD).all():
            return None
        nobody = expected.sample.messages[here] < 0
        named = self._heads.role(expected.ids, hunk.start) == "system"
        turn = named and self._heads.count(ours) > 0 and len(ours) > 3
        return Cause.SYSTEM_MISSING if turn or 2 * int(nobody.sum()) > len(nobody) else None

    def _tools(self, expected: Expected, found: Ids, hunk: Hunk) -> Cause | None:
        """Tools are in the difference: all of them, with little instead, or some, with nothing instead."""
        declared = expected.parts == Part.TOOLS
        inside = int(declared[hunk.start : hunk.stop].sum())
        instead = hunk.other_stop - hunk.other_start
        if inside and inside == int(declared.sum()) and 2 * instead < inside:
            return Cause.TOOLS_MISSING
        return Cause.CHANGED_TOOLS if inside and not instead else None

    def _reasoning(self, expected: Expected, found: Ids, hunk: Hunk) -> Cause | None:
        """The difference is reasoning with its tags, with nothing instead of it."""
        if hunk.other_stop > hunk.other_start or hunk.stop == hunk.start:
            return None
        own = expected.parts[hunk.start : hunk.stop] == Part.REASONING
        return Cause.STRIPPED_REASONING if own.all() else None

    _checks: Final[tuple[Callable[..., Cause | None], ...]] = (
        _unknown_id,
        _begin,
        _reasoning,
        _end,
        _tools,
        _system,
    )
    """What is looked for first."""

    # -- rows that are a part of the expected one

    def _cut_before(self, expected: Expected, found: Ids, start: int) -> Deviation | None:
        """A row that is the end of the expected one."""
        lost = len(expected.ids) - len(found)
        if lost <= 0 or not np.array_equal(expected.ids[lost:], found):
            return None
        hunk = Hunk(0, lost, 0, 0)
        cause = self._begin(expected, found, hunk)
        owners = expected.sample.messages
        if cause is None and not (owners[:lost] >= 0).any() and owners[lost] >= 0:
            declared = (expected.parts[:lost] == Part.TOOLS).any()
            cause = Cause.TOOLS_MISSING if declared else Cause.SYSTEM_MISSING
        return self._told(cause or Cause.CUT, expected, found, hunk, start)

    # -- in words

    def _told(self, cause: Cause, expected: Expected, found: Ids, hunk: Hunk, start: int) -> Deviation:
        message, role, field = expected.place(hunk.start)
        ours, theirs = hunk.sides(expected.ids, found)
        after = found[hunk.other_stop : hunk.other_stop + _AROUND]
        if cause is Cause.CUT:
            detail = self._cut_words(expected, hunk)
        else:
            where = expected.place_words(hunk.start)
            one, other = (quoted(text_of(self._vocabulary, side[:256])) for side in (ours, theirs))
            if cause is Cause.NO_TOKEN:
                other = f"id {next(index for index in theirs.tolist() if self._is_unknown(index))}"
            detail = f"{where}: expected {one}, found {other}"
        return Deviation(
            cause=cause,
            position=start + hunk.other_start,
            expected_position=hunk.start,
            message=message,
            role=role,
            field=field,
            detail=detail,
            lead=self.texts(found[max(0, hunk.other_start - _AROUND) : hunk.other_start]),
            expected=self.texts(ours),
            found=self.texts(theirs),
            rest=self.texts(after[: common_prefix(after, expected.ids[hunk.stop :])]),
        )

    def _cut_words(self, expected: Expected, hunk: Hunk) -> str:
        total, lost = len(expected.ids), hunk.stop - hunk.start
        cut = hunk.stop if hunk.start == 0 else hunk.start
        which = "last" if hunk.start == 0 else "first"
        said = f"the {which} {total - lost:,} of {total:,} tokens are there, {lost:,} are missing"
        messages = expected.sample.messages
        if not 0 < cut < total or messages[cut - 1] != messages[cut]:
            return f"{said}; the cut falls between messages"
        said += f"; the cut falls into {expected.place_words(cut)}"
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
            _shown(token_text(self._vocabulary, index)) if not self._is_unknown(index) else f"⟨id {index}⟩"
            for index in ids[:_SHOWN].tolist()
        ]
        return (*shown, f"… {len(ids) - _SHOWN:,} more") if len(ids) > _SHOWN else tuple(shown)


def _shown(text: str) -> str:
    """A token as `plain_view` shows it; one that is long for its text, cut."""
    text = repr(visible(text[:200]))[1:-1]
    return text if len(text) <= 80 else text[:79] + "…"
