"""Sources: the files that rows come from, cut into chunks that anyone can read on their own.

Planning looks at a file once, from its beginning to its end, and depends on nothing but its bytes: the same input
gives the same chunks wherever and by however many they are read.
"""

from __future__ import annotations

import bz2
import contextlib
import functools
import gzip
import hashlib
import json
import lzma
import mmap
import os
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, Final

from ..errors import InputError, shown
from ..files import writing

CHUNK_ROWS: Final = 256
CHUNK_BYTES: Final = 1 << 20
"""A chunk is closed when it has so many rows, or so many bytes of text."""

ROW_BYTES: Final = 8 << 20
"""A longer row is reported and left out, unless another limit is given."""

_BLOCK: Final = 1 << 20

_LINES: Final = (".jsonl", ".ndjson")
_TABLES: Final = (".parquet", ".arrow", ".feather")
_PACKED: Final = (".gz", ".bz2", ".xz", ".zst")
_HUB_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+")


class Format(StrEnum):
    """How the rows of a source are written."""

    LINES = "lines"
    """JSON, one row a line."""
    ELEMENTS = "elements"
    """One JSON array of rows."""
    OBJECT = "object"
    """One JSON object, which is a row."""
    PARQUET = "parquet"
    ARROW = "arrow"
    """Arrow's own format, as ``datasets`` saves it."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file with rows. `name` is what people know it by; `path` is where it is read, perhaps unpacked."""

    name: str
    path: str
    format: Format
    size: int
    """Bytes of text, or rows of a table."""
    given: str = ""
    """Where the file itself is, packed or not; empty for stdin."""
    hashed: str = ""
    """Its SHA-256, where it is known already."""

    @property
    def digest(self) -> str:
        """The SHA-256 of its bytes (unpacked), and so another one whenever they are. Read from beginning to end."""
        return self.hashed or file_digest(self.path)

    @property
    def chunk_size(self) -> int:
        """The most that a chunk usually is, in the units of `size`."""
        return CHUNK_ROWS if self.format in (Format.PARQUET, Format.ARROW) else CHUNK_BYTES


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
    """How much of the source it is, in the unit of `Source.size`."""
    lines: tuple[tuple[int, int, int], ...] = ()
    """Elements of an array: where each begins and ends, and on which line."""
    group: int = -1
    """Parquet: the row group."""
    oversized: bool = False
    """One row that is over the limit, and is not read."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row, or what is wrong with it."""

    number: int
    line: int | None
    """The line it begins on, in text."""
    value: Any = None
    problem: str | None = None


def file_digest(path: str, progress: Callable[[int], None] | None = None) -> str:
    """The SHA-256 of a file, read a little at a time; `progress` is told how many bytes more are done."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_BLOCK))
    with reading(path), open(path, "rb", buffering=0) as file:
        while read := file.readinto(buffer):
            digest.update(buffer[:read])
            if progress is not None:
                progress(read)
    return digest.hexdigest()


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """What the system says about a source that cannot be read, as an InputError with its name."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror or error}") from error


# -- finding sources


def find_sources(inputs: Sequence[str], spool: Path, *, split: str | None = None) -> list[Source]:
    """The files that inputs name: files, folders, ``datasets`` saved to disk, hub names, ``-`` for stdin.

    What is packed or comes from stdin is unpacked into `spool`. InputError says what cannot be read and what can.
    """
    if isinstance(inputs, (str, os.PathLike)):
        inputs = [os.fspath(inputs)]
    if not isinstance(inputs, Iterable) or not (inputs := [_named(given) for given in inputs]):
        raise InputError("no input was given: name files, folders, or '-' for stdin")
    if split is not None and not isinstance(split, str):
        raise InputError(f"split is the name of one, not {shown(split)}")
    found: list[Source] = []
    for given in inputs:
        found += _sources(given, spool, split, len(found))
    return found


def _named(given: Any) -> str:
    """An input as a string."""
    named = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(named, str) or not named or "\0" in named:
        raise InputError(f"an input is the name of a file or a folder, not {shown(given)}")
    return named


def _sources(given: str, spool: Path, split: str | None, count: int) -> list[Source]:
    if given == "-":
        return [_unpacked("stdin", sys.stdin.buffer, spool, count)]
    try:
        path = Path(given).expanduser()
        is_file = path.is_file()
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"{shown(given)} cannot be looked at: {error}") from error
    if is_file:
        return [_source(path, given, spool, count)]
    if not path.is_dir():
        if not _HUB_NAME.fullmatch(given) or given.startswith("."):
            raise InputError(f"there is no file or folder {given!r}")
        path = _from_hub(given)
    files = _files(path, given, split)
    return [
        _source(file, f"{given.rstrip('/')}/{file.relative_to(path).as_posix()}", spool, count + at)
        for at, file in enumerate(files)
    ]


