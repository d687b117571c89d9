"""Rollouts for slime, SkyRL, AReaL and OpenRLHF; trainers' engines and sampling parameters.

Every sampled token carries loss once. What a trainer cannot take is a SampleError.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import numpy as np

from ..engines.answers import EngineReply
from ..engines.errors import EngineAnswerError
from ..engines.protocol import (
    Capabilities,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    add_version,
)
from ..engines.scripted import CallbackEngine
from ..errors import InputError, SampleError, brief
from ..rollout.ends import FAILED_ENDS, End
from ..rollout.record import Rollout, Task
from ..samples.batches import token_versions
from ..samples.sample import Sample
from ..samples.trajectories import owned_turns, trajectory_samples
from ..tokens.ids import runs
from ..trajectory.trajectory import Trajectory
from ..trajectory.turns import PENALTIES, LogprobKind, VersionSpan
from .rows import (
    PromptResponse,
    failed_row,
    filled_logprobs,
    prompt_response,
    reward_of,
    rows_of,
    without_tail,
)

_IGNORED = frozenset(
    {"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "include_stop_str_in_output"}
    | {"detokenize", "logprobs"}
)
"""Parameters about text, and logprobs, which are always requested."""
_OFF: Mapping[str, tuple[float, ...]] = {
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty", "ignore_eos"), (0,)),
    **dict.fromkeys(("min_tokens", "min_new_tokens"), (0, 1)),
    **dict.fromkeys(("repetition_penalty", "n", "n_samples"), (1,)),
}
"""Values that change nothing. SkyRL and OpenRLHF always set ``min_tokens`` to 1."""
_READ = ("temperature", "top_p", "top_k", "max_tokens", "seed", "stop_token_ids")
_ALIASES = {"max_new_tokens": "max_tokens", "sampling_seed": "seed"}


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
            raise InputError(f"sampling parameters must be a mapping, not {brief(params)}")
        params = {name: getattr(params, name) for name in (*_READ, "stop", *_OFF) if hasattr(params, name)}
    remaining = {
        name: value
        for name, value in params.items()
        if name not in _IGNORED and value is not None and not (isinstance(value, Sized) and not len(value))
    }
    values = {name: remaining.pop(name) for name in (*_READ, *supports) if name in remaining}
    for alias, name in _ALIASES.items():
        if alias in remaining:
            values.setdefault(name, remaining.pop(alias))
    stops = values.setdefault("stop_token_ids", ())
    if not isinstance(stops, list | tuple):
        raise InputError(f"stop_token_ids must be a list of ids, not {brief(stops)}")
    numbers = {name: value for name, value in remaining.items() if isinstance(value, int | float)}
    off = {name for name, value in numbers.items() if value in _OFF.get(name, ())}
    if wrong := {name: value for name, value in remaining.items() if name not in off}:
        raise InputError(f"the sampling parameters {brief(wrong)} cannot be honoured: leave them out")
    if values.setdefault("max_tokens", max_tokens) is None:
        raise InputError("the sampling parameters have no max_tokens: say how long a turn may be")
    if values.get("top_k") == -1:
        values["top_k"] = 0
    values |= {"stop_token_ids": tuple(stops), "allow_raw_logprobs": allow_raw_logprobs}
    return SamplingParams(**values)


def _rows(
    rollout: Rollout, failed_reward: float | None, trainer: str, *, several: bool
) -> tuple[list[PromptResponse], float | None]:
    if (failed := failed_row(rollout, failed_reward, trainer)) is not None:
        return [failed], failed_reward
    samples = rows_of(rollout.trajectory, several=several)
    return list(map(prompt_response, samples)), reward_of(rollout)


def _is_cut(rollout: Rollout, row: PromptResponse) -> bool:
    return any(row.response_mask) and owned_turns(rollout.trajectory)[-1].finish_reason == "length"


def slime_samples(rollout: Rollout, like: Any, *, failed_reward: float | None = None) -> list[Any]:
    """Copies of slime's sample `like`, one per branch. A failed rollout needs `failed_reward`."""
    failed = failed_row(rollout, failed_reward, "slime")
    if failed is not None:  # without a reward, slime would ask its reward model
        about = {**like.metadata, "tokentrace": "; ".join(rollout.notes)}
        return [_slime_sample(like, failed, rollout, failed_reward, remove_sample=True, metadata=about)]
    samples = []
    for sample in trajectory_samples(rollout.trajectory):
        versions = [str(span.version) for span in sample.versions if span.version is not None]
        about = {**like.metadata, "branch": sample.branch}
        more = {"response": rollout.answer, "weight_versions": versions, "metadata": about}
        samples.append(_slime_sample(like, prompt_response(sample), rollout, rollout.reward, **more))
    return samples


