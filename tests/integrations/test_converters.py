"""Rows for slime, SkyRL and OpenRLHF: what the trajectory holds, in the shapes that they were recorded with.

The recipes of the guide are run as its files say, with our agent for theirs and stand-ins for what they import.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import functools
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.guides import GUIDES, blocks
from tests.integrations.rollouts import QUESTION, check_rows, make_agent, pocket_rollout, random_tree
from tokentrace import EmbeddedEngine, InputError, Task
from tokentrace.engines.protocol import Completion, Engine
from tokentrace.errors import SampleError
from tokentrace.integrations.rows import filled_logprobs, prompt_response
from tokentrace.integrations.sampling import sampling_of
from tokentrace.integrations.trainers import (
    openrlhf_output,
    skyrl_output,
    slime_samples,
    slime_whole_groups,
)
from tokentrace.rollout import Rollout
from tokentrace.rollout.ends import End
from tokentrace.rollout.record import TurnMetrics
from tokentrace.samples.trajectories import trajectory_samples
from tokentrace.trajectory import Trajectory

RECIPES = {block.title: block.code for block in blocks(GUIDES / "rows-for-trainers.md") if block.title}
SHAPES = json.loads((Path(__file__).parent / "shapes.json").read_text())
SEEDS = range(12)


def rewritten(seed: int, end: End = End.ANSWER, **options: Any) -> Rollout:
    """A rollout with a tree."""
    turn = TurnMetrics(prompt_tokens=1, sampled=1, finish_reason="stop")
    messages = [*QUESTION, {"role": "assistant", "content": "Done."}]
    made = Rollout(Task(QUESTION, name="x"), random_tree(seed, **options), [], messages, end=end, per_turn=[turn])
    made.reward = None if end is End.ENGINE else 0.5
    return made


def unanswered(end: End) -> Rollout:
    """A rollout that ended before the first turn."""
    trajectory = Trajectory()
    trajectory.begin([7, 8, 9], messages=1)
    return Rollout(Task(QUESTION, name="x"), trajectory, [], QUESTION, end=end, notes=["gone"])


def recipe(name: str, monkeypatch: pytest.MonkeyPatch, **agent: Any) -> dict[str, Any]:
    """What a file of the guide defines, with this agent in the place of the guide's."""
    module = types.ModuleType("my_agent")
    module.make_agent = functools.partial(make_agent, **agent)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_agent", module)
    names: dict[str, Any] = {}
    exec(compile(RECIPES[name], name, "exec"), names)
    return names


# -- what they share


def test_a_token_that_carries_loss_has_its_logprob_or_there_is_no_row() -> None:
    [sample] = trajectory_samples(pocket_rollout().trajectory)
    assert filled_logprobs(sample)[sample.mask].tolist() == sample.logprobs[sample.mask].tolist()
    holed = sample.logprobs.copy()
    holed[sample.mask.argmax()] = float("nan")
    for convert in (filled_logprobs, prompt_response):
        with pytest.raises(SampleError, match="carries loss and has no logprob"):
            convert(sample.replace(logprobs=holed))
    with pytest.raises(SampleError, match="has no logprobs"):
        filled_logprobs(sample.replace(logprobs=None))


def test_sampling_parameters_are_honoured_or_refused() -> None:
    given = {"max_new_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "stop": None, "no_stop_trim": True}
    made = sampling_of({**given, "sampling_seed": 3, "stop_token_ids": [5], "min_p": 0.0})
    assert (made.max_tokens, made.temperature, made.top_p, made.top_k, made.seed) == (7, 0.5, 0.9, 0, 3)
    assert made.stop_token_ids == (5,)
    assert sampling_of({**given, "min_tokens": 1}) == sampling_of(given), "SkyRL and OpenRLHF always ask for it"
    wrong: list[tuple[str, Any]] = [
        *(("stop", ["x"]), ("stop", np.array(["x", "y"])), ("min_p", 0.1), ("min_tokens", 2), ("n", 2)),
        *(("repetition_penalty", 1.1), ("custom_params", {"a": 1}), ("stop_token_ids", 5), ("stop_token_ids", "5")),
    ]
    for name, value in wrong:
        with pytest.raises(InputError, match=name):
            sampling_of({**given, name: value})
    with pytest.raises(InputError, match="mapping"):
        sampling_of([1])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="max_tokens"):
        sampling_of({"temperature": 1.0})


# -- slime


