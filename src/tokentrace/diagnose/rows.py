"""Compare a row of ids with the one that the template gives for its conversation: ids, and mask.

What the expected rendering knows about its tokens comes first (message, field, stop tokens,
declared tools); everything else is explained as breaks are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from ..data.sources import ROW_BYTES, Format, Row, Source
from ..data.tokenizing import RowResult, RowTokenizer, TokenizeSettings
from ..errors import InputError
from ..rendering.renderer import Renderer
from ..samples.sample import Sample
from ..show.alignment import Hunk
from ..show.visible import counted
from ..study.probes import USER
from ..tokens.ids import common_prefix
from ..tokens.kinds import Kind, Part
from ..tokens.tokenizer import Ids
from .break_checks import Case, explain
from .finding import Cause, Finding
from .records import Mask
from .resync import hunks, next_hunk
from .row_inputs import IdsRow, RowColumns, SourceRows, has_conversation, read_ids_row
from .token_text import Parts, TurnHeads, contrast, quoted, text_of

_MOST: Final = 8
"""Differences of a row that are explained."""
_PROMPT: Final = len(Part)
"""The code of a generation prompt among parts."""
_PARTS: Final = {**{int(part): part.name.lower().replace("_", " ") for part in Part}, _PROMPT: "generation prompt"}
_OURS: Final = frozenset({"source", "row", "sample"})
"""Columns by which our rows name where they come from."""


class Outcome(StrEnum):
    """What a row came to."""

    SAME = "same"
    IDS = "ids differ"
    MASK = "mask differs"
    BOTH = "ids and mask differ"
    CUT = "cut"
    """The beginning or the end of the expected row, with its mask."""
    UNCHECKED = "unchecked"
    """It has no conversation, and nothing else is wrong with it."""
    BAD = "bad"
    """It cannot be read, contradicts itself, or its conversation gives no row."""


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """What one row came to: findings in its ids, with `contrasts`, then in its mask."""

    source: str
    row: int
    line: int | None
    outcome: Outcome = Outcome.SAME
    reason: str | None = None
    findings: tuple[Finding, ...] = ()
    contrasts: tuple[Parts, ...] = ()
    tokens: int = 0
    trained: int | None = None
    expected_tokens: int | None = None
    expected_trained: int | None = None
    padding: int = 0

    @property
    def causes(self) -> list[Cause]:
        """Why ids differ, or that the mask is shifted; each cause once."""
        return list(dict.fromkeys(one.cause for one in self.findings if one.cause not in MASK_CAUSES))

    @property
    def mask(self) -> list[Finding]:
        return [one for one in self.findings if one.cause in MASK_CAUSES]

    @property
    def position(self) -> int | None:
        """The first token at which ids or mask differ."""
        return min((one.position for one in self.findings if one.position is not None), default=None)


MASK_CAUSES: Final = (Cause.MASK_ADDED, Cause.MASK_MISSING)


class Expected:
    """The row that a conversation gives, with the rendering that it comes from."""

    def __init__(self, sample: Sample) -> None:
        assert sample.rendered is not None
        self.sample, self.ids, self.mask, self.messages = sample, sample.ids, sample.mask, sample.messages
        self._rendered, self._offset = sample.rendered, sample.offset

    @cached_property
    def parts(self) -> npt.NDArray[np.uint8]:
        """What each token says: a `Part`, or `_PROMPT` before a turn."""
        parts = self.sample.parts
        codes = np.zeros(len(self.ids), np.uint8) if parts is None else parts.copy()
        for turn in self._rendered.turns:
            before = slice(0, max(0, turn.start - self._offset))
            scaffold = (self.messages[before] == turn.message) & (codes[before] == Part.SCAFFOLD)
            codes[before][scaffold] = _PROMPT
        return codes

    def role(self, message: int) -> str:
        return self._rendered.role(message) or "template"

    @cached_property
    def has_system(self) -> bool:
        return any(self.role(at) in ("system", "developer") for at in np.unique(self.messages).tolist())

    def origin(self, at: int) -> tuple[str, str, int]:
        """The role, the part and the message of a token."""
        message = int(self.messages[at])
        return self.role(message), _PARTS[int(self.parts[at])], message

    def place(self, at: int) -> tuple[int | None, str]:
        """The message of a token and its field, as ``message 2 (user), content``."""
        if at >= len(self.ids):
            return None, "after the end"
        role, part, message = self.origin(at)
        if message < 0:
            return None, "the template's own text"
        at += self._offset
        field = next((name for name in self._rendered.fields[at : at + 1] if name != "scaffold"), part)
        return message, f"message {message} ({role}), {field}"


class RowChecker:
    """Checks rows, one at a time. Raises InputError only for a bad setting."""

    def __init__(
        self,
        settings: TokenizeSettings,
        *,
        sources: Sequence[Source] = (),
        columns: RowColumns = RowColumns(),  # noqa: B008 (frozen)
        pad_token: str | None = None,
    ) -> None:
        self.tokenizer = RowTokenizer(settings)
        tokenizer = self.tokenizer.renderer.tokenizer
        self._ids, self._columns = _IdsChecker(self.tokenizer.renderer), columns
        self._sources = SourceRows(sources, row_bytes=max(settings.row_bytes, ROW_BYTES))
        self._pad = tokenizer.token_id(pad_token or tokenizer.variables.get("pad_token", ""))
        if pad_token and self._pad is None:
            raise InputError(f"{pad_token!r} is not a control token of {tokenizer.name or 'the tokenizer'}")

    def check(
        self, row: Row, source: str = "rows", form: Format = Format.LINES, result: RowResult | None = None
    ) -> CheckedRow:
        """Check a row. `result` is what its conversation gives, if the row does not name it."""
        checked = CheckedRow(source, row.number, row.line)
        try:
            if row.problem is not None:
                raise InputError(row.problem)
            actual = read_ids_row(row.value, self._columns)
        except InputError as error:
            return replace(checked, outcome=Outcome.BAD, reason=" ".join(str(error).split()))
        trained = None if actual.mask is None else int(actual.mask.sum())
        checked = replace(checked, tokens=len(actual.ids), trained=trained, padding=actual.padding)
        expected = result or self._conversation(row, actual, source, form)
        if isinstance(expected, str):
            return self._alone(actual, expected, checked)
        if expected.bad is not None:
            return replace(checked, outcome=Outcome.BAD, reason=f"its conversation gives no row: {expected.bad.reason}")
        return self._compare(actual, expected, checked)

    def _conversation(self, row: Row, actual: IdsRow, source: str, form: Format) -> RowResult | str:
        """What the row's conversation gives, or why there is none."""
        columns = actual.columns
        if has_conversation(columns, self.tokenizer.settings.columns):
            return self.tokenizer.tokenize(Row(row.number, row.line, dict(columns)), source, form)
        if not (columns.keys() >= _OURS and isinstance(columns["source"], str) and isinstance(columns["row"], int)):
            return "the row holds no conversation and does not say where it is"
        origin = self._sources.row(columns["source"], columns["row"])
        if isinstance(origin, str):
            return origin
        return self.tokenizer.tokenize(origin[1], origin[0].name, origin[0].format)

    def _alone(self, row: IdsRow, reason: str, checked: CheckedRow) -> CheckedRow:
        """Check a row without its conversation: only its ids can be wrong."""
        size = self.tokenizer.renderer.tokenizer.vocabulary.size
        outside = np.flatnonzero(row.ids >= size)
        if not len(outside):
            return replace(checked, outcome=Outcome.UNCHECKED, reason=reason)
        at = int(outside[0])
        words = f"token {row.start + at} is {row.ids[at]}, and the vocabulary has {size:,} ids"
        return replace(checked, outcome=Outcome.BAD, reason=words)

    def _compare(self, actual: IdsRow, result: RowResult, checked: CheckedRow) -> CheckedRow:
        expected, reason = _best(actual, result)
        row = actual.without_padding(self._pad, expected.ids)
        differing = list(hunks(expected.ids, row.ids))
        findings, contrasts = self._ids.check(expected, row.ids, row.start) if differing else ([], [])
        wrong: list[Finding] = []
        if row.mask is not None:
            wrong = _mask_findings(_wrong_mask(expected, row.ids, row.mask, differing), row.start)
            wrong += _mask_findings((("template", "padding", -1, True, at) for at in row.trained_padding), 0)
            if wrong and not differing and (moved := _shift(expected.mask, row.mask)):
                findings.append(Finding(Cause.MASK_SHIFTED, words=f"moved by one token to the {moved}"))
        cut = {one.cause for one in findings} == {Cause.CUT}
        ids = Outcome.BOTH if wrong else Outcome.CUT if cut else Outcome.IDS
        return replace(
            checked,
            outcome=ids if differing else Outcome.MASK if wrong else Outcome.SAME,
            reason=reason,
            findings=(*findings, *wrong),
            contrasts=tuple(contrasts),
            tokens=len(row.ids),
            padding=row.padding,
            expected_tokens=len(expected.ids),
            expected_trained=expected.sample.trained,
        )