def _slime_sample(
    like: Any, row: PromptResponse, rollout: Rollout, reward: float | None, **more: Any
) -> Any:
    statuses: dict[End | None, str] = {End.ANSWER: "completed", End.USER: "completed", End.ABORT: "aborted"}
    status = statuses.get(rollout.end, "failed" if rollout.end in FAILED_ENDS else "truncated")
    return dataclasses.replace(
        like,
        rollout_id=like.index if like.rollout_id is None else like.rollout_id,
        tokens=row.prompt_ids + row.response_ids,
        response_length=len(row.response_ids),
        loss_mask=row.response_mask,
        rollout_log_probs=row.response_logprobs,  # slime sends none at all if the first sample has none
        status=type(like).Status(status),
        reward=reward,
        **more,
    )


def slime_whole_groups(args: Any, group: Sequence[Any], **_: Any) -> bool:
    """Return False for a group with a failed rollout."""
    rows = (row for each in group for row in (each if isinstance(each, list) else [each]))
    return not any(row.remove_sample for row in rows)


def slime_task(sample: Any) -> Task:
    """Raises SampleError if the sample already has a response."""
    if sample.response_length:
        raise SampleError("the sample already has a response: slime's partial rollouts cannot be continued")
    prompt = sample.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return Task(messages, metadata={**sample.metadata, "label": sample.label})


def skyrl_output(
    rollouts: Sequence[Rollout],
    *,
    trajectory_ids: Sequence[Any] | None = None,
    step_wise: bool = False,
    failed_reward: float | None = None,
) -> dict[str, Any]:
    """A `GeneratorOutput`. With ``step_wise``, a rewritten history is several rows with one id.

    A rollout that failed or sampled nothing needs a `failed_reward`, and has a loss mask of 0.
    """
    if trajectory_ids is not None and len(trajectory_ids) != len(rollouts):
        raise SampleError(f"{len(trajectory_ids)} trajectory ids for {len(rollouts)} rollouts")
    if step_wise and trajectory_ids is None:
        raise SampleError("step-wise rows need trajectory_ids: SkyRL groups rows by them")
    entries: list[tuple[PromptResponse, Rollout, float | None, Any, bool]] = []
    ids = [None] * len(rollouts) if trajectory_ids is None else trajectory_ids
    for rollout, id in zip(rollouts, ids, strict=True):
        rows, reward = _rows(rollout, failed_reward, "SkyRL", several=step_wise)
        entries += [(row, rollout, reward, id, row is rows[-1]) for row in rows]
    # over groups, SkyRL averages metrics with "mean" in their names, and adds up the others
    means = {
        "turns": [one.turns for one in rollouts],
        "sampled_tokens": [one.trajectory.num_sampled for one in rollouts],
        "tool_calls": [one.tool_calls for one in rollouts],
        "failed": [one.end in FAILED_ENDS for one in rollouts],
    }
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
        "rollout_metrics": {
            f"tokentrace/mean_{name}": sum(values) / max(len(values), 1) for name, values in means.items()
        },
    }


def areal_episode(rollout: Rollout) -> dict[str, Any] | None:
    """An episode; None if the rollout failed or sampled nothing."""
    if rollout.end in FAILED_ENDS or not rollout.trajectory.num_sampled:
        return None
    return areal_tensors(rollout.trajectory, reward_of(rollout))


def areal_tensors(trajectory: Trajectory, reward: float) -> dict[str, Any]:
    """Rows up to their last token with loss."""
    import torch

    samples = list(map(without_tail, rows_of(trajectory, several=True)))

    def padded(values: Callable[[Sample], Any], dtype: Any, filler: int = 0) -> Any:
        tensor = torch.full((len(samples), max(map(len, samples))), filler, dtype=dtype)
        for at, sample in enumerate(samples):
            tensor[at, : len(sample)] = torch.from_numpy(np.array(values(sample))).to(dtype)
        return tensor

    return {
        "input_ids": padded(lambda sample: sample.ids, torch.int32),
        "attention_mask": padded(lambda sample: np.ones(len(sample)), torch.bool),
        "loss_mask": padded(lambda sample: sample.mask, torch.int32),
        "logprobs": padded(filled_logprobs, torch.float32),
        "versions": padded(token_versions, torch.int32, -1),
        "rewards": torch.full((len(samples),), reward, dtype=torch.float32),
    }


def areal_engine(engine: Any, settings: Any, *, kind: LogprobKind = LogprobKind.UNKNOWN) -> CallbackEngine:
    """An engine that samples with AReaL's."""
    from areal.api import ModelRequest

    async def sample(request: GenerateRequest) -> EngineReply:
        sampling, prompt = request.sampling, list(map(int, request.prompt_ids))
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
            raise EngineAnswerError("AReaL's engine read another prompt")
        ids, versions = answer.output_tokens, list[VersionSpan]()
        if len(answer.output_versions) != len(ids):
            raise EngineAnswerError(f"{len(answer.output_versions)} versions for {len(ids)} ids")
        for count, version in enumerate(answer.output_versions, 1):
            add_version(versions, int(version), count)
        finish = "stop" if answer.stop_reason == "tool_calls" else answer.stop_reason
        return EngineReply(ids, answer.output_logprobs, finish, versions)

    limits = {"max_length": settings.max_tokens, "versions": True, "seeds": False}
    return CallbackEngine(sample, Capabilities("areal", logprobs=kind, **limits))


