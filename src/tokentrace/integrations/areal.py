"""AReaL: rollouts as the tensors of an episode, and a workflow that runs our agents on its inference engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from ..engines.answers import answered_ids, answered_logprobs, checked_request, completion_kind
from ..engines.protocol import Capabilities, Delta, Engine, EngineAnswerError, FinishReason, GenerateRequest
from ..engines.protocol import add_version as _add_version
from ..errors import SampleError, shown
from ..rollout.ends import FAILED_ENDS
from ..rollout.loop import Agent
from ..rollout.record import Task
from ..samples.sample import Sample
from ..samples.trajectories import trajectory_samples
from ..trajectory.trajectory import Trajectory
from ..trajectory.turns import LogprobKind, VersionSpan
from .rows import filled_logprobs, reward_of, without_tail

try:
    import torch
    from areal.api import ModelRequest, RolloutWorkflow
    from areal.api.cli_args import GenerationHyperparameters
except ImportError as error:
    raise ImportError("this needs AReaL: pip install areal") from error

_FINISH: Final = {
    "stop": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


def episode_tensors(trajectory: Trajectory, reward: float) -> dict[str, torch.Tensor]:
    """The rows of a trajectory, one for each branch that has sampled tokens, as AReaL takes an episode.

    Each ends with its last token that carries loss, and is padded after it: AReaL puts the reward on the last token,
    and counts it only where the loss mask is 1. ``input_ids``, ``attention_mask``, ``loss_mask``, ``logprobs`` (0.0
    where none was sampled), ``versions`` (-1 there), and the same reward for each row. `SampleError` where a token that
    carries loss has no logprob, or weights that are not numbered.
    """
    samples = [without_tail(sample) for sample in trajectory_samples(trajectory)]
    if not samples:
        raise SampleError(f"{trajectory.name or 'the trajectory'}: nothing was sampled, so there is no row")
    return {
        "input_ids": _padded([sample.ids for sample in samples], torch.int32),
        "attention_mask": _padded([np.ones(len(sample)) for sample in samples], torch.bool),
        "loss_mask": _padded([sample.mask for sample in samples], torch.int32),
        "logprobs": _padded([filled_logprobs(sample) for sample in samples], torch.float32),
        "versions": _padded([_versions(sample) for sample in samples], torch.int32, -1),
        "rewards": torch.full((len(samples),), reward, dtype=torch.float32),
    }


def _padded(rows: Sequence[Any], dtype: torch.dtype, filler: int = 0) -> torch.Tensor:
    made = torch.full((len(rows), max(map(len, rows))), filler, dtype=dtype)
    for at, row in enumerate(rows):
        made[at, : len(row)] = torch.from_numpy(np.array(row)).to(dtype)
    return made


def _versions(sample: Sample) -> Any:
    """The version of the weights for each token, -1 where nothing was sampled or nobody said."""
    made = np.full(len(sample), -1)
    for span in sample.versions:
        if isinstance(span.version, str):
            raise SampleError(f"{sample!r}: AReaL numbers weights, and tokens are of version {shown(span.version)}")
        made[span.start : span.stop] = -1 if span.version is None else span.version
    return made


class ArealEngine(Engine):
    """AReaL's inference engine. It tells the version of the weights for each token, and takes no seed."""

    def __init__(self, engine: Any, settings: GenerationHyperparameters, *, kind: LogprobKind) -> None:
        known = {"max_length": settings.max_tokens, "logprobs": kind, "versions": True, "seeds": False}
        super().__init__(Capabilities("areal", **known))
        self._engine, self._settings = engine, settings

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        request = checked_request(request, self.capabilities)
        sampling = request.sampling
        asked = self._settings.new(
            n_samples=1,
            max_new_tokens=sampling.max_tokens,
            greedy=sampling.temperature == 0,
            temperature=sampling.temperature or 1.0,
            top_p=sampling.top_p,
            top_k=sampling.top_k or int(1e8),
            stop_token_ids=list(sampling.stop_token_ids),
        )
        prompt = [int(id) for id in request.prompt_ids]
        answer = await self._engine.agenerate(ModelRequest(input_ids=prompt, gconfig=asked))
        if list(answer.input_tokens) != prompt:
            raise EngineAnswerError("AReaL's engine read another prompt than it was given")
        if answer.stop_reason not in _FINISH:
            raise EngineAnswerError(f"AReaL's engine stopped for {shown(answer.stop_reason)}, which is not known")
        ids = answered_ids(list(answer.output_tokens), "output_tokens", None)
        logprobs = answered_logprobs(list(answer.output_logprobs), ids, "output_logprobs")
        if len(answer.output_versions) != len(ids):
            raise EngineAnswerError(f"{len(answer.output_versions)} versions for {len(ids)} ids")
        versions: list[VersionSpan] = []
        for at, version in enumerate(answer.output_versions):
            _add_version(versions, int(version), at + 1)
        kind = completion_kind(sampling, self.capabilities)
        yield Delta(ids, logprobs, _FINISH[answer.stop_reason], tuple(versions), logprobs_kind=kind)


def row_task(data: Mapping[str, Any]) -> Task:
    """A row of a dataset as a task: its ``messages``, and the rest as metadata."""
    return Task(data["messages"], metadata={name: value for name, value in data.items() if name != "messages"})


class AgentWorkflow(RolloutWorkflow):
    """A workflow that runs our agents on AReaL's engine.

    `make_agent` makes an agent for an engine, `task` a task of a row of the dataset: by default its ``messages``, with
    the rest for rewards. `settings` are AReaL's; what a turn samples with is the agent's. An episode that failed is
    rejected, as AReaL calls it.
    """

    def __init__(
        self,
        make_agent: Callable[[Engine], Agent],
        settings: GenerationHyperparameters,
        *,
        task: Callable[[Mapping[str, Any]], Task] = row_task,
        kind: LogprobKind = LogprobKind.UNKNOWN,
    ) -> None:
        self._make_agent, self._settings, self._task, self._kind = make_agent, settings, task, kind

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        """One rollout as tensors; None where it failed. `SampleError` where nobody gave a reward."""
        agent = self._make_agent(ArealEngine(engine, self._settings, kind=self._kind))
        rollout = await agent.run(self._task(data))
        if rollout.end in FAILED_ENDS or not rollout.trajectory.num_sampled:
            return None
        return episode_tensors(rollout.trajectory, reward_of(rollout))
