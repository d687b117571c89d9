"""What enters a trajectory, checked: ids, kinds, logprobs, versions, message spans, JSON values.

Every function here either returns exactly what was given, in the trajectory's own dtypes, or raises
`TrajectoryError` naming the place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ..conversation.values import no_constant
from ..errors import TrajectoryError, shown
from ..settings import items
from ..tokens.ids import INT32_MAX, check_ids, check_integers, plain_numbers, segments
from ..tokens.kinds import Kind, Kinds
from ..tokens.tokenizer import Ids
from .turns import IdsLike, KindsLike, LogprobKind, LogprobsLike, SpansLike, Version, VersionLike, VersionSpan

POSITIVE_NOISE: Final = 1e-4
"""How far above 0 a logprob may lie: float noise of a softmax, not a probability above one."""

_LEAST: Final = np.float32(-np.inf)
_MOST: Final = np.float32(POSITIVE_NOISE)
_MARSHALLED: Final = np.dtype([("kind", "u1"), ("value", "<f8")])

Logprobs: TypeAlias = npt.NDArray[np.float32]

_KIND_COUNT: Final = len(Kind)
_ALL_KINDS: Final = frozenset(Kind)


def as_ids(value: IdsLike, what: str, vocab_size: int | None) -> Ids:
    return check_ids(value, what, vocab_size=vocab_size, error=TrajectoryError)


def as_kinds(value: KindsLike, length: int, *, allowed: frozenset[Kind], skip: int = 0) -> Kinds:
    """One kind for each token, as uint8; a single kind is for all. The first `skip` may be of any kind."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        codes = np.full(1, value, np.int64) if abs(int(value)) <= INT32_MAX else np.full(1, -1, np.int64)
        _refuse_kinds(codes, allowed, 0)
        return np.full(length, int(value), np.uint8)
    given = check_integers(value, "kinds", TrajectoryError)
    if len(given) != length:
        raise TrajectoryError(f"kinds has {len(given)} entries for {length} tokens: give one for each token")
    _refuse_kinds(given[:skip], _ALL_KINDS, 0)
    _refuse_kinds(given[skip:], allowed, skip)
    return given.astype(np.uint8, copy=False)


def _refuse_kinds(codes: npt.NDArray[Any], allowed: frozenset[Kind], offset: int) -> None:
    if codes.dtype == np.uint8 and not codes.tobytes().translate(None, bytes(allowed)):
        return
    if not len(codes):
        return
    if int(codes.min()) < 0 or int(codes.max()) >= _KIND_COUNT:
        where = int(((codes < 0) | (codes >= _KIND_COUNT)).argmax())
        raise TrajectoryError(f"kinds[{where + offset}] is {int(codes[where])}, which is not a Kind")
    for kind in _ALL_KINDS - allowed:
        if (codes == kind).any():
            where = int((codes == kind).argmax())
            raise TrajectoryError(f"kinds[{where + offset}] is {kind.name}: {_WHY_NOT[kind]}")


_WHY_NOT: Final = {
    Kind.SAMPLED: "only append_completion records tokens that an engine returned",
    Kind.PROMPT: "that is for begin() and branch(); say CONTEXT, SCAFFOLD or SYNTHETIC for what comes later",
}


def as_logprobs(value: LogprobsLike, length: int) -> Logprobs:
    """One logprob for each sampled token, as float32; float32 is kept bit for bit."""
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind not in "fiu":
            raise TrajectoryError(f"logprobs must be a row of floats, not {value.dtype} of shape {value.shape}")
        given = value
    elif type(value) is list and (plain := plain_numbers(value, _MARSHALLED, b"g")) is not None:
        given = plain
    elif isinstance(value, list | tuple):
        for kind in set(map(type, value)):
            if not issubclass(kind, float | int | np.floating | np.integer) or issubclass(kind, bool):
                where = next(k for k, one in enumerate(value) if type(one) is kind)
                advice = "a missing logprob cannot be recorded; " if kind is type(None) else ""
                raise TrajectoryError(
                    f"logprobs[{where}] is {shown(value[where])}, not a number: {advice}ask the engine for logprobs, "
                    "or make the trajectory with logprobs=False"
                )
        try:
            given = np.array(value, np.float64)
        except OverflowError as error:
            raise TrajectoryError("logprobs must be finite and at most 0; one is an integer beyond floats") from error
    else:
        raise TrajectoryError(f"logprobs must be a list, a tuple or a numpy array, not {type(value).__name__}")
    if len(given) != length:
        raise TrajectoryError(
            f"{length} sampled ids but {len(given)} logprobs: every sampled token needs its own; nothing was recorded"
        )
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        logprobs = given.astype(np.float32, copy=False)
    if length and not (np.minimum.reduce(logprobs) > _LEAST and np.maximum.reduce(logprobs) <= _MOST):  # NaN is neither
        fine = np.isfinite(logprobs) & (logprobs <= _MOST)
        where = int(fine.argmin())
        raise TrajectoryError(f"logprobs[{where}] is {given[where]}: a logprob is finite and at most 0")
    return logprobs


def as_logprob_kind(value: LogprobKind | str, has_logprobs: bool) -> LogprobKind:
    """The distribution that the logprobs of a completion are of."""
    if type(value) is not LogprobKind and (not isinstance(value, str) or value not in set(LogprobKind)):
        raise TrajectoryError(f"logprobs_kind is one of {', '.join(LogprobKind)}, not {shown(value)}")
    kind = LogprobKind(value)
    if not has_logprobs and kind is not LogprobKind.UNKNOWN:
        raise TrajectoryError(f"logprobs_kind is {kind}, but the trajectory was made with logprobs=False: leave it out")
    return kind


