"""Chunks: stretches of sources that can be read on their own.

Planning looks at a file once, from beginning to end, and depends on its bytes alone: the same input gives the same
chunks wherever it is read, and however many read it.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..errors import InputError
from .sources import Format, Source, arrow_table, parquet_file, reading

CHUNK_ROWS: Final = 256
CHUNK_BYTES: Final = 1 << 20
"""A chunk is closed when it has this many rows, or bytes of text."""

ROW_BYTES: Final = 8 << 20
"""A longer row is reported and left out, unless another limit is given."""


def _state(path: str) -> tuple[int, ...]:
    """What changes when a file is written anew: what was read of it before does not count then."""
    try:
        found = os.stat(path)
    except OSError:  # whoever opens it says so
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


@functools.lru_cache(maxsize=4)
def _parquet_once(path: str, state: tuple[int, ...]) -> Any:
    return parquet_file(path)


@functools.lru_cache(maxsize=4)
def _arrow_once(path: str, state: tuple[int, ...]) -> Any:
    return arrow_table(path)


@functools.lru_cache(maxsize=1)
def _group_once(path: str, state: tuple[int, ...], group: int) -> Any:
    """A row group. Chunks of one group are read one after another, so the last one is kept."""
    return _parquet_once(path, state).read_row_group(group)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stretch of a source: bytes of text, or rows of a table."""

    index: int
    source: Source
    first: int
    """The number of its first row: the line, the element, the row of the table, counted from 1."""
    start: int
    stop: int
    rows: int
    size: int
    """How much of the source it is, in the units of `Source.size`."""
    lines: tuple[tuple[int, int, int], ...] = ()
    """Elements of an array: where each begins and ends, and on which line."""
    group: int = -1
    """Parquet: the row group."""
    oversized: bool = False
    """One row that is over the limit, and is not read."""

    @property
    def described(self) -> str:
        """Which rows these are, for errors."""
        return f"rows {self.first} to {self.first + self.rows - 1} of {self.source.name}"


@dataclass(frozen=True, slots=True)
class Row:
    """A row, or what is wrong with it."""

    number: int
    line: int | None
    """The line it begins on, in text."""
    value: Any = None
    problem: str | None = None


def chunk_size(source: Source) -> int:
    """The usual size of a full chunk, in the units of `Source.size`."""
    return CHUNK_ROWS if source.format in (Format.PARQUET, Format.ARROW) else CHUNK_BYTES


def plan(sources: Sequence[Source], *, row_bytes: int = ROW_BYTES) -> Iterator[Chunk]:
    """The chunks of all sources, in order."""
    index = 0
    for source in sources:
        planner = {Format.LINES: _plan_lines, Format.ELEMENTS: _plan_elements, Format.OBJECT: _plan_object}
        made = planner.get(source.format, _plan_table)(source, row_bytes)
        for fields in made:
            yield Chunk(index=index, source=source, **fields)
            index += 1


def _plan_lines(source: Source, limit: int) -> Iterator[dict[str, Any]]:
    start = at = rows = 0
    first = number = 1
    with reading(source.name), open(source.path, "rb", buffering=1 << 20) as file:
        while line := file.readline(limit + 1):
            length = len(line)
            oversized = length > limit and not line.endswith(b"\n")
            if oversized and rows:
                yield _lines_chunk(first, start, at, rows)
                start, first, rows = at, number, 0
            while oversized and not line.endswith(b"\n") and (line := file.readline(1 << 20)):
                length += len(line)
            at += length
            rows += 1
            number += 1
            if oversized or rows >= CHUNK_ROWS or at - start >= CHUNK_BYTES:
                yield _lines_chunk(first, start, at, rows, oversized)
                start, first, rows = at, number, 0
    if rows:
        yield _lines_chunk(first, start, at, rows)


def _lines_chunk(first: int, start: int, stop: int, rows: int, oversized: bool = False) -> dict[str, Any]:
    return {"first": first, "start": start, "stop": stop, "rows": rows, "size": stop - start, "oversized": oversized}


_MARKS: Final = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\Z)|[\[\]{},\n]', re.DOTALL)
"""What splits an array: brackets, commas and line ends, outside of strings."""


def _plan_elements(source: Source, limit: int) -> Iterator[dict[str, Any]]:
    found: list[tuple[int, int, int]] = []
    first = number = 1
    done = start = 0
    for begin, end, line in _elements(source):
        oversized = end - begin > limit
        if found and (oversized or len(found) >= CHUNK_ROWS or begin - start >= CHUNK_BYTES):
            yield _elements_chunk(found, first, done)
            done, first, found = found[-1][1], number, []
        start = found[0][0] if found else begin
        found.append((begin, end, line))
        number += 1
        if oversized:
            yield {**_elements_chunk(found, first, done), "oversized": True}
            done, first, found = end, number, []
    if found:
        yield {**_elements_chunk(found, first, done), "size": source.size - done}


