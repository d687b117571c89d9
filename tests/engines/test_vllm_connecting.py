"""vLLM: connecting finds out what a server can do, and of which distribution its logprobs are."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from tests.engines.support import Fake, Reply, json_reply, recording
from tests.engines.vllm_server import FLAT, TINY, connect, content, served, with_choice
from tokentrace.engines.protocol import (
    OPTIONAL,
    Capabilities,
    LogprobKind,
    SamplingParams,
    collected,
)
from tokentrace.engines.vllm import GENERATE, VLLMEngine


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("mode", ["processed", "scaled", "raw"])
def test_connecting_finds_out_what_a_server_can_do(mode: str, native: bool) -> None:
    fake = served(Fake(), mode=mode, native=native)
    if native:
        fake.on("/is_paused", recording("vllm_is_paused")["response"])
        fake.on("/weight_info", {"weight_version": "default"})
    assert connect(fake, vocab_size=1024) == Capabilities(
        "vllm",
        version="0.32.0",
        model="tiny",
        max_length=4096,
        vocab_size=1024,
        logprobs=LogprobKind(mode),
        streams=True,
        aborts=native,
        pauses=native,
        versions=native,
        top_logprobs=19 if native else 20,
        structures=True,
        sampling=frozenset(OPTIONAL),
        weights=native,
    )


def test_recorded_processed_logprobs_move_with_the_temperature() -> None:
    """At 0.5 the best token of the recorded prompt has -2.81, where it has -4.59 at 1 with llama.cpp."""
    at_half = recording("vllm_logprobs_T05")["response"]["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    best = next(row for row in at_half if row["rank"] == 1)
    at_one = recording("llamacpp_completion_eos")["response"]["completion_probabilities"][0]["top_logprobs"][0]
    assert (best["token_id"], at_one["id"]) == (460, 460)
    assert best["logprob"] - at_one["logprob"] > 1.0


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("mode", ["processed", "scaled", "raw"])
def test_the_kind_does_not_depend_on_what_happens_to_be_sampled(mode: str, native: bool) -> None:
    """The logprob of a sampled token moves from draw to draw, with any kind."""
    for seed in range(30):
        for logits in (FLAT, FLAT * 4, np.log(np.r_[0.6, 0.3, np.full(98, 0.1 / 98)])):
            fake = served(Fake(), mode=mode, native=native, logits=logits, seed=seed)
            assert connect(fake, vocab_size=1024).logprobs is LogprobKind(mode)


@pytest.mark.parametrize(
    ("kind", "sampling", "expected"),
    [
        ("raw", SamplingParams(1, temperature=0.7, allow_raw_logprobs=True), "raw"),
        ("unknown", SamplingParams(1, temperature=0.7, allow_raw_logprobs=True), "unknown"),
        ("raw", SamplingParams(1), "raw"),
        ("unknown", SamplingParams(1), "unknown"),
        ("processed", SamplingParams(1, temperature=0.7), "processed"),
        ("scaled", SamplingParams(1, temperature=0.7, top_k=3), "scaled"),
        ("processed", SamplingParams(1, temperature=0), "raw"),
        ("unknown", SamplingParams(1, temperature=0), "raw"),
    ],
)
def test_a_completion_says_of_which_distribution_its_logprobs_are(
    kind: str, sampling: SamplingParams, expected: str
) -> None:
    answer = with_choice(token_ids=[9], logprobs=content((9, -1.0)), finish_reason="length", weight_versions=None)
    prompt = recording("vllm_generate")["request"]["json"]["token_ids"]
    one = VLLMEngine(
        Fake().on(GENERATE, answer).connection(), replace(TINY, logprobs=LogprobKind(kind)), check_echo=False
    )
    assert asyncio.run(one.generate(prompt, sampling)).logprobs_kind is LogprobKind(expected)
    events = Reply([b"data: " + json_reply(answer).pieces[0] + b"\n\ndata: [DONE]\n\n"])
    one = VLLMEngine(
        Fake().on(GENERATE, events).connection(), replace(TINY, logprobs=LogprobKind(kind)), check_echo=False
    )
    assert asyncio.run(collected(one.stream(prompt, sampling))).logprobs_kind is LogprobKind(expected)
