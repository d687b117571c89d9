"""Requests of a group begin with the same prompt: it is read once, and no group holds an endpoint for itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from tests.engines.faults import Fault, FaultyEngine, Gate
from tokentrace import create_renderer
from tokentrace.engines.embedded import READ_AT_ONCE, EmbeddedEngine
from tokentrace.engines.protocol import Completion, Engine, FinishReason, SamplingParams
from tokentrace.engines.routing import Router
from tokentrace.pocket import POCKET
from tokentrace.pocket.model import load_pocket
from tokentrace.rollout.batch import grouped
from tokentrace.rollout.loop import Agent
from tokentrace.rollout.record import Task

MEMBERS = 8
PROMPT = np.random.default_rng(0).integers(0, 4000, READ_AT_ONCE + 100)
"""Longer than what is read in one step, so that the first of a group is still reading when the others come."""


def run(work: Callable[[list[EmbeddedEngine]], Awaitable[Any]], count: int = 1) -> Any:
    async def go() -> Any:
        engines = [EmbeddedEngine(seed=at) for at in range(count)]
        try:
            return await work(engines)
        finally:
            for engine in engines:
                await engine.close()

    return asyncio.run(go())


async def all_members(engine: Engine, group: str | None, prompts: Any = None) -> list[Completion]:
    prompts = [PROMPT] * MEMBERS if prompts is None else prompts
    return list(
        await asyncio.gather(
            *(
                engine.generate(prompt, SamplingParams(4, seed=at), session=f"member {at}", group=group)
                for at, prompt in enumerate(prompts)
            )
        )
    )


def computed(done: list[Completion], length: int = len(PROMPT)) -> int:
    """How many ids of prompts the model has read."""
    return sum(length - (one.cached_tokens or 0) for one in done)


def test_a_groups_prompt_is_read_once_on_two_endpoints() -> None:
    async def work(engines: list[EmbeddedEngine]) -> tuple[list[Completion], list[Completion]]:
        router = Router(engines)
        return await all_members(router, "question 1"), await all_members(router, None, [PROMPT[::-1]] * MEMBERS)

    together, apart = run(work, 2)
    assert computed(together) == len(PROMPT) + MEMBERS - 1, "the last id has to be read by each"
    assert computed(apart) == MEMBERS * len(PROMPT), "without a group each reads its own"


def test_sharing_a_prompt_changes_nothing_that_is_sampled() -> None:
    together, apart = (
        run(lambda engines, g=group: all_members(engines[0], g, [PROMPT] * 3)) for group in ("question", None)
    )
    for one, other in zip(together, apart, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    last = together[-1]
    scored = load_pocket().score(np.concatenate((PROMPT, last.ids)))[len(PROMPT) - 1 :]
    np.testing.assert_allclose(last.logprobs, scored, atol=1e-4)


def test_prompts_of_a_group_that_differ_share_what_they_have_in_common() -> None:
    other = np.concatenate((PROMPT[:200], PROMPT[100:200]))

    async def work(engines: list[EmbeddedEngine]) -> list[Completion]:
        return await all_members(engines[0], "question", [PROMPT, other])

    first, second = run(work)
    assert (first.cached_tokens, second.cached_tokens) == (0, 200)
    scored = load_pocket().score(np.concatenate((other, second.ids)))[len(other) - 1 :]
    np.testing.assert_allclose(second.logprobs, scored, atol=1e-4)


def test_when_the_first_of_a_group_is_ended_the_next_reads_the_prompt() -> None:
    async def work(engines: list[EmbeddedEngine]) -> list[Completion]:
        [engine] = engines
        await engine.pause()
        sampling = SamplingParams(4, seed=1)
        tasks = [
            asyncio.create_task(engine.generate(PROMPT, sampling, request_id=str(at), group="question"))
            for at in range(3)
        ]
        await asyncio.sleep(0)
        await engine.abort("0")
        await engine.resume()
        return list(await asyncio.gather(*tasks))

    ended, *others = run(work)
    assert (ended.finish_reason, len(ended.ids)) == (FinishReason.ABORT, 0)
    assert [one.cached_tokens for one in others] == [0, len(PROMPT) - 1]
    assert others[0].ids.tolist() == others[1].ids.tolist()


def test_a_group_that_comes_later_finds_the_prompt_and_new_weights_do_not() -> None:
    async def work(engines: list[EmbeddedEngine]) -> list[Completion]:
        [engine], sampling = engines, SamplingParams(1)
        first, later = [await engine.generate(PROMPT, sampling, group="question") for _ in range(2)]
        await engine.update_weights(load_pocket(), version=2)
        return [first, later, await engine.generate(PROMPT, sampling, group="question")]

    assert [one.cached_tokens for one in run(work)] == [0, len(PROMPT) - 1, 0]


# -- where a group goes


def gated(count: int) -> tuple[list[FaultyEngine], Gate]:
    gate = Gate()
    return [FaultyEngine(lambda p, s: [7], latency=gate) for _ in range(count)], gate


@pytest.mark.parametrize(("lead", "members", "shares"), [(16, 8, [8, 0]), (4, 8, [4, 4]), (4, 40, [20, 20])])
def test_a_group_stays_together_until_its_endpoint_is_ahead_by_so_many(
    lead: int, members: int, shares: list[int]
) -> None:
    async def go() -> None:
        engines, gate = gated(2)
        router = Router(engines, group_lead=lead)
        tasks = [asyncio.create_task(router.generate([1], SamplingParams(1), group="hot")) for _ in range(members)]
        ahead = 0
        for waiting in range(1, members + 1):
            await gate.waiting(waiting)
            ahead = max(ahead, abs(engines[0].running - engines[1].running))
        assert [engine.running for engine in engines] == shares
        assert ahead <= lead
        await gate.open()
        await asyncio.gather(*tasks)

    asyncio.run(go())


def test_groups_are_spread_and_others_are_not_starved() -> None:
    async def go() -> None:
        engines, gate = gated(2)
        router = Router(engines)

        async def ask(group: str | None, session: str | None = None) -> None:
            await router.generate([1], SamplingParams(1), group=group, session=session)

        names = ["a"] * 8 + ["b"] * 8 + [None] * 2
        tasks = [asyncio.create_task(ask(name)) for name in names]
        await gate.waiting(len(names))
        groups = [[request.group for request in engine.requests] for engine in engines]
        assert groups[0] == ["a"] * 8 + [None]
        assert groups[1] == ["b"] * 8 + [None]
        await gate.open()
        await asyncio.gather(*tasks)
        await ask("a", "turns of one rollout")
        await ask("b", "turns of one rollout")
        homes = [[request.session for request in engine.requests][-2:] for engine in engines]
        assert homes[0] == ["turns of one rollout"] * 2, "a session stays where it began"

    asyncio.run(go())


def test_a_group_moves_when_its_endpoint_is_down() -> None:
    async def go() -> None:
        engines = [FaultyEngine(lambda p, s, at=at: [at]) for at in range(2)]
        router = Router(engines)

        async def ask() -> int:
            return int((await router.generate([1], SamplingParams(1), group="a")).ids[0])

        assert await ask() == 0
        engines[0].faults.append(Fault.UNAVAILABLE)
        assert [await ask(), await ask()] == [1, 1]

    asyncio.run(go())


def test_an_agent_tells_the_engine_which_rollouts_are_one_group() -> None:
    renderer = create_renderer(POCKET)
    engine = FaultyEngine(lambda p, s: [renderer.get_stop_token_ids()[0]])
    agent = Agent(engine, renderer)
    question = Task([{"role": "user", "content": "What is 6 * 7?"}], name="q")

    async def go() -> None:
        for task in [*grouped([question], 2), question]:
            await agent.run(task)

    asyncio.run(go())
    assert [request.group for request in engine.requests] == ["q", "q", None]
