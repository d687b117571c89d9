"""The parts of a trajectory, and checks of everything that enters one.

A check returns exactly the values it was passed, in the dtypes that a trajectory stores, or raises `TrajectoryError`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ..conversation.values import no_constant
from ..errors import TrajectoryError, brief
from ..settings import items, whole
from ..tokens.ids import INT32_MAX, check_ids, check_integers
from ..tokens.kinds import Kind, Kinds
from ..tokens.table import TokenTable
from ..tokens.tokenizer import Ids

if TYPE_CHECKING:
    from .channels import Packed

IdsLike: TypeAlias = Sequence[int] | npt.NDArray[Any]
KindsLike: TypeAlias = Kind | int | Sequence[int] | npt.NDArray[Any]
LogprobsLike: TypeAlias = Sequence[float] | npt.NDArray[Any]
Version: TypeAlias = str | int
VersionLike: TypeAlias = Version | Sequence[tuple[Version, int, int]] | None
SpansLike: TypeAlias = Iterable[tuple[int, int, int]] | npt.NDArray[Any]
Logprobs: TypeAlias = npt.NDArray[np.float32]
Owners: TypeAlias = npt.NDArray[np.int32]

PENALTIES: Final = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
"""The sampling parameters that change logits by earlier tokens, each with the value that turns it off."""


class LogprobKind(StrEnum):
    """The distribution that logprobs are of. Kinds differ where temperature is not 1, or top-p or top-k exclude ids."""

    PROCESSED = "processed"
    """The distribution that was sampled from: temperature, top-p and top-k included."""
    SCALED = "scaled"
    """After temperature, before top-p and top-k. Equals `PROCESSED` where these exclude nothing."""
    RAW = "raw"
    """The model's, before temperature, top-p and top-k; a greedy completion (temperature 0) always has this one."""
    UNKNOWN = "unknown"
    """The engine did not report it."""


class VersionSpan(NamedTuple):
    """Tokens ``start`` to ``stop`` (exclusive) that one version of the weights sampled."""

    version: str | int
    start: int
    stop: int


