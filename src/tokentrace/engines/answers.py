"""Checks of requests, which an engine would clip or crash on, and of answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from ..errors import TrajectoryError, brief
from ..tokens.ids import INT32_MAX, check_ids, common_prefix
from ..tokens.tokenizer import Ids
from ..trajectory.checks import as_logprobs, as_versions
from ..trajectory.turns import POSITIVE_NOISE, IdsLike, LogprobKind, Logprobs, VersionSpan
from . import protocol
from .channels import ROUTED_EXPERTS, TOP_LOGPROBS, Experts, Ranked, best_ids, experts_of
from .errors import EngineAnswerError, EngineRefusal, LogprobKindError
from .protocol import Capabilities, Delta, FinishReason, GenerateRequest, SamplingParams

Answer = TypeVar("Answer")
TokenBytes = Callable[[int], bytes]


def checked_request(request: GenerateRequest, capabilities: Capabilities) -> GenerateRequest:
    """The request with an int32 prompt. Raises EngineRefusal."""
    sampling, limit, engine = request.sampling, capabilities.max_length, capabilities.engine
    size, problem = capabilities.vocab_size, ""
    check_logprobs(sampling, capabilities)
    ids = check_ids(request.prompt_ids, "prompt_ids", vocab_size=size, error=EngineRefusal)
    check_ids(sampling.stop_token_ids, "stop_token_ids", vocab_size=size, error=EngineRefusal)
    if not len(ids):
        problem = "the prompt is empty"
    elif limit is not None and len(ids) + sampling.max_tokens > limit:
        problem = f"{len(ids)} prompt ids and max_tokens {sampling.max_tokens} exceed the engine's {limit}"
    elif sampling.top_logprobs > capabilities.top_logprobs:
        problem = f"{engine} reports top_logprobs of at most {capabilities.top_logprobs} ids"
    elif sampling.structure is not None and not capabilities.structures:
        problem = f"{engine} cannot constrain a completion to JSON"
    elif sampling.seed is not None and not capabilities.seeds:
        problem = f"{engine} has no seed per request"
    elif missing := [name for name in sampling.optional if name not in capabilities.sampling]:
        problem = f"{engine} has no {missing[0]}"
    if problem:
        raise EngineRefusal(problem)
    return replace(request, prompt_ids=ids)


def check_logprobs(sampling: SamplingParams, capabilities: Capabilities) -> None:
    """Raise LogprobKindError if logprobs would not describe the sampled distribution."""
    kind, temperature = capabilities.logprobs, sampling.temperature
    is_changed = temperature not in (0, 1) or (temperature and sampling.penalties)
    is_described = kind in (LogprobKind.PROCESSED, LogprobKind.SCALED) or sampling.allow_raw_logprobs
    if is_changed and not is_described:
        raise LogprobKindError(
            f"the logprobs of {capabilities.engine} are {kind}: at this temperature or with penalties, they do "
            "not describe the sampled distribution. Start vLLM with --logprobs-mode processed_logprobs, sample "
            "at temperature 1 without penalties, or set allow_raw_logprobs=True"
        )


def completion_kind(sampling: SamplingParams, capabilities: Capabilities) -> LogprobKind:
    """What the logprobs of a completion describe; unknown where engines differ."""
    if sampling.structure is not None:
        return LogprobKind.UNKNOWN
    if sampling.temperature or capabilities.logprobs is LogprobKind.RAW:
        return capabilities.logprobs
    return LogprobKind.UNKNOWN if sampling.penalties else LogprobKind.RAW


class StopFinder:
    """Finds stop texts, one id at a time, in bytes: an id may be part of a character.

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
        """The text that this id completes; of several, the one that ends first."""
        if not self._texts:
            return None
        seen = self._tail + self._token_bytes(token)
        ends = [(at + len(raw), text) for text, raw in self._texts if (at := seen.find(raw)) >= 0]
        self._tail = seen[max(0, len(seen) - self._overlap) :]
        return min(ends, key=lambda end: end[0])[1] if ends else None


TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Logprob = Annotated[float, Meta(ge=-3e38, le=POSITIVE_NOISE)]
Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]


class VersionRow(Struct):
    """A `VersionSpan`, as servers report it."""

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


@contextmanager
def _answer_errors() -> Iterator[None]:
    try:
        yield
    except TrajectoryError as error:
        raise EngineAnswerError(f"the engine's answer: {error}") from error


def answered_logprobs(values: Sequence[Any], count: int) -> Logprobs:
    """A logprob per id. Raises EngineAnswerError unless each is finite and at most 0."""
    with _answer_errors():
        logprobs = as_logprobs(values, count, recorded=True)
    assert logprobs is not None
    return logprobs


def scored_ids(values: Sequence[Any], ids: Ids) -> Logprobs:
    return np.concatenate([np.full(1, np.nan, np.float32), answered_logprobs(values, len(ids) - 1)])


def same_ids(reported: Sequence[int], ids: Sequence[int]) -> None:
    for at, (one, sampled) in enumerate(zip(reported, ids, strict=False)):
        if one != sampled:
            raise EngineAnswerError(f"the logprob at {at} is for id {one}, but id {sampled} was sampled")


