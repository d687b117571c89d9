"""Agents on Tinker's client: `forward_backward` gets the trajectory's ids, mask and logprobs."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.train import train_step
from tinker_cookbook.rl.types import Trajectory as CookbookTrajectory
from tinker_cookbook.rl.types import Transition

from tests.apart.shared import RENDERER, pocket_rollout
from tests.guides import run_guide
from tokentrace import Trajectory, trajectory_samples
from tokentrace.engines import EmbeddedEngine, SamplingParams
from tokentrace.errors import SampleError
from tokentrace.integrations.tinker_rollouts import TinkerEngine, training_data
from tokentrace.rollout import Rollout
from tokentrace.tokens.kinds import Kind


class Client:
    """A minimal `SamplingClient` on the embedded model, with Tinker's own types."""

    def __init__(self) -> None:
        self.engine = EmbeddedEngine(seed=0)
        self.prompts: list[list[int]] = []

    async def sample_async(
        self, prompt: tinker.ModelInput, num_samples: int, sampling_params: tinker.SamplingParams
    ) -> tinker.SampleResponse:
        assert num_samples == 1
        self.prompts.append(prompt.to_ints())
        stops = tuple(sampling_params.stop)
        params = SamplingParams(sampling_params.max_tokens, seed=sampling_params.seed, stop_token_ids=stops)
        done = await self.engine.generate(prompt.to_ints(), params)
        answer = {"tokens_np": done.ids, "logprobs_np": done.logprobs, "stop_reason": str(done.finish_reason)}
        return tinker.SampleResponse([tinker.SampledSequence(sequence_id="0", **answer)])


@pytest.fixture(scope="module")
def recorded() -> tuple[Rollout, Client]:
    """A rollout with a tool on Tinker's client, and that client."""

    client = Client()
    engine = TinkerEngine(client, vocab_size=RENDERER.tokenizer.vocabulary.size, version="step 3")
    rollout = pocket_rollout(engine, client.engine.close)
    assert rollout.turns > 1
    return rollout, client


def as_the_cookbook_has_it(trajectory: Trajectory) -> CookbookTrajectory:
    """The same rollout in the format of tinker-cookbook."""
    stream, logprobs = trajectory.stream(), trajectory.logprobs()
    return CookbookTrajectory(
        transitions=[
            Transition(
                ob=tinker.ModelInput.from_ints(stream[: turn.start].tolist()),
                ac=TokensWithLogprobs(
                    stream[turn.start : turn.stop].tolist(), logprobs[turn.start : turn.stop].tolist()
                ),
                reward=0.0,
                episode_done=False,
            )
            for turn in trajectory.turns()
        ],
        final_ob=tinker.ModelInput.empty(),
    )


def test_every_prompt_that_tinker_saw_is_a_prefix_of_the_stream(recorded: tuple[Rollout, Client]) -> None:
    rollout, client = recorded
    stream = rollout.trajectory.stream().tolist()
    assert [stream[: turn.start] for turn in rollout.trajectory.turns()] == client.prompts
    assert {turn.version for turn in rollout.trajectory.turns()} == {"step 3"}


def test_data_are_those_of_tinker_cookbook_for_the_same_rollout(recorded: tuple[Rollout, Client]) -> None:
    trajectory = recorded[0].trajectory
    (ours,) = training_data(trajectory, advantage=0.75, mask=True)
    (theirs,) = trajectory_to_data(as_the_cookbook_has_it(trajectory), 0.75)
    assert ours.model_input.to_ints() == theirs.model_input.to_ints()
    assert set(ours.loss_fn_inputs) == set(theirs.loss_fn_inputs)
    for name, expected in theirs.loss_fn_inputs.items():
        assert ours.loss_fn_inputs[name].dtype == expected.dtype
        np.testing.assert_array_equal(ours.loss_fn_inputs[name].to_numpy(), expected.to_numpy())


class Answered:
    """A finished future of Tinker."""

    def __init__(self, result: Any) -> None:
        self._result = result

    async def result_async(self) -> Any:
        return self._result


class Training:
    """A training client that records the data it gets."""

    def __init__(self) -> None:
        self.data: list[tinker.Datum] = []

    async def forward_backward_async(self, data: list[tinker.Datum], **_: Any) -> Answered:
        self.data += data
        outputs = [{"logprobs": datum.loss_fn_inputs["logprobs"]} for datum in data]
        return Answered(
            tinker.ForwardBackwardOutput(loss_fn_output_type="logprobs", loss_fn_outputs=outputs, metrics={})
        )

    async def optim_step_async(self, _: Any) -> Answered:
        return Answered(tinker.OptimStepResponse(metrics=None))


def test_forward_backward_gets_the_row(recorded: tuple[Rollout, Client]) -> None:
    trajectory, client = recorded[0].trajectory, Training()
    data = training_data(trajectory, advantage=lambda turn: turn.message / 8, mask=True)
    asyncio.run(train_step(data, client, 1e-5, 1, "importance_sampling"))  # type: ignore[arg-type]
    (row,) = trajectory_samples(trajectory, advantage=lambda turn: turn.message / 8)
    (datum,) = client.data
    sent = {name: value.to_numpy() for name, value in datum.loss_fn_inputs.items()}
    assert set(sent) == {"target_tokens", "logprobs", "advantages"}
    assert datum.model_input.to_ints() == row.ids[:-1].tolist()
    assert sent["target_tokens"].tolist() == row.ids[1:].tolist()
    trained = row.mask[1:]
    np.testing.assert_array_equal(sent["logprobs"][trained], row.logprobs[1:][trained])
    np.testing.assert_array_equal(sent["advantages"], row.advantages[1:])
    assert len(set(sent["advantages"][trained].tolist())) > 1
    assert not sent["logprobs"][~trained].any()
    assert not sent["advantages"][~trained].any()


def test_every_branch_is_a_datum_and_each_token_is_trained_once() -> None:
    trajectory = Trajectory()
    trajectory.begin([1, 2])
    trajectory.append_completion([3, 4], [-0.5, -0.25], finish_reason="stop")
    trajectory.branch([1, 2, 3, 9])
    trajectory.append_completion([7], [-2.0], finish_reason="stop")
    first, second = training_data(trajectory, advantage=1.0)
    assert [one.loss_fn_inputs["target_tokens"].tolist() for one in (first, second)] == [[2, 3, 4], [2, 3, 9, 7]]
    assert [one.loss_fn_inputs["logprobs"].tolist() for one in (first, second)] == [[0, -0.5, -0.25], [0, 0, 0, -2.0]]
    assert second.loss_fn_inputs["advantages"].tolist() == [0, 0, 0, 1.0]
    without = Trajectory(logprobs=False)
    without.begin([1])
    without.append_completion([2], None, finish_reason="stop")
    without.append_context([3], Kind.CONTEXT)
    with pytest.raises(SampleError, match="no logprobs"):
        training_data(without, advantage=1.0)


def test_the_guide_runs(tmp_path: Path) -> None:
    run_guide("tinker", tmp_path)
