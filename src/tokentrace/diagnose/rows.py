"""Compare a row of ids with the one that the template gives for its conversation: ids, and mask.

What the expected rendering knows about its tokens comes first (message, field, stop tokens,
declared tools); everything else is explained as breaks are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..data.conversations import COMPLETIONS, MESSAGES, USUAL_NAMES, Columns
from ..data.sources import Format, Row
from ..data.tokenizing import RowResult, RowTokenizer, TokenizeSettings
from ..data.trainers import ATTENTION
from ..errors import InputError, kind_of
from ..samples.sample import IGNORE, Sample
from ..show.alignment import Hunk
from ..show.visible import counted
from ..study.probes import USER
from ..tokens.ids import check_ids, check_integers, common_prefix
from ..tokens.kinds import Kind, Part
from ..tokens.tokenizer import Ids
from .break_checks import Case, explain
from .finding import Cause, Finding
from .records import IDS, MASKS, Fields, Mask, first_of
from .token_text import Parts, TurnHeads, contrast, hunks, quoted, text_of

_MOST: Final = 8
"""Differences of a row that are explained."""
_PROMPT: Final = len(Part)
"""The code of a generation prompt among parts."""
_PARTS: Final = {**{int(part): part.name.lower().replace("_", " ") for part in Part}, _PROMPT: "generation prompt"}
_MASK_CAUSES: Final = (Cause.MASK_ADDED, Cause.MASK_MISSING)


class Outcome(StrEnum):
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
        return list(dict.fromkeys(one.cause for one in self.findings if one.cause not in _MASK_CAUSES))

    @property
    def mask(self) -> list[Finding]:
        return [one for one in self.findings if one.cause in _MASK_CAUSES]

    @property
    def position(self) -> int | None:
        return min((one.position for one in self.findings if one.position is not None), default=None)


# -- the row as it is


@dataclass(frozen=True, slots=True)
class RowColumns:
    """The columns of ids and mask; None uses the first usual name. `mask` may name labels."""

    ids: str | None = None
    mask: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class IdsRow:
    """A row without padding. `mask` is None if the row does not say what is trained.

    `start` tokens of padding came before it, `padding` before and after it, some of them trained
    (`trained_padding`). `columns` are the other ones.
    """

    ids: Ids
    mask: Mask | None
    start: int = 0
    padding: int = 0
    trained_padding: tuple[int, ...] = ()
    attended: bool = False
    columns: Mapping[str, Any] = field(default_factory=dict)

    def cut(self, start: int, stop: int) -> IdsRow:
        """The row without the padding before `start` and from `stop` on."""
        mask = None if self.mask is None else self.mask[start:stop]
        padding = self.padding + start + len(self.ids) - stop
        return replace(self, ids=self.ids[start:stop], mask=mask, start=self.start + start, padding=padding)

    def without_padding(self, pad: int | None, expected: Ids) -> IdsRow:
        """The row without untrained pad tokens at its ends that the expected row lacks."""
        if self.attended or pad is None:
            return self
        pads, theirs = self.ids == pad, expected == pad
        idle = pads if self.mask is None else pads & ~self.mask
        start, end = (max(0, min(_run(idle[::step]), _run(pads[::step]) - _run(theirs[::step]))) for step in (1, -1))
        return self.cut(start, len(self.ids) - end) if start + end < len(self.ids) else self


def _run(flags: Mask) -> int:
    return len(flags) if flags.all() else int(flags.argmin())


def read_ids_row(value: Any, columns: RowColumns) -> IdsRow:
    """A row of ids. Raises InputError with the column that does not fit."""
    if not isinstance(value, Mapping):
        raise InputError(f"a row of ids must be a mapping of columns, not {kind_of(value)}")
    for name in (columns.ids, columns.mask):
        if name is not None and value.get(name) is None:
            raise InputError("the row has no such column, or nothing in it", field=name)
    name = columns.ids or first_of(value, IDS)
    if name is None:
        names = ", ".join(str(column)[:80] for column in list(value)[:8]) or "no columns"
        raise InputError(f"the row holds no ids; it has {names}; searched: {', '.join(IDS)}")
    ids = check_ids(value[name], name)
    if not len(ids):
        raise InputError("holds no ids", field=name)
    masks = value
    if columns.mask is not None:
        named = value[columns.mask]
        masks = {"labels" if isinstance(named, (list, np.ndarray)) and IGNORE in named else "mask": named}
    fields = Fields(masks, "the row")
    mask = fields.trained(ids)
    for problem in fields.findings:
        raise InputError(problem.words, field=problem.where.rpartition(", ")[2])
    used = {name, "labels", ATTENTION, *MASKS, columns.mask}
    row = IdsRow(ids, mask, columns={key: value[key] for key in value if key not in used})
    if value.get(ATTENTION) is None:
        return row
    attention = check_integers(value[ATTENTION], ATTENTION) != 0
    present = np.flatnonzero(attention)
    if len(attention) != len(ids) or not len(present):
        raise InputError(f"has {len(attention):,} entries for {len(ids):,} ids, or only zeros", field=ATTENTION)
    start, stop = int(present[0]), int(present[-1]) + 1
    if len(present) != stop - start:
        raise InputError("has a hole: padding comes before and after a row", field=ATTENTION)
    trained = () if mask is None else tuple(np.flatnonzero(mask & ~attention).tolist())
    return replace(row.cut(start, stop), trained_padding=trained, attended=True)


def has_conversation(row: Mapping[str, Any], columns: Columns = USUAL_NAMES) -> bool:
    """True if a row's columns hold a conversation, valid or not."""
    named = {columns.messages, columns.prompt, columns.completion} - {None}
    present = {name for name, value in row.items() if value is not None}
    pair = "prompt" in present and not present.isdisjoint(COMPLETIONS)
    return not present.isdisjoint(named) if named else not present.isdisjoint(MESSAGES) or pair


