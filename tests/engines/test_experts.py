"""Channels of tokens: the routed experts, and the likeliest ids."""

import asyncio
import base64
import copy
import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.engines.dialects import SGLANG, VLLM, inputs
from tests.engines.support import Reply, recording
from tokentrace.engines.answers import decode
from tokentrace.engines.channels import best_ids, experts_of, flat_experts, npy_experts
from tokentrace.engines.errors import EngineAnswerError
from tokentrace.engines.protocol import SamplingParams, collected

LAYERS, EXPERTS = 3, 2


def tape(positions: int) -> Any:
    """Distinct experts for each position."""
    return np.arange(positions * LAYERS * EXPERTS, dtype=np.int32).reshape(positions, LAYERS, EXPERTS)


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


@pytest.mark.parametrize("all_positions", [True, False])
@pytest.mark.parametrize("dtype", [np.int16, np.uint8, np.int32])
def test_vllms_experts_are_aligned_with_the_sampled_ids(all_positions: bool, dtype: Any) -> None:
    recorded = recording("vllm_generate")
    prompt = inputs(recorded)[0]
    rows = (tape(len(prompt) + 5) % 200).astype(dtype)
    expected = rows[len(prompt) - 1 :].tolist()
    recorded["response"]["choices"][0]["routed_experts"] = text(npy(rows if all_positions else rows[len(prompt) - 1 :]))
    engine, _ = VLLM.engine(recorded["response"])
    done = asyncio.run(engine.generate(prompt, SamplingParams(6)))
    assert done.channels == {"routed_experts": expected}
    assert len(expected) == len(done.ids) == 6


@pytest.mark.parametrize("streamed", [False, True])
def test_sglangs_experts_are_requested_and_read_at_the_end(streamed: bool) -> None:
    recorded = recording("sglang_generate")
    prompt, experts = inputs(recorded)[0], tape(6)
    first, last = copy.deepcopy(recorded["response"]), recorded["response"]
    last["meta_info"]["routed_experts"] = text(experts.tobytes())
    first["output_ids"] = first["output_ids"][:2]
    first["meta_info"] |= {"completion_tokens": 2, "finish_reason": None}
    first["meta_info"]["output_token_logprobs"] = first["meta_info"]["output_token_logprobs"][:2]
    events = Reply([b"".join(b"data: %s\n\n" % json.dumps(one).encode() for one in (first, last))])
    engine, fake = SGLANG.engine(events if streamed else last)
    engine._experts = LAYERS * EXPERTS
    params = SamplingParams(6)
    done = asyncio.run(collected(engine.stream(prompt, params)) if streamed else engine.generate(prompt, params))
    assert done.channels == {"routed_experts": experts.reshape(6, -1).tolist()}
    assert fake.bodies("/generate")[0]["routed_experts_start_len"] == len(prompt) - 1


HEAD = b"\x93NUMPY\x01\x00"
HUGE = repr({"descr": "<i8", "fortran_order": False, "shape": (1 << 40, 1 << 20, 64)}).encode().ljust(117) + b"\n"
UNUSABLE: dict[Callable[..., Any], list[tuple[Any, ...]]] = {
    lambda row: best_ids([row], 3, 100): [
        *(([(1, -1.0), (1, -2.0)],), ([(100, -1.0)],), ([(-1, -1.0)],), ([(1, 0.5)],)),
        *(([(1, float("nan"))],), ([],), ([(1, None), (2, -9999.0)],)),
    ],
    decode: [(b'"not base64!"', bytes)],
    experts_of: [(tape(positions), 7, 6) for positions in (1, 5, 7, 11, 13)],
    npy_experts: [
        (b"short",),
        (HEAD + b"\x10\x00{'descr': 1",),
        (npy(np.zeros((2, 3, 4), np.float32)),),
        (npy(np.zeros((2, 3), np.int32)),),
        (npy(np.zeros((2, 3, 4), np.int32))[:-8],),
        (npy(np.zeros((1, 1, 1), "O")),),
        (HEAD + len(HUGE).to_bytes(2, "little") + HUGE,),  # must not allocate memory
    ],
    flat_experts: [*((bytes(20), "int32", 6), (b"", "int32", 6), (bytes(3), "int32", None))],
}


@pytest.mark.parametrize("read", UNUSABLE)
def test_unusable_channels_are_refused(read: Callable[..., Any]) -> None:
    for values in UNUSABLE[read]:
        with pytest.raises(EngineAnswerError):
            read(*values)
    assert experts_of(tape(7), 8, 0) == []
