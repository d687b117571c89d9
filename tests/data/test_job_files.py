"""The file of a job: the same for any number of workers, whole or not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.generate import conversations, write_conversations
from tests.data.job import SETTINGS, write_lines
from tests.ray_cluster import children_of
from tokentrace import InputError, Sample, files
from tokentrace.data import sources, tables
from tokentrace.data.job import tokenize_files
from tokentrace.data.tables import read_samples
from tokentrace.data.tokenizing import Counts
from tokentrace.errors import WriteError
from tokentrace.pocket import POCKET


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a few rows, so that small files have many."""
    monkeypatch.setattr(sources, "BATCH_ROWS", 8)
    monkeypatch.setattr(tables, "GROUP_ROWS", 50)


# -- the same file, whoever makes it


@pytest.mark.usefixtures("small_batches")
def test_the_file_is_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    talks: list[Any] = list(conversations(150, seed=5))
    talks[40:40] = ["{", {"messages": []}]
    path = write_lines(tmp_path / "x.jsonl", talks)
    outputs = []
    for workers in (1, 3):
        done = tokenize_files([str(path)], tmp_path / f"{workers}.parquet", SETTINGS, workers=workers)
        assert done.bad_rows is not None
        outputs.append((done.output.read_bytes(), done.bad_rows.read_bytes(), done.counts.described()))
    assert outputs[0] == outputs[1]
    assert not list(tmp_path.glob("*.draft"))


# -- interrupted


class Stop(Exception):  # noqa: N818
    """Raised in the middle of a run."""


@pytest.mark.parametrize(("name", "workers"), [("o.parquet", 1), ("o.parquet", 2), ("o.jsonl", 1)])
@pytest.mark.usefixtures("small_batches")
def test_a_run_that_stops_early_leaves_everything_as_it_was(name: str, workers: int, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [*conversations(60, seed=7), "nonsense"])

    def stop(counts: Counts, *_: int) -> None:
        if counts.rows > 20:
            raise Stop

    def run(**options: Any) -> Any:
        return tokenize_files([str(path)], tmp_path / name, SETTINGS, workers=workers, **options)

    with pytest.raises(Stop):
        run(progress=stop)
    assert [one.name for one in tmp_path.iterdir()] == ["x.jsonl"]
    run()
    before = files_of(tmp_path)
    path.write_bytes(b"nonsense\n" + path.read_bytes())
    with pytest.raises(Stop):
        run(progress=stop, overwrite=True)
    assert files_of(tmp_path) == {**before, path: path.read_bytes()}


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- JSON Lines


def test_samples_of_trajectories_survive_lines(tmp_path: Path) -> None:
    sample = Sample(
        ids=np.asarray([1, 2, 3], np.int32),
        mask=np.asarray([False, True, True]),
        messages=np.asarray([0, 1, 1], np.int32),
        kinds=np.zeros(3, np.uint8),
        logprobs=np.asarray([np.nan, -0.1, -1e-7], np.float32),
        reward=0.5,
        branch=2,
        name="one",
    )
    tables.write_samples(tmp_path / "rows.jsonl", [sample])
    assert "NaN" not in (tmp_path / "rows.jsonl").read_text()
    (read,) = read_samples(tmp_path / "rows.jsonl")
    np.testing.assert_array_equal(read.logprobs, sample.logprobs)
    assert (read.reward, read.branch, read.name) == (0.5, 2, "one")
    endless = sample.replace(logprobs=np.asarray([np.nan, -np.inf, 0], np.float32))
    with pytest.raises(InputError, match="infinite"):
        tables.write_samples(tmp_path / "endless.jsonl", [endless])
    assert not list(tmp_path.glob("endless*"))


@pytest.mark.parametrize("name", ["rows.json", "rows", "rows.arrow", "rows.jsonl.gz"])
def test_a_name_that_says_no_format_is_refused(name: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", list(conversations(3)))
    with pytest.raises(InputError, match="is neither"):
        tokenize_files([str(path)], tmp_path / name, SETTINGS, workers=1)
    with pytest.raises(InputError, match="is neither"):
        tables.write_samples(tmp_path / name, [])
    assert [one.name for one in tmp_path.iterdir()] == ["x.jsonl"]


# -- no room


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.usefixtures("small_batches")
def test_a_full_disk_names_the_file(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "x.jsonl", list(conversations(40, seed=7)))
    output, draft = tmp_path / f"o{suffix}", tmp_path / "draft"
    draft.symlink_to(FULL)
    monkeypatch.setattr(files, "draft_path", lambda _: draft)
    with pytest.raises(WriteError, match="No space left on device") as full:
        tokenize_files([str(path)], output, SETTINGS, workers=1)
    assert full.value.path == str(output)
    assert [one.name for one in tmp_path.iterdir()] == ["x.jsonl"]


KILLED = """
import sys
from tokentrace.data import sources
sources.BATCH_ROWS = 8
from tokentrace.data.job import tokenize_files
from tokentrace.data.tokenizing import TokenizeSettings
def tell(counts, done, total):
    print(counts.rows, flush=True)
if __name__ == "__main__":
    tokenize_files([sys.argv[1]], sys.argv[2], TokenizeSettings(sys.argv[3]), workers=2, progress=tell)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")
def test_a_run_that_is_killed_leaves_no_output_and_no_workers(tmp_path: Path) -> None:
    path, output = tmp_path / "x.jsonl", tmp_path / "o.parquet"
    write_conversations(path, 600, seed=9)
    script = tmp_path / "run.py"
    script.write_text(KILLED)
    command = [sys.executable, str(script), str(path), str(output), str(POCKET)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            for _ in range(3):
                assert process.stdout.readline(), "it ended before it could be killed"
            workers = [pid for pid, _ in children_of(process.pid)]
            assert len(workers) >= 2
        finally:
            os.kill(process.pid, signal.SIGKILL)
    assert not output.exists()
    for _ in range(6_000):
        if not any((Path("/proc") / str(pid)).exists() for pid in workers):
            break
        time.sleep(0.01)
    else:
        pytest.fail("the workers did not end")
    done = tokenize_files([str(path)], output, SETTINGS, workers=1)
    assert done.counts.samples == len(list(read_samples(output))) == 600


# -- large


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks at /proc")
def test_a_hundred_thousand_conversations_in_flat_memory(tmp_path: Path) -> None:
    path, output = tmp_path / "x.jsonl", tmp_path / "o.parquet"
    write_conversations(path, 100_000, seed=11)
    memory: list[int] = []

    def measure(*_: Any) -> None:
        memory.append(sum(map(resident, [os.getpid(), *(pid for pid, _ in children_of(os.getpid()))])))

    done = tokenize_files([str(path)], output, SETTINGS, workers=2, progress=measure)
    early, late = memory[len(memory) // 8 : len(memory) // 4], memory[-len(memory) // 4 :]
    assert max(late) < 1.2 * max(early), "memory does not grow with what is done"
    assert done.counts.samples == len(done.sizes["tokens"]) == 100_000


def resident(pid: int) -> int:
    """The memory of a process, in kilobytes."""
    try:
        status = (Path("/proc") / str(pid) / "status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")), 0)
