"""Messages and blocks to make conversations of."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

USER = {"role": "user", "content": "hi"}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def think(said: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": said, "signature": "c2lnbmVk"}


def use(id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": arguments}


def result(id: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, **({} if content is None else {"content": content}), **more}


def call(name: str, arguments: Any, id: str | None = None) -> dict[str, Any]:
    """A call in OpenAI's shape."""
    function = {"name": name, "arguments": arguments}
    return {**({} if id is None else {"id": id}), "type": "function", "function": function}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


# -- Anthropic


REDACTED = {"type": "redacted_thinking", "data": "ZW5jcnlwdGVk"}
CACHED = {"cache_control": {"type": "ephemeral"}}


def exhaust(value: Any) -> None:
    """Walk all of a validated value: pydantic looks into an Iterable only as it is read."""
    if isinstance(value, Mapping):
        for inner in value.values():
            exhaust(inner)
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for inner in value:
            exhaust(inner)


# -- ShareGPT


def turn(speaker: Any, value: Any, **more: Any) -> dict[str, Any]:
    return {"from": speaker, "value": value, **more}


CALL = json.dumps({"name": "f", "arguments": {}})
