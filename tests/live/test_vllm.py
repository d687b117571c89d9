"""vLLM as it really is, serving the pocket model: ``make test-vllm`` installs it and runs these.

The NumPy model is the reference: what vLLM sampled is scored again by it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from functools import cache
from typing import Any, TypeVar

import httpx2
import numpy as np
import pytest

from tests.engines.test_embedded import SETTINGS
from tests.live.live import Recorder, expected_logprobs
from tests.live.vllm_server import vllm_server
from tests.trajectory.model import check_trajectory
from tokentrace import create_renderer, trajectory_samples
from tokentrace.demo.questions import FollowUps, pick_questions, question_reward, question_task
from tokentrace.engines.http import Connection
from tokentrace.engines.protocol import Completion, Delta, FinishReason, LogprobKind, SamplingParams, collected, joined
from tokentrace.engines.vllm import GENERATE, VLLMEngine
from tokentrace.pocket import POCKET
from tokentrace.pocket.model import load_pocket
from tokentrace.rollout.batch import run_rollouts
from tokentrace.rollout.loop import Agent, Budget, End, Rollout
from tokentrace.trajectory.turns import VersionSpan

VARIABLE = "TOKENTRACE_VLLM_PYTHON"
PYTHON = os.environ.get(VARIABLE)
"""The interpreter of an environment that has vLLM."""
if not PYTHON:
    pytest.skip(f"vLLM runs by `make test-vllm`, which sets {VARIABLE}", allow_module_level=True)

CLOSE = 1e-4
ROLLOUTS = 16
RENDERER = create_renderer(POCKET)
SIZE = RENDERER.tokenizer.vocabulary.size
STOPS = tuple(RENDERER.get_stop_token_ids())
ENDLESS = RENDERER.tokenizer.encode("7" * 120)
"""After this the model goes on with sevens for as long as it may."""
LONG = SamplingParams(1500, temperature=0)
SHORTER = SamplingParams(300, temperature=0)
T = TypeVar("T")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server as training wants it."""
    assert PYTHON
    scratch = tmp_path_factory.mktemp("vllm")
    with vllm_server(PYTHON, POCKET, scratch, "--logprobs-mode=processed_logprobs") as address:
        yield address


@pytest.fixture(scope="module")
def raw_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server as it is by default."""
    assert PYTHON
    with vllm_server(PYTHON, POCKET, tmp_path_factory.mktemp("vllm_raw")) as address:
        yield address


def using(url: str, use: Callable[[VLLMEngine], Awaitable[T]], tap: Recorder | None = None) -> T:
    """What comes of an engine that is connected to, then closed."""

    async def run() -> T:
        engine = await VLLMEngine.connect(Connection(url, transport=tap or Recorder()), vocab_size=SIZE)
        try:
            return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


@cache
def prompts() -> list[list[int]]:
    questions = pick_questions(8, seed=1)
    return [
        RENDERER.render(question.prompt, tools=question.tools, add_generation_prompt=True).ids.tolist()
        for question in questions
    ]


def greedy(prompt: list[int], longest: int) -> list[int]:
    """The NumPy model's own completion."""
    model = load_pocket()
    sequence, new, out = model.new_cache(), prompt, []
    while len(out) < longest and not (out and out[-1] in STOPS):
        out.append(int(model.extend([sequence], [new])[0].argmax()))
        new = out[-1:]
    return out


def gap(left: Any, right: Any) -> float:
    return float(np.abs(np.asarray(left, np.float64) - np.asarray(right, np.float64)).max())


# -- what is found out


def test_what_the_server_can_do_is_found_out(url: str) -> None:
    async def use(engine: VLLMEngine) -> tuple[Any, bool]:
        return engine.capabilities, await engine.is_paused()

    found, paused = using(url, use)
    assert (found.engine, found.model, found.max_length, found.vocab_size) == ("vllm", "pocket", 2048, SIZE)
    assert found.version
    assert found.logprobs is LogprobKind.PROCESSED, "as the probe at two temperatures shows"
    assert found.streams
    assert found.aborts, "the generate endpoint is on"
    assert found.pauses
    assert found.versions
    assert not paused


# -- which logprobs


def kinds_found(address: str, times: int, closed: str | None) -> set[LogprobKind]:
    async def use(engine: VLLMEngine) -> LogprobKind:
        return engine.capabilities.logprobs

    return {using(address, use, Recorder(closed)) for _ in range(times)}


