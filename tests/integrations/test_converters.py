"""Rows for slime, SkyRL and OpenRLHF: the data of the trajectory in the recorded shapes of these libraries."""

import asyncio
import dataclasses
import enum
import importlib.util
import json
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.integrations.rollouts import QUESTION, check_rows, pocket_rollout, random_tree, recipe, with_engine
from tokentrace import InputError, Task
from tokentrace.engines import EngineAnswerError, EngineRefusal, LogprobKindError, SamplingParams
from tokentrace.engines.answers import checked_request
from tokentrace.engines.protocol import Capabilities, Completion, Engine, GenerateRequest
from tokentrace.errors import SampleError
from tokentrace.integrations.rows import filled_logprobs, only_sample, prompt_response
from tokentrace.integrations.trainers import (
    VERL_SAMPLING,
    ServerEngine,
    openrlhf_output,
    sampling_of,
    skyrl_output,
    slime_samples,
    slime_whole_groups,
)
from tokentrace.rollout import Rollout
from tokentrace.rollout.ends import End
from tokentrace.rollout.record import TurnMetrics
from tokentrace.samples.trajectories import trajectory_samples
from tokentrace.tokens.kinds import Kind
from tokentrace.trajectory import Trajectory

SHAPES = json.loads((Path(__file__).parent / "shapes.json").read_text())
SEEDS = range(12)
VLLM = {"name": "vllm", "logprobs_mode": "processed_logprobs"}


def rewritten(seed: int, end: End = End.ANSWER, **options: Any) -> Rollout:
    """A rollout with several branches."""
    turn = TurnMetrics()
    messages = [*QUESTION, {"role": "assistant", "content": "Done."}]
    rollout = Rollout(Task(QUESTION, name="x"), random_tree(seed, **options), [], messages, end=end, per_turn=[turn])
    rollout.reward = None if end is End.ENGINE else 0.5
    return rollout


def unanswered(end: End) -> Rollout:
    """A rollout that ended before the first turn."""
    trajectory = Trajectory()
    trajectory.begin([7, 8, 9], messages=1)
    return Rollout(Task(QUESTION, name="x"), trajectory, [], QUESTION, end=end, notes=["gone"])


# -- shared helpers


def test_a_token_that_carries_loss_without_a_logprob_is_an_error() -> None:
    [sample] = trajectory_samples(pocket_rollout().trajectory)
    assert filled_logprobs(sample)[sample.mask].tolist() == sample.logprobs[sample.mask].tolist()
    incomplete = sample.logprobs.copy()
    incomplete[sample.mask.argmax()] = float("nan")
    for convert in (filled_logprobs, prompt_response):
        with pytest.raises(SampleError, match="carries loss and has no logprob"):
            convert(sample.replace(logprobs=incomplete))
    with pytest.raises(SampleError, match="has no logprobs"):
        filled_logprobs(sample.replace(logprobs=None))


def recorded(**first: Any) -> Trajectory:
    """Two turns with a tool result between them."""
    trajectory = Trajectory(name="one")
    trajectory.begin([1, 2, 3], messages=1)
    sampling = {"sampling": {"temperature": 0.5}, **first}
    trajectory.append_completion([10, 11], [-0.5, -0.25], finish_reason="stop", **sampling)
    trajectory.append_context([4, 5], [Kind.CONTEXT, Kind.SCAFFOLD], messages=1)
    trajectory.append_completion([20], [-0.125], finish_reason="stop", sampling={"temperature": 1.0})
    return trajectory


def test_a_response_goes_from_the_first_sampled_token_to_the_last() -> None:
    trajectory = recorded()
    trajectory.append_context([6], [Kind.CONTEXT], messages=1)  # an unanswered tool result
    row = prompt_response(only_sample(trajectory))
    assert (row.prompt_ids, row.response_ids) == ([1, 2, 3], [10, 11, 4, 5, 20])
    assert (row.response_mask, row.response_logprobs) == ([1, 1, 0, 0, 1], [-0.5, -0.25, 0.0, 0.0, -0.125])
    with pytest.raises(SampleError, match="nothing was sampled"):
        only_sample(unanswered(End.ENGINE).trajectory)


