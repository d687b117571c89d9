"""Several endpoints as one engine, which keeps sessions together and avoids dead ones."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

from .errors import EngineError, EngineUnavailable, backoff
from .protocol import Capabilities, Completion, Delta, Engine, GenerateRequest, Weights, collected

_SHARED = ("aborts", "pauses", "versions", "structures", "seeds", "weights")
_REMEMBERED = 100_000
GROUP_LEAD = 16
"""How many more requests a group's endpoint may run than the idlest one."""


@dataclass(slots=True, eq=False)
class Circuit:
    """One endpoint of a router. While its circuit is open, it gets no requests."""

    engine: Engine
    name: str
    clock: Callable[[], float]
    running: int = 0
    started: int = 0
    """Requests so far: of equally busy endpoints, the one with fewer is next."""
    failed: int = 0
    failures: int = 0
    """Since it last answered."""
    open_until: float = 0.0

    @property
    def cooldown(self) -> float:
        """Seconds until the next request."""
        return max(0.0, self.open_until - self.clock())

    def fail(self) -> None:
        """Count a failure, once for all requests of an endpoint that dies."""
        if not self.cooldown:
            self.failures += 1
            self.failed += 1
            self.open_until = self.clock() + backoff(self.failures, 5.0, 300.0)

    def __str__(self) -> str:
        state = f"open for {self.cooldown:.0f} s" if self.cooldown else "closed"
        return f"{self.name} {state}" + (f", failures: {self.failed:,}" if self.failed else "")

    def described(self) -> dict[str, Any]:
        state = "open" if self.cooldown else "closed"
        return {"name": self.name, "state": state, "running": self.running, "failed": self.failed}


