"""Tables of samples as bytes: Parquet, Arrow's stream, JSON Lines, or a folder that `datasets` reads.

JSON Lines are the rows of a Parquet file of samples, one object per line; they are read here, too. Their metadata is
in a file beside them: `metadata_path`.
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
from ..files import sync
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
    """Writes tables to an open file, which stays open."""

    def write(self, table: Any) -> None: ...

    def finish(self, metadata: str = "") -> None:
        """Write the end of the file. Only Parquet can still take metadata here."""
        ...

    def abandon(self) -> None:
        """Stop writing: the file is of no use."""
        ...


def table_writer(name: str, out: IO[bytes], schema: Any) -> TableWriter:
    """The writer for a file of this name: its suffix says how it is written."""
    if name.endswith(".jsonl"):
        return _LineWriter(out)
    if name.endswith(".arrow"):
        return _RowGroups(pyarrow("pyarrow.ipc").new_stream(out, schema), schema)
    return _RowGroups(pyarrow("pyarrow.parquet").ParquetWriter(out, schema, compression="zstd"), schema)


class _RowGroups:
    """Collects tables, and writes a group of their rows whenever there are enough rows or bytes."""

    def __init__(self, writer: Any, schema: Any) -> None:
        self._writer, self._schema = writer, schema
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
        if metadata and isinstance(self._writer, pyarrow("pyarrow.parquet").ParquetWriter):
            self._writer.add_key_value_metadata({METADATA_KEY: metadata})
        self._writer.close()

    def abandon(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # it may be closed already
            self._writer.close()


# -- datasets that are saved to disk

DATA_FILE: Final = "data-00000-of-00001.arrow"
"""The name of the data in the folder of a saved dataset."""
_STATE: Final = "state.json"
_ABOUT: Final = "dataset_info.json"


def is_saved_dataset(path: Path) -> bool:
    """True if a folder is a dataset as `datasets` saves it to disk, and nothing else."""
    if not ((path / _STATE).is_file() and (path / _ABOUT).is_file()):
        return False
    return all(one.is_file() and (one.name in (_STATE, _ABOUT) or one.suffix == ".arrow") for one in path.iterdir())


def describe_dataset(folder: Path) -> None:
    """Write what ``datasets.load_from_disk`` reads beside the data. This needs no `datasets`."""
    with (folder / DATA_FILE).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    state: dict[str, Any] = {
        "_data_files": [{"filename": DATA_FILE}],
        "_fingerprint": digest[:16],  # the key of what `datasets` caches
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": "train",
    }
    (folder / _STATE).write_text(json.dumps(state, indent=2), encoding="utf-8")
    (folder / _ABOUT).write_text("{}", encoding="utf-8")  # columns and types are in the data
    for name in (_STATE, _ABOUT):
        sync(folder / name)


# -- JSON Lines


def metadata_path(path: Path) -> Path:
    """The file beside a file of lines that says how its rows were made."""
    return path.with_name(path.name + ".metadata")


class _LineWriter:
    """Writes tables of samples as JSON Lines."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out

    def write(self, table: Any) -> None:
        self._out.writelines(map(_line, table.to_pylist()))

    def finish(self, metadata: str = "") -> None:
        """Lines need no end."""

    def abandon(self) -> None:
        """Nothing is open here."""


def _line(row: dict[str, Any]) -> bytes:
    try:
        try:
            text = json.dumps(row, ensure_ascii=False, allow_nan=False)
        except ValueError:  # NaN stands where nothing was sampled: null in JSON, which has no NaN
            text = json.dumps(_without_nan(row), ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise InputError("a row holds an infinite number, which JSON cannot: write it to a .parquet file") from error
    return text.encode() + b"\n"


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
