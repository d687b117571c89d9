"""What of verl's integration needs no verl. With it, it is tried in `tests/apart/verl`."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from tokentrace.engines import EngineAnswerError, EngineRefusal, SamplingParams
from tokentrace.engines.answers import checked_request
from tokentrace.engines.protocol import Capabilities, GenerateRequest
from tokentrace.integrations.verl_engine import ServerEngine, sampling_of, seed_field
from tokentrace.trajectory.turns import LogprobKind


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

    settings = {"kind": LogprobKind.PROCESSED, "vocab_size": 10, "seed_field": seed_field({"name": server})}
    engine = ServerEngine(SimpleNamespace(generate=generate), "one", **settings)
    asyncio.run(engine.generate([1], sampling_of({"temperature": 1.0, "seed": 7}, 4)))
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

    engine = ServerEngine(SimpleNamespace(generate=generate), "one", kind=LogprobKind.PROCESSED, vocab_size=10)
    with pytest.raises(EngineAnswerError, match=problem):
        asyncio.run(engine.generate([1], SamplingParams(4)))


def test_an_engine_that_takes_no_seed_refuses_one() -> None:
    request = GenerateRequest([1], SamplingParams(4, seed=7))
    with pytest.raises(EngineRefusal, match="areal has no seed"):
        checked_request(request, Capabilities("areal", seeds=False))