def origin_of(row: Mapping[str, Any]) -> tuple[str, int, int] | None:
    """The file, the row and the sample that a row of ours was made of, as its columns say."""
    source, number, sample = (row.get(name) for name in ("source", "row", "sample"))
    named = isinstance(source, str) and isinstance(number, int) and isinstance(sample, int)
    return (source, number, sample) if named else None  # type: ignore[return-value]


# -- the row as it should be


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

    @cached_property
    def has_system(self) -> bool:
        roles = map(self._rendered.role, np.unique(self.messages).tolist())
        return not {"system", "developer"}.isdisjoint(roles)

    def origin(self, at: int) -> tuple[str, str, int]:
        message = int(self.messages[at])
        return self._rendered.role(message) or "template", _PARTS[int(self.parts[at])], message

    def place(self, at: int) -> tuple[int | None, str]:
        """The message of a token and its field, as ``message 2 (user), content``."""
        if at >= len(self.ids):
            return None, "after the end"
        role, part, message = self.origin(at)
        if message < 0:
            return None, "the template's own text"
        at += self._offset
        name = next((name for name in self._rendered.fields[at : at + 1] if name != "scaffold"), part)
        return message, f"message {message} ({role}), {name}"


def _best(actual: IdsRow, samples: Sequence[Sample]) -> tuple[Expected, str | None]:
    """The sample that the row names, or the one that it shares most with."""
    _, _, number = origin_of(actual.columns) or ("", 0, None)
    if number is not None and 0 <= number < len(samples):
        return Expected(samples[number]), None
    best = max(samples, key=lambda one: (common_prefix(one.ids, actual.ids), -abs(len(one.ids) - len(actual.ids))))
    words = f"it is sample {number} of its conversation, which gives {counted(len(samples), 'sample')}"
    return Expected(best), None if number is None else words


