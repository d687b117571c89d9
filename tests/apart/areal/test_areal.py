"""AReaL: an episode's tensors equal the trajectory, and its engine gets exactly the requests of our loop."""

import asyncio
from typing import Any

import pytest
import torch
from areal.api import ModelRequest, ModelResponse, RolloutWorkflow
from areal.api.cli_args import GenerationHyperparameters

from tests.integrations.rollouts import QUESTION, check_rows, random_tree, recipe
from tokentrace import Budget, EmbeddedEngine, Trajectory
from tokentrace.engines.protocol import Engine, SamplingParams
from tokentrace.errors import SampleError
from tokentrace.integrations.trainers import areal_tensors
from tokentrace.rollout import Rollout

DTYPES = {
    **dict.fromkeys(("input_ids", "loss_mask", "versions"), torch.int32),
    **dict.fromkeys(("logprobs", "rewards"), torch.float32),
    "attention_mask": torch.bool,
}


class Server:
    """AReaL's inference engine on pocket; each answer has newer weights."""

    def __init__(self, engine: Engine, *, without: str = "") -> None:
        self.engine, self.without, self.requests = engine, without, []

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        config = request.gconfig
        assert (config.n_samples, config.greedy) == (1, False)
        self.requests.append(request)
        sampling = SamplingParams(config.max_new_tokens, seed=3, stop_token_ids=tuple(config.stop_token_ids))
        done = await self.engine.generate(request.input_ids, sampling)
        ids = done.ids.tolist()
        versions = [len(self.requests)] * (len(ids) // 2) + [len(self.requests) + 1] * (len(ids) - len(ids) // 2)
        answer = ModelResponse(request.input_ids, ids, done.logprobs.tolist(), versions, str(done.finish_reason))
        if self.without:
            setattr(answer, self.without, getattr(answer, self.without)[1:])
        return answer


def episode(*, without: str = "", seed: int | None = None, **options: Any) -> tuple[Any, list[Rollout], Server]:
    rollouts: list[Rollout] = []
    settings = GenerationHyperparameters(max_tokens=2048)
    with pytest.MonkeyPatch.context() as patch:
        names = recipe("my_areal.py", patch, sampling=SamplingParams(64, seed=seed), rollouts=rollouts, **options)
    workflow = names["AgentWorkflow"](settings)
    assert isinstance(workflow, RolloutWorkflow)

    async def run() -> Any:
        pocket = EmbeddedEngine(seed=3)
        server = Server(pocket, without=without)
        try:
            return await workflow.arun_episode(server, {"messages": QUESTION, "answer": "395"}), server
        finally:
            await pocket.close()

    tensors, server = asyncio.run(run())
    return tensors, rollouts, server


def rows(batch: dict[str, torch.Tensor], branches: list[int]) -> list[Any]:
    out = []
    for at, branch in enumerate(branches):
        inside = batch["attention_mask"][at]
        assert inside.tolist() == sorted(inside.tolist(), reverse=True), "padding is at the end"
        for name, filler in (("loss_mask", 0), ("logprobs", 0.0), ("versions", -1)):
            assert (batch[name][at][~inside] == filler).all()
        out.append((branch, *(batch[name][at][inside].tolist() for name in ("input_ids", "loss_mask", "logprobs"))))
    return out


def check_versions(trajectory: Trajectory, tensors: dict[str, torch.Tensor], branches: list[int]) -> None:
    for at, branch in enumerate(branches):
        expected = [-1] * len(trajectory.stream(branch))
        for turn in trajectory.turns(branch):
            for version, start, stop in turn.versions:
                expected[turn.start + start : turn.start + stop] = [version] * (stop - start)
        assert tensors["versions"][at][tensors["attention_mask"][at]].tolist() == expected


@pytest.mark.parametrize("seed", range(12))
def test_branches_are_rows_of_one_episode(seed: int) -> None:
    tree = random_tree(seed)
    branches = [one.index for one in tree.branches if one.sampled]
    tensors = areal_tensors(tree, 0.25)
    assert {name: tensor.dtype for name, tensor in tensors.items()} == DTYPES
    assert tensors["rewards"].tolist() == [0.25] * len(branches)
    check_rows(tree, rows(tensors, branches))
    check_versions(tree, tensors, branches)


def test_a_workflow_runs_our_agent_on_the_engine_of_areal() -> None:
    tensors, [rollout], server = episode()
    assert {name: tensor.dtype for name, tensor in tensors.items()} == DTYPES
    check_rows(rollout.trajectory, rows(tensors, [0]))
    check_versions(rollout.trajectory, tensors, [0])
    assert tensors["rewards"].tolist() == [float(rollout.turns)]
    assert len(server.requests) == rollout.turns > 1
    stream = rollout.trajectory.stream().tolist()
    assert all(request.input_ids == stream[: len(request.input_ids)] for request in server.requests)


def test_the_reward_is_on_a_token_that_carries_loss() -> None:
    """AReaL puts the reward on the last token, and uses advantages only where the loss mask is 1."""
    tensors, [rollout], _ = episode(budget=Budget(turns=1))
    assert rollout.messages[-1]["role"] == "tool"
    assert rollout.trajectory.loss_mask()[-1] == 0
    [length] = tensors["attention_mask"].sum(1).tolist()
    assert tensors["loss_mask"][0][length - 1] == 1
    assert int(tensors["loss_mask"].sum()) == rollout.trajectory.num_sampled
    assert tensors["input_ids"][0][:length].tolist() == rollout.trajectory.stream().tolist()[:length]


@pytest.mark.parametrize(
    ("options", "requests"),
    [({"without": "output_logprobs"}, 1), ({"without": "output_versions"}, 1), ({"seed": 3}, 0)],
)
def test_an_episode_that_failed_has_no_row(options: dict[str, Any], requests: int) -> None:
    """An answer is incomplete, or a seed is set, which AReaL's requests do not have."""
    tensors, rollouts, server = episode(**options)
    assert (tensors, rollouts, len(server.requests)) == (None, [], requests)


def test_rollouts_that_areal_cannot_represent_are_refused() -> None:
    with pytest.raises(SampleError, match="has no reward"):
        episode(reward=lambda rollout: None)
    with pytest.raises(SampleError, match="has no logprobs"):
        areal_tensors(random_tree(1, logprobs=False), 0.0)
    with pytest.raises(SampleError, match="nothing was sampled"):
        areal_tensors(Trajectory(), 0.0)
    named = Trajectory()
    named.begin([1], messages=1)
    named.append_completion([2], [-0.5], finish_reason="stop", version="step 12")
    with pytest.raises(SampleError, match="numbers weights"):
        areal_tensors(named, 0.0)