def openrlhf_output(
    rollout: Rollout, prompt: str, label: Any, *, failed_reward: float | None = None
) -> dict[str, Any]:
    """An `AgentExecutor`'s output. A failed rollout needs a `failed_reward`, has no range."""
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
        "extra_logs": {
            "turns": rollout.turns,
            "tool_calls": rollout.tool_calls,
            "failed": int(not trained),
        },
    }


def openrlhf_engine(engine: Any, params: Any, max_length: int) -> CallbackEngine:
    """An engine that samples with the vLLM engine of OpenRLHF."""
    if getattr(params, "logprobs", None) is None:
        raise InputError("OpenRLHF does not ask vLLM for logprobs: turn on importance sampling correction")

    async def sample(request: GenerateRequest) -> EngineReply:
        sampling, vllm_params = request.sampling, copy.deepcopy(params)
        for name in ("max_tokens", "seed", "temperature", "top_p"):
            setattr(vllm_params, name, getattr(sampling, name))
        vllm_params.min_tokens, vllm_params.top_k = 0, sampling.top_k or -1
        vllm_params.stop_token_ids = list(sampling.stop_token_ids)
        prompt = list(map(int, request.prompt_ids))
        [output] = (await engine.generate(prompt, vllm_params, multi_modal_data=None)).outputs
        ids, reported = list(output.token_ids), output.logprobs or []
        logprobs = [top[id].logprob for id, top in zip(ids, reported, strict=False) if id in top]
        if not len(ids) == len(reported) == len(logprobs):
            raise EngineAnswerError("vLLM did not return the logprob of each sampled id")
        return EngineReply(ids, logprobs, output.finish_reason or "abort")

    return CallbackEngine(sample, Capabilities("openrlhf", max_length=max_length))


_COUNTS = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")
VERL_SAMPLING = ("min_p", *PENALTIES)
"""Parameters of verl's servers beyond those of all engines."""
_VLLM_KINDS = {"processed_logprobs": LogprobKind.PROCESSED, "raw_logprobs": LogprobKind.RAW}


class ServerEngine(CallbackEngine):
    """verl's servers, with the settings ``actor_rollout_ref.rollout``."""

    def __init__(
        self, server_manager: Any, request_id: str, rollout: Any, *, vocab_size: int, priority: int = 0
    ) -> None:
        name, optional = rollout.get("name"), frozenset(VERL_SAMPLING)
        kinds = {"vllm": _VLLM_KINDS.get(rollout.get("logprobs_mode")), "sglang": LogprobKind.SCALED}
        kind = kinds.get(name) or LogprobKind.UNKNOWN
        limits: dict[str, Any] = {"vocab_size": vocab_size, "sampling": optional, "versions": True}
        super().__init__(self._ask, Capabilities("verl", logprobs=kind, **limits))
        self.answers: list[Any] = []
        self._servers, self._request_id, self._priority = server_manager, request_id, priority
        self._seed_field = "sampling_seed" if name == "sglang" else "seed"

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
        ids, reason, finish = answer.token_ids, answer.stop_reason, FinishReason.ABORT
        if reason not in ("aborted", "abort"):
            if not len(ids):
                raise EngineAnswerError("verl's server returned no ids; its log may say why")
            # vLLM's "completed" is a stop or the token limit; SGLang says which
            is_cut = reason == "length" or len(ids) == sampling.max_tokens
            stopped = ids[-1] in sampling.stop_token_ids
            finish = FinishReason.LENGTH if is_cut and not stopped else FinishReason.STOP
        self.answers.append(answer)
        cached = answer.extra_fields.get("num_cached_tokens")
        return EngineReply(ids, answer.log_probs, finish, _verl_versions(answer), cached)

    def reported(self, name: str) -> list[Any]:
        return [value for answer in self.answers if (value := getattr(answer, name)) is not None]

    def extra_fields(self) -> dict[str, Any]:
        """The first request's extra fields, with the last version and sums of counts."""
        if not self.answers:
            return {}
        fields = [answer.extra_fields for answer in self.answers]
        merged = dict(fields[0])
        if (last := fields[-1].get("max_global_steps")) is not None:
            merged["max_global_steps"] = last
        return merged | {
            key: sum(int(one.get(key, 0)) for one in fields) for key in _COUNTS if key in merged
        }


def _verl_versions(answer: Any) -> tuple[VersionSpan, ...]:
    """The step of the weights; empty if there were several."""
    fields, count = answer.extra_fields, len(answer.token_ids)
    step = fields.get("global_steps")
    first, last = fields.get("min_global_steps", step), fields.get("max_global_steps", step)
    return () if first is None or first != last or not count else (VersionSpan(int(first), 0, count),)
