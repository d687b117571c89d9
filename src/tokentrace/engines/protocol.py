"""What an engine is: ids and sampling parameters in; ids and logprobs out."""

import json
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from ..errors import brief
from ..settings import instance, items, number, whole
from ..tokens.tokenizer import Ids
from ..trajectory.turns import PENALTIES, IdsLike, LogprobKind, Logprobs, VersionSpan
from .errors import EngineAnswerError, EngineError

Weights = str | Path | Mapping[str, Any]
"""A folder of safetensors, or arrays by name (a state dict)."""
Channels = Mapping[str, Sequence[Any]]
"""Other reports by name, one entry per token."""

_COLDEST = 0.01
"""vLLM raises lower temperatures to this."""
_NUMBERS = {
    "temperature": (0.0, 1e6),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-9, 2.0),
}
_COUNTS = {"max_tokens": 1, "top_k": 0, "top_logprobs": 0}
_UNUSED: dict[str, Any] = {"min_p": 0.0, **PENALTIES, "stop": ()}
_LEFT_OUT: dict[str, Any] = {**_UNUSED, "top_logprobs": 0, "structure": None}
OPTIONAL = tuple(_UNUSED)
_MOST_STOPS = 32  # SGLang accepts no more
"""Settings that not every engine has: see `Capabilities.sampling`."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. `top_k` 0: all tokens; `temperature` 0: greedy. Raises EngineError."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    allow_raw_logprobs: bool = False
    """Accept logprobs that do not describe the sampled distribution."""
    top_logprobs: int = 0
    """How many of the likeliest ids to report per position."""
    structure: Mapping[str, Any] | None = None
    """JSON: ``{"type": "json_object"}``, or ``{"type": "json_schema", "schema": {…}}``."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    """Stop texts. The completion ends with the id that completes one of them."""

    def __post_init__(self) -> None:
        values: dict[str, Any] = {"stop": _stop(self.stop)}
        count = partial(whole, most=2**31 - 1, error=EngineError)
        for name, bounds in _NUMBERS.items():
            values[name] = number(name, getattr(self, name), *bounds, EngineError)
        for name, least in _COUNTS.items():
            values[name] = count(name, getattr(self, name), least=least)
        stops = items("stop_token_ids", self.stop_token_ids, EngineError)
        values["stop_token_ids"] = tuple(count("each of stop_token_ids", one, least=0) for one in stops)
        instance("allow_raw_logprobs", self.allow_raw_logprobs, bool, EngineError)
        if self.structure is not None:
            values["structure"] = _structure(self.structure)
        if self.seed is not None:
            values["seed"] = whole("seed", self.seed, least=0, most=2**63 - 1, error=EngineError)
        if 0 < values["temperature"] < _COLDEST:
            raise EngineError(f"temperature must be 0 or at least {_COLDEST}: engines raise lower ones")
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def optional(self) -> list[str]:
        """The settings in use that not every engine has."""
        return [name for name, unused in _UNUSED.items() if getattr(self, name) != unused]

    @property
    def penalties(self) -> dict[str, float]:
        """The penalties in use, by name."""
        return {name: getattr(self, name) for name in self.optional if name in PENALTIES}

    def described(self) -> dict[str, Any]:
        """The parameters as a trajectory records them, without unused options."""
        values = {name: getattr(self, name) for name in SamplingParams.__slots__}
        used = {
            name: one for name, one in values.items() if name not in _LEFT_OUT or one != _LEFT_OUT[name]
        }
        return {name: list(one) if isinstance(one, tuple) else one for name, one in used.items()}


def _stop(stop: Any) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise EngineError(f"stop must be a non-empty text or a list of them, not {brief(stop)}")
    if len(texts) > _MOST_STOPS:
        raise EngineError(f"stop has {len(texts)} texts, of {_MOST_STOPS} at most")
    try:
        "".join(texts).encode("utf-8")
    except UnicodeEncodeError as error:
        raise EngineError(f"stop has a text that is not Unicode: {error}") from error
    return tuple(texts)


def _structure(structure: Any) -> dict[str, Any]:
    try:
        copy = json.loads(json.dumps(structure, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise EngineError(f"structure must be JSON: {error}") from error
    schema = copy.get("schema") if isinstance(copy, dict) else None
    is_schema = isinstance(schema, dict) and copy == {"type": "json_schema", "schema": schema}
    if not is_schema and copy != {"type": "json_object"}:
        raise EngineError(
            f"structure must be a json_object or a json_schema with schema, not {brief(copy)}"
        )
    return dict(copy)


class FinishReason(StrEnum):
    """Why a completion ended. An aborted one has the ids sampled until then."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    prompt_ids: IdsLike
    sampling: SamplingParams
    request_id: str | None = None
    """Names the request for `Engine.abort`."""
    session: str | None = None
    """Requests of a session, such as a rollout, go to the endpoint that caches their prefix."""
    group: str | None = None
    """Requests of a group share a prompt, and one endpoint while it has room."""


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """A piece of a completion. The last one also describes the whole."""

    ids: Ids
    logprobs: Logprobs
    finish_reason: FinishReason | None = None
    versions: tuple[VersionSpan, ...] = ()
    """Which weights sampled which part; empty if unknown."""
    cached_tokens: int | None = None
    logprobs_kind: LogprobKind = LogprobKind.UNKNOWN
    channels: Channels = field(default_factory=dict)
    """One that only the last piece has is of the whole completion."""
    stopped_by: str | None = None
    """The text of `SamplingParams.stop` that ended the completion."""

    def head(self, count: int) -> Self:
        """The first tokens. Drops channels of another length."""
        whole = ((name, values) for name, values in self.channels.items() if len(values) == len(self.ids))
        channels = {name: values[:count] for name, values in whole}
        cut = [one._replace(stop=min(one.stop, count)) for one in self.versions if one.start < count]
        ids, logprobs = self.ids[:count], self.logprobs[:count]
        return replace(self, ids=ids, logprobs=logprobs, versions=tuple(cut), channels=channels)


