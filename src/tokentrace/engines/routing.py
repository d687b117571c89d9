"""Several endpoints as one engine: sessions stay where their prefix is cached, requests go round what is down."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from time import monotonic
from typing import Any, Final

from .protocol import (
    Capabilities,
    Completion,
    Delta,
    Engine,
    EngineError,
    EngineUnavailable,
    GenerateRequest,
    Weights,
)

_ALL_CAN: Final = ("streams", "aborts", "pauses", "versions", "structures", "seeds", "weights")
GROUP_LEAD: Final = 16
"""By how many requests the endpoint of a group may be ahead of the one where the fewest run."""


class CircuitState(StrEnum):
    """Whether requests go to an endpoint."""

    CLOSED = "closed"
    """They do."""
    OPEN = "open"
    """It failed and is left alone for a while."""
    HALF_OPEN = "half-open"
    """It failed and was left alone: the next request finds out whether it answers again."""


@dataclass(frozen=True, slots=True)
class Circuit:
    """What a router knows of one of its endpoints, as of now."""

    name: str
    state: CircuitState
    running: int
    """Requests under way there."""
    failed: int
    """How often it was found not to answer, all in all; requests that fail together are one."""
    rests: float
    """Seconds for which it is still left alone."""

    def __str__(self) -> str:
        rests = f" for {self.rests:.0f} s" if self.state is CircuitState.OPEN else ""
        failed = f", failed {self.failed:,} time{'s' if self.failed > 1 else ''}" if self.failed else ""
        return f"{self.name} {self.state}{rests}{failed}"

    def described(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {"name": self.name, "state": str(self.state), "running": self.running, "failed": self.failed}


@dataclass(slots=True, eq=False)
class _Endpoint:
    engine: Engine
    number: int
    name: str
    running: int = 0
    sessions: int = 0
    failed: int = 0
    """How often it failed, all in all."""
    failures: int = 0
    """How often it failed since it last answered."""
    resting_until: float = 0.0


class Router(Engine):
    """Engines that serve the same model, as one.

    Requests of a session go where its first went, as long as that endpoint answers; other requests go where the fewest
    are running. A request that no token was accepted of (`EngineUnavailable`) is sent to another endpoint, and its
    session moves there. An endpoint that failed is left alone for `rest` seconds, twice as long with each further
    failure up to `longest_rest`, unless no other answers: before a request is lost, all are tried, once.

    Requests of a group begin with the same prompt, which an engine reads once for all of them where they come to it
    together. So they go where the first of them went, until `group_lead` more run there than where the fewest do; then
    the group moves there. A group can so bring one endpoint ahead of the others, but never by more.

    `names` are what `circuits` calls the endpoints: addresses without passwords; numbers where there are none.

    `EngineError` where the engines differ in vocabulary or in the kind of their logprobs: rows of both could not be
    told apart.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        rest: float = 5.0,
        longest_rest: float = 300.0,
        sessions: int = 100_000,
        group_lead: int = GROUP_LEAD,
        names: Sequence[str] = (),
        clock: Callable[[], float] = monotonic,
    ) -> None:
        super().__init__(_agreed([engine.capabilities for engine in engines]))
        if names and len(names) != len(engines):
            raise EngineError(f"there are {len(names)} names for {len(engines)} engines")
        called = list(names) or [f"endpoint {number}" for number in range(len(engines))]
        self._endpoints: Final = [
            _Endpoint(engine, number, name) for number, (engine, name) in enumerate(zip(engines, called, strict=True))
        ]
        self._rest: Final = rest
        self._longest_rest: Final = longest_rest
        self._most_sessions: Final = sessions
        self._clock: Final = clock
        self._group_lead: Final = group_lead
        self._groups: Final[OrderedDict[str, _Endpoint]] = OrderedDict()
        self._homes: Final[OrderedDict[str, _Endpoint]] = OrderedDict()
        self._requests: Final[dict[str, _Endpoint]] = {}
        self._take_version()

    def __repr__(self) -> str:
        return f"Router({', '.join(map(str, self.circuits))})"

    @property
    def circuits(self) -> list[Circuit]:
        """Which endpoints are asked, and which are left alone."""
        now = self._clock()
        found = []
        for one in self._endpoints:
            rests = max(0.0, one.resting_until - now)
            state = CircuitState.OPEN if rests else CircuitState.HALF_OPEN if one.failures else CircuitState.CLOSED
            found.append(Circuit(one.name, state, one.running, one.failed, rests))
        return found

    async def _generate(self, request: GenerateRequest) -> Completion:
        failures: list[EngineUnavailable] = []
        for endpoint in self._candidates(request):
            with self._attempt(endpoint, request, failures) as answered:
                completion = await endpoint.engine.generate(request.prompt_ids, request.sampling, **_options(request))
                answered()
                return completion
        raise _all_failed(failures)

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """After the first piece, nothing is sent elsewhere."""
        failures: list[EngineUnavailable] = []
        for endpoint in self._candidates(request):
            with self._attempt(endpoint, request, failures) as answered:
                deltas = endpoint.engine.stream(request.prompt_ids, request.sampling, **_options(request))
                async with aclosing(deltas):
                    async for delta in deltas:
                        answered()
                        yield delta
                return
        raise _all_failed(failures)

    async def check(self) -> None:
        """Raise `EngineUnavailable` unless one of the endpoints answers."""
        done = await asyncio.gather(*(one.engine.check() for one in self._endpoints), return_exceptions=True)
        failures = [error for error in done if isinstance(error, EngineUnavailable)]
        if len(failures) == len(done):
            raise _all_failed(failures)

    async def abort(self, request_id: str) -> None:
        """End a request where it runs; one that is not known here, wherever it may run."""
        endpoint = self._requests.get(request_id)
        if endpoint is not None:
            await endpoint.engine.abort(request_id)
            return
        await self._everywhere("abort", lambda engine: engine.abort(request_id), but=EngineUnavailable)

    async def pause(self) -> None:
        """Pause all. `EngineError` names those that were not; the others stay paused."""
        await self._everywhere("pause", lambda engine: engine.pause())

    async def resume(self) -> None:
        """Resume all. `EngineError` names those that were not."""
        await self._everywhere("resume", lambda engine: engine.resume())

    async def update_weights(self, weights: Weights, *, version: str | int) -> None:
        """Give all the same weights. `version` is the router's once all have it.

        `EngineError` names those that did not take them. The others have: which weights sampled what is told by each
        completion, until the update is asked for again.
        """
        await self._everywhere("update_weights", lambda engine: engine.update_weights(weights, version=version))
        self._take_version()

    async def set_version(self, version: str | int) -> None:
        """As `update_weights`, where somebody else has changed the weights of all."""
        await self._everywhere("set_version", lambda engine: engine.set_version(version))
        self._take_version()

    async def reset_prefix_cache(self) -> None:
        await self._everywhere("reset_prefix_cache", lambda engine: engine.reset_prefix_cache())

    def _take_version(self) -> None:
        self.version = _one({one.engine.version for one in self._endpoints})

    async def close(self) -> None:
        await self._everywhere("close", lambda engine: engine.close())

    def forget(self, session: str) -> None:
        """Let go of where a session went: it is over."""
        home = self._homes.pop(session, None)
        if home is not None:
            home.sessions -= 1

    async def _everywhere(
        self, what: str, act: Callable[[Engine], Awaitable[None]], *, but: type[Exception] | tuple[()] = ()
    ) -> None:
        done = await asyncio.gather(*(act(one.engine) for one in self._endpoints), return_exceptions=True)
        failed = [(at, error) for at, error in enumerate(done) if error is not None and not isinstance(error, but)]
        problems = [f"{self._endpoints[at].name}: {error}" for at, error in failed]
        if problems:
            raise EngineError(f"{what} failed at {len(problems)} of {len(done)}: {'; '.join(problems)}")

    def _candidates(self, request: GenerateRequest) -> Iterator[_Endpoint]:
        """The endpoints in the order in which to try them, each once; chosen when it is its turn."""
        left = list(self._endpoints)
        session, group = request.session, request.group
        home = self._homes.get(session) if session is not None else None
        while left:
            now = self._clock()
            awake = [one for one in left if one.resting_until <= now]
            if home is not None and home in awake:
                chosen = home
            elif awake:
                idlest = min(awake, key=lambda one: (one.running, one.sessions, one.number))
                chosen = idlest if group is None else self._of_group(group, awake, idlest)
            else:
                chosen = min(left, key=lambda one: one.resting_until)
            left.remove(chosen)
            yield chosen

    def _of_group(self, group: str, awake: Sequence[_Endpoint], idlest: _Endpoint) -> _Endpoint:
        """Where the group is, while it has room; else the endpoint where the fewest requests run."""
        found = self._groups.get(group, idlest)
        chosen = found if found in awake and found.running < idlest.running + self._group_lead else idlest
        self._groups[group] = chosen
        self._groups.move_to_end(group)
        if len(self._groups) > self._most_sessions:
            self._groups.popitem(last=False)
        return chosen

    @contextmanager
    def _attempt(
        self, endpoint: _Endpoint, request: GenerateRequest, failures: list[EngineUnavailable]
    ) -> Iterator[Callable[[], None]]:
        """A request under way at an endpoint, which calls what it is given once it is answered.

        An endpoint that is unavailable before that is put among the failures: the next may be tried.
        """
        known, began = endpoint.failed, False
        session, name = request.session, request.request_id

        def answered() -> None:
            nonlocal began
            began = True
            endpoint.failures = 0
            if endpoint.failed == known:  # else it failed after this was asked, and rests on
                endpoint.resting_until = 0.0

        if session is not None:
            self._settle(session, endpoint)
        if name is not None:
            self._requests[name] = endpoint
        endpoint.running += 1
        try:
            yield answered
        except EngineUnavailable as error:
            if began:
                raise
            self._failed(endpoint)
            failures.append(error)
        finally:
            endpoint.running -= 1
            if name is not None and self._requests.get(name) is endpoint:
                del self._requests[name]

    def _settle(self, session: str, endpoint: _Endpoint) -> None:
        if self._homes.get(session) is not endpoint:
            self.forget(session)
            endpoint.sessions += 1
        self._homes[session] = endpoint
        self._homes.move_to_end(session)
        if len(self._homes) > self._most_sessions:
            self.forget(next(iter(self._homes)))

    def _failed(self, endpoint: _Endpoint) -> None:
        if endpoint.resting_until > self._clock():  # all requests under way fail when it dies: that is one failure
            return
        rest = min(self._rest * 2**endpoint.failures, self._longest_rest)
        endpoint.failures += 1
        endpoint.failed += 1
        endpoint.resting_until = self._clock() + rest


