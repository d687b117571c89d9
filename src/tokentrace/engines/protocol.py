"""What an engine is: ids and sampling parameters in; ids, logprobs, a finish reason and weight versions out.

An engine neither reads nor writes text. It returns one logprob for each id that it sampled; missing ids or logprobs
are an error, and never made up.
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

from ..errors import TokentraceError, shown
from ..settings import instance, number, whole
from ..tokens.tokenizer import Ids
from ..trajectory.turns import PENALTIES, VersionSpan
from ..trajectory.turns import LogprobKind as LogprobKind  # noqa: PLC0414

Logprobs: TypeAlias = npt.NDArray[np.float32]
WireText: TypeAlias = Sequence[bytes] | Callable[[], Sequence[bytes]]
"""A prompt as JSON text in pieces, or a function that returns it."""
Weights: TypeAlias = str | Path | Mapping[str, Any]
"""A folder of safetensors as the engine's machine sees it, or arrays by name (a state dict)."""
Channels: TypeAlias = Mapping[str, Sequence[Any]]
"""What is told of tokens beside their logprobs, by name: one entry for each."""
TOP_LOGPROBS: Final = "top_logprobs"
"""The channel that `SamplingParams.top_logprobs` asks for: of each token the likeliest ids, as ``(id, logprob)``."""
ROUTED_EXPERTS: Final = "routed_experts"
"""The channel of the experts that the model used when it computed what each token was sampled from."""
NO_CHANNELS: Final[Channels] = {}
_MOST: Final = 2**31 - 1
COLDEST: Final = 0.01
"""The lowest temperature but 0: vLLM samples at this one where a lower one is asked for, or greedily."""
OPTIONAL: Final = ("min_p", *PENALTIES, "stop")
"""The settings of `SamplingParams` that not every engine has: see `Capabilities.sampling`."""
_MOST_STOPS: Final = 32
"""SGLang takes no more."""


class EngineError(TokentraceError):
    """An engine cannot be used, or did not do what it was asked."""


class EngineUnavailable(EngineError):  # noqa: N818
    """The engine could not be reached or was too busy, and no token was accepted: the request may be sent again."""


class EngineRefusal(EngineError):  # noqa: N818
    """The engine refused the request as it is: too long, out of its vocabulary, unknown model."""

    def __init__(self, problem: str, *, status: int | None = None) -> None:
        self.status = status
        super().__init__(problem)


class LogprobKindError(EngineRefusal):
    """Not sent: sampled like this, the engine's logprobs are not those of the distribution that is sampled from."""


