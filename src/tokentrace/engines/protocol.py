"""What an engine is: ids and sampling parameters in; ids, logprobs, a finish reason and weight versions out.

Missing ids or logprobs are an error and never filled in.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import brief
from ..settings import whole
from ..tokens.tokenizer import Ids
from ..trajectory.turns import LogprobKind as LogprobKind  # noqa: PLC0414
from ..trajectory.turns import VersionSpan
from .errors import EngineAnswerError as EngineAnswerError  # noqa: PLC0414
from .errors import EngineError as EngineError  # noqa: PLC0414
from .errors import EngineRefusal as EngineRefusal  # noqa: PLC0414
from .errors import EngineUnavailable as EngineUnavailable  # noqa: PLC0414
from .errors import LogprobKindError as LogprobKindError  # noqa: PLC0414
from .sampling import OPTIONAL as OPTIONAL  # noqa: PLC0414
from .sampling import SamplingParams as SamplingParams  # noqa: PLC0414

Logprobs: TypeAlias = npt.NDArray[np.float32]
WireText: TypeAlias = Sequence[bytes] | Callable[[], Sequence[bytes]]
Weights: TypeAlias = str | Path | Mapping[str, Any]
"""A folder of safetensors, or arrays by name (a state dict)."""
Channels: TypeAlias = Mapping[str, Sequence[Any]]
"""Other reports by name, one entry per token."""


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """With a stop token, which is its last id, or with a stop text, which its last id completes."""
    LENGTH = "length"
    ABORT = "abort"
    """It was ended from outside; its ids are what was sampled until then."""


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """A request to an engine."""

    prompt_ids: Sequence[int] | Ids
    sampling: SamplingParams
    request_id: str | None = None
    """Names the request for `Engine.abort`."""
    session: str | None = None
    """Requests of one session (a rollout) go to the endpoint that caches their prefix."""
    wire: WireText | None = None
    """The prompt as JSON text in pieces (`Trajectory.wire_parts`), or a function that returns it."""
    group: str | None = None
    """Requests of one group share a prompt and go to one endpoint while it has room."""


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """A piece of a completion. The last piece has the finish reason and what is true of the whole."""

    ids: Ids
    logprobs: Logprobs
    finish_reason: FinishReason | None = None
    versions: tuple[VersionSpan, ...] = ()
    """Which weights sampled which part; empty if the engine does not report it."""
    cached_tokens: int | None = None
    """How many ids of the prompt were in the engine's cache."""
    logprobs_kind: LogprobKind = LogprobKind.UNKNOWN
    channels: Channels = field(default_factory=dict)
    """A channel that only the last piece has covers the whole completion."""
    stopped_by: str | None = None
    """The text of `SamplingParams.stop` that ended the completion."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion(Delta):
    """A whole completion. A sampled stop token is the last of `ids`."""

    finish_reason: FinishReason

    def __post_init__(self) -> None:
        for name, array, codes in (("ids", self.ids, "iu"), ("logprobs", self.logprobs, "f")):
            if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in codes:
                raise EngineAnswerError(f"the {name} of a completion must be a row of numbers, not {brief(array)}")
        if self.ids.shape != self.logprobs.shape:
            raise EngineAnswerError(f"{len(self.ids)} ids were returned with {len(self.logprobs)} logprobs")
        if not np.isfinite(self.logprobs).all():
            at = int(np.flatnonzero(~np.isfinite(self.logprobs))[0])
            raise EngineAnswerError(f"the logprob of id {int(self.ids[at])} at {at} is {float(self.logprobs[at])}")
        check_channels(self.channels, len(self.ids))


async def collected(deltas: AsyncIterable[Delta]) -> Completion:
    """Join a stream into one completion. Raises EngineAnswerError if it has no end."""
    return joined([delta async for delta in deltas])


def joined(pieces: Sequence[Delta]) -> Completion:
    """Join pieces into one completion. Raises EngineAnswerError if they have no end."""
    last = pieces[-1] if pieces else None
    if last is None or last.finish_reason is None:
        raise EngineAnswerError("the stream ended without a finish reason")
    return Completion(
        np.concatenate([piece.ids for piece in pieces]),
        np.concatenate([piece.logprobs for piece in pieces]),
        last.finish_reason,
        last.versions,
        last.cached_tokens,
        last.logprobs_kind,
        _joined_channels(pieces),
        last.stopped_by,
    )


def _joined_channels(pieces: Sequence[Delta]) -> Channels:
    earlier = [piece for piece in pieces[:-1] if len(piece.ids)]
    channels = dict(pieces[-1].channels)
    for name in dict.fromkeys(name for piece in earlier for name in piece.channels):
        some = [*earlier, *(pieces[-1:] if len(pieces[-1].ids) else [])]
        if not all(name in piece.channels for piece in some):
            raise EngineAnswerError(f"only some pieces of the completion have {name}")
        channels[name] = [entry for piece in some for entry in piece.channels[name]]
    return channels


def check_channels(channels: Channels, length: int) -> None:
    """Raise EngineAnswerError unless each channel has one entry per token."""
    for name, entries in channels.items():
        if len(entries) != length:
            raise EngineAnswerError(f"{name} has {len(entries)} entries for {length} ids; every sampled id needs one")


def add_version(spans: list[VersionSpan], version: str | int, end: int) -> None:
    """Extend the spans of weight versions up to `end`."""
    if spans and spans[-1].version == version:
        spans[-1] = spans[-1]._replace(stop=end)
    else:
        spans.append(VersionSpan(version, spans[-1].stop if spans else 0, end))


def checked_version(version: Any) -> str | int:
    """Return a name of weights: text, or a whole number. Raises EngineError."""
    if isinstance(version, str):
        return version
    return whole("version", version, least=-(2**63), most=2**63 - 1, error=EngineError)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do."""

    engine: str
    """``"vllm"``, ``"sglang"``, ``"llama.cpp"``, ``"embedded"``."""
    version: str | None = None
    model: str | None = None
    max_length: int | None = None
    """The most tokens of prompt and completion together; None if unknown."""
    vocab_size: int | None = None
    logprobs: LogprobKind = LogprobKind.UNKNOWN
    """Of which distribution its logprobs are. Greedy completions have raw ones."""
    streams: bool = False
    aborts: bool = False
    pauses: bool = False
    versions: bool = False
    """True if completions report their weights."""
    top_logprobs: int = 0
    """The most that `SamplingParams.top_logprobs` may be."""
    structures: bool = False
    sampling: frozenset[str] = frozenset()
    """Which of `min_p`, the penalties and `stop` it has."""
    seeds: bool = True
    weights: bool = False


