"""Several endpoints as one engine: affinity, load, failover, required agreement."""

import asyncio
from typing import Any

import pytest

from tests.engines.faults import GARBAGE, UNAVAILABLE, Fault, FaultyEngine, Gate
from tests.loop import in_loop
from tokentrace.engines.errors import EngineError, EngineUnavailable
from tokentrace.engines.protocol import Capabilities, Engine, FinishReason, SamplingParams, collected
from tokentrace.engines.routing import GROUP_LEAD, Router
from tokentrace.trajectory.turns import LogprobKind, VersionSpan

SAMPLING = SamplingParams(4)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def endpoints(count: int = 3, **options: Any) -> list[FaultyEngine]:
    return [FaultyEngine(lambda prompt, sampling, at=at: [at] * 4, **options) for at in range(count)]


async def ask(router: Engine, session: str | None = None, **options: Any) -> int:
    return int((await router.generate([1, 2], SAMPLING, session=session, **options)).ids[0])


@in_loop
async def test_a_session_stays_on_its_endpoint() -> None:
    router = Router(endpoints())
    homes = {name: await ask(router, name) for name in "abcdef"}
    assert sorted(homes.values()) == [0, 0, 1, 1, 2, 2], "new sessions are spread"
    for _ in range(3):
        for name, home in homes.items():
            assert await ask(router, name) == home
            assert (await collected(router.stream([1], SAMPLING, session=name))).ids[0] == home


@in_loop
async def test_new_requests_go_to_the_endpoint_with_the_fewest_requests() -> None:
    gates = [Gate() for _ in range(3)]
    engines = [FaultyEngine(lambda p, s, at=at: [at] * 4, latency=gate) for at, gate in enumerate(gates)]
    router = Router(engines)
    tasks = [asyncio.create_task(ask(router)) for _ in range(6)]
    await asyncio.sleep(0)
    assert [len(engine.requests) for engine in engines] == [2, 2, 2]
    await gates[1].open()
    await asyncio.gather(tasks[1], tasks[4])
    assert await ask(router) == 1
    for gate in gates:
        await gate.open()
    assert sorted(await asyncio.gather(*tasks)) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("streamed", [False, True])
@in_loop
async def test_a_request_that_was_not_accepted_goes_elsewhere_and_its_session_stays_there(streamed: bool) -> None:
    async def once(router: Router) -> int:
        if streamed:
            return int((await collected(router.stream([1, 2], SAMPLING, session="s"))).ids[0])
        return await ask(router, "s")

    engines = endpoints()
    clock = Clock()
    router = Router(engines, clock=clock)
    assert await once(router) == 0
    engines[0].faults.append(UNAVAILABLE)
    assert await once(router) == 1
    clock.now = 100.0
    assert await once(router) == 1, "its prefix is cached there now"


@in_loop
async def test_a_failed_endpoint_is_skipped_for_longer_each_time() -> None:
    engines, clock = endpoints(2), Clock()
    router = Router(engines, clock=clock)
    for pause in (5.0, 10.0, 20.0):
        engines[0].faults.append(UNAVAILABLE)
        before = len(engines[0].requests)
        assert await ask(router) == 1
        clock.now += pause - 0.1
        assert await ask(router) == 1
        assert len(engines[0].requests) == before + 1
        clock.now += 0.2
    assert await ask(router) == 0
    engines[0].faults.append(UNAVAILABLE)
    assert await ask(router) == 1
    clock.now += 5.1
    assert await ask(router) == 0, "it had answered in between: the rest is short again"


@in_loop
async def test_every_endpoint_is_tried_once_before_a_request_fails() -> None:
    engines, clock = endpoints(3), Clock()
    router = Router(engines, clock=clock)
    for engine in engines:
        engine.faults.append(UNAVAILABLE)
    with pytest.raises(EngineUnavailable):
        await ask(router)
    assert [len(engine.requests) for engine in engines] == [1, 1, 1]
    assert await ask(router) == 0, "all rest, and one is tried all the same"


