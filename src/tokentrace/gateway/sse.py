"""A parser's events as the wire events of OpenAI's and Anthropic's streaming APIs. Pure: dicts and text, no I/O.

A call is announced as soon as its name is certain; an attempt without a name never is. What was announced cannot be
taken back: such a call may still end with a status other than ok, with the arguments streamed so far, which may not be
whole JSON. Clients should run calls only if the end of the stream (``finish_reason``, ``stop_reason``) says that there
are any to run, and look at the recorded response, where every attempt has its status.

Ids are those of `shapes`, except that an id which the model writes after the arguments comes too late to be streamed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ..parsing.events import ArgumentsDelta, CallFinished, CallNamed, ContentDelta, Done, Event, ReasoningDelta
from ..parsing.messages import CallId, expressible, numbered_call_id
from ..parsing.response import ParsedResponse
from .shapes import anthropic_stop_reason

OPENAI_END: Final = "data: [DONE]\n\n"
"""The frame that ends a stream of OpenAI's, after the last chunk."""

_UNSAFE: Final = re.compile("[\x85\u2028\u2029\ud800-\udfff]")
"""Characters that JSON allows but some readers take for the end of a line, and those that UTF-8 cannot encode."""


def encode_sse(payload: Mapping[str, Any], *, event: str | None = None) -> str:
    r"""One server-sent event. Its data is one line of JSON that can be written as UTF-8; ValueError for a NaN.

    >>> encode_sse({"text": "née\n"}, event="delta")
    'event: delta\ndata: {"text":"née\\n"}\n\n'
    """
    data = json.dumps(payload, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    data = _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", data)
    return f"data: {data}\n\n" if event is None else f"event: {event}\ndata: {data}\n\n"


class OpenAIChunks:
    """The ``chat.completion.chunk`` objects of one completion. Put together they are its `shapes.openai_message`.

    They may have more calls than that: those announced that turned out not to be expressible. `choice` is the index of
    the completion where there are several.
    """

    def __init__(self, *, id: str, model: str, created: int, call_id: CallId | None = None, choice: int = 0) -> None:
        self._head: Final = {"id": id, "object": "chat.completion.chunk", "created": created, "model": model}
        self._choice: Final = choice
        self._call_id: Final = call_id or numbered_call_id
        self._announced: Final[dict[int, int]] = {}
        self._opened = False
        self._has_content = False

    def feed(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        """The chunks that say these events. The first feed, even of nothing, opens with the role."""
        chunks = [] if self._opened else [self._chunk({"role": "assistant"})]
        self._opened = True
        for event in events:
            chunks += self._chunks(event)
        return chunks

    def empty(self) -> dict[str, Any]:
        """A chunk that says nothing: it keeps a connection open, or carries fields of its own."""
        return self._chunk({})

    def _chunks(self, event: Event) -> list[dict[str, Any]]:
        match event:
            case ReasoningDelta(text) if text:
                return [self._chunk({"reasoning_content": text})]
            case ContentDelta(text) if text:
                self._has_content = True
                return [self._chunk({"content": text})]
            case CallNamed():
                return [self._announce(event)]
            case ArgumentsDelta(index, text) if text and index in self._announced:
                call = {"index": self._announced[index], "function": {"arguments": text}}
                return [self._chunk({"tool_calls": [call]})]
            case Done(response):
                return [self._chunk(self._last_delta(response), response.finish_reason)]
        return []

    def _announce(self, event: CallNamed) -> dict[str, Any]:
        at = self._announced[event.index] = len(self._announced)
        id = event.id or self._call_id(event.index)
        call = {"index": at, "id": id, "type": "function", "function": {"name": event.name, "arguments": ""}}
        return self._chunk({"tool_calls": [call]})

    def _last_delta(self, response: ParsedResponse) -> dict[str, Any]:
        """Empty content is None beside calls, and only at the end is it certain that there are none."""
        nothing = not self._has_content and not any(expressible(call) for call in response.tool_calls)
        return {"content": ""} if nothing else {}

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        return {**self._head, "choices": [{"index": self._choice, "delta": delta, "finish_reason": finish_reason}]}


class AnthropicEvents:
    """The events of one message of Anthropic's. Put together they are its `shapes.anthropic_message`.

    They may have more blocks of tool use than that: those of calls that turned out not to be expressible. Anthropic's
    own client raises on input that cannot be the beginning of JSON.

    Set `output_tokens` before feeding the `Done`, or the whole `usage`. A `signature` is that of every block of
    thinking. Each event's name is its ``type``.
    """

    def __init__(
        self, *, id: str, model: str, input_tokens: int = 0, call_id: CallId | None = None, signature: str = ""
    ) -> None:
        self.output_tokens = 0
        self.usage: Mapping[str, Any] | None = None
        self._signature: Final = signature
        self._id: Final = id
        self._model: Final = model
        self._input_tokens: Final = input_tokens
        self._call_id: Final = call_id or numbered_call_id
        self._opened = False
        self._blocks = 0
        self._open: str | int | None = None
        """The block that is open: its type, or the index of its call."""

    def feed(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        """The wire events that say these events. The first feed, even of nothing, opens with ``message_start``."""
        said = [] if self._opened else [self._message_start()]
        self._opened = True
        for event in events:
            said += self._events(event)
        return said

    def _events(self, event: Event) -> list[dict[str, Any]]:
        match event:
            case ReasoningDelta(text) if text:
                opening = self._ensure("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                return [*opening, self._delta({"type": "thinking_delta", "thinking": text})]
            case ContentDelta(text) if text:
                opening = self._ensure("text", {"type": "text", "text": ""})
                return [*opening, self._delta({"type": "text_delta", "text": text})]
            case CallNamed(index, name, id):
                block = {"type": "tool_use", "id": id or self._call_id(index), "name": name, "input": {}}
                return self._ensure(index, block)
            case ArgumentsDelta(index, text) if text and self._open == index:
                return [self._delta({"type": "input_json_delta", "partial_json": text})]
            case CallFinished(index) if self._open == index:
                return self._close()
            case Done(response):
                return [*self._close(), self._message_delta(response), {"type": "message_stop"}]
        return []

    def _ensure(self, which: str | int, block: dict[str, Any]) -> list[dict[str, Any]]:
        """Open the block, and close another that is open; nothing if it is open already."""
        if self._open == which:
            return []
        closing = self._close()
        self._open = which
        self._blocks += 1
        return [*closing, {"type": "content_block_start", "index": self._blocks - 1, "content_block": block}]

    def _close(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        signed = self._open == "thinking" and self._signature
        self._open = None
        stop = {"type": "content_block_stop", "index": self._blocks - 1}
        return [self._delta({"type": "signature_delta", "signature": self._signature}), stop] if signed else [stop]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}

    def _message_start(self) -> dict[str, Any]:
        message: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self._input_tokens, "output_tokens": 0},
        }
        return {"type": "message_start", "message": message}

    def _message_delta(self, response: ParsedResponse) -> dict[str, Any]:
        return {
            "type": "message_delta",
            "delta": {"stop_reason": anthropic_stop_reason(response), "stop_sequence": None},
            "usage": {"output_tokens": self.output_tokens} if self.usage is None else dict(self.usage),
        }
