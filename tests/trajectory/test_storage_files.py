"""Trajectories in files on disk: replaced whole, and followed as they grow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trajectory.stored import small
from tests.trajectory.walk import Walk
from tokentrace.errors import TrajectoryError
from tokentrace.tokens.kinds import Kind
from tokentrace.trajectory import (
    Trajectory,
    TrajectoryFile,
    load_trajectory,
    save_trajectory,
    to_bytes,
)
from tokentrace.trajectory import storage as storage_module


def test_save_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "one.trajectory"
    path.write_bytes(b"old")
    save_trajectory(small(), path)
    assert to_bytes(load_trajectory(path).trajectory) == path.read_bytes() == to_bytes(small())
    assert [one.name for one in tmp_path.iterdir()] == ["one.trajectory"]


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "one.trajectory"
    save_trajectory(small(), path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(storage_module.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        save_trajectory(Trajectory(), path)
    with pytest.raises(OSError, match="no space"):
        TrajectoryFile.create(tmp_path / "two", small())
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["one.trajectory"]


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(TrajectoryError, match=r"notes\.txt: not a trajectory"):
        load_trajectory(path)


def test_a_file_follows_a_growing_trajectory(tmp_path: Path) -> None:
    path = tmp_path / "growing"
    walk = Walk(3, rewards=False)
    walk.begin()
    with TrajectoryFile.create(path, walk.trajectory) as file:
        for _ in range(60):
            before, size = walk.trajectory.num_writes, path.stat().st_size
            walk.step()
            assert file.write() == walk.trajectory.num_writes - before
            assert (path.stat().st_size == size) == (walk.trajectory.num_writes == before)
            assert path.read_bytes() == to_bytes(walk.trajectory)
        walk.context()
    assert path.read_bytes() == to_bytes(walk.trajectory)
    with pytest.raises(FileExistsError):
        TrajectoryFile.create(path, walk.trajectory)


def test_rewards_are_written_when_they_are_said(tmp_path: Path) -> None:
    path = tmp_path / "rewards.tt"
    trajectory = small()
    with TrajectoryFile.create(path, trajectory) as file:
        (turn, *_) = trajectory.turns()
        trajectory.set_reward(1.0, turn)
        assert file.write() == 0
        assert load_trajectory(path).trajectory.turns()[0].reward == 1.0
        trajectory.set_reward(0.25, turn)
        trajectory.set_reward(7)
    loaded = load_trajectory(path).trajectory
    assert (loaded.turns()[0].reward, loaded.reward) == (0.25, 7.0)
    assert loaded.rewarded == ((turn.write, 1.0), (turn.write, 0.25), (-1, 7.0))


def test_a_write_that_failed_half_way_is_made_good_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "torn"
    trajectory = Trajectory()
    trajectory.begin([1])
    file = TrajectoryFile.create(path, trajectory)
    with path.open("ab") as other:
        other.write(b"half a record" * 100)
    trajectory.append_context([2], Kind.CONTEXT)
    assert file.write() == 1
    file.close()
    assert path.read_bytes() == to_bytes(trajectory)
