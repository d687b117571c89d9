"""What engines tell beside logprobs: read as they write it, one entry an id, or refused."""

from __future__ import annotations

import asyncio
import base64
import copy
import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.support import Fake, Reply, recording
from tokentrace.engines.channels import answered_top, experts_of, flat_experts, npy_experts
from tokentrace.engines.llamacpp import COMPLETION, LlamaCppEngine
from tokentrace.engines.protocol import (
    Capabilities,
    Completion,
    EngineAnswerError,
    EngineError,
    LogprobKind,
    SamplingParams,
    collected,
)
from tokentrace.engines.routing import Router
from tokentrace.engines.sglang import SGLangEngine
from tokentrace.engines.vllm import COMPLETIONS, GENERATE, VLLMEngine

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


def test_vllm_streams_alternatives_with_their_ids() -> None:
    recorded = recording("vllm_generate_stream")
    events = [json.loads(one[6:]) for one in recorded["response"].split("\n\n") if one.startswith("data: {")]
    rows = [
        {687: -4.465181827545166, 1: -5.0, 2: -9999.0},
        {687: -4.1, 3: -6.0, 4: -5.5},
        {687: -3.9, 5: -4.0, 6: -4.5},
    ]
    told = [event for event in events if event["choices"]]
    for event, row in zip(told, rows, strict=True):
        with_alternatives(event["choices"][0], [row])
    engine, fake = vllm(streamed(events))
    prompt = recorded["request"]["json"]["token_ids"]
    done = asyncio.run(collected(engine.stream(prompt, SamplingParams(3, temperature=0, top_logprobs=2))))
    assert fake.bodies(GENERATE)[0]["sampling_params"]["logprobs"] == 3
    assert done.channels["top_logprobs"] == [
        ((687, -4.465181827545166), (1, -5.0)),
        ((687, -4.1), (4, -5.5)),
        ((687, -3.9), (5, -4.0)),
    ]


def test_vllm_completions_tell_as_many_as_asked_for() -> None:
    recorded = recording("vllm_completions_ids")
    engine, fake = vllm(recorded["response"], COMPLETIONS)
    prompt = recorded["request"]["json"]["prompt"]
    done = asyncio.run(engine.generate(prompt, SamplingParams(6, seed=1, top_logprobs=1)))
    assert fake.bodies(COMPLETIONS)[0]["logprobs"] == 1
    assert done.channels["top_logprobs"][0] == ((518, -6.224958896636963),)
    text = copy.deepcopy(recorded["response"])
    text["choices"][0]["logprobs"]["top_logprobs"][0] = {"pre": -1.0}
    with pytest.raises(EngineAnswerError, match=r"top_logprobs\[0\]: 'pre' is no id"):
        asyncio.run(vllm(text, COMPLETIONS)[0].generate(prompt, SamplingParams(6, seed=1, top_logprobs=1)))


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


@pytest.mark.parametrize("repeats", [True, False])
def test_sglang_streams_alternatives_with_their_ids(repeats: bool) -> None:
    """In streams that repeat what was said, and in those that do not."""
    whole = recording("sglang_generate_prompt_lp")["response"]
    first = copy.deepcopy(whole)
    first["output_ids"] = first["output_ids"][:1]
    first["meta_info"] |= {"completion_tokens": 1, "finish_reason": None}
    for name in ("output_token_logprobs", "output_top_logprobs"):
        first["meta_info"][name] = first["meta_info"][name][:1]
    if not repeats:
        whole["output_ids"] = whole["output_ids"][1:]
        for name in ("output_token_logprobs", "output_top_logprobs"):
            whole["meta_info"][name] = whole["meta_info"][name][1:]
    engine, _ = sglang(streamed([first, whole]))
    done = asyncio.run(collected(engine.stream([300, 301, 302, 303, 304, 305], SamplingParams(2, top_logprobs=1))))
    assert done.channels["top_logprobs"] == [((131, -4.636009693145752),), ((618, -4.3505144119262695),)]


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
    with pytest.raises(EngineAnswerError, match="has no top_"):
        asyncio.run(broken.generate(recorded["request"]["json"]["prompt"], SamplingParams(2, top_logprobs=1)))


