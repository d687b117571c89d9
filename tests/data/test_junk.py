"""Junk in files and settings: an error of ours that names the file and the row, never one of Python's or Arrow's."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tokentrace import TokentraceError
from tokentrace.data.job import tokenize_files
from tokentrace.data.sources import find_sources, read_rows
from tokentrace.data.tables import read_samples
from tokentrace.data.tokenizing import TokenizeSettings, tokenize_rows
from tokentrace.diagnose import check_dataset
from tokentrace.pocket import POCKET

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
SETTINGS = TokenizeSettings(str(POCKET))


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


FILES: dict[str, Callable[[Path], Any]] = {
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
"""Files that cannot be read."""


@pytest.mark.parametrize("name", FILES)
def test_files_that_cannot_be_read_are_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    FILES[name](path)
    spool = tmp_path / "spool"
    calls: list[Callable[[], Any]] = [
        lambda: [list(read_rows(source)) for source in find_sources([str(path)], spool)],
        lambda: tokenize_files([str(path)], tmp_path / "out.parquet", SETTINGS, workers=1),
        lambda: check_dataset([str(path)], SETTINGS),
    ]
    if not name.endswith(".gz"):
        calls.append(lambda: list(read_samples(path)))
    for call in calls:
        if name == "empty.jsonl.gz" and calls.index(call) in (0, 2):
            call()  # a packed file of no rows is one of no rows
            continue
        with pytest.raises(TokentraceError, match=name.partition(".")[0]):
            call()
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize("name", TokenizeSettings.__dataclass_fields__)
def test_settings_are_made_or_refused_by_name(name: str) -> None:
    refused = [said for junk in JUNK if (said := refusal(name, junk)) is not None]
    assert refused
    assert [said for said in refused if name not in said and "settings" not in said] == []


def refusal(name: str, junk: Any) -> str | None:
    try:
        json.dumps(TokenizeSettings(**{"tokenizer": str(POCKET), name: junk}).described())
    except TokentraceError as error:
        return str(error)
    return None


def test_rows_of_junk_are_bad_rows_or_samples() -> None:
    """Values of every kind at every place of a row: whatever comes of it, it is a sample or a bad row."""
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
    assert any(outcomes)
    assert not all(outcomes)
