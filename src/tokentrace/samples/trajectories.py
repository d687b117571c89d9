"""Trajectories to samples: one row for each branch that owns sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from ..errors import SampleError, brief
from ..settings import as_float, is_number
from ..trajectory.trajectory import Trajectory
from ..trajectory.turns import PENALTIES, Branch, LogprobKind, Turn, VersionSpan
from .sample import CompletionSpan, Sample

Advantage: TypeAlias = float | Callable[[Turn], float] | Sequence[float] | npt.NDArray[Any]
"""One value for all turns, a function of a turn, or one value for each turn in the order in which they were written."""


def trajectory_samples(
    trajectory: Trajectory, *, reward: float | None = None, advantage: Advantage | None = None
) -> list[Sample]:
    """One row for each branch that owns sampled tokens, in the order of branches: its whole stream.

    Over all rows each sampled token carries loss exactly once, in the branch that owns it. Logprobs, versions and
    completions are those of the whole stream, shared prefixes included. A note reports logprobs that are not of the
    distribution that was sampled from.

    `reward` goes to each row; by default it is that of the trajectory (`set_reward`), else ``metadata["reward"]``.
    `advantage` is a float for all turns, a function of a turn, or one value for each turn of the whole trajectory in
    write order; it goes to the tokens of that turn that carry loss. Raises SampleError if one is not a finite float32.

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
    """The rows of `trajectory_samples`, each made when it is asked for: those of many long branches are large."""
    if not isinstance(trajectory, Trajectory):
        raise SampleError(f"rows are made from a Trajectory, not from {brief(trajectory)}")
    carried = recorded_reward(trajectory) if reward is None else _finite(reward, "the reward", trajectory)
    values = None if advantage is None else _advantages(trajectory, advantage)
    return (_row(trajectory, branch, carried, values) for branch in trajectory.branches if branch.sampled)


def _row(trajectory: Trajectory, branch: Branch, reward: float | None, values: dict[int, float] | None) -> Sample:
    index = branch.index
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
    sampling = turn.sampling or {}
    names = ("temperature", "top_p", "min_p", *PENALTIES)
    top_k = sampling.get("top_k")
    return CompletionSpan(
        turn.start,
        turn.stop,
        turn.logprobs_kind,
        top_k=top_k if _is_small(top_k) else None,
        cached_tokens=turn.cached_tokens,
        **{name: _number(sampling.get(name)) for name in names},
    )


def _number(value: Any) -> float | None:
    return float(value) if type(value) is float or _is_small(value) else None


def _is_small(value: Any) -> TypeGuard[int]:
    return type(value) is int and abs(value) < 2**31


def _notes(turns: Sequence[Turn]) -> tuple[str, ...]:
    """A note where logprobs are not, or may not be, of the distribution that was sampled from.

    What top-k, top-p and min-p leave out is not noted: trainers compare with the whole distribution.
    """
    odd = [
        f"{turn.logprobs_kind}, sampled with {' and '.join(changed)}"
        for turn in turns
        if (changed := _changes(turn)) and turn.logprobs_kind in (LogprobKind.RAW, LogprobKind.UNKNOWN)
    ]
    what = "; ".join(dict.fromkeys(odd))
    count = f"{len(odd)} of {len(turns)}"
    return (f"logprobs of {count} completions are not of what was sampled from: {what}",) if odd else ()


def _changes(turn: Turn) -> list[str]:
    """What makes the distribution that was sampled from another than the model's; nothing where it was greedy."""
    span = _completion(turn)
    if span.temperature == 0:
        return []
    changed = [] if span.temperature in (None, 1) else [f"temperature {span.temperature:g}"]
    penalties = {name: getattr(span, name) for name in PENALTIES}
    changed += [f"{name} {value:g}" for name, value in penalties.items() if value not in (None, PENALTIES[name])]
    return changed + (["a structure that it must have"] if (turn.sampling or {}).get("structure") else [])


def recorded_reward(trajectory: Trajectory) -> float | None:
    """The reward that was set, else the number in the metadata."""
    if trajectory.reward is not None:
        return _finite(trajectory.reward, "the reward", trajectory)
    recorded = trajectory.metadata.get("reward")
    return _finite(recorded, "the reward in its metadata", trajectory) if is_number(recorded) else None


def owned_turns(trajectory: Trajectory) -> list[Turn]:
    """All turns of a trajectory, each once, in the order in which they were written."""
    return [write for write in trajectory.writes() if isinstance(write, Turn)]


def _advantages(trajectory: Trajectory, advantage: Advantage) -> dict[int, float]:
    """The advantage of each turn, by the number of its write."""
    turns = owned_turns(trajectory)
    if callable(advantage) and not isinstance(advantage, type):
        values: Sequence[Any] = [advantage(turn) for turn in turns]
    elif (isinstance(advantage, np.ndarray) and advantage.ndim) or isinstance(advantage, list | tuple):
        if len(advantage) != len(turns):
            raise SampleError(
                f"{_called(trajectory)}{len(advantage)} advantages for {len(turns)} turns: give one value for each "
                "turn, in the order in which they were written"
            )
        values = [*advantage]
    else:
        values = [advantage] * len(turns)
    place = "the advantage of turn {} (branch {}, message {}, tokens {}..{})"
    return {
        turn.write: _finite(value, place.format(number, turn.branch, turn.message, turn.start, turn.stop), trajectory)
        for number, (turn, value) in enumerate(zip(turns, values, strict=True))
    }


def _finite(value: Any, what: str, trajectory: Trajectory) -> float:
    """A number that float32 can hold, as float."""
    number = as_float(value) if is_number(value) else None
    if number is None or abs(number) > float(np.finfo(np.float32).max):
        raise SampleError(f"{_called(trajectory)}{what} is {brief(value)}: it must be a finite number (float32)")
    return number


def _called(trajectory: Trajectory) -> str:
    return f"trajectory {trajectory.name!r}: " if trajectory.name else ""
