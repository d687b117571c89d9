"""Trajectories to samples, and the advantages of their turns."""

import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import SampleError, brief
from ..settings import as_float32, choose, is_number, items, number
from ..trajectory.trajectory import Trajectory
from ..trajectory.turns import PENALTIES, LogprobKind, Turn, VersionSpan
from .sample import CompletionSpan, Sample

Advantage = float | Callable[[Turn], float] | Sequence[float] | npt.NDArray[Any]
"""One value for all turns, a function of a turn, or one value for each turn in write order."""


def trajectory_samples(
    trajectory: Trajectory, *, reward: float | None = None, advantage: Advantage | None = None
) -> list[Sample]:
    """One row for each branch with sampled tokens of its own: its whole stream.

    Over all rows, each sampled token carries loss exactly once, in the branch that owns it.
    Logprobs, versions and completions are the whole stream's. A note reports logprobs that are
    not of the sampling distribution.

    Each row gets `reward`, by default the trajectory's (`set_reward`), else
    ``metadata["reward"]``. `advantage` is a float for all turns, a function of a turn, or one
    value for each turn in write order; it goes to the turn's tokens that carry loss. Raises
    SampleError if one is not a finite float32.

    >>> trajectory = Trajectory(name="demo")
    >>> trajectory.begin([1, 2, 3], messages=1)
    >>> turn = trajectory.append_completion([7, 8], [-0.5, -0.25], finish_reason="stop")
    >>> [row] = trajectory_samples(trajectory, reward=1.0, advantage=0.5)
    >>> row
    Sample('demo', 5 tokens, 2 trained)
    >>> row.advantages.tolist()
    [0.0, 0.0, 0.0, 0.5, 0.5]
    """
    return list(each_trajectory_sample(trajectory, reward=reward, advantage=advantage))


def each_trajectory_sample(
    trajectory: Trajectory, *, reward: float | None = None, advantage: Advantage | None = None
) -> Iterator[Sample]:
    """The rows of `trajectory_samples`, each made on demand."""
    if not isinstance(trajectory, Trajectory):
        raise SampleError(f"rows are made from a Trajectory, not from {brief(trajectory)}")
    carried = recorded_reward(trajectory) if reward is None else _finite(reward, "the reward", trajectory)
    values = None if advantage is None else _advantages(trajectory, advantage)
    return (_row(trajectory, one.index, carried, values) for one in trajectory.branches if one.sampled)


def _row(
    trajectory: Trajectory, index: int, reward: float | None, values: dict[int, float] | None
) -> Sample:
    table, turns = trajectory.table(index), trajectory.turns(index)
    sampled = [turn for turn in turns if len(turn)]
    advantages = None
    if values is not None:
        advantages = np.zeros(len(table), np.float32)
        for turn in turns:
            if turn.branch == index:
                advantages[turn.start : turn.stop] = values[turn.write]
    return Sample(
        ids=table.ids,
        mask=trajectory.loss_mask(index),
        messages=table.messages,
        kinds=table.kinds,
        logprobs=table.logprobs,
        advantages=advantages,
        reward=reward,
        versions=tuple(
            VersionSpan(version, turn.start + start, turn.start + stop)
            for turn in turns
            for version, start, stop in turn.versions
            if start < stop
        ),
        completions=tuple(map(_completion, sampled)),
        channels=trajectory.channels(index),
        name=trajectory.name,
        branch=index,
        notes=_notes(sampled) if trajectory.has_logprobs else (),
    )


def _completion(turn: Turn) -> CompletionSpan:
    how: dict[str, Any] = {"cached_tokens": turn.cached_tokens}
    for name, value in (turn.sampling or {}).items():
        is_whole = type(value) is int and abs(value) < 2**31
        if name == "top_k" and is_whole:
            how[name] = value
        elif name in ("temperature", "top_p", "min_p", *PENALTIES) and (is_whole or type(value) is float):
            how[name] = float(value)
    return CompletionSpan(turn.start, turn.stop, turn.logprobs_kind, **how)


def _notes(turns: Sequence[Turn]) -> tuple[str, ...]:
    """A note if logprobs are not of the sampling distribution."""
    odd: list[str] = []
    for turn in turns:
        span = _completion(turn)
        if span.temperature == 0 or span.logprobs_kind not in (LogprobKind.RAW, LogprobKind.UNKNOWN):
            continue
        usual = {"temperature": 1.0, **PENALTIES}.items()
        values = ((name, getattr(span, name), neutral) for name, neutral in usual)
        changed = [f"{name} {value:g}" for name, value, neutral in values if value not in (None, neutral)]
        changed += ["a required structure"] if (turn.sampling or {}).get("structure") else []
        odd += [f"{span.logprobs_kind}, sampled with {' and '.join(changed)}"] if changed else []
    what = "; ".join(dict.fromkeys(odd))
    count = f"{len(odd)} of {len(turns)}"
    return (f"logprobs of {count} completions are not of the sampling distribution: {what}",) if odd else ()


def recorded_reward(trajectory: Trajectory) -> float | None:
    """The reward that was set, else the number in the metadata."""
    if trajectory.reward is not None:
        return _finite(trajectory.reward, "the reward", trajectory)
    recorded = trajectory.metadata.get("reward")
    return _finite(recorded, "the reward in its metadata", trajectory) if is_number(recorded) else None


def owned_turns(trajectory: Trajectory) -> list[Turn]:
    """All turns of a trajectory, each once, in write order."""
    return [write for write in trajectory.writes() if isinstance(write, Turn)]


