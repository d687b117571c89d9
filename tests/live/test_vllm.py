"""A real vLLM serves the pocket model (``make test-vllm``); the NumPy model re-scores what it sampled."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx2
import pytest

from tests.engines.test_embedded import RENDERER, SETTINGS, STOPS
from tests.live.live import Recorder, check_rollouts, expected_logprobs, gap, prompts, roll_out
from tests.live.vllm_server import vllm_server
from tests.loop import in_loop
from tokentrace import trajectory_samples
from tokentrace.demo.questions import FollowUps, pick_questions, question_task
from tokentrace.engines.http import Connection
from tokentrace.engines.protocol import Delta, FinishReason, SamplingParams, joined
from tokentrace.engines.vllm import GENERATE, VLLMEngine
from tokentrace.pocket import POCKET
from tokentrace.pocket.model import load_pocket
from tokentrace.rollout.batch import run_rollouts
from tokentrace.rollout.loop import Agent, Budget, End, Rollout
from tokentrace.trajectory.turns import LogprobKind, VersionSpan

VARIABLE = "TOKENTRACE_VLLM_PYTHON"
PYTHON = os.environ.get(VARIABLE)
"""The interpreter of an environment that has vLLM."""
if not PYTHON:
    pytest.skip(f"vLLM runs by `make test-vllm`, which sets {VARIABLE}", allow_module_level=True)

CLOSE = 1e-4
ROLLOUTS = 16
SIZE = RENDERER.tokenizer.vocabulary.size
ENDLESS = RENDERER.tokenizer.encode("7" * 120)
"""After this prompt the model writes sevens until it reaches the limit."""
LONG = SamplingParams(1500, temperature=0)
SHORTER = SamplingParams(300, temperature=0)
both_paths = pytest.mark.parametrize("closed", [None, GENERATE], ids=["generate", "completions"])


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with processed logprobs, as training needs them."""
    assert PYTHON
    scratch = tmp_path_factory.mktemp("vllm")
    with vllm_server(PYTHON, POCKET, scratch, "--logprobs-mode=processed_logprobs") as address:
        yield address


@pytest.fixture(scope="module")
def raw_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with vLLM's defaults: raw logprobs."""
    assert PYTHON
    with vllm_server(PYTHON, POCKET, tmp_path_factory.mktemp("vllm_raw")) as address:
        yield address


@asynccontextmanager
async def connected(url: str, recorder: Recorder | None = None) -> AsyncIterator[VLLMEngine]:
    """Connect an engine, and close it afterwards."""
    engine = await VLLMEngine.connect(Connection(url, transport=recorder or Recorder()), vocab_size=SIZE)
    try:
        yield engine
    finally:
        await engine.close()


def greedy(prompt: list[int], max_tokens: int) -> list[int]:
    """The NumPy model's greedy completion."""
    model = load_pocket()
    sequence, new, ids = model.new_cache(), prompt, []
    while len(ids) < max_tokens and not (ids and ids[-1] in STOPS):
        ids.append(int(model.extend([sequence], [new])[0].argmax()))
        new = ids[-1:]
    return ids


# -- capabilities


@in_loop
async def test_capabilities_are_detected(url: str) -> None:
    async with connected(url) as engine:
        caps = engine.capabilities
        assert not await engine.is_paused()
    assert (caps.engine, caps.model, caps.max_length, caps.vocab_size) == ("vllm", "pocket", 2048, SIZE)
    assert caps.version
    assert caps.logprobs is LogprobKind.PROCESSED, "as the probe at two temperatures shows"
    assert caps.aborts, "the generate endpoint is on"
    assert all((caps.pauses, caps.versions))


# -- kinds of logprobs


@both_paths
@in_loop
async def test_a_raw_and_a_processed_server_are_told_apart(url: str, raw_url: str, closed: str | None) -> None:
    for address, kind in ((url, LogprobKind.PROCESSED), (raw_url, LogprobKind.RAW)):
        for _ in range(15):
            async with connected(address, Recorder(closed)) as engine:
                assert engine.capabilities.logprobs is kind


@pytest.mark.parametrize(("mode", "kind"), [("url", LogprobKind.PROCESSED), ("raw_url", LogprobKind.RAW)])
@in_loop
async def test_rows_carry_the_kind_the_settings_and_the_cached_tokens(
    mode: str, kind: LogprobKind, request: pytest.FixtureRequest
) -> None:
    sampling = SamplingParams(160, temperature=0.9, top_k=50, allow_raw_logprobs=True)
    rollouts: list[Rollout] = []
    async with connected(request.getfixturevalue(mode)) as engine:
        agent = Agent(engine, RENDERER, sampling=sampling, interaction=FollowUps(), budget=Budget(turns=4))
        tasks = map(question_task, pick_questions(4, seed=7))
        await run_rollouts(agent, tasks, concurrency=2, done=rollouts.append, seed=1)
    rows = [row for rollout in rollouts for row in trajectory_samples(rollout.trajectory)]
    spans = [span for row in rows for span in row.completions]
    assert {(span.logprobs_kind, span.temperature, span.top_p, span.top_k) for span in spans} == {(kind, 0.9, 1.0, 50)}
    assert all(span.cached_tokens is not None for span in spans)
    assert any(span.cached_tokens for span in spans), "later turns find their prefix cached"
    assert any(row.notes for row in rows) == (kind is LogprobKind.RAW)


# -- ids and logprobs


