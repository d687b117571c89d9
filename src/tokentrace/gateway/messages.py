"""Anthropic's Messages. Pure.

Thinking has a signature, since clients want to send one back; any is accepted. ``input_tokens`` are those that were not
in the engine's cache. A tool use is sent when the call has ended, and input that is broken or cut off is text, unless
the client asks for eager streaming. What Claude Code sends besides the conversation:

- The block ``x-anthropic-billing-header`` of its system prompt is for Anthropic's servers. It is ignored.
- Tools with ``defer_loading`` are not shown at the beginning. A ``tool_reference`` in a result, or a ``tool_addition``,
  becomes the tool's definition, as text, so that everything before it stays as it was.
- ``context_management`` and an effort in the middle of a conversation would change its beginning: they are wishes.
- Input that it could not read as JSON comes back as ``__unparsedToolInput``. It is read as the text that it was.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from ..conversation.messages import check_messages
from ..conversation.shapes import from_anthropic, openai_tools, with_system
from ..parsing.response import PartKind
from . import requests as wire
from .dialect import Dialect, Encoder, Head, Item, ItemChange, Reply, StreamEvent
from .requests import Request, RequestError, TokenFields, convert, naming_fields

Message = Mapping[str, Any]

BILLING: Final = "x-anthropic-billing-header:"
"""How the block begins that Claude Code puts before its system prompt."""

_HARMLESS: Final = (
    "metadata", "service_tier", "cache_control", "inference_geo", "speed", "betas", "anthropic_beta",
    "anthropic_version", "user_profile_id", "workspace_id", "diagnostics", "fallbacks", "fallback_credit_token",
)  # fmt: skip
"""Fields without any effect on the sampled tokens."""

_REFUSED: Final[wire.Refused] = {
    **wire.REFUSED,
    "mcp_servers": (([],), "nothing here connects to servers of tools"),
    "container": ((), "there are no containers here"),
}
_NO_THREADS: Final = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Makes clients that know threads send the whole conversation instead, from then on."""
_KEEPS_ALL: Final = {"type": "clear_thinking_20251015", "keep": "all"}
"""A context edit that changes nothing."""
_EFFORTS: Final = "messages.output_config"
_STOP_REASONS: Final = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}


class _ToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(Struct):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = None
    display: Any = None


