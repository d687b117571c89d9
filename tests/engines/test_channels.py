"""What engines report besides logprobs: read as they write it, one entry per id, or refused."""

from __future__ import annotations

import asyncio
import base64
import copy
import io
import json
from typing import Any

import numpy as np
import pytest

from tests.engines.dialects import LLAMACPP, RAW, SGLANG, TINY, VLLM, Dialect, asked
from tests.engines.support import Reply, recording
from tokentrace.engines.channels import best_ids, experts_of, flat_experts, npy_experts
from tokentrace.engines.errors import EngineAnswerError
from tokentrace.engines.protocol import Completion, SamplingParams, collected
from tokentrace.engines.sglang import SGLangEngine

REPORTED = [
    (VLLM, "vllm_generate_top", 1, [[(687, -4.465181827545166)], [(776, -4.7041168212890625)]]),
    (
        SGLANG,
        "sglang_generate_prompt_lp",
        2,
        [
            [(131, -4.636009693145752), (624, -4.702267169952393)],
            [(618, -4.3505144119262695), (136, -4.4018378257751465)],
        ],
    ),
    (LLAMACPP, "llamacpp_completion", 1, [[(460, -4.59596)], [(810, -4.14996)]]),
    (LLAMACPP, "llamacpp_completion_post", 1, [[(460, -4.59596)], [(810, -4.14996)]]),
]
COUNTS = {"vllm": "logprobs", "sglang": "top_logprobs_num", "llama.cpp": "n_probs"}


def without_alternatives(answer: Any) -> Any:
    """The same answer, with no alternatives in it."""
    text = json.dumps(answer)
    for name in ("top_logprobs", "output_top_logprobs", "top_probs"):
        text = text.replace(f'"{name}"', f'"no_{name}"')
    return json.loads(text)


@pytest.mark.parametrize(("dialect", "name", "count", "expected"), REPORTED, ids=[row[1] for row in REPORTED])
def test_the_likeliest_ids_are_read_as_recorded(dialect: Dialect, name: str, count: int, expected: Any) -> None:
    recorded = recording(name)
    answer, capabilities = recorded["response"], TINY if name.endswith("post") else RAW
    if dialect is LLAMACPP:
        answer |= {"tokens": answer["tokens"][:2]}  # the others are incomplete UTF-8
    sampling = SamplingParams(2, top_logprobs=count)
    engine, fake = dialect.engine(answer, without_alternatives(answer), capabilities=capabilities)
    done = asyncio.run(engine.generate(asked(recorded)[0], sampling))
    sent, body = recorded["request"]["json"], fake.bodies(dialect.path)[0]
    key = COUNTS[dialect.name]
    assert body.get("sampling_params", body).get(key, body.get(key)) == sent.get("sampling_params", sent).get(
        key, sent.get(key)
    )
    rows = done.channels["top_logprobs"]
    assert [[one for one, _ in row] for row in rows] == [[one for one, _ in row] for row in expected]
    np.testing.assert_allclose([row[0][1] for row in rows], [row[0][1] for row in expected], atol=2e-3)
    with pytest.raises(EngineAnswerError):
        asyncio.run(engine.generate(asked(recorded)[0], sampling))


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
        best_ids([row], 3, 100, "top")


# -- routed experts

LAYERS, EXPERTS = 3, 2


def tape(positions: int) -> Any:
    """Experts of each position, none of them twice."""
    return np.arange(positions * LAYERS * EXPERTS, dtype=np.int32).reshape(positions, LAYERS, EXPERTS)


def npy(array: Any) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode("ascii")


def flat(array: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


@pytest.mark.parametrize("all_positions", [True, False])
@pytest.mark.parametrize("dtype", [np.int16, np.uint8, np.int32])
def test_vllms_experts_are_those_that_each_id_was_sampled_with(all_positions: bool, dtype: Any) -> None:
    recorded = recording("vllm_generate")
    prompt = asked(recorded)[0]
    read = (tape(len(prompt) + 5) % 200).astype(dtype)
    expected = read[len(prompt) - 1 :].tolist()
    recorded["response"]["choices"][0]["routed_experts"] = npy(read if all_positions else read[len(prompt) - 1 :])
    engine, _ = VLLM.engine(recorded["response"])
    done = asyncio.run(engine.generate(prompt, SamplingParams(6)))
    assert done.channels == {"routed_experts": expected}
    assert len(expected) == len(done.ids) == 6


@pytest.mark.parametrize("streamed", [False, True])
def test_sglangs_experts_are_requested_and_read_at_the_end(streamed: bool) -> None:
    recorded = recording("sglang_generate")
    prompt, read = asked(recorded)[0], tape(6)
    first, last = copy.deepcopy(recorded["response"]), recorded["response"]
    last["meta_info"]["routed_experts"] = flat(read)
    first["output_ids"] = first["output_ids"][:2]
    first["meta_info"] |= {"completion_tokens": 2, "finish_reason": None}
    first["meta_info"]["output_token_logprobs"] = first["meta_info"]["output_token_logprobs"][:2]
    events = Reply([b"".join(b"data: %s\n\n" % json.dumps(one).encode() for one in (first, last))])
    engine, fake = SGLANG.engine(events if streamed else last)
    engine._experts = LAYERS * EXPERTS

    async def run(engine: SGLangEngine) -> Completion:
        if streamed:
            return await collected(engine.stream(prompt, SamplingParams(6)))
        return await engine.generate(prompt, SamplingParams(6))

    done = asyncio.run(run(engine))
    assert done.channels == {"routed_experts": read.reshape(6, -1).tolist()}
    assert fake.bodies("/generate")[0]["routed_experts_start_len"] == len(prompt) - 1


def test_experts_of_a_wrong_number_of_positions_are_refused() -> None:
    for positions in (1, 5, 7, 11, 13):
        with pytest.raises(EngineAnswerError):
            experts_of(tape(positions), 7, 6)
    assert experts_of(tape(7), 8, 0) == []


HEAD = b"\x93NUMPY\x01\x00"
HUGE = repr({"descr": "<i8", "fortran_order": False, "shape": (1 << 40, 1 << 20, 64)}).encode().ljust(117) + b"\n"


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
        base64.b64encode(HEAD + len(HUGE).to_bytes(2, "little") + HUGE).decode(),  # takes no memory
    ],
)
def test_what_is_no_array_of_experts_is_refused(value: Any) -> None:
    with pytest.raises(EngineAnswerError):
        npy_experts(value)


@pytest.mark.parametrize(
    ("value", "kind", "width"),
    [(flat(np.zeros(5, np.int32)), None, 6), ("", None, 6), (flat(np.zeros(3, np.uint8)), None, None)]
    + [(flat(np.zeros(6, np.int32)), kind, 6) for kind in ("float32", "int8")],
)
def test_what_are_no_flat_experts_is_refused(value: Any, kind: Any, width: int | None) -> None:
    with pytest.raises(EngineAnswerError):
        flat_experts(value, kind, width)
