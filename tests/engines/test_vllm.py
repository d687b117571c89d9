"""vLLM: requests and answers as recorded, normalised."""

from __future__ import annotations

import asyncio
import copy
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.support import Fake, Reply, answer_bytes, cut, recording
from tests.engines.vllm_server import TINY, content, engine, with_choice
from tokentrace.engines.protocol import (
    OPTIONAL,
    Completion,
    EngineAnswerError,
    EngineError,
    EngineRefusal,
    FinishReason,
    LogprobKind,
    SamplingParams,
)
from tokentrace.engines.vllm import COMPLETIONS, GENERATE, VLLMEngine
from tokentrace.trajectory import Trajectory
from tokentrace.trajectory.turns import VersionSpan

NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
ALL = {"top_p": 1.0, "top_k": 0}
IGNORED = {"logit_bias", "ignore_eos"}
"""What the recordings used to make the model do something; an adapter has no such setting."""


def expected_body(recorded: Any, **changes: Any) -> Any:
    """The recorded body, with every sampling setting said, and without what only the recording needed."""
    body = copy.deepcopy(recorded["request"]["json"])
    params = body.get("sampling_params", body)
    for name in IGNORED:
        params.pop(name, None)
    params.update({key: value for key, value in (NEUTRAL | ALL).items() if key not in params})
    return body | {"return_token_ids": False} | changes


