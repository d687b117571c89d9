"""Rollouts for slime, SkyRL, AReaL, OpenRLHF and prime-rl; trainers' engines and sampling parameters.

Every sampled token carries loss once, with the engine's logprob. What a trainer cannot take is a SampleError.
"""

import copy
import dataclasses
from collections.abc import Mapping, Sequence, Sized
from typing import Any, Final

import numpy as np

from ..engines.answers import EngineReply
from ..engines.errors import EngineAnswerError
from ..engines.protocol import Capabilities, FinishReason, GenerateRequest, SamplingParams, add_version
from ..engines.scripted import CallbackEngine
from ..errors import InputError, SampleError, brief
from ..rollout.ends import FAILED_ENDS, End
from ..rollout.record import Rollout, Task
from ..samples.sample import Sample
from ..samples.trajectories import Advantage, owned_turns, trajectory_samples
from ..tokens.ids import runs
from ..trajectory.trajectory import Trajectory
from ..trajectory.turns import PENALTIES, LogprobKind, VersionSpan
from .rows import (
    PromptResponse,
    failed_row,
    filled_logprobs,
    only_sample,
    prompt_response,
    reward_of,
    warn_of_other_distribution,
    weight_versions,
    without_tail,
)

# -- trainers' sampling parameters, which are those of vLLM and SGLang, converted to ours

