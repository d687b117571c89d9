"""Anthropic's Messages: requests in, messages and events out. Pure.

An answer has blocks of thinking, text and tool use in the order in which they were written. Thinking has a signature,
because clients want one to send back; it says nothing, and any is accepted. ``input_tokens`` are those that were not in
the engine's cache, as Anthropic counts. Streams tell thinking, text and input as they are sampled: put together they
are the answer.

Input is an object, and Anthropic's client raises on pieces that cannot become JSON. So a tool use begins with its
object, and where that breaks, or the completion is cut off, its pieces end unfinished, as those of Anthropic's own API
do. ``input`` is then what Anthropic's client reads of them: the members that are whole. An attempt with a name and no
object is text.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..engines.protocol import Delta
from ..parsing.events import Done, Event
from ..parsing.shapes import CallId, anthropic_message
from ..parsing.sse import AnthropicEvents, encode_sse
from .dialect import Dialect, Frames, Head, Reply
from .endings import finish_reason, telling, told, usage_of
from .messages_request import read_messages
from .requests import Request, RequestError
from .token_fields import TokenFields, tokentrace_fields

QUIET: Final = 32
"""How many pieces of a call may pass untold before a ping shows that the stream is alive."""

_STOP_REASONS: Final = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}


class Messages:
    """The dialect."""

    name = "messages"

    def read(self, body: Any, headers: Mapping[str, str]) -> Request:
        """A body of ``POST /v1/messages``."""
        return read_messages(body, headers)

    def answer(self, head: Head, replies: Sequence[Reply]) -> dict[str, Any]:
        """A ``message``. There is one reply: this API has no choices."""
        [reply] = replies
        made = anthropic_message(told(head, reply), call_id=reply.call_id, signature=signature(head.id))
        answer = {
            "id": f"msg_{head.id}",
            "type": "message",
            **made,
            "model": head.model,
            **_ending(head, reply),
            "usage": _usage(head, reply),
        }
        return answer | _ids(head, reply)

    def stream(self, head: Head, call_ids: Sequence[CallId]) -> Frames:
        """Events, each with its name."""
        return MessagesFrames(head, call_ids[0])

    def error(self, error: RequestError) -> dict[str, Any]:
        """Anthropic's error object."""
        details = {} if error.details is None else {"details": dict(error.details)}
        return {"type": "error", "error": {"type": error.kind, "message": str(error), **details}, "request_id": None}


MESSAGES: Final[Dialect] = Messages()


def read_count(body: Any, headers: Mapping[str, str]) -> Request:
    """A body of ``POST /v1/messages/count_tokens``."""
    return read_messages(body, headers, counting=True)


def count_answer(tokens: int) -> dict[str, Any]:
    """The answer to ``count_tokens``: how long the prompt would be."""
    return {"input_tokens": tokens}


def signature(id: str) -> str:
    """A signature for the thinking of an answer: the same whenever it is told."""
    return base64.b64encode(hashlib.blake2b(f"tokentrace thinking {id}".encode(), digest_size=24).digest()).decode()


class MessagesFrames:
    """The frames of one streamed message."""

    def __init__(self, head: Head, call_id: CallId) -> None:
        self._head: Final = head
        self._telling: Final = telling(head)
        self._quiet = 0
        self._events: Final = AnthropicEvents(
            id=f"msg_{head.id}",
            model=head.model,
            input_tokens=len(head.prompt_ids),
            call_id=call_id,
            signature=signature(head.id),
        )

    def open(self) -> list[str]:
        """``message_start``: what of the prompt is cached is told at the end."""
        return _encoded(self._events.feed([]))

    def feed(self, choice: int, events: Sequence[Event], delta: Delta | None) -> list[str]:
        said = self._events.feed(self._telling.feed(events))
        self._quiet = 0 if said or not self._telling.calling else self._quiet + 1
        if self._quiet >= QUIET:
            said, self._quiet = [{"type": "ping"}], 0
        return _encoded(said)

    def close(self, replies: Sequence[Reply]) -> list[str]:
        """How it ended and what it cost, and ``message_stop``."""
        [reply] = replies
        self._events.usage = _usage(self._head, reply)
        *blocks, last, stop = self._events.feed([Done(told(self._head, reply))])
        last = {**last, "delta": _ending(self._head, reply), **_ids(self._head, reply)}
        return _encoded([*blocks, last, stop])

    def fail(self, error: RequestError) -> list[str]:
        """An ``error`` event."""
        return _encoded([MESSAGES.error(error)])


def _encoded(events: Sequence[Mapping[str, Any]]) -> list[str]:
    return [encode_sse(event, event=event["type"]) for event in events]


def _ending(head: Head, reply: Reply) -> dict[str, Any]:
    """Why it ended. A stop text after calls leaves the calls to be answered."""
    reason = finish_reason(head, reply)
    if reply.stopped_by is not None and reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stopped_by}
    return {"stop_reason": _STOP_REASONS[reason], "stop_sequence": None}


def _usage(head: Head, reply: Reply) -> dict[str, Any]:
    usage = usage_of(head, [reply])
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


def _ids(head: Head, reply: Reply) -> dict[str, Any]:
    asked = TokenFields.TOKENTRACE in head.request.echo.get("token_fields", ()) and head.request.token_ids
    return tokentrace_fields(head.prompt_ids, reply.completion) if asked else {}