class RowChecker:
    """Checks rows, one at a time. Raises InputError only for a bad setting."""

    def __init__(
        self,
        settings: TokenizeSettings,
        *,
        columns: RowColumns = RowColumns(),  # noqa: B008 (frozen)
        pad_token: str | None = None,
    ) -> None:
        self.tokenizer, self._columns = RowTokenizer(settings), columns
        self._renderer = renderer = self.tokenizer.renderer
        tokenizer = renderer.tokenizer
        self._vocabulary, self._heads = tokenizer.vocabulary, TurnHeads.of(tokenizer.vocabulary)
        self._pad = tokenizer.token_id(pad_token or tokenizer.variables.get("pad_token", ""))
        if pad_token and self._pad is None:
            raise InputError(f"{pad_token!r} is not a control token of {tokenizer.name or 'the tokenizer'}")
        self._bos = tokenizer.token_id(tokenizer.variables.get("bos_token", ""))
        self._ends = frozenset({*renderer.get_stop_token_ids(), *renderer.turn_stop_ids()})
        prompted = renderer.silent().render([dict(USER)], add_generation_prompt=True)
        self._prompt = prompted.ids[[name == "generation_prompt" for name in prompted.fields]]

    def check(
        self, row: Row, source: str = "rows", form: Format = Format.LINES, origin: RowResult | str | None = None
    ) -> CheckedRow:
        """Check a row. Without a conversation it needs its `origin`: what that gives, or why there is none."""
        checked = CheckedRow(source, row.number, row.line)
        try:
            if row.problem is not None:
                raise InputError(row.problem)
            actual = read_ids_row(row.value, self._columns)
        except InputError as error:
            return replace(checked, outcome=Outcome.BAD, reason=" ".join(str(error).split()))
        trained = None if actual.mask is None else int(actual.mask.sum())
        checked = replace(checked, tokens=len(actual.ids), trained=trained, padding=actual.padding)
        if has_conversation(actual.columns, self.tokenizer.settings.columns):
            origin = self.tokenizer.tokenize(Row(row.number, row.line, dict(actual.columns)), source, form)
        if isinstance(origin, RowResult) and origin.samples:
            return self._compare(actual, origin.samples, checked)
        if isinstance(origin, RowResult):
            reason = f"its conversation gives no row: {origin.problems[0].reason}"
            return replace(checked, outcome=Outcome.BAD, reason=reason)
        size = self._vocabulary.size
        for at in np.flatnonzero(actual.ids >= size)[:1].tolist():
            words = f"token {actual.start + at} is {actual.ids[at]}, and the vocabulary has {size:,} ids"
            return replace(checked, outcome=Outcome.BAD, reason=words)
        reason = origin or "the row holds no conversation and does not say where it is"
        return replace(checked, outcome=Outcome.UNCHECKED, reason=reason)

    def _compare(self, actual: IdsRow, samples: Sequence[Sample], checked: CheckedRow) -> CheckedRow:
        expected, reason = _best(actual, samples)
        row = actual.without_padding(self._pad, expected.ids)
        differing = list(hunks(expected.ids, row.ids))
        causes = self._differences(expected, row.ids) if differing else []
        findings = [self._finding(cause, hunk, expected, row) for cause, hunk in causes]
        wrong: list[Finding] = []
        if row.mask is not None:
            wrong = _mask_findings(expected, row, differing)
            if wrong and not differing and (moved := _shift(expected.mask, row.mask)):
                findings.append(Finding(Cause.MASK_SHIFTED, words=f"moved by one token to the {moved}"))
        cut = {cause for cause, _ in causes} == {Cause.CUT}
        ids = Outcome.BOTH if wrong else Outcome.CUT if cut else Outcome.IDS
        return replace(
            checked,
            outcome=ids if differing else Outcome.MASK if wrong else Outcome.SAME,
            reason=reason,
            findings=(*findings, *wrong),
            contrasts=tuple(contrast(self._vocabulary, expected.ids, row.ids, hunk, fine=False) for _, hunk in causes),
            tokens=len(row.ids),
            padding=row.padding,
            expected_tokens=len(expected.ids),
            expected_trained=expected.sample.trained,
        )

    # -- why ids differ

    def _differences(self, expected: Expected, ids: Ids) -> list[tuple[Cause, Hunk]]:
        lost = len(expected.ids) - len(ids)
        if lost > 0 and np.array_equal(expected.ids[lost:], ids):  # the end of the expected row
            cause = Cause.BOS_MISSING if expected.ids[:lost].tolist() == [self._bos] else Cause.CUT
            if cause is Cause.CUT and not (expected.messages[:lost] >= 0).any() and expected.messages[lost] >= 0:
                cause = Cause.TOOLS_MISSING if (expected.parts[:lost] == Part.TOOLS).any() else Cause.SYSTEM_MISSING
            return [(cause, Hunk(0, lost, 0, 0))]
        differences: list[tuple[Cause, Hunk]] = []
        at = other = 0
        while len(differences) < _MOST and (hunk := next(hunks(expected.ids, ids, at, other), None)) is not None:
            cause, hunk = self._explain(expected, ids, hunk)
            differences.append((cause, hunk))
            at, other = hunk.stop, hunk.other_stop
        return differences

    def _explain(self, expected: Expected, ids: Ids, hunk: Hunk) -> tuple[Cause, Hunk]:
        place = self._by_place(expected, ids, hunk)
        at, other = hunk.start, hunk.other_start
        if place is not None or at == len(expected.ids):
            return place or Cause.UNKNOWN, hunk
        aligned = np.concatenate((expected.ids[:at], ids[other:]))
        sampled = expected.sample.kinds == Kind.SAMPLED
        case = Case(expected.ids, aligned, self._renderer, next(hunks(expected.ids, aligned, at, at)), sampled)
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
        parts, messages = (column[hunk.start : hunk.stop] for column in (expected.parts, expected.messages))
        gone, new = not len(theirs), not len(ours)
        last = hunk.stop == len(expected.ids) and hunk.other_stop == len(ids)
        declared, tools = int((expected.parts == Part.TOOLS).sum()), int((parts == Part.TOOLS).sum())
        bos = new and hunk.start <= 1 and bool((theirs == self._bos).all())
        role, other_role = self._heads.role(expected.ids, hunk.start), self._heads.role(ids, hunk.other_start)
        turn = role == "system" and self._heads.count(ours) and len(ours) > 3
        scaffold = gone and not expected.has_system and bool((parts == Part.SCAFFOLD).all())
        first = not expected.has_system and not (expected.messages[: hunk.start] > 0).any()
        other_turn = other_role in ("system", "developer") and self._heads.count(theirs) and len(theirs) > 3
        ends, other_ends = self._ends_turn(ours), self._ends_turn(theirs)
        ending = None not in (ends, other_ends)
        causes = {
            Cause.NO_TOKEN: (theirs >= self._vocabulary.size).any(),
            Cause.TOOLS_MISSING: tools and tools == declared and 2 * len(theirs) < tools,
            Cause.BOS_MISSING: gone and hunk.start == 0 and ours.tolist() == [self._bos],
            Cause.BOS_DOUBLED: bos and expected.ids[0] == self._bos,
            Cause.BOS_ADDED: bos,
            Cause.GENERATION_PROMPT: new and last and np.array_equal(theirs, self._prompt),
            Cause.STRIPPED_REASONING: gone and (parts == Part.REASONING).all(),
            Cause.SYSTEM_MISSING: scaffold and (turn or 2 * int((messages < 0).sum()) > len(messages)),
            Cause.SYSTEM_ADDED: new and first and other_turn,
            Cause.STOP_TOKEN: ending and ends and other_ends,
            Cause.END_MISSING: ending and ends,
            Cause.END_ADDED: ending and other_ends,
            Cause.LAST_WHITESPACE: ending and last,
            Cause.CUT: gone and last,
            Cause.CHANGED_TOOLS: gone and tools,
        }
        return next((cause for cause, applies in causes.items() if applies), None)

    def _ends_turn(self, ids: Ids) -> bool | None:
        """True if ids end a turn, False if they are white space, else None."""
        solid = [index for index in ids.tolist() if self._vocabulary.token_bytes(index).strip()]
        return bool(self._ends.intersection(ids.tolist())) if self._ends.issuperset(solid) else None

    def _finding(self, cause: Cause, hunk: Hunk, expected: Expected, row: IdsRow) -> Finding:
        ours, theirs = hunk.sides(expected.ids, row.ids)
        cut = cause is Cause.CUT
        message, place = expected.place(hunk.stop if cut and not hunk.start else hunk.start)
        one, other = (quoted(text_of(self._vocabulary, side[:256])) for side in (ours, theirs))
        size = f" ({len(ours):,} of {counted(len(expected.ids))})" if cut else ""
        outside = theirs[theirs >= self._vocabulary.size]
        words = f"{place}: expected {one}{size}, found {f'id {outside[0]}' if len(outside) else other}"
        name = place.rpartition(", ")[2]
        return Finding(cause, "", message, name, words, row.start + hunk.other_start, len(ours))


