"""What engines tell beside logprobs: read as they write it, one entry an id, or refused."""

from __future__ import annotations

import asyncio
import base64
import copy
import io
import json
from typing import Any

import numpy as np
import pytest

from tests.engines.support import Fake, Reply, recording
from tokentrace.engines.channels import answered_top, experts_of, flat_experts, npy_experts
from tokentrace.engines.llamacpp import COMPLETION, LlamaCppEngine
from tokentrace.engines.protocol import (
    Capabilities,
    EngineAnswerError,
    LogprobKind,
    SamplingParams,
)
from tokentrace.engines.sglang import SGLangEngine
from tokentrace.engines.vllm import GENERATE, VLLMEngine

TELLS = {"max_length": 4096, "vocab_size": 1024, "top_logprobs": 20}


def npy(array: Any) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode("ascii")


def streamed(events: list[Any]) -> Reply:
    return Reply([b"".join(b"data: %s\n\n" % json.dumps(one).encode() for one in events) + b"data: [DONE]\n\n"])


# -- top logprobs


def vllm(answer: Any, path: str = GENERATE) -> tuple[VLLMEngine, Fake]:
    fake = Fake().on(path, answer)
    told = Capabilities("vllm", model="tiny", **TELLS)
    return VLLMEngine(fake.connection(), told, path=path, check_echo=False), fake


def test_vllm_tells_as_recorded() -> None:
    """Of ``logprobs: 2`` the sampled id is one: that is how the likeliest alone is asked for."""
    recorded = recording("vllm_generate_top")
    engine, fake = vllm(recorded["response"])
    prompt = recorded["request"]["json"]["token_ids"]
    done = asyncio.run(engine.generate(prompt, SamplingParams(2, seed=1, stop_token_ids=(1002,), top_logprobs=1)))
    assert (
        fake.bodies(GENERATE)[0]["sampling_params"]["logprobs"]
        == recorded["request"]["json"]["sampling_params"]["logprobs"]
    )
    assert done.channels == {"top_logprobs": [((687, -4.465181827545166),), ((776, -4.7041168212890625),)]}
    assert np.array_equal(done.logprobs, np.float32([-6.224958896636963, -7.036780834197998])), "of the sampled ids"


def with_alternatives(choice: Any, rows: list[dict[int, float]]) -> Any:
    for entry, row in zip(choice["logprobs"]["content"], rows, strict=True):
        entry["top_logprobs"] = [{"token_id": one, "logprob": value, "rank": 0} for one, value in row.items()]
    return choice


def sglang(answer: Any) -> tuple[SGLangEngine, Fake]:
    fake = Fake().on("/generate", answer)
    return SGLangEngine(fake.connection(), Capabilities("sglang", model="tiny", **TELLS)), fake


def test_sglang_tells_as_recorded() -> None:
    recorded = recording("sglang_generate_prompt_lp")
    engine, fake = sglang(recorded["response"])
    done = asyncio.run(engine.generate(recorded["request"]["json"]["input_ids"], SamplingParams(2, top_logprobs=2)))
    assert fake.bodies("/generate")[0]["top_logprobs_num"] == recorded["request"]["json"]["top_logprobs_num"]
    assert done.channels["top_logprobs"] == [
        ((131, -4.636009693145752), (624, -4.702267169952393)),
        ((618, -4.3505144119262695), (136, -4.4018378257751465)),
    ]


@pytest.mark.parametrize("name", ["llamacpp_completion", "llamacpp_completion_post"])
def test_llamacpp_tells_as_recorded(name: str) -> None:
    recorded = recording(name)
    answer = recorded["response"]
    answer |= {"tokens": answer["tokens"][:2], "tokens_predicted": 2}  # the others are incomplete UTF-8
    kind = LogprobKind.PROCESSED if name.endswith("post") else LogprobKind.RAW
    fake = Fake().on(COMPLETION, answer)
    engine = LlamaCppEngine(fake.connection(), Capabilities("llama.cpp", logprobs=kind, **TELLS))
    done = asyncio.run(
        engine.generate(recorded["request"]["json"]["prompt"], SamplingParams(2, seed=1, top_logprobs=1))
    )
    assert fake.bodies(COMPLETION)[0]["n_probs"] == 1
    rows = done.channels["top_logprobs"]
    assert [[one for one, _ in row] for row in rows] == [[460], [810]]
    np.testing.assert_allclose([row[0][1] for row in rows], [-4.59596, -4.14996], atol=2e-3)
    fewer = copy.deepcopy(answer)
    for entry in fewer["completion_probabilities"]:
        entry.pop("top_probs", None)
        entry.pop("top_logprobs", None)
    broken = LlamaCppEngine(Fake().on(COMPLETION, fewer).connection(), engine.capabilities)
    with pytest.raises(EngineAnswerError):
        asyncio.run(broken.generate(recorded["request"]["json"]["prompt"], SamplingParams(2, top_logprobs=1)))


