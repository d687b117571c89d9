"""Agents on Tinker's `SamplingClient`, and trajectories as its data."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..engines.answers import EngineReply
from ..engines.errors import EngineAnswerError, EngineRefusal, EngineUnavailable
from ..engines.protocol import Capabilities, GenerateRequest
from ..engines.scripted import CallbackEngine
from ..samples.sample import Sample
from ..samples.trajectories import trajectory_samples
from ..trajectory.trajectory import Trajectory
from ..trajectory.turns import Turn, VersionSpan
from .rows import filled_logprobs

try:
    import tinker
except ImportError as error:
    raise ImportError(f"this needs tinker: pip install tinker ({error})") from error


class TinkerEngine(CallbackEngine):
    """Samples with a `tinker.SamplingClient`. New weights need a new engine with a new `version`.

    Tinker does not document its logprobs at temperatures other than 1, so these need
    `allow_raw_logprobs`.
    """

    def __init__(
        self,
        client: Any,
        *,
        vocab_size: int | None = None,
        max_length: int | None = None,
        version: str | int | None = None,
    ) -> None:
        limits: dict[str, Any] = {"vocab_size": vocab_size, "max_length": max_length}
        super().__init__(self._ask, Capabilities("tinker", versions=version is not None, **limits))
        self._client, self._version = client, version

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
        prompt = tinker.ModelInput.from_ints(list(map(int, request.prompt_ids)))
        try:
            answer = await self._client.sample_async(prompt=prompt, num_samples=1, sampling_params=params)
        except (tinker.APIConnectionError, tinker.RateLimitError, tinker.InternalServerError) as error:
            raise EngineUnavailable(f"tinker: {error}") from error
        except tinker.APIStatusError as error:
            raise EngineRefusal(f"tinker: {error}", status=error.status_code) from error
        if len(answer.sequences) != 1:
            raise EngineAnswerError(f"tinker returned {len(answer.sequences)} sequences, not one")
        [sampled] = answer.sequences
        ids, version = sampled.tokens, self._version
        versions = () if version is None or not len(ids) else (VersionSpan(version, 0, len(ids)),)
        return EngineReply(ids, sampled.logprobs, sampled.stop_reason, versions)


def training_data(
    trajectory: Trajectory,
    *,
    advantage: float | Callable[[Turn], float] | Sequence[float],
    mask: bool = False,
) -> list[tinker.Datum]:
    return [_datum(sample, mask) for sample in trajectory_samples(trajectory, advantage=advantage)]


def _datum(sample: Sample, mask: bool) -> tinker.Datum:
    inputs: dict[str, Any] = {
        "target_tokens": sample.ids.astype(np.int64),
        "logprobs": np.where(sample.mask, filled_logprobs(sample), np.float32(0)),
        "advantages": np.asarray(sample.advantages, np.float32),
    }
    if mask:
        inputs["mask"] = sample.mask.astype(np.float32)
    tensors = {name: tinker.TensorData.from_numpy(values[1:].copy()) for name, values in inputs.items()}
    tokens = tinker.ModelInput.from_ints(sample.ids[:-1].tolist())
    return tinker.Datum(model_input=tokens, loss_fn_inputs=tensors)
