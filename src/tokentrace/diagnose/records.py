"""Recorded rollouts in one form, whoever recorded them: calls of an engine, and training rows built from them.

A call is a prompt and what was sampled after it. `record_shapes` knows how frameworks name these things,
`record_files` opens files, and `rollouts` finds out whether each call continues the one before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..conversation.place import is_list
from ..errors import InputError, shown
from ..samples.sample import IGNORE
from ..tokens.ids import check_ids, check_integers, runs
from ..tokens.kinds import Kind
from ..tokens.tokenizer import Ids
from ..tokens.visible import counted
from ..trajectory.inputs import POSITIVE_NOISE
from .finding import Cause, Finding

Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Message = Mapping[str, Any]


class Request(NamedTuple):
    """The conversation that a call continues, and the reply if the record has it."""

    messages: Sequence[Message]
    tools: Sequence[Message] | None = None
    reply: Message | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of an engine: `stream` is its prompt and, from `start` on, the sampled tokens.

    `mask` marks trained tokens of the stream; `logprobs` belong to the sampled ones. Both are None if the record lacks
    them or they do not fit, which `findings` reports. `recorded` is the cause that the record itself gives.
    """

    stream: Ids
    start: int
    where: str
    logprobs: Floats | None = None
    mask: Mask | None = None
    request: Request | None = None
    recorded: str = ""
    temperature: float | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def prompt(self) -> Ids:
        return self.stream[: self.start]


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A training row. `sampled` marks the tokens that an engine returned, if the row itself says so.

    `independent` is True if the calls of its rollout were recorded apart from it, so that they can prove its mask.
    """

    ids: Ids
    mask: Mask
    where: str
    sampled: Mask | None = None
    findings: tuple[Finding, ...] = ()
    independent: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One rollout. `ordered` is False if its calls are lines of a file, which may be in any order."""

    name: str
    where: str
    calls: Sequence[Call]
    rows: Sequence[Row] = ()
    tokenizer: str | None = None
    """The first digits of its tokenizer's digest, if recorded."""
    notes: Sequence[str] = field(default_factory=tuple)
    ordered: bool = True

    @staticmethod
    def join(parts: Sequence[Rollout]) -> Rollout:
        """One rollout of several lines."""
        if len(parts) == 1:
            return parts[0]
        return Rollout(
            parts[0].name,
            parts[0].where,
            [call for part in parts for call in part.calls],
            [row for part in parts for row in part.rows],
            next((part.tokenizer for part in parts if part.tokenizer), None),
            ordered=False,
        )


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A line, file or session that cannot be read, and why."""

    where: str
    problem: str


@dataclass(frozen=True, slots=True)
class Fields:
    """An object in a record. Errors name the field from the top of the line; `where` is the line."""

    value: Mapping[str, Any]
    where: str
    path: str = ""

    def name(self, field: str) -> str:
        return f"{self.path}.{field}" if self.path else field

    def place(self, field: str = "") -> str:
        path = self.name(field) if field else self.path
        return f"{self.where}, {path}" if path else self.where

    def first(self, *names: str) -> str | None:
        """The first of these fields that has a value."""
        return next((name for name in names if self.value.get(name) is not None), None)

    def text(self, *names: str) -> str | None:
        """The first of these fields, as text."""
        name = self.first(*names)
        if name is None:
            return None
        value = self.value[name]
        if isinstance(value, (Mapping, list)):
            raise InputError(f"must be text or a number, not {shown(value)}", field=self.name(name))
        return str(value)

    def number(self, name: str) -> float | None:
        value = self.value.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return None
        try:
            return float(value)
        except OverflowError:
            raise InputError(f"is {shown(value)}, too large for a number", field=self.name(name)) from None

    def at(self, name: str) -> Fields:
        """A field that is an object; an empty one if it is missing."""
        value = self.value.get(name)
        return self._object({} if value is None else value, self.name(name))

    def each(self, name: str | None) -> Iterator[Fields]:
        """The objects in a list; none if it is missing."""
        if name is not None and self.value.get(name) is not None:
            for at, value in enumerate(self.items(name)):
                yield self._object(value, f"{self.name(name)}[{at}]")

    def _object(self, value: Any, path: str) -> Fields:
        if not isinstance(value, Mapping):
            raise InputError(f"must be an object, not {shown(value)}", field=path)
        return Fields(value, self.where, path)

    def items(self, name: str) -> Sequence[Any]:
        value: Any = self.value.get(name)
        if not is_list(value):
            raise InputError(f"must be a list, not {shown(value)}", field=self.name(name))
        return value  # type: ignore[no-any-return]

    def ids(self, name: str) -> Ids:
        if self.value.get(name) is None:
            raise InputError("is missing", field=self.name(name))
        return check_ids(self.value[name], self.name(name))

    def floats(self, name: str) -> Floats:
        """A list of numbers, NaN for None."""
        try:
            values = np.asarray(self.items(name), np.float64)
        except (TypeError, ValueError, OverflowError):
            values = np.zeros((0, 0))
        if values.ndim != 1:
            raise InputError("must be one list of numbers", field=self.name(name))
        return values

    def messages(self, name: str) -> list[Message] | None:
        """A list of objects, or JSON text of one; None if the field is neither."""
        value: Any = self.value.get(name)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                return None
        return list(value) if is_list(value) and all(isinstance(one, Mapping) for one in value) else None

    def request(self, messages: str = "messages", tools: str = "tools", reply: Any = None) -> Request | None:
        """The conversation beside a call; None if there is none."""
        listed = self.messages(messages)
        return None if listed is None else Request(listed, self.messages(tools), _mapping(reply))


def _mapping(value: Any) -> Message | None:
    return value if isinstance(value, Mapping) else None


# -- calls


class CallNames(NamedTuple):
    """What a framework calls the parts of a call; of several names the first that has a value counts."""

    prompt: str
    completion: str
    logprobs: tuple[str, ...] = ()
    mask: tuple[str, ...] = ()


def read_call(
    fields: Fields, names: CallNames, request: Request | None = None, temperature: float | None = None
) -> Call:
    """A call that is an object with its prompt and its completion."""
    prompt, completion = fields.ids(names.prompt), fields.ids(names.completion)
    findings: list[Finding] = []
    return Call(
        np.concatenate([prompt, completion]),
        len(prompt),
        fields.place(),
        read_logprobs(fields, fields.first(*names.logprobs), len(completion), findings),
        read_mask(fields, fields.first(*names.mask), len(completion), len(prompt), findings),
        request,
        temperature=temperature,
        findings=tuple(findings),
    )


def read_logprobs(fields: Fields, name: str | None, count: int, findings: list[Finding]) -> Floats | None:
    """The logprobs of `count` sampled tokens. Adds what is wrong with them to `findings`."""
    if not count:
        return None
    if name is None or fields.value.get(name) is None or not len(fields.items(name)):
        findings.append(Finding(Cause.NO_LOGPROBS, fields.place(), words=f"{counted(count)} sampled", tokens=count))
        return None
    values = fields.floats(name)
    if len(values) != count:
        words = f"{len(values):,} logprobs for {count:,} sampled tokens"
        findings.append(Finding(Cause.BAD_LOGPROBS, fields.place(name), words=words, tokens=count))
        return None
    findings += logprob_findings(values, fields.place(name))
    return values


def logprob_findings(values: Floats, where: str) -> Iterator[Finding]:
    """What is wrong with the logprobs of one completion: not finite, above 0, or all 0."""
    wrong = ~np.isfinite(values) | (values > POSITIVE_NOISE)
    if wrong.any():
        at = int(wrong.argmax())
        words = f"token {at} of the completion: {values[at]:g}"
        yield Finding(Cause.BAD_LOGPROBS, where, words=words, position=at, tokens=int(wrong.sum()))
    if len(values) >= 4 and not values.any():
        yield Finding(Cause.ZERO_LOGPROBS, where, words=f"all {len(values):,} of a completion", tokens=len(values))


def read_mask(fields: Fields, name: str | None, count: int, before: int, findings: list[Finding]) -> Mask | None:
    """The mask of a call, over its `count` sampled tokens or over the `before` tokens of its prompt and these."""
    if name is None or fields.value.get(name) is None:
        return None
    values = fields.items(name)
    wrong = next((at for at, value in enumerate(values) if value not in (0, 1)), None)
    words = "" if wrong is None else f"entry {wrong} is {shown(values[wrong])}"
    if len(values) not in (count, before + count):
        words = f"{len(values):,} entries for {counted(before + count)}"
    if words:
        findings.append(Finding(Cause.BAD_MASK, fields.place(name), words=words, tokens=len(values)))
        return None
    mask: Mask = np.zeros(before + count, np.bool_)
    mask[before + count - len(values) :] = np.asarray(values, np.bool_)
    return mask


# -- rows


class RowFields(NamedTuple):
    """The parts of a row: `first` is where its response begins, which the mask and logprobs may be limited to."""

    ids: Ids
    first: int
    mask: str | None
    logprobs: str | None


def read_row(fields: Fields, row: RowFields) -> tuple[list[Call], Row]:
    """The calls that a row was built from, and the row itself."""
    findings: list[Finding] = []
    mask = _row_mask(fields, row, findings)
    spans, sampled = _row_spans(fields, len(row.ids), mask)
    values = _row_logprobs(fields, row, mask, findings)
    request = fields.request() if "cause" not in fields.value else None  # an exported session: only its last call's
    causes = [fields.value.get(name) for name in ("cause", "cause_detail")]
    recorded = ": ".join(cause for cause in causes if isinstance(cause, str) and cause)
    calls = []
    for start, stop in spans:
        logprobs = None if values is None else values[start:stop]
        wrong = () if logprobs is None else tuple(logprob_findings(logprobs, fields.place(row.logprobs or "")))
        calls.append(Call(row.ids[:stop], start, fields.place(), logprobs, None, request, recorded, findings=wrong))
    return calls, Row(row.ids, mask, fields.place(), sampled, tuple(findings))


def _row_mask(fields: Fields, row: RowFields, findings: list[Finding]) -> Mask:
    """What a row trains: its mask or its labels, which must agree; without both, its response."""
    mask = read_mask(fields, row.mask, len(row.ids) - row.first, row.first, findings)
    if fields.value.get("labels") is not None:
        labels, where = check_integers(fields.value["labels"], fields.name("labels")), fields.place("labels")
        trained = labels != IGNORE
        if len(labels) != len(row.ids):
            words = f"{len(labels):,} labels for {len(row.ids):,} tokens"
            findings.append(Finding(Cause.BAD_LABELS, where, words=words, tokens=len(labels)))
            return np.zeros(len(row.ids), np.bool_) if mask is None else mask
        wrong = trained & (labels != row.ids)
        if wrong.any():
            at = int(wrong.argmax())
            words = f"the first is label {at:,}: {labels[at]}, and the token there is {row.ids[at]}"
            findings.append(Finding(Cause.BAD_LABELS, where, words=words, position=at, tokens=int(wrong.sum())))
        if mask is not None and (mask != trained).any():
            at, count = int((mask != trained).argmax()), int((mask != trained).sum())
            who = "labels train it, and the mask does not" if trained[at] else "the mask trains it, and labels do not"
            words = f"the first is token {at:,}: {who}"
            findings.append(Finding(Cause.BAD_LABELS, where, words=words, position=at, tokens=count))
        return trained if mask is None else mask
    if mask is None:
        mask = np.arange(len(row.ids)) >= row.first if not findings else np.zeros(len(row.ids), np.bool_)
    return mask


def _row_spans(fields: Fields, count: int, mask: Mask) -> tuple[list[tuple[int, int]], Mask | None]:
    """The completions in a row as far as it trains them, and the mask of sampled tokens if the row has one."""
    sampled = None
    if fields.value.get("kinds") is not None:
        sampled = check_integers(fields.value["kinds"], fields.name("kinds")) == Kind.SAMPLED
        if len(sampled) != count:
            words = f"has {len(sampled):,} entries, and there are {count:,} ids"
            raise InputError(words, field=fields.name("kinds"))
    if fields.value.get("completions") is None:
        return runs(mask), sampled
    spans = []
    for one in fields.each("completions"):
        start, stop = one.value.get("start"), one.value.get("stop")
        if type(start) is not int or type(stop) is not int or not 0 <= start <= stop <= count:
            words = f"is from {shown(start)} to {shown(stop)}: no stretch of a row of {count:,} tokens"
            raise InputError(words, field=one.path)
        spans.append((start, stop))
    if sampled is None:
        sampled = np.zeros(count, np.bool_)
        for start, stop in spans:
            sampled[start:stop] = True
    return [(start, stop) for start, stop in spans if mask[start:stop].any()], sampled


def _row_logprobs(fields: Fields, row: RowFields, mask: Mask, findings: list[Finding]) -> Floats | None:
    """Logprobs over the whole row, NaN where there are none: given for all, for the response, or for trained tokens."""
    trained, total = int(mask.sum()), len(row.ids)
    if row.logprobs is None or fields.value.get(row.logprobs) is None:
        if trained:
            words = f"{counted(trained)} trained"
            findings.append(Finding(Cause.NO_LOGPROBS, fields.place(), words=words, tokens=trained))
        return None
    values = fields.floats(row.logprobs)
    if len(values) not in (total, total - row.first, trained):
        words = f"{len(values):,} logprobs for {total:,} tokens, {trained:,} of them trained"
        findings.append(Finding(Cause.BAD_LOGPROBS, fields.place(row.logprobs), words=words, tokens=trained))
        return None
    out = np.full(total, np.nan)
    if len(values) in (total, total - row.first):
        out[total - len(values) :] = values
    else:
        out[mask] = values
    return out
