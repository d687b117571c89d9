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
from typing import Any, NamedTuple

from ..errors import InputError, brief
from ..settings import instance

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_ROWS = re.compile(r"(?!(.*/)?(\.|(dataset_(infos?|dict)|state)\.json$)).*\.((nd|)jsonl?(\.gz)?|parquet)")
_TRAINING = frozenset({"train", "training"})
_SPLITS = _TRAINING | {"test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation"}

BATCH_ROWS = 256
BATCH_BYTES = 1 << 20
"""A batch ends at this many rows, or bytes of text."""


class Format(StrEnum):
    """A JSON file is one value: a list of rows, or one row."""

    LINES = "lines"
    JSON = "json"
    PARQUET = "parquet"


@dataclass(frozen=True, slots=True)
class Source:
    """A file of rows. `path` may be an unpacked copy of `origin`, which is empty for stdin."""

    name: str
    path: str
    format: Format
    size: int
    origin: str = ""
    copy: _Copy | None = field(default=None, compare=False)

    @property
    def digest(self) -> str:
        with _reading(self.path), open(self.path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


class _Copy:
    """A temporary file, deleted with this object. It is closed: there may be thousands."""

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


def find_sources(inputs: Sequence[str], *, split: str | None = None) -> list[Source]:
    """The files that inputs name: files, folders, hub names, ``-`` for stdin. Raises InputError."""
    names = [inputs] if isinstance(inputs, (str, os.PathLike)) else inputs
    if not isinstance(names, Iterable) or not (names := list(names)):
        raise InputError("there is no input: name files, folders, or '-' for stdin")
    if split is not None:
        instance("split", split, str, InputError)
    return [_source(title, path) for name in names for title, path in _files(name, split)]


def _files(value: Any, split: str | None) -> list[tuple[str, Path]]:
    name = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(name, str) or not name:
        raise InputError(f"an input is the name of a file or a folder, not {brief(value)}")
    with _reading(brief(name), (OSError, RuntimeError, ValueError)):
        path = Path(name).expanduser()
        if name == "-" or path.is_file():
            return [(name, path)]
        folder = path if path.is_dir() else _from_hub(name)
    files = _files_in(folder, name, split)
    return [(f"{name.rstrip('/')}/{file.relative_to(folder).as_posix()}", file) for file in files]


def _files_in(folder: Path, name: str, split: str | None) -> list[Path]:
    """Raises InputError if there are several splits."""
    files = {
        path: _words(name)
        for path in sorted(folder.rglob("*"))
        if _ROWS.fullmatch(name := path.relative_to(folder).as_posix()) and path.is_file()
    }
    if split is not None:
        files = {path: words for path, words in files.items() if _words(split) <= words}
    splits = {min(words & _SPLITS, default="none") for words in files.values()}
    if split is None and len(splits) > 1 and not _TRAINING | {"none"} >= splits:
        choices = ", ".join(sorted(splits))
        raise InputError(f"{name} holds several splits ({choices}): choose one with --split (split=)")
    if not files:
        which = "" if split is None else f" of split {split!r}"
        raise InputError(f"{name}: there is no file with rows{which}: .jsonl, .json or .parquet")
    return list(files)


def _words(name: str) -> set[str]:
    return set(re.split(r"[-_./]", name.lower()))


def _from_hub(name: str) -> Path:
    if not _HUB_NAME.fullmatch(name):
        raise InputError(f"there is no file or folder {name!r}")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=["*json*", "*.parquet"]))
    except Exception as error:
        problem = f"it could not be fetched from the hub: {type(error).__name__}: {error}"
        if isinstance(error, ImportError):
            problem = "to fetch it from the hub, install tokentrace[hub]"
        raise InputError(f"{name!r} is not a file here; {problem}") from error


def _source(name: str, path: Path) -> Source:
    if path.suffix == ".parquet":
        return Source(name, str(path), Format.PARQUET, parquet_file(str(path)).metadata.num_rows, str(path))
    origin, copy = "" if name == "-" else str(path), None
    with _reading(name, (OSError, EOFError, zlib.error)):
        if name == "-" or path.suffix == ".gz":
            copy = _Copy()
            with (
                sys.stdin.buffer if name == "-" else gzip.open(path) as packed,
                open(copy.name, "wb") as file,
            ):
                shutil.copyfileobj(packed, file, 1 << 20)
            name, path = "stdin" if name == "-" else name.removesuffix(".gz"), Path(copy.name)
        return Source(name, str(path), _text_format(path, name), path.stat().st_size, origin, copy)


