"""Who sent a request, and for which session. Refuses whatever is not allowed here."""

from __future__ import annotations

import base64
import binascii
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from ..errors import brief
from ..store.store import Store
from .keys import Caller, Keys, Role, hash_key
from .problems import RequestError
from .sessions import ID, ID_RULE

SESSION_HEADERS: Final = ("x-tokentrace-session", "x-session-id", "x-claude-code-session-id", "session-id")
"""Headers that name a session. The first one that is there counts."""


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one gateway. Without keys it is for developers: everybody on this machine may do everything."""

    store: Store
    keys: Keys | None

    async def caller(self, headers: Mapping[str, str]) -> Caller:
        """Who sent a request. Raises RequestError for somebody without a valid key."""
        is_browser = headers.get("authorization", "").lower().startswith("basic ")
        if self.keys is None or is_browser:
            _check_origin(headers, loopback=self.keys is None)
        if self.keys is None:
            return Caller(Role.ADMIN)
        key = _key(headers)
        if not key:
            raise _denied("a key is needed: Authorization: Bearer KEY, or x-api-key: KEY")
        hashed = hash_key(key)
        caller = self.keys.caller(hashed)
        if caller is not None:
            return caller
        session = await self.store.session_of_key(hashed)
        if session is None:
            raise _denied("the key is not valid")
        return Caller(Role.SESSION, session.id)

    async def session(self, caller: Caller, path_id: str | None, headers: Mapping[str, str]) -> str:
        """The session that a request of an agent is for."""
        if caller.role is Role.SESSION:
            id = caller.session or ""
            if path_id not in (None, id) or headers.get(SESSION_HEADERS[0]) not in (None, id):
                raise RequestError("the key is another session's", status=403, code="forbidden")
            return id
        id = path_id or next((headers[name] for name in SESSION_HEADERS if headers.get(name)), "")
        if not id and self.keys is None:
            id = await self._session_of_key(_key(headers))
        if not id:
            raise RequestError(
                "which session is it? Use /sessions/{id}/v1 as the base URL, the key of a session, or the header "
                f"{SESSION_HEADERS[0]}",
                code="no_session",
            )
        if not ID.fullmatch(id):
            raise RequestError(f"{brief(id)} is not the name of a session: {ID_RULE}", code="no_session")
        return id

    async def _session_of_key(self, key: str) -> str:
        """Without keys, any key tells sessions apart: a session's own key, its name, or anything else."""
        if not key:
            return ""
        session = await self.store.session_of_key(hash_key(key))
        if session is not None:
            return session.id
        if ID.fullmatch(key) and await self.store.session(key) is not None:
            return key
        return "key-" + hash_key(key).removeprefix("sha256:")[:16]


def require_admin(caller: Caller) -> None:
    """Raise RequestError unless an administrator asks."""
    if caller.role is not Role.ADMIN:
        raise RequestError("an admin key is needed for this", status=403, code="forbidden")


def _key(headers: Mapping[str, str]) -> str:
    """The key of a request: a bearer token, Anthropic's header, or a browser's password."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return headers.get("x-api-key", "").strip()


def _check_origin(headers: Mapping[str, str], *, loopback: bool) -> None:
    """Refuse what another site makes a browser send: browsers add keys by themselves, or need none."""
    host = headers.get("host", "")
    if loopback and not _is_loopback(host):
        problem = f"the Host {brief(host)} is not this machine: without keys only localhost is served"
        raise RequestError(problem, status=403)
    origin = headers.get("origin", "")
    if origin and origin.partition("://")[2] != host:
        raise RequestError(f"requests of other sites ({brief(origin)}) are refused", status=403, code="forbidden")
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise RequestError("requests of other sites are refused", status=403, code="forbidden")


def _is_loopback(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _denied(problem: str) -> RequestError:
    return RequestError(problem, status=401, code="invalid_api_key")