# -- masks


def _mask_findings(expected: Expected, row: IdsRow, differing: Sequence[Hunk]) -> list[Finding]:
    """One finding for the tokens of each role and part that have another mask."""
    groups: dict[tuple[str, str, bool], list[tuple[int, int]]] = {}
    for role, part, message, trained, at in _wrong_mask(expected, row, differing):
        groups.setdefault((role, part, trained), []).append((at, message))
    out = []
    for (role, part, trained), places in groups.items():
        turns = len({message for _, message in places if message >= 0})
        name = {"stop": "stop token", "content": "text"}.get(part, part)
        of = f" of {counted(turns, f'{role} turn')}" if turns and role != "template" else ""
        words = f"{name}{of} {'trained' if trained else 'not trained'} ({counted(len(places))})"
        cause = _MASK_CAUSES[not trained]
        out.append(Finding(cause, role, field=part, words=words, position=min(places)[0], tokens=len(places)))
    return sorted(out, key=lambda finding: finding.position or 0)


def _wrong_mask(
    expected: Expected, row: IdsRow, differing: Sequence[Hunk]
) -> Iterator[tuple[str, str, int, bool, int]]:
    """Tokens with a wrong mask: role, part, message, whether they are trained, position.

    Where ids differ, only a stretch counts that is trained in place of one that is not, or the
    other way round.
    """
    at = other = 0
    mask = np.zeros(0, np.bool_) if row.mask is None else row.mask
    for hunk in (*differing, Hunk(len(expected.ids), len(expected.ids), len(mask), len(mask))):
        size = min(hunk.start - at, hunk.other_start - other)
        for offset in np.flatnonzero(expected.mask[at : at + size] != mask[other : other + size]).tolist():
            yield *expected.origin(at + offset), not expected.mask[at + offset], row.start + other + offset
        theirs, ours = hunk.sides(expected.mask, mask)
        if len(ours) and bool(theirs.any()) != bool(ours.any()):
            origin = expected.origin(hunk.start) if len(theirs) else ("template", "added tokens", -1)
            for position in np.flatnonzero(ours if ours.any() else np.ones_like(ours)).tolist():
                yield *origin, bool(ours.any()), row.start + hunk.other_start + position
        at, other = hunk.stop, hunk.other_stop
    yield from (("template", "padding", -1, True, at) for at in row.trained_padding)


def _shift(expected: Mask, actual: Mask) -> str:
    """The direction in which a mask is moved by one token, or nothing."""
    if len(expected) != len(actual) or not expected.any():
        return ""
    right = np.array_equal(expected[:-1], actual[1:]) and not actual[0]
    left = np.array_equal(expected[1:], actual[:-1]) and not actual[-1]
    return "right" if right else "left" if left else ""
