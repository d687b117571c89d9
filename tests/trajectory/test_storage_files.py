"""Trajectories in files on disk: replaced whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trajectory.stored import small
from tokentrace.errors import TrajectoryError
from tokentrace.trajectory import (
    Trajectory,
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
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["one.trajectory"]


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(TrajectoryError, match=r"notes\.txt: not a trajectory"):
        load_trajectory(path)