def as_version(value: VersionLike, length: int) -> Version | tuple[VersionSpan, ...] | None:
    """One version for the whole completion, spans of several, or None where it is not known."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | np.integer):
        return _one_version(value)
    if not isinstance(value, list | tuple):
        raise TrajectoryError(f"version must be a str, an int or spans (version, start, stop), not {shown(value)}")
    spans: list[VersionSpan] = []
    reached = 0
    for number, row in enumerate(value):
        if not isinstance(row, list | tuple) or len(row) != 3:
            raise TrajectoryError(f"version[{number}] must be (version, start, stop), not {shown(row)}")
        name = row[0] if isinstance(row[0], str) else _one_version(row[0])
        start, stop = as_count(row[1], f"version[{number}].start"), as_count(row[2], f"version[{number}].stop")
        if start != reached or (stop <= start and length):
            raise TrajectoryError(f"version[{number}] is {start}..{stop}: the next span starts at {reached}, not empty")
        spans.append(VersionSpan(name, start, stop))
        reached = stop
    if reached != length or (not length and len(spans) > 1):
        raise TrajectoryError(f"the version spans cover {reached} of {length} sampled tokens: cover them all, once")
    if not spans:
        return None
    return spans[0].version if len(spans) == 1 else tuple(spans)


def _one_version(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not -(2**63) <= int(value) < 2**63:
        raise TrajectoryError(f"a version is a str or an int of 64 bits, not {shown(value)}")
    return int(value)


def as_spans(
    value: SpansLike, start: int, stop: int, messages: int, after: int = 0, earlier: int = 0
) -> npt.NDArray[np.int32]:
    """Spans ``(start, stop, message)`` as rows of int32: in order, apart, not empty, within ``start..stop``.

    They come after so many other tokens and so many earlier messages.
    """
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "iu" or value.shape[1:] != (3,):
            raise TrajectoryError(f"message_spans must have rows of 3 integers, not {value.dtype} {value.shape}")
        rows: list[Any] = value.tolist()
    else:
        rows = items("message_spans, rows of (start, stop, message),", value, TrajectoryError)
    reached = start
    shifted = []
    for number, row in enumerate(rows):
        what = f"message_spans[{number}]"
        if not isinstance(row, list | tuple) or len(row) != 3:
            raise TrajectoryError(f"{what} must be (start, stop, message), not {shown(row)}")
        first, last, message = (as_count(one, what) for one in row)
        if not reached <= first < last <= stop:
            raise TrajectoryError(
                f"{what} is {first}..{last}: spans come in order, do not overlap, are not empty, and lie in "
                f"{start}..{stop}"
            )
        if message >= messages:
            raise TrajectoryError(f"{what} names message {message} of {messages}: say how many with messages=")
        reached = last
        shifted.append((first + after, last + after, message + earlier))
    made: npt.NDArray[Any] = np.array(shifted, np.int64 if after else np.int32)  # a stream may be too long: said later
    return made.reshape(-1, 3)


def owner_spans(owners: npt.ArrayLike, length: int) -> list[tuple[int, int, int]]:
    """The runs of tokens that belong to one message, as spans, from the message of each token (-1 for none)."""
    given = np.asarray(owners)
    if given.dtype.kind not in "iu" or given.shape != (length,):
        raise TrajectoryError(
            f"bridge.messages must be {length} integers, one for each new id, not {given.dtype} of shape {given.shape}"
        )
    return [(start, stop, int(given[start])) for start, stop in segments(given) if given[start] != -1]


def from_position(
    kinds: KindsLike | None, spans: SpansLike, length: int, position: int, messages: int, allowed: frozenset[Kind]
) -> tuple[KindsLike, npt.NDArray[np.int32]]:
    """Kinds and spans of a whole prompt, from a position on."""
    rows = as_spans(spans, 0, length, messages)
    rows = rows[rows[:, 1] > position]
    rows[:, 0] = np.maximum(rows[:, 0], position)
    if kinds is None:
        kinds = Kind.CONTEXT
    return as_kinds(kinds, length, allowed=allowed, skip=position)[position:], rows


def as_count(value: Any, what: str) -> int:
    """An integer from 0 to ``2**31 - 1``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= int(value) <= INT32_MAX:
        raise TrajectoryError(f"{what} must be an integer from 0 to 2**31 - 1, not {shown(value)}")
    return int(value)


def json_text(value: Any, what: str) -> str:
    """`value` as JSON text that gives back an equal value; what JSON would change is refused."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
        same = bool(from_json(text) == value)
    except (TypeError, ValueError, RecursionError) as error:
        raise TrajectoryError(f"{what} cannot be kept as JSON: {error}") from error
    if not same:
        raise TrajectoryError(f"{what} does not survive JSON: use lists for tuples, and strings as keys")
    return text


def mapping_json(value: Mapping[str, Any], what: str) -> str:
    if not isinstance(value, Mapping):
        raise TrajectoryError(f"{what} must be a mapping, not {type(value).__name__}")
    return json_text(dict(value), what)


def from_json(text: str | bytes) -> Any:
    """The value of strict JSON text: no NaN, no Infinity. Raises ValueError or RecursionError."""
    return json.loads(text, parse_constant=no_constant)
