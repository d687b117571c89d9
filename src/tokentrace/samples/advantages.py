"""Advantages: how a rollout or a turn compares with the others of its group.

A group is several rollouts of one task. A rollout counts once in it, however many rows it makes. What cannot be
compared (a group of one, rewards that are all the same) has advantage 0, and a note reports it; it is never NaN.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any, Final

from ..errors import SampleError, brief
from ..settings import as_float, choose, is_number, items, number
from ..trajectory.trajectory import Trajectory
from ..trajectory.turns import Turn
from .trajectories import owned_turns, recorded_reward

EPSILON: Final = 1e-6
"""Added to the deviation of a group."""


class Baseline(StrEnum):
    """What a reward is compared with."""

    STD = "std"
    """Less the mean of its group, by the deviation of its group (n - 1, plus 1e-6): GRPO."""
    MEAN = "mean"
    """Less the mean of its group: GRPO without the deviation, as in Dr. GRPO."""
    LEAVE_ONE_OUT = "leave_one_out"
    """Less the mean of the others of its group: RLOO."""


@dataclass(frozen=True, slots=True)
class Relative:
    """Rewards compared with their groups, by name, and notes."""

    values: Mapping[str, float]
    notes: tuple[str, ...] = ()


def relative_to_group(
    rewards: Mapping[str, float], groups: Mapping[str, str], *, baseline: Baseline | str = Baseline.STD
) -> Relative:
    """Each reward compared with those of its group. A name without a group is a group of its own.

    >>> rewards = {"a-0": 1.0, "a-1": 0.0, "b-0": 1.0}
    >>> relative = relative_to_group(rewards, {"a-0": "a", "a-1": "a", "b-0": "b"}, baseline="mean")
    >>> relative.values
    {'a-0': 0.5, 'a-1': -0.5, 'b-0': 0.0}
    >>> relative.notes
    ("advantage 0 for groups of one rollout: 'b'",)
    """
    how = choose(Baseline, "baseline", baseline, SampleError)
    members: dict[str, dict[str, float]] = defaultdict(dict)
    for name, reward in rewards.items():
        members[groups.get(name, name)][name] = _reward(reward, name)
    values: dict[str, float] = {}
    for group in members.values():
        values |= dict(zip(group, _compared(list(group.values()), how), strict=True))
    alone = [name for name, group in members.items() if len(group) == 1]
    same = [name for name, group in members.items() if len(group) > 1 and len(set(group.values())) == 1]
    return Relative(
        {name: values[name] for name in rewards},
        (*_note("advantage 0 for groups of one rollout", alone), *_note("advantage 0 for groups of one reward", same)),
    )


def _compared(rewards: Sequence[float], how: Baseline) -> list[float]:
    """The rewards of one group, compared."""
    count = len(rewards)
    if count == 1 or len(set(rewards)) == 1:
        return [0.0] * count
    mean = statistics.fmean(rewards)
    if how is Baseline.LEAVE_ONE_OUT:
        return [(reward - mean) * count / (count - 1) for reward in rewards]
    by = statistics.stdev(rewards) + EPSILON if how is Baseline.STD else 1.0
    return [(reward - mean) / by for reward in rewards]


def _note(what: str, names: Sequence[str]) -> list[str]:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"{what}: {', '.join(map(repr, names[:3]))}{more}"] if names else []


def _reward(value: Any, name: str) -> float:
    reward = as_float(value) if is_number(value) else None
    if reward is None:
        raise SampleError(f"{name!r}: a reward is a finite number, not {brief(value)}")
    return reward


def returns_to_go(rewards: Sequence[float], gamma: float = 1.0) -> list[float]:
    """The reward of each step and all later ones, each discounted by `gamma` for each step.

    >>> returns_to_go([1.0, 0.0, 4.0], gamma=0.5)
    [2.0, 2.0, 4.0]
    """
    factor = number("gamma", gamma, 0.0, 1.0, SampleError)
    checked = [_reward(reward, "a step") for reward in reversed(rewards)]
    return [*accumulate(checked, lambda later, reward: reward + factor * later)][::-1]


@dataclass(frozen=True, slots=True)
class Advantages:
    """For each rollout by its name an advantage for each of its turns, as `trajectory_samples` takes it."""

    values: Mapping[str, Sequence[float]]
    """In the order in which turns were recorded. A rollout without a reward is not in here."""
    notes: tuple[str, ...] = ()

    def of(self, trajectory: Trajectory) -> Sequence[float] | None:
        """The advantages of a trajectory's turns; None if it has no reward."""
        return self.values.get(trajectory.name)


