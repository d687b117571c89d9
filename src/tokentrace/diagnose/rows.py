"""Compare the ids and mask of a row with those that the template gives for its conversation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ..data.conversations import COMPLETIONS, MESSAGES, USUAL_NAMES, Columns
from ..data.sources import Row
from ..data.tokenizing import RowResult, RowTokenizer, TokenizeSettings
from ..data.trainers import ATTENTION
from ..errors import InputError, brief, kind_of
from ..samples.sample import IGNORE, Sample
from ..show.alignment import Hunk, hunks
from ..show.document import Contrast
from ..show.results import excerpt
from ..show.visible import counted, quoted
from ..study.probes import USER
from ..tokens.ids import check_ids, check_integers, common_prefix, runs
from ..tokens.kinds import Kind, Part
from ..tokens.tokenizer import Ids
from .break_checks import Case, TurnHeads
from .conversation_diff import INSTRUCTIONS
from .finding import Cause, Finding
from .records import IDS, MASKS, Fields, Line, Mask, Rollout, first_of
from .report import Entry, Example

_MOST = 8
_PROMPT = len(Part)
_PARTS = (*(part.name.lower().replace("_", " ") for part in Part), "generation prompt")
_UNEXPECTED = {-1: "added tokens", -2: "padding"}
_MASK_CAUSES = (Cause.MASK_ADDED, Cause.MASK_MISSING)
_ROW_CAUSES = {Cause.EMPTY_PARAMETER: Cause.REWRITTEN_CALL, Cause.ZEROED_ANCHOR: Cause.UNKNOWN}


class Outcome(StrEnum):
    SAME = "same"
    IDS = "ids differ"
    MASK = "mask differs"
    BOTH = "ids and mask differ"
    CUT = "cut"
    UNCHECKED = "unchecked"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """Findings in a row's ids, with `contrasts`, then in its mask."""

    where: str
    outcome: Outcome = Outcome.SAME
    reason: str = ""
    findings: tuple[Finding, ...] = ()
    contrasts: tuple[Contrast, ...] = ()
    counts: Mapping[str, int] = field(default_factory=Counter)

    @property
    def causes(self) -> list[Cause]:
        return list(dict.fromkeys(one.cause for one in self.findings if one.cause not in _MASK_CAUSES))

    @property
    def mask(self) -> list[Finding]:
        return [one for one in self.findings if one.cause in _MASK_CAUSES]

    def entries(self) -> Iterator[Entry]:
        mask = self.mask
        words = (
            f"token {one.position:,}: {one.words}" if one in mask else str(one) for one in self.findings
        )
        example = Example(self.where, self.reason or "; ".join(words), self.findings, self.contrasts)
        differs = self.outcome not in (Outcome.SAME, Outcome.UNCHECKED)
        yield Entry("outcomes", self.outcome, 0, example if differs else None)
        yield from (Entry("causes", cause, 0, example) for cause in self.causes)
        yield from (Entry("mask", (one.where, one.field, one.cause), one.tokens) for one in mask)
        if self.reason:
            yield Entry("reasons", self.reason)


@dataclass(frozen=True, slots=True, eq=False)
class IdsRow:
    """Padding lies outside `start` to `stop`."""

    ids: Ids
    mask: Mask | None
    start: int
    stop: int
    attended: bool
    columns: Line

    def without_padding(self, pad: int | None, expected: Ids) -> IdsRow:
        """Leave out surplus pad tokens at both ends."""
        if self.attended or pad is None:
            return self
        pads = self.ids == pad
        idle = pads if self.mask is None else pads & ~self.mask

        def surplus(step: int) -> int:
            at_end = _run(pads[::step]) - _run(expected[::step] == pad)
            return max(0, min(_run(idle[::step]), at_end))

        start, stop = surplus(1), len(self.ids) - surplus(-1)
        return replace(self, start=start, stop=stop) if start < stop else self


def _run(flags: Mask) -> int:
    return len(flags) if flags.all() else int(flags.argmin())


