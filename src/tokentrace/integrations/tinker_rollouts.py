"""Rollouts on Tinker: our agents on its `SamplingClient`, and trajectories as the data that it trains on.

engine = TinkerEngine(service.create_sampling_client(base_model=name), vocab_size=renderer.tokenizer.vocabulary.size)
rollout = await Agent(engine, renderer, tools=[...]).run(task)
await training_client.forward_backward_async(training_data(rollout.trajectory, advantage=1.0), "importance_sampling")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..engines.answers import EngineReply
from ..engines.protocol import Capabilities, EngineAnswerError, EngineRefusal, EngineUnavailable, GenerateRequest
from ..engines.scripted import CallbackEngine
from ..errors import SampleError
from ..samples.trajectories import trajectory_samples
from ..trajectory.trajectory import Trajectory
from ..trajectory.turns import Turn, VersionSpan

try:
    import tinker
except ImportError as error:
    raise ImportError(f"tokentrace.integrations.tinker_rollouts needs tinker: pip install tinker ({error})") from error


class TinkerEngine(CallbackEngine):
    """Samples with a `tinker.SamplingClient`: ids in, ids and logprobs out.

    `version` is what completions say of the weights: a new `SamplingClient` has new weights, so make a new engine for
    it. `max_length` is the model's context. What Tinker's logprobs are of at a temperature other than 1 is not
    documented; so they are ``UNKNOWN``, and such temperatures are refused unless `SamplingParams.allow_raw_logprobs`.
    """

    def __init__(
        self,
        client: Any,
        *,
        vocab_size: int | None = None,
        max_length: int | None = None,
        version: str | int | None = None,
    ) -> None:
        capabilities = Capabilities(
            "tinker", vocab_size=vocab_size, max_length=max_length, versions=version is not None
        )
        super().__init__(self._ask, capabilities)
        self._client = client
        self._version = version

    async def _ask(self, request: GenerateRequest) -> EngineReply:
        sampling = request.sampling
        params = tinker.SamplingParams(
            max_tokens=sampling.max_tokens,
            seed=sampling.seed,
            stop=list(sampling.stop_token_ids) or None,
            temperature=sampling.temperature,
            top_k=sampling.top_k or -1,
            top_p=sampling.top_p,
        )
        prompt = tinker.ModelInput.from_ints(np.asarray(request.prompt_ids).tolist())
        try:
            answer = await self._client.sample_async(prompt=prompt, num_samples=1, sampling_params=params)
        except (tinker.APIConnectionError, tinker.RateLimitError, tinker.InternalServerError) as error:
            raise EngineUnavailable(f"tinker: {error}") from error
        except tinker.APIStatusError as error:
            raise EngineRefusal(f"tinker: {error}", status=error.status_code) from error
        if len(answer.sequences) != 1:
            raise EngineAnswerError(f"tinker returned {len(answer.sequences)} sequences, and one was sampling for")
        [sampled] = answer.sequences
        count = len(sampled.tokens)
        versions = () if self._version is None or not count else (VersionSpan(self._version, 0, count),)
        return EngineReply(sampled.tokens, sampled.logprobs, sampled.stop_reason, versions)


def training_data(
    trajectory: Trajectory,
    *,
    advantage: float | Callable[[Turn], float] | Sequence[float],
    mask: bool = False,
) -> list[tinker.Datum]:
    """The rows of a trajectory as Tinker trains on them: one datum for each branch.

    ``target_tokens``, ``logprobs`` and ``advantages`` are those of the tokens that the model input predicts, so they
    begin with the second token. Where nothing was sampled, or another branch trains it, logprobs and advantages are 0.
    With `mask`, each datum has ``mask`` as well, which tinker-cookbook's training loop reads, and takes out before it
    sends them. `advantage` is that of `trajectory_samples`. `SampleError` without logprobs.
    """
    return [_datum(sample, mask) for sample in trajectory_samples(trajectory, advantage=advantage)]


def _datum(sample: Any, mask: bool) -> tinker.Datum:
    if sample.logprobs is None:
        raise SampleError(f"{sample!r} has no logprobs: the importance of a token cannot be told without")
    inputs = {
        "target_tokens": sample.ids.astype(np.int64),
        "logprobs": np.where(sample.mask, sample.logprobs, np.float32(0)),
        "advantages": sample.advantages.astype(np.float32),
    }
    if mask:
        inputs["mask"] = sample.mask.astype(np.float32)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(sample.ids[:-1].tolist()),
        loss_fn_inputs={name: tinker.TensorData.from_numpy(values[1:].copy()) for name, values in inputs.items()},
    )
