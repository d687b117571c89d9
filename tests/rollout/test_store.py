"""What is on the disk: finished rollouts whole, unfinished ones known, whenever and however the process ended."""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trajectory.checker import check_trajectory
from tokentrace import InputError, Trajectory, create_renderer
from tokentrace.data.tables import read_metadata
from tokentrace.engines.protocol import SamplingParams
from tokentrace.engines.scripted import ScriptedEngine
from tokentrace.errors import TrajectoryError
from tokentrace.pocket import POCKET
from tokentrace.rollout.batch import grouped, run_rollouts
from tokentrace.rollout.loop import Agent, End, Rollout, Task
from tokentrace.rollout.store import (
    JOURNAL,
    ROWS,
    RUN,
    TRAJECTORIES,
    JournalWarning,
    RolloutStore,
    check_run,
    discard_run,
    file_name,
    group_advantages,
)
from tokentrace.trajectory import storage

ROOT = Path(__file__).parents[2]


def a_rollout(name: str, reward: float | None = 1.0, end: End = End.ANSWER, **metadata: Any) -> Rollout:
    trajectory = Trajectory(name=name, metadata=metadata)
    trajectory.begin([1, 2, 3], messages=1)
    trajectory.append_completion([7, 8], [-0.5, -0.25], finish_reason="stop")
    task = Task([{"role": "user", "content": "?"}], name=name, metadata=metadata)
    return Rollout(task, trajectory, [], list(task.messages), end=end, reward=reward)


def stored(folder: Path, *rollouts: Rollout) -> RolloutStore:
    store = RolloutStore(folder)
    for rollout in rollouts:
        store.start(rollout.task.name)
        store.finish(rollout)
    return store


def test_a_rollout_is_on_the_disk_before_the_journal_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stored(tmp_path)
    journal = tmp_path / JOURNAL
    store.start("one")

    def save(*_: object) -> None:
        assert b"finished" not in journal.read_bytes()
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr("tokentrace.rollout.store.save_trajectory", save)
        with pytest.raises(OSError, match="full"):
            store.finish(a_rollout("one"))
    assert (store.finished, store.unfinished) == ([], ["one"])
    store.finish(a_rollout("one"))
    assert store.is_finished("one")
    store.close()
    again = RolloutStore(tmp_path)
    ((row, trajectory),) = again.trajectories()
    assert (row["name"], row["metrics"]["reward"], trajectory.num_sampled) == ("one", 1.0, 2)
    (sample,) = again.samples()
    assert (sample.reward, sample.trained) == (1.0, 2)
    again.close()


@functools.cache
def journal_lines() -> list[bytes]:
    """The journal of two finished rollouts, one that was run again, and one that was only started."""
    with tempfile.TemporaryDirectory() as folder:
        store = stored(Path(folder), a_rollout("é one"), a_rollout("two", None, End.ENGINE), a_rollout("three"))
        store.run_again(["engine"])
        store.start("four")
        store.close()
        return (Path(folder) / JOURNAL).read_bytes().splitlines(keepends=True)


def records(store: RolloutStore) -> tuple[list[str], list[str]]:
    return sorted(str(row["name"]) for row in store.finished), sorted(store.unfinished)


def reopened(folder: Path, lines: Sequence[bytes]) -> RolloutStore:
    (folder / JOURNAL).write_bytes(b"".join(lines))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return RolloutStore(folder)