@pytest.mark.parametrize("closed", [None, GENERATE], ids=["generate", "completions"])
def test_a_raw_and_a_processed_server_are_told_apart(url: str, raw_url: str, closed: str | None) -> None:
    assert kinds_found(url, 15, closed) == {LogprobKind.PROCESSED}
    assert kinds_found(raw_url, 15, closed) == {LogprobKind.RAW}


@pytest.mark.parametrize(("mode", "kind"), [("url", LogprobKind.PROCESSED), ("raw_url", LogprobKind.RAW)])
def test_rows_carry_the_kind_the_settings_and_the_cached_tokens(
    mode: str, kind: LogprobKind, request: pytest.FixtureRequest
) -> None:
    sampling = SamplingParams(160, temperature=0.9, top_k=50, allow_raw_logprobs=True)
    rollouts: list[Rollout] = []

    async def use(engine: VLLMEngine) -> Any:
        agent = Agent(engine, RENDERER, sampling=sampling, interaction=FollowUps(), budget=Budget(turns=4))
        return await run_rollouts(
            agent, map(question_task, pick_questions(4, seed=7)), concurrency=2, done=rollouts.append, seed=1
        )

    using(request.getfixturevalue(mode), use)
    spans = [span for rollout in rollouts for row in trajectory_samples(rollout.trajectory) for span in row.completions]
    assert {(span.logprobs_kind, span.temperature, span.top_p, span.top_k) for span in spans} == {(kind, 0.9, 1.0, 50)}
    assert all(span.cached_tokens is not None for span in spans)
    assert any(span.cached_tokens for span in spans), "later turns find their prefix cached"
    notes = [note for rollout in rollouts for row in trajectory_samples(rollout.trajectory) for note in row.notes]
    assert bool(notes) == (kind is LogprobKind.RAW)


# -- ids and logprobs


@pytest.mark.parametrize("closed", [None, GENERATE], ids=["generate", "completions"])
def test_greedy_ids_are_those_of_the_numpy_model(url: str, closed: str | None) -> None:
    sampling = SamplingParams(160, temperature=0, stop_token_ids=STOPS)

    async def use(engine: VLLMEngine) -> list[Completion]:
        return list(await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts())))

    for prompt, done in zip(prompts(), using(url, use, Recorder(closed)), strict=True):
        assert done.ids.tolist() == greedy(prompt, 160)
        assert done.finish_reason is FinishReason.STOP
        assert gap(done.logprobs, expected_logprobs(prompt, done.ids, sampling)) < CLOSE


@pytest.mark.parametrize("closed", [None, GENERATE], ids=["generate", "completions"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 0.6}, {"temperature": 1.7}, {"top_k": 5}, {"top_p": 0.8}, *SETTINGS],
    ids=lambda changes: " ".join(f"{name} {value}" for name, value in changes.items()) or "plain",
)
def test_logprobs_are_of_the_distribution_sampled_from(url: str, closed: str | None, changes: dict[str, Any]) -> None:
    sampling = SamplingParams(64, seed=11, stop_token_ids=STOPS, **changes)

    async def use(engine: VLLMEngine) -> list[Completion]:
        return list(await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts())))

    found = using(url, use, Recorder(closed))
    gaps = [
        gap(done.logprobs, expected_logprobs(prompt, done.ids, sampling))
        for prompt, done in zip(prompts(), found, strict=True)
    ]
    print(f"largest difference of logprobs: {max(gaps):.1e}")
    assert max(gaps) < CLOSE


@pytest.mark.parametrize("closed", [None, GENERATE], ids=["generate", "completions"])
def test_a_stream_is_the_whole_in_pieces(url: str, closed: str | None) -> None:
    sampling = SamplingParams(80, seed=5, stop_token_ids=STOPS)

    async def use(engine: VLLMEngine) -> list[tuple[Completion, list[Delta], Completion]]:
        found = []
        for prompt in prompts()[1:5]:  # the first is too short to be cached
            whole = await engine.generate(prompt, sampling)
            pieces = [piece async for piece in engine.stream(prompt, sampling)]
            found.append((whole, pieces, await collected(engine.stream(prompt, sampling))))
        return found

    for whole, pieces, streamed in using(url, use, Recorder(closed)):
        assert len(pieces) > 1
        assert np.concatenate([piece.ids for piece in pieces]).tolist() == whole.ids.tolist()
        assert streamed.ids.tolist() == whole.ids.tolist()
        assert gap(streamed.logprobs, whole.logprobs) < CLOSE
        assert (streamed.finish_reason, streamed.versions) == (whole.finish_reason, whole.versions)
        assert pieces[-1].finish_reason is whole.finish_reason
        assert streamed.cached_tokens, "the same prompt was read before"