class EngineAnswerError(EngineError):
    """The engine's answer cannot be used: ids or logprobs are missing or wrong, or it is not an answer at all."""


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
    """How to sample. `top_k` 0 is all tokens; `temperature` 0 is greedy.

    `min_p` leaves out the tokens that are less likely than this share of the likeliest one's probability.
    `presence_penalty` is taken off the logit of each token that was sampled before, `frequency_penalty` once for each
    time that it was, and `repetition_penalty` divides the logits of tokens of the prompt and the completion (it
    multiplies negative ones). `stop` are texts: the completion ends with the id that completes one of them, and keeps
    all of its ids. Not every engine has these settings (`Capabilities.sampling`).

    Nothing else changes how it samples: adapters switch off every other setting that an engine is known to have. A
    temperature other than 0 and 1, or a penalty, is refused with `LogprobKindError` where the engine's logprobs are raw
    or of unknown kind: they are not those of the distribution that is sampled from, and a trainer that assumes so is
    wrong on every token. `allow_raw_logprobs` permits it; the kind of the logprobs is recorded all the same.

    `top_logprobs` asks for that many of the likeliest ids at each place, with their logprobs; it changes nothing that
    is sampled. `Capabilities.top_logprobs` says how many an engine tells.

    `structure` is what the completion has to be, from its first token on: ``{"type": "json_object"}``, or ``{"type":
    "json_schema", "schema": {…}}``. An engine that can do that (`Capabilities.structures`) samples only what goes on
    with such a text; its logprobs are then of ``UNKNOWN`` kind.
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
        given = self.stop_token_ids
        if not isinstance(given, list | tuple):
            raise EngineError(f"stop_token_ids must be a tuple of ids, not {shown(given)}")
        checked = {
            "max_tokens": whole("max_tokens", self.max_tokens, least=1, most=_MOST, error=EngineError),
            "temperature": number("temperature", self.temperature, 0.0, 1e6, EngineError),
            "top_p": number("top_p", self.top_p, 0.0, 1.0, EngineError),
            "top_k": whole("top_k", self.top_k, least=0, most=_MOST, error=EngineError),
            "stop_token_ids": tuple(
                whole(f"stop_token_ids[{at}]", one, least=0, most=_MOST, error=EngineError)
                for at, one in enumerate(given)
            ),
            "top_logprobs": whole("top_logprobs", self.top_logprobs, least=0, most=_MOST, error=EngineError),
            "allow_raw_logprobs": instance("allow_raw_logprobs", self.allow_raw_logprobs, bool, EngineError),
            "min_p": number("min_p", self.min_p, 0.0, 1.0, EngineError),
            "presence_penalty": number("presence_penalty", self.presence_penalty, -2.0, 2.0, EngineError),
            "frequency_penalty": number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, EngineError),
            "repetition_penalty": number("repetition_penalty", self.repetition_penalty, 0.0, 2.0, EngineError),
            "stop": _stop(self.stop),
        }
        if self.structure is not None:
            checked["structure"] = _structure(self.structure)
        if self.seed is not None:
            checked["seed"] = whole("seed", self.seed, least=0, most=2**63 - 1, error=EngineError)
        if checked["top_p"] == 0:
            raise EngineError("top_p cannot be 0: no token would be left; temperature 0 is greedy")
        if checked["repetition_penalty"] == 0:
            raise EngineError("repetition_penalty cannot be 0: logits are divided by it; 1 changes nothing")
        if 0 < self.temperature < COLDEST:
            raise EngineError(
                f"temperature cannot be {self.temperature!r}: below {COLDEST}, engines sample at another temperature "
                "than was asked for; 0 is greedy"
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def penalties(self) -> dict[str, float]:
        """The penalties that are not the value that does nothing, by name."""
        values = {name: getattr(self, name) for name in PENALTIES}
        return {name: value for name, value in values.items() if value != PENALTIES[name]}

    @property
    def optional(self) -> list[str]:
        """Which of the settings that not every engine has are asked for."""
        asked = {"min_p": bool(self.min_p), "stop": bool(self.stop), **dict.fromkeys(self.penalties, True)}
        return [name for name in OPTIONAL if asked.get(name)]

    def described(self) -> dict[str, Any]:
        """As JSON can hold it: what a trajectory records. What was not asked for is left out."""
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        values |= {"stop_token_ids": list(self.stop_token_ids), "stop": list(self.stop)}
        asked = {*self.optional, *(name for name in ("top_logprobs", "structure") if values[name])}
        return {
            name: value
            for name, value in values.items()
            if name in asked or name not in ("top_logprobs", "structure", *OPTIONAL)
        }


def _stop(given: Any) -> tuple[str, ...]:
    """Stop texts, of which one may be given alone."""
    texts = (given,) if isinstance(given, str) else given
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise EngineError(f"stop must be texts, none of them empty, not {shown(given)}")
    if len(texts) > _MOST_STOPS:
        raise EngineError(f"stop can have at most {_MOST_STOPS} texts, not {len(texts)}")
    try:
        "".join(texts).encode("utf-8")
    except UnicodeEncodeError as error:
        raise EngineError(f"stop has a text that is not Unicode: {error}") from error
    return tuple(texts)


def _structure(given: Any) -> dict[str, Any]:
    """A structure that an engine can be asked for, as a copy that nobody changes."""
    try:
        found = json.loads(json.dumps(given, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise EngineError(f"structure must be what JSON can hold: {error}") from error
    kind = found.get("type") if isinstance(found, dict) else None
    schema = {"json_object": False, "json_schema": True}.get(kind) if isinstance(kind, str) else None
    if schema is None or set(found) != {"type", *(["schema"] if schema else [])}:
        raise EngineError(
            'structure must be {"type": "json_object"} or {"type": "json_schema", "schema": {...}}, not '
            f"{shown(given)}"
        )
    if schema and not isinstance(found["schema"], dict):
        raise EngineError(f"structure: the schema must be a JSON schema, an object, not {shown(found['schema'])}")
    return dict(found)


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """What an engine is asked for. `Engine.generate` says what each part means."""

    prompt_ids: Sequence[int] | Ids
    sampling: SamplingParams
    request_id: str | None = None
    session: str | None = None
    wire: WireText | None = None
    group: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """A piece of a completion that is still arriving. What the last piece says is true of the whole completion."""

    ids: Ids
    logprobs: Logprobs
    finish_reason: FinishReason | None = None
    """Why the completion ended; None in every piece but the last."""
    versions: tuple[VersionSpan, ...] = ()
    """Which weights sampled which part; empty where the engine does not say."""
    cached_tokens: int | None = None
    """How many ids of the prompt were in the engine's cache; None where it does not say."""
    logprobs_kind: LogprobKind = LogprobKind.UNKNOWN
    """Of which distribution `logprobs` are."""
    channels: Channels = field(default_factory=dict)
    """What else the engine tells of each token, by name: ``"top_logprobs"`` has the likeliest ids at that place, best
    first, as ``(id, logprob)``; those that could not have been drawn are left out. One entry for each of `ids`. A
    channel that only the last piece has covers the whole completion."""
    stopped_by: str | None = None
    """The text of `SamplingParams.stop` that ended the completion; None where something else did."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion(Delta):
    """What an engine sampled for a prompt, whole. A stop token that was sampled is the last of `ids`."""

    finish_reason: FinishReason

    def __post_init__(self) -> None:
        for name, array, codes in (("ids", self.ids, "iu"), ("logprobs", self.logprobs, "f")):
            if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in codes:
                raise EngineAnswerError(f"the {name} of a completion are a row of numbers, not {shown(array)}")
        if self.ids.shape != self.logprobs.shape:
            raise EngineAnswerError(f"{len(self.ids)} ids were returned with {len(self.logprobs)} logprobs")
        if not np.isfinite(self.logprobs).all():
            at = int(np.flatnonzero(~np.isfinite(self.logprobs))[0])
            raise EngineAnswerError(f"the logprob of id {int(self.ids[at])} at {at} is {float(self.logprobs[at])}")
        check_channels(self.channels, len(self.ids))


async def collected(deltas: AsyncIterable[Delta]) -> Completion:
    """The whole of a stream. `EngineAnswerError` where its last piece does not say why it ended."""
    return joined([delta async for delta in deltas])


def joined(pieces: Sequence[Delta]) -> Completion:
    """Pieces as one completion. `EngineAnswerError` where the last does not say why it ended."""
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
        _joined_channels(pieces),
        last.stopped_by,
    )


def _joined_channels(pieces: Sequence[Delta]) -> Channels:
    """Each channel of all pieces, or of the last alone."""
    told = [piece for piece in pieces if len(piece.ids)] or pieces[-1:]
    earlier = [piece for piece in told if piece is not pieces[-1]]
    names = dict.fromkeys(name for piece in (*told, pieces[-1]) for name in piece.channels)
    whole: dict[str, Sequence[Any]] = {}
    for name in names:
        if not any(name in piece.channels for piece in earlier):
            whole[name] = pieces[-1].channels[name]
        elif all(name in piece.channels for piece in told):
            whole[name] = [entry for piece in told for entry in piece.channels[name]]
        else:
            raise EngineAnswerError(f"{name} came with some pieces of the completion, and not with others")
    return whole


def check_channels(channels: Channels, length: int) -> None:
    """`EngineAnswerError` where a channel has not one entry for each of as many tokens."""
    for name, entries in channels.items():
        if len(entries) != length:
            raise EngineAnswerError(f"{name} has {len(entries)} entries for {length} ids; every sampled id needs one")


def add_version(spans: list[VersionSpan], version: str | int, stop: int) -> None:
    """Say which weights sampled what was sampled since the last span, up to `stop`."""
    if spans and spans[-1].version == version:
        spans[-1] = spans[-1]._replace(stop=stop)
    else:
        spans.append(VersionSpan(version, spans[-1].stop if spans else 0, stop))


def checked_version(version: Any) -> str | int:
    """What weights can be called by, and be recorded under: a text, or a whole number of 64 bits."""
    if isinstance(version, str):
        return version
    return whole("version", version, least=-(2**63), most=2**63 - 1, error=EngineError)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do, found out when it was connected to."""

    engine: str
    """``"vllm"``, ``"sglang"``, ``"llama.cpp"``, ``"embedded"``."""
    version: str | None = None
    model: str | None = None
    max_length: int | None = None
    """The most tokens of prompt and completion together; None where the engine does not say."""
    vocab_size: int | None = None
    logprobs: LogprobKind = LogprobKind.UNKNOWN
    """Of which distribution its logprobs are. Greedy completions have raw ones whatever it is."""
    streams: bool = False
    aborts: bool = False
    pauses: bool = False
    versions: bool = False
    """Whether completions say which weights sampled them."""
    top_logprobs: int = 0
    """How many of the likeliest ids it tells at each place: the most that `SamplingParams.top_logprobs` may be."""
    structures: bool = False
    """Whether it can be held to JSON: see `SamplingParams.structure`."""
    sampling: frozenset[str] = frozenset()
    """Which of `min_p`, the penalties and `stop` of `SamplingParams` it has."""
    seeds: bool = True
    """Whether it samples with `SamplingParams.seed`; a request with one is refused where it does not."""
    weights: bool = False
    """Whether it can be given other weights: see `Engine.update_weights`."""


