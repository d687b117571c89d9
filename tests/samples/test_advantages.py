"""Advantages by group and by turn: each rollout counts once, and no value is NaN."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentrace import trajectory_samples
from tokentrace.errors import SampleError
from tokentrace.samples.trajectories import Baseline, relative_to_group, returns_to_go, trajectory_advantages
from tokentrace.tokens.kinds import Kind
from tokentrace.trajectory import Trajectory, from_bytes, to_bytes

REWARDS = st.lists(st.integers(-5, 5), min_size=1, max_size=6)


@given(REWARDS, st.sampled_from(list(Baseline)))
def test_group_advantages_match_the_formulas_of_the_papers(rewards: list[int], baseline: Baseline) -> None:
    names = {f"a-{at}": float(reward) for at, reward in enumerate(rewards)}
    advantages = relative_to_group(names, dict.fromkeys(names, "a"), baseline=baseline)
    values = np.array(list(names.values()))
    if len(rewards) == 1 or len(set(rewards)) == 1:
        expected = np.zeros(len(rewards))
        assert "advantage 0" in advantages.notes[0]
    elif baseline is Baseline.LEAVE_ONE_OUT:
        expected = np.array([value - np.delete(values, at).mean() for at, value in enumerate(values)])
    else:
        expected = (values - values.mean()) / (values.std(ddof=1) + 1e-6 if baseline is Baseline.STD else 1)
    np.testing.assert_allclose(list(advantages.values.values()), expected, atol=1e-9)
    assert list(advantages.values) == list(names)


def test_groups_are_separate_and_incomparable_rollouts_are_noted() -> None:
    rewards = {"a-0": 1, "a-1": 3, "b-0": 2, "b-1": 2, "c": 7}
    groups = {"a-0": "a", "a-1": "a", "b-0": "b", "b-1": "b"}
    advantages = relative_to_group(rewards, groups, baseline="mean")
    assert advantages.values == {"a-0": -1, "a-1": 1, "b-0": 0, "b-1": 0, "c": 0}
    assert len(advantages.notes) == 2


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, "1", True])
def test_values_that_are_no_rewards_are_refused(bad: Any) -> None:
    with pytest.raises(SampleError, match="'a': a reward must be a finite number"):
        relative_to_group({"a": bad}, {})


@given(st.lists(st.floats(-5, 5), max_size=6), st.floats(0, 1))
def test_returns_to_go_are_discounted_sums_of_later_rewards(rewards: list[float], gamma: float) -> None:
    expected = [sum(gamma**k * reward for k, reward in enumerate(rewards[at:])) for at in range(len(rewards))]
    np.testing.assert_allclose(returns_to_go(rewards, gamma), expected, atol=1e-9)


def rollout(name: str, reward: float | None, *turns: float | None, parts: bool = False) -> Trajectory:
    """A rollout of group "a" with a reward and turn rewards; with `parts`, its first turn has two parts."""
    trajectory = Trajectory(name=name, metadata={"group": "a"})
    trajectory.begin([1, 2], messages=1)
    for at, turn_reward in enumerate(turns):
        if at:
            trajectory.append_context([3], Kind.CONTEXT, messages=1)
        elif parts:
            trajectory.append_completion([6], [-0.5], finish_reason="abort")
        turn = trajectory.append_completion([7, 8], [-0.5, -0.5], finish_reason="stop", continues=parts and not at)
        if turn_reward is not None:
            trajectory.set_reward(turn_reward, turn)
    if reward is not None:
        trajectory.set_reward(reward)
    return from_bytes(to_bytes(trajectory)).trajectory


def test_the_outcome_goes_to_all_turns_and_to_the_rows() -> None:
    one, two, unrewarded = rollout("a-0", 1.0, None, None), rollout("a-1", 0.0, None), rollout("a-2", None, None)
    advantages = trajectory_advantages([one, two, unrewarded], baseline="mean")
    assert advantages.values == {"a-0": [0.5, 0.5], "a-1": [-0.5]}
    assert advantages.of(unrewarded) is None
    assert advantages.notes == ("no advantage for rollouts without a reward: 'a-2'",)
    (row,) = trajectory_samples(one, advantage=advantages.of(one))
    assert row.advantages is not None
    assert row.advantages.tolist() == [0, 0, 0.5, 0.5, 0, 0.5, 0.5]
    assert row.reward == 1.0


def test_rewards_of_turns_are_compared_turn_by_turn() -> None:
    one, two = rollout("a-0", 1.0, 1.0, 2.0), rollout("a-1", 0.0, None, 4.0)
    advantages = trajectory_advantages([one, two], baseline="mean", turn_weight=2.0, gamma=0.5)
    # returns to go: 1 + 2 / 2 = 2 and 2; 4 / 2 = 2 and 4
    assert advantages.values == {"a-0": [0.5, 0.5 - 2.0], "a-1": [-0.5, -0.5 + 2.0]}
    longer = rollout("a-1", 0.0, None, 4.0, 9.0)
    advantages = trajectory_advantages([one, longer], baseline="mean", turn_weight=1.0)
    assert advantages.values["a-1"][2] == -0.5, "nothing to compare the third turn with"


def test_parts_of_a_turn_are_one_turn() -> None:
    one, two = rollout("a-0", 1.0, 3.0, 2.0, parts=True), rollout("a-1", 0.0, 1.0, 2.0)
    advantages = trajectory_advantages([one, two], baseline="mean", turn_weight=1.0)
    assert advantages.values == {"a-0": [1.5, 1.5, 0.5], "a-1": [-1.5, -0.5]}


def test_a_rollout_of_several_rows_counts_once() -> None:
    one, two, three = (rollout(f"a-{at}", reward, None) for at, reward in enumerate((1.0, 0.0, 0.0)))
    one.branch([one.stream()[0], 5], cause="compaction")
    one.append_completion([9], [-0.5], finish_reason="stop")
    advantages = trajectory_advantages([one, two, three], baseline="mean")
    assert advantages.values["a-0"] == pytest.approx([2 / 3, 2 / 3])
    assert len([row for trajectory in (one, two, three) for row in trajectory_samples(trajectory)]) == 4
