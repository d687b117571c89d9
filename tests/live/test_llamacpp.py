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

from tests.engines.test_sampling import reference
from tests.live.live import CONTEXT, ROOT, Recorder, llama_server, no_wheel
from tests.trajectory.checker import check_trajectory
from tokentrace import create_renderer
from tokentrace.demo.questions import FollowUps, pick_questions, question_reward, question_task
from tokentrace.engines.http import Connection
from tokentrace.engines.llamacpp import LlamaCppEngine
from tokentrace.engines.protocol import EngineAnswerError, EngineRefusal, FinishReason, LogprobKind, SamplingParams
from tokentrace.pocket import POCKET
from tokentrace.pocket.model import load_pocket, log_softmax, read_safetensors
from tokentrace.rollout.batch import run_rollouts
from tokentrace.rollout.loop import Agent, End, Rollout
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


def expected_logprobs(logits: Any, ids: Any, sampling: SamplingParams) -> Any:
    """Of the distribution that is sampled from: temperature, then top-k, then top-p."""
    weights = np.exp(logits.astype(np.float64) / sampling.temperature)
    order = np.argsort(-weights, axis=-1)
    sorted_weights = np.take_along_axis(weights, order, -1)
    if sampling.top_k:
        sorted_weights[:, sampling.top_k :] = 0
    sorted_weights /= sorted_weights.sum(-1, keepdims=True)
    before = np.cumsum(sorted_weights, -1) - sorted_weights
    sorted_weights[before >= sampling.top_p] = 0
    sorted_weights /= sorted_weights.sum(-1, keepdims=True)
    return np.log(sorted_weights[order == np.asarray(ids)[:, None]])


# -- the file


def test_the_file_has_the_weights_and_every_token(model_file: Path) -> None:
    import gguf  # slow to import, and needed here alone

    reader = gguf.GGUFReader(model_file)
    found = {tensor.name: tensor for tensor in reader.tensors}
    ours = read_safetensors(POCKET / "model.safetensors")
    assert len(found) == len(ours)
    assert {tensor.tensor_type for tensor in found.values()} == {gguf.GGMLQuantizationType.F32}
    embedding = found["token_embd.weight"].data.reshape(MODEL.vocabulary_size, -1)
    assert np.array_equal(embedding, ours["model.embed_tokens.weight"])
    assert np.array_equal(found["blk.4.attn_q_norm.weight"].data, ours["model.layers.4.self_attn.q_norm.weight"])
    assert len(reader.fields["tokenizer.ggml.tokens"].data) == MODEL.vocabulary_size
    assert reader.fields["tokenizer.ggml.eos_token_id"].contents() == END


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


def test_greedy_rollouts_answer_right(greedy: Rolled) -> None:
    assert len(greedy.rollouts) == QUESTIONS
    for rollout in greedy.rollouts:
        assert (rollout.end, rollout.notes, rollout.malformed, rollout.use.failed) == (End.USER, [], 0, 0)
        assert rollout.reward == 1.0
    assert sum(rollout.use.calls for rollout in greedy.rollouts) > QUESTIONS
    assert max(rollout.turns for rollout in greedy.rollouts) > 3


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
    for body, answer in rolled.recorder.completions():
        theirs.append((body["prompt"], answer["tokens"]))
        assert answer["tokens_evaluated"] == len(body["prompt"])
        assert answer["prompt"] == RENDERER.tokenizer.decode(body["prompt"]), "the server's own words for its ids"
    assert sorted(theirs) == sorted(ours)


def test_a_rollout_is_one_row(rolled: Rolled) -> None:
    for rollout in rolled.rollouts:
        (row,) = trajectory_samples(rollout.trajectory, reward=rollout.reward)
        assert row.trained == rollout.trajectory.num_sampled > 0
        assert rollout.trajectory.num_branches == 1


def test_prefixes_are_cached(greedy: Rolled) -> None:
    assert any(answer["timings"]["cache_n"] > 0 for _, answer in greedy.recorder.completions())


@pytest.mark.parametrize(("name", "gap"), [("greedy", RAW_GAP), ("sampled", PROCESSED_GAP)])
def test_logprobs_are_those_of_a_re_score(name: str, gap: float, request: pytest.FixtureRequest) -> None:
    rolled: Rolled = request.getfixturevalue(name)
    for rollout in rolled.rollouts:
        trajectory = rollout.trajectory
        mask = trajectory.loss_mask()
        again = np.concatenate(([0.0], MODEL.score(trajectory.stream())))
        np.testing.assert_allclose(trajectory.logprobs()[mask], again[mask], rtol=0, atol=gap)


