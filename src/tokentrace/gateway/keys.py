"""Who may do what. Keys are long random strings; only their hashes are kept, in files and in stores."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from ..errors import InputError
from ..files import owned

_LINE: Final = re.compile(r"(admin|agent)\s+sha256:([0-9a-f]{64})(?:\s+\S.*)?")


class Role(StrEnum):
    """What a key is for."""

    ADMIN = "admin"
    """Everything: making, reading, exporting and dropping sessions, pausing, draining, metrics."""
    AGENT = "agent"
    """Sampling, in any session whose name it knows."""
    SESSION = "session"
    """Sampling in one session, whose key it is."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request."""

    role: Role
    session: str | None = None
    """The one session that a session's key is for."""


def hash_key(key: str) -> str:
    """What is kept of a key."""
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def new_key() -> str:
    """A key that nobody can guess."""
    return "tt-" + secrets.token_urlsafe(32)


class Keys:
    """The keys of a file: a line each, ``admin|agent sha256:… [name]``. Lines that begin with ``#`` are comments.

    InputError where there is no such file, or it is not one of keys. A file that changes is
    read again; while it cannot be read, no key counts.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._seen = path, _changed(path)
        self._callers = _read(path)

    def caller(self, hashed: str) -> Caller | None:
        """Who a key belongs to, by its hash."""
        changed = _changed(self._path)
        if changed != self._seen:
            self._callers = {}
            with contextlib.suppress(InputError):
                self._callers = _read(self._path)
            self._seen = changed
        return self._callers.get(hashed)


def _read(path: Path) -> dict[str, Caller]:
    """Who the keys of a file belong to, by their hashes; InputError names the line that is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a file of keys: it is not text") from None
    except OSError as error:
        problem = f"{path}: {error.strerror}; make a file of keys with: tokentrace keys {path} --admin"
        raise InputError(problem) from error
    callers: dict[str, Caller] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise InputError(
                f"{path}, line {number}: a key is written as 'admin sha256:…' or 'agent sha256:…', with 64 digits "
                f"of its hash; tokentrace keys {path} --agent adds one"
            )
        callers["sha256:" + match[2]] = Caller(Role(match[1]))
    if not any(caller.role is Role.ADMIN for caller in callers.values()):
        raise InputError(f"{path}: has no admin key, so nobody could read what is recorded; add one with --admin")
    return callers


def _changed(path: Path) -> tuple[int, ...] | None:
    """What tells whether a file is another than before."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns, found.st_size


def add_key(path: Path, role: Role, name: str = "") -> str:
    """Add a key to a file, which is made if it is not there; returns the key, which is stored nowhere."""
    if "\n" in name or "\r" in name:
        raise InputError("a key's name is one line")
    key = new_key()
    with open(path, "a", encoding="utf-8", opener=owned) as file:
        file.write(f"{role} {hash_key(key)} {name}".rstrip() + "\n")
        file.flush()
        os.fsync(file.fileno())
    return key
