"""The job on a real local Ray: the same bytes as without it, even if workers die."""

import gzip
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.generate import SETTINGS, conversations, write_lines
from tests.ray_cluster import children_of, local_ray
from tokentrace.data import job
from tokentrace.data.job import tokenize_files
from tokentrace.data.sources import Batch, Row
from tokentrace.data.tables import samples_table
from tokentrace.data.tokenizing import RowTokenizer, TokenizeSettings, tokenize_rows
from tokentrace.errors import InputError, SampleError
from tokentrace.pocket import POCKET

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),  # Ray Data's, about its own settings
    pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc"),
]

WORKERS = ("ray::tokenize_in_worker", "ray::IDLE")


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[Any]:
    with local_ray() as ray:
        yield ray


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files of all kinds, with good and bad rows. Each file is one batch, except one that has two."""
    folder = tmp_path_factory.mktemp("inputs")
    rows = folder / "rows"
    rows.mkdir()
    bad = ['{"messages": [', "", "[1, 2]", {"messages": [{"role": "user", "content": "nobody answers"}]}]
    for number in range(4):
        write_lines(rows / f"{number}.jsonl", [*conversations(25, number), *(bad if number == 1 else [])])
    short = [*conversations(300, 5, most=3), {"messages": []}]
    (rows / "5.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, short)).encode(), mtime=0))
    (rows / "6.json").write_text(json.dumps(list(conversations(20, 6))), encoding="utf-8")
    pq.write_table(pa.table({"messages": [row["messages"] for row in conversations(20, 7)]}), rows / "7.parquet")
    return folder


# -- deterministic output


def test_workers_that_die_change_nothing(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer's path is relative to the folder of the inputs, which the Ray workers do not run in."""
    monkeypatch.chdir(inputs)
    settings, killed = TokenizeSettings(os.path.relpath(POCKET, inputs)), []

    def kill_workers(*_: Any) -> None:
        if not killed:
            killed.extend(pid for pid, name in children_of(os.getpid()) if name in WORKERS)
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    here = tokenize_files(["rows"], tmp_path / "here" / "out.parquet", settings, workers=1)
    target = tmp_path / "there" / "out.parquet"
    there = tokenize_files(["rows"], target, settings, workers=2, progress=kill_workers, ray="")
    assert killed
    assert here.counts.bad.total() == 4
    assert there.counts == here.counts
    for name in ("out.bad.jsonl", "out.parquet"):
        assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()
    assert len(list((tmp_path / "there").iterdir())) == 2


# -- failures on a node


class Deadly:
    """A text that kills the process that decodes it."""

    def decode(self, _: str) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return ""


def test_rows_that_kill_workers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    deadly: Any = Deadly()
    batches = iter([Batch([Row(number, number, text=deadly, source="x.jsonl") for number in (7, 8)], 1)])
    monkeypatch.setattr(job, "_RETRIES", 1)
    with pytest.raises(SampleError, match=r"^rows 7 to 8 of x\.jsonl: workers failed on them"):
        list(job.run_on_ray(batches, RowTokenizer(SETTINGS), 1))


# -- rows


def test_a_dataset_gives_the_samples_of_its_rows(ray: Any) -> None:
    rows: list[dict[str, Any]] = list(conversations(40, 9, most=8))
    rows[7] = {"messages": [{"role": "user", "content": "nobody answers"}]}
    rows[20] = {"messages": []}
    settings = TokenizeSettings(str(POCKET), labels=True, max_length=300)
    table = pa.table({"id": [f"r{at}" for at in range(len(rows))], "messages": [row["messages"] for row in rows]})
    dataset = ray.data.from_arrow([table.slice(at, 10) for at in range(0, len(rows), 10)])
    dataset.context.execution_options.preserve_order = True
    dataset.context.enable_progress_bars = False
    tokenized = job.tokenize_dataset(dataset, settings, concurrency=1, keep=["id"])
    actual = pa.concat_tables(list(tokenized.iter_batches(batch_size=None, batch_format="pyarrow"))).to_pylist()
    assert list(actual[0]) == [*(name for name in settings.output if name != "row"), "error", "id"]
    results = list(tokenize_rows(settings, rows))
    assert any(one.bad is not None and one.bad.kind == "left out" for one in results)
    assert [row["id"] for row in actual] == [f"r{at}" for at in range(len(rows))]
    for row, one in zip(actual, results, strict=True):
        if one.bad is None:
            (expected,) = samples_table(one.samples).to_pylist()
            names = ["error", *(name for name in expected if name not in ("row", "source", "num_messages"))]
            assert {name: row[name] for name in names} == {name: expected.get(name) for name in names}
        else:
            assert row["error"] == f"{one.bad.kind}: {one.bad.reason}"
            assert row["input_ids"] == row["loss_mask"] == row["parts"] == row["notes"] == []
            assert row["num_tokens"] == 0


# -- Ray itself


def test_without_ray_the_error_names_the_extra(inputs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"install tokentrace\[ray\]"):
        tokenize_files([str(inputs / "rows")], tmp_path / "out.parquet", SETTINGS, ray="")


def test_addresses_that_are_refused(ray: Any, inputs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    def refused(address: str, problem: str) -> None:
        with pytest.raises(InputError, match=problem):
            tokenize_files([str(inputs / "rows")], tmp_path / "out.parquet", SETTINGS, ray=address)

    refused("ray://head:10001", r"ray://head:10001 is an address of the Ray Client")
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # no listener
        port = bound.getsockname()[1]
        refused(f"127.0.0.1:{port}", rf"cannot connect to Ray at '127.0.0.1:{port}': ConnectionRefusedError: ")
    monkeypatch.setattr(ray, "init", lambda **_: (_ for _ in ()).throw(ConnectionError("could not find any")))
    refused("auto", r"cannot connect to Ray at 'auto': ConnectionError: could not find any")
