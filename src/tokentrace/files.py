"""Files that are there whole or not at all, and folders that one process writes to at a time."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import IO, Any

from .errors import InputError


def sync(path: Path) -> None:
    """Have what was written to a file on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is there whole, or not at all."""
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.draft")
    draft.write_bytes(data)
    sync(draft)
    os.replace(draft, path)


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
