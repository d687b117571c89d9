"""Names that a gateway makes up: of answers, of calls, of turns in a store. Pure."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..parsing.messages import CallId
from ..parsing.response import ParsedResponse

_ALPHABET: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def random_id() -> str:
    """An id for an answer."""
    number = secrets.randbits(6 * 24)
    return "".join(_ALPHABET[(number >> shift & 63) % len(_ALPHABET)] for shift in range(0, 6 * 24, 6))


def response_name(id: str) -> str:
    """What a store knows an answer by, with or without the prefix that a dialect gives its id."""
    return "response:" + id.rsplit("_", 1)[-1].rsplit("-", 1)[-1]


def call_ids_of(id: str, choice: int) -> CallId:
    """Ids of calls: nine letters and digits (Mistral's templates want just that), the same for the same answer."""

    def call_id(index: int) -> str:
        digest = hashlib.blake2b(f"{id}/{choice}/{index}".encode(), digest_size=9).digest()
        return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in digest)

    return call_id


def written_ids(response: ParsedResponse, call_id: CallId) -> dict[str, str]:
    """For each call of which the agent was told an id before the model wrote one: the one that the model wrote."""
    return {call_id(call.index): call.id for call in response.tool_calls if call.late_id and call.id}


def with_written_ids(messages: Sequence[Mapping[str, Any]], notes: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Messages in which results name their calls by the ids that the model wrote, as a turn's notes have them."""
    written = notes.get("written_ids") or {}
    return [
        {**message, "tool_call_id": written[message["tool_call_id"]]}
        if written and message.get("tool_call_id") in written
        else message
        for message in messages
    ]