def test_alternatives_that_were_asked_for_and_not_told_are_an_error() -> None:
    recorded = recording("vllm_generate")
    for entry in recorded["response"]["choices"][0]["logprobs"]["content"]:
        del entry["top_logprobs"]
    engine, _ = vllm(recorded["response"])
    with pytest.raises(EngineAnswerError, match="has no top_logprobs"):
        asyncio.run(engine.generate(recorded["request"]["json"]["token_ids"], SamplingParams(6, top_logprobs=1)))
    recorded = recording("sglang_generate")
    with pytest.raises(EngineAnswerError, match="has no output_top_logprobs"):
        asyncio.run(
            sglang(recorded["response"])[0].generate(
                recorded["request"]["json"]["input_ids"], SamplingParams(6, top_logprobs=1)
            )
        )


@given(st.dictionaries(st.integers(0, 99), st.floats(-100, 0), min_size=1, max_size=9), st.integers(1, 9))
def test_the_best_come_first_and_no_more_than_asked_for(row: dict[int, float], count: int) -> None:
    (best,) = answered_top([row.items()], count, 100, "top")
    assert len(best) == min(count, len(row))
    assert [value for _, value in best] == sorted(row.values(), reverse=True)[:count]
    assert all(row[one] == value for one, value in best)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ([(1, -1.0), (1, -2.0)], "told twice"),
        ([(100, -1.0)], "100 is no id"),
        ([(-1, -1.0)], "-1 is no id"),
        ([(True, -1.0)], "True is no id"),
        ([("1", -1.0)], "'1' is no id"),
        ([(1, 0.5)], "at most 0"),
        ([(1, float("nan"))], "at most 0"),
        ([(1, "x")], "at most 0"),
        ([], "no id is told"),
        ([(1, None), (2, -9999.0), (3, float("-inf"))], "no id is told"),
    ],
)
def test_what_is_no_alternative_is_refused(row: list[tuple[Any, Any]], says: str) -> None:
    with pytest.raises(EngineAnswerError, match=says):
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


def test_vllm_experts_of_a_stream_come_with_its_end() -> None:
    recorded = recording("vllm_generate_stream")
    prompt = recorded["request"]["json"]["token_ids"]
    events = [json.loads(one[6:]) for one in recorded["response"].split("\n\n") if one.startswith("data: {")]
    told = [event for event in events if event["choices"]]
    read = tape(len(prompt) + 2)
    told[-1]["choices"][0]["routed_experts"] = npy(read)
    sampling = SamplingParams(3, temperature=0)

    async def run(events: list[Any]) -> Completion:
        deltas = [delta async for delta in vllm(streamed(events))[0].stream(prompt, sampling)]
        assert [list(delta.channels) for delta in deltas] == [[], [], ["routed_experts"]]
        return await collected(vllm(streamed(events))[0].stream(prompt, sampling))

    assert asyncio.run(run(events)).channels == {"routed_experts": read[-3:].tolist()}
    told[0]["choices"][0]["routed_experts"] = npy(read)
    with pytest.raises(EngineAnswerError, match="before the end"):
        asyncio.run(run(events))


