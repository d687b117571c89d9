"""The file of a job: the same whoever makes it, whole or not there, gone on with after an interruption."""

from __future__ import annotations

import functools
import gzip
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.generate import conversations, write_conversations
from tests.data.job import SETTINGS, write_lines
from tokentrace import InputError, Sample
from tokentrace.data import chunks, job, tables, writers
from tokentrace.data.job import Progress, bad_rows_path, parts_path, tokenize_files
from tokentrace.data.statistics import statistics
from tokentrace.data.tables import read_metadata, read_samples
from tokentrace.data.tokenizing import TokenizeSettings
from tokentrace.errors import SampleError, WriteError
from tokentrace.pocket import POCKET
from tokentrace.samples.supervised import SampleSettings


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few rows, so that small files have many. Workers are told by the chunks they get."""
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 8)
    monkeypatch.setattr(writers, "GROUP_ROWS", 50)


# -- the same file, whoever makes it


@pytest.mark.usefixtures("small_chunks")
def test_the_file_is_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    rows: list[Any] = list(conversations(150, seed=5))
    rows[40:40] = ["{", {"messages": []}]
    path = write_lines(tmp_path / "x.jsonl", rows)
    outputs = []
    for workers in (1, 2, 3):
        done = tokenize_files([str(path)], tmp_path / f"{workers}.parquet", SETTINGS, workers=workers)
        assert done.chunks > 10
        assert done.bad_rows is not None
        outputs.append((done.output.read_bytes(), done.bad_rows.read_bytes(), done.counts.described()))
    assert outputs[0] == outputs[1] == outputs[2]
    assert not list(tmp_path.glob("*.parts"))
    assert not list(tmp_path.glob("*.unfinished"))


@pytest.mark.usefixtures("small_chunks")
def test_several_inputs_are_one_file_in_their_order(tmp_path: Path) -> None:
    rows = list(conversations(30, seed=6))
    one = write_lines(tmp_path / "b.jsonl", rows[:10])
    (tmp_path / "a.json").write_text(json.dumps(rows[10:20]), encoding="utf-8")
    pq.write_table(
        pa.Table.from_pylist([{"messages": json.dumps(row["messages"])} for row in rows[20:]]), tmp_path / "c.parquet"
    )
    inputs = [str(one), str(tmp_path / "a.json"), str(tmp_path / "c.parquet")]
    done = tokenize_files(inputs, tmp_path / "o.parquet", SETTINGS, workers=2)
    whole = tokenize_files(
        [str(write_lines(tmp_path / "all.jsonl", rows))], tmp_path / "all.parquet", SETTINGS, workers=1
    )
    ids = pq.read_table(done.output).column("input_ids").to_pylist()
    assert ids == pq.read_table(whole.output).column("input_ids").to_pylist()


# -- interrupted


class Stop(Exception):  # noqa: N818
    """Raised in the middle of a run."""


@pytest.mark.usefixtures("small_chunks")
def test_a_run_that_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [*conversations(100, seed=7), "nonsense"])
    whole = tokenize_files([str(path)], tmp_path / "whole.parquet", SETTINGS, workers=1)
    seen: list[Progress] = []

    def stop(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == 5:
            raise Stop

    output = tmp_path / "o.parquet"
    with pytest.raises(Stop):
        tokenize_files([str(path)], output, SETTINGS, workers=1, progress=stop)
    assert not output.exists()
    assert len(list(parts_path(output).glob("*.arrow"))) == 5
    reports: list[Progress] = []
    done = tokenize_files([str(path)], output, SETTINGS, workers=2, progress=reports.append)
    assert done.resumed_chunks == 5
    assert reports[-1].done == reports[-1].total
    assert output.read_bytes() == whole.output.read_bytes()
    assert bad_rows_path(output).read_bytes() == bad_rows_path(whole.output).read_bytes()
    assert done.counts.described() == whole.counts.described()


@pytest.mark.usefixtures("small_chunks")
def test_parts_of_another_job_are_refused_by_name(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", list(conversations(40, seed=7)))
    output = tmp_path / "o.parquet"

    def stop(_: Progress) -> None:
        raise Stop

    with pytest.raises(Stop):
        tokenize_files([str(path)], output, SETTINGS, workers=1, progress=stop)
    other = TokenizeSettings(str(POCKET), samples=SampleSettings(turns="last"))
    with pytest.raises(InputError, match=r"other input or settings \(settings\.turns\): restart"):
        tokenize_files([str(path)], output, other, workers=1)
    write_lines(path, list(conversations(41, seed=7)))
    with pytest.raises(InputError, match=r"\(sources\)"):
        tokenize_files([str(path)], output, SETTINGS, workers=1)
    assert tokenize_files([str(path)], output, other, workers=1, restart=True).counts.samples == 41


@pytest.mark.usefixtures("small_chunks")
def test_a_run_goes_on_by_what_the_input_says_and_not_by_its_time(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", list(conversations(40, seed=7)))
    output = tmp_path / "o.parquet"

    def stop(_: Progress) -> None:
        raise Stop

    with pytest.raises(Stop):
        tokenize_files([str(path)], output, SETTINGS, workers=1, progress=stop)
    about, data = path.stat(), path.read_bytes()
    path.write_bytes(data.replace(b"river", b"RIVER"))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert path.stat().st_size == about.st_size
    with pytest.raises(InputError, match=r"other input or settings \(sources\)"):
        tokenize_files([str(path)], output, SETTINGS, workers=1)
    path.write_bytes(data)
    os.utime(path, ns=(5, 5))
    assert tokenize_files([str(path)], output, SETTINGS, workers=1).resumed_chunks == 1


@pytest.mark.usefixtures("small_chunks")
def test_an_input_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", list(conversations(40, seed=7)))
    data = path.read_bytes()

    def change(_: Progress) -> None:
        path.write_bytes(data.replace(b"river", b"RIVER"))

    with pytest.raises(InputError, match="changed while it was read"):
        tokenize_files([str(path)], tmp_path / "o.parquet", SETTINGS, workers=1, progress=change)
    assert not (tmp_path / "o.parquet").exists()


def test_reading_a_long_input_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_TELL", 1000)
    path = write_lines(tmp_path / "x.jsonl", list(conversations(40, seed=7)))
    seen: list[Progress] = []
    tokenize_files([str(path)], tmp_path / "o.parquet", SETTINGS, workers=1, progress=seen.append)
    read = [one for one in seen if one.stage is job.Stage.READING]
    assert read
    assert (read[-1].done, read[-1].total) == (path.stat().st_size, path.stat().st_size)
    assert seen[-1].stage is job.Stage.TOKENIZING


# -- JSON Lines


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
@pytest.mark.usefixtures("small_chunks")
def test_lines_are_the_rows_of_parquet(suffix: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [*conversations(30, seed=7), "nonsense"])
    settings = TokenizeSettings(str(POCKET), labels=True)
    table = tokenize_files([str(path)], tmp_path / "rows.parquet", settings, workers=1)
    output = tmp_path / f"lines{suffix}"
    done = tokenize_files([str(path)], output, settings, workers=1)
    opened = gzip.decompress(output.read_bytes()) if suffix.endswith(".gz") else output.read_bytes()
    rows = [json.loads(line) for line in opened.decode().splitlines()]
    assert rows == pq.read_table(table.output).to_pylist()
    assert read_metadata(output) == read_metadata(table.output)
    assert statistics(output) == statistics(table.output)
    for one, two in zip(read_samples(output), read_samples(table.output), strict=True):
        np.testing.assert_array_equal(one.ids, two.ids)
        np.testing.assert_array_equal(one.mask, two.mask)
        np.testing.assert_array_equal(one.parts, two.parts)
        assert (one.notes, one.name) == (two.notes, two.name)
    assert done.bad_rows == tmp_path / "lines.bad.jsonl"
    assert done.bad_rows.read_bytes() == bad_rows_path(table.output).read_bytes()
    from datasets import load_dataset

    loaded = load_dataset("json", data_files=str(output), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded["input_ids"][3] == rows[3]["input_ids"]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
@pytest.mark.usefixtures("small_chunks")
def test_lines_are_gone_on_with_and_the_same_for_any_number_of_workers(suffix: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", list(conversations(60, seed=7)))
    whole = tokenize_files([str(path)], tmp_path / f"whole{suffix}", SETTINGS, workers=1)
    seen: list[Progress] = []

    def stop(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == 3:
            raise Stop

    output = tmp_path / f"o{suffix}"
    with pytest.raises(Stop):
        tokenize_files([str(path)], output, SETTINGS, workers=1, progress=stop)
    assert not output.exists()
    done = tokenize_files([str(path)], output, SETTINGS, workers=2)
    assert done.resumed_chunks == 3
    assert output.read_bytes() == whole.output.read_bytes()
    assert sorted(one.name for one in tmp_path.iterdir() if one.name.startswith("o.")) == [
        f"o{suffix}",
        f"o{suffix}.metadata",
    ]


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


@pytest.mark.parametrize("name", ["rows.json", "rows.csv", "rows", "rows.gz", "rows.parquet.gz", "rows.jsonl.zst"])
def test_a_name_that_says_no_format_is_refused(name: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", list(conversations(3)))
    with pytest.raises(InputError, match=r"\.parquet, \.arrow, \.jsonl, \.jsonl\.gz, and "):
        tokenize_files([str(path)], tmp_path / name, SETTINGS, workers=1)
    with pytest.raises(InputError, match="none of these"):
        tables.write_samples(tmp_path / name, [])
    assert [one.name for one in tmp_path.iterdir()] == ["x.jsonl"]


# -- no room


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".jsonl.gz"])
@pytest.mark.usefixtures("small_chunks")
def test_a_full_disk_names_the_file_and_what_is_safe(suffix: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", list(conversations(40, seed=7)))
    output = tmp_path / f"o{suffix}"
    (tmp_path / f"o{suffix}.unfinished").symlink_to(FULL)
    with pytest.raises(WriteError, match=r"No space left on device; 40 rows are safe in .*run the same again") as full:
        tokenize_files([str(path)], output, SETTINGS, workers=1)
    assert (full.value.path, full.value.rows) == (str(output), 40)
    assert not output.exists()
    done = tokenize_files([str(path)], output, SETTINGS, workers=1)
    assert done.resumed_chunks == done.chunks == 5
    assert len(list(read_samples(output))) == 40


LIMITED = """
import resource, sys
from tokentrace.data import chunks
chunks.CHUNK_ROWS = 8
from tokentrace.data.job import tokenize_files
from tokentrace.data.tokenizing import TokenizeSettings
from tokentrace.errors import WriteError
if __name__ == "__main__":
    def limit(progress):
        if progress.counts.rows == 16:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    try:
        tokenize_files([sys.argv[1]], sys.argv[2], TokenizeSettings(sys.argv[3]), workers=1, progress=limit)
    except WriteError as error:
        print(error.rows, error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits of files are POSIX's")
@pytest.mark.usefixtures("small_chunks")
def test_a_part_that_cannot_be_written_keeps_those_that_were(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", list(conversations(40, seed=7)))
    script, output = tmp_path / "run.py", tmp_path / "o.parquet"
    script.write_text(LIMITED)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), str(path), str(output), str(POCKET)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert done.stdout.startswith("16 "), done.stderr
    assert f"{parts_path(output) / '00000002.arrow'} cannot be written: File too large; 16 rows are safe" in done.stdout
    assert not list(parts_path(output).glob("*.draft"))
    assert tokenize_files([str(path)], output, SETTINGS, workers=1).resumed_chunks == 2


def test_an_error_of_writing_comes_from_a_worker_as_it_is(tmp_path: Path) -> None:
    error = pickle.loads(pickle.dumps(WriteError("no room", path="/x/y", rows=3)))
    assert (str(error), error.path, error.rows) == ("/x/y cannot be written: no room", "/x/y", 3)


def test_an_output_that_is_there_is_kept_unless_told(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", list(conversations(3)))
    output = tmp_path / "o.parquet"
    output.write_bytes(b"precious")
    with pytest.raises(InputError, match="there already"):
        tokenize_files([str(path)], output, SETTINGS, workers=1)
    assert output.read_bytes() == b"precious"
    tokenize_files([str(path)], output, SETTINGS, workers=1, overwrite=True)
    assert len(list(read_samples(output))) == 3


def test_errors_before_any_row_leave_nothing_behind(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", list(conversations(3)))
    with pytest.raises(InputError, match="no file or folder"):
        tokenize_files(["./nothing.jsonl"], tmp_path / "o.parquet", SETTINGS)
    with pytest.raises(InputError, match="no folder"):
        tokenize_files([str(path)], tmp_path / "no" / "o.parquet", SETTINGS)
    (tmp_path / "empty.jsonl").write_bytes(b"\n\n")
    with pytest.raises(InputError, match="no rows"):
        tokenize_files([str(tmp_path / "empty.jsonl")], tmp_path / "o.parquet", SETTINGS, workers=1)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["empty.jsonl", "x.jsonl"]


def test_two_runs_do_not_write_the_same_file(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    path = write_lines(tmp_path / "x.jsonl", list(conversations(3)))
    parts = parts_path(tmp_path / "o.parquet")
    parts.mkdir()
    with (parts / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another run is writing"):
            tokenize_files([str(path)], tmp_path / "o.parquet", SETTINGS, workers=1)
    assert tokenize_files([str(path)], tmp_path / "o.parquet", SETTINGS, workers=1).counts.samples == 3


KILLED = """
import sys
from tokentrace.data import chunks
chunks.CHUNK_ROWS = 8
from tokentrace.data.job import tokenize_files
from tokentrace.data.tokenizing import TokenizeSettings
if __name__ == "__main__":
    tokenize_files([sys.argv[1]], sys.argv[2], TokenizeSettings(sys.argv[3]), workers=2)
"""


def wait_for(condition: Any, what: str) -> None:
    for _ in range(6_000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError(f"{what} did not happen")


def has_parts(output: Path, count: int, process: subprocess.Popen[bytes]) -> bool:
    return len(list(parts_path(output).glob("*.arrow"))) >= count or process.poll() is not None


def children_of(pid: int) -> list[int]:
    """Processes whose parent is `pid`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                found.append(int(entry.name))
    return found


def all_gone(pids: list[int]) -> bool:
    return not any((Path("/proc") / str(pid)).exists() for pid in pids)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")
@pytest.mark.usefixtures("small_chunks")
def test_killed_in_the_middle_and_restarted_it_gives_the_identical_file(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    write_conversations(path, 600, seed=9)
    with path.open("a") as file:
        file.write("nonsense\n")
    whole = tokenize_files([str(path)], tmp_path / "whole.parquet", SETTINGS, workers=1)
    script, output = tmp_path / "run.py", tmp_path / "o.parquet"
    script.write_text(KILLED)
    for parts_done in (3, 20):
        process = subprocess.Popen([sys.executable, str(script), str(path), str(output), str(POCKET)])
        try:
            wait_for(functools.partial(has_parts, output, parts_done, process), "some parts")
            assert process.poll() is None, "it was done before it could be killed"
            workers = children_of(process.pid)
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        assert not output.exists()
        wait_for(functools.partial(all_gone, workers), "the end of the workers")
    done = tokenize_files([str(path)], output, SETTINGS, workers=2)
    assert done.resumed_chunks >= 20
    assert output.read_bytes() == whole.output.read_bytes()
    assert bad_rows_path(output).read_bytes() == bad_rows_path(whole.output).read_bytes()


def test_a_worker_that_dies_is_named_with_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokentrace.data import workers

    monkeypatch.setattr(chunks, "CHUNK_ROWS", 8)
    path = write_lines(tmp_path / "x.jsonl", list(conversations(40, seed=7)))
    give = workers._Worker.give

    def kill_then_give(self: Any, chunk: Any) -> None:
        if chunk is not None and chunk.first > 20:
            self.process.kill()
            self.process.join()
        give(self, chunk)

    monkeypatch.setattr(workers._Worker, "give", kill_then_give)
    with pytest.raises(SampleError, match=r"a worker died \(SIGKILL\) on rows \d+ to \d+ of .*x\.jsonl"):
        tokenize_files([str(path)], tmp_path / "o.parquet", SETTINGS, workers=2)
    monkeypatch.setattr(workers._Worker, "give", give)
    assert tokenize_files([str(path)], tmp_path / "o.parquet", SETTINGS, workers=2).counts.samples == 40


# -- large


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks at /proc")
def test_a_hundred_thousand_conversations_in_flat_memory_survive_kill_minus_nine(tmp_path: Path) -> None:
    path, output = tmp_path / "x.jsonl", tmp_path / "o.parquet"
    write_conversations(path, 100_000, seed=11)
    program = str(Path(sys.executable).with_name("tokentrace"))
    command = [program, "tokenize", str(path), "-t", str(POCKET), "-j", "2", "-q", "-o"]
    process = subprocess.Popen([*command, str(output)])
    memory: list[int] = []
    try:
        wait_for(lambda: len(list(parts_path(output).glob("*.arrow"))) >= 20, "a beginning")
        while len(list(parts_path(output).glob("*.arrow"))) < 200 and process.poll() is None:
            memory.append(sum(map(resident, [process.pid, *children_of(process.pid)])))
            time.sleep(0.5)
        assert process.poll() is None
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    early, late = memory[: len(memory) // 4], memory[-len(memory) // 4 :]
    assert max(late) < 1.2 * max(early), "memory does not grow with what is done"
    subprocess.run([*command, str(output)], check=True)
    whole = tmp_path / "whole.parquet"
    subprocess.run([*command, str(whole)], check=True)
    assert output.read_bytes() == whole.read_bytes()
    assert statistics(output).samples == 100_000


def resident(pid: int) -> int:
    """The memory of a process, in kilobytes."""
    try:
        status = (Path("/proc") / str(pid) / "status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")), 0)