@both_paths
@in_loop
async def test_greedy_ids_are_those_of_the_numpy_model(url: str, closed: str | None) -> None:
    sampling = SamplingParams(160, temperature=0, stop_token_ids=STOPS)
    async with connected(url, Recorder(closed)) as engine:
        completions = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts()))
    for prompt, completion in zip(prompts(), completions, strict=True):
        assert completion.ids.tolist() == greedy(prompt, 160)
        assert completion.finish_reason is FinishReason.STOP
        assert gap(completion.logprobs, expected_logprobs(prompt, completion.ids, sampling)) < CLOSE


@both_paths
@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 0.6}, {"temperature": 1.7}, {"top_k": 5}, {"top_p": 0.8}, *SETTINGS],
    ids=lambda changes: " ".join(f"{name} {value}" for name, value in changes.items()) or "plain",
)
@in_loop
async def test_logprobs_are_of_the_distribution_sampled_from(
    url: str, closed: str | None, changes: dict[str, Any]
) -> None:
    sampling = SamplingParams(64, seed=11, stop_token_ids=STOPS, **changes)
    async with connected(url, Recorder(closed)) as engine:
        completions = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts()))
    pairs = zip(prompts(), completions, strict=True)
    gaps = [gap(sampled.logprobs, expected_logprobs(prompt, sampled.ids, sampling)) for prompt, sampled in pairs]
    print(f"largest difference of logprobs: {max(gaps):.1e}")
    assert max(gaps) < CLOSE


@both_paths
@in_loop
async def test_a_stream_equals_the_whole_completion(url: str, closed: str | None) -> None:
    sampling = SamplingParams(80, seed=5, stop_token_ids=STOPS)
    async with connected(url, Recorder(closed)) as engine:
        for prompt in prompts()[1:5]:  # the first is too short to be cached
            whole = await engine.generate(prompt, sampling)
            pieces = [piece async for piece in engine.stream(prompt, sampling)]
            streamed = joined(pieces)
            assert len(pieces) > 1
            assert streamed.ids.tolist() == whole.ids.tolist()
            assert gap(streamed.logprobs, whole.logprobs) < CLOSE
            assert (streamed.finish_reason, streamed.versions) == (whole.finish_reason, whole.versions)
            assert streamed.cached_tokens, "the same prompt was read before"


# -- rollouts


@both_paths
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@in_loop
async def test_the_engine_saw_the_rows_that_are_trained(url: str, closed: str | None, temperature: float) -> None:
    recorder = Recorder(closed)
    async with connected(url, recorder) as engine:
        recorder.seen.clear()  # forget the probes of `connect`
        rollouts, summary = await roll_out(engine, ROLLOUTS, temperature)
    assert {rollout.end for rollout in rollouts} <= {End.USER, End.LENGTH, End.TURNS}
    assert summary.tool_calls > ROLLOUTS
    answers = [(answer, answer["choices"][0]) for _, _, answer in recorder.seen]
    echoes = [answer.get("prompt_token_ids") or choice["prompt_token_ids"] for answer, choice in answers]
    check_rollouts(
        rollouts, [(echo, choice["token_ids"]) for echo, (_, choice) in zip(echoes, answers, strict=True)], CLOSE
    )
    print(summary.described())
    if not temperature:
        assert summary.reward >= 0.8


# -- requests that end early, wait, or are refused


@in_loop
async def test_an_abort_ends_a_stream_with_what_was_sampled(url: str) -> None:
    pieces: list[Delta] = []
    async with connected(url) as engine, aclosing(engine.stream(ENDLESS, LONG, request_id="victim")) as stream:
        async for piece in stream:
            if not pieces:
                await engine.abort("victim")
            pieces.append(piece)
    completion = joined(pieces)
    assert completion.finish_reason is FinishReason.ABORT
    assert 0 < len(completion.ids) < LONG.max_tokens
    assert gap(completion.logprobs, expected_logprobs(ENDLESS, completion.ids, LONG)) < CLOSE


@in_loop
async def test_requests_wait_unchanged_while_the_server_is_paused(url: str) -> None:
    sampling = SamplingParams(60, seed=9, stop_token_ids=STOPS)
    async with connected(url) as engine:
        before = await engine.generate(prompts()[2], sampling)
        await engine.pause()
        try:
            assert await engine.is_paused()
            waiting = asyncio.create_task(engine.generate(prompts()[2], sampling))
            done, _ = await asyncio.wait({waiting}, timeout=2.0)
            assert not done
        finally:
            await engine.resume()
        assert not await engine.is_paused()
        assert (await waiting).ids.tolist() == before.ids.tolist()


@in_loop
async def test_weight_versions_are_reported_token_by_token(url: str) -> None:
    pieces: list[Delta] = []
    async with connected(url) as engine:
        before = await engine.generate(prompts()[0], SamplingParams(5, temperature=0))
        async for piece in engine.stream(ENDLESS, SHORTER):
            if not pieces:
                async with httpx2.AsyncClient(trust_env=False) as client:
                    answer = await client.post(f"{url}/update_weight_version", json={"new_version": "step-1"})
                    answer.raise_for_status()
            pieces.append(piece)
    across = joined(pieces)
    (old,) = before.versions
    assert (old.start, old.stop) == (0, 5)
    first, second = across.versions
    assert first == VersionSpan(old.version, 0, first.stop)
    assert second == VersionSpan("step-1", first.stop, len(across.ids))
