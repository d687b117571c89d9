"""An engine whose completions come from a function, for tests and benchmarks. It fails where it is told to."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple, TypeAlias

from ..settings import items
from ..tokens.tokenizer import Ids
from .answers import Arriving, answered_ids, answered_logprobs, checked_prompt, collected, completion_kind
from .protocol import (
    Capabilities,
    Completion,
    Delta,
    EngineAnswerError,
    EngineError,
    EngineUnavailable,
    LogprobKind,
    Logprobs,
    SamplingParams,
)


class Sampled(NamedTuple):
    """What a script returns where it tells logprobs."""

    ids: Sequence[int] | Ids
    logprobs: Sequence[float] | Logprobs


Script: TypeAlias = Callable[[Ids, SamplingParams], Sequence[int] | Ids | Sampled]
"""The ids that follow a prompt, or those and their logprobs."""


class Fault(StrEnum):
    """What goes wrong with a request."""

    UNAVAILABLE = "unavailable"
    """It cannot be reached: `EngineUnavailable`."""
    DIES = "dies"
    """It ends after the first piece of a stream: `EngineError`. Where nothing was streamed: `EngineUnavailable`."""
    GARBAGE = "garbage"
    """It answers what is no completion: `EngineAnswerError`."""
    FEW_LOGPROBS = "few_logprobs"
    """One logprob is missing: `EngineAnswerError`."""
    WRONG_IDS = "wrong_ids"
    """One id is outside of the vocabulary: `EngineAnswerError`."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What a scripted engine was asked."""

    prompt_ids: Ids
    sampling: SamplingParams
    request_id: str | None
    session: str | None


class _Answer(NamedTuple):
    ids: Ids
    logprobs: Logprobs
    stops: bool


