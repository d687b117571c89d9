"""Callback and scripted engines behave like servers, and get the same checks."""

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.support import same
from tests.loop import in_loop
from tokentrace.engines import CallbackEngine, Completion, EngineAnswerError, EngineRefusal, EngineReply
from tokentrace.engines.protocol import Capabilities, FinishReason, GenerateRequest, SamplingParams, collected
from tokentrace.engines.scripted import ScriptedEngine
from tokentrace.trajectory.turns import LogprobKind, VersionSpan


def sampled(reply: EngineReply, *, streamed: bool = False, **sampling: Any) -> Completion:
    async def sample(request: GenerateRequest) -> EngineReply:
        assert list(request.prompt_ids) == [1, 2]
        return reply

    engine = CallbackEngine(sample, Capabilities("mine", vocab_size=10, logprobs=LogprobKind.PROCESSED))
    params = SamplingParams(**{"max_tokens": 4, **sampling})
    return asyncio.run(collected(engine.stream([1, 2], params)) if streamed else engine.generate([1, 2], params))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_reply_is_the_completion(streamed: bool) -> None:
    done = sampled(EngineReply([7, 8], [-0.5, -0.25], "stop", [VersionSpan(3, 0, 2)], 1), streamed=streamed)
    assert (done.ids.tolist(), done.logprobs.tolist(), done.finish_reason) == ([7, 8], [-0.5, -0.25], "stop")
    assert (done.versions, done.cached_tokens) == ((VersionSpan(3, 0, 2),), 1)
    assert done.logprobs_kind is LogprobKind.PROCESSED


@pytest.mark.parametrize(
    ("ids", "logprobs", "finish"),
    [
        ([7], None, "stop"), ([7, 8], [-0.5], "stop"), ([10], [-0.5], "stop"), ([7], [0.5], "stop"),
        ([7] * 5, [-0.5] * 5, "length"), ([7], [-0.5], "tired"), ([7], [-0.5], None),
    ],
)  # fmt: skip
def test_an_invalid_reply_is_refused(ids: Any, logprobs: Any, finish: str) -> None:
    with pytest.raises(EngineAnswerError):
        sampled(EngineReply(ids, logprobs, finish))


def test_the_function_is_not_called_with_unsupported_settings() -> None:
    for sampling in ({"min_p": 0.1}, {"top_logprobs": 1}, {"stop": ("x",)}, {"stop_token_ids": (11,)}):
        with pytest.raises(EngineRefusal):
            sampled(EngineReply([7], [-0.5], "stop"), **sampling)


# -- scripts


IDS = st.integers(0, 9)


@given(st.lists(IDS, max_size=12), st.integers(1, 12), st.sets(IDS, max_size=2), st.integers(0, 4))
def test_a_stream_equals_the_whole_completion(ids: list[int], max_tokens: int, stops: set[int], piece: int) -> None:
    sampling = SamplingParams(max_tokens, stop_token_ids=tuple(stops))
    logprobs = [-0.25 * at for at in range(len(ids))]
    engine = ScriptedEngine(lambda prompt, s: EngineReply(ids, logprobs), vocab_size=10, piece=piece, version=3)
    whole = asyncio.run(engine.generate([1], sampling))
    assert same(whole, asyncio.run(collected(engine.stream([1], sampling))))
    end = next((at + 1 for at, one in enumerate(ids) if one in stops), len(ids))
    assert whole.ids.tolist() == ids[: min(end, max_tokens)]
    assert np.array_equal(whole.logprobs, np.float32(logprobs[: len(whole.ids)]))
    stopped = len(whole.ids) and (whole.ids[-1] in stops or len(whole.ids) < max_tokens)
    assert whole.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert whole.versions == ((VersionSpan(3, 0, len(whole.ids)),) if len(whole.ids) else ())


@in_loop
async def test_latency_pause_abort_and_new_weights() -> None:
    counts: list[int] = []

    async def latency(count: int) -> None:
        counts.append(count)
        if len(counts) == 2:
            engine.version = "b"
        if len(counts) == 3:
            await engine.abort("mine")

    engine = ScriptedEngine(lambda p, s: [1, 2, 3, 4, 5], piece=1, latency=latency, version="a")
    await engine.pause()
    task = asyncio.create_task(engine.generate([1], SamplingParams(5), request_id="mine"))
    await asyncio.sleep(0)
    assert not task.done()
    await engine.abort("another")
    await engine.resume()
    done = await task
    assert counts == [1, 1, 1]
    assert (done.ids.tolist(), done.logprobs.tolist()) == ([1, 2], [-1.0, -1.0])
    assert done.finish_reason is FinishReason.ABORT
    assert done.versions == (VersionSpan("a", 0, 1), VersionSpan("b", 1, 2))
    again = await engine.generate([1], SamplingParams(5), request_id="mine")
    assert again.finish_reason is FinishReason.LENGTH, "an abort is for the request that ran"
