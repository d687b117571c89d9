"""What an engine is: ids and sampling parameters in; ids, logprobs, a finish reason and weight versions out.

An engine never sees text and never makes ids of it. It returns one logprob for each id that it sampled; ids or
logprobs that are missing are an error, never made up.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import TokentraceError, shown
from ..tokens.tokenizer import Ids
from ..trajectory.turns import LogprobKind as LogprobKind  # noqa: PLC0414
from ..trajectory.turns import VersionSpan

Logprobs = npt.NDArray[np.float32]
COLDEST: Final = 0.01
"""The lowest temperature but 0: vLLM samples at this one where a lower one is asked for, or greedily."""


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
    """Not sent: at this temperature the engine's logprobs are not those of the distribution that is sampled from."""


class EngineAnswerError(EngineError):
    """The engine's answer is not what it must be: ids or logprobs are missing, or it is no answer at all."""


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """With a stop token, which is its last id."""
    LENGTH = "length"
    """It ran out of tokens."""
    ABORT = "abort"
    """Somebody ended it; its ids are what was sampled until then."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. `top_k` 0 is all tokens; `temperature` 0 is greedy.

    Nothing else has a say in it: adapters send every other setting that an engine is known to have (min-p, penalties)
    as the one that does nothing. A temperature other than 0 and 1 is refused with `LogprobKindError` where the engine's
    logprobs are raw or of unknown kind: they are not those of the distribution that is sampled from, and a trainer that
    takes them for it is wrong on every token. `allow_raw_logprobs` lets it be; what they are is recorded all the same.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    allow_raw_logprobs: bool = False

    def __post_init__(self) -> None:
        given = self.stop_token_ids
        if not isinstance(given, list | tuple):
            raise EngineError(f"stop_token_ids must be a tuple of ids, not {shown(given)}")
        if not isinstance(self.allow_raw_logprobs, bool):
            raise EngineError(f"allow_raw_logprobs is True or False, not {shown(self.allow_raw_logprobs)}")
        checked = {
            "max_tokens": _whole("max_tokens", self.max_tokens, 1),
            "temperature": _number("temperature", self.temperature, 0.0, 1e6),
            "top_p": _number("top_p", self.top_p, 0.0, 1.0),
            "top_k": _whole("top_k", self.top_k, 0),
            "seed": None if self.seed is None else _whole("seed", self.seed, 0, 2**63 - 1),
            "stop_token_ids": tuple(_whole(f"stop_token_ids[{at}]", one, 0) for at, one in enumerate(given)),
        }
        if checked["top_p"] == 0:
            raise EngineError("top_p cannot be 0: no token would be left; temperature 0 is greedy")
        if 0 < self.temperature < COLDEST:
            raise EngineError(
                f"temperature cannot be {self.temperature!r}: below {COLDEST}, engines sample at another temperature "
                "than was asked for; 0 is greedy"
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def described(self) -> dict[str, Any]:
        """As JSON can hold it: what a trajectory records."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {
            "stop_token_ids": list(self.stop_token_ids)
        }


def _whole(name: str, value: Any, least: int, most: int = 2**31 - 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= int(value) <= most:
        raise EngineError(f"{name} must be an integer of {least} to {most}, and cannot be {shown(value)}")
    return int(value)


def _number(name: str, value: Any, least: float, most: float) -> float:
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:  # NaN is neither
        raise EngineError(f"{name} must be a number of {least:g} to {most:g}, and cannot be {shown(value)}")
    return float(value)


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What an engine sampled for a prompt. A stop token that was sampled is the last of `ids`."""

    ids: Ids
    logprobs: Logprobs
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...] = ()
    """Which weights sampled which part; empty where the engine does not say."""
    cached_tokens: int | None = None
    """How many ids of the prompt were in the engine's cache; None where it does not say."""
    logprobs_kind: LogprobKind = LogprobKind.UNKNOWN
    """Of which distribution `logprobs` are."""

    def __post_init__(self) -> None:
        for name, array, codes in (("ids", self.ids, "iu"), ("logprobs", self.logprobs, "f")):
            if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in codes:
                raise EngineAnswerError(f"the {name} of a completion are a row of numbers, not {shown(array)}")
        if self.ids.shape != self.logprobs.shape:
            raise EngineAnswerError(f"{len(self.ids)} ids were returned with {len(self.logprobs)} logprobs")
        if not np.isfinite(self.logprobs).all():
            at = int(np.flatnonzero(~np.isfinite(self.logprobs))[0])
            raise EngineAnswerError(f"the logprob of id {int(self.ids[at])} at {at} is {float(self.logprobs[at])}")


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """A piece of a completion that is still arriving. The last one has the finish reason."""

    ids: Ids
    logprobs: Logprobs
    finish_reason: FinishReason | None = None
    versions: tuple[VersionSpan, ...] = ()
    """In the last piece: those of the whole completion."""
    cached_tokens: int | None = None
    logprobs_kind: LogprobKind = LogprobKind.UNKNOWN
    """In the last piece: of which distribution the logprobs of all pieces are."""


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


class Engine(Protocol):
    """One engine, or several that look like one. Safe to use from many tasks of one event loop."""

    @property
    def capabilities(self) -> Capabilities: ...

    async def generate(
        self,
        prompt_ids: Sequence[int] | Ids,
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        session: str | None = None,
        wire: Sequence[bytes] | None = None,
    ) -> Completion:
        """Sample a completion.

        `request_id` is what `abort` takes. Requests of one `session` (a rollout) go to the same endpoint, where the
        prefix of their prompt is cached. `wire` is the prompt as JSON text in pieces (`Trajectory.wire_parts`), for
        engines that are sent JSON; it must say the same as `prompt_ids`.
        """
        ...

    def stream(
        self,
        prompt_ids: Sequence[int] | Ids,
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        session: str | None = None,
        wire: Sequence[bytes] | None = None,
    ) -> AsyncIterator[Delta]:
        """As `generate`, in pieces. Closing the iterator aborts the request."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request; its `generate` returns what was sampled, with ``ABORT``. Unknown ids are ignored."""
        ...

    async def pause(self) -> None:
        """Let no request go on until `resume`: the weights are about to change."""
        ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...