def test_raw_logprobs_are_normalised_with_a_sum_in_float32(greedy: Rolled) -> None:
    for rollout in greedy.rollouts:
        trajectory = rollout.trajectory
        stream, at = trajectory.stream(), np.flatnonzero(trajectory.loss_mask())
        logits = logits_of(stream[:1], stream[1:])[at - 1]
        shifted = -np.sort(-logits, -1)
        shifted -= shifted[:, :1]
        running = np.cumsum(np.exp(shifted), -1, dtype=np.float32)[:, -1]
        found = logits[np.arange(len(at)), stream[at]] - logits.max(-1) - np.log(running)
        np.testing.assert_allclose(trajectory.logprobs()[at], found, rtol=0, atol=PROCESSED_GAP)


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
        expected = expected_logprobs(logits_of(prompt, completion.ids), completion.ids, one)
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=PROCESSED_GAP)


@pytest.mark.parametrize(
    "given",
    [{"min_p": 0.1, "temperature": 2.0}, {"repetition_penalty": 1.5}, {"repetition_penalty": 0.7, "min_p": 0.05}],
)
def test_min_p_and_the_repetition_penalty_mean_what_they_do_elsewhere(server: str, given: dict[str, Any]) -> None:
    prompt, sampling = first_prompts(3)[2], SamplingParams(40, seed=1, stop_token_ids=(END,), **given)

    async def work(engine: LlamaCppEngine) -> Any:
        return await engine.generate(prompt, sampling)

    done, _ = use(server, work)
    ids, known = done.ids.tolist(), prompt.tolist()
    wanted = [
        np.log(reference(logits, known, ids[:at], sampling)[ids[at]])
        for at, logits in enumerate(logits_of(prompt, done.ids))
    ]
    np.testing.assert_allclose(done.logprobs, wanted, rtol=0, atol=PROCESSED_GAP)


def test_raw_logprobs_can_be_asked_for(server: str) -> None:
    prompt = first_prompts(3)[2]

    async def work(engine: LlamaCppEngine) -> Any:
        return await engine.generate(
            prompt,
            SamplingParams(40, temperature=2.0, top_k=5, seed=1, stop_token_ids=(END,), allow_raw_logprobs=True),
        )

    completion, _ = use(server, work, logprobs="raw")
    expected = log_softmax(logits_of(prompt, completion.ids))[np.arange(len(completion.ids)), completion.ids]
    np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=RAW_GAP)


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


def test_seeds_are_heeded(server: str) -> None:
    prompt = first_prompts(3)[2]

    async def work(engine: LlamaCppEngine) -> list[list[int]]:
        seeds = (7, 7, 8)
        found = [
            await engine.generate(prompt, SamplingParams(60, temperature=2.0, top_k=5, seed=seed)) for seed in seeds
        ]
        return [completion.ids.tolist() for completion in found]

    (first, again, other), _ = use(server, work)
    assert first == again != other


def test_a_context_can_be_filled_to_the_last_token(server: str) -> None:
    async def work(engine: LlamaCppEngine) -> list[Any]:
        return [
            await engine.generate([NEWLINE] * (CONTEXT - count), SamplingParams(count, temperature=0))
            for count in (4, 1)
        ]

    (four, one), _ = use(server, work)
    assert (len(four.ids), four.finish_reason) == (4, FinishReason.LENGTH)
    assert (len(one.ids), one.finish_reason) == (1, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        ([NEWLINE, MODEL.vocabulary_size], SamplingParams(4)),
        ([NEWLINE, -1], SamplingParams(4)),
        ([], SamplingParams(4)),
        ([NEWLINE] * CONTEXT, SamplingParams(1)),
        ([NEWLINE] * (CONTEXT - 3), SamplingParams(4)),
        ([NEWLINE], SamplingParams(4, stop_token_ids=(MODEL.vocabulary_size,))),
    ],
    ids=["outside", "negative", "empty", "too long", "too long with max_tokens", "stop id outside"],
)
def test_what_does_not_fit_is_not_sent(server: str, prompt: list[int], sampling: SamplingParams) -> None:
    async def work(engine: LlamaCppEngine) -> None:
        with pytest.raises(EngineRefusal, match=r"^not sent: ") as caught:
            await engine.generate(prompt, sampling)
        assert caught.value.status is None

    _, recorder = use(server, work)
    assert recorder.completions() == []


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
    short = [a for _, a in recorder.completions() if len(a["completion_probabilities"]) < len(a["tokens"])]
    assert len(short) == len(problems)
