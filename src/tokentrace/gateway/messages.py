"""Anthropic's Messages: requests in, messages and events out. Pure.

An answer has blocks of thinking, text and tool use in the order in which they were written. Thinking has a signature,
because clients want one to send back; it says nothing, and any is accepted. ``input_tokens`` are those that were not in
the engine's cache, as Anthropic counts. Streams tell thinking, text and input as they are sampled: put together they
are the answer.

Input is an object, and Anthropic's client raises on pieces that cannot become JSON. So a tool use begins with its
object, and where that breaks, or the completion is cut off, its pieces end unfinished, as those of Anthropic's own API
do. ``input`` is then what Anthropic's client reads of them: the members that are whole. An attempt with a name and no
object is text.

What Claude Code sends beside the conversation is treated so:

- ``cache_control``, ``metadata``, beta headers and the like say nothing to a model.
- The block ``x-anthropic-billing-header`` of its system prompt is for Anthropic's servers, which take it out; so does
  this, and lists it as ignored.
- Tools with ``defer_loading`` are not shown at the beginning. A ``tool_reference`` in a result, or a ``tool_addition``,
  is the definition of the tool, as text, where it stands: what came before it stays as it was.
- ``thinking`` and ``output_config.effort`` are hints for the template. An effort in the middle of a conversation
  (``output_config`` of a system message) is listed as a wish, for it would change the beginning.
- ``context_management`` would have the server leave out some of what is sent. Nothing is left out: unless its edits
  keep everything, it is listed as a wish.
- Input that it could not read as JSON it repeats as ``__unparsedToolInput``, with the text that it was told; that is
  read as the answer said it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..conversation.messages import check_messages
from ..conversation.shapes import from_anthropic, openai_tools, with_system
from ..engines.protocol import Delta
from ..parsing.events import Done, Event
from ..parsing.messages import CallId
from .dialect import AgentDialect, Head, Replied, Telling, finish_reason, told, usage_of
from .partial import PartialObject
from .requests import Body, Request, RequestError, offered, refusing, structure_of, thinking_hints
from .shapes import STOP_REASONS, anthropic_message
from .sse import AnthropicEvents, encode_sse
from .token_fields import TokenFields, asked_fields, carried

BILLING: Final = "x-anthropic-billing-header:"
"""How the block begins that Claude Code puts before its system prompt."""

_HARMLESS: Final = (
    "metadata", "service_tier", "cache_control", "inference_geo", "speed", "betas", "anthropic_beta",
    "anthropic_version", "user_profile_id", "workspace_id", "diagnostics", "fallbacks", "fallback_credit_token",
)  # fmt: skip
"""Fields that say nothing about the tokens that are sampled."""

_UNPARSED: Final = "__unparsedToolInput"

_KEEPS_ALL: Final = {"type": "clear_thinking_20251015", "keep": "all"}
"""An edit that leaves everything where it is."""

_NO_THREADS: Final = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""What makes clients that know of threads send the whole conversation instead, from then on."""


def read_messages(body: Any, headers: Mapping[str, str], *, counting: bool = False) -> Request:
    """A body of ``POST /v1/messages``, or with `counting` of ``/v1/messages/count_tokens``, which has no limit.

    RequestError names the field that cannot be served.
    """
    said = Body(body)
    said.refuse("thread", (), "there are no threads here; send the whole conversation", _NO_THREADS)
    wishes: list[str] = []
    shown, deferred = _tools(said, wishes)
    messages = _messages(said, deferred, wishes)
    system, billed = _system(said)
    allowed = _tool_choice(said, [*shown, *deferred.values()], wishes)
    said.refuse_unserved()
    said.refuse("mcp_servers", ([],), "nothing here connects to servers of tools")
    said.refuse("container", (), "there are no containers here")
    said.skip(*_HARMLESS)
    hints, structure = _output(said, wishes)
    limit = said.whole("max_tokens", 1)
    if limit is None and not counting:
        raise RequestError("is missing", field="max_tokens")
    fields = asked_fields(said, headers, TokenFields.TOKENTRACE, [TokenFields.TOKENTRACE])
    return Request(
        messages=[*system, *messages],
        tools=shown or None,
        **said.sampling(),
        max_tokens=limit,
        stop=said.texts("stop_sequences", 64),
        usage_in_stream=True,
        continued=messages[-1]["role"] == "assistant",
        calls_allowed=allowed,
        object_arguments=True,
        structure=structure,
        hints=hints,
        echo={"token_fields": list(fields)},
        wishes=tuple(dict.fromkeys(wishes)),
        ignored=(*billed, *said.unread),
    )


def read_count(body: Any, headers: Mapping[str, str]) -> Request:
    """A body of ``POST /v1/messages/count_tokens``."""
    return read_messages(body, headers, counting=True)


# -- the conversation


