"""The adapter against a real llama.cpp server that serves pocket in float32.

Its logprobs after sampling were within 1e-5 of the NumPy model's in these tests (with a cache in float16: 3.8e-4). Raw
ones were within 1.6e-4, and within 1e-5 of the NumPy model's logits when these are normalised with a running sum in
float32, in which the many small probabilities get lost. The bounds here leave room for other processors.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.live.live import CONTEXT, ROOT, Recorder, expected_logprobs, llama_server, no_wheel
from tests.trajectory.model import check_trajectory
from tokentrace import create_renderer
from tokentrace.demo.questions import FollowUps, pick_questions, question_reward, question_task
from tokentrace.engines.errors import EngineAnswerError
from tokentrace.engines.http import Connection
from tokentrace.engines.llamacpp import LlamaCppEngine
from tokentrace.engines.protocol import FinishReason, LogprobKind, SamplingParams
from tokentrace.pocket import POCKET
from tokentrace.pocket.model import load_pocket
from tokentrace.rollout.batch import run_rollouts
from tokentrace.rollout.loop import Agent, Rollout
from tokentrace.samples.trajectories import trajectory_samples

RENDERER = create_renderer(POCKET)
MODEL = load_pocket()
(END,) = RENDERER.get_stop_token_ids()
NEWLINE = 198
QUESTIONS = 12
PROCESSED_GAP = 1e-4
RAW_GAP = 1e-3
TIE = 1e-3
"""Logits that are nearer to each other than this may be ordered either way."""

if reason := no_wheel():
    pytest.skip(reason, allow_module_level=True)


@dataclass(frozen=True)
class Rolled:
    rollouts: list[Rollout]
    recorder: Recorder


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


def use(server: str, work: Callable[[LlamaCppEngine], Awaitable[Any]], **settings: Any) -> tuple[Any, Recorder]:
    """What `work` makes of an engine that is connected for it, and what was sent and answered."""
    recorder = Recorder()

    async def run() -> Any:
        connection = Connection(server, transport=recorder)
        engine = await LlamaCppEngine.connect(connection, vocab_size=MODEL.vocabulary_size, **settings)
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(run()), recorder


def roll_out(server: str, temperature: float) -> Rolled:
    rollouts: list[Rollout] = []

    async def work(engine: LlamaCppEngine) -> None:
        sampling = SamplingParams(160, temperature=temperature)
        agent = Agent(engine, RENDERER, sampling=sampling, interaction=FollowUps(), reward=question_reward)
        await run_rollouts(
            agent, map(question_task, pick_questions(QUESTIONS)), concurrency=4, done=rollouts.append, seed=3
        )

    _, recorder = use(server, work)
    return Rolled(rollouts, recorder)


@pytest.fixture(scope="module")
def greedy(server: str) -> Rolled:
    return roll_out(server, 0.0)


@pytest.fixture(scope="module")
def sampled(server: str) -> Rolled:
    return roll_out(server, 1.0)


@pytest.fixture(params=["greedy", "sampled"])
def rolled(request: pytest.FixtureRequest) -> Rolled:
    found: Rolled = request.getfixturevalue(request.param)
    return found


def first_prompts(count: int) -> list[Any]:
    tasks = [question_task(question) for question in pick_questions(count)]
    schemas = [[tool.tool_schema for tool in task.tools or ()] for task in tasks]
    return [
        RENDERER.render(task.messages, tools=tools, add_generation_prompt=True).ids
        for task, tools in zip(tasks, schemas, strict=True)
    ]


def logits_of(prompt: Any, ids: Any) -> Any:
    """The NumPy model's logits for each of `ids`."""
    (logits,) = MODEL.extend([MODEL.new_cache()], [np.concatenate((prompt, ids))], every=True)
    return logits[len(prompt) - 1 : -1]


# -- what it can do


def test_connect_finds_out_what_it_can_do(server: str, model_file: Path) -> None:
    async def look() -> Any:
        engine = await LlamaCppEngine.connect(server)
        await engine.close()
        return engine.capabilities

    found = asyncio.run(look())
    assert (found.engine, found.max_length, found.vocab_size) == ("llama.cpp", CONTEXT, MODEL.vocabulary_size)
    assert found.logprobs is LogprobKind.PROCESSED
    assert found.model == str(model_file)
    assert not any((found.streams, found.aborts, found.pauses, found.versions))


def test_greedy_ids_are_those_of_the_numpy_model(server: str) -> None:
    prompts = first_prompts(6)

    async def work(engine: LlamaCppEngine) -> list[Any]:
        return [await engine.generate(one, SamplingParams(80, temperature=0, stop_token_ids=(END,))) for one in prompts]

    completions, _ = use(server, work)
    for prompt, completion in zip(prompts, completions, strict=True):
        logits = logits_of(prompt, completion.ids)
        best = logits.argmax(-1)
        clear = logits.max(-1) - np.sort(logits, -1)[:, -2] > TIE
        assert clear.any()
        assert np.array_equal(completion.ids[clear], best[clear])
        assert (logits.max(-1) - logits[np.arange(len(logits)), completion.ids] <= TIE).all()