def _best(actual: IdsRow, result: RowResult) -> tuple[Expected, str | None]:
    """The sample that the row names, or the one that it shares most with."""
    samples, columns = result.samples, actual.columns
    number = columns.get("sample") if columns.keys() >= _OURS else None
    if isinstance(number, int) and 0 <= number < len(samples):
        return Expected(samples[number]), None
    best = max(samples, key=lambda one: (common_prefix(one.ids, actual.ids), -abs(len(one.ids) - len(actual.ids))))
    count = counted(len(samples), "sample")
    words = f"it is sample {number} of its conversation, which gives {count} with these settings"
    return Expected(best), words if isinstance(number, int) else None


# -- masks

_Wrong = tuple[str, str, int, bool, int]
"""A token with a wrong mask: role, part, message, whether it is trained, position."""


def _wrong_mask(expected: Expected, ids: Ids, mask: Mask, differing: Sequence[Hunk]) -> Iterator[_Wrong]:
    """Tokens with another mask than the expected one where ids agree.

    Where ids differ, only a stretch counts that is trained in place of one that is not, or the
    other way round.
    """
    at = other = 0
    for hunk in (*differing, Hunk(len(expected.ids), len(expected.ids), len(ids), len(ids))):
        size = min(hunk.start - at, hunk.other_start - other)
        for offset in np.flatnonzero(expected.mask[at : at + size] != mask[other : other + size]).tolist():
            yield *expected.origin(at + offset), not expected.mask[at + offset], other + offset
        theirs, ours = hunk.sides(expected.mask, mask)
        if len(ours) and bool(theirs.any()) != bool(ours.any()):
            origin = expected.origin(hunk.start) if len(theirs) else ("template", "added tokens", -1)
            for position in np.flatnonzero(ours if ours.any() else np.ones_like(ours)).tolist():
                yield *origin, bool(ours.any()), hunk.other_start + position
        at, other = hunk.stop, hunk.other_stop


