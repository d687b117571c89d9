"""Tables of samples as bytes: Parquet, Arrow's stream, or JSON Lines, to a file or to anything that takes bytes; and as
a folder that `datasets` reads.

JSON Lines are the rows of a Parquet file of samples, one object per line; they are read here, too. What a Parquet file
says in its metadata is in a file beside them: `metadata_path`.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import itertools
import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final, Protocol

from ..errors import InputError, kind_of
from .sources import pyarrow

SUFFIXES: Final = (".parquet", ".arrow", ".jsonl", ".jsonl.gz")
"""The names of files of samples end in one of these."""
GROUP_TOKENS: Final = 1 << 20
GROUP_ROWS: Final = 4096
GROUP_BYTES: Final = 1 << 26
"""A row group, or a batch of an Arrow stream, is closed when it has this many tokens, rows or bytes."""
_LINES_AT_ONCE: Final = 256
"""How many lines are read at a time."""


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
        return _LineWriter(out, packed=name.endswith(".gz"))
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


# -- JSON Lines


def metadata_path(path: Path) -> Path:
    """The file beside a file of lines that says how its rows were made."""
    return path.with_name(path.name + ".metadata")


class _LineWriter:
    """Writes tables of samples as JSON Lines; `packed` by gzip. The same rows are the same bytes.

    A file at a path is its own; a file that is open already is left open.
    """

    def __init__(self, out: Path | IO[bytes], packed: bool) -> None:
        self._owned = isinstance(out, Path)
        self._file: IO[bytes] = out.open("wb") if isinstance(out, Path) else out
        self._out: Any = self._file
        if packed:  # without name and time, which say nothing about the rows
            self._out = gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=self._file, mtime=0)

    def write(self, table: Any) -> None:
        self._out.writelines(map(_line, table.to_pylist()))

    def finish(self) -> None:
        for file in self._closed_by_us():
            file.close()

    def abandon(self) -> None:
        for file in self._closed_by_us():
            with contextlib.suppress(OSError):
                file.close()

    def _closed_by_us(self) -> list[Any]:
        packing = [] if self._out is self._file else [self._out]
        return [*packing, self._file] if self._owned else packing


def _line(row: dict[str, Any]) -> bytes:
    try:
        return (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "surrogatepass")
    except ValueError:  # NaN stands where nothing was sampled: null in JSON, which has no NaN
        plain = {name: _without_nan(value) for name, value in row.items()}
    try:
        return (json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "surrogatepass")
    except ValueError as error:
        raise InputError("a row holds an infinite number, which JSON cannot: write it to a .parquet file") from error


def _without_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nan(one) for one in value]
    if isinstance(value, dict):
        return {name: _without_nan(one) for name, one in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def read_line_tables(path: Path, schema: Any) -> Iterator[Any]:
    """The rows of a file of lines as tables with those columns of `schema` that they have."""
    pa = pyarrow()
    number = 0
    rows = _rows(path)
    while group := list(itertools.islice(rows, _LINES_AT_ONCE)):
        names = set(group[0])
        fields = [field for field in schema if field.name in names]
        try:
            yield pa.Table.from_pylist(group, schema=pa.schema(fields))
        except (ValueError, TypeError, OverflowError) as error:
            where = f"{path}, rows {number + 1} to {number + len(group)}"
            raise InputError(f"{where}: not rows of samples: {error}") from error
        number += len(group)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _row(line, f"{path}, line {number}")
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise InputError(f"{where}: a sample is an object, not {kind_of(row)}")
    return row