_IGNORED: Final = frozenset(
    {"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "include_stop_str_in_output"}
    | {"detokenize", "logprobs"}
)
"""Parameters about text, and logprobs, which are always requested."""
_OFF: Final[Mapping[str, tuple[float, ...]]] = {
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty", "ignore_eos"), (0,)),
    **dict.fromkeys(("min_tokens", "min_new_tokens"), (0, 1)),
    **dict.fromkeys(("repetition_penalty", "n", "n_samples"), (1,)),
}
"""Values that change nothing. SkyRL and OpenRLHF always set ``min_tokens`` to 1."""
_PARAMETERS: Final = ("temperature", "top_p", "top_k", "max_tokens", "stop", "stop_token_ids", "seed", *_OFF)


def sampling_of(
    params: Any,
    *,
    max_tokens: int | None = None,
    supports: Sequence[str] = (),
    allow_raw_logprobs: bool = False,
) -> SamplingParams:
    """Convert sampling parameters. Raises InputError for unknown ones."""
    if not isinstance(params, Mapping):
        if not hasattr(params, "temperature"):
            raise InputError(f"sampling parameters must be a mapping of names to values, not {brief(params)}")
        params = {name: getattr(params, name) for name in _PARAMETERS if hasattr(params, name)}
    remaining = {
        name: value
        for name, value in params.items()
        if name not in _IGNORED and value is not None and not (isinstance(value, Sized) and not len(value))
    }
    limits = [remaining.pop(name, None) for name in ("max_tokens", "max_new_tokens")]
    seeds = [remaining.pop(name, None) for name in ("seed", "sampling_seed")]
    stops = remaining.pop("stop_token_ids", ())
    names = ("temperature", "top_p", "top_k", *supports)
    values = {name: remaining.pop(name) for name in names if name in remaining}
    if not isinstance(stops, list | tuple):
        raise InputError(f"stop_token_ids must be a list of ids, not {brief(stops)}")
    numbers = {name: value for name, value in remaining.items() if isinstance(value, int | float)}
    off = {name for name, value in numbers.items() if value in _OFF.get(name, ())}
    if wrong := {name: value for name, value in remaining.items() if name not in off}:
        raise InputError(f"the sampling parameters {brief(wrong)} cannot be honoured here: leave them out")
    limit = next((one for one in limits if one is not None), max_tokens)
    if limit is None:
        raise InputError("the sampling parameters have no max_tokens: say how long a turn may be")
    if values.get("top_k") == -1:
        values["top_k"] = 0
    values |= {"stop_token_ids": tuple(stops), "allow_raw_logprobs": allow_raw_logprobs}
    return SamplingParams(limit, seed=next((one for one in seeds if one is not None), None), **values)


# -- rows


def _rows(
    rollout: Rollout, failed_reward: float | None, trainer: str, *, several: bool
) -> tuple[list[PromptResponse], float | None]:
    failed = failed_row(rollout, failed_reward, trainer)
    if failed is not None:
        return [failed], failed_reward
    samples = trajectory_samples(rollout.trajectory) if several else [only_sample(rollout.trajectory)]
    return [prompt_response(sample) for sample in samples], reward_of(rollout)


def _is_cut(rollout: Rollout, row: PromptResponse) -> bool:
    return any(row.response_mask) and owned_turns(rollout.trajectory)[-1].finish_reason == "length"


# -- slime


def slime_samples(rollout: Rollout, like: Any, *, failed_reward: float | None = None) -> list[Any]:
    """Return copies of slime's sample `like`, one for each branch. A failed rollout needs a `failed_reward`."""
    failed = failed_row(rollout, failed_reward, "slime")
    if failed is not None:  # without a reward, slime would ask its reward model
        metadata = {**like.metadata, "tokentrace": "; ".join(rollout.notes)}
        return [
            _slime_sample(like, failed, rollout, reward=failed_reward, remove_sample=True, metadata=metadata)
        ]
    samples = []
    for sample in trajectory_samples(rollout.trajectory):
        versions = [str(span.version) for span in sample.versions if span.version is not None]
        more = {"response": rollout.answer, "weight_versions": versions, "reward": rollout.reward}
        metadata = {**like.metadata, "branch": sample.branch}
        samples.append(_slime_sample(like, prompt_response(sample), rollout, metadata=metadata, **more))
    return samples


def _slime_sample(like: Any, row: PromptResponse, rollout: Rollout, **more: Any) -> Any:
    statuses: dict[End | None, str] = {End.ANSWER: "completed", End.USER: "completed", End.ABORT: "aborted"}
    status = statuses.get(rollout.end, "failed" if rollout.end in FAILED_ENDS else "truncated")
    return dataclasses.replace(
        like,
        rollout_id=like.rollout_id if like.rollout_id is not None else like.index,
        tokens=row.prompt_ids + row.response_ids,
        response_length=len(row.response_ids),
        loss_mask=row.response_mask,
        rollout_log_probs=row.response_logprobs,  # slime sends none at all if the first sample has none
        status=type(like).Status(status),
        **more,
    )


def slime_whole_groups(args: Any, group: Sequence[Any], **_: Any) -> bool:
    """Return False for a group with a failed rollout."""
    rows = [one for each in group for one in (each if isinstance(each, list) else [each])]
    return not any(one.remove_sample for one in rows)


def slime_task(sample: Any) -> Task:
    """Raises SampleError if the sample already has a response."""
    if sample.response_length:
        raise SampleError(
            "the sample already has a response: partial rollouts of slime cannot be continued here"
        )
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
    """Return a `GeneratorOutput`. With ``step_wise``, a rewritten history is several rows with one id.

    A rollout that failed or sampled nothing needs a `failed_reward`, and has a loss mask of 0.
    """
    if trajectory_ids is not None and len(trajectory_ids) != len(rollouts):
        raise SampleError(f"{len(trajectory_ids)} trajectory ids for {len(rollouts)} rollouts")
    if step_wise and trajectory_ids is None:
        raise SampleError("step-wise rows need trajectory_ids: SkyRL groups rows by them")
    entries: list[tuple[PromptResponse, Rollout, float | None, Any, bool]] = []
    for at, rollout in enumerate(rollouts):
        rows, reward = _rows(rollout, failed_reward, "SkyRL", several=step_wise)
        id = None if trajectory_ids is None else trajectory_ids[at]
        entries += [(row, rollout, reward, id, row is rows[-1]) for row in rows]

    def mean(*values: float) -> float:
        return sum(values) / max(len(values), 1)

    return {
        "prompt_token_ids": [row.prompt_ids for row, *_ in entries],
        "response_ids": [row.response_ids for row, *_ in entries],
        "loss_masks": [row.response_mask for row, *_ in entries],
        "rollout_logprobs": [row.response_logprobs for row, *_ in entries],
        "rewards": [reward for _, _, reward, *_ in entries],
        "stop_reasons": ["length" if _is_cut(rollout, row) else "stop" for row, rollout, *_ in entries],
        "trajectory_generation_times": [rollout.seconds for _, rollout, *_ in entries],
        "trajectory_ids": None if trajectory_ids is None else [id for *_, id, _ in entries],
        "is_last_step": [is_last for *_, is_last in entries] if step_wise else None,
        **dict.fromkeys(("rollout_expert_indices", "env_metrics", "pixel_values", "image_grid_thw")),
        # over groups, SkyRL averages metrics with "mean" in their names, and adds up the others
        "rollout_metrics": {
            "tokentrace/mean_turns": mean(*(one.turns for one in rollouts)),
            "tokentrace/mean_sampled_tokens": mean(*(one.trajectory.num_sampled for one in rollouts)),
            "tokentrace/mean_tool_calls": mean(*(one.tool_calls for one in rollouts)),
            "tokentrace/mean_failed": mean(*(one.end in FAILED_ENDS for one in rollouts)),
        },
    }


# -- AReaL


def areal_episode(rollout: Rollout) -> dict[str, Any] | None:
    """An episode; None if the rollout failed or sampled nothing."""
    if rollout.end in FAILED_ENDS or not rollout.trajectory.num_sampled:
        return None
    return areal_tensors(rollout.trajectory, reward_of(rollout))


def areal_tensors(trajectory: Trajectory, reward: float) -> dict[str, Any]:
    """Rows up to their last token with loss."""
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
        "versions": padded([weight_versions(sample) for sample in samples], torch.int32, -1),
        "rewards": torch.full((len(samples),), reward, dtype=torch.float32),
    }


