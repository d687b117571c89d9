"""What goes wrong with engines, for tests: a scripted engine that fails on request, and a gate for pieces."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from enum import StrEnum
from typing import Any, NamedTuple

from tokentrace.engines.answers import EngineReply
from tokentrace.engines.errors import EngineAnswerError, EngineError, EngineUnavailable
from tokentrace.engines.protocol import Completion, Delta, GenerateRequest, SamplingParams, collected
from tokentrace.engines.scripted import Script, ScriptedEngine
from tokentrace.tokens.tokenizer import Ids


class Fault(StrEnum):
    """What goes wrong with a request."""

    UNAVAILABLE = "unavailable"
    """It cannot be reached: `EngineUnavailable`."""
    DIES = "dies"
    """It ends after the first piece of a stream: `EngineError`. Where nothing was streamed: `EngineUnavailable`."""
    GARBAGE = "garbage"
    """Its answer is not JSON: `EngineAnswerError`."""
    FEW_LOGPROBS = "few_logprobs"
    """One logprob is missing: `EngineAnswerError`."""
    WRONG_IDS = "wrong_ids"
    """One id is outside of the vocabulary: `EngineAnswerError`."""


class Breaks(NamedTuple):
    """A request goes wrong in its middle: instead of the piece after so many, the error is raised."""

    after: int
    error: Exception


class Gate:
    """Lets the pieces of scripted completions pass one by one: ``ScriptedEngine(script, piece=1, latency=gate)``.

    It is closed at first. A test waits for requests in front of it (`waiting`), and lets pieces pass (`open`).
    """

    def __init__(self) -> None:
        self._allowed: float = 0
        self._before = 0
        self._changed = asyncio.Condition()

    async def __call__(self, count: int) -> None:
        async with self._changed:
            self._before += 1
            self._changed.notify_all()
            try:
                await self._changed.wait_for(lambda: self._allowed > 0)
                self._allowed -= 1
            finally:
                self._before -= 1

    async def open(self, pieces: float = math.inf) -> None:
        """Let so many more pieces pass, of whichever requests; without a number, all from now on."""
        async with self._changed:
            self._allowed += pieces
            self._changed.notify_all()

    async def waiting(self, requests: int = 1) -> None:
        """Wait until as many requests stand before the gate, and none may pass."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._before >= requests and not self._allowed)


class FaultyEngine(ScriptedEngine):
    """A scripted engine with `faults`: what goes wrong with the next requests, one each; None lets one pass."""

    def __init__(self, script: Script, **options: Any) -> None:
        super().__init__(script, **options)
        self.faults: deque[Fault | Breaks | None] = deque()
        self._current: list[Fault | Breaks | None] = []

    async def _generate(self, request: GenerateRequest) -> Completion:
        if self.faults and self.faults[0] is Fault.DIES:  # nothing of the answer has arrived
            self.faults[0] = Fault.UNAVAILABLE
        return await collected(FaultyEngine._stream(self, request))  # a test may wrap the methods of an object

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        fault: list[Fault | Breaks | None] = []
        self._current = fault  # from here to its answer a request runs in one go
        arrived = 0
        async with aclosing(super()._stream(request)) as pieces:
            async for piece in pieces:
                error = _error(fault[0], arrived, piece)
                if error is not None:
                    raise error
                arrived += 1
                yield piece

    def _answer(self, prompt: Ids, sampling: SamplingParams) -> EngineReply:
        fault = self.faults.popleft() if self.faults else None
        self._current.append(fault)
        if fault is Fault.UNAVAILABLE:
            raise EngineUnavailable("the script says that the engine cannot be reached")
        if fault is Fault.GARBAGE:
            raise EngineAnswerError("the script says that the answer is not JSON")
        reply = super()._answer(prompt, sampling)
        if fault is Fault.WRONG_IDS:
            size = self.capabilities.vocab_size
            return replace(reply, ids=[-1 if size is None else size, *reply.ids[1:]])
        return replace(reply, logprobs=[]) if fault is Fault.FEW_LOGPROBS else reply


def _error(fault: Fault | Breaks | None, arrived: int, piece: Delta) -> Exception | None:
    """What is raised in the place of a piece, after so many have arrived."""
    if isinstance(fault, Breaks):
        return fault.error if arrived == fault.after else None
    if fault is not Fault.DIES or (not arrived and piece.finish_reason is None):
        return None
    words = f"the script says that the engine died after {arrived} pieces had arrived"
    return EngineError(words) if arrived else EngineUnavailable(words)