# -- whole rollouts


def test_the_engine_sees_the_prompts_of_the_trajectory(rolled: Rolled) -> None:
    ours = []
    for rollout in rolled.rollouts:
        trajectory = rollout.trajectory
        check_trajectory(trajectory)
        turns = trajectory.turns()
        assert len(turns) == rollout.turns
        stream = trajectory.stream()
        ours += [(stream[: turn.start].tolist(), trajectory.completion(turn).tolist()) for turn in turns]
    theirs = []
    for _, body, answer in rolled.recorder.seen:
        theirs.append((body["prompt"], answer["tokens"]))
        assert answer["tokens_evaluated"] == len(body["prompt"])
        assert answer["prompt"] == RENDERER.tokenizer.decode(body["prompt"]), "the server's own words for its ids"
    assert sorted(theirs) == sorted(ours)


def test_a_rollout_is_one_row(rolled: Rolled) -> None:
    for rollout in rolled.rollouts:
        (row,) = trajectory_samples(rollout.trajectory, reward=rollout.reward)
        assert row.trained == rollout.trajectory.num_sampled > 0
        assert rollout.trajectory.num_branches == 1


@pytest.mark.parametrize(("name", "gap"), [("greedy", RAW_GAP), ("sampled", PROCESSED_GAP)])
def test_logprobs_are_those_of_a_re_score(name: str, gap: float, request: pytest.FixtureRequest) -> None:
    rolled: Rolled = request.getfixturevalue(name)
    for rollout in rolled.rollouts:
        trajectory = rollout.trajectory
        mask = trajectory.loss_mask()
        again = np.concatenate(([0.0], MODEL.score(trajectory.stream())))
        np.testing.assert_allclose(trajectory.logprobs()[mask], again[mask], rtol=0, atol=gap)


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
def test_logprobs_are_of_the_distribution_sampled_from(server: str, settings: dict[str, Any]) -> None:
    prompt = first_prompts(3)[2]
    sampling = [SamplingParams(40, seed=seed, stop_token_ids=(END,), **settings) for seed in range(3)]

    async def work(engine: LlamaCppEngine) -> list[Any]:
        return [await engine.generate(prompt, one) for one in sampling]

    completions, _ = use(server, work)
    for completion, one in zip(completions, sampling, strict=True):
        expected = expected_logprobs(prompt, completion.ids, one)
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=PROCESSED_GAP)


# -- limits


def test_max_tokens_and_stop_ids_are_respected(server: str) -> None:
    prompt = first_prompts(1)[0]

    async def work(engine: LlamaCppEngine) -> list[Any]:
        return [
            await engine.generate(prompt, SamplingParams(5, temperature=0, stop_token_ids=(END,))),
            await engine.generate(prompt, SamplingParams(80, temperature=0, stop_token_ids=(END,))),
            await engine.generate(prompt, SamplingParams(80, temperature=0, stop_token_ids=(END, NEWLINE))),
            await engine.generate(prompt, SamplingParams(1, temperature=0)),
        ]

    (short, whole, line, one), _ = use(server, work)
    assert (len(short.ids), short.finish_reason) == (5, FinishReason.LENGTH)
    assert (int(whole.ids[-1]), whole.finish_reason) == (END, FinishReason.STOP)
    assert END not in whole.ids[:-1]
    assert (int(line.ids[-1]), line.finish_reason) == (NEWLINE, FinishReason.STOP)
    assert NEWLINE not in line.ids[:-1]
    assert len(line.logprobs) == len(line.ids) < len(whole.ids)
    assert (len(one.ids), one.finish_reason) == (1, FinishReason.LENGTH)
    for part in (short, line, one):
        assert np.array_equal(part.ids, whole.ids[: len(part.ids)])


def test_half_characters_without_logprobs_are_an_error(server: str) -> None:
    """At a temperature that makes all tokens nearly as likely, single bytes are sampled too."""

    async def work(engine: LlamaCppEngine) -> list[str]:
        problems = []
        for seed in range(8):
            try:
                await engine.generate([NEWLINE], SamplingParams(100, temperature=100.0, seed=seed))
            except EngineAnswerError as error:
                problems.append(str(error))
        return problems

    problems, recorder = use(server, work)
    assert problems
    assert all("incomplete UTF-8" in problem for problem in problems)
    short = [a for _, _, a in recorder.seen if len(a["completion_probabilities"]) < len(a["tokens"])]
    assert len(short) == len(problems)
