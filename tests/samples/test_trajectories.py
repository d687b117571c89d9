"""Rows from trajectories: every sampled token is trained exactly once, with the engine's data about it."""

import math
from typing import Any

import numpy as np
import pytest

from tests.trajectory.walk import Walk
from tokentrace.errors import SampleError
from tokentrace.samples.sample import CompletionSpan
from tokentrace.samples.trajectories import trajectory_samples
from tokentrace.tokens.kinds import Kind
from tokentrace.trajectory import LogprobKind, Trajectory, Turn

SEEDS = range(60)


def walked(seed: int, steps: int = 60) -> Walk:
    walk = Walk(seed)
    for _ in range(steps):
        walk.random.choice(walk.legal)() if walk.model.branches else walk.begin()
    return walk


def forked() -> Trajectory:
    """A trajectory with two turns, and a branch that starts inside the second."""
    trajectory = Trajectory(name="forked", metadata={"reward": 1})
    trajectory.begin([1, 2], messages=1, message_spans=[(0, 2, 0)])
    trajectory.append_completion([10, 11], [-0.1, -0.2], finish_reason="stop", version=4)
    trajectory.append_context([3], Kind.SCAFFOLD)
    trajectory.append_completion(
        [20, 21, 22], [-0.3, -0.4, -0.5], finish_reason="length", version=[(4, 0, 1), (5, 1, 3)]
    )
    trajectory.branch([1, 2, 10, 11, 3, 20, 21, 9], cause="retry")
    trajectory.append_completion([30], [-0.6], finish_reason="stop", version=6)
    return trajectory


def turns_in_write_order(trajectory: Trajectory) -> list[Turn]:
    turns = {turn.write: turn for k in range(trajectory.num_branches) for turn in trajectory.turns(k) if not turn.cut}
    return [turns[write] for write in sorted(turns)]


# -- rows


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_match_the_model_of_the_trajectory(seed: int) -> None:
    walk = walked(seed)
    rows = trajectory_samples(walk.trajectory)
    owning = [
        index
        for index, branch in enumerate(walk.model.branches)
        if any(token.kind == Kind.SAMPLED and token.owner == index for token in branch.tokens)
    ]
    assert [row.branch for row in rows] == owning
    assert len(rows) == walk.trajectory.num_samples
    for row in rows:
        branch = walk.model.branches[row.branch]
        tokens = branch.tokens
        assert row.token_ids == branch.ids
        assert row.mask.tolist() == [token.kind == Kind.SAMPLED and token.owner == row.branch for token in tokens]
        assert row.kinds.tolist() == [token.kind for token in tokens]
        assert row.messages.tolist() == [token.message for token in tokens]
        assert row.advantages is None
        assert (row.logprobs is not None) == walk.trajectory.has_logprobs
        if row.logprobs is not None:
            logprobs = [math.nan if token.logprob is None else token.logprob for token in tokens]
            np.testing.assert_array_equal(row.logprobs, np.array(logprobs, np.float32))
        assert row.name == walk.trajectory.name
        versions: list[Any] = [None] * len(tokens)
        for piece in branch.pieces:
            if piece.turn is not None and piece.turn["by_token"]:
                versions[piece.start : piece.stop] = piece.turn["by_token"][: piece.stop - piece.start]
        row_versions: list[Any] = [None] * len(tokens)
        for version, start, stop in row.versions:
            assert start < stop
            row_versions[start:stop] = [version] * (stop - start)
        assert row_versions == versions


@pytest.mark.parametrize("seed", SEEDS[::3])
def test_advantages_cover_the_tokens_of_their_turn_and_no_others(seed: int) -> None:
    trajectory = walked(seed).trajectory
    turns = turns_in_write_order(trajectory)
    values = [0.5 + number for number in range(len(turns))]
    by_write = {turn.write: value for turn, value in zip(turns, values, strict=True)}
    writes: list[int] = []

    def of_turn(turn: Turn) -> float:
        writes.append(turn.write)
        return by_write[turn.write]

    for row, same in zip(
        trajectory_samples(trajectory, advantage=values), trajectory_samples(trajectory, advantage=of_turn), strict=True
    ):
        expected = np.zeros(len(row), np.float32)
        for turn in turns:
            if turn.branch == row.branch:
                expected[turn.start : turn.stop] = by_write[turn.write]
        assert row.advantages is not None
        assert same.advantages is not None
        assert row.advantages.tolist() == expected.tolist() == same.advantages.tolist()
        assert ((row.advantages != 0) == row.mask).all()
    assert writes == sorted(by_write)


