"""SGLang: requests and answers as recorded, normalised."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.support import Fake, Model, Reply, answer_bytes, cut, recording
from tokentrace.engines.protocol import (
    OPTIONAL,
    Capabilities,
    EngineAnswerError,
    EngineError,
    EngineRefusal,
    EngineUnavailable,
    FinishReason,
    LogprobKind,
    SamplingParams,
    collected,
)
from tokentrace.engines.sglang import GENERATE, SGLangEngine
from tokentrace.trajectory.turns import VersionSpan

TINY = Capabilities("sglang", model="tiny", max_length=4096, vocab_size=1024)
SAID = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "skip_special_tokens": False,
}
IGNORED = {"logit_bias", "ignore_eos"}


def engine(fake: Fake) -> SGLangEngine:
    return SGLangEngine(fake.connection(), TINY)


def expected_body(recorded: Any) -> Any:
    body = {"logprob_start_len": -1, "stream": False} | copy.deepcopy(recorded["request"]["json"])
    body["sampling_params"] = {k: v for k, v in body["sampling_params"].items() if k not in IGNORED} | SAID
    if "rid" in body:
        body["rid"] = f"{len(body['rid'])}-{body['rid']}"
    return body


def asked(recorded: Any) -> tuple[list[int], SamplingParams]:
    body = recorded["request"]["json"]
    params = body["sampling_params"]
    stops = tuple(params.get("stop_token_ids", ()))
    return body["input_ids"], SamplingParams(
        params["max_new_tokens"], temperature=params["temperature"], stop_token_ids=stops
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sglang_generate", FinishReason.LENGTH),
        ("sglang_generate_eos", FinishReason.STOP),
        ("sglang_generate_stoptok", FinishReason.STOP),
        ("sglang_abort_victim", FinishReason.ABORT),
        ("sglang_pause_in_place_victim", FinishReason.LENGTH),
    ],
)
def test_whole_answers_are_read_as_recorded(name: str, reason: FinishReason) -> None:
    recorded = recording(name)
    fake = Fake().on(GENERATE, recorded["response"])
    done = asyncio.run(engine(fake).generate(*asked(recorded), request_id=recorded["request"]["json"].get("rid")))
    assert fake.bodies(GENERATE) == [expected_body(recorded)]
    meta = recorded["response"]["meta_info"]
    assert done.ids.tolist() == recorded["response"]["output_ids"]
    assert np.array_equal(done.logprobs, np.float32([row[0] for row in meta["output_token_logprobs"]]))
    assert done.finish_reason is reason
    assert done.versions == tuple(VersionSpan(*row.values()) for row in meta["weight_versions"])
    assert done.cached_tokens == meta["cached_tokens"]


# -- streams


def incremental(text: str, *, logprobs_so_far: bool) -> str:
    """A recorded cumulative stream as ``--incremental-streaming-output`` gives it."""
    made, seen = [], 0
    for event in text.removesuffix("\n\n").split("\n\n"):
        if event != "data: [DONE]":
            value = json.loads(event.removeprefix("data: "))
            total = len(value["output_ids"])
            value["output_ids"] = value["output_ids"][seen:]
            if not logprobs_so_far:
                value["meta_info"]["output_token_logprobs"] = value["meta_info"]["output_token_logprobs"][seen:]
            seen = total
            event = f"data: {json.dumps(value)}"
        made.append(event)
    return "\n\n".join(made) + "\n\n"


@pytest.mark.parametrize("shape", ["cumulative", "incremental", "ids alone incremental"])
@settings(max_examples=25, deadline=None)
@given(places=st.lists(st.integers(0, 10_000), max_size=40))
def test_a_stream_cut_anywhere_gives_the_same_pieces(shape: str, places: list[int]) -> None:
    recorded = recording("sglang_generate_stream")
    text = recorded["response"]
    if shape != "cumulative":
        text = incremental(text, logprobs_so_far=shape != "incremental")
    fake = Fake().on(GENERATE, Reply(cut(text.encode(), places)))

    async def run() -> list[Any]:
        return [delta async for delta in engine(fake).stream(*asked(recorded))]

    deltas = asyncio.run(run())
    assert [delta.ids.tolist() for delta in deltas] == [[131], [915], [915]]
    assert np.array_equal(
        np.concatenate([delta.logprobs for delta in deltas]),
        np.float32([-4.636009216308594, -4.471065044403076, -4.712242126464844]),
    )
    assert [delta.finish_reason for delta in deltas] == [None, None, FinishReason.LENGTH]
    assert (deltas[-1].versions, deltas[-1].cached_tokens) == ((VersionSpan("default", 0, 3),), 5)
    assert fake.bodies(GENERATE) == [expected_body(recorded)]


def events(*totals: tuple[list[int], int]) -> bytes:
    made = []
    for ids, total in totals:
        meta = {"prompt_tokens": 6, "completion_tokens": total, "finish_reason": None}
        meta["output_token_logprobs"] = [[-1.0, one, None] for one in ids]
        made.append(f"data: {json.dumps({'output_ids': ids, 'meta_info': meta})}\n\n")
    return "".join(made).encode()


@pytest.mark.parametrize(
    "text",
    [
        events(([1], 1), ([1, 2], 4)),
        events(([1, 2], 2), ([1], 1)),
        events(([1], 1), ([7, 2], 2)),
        events(([1], 1)),
    ],
)
def test_a_stream_that_skips_or_takes_back_is_an_error(text: bytes) -> None:
    fake = Fake().on(GENERATE, Reply([text]))
    with pytest.raises(EngineAnswerError):
        asyncio.run(collected(engine(fake).stream([1] * 6, SamplingParams(5))))
    assert len(fake.requests) == 1


# -- answers that are not what they must be


def with_meta(**changes: Any) -> Any:
    answer = recording("sglang_generate")["response"]
    answer["meta_info"] |= changes
    return answer


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (with_meta(output_token_logprobs=[[-1.0, 477, None]]), EngineAnswerError),
        (with_meta(output_token_logprobs=None), EngineAnswerError),
        (with_meta(output_token_logprobs=[[None, 477, None]] * 6), EngineAnswerError),
        (with_meta(output_token_logprobs=[[-1.0, 478, None]] * 6), EngineAnswerError),
        (with_meta(prompt_tokens=119), EngineAnswerError),
        (with_meta(finish_reason={"type": "tired"}), EngineAnswerError),
        (with_meta(finish_reason={"type": "stop", "matched": 3}), EngineAnswerError),
        (with_meta(finish_reason="length"), EngineAnswerError),
        (recording("sglang_generate")["response"] | {"output_ids": [1024] * 6}, EngineAnswerError),
        (with_meta(finish_reason={"type": "abort", "status_code": 400, "message": "bad"}), EngineRefusal),
        (with_meta(finish_reason={"type": "abort", "status_code": 503, "message": "full"}), EngineUnavailable),
        ({"text": "hi"}, EngineAnswerError),
        ([], EngineAnswerError),
    ],
)
def test_an_answer_that_is_no_completion_is_an_error(answer: Any, error: type[Exception]) -> None:
    fake = Fake().on(GENERATE, answer)
    with pytest.raises(error):
        asyncio.run(engine(fake).generate(*asked(recording("sglang_generate"))))
    assert len(fake.requests) == 1


def test_what_could_kill_the_server_is_not_sent() -> None:
    fake = Fake()
    for prompt, sampling in [([1024], SamplingParams(1)), ([1], SamplingParams(1, stop_token_ids=(1024,)))]:
        with pytest.raises(EngineRefusal):
            asyncio.run(engine(fake).generate(prompt, sampling))
    body = recording("sglang_toolong2")["request"]["json"]
    with pytest.raises(EngineRefusal):
        asyncio.run(engine(fake).generate(body["input_ids"], SamplingParams(20)))
    assert not fake.requests


# -- abort, pause


def test_abort_pause_and_resume_are_sent_as_recorded() -> None:
    fake = Fake()
    names = ["sglang_abort", "sglang_pause_in_place", "sglang_continue_in_place"]
    for name in names:
        fake.on(recording(name)["request"]["path"], Reply([answer_bytes(recording(name))]))
    one = engine(fake)

    async def run() -> None:
        await one.abort("ab-1")
        await one.pause()
        await one.resume()
        await one.close()

    asyncio.run(run())
    recorded = [recording(name)["request"] for name in names]
    assert recorded[0]["json"] == {"rid": "ab-1"}
    recorded[0]["json"] = {"rid": "4-ab-1"}
    assert fake.requests == [(one["method"], one["path"], one["json"]) for one in recorded]


# -- connecting


def served(*, mode: str = "scaled", **model: Any) -> Fake:
    """The shapes of SGLang's documentation; the sampled answer is a recorded one."""
    served_model = Model(mode, np.linspace(0.0, -2.0, 64))

    def generate(body: Any) -> Any:
        answer = recording("sglang_generate_prompt_lp")["response"]
        params = body["sampling_params"]
        _, logprobs, ranked = served_model.told(params["temperature"], max(params["top_k"], 0))
        answer["meta_info"]["output_top_logprobs"] = [[[logprobs[ranked[0]], ranked[0], None]]]
        return answer

    fake = Fake().on(GENERATE, generate)
    fake.on(
        "/get_model_info", {"model_path": "models/tiny", "is_generation": True, "weight_version": "default"} | model
    )
    fake.on("/get_server_info", {"version": "0.5.23", "context_length": None, "max_total_num_tokens": 20480})
    return fake.on("/v1/models", {"data": [{"id": "tiny", "max_model_len": 4096}]})


