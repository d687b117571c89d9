"""Rollouts as the samples of TRL's `AsyncGRPOTrainer`: one for each row, with the advantage of its rollout."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..errors import SampleError
from ..samples.sample import Sample
from .finished import Finished
from .trl import check_temperature

try:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
except ImportError as error:
    raise ImportError("tokentrace.integrations.trl_async needs TRL's AsyncGRPO: pip install 'trl>=1.16'") from error


def rollout_samples(
    finished: Sequence[Finished], *, group: int, version: int | None = None, temperature: float = 1.0
) -> list[RolloutSample]:
    """The samples of a group: one for each row of each rollout, with advantages as TRL computes them.

    All rows of a rollout have its advantage. Rollouts without a reward count neither in the mean nor in the deviation,
    and have an advantage of 0, as in TRL. `model_version`, by which TRL drops what is too old, is `version`, or if that
    is None the oldest that sampled a token that carries loss; `metrics` have the newest, and the share of older tokens.
    """
    rewards = np.asarray([np.nan if one.reward is None else one.reward for one in finished], float)
    scored = rewards[~np.isnan(rewards)]
    mean, deviation = (scored.mean(), scored.std()) if len(scored) else (np.nan, np.nan)
    advantages = np.nan_to_num((rewards - mean) / (deviation + 1e-8), nan=0.0)
    made = []
    for one, reward, advantage in zip(finished, rewards, advantages, strict=True):
        for row in one.samples:
            check_temperature(row, temperature)
            if row.logprobs is None:
                raise SampleError(f"{row!r} has no logprobs: the engine has to tell them")
            versions = np.asarray([version]) if version is not None else _versions(row)
            said = {"reward": reward, "reward_std": deviation, "rollout/rows": len(one.samples)}
            said |= {"version/newest": versions.max(), "version/older_tokens": (versions < versions.max()).mean()}
            made.append(
                RolloutSample(
                    prompt=[dict(message) for message in one.messages[: one.prompt]],
                    completion=[dict(message) for message in one.messages[one.prompt :]],
                    input_ids=row.ids.astype(np.int64),
                    completion_mask=row.mask.astype(np.int64),
                    old_log_probs=np.where(row.mask, row.logprobs, 0).astype(np.float32),
                    advantage=float(advantage),
                    model_version=int(versions.min()),
                    group_id=group,
                    metrics={name: float(value) for name, value in said.items()},
                    enqueued_at=time.time(),
                )
            )
    return made


def _versions(row: Sample) -> npt.NDArray[np.int64]:
    """Which weights sampled each of the tokens that carry loss."""
    found = np.full(len(row), -1, np.int64)
    for span in row.versions:
        if isinstance(span.version, int):
            found[span.start : span.stop] = span.version
    trained = found[row.mask]
    if (trained < 0).any():
        raise SampleError(f"{row!r}: the engine does not say by a number which weights sampled its tokens")
    return trained
