"""Turns, contexts and branches: the parts of a trajectory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..tokens.kinds import Kind
from ..tokens.table import TokenTable

if TYPE_CHECKING:
    from .channels import Packed

IdsLike = Sequence[int] | npt.NDArray[Any]
KindsLike = Kind | int | Sequence[int] | npt.NDArray[Any]
LogprobsLike = Sequence[float] | npt.NDArray[Any]
VersionLike = str | int | Sequence[tuple[str | int, int, int]] | None
SpansLike = Iterable[tuple[int, int, int]] | npt.NDArray[Any]
Logprobs = npt.NDArray[np.float32]

PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
"""Sampling parameters that change logits by earlier tokens, with the value for off."""
POSITIVE_NOISE = 1e-4
"""How far above 0 a logprob may be: a softmax rounds."""


class LogprobKind(StrEnum):
    """The distribution that logprobs come from."""

    PROCESSED = "processed"
    """The distribution that was sampled from: temperature, top-p and top-k included."""
    SCALED = "scaled"
    """After temperature, before top-p and top-k. Equals `PROCESSED` if these exclude nothing."""
    RAW = "raw"
    """The model's own, before temperature, top-p and top-k. Greedy completions have it."""
    UNKNOWN = "unknown"


class VersionSpan(NamedTuple):
    """Tokens ``start`` to ``stop`` (exclusive) that one version of the weights sampled."""

    version: str | int
    start: int
    stop: int


class SharedPrefix(NamedTuple):
    """How much of a prompt is already recorded, and where."""

    branch: int
    """The oldest branch that shares most of it; -1 for none."""
    length: int
    extends: int
    """The branch whose whole stream it begins with, if none shares more; else -1."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion, as the engine returned it. Positions are those of the stream.

    `cut`: the branch left its parent inside this completion, and has only the head of it.
    """

    write: int
    """The number of the write that recorded it."""
    branch: int
    """The branch that owns it, and trains it."""
    start: int
    stop: int
    message: int
    """Its number in the conversation."""
    finish_reason: str
    versions: tuple[VersionSpan, ...]
    """Which weights sampled which part, counted from `start`; empty if unknown."""
    sampling_json: str | None
    continues: bool
    """It continues the message of the turn before, which was cut off."""
    cut: bool = False
    logprobs_kind: LogprobKind = LogprobKind.UNKNOWN
    cached_tokens: int | None = None
    """How many ids of its prompt the engine had cached; None if unknown."""
    reward: float | None = field(default=None, compare=False)
    """From `Trajectory.set_reward`, as of when this turn was read."""
    channels: tuple[tuple[str, Packed], ...] = field(default=(), compare=False, repr=False)
    """Its side channels, by name."""
    tokens: TokenTable = field(kw_only=True, compare=False, repr=False)

    @property
    def messages(self) -> int:
        return self.message + 1

    @property
    def version(self) -> str | int | None:
        """The version that sampled all of it; None if unknown, or if it changed."""
        return self.versions[0].version if len(self.versions) == 1 else None

    @property
    def sampling(self) -> dict[str, Any] | None:
        return None if self.sampling_json is None else json.loads(self.sampling_json)

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """Tokens added without sampling: a prompt, or what follows a completion."""

    branch: int
    start: int
    stop: int
    message: int
    """How many messages the branch held before it."""
    messages: int
    """How many it holds after it."""
    tokens: TokenTable
    parent: int | None = None
    """If this write opened the branch: the owner of the token before `start`, -1 for none."""
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Branch:
    """One node of the tree: it owns the tokens from `start` on."""

    index: int
    parent: int
    """The owner of the token before `start`; -1 if nothing is shared."""
    start: int
    stop: int
    sampled: int
    """How many of its tokens were sampled."""
    cause: str
    """Why the history was rewritten; empty for the first branch."""


Write = Turn | Context
