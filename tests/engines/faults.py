"""Engine faults for tests: a scripted engine that fails on demand, and a gate for pieces."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple

from tokentrace.engines.errors import EngineAnswerError, EngineError, EngineUnavailable
from tokentrace.engines.protocol import Delta, GenerateRequest
from tokentrace.engines.scripted import Script, ScriptedEngine


class Fault(NamedTuple):
    """A request that fails: after `after` pieces, the error is raised."""

    error: type[EngineError]
    after: int = 0


UNAVAILABLE, GARBAGE = Fault(EngineUnavailable), Fault(EngineAnswerError)


class Gate:
    """A gate for pieces of scripted completions, closed at first: ``ScriptedEngine(script, piece=1, latency=gate)``."""

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
        """Let this many more pieces of any request pass; by default, all from now on."""
        async with self._changed:
            self._allowed += pieces
            self._changed.notify_all()

    async def waiting(self, requests: int = 1) -> None:
        """Wait until at least this many requests are blocked at the gate."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._before >= requests and not self._allowed)


class FaultyEngine(ScriptedEngine):
    """A scripted engine whose `faults` apply to the next requests, one each; None means no fault."""

    def __init__(self, script: Script, **options: Any) -> None:
        super().__init__(script, **options)
        self.faults: deque[Fault | None] = deque()

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        fault, pieces = self.faults.popleft() if self.faults else None, 0
        async with aclosing(super()._stream(request)) as deltas:
            async for delta in deltas:
                if fault is not None and pieces == fault.after:
                    raise fault.error(f"the script says so, after {pieces} pieces")
                pieces += 1
                yield delta