class _Format(Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class MessagesBody(wire.AgentBody):
    """The body of ``POST /v1/messages`` and ``/v1/messages/count_tokens``."""

    messages: list[Any] | None = None
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: _ToolChoice | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop_sequences: list[str] | None = None
    thinking: _Thinking | None = None
    output_config: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    thread: Any = None


def read_messages(raw: Any, headers: Mapping[str, str], past: wire.ReadHistory = wire.NOTHING_READ) -> Request:
    """Read a body of ``/v1/messages``. Raises RequestError that names the field which cannot be served."""
    request = read_count(raw, headers, past)
    if request.max_tokens is None:
        raise RequestError("is missing", field="max_tokens")
    return request


def read_count(raw: Any, headers: Mapping[str, str], past: wire.ReadHistory = wire.NOTHING_READ) -> Request:
    """Read a body of ``/v1/messages/count_tokens``, which needs no limit."""
    body, shared = wire.read_body(raw, MessagesBody, _REFUSED, _HARMLESS)
    if body.thread is not None:
        fix = "send the whole conversation"
        raise RequestError("there are no threads here", field="thread", fix=fix, details=_NO_THREADS)
    tools, deferred = _tools(body.tools or [])
    messages, starts = _messages(body.messages or [], deferred, past)
    system, billed = _system(body.system)
    config = body.output_config or {}
    on = None if body.thinking is None else body.thinking.type != "disabled"
    form = convert(config["format"], _Format, "output_config.format") if config.get("format") else None
    choice = body.tool_choice or _ToolChoice("auto")
    wishes = _wishes(body, choice)
    eager = "fine-grained-tool-streaming" in headers.get("anthropic-beta", "")
    eager = eager or any(tool.get("eager_input_streaming") is True for tool in body.tools or ())
    answer = wire.AnswerOptions(
        calls_allowed=choice.type != "none",
        object_arguments=not (body.stream and eager),
        usage_in_stream=True,
        token_fields=wire.requested_token_fields(body, headers, TokenFields.TOKENTRACE, [TokenFields.TOKENTRACE]),
    )
    return Request(
        messages=[*system, *messages],
        tools=tools or None,
        **shared | {"ignored": (*billed, *shared["ignored"])},
        max_tokens=body.max_tokens,
        stop=wire.stop_texts(body.stop_sequences, "stop_sequences", 64),
        continued=messages[-1]["role"] == "assistant",
        structure=None if form is None else wire.structure_of(form.type, form.schema, "output_format"),
        hints=wire.thinking_hints(on, config.get("effort"), field="output_config.effort"),
        wishes=wishes,
        starts=() if _EFFORTS in wishes else [len(system) + start for start in starts],
        answer=answer,
    )


def _wishes(body: MessagesBody, choice: _ToolChoice) -> tuple[str, ...]:
    thinking, edits = body.thinking, (body.context_management or {}).get("edits")
    conditions = {
        "tools.strict": any(tool.get("strict") is True for tool in body.tools or ()),
        "tool_choice": choice.type in ("any", "tool"),
        "tool_choice.disable_parallel_tool_use": choice.disable_parallel_tool_use is True,
        "thinking.budget_tokens": thinking is not None and thinking.budget_tokens is not None,
        "thinking.display": thinking is not None and thinking.display is not None,
        "output_config": bool((body.output_config or {}).keys() - {"effort", "format"}),
        _EFFORTS: any(message.get("output_config") for message in body.messages or ()),
        "context_management": bool(edits) and edits != [_KEEPS_ALL],
    }
    return wire.wishes(conditions)


# -- the conversation


def _messages(
    items: list[Any], deferred: Mapping[str, Message], past: wire.ReadHistory
) -> tuple[list[Message], list[int]]:
    """The conversation, and how many messages come before each item."""
    messages, starts = list(past.messages), list(past.starts)
    names = {call["id"]: call["function"]["name"] for one in messages for call in one.get("tool_calls") or ()}
    for at, item in enumerate(items, past.items):
        starts.append(len(messages))
        with naming_fields(first=at):
            checked = check_messages(from_anthropic([item], names=names))
        checked = [_with_texts(one) if one.get("tool_calls") else one for one in checked]
        messages += [_defined(one, deferred) for one in checked if one != {"role": "system", "content": ""}]
    if not messages:
        raise RequestError("is empty", field="messages", fix="send at least one message with content")
    return messages, starts


def _with_texts(message: Message) -> Message:
    """The message with the text of each input that Claude Code could not read."""
    calls = list(message["tool_calls"])
    for at, call in enumerate(calls):
        match call["function"]["arguments"]:
            case {"__unparsedToolInput": {"raw": str(raw), "len": int(length)}, **more} if not more:
                if len(raw.encode("utf-16-le", "surrogatepass")) == 2 * length:  # else only its beginning came back
                    calls[at] = {**call, "function": {**call["function"], "arguments": raw}}
    return {**message, "tool_calls": calls}


def _system(system: str | list[Any] | None) -> tuple[list[Message], list[str]]:
    """The system prompt as at most one message, and the names of blocks that were left out."""
    blocks = system
    if isinstance(system, list):
        blocks = [one for one in system if not (isinstance(one, dict) and str(one.get("text")).startswith(BILLING))]
    with naming_fields():
        return with_system([], blocks), [] if blocks == system else [f"system.{BILLING.rstrip(':')}"]


def _defined(message: Message, deferred: Mapping[str, Message]) -> Message:
    """The message with the definitions of deferred tools, as text, in place of references to them."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [_definition(part, deferred) for part in content]
    if all(part.get("type") == "text" for part in parts):
        return {**message, "content": "".join(part["text"] for part in parts)}
    return {**message, "content": parts}


def _definition(part: Message, deferred: Mapping[str, Message]) -> Message:
    match part:
        case {"type": "tool_removal", "tool": {"type": "tool_reference", "name": str(name)}}:
            return {"type": "text", "text": f"The function {name} is no longer available.\n"}
        case {"type": "tool_reference", "tool_name": str(name)} if name in deferred:
            pass
        case {"type": "tool_addition", "tool": {"type": "tool_reference", "name": str(name)}} if name in deferred:
            pass
        case {"type": "tool_reference" | "tool_addition" | "tool_removal" as kind}:
            raise RequestError(f"a {kind} block must name a tool of this request with defer_loading", field="messages")
        case _:
            return part
    function = deferred[name]["function"]
    fields = {key: function[key] for key in ("description", "name", "parameters") if key in function}
    return {"type": "text", "text": f"<function>{json.dumps(fields, ensure_ascii=False)}</function>\n"}


def _tools(tools: list[Any]) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The tools that the template shows, and those to be defined later, by name."""
    for at, tool in enumerate(tools):
        match tool:
            case {"input_schema": schema} if schema is not None:
                pass
            case {"type": kind} if kind not in (None, "custom"):
                problem = "Anthropic's own tools have no schema that a template could show"
                fix = "pass one with input_schema"
                raise RequestError(problem, field=f"tools.{at}.type", fix=fix, code="unsupported_parameter")
            case {}:
                raise RequestError("is missing", field=f"tools.{at}.input_schema")
    with naming_fields():
        functions = openai_tools(tools or None) or []
    visible: list[dict[str, Any]] = []
    deferred: dict[str, dict[str, Any]] = {}
    for tool, function in zip(tools, functions, strict=True):
        if tool.get("defer_loading") is True:
            deferred[function["function"]["name"]] = function
        else:
            visible.append(function)
    return visible, deferred


# -- answers


def write_message(head: Head, replies: Sequence[Reply]) -> dict[str, Any]:
    """A ``message``. There is one reply: this API has no choices."""
    [reply] = replies
    return {
        **_message(head),
        "content": [_block(head, item) for item in reply.items],
        **_ending(reply),
        "usage": _usage(head, reply),
        **head.token_fields(reply, TokenFields.TOKENTRACE),
    }


def _message(head: Head) -> dict[str, Any]:
    return {"id": f"msg_{head.id}", "type": "message", "role": "assistant", "model": head.model}


def _block(head: Head, item: Item) -> dict[str, Any]:
    if item.kind is PartKind.TOOL_CALL:
        return {"type": "tool_use", "id": item.id, "name": item.name, "input": item.arguments}
    if item.kind is PartKind.REASONING:
        return {"type": "thinking", "thinking": item.text, "signature": signature(head.id)}
    return {"type": "text", "text": item.text}


def _ending(reply: Reply) -> dict[str, Any]:
    """Why it ended. After a stop text, calls are still to be answered."""
    if reply.stopped_by is not None and reply.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stopped_by}
    return {"stop_reason": _STOP_REASONS[reply.finish_reason], "stop_sequence": None}


