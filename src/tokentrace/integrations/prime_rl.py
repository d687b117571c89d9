"""Rows for prime-rl: the fields of its `TrainingSample`, one for each branch of a trajectory.

prime-rl is not a package of the index, so nothing of it is imported: ``TrainingSample(**fields)``, with the class of
``prime_rl.transports.rollouts.types`` (as of 21 August 2026).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import SampleError
from ..samples.sample import Sample
from ..samples.trajectories import Advantage, trajectory_samples
from ..trajectory.trajectory import Trajectory
from .rows import warn_of_other_distribution


def training_samples(
    trajectory: Trajectory, *, env_name: str, advantage: Advantage | None = None
) -> list[dict[str, Any]]:
    """The fields of a `TrainingSample` for each row of a trajectory, each sampled token trained once.

    SampleError where logprobs or temperatures were not recorded: prime-rl would train on numbers that nobody sampled
    with. A warning where they were sampled with settings that it does not know of (top-p, penalties). `advantage` is as
    in `trajectory_samples`; without it prime-rl has to assign credit itself.
    """
    return [
        training_sample(sample, env_name=env_name) for sample in trajectory_samples(trajectory, advantage=advantage)
    ]


def training_sample(sample: Sample, *, env_name: str) -> dict[str, Any]:
    """The fields of a `TrainingSample`. Logprobs are 0.0 and temperatures 1.0 where nothing was sampled."""
    if sample.logprobs is None or np.isnan(sample.logprobs[sample.mask]).any():
        raise SampleError(f"{sample!r} has tokens to train without a logprob, and prime-rl needs one for each")
    warn_of_other_distribution(sample, "prime-rl")
    temperatures = np.ones(len(sample), np.float64)
    for completion in sample.completions:
        if not completion.temperature:
            said = "was not recorded" if completion.temperature is None else "is 0"
            raise SampleError(
                f"{sample!r}: the temperature of tokens {completion.start} to {completion.stop} {said}; prime-rl "
                "divides by the temperature that each token was sampled with"
            )
        temperatures[completion.start : completion.stop] = completion.temperature
    fields = {
        "token_ids": sample.token_ids,
        "mask": sample.mask.tolist(),
        "logprobs": np.nan_to_num(sample.logprobs, nan=0.0).tolist(),
        "temperatures": temperatures.tolist(),
        "env_name": env_name,
    }
    return fields if sample.advantages is None else {**fields, "advantages": sample.advantages.tolist()}
