"""The adapter against a real llama.cpp server that serves pocket in float32.

Its logprobs after sampling were within 1e-5 of the NumPy model's in these tests (with a cache in float16: 3.8e-4). Raw
ones were within 1.6e-4, and within 1e-5 of the NumPy model's logits when these are normalised with a running sum in
float32, in which the many small probabilities get lost. The bounds here leave room for other processors.
"""

import importlib.util
import platform
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.test_embedded import RENDERER
from tests.live.live import CONTEXT, ROOT, Recorder, check_rollouts, expected_logprobs, llama_server, prompts, roll_out
from tests.loop import in_loop
from tests.support import FULL, rotating
from tokentrace.engines.errors import EngineAnswerError
from tokentrace.engines.http import Connection
from tokentrace.engines.llamacpp import LlamaCppEngine
from tokentrace.engines.protocol import FinishReason, SamplingParams
from tokentrace.pocket.model import load_pocket
from tokentrace.trajectory.turns import LogprobKind

MODEL = load_pocket()
(END,) = RENDERER.get_stop_token_ids()
NEWLINE = 198
QUESTIONS = 12 if FULL else 4
PROCESSED_GAP = 1e-4
RAW_GAP = 1e-3
TIE = 1e-3
"""Logits that are closer together than this may be in either order."""

WHEELS = {("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"), ("darwin", "x86_64"), ("win32", "AMD64")}
"""Systems for which PyPI has a wheel of xllamacpp."""

if (sys.platform, platform.machine()) not in WHEELS:
    pytest.skip(f"xllamacpp has no wheel for {platform.platform()}", allow_module_level=True)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.spec_from_file_location("export_gguf", ROOT / "training" / "pocket" / "export_gguf.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    target = tmp_path_factory.mktemp("gguf") / "pocket.gguf"
    script.export(target)
    return target


@pytest.fixture(scope="module")
def server(model_file: Path) -> Iterator[str]:
    with llama_server(model_file, model_file.with_suffix(".log")) as address:
        yield address


@asynccontextmanager
async def connected(server: str, recorder: Recorder | None = None) -> AsyncIterator[LlamaCppEngine]:
    engine = await LlamaCppEngine.connect(Connection(server, transport=recorder or Recorder()))
    try:
        yield engine
    finally:
        await engine.close()


# -- capabilities


@in_loop
async def test_connect_detects_the_capabilities(server: str, model_file: Path) -> None:
    async with connected(server) as engine:
        caps = engine.capabilities
    assert (caps.engine, caps.max_length, caps.vocab_size) == ("llama.cpp", CONTEXT, MODEL.vocabulary_size)
    assert caps.logprobs is LogprobKind.PROCESSED
    assert caps.model == str(model_file)
    assert not any((caps.aborts, caps.pauses, caps.versions))


@in_loop
async def test_greedy_ids_are_those_of_the_numpy_model(server: str) -> None:
    async with connected(server) as engine:
        for prompt in prompts(0)[:6]:
            ids = (await engine.generate(prompt, SamplingParams(80, temperature=0, stop_token_ids=(END,)))).ids
            row = np.concatenate((prompt, ids))
            logits = MODEL.extend([MODEL.new_cache()], [row], every=True)[0][len(prompt) - 1 : -1]
            clear = logits.max(-1) - np.sort(logits, -1)[:, -2] > TIE
            assert clear.any()
            assert np.array_equal(ids[clear], logits.argmax(-1)[clear])
            assert (logits.max(-1) - logits[np.arange(len(logits)), ids] <= TIE).all()


@pytest.mark.parametrize(("temperature", "gap"), rotating([(0.0, RAW_GAP), (1.0, PROCESSED_GAP)], "rows", 2))
@in_loop
async def test_the_engine_saw_the_rows_that_are_trained(server: str, temperature: float, gap: float) -> None:
    recorder = Recorder()
    async with connected(server, recorder) as engine:
        rollouts, _ = await roll_out(engine, QUESTIONS, temperature)
    for _, body, answer in recorder.seen:
        assert answer["tokens_evaluated"] == len(body["prompt"])
        assert answer["prompt"] == RENDERER.tokenizer.decode(body["prompt"]), "the server's own words for its ids"
    check_rollouts(rollouts, [(body["prompt"], answer["tokens"]) for _, body, answer in recorder.seen], gap)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.3},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9},
    ],
    ids=lambda settings: ",".join(f"{name}={value}" for name, value in settings.items()),
)
@in_loop
async def test_logprobs_are_of_the_distribution_sampled_from(server: str, settings: dict[str, Any]) -> None:
    prompt = prompts(0)[2]
    async with connected(server) as engine:
        for seed in range(3 if FULL else 1):
            sampling = SamplingParams(40, seed=seed, stop_token_ids=(END,), **settings)
            completion = await engine.generate(prompt, sampling)
            expected = expected_logprobs(prompt, completion.ids, sampling)
            np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=PROCESSED_GAP)


@in_loop
async def test_max_tokens_and_stop_ids_are_respected(server: str) -> None:
    prompt = prompts(0)[0]
    limits = [(5, (END,)), (80, (END,)), (80, (END, NEWLINE)), (1, ())]
    async with connected(server) as engine:
        samplings = [SamplingParams(max_tokens, temperature=0, stop_token_ids=stops) for max_tokens, stops in limits]
        short, whole, line, one = [await engine.generate(prompt, sampling) for sampling in samplings]
    assert (len(short.ids), short.finish_reason) == (5, FinishReason.LENGTH)
    assert (int(whole.ids[-1]), whole.finish_reason) == (END, FinishReason.STOP)
    assert END not in whole.ids[:-1]
    assert (int(line.ids[-1]), line.finish_reason) == (NEWLINE, FinishReason.STOP)
    assert NEWLINE not in line.ids[:-1]
    assert len(line.logprobs) == len(line.ids) < len(whole.ids)
    assert (len(one.ids), one.finish_reason) == (1, FinishReason.LENGTH)
    for part in (short, line, one):
        assert np.array_equal(part.ids, whole.ids[: len(part.ids)])


@in_loop
async def test_half_characters_without_logprobs_are_an_error(server: str) -> None:
    """At a temperature that makes all tokens nearly as likely, single bytes are sampled too."""
    problems, recorder = [], Recorder()
    async with connected(server, recorder) as engine:
        for seed in range(3):
            try:
                await engine.generate([NEWLINE], SamplingParams(100, temperature=100.0, seed=seed))
            except EngineAnswerError as error:
                problems.append(str(error))
    assert problems
    assert all("incomplete UTF-8" in problem for problem in problems)
    short = [reply for _, _, reply in recorder.seen if len(reply["completion_probabilities"]) < len(reply["tokens"])]
    assert len(short) == len(problems)
