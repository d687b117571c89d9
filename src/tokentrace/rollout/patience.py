"""What a run does while its engine does not answer: it waits, asks again, and goes on; or its patience runs out.

A request that failed with `EngineUnavailable` has sampled nothing, so it can be sent again as it was. All rollouts of a
run share one `Patience`: one of them asks the engine for a single token now and then, the others wait for what it
finds. An engine that answers that, but not the request, is not down: the request is at fault, and after a few tries
the rollout that made it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from ..engines.protocol import EngineError, EngineUnavailable
from ..errors import InputError
from ..settings import limit
from .checks import count

Answer = TypeVar("Answer")

_OUTAGES: Final = 10
"""A request that fails in this many outages is taken to be their cause."""


class EngineDown(EngineError):  # noqa: N818
    """The engine, or the last node of a cluster, was gone for longer than the run waits. What is finished is kept."""


@dataclass(frozen=True, slots=True)
class Outage:
    """An engine that does not answer, as of now."""

    reason: str
    waited: float
    """Seconds since it was found out."""
    pause: float
    """Seconds until it is asked again."""
    left: float | None
    """Seconds until the run stops; None: never."""
    problem: str = "the engine does not answer"

    def __str__(self) -> str:
        stops = "" if self.left is None else f", the run stops in {self.left:.0f} s"
        again = f"asking again in {self.pause:.0f} s{stops}"
        return f"{self.problem}, and all rollouts wait: {again}; {self.reason}"


class Patience:
    """How long a run waits for its engine, and how often it asks. One for each run.

    `seconds` is how long an engine may be down before `EngineDown` stops the run; None is forever. It is asked at
    once, then after `pause` seconds, twice as long each time up to `longest_pause`. `notice` is called with an `Outage`
    before each pause, and with None when the engine answers again. `tries` is how often a request may fail while the
    engine answers others, before its rollout ends.
    """

    def __init__(
        self,
        seconds: float | None = 600.0,
        *,
        pause: float = 1.0,
        longest_pause: float = 30.0,
        tries: int = 3,
        notice: Callable[[Outage | None], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        self.seconds: Final = limit("patience", seconds, zero=True, error=InputError)
        self._pause: Final = limit("pause", pause, error=InputError) or 0.0
        self._longest: Final = limit("longest_pause", longest_pause, error=InputError) or 0.0
        self._tries: Final = count("tries", tries)
        self._notice: Final = notice or (lambda _: None)
        self._clock: Final = clock
        self._sleep: Final = sleep
        self._asking: Final = asyncio.Lock()
        self._over = 0
        """How many times it was asked until it answered."""
        self._was_down = False
        self._gave_up: EngineDown | None = None
        self.waited: float = 0.0
        """Seconds that the run has waited in all."""

    async def ask(
        self,
        request: Callable[[], Awaitable[Answer]],
        probe: Callable[[], Awaitable[Any]],
        *,
        waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Answer:
        """What the engine answers to a request, however long it is down before.

        `probe` asks it for as little as can be; `waiting` is entered for as long as the request is not under way.
        `EngineUnavailable` where the engine answers probes and not the request, `EngineDown` where it does not answer
        for too long.
        """
        refused = outages = 0
        while True:
            if self._asking.locked():
                with waiting():
                    await self._outlasted(self._over, None, probe)
            over = self._over
            try:
                return await request()
            except EngineUnavailable as error:
                with waiting():
                    was_down = await self._outlasted(over, error, probe)
                refused, outages = (refused, outages + 1) if was_down else (refused + 1, outages)
                if refused >= self._tries or outages >= _OUTAGES:
                    raise

    async def _outlasted(self, over: int, error: EngineUnavailable | None, probe: Callable[[], Awaitable[Any]]) -> bool:
        """Wait until the engine answers: the first to come asks, the others wait. Returns whether it was down."""
        async with self._asking:
            if self._gave_up is not None:
                raise EngineDown(str(self._gave_up))
            if error is not None and over == self._over:
                began = self._clock()
                try:
                    self._was_down = await self._ask_until(error, probe, began)
                finally:
                    self.waited += self._clock() - began
                self._over += 1
            return self._was_down

    async def _ask_until(self, error: EngineUnavailable, probe: Callable[[], Awaitable[Any]], began: float) -> bool:
        """Ask until there is an answer. Whether there was none at first."""
        pause = 0.0
        while True:
            try:
                await probe()
            except EngineUnavailable as again:
                error = again
            except EngineError:  # it answers, if oddly
                break
            else:
                break
            waited = self._clock() - began
            left = None if self.seconds is None else self.seconds - waited
            if left is not None and left <= 0:
                self._gave_up = EngineDown(f"the engine did not answer for {waited:.0f} s: {error}")
                raise self._gave_up from error
            pause = min(pause * 2 or self._pause, self._longest)
            pause = pause if left is None else min(pause, left)
            self._notice(Outage(str(error), waited, pause, left))
            await self._sleep(pause)
        if pause:
            self._notice(None)
        return bool(pause)