def _options(request: GenerateRequest) -> dict[str, Any]:
    found = {"request_id": request.request_id, "session": request.session, "wire": request.wire}
    return found if request.group is None else found | {"group": request.group}


def _agreed(found: Sequence[Capabilities]) -> Capabilities:
    """What all of them can do; the smallest `max_length`."""
    if not found:
        raise EngineError("a router needs at least one engine")
    sizes = {one.vocab_size for one in found if one.vocab_size is not None}
    if len(sizes) > 1:
        raise EngineError(f"the engines have vocabularies of {sorted(sizes)} ids")
    kinds = {one.logprobs for one in found}
    if len(kinds) > 1:
        raise EngineError(f"the engines return logprobs of different kinds: {', '.join(sorted(kinds))}")
    first = found[0]
    return Capabilities(
        engine="+".join(sorted({one.engine for one in found})),
        version=_one({one.version for one in found}),
        model=_one({one.model for one in found}),
        max_length=min((one.max_length for one in found if one.max_length is not None), default=None),
        vocab_size=next(iter(sizes), None),
        logprobs=first.logprobs,
        top_logprobs=min(one.top_logprobs for one in found),
        sampling=frozenset.intersection(*(one.sampling for one in found)),
        **{name: all(getattr(one, name) for one in found) for name in _ALL_CAN},
    )


def _one(values: set[Any]) -> Any:
    """What all agree on; None where they do not."""
    return next(iter(values)) if len(values) == 1 else None


def _all_failed(failures: Sequence[EngineUnavailable]) -> EngineUnavailable:
    return EngineUnavailable(f"no endpoint answered: {'; '.join(map(str, failures))}")


def circuits_of(engine: Engine) -> list[Circuit]:
    """The circuits of a router; none for an engine alone."""
    return engine.circuits if isinstance(engine, Router) else []