def asked(recorded: Any) -> tuple[list[int], SamplingParams]:
    body = recorded["request"]["json"]
    params = body.get("sampling_params", body)
    sampling = SamplingParams(
        params["max_tokens"],
        temperature=params.get("temperature", 1.0),
        seed=params.get("seed"),
        stop_token_ids=tuple(params.get("stop_token_ids", ())),
    )
    return body.get("token_ids") or body["prompt"], sampling


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vllm_generate", FinishReason.LENGTH),
        ("vllm_generate_eos", FinishReason.STOP),
        ("vllm_generate_stop_token", FinishReason.STOP),
        ("vllm_pause_abort_victim", FinishReason.ABORT),
        ("vllm_abort_victim_ab-2", FinishReason.ABORT),
        ("vllm_weight_version_spans", FinishReason.LENGTH),
    ],
)
def test_whole_answers_are_read_as_recorded(name: str, reason: FinishReason) -> None:
    recorded = recording(name)
    fake = Fake().on(GENERATE, recorded["response"])
    prompt, sampling = asked(recorded)
    request_id = recorded["request"]["json"].get("request_id")
    done = asyncio.run(engine(fake, check_echo=False).generate(prompt, sampling, request_id=request_id))
    assert fake.bodies(GENERATE) == [expected_body(recorded)]
    choice = recorded["response"]["choices"][0]
    assert done.ids.tolist() == choice["token_ids"]
    assert np.array_equal(done.logprobs, np.float32([row["logprob"] for row in choice["logprobs"]["content"]]))
    assert done.finish_reason is reason
    assert done.versions == tuple(VersionSpan(*row.values()) for row in choice["weight_versions"])
    assert done.cached_tokens == recorded["response"]["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_the_prompt_that_was_read_is_compared_however_it_is_written(separators: tuple[str, str]) -> None:
    recorded = recording("vllm_generate_top")
    prompt, sampling = asked(recorded)

    def answered(ids: Any) -> Completion:
        answer = json.dumps({**recorded["response"], "prompt_token_ids": ids}, separators=separators)
        return asyncio.run(engine(Fake().on(GENERATE, Reply([answer.encode()]))).generate(prompt, sampling))

    assert answered(prompt).ids.tolist() == [518, 654]
    for other in (prompt[1:], [*prompt[:9], 1, *prompt[10:]], [*prompt, 1], [*prompt[:-1], prompt[-1] * 10]):
        with pytest.raises(EngineAnswerError):
            answered(other)
    with pytest.raises(EngineAnswerError):
        answered(None)
    with pytest.raises(EngineAnswerError):
        answered({"prompt_token_ids": prompt})  # in a place where it says nothing


def test_what_vllm_would_clip_is_not_sent() -> None:
    """Recorded: 4090 of prompt and 20 asked for gave 6 tokens and ``length``."""
    recorded = recording("vllm_generate_bad_toolong2")
    prompt, sampling = asked(recorded)
    fake = Fake()
    with pytest.raises(EngineRefusal) as caught:
        asyncio.run(engine(fake).generate(prompt, sampling))
    assert caught.value.status is None
    assert not fake.requests


# -- streams


@pytest.mark.parametrize(
    ("name", "path"), [("vllm_generate_stream", GENERATE), ("vllm_completions_ids_stream", COMPLETIONS)]
)
@settings(max_examples=25, deadline=None)
@given(places=st.lists(st.integers(0, 10_000), max_size=40))
def test_a_stream_cut_anywhere_gives_the_same_pieces(name: str, path: str, places: list[int]) -> None:
    recorded = recording(name)
    fake = Fake().on(path, Reply(cut(answer_bytes(recorded), places)))
    prompt, sampling = asked(recorded)

    async def run() -> list[Any]:
        return [delta async for delta in engine(fake, path=path).stream(prompt, sampling)]

    deltas = asyncio.run(run())
    assert [delta.ids.tolist() for delta in deltas] == [[687], [687], [687]]
    assert [delta.finish_reason for delta in deltas] == [None, None, FinishReason.LENGTH]
    assert deltas[-1].cached_tokens == 256
    assert deltas[-1].versions == ((VersionSpan("default", 0, 3),) if path == GENERATE else ())
    extra = {} if path == GENERATE else {"add_special_tokens": False, "return_tokens_as_token_ids": True}
    assert fake.bodies(path) == [expected_body(recorded, return_token_ids=True, **extra)]


# -- the other endpoint


def test_completions_with_ids_are_read_as_recorded() -> None:
    recorded = recording("vllm_completions_ids")
    fake = Fake().on(COMPLETIONS, recorded["response"])
    done = asyncio.run(engine(fake, path=COMPLETIONS).generate(*asked(recorded)))
    assert fake.bodies(COMPLETIONS) == [expected_body(recorded, return_token_ids=True, add_special_tokens=False)]
    native = recording("vllm_generate")["response"]["choices"][0]
    assert done.ids.tolist() == native["token_ids"]
    assert np.array_equal(done.logprobs, np.float32([row["logprob"] for row in native["logprobs"]["content"]]))
    assert (done.finish_reason, done.versions, done.cached_tokens) == (FinishReason.LENGTH, (), 0)


# -- answers that are not what they must be


@pytest.mark.parametrize(
    "answer",
    [
        recording("vllm_generate_nologprobs")["response"],
        with_choice(logprobs=content((518, -1.0), (654, -2.0))),
        with_choice(token_ids=[518], logprobs=content((519, -1.0))),
        with_choice(token_ids=[1024], logprobs=content((1024, -1.0))),
        with_choice(token_ids=[-1], logprobs=content((-1, -1.0))),
        with_choice(token_ids=["518"], logprobs=content(("518", -1.0))),
        with_choice(token_ids=[5.0], logprobs=content((5.0, -1.0))),
        with_choice(token_ids=[True], logprobs=content((True, -1.0))),
        with_choice(token_ids=None),
        with_choice(token_ids=[518], logprobs=content((518, None))),
        with_choice(token_ids=[518], logprobs=content((518, "-1"))),
        with_choice(token_ids=[518], logprobs=content((518, 2.5))),
        with_choice(token_ids=[518], logprobs=content((518, -math.inf))),
        with_choice(finish_reason="tired"),
        with_choice(finish_reason=None),
        with_choice(finish_reason="stop", stop_reason=1002),
        with_choice(token_ids=[], logprobs=None, finish_reason="stop"),
        with_choice(weight_versions=[{"version": "a", "start": 0, "end": 5}]),
        with_choice(weight_versions=[{"version": "a", "start": 1, "end": 6}]),
        {"choices": []},
        {"object": "list"},
        [1],
    ],
)
def test_an_answer_that_is_no_completion_is_an_error(answer: Any) -> None:
    recorded = recording(
        "vllm_generate_nologprobs" if answer == recording("vllm_generate_nologprobs")["response"] else "vllm_generate"
    )
    fake = Fake().on(GENERATE, answer)
    with pytest.raises(EngineAnswerError):
        asyncio.run(engine(fake, check_echo=False).generate(*asked(recorded)))
    assert len(fake.requests) == 1, "what was sampled is not sampled again"


# -- abort, pause


def test_abort_pause_and_resume_are_sent_as_recorded() -> None:
    fake = Fake()
    names = ["vllm_abort_call_ab-2", "vllm_pause_keep", "vllm_resume", "vllm_is_paused"]
    for name in names:
        fake.on(recording(name)["request"]["path"], Reply([answer_bytes(recording(name))]))
    one = engine(fake)

    async def run() -> None:
        await one.abort("ab-2")
        await one.pause()
        await one.resume()
        assert await one.is_paused() is False
        await one.close()

    asyncio.run(run())
    recorded = [recording(name)["request"] for name in names]
    assert fake.requests == [(one["method"], one["path"], one["json"]) for one in recorded]
    assert recording("vllm_abort_call_ab-1")["request"]["json"] == {"request_ids": ["ab-1"]}, "answered 200, in vain"


# -- JSON

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS])
def test_min_p_penalties_and_stop_texts_are_sent_and_the_text_that_ended_it_is_told(path: str) -> None:
    wanted = {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2}
    recorded = recording("vllm_generate_stop_token" if path == GENERATE else "vllm_completions_ids")
    prompt, _ = asked(recorded)
    answer = copy.deepcopy(recorded["response"])
    answer["choices"][0] |= {"finish_reason": "stop", "stop_reason": "\n\n"}
    fake = Fake().on(path, answer)
    able = VLLMEngine(
        fake.connection(),
        replace(TINY, logprobs=LogprobKind.PROCESSED, sampling=frozenset(OPTIONAL)),
        path=path,
        check_echo=False,
    )
    done = asyncio.run(able.generate(prompt, SamplingParams(64, stop=["x", "\n\n"], **wanted)))
    assert (done.finish_reason, done.stopped_by) == (FinishReason.STOP, "\n\n")
    assert len(done.ids) == len(answer["choices"][0]["token_ids"])
    [body] = fake.bodies(path)
    params = body.get("sampling_params", body)
    assert {name: params[name] for name in wanted} == wanted
    assert (params["stop"], params["skip_special_tokens"]) == (["x", "\n\n"], False)


