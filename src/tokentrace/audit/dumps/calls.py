"""What a dump says of rollouts, in one form: the calls of an engine, rows made of them, and what is wrong with both.

A call is a prompt and what was sampled after it. Whether one goes on from another is for `audit.inspect` to find out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from ...tokens.tokenizer import Ids

Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Message = Mapping[str, Any]


class DumpFault(StrEnum):
    """What can be wrong with the numbers of a call or a row. The value is its name for people."""

    NO_LOGPROBS = "no logprobs"
    LOGPROBS_LENGTH = "logprobs of another number than tokens"
    LOGPROB_VALUE = "a logprob that is not a finite number"
    LOGPROB_POSITIVE = "a logprob above 0"
    LOGPROBS_ZERO = "logprobs that are all 0"
    """Of several tokens: that is what missing ones are padded with."""
    MASK_LENGTH = "a mask of another length than the tokens"
    MASK_VALUE = "a mask of other values than 0 and 1"
    LABELS_OTHER = "labels of other tokens than those they stand at"
    """Labels that were shifted already, for one."""
    LABELS_MASK = "labels that train other tokens than the mask"
    TRAINED_UNSAMPLED = "trained, but no engine sampled it"
    SAMPLED_UNTRAINED = "sampled, but not trained"
    NOTHING_SAMPLED = "a call that sampled nothing"
    NO_TOKEN = "an id that the vocabulary does not have"
    TWICE = "a call that is there twice"
    """The same ids with the same logprobs, on two lines of a file."""

    @property
    def group(self) -> str:
        """What it concerns, as ``--allow`` names it: ids, masks or logprobs."""
        name = self.name
        if name.startswith(("LOGPROB", "NO_LOGPROBS")):
            return "logprobs"
        return "ids" if name in ("NOTHING_SAMPLED", "NO_TOKEN", "TWICE") else "masks"


@dataclass(frozen=True, slots=True)
class FoundFault:
    """A fault, where it is, and in how many tokens."""

    fault: DumpFault
    where: str
    detail: str
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class DumpedRequest:
    """The conversation that a call was asked to go on with, and what it answered where that is known."""

    messages: Sequence[Message]
    tools: Sequence[Message] | None = None
    reply: Message | None = None

    def as_mapping(self) -> dict[str, Any]:
        """As `explain_break` takes it."""
        return {"messages": list(self.messages), "tools": list(self.tools or ())}


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of an engine: `stream` is its prompt and, from `start` on, what it sampled."""

    stream: Ids
    start: int
    where: str
    """File, line and field, for people."""
    logprobs: Floats | None = None
    """Of what was sampled; None where there are none, or where `findings` say that they are wrong."""
    mask: Mask | None = None
    """What is trained of the stream; None where the dump does not say."""
    request: DumpedRequest | None = None
    recorded: str = ""
    """Why the record says that its history was rewritten; empty where it says nothing."""
    temperature: float | None = None
    findings: tuple[FoundFault, ...] = ()

    @property
    def prompt(self) -> Ids:
        return self.stream[: self.start]


@dataclass(frozen=True, slots=True, eq=False)
class DumpedRow:
    """A training row. `sampled` says which tokens an engine returned, where the row itself tells.

    `own_calls`: the calls of its rollout were read from rows, this one among them, and tell nothing of its mask.
    """

    ids: Ids
    mask: Mask
    where: str
    sampled: Mask | None = None
    findings: tuple[FoundFault, ...] = ()
    own_calls: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class DumpedRollout:
    """One rollout: its calls, and rows if the dump has any."""

    name: str
    where: str
    calls: Sequence[Call]
    rows: Sequence[DumpedRow] = ()
    tokenizer: str | None = None
    """The first digits of its tokenizer's digest, where the record has them."""
    notes: Sequence[str] = field(default_factory=tuple)
    ordered: bool = True
    """Whether its calls are known to be in the order in which they were made; lines of a file need not be."""

    @staticmethod
    def joined(parts: Sequence[DumpedRollout]) -> DumpedRollout:
        """What several lines say of one rollout."""
        if len(parts) == 1:
            return parts[0]
        return DumpedRollout(
            parts[0].name,
            parts[0].where,
            [call for part in parts for call in part.calls],
            [row for part in parts for row in part.rows],
            next((part.tokenizer for part in parts if part.tokenizer), None),
            [note for part in parts for note in part.notes],
            ordered=False,
        )


@dataclass(frozen=True, slots=True)
class UnreadSource:
    """A line, a file or a session that says nothing of a rollout, and why."""

    where: str
    problem: str
