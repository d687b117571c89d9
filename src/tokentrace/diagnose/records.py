"""Recorded rollouts in one form: calls of an engine, and training rows built from them.

`record_files` opens files, `record_shapes` finds calls and rows in their lines, and `rollouts`
finds out whether each call continues the one before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import InputError, brief
from ..samples.sample import IGNORE
from ..tokens.ids import check_ids, check_integers, runs
from ..tokens.kinds import Kind
from ..tokens.tokenizer import Ids
from ..tokens.visible import counted
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

    `mask` marks trained tokens of the stream, `logprobs` belong to the sampled ones.
    `recorded` is the cause that the record itself gives for rewriting the history.
    """

    stream: Ids
    start: int
    where: str
    logprobs: Floats | None = None
    mask: Mask | None = None
    request: Request | None = None
    recorded: str = ""
    temperature: float | None = None
    findings: Sequence[Finding] = ()

    @property
    def prompt(self) -> Ids:
        return self.stream[: self.start]


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A training row. `sampled` marks what an engine returned, if the row itself says so."""

    ids: Ids
    mask: Mask
    where: str
    sampled: Mask | None = None
    findings: Sequence[Finding] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One rollout: its calls, and rows made of them.

    `derived` calls were read from the rows; other calls prove the masks of rows. `ordered` is
    False if the calls are lines of a file, in any order. `tokenizer` starts a digest.
    """

    name: str
    where: str
    calls: Sequence[Call]
    rows: Sequence[Row] = ()
    derived: bool = False
    tokenizer: str | None = None
    note: str = ""
    ordered: bool = True


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A line, file or session that cannot be read, and why."""

    where: str
    problem: str


def first_of(value: Line, names: Sequence[str]) -> str | None:
    """The first of these fields that has a value."""
    return next((name for name in names if value.get(name) is not None), None)


@dataclass(frozen=True, slots=True)
class Fields:
    """An object in a record, its line and its path. Reading it adds to `findings`."""

    value: Line
    line: str
    path: str = ""
    findings: list[Finding] = field(default_factory=list)

    def inner(self, name: str, value: Any) -> Fields:
        """An object inside this one."""
        return Fields(value, self.line, self.field(name))

    def field(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path and name else self.path or name

    def where(self, name: str = "") -> str:
        """The place of the object, or of one of its fields."""
        return ", ".join(filter(None, (self.line, self.field(name))))

    def report(self, cause: Cause, words: str, tokens: int, name: str = "", position: int | None = None) -> None:
        self.findings.append(Finding(cause, self.where(name), words=words, position=position, tokens=tokens))

    def ids(self, names: Sequence[str]) -> Ids:
        """Ids under the first of these names that is there. Raises InputError if there are none."""
        name = first_of(self.value, names)
        if name is None:
            raise InputError("is missing", field=self.field(names[0]))
        return check_ids(self.value[name], self.field(name))

    def logprobs(self, count: int, sizes: Sequence[int] = (), what: str = "sampled") -> Floats | None:
        """The logprobs of `count` tokens, in lists of these sizes; NaN for None."""
        name = first_of(self.value, LOGPROBS)
        try:
            values = np.asarray([] if name is None else self.value[name], np.float64)
        except (TypeError, ValueError, OverflowError):
            values = np.zeros((0, 0))
        if values.ndim != 1:
            raise InputError("must be one list of numbers", field=self.field(name or ""))
        if not count or len(values) in (sizes or (count,)):
            return values if count else None
        words = f"{len(values):,} logprobs for {count:,} {what} tokens"
        if len(values):
            self.report(Cause.BAD_LOGPROBS, words, count, name or "")
        else:
            self.report(Cause.NO_LOGPROBS, f"{counted(count)} {what}", count)
        return None

    def check_logprobs(self, values: Floats | None) -> None:
        """Report the logprobs of a completion that are not finite, above 0, or all 0."""
        values, name = np.zeros(0) if values is None else values, first_of(self.value, LOGPROBS) or ""
        wrong = ~np.isfinite(values) | (values > POSITIVE_NOISE)
        if wrong.any():
            at = int(wrong.argmax())
            words = f"token {at} of the completion: {values[at]:g}"
            self.report(Cause.BAD_LOGPROBS, words, int(wrong.sum()), name, at)
        if len(values) >= 4 and not values.any():
            self.report(Cause.ZERO_LOGPROBS, "all of a completion", len(values), name)

    def mask(self, count: int, before: int = 0) -> Mask | None:
        """The mask over `count` tokens, or over these and the `before` tokens of the prompt."""
        name = first_of(self.value, MASKS)
        if name is None:
            return None
        values = list(self.value[name]) if not isinstance(self.value[name], str) else [self.value[name]]
        wrong = next((at for at, one in enumerate(values) if one not in (0, 1)), None)
        words = "" if wrong is None else f"entry {wrong} is {brief(values[wrong])}"
        if len(values) not in (count, before + count):
            words = f"{len(values):,} entries for {counted(before + count)}"
        if words:
            self.report(Cause.BAD_MASK, words, len(values), name)
            return None
        mask: Mask = np.zeros(before + count, np.bool_)
        mask[before + count - len(values) :] = np.asarray(values, np.bool_)
        return mask

    def trained(self, ids: Ids, first: int = 0) -> Mask | None:
        """What a row trains: its mask or its labels, which must agree; None without both."""
        mask = self.mask(len(ids) - first, first)
        if self.value.get("labels") is None:
            return mask
        labels = check_integers(self.value["labels"], self.field("labels"))
        if len(labels) != len(ids):
            self.report(Cause.BAD_LABELS, f"{len(labels):,} labels for {len(ids):,} tokens", len(labels), "labels")
            return mask
        trained: Mask = labels != IGNORE
        mask = trained if mask is None else mask
        for wrong, what in (
            (trained & (labels != ids), "is not the id there"),
            (mask != trained, "contradicts the mask"),
        ):
            if wrong.any():
                at = int(wrong.argmax())
                words = f"label {at:,} is {labels[at]}, which {what}"
                if np.array_equal(labels[:-1][trained[:-1]], ids[1:][trained[:-1]]):
                    words += "; all labels are those of the next token: models shift them on their own"
                self.report(Cause.BAD_LABELS, words, int(wrong.sum()), "labels", at)
        return mask

    def request(self, reply: Any = None) -> Request | None:
        """The conversation beside a call or a row, if there is one."""
        messages, tools = self.value.get("messages"), self.value.get("tools")
        reply = reply if isinstance(reply, Mapping) else None
        tools = tools if isinstance(tools, list) else None
        return Request(messages, tools, reply) if isinstance(messages, list) else None

    def call(self, request: Request | None = None, temperature: Any = None) -> Call:
        """The object as a call, with its prompt and its completion."""
        prompt, completion = self.ids(PROMPTS), self.ids(COMPLETIONS)
        logprobs = self.logprobs(len(completion))
        self.check_logprobs(logprobs)
        mask = self.mask(len(completion), len(prompt))
        temperature = None if temperature is None else float(temperature)
        stream = np.concatenate([prompt, completion])
        where, findings = self.where(), self.findings
        return Call(stream, len(prompt), where, logprobs, mask, request, "", temperature, findings)

    def row(self, ids: Ids | None = None, first: int = 0) -> tuple[Row, list[Call]]:
        """The object as a row, and its trained runs as calls.

        Mask and logprobs may begin at `first`, the response, which is trained if nothing says what is.
        """
        ids = self.ids(IDS) if ids is None else ids
        mask = self.trained(ids, first)
        if mask is None:
            mask = np.arange(len(ids)) >= (len(ids) if self.findings else first)
        sampled = None
        if self.value.get("kinds") is not None:
            sampled = check_integers(self.value["kinds"], self.field("kinds")) == Kind.SAMPLED
            if len(sampled) != len(ids):
                words = f"has {len(sampled):,} entries, and there are {len(ids):,} ids"
                raise InputError(words, field=self.field("kinds"))
        count, total, scores = int(mask.sum()), len(ids), np.full(len(ids), np.nan)
        values = self.logprobs(count, (total, total - first, count), "trained")
        if values is not None:
            whole = len(values) in (total, total - first)
            scores[np.arange(total) >= total - len(values) if whole else mask] = values
        request = self.request() if "cause" not in self.value else None  # of its last call only
        causes = [self.value.get(name) for name in ("cause", "cause_detail")]
        recorded = ": ".join(cause for cause in causes if isinstance(cause, str) and cause)
        calls = []
        for start, stop in runs(mask):
            logprobs, part = None if values is None else scores[start:stop], self.inner("", self.value)
            part.check_logprobs(logprobs)
            where, findings = self.where(), part.findings
            calls.append(Call(ids[:stop], start, where, logprobs, None, request, recorded, None, findings))
        return Row(ids, mask, self.where(), sampled, self.findings), calls