def _elements_chunk(found: list[tuple[int, int, int]], first: int, done: int) -> dict[str, Any]:
    start, stop = found[0][0], found[-1][1]
    rows, size = len(found), stop - done
    return {"first": first, "start": start, "stop": stop, "rows": rows, "size": size, "lines": tuple(found)}


def _elements(source: Source) -> Iterator[tuple[int, int, int]]:
    """Where each element of an array begins and ends, and the line it begins on."""
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
                    rest = text[match.end() : match.end() + 1000].strip()
                    if rest:
                        yield match.end(), len(text), line
                    return
        yield begin, len(text), begin_line  # never closed: what is left is one row that is not valid JSON


def _trimmed(text: mmap.mmap, begin: int, end: int, line: int) -> tuple[int, int, int]:
    """Without the white space before it, which may hold line ends."""
    raw = text[begin : min(end, begin + 4096)]
    lead = len(raw) - len(raw.lstrip())
    return begin + lead, end, line + raw[:lead].count(b"\n")


def _plan_object(source: Source, limit: int) -> Iterator[dict[str, Any]]:
    yield _lines_chunk(1, 0, source.size, 1, oversized=source.size > limit)


def _plan_table(source: Source, limit: int) -> Iterator[dict[str, Any]]:
    if source.format is Format.ARROW:
        groups = [(-1, source.size)]
    else:
        about = _parquet_once(source.path, _state(source.path)).metadata
        groups = [(at, about.row_group(at).num_rows) for at in range(about.num_row_groups)]
    before = 0
    for group, rows in groups:
        for start in range(0, rows, CHUNK_ROWS):
            stop = min(start + CHUNK_ROWS, rows)
            count = stop - start
            first = before + start + 1
            yield {"first": first, "start": start, "stop": stop, "rows": count, "size": count, "group": group}
        before += rows


# -- reading


def read_rows(chunk: Chunk, *, row_bytes: int = ROW_BYTES) -> Iterator[Row]:
    """The rows of a chunk, bad ones included; blank lines are not rows."""
    if chunk.oversized:
        line = {Format.LINES: chunk.first, Format.ELEMENTS: chunk.lines[0][2] if chunk.lines else None}
        yield _too_long(chunk.first, line.get(chunk.source.format), chunk.stop - chunk.start, row_bytes)
    elif chunk.source.format in (Format.PARQUET, Format.ARROW):
        yield from _read_table(chunk, row_bytes)
    else:
        yield from _read_text(chunk)


def _too_long(number: int, line: int | None, size: int, limit: int) -> Row:
    problem = f"a row of {size:,} bytes is over the limit of {limit:,}; see --max-row-bytes"
    return Row(number, line, problem=problem)


def _read_text(chunk: Chunk) -> Iterator[Row]:
    with reading(chunk.source.name), open(chunk.source.path, "rb") as file:
        file.seek(chunk.start)
        data = file.read(chunk.stop - chunk.start)
    if chunk.start == 0:
        data = data.removeprefix(b"\xef\xbb\xbf")
    if chunk.source.format is Format.OBJECT:
        yield _parsed(data, 1, 1)
    elif chunk.source.format is Format.ELEMENTS:
        for number, (begin, end, line) in enumerate(chunk.lines, chunk.first):
            yield _parsed(data[begin - chunk.start : end - chunk.start], number, line)
    else:
        for number, text in enumerate(data.split(b"\n"), chunk.first):
            if text.strip():
                yield _parsed(text, number, number)


def _parsed(text: bytes, number: int, line: int) -> Row:
    try:
        return Row(number, line, json.loads(text.decode("utf-8")))
    except json.JSONDecodeError as error:
        return Row(number, line + error.lineno - 1, problem=f"not valid JSON: {error.msg} (column {error.colno})")
    except UnicodeDecodeError as error:
        return Row(number, line, problem=f"not UTF-8: byte {error.start} of the row is not text")
    except (RecursionError, ValueError) as error:
        return Row(number, line, problem=f"cannot be read: {error}")


def _read_table(chunk: Chunk, limit: int) -> Iterator[Row]:
    path, rows = chunk.source.path, chunk.stop - chunk.start
    try:
        state = _state(path)
        table = _group_once(path, state, chunk.group) if chunk.group >= 0 else _arrow_once(path, state)
    except (OSError, ValueError) as error:
        raise InputError(f"{chunk.described} cannot be read: {error}") from error
    piece = table.slice(chunk.start, rows)
    for at in range(rows):
        one = piece.slice(at, 1)
        size = one.get_total_buffer_size() if rows == 1 else one.nbytes
        if size > limit:
            yield _too_long(chunk.first + at, None, size, limit)
        else:
            yield Row(chunk.first + at, None, one.to_pylist()[0])