# -- rewards


@pytest.mark.parametrize(
    ("metadata", "reward", "expected"),
    [
        ({}, None, None),
        ({"reward": 1}, None, 1.0),
        ({"reward": -0.25}, None, -0.25),
        ({"reward": 1}, 0.5, 0.5),
        ({"reward": "good"}, None, None),
        ({"reward": True}, None, None),
        ({"reward": None}, None, None),
        ({"reward": 1}, np.float32(2), 2.0),
    ],
)
def test_the_reward_is_the_argument_or_the_number_in_the_metadata(metadata: Any, reward: Any, expected: Any) -> None:
    trajectory = Trajectory(metadata=metadata)
    trajectory.begin([1])
    trajectory.append_completion([2], [-1.0], finish_reason="stop")
    trajectory.branch([3])
    trajectory.append_completion([2], [-1.0], finish_reason="stop")
    assert [row.reward for row in trajectory_samples(trajectory, reward=reward)] == [expected, expected]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e300, None, "1", True])
def test_an_advantage_that_is_no_finite_number_is_refused_with_its_turn(bad: Any) -> None:
    place = r"turn 1 \(branch 0, message 2, tokens 5\.\.8\) is .*finite number"
    with pytest.raises(SampleError, match=place):
        trajectory_samples(forked(), advantage=[0.0, bad, 0.0])
    with pytest.raises(SampleError, match=place):
        trajectory_samples(forked(), advantage=lambda turn: bad if turn.start == 5 else 0.0)
    if bad is not None:
        with pytest.raises(SampleError, match="turn 0 "):
            trajectory_samples(forked(), advantage=bad)


# -- kinds of logprobs


def test_rows_have_the_logprobs_kind_of_each_completion() -> None:
    trajectory = Trajectory(name="kinds")
    trajectory.begin([1, 2], messages=1)
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 3}
    reported: dict[str, Any] = {"finish_reason": "stop", "logprobs_kind": "processed", "cached_tokens": 0}
    trajectory.append_completion([10, 11], [-0.1, -0.2], sampling=sampling, version="a", **reported)
    trajectory.append_context([3], Kind.CONTEXT)
    trajectory.append_completion([20], [-0.3], finish_reason="stop", sampling={"temperature": 1}, cached_tokens=4)
    (row,) = trajectory_samples(trajectory)
    assert row.completions == (
        CompletionSpan(2, 4, LogprobKind.PROCESSED, 0.7, 0.9, 5, 0),
        CompletionSpan(5, 6, LogprobKind.UNKNOWN, 1.0, None, None, 4),
    )
    assert row.notes == ()
    assert row.slice(3, 6).completions == (
        CompletionSpan(0, 1, LogprobKind.PROCESSED, 0.7, 0.9, 5, 0),
        CompletionSpan(2, 3, LogprobKind.UNKNOWN, 1.0, None, None, 4),
    )


@pytest.mark.parametrize(
    ("kind", "temperature", "noted"),
    [
        *[("raw", 0.7, True), ("unknown", 0.7, True), ("processed", 0.7, False), ("scaled", 0.7, False)],
        *[("raw", 1.0, False), ("raw", 0, False), ("unknown", None, False)],
    ],
)
def test_logprobs_that_are_not_of_the_sampling_distribution_get_a_note(
    kind: str, temperature: float | None, noted: bool
) -> None:
    trajectory = Trajectory()
    trajectory.begin([1])
    sampling = None if temperature is None else {"temperature": temperature}
    trajectory.append_completion([7], [-1.0], finish_reason="stop", sampling=sampling, logprobs_kind=kind)
    (row,) = trajectory_samples(trajectory)
    note = f"logprobs of 1 of 1 completions are not of the sampling distribution: {kind}, sampled with temperature 0.7"
    assert row.notes == ((note,) if noted else ())