def _mask_findings(wrong: Iterable[_Wrong], start: int) -> list[Finding]:
    """One finding for the tokens of each role and part."""
    groups: dict[tuple[str, str, bool], list[tuple[int, int]]] = {}
    for role, part, message, trained, at in wrong:
        groups.setdefault((role, part, trained), []).append((at, message))
    out = []
    for (role, part, trained), places in groups.items():
        turns = len({message for _, message in places if message >= 0})
        name = {"stop": "stop token", "content": "text"}.get(part, part)
        of = f" of {counted(turns, f'{role} turn')}" if turns and role != "template" else ""
        cause = Cause.MASK_ADDED if trained else Cause.MASK_MISSING
        words = f"{name}{of} {'trained' if trained else 'not trained'} ({counted(len(places))})"
        position = start + min(places)[0]
        out.append(Finding(cause, role, field=part, words=words, position=position, tokens=len(places)))
    return sorted(out, key=lambda finding: finding.position or 0)


def _shift(expected: Mask, actual: Mask) -> str:
    """The direction in which a mask is moved by one token, or nothing."""
    if len(expected) != len(actual) or not expected.any():
        return ""
    right = np.array_equal(expected[:-1], actual[1:]) and not actual[0]
    left = np.array_equal(expected[1:], actual[:-1]) and not actual[-1]
    return "right" if right else "left" if left else ""


# -- ids


