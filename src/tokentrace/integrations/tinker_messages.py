"""Messages of tinker-cookbook as OpenAI's, which templates read, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tinker_cookbook.renderers import Message, ToolCall
from tinker_cookbook.renderers.base import UnparsedToolCall

from ..errors import InputError, shown
from ..parsing.response import ParsedResponse

TOOLS: Final = "tools"
"""The key of a system message that has the schemas of the tools."""


def conversation(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """tinker-cookbook's messages as OpenAI's, and the tools that one of them carries."""
    tools: list[dict[str, Any]] | None = None
    said = []
    for at, message in enumerate(messages):
        if TOOLS in message:
            if tools is not None:
                raise InputError("tools are given a second time", message=at)
            tools = [{"type": "function", "function": dict(spec)} for spec in message[TOOLS]] or None
            if not message.get("content"):
                continue
        said.append(chat_message(at, message))
    return said, tools


def chat_message(at: int, message: Message) -> dict[str, Any]:
    """A message in OpenAI's shape. Calls that could not be read are text again, at the end; ``trainable`` is ``train``.

    InputError, naming the message by its number, where it holds what no template of texts has a place for.
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not isinstance(content, str | list):
        raise InputError(f"a message has a role and a content, text or a list of parts: {shown(message)}", message=at)
    made: dict[str, Any] = {"role": role, "content": content}
    parts = [] if isinstance(content, str) else content
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "thinking"):
            raise InputError(f"parts of type {shown(kind)} are not rendered, only texts", message=at)
        if not isinstance(part.get(kind), str):
            raise InputError(f"a part of type {kind!r} has no {kind!r}: {shown(part)}", message=at)
    thinking = [part["thinking"] for part in parts if part["type"] == "thinking"]
    if thinking:
        if role != "assistant" or len(thinking) > 1 or parts[0]["type"] != "thinking":
            raise InputError("a template takes one thinking part, first in an assistant's message", message=at)
        made["reasoning_content"] = thinking[0]
    if parts:
        made["content"] = "".join(part["text"] for part in parts if part["type"] == "text")
    elif not isinstance(content, str):
        made["content"] = ""
    made["content"] += "".join(call.raw_text for call in message.get("unparsed_tool_calls") or ())
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [call.model_dump(exclude_none=True) for call in calls]
    made |= {key: message[key] for key in ("name", "tool_call_id") if message.get(key)}
    return made | ({"train": message["trainable"]} if "trainable" in message else {})


def sampled_message(parsed: ParsedResponse) -> Message:
    """What a model wrote as tinker-cookbook's message: parts where there is thinking, else a string."""
    content: Any = parsed.content
    if parsed.reasoning_content:
        text = [{"type": "text", "text": parsed.content}] if parsed.content else []
        content = [{"type": "thinking", "thinking": parsed.reasoning_content}, *text]
    made: Message = {"role": "assistant", "content": content}
    calls = [
        ToolCall(id=call.id, function=ToolCall.FunctionBody(name=str(call.name), arguments=call.arguments_text))
        for call in parsed.tool_calls
        if call.ok
    ]
    unread = [UnparsedToolCall(raw_text=call.raw, error=call.problem) for call in parsed.tool_calls if not call.ok]
    return made | ({"tool_calls": calls} if calls else {}) | ({"unparsed_tool_calls": unread} if unread else {})