@given(data=st.data())
def test_a_torn_line_costs_its_own_record_alone_and_is_reported(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        lines = journal_lines()
        victim = data.draw(st.integers(0, len(lines) - 1), "line")
        others = [*lines[:victim], *lines[victim + 1 :]]
        store = reopened(path, others)
        expected = records(store)
        store.close()

        line = lines[victim]
        at = data.draw(st.integers(1, len(line) - 2), "byte")
        torn = line[:at]
        if data.draw(st.booleans(), "interleaved"):  # a part of another record inside of it
            other = data.draw(st.sampled_from(lines), "other")
            torn += other[: data.draw(st.integers(2, len(other) - 2), "part")] + line[at:-1]
        is_last = victim == len(lines) - 1
        ended = b"" if is_last and data.draw(st.booleans(), "cut off") else b"\n"
        store = reopened(path, [*lines[:victim], torn + ended, *lines[victim + 1 :]])
        assert records(store) == expected
        assert [problem.line for problem in store.unreadable] == [victim + 1]
        store.start("next")
        store.close()
        with pytest.warns(JournalWarning, match=rf"1 line cannot be read.*line {victim + 1}\b"):
            again = RolloutStore(path)
        assert records(again) == (expected[0], sorted([*expected[1], "next"]))
        again.close()


class ShortWrites:
    """A journal on a disk that is full after so many bytes, until there is room again."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self.room = file, room

    def write(self, text: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "the disk is full")
        count = int(self._file.write(text[: self.room]))
        self.room -= count
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@given(room=st.integers(0, 700))
def test_a_writer_goes_on_with_a_fresh_line_after_a_short_write(room: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        path = Path(folder)
        patched.setattr("tokentrace.rollout.store.save_trajectory", lambda *_: None)  # slow, and not what this is about
        patched.setattr("os.fsync", lambda _: None)
        store = stored(path, a_rollout("one"))
        store._journal = ShortWrites(store._journal, room)  # type: ignore[assignment]
        acknowledged = ["one"]
        for name in ("two", "three"):
            try:
                store.start(name)
                store.finish(a_rollout(name))
                acknowledged.append(name)
            except OSError:
                assert not store.is_finished(name)
        store._journal.room = 1 << 20  # type: ignore[attr-defined]
        store.finish(a_rollout("four"))
        acknowledged.append("four")
        assert [row["name"] for row in store.finished] == acknowledged
        store.close()
        again = reopened(path, [(path / JOURNAL).read_bytes()])
        assert set(acknowledged) <= {row["name"] for row in again.finished}
        assert len(again.unreadable) <= 1
        again.close()


def test_what_is_no_record_is_not_read_and_named_by_its_line(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_text('{"event": "started", "name": "a"}\n{"event": "eaten"}\n[]\n', encoding="utf-8")
    with pytest.warns(JournalWarning, match=r"rollouts.jsonl: 2 lines cannot be read.*lines 2, 3"):
        store = RolloutStore(tmp_path)
    assert [problem.line for problem in store.unreadable] == [2, 3]
    assert store.unfinished == ["a"]
    store.close()


NAMES = [
    *(
        "a/b",
        "a_b",
        "a?b",
        "..",
        ".",
        "",
        "a",
        "A",
        "x" * 500,
        "x" * 501,
        "日本",
        "日 本",
        "nul",
        "NUL",
        "con.x",
        "-a",
        " a",
    ),
    *("../../x", "/etc/passwd", "a\0b", "a\0c", "C:\\x", "a.", "a..", "é", "e\u0301", "ß", "ss", "~", "a\nb", "a.tt"),
]


def test_names_that_no_file_can_have_do_not_meet(tmp_path: Path) -> None:
    names = [*NAMES, *(file_name(name) for name in NAMES if file_name(name) not in NAMES)]  # what others are stored as
    store = stored(tmp_path, *(a_rollout(name, reward=float(at)) for at, name in enumerate(names)))
    assert [trajectory.name for _, trajectory in store.trajectories()] == sorted(names)
    files = [path.name for path in (tmp_path / TRAJECTORIES).iterdir()]
    assert len(files) == len(names)
    assert len({name.casefold() for name in files}) == len(names), "not all systems tell capitals apart"
    assert all(len(name.encode()) < 150 and name.isascii() for name in files)
    assert not {name.partition(".")[0].lower() for name in files} & {"con", "nul", "aux", "prn"}
    assert [path.name for path in tmp_path.iterdir() if path.name not in (JOURNAL, TRAJECTORIES)] == []
    store.close()
    again = RolloutStore(tmp_path)
    assert [row["name"] for row in again.finished] == names
    again.close()


@pytest.mark.parametrize(
    "file",
    [
        *("../x.tt", "/etc/x.tt", "trajectories/../../x.tt", "trajectories/a/b.tt", "trajectories\\..\\x.tt", "x.tt"),
        *("trajectories/x", "trajectories/x\0.tt", "other/x.tt", 3, None, ["trajectories", "x.tt"]),
    ],
)
def test_a_journal_names_no_file_outside_of_its_folder(file: Any, tmp_path: Path) -> None:
    stored(tmp_path, a_rollout("one")).close()
    journal = tmp_path / JOURNAL
    lines = [json.loads(line) for line in journal.read_bytes().splitlines()]
    lines[1]["file"] = file
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    with pytest.warns(JournalWarning, match=r"line 2"):
        store = RolloutStore(tmp_path)
    assert (store.finished, store.unfinished) == ([], ["one"])
    store.close()


def test_links_are_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in (JOURNAL, TRAJECTORIES):
        folder = tmp_path / f"with {name}"
        folder.mkdir()
        (folder / name).symlink_to(elsewhere / name)
        with pytest.raises(InputError, match="is a link, and not followed"):
            RolloutStore(folder)
    assert not list(elsewhere.iterdir())
    store = stored(tmp_path / "run", a_rollout("one"))
    (path,) = (tmp_path / "run" / TRAJECTORIES).iterdir()
    path.rename(elsewhere / "one.tt")
    path.symlink_to(elsewhere / "one.tt")
    with pytest.raises(TrajectoryError, match="is a link"):
        list(store.samples())
    store.finish(a_rollout("one"))
    assert not path.is_symlink(), "a link in a file's place is replaced, and what it points to is left alone"
    store.close()


def test_a_file_with_another_rollout_in_it_is_refused(tmp_path: Path) -> None:
    store = stored(tmp_path, a_rollout("one"), a_rollout("two"))
    (tmp_path / TRAJECTORIES / "one.tt").replace(tmp_path / TRAJECTORIES / "two.tt")
    storage.save_trajectory(a_rollout("one").trajectory, tmp_path / TRAJECTORIES / "one.tt")
    with pytest.raises(TrajectoryError, match=r"two.tt holds rollout 'one', and the journal says 'two'"):
        list(store.samples())
    store.close()


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_everything_is_for_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    before = os.umask(0)
    try:
        folder = tmp_path / "runs" / "seven"
        check_run(folder, {"seed": 1})
        store = stored(folder, a_rollout("one"))
        store.keep(a_rollout("two"))
        store.write_rows()
        store.close()
        found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")]}
        names = {"seven", RUN, JOURNAL, TRAJECTORIES, "one.tt", "two.partial.tt", "rows.parquet"}
        assert found == {name: 0o700 if name in ("seven", TRAJECTORIES) else 0o600 for name in names}
        journal = folder / JOURNAL
        journal.chmod(0o644)
        RolloutStore(folder).close()
        assert stat.S_IMODE(journal.stat().st_mode) == 0o644, "what somebody has opened on purpose stays open"
    finally:
        os.umask(before)


@pytest.mark.parametrize("folder", [None, 3, "a\0b", b"x"])
def test_what_is_no_folder_is_refused(folder: Any) -> None:
    with pytest.raises(InputError, match="needs the path of a folder"):
        RolloutStore(folder)


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    store = stored(tmp_path, a_rollout("one"))
    with pytest.raises(InputError, match="another process writes"):
        RolloutStore(tmp_path)
    with pytest.raises(InputError, match="another process writes"):
        discard_run(tmp_path)
    store.close()
    discard_run(tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_ended_badly_can_be_run_again(tmp_path: Path) -> None:
    store = stored(tmp_path, a_rollout("good"), a_rollout("bad", None, End.ENGINE))
    assert store.run_again(["engine"]) == ["bad"]
    store.close()
    store = RolloutStore(tmp_path)
    assert [row["name"] for row in store.finished] == ["good"]
    store.finish(a_rollout("bad", 0.5))
    assert [row["metrics"]["reward"] for row in store.finished] == [1.0, 0.5]
    store.close()


def test_other_settings_are_refused_by_name_once_something_was_run(tmp_path: Path) -> None:
    check_run(tmp_path, {"sampling": {"temperature": 1.0}})
    check_run(tmp_path, {"sampling": {"temperature": 0.7}, "seed": 1})
    stored(tmp_path, a_rollout("one")).close()
    check_run(tmp_path, {"sampling": {"temperature": 0.7}, "seed": 1})
    with pytest.raises(InputError, match=r"sampling.temperature was 0.7 and is 1.0 now"):
        check_run(tmp_path, {"sampling": {"temperature": 1.0}, "seed": 1})
    with pytest.raises(InputError, match="seed was 1 and is null now"):
        check_run(tmp_path, {"sampling": {"temperature": 0.7}})
    (tmp_path / RUN).unlink()
    with pytest.raises(InputError, match=r"no run.json"):
        check_run(tmp_path, {})
    (tmp_path / "mine.txt").write_text("kept", encoding="utf-8")
    discard_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_advantages_of_a_group_sum_to_nothing(tmp_path: Path) -> None:
    rewards = {"a": [1.0, 0.0, 0.0, 1.0], "b": [1.0, 1.0], "c": [3.0], "d": [0.5, None, 2.5]}
    store = stored(
        tmp_path, *(a_rollout(f"{g}{at}", one, group=g) for g, all_ in rewards.items() for at, one in enumerate(all_))
    )
    found = group_advantages(store.finished)
    assert "d1" not in found, "no reward, no advantage"
    for group in rewards:
        assert sum(value for name, value in found.items() if name[0] == group) == pytest.approx(0, abs=1e-9)
    assert found["a0"] == pytest.approx(0.5 / np.std([1, 0, 0, 1], ddof=1), rel=1e-5)
    assert found["b0"] == found["c0"] == 0
    by_name = {sample.name: sample for sample in store.samples(advantages="group")}
    advantages = by_name["a0"].advantages
    assert advantages is not None
    assert advantages.tolist() == pytest.approx([0, 0, 0, found["a0"], found["a0"]])
    assert by_name["d1"].advantages is None
    store.close()


def test_a_group_that_is_none_is_no_group(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    store = stored(tmp_path, *(a_rollout(f"q{at}", float(at), group=None) for at in range(3)))
    assert group_advantages(store.finished) == {"q0": 0, "q1": 0, "q2": 0}, "each is alone"
    store.write_rows()
    assert read_metadata(tmp_path / ROWS)["groups"] == {name: [name] for name in ("q0", "q1", "q2")}
    store.close()


# -- the process is killed

TASKS = [Task([{"role": "user", "content": f"Question {number}?"}], name=f"q{number}") for number in range(6)]


def run_all(folder: Path, kill_after: int | None = None) -> RolloutStore:
    """Twelve rollouts whose answers depend on their seeds; after so many, says so and waits to be killed."""
    renderer = create_renderer(POCKET)
    (stop, *_) = renderer.get_stop_token_ids()

    def script(_: Any, sampling: SamplingParams) -> list[int]:
        return [*np.random.default_rng(sampling.seed).integers(300, 4000, 20).tolist(), stop]

    asked = 0

    async def latency(_: int) -> None:
        nonlocal asked
        asked += 1
        if kill_after is not None and asked > kill_after + 1:
            await asyncio.Event().wait()  # under way for good
        await asyncio.sleep(0)

    engine = ScriptedEngine(script, vocab_size=renderer.tokenizer.vocabulary.size, latency=latency)
    store = RolloutStore(folder)
    count = 0

    def done(_: Rollout) -> None:
        nonlocal count
        count += 1
        if count == kill_after:
            print("ready", flush=True)
            sys.stdin.read()

    asyncio.run(run_rollouts(Agent(engine, renderer), grouped(TASKS, 2), concurrency=4, store=store, seed=3, done=done))
    return store


def test_a_killed_process_leaves_finished_rollouts_whole_and_the_rest_is_run_again(tmp_path: Path) -> None:
    program = f"from tests.rollout.test_store import *; run_all(Path({str(tmp_path / 'killed')!r}), 3)"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    store = RolloutStore(tmp_path / "killed")
    finished = {row["name"] for row in store.finished}
    assert 3 <= len(finished) < 12
    assert store.unfinished, "some were under way"
    assert finished.isdisjoint(store.unfinished)
    for row, trajectory in store.trajectories():
        check_trajectory(trajectory)
        assert trajectory.num_sampled == row["metrics"]["sampled"]
    store.close()

    resumed, whole = run_all(tmp_path / "killed"), run_all(tmp_path / "whole")
    assert not resumed.unfinished
    ids = [
        {row["name"]: trajectory.stream().tolist() for row, trajectory in one.trajectories()}
        for one in (resumed, whole)
    ]
    assert len(ids[0]) == 12
    assert ids[0] == ids[1], "as if nothing had happened"
    started = [json.loads(line) for line in (tmp_path / "killed" / JOURNAL).read_bytes().splitlines()]
    assert sum(row["event"] == "finished" for row in started) == 12, "nothing finished was run again"
    resumed.close()
    whole.close()


def test_a_trajectory_that_was_cut_off_is_an_error_and_no_row(tmp_path: Path) -> None:
    store = stored(tmp_path, a_rollout("one"))
    (path,) = (tmp_path / TRAJECTORIES).iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    assert storage.load_trajectory(path).truncated
    with pytest.raises(Exception, match=r"one.tt"):
        list(store.samples())
    store.close()
