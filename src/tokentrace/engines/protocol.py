"""What an engine is: ids and sampling parameters in; ids, logprobs, a finish reason and weight versions out.

An engine neither reads nor writes text. It returns one logprob for each sampled id. Missing ids or logprobs are an
error and never filled in.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import TokentraceError, brief
from ..settings import instance, items, number, whole
from ..tokens.tokenizer import Ids
from ..trajectory.turns import PENALTIES, VersionSpan
from ..trajectory.turns import LogprobKind as LogprobKind  # noqa: PLC0414

Logprobs: TypeAlias = npt.NDArray[np.float32]
WireText: TypeAlias = Sequence[bytes] | Callable[[], Sequence[bytes]]
"""A prompt as JSON text in pieces, or a function that returns it."""
Weights: TypeAlias = str | Path | Mapping[str, Any]
"""A folder of safetensors as the engine's machine sees it, or arrays by name (a state dict)."""
Channels: TypeAlias = Mapping[str, Sequence[Any]]
"""What an engine reports of tokens besides logprobs, by name: one entry per token."""
TOP_LOGPROBS: Final = "top_logprobs"
"""The channel of `SamplingParams.top_logprobs`: the likeliest ids at each token, as ``(id, logprob)``."""
ROUTED_EXPERTS: Final = "routed_experts"
"""The channel of the experts that computed the distribution of each token."""
NO_CHANNELS: Final[Channels] = {}
_MOST: Final = 2**31 - 1
COLDEST: Final = 0.01
"""The lowest temperature besides 0. vLLM raises lower ones to this."""
OPTIONAL: Final = ("min_p", *PENALTIES, "stop")
"""Settings of `SamplingParams` that not every engine has: see `Capabilities.sampling`."""
_MOST_STOPS: Final = 32
"""SGLang accepts no more."""
_TINY: Final = 1e-9
_NUMBERS: Final = {
    "temperature": (0.0, 1e6),
    "top_p": (_TINY, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (_TINY, 2.0),
}
_COUNTS: Final = {"max_tokens": 1, "top_k": 0, "top_logprobs": 0}
"""The least value of each."""


class EngineError(TokentraceError):
    """An engine cannot be used, or failed."""


class EngineUnavailable(EngineError):  # noqa: N818
    """The engine could not be reached or was too busy. No token was accepted, so the request may be sent again."""


class EngineRefusal(EngineError):  # noqa: N818
    """The engine refused the request: too long, outside its vocabulary, unknown model."""

    def __init__(self, problem: str, *, status: int | None = None) -> None:
        self.status = status
        super().__init__(problem)


class LogprobKindError(EngineRefusal):
    """Not sent: the logprobs would not be those of the distribution that is sampled from."""


class EngineAnswerError(EngineError):
    """The engine's answer cannot be used: ids or logprobs are missing or wrong, or it is not an answer."""


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """With a stop token, which is its last id, or with a stop text, which its last id completes."""
    LENGTH = "length"
    """It ran out of tokens."""
    ABORT = "abort"
    """It was ended from outside; its ids are what was sampled until then."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. `top_k` 0 is all tokens; `temperature` 0 is greedy. Adapters switch off everything else.

    `min_p` leaves out tokens less likely than this share of the likeliest one's probability. `presence_penalty` lowers
    the logit of each sampled token once, `frequency_penalty` for each occurrence; `repetition_penalty` divides the
    logits of tokens of prompt and completion. `stop` are texts: the completion ends with the id that completes one.
    Not every engine has these (`Capabilities.sampling`).

    Raw logprobs are not those of the sampled distribution at a temperature other than 0 and 1, or with a penalty:
    LogprobKindError, unless `allow_raw_logprobs` is set. `top_logprobs` requests so many of the likeliest ids at each
    place. `structure` holds the completion to JSON: ``{"type": "json_object"}``, or ``{"type": "json_schema",
    "schema": {…}}`` (`Capabilities.structures`); its logprobs are then of ``UNKNOWN`` kind.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    allow_raw_logprobs: bool = False
    top_logprobs: int = 0
    structure: Mapping[str, Any] | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        values: dict[str, Any] = {
            name: number(name, getattr(self, name), *bounds, EngineError) for name, bounds in _NUMBERS.items()
        }
        for name, least in _COUNTS.items():
            values[name] = whole(name, getattr(self, name), least=least, most=_MOST, error=EngineError)
        stops = items("stop_token_ids", self.stop_token_ids, EngineError)
        values["stop_token_ids"] = tuple(
            whole(f"stop_token_ids[{at}]", one, least=0, most=_MOST, error=EngineError) for at, one in enumerate(stops)
        )
        values["stop"] = _stop(self.stop)
        instance("allow_raw_logprobs", self.allow_raw_logprobs, bool, EngineError)
        if self.structure is not None:
            values["structure"] = _structure(self.structure)
        if self.seed is not None:
            values["seed"] = whole("seed", self.seed, least=0, most=2**63 - 1, error=EngineError)
        if 0 < values["temperature"] < COLDEST:
            raise EngineError(f"temperature must be 0 (greedy) or at least {COLDEST}: engines raise lower ones")
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def penalties(self) -> dict[str, float]:
        """The penalties that are not the value that does nothing, by name."""
        values = {name: getattr(self, name) for name in PENALTIES}
        return {name: value for name, value in values.items() if value != PENALTIES[name]}

    @property
    def optional(self) -> list[str]:
        """The settings that are in use and that not every engine has."""
        used = {"min_p": bool(self.min_p), "stop": bool(self.stop), **dict.fromkeys(self.penalties, True)}
        return [name for name in OPTIONAL if used.get(name)]

    def described(self) -> dict[str, Any]:
        """The parameters as JSON, as a trajectory records them. Leaves out optional settings that are not in use."""
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        values |= {"stop_token_ids": list(self.stop_token_ids), "stop": list(self.stop)}
        unused = {*OPTIONAL, "top_logprobs", "structure"} - set(self.optional)
        return {name: value for name, value in values.items() if name not in unused or (value and name in _EXTRAS)}


_EXTRAS: Final = ("top_logprobs", "structure")


def _stop(stop: Any) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise EngineError(f"stop must be texts, none of them empty, not {brief(stop)}")
    if len(texts) > _MOST_STOPS:
        raise EngineError(f"stop can have at most {_MOST_STOPS} texts, not {len(texts)}")
    try:
        "".join(texts).encode("utf-8")
    except UnicodeEncodeError as error:
        raise EngineError(f"stop has a text that is not Unicode: {error}") from error
    return tuple(texts)


def _structure(structure: Any) -> dict[str, Any]:
    """Return a copy of a structure that an engine can follow."""
    try:
        copy = json.loads(json.dumps(structure, allow_nan=False))
        match copy:
            case {"type": "json_object"} if len(copy) == 1:
                return dict(copy)
            case {"type": "json_schema", "schema": dict()} if len(copy) == 2:
                return dict(copy)
    except (TypeError, ValueError, RecursionError) as error:
        raise EngineError(f"structure must be JSON: {error}") from error
    raise EngineError(
        'structure must be {"type": "json_object"} or {"type": "json_schema", "schema": {...}}, not '
        f"{brief(structure)}"
    )


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """A request to an engine; see `Engine.generate`."""

    prompt_ids: Sequence[int] | Ids
    sampling: SamplingParams
    request_id: str | None = None
    session: str | None = None
    wire: WireText | None = None
    group: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """A piece of a completion. The last piece has the finish reason and what is true of the whole completion."""

    ids: Ids
    logprobs: Logprobs
    finish_reason: FinishReason | None = None
    """None in every piece but the last."""
    versions: tuple[VersionSpan, ...] = ()
    """Which weights sampled which part; empty if the engine does not report it."""
    cached_tokens: int | None = None
    """How many ids of the prompt were in the engine's cache; None if the engine does not report it."""
    logprobs_kind: LogprobKind = LogprobKind.UNKNOWN
    channels: Channels = field(default_factory=dict)
    """Other reports, one entry per id: ``"top_logprobs"`` has the likeliest ids as ``(id, logprob)``, best first. A
    channel that only the last piece has covers the whole completion."""
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
    """Join a stream into one completion. Raises EngineAnswerError if it has no finish reason."""
    return joined([delta async for delta in deltas])


def joined(pieces: Sequence[Delta]) -> Completion:
    """Join pieces into one completion. Raises EngineAnswerError if the last has no finish reason."""
    if not pieces or pieces[-1].finish_reason is None:
        raise EngineAnswerError("the stream ended without a finish reason")
    last = pieces[-1]
    return Completion(
        np.concatenate([piece.ids for piece in pieces]),
        np.concatenate([piece.logprobs for piece in pieces]),
        pieces[-1].finish_reason,
        last.versions,
        last.cached_tokens,
        last.logprobs_kind,
        _joined_channels(pieces),
        last.stopped_by,
    )


def _joined_channels(pieces: Sequence[Delta]) -> Channels:
    """Join each channel of all pieces. A channel that only the last piece has covers the whole completion."""
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
    """Return a name of weights: text, or a whole number of 64 bits. Raises EngineError for anything else."""
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
    """Which distribution its logprobs describe. Greedy completions always have raw ones."""
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
    """True if it can load other weights."""


class Engine:
    """One engine, or several as one. Safe to use from many tasks of one event loop.

    To write one, subclass it with `capabilities` and `_stream`, with `_generate` if whole answers come another way, and
    with `abort`, `pause`, `resume` and the methods for weights if it can do that.
    """

    version: str | int | None = None
    """The current weights; None if unknown."""

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
        """Sample a completion.

        `abort` takes `request_id`. Requests of one `session` (a rollout) go to the same endpoint, which caches their
        prefix. `wire` is the prompt as JSON text in pieces (`Trajectory.wire_parts`), or a function that returns it; it
        must equal `prompt_ids`. Requests of one `group` share a prompt and go to one endpoint while it has room.
        """
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
        """Raise EngineUnavailable unless the engine answers. One in this process always does."""

    async def score(self, ids: Sequence[int] | Ids) -> Logprobs:
        """Return the model's logprob of each id after all before it, at temperature 1; NaN for the first."""
        raise self._unable("score ids")

    async def abort(self, request_id: str) -> None:
        """End a request; its `generate` returns what was sampled, with ``ABORT``. Ignores unknown ids."""
        raise self._unable("abort a request; cancel the task instead")

    async def pause(self) -> None:
        """Stop all requests until `resume`."""
        raise self._unable("pause")

    async def resume(self) -> None:
        """Continue all requests."""
        raise self._unable("pause")

    async def update_weights(self, weights: Weights, *, version: str | int) -> None:
        """Load other weights of the same model, called `version`.

        `weights` is a folder of safetensors, which a server reads itself, or arrays by name for an engine in this
        process. Afterwards nothing that the old weights computed is used: requests under way are computed again, and
        their completions report which weights sampled which tokens. Raises EngineError if it fails.
        """
        raise self._unable("load other weights: start it again with them")

    async def set_version(self, version: str | int) -> None:
        """Name the current weights `version`: somebody else has changed them, and emptied the cache."""
        raise self._unable("report its weights")

    async def reset_prefix_cache(self) -> None:
        """Empty the cache, for new requests and for those under way."""
        raise self._unable("empty its cache")

    async def close(self) -> None:
        """Close connections, end work under way."""

    def _unable(self, what: str) -> EngineError:
        return EngineError(f"{self.capabilities.engine} cannot {what}")
