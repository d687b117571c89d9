"""Keys and what they allow. Files and stores have only their hashes."""

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
    AGENT = "agent"
    """Sampling in any session."""
    SESSION = "session"
    """Sampling in the session whose key it is."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request."""

    role: Role
    session: str | None = None


def hash_key(key: str) -> str:
    """The hash of a key, which files and stores have."""
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def new_key() -> str:
    """A random key."""
    return "tt-" + secrets.token_urlsafe(32)


class Keys:
    """The keys of a file, one a line: ``admin|agent sha256:… [name]``. Lines that begin with ``#`` are comments.

    Raises InputError if the file is missing or malformed. A changed file is read again; while it cannot be read, no
    key is valid.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._stamp = path, _stamp(path)
        self._callers = _read(path)

    def caller(self, hashed: str) -> Caller | None:
        """Who has a key, by its hash."""
        stamp = _stamp(self._path)
        if stamp != self._stamp:
            self._callers = {}
            with contextlib.suppress(InputError):
                self._callers = _read(self._path)
            self._stamp = stamp
        return self._callers.get(hashed)


def _read(path: Path) -> dict[str, Caller]:
    """Who has the keys of a file, by their hashes. Raises InputError that names the malformed line."""
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


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Changes when the file changes."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_ctime_ns, stat.st_size


def add_key(path: Path, role: Role, name: str = "") -> str:
    """Add a key to a file, which is created if it is missing. Returns the key, which is stored nowhere."""
    if "\n" in name or "\r" in name:
        raise InputError("a key's name is one line")
    key = new_key()
    with open(path, "a", encoding="utf-8", opener=owned) as file:
        file.write(f"{role} {hash_key(key)} {name}".rstrip() + "\n")
        file.flush()
        os.fsync(file.fileno())
    return key
