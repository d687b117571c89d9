"""Write files whole or not at all, keep them private to their owner, and lock folders."""

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
    """Turn an OSError into a WriteError that names the path."""
    try:
        yield
    except OSError as error:
        problem = os.strerror(error.errno) if error.errno else str(error)
        raise WriteError(problem, path=str(path)) from error


def unwritable(path: Path) -> str:
    """Why a file cannot be written there; empty if it can."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    return (
        "" if os.access(path if path.exists() else path.parent, os.W_OK) else "the system does not allow it"
    )


@contextlib.contextmanager
def whole_file(path: Path, *, private: bool = False) -> Iterator[IO[bytes]]:
    """Open a file that is named when the block succeeds; a `private` one for its owner only."""
    draft = draft_path(path)
    file = open(draft, "wb", opener=owned if private else None)  # noqa: SIM115
    try:
        yield file
        file.flush()
        os.fsync(file.fileno())
        file.close()
        os.replace(draft, path)
    finally:
        with contextlib.suppress(OSError):  # the disk may still be full
            file.close()
        draft.unlink(missing_ok=True)


def draft_path(path: Path) -> Path:
    """A unique name for a file that is not complete yet."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}.draft")


def write_whole(path: Path, data: bytes | Iterable[bytes], *, private: bool = False) -> None:
    """Write a file whole or not at all: see `whole_file`."""
    with whole_file(path, private=private) as file:
        file.writelines([data] if isinstance(data, bytes) else data)


def owned(path: str, flags: int) -> int:
    """An `opener` for files that only their owner may read. An existing file keeps its mode.

    Raises InputError for links: anyone who may write to the folder could point them anywhere.
    """
    try:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP and Path(path).is_symlink():
            problem = f"{path} is a link, and links are not followed: put the file itself there"
            raise InputError(problem) from error
        raise


def lock(file: IO[Any], problem: str) -> None:
    """Lock an open file until it is closed. Raises InputError(problem) if it is locked.

    Does nothing on systems and file systems without such locks.
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