def areal_engine(engine: Any, settings: Any, *, kind: LogprobKind = LogprobKind.UNKNOWN) -> CallbackEngine:
    """Return an engine that samples with AReaL's."""
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
            raise EngineAnswerError("AReaL's engine read a different prompt than the one sent")
        if len(answer.output_versions) != len(answer.output_tokens):
            raise EngineAnswerError(
                f"{len(answer.output_versions)} versions for {len(answer.output_tokens)} ids"
            )
        versions: list[VersionSpan] = []
        for at, version in enumerate(answer.output_versions):
            add_version(versions, int(version), at + 1)
        finish = "stop" if answer.stop_reason == "tool_calls" else answer.stop_reason
        return EngineReply(answer.output_tokens, answer.output_logprobs, finish, versions)

    limits = {"max_length": settings.max_tokens, "versions": True, "seeds": False}
    return CallbackEngine(sample, Capabilities("areal", logprobs=kind, **limits))


# -- OpenRLHF


def openrlhf_output(
    rollout: Rollout, prompt: str, label: Any, *, failed_reward: float | None = None
) -> dict[str, Any]:
    """Return what an `AgentExecutor` returns. A failed rollout needs a `failed_reward`, and has no range."""
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
    """Return an engine that samples with the vLLM engine of OpenRLHF."""
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
            raise EngineAnswerError("vLLM did not return the logprob of each sampled id")
        logprobs = [one[id].logprob for id, one in zip(ids, reported, strict=True)]
        return EngineReply(ids, logprobs, output.finish_reason or "abort")

    return CallbackEngine(sample, Capabilities("openrlhf", max_length=max_length))


# -- prime-rl


def prime_rl_samples(
    trajectory: Trajectory, *, env_name: str, advantage: Advantage | None = None
) -> list[dict[str, Any]]:
    """Return the fields of a `TrainingSample` for each row. Without `advantage`, prime-rl assigns credit."""
    return [_prime_rl_sample(one, env_name) for one in trajectory_samples(trajectory, advantage=advantage)]


def _prime_rl_sample(sample: Sample, env_name: str) -> dict[str, Any]:
    warn_of_other_distribution(sample, "prime-rl")
    temperatures = np.ones(len(sample), np.float64)
    for completion in sample.completions:
        if not completion.temperature:
            problem = "was not recorded" if completion.temperature is None else "is 0"
            where = f"{sample!r}, tokens {completion.start} to {completion.stop}"
            raise SampleError(f"{where}: the temperature {problem}, but prime-rl divides by it")
        temperatures[completion.start : completion.stop] = completion.temperature
    fields = {
        "token_ids": sample.token_ids,
        "mask": sample.mask.tolist(),
        "logprobs": filled_logprobs(sample).tolist(),
        "temperatures": temperatures.tolist(),
        "env_name": env_name,
    }
    return fields if sample.advantages is None else {**fields, "advantages": sample.advantages.tolist()}


