"""OpenAI's Responses API. Pure.

A response's id is ``resp_`` and `Head.id`; ids of its output items carry `Head.id` too (`conversation.responses`), so
that items which come back say which turn they are from. An answer always has an item: where the model said nothing at
all, a message without text, so that clients have something to repeat.

Reasoning is given whole, as ``reasoning_text``, and never summarised. Where ``reasoning.encrypted_content`` is asked
for, it is there besides as an opaque string: clients that keep nothing else of it bring it back.

In a stream, logprobs come with the messages when they are done, which is at the end; deltas have none. Reasoning, text
and the arguments of calls are told as they come.

What an answer needs of its request beside messages and tools is in `Request.echo` too, so that a stored response can
be given again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..conversation.responses import item_id, sealed
from ..engines.protocol import Delta, FinishReason
from ..parsing.events import Event
from ..parsing.messages import CallId
from ..parsing.response import Finish
from .dialect import AgentDialect, Head, Replied, Telling, finish_reason, logprob_entries, openai_error, told, usage_of
from .requests import RequestError
from .responses_request import PREFIX, read_responses
from .responses_sse import Item, ResponsesEvents
from .shapes import ItemId, responses_items
from .sse import encode_sse
from .token_fields import TokenFields, carried

_DEFAULTS: Final[Mapping[str, Any]] = {
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "truncation": "disabled",
}
_IF_SAID: Final = ("prompt_cache_key", "safety_identifier", "user")


def write_response(head: Head, replies: Sequence[Replied]) -> dict[str, Any]:
    """A ``response``, completed or incomplete."""
    head, reply = _restored(head), replies[0]
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
        **carried(head, reply, TokenFields.TOKENTRACE),
    }
    if cut_off and reply.completion.finish_reason is FinishReason.LENGTH:
        answer["incomplete_details"] = {"reason": "max_output_tokens"}
    return answer


class ResponsesFrames:
    """The frames of one streamed response."""

    def __init__(self, head: Head, call_ids: Sequence[CallId]) -> None:
        self._head: Final = head
        self._told: Final = Telling(head)
        self._events: Final = ResponsesEvents(
            call_id=call_ids[0],
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

    def close(self, replies: Sequence[Replied]) -> list[str]:
        answer = write_response(self._head, replies)
        said = self._events.close(answer["output"])
        return self._frames([*said, self._events.numbered(f"response.{answer['status']}", response=answer)])

    def fail(self, error: RequestError) -> list[str]:
        """That it failed, in the response's own words and as an error: clients look for either."""
        code = "invalid_prompt" if error.status < 500 else "server_error"
        code = "rate_limit_exceeded" if error.status == 429 else code
        failed = _response(self._head, "failed") | {"error": {"code": code, "message": str(error)}}
        told = {"code": error.code or code, "message": str(error), "param": error.field}
        return self._frames(
            [self._events.numbered("response.failed", response=failed), self._events.numbered("error", **told)]
        )

    def _frames(self, events: Sequence[dict[str, Any]]) -> list[str]:
        events = [{**each, "item": _named(self._head, each["item"])} if "item" in each else each for each in events]
        return [encode_sse(event, event=event["type"]) for event in events]


def _restored(head: Head) -> Head:
    """With what a request asked of its answer, where that is left only in its echo."""
    request, echo = head.request, head.request.echo
    logprobs = echo.get("logprobs") if request.logprobs is None else request.logprobs
    allowed = request.calls_allowed and echo.get("tool_choice") != "none"
    return dataclasses.replace(head, request=dataclasses.replace(request, logprobs=logprobs, calls_allowed=allowed))


def _response(head: Head, status: str) -> dict[str, Any]:
    """A response that says nothing yet: the request's settings, as they were understood."""
    request, echo = head.request, head.request.echo

    def setting(name: str, value: Any) -> Any:
        return echo.get(name) if value is None else value

    return {
        "id": PREFIX + head.id,
        "object": "response",
        "created_at": head.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.messages[0]["content"] if request.instructions else None,
        "max_output_tokens": setting("max_output_tokens", request.max_tokens),
        "model": head.model,
        "output": [],
        "store": request.stored,
        "temperature": setting("temperature", request.temperature),
        "tools": [_flat(tool.get("function") or tool) for tool in request.tools or ()],
        "top_logprobs": setting("logprobs", request.logprobs) or 0,
        "top_p": setting("top_p", request.top_p),
        "usage": None,
        **{name: echo.get(name, usual) for name, usual in _DEFAULTS.items()},
        **{name: echo[name] for name in _IF_SAID if echo.get(name) is not None},
    }


def _flat(function: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as the API has it. It is not strict: nothing makes the model keep to the schema."""
    optional = {name: function.get(name) for name in ("description", "parameters")}
    return {"type": "function", "name": function["name"], **optional, "strict": False}


def _output(head: Head, reply: Replied) -> list[Item]:
    response = told(head, reply)
    if reply.stopped_by is not None:
        response = dataclasses.replace(response, finish=Finish.STOP)
    entries: list[dict[str, Any]] = []
    if head.request.logprobs is not None:
        entries = logprob_entries(reply.completion, head.token_bytes, head.request.logprobs)
    items = responses_items(
        response,
        call_id=reply.call_id,
        item_id=_item_ids(head),
        logprobs=None if head.request.logprobs is None else lambda span: entries[span.start : span.stop],
        never_empty=True,
    )
    items = [_finished(head, item) for item in items]
    items[-1] |= carried(head, reply, TokenFields.NEMO_GYM)
    return items


def _item_ids(head: Head) -> ItemId:
    return lambda kind, at: item_id(kind, head.id, at)


def _finished(head: Head, item: Item) -> Item:
    if item["type"] != "reasoning" or not head.request.echo.get("encrypted"):
        return _named(head, item)
    return {**item, "encrypted_content": sealed(item["content"][0]["text"])}


def _named(head: Head, item: Item) -> Item:
    """A call as the client knows its function: by its namespace and its name there."""
    spaced = head.request.echo.get("namespaces") or {}
    if item["type"] != "function_call" or "namespace" in item or item["name"] not in spaced:
        return item
    namespace, name = spaced[item["name"]]
    return {**item, "name": name, "namespace": namespace}


RESPONSES: Final = AgentDialect("responses", read_responses, write_response, ResponsesFrames, openai_error)
