"""What is sent to an engine and what it returns, checked. Pure: no I/O.

Requests are refused before they are sent where an engine is known to clip them or to die of them. Answers are taken
as they are or not at all: `EngineAnswerError` names the field.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ..errors import TrajectoryError, shown
from ..tokens.ids import INT32_MAX
from ..tokens.tokenizer import Ids
from ..trajectory.inputs import POSITIVE_NOISE, as_ids
from ..trajectory.turns import LogprobKind, VersionSpan
from .protocol import (
    Capabilities,
    Completion,
    Delta,
    EngineAnswerError,
    EngineError,
    EngineRefusal,
    FinishReason,
    LogprobKindError,
    Logprobs,
    SamplingParams,
)

# -- requests


def checked_prompt(prompt_ids: Sequence[int] | Ids, sampling: SamplingParams, capabilities: Capabilities) -> Ids:
    """The prompt as int32. `EngineRefusal`: empty, no ids, outside of the vocabulary, or too long with `max_tokens`.

    `LogprobKindError` where the logprobs would not be those of the distribution sampled from: see `check_logprobs`.
    """
    check_logprobs(sampling, capabilities)
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


def check_logprobs(sampling: SamplingParams, capabilities: Capabilities) -> None:
    """`LogprobKindError` where raw or unknown logprobs are of another distribution than the one that is sampled from.

    At temperature 1 they are of the same one, as far as temperature goes. A greedy completion is drawn from nothing:
    its logprobs are raw with every engine, and are recorded as that.
    """
    kind, temperature = capabilities.logprobs, sampling.temperature
    if temperature in (0, 1) or kind in (LogprobKind.PROCESSED, LogprobKind.SCALED) or sampling.allow_raw_logprobs:
        return
    what = "raw" if kind is LogprobKind.RAW else "of a kind that is not known"
    raise LogprobKindError(
        f"not sent: the logprobs of {capabilities.engine} are {what}, and at temperature {temperature:g} such are not "
        "those of the distribution that is sampled from. Start the server with processed logprobs (vLLM: "
        "--logprobs-mode processed_logprobs), say logprobs= when connecting if you know that they are, or sample at "
        "temperature 1; SamplingParams(allow_raw_logprobs=True) records them as they are"
    )


def completion_kind(sampling: SamplingParams, capabilities: Capabilities) -> LogprobKind:
    """Of which distribution the logprobs of one completion are."""
    return LogprobKind.RAW if sampling.temperature == 0 else capabilities.logprobs


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
            raise EngineAnswerError(f"the answer has no {where}: it is {shown(value)}") from error
    return at


def rows(value: Any, what: str) -> list[Any]:
    """A list; `EngineAnswerError` where it is none."""
    if not isinstance(value, list):
        raise EngineAnswerError(f"{what} must be a list, not {shown(value)}")
    return value


def table(value: Any, what: str) -> dict[str, Any]:
    """A JSON object; `EngineAnswerError` where it is none."""
    if not isinstance(value, dict):
        raise EngineAnswerError(f"{what} must be an object, not {shown(value)}")
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
        raise EngineAnswerError(f"{what}: the logprob of id {int(ids[at])} at {at} is {shown(given[at])}, no number")
    try:
        logprobs = np.array(given, np.float64)
    except OverflowError as error:
        raise EngineAnswerError(f"{what}: one logprob is an integer beyond floats; they are at most 0") from error
    fine = np.isfinite(logprobs) & (logprobs <= POSITIVE_NOISE)
    if not fine.all():
        at = int(fine.argmin())
        raise EngineAnswerError(
            f"{what}: the logprob of id {int(ids[at])} at {at} is {shown(given[at])}; logprobs are finite and at most "
            "0, unlike logits"
        )
    with np.errstate(over="ignore"):
        small = logprobs.astype(np.float32)
    if not np.isfinite(small).all():
        at = int(np.isfinite(small).argmin())
        raise EngineAnswerError(f"{what}: the logprob of id {int(ids[at])} at {at} is {logprobs[at]}, beyond float32")
    return small


def same_ids(named: Sequence[Any], ids: Ids, what: str) -> None:
    """The ids that logprobs are said to be of must be those that were sampled."""
    for at, (one, sampled) in enumerate(zip(named, ids.tolist(), strict=False)):
        if type(one) is not int or one != sampled:
            raise EngineAnswerError(f"{what}[{at}] is of id {shown(one)}, but id {sampled} was sampled there")


def answered_versions(value: Any, length: int) -> tuple[VersionSpan, ...]:
    """Spans that cover the completion, once; empty where the engine does not say."""
    if value is None or not length:
        return ()
    spans: list[VersionSpan] = []
    reached = 0
    for row in rows(value, "weight_versions"):
        version, start, stop = part(row, "version"), part(row, "start"), part(row, "end")
        is_name = type(version) is str or (type(version) is int and abs(version) < 2**63)
        if not is_name or start != reached or type(stop) is not int or stop <= reached:
            raise EngineAnswerError(f"weight_versions: {shown(row)} does not go on at {reached}")
        spans.append(VersionSpan(version, reached, stop))
        reached = stop
    if reached != length:
        raise EngineAnswerError(f"weight_versions cover {reached} of {length} sampled ids")
    return tuple(spans)


def answered_count(value: Any, what: str) -> int | None:
    """A number of tokens; None where the engine does not say."""
    if value is not None and (type(value) is not int or not 0 <= value <= INT32_MAX):
        raise EngineAnswerError(f"{what} must be a number of tokens, not {shown(value)}")
    return value


def answered_text(value: Any, what: str) -> str | None:
    """A name or a version; None where the engine does not say."""
    if value is not None and not isinstance(value, str):
        raise EngineAnswerError(f"{what} must be text, not {shown(value)}")
    return value


def check_prompt_count(value: Any, ids: Ids) -> None:
    """The engine must have read as many ids as were sent: it neither cut the prompt nor added to it."""
    if type(value) is not int or value != len(ids):
        raise EngineAnswerError(f"{len(ids)} ids of prompt were sent, and the engine read {shown(value)}")


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


# -- whole and in pieces


class Arriving:
    """A completion that arrives in pieces. The last is held back until all is known of it."""

    def __init__(self, engine: str, sampling: SamplingParams, kind: LogprobKind) -> None:
        self.count = 0
        """How many ids arrived."""
        self.finished = False
        """Whether the reason why it ended has arrived."""
        self.cached_tokens: int | None = None
        self.last_id: int | None = None
        self._engine: Final = engine
        self._sampling: Final = sampling
        self._kind: Final = kind
        self._last: Delta | None = None

    def take(self, ids: Ids, logprobs: Logprobs) -> Delta | None:
        """A piece that others follow; None where it has no ids."""
        self.count += len(ids)
        if self.count > self._sampling.max_tokens:
            raise EngineAnswerError(f"{self.count} ids were returned, where {self._sampling.max_tokens} were asked for")
        self.last_id = int(ids[-1]) if len(ids) else self.last_id
        return Delta(ids, logprobs) if len(ids) else None

    def end(self, ids: Ids, logprobs: Logprobs, reason: Any, stop: Any, spans: Any) -> None:
        """The last piece: why it ended, with which stop token if that is told, and which weights sampled what."""
        self.take(ids, logprobs)
        if not isinstance(reason, str) or reason not in set(FinishReason):
            raise EngineAnswerError(f"{self._engine} ended for a reason that is not known here: {shown(reason)}")
        ended = FinishReason(reason)
        if ended is FinishReason.STOP and (self.last_id is None or (type(stop) is int and self.last_id != stop)):
            raise EngineAnswerError(f"it ended with stop token {stop}, but its last id is {self.last_id}")
        versions = answered_versions(spans, self.count)
        self._last = Delta(ids, logprobs, ended, versions, logprobs_kind=self._kind)
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
        return Completion(
            last.ids, last.logprobs, last.finish_reason, last.versions, last.cached_tokens, last.logprobs_kind
        )


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
        last.logprobs_kind,
    )


# -- which logprobs

COLD: Final = 0.5
HOT: Final = 2.0
"""vLLM refuses temperatures above."""
_SAME: Final = 0.05
"""How far the same logprob of two requests may differ: servers compute in 16 bits, and in other batches."""
_APART: Final = 0.3
_PROBES: Final = 6


async def probed_kind(best: Callable[[int, float, int], Awaitable[float]], vocab_size: int | None) -> LogprobKind:
    """Of which distribution an engine's logprobs are, found out from those of the best token after a prompt of one id.

    ``best(prompt_id, temperature, top_k)`` samples one token and returns the logprob of the *most likely* one, which
    is the same token at every temperature; that of the sampled one would tell nothing. Raw logprobs do not move
    with the temperature; two prompts must show it, since a tie of two tokens moves as little. Those that do move also
    move with `top_k` if they are of the distribution sampled from. Where a prompt does not tell, because the model is
    all but sure of what follows, the next id is tried.
    """
    unmoved = 0
    for prompt in range(_PROBES if vocab_size is None else min(_PROBES, vocab_size)):
        cold, hot = await best(prompt, COLD, 0), await best(prompt, HOT, 0)
        if abs(cold - hot) < _SAME and hot < -_APART:  # were they processed, they would be further apart
            unmoved += 1
            if unmoved == 2:
                return LogprobKind.RAW
        if cold - hot < _APART:
            continue
        few = await best(prompt, HOT, 2)
        if few - hot > _APART:
            return LogprobKind.PROCESSED
        if abs(few - hot) < _SAME and hot < -math.log(2) - _APART:  # of two ids, the better has at least a half
            return LogprobKind.SCALED
    return LogprobKind.UNKNOWN


def said_kind(value: LogprobKind | str | None) -> LogprobKind | None:
    """The kind that a user says; None where they leave it to be found out."""
    if value is None:
        return None
    if not isinstance(value, str) or value not in set(LogprobKind):
        raise EngineError(f"logprobs is one of {', '.join(LogprobKind)}, not {shown(value)}")
    return LogprobKind(value)


def best_logprob(value: Any, what: str) -> float:
    """The logprob of the most likely token, as an engine tells it."""
    if type(value) not in (float, int) or not -1e9 < value <= POSITIVE_NOISE:
        raise EngineAnswerError(
            f"{what}: the engine returns {shown(value)} as a logprob; where it serves logits, it cannot be used"
        )
    return float(value)