def test_alternatives_that_were_asked_for_and_not_told_are_an_error() -> None:
    recorded = recording("vllm_generate")
    for entry in recorded["response"]["choices"][0]["logprobs"]["content"]:
        del entry["top_logprobs"]
    engine, _ = vllm(recorded["response"])
    with pytest.raises(EngineAnswerError):
        asyncio.run(engine.generate(recorded["request"]["json"]["token_ids"], SamplingParams(6, top_logprobs=1)))
    recorded = recording("sglang_generate")
    with pytest.raises(EngineAnswerError):
        asyncio.run(
            sglang(recorded["response"])[0].generate(
                recorded["request"]["json"]["input_ids"], SamplingParams(6, top_logprobs=1)
            )
        )


@pytest.mark.parametrize(
    "row",
    [
        [(1, -1.0), (1, -2.0)],
        [(100, -1.0)],
        [(-1, -1.0)],
        [(1, 0.5)],
        [(1, float("nan"))],
        [],
        [(1, None), (2, -9999.0)],
    ],
)
def test_what_is_no_alternative_is_refused(row: list[tuple[Any, Any]]) -> None:
    with pytest.raises(EngineAnswerError):
        answered_top([row], 3, 100, "top")


# -- routed experts

LAYERS, EXPERTS = 3, 2


def tape(positions: int) -> Any:
    """Experts of each position, none of them twice."""
    return np.arange(positions * LAYERS * EXPERTS, dtype=np.int32).reshape(positions, LAYERS, EXPERTS)


@pytest.mark.parametrize("all_positions", [True, False])
@pytest.mark.parametrize("dtype", [np.int16, np.uint8, np.int32])
def test_vllm_experts_are_those_that_each_id_was_sampled_with(all_positions: bool, dtype: Any) -> None:
    recorded = recording("vllm_generate")
    prompt = recorded["request"]["json"]["token_ids"]
    read = (tape(len(prompt) + 5) % 200).astype(dtype)
    expected = read[len(prompt) - 1 :].tolist()
    recorded["response"]["choices"][0]["routed_experts"] = npy(read if all_positions else read[len(prompt) - 1 :])
    done = asyncio.run(vllm(recorded["response"])[0].generate(prompt, SamplingParams(6)))
    assert done.channels == {"routed_experts": expected}
    assert len(expected) == len(done.ids) == 6


def flat(array: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


def test_experts_of_a_wrong_number_of_positions_are_refused() -> None:
    for positions in (1, 5, 7, 11, 13):
        with pytest.raises(EngineAnswerError):
            experts_of(tape(positions), 7, 6)
    assert experts_of(tape(7), 8, 0) == []


HEAD = b"\x93NUMPY\x01\x00"


@pytest.mark.parametrize(
    "value",
    [
        "not base64!",
        base64.b64encode(b"short").decode(),
        base64.b64encode(HEAD + b"\x10\x00{'descr': 1").decode(),
        npy(np.zeros((2, 3, 4), np.float32)),
        npy(np.zeros((2, 3), np.int32)),
        npy(np.asfortranarray(np.zeros((2, 3, 4), np.int32))),
        npy(np.zeros((2, 3, 4), np.int32))[:-8],
        npy(np.zeros((1, 1, 1), "O")),
    ],
)
def test_what_is_no_array_of_experts_is_refused(value: Any) -> None:
    with pytest.raises(EngineAnswerError):
        npy_experts(value)


def test_an_array_that_says_it_is_huge_takes_no_memory() -> None:
    header = repr({"descr": "<i8", "fortran_order": False, "shape": (1 << 40, 1 << 20, 64)}).encode().ljust(117) + b"\n"
    with pytest.raises(EngineAnswerError):
        npy_experts(base64.b64encode(HEAD + len(header).to_bytes(2, "little") + header).decode())


@pytest.mark.parametrize(
    ("value", "kind", "width"),
    [(flat(np.zeros(5, np.int32)), None, 6), ("", None, 6), (flat(np.zeros(3, np.uint8)), None, None)]
    + [(flat(np.zeros(6, np.int32)), kind, 6) for kind in ("float32", "int8")],
)
def test_what_are_no_flat_experts_is_refused(value: Any, kind: Any, width: int | None) -> None:
    with pytest.raises(EngineAnswerError):
        flat_experts(value, kind, width)