# -- the body


def test_the_prompts_own_json_text_is_sent() -> None:
    trajectory = Trajectory()
    trajectory.begin(recording("vllm_generate")["request"]["json"]["token_ids"])
    recorded = recording("vllm_generate")
    fake = Fake().on(GENERATE, recorded["response"])
    prompt, sampling = asked(recorded)
    one = engine(fake, check_echo=False)
    for wire in (trajectory.wire_parts(), None):
        asyncio.run(one.generate(np.array(prompt, np.int32), sampling, wire=wire))
    assert fake.bodies(GENERATE) == [expected_body(recorded)] * 2
    with pytest.raises(EngineError):
        asyncio.run(one.generate(prompt[1:], sampling, wire=trajectory.wire_parts()))


def test_ids_are_scored_by_the_logprobs_of_the_prompt() -> None:
    told = [None, {"7": {"logprob": -0.5}}, {"9": {"logprob": -1.5}, "3": {"logprob": -0.1}}]
    fake = Fake().on(COMPLETIONS, {"choices": [{"prompt_logprobs": told}]})
    scored = asyncio.run(engine(fake).score([5, 7, 9]))
    assert np.isnan(scored[0])
    assert scored[1:].tolist() == [-0.5, -1.5]
    (body,) = fake.bodies(COMPLETIONS)
    assert (body["prompt"], body["prompt_logprobs"], body["add_special_tokens"]) == ([5, 7, 9], 0, False)
    with pytest.raises(EngineAnswerError):
        asyncio.run(engine(fake).score([5, 8, 9]))
