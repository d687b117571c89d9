"""Tables of samples as bytes: Parquet, JSON Lines, or Arrow's stream (for the gateway's clients).

JSON Lines are the rows of a Parquet file of samples, one object per line. Their metadata is in a file beside them:
`metadata_path`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from ..errors import InputError, kind_of
from .rows import Row, read_rows
from .sources import Format, Source, pyarrow

SUFFIXES: Final = (".parquet", ".jsonl")
"""Names of files of samples end in one of these."""
METADATA_KEY: Final = "tokentrace"
"""The key of the file's metadata: JSON that says how the rows were made."""
GROUP_ROWS: Final = 4096
GROUP_BYTES: Final = 1 << 24
"""A row group is closed when it has this many rows or bytes: about a million tokens."""
_ROWS_AT_ONCE: Final = 256
"""How many rows are read or added at a time."""


class TableWriter:
    """Writes tables as JSON Lines to an open file, which stays open."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out

    def write(self, table: Any) -> None:
        self._out.writelines(map(_line, table.to_pylist()))

    def finish(self, metadata: str = "") -> None:
        """Write the end of the file. Only Parquet still accepts metadata here."""

    def abandon(self) -> None:
        """Stop writing: the file is useless."""


class _RowGroups(TableWriter):
    """Writes row groups of Parquet or Arrow. They depend on the rows alone, not on how tables divide them."""

    def __init__(self, writer: Any, schema: Any) -> None:
        self._writer, self._schema = writer, schema
        self._pending: list[Any] = []
        self._rows = self._bytes = 0

    def write(self, table: Any) -> None:
        for start in range(0, table.num_rows, _ROWS_AT_ONCE):
            piece = table.slice(start, _ROWS_AT_ONCE)
            self._pending.append(piece)
            self._rows += piece.num_rows
            self._bytes += piece.nbytes
            if self._rows >= GROUP_ROWS or self._bytes >= GROUP_BYTES:
                self._flush()

    def _flush(self) -> None:
        if self._pending:
            group = pyarrow().concat_tables(self._pending).cast(self._schema).combine_chunks()
            self._writer.write_table(group, max(group.num_rows, 1))
        self._pending, self._rows, self._bytes = [], 0, 0

    def finish(self, metadata: str = "") -> None:
        self._flush()
        if metadata and isinstance(self._writer, pyarrow("pyarrow.parquet").ParquetWriter):
            self._writer.add_key_value_metadata({METADATA_KEY: metadata})
        self._writer.close()

    def abandon(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # it may be closed already
            self._writer.close()


def table_writer(name: str, out: IO[bytes], schema: Any) -> TableWriter:
    """The writer for a file of this name, by its suffix."""
    if name.endswith(".jsonl"):
        return TableWriter(out)
    if name.endswith(".arrow"):
        return _RowGroups(pyarrow("pyarrow.ipc").new_stream(out, schema), schema)
    return _RowGroups(pyarrow("pyarrow.parquet").ParquetWriter(out, schema, compression="zstd"), schema)


# -- JSON Lines


def metadata_path(path: Path) -> Path:
    """The file beside a file of lines that says how its rows were made."""
    return path.with_name(path.name + ".metadata")


def _line(row: dict[str, Any]) -> bytes:
    try:
        try:
            text = json.dumps(row, ensure_ascii=False, allow_nan=False)
        except ValueError:  # NaN means that nothing was sampled; JSON has null for that
            text = json.dumps(_without_nan(row), ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise InputError("a row holds an infinite number, which JSON cannot: write it to a .parquet file") from error
    return text.encode() + b"\n"


def _without_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def read_line_tables(path: Path, schema: Any) -> Iterator[Any]:
    """The rows of a file of lines as tables, with those columns of `schema` that they have."""
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
