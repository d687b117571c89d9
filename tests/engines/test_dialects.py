"""All servers: requests and answers match the recordings, and invalid answers are errors."""

import asyncio
import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.dialects import DIALECTS, LLAMACPP, RAW, SGLANG, TINY, VLLM, VLLM_COMPLETIONS, Dialect, inputs, spans
from tests.engines.support import Fake, Reply, answer_bytes, cut, json_reply, recording
from tokentrace.engines.errors import EngineAnswerError, EngineError, EngineRefusal, EngineUnavailable
from tokentrace.engines.protocol import Completion, FinishReason, SamplingParams, collected
from tokentrace.trajectory.turns import LogprobKind, VersionSpan

STOP, LENGTH, ABORT = FinishReason
RECORDED = [
    (VLLM, "vllm_generate", LENGTH),
    (VLLM, "vllm_generate_eos", STOP),
    (VLLM, "vllm_generate_stop_token", STOP),
    (VLLM, "vllm_pause_abort_victim", ABORT),
    (VLLM, "vllm_abort_victim_ab-2", ABORT),
    (VLLM, "vllm_weight_version_spans", LENGTH),
    (VLLM_COMPLETIONS, "vllm_completions_ids", LENGTH),
    (SGLANG, "sglang_generate", LENGTH),
    (SGLANG, "sglang_generate_eos", STOP),
    (SGLANG, "sglang_generate_stoptok", STOP),
    (SGLANG, "sglang_abort_victim", ABORT),
    (SGLANG, "sglang_pause_in_place_victim", LENGTH),
    (LLAMACPP, "llamacpp_completion_eos", STOP),
]


def generate(dialect: Dialect, name: str, answer: Any, **options: Any) -> tuple[Completion, Fake]:
    """The completion of a recorded request that gets another answer."""
    engine, fake = dialect.engine(answer, **options)
    prompt, sampling, request_id = inputs(recording(name))
    return asyncio.run(engine.generate(prompt, sampling, request_id=request_id)), fake


@pytest.mark.parametrize(("dialect", "name", "reason"), RECORDED, ids=[row[1] for row in RECORDED])
def test_requests_and_whole_answers_are_as_recorded(dialect: Dialect, name: str, reason: FinishReason) -> None:
    recorded = recording(name)
    done, fake = generate(dialect, name, recorded["response"])
    assert fake.bodies(dialect.path) == [dialect.expected_body(recorded)]
    expected = dialect.read(recorded["response"])
    assert done.ids.tolist() == expected["ids"]
    assert np.array_equal(done.logprobs, np.float32(expected["logprobs"]))
    assert (done.finish_reason, done.versions) == (reason, spans(expected["versions"]))
    assert done.cached_tokens == expected["cached"]


def incremental(text: str, *, logprobs_so_far: bool) -> str:
    """SGLang's recorded cumulative stream, converted to that of ``--incremental-streaming-output``."""
    events, seen = [], 0
    for event in text.removesuffix("\n\n").split("\n\n"):
        if event != "data: [DONE]":
            value = json.loads(event.removeprefix("data: "))
            total = len(value["output_ids"])
            value["output_ids"] = value["output_ids"][seen:]
            if not logprobs_so_far:
                value["meta_info"]["output_token_logprobs"] = value["meta_info"]["output_token_logprobs"][seen:]
            seen = total
            event = f"data: {json.dumps(value)}"
        events.append(event)
    return "\n\n".join(events) + "\n\n"


SGLANG_STREAM = recording("sglang_generate_stream")["response"]
SGLANG_PIECES = ([131, 915, 915], [-4.636009216308594, -4.471065044403076, -4.712242126464844], 5)
STREAMS = [
    (VLLM, "vllm_generate_stream", None, ([687] * 3, None, 256)),
    (VLLM_COMPLETIONS, "vllm_completions_ids_stream", None, ([687] * 3, None, 256)),
    (SGLANG, "sglang_generate_stream", SGLANG_STREAM, SGLANG_PIECES),
    (SGLANG, "sglang_generate_stream", incremental(SGLANG_STREAM, logprobs_so_far=True), SGLANG_PIECES),
    (SGLANG, "sglang_generate_stream", incremental(SGLANG_STREAM, logprobs_so_far=False), SGLANG_PIECES),
]


