"""Trajectories to samples: one row for each branch that has something to train, and a count over many rollouts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from ..errors import SampleError, shown
from ..settings import is_number, items
from ..tokens.visible import counted
from ..trajectory.trajectory import Trajectory
from ..trajectory.turns import PENALTIES, Branch, LogprobKind, Turn, VersionSpan
from .sample import CompletionSpan, Sample
from .staleness import UNSAMPLED, age

Advantage: TypeAlias = float | Callable[[Turn], float] | Sequence[float] | npt.NDArray[Any]
"""One value for all turns, a function of a turn, or one value for each turn in the order in which they were written."""


def trajectory_samples(
    trajectory: Trajectory, *, reward: float | None = None, advantage: Advantage | None = None
) -> list[Sample]:
    """One row for each branch that owns sampled tokens, in the order of branches: its whole stream.

    Over all rows each sampled token carries loss exactly once, in the branch that owns it. Logprobs, versions and
    completions are those of the whole stream, shared prefixes included; a trajectory that has no logprobs gives rows
    without them. A row whose logprobs are not of the distribution that was sampled from has a note that says so.

    `reward` goes to each row; by default it is that of the trajectory (`set_reward`), else the number in its
    ``metadata["reward"]``, if there is one.
    `advantage` is a float for all turns, a function that is called once for each turn, or one value for each turn of
    the whole trajectory in write order; it goes to the tokens of that turn that carry loss. `SampleError` names the
    turn whose advantage is not a finite float32, or says how many values there should be.

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
    _check_trajectory(trajectory)
    carried = _reward_of(trajectory, reward)
    values = None if advantage is None else _advantages(trajectory, advantage)
    return (_row(trajectory, branch, carried, values) for branch in trajectory.branches if branch.sampled)


def _row(trajectory: Trajectory, branch: Branch, reward: float | None, values: dict[int, float] | None) -> Sample:
    index = branch.index
    ids, mask = trajectory.stream(index), trajectory.loss_mask(index)
    turns = trajectory.turns(index)
    sampled = [turn for turn in turns if len(turn)]
    completions = tuple(map(_completion, sampled))
    advantages = None
    if values is not None:
        advantages = np.zeros(len(ids), np.float32)
        for turn in turns:
            if turn.branch == index:
                advantages[turn.start : turn.stop] = values[turn.write]
    return Sample(
        ids=ids,
        mask=mask,
        messages=trajectory.message_indices(index),
        kinds=trajectory.kinds(index),
        logprobs=trajectory.logprobs(index) if trajectory.has_logprobs else None,
        advantages=advantages,
        reward=reward,
        versions=tuple(
            VersionSpan(version, turn.start + start, turn.start + stop)
            for turn in turns
            for version, start, stop in turn.versions
            if start < stop
        ),
        completions=completions,
        channels=trajectory.channels(index),
        name=trajectory.name,
        branch=index,
        notes=_notes(sampled) if trajectory.has_logprobs else (),
    )


def _completion(turn: Turn) -> CompletionSpan:
    sampling = turn.sampling or {}
    temperature, top_p = (_number(sampling.get(name)) for name in ("temperature", "top_p"))
    top_k = sampling.get("top_k")
    return CompletionSpan(
        turn.start,
        turn.stop,
        turn.logprobs_kind,
        temperature,
        top_p,
        top_k if _is_small(top_k) else None,
        turn.cached_tokens,
        *(_number(sampling.get(name)) for name in ("min_p", *PENALTIES)),
    )


def _number(value: Any) -> float | None:
    return float(value) if type(value) is float or _is_small(value) else None


def _is_small(value: Any) -> TypeGuard[int]:
    return type(value) is int and abs(value) < 2**31


def _notes(turns: Sequence[Turn]) -> tuple[str, ...]:
    """A note where logprobs are not of the distribution that was sampled from, or may not be: temperature, penalties or
    a structure changed it.

    What top-k, top-p and min-p leave out is not noted: trainers compare with the whole distribution.
    """
    odd = [
        f"{turn.logprobs_kind}, sampled with {' and '.join(changed)}"
        for turn in turns
        if (changed := _changes(turn)) and turn.logprobs_kind in (LogprobKind.RAW, LogprobKind.UNKNOWN)
    ]
    if not odd:
        return ()
    what = "; ".join(dict.fromkeys(odd))
    return (f"logprobs of {len(odd)} of {len(turns)} completions are not of what was sampled from: {what}",)


