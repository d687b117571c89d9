"""Find the files that inputs name, and read their rows in batches."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..errors import InputError, brief

_NO_ROWS: Final = frozenset({"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"})
_HUB_NAME: Final = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_PATTERNS: Final = ("*.jsonl", "*.ndjson", "*.json", "*.jsonl.gz", "*.ndjson.gz", "*.json.gz", "*.parquet")
_TRAINING: Final = frozenset({"train", "training"})
_SPLITS: Final = _TRAINING | {"test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation"}
"""Words in the names of files and folders that name a split of a dataset."""

BATCH_ROWS: Final = 256
BATCH_BYTES: Final = 1 << 20
"""A batch is closed when it has this many rows, or bytes of text."""
ROW_BYTES: Final = 8 << 20
"""Longer rows are reported and left out, unless another limit is set."""


class Format(StrEnum):
    """The format of a source. A JSON file is one value: a list of rows, or one row."""

    LINES = "lines"
    JSON = "json"
    PARQUET = "parquet"


@dataclass(frozen=True, slots=True)
class Source:
    """A file with rows. `name` is the user's name for it; `path` is where it is read, perhaps an unpacked copy.

    `size` is in bytes of text, or rows of a table. `origin` is the file itself; empty for stdin. A `copy` is deleted
    with the source.
    """

    name: str
    path: str
    format: Format
    size: int
    origin: str = ""
    copy: _Copy | None = field(default=None, compare=False)

    @property
    def digest(self) -> str:
        """The SHA-256 of its unpacked bytes."""
        with _reading(self.path), open(self.path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


class _Copy:
    """A temporary file that is deleted with this object. It is kept closed, as there may be thousands."""

    def __init__(self) -> None:
        descriptor, self.name = tempfile.mkstemp(prefix="tokentrace-")
        os.close(descriptor)
        weakref.finalize(self, os.unlink, self.name)


@contextlib.contextmanager
def _reading(name: str, errors: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    try:
        yield
    except errors as error:
        raise InputError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from error


# -- the files of inputs


def find_sources(inputs: Sequence[str], *, split: str | None = None) -> list[Source]:
    """Return the files that inputs name: files, folders, hub names, ``-`` for stdin. Raises InputError."""
    names = [inputs] if isinstance(inputs, (str, os.PathLike)) else inputs
    if not isinstance(names, Iterable) or not (names := list(names)):
        raise InputError("there is no input: name files, folders, or '-' for stdin")
    if split is not None and not isinstance(split, str):
        raise InputError(f"split must be the name of a split, not {brief(split)}")
    return [_source(title, path) for name in names for title, path in _files(name, split)]


def _files(value: Any, split: str | None) -> list[tuple[str, Path]]:
    name = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(name, str) or not name or "\0" in name:
        raise InputError(f"an input is the name of a file or a folder, not {brief(value)}")
    with _reading(brief(name), (OSError, RuntimeError, ValueError)):
        path = Path(name).expanduser()
        if name == "-" or path.is_file():
            return [(name, path)]
        folder = path if path.is_dir() else _from_hub(name)
    files = _files_in(folder, name, split)
    return [(f"{name.rstrip('/')}/{file.relative_to(folder).as_posix()}", file) for file in files]


def _files_in(folder: Path, name: str, split: str | None) -> list[Path]:
    """Return the files with rows. Raises InputError if there are several splits."""
    files = {
        path: _words(path.relative_to(folder).as_posix())
        for path in sorted(folder.rglob("*"))
        if any(map(path.match, _PATTERNS)) and path.name not in _NO_ROWS and path.name[0] != "." and path.is_file()
    }
    if split is not None:
        files = {path: words for path, words in files.items() if _words(split) <= words}
    splits = {next(iter(sorted(words & _SPLITS)), "none") for words in files.values()}
    if split is None and len(splits) > 1 and not _TRAINING | {"none"} >= splits:
        choices = ", ".join(sorted(splits))
        raise InputError(f"{name} holds several splits ({choices}): choose one with --split (split=)")
    if not files:
        which = f" of split {split!r}" if split is not None else ""
        raise InputError(f"{name}: there is no file with rows{which}: .jsonl, .json or .parquet")
    return list(files)


def _words(name: str) -> set[str]:
    return set(re.split(r"[-_./]", name.lower()))


def _from_hub(name: str) -> Path:
    if not _HUB_NAME.fullmatch(name):
        raise InputError(f"there is no file or folder {name!r}")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=list(_PATTERNS)))
    except ImportError:
        raise InputError(f"{name!r} is not a file here; to fetch it from the hub, install tokentrace[hub]") from None
    except Exception as error:
        problem = f"could not be fetched from the hub: {type(error).__name__}: {error}"
        raise InputError(f"{name!r} is not a file here and {problem}") from error


def _source(name: str, path: Path) -> Source:
    if path.suffix == ".parquet":
        return Source(name, str(path), Format.PARQUET, parquet_file(str(path)).metadata.num_rows, str(path))
    origin, copy = "" if name == "-" else str(path), None
    with _reading(name, (OSError, EOFError, zlib.error)):
        if name == "-" or path.suffix == ".gz":
            copy = _Copy()
            with sys.stdin.buffer if name == "-" else gzip.open(path) as packed, open(copy.name, "wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
            name, path = "stdin" if name == "-" else name.removesuffix(".gz"), Path(copy.name)
        return Source(name, str(path), _text_format(path, name), path.stat().st_size, origin, copy)


def _text_format(path: Path, name: str) -> Format:
    """JSON Lines if the name or the first line says so; else one JSON value."""
    if name.endswith((".jsonl", ".ndjson")):
        return Format.LINES
    with path.open("rb") as file:
        pieces = iter(lambda: file.readline(64 << 20), b"")
        lines = (line for piece in pieces if (line := piece.strip().removeprefix(b"\xef\xbb\xbf")))
        first = next(lines, b"")
        is_whole = first[-1:] not in b"[{,:" and next(lines, None) is not None
    return Format.LINES if is_whole or first.lstrip()[:1] not in (b"[", b"{") else Format.JSON


def parquet_file(path: str) -> Any:
    """An open Parquet file. Raises InputError if it is not one."""
    if not os.path.isfile(path):
        raise InputError(f"{path} is {'a folder' if os.path.isdir(path) else 'not there'}: name a file")
    try:
        return pyarrow("pyarrow.parquet").ParquetFile(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a Parquet file: {error}") from error


def pyarrow(module: str = "pyarrow") -> Any:
    """Import pyarrow or one of its modules. Raises an InputError that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError:
        problem = "reading and writing rows needs pyarrow, even for JSON Lines: install tokentrace[data]"
        raise InputError(problem) from None


