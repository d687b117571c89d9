"""The server without a model of `bench`: the adapter reads it as it reads vLLM."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from bench.fake_engine import GENERATE, LOGPROB, FakeEngine, serving
from tests.engines.support import recording
from tokentrace.engines import FinishReason, LogprobKind, SamplingParams, VLLMEngine, collected, connect

PROMPT = np.random.default_rng(0).integers(0, 150_000, 50_000)


def test_the_adapter_reads_it_as_vllm() -> None:
    async def run() -> None:
        fake = FakeEngine([[5, 6, 7, 2], [9, 2]], piece=1, record=True)
        async with serving(fake) as url:
            engine = await connect(url, vocab_size=150_000)
            assert isinstance(engine, VLLMEngine)
            found = engine.capabilities
            assert (found.model, found.version, found.logprobs) == ("fake", "0.32.0", LogprobKind.PROCESSED)
            assert found.versions
            fake.prompts.clear()
            sampling = SamplingParams(100, stop_token_ids=(2,), temperature=0.7)
            whole = await engine.generate(PROMPT, sampling)
            assert (whole.ids.tolist(), whole.finish_reason) == ([5, 6, 7, 2], FinishReason.STOP)
            assert whole.logprobs.tolist() == [LOGPROB] * 4
            deltas = [delta async for delta in engine.stream(PROMPT, sampling)]
            assert [delta.ids.tolist() for delta in deltas] == [[9], [2]], "the next answer, an id at a time"
            cut = await collected(engine.stream(PROMPT[:9], SamplingParams(2, top_logprobs=3)))
            assert (cut.ids.tolist(), cut.finish_reason) == ([5, 6], FinishReason.LENGTH)
            assert [[one for one, _ in row] for row in cut.channels["top_logprobs"]] == [[5, 6, 7], [6, 7, 8]]
            assert [json.loads(one) for one in fake.prompts] == [PROMPT.tolist(), PROMPT.tolist(), PROMPT[:9].tolist()]
            assert fake.left == 0
            await engine.close()

    asyncio.run(run())


def test_a_reader_that_leaves_is_counted_and_many_connections_are_served() -> None:
    async def run() -> None:
        fake = FakeEngine([[5, 6, 2]], delay=60.0, first_delay=1e-9)
        async with serving(fake) as url:
            engine = await connect(url, "vllm", logprobs="processed", vocab_size=99)
            deltas = engine.stream([1, 2], SamplingParams(9))
            assert (await anext(deltas)).ids.tolist() == [5]
            await deltas.aclose()
            while not fake.left:
                await asyncio.sleep(0)
            fake.delay = 0.0
            done = await asyncio.gather(*(collected(engine.stream([1, 2], SamplingParams(9))) for _ in range(50)))
            assert [one.ids.tolist() for one in done] == [[5, 6, 2]] * 50
            assert fake.left == 1
            await engine.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_connection_is_used_again_after_a_stream() -> None:
    async def run() -> None:
        fake = FakeEngine([[5, 6, 2]])
        async with serving(fake) as url:
            engine = await VLLMEngine.connect(url)
            before = fake.connections
            for _ in range(5):
                assert (await collected(engine.stream([1, 2], SamplingParams(9)))).ids.tolist() == [5, 6, 2]
            assert fake.connections == before == 1
            await engine.close()

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("streamed", [False, True])
def test_its_answers_have_the_fields_of_recorded_ones(streamed: bool) -> None:
    """All that it says, vLLM says, with the same types; what it leaves out, the adapter does not read."""
    name = "vllm_generate_stream" if streamed else "vllm_generate_stop_token"
    recorded: Any = recording(name)["response"]
    body = {
        "token_ids": [1, 2, 3],
        "sampling_params": {"max_tokens": 9},
        "stream": streamed,
        "return_token_ids": streamed,
    }

    async def run() -> str:
        async with serving(FakeEngine([[5, 6, 7]])) as url, httpx2.AsyncClient() as client:
            refused = await client.post(f"{url}{GENERATE}", content=b"{}")
            assert refused.status_code == 400
            assert (await client.get(f"{url}/nowhere")).status_code == 404
            return str((await client.post(f"{url}{GENERATE}", content=json.dumps(body))).text)

    text = asyncio.run(run())
    if not streamed:
        check(json.loads(text), recorded)
        return
    ours, theirs = ([event[6:] for event in one.split("\n\n") if event] for one in (text, recorded))
    assert len(ours) == len(theirs) == 5
    assert ours[-1] == theirs[-1] == "[DONE]"
    for one, other in zip(ours[:-1], theirs[:-1], strict=True):
        check(json.loads(one), json.loads(other))


def check(ours: Any, theirs: Any) -> None:
    if isinstance(ours, dict):
        assert set(ours) <= set(theirs)
        for name, value in ours.items():
            check(value, theirs[name])
    elif isinstance(ours, list) and ours and theirs:
        check(ours[0], theirs[0])
    else:
        same = type(ours) is type(theirs)
        assert same or ours is None or theirs is None, (ours, theirs)


def test_it_is_a_command_that_prints_its_address() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "bench.fake_engine", "--answers", "[[7, 2]]"]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert httpx2.get(f"{url}/version").json() == {"version": "0.32.0"}
        finally:
            process.terminate()
