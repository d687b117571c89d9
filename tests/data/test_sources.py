"""Sources: the same rows from every format, in batches that depend only on the sources."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.generate import conversations
from tokentrace import InputError
from tokentrace.data import sources as reading
from tokentrace.data.sources import Row, find_sources, read_batches, read_rows

ROWS = [{"messages": [{"role": "user", "content": f'question {n} \n ,[]{{}} "x" Zürich'}], "n": n} for n in range(7)]


def rows_of(path: Path | str, **options: Any) -> list[Row]:
    return [row for source in find_sources([str(path)], **options) for row in read_rows(source)]


def values(rows: list[Row]) -> list[Any]:
    assert [row.problem for row in rows] == [None] * len(rows)
    return [row.value for row in rows]


def lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


# -- every format gives the same rows


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", lines(ROWS)),
        ("a.ndjson", lines(ROWS).rstrip(b"\n")),
        ("bom.jsonl", b"\xef\xbb\xbf" + lines(ROWS)),
        ("crlf.jsonl", lines(ROWS).replace(b"\n", b"\r\n")),
        ("blank.jsonl", lines(ROWS).replace(b"\n", b"\n\n  \n")),
        ("array.json", json.dumps(ROWS).encode()),
        ("pretty.json", json.dumps(ROWS, indent=2, ensure_ascii=False).encode()),
        ("bom.json", b"\xef\xbb\xbf" + json.dumps(ROWS, indent=1).encode()),
        ("lines.json", lines(ROWS)),
        ("a.jsonl.gz", gzip.compress(lines(ROWS))),
    ],
)
def test_text_of_every_kind_gives_the_same_rows(name: str, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    assert values(rows_of(path)) == ROWS


def test_parquet_an_object_and_stdin_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (2, 100):
        pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=size)
        rows = rows_of(tmp_path / "a.parquet")
        assert values(rows) == ROWS
        assert [row.number for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    path = tmp_path / "one.json"
    path.write_text(json.dumps(ROWS[0], indent=1), encoding="utf-8")
    assert values(rows_of(path)) == ROWS[:1]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines(ROWS))))
    assert values(rows_of("-")) == ROWS


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_of_messages_is_one_conversation(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "chat.json"
    for messages in (
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x" * 100_000}],
        [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}],
    ):
        path.write_text(json.dumps(messages, indent=indent), encoding="utf-8")
        assert values(rows_of(path)) == [messages]
        path.write_text(json.dumps([messages, messages], indent=indent), encoding="utf-8")
        assert values(rows_of(path)) == [messages, messages]
    rows = [{"role": None, "messages": messages}] * 2  # an empty column
    path.write_text(json.dumps(rows, indent=indent), encoding="utf-8")
    assert values(rows_of(path)) == rows


def test_a_folder_is_its_files_in_order_and_a_split_is_chosen_by_name(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    (data / "README.md").write_text("no rows")
    (data / "dataset_infos.json").write_text("{}")
    (data / "train-00001-of-00002.jsonl").write_bytes(lines(ROWS[2:4]))
    (data / "train-00000-of-00002.jsonl").write_bytes(lines(ROWS[:2]))
    pq.write_table(pa.Table.from_pylist(ROWS[4:]), data / "sub" / "test.parquet")
    with pytest.raises(InputError, match="no file with rows of split 'dev'"):
        find_sources([str(data)], split="dev")
    with pytest.raises(InputError, match="cannot be read"):
        find_sources(["~nobody-of-this-name/x"])
    assert values(rows_of(data, split="train")) == ROWS[:4]
    assert values(rows_of(data, split="test")) == ROWS[4:]
    (data / "sub" / "test.parquet").unlink()
    assert values(rows_of(data)) == ROWS[:4]


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["train.jsonl", "test.jsonl"], "test, train"),
        (["data/train/0.jsonl", "data/Validation/0.jsonl"], "train, validation"),
        (["chats_train.jsonl", "chats_dev.jsonl", "more.jsonl"], "dev, none, train"),
        (["chats.jsonl", "test-00000-of-00001.jsonl"], "none, test"),
        (["test_sft-0.jsonl", "train_sft-0.jsonl", "train_gen-0.jsonl"], "test, train"),
        (["train-00000.jsonl", "more.jsonl", "training.jsonl"], None),
        (["test-0.jsonl", "test-1.jsonl"], None),
        (["a.jsonl", "contest.jsonl"], None),
    ],
)
def test_a_folder_with_more_than_its_training_split_is_refused(
    tmp_path: Path, names: list[str], splits: str | None
) -> None:
    for name in names:
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_bytes(lines(ROWS))
    if splits is None:
        assert len(find_sources([str(tmp_path / "d")])) == len(names)
        return
    with pytest.raises(InputError, match=splits):
        find_sources([str(tmp_path / "d")])
    choice = next(word for word in splits.split(", ") if word != "none")
    for split in choice, choice.upper():
        assert len(find_sources([str(tmp_path / "d")], split=split)) == 1
    if "train_sft-0.jsonl" in names:
        assert len(find_sources([str(tmp_path / "d")], split="train_sft")) == 1


# -- bad rows are one row each


def test_bad_lines_are_reported_with_their_numbers_and_affect_no_others(tmp_path: Path) -> None:
    good = [json.dumps(row).encode() for row in ROWS]
    bad = [b"{", b'{"a": \xff}', b"[" * 100_000, b'{"messages": [1,}', b"nonsense"]
    mixed = [one for pair in zip(good, [*bad, b"", b"   "], strict=True) for one in pair]
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join(mixed))
    rows = rows_of(path)
    assert [row.value for row in rows if row.problem is None] == ROWS
    problems = {row.line: row.problem for row in rows if row.problem is not None}
    assert sorted(problems) == [2, 4, 6, 8, 10]
    assert problems[4] == "not UTF-8: byte 6 of the row is not text"
    assert "not valid JSON" in (problems[2] or "")


# -- batches


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.parquet"])
def test_batches_hold_every_row_once_and_add_up_to_their_sources(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BATCH_ROWS", 16)
    monkeypatch.setattr(reading, "BATCH_BYTES", 20_000)
    talks = list(conversations(200, seed=3))
    if name == "x.parquet":
        pq.write_table(pa.table({"text": [json.dumps(talk) for talk in talks]}), tmp_path / name)
    else:
        (tmp_path / name).write_bytes(lines(talks) if name == "x.jsonl" else json.dumps(talks).encode() + b"\n")
    sources = find_sources([str(tmp_path / name)] * 2)
    batches = list(read_batches(sources))
    assert len(batches) > 20
    assert all(len(batch.rows) <= 16 for batch in batches)
    numbers = [row.number for batch in batches for row in batch.rows]
    assert numbers == [*range(1, 201)] * 2
    done = [batch.done for batch in batches]
    assert sorted(set(done)) == done, "progress never goes back"
    assert done[-1] == sum(source.size for source in sources)
    assert batches == list(read_batches(sources))
