"""SkyRL: rollouts as its `GeneratorOutput`, and a generator that runs our agents.

A `GeneratorOutput` is a dict, and SkyRL calls `generate` of whatever its experiment's ``get_generator`` returns:
nothing of it is imported here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..engines.protocol import SamplingParams
from ..errors import SampleError
from ..rollout.ends import FAILED_ENDS
from ..rollout.loop import Agent
from ..rollout.record import Rollout, Task
from ..samples.trajectories import trajectory_samples
from .rows import PromptResponse, failed_row, filled_logprobs, only_sample, prompt_response, reward_of
from .sampling import sampling_of


def generator_output(
    rollouts: Sequence[Rollout],
    *,
    trajectory_ids: Sequence[Any] | None = None,
    step_wise: bool = False,
    failed_reward: float | None = None,
) -> dict[str, Any]:
    """Rollouts as a `GeneratorOutput`, in their order.

    One row a rollout; a rollout whose history was rewritten has several, which SkyRL takes with ``step_wise`` (its
    ``generator.step_wise_trajectories``): neighbours with one trajectory id, the last of them marked. A rollout that
    failed, or where nothing was sampled, is a `SampleError`, unless `failed_reward` says what to count it as: it is one
    row then, whose loss mask is 0.
    """
    if trajectory_ids is not None and len(trajectory_ids) != len(rollouts):
        raise SampleError(f"{len(trajectory_ids)} trajectory ids for {len(rollouts)} rollouts")
    if step_wise and trajectory_ids is None:
        raise SampleError("step-wise rows need trajectory_ids: SkyRL tells by them which rows belong together")
    names = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs")
    made: dict[str, Any] = {name: [] for name in (*names, "trajectory_generation_times")}
    ids: list[Any] = []
    last: list[bool] = []
    for at, rollout in enumerate(rollouts):
        failed = failed_row(rollout, failed_reward, "SkyRL")
        rows = _rows(rollout, step_wise) if failed is None else [failed]
        cut = failed is None and rollout.per_turn[-1].finish_reason == "length"
        for row in rows:
            made["prompt_token_ids"].append(row.prompt_ids)
            made["response_ids"].append(row.response_ids)
            made["loss_masks"].append(row.response_mask)
            made["rollout_logprobs"].append(row.response_logprobs)
            made["rewards"].append(reward_of(rollout) if failed is None else failed_reward)
            made["stop_reasons"].append("length" if cut else "stop")
            made["trajectory_generation_times"].append(rollout.seconds)
            last.append(row is rows[-1])
            ids.append(None if trajectory_ids is None else trajectory_ids[at])
    empty = ("rollout_expert_indices", "env_metrics", "pixel_values", "image_grid_thw")
    return {
        **made,
        **dict.fromkeys(empty),
        "trajectory_ids": None if trajectory_ids is None else ids,
        "is_last_step": last if step_wise else None,
        "rollout_metrics": _metrics(rollouts),
    }


def _rows(rollout: Rollout, step_wise: bool) -> list[PromptResponse]:
    samples = trajectory_samples(rollout.trajectory) if step_wise else [only_sample(rollout.trajectory)]
    for sample in samples:
        filled_logprobs(sample)  # refuses rows without
    return [prompt_response(sample) for sample in samples]


def _metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means over a group. SkyRL averages over groups what has "mean" in its name, and adds up what has not."""
    count = max(len(rollouts), 1)
    return {
        "tokentrace/mean_turns": sum(rollout.turns for rollout in rollouts) / count,
        "tokentrace/mean_sampled_tokens": sum(rollout.trajectory.num_sampled for rollout in rollouts) / count,
        "tokentrace/mean_tool_calls": sum(rollout.use.calls for rollout in rollouts) / count,
        "tokentrace/mean_failed": sum(rollout.end in FAILED_ENDS for rollout in rollouts) / count,
    }


class AgentGenerator:
    """A generator of SkyRL that runs our agents.

    `make_agent` makes the agent of a batch, and is given its sampling parameters: those of training or of evaluation.
    `task` makes a task of a prompt and its ``env_extras``; by default these are its metadata, where rewards find them.
    """

    def __init__(
        self,
        make_agent: Callable[[SamplingParams], Agent],
        *,
        task: Callable[[Any, Mapping[str, Any]], Task] = lambda prompt, extras: Task(prompt, metadata=extras),
        step_wise: bool = False,
        failed_reward: float | None = None,
    ) -> None:
        self._make_agent, self._task = make_agent, task
        self._step_wise, self._failed_reward = step_wise, failed_reward

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """One rollout for each prompt of the batch, in its order."""
        prompts = input_batch["prompts"]
        extras = input_batch.get("env_extras") or [{}] * len(prompts)
        sampling = input_batch.get("sampling_params")
        if sampling is None:
            raise SampleError("the batch has no sampling parameters: SkyRL's trainer gives them")
        agent = self._make_agent(sampling_of(sampling))
        tasks = [self._task(prompt, about) for prompt, about in zip(prompts, extras, strict=True)]
        rollouts = await asyncio.gather(*(agent.run(task) for task in tasks))
        return generator_output(
            rollouts,
            trajectory_ids=input_batch.get("trajectory_ids"),
            step_wise=self._step_wise,
            failed_reward=self._failed_reward,
        )
