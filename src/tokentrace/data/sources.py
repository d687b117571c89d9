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
from typing import IO, Any, Final

from ..errors import InputError, brief
from ..files import writing

_LINES: Final = (".jsonl", ".ndjson")
_ROWS: Final = re.compile(r"[^.].*\.(jsonl|ndjson|json)(\.gz)?|[^.].*\.parquet")
_NO_ROWS: Final = frozenset({"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"})
_HUB_NAME: Final = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_TRAINING: Final = frozenset({"train", "training"})
_SPLITS: Final = _TRAINING | {"test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation"}
"""Words in the names of files and folders that name a split of a dataset."""


class Format(StrEnum):
    """The format of a source."""

    LINES = "lines"
    """JSON Lines."""
    JSON = "json"
    """One JSON value: a list of rows, or one row (an object, or the messages of a conversation)."""
    PARQUET = "parquet"


@dataclass(frozen=True, slots=True)
class Source:
    """A file with rows. `name` is the user's name for it; `path` is where it is read, perhaps an unpacked copy."""

    name: str
    path: str
    format: Format
    size: int
    """Bytes of text, or rows of a table."""
    origin: str = ""
    """The path of the file itself, packed or not; empty for stdin."""

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
    if isinstance(inputs, (str, os.PathLike)):
        inputs = [os.fspath(inputs)]
    if not isinstance(inputs, Iterable) or not (inputs := [_checked_name(name) for name in inputs]):
        raise InputError("there is no input: name files, folders, or '-' for stdin")
    if split is not None and not isinstance(split, str):
        raise InputError(f"split must be the name of a split, not {brief(split)}")
    sources: list[Source] = []
    for name in inputs:
        for title, path in _files(name, split):
            sources.append(_source(path, title, spool / f"source-{len(sources):05d}"))
    return sources


def _checked_name(value: Any) -> str:
    name = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(name, str) or not name or "\0" in name:
        raise InputError(f"an input is the name of a file or a folder, not {brief(value)}")
    return name


def _files(name: str, split: str | None) -> Iterator[tuple[str, Path]]:
    """The files of an input, each with its title."""
    path = Path(name)
    try:
        path = path.expanduser()
        is_file, is_folder = name == "-" or path.is_file(), path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"{brief(name)} cannot be read: {error}") from error
    if is_file:
        yield name, path
        return
    if not is_folder:
        if not _HUB_NAME.fullmatch(name):
            raise InputError(f"there is no file or folder {name!r}")
        path = _from_hub(name)
    for file in _files_in(path, name, split):
        yield f"{name.rstrip('/')}/{file.relative_to(path).as_posix()}", file


def _files_in(folder: Path, name: str, split: str | None) -> list[Path]:
    """The files with rows in a folder, in order. Raises InputError if they belong to several splits."""
    files = {
        path: set(re.split(r"[-_./]", path.relative_to(folder).as_posix().lower()))
        for path in sorted(folder.rglob("*"))
        if _ROWS.fullmatch(path.name) and path.name not in _NO_ROWS and path.is_file()
    }
    if split is not None:
        files = {path: words for path, words in files.items() if set(re.split(r"[-_./]", split.lower())) <= words}
    else:
        splits = {next(iter(sorted(words & _SPLITS)), "none") for words in files.values()}
        if len(splits) > 1 and not _TRAINING | {"none"} >= splits:
            choices = ", ".join(sorted(splits))
            raise InputError(f"{name} holds several splits ({choices}): choose one with --split (split=)")
    if not files:
        which = f" of split {split!r}" if split is not None else ""
        raise InputError(f"{name}: there is no file with rows{which}: .jsonl, .json or .parquet")
    return list(files)


def _from_hub(name: str) -> Path:
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


def _source(path: Path, name: str, copy: Path) -> Source:
    if name == "-":
        return _unpacked(sys.stdin.buffer, "stdin", "", copy)
    with reading(name):
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as stream:
                return _unpacked(stream, name.removesuffix(".gz"), str(path), copy)
        if path.suffix == ".parquet":
            return Source(name, str(path), Format.PARQUET, parquet_file(str(path)).metadata.num_rows, str(path))
        return Source(name, str(path), _text_format(path, name), path.stat().st_size, str(path))


def _unpacked(stream: IO[bytes] | gzip.GzipFile, name: str, origin: str, copy: Path) -> Source:
    with writing(copy):
        copy.parent.mkdir(parents=True, exist_ok=True)
        with copy.open("wb") as file:
            try:
                shutil.copyfileobj(stream, file, 1 << 20)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise InputError(f"{name}: cannot be unpacked: {error}") from error
    return Source(name, str(copy), _text_format(copy, name), copy.stat().st_size, origin)


def _text_format(path: Path, name: str) -> Format:
    """JSON Lines if the name or the first line says so; else one JSON value."""
    if name.endswith(_LINES):
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
        return Format.JSON if line.rstrip()[-1:] in b"[{," or not has_more else Format.LINES
    return Format.LINES if has_more else Format.JSON


def parquet_file(path: str) -> Any:
    """An open Parquet file. Raises InputError if it is not one."""
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
