"""The embedded engine under many requests: they share its steps, hold nobody up, and end when they are ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from tokentrace.engines import embedded
from tokentrace.engines.embedded import READ_AT_ONCE, EmbeddedEngine
from tokentrace.engines.protocol import Completion, Delta, FinishReason, SamplingParams
from tokentrace.pocket.model import load_pocket
from tokentrace.trajectory.turns import VersionSpan

POCKET = load_pocket()


class Watched:
    """The pocket model; says what it was asked for, and calls a function before each step, in the step's thread."""

    def __init__(self, before: Callable[[int], None] = lambda step: None) -> None:
        self.steps: list[list[int]] = []
        """How many ids of each request were read in each step."""
        self.threads: set[int] = set()
        self.longest, self.vocabulary_size = POCKET.longest, POCKET.vocabulary_size
        self.new_cache = POCKET.new_cache
        self._before = before

    def extend(self, caches: Sequence[Any], ids: Sequence[Any]) -> Any:
        self.steps.append([len(row) for row in ids])
        self.threads.add(threading.get_ident())
        self._before(len(self.steps))
        return POCKET.extend(caches, ids)


def run(work: Callable[[EmbeddedEngine], Awaitable[Any]], model: Watched, **options: Any) -> Any:
    async def go() -> Any:
        engine = EmbeddedEngine(model, **options)  # type: ignore[arg-type]
        try:
            return await asyncio.wait_for(work(engine), 120)
        finally:
            await engine.close()

    return asyncio.run(go())


def prompt(length: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, POCKET.vocabulary_size, length)


def test_thirty_two_streams_share_each_step() -> None:
    model = Watched()

    async def work(engine: EmbeddedEngine) -> list[Completion]:
        return list(await asyncio.gather(*(engine.generate(prompt(5, n), SamplingParams(20)) for n in range(32))))

    done = run(work, model)
    assert [len(one.ids) for one in done] == [20] * 32
    assert len(model.steps) == 20, "not one of them waits for another"
    assert model.steps[1:] == [[1] * 32] * 19


def test_no_step_runs_in_the_thread_of_the_event_loop(monkeypatch: Any) -> None:
    sampling_threads: set[int] = set()
    sample = embedded.sample

    def watched(*given: Any) -> Any:
        sampling_threads.add(threading.get_ident())
        return sample(*given)

    monkeypatch.setattr(embedded, "sample", watched)
    model = Watched()

    async def work(engine: EmbeddedEngine) -> None:
        await engine.generate(prompt(5), SamplingParams(5))

    run(work, model)
    assert threading.get_ident() not in model.threads | sampling_threads
    assert model.threads
    assert sampling_threads


def test_a_long_prompt_is_read_in_parts_while_others_go_on() -> None:
    model = Watched()

    async def work(engine: EmbeddedEngine) -> tuple[Completion, Completion]:
        first = asyncio.Event()

        async def short() -> list[Delta]:
            found = []
            async for delta in engine.stream(prompt(5, 1), SamplingParams(30, seed=1)):
                found.append(delta)
                first.set()
            return found

        task = asyncio.create_task(short())
        await first.wait()
        long = await engine.generate(prompt(1000), SamplingParams(3, seed=2))
        await task
        return long, await engine.generate(prompt(1000), SamplingParams(3, seed=2))

    long, alone = run(work, model)
    assert max(sum(step) for step in model.steps) <= READ_AT_ONCE
    begun = next(at for at, step in enumerate(model.steps) if step == [READ_AT_ONCE])
    reading = model.steps[begun : begun + 7]
    assert reading == [[256], [1], [256], [1], [256], [1], [1000 - 3 * 256]], "a token of the other after each part"
    np.testing.assert_array_equal(long.ids, alone.ids)
    scored = POCKET.score(np.concatenate((prompt(1000), long.ids)))[-3:]
    np.testing.assert_allclose(long.logprobs, scored, atol=1e-4)


def test_short_prompts_are_read_together_as_far_as_they_fit() -> None:
    model = Watched()

    async def work(engine: EmbeddedEngine) -> None:
        await asyncio.gather(*(engine.generate(prompt(100, n), SamplingParams(1)) for n in range(5)))

    run(work, model)
    assert model.steps == [[100, 100, 56], [44, 100, 100]]


def test_a_reader_that_goes_away_ends_the_work_in_the_middle_of_its_prompt() -> None:
    async def work(engine: EmbeddedEngine) -> None:
        reading = asyncio.Event()
        loop = asyncio.get_running_loop()
        model._before = lambda step: loop.call_soon_threadsafe(reading.set)  # type: ignore[assignment]
        task = asyncio.create_task(engine.generate(prompt(3000), SamplingParams(1000)))
        await reading.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        before = len(model.steps)
        await engine.generate(prompt(3), SamplingParams(1))
        assert len(model.steps) <= before + 2, "the step that was under way, and one for the new request"
        assert not engine._active

    model = Watched()
    run(work, model)


def test_a_request_that_is_aborted_while_the_engine_is_paused_returns() -> None:
    model = Watched()

    async def work(engine: EmbeddedEngine) -> Completion:
        got = asyncio.Event()

        async def read() -> list[Delta]:
            found = []
            async for delta in engine.stream(prompt(5), SamplingParams(500), request_id="mine"):
                found.append(delta)
                got.set()
            return found

        task = asyncio.create_task(read())
        await got.wait()
        await engine.pause()
        steps = len(model.steps)
        await engine.abort("mine")
        found = await task
        assert len(model.steps) == steps, "none since the pause"
        waiting = asyncio.create_task(engine.generate(prompt(5), SamplingParams(1)))
        await asyncio.sleep(0)
        await engine.resume()
        await waiting
        return found[-1]  # type: ignore[return-value]

    assert run(work, model).finish_reason is FinishReason.ABORT


def test_a_token_is_of_the_weights_that_its_step_began_with() -> None:
    """The weights change while a step is under way: that step still samples with the old ones, and says so."""

    async def work(engine: EmbeddedEngine) -> Completion:
        loop = asyncio.get_running_loop()

        def change(step: int) -> None:
            if step == 3:
                asyncio.run_coroutine_threadsafe(engine.update_weights(POCKET, version="new"), loop)

        model._before = change
        return await engine.generate(prompt(5), SamplingParams(6))

    model = Watched()

    assert run(work, model, version="old").versions == (VersionSpan("old", 0, 3), VersionSpan("new", 3, 6))


def test_when_pause_returns_no_step_is_under_way() -> None:
    stepping, checked = threading.Event(), threading.Event()

    async def work(engine: EmbeddedEngine) -> None:
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def hold(step: int) -> None:
            stepping.set()
            loop.call_soon_threadsafe(begun.set)
            assert checked.wait(60)
            stepping.clear()

        model._before = hold
        task = asyncio.create_task(engine.generate(prompt(5), SamplingParams(3)))
        await begun.wait()
        pausing = asyncio.create_task(engine.pause())
        await asyncio.sleep(0)
        assert stepping.is_set()
        assert not pausing.done()
        checked.set()
        await pausing
        assert not stepping.is_set()
        steps = len(model.steps)
        await engine.resume()
        await task
        assert steps == 1

    model = Watched()
    run(work, model)
