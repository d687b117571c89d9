"""Requests to engines and their answers, checked. Pure: no I/O.

Refuses a request that an engine is known to clip or to crash on. An answer is used whole or not at all: msgspec
structs describe it, and `EngineAnswerError` names the field, as in ``$.choices[0].logprobs.content[3].token_id``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from ..errors import TrajectoryError, brief
from ..tokens.ids import INT32_MAX
from ..tokens.tokenizer import Ids
from ..trajectory.inputs import POSITIVE_NOISE, as_ids
from ..trajectory.turns import LogprobKind, VersionSpan
from .protocol import (
    NO_CHANNELS,
    TOP_LOGPROBS,
    Capabilities,
    Channels,
    Completion,
    Delta,
    EngineAnswerError,
    EngineError,
    EngineRefusal,
    FinishReason,
    GenerateRequest,
    LogprobKindError,
    Logprobs,
    SamplingParams,
    check_channels,
    joined,
)

Answer = TypeVar("Answer")

# -- requests


def checked_request(request: GenerateRequest, capabilities: Capabilities) -> GenerateRequest:
    """Return the request with its prompt as int32.

    Raises EngineRefusal if the prompt is empty, has an id outside the vocabulary or is too long together with
    `max_tokens`, or if the engine lacks a setting; LogprobKindError as `check_logprobs` does.
    """
    sampling, limit, engine = request.sampling, capabilities.max_length, capabilities.engine
    check_logprobs(sampling, capabilities)
    try:
        ids = as_ids(request.prompt_ids, "prompt_ids", capabilities.vocab_size)
        as_ids(sampling.stop_token_ids, "stop_token_ids", capabilities.vocab_size)
    except TrajectoryError as error:
        raise EngineRefusal(f"not sent: {error}") from error
    problem = ""
    if not len(ids):
        problem = "the prompt is empty"
    elif limit is not None and len(ids) + sampling.max_tokens > limit:
        problem = (
            f"{len(ids)} ids of prompt and max_tokens {sampling.max_tokens} are more than the engine's {limit}; ask "
            f"for at most {max(limit - len(ids), 0)}"
        )
    elif sampling.top_logprobs > capabilities.top_logprobs:
        most = capabilities.top_logprobs or "no"
        problem = f"top_logprobs is {sampling.top_logprobs}, and {engine} reports {most} ids besides the sampled one"
    elif sampling.structure is not None and not capabilities.structures:
        problem = f"{engine} cannot hold a completion to JSON; use vLLM, SGLang or llama.cpp, or ask in the prompt"
    elif sampling.seed is not None and not capabilities.seeds:
        problem = f"{engine} has no seed per request: leave it out"
    elif missing := [name for name in sampling.optional if name not in capabilities.sampling]:
        hint = "; pass token_bytes=, which spells each id" if engine in ("embedded", "scripted") else ""
        problem = f"{engine} has no {missing[0]}{hint}"
    if problem:
        raise EngineRefusal(f"not sent: {problem}")
    return replace(request, prompt_ids=ids)


def check_logprobs(sampling: SamplingParams, capabilities: Capabilities) -> None:
    """Raise LogprobKindError if raw or unknown logprobs would be of another distribution than the sampled one.

    At temperature 1 without penalties they agree, except for tokens that top-k, top-p and min-p leave out. Greedy
    completions are never refused: their logprobs are recorded as raw.
    """
    kind, temperature = capabilities.logprobs, sampling.temperature
    changes = {**({} if temperature == 1 else {"temperature": temperature}), **sampling.penalties}
    if not changes or temperature == 0 or sampling.allow_raw_logprobs:
        return
    if kind in (LogprobKind.PROCESSED, LogprobKind.SCALED):
        return
    what = "raw" if kind is LogprobKind.RAW else "of unknown kind"
    how = " and ".join(f"{name} {value:g}" for name, value in changes.items())
    raise LogprobKindError(
        f"not sent: the logprobs of {capabilities.engine} are {what}; at {how} they are not those of the distribution "
        "that is sampled from. Start the server with processed logprobs (vLLM: --logprobs-mode processed_logprobs), "
        "connect with logprobs= if you know that they are, sample at temperature 1 without penalties, or record them "
        "as they are with SamplingParams(allow_raw_logprobs=True)"
    )


def completion_kind(sampling: SamplingParams, capabilities: Capabilities) -> LogprobKind:
    """Return which distribution the logprobs of a completion describe.

    Unknown with a structure, since some engines apply it before they compute logprobs and some after; and unknown for
    a greedy completion with penalties, unless the engine's logprobs are always raw.
    """
    if sampling.structure is not None:
        return LogprobKind.UNKNOWN
    if sampling.temperature or capabilities.logprobs is LogprobKind.RAW:
        return capabilities.logprobs
    return LogprobKind.UNKNOWN if sampling.penalties else LogprobKind.RAW


def json_prompt(request: GenerateRequest) -> bytes:
    """Return the prompt as JSON text. Raises EngineError if the request's wire text has another number of ids."""
    wire, count = request.wire, len(request.prompt_ids)
    if wire is None:
        return repr(np.asarray(request.prompt_ids).tolist()).replace(" ", "").encode("ascii")  # faster than json.dumps
    text = b"".join(wire() if callable(wire) else wire)
    commas = np.count_nonzero(np.frombuffer(text, np.uint8) == ord(","))  # ten times as fast as bytes.count
    if not (text.startswith(b"[") and text.endswith(b"]")) or commas + 1 != count:
        raise EngineError(f"wire does not hold the prompt's {count} ids: it must equal prompt_ids")
    return text


