"""Who sent a request, and for which session. Deny by default: whatever is not allowed here is refused."""

from __future__ import annotations

import base64
import binascii
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from ..errors import shown
from ..store.store import Store
from .keys import Caller, Keys, Role, hash_key
from .requests import RequestError
from .sessions import ID

SESSION_HEADERS: Final = ("x-tokentrace-session", "x-session-id", "x-claude-code-session-id", "session-id")
"""Headers that name a session; the first that is there counts."""


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one gateway. Without keys it is for developers: everybody on this machine may do everything."""

    store: Store
    keys: Keys | None

    async def caller(self, headers: Mapping[str, str]) -> Caller:
        """Who sent a request; RequestError where that is nobody who may."""
        given = _key(headers)
        if self.keys is None or _is_browser(headers):
            _check_origin(headers, loopback=self.keys is None)
        if self.keys is None:
            return Caller(Role.ADMIN)
        if not given:
            raise _denied("a key is needed: Authorization: Bearer KEY, or x-api-key: KEY")
        hashed = hash_key(given)
        caller = self.keys.caller(hashed)
        if caller is not None:
            return caller
        session = await self.store.session_of_key(hashed)
        if session is None:
            raise _denied("the key is not known")
        return Caller(Role.SESSION, session.id)

    async def session(self, caller: Caller, path_id: str | None, headers: Mapping[str, str]) -> str:
        """The session that a request of an agent is for."""
        if caller.role is Role.SESSION:
            own = caller.session or ""
            if path_id not in (None, own) or headers.get(SESSION_HEADERS[0]) not in (None, own):
                raise RequestError("the key is another session's", status=403, code="forbidden")
            return own
        named = path_id or next((headers[name] for name in SESSION_HEADERS if headers.get(name)), None)
        if named is None and self.keys is None:
            named = await self._of_key(_key(headers))
        if named is None:
            raise RequestError(
                "which session is it? Use /sessions/{id}/v1 as the base URL, the key of a session, or the header "
                f"{SESSION_HEADERS[0]}",
                code="no_session",
            )
        if not ID.fullmatch(named):
            rule = "letters, digits and . _ : @ ~ -, at most 128 of them, the first a letter or a digit"
            raise RequestError(f"{shown(named)} is not the name of a session: {rule}", code="no_session")
        return named

    async def _of_key(self, key: str) -> str | None:
        """Without keys, whatever is given as one tells sessions apart: the key of a session, its name, or any other."""
        if not key:
            return None
        known = await self.store.session_of_key(hash_key(key))
        if known is not None:
            return known.id
        if ID.fullmatch(key) and await self.store.session(key) is not None:
            return key
        return "key-" + hash_key(key).removeprefix("sha256:")[:16]


def require_admin(caller: Caller) -> None:
    """RequestError unless an administrator asks."""
    if caller.role is not Role.ADMIN:
        raise RequestError("an admin key is needed for this", status=403, code="forbidden")


def _key(headers: Mapping[str, str]) -> str:
    """The key that a request brings: a bearer's, Anthropic's header, or the password that a browser was told."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return headers.get("x-api-key", "").strip()


def _is_browser(headers: Mapping[str, str]) -> bool:
    return headers.get("authorization", "").lower().startswith("basic ")


def _check_origin(headers: Mapping[str, str], *, loopback: bool) -> None:
    """Refuse what another site makes a browser on this machine send: browsers add keys by themselves, or need none."""
    host = headers.get("host", "")
    if loopback and not _is_loopback(host):
        raise RequestError(
            f"the Host {shown(host)} is not this machine: without keys only localhost is served", status=403
        )
    origin = headers.get("origin")
    if origin and _host(origin) != host:
        raise RequestError(f"requests of other sites ({shown(origin)}) are refused", status=403, code="forbidden")
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise RequestError("requests of other sites are refused", status=403, code="forbidden")


def _host(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _denied(problem: str) -> RequestError:
    return RequestError(problem, status=401, code="invalid_api_key")
