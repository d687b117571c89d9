"""Rows of sources: read in their order, and grouped into batches for workers."""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..errors import InputError
from .sources import TABLES, Format, Source, arrow_table, parquet_file, reading

BATCH_ROWS: Final = 256
BATCH_BYTES: Final = 1 << 20
"""A batch is closed when it has this many rows, or bytes of text."""

ROW_BYTES: Final = 8 << 20
"""A longer row is reported and left out, unless another limit is set."""

_BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Row:
    """A row, or what is wrong with it."""

    number: int
    """Counted from 1: the line, the element of the array, the row of the table."""
    line: int | None
    """The line it begins on, in text."""
    value: Any = None
    problem: str | None = None
    text: bytes | None = None
    """Its JSON text, if that is not parsed yet."""
    end: int = 0
    """Where it ends in its source, in the units of `Source.size`."""

    def parsed(self) -> Row:
        """Parse the text of the row, if it has one."""
        if self.text is None:
            return self
        line, problem, value = self.line, None, None
        try:
            value = json.loads(self.text.decode("utf-8"))
        except json.JSONDecodeError as error:
            problem = f"not valid JSON: {error.msg} (column {error.colno})"
            line = None if line is None else line + error.lineno - 1
        except UnicodeDecodeError as error:
            problem = f"not UTF-8: byte {error.start} of the row is not text"
        except (RecursionError, ValueError) as error:
            problem = f"cannot be read: {error}"
        return Row(self.number, line, value, problem, end=self.end)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one source that a worker tokenizes at once."""

    source: str
    format: Format
    rows: tuple[Row, ...]
    """Text is not parsed yet: the worker does that."""
    done: int
    """How much of all sources is read up to here, in the units of `Source.size`."""

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
    return sum(-(-source.size // (BATCH_ROWS if source.format in TABLES else BATCH_BYTES)) for source in sources)


def read_rows(source: Source, *, row_bytes: int = ROW_BYTES) -> Iterator[Row]:
    """Read the rows of a source, bad ones included. Blank lines are not rows."""
    return (row.parsed() for row in _unparsed_rows(source, row_bytes))


def _unparsed_rows(source: Source, limit: int) -> Iterator[Row]:
    if source.format in TABLES:
        return _table_rows(source, limit)
    readers = {Format.LINES: _lines, Format.ELEMENTS: _elements, Format.OBJECT: _single_row}
    return readers[source.format](source, limit)


def _lines(source: Source, limit: int) -> Iterator[Row]:
    with reading(source.name), open(source.path, "rb", buffering=1 << 20) as file:
        number = end = 0
        while line := file.readline(limit + 1):
            number += 1
            start, end = end, end + len(line)
            if len(line) > limit and not line.endswith(b"\n"):
                while not line.endswith(b"\n") and (line := file.readline(1 << 20)):
                    end += len(line)
                yield _too_long(number, number, end - start, limit, end)
                continue
            text = line.removesuffix(b"\n") if start else line.removesuffix(b"\n").removeprefix(_BOM)
            if text.strip():
                yield Row(number, number, text=text, end=end)


def _elements(source: Source, limit: int) -> Iterator[Row]:
    with reading(source.name), open(source.path, "rb") as file:
        for number, (start, stop, line) in enumerate(array_elements(source), 1):
            if stop - start > limit:
                yield _too_long(number, line, stop - start, limit, stop)
            else:
                file.seek(start)
                yield Row(number, line, text=file.read(stop - start), end=stop)


def _single_row(source: Source, limit: int) -> Iterator[Row]:
    if source.size > limit:
        yield _too_long(1, None, source.size, limit, source.size)
        return
    with reading(source.name), open(source.path, "rb") as file:
        yield Row(1, 1, text=file.read().removeprefix(_BOM), end=source.size)


def _too_long(number: int, line: int | None, size: int, limit: int, end: int) -> Row:
    problem = f"a row of {size:,} bytes is over the limit of {limit:,}; see --max-row-bytes"
    return Row(number, line, problem=problem, end=end)


def _table_rows(source: Source, limit: int) -> Iterator[Row]:
    number = 0
    for batch in _table_batches(source):
        for at in range(batch.num_rows):
            number += 1
            one = batch.slice(at, 1)
            if one.nbytes > limit:
                yield _too_long(number, None, one.nbytes, limit, number)
            else:
                yield Row(number, None, one.to_pylist()[0], end=number)


def _table_batches(source: Source) -> Iterator[Any]:
    try:
        if source.format is Format.ARROW:
            yield from arrow_table(source.path).to_batches(max_chunksize=BATCH_ROWS)
        else:
            yield from parquet_file(source.path).iter_batches(batch_size=BATCH_ROWS)
    except (OSError, ValueError) as error:
        raise InputError(f"{source.name} cannot be read: {error}") from error


# -- JSON arrays

_MARKS: Final = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\Z)|[\[\]{},\n]', re.DOTALL)
"""What splits an array: brackets, commas and line ends, outside of strings."""


def array_elements(source: Source) -> Iterator[tuple[int, int, int]]:
    """Find where each element of a JSON array begins and ends, and the line it begins on. Parses nothing."""
    if not source.size:
        return
    with (
        reading(source.name),
        open(source.path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
    ):
        depth, line = 0, 1
        begin, begin_line = 0, 1
        for match in _MARKS.finditer(text):
            mark = match[0][:1]
            if mark == b'"':
                line += match[0].count(b"\n")
            elif mark == b"\n":
                line += 1
            elif mark in b"[{":
                depth += 1
                if depth == 1:
                    begin, begin_line = match.end(), line
            elif mark == b"," and depth == 1:
                yield _trimmed(text, begin, match.start(), begin_line)
                begin, begin_line = match.end(), line
            elif mark in b"]}":
                depth -= 1
                if depth == 0:
                    if text[begin : match.start()].strip():
                        yield _trimmed(text, begin, match.start(), begin_line)
                    if text[match.end() : match.end() + 1000].strip():  # text after the array is one bad row
                        yield match.end(), len(text), line
                    return
        yield begin, len(text), begin_line  # never closed: the remaining text is one row that is not valid JSON


def _trimmed(text: mmap.mmap, begin: int, end: int, line: int) -> tuple[int, int, int]:
    """Skip the white space before an element, which may hold line ends."""
    raw = text[begin : min(end, begin + 4096)]
    lead = len(raw) - len(raw.lstrip())
    return begin + lead, end, line + raw[:lead].count(b"\n")