class Engine:
    """One engine, or several as one. Safe to use from many tasks of one event loop.

    A subclass has `_stream`, `_generate` if whole answers come another way, and what else it can do.
    """

    version: str | int | None = None

    def __init__(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.capabilities.model or ''})"

    async def generate(
        self,
        prompt_ids: Sequence[int] | Ids,
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        session: str | None = None,
        wire: WireText | None = None,
        group: str | None = None,
    ) -> Completion:
        """Sample a completion. `GenerateRequest` describes the arguments."""
        return await self._generate(GenerateRequest(prompt_ids, sampling, request_id, session, wire, group))

    def stream(
        self,
        prompt_ids: Sequence[int] | Ids,
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        session: str | None = None,
        wire: WireText | None = None,
        group: str | None = None,
    ) -> AsyncGenerator[Delta]:
        """As `generate`, in pieces. Closing the iterator ends the request."""
        return self._stream(GenerateRequest(prompt_ids, sampling, request_id, session, wire, group))

    async def _generate(self, request: GenerateRequest) -> Completion:
        return await collected(self._stream(request))

    def _stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        raise NotImplementedError

    async def check(self) -> None:
        """Raise EngineUnavailable unless the engine answers."""

    async def score(self, ids: Sequence[int] | Ids) -> Logprobs:
        """Return the logprob of each id after all before it, at temperature 1; NaN for the first."""
        raise self._unable("score ids")

    async def abort(self, request_id: str) -> None:
        """End a request, which returns what was sampled. Ignores unknown ids."""
        raise self._unable("abort a request; cancel the task instead")

    async def pause(self) -> None:
        """Stop all requests until `resume`."""
        raise self._unable("pause")

    async def resume(self) -> None:
        """Continue all requests."""
        raise self._unable("pause")

    async def update_weights(self, weights: Weights, *, version: str | int) -> None:
        """Load other weights of the same model, called `version`. Raises EngineError if it fails.

        Afterwards nothing that the old weights computed is used, and requests under way are computed again.
        """
        raise self._unable("load other weights: start it again with them")

    async def set_version(self, version: str | int) -> None:
        """Name the current weights: somebody else has changed them, and emptied the cache."""
        raise self._unable("report its weights")

    async def reset_prefix_cache(self) -> None:
        """Empty the cache, for new requests and for those under way."""
        raise self._unable("empty its cache")

    async def close(self) -> None:
        """Close connections, end work under way."""

    def _unable(self, what: str) -> EngineError:
        return EngineError(f"{self.capabilities.engine} cannot {what}")
