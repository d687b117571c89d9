"""Rows from trajectories: every sampled token trained exactly once, with what the engine said about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trajectory.walk import Walk
from tokentrace.data.tables import read_samples, write_samples
from tokentrace.engines.protocol import SamplingParams
from tokentrace.errors import SampleError
from tokentrace.samples.collation import collate
from tokentrace.samples.packing import first_fit_decreasing, flatten, pack, unpack
from tokentrace.samples.sample import CompletionSpan, Sample
from tokentrace.samples.trajectories import RolloutReport, report_rollouts, trajectory_samples
from tokentrace.samples.truncation import truncate
from tokentrace.tokens.kinds import Kind
from tokentrace.trajectory import LogprobKind, Trajectory, Turn, VersionSpan

SEEDS = range(60)


def walked(seed: int, steps: int = 60) -> Walk:
    one = Walk(seed)
    for _ in range(steps):
        one.random.choice(one.legal)() if one.model.branches else one.begin()
    return one


def forked() -> Trajectory:
    """Two turns, and a branch that leaves inside the second."""
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
    found = {turn.write: turn for k in range(trajectory.num_branches) for turn in trajectory.turns(k) if not turn.cut}
    return [found[write] for write in sorted(found)]


# -- rows


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_are_what_the_model_of_the_trajectory_says(seed: int) -> None:
    one = walked(seed)
    rows = trajectory_samples(one.trajectory)
    owning = [
        index
        for index, branch in enumerate(one.model.branches)
        if any(token.kind == Kind.SAMPLED and token.owner == index for token in branch.tokens)
    ]
    assert [row.branch for row in rows] == owning
    assert len(rows) == one.trajectory.num_samples
    for row in rows:
        branch = one.model.branches[row.branch]
        tokens = branch.tokens
        assert row.token_ids == branch.ids
        assert row.mask.tolist() == [token.kind == Kind.SAMPLED and token.owner == row.branch for token in tokens]
        assert row.kinds.tolist() == [token.kind for token in tokens]
        assert row.messages.tolist() == [token.message for token in tokens]
        assert row.name == one.trajectory.name
        versions: list[Any] = [None] * len(tokens)
        for piece in branch.pieces:
            if piece.turn is not None and piece.turn["by_token"]:
                versions[piece.start : piece.stop] = piece.turn["by_token"][: piece.stop - piece.start]
        laid_out: list[Any] = [None] * len(tokens)
        for version, start, stop in row.versions:
            assert start < stop
            laid_out[start:stop] = [version] * (stop - start)
        assert laid_out == versions


@pytest.mark.parametrize("seed", SEEDS)
def test_each_sampled_token_is_trained_exactly_once_with_the_engines_logprob(seed: int) -> None:
    trajectory = walked(seed).trajectory
    rows = trajectory_samples(trajectory)
    assert sum(row.trained for row in rows) == trajectory.num_sampled
    trained: dict[tuple[int, int], tuple[int, float]] = {}
    for row in rows:
        for position in np.flatnonzero(row.mask).tolist():
            logprob = math.nan if row.logprobs is None else float(row.logprobs[position])
            assert (row.branch, position) not in trained
            trained[row.branch, position] = int(row.ids[position]), logprob
    for turn in turns_in_write_order(trajectory):
        logprobs = trajectory.completion_logprobs(turn).tolist() if trajectory.has_logprobs else [math.nan] * len(turn)
        for position, index, logprob in zip(
            range(turn.start, turn.stop), trajectory.completion(turn).tolist(), logprobs, strict=True
        ):
            found = trained.pop((turn.branch, position))
            assert found[0] == index
            assert found[1] == logprob or (math.isnan(logprob) and not trajectory.has_logprobs)
    assert not trained


@pytest.mark.parametrize("seed", SEEDS[::3])
def test_advantages_stand_on_the_tokens_of_their_turn_and_nowhere_else(seed: int) -> None:
    trajectory = walked(seed).trajectory
    turns = turns_in_write_order(trajectory)
    values = [0.5 + number for number in range(len(turns))]
    by_write = {turn.write: value for turn, value in zip(turns, values, strict=True)}
    asked: list[int] = []

    def of_turn(turn: Turn) -> float:
        asked.append(turn.write)
        return by_write[turn.write]

    for row, same in zip(
        trajectory_samples(trajectory, advantage=values), trajectory_samples(trajectory, advantage=of_turn), strict=True
    ):
        wanted = np.zeros(len(row), np.float32)
        for turn in turns:
            if turn.branch == row.branch:
                wanted[turn.start : turn.stop] = by_write[turn.write]
        assert row.advantages is not None
        assert same.advantages is not None
        assert row.advantages.tolist() == wanted.tolist() == same.advantages.tolist()
        assert ((row.advantages != 0) == row.mask).all()
    assert asked == sorted(by_write)


def test_a_branch_that_left_inside_a_turn_has_its_head_untrained_with_logprobs_and_versions() -> None:
    first, second = trajectory_samples(forked(), advantage=[1.0, 2.0, 3.0])
    assert first.token_ids == [1, 2, 10, 11, 3, 20, 21, 22]
    assert second.token_ids == [1, 2, 10, 11, 3, 20, 21, 9, 30]
    assert first.loss_mask == [0, 0, 1, 1, 0, 1, 1, 1]
    assert second.loss_mask == [0, 0, 0, 0, 0, 0, 0, 0, 1]
    assert second.logprobs is not None
    assert second.logprobs[[2, 6, 8]].tolist() == np.array([-0.1, -0.4, -0.6], np.float32).tolist()
    assert np.isnan(second.logprobs[[0, 1, 4, 7]]).all()
    assert first.versions == (VersionSpan(4, 2, 4), VersionSpan(4, 5, 6), VersionSpan(5, 6, 8))
    assert second.versions == (VersionSpan(4, 2, 4), VersionSpan(4, 5, 6), VersionSpan(5, 6, 7), VersionSpan(6, 8, 9))
    assert first.advantages is not None
    assert second.advantages is not None
    assert first.advantages.tolist() == [0, 0, 1, 1, 0, 2, 2, 2]
    assert second.advantages.tolist() == [0] * 8 + [3]


def test_a_trajectory_without_a_sampled_token_gives_no_rows() -> None:
    trajectory = Trajectory()
    assert trajectory_samples(trajectory, advantage=1.0) == []
    trajectory.begin([1, 2])
    assert trajectory_samples(trajectory) == []
    trajectory.append_completion([], [], finish_reason="abort")
    assert trajectory_samples(trajectory) == []


def test_a_trajectory_without_logprobs_gives_rows_without() -> None:
    trajectory = Trajectory(logprobs=False)
    trajectory.begin([1])
    trajectory.append_completion([2], None, finish_reason="stop")
    [row] = trajectory_samples(trajectory)
    assert row.logprobs is None
    assert row.advantages is None


# -- rewards


@pytest.mark.parametrize(
    ("metadata", "given", "wanted"),
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
def test_the_reward_is_the_one_given_or_the_number_in_the_metadata(metadata: Any, given: Any, wanted: Any) -> None:
    trajectory = Trajectory(metadata=metadata)
    trajectory.begin([1])
    trajectory.append_completion([2], [-1.0], finish_reason="stop")
    trajectory.branch([3])
    trajectory.append_completion([2], [-1.0], finish_reason="stop")
    assert [row.reward for row in trajectory_samples(trajectory, reward=given)] == [wanted, wanted]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300, 10**400, "1", True, [1.0]])
def test_a_reward_that_is_no_finite_number_is_refused(bad: Any) -> None:
    with pytest.raises(SampleError, match=r"trajectory 'forked': the reward is .*finite number"):
        trajectory_samples(forked(), reward=bad)


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


@pytest.mark.parametrize("count", [0, 2, 4])
def test_advantages_must_be_one_for_each_turn(count: int) -> None:
    with pytest.raises(SampleError, match=f"{count} advantages for 3 turns"):
        trajectory_samples(forked(), advantage=np.ones(count))


# -- the report


@pytest.mark.parametrize("seed", range(20))
def test_the_report_counts_what_the_rows_are(seed: int) -> None:
    trajectories = [walked(1000 * seed + k, 30).trajectory for k in range(10)] + [Trajectory()]
    report = report_rollouts(one for one in trajectories)
    rows = [row for one in trajectories for row in trajectory_samples(one)]
    assert report.rollouts == len(trajectories)
    assert report.samples == len(rows)
    assert report.samples_per_rollout == len(rows) / len(trajectories)
    assert report.sampled == sum(row.trained for row in rows)
    assert report.tokens_in_rows == sum(map(len, rows))
    assert report.tokens == sum(one.num_tokens for one in trajectories)
    assert report.breaks == sum(report.causes.values())
    assert report.breaks + report.retries == sum(max(one.num_branches - 1, 0) for one in trajectories)
    assert report.samples + report.unsampled == sum(one.num_branches for one in trajectories)
    assert [*report.causes.values()] == sorted(report.causes.values(), reverse=True)
    assert "" not in report.causes


def test_the_report_reads_well() -> None:
    unknown = forked()
    unknown.branch([5])
    assert str(report_rollouts([forked(), unknown])).splitlines() == [
        "rollouts  2, as 4 samples (2.00 each)",
        "breaks    3 (retry: 2, unknown: 1)",
        "branches  5; 1 without a sampled token make no row",
        "tokens    21 recorded, 12 sampled, 34 in rows",
    ]


@pytest.mark.parametrize("cause", ["", "retry"])
@pytest.mark.parametrize("prompt", [[1, 2], [1, 2, 10], [1]])
def test_a_prompt_that_is_sampled_again_is_no_break(prompt: list[int], cause: str) -> None:
    trajectory = forked()
    trajectory.branch(prompt, cause=cause)
    trajectory.append_completion([40], [-0.7], finish_reason="stop")
    assert [branch.retries for branch in trajectory.branches] == [False, False, True]
    report = report_rollouts([trajectory])
    assert (report.breaks, report.retries, report.causes) == (1, 1, {"retry": 1})
    assert "branches  3, 1 of them the same prompt again" in str(report)


def test_a_branch_that_gets_its_new_prompt_later_is_a_break() -> None:
    trajectory = forked()
    trajectory.branch([1, 2])
    trajectory.append_context([50], Kind.CONTEXT)
    trajectory.append_completion([40], [-0.7], finish_reason="stop")
    assert report_rollouts([trajectory]).causes == {"retry": 1, "unknown": 1}


def test_a_report_of_nothing_has_no_ratio() -> None:
    report = report_rollouts([])
    assert report == RolloutReport(0, 0, 0, 0, 0, 0, 0, {})
    assert math.isnan(report.samples_per_rollout)
    assert str(report).startswith("rollouts  0, as 0 samples\n")


# -- what the logprobs mean


def recorded() -> Trajectory:
    trajectory = Trajectory(name="kinds")
    trajectory.begin([1, 2], messages=1)
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 3}
    said: dict[str, Any] = {"finish_reason": "stop", "logprobs_kind": "processed", "cached_tokens": 0}
    trajectory.append_completion([10, 11], [-0.1, -0.2], sampling=sampling, version="a", **said)
    trajectory.append_context([3], Kind.CONTEXT)
    trajectory.append_completion([20], [-0.3], finish_reason="stop", sampling={"temperature": 1}, cached_tokens=4)
    return trajectory


def test_rows_say_of_each_completion_what_its_logprobs_are() -> None:
    (row,) = trajectory_samples(recorded())
    assert row.completions == (
        CompletionSpan(2, 4, LogprobKind.PROCESSED, 0.7, 0.9, 5, 0),
        CompletionSpan(5, 6, LogprobKind.UNKNOWN, 1.0, None, None, 4),
    )
    assert row.notes == ()
    assert row.slice(3, 6).completions == (
        CompletionSpan(0, 1, LogprobKind.PROCESSED, 0.7, 0.9, 5, 0),
        CompletionSpan(2, 3, LogprobKind.UNKNOWN, 1.0, None, None, 4),
    )


def test_kinds_settings_and_cached_tokens_reach_the_table_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    rows = trajectory_samples(recorded())
    write_samples(path, rows)
    (back,) = read_samples(path)
    assert back.completions == rows[0].completions
    assert back.versions == rows[0].versions
    assert all(isinstance(span.logprobs_kind, LogprobKind) for span in back.completions)


@pytest.mark.parametrize(
    ("kind", "temperature", "noted"),
    [
        *[("raw", 0.7, True), ("unknown", 0.7, True), ("processed", 0.7, False), ("scaled", 0.7, False)],
        *[("raw", 1.0, False), ("raw", 0, False), ("unknown", None, False)],
    ],
)
def test_logprobs_of_another_distribution_than_was_sampled_from_are_noted(
    kind: str, temperature: float | None, noted: bool
) -> None:
    trajectory = Trajectory()
    trajectory.begin([1])
    sampling = None if temperature is None else {"temperature": temperature}
    trajectory.append_completion([7], [-1.0], finish_reason="stop", sampling=sampling, logprobs_kind=kind)
    (row,) = trajectory_samples(trajectory)
    note = f"logprobs of 1 of 1 completions are not of what was sampled from: {kind}, sampled with temperature 0.7"
    assert row.notes == ((note,) if noted else ())


@pytest.mark.parametrize(("kind", "temperature", "noted"), [("unknown", 1.0, True), ("unknown", 0.0, False)])
def test_a_completion_that_was_held_to_a_structure_is_noted(kind: str, temperature: float, noted: bool) -> None:
    trajectory = Trajectory()
    trajectory.begin([1])
    sampling = SamplingParams(1, temperature=temperature, structure={"type": "json_object"}).described()
    trajectory.append_completion([7], [-1.0], finish_reason="stop", sampling=sampling, logprobs_kind=kind)
    (row,) = trajectory_samples(trajectory)
    assert bool(row.notes) == noted
    assert all("unknown, sampled with a structure" in note for note in row.notes)


# -- junk

HUGE: Any = 10**5000
DEEP: Any = []
for _ in range(3000):
    DEEP = [DEEP]
JUNK = [None, True, "x", 1.5, HUGE, DEEP, object(), {}, np.zeros((2, 2)), np.array(3), [HUGE], float("nan")]


def row() -> Sample:
    return trajectory_samples(recorded(), reward=1.0, advantage=0.5)[0]


@pytest.mark.parametrize("junk", JUNK, ids=[f"{type(one).__name__}-{at}" for at, one in enumerate(JUNK)])
def test_junk_makes_no_row_but_a_typed_error(junk: Any) -> None:
    calls: list[Callable[[], object]] = [
        *(
            (lambda name=name: row().replace(**{name: junk}))  # type: ignore[misc]
            for name in ("ids", "mask", "messages", "kinds", "versions", "completions")
        ),
        lambda: row().replace(logprobs="x" if junk is None else junk),
        lambda: row().replace(versions=(VersionSpan(1, 0, junk),)),
        lambda: row().replace(completions=(CompletionSpan(junk, junk),)),
        lambda: row().replace(nonsense=junk),
        lambda: row().slice(junk, junk),
        lambda: trajectory_samples(junk),
        lambda: report_rollouts(junk if not isinstance(junk, str | dict | np.ndarray) else [junk]),
        lambda: trajectory_samples(recorded(), advantage=[junk, junk]),
        lambda: collate(junk, pad_id=0),
        lambda: collate([junk], pad_id=0),
        lambda: collate([row()], pad_id=junk),
        lambda: collate([row()], pad_id=0, length=-1 if junk is None else junk),
        lambda: collate([row()], pad_id=0, side=junk),
        lambda: collate([row()], pad_id=0, tensors=junk),
        lambda: pack(junk, 10, pad_id=0),
        lambda: pack([row()], junk, pad_id=0),
        lambda: flatten(junk),
        lambda: unpack(junk),
        lambda: first_fit_decreasing([3], junk),
        lambda: truncate(junk, 3, "right"),
        lambda: truncate(row(), 3, junk),
    ]
    for number, call in enumerate(calls):
        if number == 13 and type(junk) is float and junk == 1.5:
            continue  # an advantage
        with pytest.raises(SampleError) as caught:
            call()
        assert len(str(caught.value)) < 600, number


def test_a_batch_beyond_memory_is_refused() -> None:
    for length in (2**31 - 1, 10**12):
        with pytest.raises(SampleError):
            collate([row()], pad_id=0, length=length)
        with pytest.raises(SampleError):
            pack([row()], length, pad_id=0)
    with pytest.raises(SampleError):
        collate([row()], pad_id=0, multiple_of=2**31 - 1)