def json_body(field: str, prompt: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return a JSON object with the prompt's JSON text as `field`, then the other fields."""
    tail = json.dumps(fields, separators=(",", ":")).encode("utf-8")
    return b'{"%s":%s,%s' % (field.encode("ascii"), prompt, tail[1:])


# -- answers

TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Logprob = Annotated[float, Meta(ge=-3e38, le=POSITIVE_NOISE)]
Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]
VersionName = str | Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class VersionRow(Struct):
    """The weights that sampled a part of a completion, as servers report them."""

    version: VersionName
    start: int
    end: int


def decode(data: bytes, kind: type[Answer], hide: Callable[[str], str] = str) -> Answer:
    """Decode JSON into a struct. Raises EngineAnswerError naming the field; `hide` removes secrets from quotes."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise EngineAnswerError(f"the answer cannot be used: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = " ".join(hide(data[: 1 << 16].decode("utf-8", "replace")).split())
        raise EngineAnswerError(f"the answer is not JSON: {text[:300]!r}") from error


def answered_ids(values: Any, what: str, vocab_size: int | None) -> Ids:
    """Return sampled ids as int32. Raises EngineAnswerError naming the entry that is not an id."""
    try:
        return as_ids(values, what, vocab_size)
    except TrajectoryError as error:
        raise EngineAnswerError(f"the engine returned an invalid id: {error}") from error


def answered_logprobs(values: Sequence[Any], ids: Ids, what: str) -> Logprobs:
    """Return one logprob per id as float32. Raises EngineAnswerError unless each is finite and at most 0."""
    if len(values) != len(ids):
        raise EngineAnswerError(f"{what}: {len(values)} logprobs for {len(ids)} ids; every sampled id needs its own")
    try:
        with np.errstate(over="ignore"):
            logprobs = np.array(values, np.float64).astype(np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise EngineAnswerError(f"{what}: a logprob is not a number: {error}") from error
    valid = np.isfinite(logprobs) & (logprobs <= POSITIVE_NOISE)
    if not valid.all():
        at = int(valid.argmin())
        raise EngineAnswerError(
            f"{what}: the logprob of id {int(ids[at])} at {at} is {brief(values[at])}; logprobs are finite and at most "
            "0, unlike logits"
        )
    return logprobs


def scored_ids(values: Sequence[Any], ids: Ids, what: str) -> Logprobs:
    """Return the logprobs of ids that an engine scored: NaN for the first, `values` for those after it."""
    return np.concatenate([np.full(1, np.nan, np.float32), answered_logprobs(values, ids[1:], what)])


def same_ids(reported: Sequence[Any], ids: Sequence[int], what: str) -> None:
    """Raise EngineAnswerError unless logprobs are reported for the sampled ids."""
    for at, (one, sampled) in enumerate(zip(reported, ids, strict=False)):
        if one != sampled:
            raise EngineAnswerError(f"{what}[{at}] is of id {brief(one)}, but id {sampled} was sampled there")


def answered_versions(rows: Sequence[VersionRow] | None, length: int) -> tuple[VersionSpan, ...]:
    """Return the spans of weight versions. Raises EngineAnswerError unless they cover the completion once."""
    if rows is None or not length:
        return ()
    end = 0
    for row in rows:
        if row.start != end or row.end <= end:
            raise EngineAnswerError(f"weight_versions: a span from {row.start} to {row.end} does not continue at {end}")
        end = row.end
    if end != length:
        raise EngineAnswerError(f"weight_versions cover {end} of {length} sampled ids")
    return tuple(VersionSpan(row.version, row.start, row.end) for row in rows)


class AnswerReader:
    """Builds one completion from a whole answer, or from the events of a stream.

    Holds back the last piece until everything about it is known.
    """

    answer: ClassVar[Any] = Any
    """The struct of an answer or an event."""

    def __init__(self, request: GenerateRequest, capabilities: Capabilities) -> None:
        self.count = 0
        """The number of ids so far."""
        self.finished = False
        """True if the finish reason has arrived."""
        self.cached_tokens: int | None = None
        self.last_id: int | None = None
        self.prompt: Final[Ids] = np.asarray(request.prompt_ids, np.int32)
        self.sampling: Final = request.sampling
        self.capabilities: Final = capabilities
        self._last: Delta | None = None

    def feed(self, answer: Any) -> Delta | None:
        """Return the piece in an answer or an event; None if it has no ids, or the last ones."""
        raise NotImplementedError

    def add(
        self, ids: Sequence[int], logprobs: Sequence[float], what: str, channels: Channels = NO_CHANNELS
    ) -> Delta | None:
        """Check a piece that others follow; None if it has no ids."""
        piece = self._piece(ids, logprobs, what, channels)
        return piece if len(piece.ids) else None

    def _piece(self, ids: Sequence[int], logprobs: Sequence[float], what: str, channels: Channels) -> Delta:
        checked = answered_ids(ids, "ids", self.capabilities.vocab_size)
        check_channels(channels, len(checked))
        if self.sampling.top_logprobs and len(checked) and TOP_LOGPROBS not in channels:
            raise EngineAnswerError(f"{self.capabilities.engine} returned no top_logprobs")
        self.count += len(checked)
        if self.count > self.sampling.max_tokens:
            raise EngineAnswerError(f"{self.count} ids were returned, more than max_tokens {self.sampling.max_tokens}")
        self.last_id = int(checked[-1]) if len(checked) else self.last_id
        return Delta(checked, answered_logprobs(logprobs, checked, what), channels=channels)

    def end(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        what: str,
        reason: str,
        stop: int | str | None = None,
        versions: Sequence[VersionRow] | None = None,
        channels: Channels = NO_CHANNELS,
        whole: Channels = NO_CHANNELS,
    ) -> None:
        """Check the last piece: its finish reason, its stop token or text, and the weight versions.

        `whole` holds channels of the whole completion that no earlier piece had.
        """
        piece = self._piece(ids, logprobs, what, channels)
        check_channels(whole, self.count)
        if reason not in set(FinishReason):
            raise EngineAnswerError(f"{self.capabilities.engine} ended for an unknown reason: {brief(reason)}")
        stopped = reason == FinishReason.STOP
        if stopped and (self.last_id is None or (type(stop) is int and self.last_id != stop)):
            raise EngineAnswerError(f"it ended with stop token {stop}, but its last id is {self.last_id}")
        text = stop if stopped and isinstance(stop, str) else None
        if text is not None and text not in self.sampling.stop:
            raise EngineAnswerError(f"it ended with {brief(text)}, which is not one of the stop texts")
        self._last = replace(
            piece,
            finish_reason=FinishReason(reason),
            versions=answered_versions(versions, self.count),
            logprobs_kind=completion_kind(self.sampling, self.capabilities),
            channels={**channels, **whole},
            stopped_by=text,
        )
        self.finished = True

    def close(self) -> Delta:
        """Return the last piece. Raises EngineAnswerError if no finish reason has arrived."""
        if self._last is None:
            raise EngineAnswerError(f"{self.capabilities.engine} returned no finish reason")
        return replace(self._last, cached_tokens=self.cached_tokens)

    def whole(self, answer: Any) -> Completion:
        """Return the completion in one answer."""
        self.feed(answer)
        return joined([self.close()])

    def check_prompt_count(self, count: int | None) -> None:
        """Raise EngineAnswerError unless the engine read as many prompt ids as were sent."""
        if count != len(self.prompt):
            raise EngineAnswerError(f"{len(self.prompt)} ids of prompt were sent, and the engine read {brief(count)}")
