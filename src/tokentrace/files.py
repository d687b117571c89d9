"""Files that are written whole or not at all, files only their owner may read, folders with one writer at a time."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from .errors import InputError, WriteError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system says about a file that cannot be written, as a WriteError with its path."""
    try:
        yield
    except OSError as error:
        problem = os.strerror(error.errno) if error.errno else str(error)
        raise WriteError(problem, path=str(path)) from error


def unwritable(path: Path) -> str:
    """Why a file cannot be written there, in words; empty where nothing is known against it."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    return "" if os.access(path if path.exists() else path.parent, os.W_OK) else "the system does not allow it"


def sync(path: Path) -> None:
    """Have what was written to a file on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_whole(path: Path, data: bytes | Iterable[bytes], *, private: bool = False) -> None:
    """Write a file that is there whole, or not at all; a `private` one is for its owner alone."""
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.draft")
    try:
        with open(draft, "xb", opener=owned if private else None) as file:
            file.writelines([data] if isinstance(data, bytes) else data)
        sync(draft)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def owned(path: str, flags: int) -> int:
    """An `opener` for files that only their owner may read. Links are not followed: whoever may write to the folder
    could have them point anywhere.

    A file that is there keeps the mode that it has.
    """
    try:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP and Path(path).is_symlink():
            raise InputError(f"{path} is a link, and not followed: put the file itself there, or remove it") from error
        raise


def lock(file: IO[Any], problem: str) -> None:
    """Hold an open file for this process, for as long as it is open; InputError with `problem` where another does.

    Systems and file systems that know no such locks let everybody pass.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(problem) from None
    except OSError:  # a file system without locks
        return
