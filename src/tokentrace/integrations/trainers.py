"""Rollouts in the types of slime, SkyRL, AReaL, OpenRLHF and prime-rl, and the engines of two of them.

Every sampled token carries loss once, with the engine's logprob. What a trainer cannot take raises SampleError.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ..engines.answers import EngineReply
from ..engines.protocol import Capabilities, EngineAnswerError, GenerateRequest, add_version
from ..engines.scripted import CallbackEngine
from ..errors import InputError, SampleError, brief
from ..rollout.ends import FAILED_ENDS, End
from ..rollout.record import Rollout, Task
from ..samples.sample import Sample
from ..samples.trajectories import Advantage, trajectory_samples
from ..tokens.ids import runs
from ..trajectory.trajectory import Trajectory
from ..trajectory.turns import LogprobKind, VersionSpan
from .rows import (
    PromptResponse,
    failed_row,
    filled_logprobs,
    only_sample,
    prompt_response,
    reward_of,
    warn_of_other_distribution,
    without_tail,
)


def _row(sample: Sample) -> PromptResponse:
    """A row as prompt and response. Raises SampleError if a token that carries loss has no logprob."""
    filled_logprobs(sample)
    return prompt_response(sample)


def _rows(
    rollout: Rollout, failed_reward: float | None, trainer: str, *, several: bool
) -> tuple[list[PromptResponse], float | None]:
    """The rows of a rollout, or of one that failed the row that trains nothing; and the reward."""
    failed = failed_row(rollout, failed_reward, trainer)
    if failed is not None:
        return [failed], failed_reward
    samples = trajectory_samples(rollout.trajectory) if several else [only_sample(rollout.trajectory)]
    return [_row(sample) for sample in samples], reward_of(rollout)


def _is_cut(rollout: Rollout, row: PromptResponse) -> bool:
    return any(row.response_mask) and rollout.per_turn[-1].finish_reason == "length"


# -- slime


def slime_samples(rollout: Rollout, like: Any, *, failed_reward: float | None = None) -> list[Any]:
    """A rollout as copies of slime's sample `like`, one for each branch.

    One that failed or sampled nothing needs a `failed_reward`, and trains nothing (``remove_sample``).
    """
    failed = failed_row(rollout, failed_reward, "slime")
    if failed is not None:  # without a reward slime's reward model would be asked, or, where it was aborted, nobody
        metadata = {**like.metadata, "tokentrace": "; ".join(rollout.notes)}
        return [_slime_sample(like, failed, rollout, reward=failed_reward, remove_sample=True, metadata=metadata)]
    samples = []
    for sample in trajectory_samples(rollout.trajectory):
        versions = [str(span.version) for span in sample.versions if span.version is not None]
        more = {"response": rollout.answer, "weight_versions": versions, "reward": rollout.reward}
        metadata = {**like.metadata, "branch": sample.branch}
        samples.append(_slime_sample(like, _row(sample), rollout, metadata=metadata, **more))
    return samples


def _slime_sample(like: Any, row: PromptResponse, rollout: Rollout, **more: Any) -> Any:
    return dataclasses.replace(
        like,
        rollout_id=like.rollout_id if like.rollout_id is not None else like.index,
        tokens=row.prompt_ids + row.response_ids,
        response_length=len(row.response_ids),
        loss_mask=row.response_mask,
        rollout_log_probs=row.response_logprobs,  # slime sends nobody's where the first sample has none
        status=type(like).Status(_slime_status(rollout.end)),
        **more,
    )


def _slime_status(end: End | None) -> str:
    if end in (End.ANSWER, End.USER):
        return "completed"
    if end is End.ABORT:
        return "aborted"
    return "failed" if end in FAILED_ENDS else "truncated"


def slime_whole_groups(args: Any, group: Sequence[Any], **_: Any) -> bool:
    """For ``--dynamic-sampling-filter-path``: False for a group with a failed rollout; slime then samples another."""
    rows = [one for each in group for one in (each if isinstance(each, list) else [each])]
    return not any(one.remove_sample for one in rows)


def slime_task(sample: Any) -> Task:
    """The task of a slime sample, with its label and metadata for rewards. Raises SampleError for partial rollouts."""
    if sample.response_length:
        raise SampleError("the sample has a response already: partial rollouts of slime are not continued here")
    prompt = sample.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return Task(messages, metadata={**sample.metadata, "label": sample.label})


# -- SkyRL


def skyrl_output(
    rollouts: Sequence[Rollout],
    *,
    trajectory_ids: Sequence[Any] | None = None,
    step_wise: bool = False,
    failed_reward: float | None = None,
) -> dict[str, Any]:
    """Rollouts as a `GeneratorOutput`; with ``step_wise`` a rewritten history is several rows with one trajectory id.

    A rollout that failed or sampled nothing needs a `failed_reward`, and has a loss mask of 0.
    """
    if trajectory_ids is not None and len(trajectory_ids) != len(rollouts):
        raise SampleError(f"{len(trajectory_ids)} trajectory ids for {len(rollouts)} rollouts")
    if step_wise and trajectory_ids is None:
        raise SampleError("step-wise rows need trajectory_ids: SkyRL tells by them which rows belong together")
    rows: list[dict[str, Any]] = []
    for at, rollout in enumerate(rollouts):
        parts, reward = _rows(rollout, failed_reward, "SkyRL", several=step_wise)
        for row in parts:
            rows.append(
                {
                    "prompt_token_ids": row.prompt_ids,
                    "response_ids": row.response_ids,
                    "loss_masks": row.response_mask,
                    "rollout_logprobs": row.response_logprobs,
                    "rewards": reward,
                    "stop_reasons": "length" if _is_cut(rollout, row) else "stop",
                    "trajectory_generation_times": rollout.seconds,
                    "trajectory_ids": None if trajectory_ids is None else trajectory_ids[at],
                    "is_last_step": row is parts[-1],
                }
            )
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in _SKYRL_COLUMNS}
    empty = ["rollout_expert_indices", "env_metrics", "pixel_values", "image_grid_thw"]
    empty += [] if trajectory_ids is not None else ["trajectory_ids"]
    empty += [] if step_wise else ["is_last_step"]
    return {**columns, **dict.fromkeys(empty), "rollout_metrics": _skyrl_metrics(rollouts)}


_SKYRL_COLUMNS: Final = (
    *("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs", "rewards", "stop_reasons"),
    *("trajectory_generation_times", "trajectory_ids", "is_last_step"),
)


def _skyrl_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means over a group. SkyRL averages over groups what has "mean" in its name, and adds up what has not."""
    count = max(len(rollouts), 1)
    return {
        "tokentrace/mean_turns": sum(rollout.turns for rollout in rollouts) / count,
        "tokentrace/mean_sampled_tokens": sum(rollout.trajectory.num_sampled for rollout in rollouts) / count,
        "tokentrace/mean_tool_calls": sum(rollout.tool_calls for rollout in rollouts) / count,
        "tokentrace/mean_failed": sum(rollout.end in FAILED_ENDS for rollout in rollouts) / count,
    }