@pytest.mark.parametrize(("dialect", "name", "text", "pieces"), STREAMS)
@settings(max_examples=20, deadline=None)
@given(places=st.lists(st.integers(0, 10_000), max_size=40))
def test_a_stream_cut_anywhere_gives_the_same_pieces(
    dialect: Dialect, name: str, text: str | None, pieces: Any, places: list[int]
) -> None:
    recorded, (ids, logprobs, cached) = recording(name), pieces
    data = answer_bytes(recorded) if text is None else text.encode()
    echo = {} if dialect is SGLANG else {"check_echo": True}
    engine, fake = dialect.engine(Reply(cut(data, places)), **echo)
    prompt, sampling, _ = inputs(recorded)

    async def run() -> list[Any]:
        return [delta async for delta in engine.stream(prompt, sampling)]

    deltas = asyncio.run(run())
    assert [delta.ids.tolist() for delta in deltas] == [[one] for one in ids]
    if logprobs is not None:
        assert np.array_equal(np.concatenate([delta.logprobs for delta in deltas]), np.float32(logprobs))
    assert [delta.finish_reason for delta in deltas] == [None, None, LENGTH]
    assert deltas[-1].versions == (() if dialect is VLLM_COMPLETIONS else (VersionSpan("default", 0, 3),))
    assert deltas[-1].cached_tokens == cached
    assert fake.bodies(dialect.path) == [dialect.expected_body(recorded)]


def events(*totals: tuple[list[int], int]) -> bytes:
    out = []
    for ids, total in totals:
        meta = {"prompt_tokens": 6, "completion_tokens": total, "finish_reason": None}
        meta["output_token_logprobs"] = [[-1.0, one, None] for one in ids]
        out.append(f"data: {json.dumps({'output_ids': ids, 'meta_info': meta})}\n\n")
    return "".join(out).encode()


@pytest.mark.parametrize(
    "text",
    [events(([1], 1), ([1, 2], 4)), events(([1, 2], 2), ([1], 1)), events(([1], 1), ([7, 2], 2)), events(([1], 1))],
    ids=["skips", "takes back", "changes", "breaks off"],
)
def test_a_stream_that_skips_or_takes_back_is_an_error(text: bytes) -> None:
    engine, fake = SGLANG.engine(Reply([text]))
    with pytest.raises(EngineAnswerError):
        asyncio.run(collected(engine.stream([1] * 6, SamplingParams(5))))
    assert len(fake.requests) == 1


# -- invalid answers


def choice(**changes: Any) -> Any:
    answer = recording("vllm_generate")["response"]
    answer["choices"][0] |= changes
    return answer


def content(*rows: tuple[Any, Any]) -> Any:
    return {"content": [{"token_id": one, "logprob": value} for one, value in rows]}


def one_id(id: Any, value: Any) -> Any:
    return choice(token_ids=[id], logprobs=content((id, value)))


def meta(**changes: Any) -> Any:
    answer = recording("sglang_generate")["response"]
    answer["meta_info"] |= changes
    return answer


def completion(**changes: Any) -> Any:
    return recording("llamacpp_completion_eos")["response"] | changes


