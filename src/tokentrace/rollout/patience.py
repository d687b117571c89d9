"""While its engine does not answer, a run waits and asks again, and continues or gives up.

One rollout asks the engine for a single token now and then, and the others wait. If the engine
answers this probe but not a rollout's request, the rollout ends after a few tries.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeVar

from ..engines.errors import EngineError, EngineUnavailable, backoff
from ..errors import InputError
from ..settings import limit

Answer = TypeVar("Answer")

_TRIES = 10


class EngineDown(EngineError):  # noqa: N818
    """The engine did not answer for longer than the run waits."""


class Patience:
    """How long a run waits for its engine: `seconds`; None waits forever.

    `notice` gets a text before each pause, and None when the engine answers again.
    """

    def __init__(
        self,
        seconds: float | None = 600.0,
        *,
        notice: Callable[[str | None], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        self.seconds: Final = limit("patience", seconds, zero=True, error=InputError)
        self._notice: Final = notice or (lambda _: None)
        self._clock, self._sleep = clock, sleep
        self._asking: Final = asyncio.Lock()
        self._rounds = 0
        """Of probing, that ended with an answer."""
        self._gave_up: EngineDown | None = None
        self.waited: float = 0.0

    async def ask(
        self,
        request: Callable[[], Awaitable[Answer]],
        probe: Callable[[], Awaitable[Any]],
        *,
        waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Answer:
        """The engine's answer to a request. `waiting` is entered between requests.

        Raises EngineUnavailable if the engine answers only probes, EngineDown if it is away.
        """
        problem, rounds = EngineUnavailable(), -1
        for _ in range(_TRIES):
            with waiting():
                async with self._asking:  # another rollout may be probing
                    if rounds == self._rounds:
                        await self._outlast(problem, probe)
                        self._rounds += 1
            rounds = self._rounds
            try:
                return await request()
            except EngineUnavailable as error:
                problem = error
        raise problem

    async def _outlast(self, error: EngineUnavailable, probe: Callable[[], Awaitable[Any]]) -> None:
        """Probe the engine until it answers. Raises EngineDown."""
        began, before, failures = self._clock(), self.waited, 0
        while self._gave_up is None:
            try:
                await probe()
                break
            except EngineUnavailable as again:
                error = again
            except EngineError:  # it answers
                break
            failures += 1
            waited = self._clock() - began
            remaining = math.inf if self.seconds is None else self.seconds - waited
            if remaining <= 0:
                self._gave_up = EngineDown(f"the engine did not answer for {waited:.0f} s: {error}")
                break
            pause = min(backoff(failures, 1.0, 30.0), remaining)
            stops = f", the run stops in {remaining:.0f} s" if remaining < math.inf else ""
            text = f"no engine answers, and all rollouts wait: asking again in {pause:.0f} s{stops}"
            self._notice(f"{text}; {error}")
            await self._sleep(pause)
            self.waited = before + self._clock() - began
        if self._gave_up is not None:
            raise self._gave_up
        if failures:
            self._notice(None)