@dataclass(frozen=True, slots=True)
class EngineReply:
    """A completion, or a part of one, as an engine reports it."""

    ids: IdsLike
    logprobs: Sequence[float | None] | None
    finish_reason: str | None = None
    """``"stop"``, ``"length"`` or ``"abort"``; None if more follows."""
    versions: Sequence[VersionSpan | VersionRow] = ()
    cached_tokens: int | None = None
    stop: int | str | None = None
    top: Sequence[Ranked] = ()
    experts: Experts | None = None
    """Of the whole completion, in its last part."""


class AnswerReader:
    """Builds a completion from an engine's answers, of which `read` makes replies."""

    def __init__(
        self,
        request: GenerateRequest,
        capabilities: Capabilities,
        read: Callable[[Any, AnswerReader], EngineReply | None] = lambda answer, _: answer,
        sent: bytes | None = None,
    ) -> None:
        self._read, self._unconfirmed = read, sent
        """The prompt's JSON until the engine has echoed it; None if it need not."""
        self.count = 0
        self.last_id: int | None = None
        self.cached_tokens: int | None = None
        self.prompt: Final[Ids] = np.asarray(request.prompt_ids, np.int32)
        self.sampling: Final = request.sampling
        self.capabilities: Final = capabilities
        self.last: Delta | None = None

    def feed(self, answer: Any) -> Delta | None:
        """The piece in an answer; None if it is empty or the last: see `close`."""
        reply = self._read(answer, self)
        if reply is None:
            return None
        size, channels = self.capabilities.vocab_size, dict[str, Any]()
        ids = check_ids(reply.ids, "ids", vocab_size=size, error=EngineAnswerError)
        logprobs = answered_logprobs(reply.logprobs or (), len(ids))
        if self.sampling.top_logprobs and len(ids):
            channels[TOP_LOGPROBS] = best_ids(reply.top, self.sampling.top_logprobs, size)
        protocol.check_channels(channels, len(ids))
        self.count += len(ids)
        if self.count > self.sampling.max_tokens:
            raise EngineAnswerError(f"{self.count} ids are more than max_tokens {self.sampling.max_tokens}")
        self.last_id = int(ids[-1]) if len(ids) else self.last_id
        self.cached_tokens = self.cached_tokens if reply.cached_tokens is None else reply.cached_tokens
        delta = Delta(ids, logprobs, channels=channels)
        if reply.finish_reason is not None:
            self.last = self._end(delta, reply)
            return None
        if reply.experts is not None:
            raise EngineAnswerError("the engine sent routed experts before the end of the stream")
        return delta if len(ids) else None

    def _end(self, delta: Delta, reply: EngineReply) -> Delta:
        reason, stop, channels = reply.finish_reason, reply.stop, dict(delta.channels)
        if reason not in set(FinishReason):
            raise EngineAnswerError(
                f"{self.capabilities.engine} ended for an unknown reason: {brief(reason)}"
            )
        stopped = reason == FinishReason.STOP
        if stopped and self.last_id is None:
            raise EngineAnswerError("the completion ended with a stop, but has no ids")
        if stopped and type(stop) is int and self.last_id != stop:
            raise EngineAnswerError(f"the completion stopped at {stop}, but its last id is {self.last_id}")
        text = stop if stopped and isinstance(stop, str) else None
        if text is not None and text not in self.sampling.stop:
            raise EngineAnswerError(f"the completion ended with {brief(text)}, which is not a stop text")
        if reply.experts is not None:
            channels[ROUTED_EXPERTS] = experts_of(reply.experts, len(self.prompt), self.count)
        rows = reply.versions if self.count else ()
        with _answer_errors():
            versions = as_versions([(row.version, row.start, row.stop) for row in rows] or None, self.count)
        return replace(
            delta,
            finish_reason=FinishReason(reason),
            versions=versions,
            logprobs_kind=completion_kind(self.sampling, self.capabilities),
            channels=channels,
            stopped_by=text,
        )

    def close(self) -> Delta:
        """The last piece. Raises EngineAnswerError if there is none."""
        if self.last is None:
            raise EngineAnswerError(f"{self.capabilities.engine} returned no finish reason")
        return replace(self.last, cached_tokens=self.cached_tokens)

    def check_echo(self, echoed: msgspec.Raw) -> None:
        """Compare an echoed prompt. Raises EngineAnswerError."""
        if self._unconfirmed is not None and (echo := bytes(echoed)) != self._unconfirmed:
            if echo == b"null":
                raise EngineAnswerError("the engine did not echo the prompt (prompt_token_ids)")
            ids, size = np.array(decode(echo, list[TokenId]), np.int32), len(self.prompt)
            at = common_prefix(ids, self.prompt)
            if not at == len(ids) == size:
                raise EngineAnswerError(
                    f"the engine read {len(ids)} ids of {size}, other ones from {at} on"
                )
        self._unconfirmed = None

    def check_prompt_count(self, count: int | None) -> None:
        """Raise EngineAnswerError unless the engine read as many ids as were sent."""
        if count != len(self.prompt):
            raise EngineAnswerError(f"{len(self.prompt)} prompt ids were sent, but the engine read {count}")