class Engine:
    """One engine, or several that look like one. Safe to use from many tasks of one event loop.

    An engine of your own is a subclass with its `capabilities` and a `_stream`; it has a `_generate` too if whole
    answers come in another way, and `abort`, `pause`, `resume` and what concerns weights if it can do that.
    """

    version: str | int | None = None
    """Which weights sample now; None where that is not known."""

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

        `request_id` is what `abort` takes. Requests of one `session` (a rollout) go to the same endpoint, where the
        prefix of their prompt is cached. `wire` is the prompt as JSON text in pieces (`Trajectory.wire_parts`), or a
        function that returns it, for engines that are sent JSON; it must say the same as `prompt_ids`. Requests of one
        `group` begin with the same prompt (several answers to one question): they go to one endpoint while it has
        room, so that the prompt is read once.
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
        """Raise `EngineUnavailable` unless the engine answers. One in this process always does."""

    async def score(self, ids: Sequence[int] | Ids) -> Logprobs:
        """The model's logprob of each id given all before it, at temperature 1; NaN for the first."""
        raise EngineError(f"{self.capabilities.engine} does not tell the logprobs of ids that it is given")

    async def abort(self, request_id: str) -> None:
        """End a request; its `generate` returns what was sampled, with ``ABORT``. Unknown ids are ignored."""
        raise EngineError(
            f"{self.capabilities.engine} cannot end a request and return what it has sampled; cancel the task instead"
        )

    async def pause(self) -> None:
        """Let no request go on until `resume`: the weights are about to change."""
        raise EngineError(f"{self.capabilities.engine} cannot be paused")

    async def resume(self) -> None:
        """Let requests go on."""
        raise EngineError(f"{self.capabilities.engine} cannot be paused")

    async def update_weights(self, weights: Weights, *, version: str | int) -> None:
        """Sample with other weights of the same model, and call them `version`.

        `weights` is a folder of safetensors, which a server must be able to read itself, or arrays by name, for an
        engine in this process. When this returns, whatever is sampled is of the new weights, and nothing that the old
        ones computed is read again: requests under way have it computed anew. Their completions say which weights
        sampled which of their tokens. `EngineError` where it cannot be done, or where `version` is neither a text nor a
        whole number of 64 bits; what the engine then samples with is what
        its completions say.
        """
        raise EngineError(f"{self.capabilities.engine} cannot be given other weights: start it again with them")

    async def set_version(self, version: str | int) -> None:
        """Call the weights that sample now `version`: somebody else has changed them, and emptied the cache."""
        raise EngineError(f"{self.capabilities.engine} does not tell which weights sampled a completion")

    async def reset_prefix_cache(self) -> None:
        """Let nothing that was computed so far be read again, neither by new requests nor by those under way."""
        raise EngineError(f"{self.capabilities.engine} cannot be told to empty its cache")

    async def close(self) -> None:
        """Let go of what is open: connections, work under way."""