@dataclass(frozen=True, slots=True, eq=False)
class Completion(Delta):
    """A whole completion. A sampled stop token is the last of `ids`."""

    finish_reason: FinishReason

    def __post_init__(self) -> None:
        for name, array, codes in (("ids", self.ids, "iu"), ("logprobs", self.logprobs, "f")):
            if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in codes:
                raise EngineAnswerError(f"the {name} must be a row of numbers, not {brief(array)}")
        check_channels({"logprobs": self.logprobs, **self.channels}, len(self.ids))
        if not np.isfinite(self.logprobs).all():
            at = int(np.isfinite(self.logprobs).argmin())
            raise EngineAnswerError(f"the logprob of id {self.ids[at]} at {at} is {self.logprobs[at]}")


async def collected(deltas: AsyncIterable[Delta]) -> Completion:
    """Join a stream to a completion. Raises EngineAnswerError without a finish reason."""
    return joined([delta async for delta in deltas])


def joined(pieces: Sequence[Delta]) -> Completion:
    """Join pieces to a completion. Raises EngineAnswerError without a finish reason."""
    last = pieces[-1] if pieces else None
    if last is None or last.finish_reason is None:
        raise EngineAnswerError("the stream ended without a finish reason")
    earlier = [piece for piece in pieces[:-1] if len(piece.ids)]
    full = [*earlier, last] if len(last.ids) else earlier
    channels: dict[str, Any] = {}
    for name in dict.fromkeys(name for piece in earlier for name in piece.channels):
        if not all(name in piece.channels for piece in full):
            raise EngineAnswerError(f"only some pieces of the completion have {name}")
        channels[name] = [entry for piece in full for entry in piece.channels[name]]
    return Completion(
        np.concatenate([piece.ids for piece in pieces]),
        np.concatenate([piece.logprobs for piece in pieces]),
        last.finish_reason,
        last.versions,
        last.cached_tokens,
        last.logprobs_kind,
        {**last.channels, **channels},
        last.stopped_by,
    )


