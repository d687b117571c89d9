"""Recorded rollouts in one form: calls of an engine, and training rows built from them.

`record_files` opens files, `record_shapes` knows where frameworks keep calls, and `rollouts`
finds out whether each call continues the one before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import InputError, brief
from ..samples.sample import IGNORE
from ..show.visible import counted
from ..tokens.ids import check_ids, check_integers, runs
from ..tokens.kinds import Kind
from ..tokens.tokenizer import Ids
from ..trajectory.inputs import POSITIVE_NOISE
from .finding import Cause, Finding

Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Line = Mapping[str, Any]

IDS: Final = ("input_ids", "token_ids", "ids", "tokens")
PROMPTS: Final = ("prompt_ids", "prompt_token_ids")
COMPLETIONS: Final = (
    *("completion_ids", "completion_token_ids", "generation_token_ids"),
    *("output_ids", "token_ids"),
)
MASKS: Final = (
    *("loss_mask", "completion_mask", "output_mask", "response_mask"),
    *("env_mask", "assistant_masks", "assistant_mask", "mask"),
)
LOGPROBS: Final = (
    *("logprobs", "log_probs", "completion_logprobs", "generation_log_probs"),
    *("output_log_probs", "per_token_logps", "response_logprobs", "rollout_log_probs"),
    *("old_log_probs", "inference_logprobs", "sampling_per_token_logps"),
)
"""What frameworks call these things; the first that has a value counts."""


class Request(NamedTuple):
    """The conversation that a call continues, and the reply if the record has it."""

    messages: Sequence[Line]
    tools: Sequence[Line] | None = None
    reply: Line | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of an engine: `stream` is its prompt and, from `start` on, the sampled tokens.

    `mask` marks trained tokens of the stream, `logprobs` belong to the sampled ones. `findings`
    reports what does not fit. `recorded` is the cause that the record itself gives.
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

    `independent` rows were recorded apart from the calls of their rollout, which can prove their masks.
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
    note: str = ""
    ordered: bool = True


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A line, file or session that cannot be read, and why."""

    where: str
    problem: str