BROKEN = {
    (VLLM, "vllm_generate"): [
        choice(logprobs=content((518, -1.0), (654, -2.0))),
        choice(token_ids=[518], logprobs=content((519, -1.0))),
        *(one_id(odd, -1.0) for odd in (1024, -1, "518", 5.0, True)),
        *(one_id(518, odd) for odd in (None, "-1", 2.5, -math.inf)),
        choice(token_ids=None),
        choice(logprobs=None),
        choice(finish_reason="tired"),
        choice(finish_reason=None),
        choice(finish_reason="stop", stop_reason=1002),
        choice(token_ids=[], logprobs=None, finish_reason="stop"),
        choice(weight_versions=[{"version": "a", "start": 0, "end": 5}]),
        choice(weight_versions=[{"version": "a", "start": 1, "end": 6}]),
        choice(token_ids=[518] * 7, logprobs=content(*[(518, -1.0)] * 7)),
        choice() | {"usage": {"prompt_tokens": 5}},
        {"choices": []},
        {"object": "list"},
        [1],
    ],
    (VLLM, "vllm_generate_nologprobs"): [recording("vllm_generate_nologprobs")["response"]],
    (SGLANG, "sglang_generate"): [
        meta(output_token_logprobs=[[-1.0, 477, None]]),
        meta(output_token_logprobs=None),
        meta(output_token_logprobs=[[None, 477, None]] * 6),
        meta(output_token_logprobs=[[-1.0, 478, None]] * 6),
        meta(prompt_tokens=119),
        meta(finish_reason={"type": "tired"}),
        meta(finish_reason={"type": "stop", "matched": 3}),
        meta(finish_reason="length"),
        recording("sglang_generate")["response"] | {"output_ids": [1024] * 6},
        {"text": "hi"},
        [],
    ],
    (LLAMACPP, "llamacpp_completion_eos"): [
        completion(tokens_evaluated=121),
        completion(stop_type="word"),
        completion(truncated=True),
        completion(tokens=[1024]),
        completion(tokens=None),
        completion(completion_probabilities=[{"id": 9, "logprob": -1.0}]),
        completion(completion_probabilities=[{"id": 1002, "logprob": None}]),
        completion(completion_probabilities=[{"id": 1002}]),
        completion(completion_probabilities=[]),
        # recorded: 4 tokens, 2 logprobs; the third is a byte of an incomplete character
        recording("llamacpp_completion")["response"],
    ],
}


@pytest.mark.parametrize(("dialect", "name"), BROKEN, ids=[name for _, name in BROKEN])
def test_an_invalid_answer_is_an_error_and_is_not_retried(dialect: Dialect, name: str) -> None:
    for answer in BROKEN[dialect, name]:
        engine, fake = dialect.engine(answer)
        prompt, sampling, _ = inputs(recording(name))
        with pytest.raises(EngineAnswerError):
            asyncio.run(engine.generate(prompt, sampling))
        assert len(fake.requests) == 1, "what was sampled is not sampled again"


@pytest.mark.parametrize(("status", "error"), [(400, EngineRefusal), (503, EngineUnavailable)])
def test_a_request_that_the_scheduler_drops_is_refused_or_unavailable(status: int, error: Any) -> None:
    dropped = meta(finish_reason={"type": "abort", "status_code": status, "message": "bad"})
    with pytest.raises(error):
        generate(SGLANG, "sglang_generate", dropped)


# -- requests that are refused locally


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.name)
def test_requests_that_a_server_would_clip_or_crash_on_are_not_sent(dialect: Dialect) -> None:
    """Recorded: for 4090 prompt tokens and ``max_tokens=20``, vLLM returned 6 tokens and ``length``."""
    engine, fake = dialect.engine({})
    far = [1] * 4090
    stops = SamplingParams(1, stop_token_ids=(1024,))
    for prompt, sampling in (([1024], SamplingParams(1)), ([1], stops), (far, SamplingParams(20))):
        with pytest.raises(EngineRefusal) as caught:
            asyncio.run(engine.generate(prompt, sampling))
        assert caught.value.status is None
    assert not fake.requests


# -- the echoed prompt


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_the_echoed_prompt_is_compared_in_any_json_spacing(separators: tuple[str, str]) -> None:
    recorded = recording("vllm_generate_top")
    prompt, sampling, _ = inputs(recorded)

    def answered(ids: Any) -> Completion:
        answer = json.dumps({**recorded["response"], "prompt_token_ids": ids}, separators=separators)
        engine, _ = VLLM.engine(Reply([answer.encode()]), check_echo=True)
        return asyncio.run(engine.generate(prompt, sampling))

    assert answered(prompt).ids.tolist() == [518, 654]
    wrong = (prompt[1:], [*prompt[:9], 1, *prompt[10:]], [*prompt, 1], [*prompt[:-1], prompt[-1] * 10])
    for echo in (*wrong, None, {"prompt_token_ids": prompt}):
        with pytest.raises(EngineAnswerError):
            answered(echo)


# -- sampling settings