def check_channels(channels: Mapping[str, Sized], length: int) -> None:
    """Raise EngineAnswerError unless each channel has one entry per token."""
    for name, entries in channels.items():
        if len(entries) != length:
            raise EngineAnswerError(f"{name} has {len(entries)} entries for {length} ids")


def add_version(spans: list[VersionSpan], version: str | int, end: int) -> None:
    """Extend the spans of weight versions up to `end`."""
    if spans and spans[-1].version == version:
        spans[-1] = spans[-1]._replace(stop=end)
    else:
        spans.append(VersionSpan(version, spans[-1].stop if spans else 0, end))


def checked_version(version: Any) -> str | int:
    """The name of weights: text or a 64-bit integer. Raises EngineError."""
    if isinstance(version, str):
        return version
    return whole("version", version, least=-(2**63), most=2**63 - 1, error=EngineError)


@dataclass(frozen=True, slots=True)
class Capabilities:
    engine: str
    """``"vllm"`` and so on; ``"gateway"`` for a gateway's session."""
    version: str | None = None
    model: str | None = None
    max_length: int | None = None
    """Of prompt and completion together."""
    vocab_size: int | None = None
    logprobs: LogprobKind = LogprobKind.UNKNOWN

    aborts: bool = False
    pauses: bool = False
    versions: bool = False
    """True if completions report their weights."""
    top_logprobs: int = 0
    structures: bool = False
    sampling: frozenset[str] = frozenset()
    """Which of `min_p`, the penalties and `stop` it supports."""
    seeds: bool = True
    weights: bool = False


class Engine:
    """Samples completions, for many tasks of one event loop.

    A subclass implements `_stream`, `_generate` if whole answers come another way, and what it
    supports.
    """

    version: str | int | None = None

    def __init__(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.capabilities.model or ''})"

    async def generate(
        self, prompt_ids: IdsLike, sampling: SamplingParams, **options: str | None
    ) -> Completion:
        """Sample a completion. `options` are other fields of a `GenerateRequest`."""
        return await self._generate(GenerateRequest(prompt_ids, sampling, **options))

    def stream(
        self, prompt_ids: IdsLike, sampling: SamplingParams, **options: str | None
    ) -> AsyncGenerator[Delta]:
        """Like `generate`, in pieces. Closing the iterator ends the request."""
        return self._stream(GenerateRequest(prompt_ids, sampling, **options))

    async def _generate(self, request: GenerateRequest) -> Completion:
        return await collected(self._stream(request))

    def _stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        raise NotImplementedError

    async def check(self) -> None:
        """Raise EngineUnavailable unless the engine answers."""

    async def score(self, ids: IdsLike) -> Logprobs:
        """The logprob of each id at temperature 1; NaN for the first."""
        raise self._unable("score ids")

    async def abort(self, request_id: str) -> None:
        """End a request, which returns the ids sampled so far. Ignores unknown ids."""
        raise self._unable("abort a request; cancel the task instead")

    async def pause(self) -> None:
        """Stop all requests until `resume`."""
        raise self._unable("pause")

    async def resume(self) -> None:
        raise self._unable("pause")

    async def update_weights(self, weights: Weights, *, version: str | int) -> None:
        """Load other weights, named `version`. Drops what the old ones computed."""
        raise self._unable("load other weights: restart it with them")

    async def set_version(self, version: str | int) -> None:
        """Name the current weights, after someone changed them and emptied the cache."""
        raise self._unable("report its weights")

    async def reset_prefix_cache(self) -> None:
        """Empty the cache, for new requests and for those under way."""
        raise self._unable("empty its cache")

    async def close(self) -> None:
        """Close connections and end work under way."""

    def _unable(self, what: str) -> EngineError:
        return EngineError(f"{self.capabilities.engine} cannot {what}")
