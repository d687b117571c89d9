"""Checks of what enters a trajectory. Each returns the stored dtype or raises `TrajectoryError`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import TrajectoryError, brief
from ..settings import is_integer, items, whole
from ..tokens.ids import INT32_MAX, check_ids, check_integers
from ..tokens.kinds import Kind, Kinds
from ..tokens.tokenizer import Ids
from ..values.plain import no_constant
from .turns import (
    POSITIVE_NOISE,
    IdsLike,
    KindsLike,
    Logprobs,
    LogprobsLike,
    SpansLike,
    VersionLike,
    VersionSpan,
)

_REASONS: dict[int, str] = {
    Kind.SAMPLED: "SAMPLED: only append_completion records tokens that an engine returned",
    Kind.PROMPT: "PROMPT, which is for begin() and branch(); use CONTEXT, SCAFFOLD or SYNTHETIC",
}
_LATER = np.array([False, *(kind not in _REASONS for kind in Kind), False])  # by kind + 1
_ASK = "ask the engine for logprobs, or make the trajectory with logprobs=False"


def as_ids(value: IdsLike, what: str, vocab_size: int | None) -> Ids:
    return check_ids(value, what, vocab_size=vocab_size, error=TrajectoryError)


def as_kinds(value: KindsLike, length: int, *, opening: bool, skip: int = 0) -> Kinds:
    """One kind per token, or one for all. After `skip`, none is SAMPLED, or PROMPT unless `opening`."""
    is_single = is_integer(value)
    codes = check_integers([value] if is_single else value, "kinds", TrajectoryError)
    if not is_single and len(codes) != length:
        raise TrajectoryError(f"kinds has {len(codes)} entries for {length} tokens: give one for each")
    fine = _LATER.take(codes + 1, mode="clip") | (opening & (codes == int(Kind.PROMPT)))
    if skip and not is_single:
        fine[:skip] = (codes[:skip] >= 0) & (codes[:skip] < len(Kind))
    if not fine.all():
        at = int(fine.argmin())
        problem = _REASONS.get(int(codes[at]), f"{codes[at]}, which is not a Kind")
        raise TrajectoryError(f"kinds[{at}] is {problem}")
    return np.full(length, codes[0], np.uint8) if is_single else codes.astype(np.uint8, copy=False)


def as_logprobs(value: LogprobsLike | None, length: int, *, recorded: bool) -> Logprobs | None:
    """One logprob per sampled token, exact for float32 input; None if none are recorded."""
    if not recorded and value is not None:
        raise TrajectoryError("the trajectory was made with logprobs=False: pass None")
    if not recorded:
        return None
    if value is None:
        raise TrajectoryError(f"{length} sampled ids without logprobs: {_ASK}")
    numbers = _numbers(value)
    if len(numbers) != length:
        counts = f"{length} sampled ids but {len(numbers)} logprobs"
        raise TrajectoryError(f"{counts}: every sampled token needs its own; nothing was recorded")
    is_exact = numbers.dtype == np.float32
    with nullcontext() if is_exact else np.errstate(over="ignore", under="ignore", invalid="ignore"):
        logprobs = numbers.astype(np.float32)
    fine = (logprobs > -np.inf) & (logprobs <= POSITIVE_NOISE)
    if not fine.all():
        at = int(fine.argmin())
        raise TrajectoryError(f"logprobs[{at}] is {numbers[at]}: a logprob is finite and at most 0")
    return logprobs


def _numbers(value: LogprobsLike) -> npt.NDArray[Any]:
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "fiu":
        return value
    if not isinstance(value, list | tuple):
        raise TrajectoryError(f"logprobs must be a list or one row of floats, not {brief(value)}")
    for kind in set(map(type, value)):
        if not issubclass(kind, float | int | np.floating | np.integer) or issubclass(kind, bool):
            at = next(at for at, entry in enumerate(value) if type(entry) is kind)
            advice = "a missing logprob cannot be recorded; " if kind is type(None) else ""
            raise TrajectoryError(f"logprobs[{at}] is {brief(value[at])}, not a number: {advice}{_ASK}")
    try:
        return np.array(value, np.float64)
    except OverflowError as error:
        raise TrajectoryError("logprobs must be finite and at most 0; one exceeds a float") from error


def as_versions(value: VersionLike, length: int) -> tuple[VersionSpan, ...]:
    """Spans that cover a completion of `length` tokens; none if the version is unknown."""
    if value is None:
        return ()
    spans: list[VersionSpan] = []
    rows = value if isinstance(value, list | tuple) else [(value, 0, length)]
    for what, (version, *place) in _rows(rows, "version", "(version, start, stop)"):
        start, stop = (as_count(at, what) for at in place)
        if not isinstance(version, str):
            if not is_integer(version) or not -(2**63) <= int(version) < 2**63:
                kinds = "a str, a 64-bit int, or spans of these"
                raise TrajectoryError(f"a version must be {kinds}, not {brief(version)}")
            version = int(version)
        spans.append(VersionSpan(version, start, stop))
    starts, ends = [span.start for span in spans], [0, *(span.stop for span in spans)]
    if (
        starts != ends[:-1]
        or ends[-1] != length
        or (len(spans) > 1 and any(a >= b for a, b in pairwise(ends)))
    ):
        raise TrajectoryError(f"version: spans must cover the {length} sampled tokens in order, none empty")
    return tuple(spans)


def as_owners(spans: SpansLike, length: int, messages: int, *, start: int = 0, first: int = 0) -> Ids:
    """The message of each of `length` tokens, -1 for none, from rows ``(start, stop, message)``.

    Positions count from `start`. The messages must be below `messages`; `first` is added.
    """
    owners, reached = np.full(length, -1, np.int32), start
    rows = spans.tolist() if isinstance(spans, np.ndarray) else spans
    for what, row in _rows(rows, "message_spans", "(start, stop, message)"):
        begin, end, message = (as_count(entry, what) for entry in row)
        if not reached <= begin < end <= start + length:
            law = f"spans are in order, do not overlap, are not empty, and lie in {start}..{start + length}"
            raise TrajectoryError(f"{what} is {begin}..{end}: {law}")
        if message >= messages:
            raise TrajectoryError(f"{what} names message {message} of {messages}: pass messages=")
        owners[begin - start : end - start] = first + message
        reached = end
    return owners


def _rows(value: Any, name: str, shape: str) -> Iterator[tuple[str, Sequence[Any]]]:
    for number, row in enumerate(items(f"{name}, rows of {shape},", value, TrajectoryError)):
        if not isinstance(row, list | tuple) or len(row) != 3:
            raise TrajectoryError(f"{name}[{number}] must be {shape}, not {brief(row)}")
        yield f"{name}[{number}]", row


def as_count(value: Any, what: str) -> int:
    """An integer from 0 to ``2**31 - 1``."""
    return whole(what, value, least=0, most=INT32_MAX, error=TrajectoryError)


def mapping_json(value: Mapping[str, Any], what: str) -> str:
    """A mapping as JSON text that reads back as an equal value."""
    if not isinstance(value, Mapping):
        raise TrajectoryError(f"{what} must be a mapping, not {type(value).__name__}")
    try:
        text = json.dumps(dict(value), allow_nan=False, separators=(",", ":"))
        read = remembered_json if len(text) < 1000 else from_json
        same = bool(read(text) == dict(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise TrajectoryError(f"{what} cannot be stored as JSON: {error}") from error
    if not same:
        raise TrajectoryError(f"{what} does not survive JSON: use lists for tuples, and strings as keys")
    return text


@lru_cache(256)
def remembered_json(text: str) -> Any:
    """Like `from_json`, for texts that repeat. The value is shared: do not change it."""
    return from_json(text)


def from_json(text: str | bytes) -> Any:
    """Parse JSON without NaN or Infinity. Raises ValueError or RecursionError."""
    return json.loads(text, parse_constant=no_constant)
