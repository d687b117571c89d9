"""References to items of stored responses: what they stand for is in the recorded reply.

A reference to a call stands for all calls of its response, because clients that refer to one refer to all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..conversation.responses import response_of_item
from ..diagnose.conversation_diff import text_of
from ..errors import shown
from ..store.store import Store
from .dialect import response_name
from .problems import RequestError
from .requests import Request
from .sessions import Sessions


async def with_references(store: Store, sessions: Sessions, id: str, request: Request) -> Request:
    """The request with what its references stand for. Raises RequestError for one that the session does not have."""
    if not request.references:
        return request
    numbers: dict[str, int] = {}
    for item in (items[0] for items in request.references.values()):
        number = await store.turn_named(id, response_name(response_of_item(item) or ""))
        if number is None:
            raise _unknown(item)
        numbers[item] = number
    messages = list(request.messages)
    async with sessions.locked(id) as live:
        for at, items in request.references.items():
            messages[at] = resolved(messages[at], live.session.turns[numbers[items[0]]].reply, items)
    return replace(request, messages=messages, references={})


def resolved(message: Mapping[str, Any], reply: Mapping[str, Any], items: Sequence[str]) -> dict[str, Any]:
    """A turn's message with these items of the recorded reply. What the message has already stays."""
    result = dict(message)
    for item in items:
        match item.partition("_")[0]:
            case "rs":
                result["reasoning_content"] = _text("reasoning_content", message, reply)
                if not result["reasoning_content"]:
                    raise _unknown(item)
            case "msg":
                result["content"] = _text("content", message, reply)
            case _:
                sent = {call["id"]: call for call in message.get("tool_calls") or ()}
                calls = [sent.pop(call["id"], call) for call in reply.get("tool_calls") or ()]
                if not calls:
                    raise _unknown(item)
                result["tool_calls"] = [*calls, *sent.values()]
    return result


def _text(field: str, message: Mapping[str, Any], reply: Mapping[str, Any]) -> str:
    """The recorded text, and after it what the message has besides."""
    sent = text_of(message) if field == "content" else message.get(field) or ""
    recorded = reply.get(field) or ""
    return str(recorded if sent in recorded else recorded + sent)


def _unknown(item: str) -> RequestError:
    return RequestError(f"item_reference: there is no stored item {shown(item)} in this session", field="input")
