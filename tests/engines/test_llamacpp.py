"""llama.cpp: requests and answers as recorded, normalised."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engines.support import Fake, recording
from tokentrace.engines.llamacpp import COMPLETION, LlamaCppEngine
from tokentrace.engines.protocol import (
    Capabilities,
    EngineAnswerError,
    FinishReason,
    LogprobKind,
    SamplingParams,
)

RAW = Capabilities("llama.cpp", max_length=4096, vocab_size=1024, logprobs=LogprobKind.RAW)
PROCESSED = Capabilities("llama.cpp", max_length=4096, vocab_size=1024, logprobs=LogprobKind.PROCESSED)
PROMPT = list(range(300, 420))
SAMPLING = SamplingParams(4, seed=1)


def expected_body(recorded: Any, **changes: Any) -> Any:
    body = {"post_sampling_probs": False, "stream": False} | copy.deepcopy(recorded["request"]["json"])
    body.pop("logit_bias", None)
    return body | changes


def whole(answer: Any, sampling: SamplingParams = SAMPLING, capabilities: Capabilities = RAW) -> tuple[Any, Fake]:
    fake = Fake().on(COMPLETION, answer)
    return asyncio.run(LlamaCppEngine(fake.connection(), capabilities).generate(PROMPT, sampling)), fake


def test_an_end_of_text_that_was_sampled_is_the_last_id() -> None:
    recorded = recording("llamacpp_completion_eos")
    done, fake = whole(recorded["response"])
    assert fake.bodies(COMPLETION) == [expected_body(recorded)]
    assert (done.ids.tolist(), done.finish_reason, done.cached_tokens) == ([1002], FinishReason.STOP, 119)
    assert np.array_equal(done.logprobs, np.float32([-6.7064409255981445]))


@pytest.mark.parametrize("name", ["llamacpp_completion", "llamacpp_completion_post"])
def test_a_logprob_that_is_missing_is_an_error(name: str) -> None:
    """Recorded: 4 tokens, 2 logprobs; the third is a byte of a character that was never whole."""
    recorded = recording(name)
    capabilities = PROCESSED if name.endswith("post") else RAW
    with pytest.raises(EngineAnswerError):
        whole(recorded["response"], capabilities=capabilities)


def cut_after(answer: Any, count: int) -> Any:
    """The first tokens of an answer, all of which have a logprob."""
    answer = copy.deepcopy(answer)
    answer["tokens"] = answer["tokens"][:count]
    answer["completion_probabilities"] = answer["completion_probabilities"][:count]
    return answer


def test_probabilities_after_sampling_become_logprobs() -> None:
    recorded = recording("llamacpp_completion_post")
    done, fake = whole(cut_after(recorded["response"], 2), capabilities=PROCESSED)
    assert fake.bodies(COMPLETION) == [expected_body(recorded)]
    raw, _ = whole(cut_after(recording("llamacpp_completion")["response"], 2))
    assert done.ids.tolist() == raw.ids.tolist() == [1019, 964]
    assert np.allclose(done.logprobs, raw.logprobs, atol=2e-3), "at temperature 1 they are the same"
    assert (done.finish_reason, done.versions) == (FinishReason.LENGTH, ())
    assert (done.logprobs_kind, raw.logprobs_kind) == (LogprobKind.PROCESSED, LogprobKind.RAW), "as it was asked"


def test_greedy_logprobs_are_raw_as_with_the_other_engines() -> None:
    done, fake = whole(
        cut_after(recording("llamacpp_completion")["response"], 2), SamplingParams(4, temperature=0), PROCESSED
    )
    assert done.logprobs_kind is LogprobKind.RAW
    assert fake.bodies(COMPLETION)[0]["post_sampling_probs"] is False


def test_the_repetition_penalty_counts_all_that_there_is_and_comes_first() -> None:
    answer = cut_after(recording("llamacpp_completion")["response"], 2)
    can = replace(RAW, max_length=4096, sampling=frozenset({"min_p", "repetition_penalty"}))
    asked = SamplingParams(4, top_k=5, min_p=0.1, repetition_penalty=1.2, allow_raw_logprobs=True)
    _, fake = whole(answer, asked, can)
    [body] = fake.bodies(COMPLETION)
    assert body["samplers"] == ["penalties", "temperature", "min_p", "top_k"]
    assert (body["min_p"], body["repeat_penalty"], body["repeat_last_n"]) == (0.1, 1.2, 4096)


def test_what_follows_a_stop_token_is_cut_off() -> None:
    answer = recording("llamacpp_cmp")
    done, fake = whole(answer, SamplingParams(64, stop_token_ids=(996, 325)))
    assert (done.ids.tolist(), done.finish_reason) == ([216, 329, 996], FinishReason.STOP)
    assert len(done.logprobs) == 3
    assert "stop_token_ids" not in fake.bodies(COMPLETION)[0]


@pytest.mark.parametrize(
    "change",
    [
        {"tokens_evaluated": 121},
        {"stop_type": "word"},
        {"truncated": True},
        {"tokens": [1024]},
        {"tokens": None},
        {"completion_probabilities": [{"id": 9, "logprob": -1.0}]},
        {"completion_probabilities": [{"id": 1002, "logprob": None}]},
        {"completion_probabilities": [{"id": 1002}]},
        {"completion_probabilities": []},
    ],
)
def test_an_answer_that_is_no_completion_is_an_error(change: Any) -> None:
    with pytest.raises(EngineAnswerError):
        whole(recording("llamacpp_completion_eos")["response"] | change)


def test_connecting_finds_out_what_a_server_can_do() -> None:
    async def run(fake: Fake, **options: Any) -> Capabilities:
        engine = await LlamaCppEngine.connect(fake.connection(), **options)
        await engine.close()
        return engine.capabilities

    fake = Fake().on("/props", recording("llamacpp_props")["response"])
    found = Capabilities(
        "llama.cpp",
        version="b0-unknown",
        model="tiny.gguf",
        max_length=4096,
        logprobs=LogprobKind.PROCESSED,
        top_logprobs=20,
        structures=True,
        sampling=frozenset({"min_p", "repetition_penalty"}),
    )
    assert asyncio.run(run(fake)) == found
    fake.on("/v1/models", {"data": [{"id": "tiny.gguf", "meta": {"n_vocab": 1024}}]})
    assert asyncio.run(run(fake)).vocab_size == 1024
    assert asyncio.run(run(fake, logprobs="raw", vocab_size=9)).logprobs is LogprobKind.RAW
    with pytest.raises(EngineAnswerError):
        asyncio.run(run(Fake().on("/props", [])))