class _IdsChecker:
    """Explains why the ids of rows differ, for one renderer."""

    def __init__(self, renderer: Renderer) -> None:
        tokenizer = renderer.tokenizer
        self._renderer, self._vocabulary = renderer, tokenizer.vocabulary
        prompted = renderer.silent().render([dict(USER)], add_generation_prompt=True)
        self._prompt = prompted.ids[[field == "generation_prompt" for field in prompted.fields]]
        self._heads = TurnHeads.of(tokenizer.vocabulary)
        self._bos = tokenizer.token_id(tokenizer.variables.get("bos_token", ""))
        self._ends = frozenset({*renderer.get_stop_token_ids(), *renderer.turn_stop_ids()})

    def check(self, expected: Expected, ids: Ids, start: int) -> tuple[list[Finding], list[Parts]]:
        """The first few differences as findings and as tokens; `start` tokens came before."""
        whole = self._cut_before(expected, ids)
        differences = [] if whole is None else [whole]
        at = other = 0
        while whole is None and len(differences) < _MOST:
            hunk = next(hunks(expected.ids, ids, at, other), None)
            if hunk is None:
                break
            cause, hunk = self._explain(expected, ids, hunk)
            differences.append((cause, hunk))
            at, other = hunk.stop, hunk.other_stop
        findings = [self._finding(cause, hunk, expected, ids, start) for cause, hunk in differences]
        return findings, [contrast(self._vocabulary, expected.ids, ids, hunk, fine=False) for _, hunk in differences]

    def _cut_before(self, expected: Expected, ids: Ids) -> tuple[Cause, Hunk] | None:
        """A row that is the end of the expected one."""
        lost = len(expected.ids) - len(ids)
        if lost <= 0 or not np.array_equal(expected.ids[lost:], ids):
            return None
        cause = Cause.BOS_MISSING if expected.ids[:lost].tolist() == [self._bos] else Cause.CUT
        if cause is Cause.CUT and not (expected.messages[:lost] >= 0).any() and expected.messages[lost] >= 0:
            cause = Cause.TOOLS_MISSING if (expected.parts[:lost] == Part.TOOLS).any() else Cause.SYSTEM_MISSING
        return cause, Hunk(0, lost, 0, 0)

    def _explain(self, expected: Expected, ids: Ids, hunk: Hunk) -> tuple[Cause, Hunk]:
        """The cause of a difference, and its corrected range."""
        cause = self._by_place(expected, ids, hunk)
        at, other = hunk.start, hunk.other_start
        if cause is not None or at == len(expected.ids):
            return cause or Cause.UNKNOWN, hunk
        aligned = np.concatenate((expected.ids[:at], ids[other:]))
        sampled = expected.sample.kinds == Kind.SAMPLED
        case = Case(expected.ids, aligned, self._renderer, next_hunk(expected.ids, aligned, at, at), sampled)
        match = explain(case)
        better = match.hunk or case.hunk
        better = Hunk(at, better.stop, other, better.other_stop - at + other)
        return self._row_cause(match.cause, expected, ids, better), better

    def _row_cause(self, cause: Cause, expected: Expected, ids: Ids, hunk: Hunk) -> Cause:
        """What a cause of breaks is called in rows."""
        ours, theirs = hunk.sides(expected.ids, ids)
        if cause is Cause.BPE_REMERGE:
            control = self._vocabulary.is_control
            here, there = (set(side[control[side]].tolist()) for side in (ours, theirs))
            return Cause.CONTROL_AS_TEXT if here - there else Cause.TEXT_AS_CONTROL if there - here else cause
        if cause is Cause.STRIPPED_REASONING and len(ours) <= len(theirs):
            return Cause.REASONING_ADDED
        if cause is Cause.CHANGED_SYSTEM and not expected.has_system:
            one, other = self._heads.role(expected.ids, hunk.start), self._heads.role(ids, hunk.other_start)
            if one != other and "system" in (one, other):
                return Cause.SYSTEM_MISSING if one == "system" else Cause.SYSTEM_ADDED
        names = {Cause.EMPTY_PARAMETER: Cause.REWRITTEN_CALL, Cause.ZEROED_ANCHOR: Cause.UNKNOWN}
        return names.get(cause, cause)

    def _by_place(self, expected: Expected, ids: Ids, hunk: Hunk) -> Cause | None:
        """The cause as far as the expected rendering tells what its tokens are for."""
        ours, theirs = hunk.sides(expected.ids, ids)
        if (theirs >= self._vocabulary.size).any():
            return Cause.NO_TOKEN
        declared = expected.parts == Part.TOOLS
        tools = int(declared[hunk.start : hunk.stop].sum())
        if tools and tools == int(declared.sum()) and 2 * len(theirs) < tools:
            return Cause.TOOLS_MISSING
        last = hunk.stop == len(expected.ids) and hunk.other_stop == len(ids)
        cause = None
        if not len(theirs):
            cause = self._removed(expected, ours, hunk)
        elif not len(ours):
            cause = self._added(expected, ids, hunk, last)
        cause = cause or self._ending(ours, theirs, last)
        return cause or (Cause.CHANGED_TOOLS if tools and not len(theirs) else None)

    def _removed(self, expected: Expected, ours: Ids, hunk: Hunk) -> Cause | None:
        """A BOS token, reasoning, or the template's own system prompt, with nothing instead."""
        if hunk.start == 0 and ours.tolist() == [self._bos]:
            return Cause.BOS_MISSING
        parts = expected.parts[hunk.start : hunk.stop]
        if (parts == Part.REASONING).all():
            return Cause.STRIPPED_REASONING
        if expected.has_system or not (parts == Part.SCAFFOLD).all():
            return None
        nobody = expected.messages[hunk.start : hunk.stop] < 0
        turn = self._heads.role(expected.ids, hunk.start) == "system" and self._heads.count(ours) and len(ours) > 3
        return Cause.SYSTEM_MISSING if turn or 2 * int(nobody.sum()) > len(nobody) else None

    def _added(self, expected: Expected, ids: Ids, hunk: Hunk, last: bool) -> Cause | None:
        """A BOS token, a generation prompt or a system prompt that does not belong there."""
        theirs = ids[hunk.other_start : hunk.other_stop]
        if hunk.start <= 1 and (theirs == self._bos).all():
            return Cause.BOS_DOUBLED if expected.ids[0] == self._bos else Cause.BOS_ADDED
        if last and np.array_equal(theirs, self._prompt):
            return Cause.GENERATION_PROMPT
        first = not expected.has_system and not (expected.messages[: hunk.start] > 0).any()
        system = self._heads.role(ids, hunk.other_start) in ("system", "developer") and self._heads.count(theirs)
        return Cause.SYSTEM_ADDED if first and system and len(theirs) > 3 else None

    def _ending(self, ours: Ids, theirs: Ids, last: bool) -> Cause | None:
        """Tokens that end turns, white space at the end, or a row that was cut."""
        lost, new = self._ends_turn(ours), self._ends_turn(theirs)
        if lost is None or new is None:
            return Cause.CUT if last and not len(theirs) else None
        if lost or new:
            return Cause.STOP_TOKEN if lost and new else Cause.END_MISSING if lost else Cause.END_ADDED
        return Cause.LAST_WHITESPACE if last else None

    def _ends_turn(self, ids: Ids) -> bool | None:
        """True if ids end a turn, False if they are white space, else None."""
        ends = [index in self._ends for index in ids.tolist()]
        texts = [self._vocabulary.token_bytes(index).strip() for index in ids.tolist()]
        return any(ends) if all(end or not text for end, text in zip(ends, texts, strict=True)) else None

    def _finding(self, cause: Cause, hunk: Hunk, expected: Expected, ids: Ids, start: int) -> Finding:
        message, place = expected.place(hunk.start)
        ours, theirs = hunk.sides(expected.ids, ids)
        if cause is Cause.CUT:
            words = _cut_words(expected, hunk)
        else:
            one, other = (quoted(text_of(self._vocabulary, side[:256])) for side in (ours, theirs))
            outside = theirs[theirs >= self._vocabulary.size]
            words = f"{place}: expected {one}, found {f'id {outside[0]}' if len(outside) else other}"
        field = place.rpartition(", ")[2]
        return Finding(cause, "", message, field, words, start + hunk.other_start, len(ours))


def _cut_words(expected: Expected, hunk: Hunk) -> str:
    total, lost = len(expected.ids), hunk.stop - hunk.start
    cut, which = (hunk.stop, "last") if hunk.start == 0 else (hunk.start, "first")
    words = f"the {which} {total - lost:,} of {total:,} tokens are there, {lost:,} are missing"
    if not 0 < cut < total or expected.messages[cut - 1] != expected.messages[cut]:
        return f"{words}; the cut falls between messages"
    return f"{words}; the cut falls into {expected.place(cut)[1]}"
