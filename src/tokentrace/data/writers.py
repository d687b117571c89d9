"""Tables of samples as bytes: Parquet, Arrow's stream, or JSON Lines, to a file or to anything that takes bytes; and as
a folder that `datasets` reads."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import IO, Any, Final, Protocol

from .lines import LineWriter
from .sources import pyarrow

SUFFIXES: Final = (".parquet", ".arrow", ".jsonl", ".jsonl.gz")
"""The names of files of samples end in one of these."""
GROUP_TOKENS: Final = 1 << 20
GROUP_ROWS: Final = 4096
GROUP_BYTES: Final = 1 << 26
"""A row group, or a batch of an Arrow stream, is closed when it has this many tokens, rows or bytes."""


class TableWriter(Protocol):
    """Writes tables; what it writes is whole after `finish`."""

    def write(self, table: Any) -> None: ...

    def finish(self) -> None: ...

    def abandon(self) -> None:
        """Let go of what was written so far, which is of no use."""
        ...


def table_writer(name: str, out: Path | IO[bytes], schema: Any) -> TableWriter:
    """The writer for a file of this name. It writes to the file at `out`, or to `out` itself, which stays open."""
    if name.endswith((".jsonl", ".jsonl.gz")):
        return LineWriter(out, packed=name.endswith(".gz"))
    if name.endswith(".arrow"):
        sink = out if not isinstance(out, Path) else pyarrow().OSFile(str(out), "wb")
        return _RowGroups(pyarrow("pyarrow.ipc").new_stream(sink, schema), schema, sink if sink is not out else None)
    where = str(out) if isinstance(out, Path) else out
    return _RowGroups(pyarrow("pyarrow.parquet").ParquetWriter(where, schema, compression="zstd"), schema)


class _RowGroups:
    """Collects tables, and writes a group of their rows whenever there are enough rows, tokens or bytes."""

    def __init__(self, writer: Any, schema: Any, file: Any = None) -> None:
        self._writer, self._schema, self._file = writer, schema, file
        self._waiting: list[Any] = []
        self._rows = self._tokens = self._bytes = 0

    def write(self, table: Any) -> None:
        start = 0
        lengths = pyarrow("pyarrow.compute").list_value_length(table.column("input_ids"))
        for at, length in enumerate(lengths.to_pylist()):
            self._rows += 1
            self._tokens += length
            if self._rows >= GROUP_ROWS or self._tokens >= GROUP_TOKENS:
                self._waiting.append(table.slice(start, at + 1 - start))
                self._flush()
                start = at + 1
        if start < table.num_rows:
            rest = table.slice(start)
            self._waiting.append(rest)
            self._bytes += rest.nbytes
            if self._bytes >= GROUP_BYTES:
                self._flush()

    def _flush(self) -> None:
        if self._waiting:
            group = pyarrow().concat_tables(self._waiting).cast(self._schema).combine_chunks()
            self._writer.write_table(group, max(group.num_rows, 1))
        self._waiting, self._rows, self._tokens, self._bytes = [], 0, 0, 0

    def finish(self) -> None:
        self._flush()
        self._writer.close()
        if self._file is not None:
            self._file.close()

    def abandon(self) -> None:
        for each in (self._writer, self._file):
            with contextlib.suppress(OSError, ValueError):  # Arrow's, where it is closed already
                if each is not None:
                    each.close()


_STATE: Final = "state.json"
_ABOUT: Final = "dataset_info.json"
_DATA: Final = "data-00000-of-00001.arrow"


def is_saved_dataset(path: Path) -> bool:
    """Whether a folder is a dataset as `datasets` saves it to disk, and nothing else."""
    if not ((path / _STATE).is_file() and (path / _ABOUT).is_file()):
        return False
    return all(one.is_file() and (one.name in (_STATE, _ABOUT) or one.suffix == ".arrow") for one in path.iterdir())


class SavedDataset:
    """Writes tables to a folder that ``datasets.load_from_disk`` reads. It needs no `datasets`."""

    def __init__(self, folder: Path, schema: Any, *, private: bool = False) -> None:
        folder.mkdir(0o700 if private else 0o777)
        self._folder = folder
        self._rows = table_writer(_DATA, folder / _DATA, schema)

    def write(self, table: Any) -> None:
        self._rows.write(table)

    def finish(self) -> None:
        self._rows.finish()
        with (self._folder / _DATA).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        state: dict[str, Any] = {
            "_data_files": [{"filename": _DATA}],
            "_fingerprint": digest[:16],  # what it keeps of the dataset's changes is told apart by
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": "train",
        }
        (self._folder / _STATE).write_text(json.dumps(state, indent=2), encoding="utf-8")
        (self._folder / _ABOUT).write_text("{}", encoding="utf-8")  # columns and types are in the data

    def abandon(self) -> None:
        self._rows.abandon()
