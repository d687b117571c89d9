"""What an engine is: ids and sampling parameters in; ids, logprobs, a finish reason and weight versions out.

An engine never sees text and never makes ids of it. It returns one logprob for each id that it sampled; ids or
logprobs that are missing are an error, never made up.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import TokentraceError
from ..tokens.tokenizer import Ids
from ..trajectory.turns import VersionSpan

Logprobs = npt.NDArray[np.float32]


class EngineError(TokentraceError):
    """An engine cannot be used, or did not do what it was asked."""


class EngineUnavailable(EngineError):  # noqa: N818
    """The engine could not be reached or was too busy, and no token was accepted: the request may be sent again."""


class EngineRefusal(EngineError):  # noqa: N818
    """The engine refused the request as it is: too long, out of its vocabulary, unknown model."""

    def __init__(self, problem: str, *, status: int | None = None) -> None:
        self.status = status
        super().__init__(problem)


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


class LogprobKind(StrEnum):
    """Of which distribution an engine's logprobs are."""

    PROCESSED = "processed"
    """The one that was sampled from, temperature and top-p included."""
    RAW = "raw"
    """The model's own, before temperature and top-p."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. `top_k` 0 is all tokens; `temperature` 0 is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        problems = {
            "max_tokens": self.max_tokens >= 1,
            "temperature": self.temperature >= 0,
            "top_p": 0 < self.top_p <= 1,
            "top_k": self.top_k >= 0,
        }
        for name, is_right in problems.items():
            if not is_right:
                raise EngineError(f"{name} cannot be {getattr(self, name)!r}")

    def described(self) -> dict[str, Any]:
        """As JSON can hold it: what a trajectory records."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {
            "stop_token_ids": list(self.stop_token_ids)
        }


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

    def __post_init__(self) -> None:
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
    logprobs: LogprobKind | None = None
    """None where the engine does not say which; the adapter's documentation tells what is usual."""
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
