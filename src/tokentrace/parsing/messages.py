"""A parsed completion as the message that goes into a conversation. Pure.

A call is in the message if it can be run, or if its only trouble is a tool that was not offered or an argument given
twice. Any other attempt is text in `history_message`, where and as the model wrote it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from .response import CallStatus, ParsedResponse, ParsedToolCall, PartKind

CallId = Callable[[int], str]
"""An id for the call with this index, where the model wrote none."""

_SAID: Final = frozenset({CallStatus.OK, CallStatus.UNKNOWN_TOOL, CallStatus.DUPLICATE_ARGUMENT})


def numbered_call_id(index: int) -> str:
    """``call00000``, ``call00001``, …: the nine letters and digits that Mistral's templates insist on.

    The same in every turn; give a `call_id` where ids have to be unique in a conversation.
    """
    return f"call{index:05d}"


def expressible(call: ParsedToolCall) -> bool:
    """Whether a message can have the call: it has a name and arguments, and they are not in doubt.

    A call of which a client was told (`ParsedToolCall.told`) is in the message in any case.
    """
    if call.told:
        return True
    return call.status in _SAID and call.name is not None and call.arguments is not None


def stands_as_text(call: ParsedToolCall) -> bool:
    """Whether an attempt is text, as written, in a conversation that goes on.

    Those are the attempts that no message can have, and calls with an argument given twice, of which a mapping would
    lose one.
    """
    return not expressible(call) or call.status is CallStatus.DUPLICATE_ARGUMENT


def history_message(response: ParsedResponse, *, call_id: CallId | None = None) -> dict[str, Any]:
    """The message of the completion in the conversation that goes on: rendered there, it has the completion's tokens.

    That holds for what the template writes itself, and a renderer that adapts messages (the default). It is OpenAI's
    message with two differences. Attempts that are not calls stand in the content, where and as they were written (see
    `stands_as_text`). Reasoning that was opened and is empty is ``""``.
    """
    as_text = {call.index for call in response.tool_calls if stands_as_text(call)}
    message = openai_message(response, call_id=call_id)
    if as_text:
        calls = [_openai_call(call, call_id) for call in response.tool_calls if call.index not in as_text]
        texts = [
            part.lead + part.text if part.kind is PartKind.TOOL_CALL else part.text
            for part in response.parts
            if part.kind is PartKind.CONTENT or part.call in as_text
        ]
        message = {**message, "content": "".join(texts), "tool_calls": calls}
        if not calls:
            del message["tool_calls"]
    if response.reasoning_content is not None:
        message["reasoning_content"] = response.reasoning_content
    return message


def openai_message(response: ParsedResponse, *, call_id: CallId | None = None) -> dict[str, Any]:
    """An assistant message as in OpenAI's chat completions, with ``reasoning_content`` if there is reasoning.

    Arguments are JSON text, as written. ``content`` is None only where it is empty beside calls. Calls that are not
    `expressible` are left out of the message; find them in `response.tool_calls`.
    """
    calls = [_openai_call(call, call_id) for call in response.tool_calls if expressible(call)]
    message: dict[str, Any] = {"role": "assistant", "content": response.content or (None if calls else "")}
    if response.reasoning_content:
        message["reasoning_content"] = response.reasoning_content
    if calls:
        message["tool_calls"] = calls
    return message


def _openai_call(call: ParsedToolCall, call_id: CallId | None) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments_text}
    return {"id": call_id_of(call, call_id), "type": "function", "function": function}


def call_id_of(call: ParsedToolCall, call_id: CallId | None) -> str:
    """The id of a call: the model's, or one made up."""
    return call.id or (call_id or numbered_call_id)(call.index)
