"""Who sent a request, for which session, and what a key allows."""

import base64
import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ..errors import InputError, brief
from ..files import owned
from ..store.store import Store
from .requests import RequestError
from .sessions import ID, ID_RULE

SESSION_HEADERS = ("x-tokentrace-session", "x-session-id", "x-claude-code-session-id", "session-id")
_PORT = re.compile(r":\d+$")
_LINE = re.compile(r"(admin|agent)\s+sha256:([0-9a-f]{64})(?:\s+\S.*)?")


class Role(StrEnum):
    ADMIN = "admin"
    AGENT = "agent"  # may sample in any session
    SESSION = "session"  # may sample in its own session


@dataclass(frozen=True, slots=True)
class Caller:
    role: Role
    session_id: str | None = None


def hash_key(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def new_key() -> str:
    return "tt-" + secrets.token_urlsafe(32)


def add_key(path: Path, role: Role, name: str = "") -> str:
    """Add a key to a file. Returns the key; only its hash is stored."""
    if not name.isprintable():
        raise InputError("a key's name must be a single line of printable text")
    key = new_key()
    starts_line = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    with open(path, "a", encoding="utf-8", opener=owned) as file:
        file.write("\n" * (not starts_line) + f"{role} {hash_key(key)} {name}".rstrip() + "\n")
        file.flush()
        os.fsync(file.fileno())
    return key


class Keys:
    """The keys in a file, one per line: ``admin|agent sha256:… [name]``.

    Raises InputError if the file is missing or malformed; if it becomes so later, no key is valid.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp, self._callers = self._now(), self._read()

    def caller(self, hashed: str) -> Caller | None:
        if (stamp := self._now()) != self._stamp:
            self._callers = {}
            with contextlib.suppress(InputError):
                self._callers = self._read()
            self._stamp = stamp
        return self._callers.get(hashed)

    def _now(self) -> tuple[int, ...] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_ctime_ns, stat.st_size

    def _read(self) -> dict[str, Caller]:
        path, callers = self._path, dict[str, Caller]()
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise InputError(f"{path} is not a key file: it is not text") from None
        except OSError as error:
            problem = f"{path}: {error.strerror}; create a key file with: tokentrace keys {path} --admin"
            raise InputError(problem) from error
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            match = _LINE.fullmatch(line.strip())
            if match is None:
                rule = "a line must be 'admin sha256:…' or 'agent sha256:…' with 64 hex digits"
                raise InputError(f"{path}, line {number}: {rule}; tokentrace keys {path} --agent adds one")
            callers["sha256:" + match[2]] = Caller(Role(match[1]))
        if Caller(Role.ADMIN) in callers.values():
            return callers
        raise InputError(f"{path} has no admin key, so nobody could read the record; add one with --admin")


@dataclass(frozen=True, slots=True)
class Access:
    store: Store
    keys: Keys | None

    async def caller(self, headers: Mapping[str, str]) -> Caller:
        is_browser = headers.get("authorization", "").lower().startswith("basic ")
        if self.keys is None or is_browser:
            _check_origin(headers, loopback=self.keys is None)
        if self.keys is None:
            return Caller(Role.ADMIN)
        key = _key(headers)
        if not key:
            problem = "send a key: Authorization: Bearer KEY, or x-api-key: KEY"
            raise RequestError(problem, status=401, code="invalid_api_key")
        if (caller := self.keys.caller(hash_key(key))) is not None:
            return caller
        session = await self.store.session_of_key(hash_key(key))
        if session is None:
            raise RequestError("the key is not valid", status=401, code="invalid_api_key")
        return Caller(Role.SESSION, session.id)

    async def session(self, caller: Caller, path_id: str | None, headers: Mapping[str, str]) -> str:
        if caller.role is Role.SESSION:
            id = caller.session_id or ""
            if path_id not in (None, id) or headers.get(SESSION_HEADERS[0]) not in (None, id):
                raise RequestError("the key belongs to another session", status=403, code="forbidden")
            return id
        id = path_id or next((headers[name] for name in SESSION_HEADERS if headers.get(name)), "")
        if not id and self.keys is None and (key := _key(headers)):
            # without a key file, any text names a session, also its key or its id
            session = await self.store.session_of_key(hash_key(key))
            if session is not None:
                return session.id
            is_name = ID.fullmatch(key) and await self.store.session(key) is not None
            return key if is_name else "key-" + hash_key(key).removeprefix("sha256:")[:16]
        if not id:
            ways = "use /sessions/{id}/v1 as the base URL, a session's key, or the header"
            problem = f"the request names no session; {ways} {SESSION_HEADERS[0]}"
            raise RequestError(problem, code="no_session")
        if not ID.fullmatch(id):
            raise RequestError(f"{brief(id)} is not a valid session id: {ID_RULE}", code="no_session")
        return id


def _key(headers: Mapping[str, str]) -> str:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except ValueError:
            return ""
    return headers.get("x-api-key", "").strip()


def _check_origin(headers: Mapping[str, str], *, loopback: bool) -> None:
    """Refuse cross-site requests: browsers send the key by themselves, or need none."""
    host, origin = headers.get("host", ""), headers.get("origin", "")
    if loopback and _PORT.sub("", host.lower()) not in ("localhost", "127.0.0.1", "[::1]"):
        problem = f"the Host {brief(host)} is not this machine: without keys, only localhost is served"
        raise RequestError(problem, status=403)
    is_foreign = bool(origin) and origin.partition("://")[2] != host
    if is_foreign or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        problem = f"requests from other sites ({brief(origin)}) are refused"
        raise RequestError(problem, status=403, code="forbidden")
