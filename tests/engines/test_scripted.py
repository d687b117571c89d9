"""The scripted engine behaves as engines do, and fails as they do."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.support import same
from tokentrace.engines.protocol import (
    Engine,
    FinishReason,
    SamplingParams,
    collected,
)
from tokentrace.engines.scripted import Sampled, ScriptedEngine
from tokentrace.trajectory.turns import VersionSpan


def test_the_script_sees_the_prompt_and_the_sampling() -> None:
    engine: Engine = ScriptedEngine(lambda prompt, sampling: prompt[: sampling.top_k])
    done = asyncio.run(engine.generate([5, 6, 7], SamplingParams(9, top_k=2), request_id="r", session="s"))
    assert (done.ids.tolist(), done.logprobs.tolist()) == ([5, 6], [-1.0, -1.0])
    assert isinstance(engine, ScriptedEngine)
    (request,) = engine.requests
    assert (request.prompt_ids.tolist(), request.request_id, request.session) == ([5, 6, 7], "r", "s")


@given(
    st.lists(st.integers(0, 9), max_size=12),
    st.integers(1, 12),
    st.sets(st.integers(0, 9), max_size=2),
    st.integers(0, 4),
)
def test_a_stream_is_the_whole(ids: list[int], most: int, stops: set[int], piece: int) -> None:
    sampling = SamplingParams(most, stop_token_ids=tuple(stops))
    logprobs = [-0.25 * at for at in range(len(ids))]
    engine = ScriptedEngine(lambda prompt, s: Sampled(ids, logprobs), vocab_size=10, piece=piece, version=3)
    whole = asyncio.run(engine.generate([1], sampling))
    assert same(whole, asyncio.run(collected(engine.stream([1], sampling))))
    end = next((at + 1 for at, one in enumerate(ids) if one in stops), len(ids))
    assert whole.ids.tolist() == ids[: min(end, most)]
    assert np.array_equal(whole.logprobs, np.float32(logprobs[: len(whole.ids)]))
    stopped = len(whole.ids) and (whole.ids[-1] in stops or len(whole.ids) < most)
    assert whole.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert whole.versions == ((VersionSpan(3, 0, len(whole.ids)),) if len(whole.ids) else ())


def test_latency_pause_abort_and_new_weights() -> None:
    async def run() -> Any:
        counts: list[int] = []
        engine: ScriptedEngine

        async def latency(count: int) -> None:
            counts.append(count)
            if len(counts) == 2:
                engine.version = "b"
            if len(counts) == 3:
                await engine.abort("mine")

        engine = ScriptedEngine(lambda p, s: [1, 2, 3, 4, 5], piece=1, latency=latency, version="a", record=False)
        await engine.pause()
        task = asyncio.create_task(engine.generate([1], SamplingParams(5), request_id="mine"))
        await asyncio.sleep(0)
        assert not task.done()
        await engine.abort("another")
        await engine.resume()
        done = await task
        assert counts == [1, 1, 1]
        assert not engine.requests
        again = await engine.generate([1], SamplingParams(5), request_id="mine")
        assert again.finish_reason is FinishReason.LENGTH, "an abort is for the request that ran"
        return done

    done = asyncio.run(run())
    assert (done.ids.tolist(), done.finish_reason) == ([1, 2], FinishReason.ABORT)
    assert done.versions == (VersionSpan("a", 0, 1), VersionSpan("b", 1, 2))