class Place(NamedTuple):
    """An object in a record: the line it is on, and the path to it."""

    line: str
    path: str = ""

    def __str__(self) -> str:
        return f"{self.line}, {self.path}" if self.path else self.line

    def field(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def at(self, name: str) -> Place:
        return Place(self.line, self.field(name))


def first_of(value: Line, names: Sequence[str]) -> str | None:
    """The first of these fields that has a value."""
    return next((name for name in names if value.get(name) is not None), None)


# -- calls


def read_call(value: Line, place: Place, request: Request | None = None, temperature: Any = None) -> Call:
    """A call that is an object with its prompt and its completion."""
    prompt, completion = (_ids(value, names, place) for names in (PROMPTS, COMPLETIONS))
    findings: list[Finding] = []
    return Call(
        np.concatenate([prompt, completion]),
        len(prompt),
        str(place),
        read_logprobs(value, place, len(completion), findings),
        read_mask(value, place, len(completion), len(prompt), findings),
        request,
        temperature=None if temperature is None else float(temperature),
        findings=tuple(findings),
    )


def _ids(value: Line, names: Sequence[str], place: Place) -> Ids:
    name = first_of(value, names)
    if name is None:
        raise InputError("is missing", field=place.field(names[0]))
    return check_ids(value[name], place.field(name))


def _floats(value: Line, name: str, place: Place) -> Floats:
    """A list of numbers, NaN for None."""
    try:
        values = np.asarray(value[name], np.float64)
    except (TypeError, ValueError, OverflowError):
        values = np.zeros((0, 0))
    if values.ndim != 1:
        raise InputError("must be one list of numbers", field=place.field(name))
    return values


def read_logprobs(value: Line, place: Place, count: int, findings: list[Finding]) -> Floats | None:
    """The logprobs of `count` sampled tokens. Adds what is wrong with them to `findings`."""
    name = first_of(value, LOGPROBS)
    values = _floats(value, name, place) if name is not None else np.zeros(0)
    if not count:
        return None
    if not len(values):
        findings.append(_missing(place, count, "sampled"))
        return None
    where = str(place.at(name or ""))
    if len(values) != count:
        words = f"{len(values):,} logprobs for {count:,} sampled tokens"
        findings.append(Finding(Cause.BAD_LOGPROBS, where, words=words, tokens=count))
        return None
    findings += logprob_findings(values, where)
    return values


def _missing(place: Place, count: int, what: str) -> Finding:
    return Finding(Cause.NO_LOGPROBS, str(place), words=f"{counted(count)} {what}", tokens=count)


def logprob_findings(values: Floats, where: str) -> Iterator[Finding]:
    """What is wrong with the logprobs of one completion: not finite, above 0, or all 0."""
    wrong = ~np.isfinite(values) | (values > POSITIVE_NOISE)
    if wrong.any():
        at = int(wrong.argmax())
        words = f"token {at} of the completion: {values[at]:g}"
        yield Finding(Cause.BAD_LOGPROBS, where, words=words, position=at, tokens=int(wrong.sum()))
    if len(values) >= 4 and not values.any():
        yield Finding(Cause.ZERO_LOGPROBS, where, words="all of a completion", tokens=len(values))


def read_mask(value: Line, place: Place, count: int, before: int, findings: list[Finding]) -> Mask | None:
    """The mask over `count` sampled tokens, or over the `before` tokens of the prompt and these."""
    name = first_of(value, MASKS)
    if name is None:
        return None
    values = list(value[name]) if not isinstance(value[name], str) else [value[name]]
    wrong = next((at for at, one in enumerate(values) if one not in (0, 1)), None)
    words = "" if wrong is None else f"entry {wrong} is {brief(values[wrong])}"
    if len(values) not in (count, before + count):
        words = f"{len(values):,} entries for {counted(before + count)}"
    if words:
        findings.append(Finding(Cause.BAD_MASK, str(place.at(name)), words=words, tokens=len(values)))
        return None
    mask: Mask = np.zeros(before + count, np.bool_)
    mask[before + count - len(values) :] = np.asarray(values, np.bool_)
    return mask


# -- rows


def read_row(value: Line, place: Place, ids: Ids | None = None, first: int = 0) -> tuple[list[Call], Row]:
    """The calls that a row was built from, and the row itself.

    Mask and logprobs may begin at `first`, the response. Every run of trained tokens is a call.
    """
    ids = _ids(value, IDS, place) if ids is None else ids
    findings: list[Finding] = []
    mask = read_row_mask(value, place, ids, first, findings)
    sampled = None
    if value.get("kinds") is not None:
        sampled = check_integers(value["kinds"], place.field("kinds")) == Kind.SAMPLED
        if len(sampled) != len(ids):
            words = f"has {len(sampled):,} entries, and there are {len(ids):,} ids"
            raise InputError(words, field=place.field("kinds"))
    values = _row_logprobs(value, place, mask, first, findings)
    request = read_request(value) if "cause" not in value else None  # of its last call only
    causes = [value.get(name) for name in ("cause", "cause_detail")]
    recorded = ": ".join(cause for cause in causes if isinstance(cause, str) and cause)
    calls = []
    for start, stop in runs(mask):
        logprobs = None if values is None else values[start:stop]
        wrong = () if logprobs is None else tuple(logprob_findings(logprobs, str(place.at("logprobs"))))
        call = Call(ids[:stop], start, str(place), logprobs, None, request, recorded, findings=wrong)
        calls.append(call)
    return calls, Row(ids, mask, str(place), sampled, tuple(findings))


def read_request(value: Line, reply: Any = None) -> Request | None:
    """The conversation beside a call or a row, if there is one."""
    messages, tools = value.get("messages"), value.get("tools")
    if not isinstance(messages, list):
        return None
    reply = reply if isinstance(reply, Mapping) else None
    return Request(messages, tools if isinstance(tools, list) else None, reply)


def read_row_mask(value: Line, place: Place, ids: Ids, first: int, findings: list[Finding]) -> Mask:
    """What a row trains: its mask or its labels, which must agree; without both, its response."""
    mask = read_mask(value, place, len(ids) - first, first, findings)
    if value.get("labels") is None:
        if mask is None:
            mask = np.arange(len(ids)) >= (len(ids) if findings else first)
        return mask
    labels = check_integers(value["labels"], place.field("labels"))
    if len(labels) != len(ids):
        words = f"{len(labels):,} labels for {len(ids):,} tokens"
        findings.append(Finding(Cause.BAD_LABELS, str(place.at("labels")), words=words, tokens=len(labels)))
        return np.zeros(len(ids), np.bool_) if mask is None else mask
    trained: Mask = labels != IGNORE
    mask = trained if mask is None else mask
    for wrong, what in ((trained & (labels != ids), "is not the id there"), (mask != trained, "contradicts the mask")):
        if wrong.any():
            at = int(wrong.argmax())
            words = f"label {at:,} is {labels[at]}, which {what}"
            if np.array_equal(labels[:-1][trained[:-1]], ids[1:][trained[:-1]]):
                words += "; all labels are those of the next token: models shift them on their own"
            where = str(place.at("labels"))
            findings.append(Finding(Cause.BAD_LABELS, where, words=words, position=at, tokens=int(wrong.sum())))
    return mask


def _row_logprobs(value: Line, place: Place, mask: Mask, first: int, findings: list[Finding]) -> Floats | None:
    """Logprobs over the whole row, NaN where there are none."""
    trained, total, name = int(mask.sum()), len(mask), first_of(value, LOGPROBS)
    if name is None:
        findings += [_missing(place, trained, "trained")] if trained else []
        return None
    values = _floats(value, name, place)
    out = np.full(total, np.nan)
    if len(values) in (total, total - first):
        out[total - len(values) :] = values
    elif len(values) == trained:
        out[mask] = values
    else:
        words = f"{len(values):,} logprobs for {total:,} tokens, {trained:,} of them trained"
        findings.append(Finding(Cause.BAD_LOGPROBS, str(place.at(name)), words=words, tokens=trained))
        return None
    return out
