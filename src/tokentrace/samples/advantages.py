"""Advantages: what a rollout or a turn was worth beside the others of its group.

A group is several rollouts of one task. A rollout counts once in it, however many rows it makes. What cannot be
compared (a group of one, rewards that are all the same) has advantage 0, and a note says so; it is never NaN.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np

from ..errors import SampleError, shown
from ..settings import as_float, choose, is_number, items, number
from ..tokens.visible import counted
from ..trajectory.trajectory import Trajectory
from ..trajectory.turns import Turn
from .sample import Sample, as_samples
from .trajectories import owned_turns, recorded_reward

EPSILON: Final = 1e-6
"""What is added to the deviation of a group."""


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
    """Rewards beside their groups, by name, and what to know of them."""

    values: Mapping[str, float]
    notes: tuple[str, ...] = ()


def relative_to_group(
    rewards: Mapping[str, float], groups: Mapping[str, str], *, baseline: Baseline | str = Baseline.STD
) -> Relative:
    """Each reward compared with those of its group. A name without a group is a group of its own.

    >>> rewards = {"a-0": 1.0, "a-1": 0.0, "b-0": 1.0}
    >>> found = relative_to_group(rewards, {"a-0": "a", "a-1": "a", "b-0": "b"}, baseline="mean")
    >>> found.values
    {'a-0': 0.5, 'a-1': -0.5, 'b-0': 0.0}
    >>> found.notes
    ("1 group has one rollout, and advantage 0: 'b'",)
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
        (*_said(alone, "has one rollout", "have one rollout"), *_said(same, "has one reward", "have one reward each")),
    )


def _compared(rewards: Sequence[float], how: Baseline) -> list[float]:
    """Rewards of one group, compared."""
    count = len(rewards)
    if count == 1 or len(set(rewards)) == 1:
        return [0.0] * count
    mean = statistics.fmean(rewards)
    if how is Baseline.LEAVE_ONE_OUT:
        return [(reward - mean) * count / (count - 1) for reward in rewards]
    by = statistics.stdev(rewards) + EPSILON if how is Baseline.STD else 1.0
    return [(reward - mean) / by for reward in rewards]


def _said(groups: Sequence[str], one: str, several: str) -> list[str]:
    if not groups:
        return []
    what = f"1 group {one}" if len(groups) == 1 else f"{len(groups)} groups {several}"
    more = f" and {len(groups) - 3} more" if len(groups) > 3 else ""
    return [f"{what}, and advantage 0: {', '.join(map(repr, groups[:3]))}{more}"]


def _reward(value: Any, name: str) -> float:
    found = as_float(value) if is_number(value) else None
    if found is None:
        raise SampleError(f"{name!r}: a reward is a finite number, not {shown(value)}")
    return found


def returns_to_go(rewards: Sequence[float], gamma: float = 1.0) -> list[float]:
    """What was still to come at each step: its reward, and all later ones, each discounted by `gamma` for each step.

    >>> returns_to_go([1.0, 0.0, 4.0], gamma=0.5)
    [2.0, 2.0, 4.0]
    """
    factor = number("gamma", gamma, 0.0, 1.0, SampleError)
    out: list[float] = []
    coming = 0.0
    for reward in reversed(rewards):
        coming = _reward(reward, "a step") + factor * coming
        out.append(coming)
    return out[::-1]


@dataclass(frozen=True, slots=True)
class Advantages:
    """For each rollout by its name an advantage for each of its turns, as `trajectory_samples` takes it."""

    values: Mapping[str, Sequence[float]]
    """In the order in which turns were written. A rollout without a reward is not in here."""
    notes: tuple[str, ...] = ()

    def of(self, trajectory: Trajectory) -> Sequence[float] | None:
        """The advantages of a trajectory's turns; None where it has no reward."""
        return self.values.get(trajectory.name)


