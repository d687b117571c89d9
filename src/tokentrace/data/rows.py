"""Rows of sources, in their order, and batches of them for workers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ..errors import InputError
from .sources import Format, Source, parquet_file, reading

BATCH_ROWS: Final = 256
BATCH_BYTES: Final = 1 << 20
"""A batch is closed when it has this many rows, or bytes of text."""

ROW_BYTES: Final = 8 << 20
"""Longer rows are reported and left out, unless another limit is set."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row, or what is wrong with it.

    `number` counts from 1; `line` is that of JSON Lines; `text` is JSON that is not parsed yet; `end` is where the row
    ends in its source, in the units of `Source.size`.
    """

    number: int
    line: int | None
    value: Any = None
    problem: str | None = None
    text: bytes | None = None
    end: int = 0

    def parsed(self) -> Row:
        """Parse the text of the row, if it has one."""
        if self.text is None:
            return self
        value, problem = _parse(self.text)
        return replace(self, value=value, problem=problem, text=None)


def _parse(text: bytes) -> tuple[Any, str | None]:
    """The value of JSON text, or what is wrong with it."""
    try:
        return json.loads(text.decode("utf-8-sig")), None
    except json.JSONDecodeError as error:
        return None, f"not valid JSON: {error.msg} (column {error.colno})"
    except UnicodeDecodeError as error:
        return None, f"not UTF-8: byte {error.start} of the row is not text"
    except (RecursionError, ValueError) as error:
        return None, f"cannot be read: {error}"


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one source for a worker. `done` is how much of all sources is read, in the units of `Source.size`."""

    source: str
    format: Format
    rows: tuple[Row, ...]
    done: int

    def __str__(self) -> str:
        return f"rows {self.rows[0].number} to {self.rows[-1].number} of {self.source}"


def read_batches(sources: Sequence[Source], *, row_bytes: int = ROW_BYTES) -> Iterator[Batch]:
    """Read the rows of all sources, in order, in batches. They depend on the sources alone."""
    before = 0
    for source in sources:
        rows: list[Row] = []
        size = 0
        for row in _unparsed_rows(source, row_bytes):
            rows.append(row)
            size += len(row.text or b"")
            if len(rows) >= BATCH_ROWS or size >= BATCH_BYTES:
                yield Batch(source.name, source.format, tuple(rows), before + row.end)
                rows, size = [], 0
        before += source.size
        if rows:
            yield Batch(source.name, source.format, tuple(rows), before)


def count_batches(sources: Sequence[Source]) -> int:
    """Estimate how many batches the sources have."""
    sizes = ((source.size, BATCH_ROWS if source.format is Format.PARQUET else BATCH_BYTES) for source in sources)
    return sum(-(-size // batch) for size, batch in sizes)


def read_rows(source: Source, *, row_bytes: int = ROW_BYTES) -> Iterator[Row]:
    """Read the rows of a source, including bad ones. Skips blank lines."""
    return (row.parsed() for row in _unparsed_rows(source, row_bytes))


def _unparsed_rows(source: Source, limit: int) -> Iterator[Row]:
    if source.format is Format.JSON:
        return _values(source)
    return _table_rows(source, limit) if source.format is Format.PARQUET else _lines(source, limit)


def _lines(source: Source, limit: int) -> Iterator[Row]:
    with reading(source.name), open(source.path, "rb", buffering=1 << 20) as file:
        number = end = 0
        while line := file.readline(limit + 1):
            number += 1
            start, end = end, end + len(line)
            if len(line) > limit and not line.endswith(b"\n"):
                while not line.endswith(b"\n") and (line := file.readline(1 << 20)):
                    end += len(line)
                yield Row(number, number, problem=_too_long(end - start, limit), end=end)
            elif line.strip():
                yield Row(number, number, text=line.removesuffix(b"\n"), end=end)


def _values(source: Source) -> Iterator[Row]:
    """The rows of one JSON value: the elements of a list, unless that is the messages of one conversation."""
    with reading(source.name), open(source.path, "rb") as file:
        value, problem = _parse(file.read())
    first = value[0] if isinstance(value, list) and value else None
    is_message = isinstance(first, dict) and (isinstance(first.get("role"), str) or {"from", "value"} <= set(first))
    if not isinstance(value, list) or is_message:
        yield Row(1, None, value, problem, end=source.size)
        return
    for number, row in enumerate(value, 1):
        yield Row(number, None, row, end=source.size * number // len(value))


def _table_rows(source: Source, limit: int) -> Iterator[Row]:
    number = 0
    try:
        for batch in parquet_file(source.path).iter_batches(batch_size=BATCH_ROWS):
            for at in range(batch.num_rows):
                number += 1
                row = batch.slice(at, 1)
                if row.nbytes > limit:
                    yield Row(number, None, problem=_too_long(row.nbytes, limit), end=number)
                else:
                    yield Row(number, None, row.to_pylist()[0], end=number)
    except (OSError, ValueError) as error:
        raise InputError(f"{source.name} cannot be read: {error}") from error


def _too_long(size: int, limit: int) -> str:
    return f"a row of {size:,} bytes is over the limit of {limit:,}; see --max-row-bytes"