def read_ids_row(value: Any, ids_column: str | None = None, mask_column: str | None = None) -> IdsRow:
    """Read a row of ids. Raises InputError, which names the column at fault."""
    if not isinstance(value, Mapping):
        raise InputError(f"a row of ids must be a mapping of columns, not {kind_of(value)}")
    for name in (ids_column, mask_column):
        if name is not None and value.get(name) is None:
            raise InputError("the row has no such column, or it is empty", field=name)
    name = ids_column or first_of(value, IDS) or next((each for each in IDS if each in value), None)
    if name is None:
        raise InputError(f"the row holds no ids; it is {brief(value)}; looked for: {', '.join(IDS)}")
    ids = check_ids(value[name], name)
    if not len(ids):
        raise InputError("holds no ids", field=name)
    masks = value
    if mask_column is not None:
        named = value[mask_column]
        masks = {"labels" if isinstance(named, (list, np.ndarray)) and IGNORE in named else "mask": named}
    fields = Fields(masks, Rollout("", ""))
    mask = fields.trained(ids)
    for finding in fields.rollout.findings:
        raise InputError(finding.words, field=finding.field)
    used = {name, "labels", ATTENTION, *MASKS, mask_column}
    columns = {key: value[key] for key in value if key not in used}
    if value.get(ATTENTION) is None:
        return IdsRow(ids, mask, 0, len(ids), False, columns)
    attention = check_integers(value[ATTENTION], ATTENTION) != 0
    attended = runs(attention)
    if len(attention) != len(ids) or not attended:
        problem = f"has {len(attention):,} entries for {len(ids):,} ids, or only zeros"
        raise InputError(problem, field=ATTENTION)
    if len(attended) > 1:
        raise InputError("has a gap: padding may only come before and after the row", field=ATTENTION)
    return IdsRow(ids, mask, *attended[0], True, columns)


def has_conversation(row: Line, columns: Columns = USUAL_NAMES) -> bool:
    """True if a row's columns hold a conversation, valid or not."""
    named = {columns.messages, columns.prompt, columns.completion} - {None}
    present = {name for name, value in row.items() if value is not None}
    if not named and "prompt" in present:
        named = {*MESSAGES, *COMPLETIONS}
    return not present.isdisjoint(named or MESSAGES)


def origin_of(row: Line) -> tuple[str, int, int] | None:
    match row:
        case {"source": str(source), "row": int(number), "sample": int(sample)}:
            return source, number, sample
    return None


