"""The embedded engine: what it returns is what the model says, however requests share its steps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from tokentrace import create_renderer
from tokentrace.engines.drawing import sample
from tokentrace.engines.embedded import EmbeddedEngine
from tokentrace.engines.protocol import (
    Completion,
    Delta,
    EngineError,
    EngineRefusal,
    FinishReason,
    SamplingParams,
    joined,
)
from tokentrace.engines.routing import Router
from tokentrace.pocket import POCKET
from tokentrace.pocket.model import load_pocket, log_softmax
from training.pocket.questions import make_questions

RENDERER = create_renderer(POCKET)
STOPS = tuple(RENDERER.get_stop_token_ids())
PROMPTS = [
    RENDERER.render(question.prompt, tools=question.tools or None, add_generation_prompt=True).ids
    for question in make_questions(3, 8, "held_back")
]


def with_engine(work: Callable[[EmbeddedEngine], Awaitable[Any]], **options: Any) -> Any:
    async def go() -> Any:
        engine = EmbeddedEngine(**options)
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(go())


def params(**given: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, "seed": 7, "stop_token_ids": STOPS, **given})


def same(one: Completion, other: Completion, tolerance: float = 1e-5) -> None:
    np.testing.assert_array_equal(one.ids, other.ids)
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=tolerance)
    assert one.finish_reason is other.finish_reason


def test_logprobs_are_those_of_a_score_of_the_finished_row() -> None:
    async def work(engine: EmbeddedEngine) -> list[Completion]:
        ample = params(max_tokens=200)
        return list(await asyncio.gather(*(engine.generate(prompt, ample) for prompt in PROMPTS)))

    for prompt, completion in zip(PROMPTS, with_engine(work), strict=True):
        row = np.concatenate((prompt, completion.ids))
        scored = load_pocket().score(row)[len(prompt) - 1 :]
        np.testing.assert_allclose(completion.logprobs, scored, atol=1e-4)
        assert completion.finish_reason is FinishReason.STOP
        assert int(completion.ids[-1]) in STOPS
        assert completion.versions[0][1:] == (0, len(completion.ids))


def test_a_batch_says_what_each_request_says_alone() -> None:
    async def together(engine: EmbeddedEngine) -> list[Completion]:
        return list(await asyncio.gather(*(engine.generate(prompt, params()) for prompt in PROMPTS)))

    async def apart(engine: EmbeddedEngine) -> list[Completion]:
        return [await engine.generate(prompt, params()) for prompt in PROMPTS]

    for one, other in zip(with_engine(together), with_engine(apart), strict=True):
        same(one, other)


def test_a_stream_is_the_whole_in_pieces() -> None:
    async def work(engine: EmbeddedEngine) -> tuple[Completion, list[Delta]]:
        whole = await engine.generate(PROMPTS[0], params())
        return whole, [delta async for delta in engine.stream(PROMPTS[0], params())]

    whole, deltas = with_engine(work)
    assert [len(delta.ids) for delta in deltas] == [1] * len(whole.ids)
    np.testing.assert_array_equal(np.concatenate([delta.ids for delta in deltas]), whole.ids)
    np.testing.assert_allclose(np.concatenate([delta.logprobs for delta in deltas]), whole.logprobs, atol=1e-5)
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason is whole.finish_reason


def test_the_prefix_of_a_session_is_not_read_again_and_changes_nothing() -> None:
    async def work(engine: EmbeddedEngine) -> tuple[list[Completion], Completion, Completion]:
        first = await engine.generate(PROMPTS[0], params(), session="a")
        longer = np.concatenate((PROMPTS[0], first.ids, PROMPTS[1][1:40]))
        second = await engine.generate(longer, params(), session="a")
        fresh = await engine.generate(longer, params())
        rewritten = np.concatenate((PROMPTS[0][:50], PROMPTS[1][20:]))
        third = await engine.generate(rewritten, params(), session="a")
        return [first, second, third], fresh, await engine.generate(rewritten, params())

    (first, second, third), fresh, anew = with_engine(work)
    assert first.cached_tokens == 0
    assert second.cached_tokens == len(PROMPTS[0]) + len(first.ids) - 1, "the stop token was never read"
    assert fresh.cached_tokens == 0
    same(second, fresh)
    assert third.cached_tokens == 50
    same(third, anew)


def test_greedy_takes_the_best_and_tells_the_models_own_logprob() -> None:
    logits = np.asarray([0.1, 2.0, 1.0], np.float32)
    index, logprob = sample(logits, params(temperature=0.0), np.random.default_rng(0))
    assert index == 1
    assert logprob == pytest.approx(float(log_softmax(logits)[1]))


@pytest.mark.parametrize(
    "given", [{}, {"temperature": 0.0}, {"temperature": 0.6, "top_k": 3}, {"temperature": 1.7, "top_p": 0.3}]
)
def test_top_logprobs_are_the_best_of_what_the_logprobs_are_of(given: dict[str, Any]) -> None:
    async def work(engine: EmbeddedEngine) -> tuple[Completion, Completion, Completion]:
        asked = params(top_logprobs=5, max_tokens=12, **given)
        pieces = [delta async for delta in engine.stream(PROMPTS[0], asked)]
        assert all(len(delta.channels["top_logprobs"]) == len(delta.ids) == 1 for delta in pieces)
        plain = await engine.generate(PROMPTS[0], params(max_tokens=12, **given))
        return joined(pieces), await Router([engine]).generate(PROMPTS[0], asked), plain

    streamed, whole, plain = with_engine(work)
    np.testing.assert_array_equal(whole.ids, plain.ids, "being told more changes nothing that is sampled")
    assert plain.channels == {}
    told = whole.channels["top_logprobs"]
    assert len(told) == len(whole.ids) == len(streamed.channels["top_logprobs"])
    temperature, row = given.get("temperature", 1.0), [*map(int, PROMPTS[0])]
    for at, (best, sampled, logprob) in enumerate(zip(told, whole.ids.tolist(), whole.logprobs, strict=True)):
        known = dict(best)
        if sampled in known:
            assert known[sampled] == pytest.approx(float(logprob), abs=1e-5)
        if at < 5:  # as the whole model says it, told in another way
            cache = load_pocket().new_cache(len(row))
            logits = load_pocket().extend([cache], [row])[0].astype(np.float64)
            order = np.argsort(-logits)[: given.get("top_k", 5)]
            weights = np.exp((logits - logits.max()) / (temperature or 1.0))
            if "top_k" in given:
                weights[np.argsort(-logits)[given["top_k"] :]] = 0
            if "top_p" in given:
                kept = int(np.searchsorted(np.cumsum(weights[np.argsort(-weights)]) / weights.sum(), 0.3)) + 1
                order = order[:kept]
                weights[np.argsort(-weights)[kept:]] = 0
            assert [index for index, _ in best] == order.tolist()
            np.testing.assert_allclose([one for _, one in best], np.log(weights[order] / weights.sum()), atol=1e-4)
        row.append(sampled)


def test_limits_and_stops_end_a_completion() -> None:
    async def work(engine: EmbeddedEngine) -> tuple[Completion, Completion]:
        short = await engine.generate(PROMPTS[0], params(max_tokens=3, stop_token_ids=()))
        stop = int(short.ids[1])
        return short, await engine.generate(PROMPTS[0], params(max_tokens=30, stop_token_ids=(stop,)))

    short, stopped = with_engine(work)
    assert (len(short.ids), short.finish_reason) == (3, FinishReason.LENGTH)
    assert stopped.finish_reason is FinishReason.STOP
    assert int(stopped.ids[-1]) == int(short.ids[1])
    assert len(stopped.ids) <= 2


def test_an_aborted_request_returns_what_was_sampled_and_touches_no_other() -> None:
    async def work(engine: EmbeddedEngine) -> tuple[Completion, Completion, Completion]:
        long = params(max_tokens=400, stop_token_ids=())
        victim = asyncio.create_task(engine.generate(PROMPTS[0], long, request_id="victim"))
        other = asyncio.create_task(engine.generate(PROMPTS[1], params(), request_id="other"))
        async for _ in engine.stream(PROMPTS[2], params(max_tokens=5, stop_token_ids=())):
            pass
        await engine.abort("victim")
        await engine.abort("nobody")
        return await victim, await other, await engine.generate(PROMPTS[1], params())

    victim, other, alone = with_engine(work)
    assert victim.finish_reason is FinishReason.ABORT
    assert 1 <= len(victim.ids) < 400
    same(other, alone)


def test_a_paused_engine_samples_nothing_until_it_is_resumed() -> None:
    async def work(engine: EmbeddedEngine) -> tuple[bool, Completion]:
        await engine.pause()
        task = asyncio.create_task(engine.generate(PROMPTS[0], params()))
        for _ in range(20):
            await asyncio.sleep(0)
        was_waiting = not task.done()
        await engine.resume()
        return was_waiting, await task

    was_waiting, completion = with_engine(work)
    assert was_waiting
    assert completion.finish_reason is FinishReason.STOP


def test_requests_that_cannot_be_are_refused_and_a_closed_engine_takes_none() -> None:
    async def work(engine: EmbeddedEngine) -> None:
        for prompt in ([], [4096], [-1], [1] * 4090):
            with pytest.raises(EngineRefusal):
                await engine.generate(prompt, params())
        waiting = asyncio.create_task(engine.generate(PROMPTS[0], params(max_tokens=400, stop_token_ids=())))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineError):
            await waiting
        with pytest.raises(EngineError):
            await engine.generate(PROMPTS[0], params())

    with_engine(work)


def test_a_later_event_loop_goes_on_with_the_engine_as_it_was_left() -> None:
    engine = EmbeddedEngine()

    async def ask() -> Completion:
        return await asyncio.wait_for(engine.generate(PROMPTS[0], params(), session="a"), 60)

    async def leave_one_behind() -> None:
        stream = engine.stream(PROMPTS[1], params(max_tokens=400, stop_token_ids=()))
        await anext(stream)
        await engine.pause()

    async def resume() -> Completion:
        await asyncio.wait_for(engine.resume(), 60)
        return await ask()

    first, second = asyncio.run(ask()), asyncio.run(ask())
    same(first, second)
    assert second.cached_tokens == len(PROMPTS[0]) - 1, "caches belong to no event loop"
    asyncio.run(leave_one_behind())
    same(first, asyncio.run(resume()))
    asyncio.run(asyncio.wait_for(engine.close(), 60))