def _files(folder: Path, given: str, split: str | None) -> list[Path]:
    """The files with rows in a folder, in order."""
    if (folder / "dataset_dict.json").is_file():
        splits = _json_file(folder / "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or not splits:
            raise InputError(f"{given}: dataset_dict.json names no splits")
        return _files(folder / _choose_split([str(name) for name in splits], split, given), given, None)
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        try:
            names = [str(row["filename"]) for row in _json_file(folder / "state.json")["_data_files"]]
        except (KeyError, TypeError):
            raise InputError(f"{given}: state.json does not say which files the dataset has") from None
        return [folder / name for name in names]
    files = sorted(path for path in folder.rglob("*") if path.is_file() and _is_data(path))
    if split is not None:
        files = [path for path in files if _of_split(path.relative_to(folder), split)]
    if not files:
        of = f" of split {split!r}" if split is not None else ""
        raise InputError(f"{given}: there is no file with rows{of}: .jsonl, .json, .parquet or .arrow")
    return files


def _of_split(path: Path, split: str) -> bool:
    """Whether a file is of a split, by the names that hubs use: ``train-00000-of-00001.parquet``, ``train/x.jsonl``."""
    words = [re.split(r"[-_.]", part)[0] for part in path.parts]
    return split in words


def _choose_split(splits: list[str], split: str | None, given: str) -> str:
    wanted = split or ("train" if "train" in splits else splits[0] if len(splits) == 1 else None)
    if wanted is None or wanted not in splits:
        asked = f"there is no split {split!r}" if split else "a split has to be chosen"
        raise InputError(f"{given}: {asked}; there are {', '.join(splits)}")
    return wanted


def _is_data(path: Path) -> bool:
    if path.name.startswith(".") or path.name in ("dataset_infos.json", "dataset_info.json", "state.json"):
        return False
    inner = Path(path.stem) if path.suffix in _PACKED else path
    return inner.suffix in (*_LINES, ".json") or path.suffix in _TABLES


def _json_file(path: Path) -> Mapping[str, Any]:
    try:
        with reading(str(path)):
            value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON: {error}") from error
    return value if isinstance(value, Mapping) else {}


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise InputError(f"{name!r} is no file here; to fetch it from the hub, install tokentrace[hub]") from None
    patterns = [f"*{suffix}" for suffix in (*_LINES, ".json", *_TABLES)]
    patterns += [f"*{suffix}{packed}" for suffix in (*_LINES, ".json") for packed in _PACKED]
    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns))
    except Exception as error:
        raise InputError(
            f"{name!r} is no file here and could not be fetched from the hub: {type(error).__name__}: {error}"
        ) from error


def _source(path: Path, name: str, spool: Path, count: int) -> Source:
    if path.suffix in _PACKED:
        with reading(name):
            packed = _opened(path)
        with packed:
            return _unpacked(name.removesuffix(path.suffix), packed, spool, count, str(path))
    if path.suffix == ".parquet":
        return Source(name, str(path), Format.PARQUET, _parquet(str(path)).metadata.num_rows, str(path))
    if path.suffix in _TABLES:
        return Source(name, str(path), Format.ARROW, _arrow(str(path)).num_rows, str(path))
    with reading(name):
        return Source(name, str(path), _text_format(path), path.stat().st_size, str(path))


def _text_format(path: Path) -> Format:
    """Lines, an array or an object: by the name, or by how it begins."""
    if path.suffix in _LINES:
        return Format.LINES
    with path.open("rb") as file:
        head = file.read(1 << 16).removeprefix(b"\xef\xbb\xbf").lstrip()
        if head.startswith(b"["):
            return Format.LINES if _is_lines(head) else Format.ELEMENTS
    return Format.LINES if _is_lines(head) or not head.startswith(b"{") else Format.OBJECT


def _is_lines(head: bytes) -> bool:
    """Whether the first line is JSON on its own, and others follow."""
    line, newline, rest = head.partition(b"\n")
    if not newline or not rest.strip():
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _opened(path: Path) -> IO[bytes]:
    if path.suffix == ".zst":
        pa = tables("pyarrow")
        stream: IO[bytes] = pa.input_stream(str(path), compression="zstd")
        return stream
    opener: Any = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}[path.suffix]
    opened: IO[bytes] = opener(path, "rb")
    return opened


def _unpacked(name: str, stream: IO[bytes], spool: Path, count: int, given: str = "") -> Source:
    """A copy of what a stream says, with its hash."""
    path = spool / f"source-{count:05d}{Path(name).suffix or '.json'}"
    digest = hashlib.sha256()
    with writing(path):
        spool.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as copy:
            while block := _read_packed(stream, name):
                digest.update(block)
                copy.write(block)
    return Source(name, str(path), _text_format(path), path.stat().st_size, given, digest.hexdigest())