def _messages(said: Body, deferred: Mapping[str, Mapping[str, Any]], wishes: list[str]) -> list[Mapping[str, Any]]:
    given = said.get("messages", list, "a list of messages", ())
    with refusing():
        made = check_messages(from_anthropic(given))
    if any(isinstance(message, Mapping) and message.get("output_config") for message in given):
        wishes.append("messages.output_config")
    made = [_defined(_as_told(message), deferred) for message in made if message != {"role": "system", "content": ""}]
    if not made:
        raise RequestError("says nothing; give at least one message with content", field="messages")
    return made


def _system(said: Body) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The system prompt as messages, none or one, and what was left out of it."""
    given = said.get("system", (str, list), "a string or a list of text blocks")
    kept = [block for block in given if not _is_billing(block)] if isinstance(given, list) else given
    with refusing():
        messages = with_system([], kept)
    left_out = isinstance(given, list) and len(kept) < len(given)
    return messages, [f"system.{BILLING.rstrip(':')}"] if left_out else []


def _is_billing(block: Any) -> bool:
    text = block.get("text") if isinstance(block, Mapping) else None
    return isinstance(text, str) and text.startswith(BILLING)


def _as_told(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message in which input that Claude Code could not read is what the answer had in its place."""
    calls = message.get("tool_calls") or ()
    if not any(_UNPARSED in call["function"]["arguments"] for call in calls):
        return message
    return {**message, "tool_calls": [_call_as_told(call) for call in calls]}


def _call_as_told(call: Mapping[str, Any]) -> Mapping[str, Any]:
    match call["function"]["arguments"]:
        case {"__unparsedToolInput": {"raw": str(raw), "len": int(length)}, **more} if not more:
            if len(raw.encode("utf-16-le", "surrogatepass")) == 2 * length:  # else it kept the beginning only
                read = PartialObject()
                read.feed(raw)
                return {**call, "function": {**call["function"], "arguments": read.value()}}
    return call


