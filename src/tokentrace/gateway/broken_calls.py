"""Calls with arguments that are not JSON, in conversations that must be rendered. Pure.

An agent repeats such a call as the model wrote it. If the conversation continues the recorded turn, nothing of it is
rendered. If it branches, a template that reads arguments as a mapping gets an empty one, with a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..conversation.forms import parse_arguments
from ..conversation.messages import Messages
from ..conversation.place import Place
from ..errors import InputError
from ..rendering.rendered import RenderedTokens
from ..rendering.renderer import Renderer


def render_readably(renderer: Renderer, messages: Messages, **how: Any) -> tuple[RenderedTokens, list[str]]:
    """A rendered conversation, and notes on calls whose arguments the template did not get.

    Raises what `Renderer.render` raises, except for the arguments of a call.
    """
    try:
        return renderer.render(messages, **how), []
    except InputError:
        readable = readable_calls(messages)
        changed = [at for at, message in enumerate(messages) if readable[at] is not message]
        if not changed:
            raise
    note = "the arguments of a call are not a JSON object: the template got none"
    return renderer.render(readable, **how), [f"message {at}: {note}" for at in changed]


def readable_calls(messages: Messages) -> list[Mapping[str, Any]]:
    """The messages, with a mapping in place of arguments that are not a JSON object. The others stay as they are."""
    return [_readable(message) if message.get("tool_calls") else message for message in messages]


def _readable(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = [_readable_call(call) for call in message["tool_calls"]]
    same = all(new is old for new, old in zip(calls, message["tool_calls"], strict=True))
    return message if same else {**message, "tool_calls": calls}


def _readable_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    text = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(text, str) or not text.strip():
        return call
    try:
        parse_arguments(text, Place())
    except InputError:
        return {**call, "function": {**function, "arguments": {}}}
    return call
