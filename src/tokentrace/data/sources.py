"""Sources: the files that rows come from."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import importlib
import json
import lzma
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, Final

from ..errors import InputError, shown
from ..files import writing

_BLOCK: Final = 1 << 20

_LINES: Final = (".jsonl", ".ndjson")
_TABLES: Final = (".parquet", ".arrow", ".feather")
_PACKED: Final = (".gz", ".bz2", ".xz", ".zst")
_HUB_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+")
_TRAINING: Final = frozenset({"train", "training"})
_SPLITS: Final = _TRAINING | {"test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation"}
"""Words in the names of files and folders that say which split of a dataset they are."""
_FIRST_LINE: Final = 64 << 20
"""How much of a first line is read to tell JSON Lines from one JSON value."""


class Format(StrEnum):
    """How the rows of a source are written."""

    LINES = "lines"
    """JSON, one row a line."""
    ELEMENTS = "elements"
    """One JSON array of rows."""
    OBJECT = "object"
    """One JSON value that is a row: an object, or the list of a conversation's messages."""
    PARQUET = "parquet"
    ARROW = "arrow"
    """Arrow's own format, as ``datasets`` saves it."""


TABLES: Final = (Format.PARQUET, Format.ARROW)


@dataclass(frozen=True, slots=True)
class Source:
    """A file with rows. `name` is what the user called it; `path` is where it is read, perhaps unpacked."""

    name: str
    path: str
    format: Format
    size: int
    """Bytes of text, or rows of a table."""
    origin: str = ""
    """Where the file itself is, packed or not; empty for stdin."""

    @property
    def digest(self) -> str:
        """The SHA-256 of its unpacked bytes, read from beginning to end."""
        with reading(self.path), open(self.path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """A system error while a source is read becomes an InputError with its name."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror or error}") from error


# -- finding sources


def find_sources(inputs: Sequence[str], spool: Path, *, split: str | None = None) -> list[Source]:
    """The files that inputs name: files, folders, ``datasets`` saved to disk, hub names, ``-`` for stdin.

    Packed files and stdin are unpacked into `spool`. InputError says what cannot be read, and what can.
    """
    if isinstance(inputs, (str, os.PathLike)):
        inputs = [os.fspath(inputs)]
    if not isinstance(inputs, Iterable) or not (inputs := [_named(each) for each in inputs]):
        raise InputError("there is no input: name files, folders, or '-' for stdin")
    if split is not None and not isinstance(split, str):
        raise InputError(f"split must be the name of a split, not {shown(split)}")
    sources: list[Source] = []
    for name in inputs:
        sources += _sources(name, spool, split, len(sources))
    return sources


def _named(value: Any) -> str:
    """An input as a string."""
    name = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(name, str) or not name or "\0" in name:
        raise InputError(f"an input is the name of a file or a folder, not {shown(value)}")
    return name


def _sources(name: str, spool: Path, split: str | None, count: int) -> list[Source]:
    if name == "-":
        return [_unpacked("stdin", sys.stdin.buffer, spool, count)]
    try:
        path = Path(name).expanduser()
        is_file = path.is_file()
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"{shown(name)} cannot be looked at: {error}") from error
    if is_file:
        return [_source(path, name, spool, count)]
    if not path.is_dir():
        if not _HUB_NAME.fullmatch(name) or name.startswith("."):
            raise InputError(f"there is no file or folder {name!r}")
        path = _from_hub(name)
    files = _files(path, name, split)
    return [
        _source(file, f"{name.rstrip('/')}/{file.relative_to(path).as_posix()}", spool, count + at)
        for at, file in enumerate(files)
    ]


def _files(folder: Path, name: str, split: str | None) -> list[Path]:
    """The files with rows in a folder, in order."""
    if (folder / "dataset_dict.json").is_file():
        splits = _json_file(folder / "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or not splits:
            raise InputError(f"{name}: dataset_dict.json names no splits")
        return _files(folder / _choose_split([str(each) for each in splits], split, name), name, None)
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        try:
            names = [str(row["filename"]) for row in _json_file(folder / "state.json")["_data_files"]]
        except (KeyError, TypeError):
            raise InputError(f"{name}: state.json does not say which files the dataset has") from None
        return [folder / each for each in names]
    files = sorted(path for path in folder.rglob("*") if path.is_file() and _is_data(path))
    words = {path: _words(path.relative_to(folder)) for path in files}
    if split is None:
        _check_one_split(words, name)
    else:
        files = [path for path in files if set(_words(Path(split))) <= set(words[path])]
    if not files:
        of = f" of split {split!r}" if split is not None else ""
        raise InputError(f"{name}: there is no file with rows{of}: .jsonl, .json, .parquet or .arrow")
    return files


def _words(path: Path) -> list[str]:
    """The words in a path. They name its split: ``train-00000-of-00001.parquet``, ``train/x.jsonl``."""
    return re.split(r"[-_./]", path.as_posix().lower())


def _check_one_split(files: Mapping[Path, list[str]], folder: str) -> None:
    """Raises InputError if some files are a test or validation split and others are not."""
    splits = [next((word for word in words if word in _SPLITS), None) for words in files.values()]
    named = sorted({split for split in splits if split is not None})
    if len(set(splits)) > 1 and not _TRAINING.issuperset(named):
        unnamed = ", and files of none" if None in splits else ""
        raise InputError(
            f"{folder} holds several splits: {', '.join(named)}{unnamed}; choose one with --split (split=)"
        )


def _choose_split(splits: list[str], split: str | None, name: str) -> str:
    wanted = split or ("train" if "train" in splits else splits[0] if len(splits) == 1 else None)
    if wanted is None or wanted not in splits:
        problem = f"there is no split {split!r}" if split else "a split has to be chosen"
        raise InputError(f"{name}: {problem}; there are {', '.join(splits)}")
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
        raise InputError(f"{name!r} is not a file here; to fetch it from the hub, install tokentrace[hub]") from None
    patterns = [f"*{suffix}" for suffix in (*_LINES, ".json", *_TABLES)]
    patterns += [f"*{suffix}{packed}" for suffix in (*_LINES, ".json") for packed in _PACKED]
    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns))
    except Exception as error:
        raise InputError(
            f"{name!r} is not a file here and could not be fetched from the hub: {type(error).__name__}: {error}"
        ) from error


def _source(path: Path, name: str, spool: Path, count: int) -> Source:
    if path.suffix in _PACKED:
        with reading(name):
            packed = _opened(path)
        with packed:
            return _unpacked(name.removesuffix(path.suffix), packed, spool, count, str(path))
    if path.suffix == ".parquet":
        return Source(name, str(path), Format.PARQUET, parquet_file(str(path)).metadata.num_rows, str(path))
    if path.suffix in _TABLES:
        return Source(name, str(path), Format.ARROW, arrow_table(str(path)).num_rows, str(path))
    with reading(name):
        return Source(name, str(path), _text_format(path), path.stat().st_size, str(path))


def _text_format(path: Path) -> Format:
    """Lines, an array or one row: by the name, or by how it begins."""
    if path.suffix in _LINES:
        return Format.LINES
    with path.open("rb") as file:
        line = file.readline(_FIRST_LINE).removeprefix(b"\xef\xbb\xbf")
        while line and not line.strip():
            line = file.readline(_FIRST_LINE)
        has_more = bool(file.read(1 << 16).strip())
    if (line := line.lstrip())[:1] not in (b"[", b"{") or (has_more and _is_json(line)):
        return Format.LINES
    if line.startswith(b"["):
        return Format.OBJECT if _is_conversation(path) else Format.ELEMENTS
    return Format.LINES if has_more and not line.endswith(b"\n") else Format.OBJECT


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _is_conversation(path: Path) -> bool:
    """True if the first element of a JSON array is a message, so that the array is one conversation."""
    with path.open("rb") as file:
        for size in (1 << 12, 1 << 16, _FIRST_LINE):
            file.seek(0)
            text = file.read(size).decode("utf-8-sig", "ignore").lstrip()
            try:
                first, _ = json.JSONDecoder().raw_decode(text[1:].lstrip())
            except (ValueError, RecursionError):
                continue
            return isinstance(first, dict) and (isinstance(first.get("role"), str) or {"from", "value"} <= set(first))
    return False


def _opened(path: Path) -> IO[bytes]:
    if path.suffix == ".zst":
        stream: IO[bytes] = pyarrow().input_stream(str(path), compression="zstd")
        return stream
    opener: Any = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}[path.suffix]
    opened: IO[bytes] = opener(path, "rb")
    return opened


def _unpacked(name: str, stream: IO[bytes], spool: Path, count: int, origin: str = "") -> Source:
    """Write an unpacked copy of a stream."""
    path = spool / f"source-{count:05d}{Path(name).suffix or '.json'}"
    with writing(path):
        spool.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as copy:
            while block := _read_packed(stream, name):
                copy.write(block)
    return Source(name, str(path), _text_format(path), path.stat().st_size, origin)


def _read_packed(stream: IO[bytes], name: str) -> bytes:
    try:
        return stream.read(_BLOCK)
    except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
        raise InputError(f"{name}: cannot be unpacked: {error}") from error


def parquet_file(path: str) -> Any:
    try:
        return pyarrow("pyarrow.parquet").ParquetFile(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a Parquet file: {error}") from error


def arrow_table(path: str) -> Any:
    """A table of an Arrow file, mapped into memory and not read."""
    pa, ipc = pyarrow(), pyarrow("pyarrow.ipc")
    try:
        mapped = pa.memory_map(path)
        try:
            return ipc.open_file(mapped).read_all()
        except pa.ArrowInvalid:
            mapped.seek(0)
            return ipc.open_stream(mapped).read_all()
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not an Arrow file: {error}") from error


def pyarrow(module: str = "pyarrow") -> Any:
    """pyarrow or a module of it, or InputError with what to install."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise InputError(
            "files of rows, JSON Lines among them, are read and written with pyarrow: install tokentrace[data]"
        ) from None