def connect(fake: Fake, **options: Any) -> Capabilities:
    async def run() -> Capabilities:
        return (await SGLangEngine.connect(fake.connection(), **options)).capabilities

    return asyncio.run(run())


@pytest.mark.parametrize("mode", ["processed", "scaled", "raw"])
def test_connecting_finds_out_what_a_server_can_do(mode: str) -> None:
    assert connect(served(mode=mode), vocab_size=1024) == Capabilities(
        "sglang",
        version="0.5.23",
        model="tiny",
        max_length=4096,
        vocab_size=1024,
        logprobs=LogprobKind(mode),
        streams=True,
        aborts=True,
        pauses=True,
        versions=True,
        top_logprobs=20,
        structures=True,
        sampling=frozenset(OPTIONAL),
        weights=True,
    )


def test_the_vocabulary_must_be_known() -> None:
    with pytest.raises(EngineError):
        connect(served())
    assert connect(served(vocab_size=77)).vocab_size == 77


def test_ids_are_scored_by_the_logprobs_of_the_prompt() -> None:
    told = [[None, 5, None], [-0.5, 7, None], [-1.5, 9, None]]
    fake = Fake().on(GENERATE, {"output_ids": [1], "meta_info": {"input_token_logprobs": told}})
    scored = asyncio.run(engine(fake).score([5, 7, 9]))
    assert np.isnan(scored[0])
    assert scored[1:].tolist() == [-0.5, -1.5]
    (body,) = fake.bodies(GENERATE)
    assert (body["input_ids"], body["logprob_start_len"], body["return_logprob"]) == ([5, 7, 9], 0, True)
    with pytest.raises(EngineAnswerError):
        asyncio.run(engine(fake).score([5, 8, 9]))
    with pytest.raises(EngineAnswerError):
        asyncio.run(engine(fake).score([5, 7, 9, 2]))