class RowChecker:
    """Checks rows, one at a time. Raises InputError for a bad setting."""

    def __init__(
        self, settings: TokenizeSettings, columns: Sequence[str | None] = (), pad_token: str | None = None
    ) -> None:
        self.tokenizer, self._columns = RowTokenizer(settings), columns
        self.renderer = renderer = self.tokenizer.renderer
        tokenizer = renderer.tokenizer
        self.vocabulary, self.heads = tokenizer.vocabulary, TurnHeads(tokenizer)
        self._pad = tokenizer.token_id(pad_token or tokenizer.variables.get("pad_token", ""))
        if pad_token and self._pad is None:
            raise InputError(f"{pad_token!r} is not a control token of {tokenizer.name or 'the tokenizer'}")
        self.bos = tokenizer.token_id(tokenizer.variables.get("bos_token", ""))
        self.ends = frozenset({*renderer.get_stop_token_ids(), *renderer.turn_stop_ids()})
        prompted = renderer.silent().render([dict(USER)], add_generation_prompt=True)
        self.prompt = prompted.ids[[name == "generation_prompt" for name in prompted.fields]]

    def check(self, row: Row, result: RowResult | str | None = None) -> CheckedRow:
        """Compare a row with its own conversation, or with the `result` for its source."""
        checked = CheckedRow(f"{row.source}, row {row.number}", Outcome.BAD, counts=Counter(rows=1))
        try:
            if row.problem is not None:
                raise InputError(row.problem)
            actual = read_ids_row(row.value, *self._columns)
        except InputError as error:
            return replace(checked, reason=" ".join(str(error).split()))
        checked = replace(checked, counts=Counter(rows=1, masks=actual.mask is not None))
        if has_conversation(actual.columns, self.tokenizer.settings.columns):
            result = self.tokenizer.tokenize(replace(row, value=dict(actual.columns)))
        if isinstance(result, RowResult) and result.samples:
            return self._compare(actual, result.samples, checked)
        if isinstance(result, RowResult):
            return replace(checked, reason=f"its conversation gives no row: {result.problems[0].reason}")
        size = self.vocabulary.size
        outside = np.flatnonzero(actual.ids >= size)
        for at in outside[(outside >= actual.start) & (outside < actual.stop)][:1]:
            words = f"token {at} is {actual.ids[at]}, but the vocabulary has {size:,} ids"
            return replace(checked, reason=words)
        reason = result or "the row has no conversation and does not name its source"
        return replace(checked, outcome=Outcome.UNCHECKED, reason=reason)

    def _compare(self, actual: IdsRow, samples: Sequence[Sample], checked: CheckedRow) -> CheckedRow:
        _, _, number = origin_of(actual.columns) or ("", 0, None)
        ids, reason = actual.ids[actual.start : actual.stop], ""
        if number is not None and 0 <= number < len(samples):
            sample = samples[number]
        else:
            sample = max(samples, key=lambda one: (common_prefix(one.ids, ids), -abs(len(one) - len(ids))))
            count = counted(len(samples), "sample")
            if number is not None:
                reason = f"it says it is sample {number} of its conversation, which gives {count}"
        row = actual.without_padding(self._pad, sample.ids)
        case, size = _Comparison(self, sample, row), row.stop - row.start
        causes, wrong = case.differences(), case.mask_findings()
        findings = [case.finding(cause, hunk) for cause, hunk in causes]
        mask = row.mask[row.start : row.stop] if row.mask is not None else np.zeros(0, np.bool_)
        shifts = {"right": np.append(False, sample.mask[:-1]), "left": np.append(sample.mask[1:], False)}
        for side, shifted in shifts.items() if wrong and not case.hunks else ():
            if np.array_equal(mask, shifted):
                findings.append(Finding(Cause.MASK_SHIFTED, words=f"moved by one token to the {side}"))
        outcome = Outcome.CUT if {cause for cause, _ in causes} == {Cause.CUT} else Outcome.IDS
        if wrong or not causes:
            outcome = Outcome.BOTH if causes else Outcome.MASK if wrong else Outcome.SAME
        counts = Counter(compared=1, tokens=size, trained=int(mask.sum()), padding=len(row.ids) - size)
        counts.update(checked.counts, expected_tokens=len(sample), expected_trained=sample.trained)
        tokens, names = (self.renderer.tokenizer, sample.ids, row.ids), ("expected", "found")
        contrasts = tuple(excerpt(*tokens, hunk, names) for _, hunk in causes)
        return CheckedRow(checked.where, outcome, reason, (*findings, *wrong), contrasts, counts)