# -- rows


@dataclass(frozen=True, slots=True)
class Row:
    """A row, or what is wrong with it.

    `number` counts from 1; `line` is its line in JSON Lines; `text` is JSON that is not parsed yet; `end` is where
    the row ends in its source, in the units of `Source.size`; `filled` is True if a table may have filled in nulls.
    """

    number: int
    line: int | None
    value: Any = None
    problem: str | None = None
    text: bytes | None = None
    end: int = 0
    source: str = "rows"
    filled: bool = False

    def parsed(self) -> Row:
        """Parse the text of the row, if it has one."""
        if self.text is None:
            return self
        value = problem = None
        try:
            value = json.loads(self.text.decode("utf-8-sig"))
        except json.JSONDecodeError as error:
            problem = f"not valid JSON: {error.msg} (column {error.colno})"
        except UnicodeDecodeError as error:
            problem = f"not UTF-8: byte {error.start} of the row is not text"
        except (RecursionError, ValueError) as error:
            problem = f"cannot be read: {error}"
        return replace(self, value=value, problem=problem, text=None)


def read_rows(source: Source, *, row_bytes: int = ROW_BYTES) -> Iterator[Row]:
    """Read the rows of a source, including bad ones. Skips blank lines."""
    return (row.parsed() for row in _unparsed(source, row_bytes))


def _unparsed(source: Source, limit: int) -> Iterator[Row]:
    readers = {Format.LINES: _lines, Format.JSON: _values, Format.PARQUET: _table_rows}
    with _reading(source.name, (OSError, ValueError)):
        for row, size in readers[source.format](source, limit):
            problem = f"a row of {size:,} bytes is over the limit of {limit:,}; see --max-row-bytes"
            yield replace(row, value=None, text=None, problem=problem) if size > limit else row


def _lines(source: Source, limit: int) -> Iterator[tuple[Row, int]]:
    """Yield rows of JSON Lines with their sizes. Discards what a line has beyond the limit."""
    with open(source.path, "rb", buffering=1 << 20) as file:
        number = end = 0
        while line := file.readline(limit + 1):
            number, start, end, text = number + 1, end, end + len(line), line
            while not line.endswith(b"\n") and (line := file.readline(1 << 20)):
                end += len(line)
            if text.strip():
                text = text.removesuffix(b"\n")
                yield Row(number, number, text=text, end=end, source=source.name), max(len(text), end - start - 1)


def _values(source: Source, _: int) -> Iterator[tuple[Row, int]]:
    """Yield the elements of a list, unless they are messages."""
    text = Path(source.path).read_bytes()
    whole = Row(1, None, text=text, end=source.size, source=source.name).parsed()
    value, first = whole.value, whole.value[0] if isinstance(whole.value, list) and whole.value else None
    is_message = isinstance(first, dict) and (isinstance(first.get("role"), str) or {"from", "value"} <= set(first))
    if not isinstance(value, list) or is_message:
        yield whole, 0
        return
    for number, row in enumerate(value, 1):
        yield Row(number, None, row, end=source.size * number // len(value), source=source.name), 0


def _table_rows(source: Source, limit: int) -> Iterator[tuple[Row, int]]:
    batches = parquet_file(source.path).iter_batches(batch_size=BATCH_ROWS)
    rows = (batch.slice(at, 1) for batch in batches for at in range(batch.num_rows))
    for number, row in enumerate(rows, 1):
        value = row.to_pylist()[0] if row.nbytes <= limit else None
        yield Row(number, None, value, end=number, source=source.name, filled=True), row.nbytes


# -- batches


class Batch(NamedTuple):
    """Rows of one source. `done` is how much of all sources has been read."""

    rows: Sequence[Row]
    done: int

    def __str__(self) -> str:
        return f"rows {self.rows[0].number} to {self.rows[-1].number} of {self.rows[0].source}"


def read_batches(sources: Sequence[Source], *, row_bytes: int = ROW_BYTES) -> Iterator[Batch]:
    """Read the rows of all sources, in order, in batches, which depend only on the sources."""
    before = 0
    for source in sources:
        rows: list[Row] = []
        size = 0
        for row in _unparsed(source, row_bytes):
            rows.append(row)
            size += len(row.text or b"")
            if len(rows) >= BATCH_ROWS or size >= BATCH_BYTES:
                yield Batch(rows, before + row.end)
                rows, size = [], 0
        before += source.size
        if rows:
            yield Batch(rows, before)