def _changes(turn: Turn) -> list[str]:
    """What makes the distribution that was sampled from another than the model's; nothing where it was greedy."""
    span = _completion(turn)
    if span.temperature == 0:
        return []
    changed = [] if span.temperature in (None, 1) else [f"temperature {span.temperature:g}"]
    penalties = {name: getattr(span, name) for name in PENALTIES}
    changed += [f"{name} {value:g}" for name, value in penalties.items() if value not in (None, PENALTIES[name])]
    return changed + (["a structure that it must have"] if (turn.sampling or {}).get("structure") else [])


def _reward_of(trajectory: Trajectory, reward: float | None) -> float | None:
    return recorded_reward(trajectory) if reward is None else _finite(reward, "the reward", trajectory)


def recorded_reward(trajectory: Trajectory) -> float | None:
    """What a trajectory says that it was worth: what it was told, else the number in its metadata."""
    if trajectory.reward is not None:
        return _finite(trajectory.reward, "the reward", trajectory)
    recorded = trajectory.metadata.get("reward")
    return _finite(recorded, "the reward in its metadata", trajectory) if is_number(recorded) else None


def owned_turns(trajectory: Trajectory) -> list[Turn]:
    """All turns of a trajectory, each once, in the order in which they were written."""
    owned = (turn for k in range(trajectory.num_branches) for turn in trajectory.turns(k) if turn.branch == k)
    return sorted(owned, key=lambda turn: turn.write)


def _advantages(trajectory: Trajectory, advantage: Advantage) -> dict[int, float]:
    """The advantage of each turn, by the number of its write."""
    turns = owned_turns(trajectory)
    if callable(advantage):
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
    return {
        turn.write: _finite(value, f"the advantage of turn {number} ({_place(turn)})", trajectory)
        for number, (turn, value) in enumerate(zip(turns, values, strict=True))
    }


def _finite(value: Any, what: str, trajectory: Trajectory) -> float:
    """A number that float32 can hold, as float."""
    if is_number(value):
        with np.errstate(over="ignore"):
            try:
                fine = bool(np.isfinite(np.float32(value)))
            except (OverflowError, ValueError, TypeError):  # an int beyond floats
                fine = False
        if fine:
            return float(value)
    raise SampleError(f"{_called(trajectory)}{what} is {shown(value)}: it must be a finite number (float32)")


def _check_trajectory(value: Any) -> None:
    if not isinstance(value, Trajectory):
        raise SampleError(f"rows are made from a Trajectory, not from {shown(value)}")


def _called(trajectory: Trajectory) -> str:
    return f"trajectory {trajectory.name!r}: " if trajectory.name else ""


def _place(turn: Turn) -> str:
    return f"branch {turn.branch}, message {turn.message}, tokens {turn.start}..{turn.stop}"


