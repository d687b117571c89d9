"""Checks of requests to engines and of their answers. Pure: no I/O.

Refuses a request that an engine is known to clip or to crash on. An answer is used whole or not at all; errors name
the field, as in ``$.choices[0].logprobs.content[3].token_id``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from ..errors import TrajectoryError, brief
from ..tokens.ids import INT32_MAX
from ..tokens.tokenizer import Ids
from ..trajectory.checks import as_ids
from ..trajectory.turns import POSITIVE_NOISE, LogprobKind, VersionSpan
from . import protocol
from .channels import ROUTED_EXPERTS, TOP_LOGPROBS, Experts, Ranked, best_ids, experts_of
from .errors import EngineAnswerError, EngineRefusal, LogprobKindError
from .protocol import Capabilities, Channels, Delta, FinishReason, GenerateRequest, Logprobs, SamplingParams

Answer = TypeVar("Answer")
TokenBytes: TypeAlias = Callable[[int], bytes]
"""The bytes of an id, control tokens included: ``renderer.tokenizer.vocabulary.token_bytes``."""

# -- requests


def checked_request(request: GenerateRequest, capabilities: Capabilities) -> GenerateRequest:
    """Return the request with its prompt as int32. Raises EngineRefusal if the engine cannot serve it."""
    sampling, limit, engine = request.sampling, capabilities.max_length, capabilities.engine
    check_logprobs(sampling, capabilities)
    try:
        ids = as_ids(request.prompt_ids, "prompt_ids", capabilities.vocab_size)
        as_ids(sampling.stop_token_ids, "stop_token_ids", capabilities.vocab_size)
    except TrajectoryError as error:
        raise EngineRefusal(str(error)) from error
    problem = ""
    if not len(ids):
        problem = "the prompt is empty"
    elif limit is not None and len(ids) + sampling.max_tokens > limit:
        problem = (
            f"{len(ids)} prompt ids and max_tokens {sampling.max_tokens} are more than the engine's {limit}; ask "
            f"for at most {max(limit - len(ids), 0)}"
        )
    elif sampling.top_logprobs > capabilities.top_logprobs:
        most = capabilities.top_logprobs or "no"
        problem = f"top_logprobs is {sampling.top_logprobs}, but {engine} reports {most} ids besides the sampled one"
    elif sampling.structure is not None and not capabilities.structures:
        problem = f"{engine} cannot constrain a completion to JSON; use vLLM, SGLang or llama.cpp, or ask in the prompt"
    elif sampling.seed is not None and not capabilities.seeds:
        problem = f"{engine} has no seed per request: leave it out"
    elif missing := [name for name in sampling.optional if name not in capabilities.sampling]:
        problem = f"{engine} has no {missing[0]}"
    if problem:
        raise EngineRefusal(problem)
    return replace(request, prompt_ids=ids)


def check_logprobs(sampling: SamplingParams, capabilities: Capabilities) -> None:
    """Raise LogprobKindError if logprobs would not describe the sampled distribution.

    Raw logprobs are those at temperature 1 without penalties. Greedy completions are recorded as raw.
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
        f"the logprobs of {capabilities.engine} are {what}; at {how} they do not describe the sampled "
        "distribution. Start the server with processed logprobs (vLLM: --logprobs-mode processed_logprobs), "
        "connect with logprobs= if you know that they are, sample at temperature 1 without penalties, or record them "
        "as they are with SamplingParams(allow_raw_logprobs=True)"
    )


def completion_kind(sampling: SamplingParams, capabilities: Capabilities) -> LogprobKind:
    """Return which distribution the logprobs of a completion describe.

    Unknown with a structure and for greedy decoding with penalties, where engines differ.
    """
    if sampling.structure is not None:
        return LogprobKind.UNKNOWN
    if sampling.temperature or capabilities.logprobs is LogprobKind.RAW:
        return capabilities.logprobs
    return LogprobKind.UNKNOWN if sampling.penalties else LogprobKind.RAW


