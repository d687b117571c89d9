"""What of verl's integration needs no verl. With it, it is tried in `tests/apart/verl`."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from tokentrace import InputError
from tokentrace.engines import EngineAnswerError, EngineRefusal, LogprobKindError, SamplingParams
from tokentrace.engines.answers import checked_request
from tokentrace.engines.protocol import Capabilities, GenerateRequest
from tokentrace.integrations.sampling import sampling_of
from tokentrace.integrations.verl_engine import OPTIONAL, ServerEngine

VLLM = {"name": "vllm", "logprobs_mode": "processed_logprobs"}


@pytest.mark.skipif(importlib.util.find_spec("verl") is not None, reason="verl is installed here")
@pytest.mark.parametrize("name", ["verl", "verl_parser", "verl_sft"])
def test_without_verl_the_error_says_what_to_install(name: str) -> None:
    with pytest.raises(ImportError, match=r"needs verl: pip install 'verl\[verl-core\]'"):
        importlib.import_module(f"tokentrace.integrations.{name}")


@pytest.mark.parametrize(
    ("server", "expected"),
    [("vllm", {"seed": 7}), ("sglang", {"sampling_seed": 7}), ("trtllm", {"seed": 7})],
)
def test_verls_servers_are_sent_the_seed(server: str, expected: dict[str, int]) -> None:
    sent: dict[str, Any] = {}

    async def generate(**request: Any) -> Any:
        sent.update(request["sampling_params"])
        return SimpleNamespace(token_ids=[5], log_probs=[-0.5], stop_reason="completed", extra_fields={})

    engine = ServerEngine(SimpleNamespace(generate=generate), "one", {**VLLM, "name": server}, vocab_size=10)
    asyncio.run(engine.generate([1], sampling_of({"temperature": 1.0, "seed": 7}, max_tokens=4)))
    assert {name: value for name, value in sent.items() if "seed" in name} == expected
    sent.clear()
    asyncio.run(engine.generate([1], SamplingParams(4)))
    assert not [name for name in sent if "seed" in name]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"log_probs": None}, "verl returned no logprobs"),
        ({"log_probs": [-0.5, -0.5]}, "2 logprobs for 1 ids"),
        ({"token_ids": [], "log_probs": []}, "returned no ids"),
        ({"token_ids": [10]}, "the vocabulary has 10 ids"),
    ],
)
def test_an_answer_of_verls_servers_that_cannot_be_used_is_refused(changed: dict[str, Any], problem: str) -> None:
    answer = {"token_ids": [5], "log_probs": [-0.5], "stop_reason": "completed", "extra_fields": {}, **changed}

    async def generate(**_: Any) -> Any:
        return SimpleNamespace(**answer)

    engine = ServerEngine(SimpleNamespace(generate=generate), "one", VLLM, vocab_size=10)
    with pytest.raises(EngineAnswerError, match=problem):
        asyncio.run(engine.generate([1], SamplingParams(4)))


def test_sampling_parameters_are_honoured_or_refused() -> None:
    settings = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    plain = sampling_of(settings, max_tokens=64)
    assert (plain.temperature, plain.top_p, plain.top_k, plain.max_tokens) == (0.7, 0.9, 0, 64)
    assert sampling_of({"top_k": 20}, max_tokens=64).top_k == 20
    with pytest.raises(InputError, match="min_q"):
        sampling_of({**settings, "min_q": 0.1}, max_tokens=64, supports=OPTIONAL)
    penalty = sampling_of({**settings, "min_p": 0.05, "repetition_penalty": 1.1}, max_tokens=64, supports=OPTIONAL)
    assert (penalty.min_p, penalty.repetition_penalty) == (0.05, 1.1)
    raw = {"name": "vllm", "logprobs_mode": "raw_logprobs"}
    with pytest.raises(LogprobKindError):
        asyncio.run(ServerEngine(None, "one", raw, vocab_size=9).generate([1], penalty))


def test_an_engine_that_takes_no_seed_refuses_one() -> None:
    request = GenerateRequest([1], SamplingParams(4, seed=7))
    with pytest.raises(EngineRefusal, match="areal has no seed"):
        checked_request(request, Capabilities("areal", seeds=False))