def flat(array: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


def sglang_server(*, all_positions: bool, dtype: str | None = None, experts: bool = True) -> Fake:
    """Answers with the experts of all that was read, or from where it was asked for them."""
    recorded = recording("sglang_generate")["response"]

    def generate(body: Any) -> Any:
        answer, most = copy.deepcopy(recorded), body["sampling_params"]["max_new_tokens"]
        meta = answer["meta_info"]
        answer["output_ids"] = answer["output_ids"][:most]
        meta |= {"prompt_tokens": len(body["input_ids"]), "completion_tokens": most}
        meta["output_token_logprobs"] = meta["output_token_logprobs"][:most]
        meta["output_top_logprobs"] = [[[-1.0, 1, None]]] * most
        meta["weight_versions"] = [{"version": "default", "start": 0, "end": most}]
        if experts and body.get("return_routed_experts"):
            read = tape(len(body["input_ids"]) + most - 1)
            start = 0 if all_positions else body.get("routed_experts_start_len", 0)
            meta["routed_experts"] = flat(read[start:].astype(dtype or "int32"))
            meta |= {"routed_experts_dtype": dtype} if dtype else {}
        return answer

    fake = Fake().on("/generate", generate).on("/get_model_info", {"model_path": "tiny", "vocab_size": 1024})
    return fake.on("/get_server_info", {"version": "0.5.23"})


@pytest.mark.parametrize("all_positions", [True, False])
@pytest.mark.parametrize("dtype", [None, "int32", "uint16"])
def test_sglang_experts_are_those_that_each_id_was_sampled_with(all_positions: bool, dtype: str | None) -> None:
    async def run() -> Completion:
        fake = sglang_server(all_positions=all_positions, dtype=dtype)
        engine = await SGLangEngine.connect(fake.connection(), logprobs="scaled", routed_experts=True)
        done = await engine.generate(list(range(7)), SamplingParams(6))
        assert fake.bodies("/generate")[-1]["return_routed_experts"] is True
        return done

    done = asyncio.run(run())
    assert done.channels == {"routed_experts": tape(12)[6:].reshape(6, -1).tolist()}


def test_experts_are_asked_for_where_they_are_wanted() -> None:
    async def run() -> None:
        fake = sglang_server(all_positions=False)
        engine = await SGLangEngine.connect(fake.connection(), logprobs="scaled")
        assert (await engine.generate([1, 2], SamplingParams(6))).channels == {}
        assert not any("return_routed_experts" in body for body in fake.bodies("/generate"))
        none = sglang_server(all_positions=False, experts=False)
        with pytest.raises(EngineError, match="--enable-return-routed-experts"):
            await SGLangEngine.connect(none.connection(), logprobs="scaled", routed_experts=True)

    asyncio.run(run())


def test_experts_of_a_wrong_number_of_positions_are_refused() -> None:
    for positions in (1, 5, 7, 11, 13):
        with pytest.raises(EngineAnswerError, match=f"has {positions} positions"):
            experts_of(tape(positions), 7, 6)
    assert experts_of(tape(7), 8, 0) == []


HEAD = b"\x93NUMPY\x01\x00"


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, 2],
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
    with pytest.raises(EngineAnswerError, match="routed_experts"):
        npy_experts(value)


def test_an_array_that_says_it_is_huge_takes_no_memory() -> None:
    header = repr({"descr": "<i8", "fortran_order": False, "shape": (1 << 40, 1 << 20, 64)}).encode().ljust(117) + b"\n"
    with pytest.raises(EngineAnswerError, match="routed_experts"):
        npy_experts(base64.b64encode(HEAD + len(header).to_bytes(2, "little") + header).decode())


@pytest.mark.parametrize(
    ("value", "kind", "width"),
    [(None, None, 6), (flat(np.zeros(5, np.int32)), None, 6), ("", None, 6), (flat(np.zeros(3, np.uint8)), None, None)]
    + [(flat(np.zeros(6, np.int32)), kind, 6) for kind in ("float32", 1, ["int32"])],
)
def test_what_are_no_flat_experts_is_refused(value: Any, kind: Any, width: int | None) -> None:
    with pytest.raises(EngineAnswerError, match="routed_experts"):
        flat_experts(value, kind, width)


def test_a_router_passes_channels_on() -> None:
    recorded = recording("sglang_generate_prompt_lp")
    engines = [sglang(recorded["response"])[0] for _ in range(2)]
    router = Router(engines)
    prompt, sampling = recorded["request"]["json"]["input_ids"], SamplingParams(2, top_logprobs=2)
    done = asyncio.run(router.generate(prompt, sampling))
    assert len(done.channels["top_logprobs"]) == 2
    assert replace(router.capabilities, engine="") == replace(engines[0].capabilities, engine="")
