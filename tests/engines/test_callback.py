"""An engine that is a function is checked as a server is: what it is asked, and what it returns."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tokentrace.engines import (
    CallbackEngine,
    Capabilities,
    Completion,
    EngineAnswerError,
    EngineRefusal,
    EngineReply,
    GenerateRequest,
    LogprobKind,
    SamplingParams,
    collected,
)
from tokentrace.trajectory.turns import VersionSpan


def sampled(reply: EngineReply, *, streamed: bool = False, **sampling: Any) -> Completion:
    async def sample(request: GenerateRequest) -> EngineReply:
        assert list(request.prompt_ids) == [1, 2]
        return reply

    engine = CallbackEngine(sample, Capabilities("mine", vocab_size=10, logprobs=LogprobKind.PROCESSED))
    params = SamplingParams(**{"max_tokens": 4, **sampling})
    return asyncio.run(collected(engine.stream([1, 2], params)) if streamed else engine.generate([1, 2], params))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_reply_is_the_completion(streamed: bool) -> None:
    made = sampled(EngineReply([7, 8], [-0.5, -0.25], "stop", [VersionSpan(3, 0, 2)], 1), streamed=streamed)
    assert (made.ids.tolist(), made.logprobs.tolist(), made.finish_reason) == ([7, 8], [-0.5, -0.25], "stop")
    assert (made.versions, made.cached_tokens) == ((VersionSpan(3, 0, 2),), 1)
    assert made.logprobs_kind is LogprobKind.PROCESSED


@pytest.mark.parametrize(
    ("ids", "logprobs", "finish"),
    [
        ([7], None, "stop"),
        ([7, 8], [-0.5], "stop"),
        ([10], [-0.5], "stop"),
        ([7], [0.5], "stop"),
        ([7] * 5, [-0.5] * 5, "length"),
        ([7], [-0.5], "tired"),
    ],
)
def test_a_reply_that_cannot_be_used_is_refused(ids: Any, logprobs: Any, finish: str) -> None:
    with pytest.raises(EngineAnswerError):
        sampled(EngineReply(ids, logprobs, finish))


def test_the_function_is_not_called_with_what_it_cannot_do() -> None:
    for sampling in ({"min_p": 0.1}, {"top_logprobs": 1}, {"stop": ("x",)}, {"stop_token_ids": (11,)}):
        with pytest.raises(EngineRefusal):
            sampled(EngineReply([7], [-0.5], "stop"), **sampling)