# -- verl

_ABORTED: Final = ("aborted", "abort")
_ADDED_UP: Final = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")
VERL_SAMPLING: Final = ("min_p", *PENALTIES)
"""Parameters that verl's servers take beyond those of all engines."""


_VLLM_KINDS: Final = {"processed_logprobs": LogprobKind.PROCESSED, "raw_logprobs": LogprobKind.RAW}


class ServerEngine(CallbackEngine):
    """verl's servers, with the settings ``actor_rollout_ref.rollout``."""

    def __init__(
        self, server_manager: Any, request_id: str, rollout: Any, *, vocab_size: int, priority: int = 0
    ) -> None:
        kinds = {"vllm": _VLLM_KINDS.get(rollout.get("logprobs_mode")), "sglang": LogprobKind.SCALED}
        kind = kinds.get(rollout.get("name")) or LogprobKind.UNKNOWN
        optional = frozenset(VERL_SAMPLING)
        reported: dict[str, Any] = {"logprobs": kind, "versions": True}
        super().__init__(self._ask, Capabilities("verl", vocab_size=vocab_size, sampling=optional, **reported))
        self.answers: list[Any] = []
        self._servers = server_manager
        self._request_id = request_id
        self._priority = priority
        self._seed_field = "sampling_seed" if rollout.get("name") == "sglang" else "seed"

    async def _ask(self, request: GenerateRequest) -> EngineReply:
        sampling = request.sampling
        answer = await self._servers.generate(
            request_id=self._request_id,
            prompt_ids=list(map(int, request.prompt_ids)),
            sampling_params={
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "repetition_penalty": 1.0,
                **{name: getattr(sampling, name) for name in sampling.optional},
                **({} if sampling.seed is None else {self._seed_field: sampling.seed}),
                "logprobs": True,
                "max_tokens": sampling.max_tokens,
                "stop_token_ids": list(sampling.stop_token_ids),
            },
            priority=self._priority,
        )
        if not len(answer.token_ids) and answer.stop_reason not in _ABORTED:
            raise EngineAnswerError("verl's server returned no ids; its log may say why")
        self.answers.append(answer)
        cached, ids = answer.extra_fields.get("num_cached_tokens"), answer.token_ids
        if answer.stop_reason in _ABORTED:
            finish = FinishReason.ABORT
        else:  # vLLM's "completed" is a stop or the token limit; SGLang says which
            is_cut = answer.stop_reason == "length" or len(ids) == sampling.max_tokens
            stopped = ids[-1] in sampling.stop_token_ids
            finish = FinishReason.LENGTH if is_cut and not stopped else FinishReason.STOP
        return EngineReply(ids, answer.log_probs, finish, _verl_versions(answer), cached)

    def reported(self, name: str) -> list[Any]:
        return [value for answer in self.answers if (value := getattr(answer, name)) is not None]

    def extra_fields(self) -> dict[str, Any]:
        """The extra fields of the first request, with the last version of the weights, and sums of counts."""
        if not self.answers:
            return {}
        fields = [answer.extra_fields for answer in self.answers]
        merged = dict(fields[0])
        if (last := fields[-1].get("max_global_steps")) is not None:
            merged["max_global_steps"] = last
        merged |= {key: sum(int(one.get(key, 0)) for one in fields) for key in _ADDED_UP if key in merged}
        return merged


def _verl_versions(answer: Any) -> tuple[VersionSpan, ...]:
    """The step of the weights; empty if there were several."""
    fields, count = answer.extra_fields, len(answer.token_ids)
    step = fields.get("global_steps")
    first, last = fields.get("min_global_steps", step), fields.get("max_global_steps", step)
    return () if first is None or first != last or not count else (VersionSpan(int(first), 0, count),)