class SharedPrefix(NamedTuple):
    """How much of a prompt is already recorded, and where."""

    branch: int
    """The branch that shares most of it, the oldest of several; -1 if nothing is shared."""
    length: int
    """How many ids are shared."""
    extends: int
    """The branch whose whole stream the prompt begins with, if none shares more; else -1."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion, as the engine returned it. Positions are those of the stream.

    `cut`: the branch left its parent inside this completion and has only its head; the parent has the whole turn.
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
    """Which weights sampled which part; positions count from `start`. Empty if the version is unknown."""
    sampling_json: str | None
    continues: bool
    """It continues the message of the turn before, which was aborted or ran out of tokens."""
    cut: bool = False
    logprobs_kind: LogprobKind = LogprobKind.UNKNOWN
    cached_tokens: int | None = None
    """How many ids of its prompt the engine had cached; None if unknown."""
    reward: float | None = field(default=None, compare=False)
    """The reward that `Trajectory.set_reward` had recorded when this turn was read."""
    channels: tuple[tuple[str, Packed], ...] = field(default=(), compare=False, repr=False)
    """Names and packed entries of its side channels; `Trajectory.channels` has them along a stream."""
    tokens: TokenTable = field(kw_only=True, compare=False, repr=False)

    @property
    def messages(self) -> int:
        """How many messages its branch holds after it."""
        return self.message + 1

    @property
    def version(self) -> str | int | None:
        """The version that sampled all of it; None if it is unknown or the weights changed in between."""
        return self.versions[0].version if len(self.versions) == 1 else None

    @property
    def sampling(self) -> dict[str, Any] | None:
        """The sampling parameters."""
        return None if self.sampling_json is None else json.loads(self.sampling_json)

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """Tokens that were added to a stream without sampling: a prompt, a rewritten one, or what follows a completion."""

    branch: int
    start: int
    stop: int
    message: int
    """How many messages the branch held before it: the number of its first message."""
    messages: int
    """How many messages the branch holds after it."""
    tokens: TokenTable
    parent: int | None = None
    """Set if this write opened the branch: the branch that owns the token before `start`, -1 for none."""
    cause: str = ""
    """Why it opened a branch."""


@dataclass(frozen=True, slots=True)
class Branch:
    """One node of the tree: it owns the tokens from `start` on, and its ancestors those before."""

    index: int
    parent: int
    """The branch that owns the token before `start`; -1 if nothing is shared."""
    start: int
    stop: int
    """The length of its stream when it was read."""
    sampled: int
    """How many of the tokens that it owns were sampled."""
    cause: str
    """Why the history was rewritten; empty for the first branch."""
    retries: bool = False
    """It rewrites nothing: a recorded prompt, or the beginning of one, was sampled again."""


Write: TypeAlias = Turn | Context
"""A trajectory is a list of these."""


# -- checks

POSITIVE_NOISE: Final = 1e-4
"""How far above 0 a logprob may lie: float noise of a softmax, not a probability above one."""

_KINDS: Final = frozenset(Kind)
LATER_KINDS: Final = frozenset({Kind.CONTEXT, Kind.SCAFFOLD, Kind.SYNTHETIC})
PROMPT_KINDS: Final = LATER_KINDS | {Kind.PROMPT}

_REASONS: Final = {
    Kind.SAMPLED: "SAMPLED: only append_completion records tokens that an engine returned",
    Kind.PROMPT: "PROMPT, which is for begin() and branch(); use CONTEXT, SCAFFOLD or SYNTHETIC",
}

_ASK: Final = "ask the engine for logprobs, or make the trajectory with logprobs=False"


def as_ids(value: IdsLike, what: str, vocab_size: int | None) -> Ids:
    return check_ids(value, what, vocab_size=vocab_size, error=TrajectoryError)


def as_kinds(value: KindsLike, length: int, *, allowed: frozenset[Kind], skip: int = 0) -> Kinds:
    """One kind per token as uint8; a single kind applies to all. The first `skip` may be of any kind."""
    is_single = isinstance(value, int | np.integer) and not isinstance(value, bool)
    codes = check_integers([value] if is_single else value, "kinds", TrajectoryError)
    if not is_single and len(codes) != length:
        raise TrajectoryError(f"kinds has {len(codes)} entries for {length} tokens: give one for each token")
    skip = 0 if is_single else skip
    for begin, part, fitting in ((0, codes[:skip].tolist(), _KINDS), (skip, codes[skip:].tolist(), allowed)):
        for code in sorted(set(part) - fitting):
            problem = _REASONS.get(code, f"{code}, which is not a Kind")
            raise TrajectoryError(f"kinds[{begin + part.index(code)}] is {problem}")
    return np.full(length, codes[0], np.uint8) if is_single else codes.astype(np.uint8, copy=False)


def as_logprobs(value: LogprobsLike | None, length: int, *, recorded: bool) -> Logprobs | None:
    """One logprob per sampled token as float32, exact for float32 input; None in a trajectory that records none."""
    if not recorded and value is not None:
        raise TrajectoryError("the trajectory was made with logprobs=False: give None, or make it with logprobs")
    if not recorded:
        return None
    if value is None:
        raise TrajectoryError(f"{length} sampled ids without logprobs: {_ASK}")
    numbers = _numbers(value)
    if len(numbers) != length:
        counts = f"{length} sampled ids but {len(numbers)} logprobs"
        raise TrajectoryError(f"{counts}: every sampled token needs its own; nothing was recorded")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        logprobs = numbers.astype(np.float32)
    fine = np.isfinite(logprobs) & (logprobs <= np.float32(POSITIVE_NOISE))
    if not fine.all():
        at = int(fine.argmin())
        raise TrajectoryError(f"logprobs[{at}] is {numbers[at]}: a logprob is finite and at most 0")
    return logprobs


def _numbers(value: LogprobsLike) -> npt.NDArray[Any]:
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind not in "fiu":
            raise TrajectoryError(f"logprobs must be a row of floats, not {value.dtype} of shape {value.shape}")
        return value
    if not isinstance(value, list | tuple):
        raise TrajectoryError(f"logprobs must be a list, a tuple or a numpy array, not {type(value).__name__}")
    for kind in set(map(type, value)):
        if not issubclass(kind, float | int | np.floating | np.integer) or issubclass(kind, bool):
            at = next(at for at, entry in enumerate(value) if type(entry) is kind)
            advice = "a missing logprob cannot be recorded; " if kind is type(None) else ""
            raise TrajectoryError(f"logprobs[{at}] is {brief(value[at])}, not a number: {advice}{_ASK}")
    try:
        return np.array(value, np.float64)
    except OverflowError as error:
        raise TrajectoryError("logprobs must be finite and at most 0; one is an integer beyond floats") from error


def as_versions(value: VersionLike, length: int) -> tuple[VersionSpan, ...]:
    """Spans that cover a completion of `length` tokens; none if the version is unknown."""
    if value is None:
        return ()
    spans: list[VersionSpan] = []
    reached = 0
    rows = value if isinstance(value, list | tuple) else [(value, 0, length)]
    for what, (version, *place) in _rows(rows, "version", "(version, start, stop)"):
        start, stop = (as_count(at, what) for at in place)
        is_integer = isinstance(version, int | np.integer) and not isinstance(version, bool)
        if not isinstance(version, str) and not (is_integer and -(2**63) <= int(version) < 2**63):
            raise TrajectoryError(f"a version is a str or an int of 64 bits, or spans of them, not {brief(version)}")
        if start != reached or (stop <= start and length):
            raise TrajectoryError(f"{what} is {start}..{stop}: the next span starts at {reached}, not empty")
        spans.append(VersionSpan(version if isinstance(version, str) else int(version), start, stop))
        reached = stop
    if reached != length or (not length and len(spans) > 1):
        raise TrajectoryError(f"the version spans cover {reached} of {length} sampled tokens: cover them all, once")
    return tuple(spans)


def as_owners(spans: SpansLike, length: int, messages: int, *, start: int = 0, first: int = 0) -> Owners:
    """The message of each of `length` tokens, -1 for none, from rows ``(start, stop, message)``.

    The rows come in order, do not overlap, are not empty, and name messages below `messages`. Their positions count
    from `start`; `first` is added to their messages.
    """
    owners = np.full(length, -1, np.int32)
    reached = start
    rows = spans.tolist() if isinstance(spans, np.ndarray) else spans
    for what, row in _rows(rows, "message_spans", "(start, stop, message)"):
        begin, end, message = (as_count(entry, what) for entry in row)
        if not reached <= begin < end <= start + length:
            law = f"spans come in order, do not overlap, are not empty, and lie in {start}..{start + length}"
            raise TrajectoryError(f"{what} is {begin}..{end}: {law}")
        if message >= messages:
            raise TrajectoryError(f"{what} names message {message} of {messages}: say how many with messages=")
        owners[begin - start : end - start] = first + message
        reached = end
    return owners


def _rows(value: Any, name: str, shape: str) -> Iterator[tuple[str, Sequence[Any]]]:
    """Rows of three values, each with its name."""
    for number, row in enumerate(items(f"{name}, rows of {shape},", value, TrajectoryError)):
        if not isinstance(row, list | tuple) or len(row) != 3:
            raise TrajectoryError(f"{name}[{number}] must be {shape}, not {brief(row)}")
        yield f"{name}[{number}]", row


def as_count(value: Any, what: str) -> int:
    """An integer from 0 to ``2**31 - 1``."""
    return whole(what, value, least=0, most=INT32_MAX, error=TrajectoryError)


def mapping_json(value: Mapping[str, Any], what: str) -> str:
    """A mapping as JSON text that reads back as an equal value; raises `TrajectoryError` if JSON would change it."""
    if not isinstance(value, Mapping):
        raise TrajectoryError(f"{what} must be a mapping, not {type(value).__name__}")
    try:
        text = json.dumps(dict(value), allow_nan=False, separators=(",", ":"))
        same = bool(from_json(text) == dict(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise TrajectoryError(f"{what} cannot be stored as JSON: {error}") from error
    if not same:
        raise TrajectoryError(f"{what} does not survive JSON: use lists for tuples, and strings as keys")
    return text


def from_json(text: str | bytes) -> Any:
    """Parse strict JSON: no NaN, no Infinity. Raises ValueError or RecursionError."""
    return json.loads(text, parse_constant=no_constant)
