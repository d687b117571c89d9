"""What a trajectory consists of: turns, branches, spans of messages and versions, and the writes it was made of."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ..tokens.kinds import Kind

IdsLike: TypeAlias = Sequence[int] | npt.NDArray[Any]
KindsLike: TypeAlias = Kind | int | Sequence[int] | npt.NDArray[Any]
LogprobsLike: TypeAlias = Sequence[float] | npt.NDArray[Any]
Version: TypeAlias = str | int
VersionLike: TypeAlias = Version | Sequence[tuple[Version, int, int]] | None
SpansLike: TypeAlias = Iterable[tuple[int, int, int]] | npt.NDArray[Any]

PENALTIES: Final = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
"""The sampling parameters that change logits by what is there already, each with the value that does nothing."""


class LogprobKind(StrEnum):
    """The distribution that logprobs are of. Kinds differ where temperature is not 1, or top-p or top-k exclude ids."""

    PROCESSED = "processed"
    """The one that was sampled from: temperature, top-p and top-k included."""
    SCALED = "scaled"
    """After temperature, before top-p and top-k. Where these exclude nothing, it is the one that was sampled from."""
    RAW = "raw"
    """The model's own, before temperature, top-p and top-k; what a greedy completion (temperature 0) has everywhere."""
    UNKNOWN = "unknown"
    """It was not said, and could not be found."""


class MessageSpan(NamedTuple):
    """Tokens ``start`` to ``stop`` (exclusive) of a stream that belong to one message of the conversation."""

    start: int
    stop: int
    message: int


class VersionSpan(NamedTuple):
    """Tokens ``start`` to ``stop`` (exclusive) of a completion that one version of the weights sampled."""

    version: str | int
    start: int
    stop: int


class SharedPrefix(NamedTuple):
    """How much of a prompt is already recorded, and where."""

    branch: int
    """The branch that shares most of it, the oldest of several; -1 where nothing is shared."""
    length: int
    """How many ids are shared."""
    extends: int
    """The branch whose whole stream the prompt begins with, where none shares more; -1 where there is none."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion, as the engine returned it. Positions are those of the stream.

    `cut` is True in the turns of a branch that left its parent inside this completion: only the head up to `stop`
    lies in that branch, and `finish_reason` tells of the whole. The turn itself, whole, is the parent's.
    """

    write: int
    """The number of the write that recorded it: unique in the trajectory, and growing with time."""
    branch: int
    """The branch that owns it, and trains it."""
    start: int
    stop: int
    message: int
    """Its number in the conversation."""
    finish_reason: str
    versions: tuple[VersionSpan, ...]
    """Which weights sampled which part; positions count from `start`. Empty where it is not known."""
    sampling_json: str | None
    continues: bool
    """It continues the message of the turn before, which was aborted or ran out of tokens."""
    cut: bool = False
    logprobs_kind: LogprobKind = LogprobKind.UNKNOWN
    """Of which distribution its logprobs are."""
    cached_tokens: int | None = None
    """How many ids of its prompt the engine had cached; None where it is not known."""
    reward: float | None = field(default=None, compare=False)
    """What it was worth, as `Trajectory.set_reward` was told until then; None where it was not."""

    @property
    def version(self) -> str | int | None:
        """The version that sampled all of it; None where it is not known or the weights changed in between."""
        return self.versions[0].version if len(self.versions) == 1 else None

    @property
    def sampling(self) -> dict[str, Any] | None:
        """The sampling parameters, as given."""
        return None if self.sampling_json is None else json.loads(self.sampling_json)

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Branch:
    """One node of the tree: the tokens from `start` on are its own, those before are its parent's."""

    index: int
    parent: int
    """The branch that owns the token before `start`; -1 where nothing is shared."""
    start: int
    stop: int
    """The length of its stream, as of when it was asked for."""
    sampled: int
    """How many of its own tokens were sampled."""
    cause: str
    """Why the history was rewritten; empty for the first branch."""
    retries: bool = False
    """Whether it rewrites nothing: a recorded prompt, or the beginning of one, was sampled again."""


@dataclass(frozen=True, slots=True, eq=False)
class ContextWrite:
    """Tokens that were put into a stream: a first prompt, a rewritten one, or what came after a completion."""

    branch: int
    start: int
    ids: IdsLike
    kinds: KindsLike
    spans: npt.NDArray[np.int32]
    """Rows of stream positions and message number."""
    messages: int
    """How many messages the conversation holds after it."""
    parent: int | None = None
    """Set where this write makes the branch: the branch that owns the token before `start`, -1 for none."""
    cause: str = ""
    """Why it makes a branch."""


@dataclass(frozen=True, slots=True, eq=False)
class CompletionWrite:
    """Tokens that an engine returned."""

    branch: int
    start: int
    ids: IdsLike
    logprobs: LogprobsLike | None
    finish_reason: str
    version: VersionLike
    sampling_json: str | None
    continues: bool
    logprobs_kind: LogprobKind | str = LogprobKind.UNKNOWN
    cached_tokens: int | None = None
    channels: Mapping[str, Any] = field(default_factory=dict)
    """What else was told of the tokens, by name."""


Write = ContextWrite | CompletionWrite
"""What the ledger records, and what a trajectory is made of. `Trajectory.writes` gives those made, with arrays."""