class Router(Engine):
    """Several engines that serve the same model, as one.

    Requests of a session go to one endpoint, those of a group too until `GROUP_LEAD` more run
    there than at the idlest one, others to the least busy one. If an endpoint is unavailable
    before its first token, the request and its session move. An endpoint that failed gets no
    requests for a while, unless all have failed.

    Raises EngineError if the engines differ in vocabulary or in the kind of their logprobs.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        names: Sequence[str] = (),
        clock: Callable[[], float] = monotonic,
    ) -> None:
        super().__init__(_agreed([engine.capabilities for engine in engines]))
        if names and len(names) != len(engines):
            raise EngineError(f"there are {len(names)} names for {len(engines)} engines")
        labels = names or [f"endpoint {number}" for number in range(len(engines))]
        self.circuits: Final = [Circuit(*pair, clock) for pair in zip(engines, labels, strict=True)]
        self._groups: Final[OrderedDict[str, Circuit]] = OrderedDict()
        self._homes: Final[OrderedDict[str, Circuit]] = OrderedDict()
        self.version = _common({one.version for one in engines})

    async def _generate(self, request: GenerateRequest) -> Completion:
        async def whole(engine: Engine) -> AsyncGenerator[Delta]:
            yield await engine._generate(request)

        return await collected(self._route(request, whole))

    def _stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        return self._route(request, lambda engine: engine._stream(request))

    async def _route(
        self, request: GenerateRequest, answer: Callable[[Engine], AsyncGenerator[Delta]]
    ) -> AsyncGenerator[Delta]:
        failures: list[EngineUnavailable] = []
        for endpoint in self._candidates(request):
            failed_before, is_answered = endpoint.failed, False
            if request.session is not None:
                _remember(self._homes, request.session, endpoint)
            endpoint.started += 1
            endpoint.running += 1
            try:
                async with aclosing(answer(endpoint.engine)) as deltas:
                    async for delta in deltas:
                        is_answered = True
                        endpoint.failures = 0
                        if endpoint.failed == failed_before:  # otherwise it failed after this was sent
                            endpoint.open_until = 0.0
                        yield delta
                return
            except EngineUnavailable as error:
                if is_answered:
                    raise
                endpoint.fail()
                failures.append(error)
            finally:
                endpoint.running -= 1
        raise _all_failed(failures)

    async def check(self) -> None:
        done = await asyncio.gather(*(one.engine.check() for one in self.circuits), return_exceptions=True)
        failures = [error for error in done if isinstance(error, EngineUnavailable)]
        if len(failures) == len(done):
            raise _all_failed(failures)

    async def abort(self, request_id: str) -> None:
        """End a request wherever it runs. Ignores endpoints that are unavailable."""
        await self._everywhere("abort", request_id, ignore=EngineUnavailable)

    async def pause(self) -> None:
        await self._everywhere("pause")

    async def resume(self) -> None:
        await self._everywhere("resume")

    async def update_weights(self, weights: Weights, *, version: str | int) -> None:
        await self._everywhere("update_weights", weights, version=version)

    async def set_version(self, version: str | int) -> None:
        await self._everywhere("set_version", version)

    async def reset_prefix_cache(self) -> None:
        await self._everywhere("reset_prefix_cache")

    async def close(self) -> None:
        await self._everywhere("close")

    async def _everywhere(
        self, method: str, *args: Any, ignore: type[Exception] | tuple[()] = (), **options: Any
    ) -> None:
        calls = (getattr(one.engine, method)(*args, **options) for one in self.circuits)
        done = await asyncio.gather(*calls, return_exceptions=True)
        pairs = zip(self.circuits, done, strict=True)
        problems = [
            f"{one.name}: {error}" for one, error in pairs if error and not isinstance(error, ignore)
        ]
        if problems:
            raise EngineError(f"{method} failed at {len(problems)} of {len(done)}: {'; '.join(problems)}")
        self.version = _common({one.engine.version for one in self.circuits})

    def _candidates(self, request: GenerateRequest) -> Iterator[Circuit]:
        """Yield each endpoint once, the best first, chosen when it is needed."""
        remaining = list(self.circuits)
        home = self._homes.get(request.session) if request.session is not None else None
        while remaining:
            awake = [one for one in remaining if not one.cooldown]
            if home is not None and home in awake:
                chosen = home
            elif awake:
                chosen = self._least_busy(awake, request.group)
            else:
                chosen = min(remaining, key=lambda one: one.open_until)
            remaining.remove(chosen)
            yield chosen

    def _least_busy(self, awake: Sequence[Circuit], group: str | None) -> Circuit:
        """The idlest endpoint, or the group's while that is not too far ahead."""
        chosen = min(awake, key=lambda one: (one.running, one.started))
        if group is not None:
            current = self._groups.get(group, chosen)
            if current in awake and current.running < chosen.running + GROUP_LEAD:
                chosen = current
            _remember(self._groups, group, chosen)
        return chosen


def _remember(homes: OrderedDict[str, Circuit], name: str, endpoint: Circuit) -> None:
    homes[name] = endpoint
    homes.move_to_end(name)
    if len(homes) > _REMEMBERED:
        homes.popitem(last=False)


def _agreed(engines: Sequence[Capabilities]) -> Capabilities:
    if not engines:
        raise EngineError("a router needs at least one engine")
    sizes = {one.vocab_size for one in engines if one.vocab_size is not None}
    kinds = {one.logprobs for one in engines}
    if len(sizes) > 1 or len(kinds) > 1:
        raise EngineError(
            f"the engines differ: vocabularies of {sorted(sizes)} ids, {sorted(kinds)} logprobs"
        )
    return Capabilities(
        engine="+".join(sorted({one.engine for one in engines})),
        version=_common({one.version for one in engines}),
        model=_common({one.model for one in engines}),
        max_length=min((one.max_length for one in engines if one.max_length is not None), default=None),
        vocab_size=next(iter(sizes), None),
        logprobs=engines[0].logprobs,
        top_logprobs=min(one.top_logprobs for one in engines),
        sampling=frozenset.intersection(*(one.sampling for one in engines)),
        **{name: all(getattr(one, name) for one in engines) for name in _SHARED},
    )


def _common(values: set[Any]) -> Any:
    return next(iter(values)) if len(values) == 1 else None


def _all_failed(failures: Sequence[EngineUnavailable]) -> EngineUnavailable:
    return EngineUnavailable(f"no endpoint answered: {'; '.join(map(str, failures))}")
