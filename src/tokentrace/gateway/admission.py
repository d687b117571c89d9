"""Which requests may run: concurrency, session budgets, pause and drain."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from ..store.store import State
from .dialect import Head, Reply
from .requests import RequestError
from .sessions import LiveSession, Sessions

Answered = tuple[Head, Sequence[Reply]]


@dataclass(frozen=True, slots=True)
class Limits:
    body_bytes: int = 64 * 2**20
    max_tokens: int = 32_768
    concurrent: int = 512
    waiting: int = 2_048


@dataclass(slots=True, eq=False)
class Claim:
    """An admitted request. Whoever gets it must `end` it."""

    admission: Admission
    session_id: str
    key: tuple[str, str] | None = None
    """Requests of this session and name wait for its answer."""

    def take(self, name: str) -> None:
        self.key = (self.session_id, name)
        self.admission.under_way[self.key] = asyncio.get_running_loop().create_future()

    def end(self, answered: Answered | None = None) -> None:
        """Pass the answer to waiting requests. Without one, one of them samples."""
        self.admission.claims.discard(self)
        self.admission.ended.set()
        if self.key is not None:
            self.admission.under_way.pop(self.key).set_result(answered)
            self.key = None


@dataclass(slots=True)
class Admission:
    sessions: Sessions
    limits: Limits
    draining: bool = False
    in_flight: int = 0
    claims: set[Claim] = field(default_factory=set)
    under_way: dict[tuple[str, str], asyncio.Future[Answered | None]] = field(default_factory=dict)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    running: asyncio.Event = field(default_factory=asyncio.Event)
    _slots: asyncio.Semaphore = field(init=False)
    _turns: Counter[str] = field(default_factory=Counter)
    _tokens: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.limits.concurrent)
        self.running.set()

    @property
    def waiting(self) -> int:
        return len(self.claims) - self.in_flight

    @property
    def paused(self) -> bool:
        return not self.running.is_set()

    def admit(self, session_id: str) -> Claim:
        if self.draining:
            raise RequestError("the gateway is shutting down", status=503, code="draining", retry=5)
        if len(self.claims) >= self.limits.concurrent + self.limits.waiting:
            raise RequestError("too many requests are waiting", status=429, code="overloaded", retry=1)
        claim = Claim(self, session_id)
        self.claims.add(claim)
        return claim

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        while True:
            await self.running.wait()
            await self._slots.acquire()
            if not self.paused:
                break
            self._slots.release()  # it was paused while this request waited
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            self._slots.release()
            self.ended.set()

    @contextlib.asynccontextmanager
    async def budget(self, id: str, turns: int, max_tokens: int) -> AsyncIterator[int]:
        """Reserve turns and tokens once there are enough. Yields the most per turn."""
        while True:
            live = self.sessions.live.get(id) or await self.sessions.get(id)
            self.check_open(live, turns)
            tokens, settings = max_tokens, live.settings
            limit, most = settings.max_sampled_tokens, settings.max_turns
            if limit is not None:
                tokens = min(tokens, (limit - live.info.sampled - self._tokens[id]) // turns)
            if tokens > 0 and (most is None or live.info.turns + self._turns[id] + turns <= most):
                break
            self.ended.clear()
            await self.ended.wait()
        self._turns[id] += turns
        self._tokens[id] += turns * tokens
        try:
            yield tokens
        finally:
            self._turns[id] -= turns
            self._tokens[id] -= turns * tokens
            if not self._turns[id]:
                del self._turns[id], self._tokens[id]

    def check_open(self, live: LiveSession, turns: int = 1) -> None:
        info, limit = live.info, live.settings.max_sampled_tokens
        if info.state is not State.OPEN:
            problem = f"session {info.id} is {info.state}: no turn can be added"
            raise RequestError(problem, status=409, code="closed")
        budgets = (("turns", live.settings.max_turns, info.turns), ("tokens", limit, info.sampled))
        for what, most, used in budgets:
            if most is not None and most - used < turns:
                asked = f"n={turns}: " if turns > 1 else ""
                problem = f"{asked}session {info.id} has {max(0, most - used)} of its {most} {what} left"
                raise RequestError(problem, status=403, code="budget_exhausted")

    async def drain(self, seconds: float | None = None) -> bool:
        """Admit no more, and wait for the others. True if none is running."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.until(lambda: not self.in_flight and (self.paused or not self.claims))
        return not self.in_flight

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.ended.clear()
            await self.ended.wait()