def slime_type() -> Any:
    """slime's `Sample`, as it was recorded."""
    status = enum.Enum("Status", {name.upper(): name for name in SHAPES["slime"]["Sample.Status"]})
    fields: list[Any] = []
    for name, about in SHAPES["slime"]["Sample"].items():
        default = about.rpartition(" = ")[2]
        value = status.PENDING if name == "status" else eval(default)
        made = type(value) in (list, dict)
        fields.append(
            (name, Any, dataclasses.field(default_factory=type(value)) if made else dataclasses.field(default=value))
        )
    return dataclasses.make_dataclass("Sample", fields, namespace={"Status": status})


SLIME = slime_type()


@pytest.mark.parametrize("seed", SEEDS)
def test_slime_gets_each_sampled_token_once(seed: int) -> None:
    rollout = rewritten(seed)
    tree = rollout.trajectory
    given = SLIME(index=7, group_index=2, prompt="q", label="a", metadata={"k": 1})
    made = slime_samples(rollout, given)
    rows = []
    for one in made:
        assert len(one.loss_mask) == len(one.rollout_log_probs) == one.response_length <= len(one.tokens)
        before = len(one.tokens) - one.response_length
        rows.append(
            (one.metadata["branch"], one.tokens, [0] * before + one.loss_mask, [0.0] * before + one.rollout_log_probs)
        )
        assert (one.rollout_id, one.index, one.group_index, one.label, one.reward) == (7, 7, 2, "a", 0.5)
        assert one.status is SLIME.Status.COMPLETED
        assert one.weight_versions
    check_rows(tree, rows)
    assert given == SLIME(index=7, group_index=2, prompt="q", label="a", metadata={"k": 1}), (
        "what was given stays as it is"
    )


@pytest.mark.parametrize(
    ("end", "status"),
    [(End.ANSWER, "completed"), (End.TURNS, "truncated"), (End.ABORT, "aborted"), (End.ENGINE, "failed")],
)
def test_slime_is_told_how_a_rollout_ended(end: End, status: str) -> None:
    failed = end in (End.ABORT, End.ENGINE)
    made = slime_samples(rewritten(3, end), SLIME(index=1), failed_reward=-1.0)
    assert {one.status.value for one in made} == {status}
    assert {one.remove_sample for one in made} == {failed}
    assert {one.reward for one in made} == {-1.0 if failed else 0.5}, "slime's reward model is not asked"
    nothing = Rollout(Task(QUESTION), Trajectory(), [], QUESTION, end=end, notes=["gone"])
    for none, ids in ((nothing, [0, 0]), (unanswered(end), [7, 8, 9])):
        [one] = slime_samples(none, SLIME(index=1), failed_reward=-1.0)
        assert (one.status.value, one.remove_sample, one.reward, one.tokens) == (status, True, -1.0, ids)
        assert (one.response_length, one.loss_mask, one.rollout_log_probs) == (1, [0], [0.0])
        assert one.metadata["tokentrace"] == "gone"
        with pytest.raises(SampleError, match=r"gone.*failed_reward"):
            slime_samples(none, SLIME(index=1))
        assert not slime_whole_groups(None, [slime_samples(rewritten(3), SLIME()), one])
        assert slime_whole_groups(None, [slime_samples(rewritten(3), SLIME()), SLIME()])


# -- SkyRL


def skyrl_rows(made: dict[str, Any]) -> list[Any]:
    columns = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")
    return [
        (prompt + response, [0] * len(prompt) + mask, [0.0] * len(prompt) + logprobs)
        for prompt, response, mask, logprobs in zip(*(made[name] for name in columns), strict=True)
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_skyrl_gets_branches_as_steps(seed: int) -> None:
    rollouts = [rewritten(seed), rewritten(seed + 100)]
    made = skyrl_output(rollouts, trajectory_ids=["a", "b"], step_wise=True)
    assert set(made) == set(SHAPES["skyrl"]["GeneratorOutput"])
    rows, at = skyrl_rows(made), 0
    for rollout, name in zip(rollouts, "ab", strict=True):
        branches = [one.index for one in rollout.trajectory.branches if one.sampled]
        mine = slice(at, at + len(branches))
        check_rows(rollout.trajectory, [(branch, *row) for branch, row in zip(branches, rows[mine], strict=True)])
        assert made["trajectory_ids"][mine] == [name] * len(branches)
        assert made["is_last_step"][mine] == [False] * (len(branches) - 1) + [True]
        assert made["rewards"][mine] == [0.5] * len(branches)
        at += len(branches)
    assert at == len(rows)
    assert len(made["trajectory_generation_times"]) == len(rows), "one for each row, as SkyRL flattens them"


def test_skyrl_runs_an_agent_for_each_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Rollout] = []

    names = recipe("my_skyrl.py", monkeypatch, kept=kept)

    async def run() -> Any:
        engine = EmbeddedEngine(seed=3)
        sampling = {"min_tokens": 1, "max_tokens": 64, "temperature": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1}
        batch = {
            "prompts": [QUESTION, QUESTION],
            "sampling_params": {**sampling, "seed": 3},
            "trajectory_ids": ["a", "b"],
        }
        try:
            return await names["AgentGenerator"](engine).generate(batch)
        finally:
            await engine.close()

    made = asyncio.run(run())
    assert set(made) == set(SHAPES["skyrl"]["GeneratorOutput"])
    kept.sort(key=lambda rollout: rollout.task.name)  # numbered in the order of the prompts
    for row, expected in zip(skyrl_rows(made), kept, strict=True):
        check_rows(expected.trajectory, [(0, *row)])
    assert made["rewards"] == [float(rollout.turns) for rollout in kept]
    assert made["trajectory_ids"] == ["a", "b"]
    assert made["is_last_step"] is None