@pytest.mark.parametrize(
    ("dialect", "name"), [(VLLM, "vllm_generate_stop_token"), (VLLM_COMPLETIONS, "vllm_completions_ids")]
)
def test_min_p_penalties_and_stop_texts_are_sent_and_reported(dialect: Dialect, name: str) -> None:
    penalties = {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2}
    answer = recording(name)["response"]
    answer["choices"][0] |= {"finish_reason": "stop", "stop_reason": "\n\n"}
    engine, fake = dialect.engine(answer, capabilities=TINY, check_echo=False)
    prompt = inputs(recording(name))[0]
    done = asyncio.run(engine.generate(prompt, SamplingParams(64, stop=["x", "\n\n"], **penalties)))
    assert (done.finish_reason, done.stopped_by) == (STOP, "\n\n")
    assert len(done.ids) == len(answer["choices"][0]["token_ids"])
    [body] = fake.bodies(dialect.path)
    params = body.get("sampling_params", body)
    assert {name: params[name] for name in penalties} == penalties
    assert (params["stop"], params["skip_special_tokens"]) == (["x", "\n\n"], False)


OBJECT = {"type": "object", "properties": {"n": {"type": "integer"}}}
STRUCTURED = [
    (VLLM, "structured_outputs", {"json_object": True}, {"json": OBJECT}),
    (VLLM_COMPLETIONS, "structured_outputs", {"json_object": True}, {"json": OBJECT}),
    (SGLANG, "json_schema", json.dumps({"type": "object"}), json.dumps(OBJECT)),
    (LLAMACPP, "json_schema", {"type": "object"}, OBJECT),
]


@pytest.mark.parametrize(("dialect", "field", "any_object", "schema"), STRUCTURED, ids=lambda one: str(one)[:20])
def test_json_is_requested_in_each_servers_format(dialect: Dialect, field: str, any_object: Any, schema: Any) -> None:
    engine, fake = dialect.engine(json_reply({}, 400), capabilities=replace(TINY, structures=True))
    for structure in ({"type": "json_object"}, {"type": "json_schema", "schema": OBJECT}):
        with pytest.raises(EngineRefusal):
            asyncio.run(engine.generate([1], SamplingParams(8, structure=structure)))
    bodies = fake.bodies(dialect.path)
    assert [body.get("sampling_params", body)[field] for body in bodies] == [any_object, schema]


def first_tokens(answer: Any, count: int = 2) -> Any:
    """The first tokens of llama.cpp's answer, which all have a logprob."""
    answer = copy.deepcopy(answer)
    answer["tokens"] = answer["tokens"][:count]
    answer["completion_probabilities"] = answer["completion_probabilities"][:count]
    return answer


def test_llamacpps_samplers_run_in_vllms_order_and_penalties_cover_the_whole_context() -> None:
    answer = first_tokens(recording("llamacpp_completion")["response"])
    sampling = SamplingParams(4, top_k=5, min_p=0.1, repetition_penalty=1.2, allow_raw_logprobs=True)
    engine, fake = LLAMACPP.engine(answer)
    asyncio.run(engine.generate(list(range(300, 420)), sampling))
    [body] = fake.bodies(LLAMACPP.path)
    assert body["samplers"] == ["penalties", "temperature", "min_p", "top_k"]
    assert (body["min_p"], body["repeat_penalty"], body["repeat_last_n"]) == (0.1, 1.2, 4096)


def test_llamacpps_probabilities_after_sampling_become_logprobs() -> None:
    recorded = recording("llamacpp_completion_post")
    done, fake = generate(LLAMACPP, "llamacpp_completion_post", first_tokens(recorded["response"]), capabilities=TINY)
    assert fake.bodies(LLAMACPP.path) == [LLAMACPP.expected_body(recorded)]
    plain = first_tokens(recording("llamacpp_completion")["response"])
    raw, _ = generate(LLAMACPP, "llamacpp_completion", plain)
    assert done.ids.tolist() == raw.ids.tolist() == [1019, 964]
    assert np.allclose(done.logprobs, raw.logprobs, atol=2e-3), "at temperature 1 they are the same"
    assert (done.logprobs_kind, raw.logprobs_kind) == (LogprobKind.PROCESSED, LogprobKind.RAW)
    engine, fake = LLAMACPP.engine(plain, capabilities=TINY)
    greedy = asyncio.run(engine.generate(list(range(300, 420)), SamplingParams(4, temperature=0)))
    assert greedy.logprobs_kind is LogprobKind.RAW
    assert fake.bodies(LLAMACPP.path)[0]["post_sampling_probs"] is False


