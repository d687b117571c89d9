"""A llama.cpp server for tests: ``python -m tests.live.live MODEL.gguf`` prints its address, serves until stdin ends.

It is a separate process: it always ends with the test's process, and llama.cpp cannot crash the tests.
"""

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from tests.engines.test_embedded import RENDERER, reference
from tests.trajectory.model import check_trajectory
from tokentrace.demo.questions import FollowUps, pick_questions, question_reward, question_task
from tokentrace.engines.llamacpp import COMPLETION
from tokentrace.engines.protocol import Engine, SamplingParams
from tokentrace.engines.vllm import COMPLETIONS, GENERATE
from tokentrace.pocket.model import load_pocket
from tokentrace.rollout.batch import Summary, run_rollouts
from tokentrace.rollout.loop import Agent, Budget, Rollout
from tokentrace.samples.trajectories import trajectory_samples

ROOT = Path(__file__).parents[2]
SLOTS = 4
CONTEXT = 1536
"""Tokens per slot, which `connect` must read from the server."""
START_SECONDS = 60


@contextmanager
def llama_server(model: Path, log: Path) -> Iterator[str]:
    """Run this file as a server; yields its address."""
    command = [sys.executable, "-m", "tests.live.live", str(model)]
    with (
        log.open("wb") as errors,
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        too_slow = threading.Timer(START_SECONDS, process.kill)
        too_slow.start()
        try:
            address = process.stdout.readline().decode().strip()
            too_slow.cancel()
            if not address:
                raise RuntimeError(f"llama.cpp did not start: {log.read_text(errors='replace')[-2000:]}")
            yield address
        finally:
            too_slow.cancel()
            process.stdin.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


class Recorder(httpx2.AsyncBaseTransport):
    """A transport that records whole answers, and answers 403 for the path `closed`."""

    def __init__(self, closed: str | None = None) -> None:
        self._closed = closed
        self._inner = httpx2.AsyncHTTPTransport()
        self.seen: list[tuple[str, Any, Any]] = []
        """Path, body and answer of each completion."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path
        if path == self._closed:
            return httpx2.Response(403, json={"detail": "off"})
        response = await self._inner.handle_async_request(request)
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            return response
        answer = await response.aread()
        await response.aclose()
        if response.is_success and path in (GENERATE, COMPLETIONS, COMPLETION):
            self.seen.append((path, json.loads(request.content), json.loads(answer)))
        return httpx2.Response(response.status_code, headers=response.headers, content=answer)

    async def aclose(self) -> None:
        await self._inner.aclose()


@cache
def prompts(seed: int = 1) -> list[list[int]]:
    """The first prompts of eight of pocket's questions, as ids."""
    return [
        RENDERER.render(question.prompt, tools=question.tools, add_generation_prompt=True).ids.tolist()
        for question in pick_questions(8, seed)
    ]


def expected_logprobs(prompt: Sequence[int], ids: Any, sampling: SamplingParams) -> list[float]:
    """The logprobs of sampled ids under the NumPy model's distribution with `sampling` applied."""
    model, row = load_pocket(), [*map(int, prompt), *map(int, ids)]
    (logits,) = model.extend([model.new_cache(len(row))], [row], every=True)
    start = len(prompt)
    return [
        math.log(reference(logits[at - 1], row[:start], row[start:at], sampling)[row[at]])
        for at in range(start, len(row))
    ]


def gap(left: Any, right: Any) -> float:
    return float(np.abs(np.asarray(left, np.float64) - np.asarray(right, np.float64)).max())


async def roll_out(engine: Engine, count: int, temperature: float, **options: Any) -> tuple[list[Rollout], Summary]:
    """Run rollouts of pocket's questions; none may break."""
    rollouts: list[Rollout] = []
    sampling = SamplingParams(160, temperature=temperature)
    budget = Budget(turns=12, turn_tokens=160)
    agent = Agent(engine, RENDERER, sampling=sampling, interaction=FollowUps(), reward=question_reward, budget=budget)
    tasks = map(question_task, pick_questions(count))
    summary = await run_rollouts(agent, tasks, concurrency=4, done=rollouts.append, seed=3)
    assert (summary.rollouts, summary.breaks, summary.samples) == (count, 0, count), [each.notes for each in rollouts]
    return rollouts, summary


def check_rollouts(rollouts: list[Rollout], seen: list[tuple[list[int], list[int]]], max_gap: float) -> None:
    """Check that the engine saw exactly the rows' prompts and completions, and re-score each logprob."""
    turns, gaps = [], []
    for rollout in rollouts:
        check_trajectory(rollout.trajectory)
        stream = rollout.trajectory.stream().tolist()
        assert len(rollout.trajectory.turns()) == rollout.turns
        turns += [(stream[: turn.start], stream[turn.start : turn.stop]) for turn in rollout.trajectory.turns()]
        (row,) = trajectory_samples(rollout.trajectory, reward=rollout.reward)
        assert row.trained == rollout.trajectory.num_sampled > 0
        assert row.logprobs is not None
        at = np.flatnonzero(row.mask)
        gaps.append(gap(row.logprobs[at], load_pocket().score(row.ids)[at - 1]))
    assert sorted(seen) == sorted(turns)
    print(f"largest difference of logprobs: {max(gaps):.1e}")
    assert max(gaps) < max_gap


def serve(model: str) -> None:
    """Serve in float32, without flash attention, on one thread: comparable with the NumPy model."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = 0  # any free port
    params.n_parallel = SLOTS
    params.n_ctx = SLOTS * CONTEXT
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.n_gpu_layers = 0
    params.cache_ram_mib = 64
    params.warmup = False
    params.ui = False
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    while os.read(sys.stdin.fileno(), 4096):
        pass
    del server  # stops its threads


if __name__ == "__main__":
    serve(sys.argv[1])