def _read_packed(stream: IO[bytes], name: str) -> bytes:
    try:
        return stream.read(_BLOCK)
    except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
        raise InputError(f"{name}: cannot be unpacked: {error}") from error


def clear_spool(spool: Path) -> None:
    """Remove what `find_sources` unpacked."""
    shutil.rmtree(spool, ignore_errors=True)


# -- planning


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
                yield {"first": first, "start": start, "stop": at, "rows": rows, "size": at - start}
                start, first, rows = at, number, 0
            while oversized and not line.endswith(b"\n") and (line := file.readline(1 << 20)):
                length += len(line)
            at += length
            rows += 1
            number += 1
            if oversized or rows >= CHUNK_ROWS or at - start >= CHUNK_BYTES:
                size = at - start
                yield {"first": first, "start": start, "stop": at, "rows": rows, "size": size, "oversized": oversized}
                start, first, rows = at, number, 0
    if rows:
        yield {"first": first, "start": start, "stop": at, "rows": rows, "size": at - start}


_MARKS: Final = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\Z)|[\[\]{},\n]', re.DOTALL)
"""What an array is taken apart by: strings, which hide the rest, brackets, commas and line ends."""


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
        yield begin, len(text), begin_line  # never closed: what is left is one row that is no JSON


def _trimmed(text: mmap.mmap, begin: int, end: int, line: int) -> tuple[int, int, int]:
    """Without the white space before it, which may hold line ends."""
    raw = text[begin : min(end, begin + 4096)]
    lead = len(raw) - len(raw.lstrip())
    return begin + lead, end, line + raw[:lead].count(b"\n")


def _plan_object(source: Source, limit: int) -> Iterator[dict[str, Any]]:
    size = source.size
    yield {"first": 1, "start": 0, "stop": size, "rows": 1, "size": size, "oversized": size > limit}


def _plan_table(source: Source, limit: int) -> Iterator[dict[str, Any]]:
    if source.format is Format.ARROW:
        groups = [(-1, source.size)]
    else:
        about = _parquet(source.path).metadata
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
    """The rows of a chunk, bad ones included; lines that hold nothing are no rows."""
    if chunk.oversized:
        size = chunk.stop - chunk.start
        line = {Format.LINES: chunk.first, Format.ELEMENTS: chunk.lines[0][2] if chunk.lines else None}
        problem = f"a row of {size:,} bytes is over the limit of {row_bytes:,}; see --max-row-bytes"
        yield Row(chunk.first, line.get(chunk.source.format), problem=problem)
    elif chunk.source.format in (Format.PARQUET, Format.ARROW):
        yield from _read_table(chunk, row_bytes)
    else:
        yield from _read_text(chunk)


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
        return Row(number, line, problem=f"not UTF-8: byte {error.start} of the row is no text")
    except (RecursionError, ValueError) as error:
        return Row(number, line, problem=f"not to be read: {error}")


def _read_table(chunk: Chunk, limit: int) -> Iterator[Row]:
    path, rows = chunk.source.path, chunk.stop - chunk.start
    try:
        table = _group(path, chunk.group) if chunk.group >= 0 else _arrow(path)
    except (OSError, ValueError) as error:
        last = chunk.first + chunk.rows - 1
        raise InputError(f"{chunk.source.name}, rows {chunk.first} to {last}: cannot be read: {error}") from error
    piece = table.slice(chunk.start, rows)
    for at in range(rows):
        one = piece.slice(at, 1)
        size = one.get_total_buffer_size() if rows == 1 else one.nbytes
        if size > limit:
            problem = f"a row of {size:,} bytes is over the limit of {limit:,}; see --max-row-bytes"
            yield Row(chunk.first + at, None, problem=problem)
        else:
            yield Row(chunk.first + at, None, one.to_pylist()[0])


@functools.lru_cache(maxsize=1)
def _group(path: str, group: int) -> Any:
    """A row group. Chunks of one group are read one after another, so the last one is kept."""
    return _parquet(path).read_row_group(group)


@functools.lru_cache(maxsize=4)
def _parquet(path: str) -> Any:
    parquet = tables("pyarrow.parquet")
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no Parquet file: {error}") from error


@functools.lru_cache(maxsize=4)
def _arrow(path: str) -> Any:
    """A table, mapped into memory and not read."""
    pa = tables("pyarrow")
    ipc = tables("pyarrow.ipc")
    try:
        mapped = pa.memory_map(path)
        try:
            return ipc.open_file(mapped).read_all()
        except pa.ArrowInvalid:
            mapped.seek(0)
            return ipc.open_stream(mapped).read_all()
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no Arrow file: {error}") from error


def tables(module: str) -> Any:
    """A module of pyarrow, or InputError with what to install."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise InputError("tables are read and written with pyarrow: install tokentrace[data]") from None