def trajectory_advantages(
    trajectories: Iterable[Trajectory],
    *,
    baseline: Baseline | str = Baseline.STD,
    turn_weight: float = 0.0,
    gamma: float = 1.0,
) -> Advantages:
    """Advantages of rollouts in groups: those of one ``metadata["group"]``, told apart by their names.

    The reward of the whole rollout (`Trajectory.set_reward`, else ``metadata["reward"]``) is compared with its group
    and goes to all turns. With a `turn_weight`, the rewards of turns count besides: what was still to come at a turn
    (`returns_to_go` of the rewards of turns, in the order of time; none is 0) is compared with the same turn of the
    others, and added, times the weight. Parts of a turn that was aborted and went on are one turn.

    >>> first, second = Trajectory(name="a-0", metadata={"group": "a"}), Trajectory(name="a-1", metadata={"group": "a"})
    >>> for trajectory, reward in ((first, 1.0), (second, 0.0)):
    ...     trajectory.begin([1, 2])
    ...     turn = trajectory.append_completion([7], [-0.5], finish_reason="stop")
    ...     trajectory.set_reward(reward)
    >>> trajectory_advantages([first, second], baseline="mean").values
    {'a-0': [0.5], 'a-1': [-0.5]}
    """
    how = choose(Baseline, "baseline", baseline, SampleError)
    weight = number("turn_weight", turn_weight, -math.inf, math.inf, SampleError)
    number("gamma", gamma, 0.0, 1.0, SampleError)
    rewards: dict[str, float] = {}
    groups: dict[str, str] = {}
    turns: dict[str, list[Turn]] = {}
    without: list[str] = []
    for trajectory in items("trajectories", trajectories, SampleError):
        if not isinstance(trajectory, Trajectory):
            raise SampleError(f"advantages are of trajectories, not of {shown(trajectory)}")
        if trajectory.name in turns or trajectory.name in without:
            raise SampleError(f"two trajectories are called {trajectory.name!r}: give each a name of its own")
        reward = recorded_reward(trajectory)
        if reward is None:
            without.append(trajectory.name)
            continue
        rewards[trajectory.name] = reward
        group = trajectory.metadata.get("group")
        groups[trajectory.name] = trajectory.name if group is None else str(group)
        turns[trajectory.name] = owned_turns(trajectory)
    outcome = relative_to_group(rewards, groups, baseline=how)
    values = {name: [outcome.values[name]] * len(turns[name]) for name in rewards}
    if weight:
        for name, added in _turn_advantages(turns, groups, how, gamma).items():
            values[name] = [value + weight * one for value, one in zip(values[name], added, strict=True)]
    some = ", ".join(map(repr, without[:3]))
    lost = f"{counted(len(without), 'rollout')} without a reward, and so without an advantage: {some}"
    return Advantages(values, (*outcome.notes, *([lost] if without else [])))


def _turn_advantages(
    turns: Mapping[str, Sequence[Turn]], groups: Mapping[str, str], how: Baseline, gamma: float
) -> dict[str, list[float]]:
    """For each turn what was still to come, compared with the same turn of the others of the group."""
    places = {name: _places(own) for name, own in turns.items()}
    coming: dict[str, list[float]] = {}
    for name, own in turns.items():
        rewards = [0.0] * (max(places[name], default=-1) + 1)
        for turn, place in zip(own, places[name], strict=True):
            rewards[place] += turn.reward or 0.0
        coming[name] = returns_to_go(rewards, gamma)
    compared: dict[str, list[float]] = {name: [] for name in turns}
    for place in range(max(map(len, coming.values()), default=0)):
        there = {name: values[place] for name, values in coming.items() if place < len(values)}
        for name, value in relative_to_group(there, groups, baseline=how).values.items():
            compared[name].append(value)
    return {name: [compared[name][place] for place in own] for name, own in places.items()}


def _places(turns: Sequence[Turn]) -> list[int]:
    """The number of each turn; parts of one that went on have one number."""
    place = -1
    out: list[int] = []
    for turn in turns:
        place += not (turn.continues and out)
        out.append(place)
    return out


def with_advantages(
    samples: Sequence[Sample], groups: Mapping[str, str], *, baseline: Baseline | str = Baseline.STD
) -> tuple[list[Sample], tuple[str, ...]]:
    """Rows with the advantage of their rollout on each token that carries loss, and what to know of it.

    For rows that were read from a file: rows of one name are of one rollout, and have its reward. `groups` says which
    group each name is in; the gateway's rows have it in the column ``metadata``. Rows without a reward are left as they
    are. `SampleError` where rows of one name have several rewards.
    """
    rows = as_samples(samples)
    rewards: dict[str, float] = {}
    for row in rows:
        if row.reward is not None and rewards.setdefault(row.name, row.reward) != row.reward:
            raise SampleError(f"rows of {row.name!r} have rewards {rewards[row.name]} and {row.reward}")
    found = relative_to_group(rewards, groups, baseline=baseline)
    made = [
        row
        if row.reward is None
        else row.replace(advantages=np.where(row.mask, found.values[row.name], 0).astype(np.float32))
        for row in rows
    ]
    without = {row.name for row in rows} - set(rewards)
    lost = [f"{counted(len(without), 'rollout')} without a reward, and so without an advantage"] if without else []
    return made, (*found.notes, *lost)
