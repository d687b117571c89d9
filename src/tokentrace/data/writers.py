"""Tables of samples as bytes: Parquet, Arrow's stream, or JSON Lines, to a file or to anything that takes bytes; and as
a folder that `datasets` reads.

JSON Lines are the rows of a Parquet file of samples, one object per line; they are read here, too. What a Parquet file
says in its metadata is in a file beside them: `metadata_path`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final, Protocol

from ..errors import InputError, kind_of
from .rows import Row, read_rows
from .sources import Format, Source, pyarrow

SUFFIXES: Final = (".parquet", ".jsonl")
"""The names of files of samples end in one of these."""
METADATA_KEY: Final = "tokentrace"
"""The key of the file's metadata under which JSON says how the rows were made."""
GROUP_ROWS: Final = 4096
GROUP_BYTES: Final = 1 << 24
"""A row group, or a batch of an Arrow stream, is closed when it has this many rows or bytes: about a million tokens."""
_ROWS_AT_ONCE: Final = 256
"""How many rows are read or added at a time."""


class TableWriter(Protocol):
    """Writes tables; what it writes is whole after `finish`."""

    def write(self, table: Any) -> None: ...

    def finish(self, metadata: str = "") -> None:
        """Close the file. Parquet takes metadata here that was not known at the start."""
        ...

    def abandon(self) -> None:
        """Let go of what was written so far, which is of no use."""
        ...


def table_writer(name: str, out: Path | IO[bytes], schema: Any) -> TableWriter:
    """The writer for a file of this name. It writes to the file at `out`, or to `out` itself, which stays open."""
    if name.endswith(".jsonl"):
        return _LineWriter(out)
    if name.endswith(".arrow"):
        sink = out if not isinstance(out, Path) else pyarrow().OSFile(str(out), "wb")
        return _RowGroups(pyarrow("pyarrow.ipc").new_stream(sink, schema), schema, sink if sink is not out else None)
    where = str(out) if isinstance(out, Path) else out
    return _RowGroups(pyarrow("pyarrow.parquet").ParquetWriter(where, schema, compression="zstd"), schema)


class _RowGroups:
    """Collects tables, and writes a group of their rows whenever there are enough rows or bytes."""

    def __init__(self, writer: Any, schema: Any, file: Any = None) -> None:
        self._writer, self._schema, self._file = writer, schema, file
        self._waiting: list[Any] = []
        self._rows = self._bytes = 0

    def write(self, table: Any) -> None:
        for start in range(0, table.num_rows, _ROWS_AT_ONCE):
            piece = table.slice(start, _ROWS_AT_ONCE)
            self._waiting.append(piece)
            self._rows += piece.num_rows
            self._bytes += piece.nbytes
            if self._rows >= GROUP_ROWS or self._bytes >= GROUP_BYTES:
                self._flush()

    def _flush(self) -> None:
        if self._waiting:
            group = pyarrow().concat_tables(self._waiting).cast(self._schema).combine_chunks()
            self._writer.write_table(group, max(group.num_rows, 1))
        self._waiting, self._rows, self._bytes = [], 0, 0

    def finish(self, metadata: str = "") -> None:
        self._flush()
        if metadata and hasattr(self._writer, "add_key_value_metadata"):
            self._writer.add_key_value_metadata({METADATA_KEY: metadata})
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

    def finish(self, metadata: str = "") -> None:
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
    """Writes tables of samples as JSON Lines. A file that is open already is left open."""

    def __init__(self, out: Path | IO[bytes]) -> None:
        self._opened = out.open("wb") if isinstance(out, Path) else None
        self._out: IO[bytes] = self._opened or out  # type: ignore[assignment]

    def write(self, table: Any) -> None:
        self._out.writelines(map(_line, table.to_pylist()))

    def finish(self, metadata: str = "") -> None:
        if self._opened is not None:
            self._opened.close()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self.finish()


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
    rows = read_rows(Source(str(path), str(path), Format.LINES, 0), row_bytes=1 << 40)
    while group := list(itertools.islice(rows, _ROWS_AT_ONCE)):
        values = [_sample_row(row, path) for row in group]
        fields = [field for field in schema if field.name in values[0]]
        try:
            yield pa.Table.from_pylist(values, schema=pa.schema(fields))
        except (ValueError, TypeError, OverflowError) as error:
            place = f"{path}, rows {group[0].number} to {group[-1].number}"
            raise InputError(f"{place}: not rows of samples: {error}") from error


def _sample_row(row: Row, path: Path) -> dict[str, Any]:
    if row.problem is not None:
        raise InputError(f"{path}, line {row.line}: {row.problem}")
    if not isinstance(row.value, dict):
        raise InputError(f"{path}, line {row.line}: a sample is an object, not {kind_of(row.value)}")
    return row.value
