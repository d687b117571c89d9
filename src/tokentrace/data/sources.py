"""Sources: the files that rows come from."""

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
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from ..errors import InputError, brief
from ..files import writing

_ROWS: Final = re.compile(r"[^.].*\.(jsonl|ndjson|json)(\.gz)?|[^.].*\.parquet")
_NO_ROWS: Final = frozenset({"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"})
_HUB_NAME: Final = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_TRAINING: Final = frozenset({"train", "training"})
_SPLITS: Final = _TRAINING | {"test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation"}
"""Words in the names of files and folders that name a split of a dataset."""


class Format(StrEnum):
    """The format of a source. JSON is one value: a list of rows, or one row (an object, or a list of messages)."""

    LINES = "lines"
    JSON = "json"
    PARQUET = "parquet"


@dataclass(frozen=True, slots=True)
class Source:
    """A file with rows. `name` is the user's name for it; `path` is where it is read, perhaps an unpacked copy.

    `size` is in bytes of text, or rows of a table. `origin` is the file itself; empty for stdin.
    """

    name: str
    path: str
    format: Format
    size: int
    origin: str = ""

    @property
    def digest(self) -> str:
        """The SHA-256 of its unpacked bytes."""
        with reading(self.path), open(self.path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn system errors while a source is read into an InputError with its name."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror or error}") from error


def find_sources(inputs: Sequence[str], spool: Path, *, split: str | None = None) -> list[Source]:
    """The files that inputs name: files, folders, hub names, ``-`` for stdin.

    Unpacks gzip files and stdin into `spool`. Raises InputError for what cannot be read.
    """
    names = [inputs] if isinstance(inputs, (str, os.PathLike)) else inputs
    if not isinstance(names, Iterable) or not (names := list(names)):
        raise InputError("there is no input: name files, folders, or '-' for stdin")
    if split is not None and not isinstance(split, str):
        raise InputError(f"split must be the name of a split, not {brief(split)}")
    files = [file for name in names for file in _files(name, split)]
    return [_source(title, path, spool / f"source-{at:05d}") for at, (title, path) in enumerate(files)]


def _files(value: Any, split: str | None) -> list[tuple[str, Path]]:
    """The files of an input, each with its title."""
    name = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(name, str) or not name or "\0" in name:
        raise InputError(f"an input is the name of a file or a folder, not {brief(value)}")
    try:
        path = Path(name).expanduser()
        if name == "-" or path.is_file():
            return [(name, path)]
        folder = path if path.is_dir() else None
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"{brief(name)} cannot be read: {error}") from error
    folder = folder or _from_hub(name)
    files = _files_in(folder, name, split)
    return [(f"{name.rstrip('/')}/{file.relative_to(folder).as_posix()}", file) for file in files]


def _files_in(folder: Path, name: str, split: str | None) -> list[Path]:
    """The files with rows in a folder, in order. Raises InputError if they belong to several splits."""
    files = {
        path: set(re.split(r"[-_./]", path.relative_to(folder).as_posix().lower()))
        for path in sorted(folder.rglob("*"))
        if _ROWS.fullmatch(path.name) and path.name not in _NO_ROWS and path.is_file()
    }
    if split is not None:
        files = {path: words for path, words in files.items() if set(re.split(r"[-_./]", split.lower())) <= words}
    splits = {next(iter(sorted(words & _SPLITS)), "none") for words in files.values()}
    if split is None and len(splits) > 1 and not _TRAINING | {"none"} >= splits:
        choices = ", ".join(sorted(splits))
        raise InputError(f"{name} holds several splits ({choices}): choose one with --split (split=)")
    if not files:
        which = f" of split {split!r}" if split is not None else ""
        raise InputError(f"{name}: there is no file with rows{which}: .jsonl, .json or .parquet")
    return list(files)


def _from_hub(name: str) -> Path:
    if not _HUB_NAME.fullmatch(name):
        raise InputError(f"there is no file or folder {name!r}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise InputError(f"{name!r} is not a file here; to fetch it from the hub, install tokentrace[hub]") from None
    patterns = ["*.jsonl", "*.ndjson", "*.json", "*.jsonl.gz", "*.json.gz", "*.parquet"]
    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns))
    except Exception as error:
        problem = f"could not be fetched from the hub: {type(error).__name__}: {error}"
        raise InputError(f"{name!r} is not a file here and {problem}") from error


def _source(name: str, path: Path, copy: Path) -> Source:
    with reading(name):
        if path.suffix == ".parquet":
            return Source(name, str(path), Format.PARQUET, parquet_file(str(path)).metadata.num_rows, str(path))
        origin = str(path)
        if name == "-":
            name, path, origin = "stdin", _unpacked(name, sys.stdin.buffer, copy), ""
        elif path.suffix == ".gz":
            with gzip.open(path, "rb") as stream:
                name, path = name.removesuffix(".gz"), _unpacked(name, stream, copy)
        return Source(name, str(path), _text_format(path, name), path.stat().st_size, origin)


def _unpacked(name: str, stream: Any, copy: Path) -> Path:
    with writing(copy):
        copy.parent.mkdir(parents=True, exist_ok=True)
        with copy.open("wb") as file:
            try:
                shutil.copyfileobj(stream, file, 1 << 20)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise InputError(f"{name}: cannot be unpacked: {error}") from error
    return copy


def _text_format(path: Path, name: str) -> Format:
    """JSON Lines if the name or the first line says so; else one JSON value."""
    if name.endswith((".jsonl", ".ndjson")):
        return Format.LINES
    with path.open("rb") as file:
        line = file.readline(64 << 20).removeprefix(b"\xef\xbb\xbf")
        while line and not line.strip():
            line = file.readline(64 << 20)
        has_more = bool(file.read(1 << 16).strip())
    if line.lstrip()[:1] not in (b"[", b"{"):
        return Format.LINES
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        has_more = has_more and line.rstrip()[-1:] not in b"[{,"
    return Format.LINES if has_more else Format.JSON


def parquet_file(path: str) -> Any:
    """An open Parquet file. Raises InputError if it is not one."""
    if not os.path.isfile(path):
        raise InputError(f"{path} is {'a folder' if os.path.isdir(path) else 'not there'}: name a file")
    try:
        return pyarrow("pyarrow.parquet").ParquetFile(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a Parquet file: {error}") from error


def pyarrow(module: str = "pyarrow") -> Any:
    """pyarrow or one of its modules. Raises InputError that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError:
        problem = "files of rows are read and written with pyarrow, JSON Lines included: install tokentrace[data]"
        raise InputError(problem) from None