# -- OpenRLHF


@pytest.fixture
def openrlhf(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """With a base class in place of OpenRLHF's, which the recipe imports."""
    agent = types.ModuleType("openrlhf.utils.agent")
    agent.AgentExecutorBase = type("AgentExecutorBase", (), {})  # type: ignore[attr-defined]
    for each, module in (("openrlhf", types.ModuleType("openrlhf")), ("openrlhf.utils", types.ModuleType("utils"))):
        monkeypatch.setitem(sys.modules, each, module)
    monkeypatch.setitem(sys.modules, "openrlhf.utils.agent", agent)
    return monkeypatch


class TrainersVLLM:
    """vLLM as OpenRLHF wraps it, sampled by pocket."""

    def __init__(self, engine: Engine, lost: int) -> None:
        self.engine, self.lost = engine, lost

    async def generate(self, prompt_ids: list[int], params: Any, multi_modal_data: Any) -> Any:
        assert multi_modal_data is None
        assert params.min_tokens == 0, "a turn may be its stop token alone"
        made: Completion = await self.engine.generate(prompt_ids, sampling_of(vars(params), allow_raw_logprobs=True))
        ids = made.ids.tolist()
        logprobs = [
            {id: types.SimpleNamespace(logprob=float(one)), 1: types.SimpleNamespace(logprob=-9.0)}
            for id, one in zip(ids, made.logprobs, strict=True)
        ][self.lost :]
        output = types.SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=str(made.finish_reason))
        return types.SimpleNamespace(outputs=[output])


def execute(openrlhf: pytest.MonkeyPatch, *, lost: int = 0, logprobs: int | None = 1, **options: Any) -> Any:
    names = recipe("my_openrlhf.py", openrlhf, **options)
    params = types.SimpleNamespace(
        temperature=1.0, top_p=1.0, top_k=-1, max_tokens=64, min_tokens=1, seed=3, logprobs=logprobs, stop=None
    )

    async def run() -> Any:
        engine = EmbeddedEngine(seed=3)
        vllm = TrainersVLLM(engine, lost)
        try:
            return await names["AgentExecutor"]().execute(QUESTION[0]["content"], "395", params, 2048, None, vllm)
        finally:
            await engine.close()

    return asyncio.run(run())


def test_openrlhf_gets_the_sequence_and_the_ranges_with_loss(openrlhf: Any) -> None:
    kept: list[Rollout] = []
    made = execute(openrlhf, kept=kept)
    [expected] = kept
    assert set(made) == set(SHAPES["openrlhf"]["executed"])
    mask = [0] * len(made["observation_tokens"])
    for start, stop in made["action_ranges"]:
        mask[start:stop] = [1] * (stop - start)
    check_rows(expected.trajectory, [(0, made["observation_tokens"], mask, made["rollout_log_probs"])])
    assert len(made["action_ranges"]) == expected.turns
    assert (made["reward"], made["truncated"]) == (float(expected.turns), False)


def test_openrlhf_gets_no_row_without_logprobs_or_reward(openrlhf: Any) -> None:
    with pytest.raises(InputError, match="does not ask vLLM for logprobs"):
        execute(openrlhf, logprobs=None)
    made = execute(openrlhf, lost=1)
    assert (made["reward"], made["action_ranges"], made["truncated"]) == (0.0, [], False)
    assert made["rollout_log_probs"] == [0.0] * len(made["observation_tokens"])
    assert made["extra_logs"]["failed"] == 1
    with pytest.raises(SampleError, match=r"failed \(engine.*failed_reward"):
        openrlhf_output(rewritten(1, End.ENGINE), "", "")
    with pytest.raises(SampleError, match="has no reward"):
        execute(openrlhf, reward=lambda rollout: None)
    with pytest.raises(SampleError, match="takes one row"):
        openrlhf_output(rewritten(1), "", "")
