"""Calls with arguments that are not JSON, in conversations that have to be rendered. Pure.

An agent is told such a call as the model wrote it, and repeats it. Where the conversation goes on from the recorded
turn nothing of it is rendered. Where it branches, a template that reads arguments as a mapping could not show it: it is
shown what can be read of them, and the turn has a note that says so.
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
from .partial import PartialObject


def render_readably(renderer: Renderer, messages: Messages, **how: Any) -> tuple[RenderedTokens, list[str]]:
    """A rendered conversation, and notes on calls of which only a part could be shown.

    Raises what `Renderer.render` raises where that is not for the arguments of a call.
    """
    try:
        return renderer.render(messages, **how), []
    except InputError:
        shown = readable_calls(messages)
        changed = [at for at, message in enumerate(messages) if shown[at] is not message]
        if not changed:
            raise
    note = "the arguments of a call are not a JSON object: the template was shown what can be read of them"
    return renderer.render(shown, **how), [f"message {at}: {note}" for at in changed]


def readable_calls(messages: Messages) -> list[Mapping[str, Any]]:
    """The messages, with a mapping in place of arguments that are not a JSON object; the others are as they were."""
    return [_readable(message) if message.get("tool_calls") else message for message in messages]


def _readable(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = [_readable_call(call) for call in message["tool_calls"]]
    same = all(made is call for made, call in zip(calls, message["tool_calls"], strict=True))
    return message if same else {**message, "tool_calls": calls}


def _readable_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    text = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(text, str) or not text.strip() or _is_object(text):
        return call
    read = PartialObject()
    read.feed(text)
    return {**call, "function": {**function, "arguments": read.value()}}


def _is_object(text: str) -> bool:
    """Whether a template can be shown a text as a mapping."""
    try:
        parse_arguments(text, Place())
    except InputError:
        return False
    return True
