"""OpenAI's Responses API. Pure.

A response's id is ``resp_`` and `Head.id`; ids of its output items carry `Head.id` too (`conversation.responses`), so
that items which come back say which turn they are from. An answer always has an item: where the model said nothing at
all, a message without text, so that clients have something to repeat.

Reasoning is given whole, as ``reasoning_text``, and never summarised. Where ``reasoning.encrypted_content`` is asked
for, it is there besides as an opaque string: clients that keep nothing else of it bring it back.

In a stream, logprobs come with the messages when they are done, which is at the end; deltas have none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..conversation.responses import item_id, sealed
from ..engines.protocol import TOP_LOGPROBS, Completion, Delta, FinishReason
from ..parsing.events import Event
from ..parsing.response import Finish, TokenRange
from ..parsing.responses_sse import Item, ResponsesEvents
from ..parsing.shapes import CallId, ItemId, TokenLogprobs, responses_items
from ..parsing.sse import encode_sse
from ..parsing.telling import ToldEvents
from .dialect import Dialect, Frames, Head, Reply
from .endings import finish_reason, told, usage_of
from .requests import Request, RequestError
from .responses_reading import PREFIX, read_request
from .token_fields import TokenFields, nemo_gym_fields, tokentrace_fields

_ECHOED: Final = ("max_tool_calls", "metadata", "parallel_tool_calls", "reasoning", "text", "tool_choice", "truncation")
_ECHOED_IF_SAID: Final = ("prompt_cache_key", "safety_identifier", "user")


class _Responses:
    name = "responses"

    def read(self, body: Any, headers: Mapping[str, str]) -> Request:
        return read_request(body, headers)

    def answer(self, head: Head, replies: Sequence[Reply]) -> dict[str, Any]:
        reply = replies[0]
        usage = usage_of(head, replies)
        cut_off = finish_reason(head, reply) == "length"
        answer = _response(head, "incomplete" if cut_off else "completed") | {
            "output": _output(head, reply),
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": usage.prompt + usage.completion,
            },
        }
        if cut_off and reply.completion.finish_reason is FinishReason.LENGTH:
            answer["incomplete_details"] = {"reason": "max_output_tokens"}
        if TokenFields.TOKENTRACE in _ways(head):
            answer |= tokentrace_fields(head.prompt_ids, reply.completion)
        return answer

    def stream(self, head: Head, call_ids: Sequence[CallId]) -> Frames:
        return _Frames(head, call_ids[0])

    def error(self, error: RequestError) -> dict[str, Any]:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(error.status, kind)
        return {
            "error": {"message": str(error), "type": kind, "param": error.field, "code": error.code or None},
        }


RESPONSES: Final[Dialect] = _Responses()


class _Frames:
    def __init__(self, head: Head, call_id: CallId) -> None:
        self._head: Final = head
        self._told: Final = ToldEvents(calls_allowed=head.request.calls_allowed)
        self._events: Final = ResponsesEvents(
            call_id=call_id,
            item_id=_item_ids(head),
            finished=lambda item: _finished(head, item),
            hold_messages=head.request.logprobs is not None,
        )

    def open(self) -> list[str]:
        begun = _response(self._head, "in_progress")
        return self._frames(
            [self._events.numbered(f"response.{name}", response=begun) for name in ("created", "in_progress")]
        )

    def feed(self, choice: int, events: Sequence[Event], delta: Delta | None) -> list[str]:
        return self._frames(self._events.feed(self._told.feed(events)))

    def close(self, replies: Sequence[Reply]) -> list[str]:
        answer = RESPONSES.answer(self._head, replies)
        said = self._events.close(answer["output"])
        return self._frames([*said, self._events.numbered(f"response.{answer['status']}", response=answer)])

    def fail(self, error: RequestError) -> list[str]:
        code = (
            "rate_limit_exceeded" if error.status == 429 else "invalid_prompt" if error.status < 500 else "server_error"
        )
        failed = _response(self._head, "failed") | {"error": {"code": code, "message": str(error)}}
        told = {"code": error.code or code, "message": str(error), "param": error.field}
        return self._frames(
            [self._events.numbered("response.failed", response=failed), self._events.numbered("error", **told)]
        )

    def _frames(self, events: Sequence[dict[str, Any]]) -> list[str]:
        return [encode_sse(event, event=event["type"]) for event in events]


def _response(head: Head, status: str) -> dict[str, Any]:
    """A response that says nothing yet: the request's settings, as they were understood."""
    request, echo = head.request, head.request.echo
    instructions = request.messages[0]["content"] if request.instructions else None
    return {
        "id": PREFIX + head.id,
        "object": "response",
        "created_at": head.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": instructions,
        "max_output_tokens": request.max_tokens,
        "model": head.model,
        "output": [],
        "previous_response_id": None if request.previous is None else PREFIX + request.previous,
        "store": request.stored,
        "temperature": request.temperature,
        "tools": [_flat(tool["function"]) for tool in request.tools or ()],
        "top_logprobs": request.logprobs or 0,
        "top_p": request.top_p,
        "usage": None,
        **{name: echo[name] for name in _ECHOED},
        **{name: echo[name] for name in _ECHOED_IF_SAID if echo[name] is not None},
    }


def _flat(function: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as the API has it. It is not strict: nothing makes the model keep to the schema."""
    optional = {name: function.get(name) for name in ("description", "parameters")}
    return {"type": "function", "name": function["name"], **optional, "strict": False}


def _output(head: Head, reply: Reply) -> list[Item]:
    response = told(head, reply)
    if reply.stopped_by is not None:
        response = dataclasses.replace(response, finish=Finish.STOP)
    logprobs = None if head.request.logprobs is None else _logprobs(head, reply.completion)
    items = responses_items(
        response, call_id=reply.call_id, item_id=_item_ids(head), logprobs=logprobs, never_empty=True
    )
    items = [_finished(head, item) for item in items]
    if TokenFields.NEMO_GYM in _ways(head):
        items[-1] |= nemo_gym_fields(head.prompt_ids, reply.completion)
    return items


def _item_ids(head: Head) -> ItemId:
    return lambda kind, at: item_id(kind, head.id, at)


def _finished(head: Head, item: Item) -> Item:
    if item["type"] != "reasoning" or not head.request.echo["encrypted"]:
        return item
    return {**item, "encrypted_content": sealed(item["content"][0]["text"])}


def _logprobs(head: Head, completion: Completion) -> TokenLogprobs:
    most = head.request.logprobs or 0
    others = completion.channels.get(TOP_LOGPROBS, ())

    def said(token: int, logprob: float) -> dict[str, Any]:
        written = head.token_bytes(token)
        return {"token": written.decode("utf-8", "replace"), "bytes": list(written), "logprob": logprob}

    def entry(at: int) -> dict[str, Any]:
        likeliest = others[at][:most] if at < len(others) else ()
        own = said(int(completion.ids[at]), float(completion.logprobs[at]))
        return {**own, "top_logprobs": [said(int(token), float(logprob)) for token, logprob in likeliest]}

    def entries(span: TokenRange) -> list[dict[str, Any]]:
        return [entry(at) for at in range(span.start, min(span.stop, len(completion.ids)))]

    return entries


def _ways(head: Head) -> Sequence[str]:
    ways: Sequence[str] = head.request.echo["token_fields"]
    return ways
