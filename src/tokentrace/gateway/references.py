"""References to items of stored responses, in place of the items: what they stand for is in the recorded reply.

References count by kind: one to a call stands for all calls of its response, as clients that refer to one refer to all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..conversation.responses import response_of_item
from ..diagnose.conversation_diff import text_of
from ..errors import shown
from ..store.store import Store
from .names import response_name
from .requests import Request, RequestError
from .sessions import Sessions


async def with_references(store: Store, sessions: Sessions, id: str, request: Request) -> Request:
    """The request with what its references stand for. RequestError names one that stands for nothing in the session."""
    if not request.references:
        return request
    messages = list(request.messages)
    numbers: dict[str, int] = {}
    for item, *_ in request.references.values():
        response = response_of_item(item) or ""
        if response not in numbers:
            number = await store.turn_named(id, response_name(response))
            if number is None:
                raise _unknown(item)
            numbers[response] = number
    async with sessions.held(id) as live:
        for at, items in request.references.items():
            turn = live.session.turns[numbers[response_of_item(items[0]) or ""]]
            messages[at] = resolved(messages[at], turn.reply, items)
    return replace(request, messages=messages, references={})


def resolved(message: Mapping[str, Any], reply: Mapping[str, Any], items: Sequence[str]) -> dict[str, Any]:
    """A turn's message with what these items of the reply say; what is in the message already stays."""
    made = dict(message)
    for item in items:
        match item.partition("_")[0]:
            case "rs":
                made["reasoning_content"] = _text("reasoning_content", message, reply)
                if not made["reasoning_content"]:
                    raise _unknown(item)
            case "msg":
                made["content"] = _text("content", message, reply)
            case _:
                own = {call["id"]: call for call in message.get("tool_calls") or ()}
                calls = [own.pop(call["id"], call) for call in reply.get("tool_calls") or ()]
                if not calls:
                    raise _unknown(item)
                made["tool_calls"] = [*calls, *own.values()]
    return made


def _text(field: str, message: Mapping[str, Any], reply: Mapping[str, Any]) -> str:
    said = text_of(message) if field == "content" else message.get(field) or ""
    recorded = reply.get(field) or ""
    return recorded if said in recorded else recorded + said


def _unknown(item: str) -> RequestError:
    return RequestError(f"item_reference: there is no stored item {shown(item)} in this session", field="input")