@pytest.mark.parametrize("fault", [GARBAGE, Fault(EngineError)])
@in_loop
async def test_accepted_requests_do_not_fail_over(fault: Fault) -> None:
    engines = endpoints()
    engines[0].faults.append(fault)
    with pytest.raises(EngineError):
        await ask(Router(engines))
    assert [len(engine.requests) for engine in engines] == [1, 0, 0]


@in_loop
async def test_pause_resume_and_abort_reach_all() -> None:
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


@in_loop
async def test_a_pause_that_did_not_reach_all_is_an_error() -> None:
    class Unpausable(FaultyEngine):
        async def pause(self) -> None:
            raise EngineUnavailable("gone")

        async def abort(self, request_id: str) -> None:
            raise EngineUnavailable("gone")

    router = Router([*endpoints(1), Unpausable(lambda prompt, sampling: [1])])
    with pytest.raises(EngineError):
        await router.pause()
    await router.abort("unknown")


# -- required agreement


def test_engines_with_different_vocabularies_or_logprobs_are_refused() -> None:
    def engine(**changes: Any) -> Engine:
        return Engine(Capabilities("mine", **changes))

    with pytest.raises(EngineError):
        Router([engine(vocab_size=1024), engine(vocab_size=1000)])
    with pytest.raises(EngineError):
        Router([engine(), engine(logprobs=LogprobKind.RAW)])
    with pytest.raises(EngineError):
        Router([])
    assert Router([engine(max_length=100), engine()]).capabilities.max_length == 100


@in_loop
async def test_a_group_stays_together_until_its_endpoint_is_far_ahead() -> None:
    gates = [Gate(), Gate()]
    engines = [FaultyEngine(lambda prompt, sampling: [1], latency=gate) for gate in gates]
    router = Router(engines)
    calls = [asyncio.create_task(router.generate([1, 2], SAMPLING, group="g")) for _ in range(GROUP_LEAD + 4)]
    await gates[1].waiting(1)
    for gate in gates:
        await gate.open()
    await asyncio.gather(*calls)
    first, second = (len(engine.requests) for engine in engines)
    assert first >= GROUP_LEAD
    assert second <= 4


@in_loop
async def test_circuits_show_which_endpoints_are_skipped() -> None:
    clock = Clock()
    engines = endpoints(2)
    router = Router(engines, clock=clock, names=["http://a", "http://b"])

    def states() -> list[str]:
        return [one.described()["state"] for one in router.circuits]

    assert states() == ["closed", "closed"]
    engines[0].faults.append(UNAVAILABLE)
    assert await ask(router) == 1
    assert states() == ["open", "closed"]
    assert list(map(str, router.circuits)) == ["http://a open for 5 s, failures: 1", "http://b closed"]
    clock.now = 6
    assert states() == ["closed", "closed"]
    assert await ask(router) == 0
    assert states() == ["closed", "closed"]
    assert router.circuits[0].described() == {"name": "http://a", "state": "closed", "running": 0, "failed": 1}


@in_loop
async def test_a_router_has_a_version_once_all_have_it() -> None:
    class Broken(FaultyEngine):
        async def update_weights(self, weights: Any, *, version: str | int) -> None:
            raise EngineError("the disk is full")

    fine, broken = (kind(lambda prompt, sampling: [1], version=1) for kind in (FaultyEngine, Broken))
    router = Router([fine, broken], names=["http://one", "http://two"])
    assert (router.capabilities.weights, router.version) == (True, 1)
    with pytest.raises(EngineError, match="http://two: the disk is full"):
        await router.update_weights("/weights/2", version=2)
    assert (fine.version, broken.version, router.version) == (2, 1, 1)
    broken.__class__ = FaultyEngine
    await router.update_weights("/weights/2", version=2)
    assert (fine.version, broken.version, router.version) == (2, 2, 2)
    await router.set_version(3)
    assert (await router.generate([1], SamplingParams(1))).versions == (VersionSpan(3, 0, 1),)