class StopFinder:
    """Finds stop texts in a completion, one id at a time. Compares bytes, since an id may be part of a character.

    >>> finder = StopFinder(["é!", "b"], lambda one: [b"a", b"\\xc3", b"\\xa9!"][one])
    >>> [finder.feed(one) for one in (0, 1, 2)]
    [None, None, 'é!']
    """

    def __init__(self, texts: Sequence[str], token_bytes: TokenBytes) -> None:
        self._texts = [(text, text.encode("utf-8")) for text in texts]
        self._token_bytes = token_bytes
        self._overlap = max((len(raw) for _, raw in self._texts), default=1) - 1
        self._tail = b""

    def feed(self, token: int) -> str | None:
        """Return the text that this id completes; of several, the one that ends first."""
        if not self._texts:
            return None
        seen = self._tail + self._token_bytes(token)
        ends = [(at + len(raw), text) for text, raw in self._texts if (at := seen.find(raw)) >= 0]
        self._tail = seen[max(0, len(seen) - self._overlap) :]
        return min(ends, key=lambda end: end[0])[1] if ends else None


# -- values in answers

TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Logprob = Annotated[float, Meta(ge=-3e38, le=POSITIVE_NOISE)]
Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]


class VersionRow(Struct):
    """The weights that sampled a part of a completion, as servers report them."""

    version: str | Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    start: int
    stop: int = msgspec.field(name="end")


