"""Ids that a gateway makes up: of answers, of calls, of turns in a store. Pure."""

from __future__ import annotations

import hashlib
import secrets
from typing import Final

from .items import CallId

_ALPHABET: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def random_id() -> str:
    """An id for an answer."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(24))


def response_name(id: str) -> str:
    """The name of an answer in a store. Ignores the prefix that a dialect gives its id."""
    return "response:" + id.rsplit("_", 1)[-1].rsplit("-", 1)[-1]


def call_ids_of(id: str, choice: int) -> CallId:
    """Ids of calls: nine letters and digits, as Mistral's templates want, always the same for the same answer."""

    def call_id(index: int) -> str:
        digest = hashlib.blake2b(f"{id}/{choice}/{index}".encode(), digest_size=9).digest()
        return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in digest)

    return call_id