def trajectory_advantages(
    trajectories: Iterable[Trajectory],
    *,
    baseline: Baseline | str = Baseline.STD,
    turn_weight: float = 0.0,
    gamma: float = 1.0,
) -> Advantages:
    """Advantages of rollouts in groups: those with one ``metadata["group"]``. Each needs a name of its own.

    The reward of the whole rollout (`Trajectory.set_reward`, else ``metadata["reward"]``) is compared with its group
    and goes to all turns. With a `turn_weight`, the `returns_to_go` of the rewards of turns are compared with the same
    turn of the others, and added, times the weight. Parts of a turn that was aborted and resumed are one turn.
    """
    how = choose(Baseline, "baseline", baseline, SampleError)
    weight = number("turn_weight", turn_weight, -math.inf, math.inf, SampleError)
    rewards: dict[str, float | None] = {}
    groups: dict[str, str] = {}
    turns: dict[str, list[Turn]] = {}
    for trajectory in items("trajectories", trajectories, SampleError):
        if not isinstance(trajectory, Trajectory):
            raise SampleError(f"advantages are of trajectories, not of {brief(trajectory)}")
        name, group = trajectory.name, trajectory.metadata.get("group")
        if name in rewards:
            raise SampleError(f"two trajectories are called {name!r}: give each a name of its own")
        rewards[name] = recorded_reward(trajectory)
        groups[name] = name if group is None else str(group)
        turns[name] = owned_turns(trajectory)
    rewarded = {name: reward for name, reward in rewards.items() if reward is not None}
    outcome = relative_to_group(rewarded, groups, baseline=how)
    values = {name: [outcome.values[name]] * len(turns[name]) for name in rewarded}
    if weight:
        for name, added in _turn_advantages({name: turns[name] for name in rewarded}, groups, how, gamma).items():
            values[name] = [value + weight * one for value, one in zip(values[name], added, strict=True)]
    without = [name for name in rewards if name not in rewarded]
    return Advantages(values, (*outcome.notes, *_note("no advantage for rollouts without a reward", without)))


def _turn_advantages(
    turns: Mapping[str, Sequence[Turn]], groups: Mapping[str, str], how: Baseline, gamma: float
) -> dict[str, list[float]]:
    """The return of each turn, compared with the same turn of the others of the group."""
    numbers: dict[str, list[int]] = {}
    returns: dict[str, list[float]] = {}
    for name, recorded in turns.items():
        starts = [not (turn.continues and at) for at, turn in enumerate(recorded)]
        numbers[name] = [count - 1 for count in accumulate(starts)]  # parts of one turn have one number
        rewards = [0.0] * sum(starts)
        for turn, at in zip(recorded, numbers[name], strict=True):
            rewards[at] += turn.reward or 0.0
        returns[name] = returns_to_go(rewards, gamma)
    compared: dict[str, list[float]] = {name: [] for name in turns}
    for at in range(max(map(len, returns.values()), default=0)):
        there = {name: values[at] for name, values in returns.items() if at < len(values)}
        for name, value in relative_to_group(there, groups, baseline=how).values.items():
            compared[name].append(value)
    return {name: [compared[name][at] for at in numbers[name]] for name in turns}
