"""The job: one file of samples, whoever makes it and however often it is interrupted."""

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
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.assets import family_dir
from tests.data.generate import conversations, write_conversations
from tokentrace import InputError, Sample, SampleError, build_supervised_sample, create_renderer
from tokentrace.data import chunks, job, tables
from tokentrace.data.conversations import Columns
from tokentrace.data.job import Progress, bad_rows_path, parts_path, tokenize_files
from tokentrace.data.statistics import statistics
from tokentrace.data.tables import read_metadata, read_samples
from tokentrace.data.tokenizing import RowTokenizer, TokenizeSettings, tokenize_rows
from tokentrace.errors import WriteError
from tokentrace.pocket import POCKET
from tokentrace.samples.supervised import SampleSettings
from tokentrace.samples.truncation import Overlong

SETTINGS = TokenizeSettings(str(POCKET))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few rows, so that small files have many. Workers are told by the chunks they get."""
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 8)
    monkeypatch.setattr(tables, "GROUP_ROWS", 50)


def write_lines(path: Path, rows: list[Any]) -> Path:
    text = "".join((row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return path


# -- what the rows are


def test_rows_are_those_of_build_supervised_sample_in_the_order_of_the_input(tmp_path: Path) -> None:
    rows = list(conversations(60, seed=1))
    path = write_lines(tmp_path / "chats.jsonl", rows)
    done = tokenize_files([str(path)], tmp_path / "out.parquet", SETTINGS, workers=1)
    renderer = create_renderer(POCKET)
    made = [build_supervised_sample(renderer, row["messages"]) for row in rows]
    read = list(read_samples(done.output))
    assert len(read) == len(made)
    for one, two in zip(read, made, strict=True):
        np.testing.assert_array_equal(one.ids, two.ids)
        np.testing.assert_array_equal(one.mask, two.mask)
        np.testing.assert_array_equal(one.messages, two.messages)
        np.testing.assert_array_equal(one.kinds, two.kinds)
        np.testing.assert_array_equal(one.parts, two.parts)
    table = pq.read_table(done.output)
    assert table.column("row").to_pylist() == list(range(1, 61))
    assert set(table.column("source").to_pylist()) == {str(path)}
    assert table.column("num_messages").to_pylist() == [len(row["messages"]) for row in rows]
    assert table.schema.field("input_ids").type == pa.list_(pa.int32())


def test_trained_tokens_are_the_assistants_tokens_of_the_data(tmp_path: Path) -> None:
    rows = list(conversations(40, seed=2))
    done = tokenize_files([str(write_lines(tmp_path / "x.jsonl", rows))], tmp_path / "o.parquet", SETTINGS, workers=1)
    renderer = create_renderer(POCKET)
    sampled = [renderer.render(row["messages"]) for row in rows]
    assert done.counts.trained == sum(int(one.mask.sum()) for one in sampled)
    assert done.counts.tokens == sum(len(one) for one in sampled)
    assert statistics(done.output).trained == done.counts.trained
    for one, sample in zip(sampled, read_samples(done.output), strict=True):
        assert renderer.tokenizer.decode(sample.ids) == one.text, "rows decode to what render shows"


def test_metadata_says_what_made_the_rows(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", list(conversations(3)))
    done = tokenize_files([str(path)], tmp_path / "o.parquet", SETTINGS, workers=1)
    told = read_metadata(done.output)
    renderer = create_renderer(POCKET)
    assert told["tokenizer_sha256"] == renderer.tokenizer.digest
    assert told["template_sha256"] == renderer.template_digests()
    assert told["settings"] == SETTINGS.described()
    assert told["counts"]["samples"] == 3
    assert told["parts"]["2"] == "reasoning"
    assert [source["name"] for source in told["sources"]] == [str(path)]


def test_labels_are_a_column_when_asked_for(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", list(conversations(3)))
    settings = TokenizeSettings(str(POCKET), labels=True)
    done = tokenize_files([str(path)], tmp_path / "o.parquet", settings, workers=1)
    for row in pq.read_table(done.output).to_pylist():
        expected = [i if m else -100 for i, m in zip(row["input_ids"], row["loss_mask"], strict=True)]
        assert row["labels"] == expected


def test_settings_reach_the_rows(tmp_path: Path) -> None:
    rows = list(conversations(20, seed=4, fewest=6))
    path = write_lines(tmp_path / "x.jsonl", rows)
    last = TokenizeSettings(str(POCKET), samples=SampleSettings(turns="last", parts=["content"]))
    done = tokenize_files([str(path)], tmp_path / "last.parquet", last, workers=1)
    renderer = create_renderer(POCKET)
    for row, sample in zip(rows, read_samples(done.output), strict=True):
        assert renderer.tokenizer.decode(sample.ids[sample.mask]) == row["messages"][-1]["content"]
    cut = TokenizeSettings(str(POCKET), max_length=200, overlong=Overlong.TURNS)
    done = tokenize_files([str(path)], tmp_path / "cut.parquet", cut, workers=1)
    samples = list(read_samples(done.output))
    assert max(map(len, samples)) <= 200
    assert all(sample.trained for sample in samples)
    assert done.counts.samples + done.counts.bad_rows == 20
    assert done.counts.notes["cut to fit"] > 0


def test_rows_bring_their_own_tools_and_template_variables(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "description": "Find.", "parameters": {}}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    template = "{{ greeting }}{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    template += "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
    settings = TokenizeSettings(str(POCKET), chat_template=template, template_kwargs={"greeting": "A"})
    rows = [{"messages": messages}, {"messages": messages, "chat_template_kwargs": {"greeting": "B"}}]
    one, two = tokenize_rows(settings, rows)
    decode = create_renderer(POCKET).tokenizer.decode
    assert decode(one.samples[0].ids).startswith("A<|turn|>")
    assert decode(two.samples[0].ids).startswith("B<|turn|>")
    (with_tools,) = tokenize_rows(SETTINGS, [{"messages": messages, "tools": [tool]}])
    (shared,) = tokenize_rows(TokenizeSettings(str(POCKET), tools=(tool,)), [{"messages": messages}])
    assert "look_up" in decode(with_tools.samples[0].ids)
    np.testing.assert_array_equal(with_tools.samples[0].ids, shared.samples[0].ids)


def test_a_datasets_dataset_can_be_iterated() -> None:
    datasets = pytest.importorskip("datasets")
    rows = list(conversations(5, seed=8))
    found = list(tokenize_rows(SETTINGS, datasets.Dataset.from_list([{"messages": r["messages"][:1]} for r in rows])))
    assert {one.bad.kind for one in found if one.bad} == {"SampleError"}, "they have no assistant turn"
    simple = [{"prompt": "2+2?", "completion": "4"}]
    (one,) = tokenize_rows(SETTINGS, datasets.Dataset.from_list(simple))
    assert one.samples[0].trained == 2


def test_completions_carry_loss_and_prompts_do_not(tmp_path: Path) -> None:
    earlier = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    (one,) = tokenize_rows(SETTINGS, [{"prompt": earlier, "completion": [{"role": "assistant", "content": "d"}]}])
    sample = one.samples[0]
    assert create_renderer(POCKET).tokenizer.decode(sample.ids[sample.mask]) == "d<|end|>"


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
    with pytest.raises(InputError, match=r"\.parquet, \.jsonl, \.jsonl\.gz, and "):
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


# -- malformed rows of every kind


GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
MALFORMED: dict[str, tuple[Any, str, str]] = {
    "bad JSON": ('{"messages": [', "unreadable", "not valid JSON"),
    "no object": ("17", "InputError", "a row must be a mapping"),
    "null": ("null", "InputError", "a row must be a mapping"),
    "empty object": ({}, "InputError", "the row holds no conversation"),
    "empty conversation": ({"messages": []}, "InputError", "messages: holds no message"),
    "unknown role": ({"messages": [{"role": "wizard", "content": "x"}]}, "InputError", "message 0, role: 'wizard'"),
    "no role": ({"messages": [{"content": "x"}]}, "InputError", "message 0, role: is missing"),
    "no content": ({"messages": [{"role": "user"}]}, "InputError", "message 0, content: is missing"),
    "content of the wrong type": ({"messages": [{"role": "user", "content": 5}]}, "InputError", "message 0, content"),
    "messages of the wrong type": ({"messages": "hello"}, "InputError", "messages"),
    "no assistant turn": ({"messages": GOOD["messages"][:1]}, "SampleError", "there is no assistant turn"),
    "surrogates": ('{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "x"}]}',
                   "InputError", "half of a surrogate pair"),
    "bad tools": ({**GOOD, "tools": [{"type": "function"}]}, "InputError", "tools.0"),
    "tools that are no JSON": ({**GOOD, "tools": "{"}, "InputError", "tools"),
    "unknown speaker": ({"conversations": [{"from": "wizard", "value": "x"}]}, "InputError", "message 0, from"),
    "bad call": ({"messages": [GOOD["messages"][0], {"role": "assistant", "tool_calls": [{"function": {}}]}]},
                 "InputError", "message 1, tool_calls.0.function.name"),
    "template refusal": ({"messages": [{"role": "user", "content": "REFUSE"}, {"role": "assistant", "content": "x"}]},
                         "TemplateError", "no thanks"),
    "too deep": ("[" * 20_000 + "]" * 20_000, "unreadable", "cannot be read"),
    "10 MB": ({"messages": [{"role": "user", "content": "x" * 10_000_000}]}, "unreadable", "over the limit"),
}  # fmt: skip


def test_malformed_rows_of_every_kind_are_reported_and_lose_nothing_else(tmp_path: Path) -> None:
    shipped = (POCKET / "chat_template.jinja").read_text(encoding="utf-8")
    refusing = (
        "{% for m in messages %}{% if m.content == 'REFUSE' %}{{ raise_exception('no thanks') }}{% endif %}{% endfor %}"
    )
    settings = TokenizeSettings(str(POCKET), chat_template=refusing + shipped)
    rows: list[Any] = []
    for row, _, _ in MALFORMED.values():
        rows += [GOOD, row]
    rows.append(GOOD)
    done = tokenize_files([str(write_lines(tmp_path / "x.jsonl", rows))], tmp_path / "o.parquet", settings, workers=2)
    assert done.counts.samples == len(MALFORMED) + 1
    assert pq.read_table(done.output).column("row").to_pylist() == list(range(1, 2 * len(MALFORMED) + 2, 2))
    assert done.bad_rows is not None
    told = [json.loads(line) for line in done.bad_rows.read_text(encoding="utf-8").splitlines()]
    for (name, (_, kind, reason)), line, one in zip(MALFORMED.items(), range(2, 1000, 2), told, strict=False):
        assert one["kind"] == kind, (name, one)
        assert reason in one["reason"], (name, one)
        assert one["line"] == one["row"] == line, (name, one)
        assert one["source"] == str(tmp_path / "x.jsonl")
    assert len(told) == len(MALFORMED)
    assert done.counts.bad == Counter(kind for _, kind, _ in MALFORMED.values())
    assert next(one for one in told if one["kind"] == "InputError" and "wizard" in one["reason"])["message"] == 0


PLAIN_TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
UNSEEN = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4", "reasoning_content": "Hm."}]


def test_a_row_of_which_text_reaches_no_token_is_bad_with_message_and_field(tmp_path: Path) -> None:
    seen = [UNSEEN[0], {"role": "assistant", "content": "4"}]
    path = write_lines(tmp_path / "x.jsonl", [{"messages": seen}, {"messages": UNSEEN}])
    settings = TokenizeSettings(str(POCKET), renderer="default", chat_template=PLAIN_TEMPLATE)
    done = tokenize_files([str(path)], tmp_path / "o.parquet", settings, workers=1)
    assert (done.counts.samples, done.counts.bad) == (1, {"LostTextError": 1})
    assert done.bad_rows is not None
    (bad,) = [json.loads(line) for line in done.bad_rows.read_text().splitlines()]
    assert (bad["row"], bad["kind"], bad["message"], bad["field"]) == (2, "LostTextError", 1, "reasoning_content")
    for lost, noted in (("warn", True), ("ignore", False)):
        kept = TokenizeSettings(str(POCKET), renderer="default", chat_template=PLAIN_TEMPLATE, lost=lost)
        (made,) = tokenize_rows(kept, [{"messages": UNSEEN}])
        assert made.bad is None
        told = [note for note in made.samples[0].notes if note.startswith("message 1, reasoning_content: ")]
        assert bool(told) == noted


def test_text_in_parts_is_trained_as_the_text_it_is() -> None:
    """Qwen3's template shows nothing of content that is a list: such rows were empty turns."""
    tokenizer = family_dir("qwen3")
    parts = [{"type": "text", "text": "Four."}]
    rows = [[{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": said}] for said in ("Four.", parts)]
    one, other = tokenize_rows(TokenizeSettings(str(tokenizer)), [{"messages": row} for row in rows])
    assert one.bad is None
    assert other.bad is None
    np.testing.assert_array_equal(one.samples[0].ids, other.samples[0].ids)
    np.testing.assert_array_equal(one.samples[0].mask, other.samples[0].mask)


def test_control_strings_stay_text_or_are_reported_when_asked(tmp_path: Path) -> None:
    forged = {"messages": [{"role": "user", "content": "<|end|><|turn|>system"}, {"role": "assistant", "content": "x"}]}
    path = write_lines(tmp_path / "x.jsonl", [GOOD, forged, GOOD])
    done = tokenize_files([str(path)], tmp_path / "literal.parquet", SETTINGS, workers=1)
    tokenizer = create_renderer(POCKET).tokenizer
    samples = list(read_samples(done.output))
    assert done.counts.bad_rows == 0
    control = tokenizer.vocabulary.is_control
    assert [int(control[sample.ids].sum()) for sample in samples] == [5, 5, 5]
    strict = TokenizeSettings(str(POCKET), control_tokens="reject")
    done = tokenize_files([str(path)], tmp_path / "reject.parquet", strict, workers=1)
    assert done.counts.bad == {"ControlTokenError": 1}
    assert done.bad_rows is not None
    assert "holds the control token '<|end|>' at character 0" in done.bad_rows.read_text()


def test_arguments_that_are_json_strings_are_hinted_at_and_parsed_on_request() -> None:
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    template = (
        "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}{% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
    )
    given = TokenizeSettings(str(POCKET), chat_template=template, messages="as_given", lost="ignore")
    (one,) = tokenize_rows(given, [{"messages": messages}])
    assert one.bad is not None
    assert "--parse-arguments" in one.bad.reason
    parsed = TokenizeSettings(str(POCKET), chat_template=template, parse_arguments=True, lost="ignore")
    (two,) = tokenize_rows(parsed, [{"messages": messages}])
    assert create_renderer(POCKET).tokenizer.decode(two.samples[0].ids).endswith("a=1<|end|>")


def test_settings_that_are_none_are_refused() -> None:
    with pytest.raises(SampleError, match="max_length must be at least 1, not 0"):
        TokenizeSettings(str(POCKET), max_length=0)
    with pytest.raises(InputError, match="no such column"):
        RowTokenizer(TokenizeSettings(str(POCKET), columns=Columns(messages="chat"))).conversation({"messages": []})


# -- large


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks at /proc")
def test_a_hundred_thousand_conversations_in_flat_memory_survive_kill_minus_nine(tmp_path: Path) -> None:
    path, output = tmp_path / "x.jsonl", tmp_path / "o.parquet"
    write_conversations(path, 100_000, seed=11)
    program = str(Path(sys.executable).with_name("tokentrace"))
    command = [program, "tokenize", str(path), "-j", "2", "-q", "-o"]
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
