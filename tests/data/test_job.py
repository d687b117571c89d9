"""The job: one file of samples, identical for any number of workers, never partial; every bad row is reported."""

import gzip
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.generate import SETTINGS, conversations, write_conversations, write_lines
from tests.ray_cluster import children_of
from tokentrace import InputError, Sample, TokentraceError, build_supervised_sample, create_renderer, files
from tokentrace.data import sources, tables
from tokentrace.data.job import tokenize_files
from tokentrace.data.sources import find_sources, read_rows
from tokentrace.data.tables import read_samples
from tokentrace.data.tokenizing import Counts, RowTokenizer, TokenizeSettings, tokenize_rows
from tokentrace.diagnose import check_dataset
from tokentrace.errors import WriteError
from tokentrace.pocket import POCKET

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
PLAIN = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a few rows, so that small files have many."""
    monkeypatch.setattr(sources, "BATCH_ROWS", 8)
    monkeypatch.setattr(tables, "GROUP_BYTES", 100_000)


# -- contents of the rows


def test_rows_are_those_of_build_supervised_sample_in_the_order_of_the_input(tmp_path: Path) -> None:
    rows = list(conversations(60, seed=1))
    path = write_lines(tmp_path / "chats.jsonl", rows)
    done = tokenize_files([str(path)], tmp_path / "out.parquet", SETTINGS, workers=1)
    renderer = create_renderer(POCKET)
    expected = [build_supervised_sample(renderer, row["messages"]) for row in rows]
    for one, two in zip(read_samples(done.output), expected, strict=True):
        for name in ("ids", "mask", "messages", "kinds", "parts"):
            np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    table = pq.read_table(done.output)
    assert table.column("row").to_pylist() == list(range(1, 61))
    assert set(table.column("source").to_pylist()) == {str(path)}
    assert table.column("num_messages").to_pylist() == [len(row["messages"]) for row in rows]
    assert table.schema.field("input_ids").type == pa.list_(pa.int32())


def test_rows_bring_their_own_tools_and_template_variables() -> None:
    tool = {"type": "function", "function": {"name": "look_up", "description": "Find.", "parameters": {}}}
    settings = replace(SETTINGS, chat_template="{{ greeting }}" + PLAIN, template_kwargs={"greeting": "A"})
    one, two = tokenize_rows(settings, [GOOD, {**GOOD, "chat_template_kwargs": {"greeting": "B"}}])
    decode = create_renderer(POCKET).tokenizer.decode
    assert decode(one.samples[0].ids).startswith("A<|turn|>")
    assert decode(two.samples[0].ids).startswith("B<|turn|>")
    (with_tools,) = tokenize_rows(SETTINGS, [{**GOOD, "tools": [tool]}])
    (shared,) = tokenize_rows(replace(SETTINGS, tools=(tool,)), [GOOD])
    assert "look_up" in decode(with_tools.samples[0].ids)
    np.testing.assert_array_equal(with_tools.samples[0].ids, shared.samples[0].ids)


# -- bad rows of every kind

MALFORMED: dict[str, tuple[Any, str, str]] = {
    "bad JSON": ('{"messages": [', "unreadable", "not valid JSON"),
    "no object": ("17", "InputError", "a row must be a mapping"),
    "empty object": ({}, "InputError", "the row has no conversation"),
    "empty conversation": ({"messages": []}, "InputError", "messages: has no messages"),
    "unknown role": ({"messages": [{"role": "wizard", "content": "x"}]}, "InputError", "message 0, role: 'wizard'"),
    "no assistant turn": ({"messages": GOOD["messages"][:1]}, "SampleError", "there is no assistant turn"),
    "surrogates": ('{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "x"}]}',
                   "InputError", "half of a surrogate pair"),
    "a renderer's setting": ({**GOOD, "chat_template_kwargs": {"lost": "ignore"}}, "InputError", "'lost' is not"),
    "bad tools": ({**GOOD, "tools": [{"type": "function"}]}, "InputError", "tools.0"),
    "tools that are no JSON": ({**GOOD, "tools": "{"}, "InputError", "tools"),
    "unknown speaker": ({"conversations": [{"from": "wizard", "value": "x"}]}, "InputError", "message 0, from"),
    "bad call": ({"messages": [GOOD["messages"][0], {"role": "assistant", "tool_calls": [{"function": {}}]}]},
                 "InputError", "message 1, tool_calls.0.function.name"),
    "template refusal": ({"messages": [{"role": "user", "content": "REFUSE"}, {"role": "assistant", "content": "x"}]},
                         "TemplateError", "no thanks"),
    "too deep": ("[" * 20_000 + "]" * 20_000, "unreadable", "recursion"),
}  # fmt: skip


def test_malformed_rows_of_every_kind_are_reported_and_lose_nothing_else(tmp_path: Path) -> None:
    refusing = "{% if messages[0].content == 'REFUSE' %}{{ raise_exception('no thanks') }}{% endif %}"
    shipped = (POCKET / "chat_template.jinja").read_text(encoding="utf-8")
    rows = [one for row, _, _ in MALFORMED.values() for one in (GOOD, row)]
    path = write_lines(tmp_path / "x.jsonl", [*rows, GOOD])
    settings = replace(SETTINGS, chat_template=refusing + shipped)
    done = tokenize_files([str(path)], tmp_path / "o.parquet", settings, workers=1)
    assert done.counts.samples == len(MALFORMED) + 1
    assert pq.read_table(done.output).column("row").to_pylist() == list(range(1, 2 * len(MALFORMED) + 2, 2))
    assert done.bad_rows is not None
    reports = [json.loads(line) for line in done.bad_rows.read_text(encoding="utf-8").splitlines()]
    for (name, (_, kind, reason)), line, one in zip(MALFORMED.items(), range(2, 1000, 2), reports, strict=False):
        assert one["kind"] == kind, (name, one)
        assert reason in one["reason"], (name, one)
        assert one["line"] == one["row"] == line, (name, one)
        assert one["source"] == str(path)
    assert done.counts.bad == Counter(kind for _, kind, _ in MALFORMED.values()) == Counter(r["kind"] for r in reports)
    assert next(one for one in reports if "wizard" in one["reason"])["message"] == 0


def test_a_row_with_text_that_reaches_no_token_is_bad_with_message_and_field() -> None:
    unseen = {"messages": [GOOD["messages"][0], {**GOOD["messages"][1], "reasoning_content": "Hm."}]}
    settings = replace(SETTINGS, renderer="default", chat_template=PLAIN)
    good, bad = tokenize_rows(settings, [GOOD, unseen])
    assert (good.bad, bad.samples) == (None, ())
    assert bad.bad is not None
    assert (bad.bad.row, bad.bad.kind, bad.bad.message, bad.bad.field) == (2, "LostTextError", 1, "reasoning_content")
    for lost, is_noted in (("warn", True), ("ignore", False)):
        (result,) = tokenize_rows(replace(settings, lost=lost), [unseen])
        assert result.bad is None
        notes = [note for note in result.samples[0].notes if note.startswith("message 1, reasoning_content: ")]
        assert bool(notes) == is_noted


# -- deterministic output, or the previous file


@pytest.mark.usefixtures("small_batches")
def test_the_file_is_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [*conversations(40, seed=5), "{", {"messages": []}, *conversations(80)])
    outputs = []
    for workers in (1, 3):
        done = tokenize_files([str(path)], tmp_path / f"{workers}.parquet", SETTINGS, workers=workers)
        assert done.bad_rows is not None
        outputs.append((done.output.read_bytes(), done.bad_rows.read_bytes(), done.counts.described()))
    assert outputs[0] == outputs[1]
    assert not list(tmp_path.glob("*.draft"))


class Stop(Exception):  # noqa: N818
    """Raised in the middle of a run."""


@pytest.mark.parametrize(("name", "workers"), [("o.parquet", 2), ("o.jsonl", 1)])
@pytest.mark.usefixtures("small_batches")
def test_a_run_that_stops_early_leaves_everything_as_it_was(name: str, workers: int, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [*conversations(60, seed=7, most=8), "nonsense"])

    def stop(counts: Counts, *_: int) -> None:
        if counts.rows > 20:
            raise Stop

    def run(workers: int = 1, **options: Any) -> Any:
        return tokenize_files([str(path)], tmp_path / name, SETTINGS, workers=workers, **options)

    with pytest.raises(Stop):
        run(workers, progress=stop)
    assert [one.name for one in tmp_path.iterdir()] == ["x.jsonl"]
    run()
    path.write_bytes(b"nonsense\n" + path.read_bytes())
    before = {one: one.read_bytes() for one in tmp_path.iterdir()}
    with pytest.raises(Stop):
        run(progress=stop, overwrite=True)
    assert {one: one.read_bytes() for one in tmp_path.iterdir()} == before


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
def test_a_name_without_a_known_format_is_refused(name: str, tmp_path: Path) -> None:
    path = write_conversations(tmp_path / "x.jsonl", 3)
    with pytest.raises(InputError, match="is neither"):
        tokenize_files([str(path)], tmp_path / name, SETTINGS, workers=1)
    with pytest.raises(InputError, match="is neither"):
        tables.write_samples(tmp_path / name, [])
    assert [one.name for one in tmp_path.iterdir()] == ["x.jsonl"]


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.usefixtures("small_batches")
def test_a_full_disk_names_the_file(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_conversations(tmp_path / "x.jsonl", 40, seed=7)
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
    path, output = write_conversations(tmp_path / "x.jsonl", 600, seed=9), tmp_path / "o.parquet"
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


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks at /proc")
def test_a_hundred_thousand_conversations_in_flat_memory(tmp_path: Path) -> None:
    path, memory = write_conversations(tmp_path / "x.jsonl", 100_000, seed=11), list[int]()

    def resident(pid: int) -> int:
        try:
            status = (Path("/proc") / str(pid) / "status").read_text()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")), 0)

    def measure(*_: Any) -> None:
        memory.append(sum(map(resident, [os.getpid(), *(pid for pid, _ in children_of(os.getpid()))])))

    done = tokenize_files([str(path)], tmp_path / "o.parquet", SETTINGS, workers=2, progress=measure)
    early, late = memory[len(memory) // 8 : len(memory) // 4], memory[-len(memory) // 4 :]
    assert max(late) < 1.2 * max(early), "memory does not grow with what is done"
    assert done.counts.samples == len(done.sizes["tokens"]) == 100_000


# -- junk in files, settings and rows: a typed error that names the place


def deep(levels: int) -> Any:
    value: Any = "end"
    for _ in range(levels):
        value = [value]
    return value


JUNK: list[Any] = [
    *(None, True, 0, -1, 1.5, math.nan, math.inf, 10**400, "", "\0", "\ud800", "x" * 10_000, b"bytes", [], [None], {}),
    *({"a": math.nan}, deep(3_000), np.int64(3), np.float32("nan"), np.arange(3), np.asarray(["a", None], object)),
    *(object(), Path("nowhere"), lambda: None),
]


def parquet_of(path: Path, **columns: Any) -> None:
    pq.write_table(pa.table(columns), path)


def damaged_parquet(path: Path) -> None:
    """A footer that can be read, and pages that cannot."""
    parquet_of(path, input_ids=[list(range(5000))] * 50)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[4:middle] = bytes(middle - 4)
    path.write_bytes(bytes(data))


UNREADABLE: dict[str, Callable[[Path], Any]] = {
    "folder.parquet": Path.mkdir,
    "folder.jsonl": Path.mkdir,
    "empty.parquet": Path.touch,
    "empty.jsonl.gz": Path.touch,
    "text.parquet": lambda path: path.write_text("no table"),
    "text.jsonl.gz": lambda path: path.write_text("not packed"),
    "cut.jsonl.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(GOOD).encode() * 100)[:-20]),
    "cut.parquet": lambda path: (parquet_of(path, a=[1, 2]), path.write_bytes(path.read_bytes()[:-30])),
    "damaged.parquet": damaged_parquet,
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_files_that_cannot_be_read_are_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    UNREADABLE[name](path)
    calls: list[Callable[[], Any]] = [
        lambda: [list(read_rows(source)) for source in find_sources([str(path)])],
        lambda: tokenize_files([str(path)], tmp_path / "out.parquet", SETTINGS, workers=1),
        lambda: check_dataset([str(path)], SETTINGS),
    ]
    if not name.endswith(".gz"):
        calls.append(lambda: list(read_samples(path)))
    for call in calls:
        if name == "empty.jsonl.gz" and calls.index(call) in (0, 2):
            call()  # an empty packed file is valid and has no rows
            continue
        with pytest.raises(TokentraceError, match=name.partition(".")[0]):
            call()
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize("name", TokenizeSettings.__dataclass_fields__)
def test_settings_are_accepted_or_refused_by_name(name: str) -> None:
    refusals = []
    for junk in JUNK:
        try:
            settings = TokenizeSettings(**{"tokenizer": str(POCKET), name: junk})
            json.dumps([settings.described(), RowTokenizer(settings).described()])
        except TokentraceError as error:
            refusals.append(str(error))
    assert refusals
    words = (name.partition("_")[0], "settings")
    unnamed = [text for text in refusals if not any(word in text for word in words)]
    assert not unnamed or name == "tokenizer"  # its errors quote the value


def test_rows_of_junk_are_bad_rows_or_samples() -> None:
    """Junk of every kind in every field of a row gives a sample or a bad row."""
    rng = random.Random(0)
    rows: list[Any] = [*JUNK]
    for key in ("messages", "conversations", "prompt", "completion", "tools", "system", "chat_template_kwargs"):
        rows += [{**GOOD, key: junk} for junk in JUNK]
    for key in ("role", "content", "tool_calls", "reasoning_content", "name", "train", "weight"):
        for junk in JUNK:
            messages = [dict(message) for message in GOOD["messages"]]
            messages[rng.randrange(2)][key] = junk
            rows.append({"messages": messages})
    rows.append({"messages": [{"role": "user", "content": deep(100_000)}]})
    outcomes = [one.bad is None for one in tokenize_rows(SETTINGS, rows)]
    assert len(outcomes) == len(rows)
    assert {*outcomes} == {True, False}