def test_tokens_after_a_stop_token_are_cut_off() -> None:
    engine, fake = LLAMACPP.engine(recording("llamacpp_cmp"))
    done = asyncio.run(engine.generate(list(range(300, 420)), SamplingParams(64, stop_token_ids=(996, 325))))
    assert (done.ids.tolist(), done.finish_reason, len(done.logprobs)) == ([216, 329, 996], STOP, 3)
    assert "stop_token_ids" not in fake.bodies(LLAMACPP.path)[0]


ALLOWED = {"temperature": 0.7, "allow_raw_logprobs": True}


@pytest.mark.parametrize(
    ("kind", "sampling", "expected"),
    [
        ("raw", ALLOWED, "raw"),
        ("unknown", ALLOWED, "unknown"),
        ("raw", {}, "raw"),
        ("unknown", {}, "unknown"),
        ("processed", {"temperature": 0.7}, "processed"),
        ("scaled", {"temperature": 0.7, "top_k": 3}, "scaled"),
        ("processed", {"temperature": 0}, "raw"),
        ("unknown", {"temperature": 0}, "raw"),
    ],
)
def test_a_completion_has_the_kind_of_its_logprobs(kind: str, sampling: Any, expected: str) -> None:
    answer = one_id(9, -1.0)
    answer["choices"][0] |= {"weight_versions": None}
    events = Reply([b"data: " + json.dumps(answer).encode() + b"\n\ndata: [DONE]\n\n"])
    engine, _ = VLLM.engine(answer, events, capabilities=replace(RAW, logprobs=LogprobKind(kind)))
    arguments = inputs(recording("vllm_generate"))[0], SamplingParams(1, **sampling)
    for completion in (engine.generate(*arguments), collected(engine.stream(*arguments))):
        assert asyncio.run(completion).logprobs_kind is LogprobKind(expected)


# -- control requests


@pytest.mark.parametrize(
    ("dialect", "names"),
    [
        (VLLM, ["vllm_abort_call_ab-2", "vllm_pause_keep", "vllm_resume", "vllm_is_paused"]),
        (SGLANG, ["sglang_abort", "sglang_pause_in_place", "sglang_continue_in_place"]),
    ],
    ids=["vllm", "sglang"],
)
def test_abort_pause_and_resume_are_sent_as_recorded(dialect: Dialect, names: list[str]) -> None:
    engine, fake = dialect.engine({})
    for name in names:
        fake.on(recording(name)["request"]["path"], Reply([answer_bytes(recording(name))]))

    async def run() -> None:
        await engine.abort("ab-2" if dialect is VLLM else "ab-1")
        await engine.pause()
        await engine.resume()
        if dialect is VLLM:
            assert await engine.is_paused() is False
        await engine.close()

    asyncio.run(run())
    expected = [recording(name)["request"] for name in names]
    if dialect is SGLANG:  # without the length, SGLang aborts every request whose id starts with this one
        expected[0]["json"] = {"rid": "4-ab-1"}
    assert fake.requests == [(one["method"], one["path"], one["json"]) for one in expected]


RELOAD = "/collective_rpc"
RESET = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
PAUSE = "/pause?mode=keep&clear_cache=false"
FROM_DISK = "/update_weights_from_disk"


def loading(dialect: Dialect, **answers: Any) -> tuple[Any, Fake]:
    """A server with the answers of vLLM 0.32 or SGLang: see `tests/live/test_vllm.py`."""
    engine, fake = dialect.engine({})
    for path in (PAUSE, "/resume", RELOAD, RESET, "/update_weight_version", FROM_DISK):
        fake.on(path, {"success": True})
    fake.on("/flush_cache", Reply([b"Cache flushed.\n"])).on("/is_paused", {"is_paused": False})
    for path, answer in answers.items():
        fake.on(path, answer)
    return engine, fake


@pytest.mark.parametrize("paused", [False, True])
def test_vllm_reloads_resets_and_gets_the_version_while_it_is_paused(paused: bool) -> None:
    engine, fake = loading(VLLM, **{"/is_paused": {"is_paused": paused}})
    asyncio.run(engine.update_weights(Path("/weights/7"), version=7))
    update = [
        (RELOAD, {"method": "reload_weights", "kwargs": {"weights_path": "/weights/7"}}),
        (RESET, None),
        ("/update_weight_version", {"new_version": "7"}),
    ]
    around = update if paused else [(PAUSE, None), *update, ("/resume", None)]
    assert [(path, body) for _, path, body in fake.requests] == [("/is_paused", None), *around]
    assert engine.version == "7"


