"""The store on disk: finished rollouts are whole and unfinished ones are listed, however the process ends."""

import asyncio
import itertools
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rollout.support import RENDERER, SIZE
from tests.store.support import opened
from tests.trajectory.model import check_trajectory
from tokentrace import InputError, Trajectory
from tokentrace.engines.protocol import SamplingParams
from tokentrace.engines.scripted import ScriptedEngine
from tokentrace.gateway.rows import ExportFormat, export_rows
from tokentrace.rollout.batch import grouped, run_rollouts
from tokentrace.rollout.loop import Agent, End, Rollout, Task
from tokentrace.rollout.record import TurnMetrics
from tokentrace.rollout.store import RUN, STORE, RolloutStore, check_run, discard_run, group_advantages

ROOT = Path(__file__).parents[2]


def a_rollout(name: str, reward: float | None = 1.0, end: End = End.ANSWER, **metadata: Any) -> Rollout:
    trajectory = Trajectory(name=name, metadata=metadata)
    trajectory.begin([1, 2, 3], messages=1)
    trajectory.append_completion([7, 8], [-0.5, -0.25], finish_reason="stop", channels={"entropy": [1, 2]})
    task = Task([{"role": "user", "content": "?"}], name=name, metadata=metadata)
    messages = [*task.messages, {"role": "assistant", "content": "7"}]
    turn = TurnMetrics()
    return Rollout(task, trajectory, [], messages, end=end, reward=reward, per_turn=[turn])


def stored(folder: Path, *rollouts: Rollout) -> RolloutStore:
    store = RolloutStore(folder)
    for rollout in rollouts:
        store.start(rollout.task.name)
        store.finish(rollout)
    return store


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_files_are_private_to_their_owner_under_any_umask(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    before = os.umask(0)
    try:
        folder = tmp_path / "runs" / "seven"
        store = stored(folder, a_rollout("one"))
        check_run(folder, {"seed": 1})
        store.write_rows()
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")]}
        store.close()
        assert {"seven", RUN, STORE, "rows.parquet"} <= set(modes)
        assert all(mode == (0o700 if name == "seven" else 0o600) for name, mode in modes.items())
    finally:
        os.umask(before)


@pytest.mark.parametrize("folder", [None, 3, "a\0b", b"x"])
def test_values_that_are_no_folder_are_refused(folder: Any) -> None:
    with pytest.raises(InputError, match="needs the path of a folder"):
        RolloutStore(folder)


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    store = stored(tmp_path, a_rollout("one"))
    with pytest.raises(InputError, match="another process is writing"):
        RolloutStore(tmp_path)
    with pytest.raises(InputError, match="another process is writing"):
        discard_run(tmp_path)
    store.close()
    (tmp_path / "mine.txt").write_text("kept", encoding="utf-8")
    discard_run(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", "run.lock"]


def test_a_rollout_is_a_session_of_the_store(tmp_path: Path) -> None:
    stored(tmp_path, a_rollout("one", 0.5, color="red")).close()

    async def read() -> tuple[Any, list[Any], list[Any], bytes]:
        async with opened(str(tmp_path / STORE)) as store:
            turns = [turn async for turn in store.turns("one")]
            rows = [piece async for piece in export_rows(store, store.sessions(), ExportFormat.JSONL)]
            return await store.session("one"), turns, await store.labels("one"), b"".join(rows)

    info, turns, labels, row = asyncio.run(read())
    assert json.loads(json.loads(row)["channels"]) == {"entropy": [None, None, None, 1, 2]}
    assert (info.state, info.turns, info.sampled, info.metadata["color"]) == ("exported", 1, 2, "red")
    assert turns[0].info["reply"]["content"] == "7"
    assert [(label.name, label.value) for label in labels] == [("reward", 0.5)]


def test_advantages_of_a_group_sum_to_zero(tmp_path: Path) -> None:
    rewards = {"a": [1.0, 0.0, 0.0, 1.0], "b": [1.0, 1.0], "c": [3.0], "d": [0.5, None, 2.5]}
    store = stored(
        tmp_path, *(a_rollout(f"{g}{at}", one, group=g) for g, many in rewards.items() for at, one in enumerate(many))
    )
    values = group_advantages(store.finished).values
    assert "d1" not in values, "no reward, no advantage"
    for group in rewards:
        assert sum(value for name, value in values.items() if name[0] == group) == pytest.approx(0, abs=1e-9)
    assert values["a0"] == pytest.approx(0.5 / np.std([1, 0, 0, 1], ddof=1), rel=1e-5)
    assert values["b0"] == values["c0"] == 0
    by_name = {sample.name: sample for sample in store.samples(advantages="group")}
    advantages = by_name["a0"].advantages
    assert advantages is not None
    assert advantages.tolist() == pytest.approx([0, 0, 0, values["a0"], values["a0"]])
    assert by_name["d1"].advantages is None
    with pytest.raises(InputError, match="advantages are 'group' or None, not 'grop'"):
        list(store.samples(advantages="grop"))
    store.close()


# -- the process is killed

TASKS = [Task([{"role": "user", "content": f"Question {number}?"}], name=f"q{number}") for number in range(6)]


def run_all(folder: Path, kill_after: int | None = None) -> RolloutStore:
    """Run twelve rollouts whose answers depend on their seeds; after `kill_after`, print and wait to be killed."""
    (stop, *_) = RENDERER.get_stop_token_ids()
    requests, ended = itertools.count(), itertools.count(1)

    def script(_: Any, sampling: SamplingParams) -> list[int]:
        return [*np.random.default_rng(sampling.seed).integers(300, 4000, 20).tolist(), stop]

    async def latency(_: int) -> None:
        if kill_after is not None and next(requests) > kill_after:
            await asyncio.Event().wait()  # never finishes
        await asyncio.sleep(0)

    def done(_: Rollout) -> None:
        if next(ended) == kill_after:
            print("ready", flush=True)
            sys.stdin.read()

    engine, store = ScriptedEngine(script, vocab_size=SIZE, latency=latency), RolloutStore(folder)
    asyncio.run(run_rollouts(Agent(engine, RENDERER), grouped(TASKS, 2), concurrency=4, store=store, seed=3, done=done))
    return store


def test_a_killed_process_keeps_finished_rollouts_and_the_others_are_run_again(tmp_path: Path) -> None:
    program = f"from tests.rollout.test_store import *; run_all(Path({str(tmp_path / 'killed')!r}), 3)"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    store = RolloutStore(tmp_path / "killed")
    finished = {row["name"] for row in store.finished}
    assert 3 <= len(finished) < 12
    assert finished.isdisjoint(store.unfinished)
    for row, trajectory in store.trajectories():
        check_trajectory(trajectory)
        assert trajectory.num_sampled == row["metrics"]["sampled"]
    store.close()

    resumed, whole = run_all(tmp_path / "killed"), run_all(tmp_path / "whole")
    assert not resumed.unfinished
    streams = [{row["name"]: one.stream().tolist() for row, one in store.trajectories()} for store in (resumed, whole)]
    assert len(streams[0]) == 12
    assert streams[0] == streams[1], "as if nothing had happened"
    resumed.close()
    whole.close()
