"""Several endpoints as one: affinity, load, failover, what must agree."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.engines.faults import Fault, FaultyEngine
from tokentrace.engines.protocol import (
    Capabilities,
    Engine,
    EngineError,
    EngineRefusal,
    EngineUnavailable,
    FinishReason,
    LogprobKind,
    SamplingParams,
    collected,
)
from tokentrace.engines.routing import CircuitState, Router, circuits_of

SAMPLING = SamplingParams(4)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def endpoints(count: int = 3, **options: Any) -> list[FaultyEngine]:
    return [FaultyEngine(lambda prompt, sampling, at=at: [at] * 4, **options) for at in range(count)]


async def ask(router: Engine, session: str | None = None, **options: Any) -> int:
    return int((await router.generate([1, 2], SAMPLING, session=session, **options)).ids[0])


def test_a_session_stays_where_it_began() -> None:
    async def run() -> None:
        router = Router(endpoints())
        homes = {name: await ask(router, name) for name in "abcdef"}
        assert sorted(homes.values()) == [0, 0, 1, 1, 2, 2], "new sessions are spread"
        for _ in range(3):
            for name, home in homes.items():
                assert await ask(router, name) == home
                assert (await collected(router.stream([1], SAMPLING, session=name))).ids[0] == home

    asyncio.run(run())


def test_new_requests_go_where_the_fewest_run() -> None:
    async def run() -> None:
        gates = [asyncio.Event() for _ in range(3)]

        def slow(at: int) -> Any:
            async def wait(count: int) -> None:
                await gates[at].wait()

            return wait

        engines = [FaultyEngine(lambda p, s, at=at: [at] * 4, latency=slow(at)) for at in range(3)]
        router = Router(engines)
        tasks = [asyncio.create_task(ask(router)) for _ in range(6)]
        await asyncio.sleep(0)
        assert [len(engine.requests) for engine in engines] == [2, 2, 2]
        gates[1].set()
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(tasks[1], tasks[4])
        assert await ask(router) == 1
        for gate in gates:
            gate.set()
        assert sorted(await asyncio.gather(*tasks)) == [0, 0, 1, 1, 2, 2]

    asyncio.run(run())


@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_that_was_not_accepted_goes_elsewhere_and_its_session_stays_there(streamed: bool) -> None:
    async def once(router: Router) -> int:
        if streamed:
            return int((await collected(router.stream([1, 2], SAMPLING, session="s"))).ids[0])
        return await ask(router, "s")

    async def run() -> None:
        engines = endpoints()
        clock = Clock()
        router = Router(engines, rest=5.0, clock=clock)
        assert await once(router) == 0
        engines[0].faults.append(Fault.UNAVAILABLE)
        assert await once(router) == 1
        clock.now = 100.0
        assert await once(router) == 1, "its prefix is cached there now"

    asyncio.run(run())


def test_an_endpoint_that_failed_is_left_alone_and_longer_each_time() -> None:
    async def run() -> None:
        engines, clock = endpoints(2), Clock()
        router = Router(engines, rest=5.0, longest_rest=8.0, clock=clock)
        for rest in (5.0, 8.0, 8.0):
            engines[0].faults.append(Fault.UNAVAILABLE)
            before = len(engines[0].requests)
            assert await ask(router) == 1
            clock.now += rest - 0.1
            assert await ask(router) == 1
            assert len(engines[0].requests) == before + 1
            clock.now += 0.2
        assert await ask(router) == 0
        engines[0].faults.append(Fault.UNAVAILABLE)
        assert await ask(router) == 1
        clock.now += 5.1
        assert await ask(router) == 0, "it had answered in between: the rest is short again"

    asyncio.run(run())


class Dying(FaultyEngine):
    """Dies with all requests under way, when it is told to."""

    def __init__(self) -> None:
        super().__init__(lambda prompt, sampling: [0] * 4)
        self.dead = asyncio.Event()
        self.asked = 0

    async def generate(self, *args: Any, **options: Any) -> Any:
        self.asked += 1
        await self.dead.wait()
        raise EngineUnavailable("dead")


def test_requests_that_fail_at_once_are_one_failure() -> None:
    async def run() -> None:
        dying, clock = Dying(), Clock()
        router = Router([dying, *endpoints(2)[1:]], rest=5.0, longest_rest=1000.0, clock=clock)
        for name in "abcdefgh":
            router._settle(name, router._endpoints[0])
        tasks = [asyncio.create_task(ask(router, name)) for name in "abcdefgh"]
        await asyncio.sleep(0)
        dying.dead.set()
        assert await asyncio.gather(*tasks) == [1] * 8
        assert dying.asked == 8
        clock.now = 5.1
        await ask(router)
        assert dying.asked == 9, "it is tried again after one rest, not after eight"

    asyncio.run(run())


def test_a_session_that_moved_counts_where_it_is() -> None:
    async def run() -> None:
        engines, clock = endpoints(2), Clock()
        router = Router(engines, clock=clock)
        assert [await ask(router, name) for name in "ab"] == [0, 1]
        engines[1].faults.append(Fault.UNAVAILABLE)
        assert await ask(router, "b") == 0
        clock.now = 100.0
        assert [await ask(router, name) for name in "cd"] == [1, 1]

    asyncio.run(run())


def test_an_engine_that_is_unavailable_after_its_first_piece_is_an_error() -> None:
    class Halfway(FaultyEngine):
        async def stream(self, *args: Any, **options: Any) -> Any:
            async for delta in super().stream(*args, **options):
                yield delta
                raise EngineUnavailable("gone")

    async def run() -> None:
        other = endpoints(1)[0]
        with pytest.raises(EngineUnavailable, match="gone"):
            await collected(Router([Halfway(lambda p, s: [1, 2], piece=1), other]).stream([1], SAMPLING))
        assert not other.requests

    asyncio.run(run())


def test_before_a_request_is_lost_every_endpoint_is_tried_once() -> None:
    async def run() -> None:
        engines, clock = endpoints(3), Clock()
        router = Router(engines, clock=clock)
        for engine in engines:
            engine.faults.append(Fault.UNAVAILABLE)
        with pytest.raises(EngineUnavailable, match=r"no endpoint answered: .*;.*;"):
            await ask(router)
        assert [len(engine.requests) for engine in engines] == [1, 1, 1]
        assert await ask(router) == 0, "all rest, and one is tried all the same"

    asyncio.run(run())


@pytest.mark.parametrize("fault", [Fault.GARBAGE, Fault.FEW_LOGPROBS, Fault.WRONG_IDS])
def test_what_was_accepted_goes_nowhere_else(fault: Fault) -> None:
    async def run() -> None:
        engines = endpoints()
        engines[0].faults.append(fault)
        with pytest.raises(EngineError):
            await ask(Router(engines))
        assert [len(engine.requests) for engine in engines] == [1, 0, 0]

    asyncio.run(run())


def test_a_stream_that_died_after_its_first_piece_goes_nowhere_else() -> None:
    async def run() -> None:
        engines = endpoints(2, piece=1)
        engines[0].faults.append(Fault.DIES)
        router = Router(engines)
        with pytest.raises(EngineError, match="died after 1 pieces"):
            await collected(router.stream([1], SAMPLING))
        assert [len(engine.requests) for engine in engines] == [1, 0]

    asyncio.run(run())


def test_refusals_are_the_callers() -> None:
    engines = endpoints(2, max_length=5)
    with pytest.raises(EngineRefusal):
        asyncio.run(Router(engines).generate([1, 2], SAMPLING))


def test_pause_resume_and_abort_reach_all() -> None:
    async def run() -> None:
        engines = endpoints(3, piece=1)
        router = Router(engines)
        await router.pause()
        tasks = [asyncio.create_task(router.generate([1], SAMPLING, request_id=f"r{at}")) for at in range(3)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)
        await router.abort("r1")
        await router.abort("nobody knows")
        await router.resume()
        done = await asyncio.gather(*tasks)
        assert [one.finish_reason for one in done] == [FinishReason.LENGTH, FinishReason.ABORT, FinishReason.LENGTH]
        await router.close()

    asyncio.run(run())


def test_a_pause_that_did_not_reach_all_is_an_error() -> None:
    class Unpausable(FaultyEngine):
        async def pause(self) -> None:
            raise EngineUnavailable("gone")

        async def abort(self, request_id: str) -> None:
            raise EngineUnavailable("gone")

    async def run() -> None:
        router = Router([*endpoints(1), Unpausable(lambda prompt, sampling: [1])])
        with pytest.raises(EngineError, match="pause failed at 1 of 2: endpoint 1: gone"):
            await router.pause()
        await router.abort("unknown")

    asyncio.run(run())


def test_sessions_are_forgotten() -> None:
    async def run() -> None:
        router = Router(endpoints(2), sessions=2)
        assert [await ask(router, name) for name in "abc"] == [0, 1, 0]
        router.forget("b")
        router.forget("never seen")
        assert await ask(router, "d") == 1

    asyncio.run(run())


# -- what must agree


class Said(FaultyEngine):
    def __init__(self, capabilities: Capabilities) -> None:
        super().__init__(lambda prompt, sampling: [1])
        self.capabilities = capabilities


FULL = Capabilities("vllm", "1", "tiny", 4096, 1024, LogprobKind.PROCESSED, True, True, True, True, structures=True)


def agreed(*changes: dict[str, Any]) -> Capabilities:
    return Router([Said(replace(FULL, **change)) for change in changes]).capabilities


def test_capabilities_are_those_of_all() -> None:
    assert agreed({}, {}) == FULL
    assert agreed({"max_length": 100}, {}, {"max_length": None}).max_length == 100
    assert agreed({"vocab_size": None}, {}).vocab_size == 1024
    assert agreed({"engine": "sglang", "version": "2", "model": "b"}, {}) == replace(
        FULL, engine="sglang+vllm", version=None, model=None
    )
    assert agreed({"top_logprobs": 20}, {"top_logprobs": 5}).top_logprobs == 5
    for name in ("streams", "aborts", "pauses", "versions", "structures"):
        assert not getattr(agreed({}, {name: False}), name)


def test_engines_whose_rows_could_not_be_told_apart_are_refused() -> None:
    with pytest.raises(EngineError, match=r"vocabularies of \[1000, 1024\]"):
        agreed({}, {"vocab_size": 1000})
    with pytest.raises(EngineError, match="different kinds: processed, raw"):
        agreed({}, {"logprobs": LogprobKind.RAW})
    with pytest.raises(EngineError, match="different kinds: processed, unknown"):
        agreed({}, {"logprobs": LogprobKind.UNKNOWN})
    with pytest.raises(EngineError, match="at least one"):
        agreed()


def test_circuits_say_which_endpoints_are_left_alone() -> None:
    async def run() -> None:
        clock = Clock()
        engines = endpoints(2)
        router = Router(engines, rest=5, clock=clock, names=["http://a", "http://b"])

        def states() -> list[CircuitState]:
            return [one.state for one in router.circuits]

        assert states() == [CircuitState.CLOSED, CircuitState.CLOSED]
        engines[0].faults.append(Fault.UNAVAILABLE)
        assert await ask(router) == 1
        assert states() == [CircuitState.OPEN, CircuitState.CLOSED]
        assert list(map(str, router.circuits)) == ["http://a open for 5 s, failed 1 time", "http://b closed"]
        clock.now = 6
        assert states() == [CircuitState.HALF_OPEN, CircuitState.CLOSED]
        assert await ask(router) == 0
        assert states() == [CircuitState.CLOSED, CircuitState.CLOSED]
        assert router.circuits[0].described() == {"name": "http://a", "state": "closed", "running": 0, "failed": 1}
        assert circuits_of(engines[0]) == []
        with pytest.raises(EngineError, match="1 names for 2 engines"):
            Router(engines, names=["http://a"])

    asyncio.run(run())


def test_an_endpoint_that_answers_again_shares_the_work_at_once() -> None:
    async def run() -> None:
        clock = Clock()
        engines = endpoints(2)
        router = Router(engines, rest=100, clock=clock)
        for engine in engines:
            engine.faults.append(Fault.UNAVAILABLE)
        with pytest.raises(EngineUnavailable):
            await ask(router)
        engines[0].faults.append(Fault.UNAVAILABLE)
        assert await ask(router) == 1, "both rest, both are tried"
        assert [one.state for one in router.circuits] == [CircuitState.OPEN, CircuitState.CLOSED]

    asyncio.run(run())