@dataclass(frozen=True, slots=True)
class RolloutReport:
    """How many rows and tokens many rollouts give. `str()` of it is a few lines for people."""

    rollouts: int
    samples: int
    """How many rows they make: branches that own sampled tokens."""
    breaks: int
    """How many times a history was rewritten: the branches beyond the first of each, without the retries."""
    tokens: int
    """How many tokens are recorded; one that branches share counts once."""
    sampled: int
    """How many of them were sampled; each is trained once."""
    tokens_in_rows: int
    """How many tokens the rows hold: a shared prefix counts in each row that begins with it."""
    unsampled: int
    """How many branches own no sampled token, and make no row."""
    causes: Mapping[str, int] = field(default_factory=dict)
    """Why histories were rewritten, the most frequent first; ``"unknown"`` where no cause was given."""
    stale: Mapping[int, int] = field(default_factory=dict)
    """How many sampled tokens are how many versions old, where `report_rollouts` was told the version of now."""
    unversioned: int = 0
    """How many sampled tokens nobody said the version of, where it was told that."""
    retries: int = 0
    """How many branches sample a recorded prompt again, or an earlier point of one: nothing was rewritten."""

    @property
    def max_staleness(self) -> int | None:
        """None where nothing is known."""
        return max(self.stale, default=None)

    @property
    def mean_staleness(self) -> float:
        """Over sampled tokens whose version is known; NaN where there are none."""
        tokens = sum(self.stale.values())
        return sum(age * count for age, count in self.stale.items()) / tokens if tokens else math.nan

    @property
    def samples_per_rollout(self) -> float:
        """1 where no history was rewritten; NaN where there are no rollouts."""
        return self.samples / self.rollouts if self.rollouts else math.nan

    def __str__(self) -> str:
        ratio = f" ({self.samples_per_rollout:.2f} each)" if self.rollouts else ""
        why = ", ".join(f"{cause}: {count}" for cause, count in self.causes.items())
        none = f"; {self.unsampled} without a sampled token make no row" if self.unsampled else ""
        again = f", {self.retries:,} of them the same prompt again" if self.retries else ""
        return "\n".join(
            [
                f"rollouts  {self.rollouts:,}, as {counted(self.samples, 'sample')}{ratio}",
                f"breaks    {self.breaks:,}{f' ({why})' if why else ''}",
                f"branches  {self.samples + self.unsampled:,}{again}{none}",
                f"tokens    {self.tokens:,} recorded, {self.sampled:,} sampled, {self.tokens_in_rows:,} in rows",
                *self._stale_line(),
            ]
        )

    def _stale_line(self) -> list[str]:
        if not self.stale and not self.unversioned:
            return []
        known = f"at most {self.max_staleness}, {self.mean_staleness:.2f} on average" if self.stale else "not known"
        return [f"staleness {known}{f'; {self.unversioned:,} tokens of no version' if self.unversioned else ''}"]


def report_rollouts(trajectories: Iterable[Trajectory], *, version: int | None = None) -> RolloutReport:
    """Count samples, breaks with their causes, and tokens; trajectories are read one at a time.

    With the `version` of the weights of now, it also says how old sampled tokens are. `SampleError` where versions are
    no numbers (a text of digits is one), or later than that.

    >>> trajectory = Trajectory()
    >>> trajectory.begin([1, 2, 3])
    >>> turn = trajectory.append_completion([7, 8], [-0.5, -0.25], finish_reason="stop")
    >>> branch = trajectory.branch([1, 2, 4], cause="compaction")
    >>> turn = trajectory.append_completion([9], [-0.5], finish_reason="stop")
    >>> print(report_rollouts([trajectory]))
    rollouts  1, as 2 samples (2.00 each)
    breaks    1 (compaction: 1)
    branches  2
    tokens    7 recorded, 3 sampled, 9 in rows
    """
    counts: Counter[str] = Counter()
    causes: Counter[str] = Counter()
    stale: Counter[int] = Counter()
    for trajectory in items("trajectories", trajectories, SampleError):
        _check_trajectory(trajectory)
        branches = trajectory.branches
        rows = [branch for branch in branches if branch.sampled]
        broken = [branch for branch in branches[1:] if not branch.retries]
        causes.update(branch.cause or "unknown" for branch in broken)
        counts.update(
            rollouts=1,
            samples=len(rows),
            breaks=len(broken),
            retries=len(branches[1:]) - len(broken),
            tokens=trajectory.num_tokens,
            sampled=trajectory.num_sampled,
            tokens_in_rows=sum(branch.stop for branch in rows),
            unsampled=len(branches) - len(rows),
        )
        if version is not None:
            stale.update(_ages(trajectory, version))
    ordered = dict(sorted(causes.items(), key=lambda item: (-item[1], item[0])))
    names = ("rollouts", "samples", "breaks", "tokens", "sampled", "tokens_in_rows", "unsampled", "retries")
    unversioned = stale.pop(UNSAMPLED, 0)
    return RolloutReport(
        **{name: counts[name] for name in names},
        causes=ordered,
        stale=dict(sorted(stale.items())),
        unversioned=unversioned,
    )


def _ages(trajectory: Trajectory, version: int) -> Counter[int]:
    """How many sampled tokens are how many versions old; -1 for those that nobody said the version of."""
    ages: Counter[int] = Counter()
    for turn in owned_turns(trajectory):
        for sampled_by, start, stop in turn.versions:
            ages[age(sampled_by, version, _called(trajectory))] += stop - start
        if not turn.versions:
            ages[UNSAMPLED] += len(turn)
    return ages
