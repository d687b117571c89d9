"""Samples as JSON Lines: the rows of a Parquet file of samples, one object per line.

What a Parquet file says in its metadata is in a file beside it: `metadata_path`.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from ..errors import InputError, kind_of
from .sources import pyarrow

_ROWS: Final = 256
"""How many lines are read at a time."""


def metadata_path(path: Path) -> Path:
    """The file beside a file of lines that says how its rows were made."""
    return path.with_name(path.name + ".metadata")


class LineWriter:
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
    while group := list(itertools.islice(rows, _ROWS)):
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