def test_sampling_parameters_are_honoured_or_refused() -> None:
    options = {"max_new_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "stop": None, "no_stop_trim": True}
    parsed = sampling_of({**options, "sampling_seed": 3, "stop_token_ids": [5], "min_p": 0.0})
    assert (parsed.max_tokens, parsed.temperature, parsed.top_p, parsed.top_k, parsed.seed) == (7, 0.5, 0.9, 0, 3)
    assert parsed.stop_token_ids == (5,)
    assert sampling_of({**options, "min_tokens": 1}) == sampling_of(options), "SkyRL and OpenRLHF always ask for it"
    wrong: list[tuple[str, Any]] = [
        *(("stop", ["x"]), ("stop", np.array(["x", "y"])), ("min_p", 0.1), ("min_tokens", 2), ("n", 2)),
        *(("repetition_penalty", 1.1), ("custom_params", {"a": 1}), ("stop_token_ids", 5), ("stop_token_ids", "5")),
    ]
    for name, value in wrong:
        with pytest.raises(InputError, match=name):
            sampling_of({**options, name: value})
    with pytest.raises(InputError, match="mapping"):
        sampling_of([1])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="max_tokens"):
        sampling_of({"temperature": 1.0})
    penalty = sampling_of({**options, "min_p": 0.05, "repetition_penalty": 1.1}, supports=VERL_SAMPLING)
    assert (penalty.min_p, penalty.repetition_penalty) == (0.05, 1.1)
    with pytest.raises(InputError, match="min_q"):
        sampling_of({**options, "min_q": 0.1}, supports=VERL_SAMPLING)
    raw = ServerEngine(None, "one", {"name": "vllm", "logprobs_mode": "raw_logprobs"}, vocab_size=9)
    with pytest.raises(LogprobKindError):
        asyncio.run(raw.generate([1], penalty))
    with pytest.raises(EngineRefusal, match="areal has no seed"):
        checked_request(GenerateRequest([1], SamplingParams(4, seed=7)), Capabilities("areal", seeds=False))


# -- slime


def slime_type() -> Any:
    """slime's `Sample` class, from the recorded fields."""
    status = enum.Enum("Status", {name.upper(): name for name in SHAPES["slime"]["Sample.Status"]})
    fields: list[Any] = []
    for name, annotation in SHAPES["slime"]["Sample"].items():
        value = status.PENDING if name == "status" else eval(annotation.rpartition(" = ")[2])
        default = {"default_factory": type(value)} if type(value) in (list, dict) else {"default": value}
        fields.append((name, Any, dataclasses.field(**default)))
    return dataclasses.make_dataclass("Sample", fields, namespace={"Status": status})


SLIME = slime_type()


@pytest.mark.parametrize("seed", SEEDS)
def test_slime_gets_each_sampled_token_once(seed: int) -> None:
    rollout = rewritten(seed)
    tree = rollout.trajectory
    template = SLIME(index=7, group_index=2, prompt="q", label="a", metadata={"k": 1})
    samples = slime_samples(rollout, template)
    rows = []
    for row in samples:
        assert len(row.loss_mask) == len(row.rollout_log_probs) == row.response_length <= len(row.tokens)
        before = len(row.tokens) - row.response_length
        rows.append(
            (row.metadata["branch"], row.tokens, [0] * before + row.loss_mask, [0.0] * before + row.rollout_log_probs)
        )
        assert (row.rollout_id, row.index, row.group_index, row.label, row.reward) == (7, 7, 2, "a", 0.5)
        assert row.status is SLIME.Status.COMPLETED
        assert row.weight_versions
    check_rows(tree, rows)
    assert template == SLIME(index=7, group_index=2, prompt="q", label="a", metadata={"k": 1}), (
        "what was given stays as it is"
    )


@pytest.mark.parametrize(
    ("end", "status"),
    [(End.ANSWER, "completed"), (End.TURNS, "truncated"), (End.ABORT, "aborted"), (End.ENGINE, "failed")],
)
def test_slimes_status_is_the_end_of_the_rollout(end: End, status: str) -> None:
    failed = end in (End.ABORT, End.ENGINE)
    samples = slime_samples(rewritten(3, end), SLIME(index=1), failed_reward=-1.0)
    assert {sample.status.value for sample in samples} == {status}
    assert {sample.remove_sample for sample in samples} == {failed}
    assert {sample.reward for sample in samples} == {-1.0 if failed else 0.5}, "slime's reward model is not asked"
    nothing = Rollout(Task(QUESTION), Trajectory(), [], QUESTION, end=end, notes=["gone"])
    for rollout, ids in ((nothing, [0, 0]), (unanswered(end), [7, 8, 9])):
        [sample] = slime_samples(rollout, SLIME(index=1), failed_reward=-1.0)
        assert (sample.status.value, sample.remove_sample, sample.reward, sample.tokens) == (status, True, -1.0, ids)
        assert (sample.response_length, sample.loss_mask, sample.rollout_log_probs) == (1, [0], [0.0])
        assert sample.metadata["tokentrace"] == "gone"
        with pytest.raises(SampleError, match=r"gone.*failed_reward"):
            slime_samples(rollout, SLIME(index=1))
        assert not slime_whole_groups(None, [slime_samples(rewritten(3), SLIME()), sample])
        assert slime_whole_groups(None, [slime_samples(rewritten(3), SLIME()), SLIME()])