# -- AReaL


def areal_episode(rollout: Rollout) -> dict[str, Any] | None:
    """A rollout as the tensors of an episode; None, which AReaL rejects, if it failed or sampled nothing."""
    if rollout.end in FAILED_ENDS or not rollout.trajectory.num_sampled:
        return None
    return areal_tensors(rollout.trajectory, reward_of(rollout))


def areal_tensors(trajectory: Trajectory, reward: float) -> dict[str, Any]:
    """The rows of a trajectory as an episode, each up to its last token with loss: AReaL puts the reward on it.

    ``logprobs`` are 0.0 and ``versions`` -1 where nothing was sampled.
    """
    import torch

    samples = [without_tail(sample) for sample in trajectory_samples(trajectory)]
    if not samples:
        raise SampleError(f"{trajectory.name or 'the trajectory'}: nothing was sampled, so there is no row")

    def padded(rows: Sequence[Any], dtype: Any, filler: int = 0) -> Any:
        tensor = torch.full((len(rows), max(map(len, rows))), filler, dtype=dtype)
        for at, row in enumerate(rows):
            tensor[at, : len(row)] = torch.from_numpy(np.array(row)).to(dtype)
        return tensor

    return {
        "input_ids": padded([sample.ids for sample in samples], torch.int32),
        "attention_mask": padded([np.ones(len(sample)) for sample in samples], torch.bool),
        "loss_mask": padded([sample.mask for sample in samples], torch.int32),
        "logprobs": padded([filled_logprobs(sample) for sample in samples], torch.float32),
        "versions": padded([_areal_versions(sample) for sample in samples], torch.int32, -1),
        "rewards": torch.full((len(samples),), reward, dtype=torch.float32),
    }


def _areal_versions(sample: Sample) -> Any:
    versions = np.full(len(sample), -1)
    for span in sample.versions:
        if isinstance(span.version, str):
            raise SampleError(f"{sample!r}: AReaL numbers weights, and tokens are of version {brief(span.version)}")
        versions[span.start : span.stop] = -1 if span.version is None else span.version
    return versions