class _Comparison:
    def __init__(self, checker: RowChecker, sample: Sample, row: IdsRow) -> None:
        assert sample.rendered is not None
        self.checker, self.vocabulary = checker, checker.vocabulary
        self.sample, self.row, self.rendered = sample, row, sample.rendered
        self.ids, self.messages, self.other = sample.ids, sample.messages, row.ids[: row.stop]
        self.hunks = list(hunks(self.ids, self.other, 0, row.start))

    @cached_property
    def parts(self) -> npt.NDArray[np.uint8]:
        """The part of each expected token: a `Part` or `_PROMPT`."""
        parts = self.sample.parts
        codes = np.zeros(len(self.ids), np.uint8) if parts is None else parts.copy()
        for turn in self.rendered.turns:
            before = slice(0, max(0, turn.start - self.sample.offset))
            scaffold = (self.messages[before] == turn.message) & (codes[before] == Part.SCAFFOLD)
            codes[before][scaffold] = _PROMPT
        return codes

    @cached_property
    def has_system(self) -> bool:
        roles = map(self.rendered.role, np.unique(self.messages).tolist())
        return not INSTRUCTIONS.isdisjoint(roles)

    def origin(self, at: int) -> tuple[str, str, int]:
        if at in _UNEXPECTED:
            return "template", _UNEXPECTED[at], -1
        message = int(self.messages[at])
        return self.rendered.role(message) or "template", _PARTS[int(self.parts[at])], message

    def roles(self, hunk: Hunk) -> tuple[str | None, str | None]:
        return self.checker.heads.roles_at(hunk, self.ids, self.other)

    def differences(self) -> list[tuple[Cause, Hunk]]:
        at, other = 0, self.row.start
        lost = len(self.ids) - (len(self.other) - other)
        if lost > 0 and np.array_equal(self.ids[lost:], self.other[other:]):  # the row is the end
            cause = Cause.BOS_MISSING if self.ids[:lost].tolist() == [self.checker.bos] else Cause.CUT
            if cause is Cause.CUT and not (self.messages[:lost] >= 0).any() and self.messages[lost] >= 0:
                tools = (self.parts[:lost] == Part.TOOLS).any()
                cause = Cause.TOOLS_MISSING if tools else Cause.SYSTEM_MISSING
            return [(cause, Hunk(0, lost, other, other))]
        differences: list[tuple[Cause, Hunk]] = []
        while len(differences) < _MOST and (hunk := next(hunks(self.ids, self.other, at, other), None)):
            cause, hunk = self._explain(hunk)
            differences.append((cause, hunk))
            at, other = hunk.stop, hunk.other_stop
        return differences

    def _explain(self, hunk: Hunk) -> tuple[Cause, Hunk]:
        place = self._by_place(hunk)
        at, other = hunk.start, hunk.other_start
        if place is not None or at == len(self.ids):
            return place or Cause.AFTER_END, hunk
        aligned = np.concatenate((self.ids[:at], self.other[other:]))
        sampled = self.sample.kinds == Kind.SAMPLED
        difference = next(hunks(self.ids, aligned, at, at))
        case = Case(self.ids, aligned, self.checker.renderer, difference, sampled)
        match = case.explain()
        better = match.hunk or case.hunk
        better = Hunk(at, better.stop, other, better.other_stop - at + other)
        ours, theirs = better.sides(self.ids, self.other)
        cause = _ROW_CAUSES.get(match.cause, match.cause)
        if cause is Cause.BPE_REMERGE:
            control = self.vocabulary.is_control
            here, there = (set(side[control[side]].tolist()) for side in (ours, theirs))
            if here != there:
                cause = Cause.CONTROL_AS_TEXT if here - there else Cause.TEXT_AS_CONTROL
        if cause is Cause.UNKNOWN and self.messages[at] >= 0:
            cause = Cause.OTHER_TEXT
        if cause is Cause.STRIPPED_REASONING and len(ours) <= len(theirs):
            cause = Cause.REASONING_ADDED
        if cause is Cause.CHANGED_SYSTEM and not self.has_system:
            system, other_system = (role == "system" for role in self.roles(better))
            if system != other_system:
                cause = Cause.SYSTEM_MISSING if system else Cause.SYSTEM_ADDED
        return cause, better

    def _by_place(self, hunk: Hunk) -> Cause | None:
        start, bos_token, heads = hunk.start, self.checker.bos, self.checker.heads
        ours, theirs = hunk.sides(self.ids, self.other)
        parts, messages = (column[start : hunk.stop] for column in (self.parts, self.messages))
        gone, new = not len(theirs), not len(ours)
        last = hunk.stop == len(self.ids) and hunk.other_stop == len(self.other)
        declared, tools = int((self.parts == Part.TOOLS).sum()), int((parts == Part.TOOLS).sum())
        bos = new and start <= 1 and bool((theirs == bos_token).all())
        role, other_role = self.roles(hunk)
        turn = role == "system" and heads.count(ours) and len(ours) > 3
        scaffold = gone and not self.has_system and bool((parts == Part.SCAFFOLD).all())
        first = not self.has_system and not (self.messages[:start] > 0).any()
        other_turn = other_role in INSTRUCTIONS and heads.count(theirs) and len(theirs) > 3
        ends, other_ends = self._ends_turn(ours), self._ends_turn(theirs)
        ending = None not in (ends, other_ends)
        both, one_token = np.append(ours, theirs), len(ours) < 2 and len(theirs) < 2
        causes = {
            Cause.NO_TOKEN: (theirs >= self.vocabulary.size).any(),
            Cause.TOOLS_MISSING: tools and tools == declared and 2 * len(theirs) < tools,
            Cause.BOS_MISSING: gone and not start and ours.tolist() == [bos_token],
            Cause.BOS_DOUBLED: bos and self.ids[0] == bos_token,
            Cause.BOS_ADDED: bos,
            Cause.GENERATION_PROMPT: new and last and np.array_equal(theirs, self.checker.prompt),
            Cause.STRIPPED_REASONING: gone and ends is None and (parts == Part.REASONING).all(),
            Cause.SYSTEM_MISSING: scaffold and (turn or 2 * int((messages < 0).sum()) > len(messages)),
            Cause.SYSTEM_ADDED: new and first and other_turn,
            Cause.STOP_TOKEN: ending and ends and other_ends,
            Cause.END_MISSING: ending and ends,
            Cause.END_ADDED: ending and other_ends,
            Cause.LAST_WHITESPACE: ending and last,
            Cause.CUT: gone and last,
            Cause.CHANGED_TOOLS: gone and tools,
            Cause.CONTROL_TOKEN: one_token
            and self.vocabulary.is_control[both % self.vocabulary.size].all(),
        }
        return next((cause for cause, applies in causes.items() if applies), None)

    def _ends_turn(self, ids: Ids) -> bool | None:
        """True if ids end a turn, False for white space, else None."""
        ends = self.checker.ends
        solid = [index for index in ids.tolist() if self.vocabulary.token_bytes(index).strip()]
        return bool(ends.intersection(ids.tolist())) if ends.issuperset(solid) else None

    def finding(self, cause: Cause, hunk: Hunk) -> Finding:
        ours, theirs = hunk.sides(self.ids, self.other)
        cut, message = cause is Cause.CUT, -1
        at = hunk.stop if cut and not hunk.start else hunk.start
        place = name = "after the end"
        if at < len(self.ids):
            role, name, message = self.origin(at)
            fields = self.rendered.fields[self.sample.offset + at :][:1]
            name = next((one for one in fields if one != "scaffold"), name)
            place = f"message {message} ({role}), {name}" if message >= 0 else "the template's own text"
        one, other = (quoted(self.rendered.tokenizer.decode(side[:256])) for side in (ours, theirs))
        size = f" ({len(ours):,} of {counted(len(self.ids))})" if cut else ""
        outside = theirs[theirs >= self.vocabulary.size]
        words = f"{place}: expected {one}{size}, found {f'id {outside[0]}' if len(outside) else other}"
        owner = message if message >= 0 else None
        return Finding(cause, "", owner, name, words, hunk.other_start, len(ours))

    def mask_findings(self) -> list[Finding]:
        mask, groups = self.row.mask, dict[tuple[str, str, bool], list[tuple[int, int]]]()
        if mask is None:
            return []
        target, places = self._expected_mask(mask)
        for at in np.flatnonzero(target != mask).tolist():
            role, part, message = self.origin(places[at])
            groups.setdefault((role, part, not target[at]), []).append((at, message))
        findings = []
        for (role, part, trained), tokens in groups.items():
            turns = len({message for _, message in tokens if message >= 0})
            name = {"stop": "stop token", "content": "text"}.get(part, part)
            of = f" of {counted(turns, f'{role} turn')}" if turns and role != "template" else ""
            words = f"{name}{of} {'trained' if trained else 'not trained'} ({counted(len(tokens))})"
            cause = _MASK_CAUSES[not trained]
            findings.append(Finding(cause, role, None, part, words, tokens[0][0], len(tokens)))
        return findings

    def _expected_mask(self, mask: Mask) -> tuple[Mask, list[int]]:
        """The mask that the row should have, and the expected token that each of its tokens replaces.

        Where ids differ, the mask is right if both sides train something, or neither does.
        """
        expected, other, stop = self.sample.mask, self.row.start, self.row.stop
        target, places = np.zeros(len(mask), np.bool_), np.full(len(mask), -2)
        at = 0
        for hunk in (*self.hunks, Hunk(len(expected), len(expected), stop, stop)):
            target[other : hunk.other_start] = expected[at : hunk.start]
            places[other : hunk.other_start] = np.arange(at, hunk.start)
            at, other = hunk.stop, hunk.other_stop
            before, new = hunk.sides(expected, mask)
            target[hunk.other_start : other] = new if new.any() == before.any() else before.any()
            places[hunk.other_start : other] = hunk.start if len(before) else -1
        return target, places.tolist()