def _text_format(path: Path, name: str) -> Format:
    """Return JSON Lines if the name or first line says so, else JSON."""
    if name.endswith((".jsonl", ".ndjson")):
        return Format.LINES
    with path.open("rb") as file:
        lines = (text for line in file if (text := line.strip().removeprefix(b"\xef\xbb\xbf")))
        first = next(lines, b"")
        is_whole = first[-1:] not in b"[{,:" and next(lines, None) is not None
    return Format.LINES if is_whole or first.lstrip()[:1] not in (b"[", b"{") else Format.JSON


def parquet_file(path: str) -> Any:
    """Open a Parquet file. Raises InputError if it is not one."""
    try:
        return pyarrow("pyarrow.parquet").ParquetFile(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as Parquet: {error}") from error


def pyarrow(module: str = "pyarrow") -> Any:
    """Import pyarrow or one of its modules. Raises InputError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise InputError("rows need pyarrow, even in JSON Lines: install tokentrace[data]") from None


@dataclass(frozen=True, slots=True)
class Row:
    """A row, or its problem. `number` and `line` (of JSON Lines) count from 1."""

    number: int
    line: int | None
    value: Any = None
    problem: str | None = None
    text: bytes | None = None
    """JSON that is not parsed yet."""
    end: int = 0
    """Where the row ends, in units of `Source.size`."""
    source: str = "rows"
    filled: bool = False
    """True if a table may have filled in nulls."""

    def parsed(self) -> Row:
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


def read_rows(source: Source) -> Iterator[Row]:
    """Read a source's rows, bad ones too. Skips blank lines."""
    return (row.parsed() for row in _unparsed(source))


def _unparsed(source: Source) -> Iterator[Row]:
    readers = {Format.LINES: _lines, Format.JSON: _values, Format.PARQUET: _table_rows}
    with _reading(source.name, (OSError, ValueError)):
        yield from readers[source.format](source)


def _lines(source: Source) -> Iterator[Row]:
    end = 0
    with open(source.path, "rb", buffering=1 << 20) as file:
        for number, line in enumerate(file, 1):
            end += len(line)
            if line.strip():
                yield Row(number, number, text=line.removesuffix(b"\n"), end=end, source=source.name)


def _values(source: Source) -> Iterator[Row]:
    """Yield the items of a list, unless they are messages."""
    text = Path(source.path).read_bytes()
    whole = Row(1, None, text=text, end=source.size, source=source.name).parsed()
    value = whole.value
    first = value[0] if isinstance(value, list) and value and isinstance(value[0], dict) else {}
    is_message = isinstance(first.get("role"), str) or {"from", "value"} <= first.keys()
    if not isinstance(value, list) or is_message:
        yield whole
        return
    for number, row in enumerate(value, 1):
        yield Row(number, None, row, end=source.size * number // len(value), source=source.name)


def _table_rows(source: Source) -> Iterator[Row]:
    batches = parquet_file(source.path).iter_batches(batch_size=BATCH_ROWS)
    rows = (row for batch in batches for row in batch.to_pylist())
    for number, row in enumerate(rows, 1):
        yield Row(number, None, row, end=number, source=source.name, filled=True)


class Batch(NamedTuple):
    rows: Sequence[Row]
    done: int
    """How much of all sources has been read."""


def read_batches(sources: Sequence[Source]) -> Iterator[Batch]:
    """Read all rows in order, in batches that depend only on the sources."""
    before = 0
    for source in sources:
        rows, size = list[Row](), 0
        for row in _unparsed(source):
            rows.append(row)
            size += len(row.text or b"")
            if len(rows) >= BATCH_ROWS or size >= BATCH_BYTES:
                yield Batch(rows, before + row.end)
                rows, size = [], 0
        before += source.size
        if rows:
            yield Batch(rows, before)