def areal_engine(engine: Any, settings: Any, *, kind: LogprobKind = LogprobKind.UNKNOWN) -> CallbackEngine:
    """AReaL's inference engine with its `GenerationHyperparameters`; the agent's sampling parameters replace them."""
    from areal.api import ModelRequest

    async def sample(request: GenerateRequest) -> EngineReply:
        sampling, prompt = request.sampling, np.asarray(request.prompt_ids).tolist()
        config = settings.new(
            n_samples=1,
            max_new_tokens=sampling.max_tokens,
            greedy=sampling.temperature == 0,
            temperature=sampling.temperature or 1.0,
            top_p=sampling.top_p,
            top_k=sampling.top_k or int(1e8),
            stop_token_ids=list(sampling.stop_token_ids),
        )
        answer = await engine.agenerate(ModelRequest(input_ids=prompt, gconfig=config))
        if list(answer.input_tokens) != prompt:
            raise EngineAnswerError("AReaL's engine read another prompt than the one sent")
        if len(answer.output_versions) != len(answer.output_tokens):
            raise EngineAnswerError(f"{len(answer.output_versions)} versions for {len(answer.output_tokens)} ids")
        versions: list[VersionSpan] = []
        for at, version in enumerate(answer.output_versions):
            add_version(versions, int(version), at + 1)
        finish = "stop" if answer.stop_reason == "tool_calls" else answer.stop_reason
        return EngineReply(answer.output_tokens, answer.output_logprobs, finish, versions)

    capabilities: dict[str, Any] = {
        "max_length": settings.max_tokens,
        "logprobs": kind,
        "versions": True,
        "seeds": False,
    }
    return CallbackEngine(sample, Capabilities("areal", **capabilities))


# -- OpenRLHF


def openrlhf_output(rollout: Rollout, prompt: str, label: Any, *, failed_reward: float | None = None) -> dict[str, Any]:
    """A rollout as what an `AgentExecutor` returns: the whole sequence, the ranges that carry loss, and logprobs.

    One that failed or sampled nothing needs a `failed_reward`, and has no range.
    """
    [row], reward = _rows(rollout, failed_reward, "OpenRLHF", several=False)
    start, trained = len(row.prompt_ids), runs(np.array(row.response_mask, np.bool_))
    return {
        "prompt": prompt,
        "label": label,
        "images": None,
        "mm_train_inputs": None,
        "observation_tokens": row.prompt_ids + row.response_ids,
        "action_ranges": [(start + first, start + stop) for first, stop in trained],
        "rollout_log_probs": [0.0] * start + (row.response_logprobs or []),
        "truncated": _is_cut(rollout, row),
        "reward": reward,
        "scores": reward,
        "extra_logs": {"turns": rollout.turns, "tool_calls": rollout.tool_calls, "failed": int(not trained)},
    }


def openrlhf_engine(engine: Any, params: Any, max_length: int) -> CallbackEngine:
    """The vLLM engine that OpenRLHF hands to an executor. The agent's sampling parameters replace the trainer's."""
    if getattr(params, "logprobs", None) is None:
        raise InputError("OpenRLHF does not ask vLLM for logprobs: turn on its importance sampling correction")

    async def sample(request: GenerateRequest) -> EngineReply:
        sampling, vllm_params = request.sampling, copy.deepcopy(params)
        for name in ("max_tokens", "seed", "temperature", "top_p"):
            setattr(vllm_params, name, getattr(sampling, name))
        vllm_params.min_tokens, vllm_params.top_k = 0, sampling.top_k or -1
        vllm_params.stop_token_ids = list(sampling.stop_token_ids)
        prompt = np.asarray(request.prompt_ids).tolist()
        [output] = (await engine.generate(prompt, vllm_params, multi_modal_data=None)).outputs
        ids, reported = list(output.token_ids), output.logprobs or []
        if len(reported) != len(ids) or not all(id in one for id, one in zip(ids, reported, strict=True)):
            raise EngineAnswerError("vLLM did not tell the logprob of each id that it sampled")
        logprobs = [one[id].logprob for id, one in zip(ids, reported, strict=True)]
        return EngineReply(ids, logprobs, output.finish_reason or "abort")

    return CallbackEngine(sample, Capabilities("openrlhf", max_length=max_length))


# -- prime-rl


def prime_rl_samples(
    trajectory: Trajectory, *, env_name: str, advantage: Advantage | None = None
) -> list[dict[str, Any]]:
    """The fields of a `TrainingSample` (``prime_rl.transports.rollouts.types``, 21 August 2026) for each row.

    Warns of settings that prime-rl does not know. Without `advantage` prime-rl assigns credit itself.
    """
    return [_prime_rl_sample(one, env_name) for one in trajectory_samples(trajectory, advantage=advantage)]


def _prime_rl_sample(sample: Sample, env_name: str) -> dict[str, Any]:
    logprobs = filled_logprobs(sample)
    warn_of_other_distribution(sample, "prime-rl")
    temperatures = np.ones(len(sample), np.float64)
    for completion in sample.completions:
        if not completion.temperature:
            problem = "was not recorded" if completion.temperature is None else "is 0"
            where = f"{sample!r}, tokens {completion.start} to {completion.stop}"
            raise SampleError(f"{where}: the temperature {problem}, and prime-rl divides by it")
        temperatures[completion.start : completion.stop] = completion.temperature
    fields = {
        "token_ids": sample.token_ids,
        "mask": sample.mask.tolist(),
        "logprobs": logprobs.tolist(),
        "temperatures": temperatures.tolist(),
        "env_name": env_name,
    }
    return fields if sample.advantages is None else {**fields, "advantages": sample.advantages.tolist()}