# -- SkyRL


def skyrl_rows(output: dict[str, Any]) -> list[Any]:
    columns = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")
    return [
        (prompt + response, [0] * len(prompt) + mask, [0.0] * len(prompt) + logprobs)
        for prompt, response, mask, logprobs in zip(*(output[name] for name in columns), strict=True)
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_skyrl_gets_branches_as_steps(seed: int) -> None:
    rollouts = [rewritten(seed), rewritten(seed + 100)]
    output = skyrl_output(rollouts, trajectory_ids=["a", "b"], step_wise=True)
    assert set(output) == set(SHAPES["skyrl"]["GeneratorOutput"])
    rows, at = skyrl_rows(output), 0
    for rollout, name in zip(rollouts, "ab", strict=True):
        branches = [one.index for one in rollout.trajectory.branches if one.sampled]
        steps = slice(at, at + len(branches))
        check_rows(rollout.trajectory, [(branch, *row) for branch, row in zip(branches, rows[steps], strict=True)])
        assert output["trajectory_ids"][steps] == [name] * len(branches)
        assert output["is_last_step"][steps] == [False] * (len(branches) - 1) + [True]
        assert output["rewards"][steps] == [0.5] * len(branches)
        at += len(branches)
    assert at == len(rows)
    assert len(output["trajectory_generation_times"]) == len(rows), "one for each row, as SkyRL flattens them"


def test_skyrl_runs_an_agent_for_each_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts: list[Rollout] = []
    names = recipe("my_skyrl.py", monkeypatch, rollouts=rollouts)
    sampling = {"min_tokens": 1, "max_tokens": 64, "temperature": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1}
    batch = {"prompts": [QUESTION, QUESTION], "sampling_params": {**sampling, "seed": 3}, "trajectory_ids": ["a", "b"]}
    output = with_engine(lambda engine: names["AgentGenerator"](engine).generate(batch))
    assert set(output) == set(SHAPES["skyrl"]["GeneratorOutput"])
    rollouts.sort(key=lambda rollout: rollout.task.name)  # numbered in the order of the prompts
    for row, expected in zip(skyrl_rows(output), rollouts, strict=True):
        check_rows(expected.trajectory, [(0, *row)])
    assert output["rewards"] == [float(rollout.turns) for rollout in rollouts]
    assert output["trajectory_ids"] == ["a", "b"]
    assert output["is_last_step"] is None


# -- OpenRLHF


@pytest.fixture
def openrlhf(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Installs a stand-in for the base class of OpenRLHF that the recipe imports."""
    agent = types.ModuleType("openrlhf.utils.agent")
    agent.AgentExecutorBase = type("AgentExecutorBase", (), {})  # type: ignore[attr-defined]
    for each, module in (("openrlhf", types.ModuleType("openrlhf")), ("openrlhf.utils", types.ModuleType("utils"))):
        monkeypatch.setitem(sys.modules, each, module)
    monkeypatch.setitem(sys.modules, "openrlhf.utils.agent", agent)
    return monkeypatch


class TrainersVLLM:
    """OpenRLHF's wrapper of vLLM, on pocket; drops the first `lost` logprobs of each answer."""

    def __init__(self, engine: Engine, lost: int) -> None:
        self.engine, self.lost = engine, lost

    async def generate(self, prompt_ids: list[int], params: Any, multi_modal_data: Any) -> Any:
        assert multi_modal_data is None
        assert params.min_tokens == 0, "a turn may be its stop token alone"
        done: Completion = await self.engine.generate(prompt_ids, sampling_of(vars(params), allow_raw_logprobs=True))
        ids = done.ids.tolist()
        logprobs = [
            {id: types.SimpleNamespace(logprob=float(one)), 1: types.SimpleNamespace(logprob=-9.0)}
            for id, one in zip(ids, done.logprobs, strict=True)
        ][self.lost :]
        output = types.SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=str(done.finish_reason))
        return types.SimpleNamespace(outputs=[output])


def execute(openrlhf: pytest.MonkeyPatch, *, lost: int = 0, logprobs: int | None = 1, **options: Any) -> Any:
    names = recipe("my_openrlhf.py", openrlhf, **options)
    params = types.SimpleNamespace(
        temperature=1.0, top_p=1.0, top_k=-1, max_tokens=64, min_tokens=1, seed=3, logprobs=logprobs, stop=None
    )

    def work(engine: Engine) -> Any:
        vllm = TrainersVLLM(engine, lost)
        return names["AgentExecutor"]().execute(QUESTION[0]["content"], "395", params, 2048, None, vllm)

    return with_engine(work)


def test_openrlhf_gets_the_sequence_and_the_ranges_with_loss(openrlhf: Any) -> None:
    rollouts: list[Rollout] = []
    output = execute(openrlhf, rollouts=rollouts)
    [expected] = rollouts
    assert set(output) == set(SHAPES["openrlhf"]["executed"])
    mask = [0] * len(output["observation_tokens"])
    for start, stop in output["action_ranges"]:
        mask[start:stop] = [1] * (stop - start)
    check_rows(expected.trajectory, [(0, output["observation_tokens"], mask, output["rollout_log_probs"])])
    assert len(output["action_ranges"]) == expected.turns
    assert (output["reward"], output["truncated"]) == (float(expected.turns), False)


def test_openrlhf_gets_no_row_without_logprobs_or_reward(openrlhf: Any) -> None:
    with pytest.raises(InputError, match="does not ask vLLM for logprobs"):
        execute(openrlhf, logprobs=None)
    output = execute(openrlhf, lost=1)
    assert (output["reward"], output["action_ranges"], output["truncated"]) == (0.0, [], False)
    assert output["rollout_log_probs"] == [0.0] * len(output["observation_tokens"])
    assert output["extra_logs"]["failed"] == 1
    with pytest.raises(SampleError, match=r"failed \(engine.*failed_reward"):
        openrlhf_output(rewritten(1, End.ENGINE), "", "")
    with pytest.raises(SampleError, match="has no reward"):
        execute(openrlhf, reward=lambda rollout: None)
    with pytest.raises(SampleError, match="takes one row"):
        openrlhf_output(rewritten(1), "", "")


# -- verl


@pytest.mark.skipif(importlib.util.find_spec("verl") is not None, reason="verl is installed here")
@pytest.mark.parametrize("name", ["verl", "verl_sft"])
def test_without_verl_the_error_says_what_to_install(name: str) -> None:
    with pytest.raises(ImportError, match=r"needs verl: pip install 'verl\[verl-core\]'"):
        importlib.import_module(f"tokentrace.integrations.{name}")


def ask_verl(sampling: SamplingParams, name: str = "vllm", **changes: Any) -> dict[str, Any]:
    """The request that verl's server of this kind gets; its answer is one token, with the fields of `changed`."""
    answer = {"token_ids": [5], "log_probs": [-0.5], "stop_reason": "completed", "extra_fields": {}, **changes}
    sent: dict[str, Any] = {}

    async def generate(**request: Any) -> Any:
        sent.update(request["sampling_params"])
        return SimpleNamespace(**answer)

    engine = ServerEngine(SimpleNamespace(generate=generate), "one", {**VLLM, "name": name}, vocab_size=10)
    asyncio.run(engine.generate([1], sampling))
    return sent


def test_verls_servers_are_sent_the_seed() -> None:
    for server, name in (("vllm", "seed"), ("sglang", "sampling_seed"), ("trtllm", "seed")):
        sent = ask_verl(sampling_of({"temperature": 1.0, "seed": 7}, max_tokens=4), server)
        assert {key: value for key, value in sent.items() if "seed" in key} == {name: 7}
        assert not [key for key in ask_verl(SamplingParams(4), server) if "seed" in key]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"log_probs": None}, "1 sampled ids but 0 logprobs"),
        ({"log_probs": [-0.5, -0.5]}, "1 sampled ids but 2 logprobs"),
        ({"token_ids": [], "log_probs": []}, "returned no ids"),
        ({"token_ids": [10]}, "the vocabulary has 10 ids"),
    ],
)
def test_an_unusable_answer_of_verls_servers_is_refused(changed: dict[str, Any], problem: str) -> None:
    with pytest.raises(EngineAnswerError, match=problem):
        ask_verl(SamplingParams(4), **changed)