# -- rollouts


@pytest.mark.parametrize("closed", [None, GENERATE], ids=["generate", "completions"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_engine_saw_the_rows_that_are_trained(url: str, closed: str | None, temperature: float) -> None:
    tap, rollouts = Recorder(closed), list[Rollout]()
    sampling = SamplingParams(160, temperature=temperature)

    async def use(engine: VLLMEngine) -> Any:
        tap.seen.clear()  # the probes
        agent = Agent(
            engine,
            RENDERER,
            sampling=sampling,
            interaction=FollowUps(),
            reward=question_reward,
            budget=Budget(turns=12, turn_tokens=160),
        )
        tasks = [question_task(question) for question in pick_questions(ROLLOUTS)]
        return await run_rollouts(agent, tasks, concurrency=8, done=rollouts.append, seed=1)

    summary = using(url, use, tap)
    assert len(rollouts) == ROLLOUTS
    assert {rollout.end for rollout in rollouts} <= {End.USER, End.LENGTH, End.TURNS}, [r.notes for r in rollouts]
    assert (summary.breaks, summary.samples) == (0, ROLLOUTS)
    assert summary.tool_calls > ROLLOUTS
    assert len(tap.seen) == summary.turns

    prompts_seen = {tuple(_echo(answer)): _sampled(answer) for _, _, answer in tap.seen}
    gaps = []
    for rollout in rollouts:
        check_trajectory(rollout.trajectory)
        stream = rollout.trajectory.stream()
        assert len(rollout.trajectory.turns()) == rollout.turns
        for turn in rollout.trajectory.turns():
            sampled = prompts_seen.get(tuple(stream[: turn.start].tolist()))
            assert sampled is not None, "the engine never saw this prompt"
            assert sampled == stream[turn.start : turn.stop].tolist()
        (row,) = trajectory_samples(rollout.trajectory)
        assert row.trained == rollout.trajectory.num_sampled
        assert row.logprobs is not None
        rescored = load_pocket().score(row.ids)
        at = np.flatnonzero(row.mask)
        gaps.append(gap(row.logprobs[at], rescored[at - 1]))
    print(f"largest difference of logprobs: {max(gaps):.1e}")
    print(summary.described())
    assert max(gaps) < CLOSE
    if not temperature:
        assert summary.reward >= 0.8


def _echo(answer: Any) -> list[int]:
    """The prompt, as the server says that it read it."""
    return list(answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"])


def _sampled(answer: Any) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


# -- requests that end early, wait, or are refused


def test_an_abort_ends_a_stream_with_what_was_sampled(url: str) -> None:
    async def use(engine: VLLMEngine) -> list[Delta]:
        pieces: list[Delta] = []
        async with aclosing(engine.stream(ENDLESS, LONG, request_id="victim")) as arriving:
            async for piece in arriving:
                if not pieces:
                    await engine.abort("victim")
                pieces.append(piece)
        return pieces

    pieces = using(url, use)
    assert pieces[-1].finish_reason is FinishReason.ABORT
    ids = np.concatenate([piece.ids for piece in pieces])
    assert 0 < len(ids) < LONG.max_tokens
    logprobs = np.concatenate([piece.logprobs for piece in pieces])
    assert gap(logprobs, expected_logprobs(ENDLESS, ids, LONG)) < CLOSE


def test_a_paused_server_lets_requests_wait_and_not_change(url: str) -> None:
    sampling = SamplingParams(60, seed=9, stop_token_ids=STOPS)

    async def use(engine: VLLMEngine) -> tuple[Completion, Completion]:
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
        return before, await waiting

    before, after = using(url, use)
    assert after.ids.tolist() == before.ids.tolist()


def test_weight_versions_are_told_token_by_token(url: str) -> None:
    async def name(version: str) -> None:
        async with httpx2.AsyncClient(trust_env=False) as client:
            (await client.post(f"{url}/update_weight_version", json={"new_version": version})).raise_for_status()

    async def use(engine: VLLMEngine) -> tuple[Completion, Completion]:
        before = await engine.generate(prompts()[0], SamplingParams(5, temperature=0))
        pieces: list[Delta] = []
        async for piece in engine.stream(ENDLESS, SHORTER):
            if not pieces:
                await name("step-1")
            pieces.append(piece)
        return before, joined(pieces)

    before, across = using(url, use)
    (old,) = before.versions
    assert (old.start, old.stop) == (0, 5)
    first, second = across.versions
    assert first == VersionSpan(old.version, 0, first.stop)
    assert second == VersionSpan("step-1", first.stop, len(across.ids))