def _defined(message: Mapping[str, Any], deferred: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """A message in which parts that stand for tools are the tools' definitions, as text."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [_definition(part, deferred) for part in content]
    if all(part.get("type") == "text" for part in parts):
        return {**message, "content": "".join(part["text"] for part in parts)}
    return {**message, "content": parts}


def _definition(part: Mapping[str, Any], deferred: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    kind, tool = part.get("type"), part.get("tool")
    if kind == "tool_reference":
        name = part.get("tool_name")
    elif kind in ("tool_addition", "tool_removal"):
        name = tool.get("name") if isinstance(tool, Mapping) and tool.get("type") == "tool_reference" else None
    else:
        return part
    if not isinstance(name, str) or (kind != "tool_removal" and name not in deferred):
        raise RequestError(f"a {kind} block must name a tool of this request with defer_loading", field="messages")
    if kind == "tool_removal":
        return {"type": "text", "text": f"The function {name} is no longer available.\n"}
    function = deferred[name]["function"]
    fields = {key: function[key] for key in ("description", "name", "parameters") if key in function}
    return {"type": "text", "text": f"<function>{json.dumps(fields, ensure_ascii=False)}</function>\n"}


# -- tools


def _tools(said: Body, wishes: list[str]) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The tools that the template shows, and those to be defined later, by name."""
    given = said.get("tools", list, "a list of tools", ())
    for at, tool in enumerate(given):
        if isinstance(tool, Mapping) and tool.get("input_schema") is None:
            kind = tool.get("type")
            if kind not in (None, "custom"):
                problem = "tools of Anthropic's have no schema that a template could show; give one with input_schema"
                raise RequestError(problem, field=f"tools.{at}.type", code="unsupported_parameter")
            raise RequestError("is missing", field=f"tools.{at}.input_schema")
        if isinstance(tool, Mapping) and tool.get("strict") is True:
            wishes.append("tools.strict")
    with refusing():
        made = openai_tools(list(given) or None) or []
    late = [isinstance(tool, Mapping) and tool.get("defer_loading") is True for tool in given]
    shown = [tool for tool, later in zip(made, late, strict=True) if not later]
    return shown, {tool["function"]["name"]: tool for tool, later in zip(made, late, strict=True) if later}


def _tool_choice(said: Body, tools: Sequence[Mapping[str, Any]], wishes: list[str]) -> bool:
    """Whether calls are allowed; the rest of a choice is a wish."""
    choice = said.get("tool_choice", Mapping, "an object with a type", {"type": "auto"})
    kind = choice.get("type")
    if kind not in ("auto", "any", "tool", "none"):
        raise RequestError("must be auto, any, tool or none", field="tool_choice.type")
    if kind == "tool":
        offered("tool_choice.name", choice.get("name"), tools)
    if kind in ("any", "tool"):
        wishes.append("tool_choice")
    if choice.get("disable_parallel_tool_use") is True:
        wishes.append("tool_choice.disable_parallel_tool_use")
    return bool(kind != "none")


# -- what the answer is to be like


def _output(said: Body, wishes: list[str]) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """Hints for thinking, and the structure of the content."""
    on: bool | None = None
    thinking = said.get("thinking", Mapping, "an object with a type", {})
    if thinking:
        kind = thinking.get("type")
        if kind not in ("enabled", "adaptive", "between_tools", "disabled"):
            raise RequestError("must be enabled, adaptive or disabled", field="thinking.type")
        on = kind != "disabled"
        wishes += [f"thinking.{name}" for name in ("budget_tokens", "display") if thinking.get(name) is not None]
    config = said.get("output_config", Mapping, "an object", {})
    wishes += ["output_config"] if set(config) - {"effort", "format"} else []
    hints = thinking_hints(on, config.get("effort"), field="output_config.effort")
    edits = said.get("context_management", Mapping, "an object", {}).get("edits")
    if edits and edits != [_KEEPS_ALL]:
        wishes.append("context_management")
    if said.get("compaction", Mapping, "an object"):
        wishes.append("compaction")
    formats = {
        "output_config.format": config.get("format"),
        "output_format": said.get("output_format", Mapping, "an object"),
    }
    for field, wanted in formats.items():
        if wanted is None:
            continue
        if not isinstance(wanted, Mapping) or wanted.get("type") != "json_schema":
            raise RequestError("must be of the type json_schema", field=field)
        return hints, structure_of("json_schema", wanted.get("schema"), field)
    return hints, None


# -- answers


def write_message(head: Head, replies: Sequence[Replied]) -> dict[str, Any]:
    """A ``message``. There is one reply: this API has no choices."""
    [reply] = replies
    return {
        "id": f"msg_{head.id}",
        "type": "message",
        **anthropic_message(told(head, reply), call_id=reply.call_id, signature=signature(head.id)),
        "model": head.model,
        **_ending(head, reply),
        "usage": _usage(head, reply),
        **carried(head, reply, TokenFields.TOKENTRACE),
    }


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """Anthropic's error object."""
    details = {} if error.details is None else {"details": dict(error.details)}
    return {"type": "error", "error": {"type": error.kind, "message": str(error), **details}, "request_id": None}


def count_answer(tokens: int) -> dict[str, Any]:
    """The answer to ``count_tokens``: how long the prompt would be."""
    return {"input_tokens": tokens}


def signature(id: str) -> str:
    """A signature for the thinking of an answer: the same whenever it is told."""
    return base64.b64encode(hashlib.blake2b(f"tokentrace thinking {id}".encode(), digest_size=24).digest()).decode()


class MessagesFrames:
    """The frames of one streamed message."""

    def __init__(self, head: Head, call_ids: Sequence[CallId]) -> None:
        self._head: Final = head
        self._telling: Final = Telling(head)
        self._events: Final = AnthropicEvents(
            id=f"msg_{head.id}",
            model=head.model,
            input_tokens=len(head.prompt_ids),
            call_id=call_ids[0],
            signature=signature(head.id),
        )

    def open(self) -> list[str]:
        """``message_start``: what of the prompt is cached is told at the end."""
        return _encoded(self._events.feed([]))

    def feed(self, choice: int, events: Sequence[Event], delta: Delta | None) -> list[str]:
        said = self._events.feed(self._telling.feed(events))
        return _encoded([{"type": "ping"}] if self._telling.is_quiet(bool(said)) else said)

    def close(self, replies: Sequence[Replied]) -> list[str]:
        """How it ended and what it cost, and ``message_stop``."""
        [reply] = replies
        self._events.usage = _usage(self._head, reply)
        *blocks, last, stop = self._events.feed([Done(told(self._head, reply))])
        last = {**last, "delta": _ending(self._head, reply), **carried(self._head, reply, TokenFields.TOKENTRACE)}
        return _encoded([*blocks, last, stop])

    def fail(self, error: RequestError) -> list[str]:
        """An ``error`` event."""
        return _encoded([anthropic_error(error)])


def _encoded(events: Sequence[Mapping[str, Any]]) -> list[str]:
    return [encode_sse(event, event=event["type"]) for event in events]


def _ending(head: Head, reply: Replied) -> dict[str, Any]:
    """Why it ended. A stop text after calls leaves the calls to be answered."""
    reason = finish_reason(head, reply)
    if reply.stopped_by is not None and reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stopped_by}
    return {"stop_reason": STOP_REASONS[reason], "stop_sequence": None}


def _usage(head: Head, reply: Replied) -> dict[str, Any]:
    usage = usage_of(head, [reply])
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


MESSAGES: Final = AgentDialect("messages", read_messages, write_message, MessagesFrames, anthropic_error)