def _usage(head: Head, reply: Reply) -> dict[str, Any]:
    usage = head.usage([reply])
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """Anthropic's error object."""
    details = {} if error.details is None else {"details": dict(error.details)}
    return {"type": "error", "error": {"type": error.kind, "message": str(error), **details}, "request_id": None}


def signature(id: str) -> str:
    """The signature of an answer's thinking: always the same for the same answer."""
    return base64.b64encode(hashlib.blake2b(f"tokentrace thinking {id}".encode(), digest_size=24).digest()).decode()


class MessagesEncoder(Encoder):
    """The events of one streamed message."""

    def open(self) -> list[StreamEvent]:
        """``message_start``: how much of the prompt was cached is reported at the end."""
        usage = {"input_tokens": len(self.head.prompt_ids), "output_tokens": 0}
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [{"type": "message_start", "message": {**_message(self.head), **empty}}]

    def close(self, replies: Sequence[Reply]) -> list[StreamEvent]:
        """How it ended and what it cost, and ``message_stop``."""
        [reply] = replies
        last = {"type": "message_delta", "delta": _ending(reply), "usage": _usage(self.head, reply)}
        return [{**last, **self.head.token_fields(reply, TokenFields.TOKENTRACE)}, {"type": "message_stop"}]

    def fail(self, error: RequestError) -> list[StreamEvent]:
        return [anthropic_error(error)]

    def encode(self, change: ItemChange) -> list[StreamEvent]:
        """The events for a change; a ping while a call is silent."""
        item, place = change.item, {"index": change.item.index}
        match change.event:
            case "opened":
                block = {**_block(self.head, item), **_EMPTY[item.kind]}
                return [{"type": "content_block_start", **place, "content_block": block}]
            case "grew":
                kind, field = _DELTAS[item.kind]
                return [{"type": "content_block_delta", **place, "delta": {"type": kind, field: change.text}}]
            case "waiting":
                return [{"type": "ping"}]
        end = {"type": "content_block_stop", **place}
        if item.kind is not PartKind.REASONING:
            return [end]
        delta = {"type": "signature_delta", "signature": signature(self.head.id)}
        return [{"type": "content_block_delta", **place, "delta": delta}, end]


_EMPTY: Final[Mapping[PartKind, Mapping[str, Any]]] = {
    PartKind.REASONING: {"thinking": "", "signature": ""},
    PartKind.CONTENT: {"text": ""},
    PartKind.TOOL_CALL: {"input": {}},
}
_DELTAS: Final = {
    PartKind.REASONING: ("thinking_delta", "thinking"),
    PartKind.CONTENT: ("text_delta", "text"),
    PartKind.TOOL_CALL: ("input_json_delta", "partial_json"),
}

MESSAGES: Final = Dialect("messages", read_messages, write_message, MessagesEncoder, anthropic_error)