@pytest.mark.parametrize("answers", [{RELOAD: json_reply({"error": "no folder"}, 400)}, {RESET: {"success": False}}])
def test_a_vllm_that_fails_to_load_stays_paused_and_keeps_its_version(answers: Any) -> None:
    engine, fake = loading(VLLM, **answers)
    engine.version = "6"
    with pytest.raises(EngineError):
        asyncio.run(engine.update_weights("/weights/7", version=7))
    assert "/resume" not in [path for _, path, _ in fake.requests]
    assert engine.version == "6"


def test_sglang_loads_flushes_and_names_the_version_at_once() -> None:
    engine, fake = loading(SGLANG)
    asyncio.run(engine.update_weights("/weights/7", version=7))
    assert engine.version == "7"
    asyncio.run(engine.set_version("8"))
    asyncio.run(engine.reset_prefix_cache())
    assert [(path, body) for _, path, body in fake.requests] == [
        (FROM_DISK, {"model_path": "/weights/7", "weight_version": "7", "flush_cache": True}),
        ("/update_weight_version", {"new_version": "8", "abort_all_requests": False}),
        ("/flush_cache", None),
    ]
    assert engine.version == "8"


SCORES = [
    (VLLM_COMPLETIONS, {"prompt": [5, 7, 9], "prompt_logprobs": 0, "add_special_tokens": False}),
    (SGLANG, {"input_ids": [5, 7, 9], "logprob_start_len": 0, "return_logprob": True}),
]


@pytest.mark.parametrize(("dialect", "body"), SCORES, ids=["vllm", "sglang"])
def test_ids_are_scored_by_the_logprobs_of_the_prompt(dialect: Dialect, body: dict[str, Any]) -> None:
    rows = [None, {"7": {"logprob": -0.5}}, {"9": {"logprob": -1.5}, "3": {"logprob": -0.1}}]
    answer: Any = {"choices": [{"prompt_logprobs": rows}]}
    if dialect is SGLANG:
        triples = [[None, 5, None], [-0.5, 7, None], [-1.5, 9, None]]
        answer = {"output_ids": [1], "meta_info": {"input_token_logprobs": triples}}
    engine, fake = dialect.engine(answer)
    scored = asyncio.run(engine.score([5, 7, 9]))
    assert np.isnan(scored[0])
    assert scored[1:].tolist() == [-0.5, -1.5]
    assert body.items() <= fake.bodies(dialect.path)[0].items()
    for other in ([5, 8, 9], [5, 7, 9, 2]):
        with pytest.raises(EngineAnswerError):
            asyncio.run(engine.score(other))


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
    """The answer without alternatives."""
    text = json.dumps(answer)
    for name in ("top_logprobs", "output_top_logprobs", "top_probs"):
        text = text.replace(f'"{name}"', f'"no_{name}"')
    return json.loads(text)


@pytest.mark.parametrize(("dialect", "name", "count", "expected"), REPORTED, ids=[row[1] for row in REPORTED])
def test_the_likeliest_ids_are_read_as_recorded(dialect: Dialect, name: str, count: int, expected: Any) -> None:
    recorded = recording(name)
    answer, capabilities = recorded["response"], TINY if name.endswith("post") else RAW
    if dialect is LLAMACPP:
        answer |= {"tokens": answer["tokens"][:2]}  # the other tokens are incomplete UTF-8
    sampling = SamplingParams(2, top_logprobs=count)
    engine, fake = dialect.engine(answer, without_alternatives(answer), capabilities=capabilities)
    done = asyncio.run(engine.generate(inputs(recorded)[0], sampling))
    sent, body = recorded["request"]["json"], fake.bodies(dialect.path)[0]
    key = COUNTS[dialect.name]
    assert body.get("sampling_params", body).get(key, body.get(key)) == sent.get("sampling_params", sent).get(
        key, sent.get(key)
    )
    rows = done.channels["top_logprobs"]
    assert [[one for one, _ in row] for row in rows] == [[one for one, _ in row] for row in expected]
    np.testing.assert_allclose([row[0][1] for row in rows], [row[0][1] for row in expected], atol=2e-3)
    with pytest.raises(EngineAnswerError):
        asyncio.run(engine.generate(inputs(recorded)[0], sampling))
