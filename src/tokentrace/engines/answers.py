"""What is sent to an engine and what it returns, checked. Pure: no I/O.

Requests are refused before they are sent where an engine is known to clip them or to die of them. Answers are taken
as they are or not at all: `EngineAnswerError` names the field.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ..errors import TrajectoryError
from ..tokens.tokenizer import Ids
from ..trajectory.inputs import POSITIVE_NOISE, as_ids
from ..trajectory.turns import VersionSpan
from .protocol import (
    Capabilities,
    Completion,
    Delta,
    EngineAnswerError,
    EngineError,
    EngineRefusal,
    FinishReason,
    LogprobKind,
    Logprobs,
    SamplingParams,
)

# -- requests


def checked_prompt(prompt_ids: Sequence[int] | Ids, sampling: SamplingParams, capabilities: Capabilities) -> Ids:
    """The prompt as int32. `EngineRefusal`: empty, no ids, outside of the vocabulary, or too long with `max_tokens`."""
    try:
        ids = as_ids(prompt_ids, "prompt_ids", capabilities.vocab_size)
        as_ids(sampling.stop_token_ids, "stop_token_ids", capabilities.vocab_size)
    except TrajectoryError as error:
        raise EngineRefusal(f"not sent: {error}") from error
    if not len(ids):
        raise EngineRefusal("not sent: the prompt is empty")
    limit = capabilities.max_length
    if limit is not None and len(ids) + sampling.max_tokens > limit:
        raise EngineRefusal(
            f"not sent: {len(ids)} ids of prompt and max_tokens {sampling.max_tokens} are more than the engine's "
            f"{limit}; ask for at most {max(limit - len(ids), 0)}"
        )
    return ids


def json_body(field: str, ids: Ids, wire: Sequence[bytes] | None, rest: Mapping[str, Any]) -> bytes:
    """A JSON object with the ids as `field`, then the rest. `wire` is put in as it is, without encoding ids again."""
    if wire is None:
        text = repr(ids.tolist()).replace(" ", "").encode("ascii")  # in C, unlike json.dumps with its checks
    else:
        text = b"".join(wire)
        if not (text.startswith(b"[") and text.endswith(b"]")) or text.count(b",") + 1 != len(ids):
            raise EngineError(f"wire does not hold the prompt's {len(ids)} ids: it must say the same as prompt_ids")
    tail = json.dumps(rest, separators=(",", ":")).encode("utf-8")
    return b'{"%s":%s,%s' % (field.encode("ascii"), text, tail[1:])


# -- answers


def part(value: Any, *path: str | int) -> Any:
    """What lies at a path of an answer; `EngineAnswerError` where there is nothing."""
    at = value
    for depth, name in enumerate(path):
        try:
            at = at[name]
        except (KeyError, IndexError, TypeError) as error:
            where = ".".join(map(str, path[: depth + 1]))
            raise EngineAnswerError(f"the answer has no {where}: {_shown(value)}") from error
    return at


def rows(value: Any, what: str) -> list[Any]:
    """A list; `EngineAnswerError` where it is none."""
    if not isinstance(value, list):
        raise EngineAnswerError(f"{what} must be a list, not {_shown(value)}")
    return value


def table(value: Any, what: str) -> dict[str, Any]:
    """A JSON object; `EngineAnswerError` where it is none."""
    if not isinstance(value, dict):
        raise EngineAnswerError(f"{what} must be an object, not {_shown(value)}")
    return value


def answered_ids(value: Any, what: str, vocab_size: int | None) -> Ids:
    """Sampled ids."""
    try:
        return as_ids(rows(value, what), what, vocab_size)
    except TrajectoryError as error:
        raise EngineAnswerError(f"the engine returned what is no id: {error}") from error


def answered_logprobs(value: Any, ids: Ids, what: str) -> Logprobs:
    """One logprob for each id: a finite number, at most 0."""
    given = rows(value, what)
    if len(given) != len(ids):
        raise EngineAnswerError(f"{what}: {len(given)} logprobs for {len(ids)} ids; every sampled id needs its own")
    if not set(map(type, given)) <= {float, int}:
        at = next(k for k, one in enumerate(given) if type(one) not in (float, int))
        raise EngineAnswerError(f"{what}: the logprob of id {int(ids[at])} at {at} is {_shown(given[at])}, no number")
    logprobs = np.array(given, np.float64)
    fine = np.isfinite(logprobs) & (logprobs <= POSITIVE_NOISE)
    if not fine.all():
        at = int(fine.argmin())
        raise EngineAnswerError(
            f"{what}: the logprob of id {int(ids[at])} at {at} is {given[at]}; logprobs are finite and at most 0"
        )
    return logprobs.astype(np.float32)


def same_ids(named: Sequence[Any], ids: Ids, what: str) -> None:
    """The ids that logprobs are said to be of must be those that were sampled."""
    for at, (one, sampled) in enumerate(zip(named, ids.tolist(), strict=False)):
        if one != sampled or isinstance(one, bool):
            raise EngineAnswerError(f"{what}[{at}] is of id {_shown(one)}, but id {sampled} was sampled there")


def answered_versions(value: Any, length: int) -> tuple[VersionSpan, ...]:
    """Spans that cover the completion, once; empty where the engine does not say."""
    if value is None or not length:
        return ()
    spans: list[VersionSpan] = []
    reached = 0
    for row in rows(value, "weight_versions"):
        version, start, stop = part(row, "version"), part(row, "start"), part(row, "end")
        if type(version) not in (str, int) or start != reached or type(stop) is not int or stop <= reached:
            raise EngineAnswerError(f"weight_versions: {_shown(row)} does not go on at {reached}")
        spans.append(VersionSpan(version, reached, stop))
        reached = stop
    if reached != length:
        raise EngineAnswerError(f"weight_versions cover {reached} of {length} sampled ids")
    return tuple(spans)


def answered_count(value: Any) -> int | None:
    """A number of tokens; None where the engine does not say."""
    return value if type(value) is int and value >= 0 else None


def check_prompt_count(value: Any, ids: Ids) -> None:
    """The engine must have read as many ids as were sent: it neither cut the prompt nor added to it."""
    if value != len(ids):
        raise EngineAnswerError(f"{len(ids)} ids of prompt were sent, and the engine read {_shown(value)}")


def check_prompt_echo(value: Any, ids: Ids) -> None:
    """The prompt that the engine says it read must be the one that was sent."""
    echoed = answered_ids(value, "prompt_token_ids", None)
    if len(echoed) == len(ids) and np.array_equal(echoed, ids):
        return
    shared = min(len(echoed), len(ids))
    differ = np.flatnonzero(echoed[:shared] != ids[:shared])
    at = int(differ[0]) if len(differ) else shared
    raise EngineAnswerError(
        f"the engine read another prompt than was sent: {len(echoed)} ids of {len(ids)}, different from {at} on"
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}…"


# -- whole and in pieces


class Arriving:
    """A completion that arrives in pieces. The last is held back until all is known of it."""

    def __init__(self, engine: str, sampling: SamplingParams) -> None:
        self.count = 0
        """How many ids arrived."""
        self.finished = False
        """Whether the reason why it ended has arrived."""
        self.cached_tokens: int | None = None
        self.last_id: int | None = None
        self._engine: Final = engine
        self._sampling: Final = sampling
        self._last: Delta | None = None

    def take(self, ids: Ids, logprobs: Logprobs) -> Delta | None:
        """A piece that others follow; None where it has no ids."""
        self.count += len(ids)
        self.last_id = int(ids[-1]) if len(ids) else self.last_id
        return Delta(ids, logprobs) if len(ids) else None

    def end(self, ids: Ids, logprobs: Logprobs, reason: Any, stop: Any, spans: Any) -> None:
        """The last piece: why it ended, with which stop token if that is told, and which weights sampled what."""
        self.take(ids, logprobs)
        try:
            ended = FinishReason(reason)
        except ValueError as error:
            raise EngineAnswerError(f"{self._engine} ended for a reason that is not known here: {reason!r}") from error
        if self.count > self._sampling.max_tokens:
            raise EngineAnswerError(f"{self.count} ids were returned, where {self._sampling.max_tokens} were asked for")
        if ended is FinishReason.STOP and (self.last_id is None or (type(stop) is int and self.last_id != stop)):
            raise EngineAnswerError(f"it ended with stop token {stop}, but its last id is {self.last_id}")
        self._last = Delta(ids, logprobs, ended, answered_versions(spans, self.count))
        self.finished = True

    def close(self) -> Delta:
        """The last piece."""
        if self._last is None:
            raise EngineAnswerError(f"{self._engine} did not say why the completion ended")
        return replace(self._last, cached_tokens=self.cached_tokens)

    def whole(self) -> Completion:
        """The completion, where it came as one piece."""
        last = self.close()
        assert last.finish_reason is not None
        return Completion(last.ids, last.logprobs, last.finish_reason, last.versions, last.cached_tokens)


async def collected(deltas: AsyncIterable[Delta]) -> Completion:
    """The whole of a stream. `EngineAnswerError` where its last piece does not say why it ended."""
    pieces = [delta async for delta in deltas]
    last = pieces[-1] if pieces else None
    if last is None or last.finish_reason is None:
        raise EngineAnswerError("the stream ended without saying why")
    return Completion(
        np.concatenate([piece.ids for piece in pieces]),
        np.concatenate([piece.logprobs for piece in pieces]),
        last.finish_reason,
        last.versions,
        last.cached_tokens,
    )


# -- which logprobs

_FLAT: Final = 4.0
"""A temperature at which any model's best token is much less likely."""


async def probed_kind(top_logprob: Callable[[float], Awaitable[float]]) -> LogprobKind | None:
    """Of which distribution the logprobs are, from the best token's logprob at temperature 1 and at a high one.

    Raw logprobs do not move with the temperature. None where the distribution is too peaked to tell.
    """
    at_one, at_flat = await top_logprob(1.0), await top_logprob(_FLAT)
    if max(at_one, at_flat) > POSITIVE_NOISE:
        raise EngineError(f"the engine returns {max(at_one, at_flat)} as a logprob: it serves logits")
    if at_one - at_flat > 0.3:
        return LogprobKind.PROCESSED
    if abs(at_one - at_flat) < 0.1 and at_one < -0.2:
        return LogprobKind.RAW
    return None
