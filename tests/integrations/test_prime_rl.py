"""Rows for prime-rl, held to the fields of its `TrainingSample` as read in its source (21 August 2026)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tokentrace.errors import SampleError
from tokentrace.integrations.trainers import prime_rl_samples
from tokentrace.tokens.kinds import Kind
from tokentrace.trajectory import Trajectory


@dataclass
class TrainingSample:
    """The struct's fields, in their order; prime-rl is not on the index."""

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    env_name: str
    ref_logprobs: list[float] | None = None
    mm_kwargs: Any = None
    routed_experts: Any = None
    mm_token_type_ids: list[int] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None
    advantages: list[float] | None = None


def recorded(**first: Any) -> Trajectory:
    trajectory = Trajectory(name="one")
    trajectory.begin([1, 2, 3], messages=1)
    sampling = {"sampling": {"temperature": 0.5}, **first}
    trajectory.append_completion([10, 11], [-0.5, -0.25], finish_reason="stop", **sampling)
    trajectory.append_context([4, 5], [Kind.CONTEXT, Kind.SCAFFOLD], messages=1)
    trajectory.append_completion([20], [-0.125], finish_reason="stop", sampling={"temperature": 1.0})
    return trajectory


def test_a_row_is_the_trajectory() -> None:
    [fields] = prime_rl_samples(recorded(), env_name="math", advantage=[0.5, 2.0])
    sample = TrainingSample(**fields)
    assert sample.token_ids == [1, 2, 3, 10, 11, 4, 5, 20]
    assert sample.mask == [False, False, False, True, True, False, False, True]
    assert sample.logprobs == [0.0, 0.0, 0.0, -0.5, -0.25, 0.0, 0.0, -0.125]
    assert sample.temperatures == [1.0, 1.0, 1.0, 0.5, 0.5, 1.0, 1.0, 1.0]
    assert sample.advantages == [0.0, 0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 2.0]
    assert sample.env_name == "math"
    for name, kind in {"token_ids": int, "mask": bool, "logprobs": float, "temperatures": float}.items():
        assert {type(value) for value in getattr(sample, name)} == {kind}
    [plain] = prime_rl_samples(recorded(), env_name="math")
    assert TrainingSample(**plain).advantages is None


def test_branches_train_each_token_once() -> None:
    trajectory = recorded()
    trajectory.branch([1, 2, 3, 10, 99], messages=2)
    trajectory.append_completion([30], [-1.0], finish_reason="stop", sampling={"temperature": 1.0})
    first, second = prime_rl_samples(trajectory, env_name="math")
    assert sum(first["mask"]) + sum(second["mask"]) == 4
    assert second["token_ids"] == [1, 2, 3, 10, 99, 30]
    assert second["mask"] == [False] * 5 + [True]
    assert second["logprobs"][3] == -0.5  # sampled, and trained in the other row


@pytest.mark.parametrize(("sampling", "said"), [(None, "was not recorded"), ({"temperature": 0.0}, "is 0")])
def test_no_temperature_no_row(sampling: Any, said: str) -> None:
    with pytest.raises(SampleError, match=f"tokens 3 to 5: the temperature {said}"):
        prime_rl_samples(recorded(sampling=sampling), env_name="math")


def test_no_logprobs_no_row() -> None:
    trajectory = Trajectory(logprobs=False)
    trajectory.begin([1], messages=1)
    trajectory.append_completion([2], None, finish_reason="stop", sampling={"temperature": 1.0})
    with pytest.raises(SampleError, match="has no logprobs"):
        prime_rl_samples(trajectory, env_name="math")