class ScriptedEngine:
    """Answers with what `script` returns, up to and including its first stop token, and at most ``max_tokens``.

    A completion that ends short of ``max_tokens`` without a stop token ends with its last id as one. Ids without
    logprobs get ``-1.0`` each. Pieces of a stream have `piece` ids, 0 for all in one; `latency` is awaited before each
    with its number of ids. `version` is which weights sample, and may be set at any time. `logprobs` is of which kind
    they are said to be. Requests are kept in `requests` unless `record` is off.

    >>> engine = ScriptedEngine(lambda prompt, sampling: [7, 8, 9])
    >>> asyncio.run(engine.generate([1, 2], SamplingParams(10, stop_token_ids=(8,)))).ids.tolist()
    [7, 8]
    """

    def __init__(
        self,
        script: Script,
        *,
        vocab_size: int | None = None,
        max_length: int | None = None,
        piece: int = 0,
        latency: Callable[[int], Awaitable[None]] | None = None,
        version: str | int | None = None,
        record: bool = True,
        logprobs: LogprobKind | str = LogprobKind.PROCESSED,
    ) -> None:
        self.requests: Final[list[Request]] = []
        self.faults: Final[deque[Fault | None]] = deque()
        """What goes wrong with the next requests, one each; None lets one pass."""
        self.version = version
        self._script: Final = script
        self._piece: Final = piece
        self._latency: Final = latency
        self._record: Final = record
        self._going: Final = asyncio.Event()
        self._going.set()
        self._running: Final[set[str]] = set()
        self._aborted: Final[set[str]] = set()
        self._capabilities: Final = Capabilities(
            engine="scripted",
            max_length=max_length,
            vocab_size=vocab_size,
            logprobs=LogprobKind(logprobs),
            streams=True,
            aborts=True,
            pauses=True,
            versions=version is not None,
        )

    @property
    def capabilities(self) -> Capabilities:
        """As it was made."""
        return self._capabilities

    async def generate(
        self,
        prompt_ids: Sequence[int] | Ids,
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        session: str | None = None,
        wire: Sequence[bytes] | None = None,
    ) -> Completion:
        """What the script returns."""
        return await collected(self._pieces(prompt_ids, sampling, request_id, session, streamed=False))

    def stream(
        self,
        prompt_ids: Sequence[int] | Ids,
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        session: str | None = None,
        wire: Sequence[bytes] | None = None,
    ) -> AsyncGenerator[Delta]:
        """As `generate`, in pieces."""
        return self._pieces(prompt_ids, sampling, request_id, session, streamed=True)

    async def abort(self, request_id: str) -> None:
        """End a request before its next piece."""
        if request_id and request_id in self._running:
            self._aborted.add(request_id)

    async def pause(self) -> None:
        """Let no request go on past its next piece."""
        self._going.clear()

    async def resume(self) -> None:
        """Let requests go on."""
        self._going.set()

    async def close(self) -> None:
        """Nothing is open."""

    async def _pieces(
        self,
        prompt_ids: Sequence[int] | Ids,
        sampling: SamplingParams,
        request_id: str | None,
        session: str | None,
        *,
        streamed: bool,
    ) -> AsyncGenerator[Delta]:
        prompt = checked_prompt(prompt_ids, sampling, self._capabilities)
        if self._record:
            self.requests.append(Request(prompt.copy(), sampling, request_id, session))
        fault = self.faults.popleft() if self.faults else None
        if fault is Fault.UNAVAILABLE or (fault is Fault.DIES and not streamed):
            raise EngineUnavailable("the script says that the engine cannot be reached")
        answer = self._answer(prompt, sampling, fault)
        name = request_id or ""
        self._running.add(name)
        try:
            async for delta in self._sampled(
                answer, name, Arriving("the script", sampling, completion_kind(sampling, self._capabilities)), fault
            ):
                yield delta
        finally:
            self._running.discard(name)
            self._aborted.discard(name)

    async def _sampled(
        self, answer: _Answer, name: str, arriving: Arriving, fault: Fault | None
    ) -> AsyncGenerator[Delta]:
        ids, logprobs, stops = answer
        size = self._piece or len(ids) or 1
        spans: list[dict[str, Any]] = []
        for start in range(0, len(ids) or 1, size):
            stop = min(start + size, len(ids))
            if self._latency is not None:
                await self._latency(stop - start)
            await self._going.wait()
            if name in self._aborted:
                arriving.end(ids[:0], logprobs[:0], "abort", None, _merged(spans) or None)
                break
            if self.version is not None:
                spans.append({"version": self.version, "start": start, "end": stop})
            if stop == len(ids) and fault is not Fault.DIES:
                arriving.end(ids[start:], logprobs[start:], "stop" if stops else "length", None, _merged(spans) or None)
                break
            if fault is Fault.DIES and (arriving.count or stop == len(ids)):
                words = f"the script says that the engine died after {arriving.count} tokens had arrived"
                raise EngineError(words) if arriving.count else EngineUnavailable(words)
            delta = arriving.take(ids[start:stop], logprobs[start:stop])
            if delta is not None:
                yield delta
        yield arriving.close()

    def _answer(self, prompt: Ids, sampling: SamplingParams, fault: Fault | None) -> _Answer:
        if fault is Fault.GARBAGE:
            raise EngineAnswerError("the script says that the answer is no JSON")
        given = self._script(prompt, sampling)
        sampled = items("the script's ids", given.ids if isinstance(given, Sampled) else given, EngineAnswerError)
        sampled = answered_ids(sampled, "ids", None).tolist()
        values = (
            items("the script's logprobs", given.logprobs, EngineAnswerError) if isinstance(given, Sampled) else None
        )
        values = [-1.0] * len(sampled) if values is None else values
        if len(values) != len(sampled):
            raise EngineAnswerError(f"the script returned {len(sampled)} ids with {len(values)} logprobs")
        ends = [at + 1 for at, one in enumerate(sampled) if one in sampling.stop_token_ids][:1]
        end = min([*ends, len(sampled), sampling.max_tokens])
        stops = bool(end) and (end in ends or end < sampling.max_tokens)
        sampled, values = sampled[:end], values[:end]
        if fault is Fault.WRONG_IDS:
            sampled[-1:] = [-1 if self._capabilities.vocab_size is None else self._capabilities.vocab_size]
        if fault is Fault.FEW_LOGPROBS:
            values = values[:-1]
        checked = answered_ids(sampled, "ids", self._capabilities.vocab_size)
        return _Answer(checked, answered_logprobs(values, checked, "logprobs"), stops)


def _merged(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours of one version as one."""
    merged: list[dict[str, Any]] = []
    for span in spans:
        if merged and merged[-1]["version"] == span["version"]:
            merged[-1] = merged[-1] | {"end": span["end"]}
        else:
            merged.append(span)
    return merged