def _advantages(trajectory: Trajectory, advantage: Advantage) -> dict[int, float]:
    turns = owned_turns(trajectory)
    values: list[Any] = [advantage] * len(turns)
    if callable(advantage) and not isinstance(advantage, type):
        values = [advantage(turn) for turn in turns]
    elif (isinstance(advantage, np.ndarray) and advantage.ndim) or isinstance(advantage, list | tuple):
        values = [*advantage]
    if len(values) != len(turns):
        what = f"{len(values)} advantages for {len(turns)} turns: give one value for each, in write order"
        raise SampleError(f"trajectory {trajectory.name!r}: {what}")
    advantages: dict[int, float] = {}
    for at, (turn, value) in enumerate(zip(turns, values, strict=True)):
        where = f"branch {turn.branch}, message {turn.message}, tokens {turn.start}..{turn.stop}"
        advantages[turn.write] = _finite(value, f"the advantage of turn {at} ({where})", trajectory)
    return advantages


def _finite(value: Any, what: str, trajectory: Trajectory) -> float:
    """A number that float32 can hold, as float."""
    number = as_float32(value)
    if number is None:
        problem = f"{what} is {brief(value)}: it must be a finite number (float32)"
        raise SampleError(f"trajectory {trajectory.name!r}: {problem}")
    return number


EPSILON = 1e-6  # added to the deviation of a group


class Baseline(StrEnum):
    """What a reward is compared with: the rewards of its group.

    In a group of one, or of equal rewards, an advantage is 0, and a note reports it.
    """

    STD = "std"
    """Minus the group's mean, over its standard deviation (n - 1, plus 1e-6): GRPO."""
    MEAN = "mean"
    """Minus the mean of its group: GRPO without the deviation, as in Dr. GRPO."""
    LEAVE_ONE_OUT = "leave_one_out"
    """Minus the mean of the others in its group: RLOO."""


@dataclass(frozen=True, slots=True)
class Relative:
    """Rewards compared with their groups, by name, and notes."""

    values: Mapping[str, float]
    notes: tuple[str, ...] = ()


def relative_to_group(
    rewards: Mapping[str, float], groups: Mapping[str, str], *, baseline: Baseline | str = Baseline.STD
) -> Relative:
    """Each reward compared with those of its group. A name without a group is its own group.

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
        value = as_float32(reward)
        if value is None:
            raise SampleError(f"{name!r}: a reward must be a finite number (float32), not {brief(reward)}")
        members[groups.get(name, name)][name] = value
    values: dict[str, float] = {}
    for group in members.values():
        values |= dict(zip(group, _compared(list(group.values()), how), strict=True))
    alone = [name for name, group in members.items() if len(group) == 1]
    same = [name for name, group in members.items() if len(group) > 1 and len(set(group.values())) == 1]
    notes = _note("advantage 0 for groups of one rollout", alone)
    notes += _note("advantage 0 for equal-reward groups", same)
    return Relative({name: values[name] for name in rewards}, tuple(notes))


def _compared(rewards: Sequence[float], how: Baseline) -> list[float]:
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


def returns_to_go(rewards: Sequence[float], gamma: float = 1.0) -> list[float]:
    """For each step, the sum of its reward and later ones, discounted by `gamma`.

    >>> returns_to_go([1.0, 0.0, 4.0], gamma=0.5)
    [2.0, 2.0, 4.0]
    """
    factor = number("gamma", gamma, 0.0, 1.0, SampleError)
    check = functools.partial(number, least=-math.inf, most=math.inf, error=SampleError)
    checked = (check("the reward of a step", one) for one in reversed(rewards))
    return [*accumulate(checked, lambda later, reward: reward + factor * later)][::-1]


@dataclass(frozen=True, slots=True)
class Advantages:
    """An advantage for each turn, in write order, of each rollout with a reward, by name."""

    values: Mapping[str, Sequence[float]]
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
    """Advantages of rollouts within groups (``metadata["group"]``). Each needs its own name.

    A rollout's reward (`Trajectory.set_reward`, else ``metadata["reward"]``) is compared with
    its group and goes to all turns. With a `turn_weight`, the `returns_to_go` of turn rewards
    are compared with the same turn of the others, and added, times the weight. Parts of a
    resumed turn are one turn.
    """
    how = choose(Baseline, "baseline", baseline, SampleError)
    weight = number("turn_weight", turn_weight, -math.inf, math.inf, SampleError)
    rewards, groups, turns = dict[str, float | None](), dict[str, str](), dict[str, list[Turn]]()
    for trajectory in items("trajectories", trajectories, SampleError):
        if not isinstance(trajectory, Trajectory):
            raise SampleError(f"advantages need trajectories, not {brief(trajectory)}")
        name, group = trajectory.name, trajectory.metadata.get("group")
        if name in rewards:
            raise SampleError(f"two trajectories are called {name!r}: give each its own name")
        rewards[name] = recorded_reward(trajectory)
        groups[name] = name if group is None else str(group)
        turns[name] = owned_turns(trajectory)
    rewarded = {name: reward for name, reward in rewards.items() if reward is not None}
    outcome = relative_to_group(rewarded, groups, baseline=how)
    values = {name: [outcome.values[name]] * len(turns[name]) for name in rewarded}
    if weight:
        recorded = {name: turns[name] for name in rewarded}
        for name, added in _turn_advantages(recorded, groups, how, gamma).items():
            values[name] = [value + weight * one for value, one in zip(values[name], added, strict=True)]
    without = [name for name in rewards if name not in rewarded]
    return Advantages(
        values, (*outcome.notes, *_note("no advantage for rollouts without a reward", without))
    )


def _turn_advantages(
    turns: Mapping[str, Sequence[Turn]], groups: Mapping[str, str], how: Baseline, gamma: float
) -> dict[str, list[float]]:
    numbers, returns = dict[str, list[int]](), dict[str, list[float]]()
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