def decode(data: bytes, kind: type[Answer], hide: Callable[[str], str] = str) -> Answer:
    """Decode JSON into a struct. Raises EngineAnswerError; `hide` removes secrets."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise EngineAnswerError(f"the answer cannot be used: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = " ".join(hide(data[: 1 << 16].decode("utf-8", "replace")).split())
        raise EngineAnswerError(f"the answer is not JSON: {text[:300]!r}") from error


def answered_ids(values: Any, vocab_size: int | None) -> Ids:
    """Return ids as int32. Raises EngineAnswerError."""
    try:
        return as_ids(values, "ids", vocab_size)
    except TrajectoryError as error:
        raise EngineAnswerError(f"the engine returned an invalid id: {error}") from error


def answered_logprobs(values: Sequence[Any], ids: Ids, what: str) -> Logprobs:
    """Return one logprob per id. Raises EngineAnswerError unless each is finite and at most 0."""
    protocol.check_channels({what: values}, len(ids))
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
    """Return the logprobs of scored ids: NaN for the first."""
    return np.concatenate([np.full(1, np.nan, np.float32), answered_logprobs(values, ids[1:], what)])


def same_ids(reported: Sequence[Any], ids: Sequence[int], what: str) -> None:
    """Raise EngineAnswerError unless logprobs are reported for the sampled ids."""
    for at, (one, sampled) in enumerate(zip(reported, ids, strict=False)):
        if one != sampled:
            raise EngineAnswerError(f"{what}[{at}] is for id {brief(one)}, but id {sampled} was sampled there")


# -- completions


@dataclass(frozen=True, slots=True)
class EngineReply:
    """A completion, or a part of one, as an engine reports it: unchecked."""

    ids: Sequence[int] | Ids
    logprobs: Sequence[float | None] | None
    """One per id. None is an error."""
    finish_reason: str | None = None
    """``"stop"``, ``"length"`` or ``"abort"``; None if more follows."""
    versions: Sequence[VersionSpan | VersionRow] = ()
    cached_tokens: int | None = None
    stop: int | str | None = None
    top: Sequence[Ranked] = ()
    channels: Channels = field(default_factory=dict)
    experts: Experts | None = None
    """The routed experts of the whole completion, in its last part."""
    where: str = "logprobs"
    """The field of the answer that holds the logprobs."""


class AnswerReader:
    """Builds one completion from the replies of an engine, whole or in parts. `read` extracts them from answers."""

    def __init__(
        self,
        request: GenerateRequest,
        capabilities: Capabilities,
        read: Callable[[Any, AnswerReader], EngineReply | None] = lambda answer, _: answer,
        sent: bytes | None = None,
    ) -> None:
        self._read = read
        self.unconfirmed = sent
        """The JSON text of the prompt, until the engine has echoed it; None if the echo is not checked."""
        self.count = 0
        self.last_id: int | None = None
        self.cached_tokens: int | None = None
        self.prompt: Final[Ids] = np.asarray(request.prompt_ids, np.int32)
        self.sampling: Final = request.sampling
        self.capabilities: Final = capabilities
        self.last: Delta | None = None

    def feed(self, answer: Any) -> Delta | None:
        """Return the piece in an answer; None if it has no ids, or is the last piece."""
        reply = self._read(answer, self)
        return None if reply is None else self.add(reply)

    def add(self, reply: EngineReply) -> Delta | None:
        """Check a reply and return its piece; None if it has no ids, or is the last piece, which `close` returns."""
        ids = answered_ids(reply.ids, self.capabilities.vocab_size)
        if reply.logprobs is None and len(ids):
            raise EngineAnswerError(f"{self.capabilities.engine} returned no logprobs: ids without them cannot be used")
        channels, count = dict(reply.channels), self.sampling.top_logprobs
        if count and len(ids) and TOP_LOGPROBS not in channels:
            channels[TOP_LOGPROBS] = best_ids(reply.top, count, self.capabilities.vocab_size, reply.where)
        protocol.check_channels(channels, len(ids))
        self.count += len(ids)
        if self.count > self.sampling.max_tokens:
            raise EngineAnswerError(f"{self.count} ids were returned, more than max_tokens {self.sampling.max_tokens}")
        self.last_id = int(ids[-1]) if len(ids) else self.last_id
        self.cached_tokens = self.cached_tokens if reply.cached_tokens is None else reply.cached_tokens
        delta = Delta(ids, answered_logprobs(reply.logprobs or (), ids, reply.where), channels=channels)
        if reply.finish_reason is not None:
            self.last = self._end(delta, reply)
            return None
        if reply.experts is not None:
            raise EngineAnswerError("the engine sent routed experts before the end of the stream")
        return delta if len(ids) else None

    def _end(self, delta: Delta, reply: EngineReply) -> Delta:
        reason, stop, channels = reply.finish_reason, reply.stop, dict(delta.channels)
        if reason not in set(FinishReason):
            raise EngineAnswerError(f"{self.capabilities.engine} ended for an unknown reason: {brief(reason)}")
        stopped = reason == FinishReason.STOP
        if stopped and self.last_id is None:
            raise EngineAnswerError("the completion ended with a stop, but has no ids")
        if stopped and type(stop) is int and self.last_id != stop:
            raise EngineAnswerError(f"the completion ended with stop token {stop}, but its last id is {self.last_id}")
        text = stop if stopped and isinstance(stop, str) else None
        if text is not None and text not in self.sampling.stop:
            raise EngineAnswerError(f"the completion ended with {brief(text)}, which is not a stop text")
        if reply.experts is not None:
            channels[ROUTED_EXPERTS] = experts_of(reply.experts, len(self.prompt), self.count)
        versions = list[VersionSpan]()
        for row in reply.versions if self.count else ():
            span = VersionSpan(row.version, row.start, row.stop)
            end = versions[-1].stop if versions else 0
            if span.start != end or span.stop <= end:
                raise EngineAnswerError(f"weight_versions: {span.start} to {span.stop} does not continue at {end}")
            versions.append(span)
        if versions and versions[-1].stop != self.count:
            raise EngineAnswerError(f"weight_versions cover {versions[-1].stop} of {self.count} sampled ids")
        return replace(
            delta,
            finish_reason=FinishReason(reason),
            versions=tuple(versions),
            logprobs_kind=completion_kind(self.sampling, self.capabilities),
            channels=channels,
            stopped_by=text,
        )

    def close(self) -> Delta:
        """Return the last piece. Raises EngineAnswerError if there is none."""
        if self.last is None:
            raise EngineAnswerError(f"{self.capabilities.engine} returned no finish reason")
        return replace(self.last, cached_tokens=self.cached_tokens)

    def check_prompt_count(self, count: int | None) -> None:
        """Raise EngineAnswerError unless the engine read as many ids as were sent."""
        if count != len(self.prompt):
            raise EngineAnswerError(f"{len(self.prompt)} prompt ids were sent, but the engine read {brief(count)}")
