"""Anthropic's Messages API. Pure.

A tool use is sent once the call has ended, and broken or cut-off input becomes text, unless the
client asks for eager streaming. Claude Code also sends:

- A block ``x-anthropic-billing-header`` in its system prompt, which is ignored.
- Tools with ``defer_loading``; a reference to one becomes its definition, as text.
- ``context_management``, and an effort in mid-conversation, which are not enforced.
- ``__unparsedToolInput``, whose text is restored.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ..conversation.messages import check_messages
from ..conversation.shapes import from_anthropic, openai_tools, with_system
from ..parsing.response import PartKind
from . import requests as wire
from .dialect import Dialect, Item, ItemChange, Reply, StreamEvent, encode_sse
from .requests import NOTHING_READ, ReadHistory, Request, RequestError, TokenFields, convert, naming_fields
from .turns import Message

BILLING = "x-anthropic-billing-header:"

_HARMLESS = (
    "metadata", "service_tier", "cache_control", "inference_geo", "speed", "betas", "anthropic_beta",
    "anthropic_version", "user_profile_id", "workspace_id", "diagnostics", "fallbacks", "fallback_credit_token",
)  # fmt: skip

_REFUSED: wire.Refused = {
    **wire.REFUSED,
    "mcp_servers": (([],), "the gateway does not connect to MCP servers"),
    "container": ((), "the gateway has no containers"),
}
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Tells clients that use threads to send the whole conversation from now on."""
_KEEPS_ALL = {"type": "clear_thinking_20251015", "keep": "all"}
_EFFORTS = "messages.output_config"
_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}


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


def read_messages(raw: Any, headers: Mapping[str, str], past: ReadHistory = NOTHING_READ) -> Request:
    request = read_count(raw, headers, past)
    if request.max_tokens is None:
        raise RequestError("is missing", field="max_tokens")
    return request


def read_count(raw: Any, headers: Mapping[str, str], past: ReadHistory = NOTHING_READ) -> Request:
    """Read a body that needs no ``max_tokens``: ``/v1/messages/count_tokens``."""
    body, shared = wire.read_body(raw, MessagesBody, _REFUSED, _HARMLESS)
    if body.thread is not None:
        problem = "threads are not supported; send the whole conversation"
        raise RequestError(problem, field="thread", details=_NO_THREADS)
    visible, deferred = _tools(body.tools or [])
    messages, starts = _messages(body.messages or [], deferred, past)
    system, billed = _system(body.system)
    config = body.output_config or {}
    edits = (body.context_management or {}).get("edits")
    form = convert(config["format"], _Format, "output_config.format") if config.get("format") else None
    choice, thinking = body.tool_choice or _ToolChoice("auto"), body.thinking
    on = None if thinking is None else thinking.type != "disabled"
    unenforced = {
        "tools.strict": any(tool.get("strict") is True for tool in body.tools or ()),
        "tool_choice": choice.type in ("any", "tool"),
        "tool_choice.disable_parallel_tool_use": choice.disable_parallel_tool_use is True,
        "thinking.budget_tokens": thinking is not None and thinking.budget_tokens is not None,
        "thinking.display": thinking is not None and thinking.display is not None,
        "output_config": bool(config.keys() - {"effort", "format"}),
        _EFFORTS: any(message.get("output_config") for message in body.messages or ()),
        "context_management": bool(edits) and edits != [_KEEPS_ALL],
    }
    eager = "fine-grained-tool-streaming" in headers.get("anthropic-beta", "")
    eager = eager or any(tool.get("eager_input_streaming") is True for tool in body.tools or ())
    ours = TokenFields.TOKENTRACE
    return Request(
        messages=[*system, *messages],
        tools=visible or None,
        **shared | {"ignored": (*billed, *shared["ignored"])},
        max_tokens=body.max_tokens,
        stop=wire.stop_texts(body.stop_sequences, "stop_sequences", 64),
        continued=messages[-1]["role"] == "assistant",
        structure=None if form is None else wire.structure_of(form.type, form.schema, "output_format"),
        hints=wire.thinking_hints(on, config.get("effort"), field="output_config.effort"),
        unenforced=wire.unenforced(**unenforced),
        starts=() if unenforced[_EFFORTS] else [len(system) + start for start in starts],
        answer=wire.AnswerOptions(
            calls_allowed=choice.type != "none",
            object_arguments=not (body.stream and eager),
            usage_in_stream=True,
            token_fields=wire.requested_token_fields(body, headers, ours, [ours]),
        ),
    )


def _messages(
    items: list[Any], deferred: Mapping[str, Message], past: ReadHistory
) -> tuple[list[Message], list[int]]:
    """The conversation, and how many messages come before each item."""
    messages, starts = list(past.messages), list(past.starts)
    calls = (call for one in messages for call in one.get("tool_calls") or ())
    names = {call["id"]: call["function"]["name"] for call in calls if "id" in call}
    for at, item in enumerate(items, past.items):
        starts.append(len(messages))
        with naming_fields(first=at):
            checked = check_messages(from_anthropic([item], names=names))
        checked = [_with_texts(one) if one.get("tool_calls") else one for one in checked]
        messages += [_defined(one, deferred) for one in checked if one != {"role": "system", "content": ""}]
    if not messages:
        raise RequestError("is empty; send at least one message with content", field="messages")
    return messages, starts


def _with_texts(message: Message) -> Message:
    calls = list(message["tool_calls"])
    for at, call in enumerate(calls):
        match call["function"]["arguments"]:
            case {"__unparsedToolInput": {"raw": str(raw), "len": int(length)}, **more} if not more:
                # otherwise it was shortened
                if len(raw.encode("utf-16-le", "surrogatepass")) == 2 * length:
                    calls[at] = {**call, "function": {**call["function"], "arguments": raw}}
    return {**message, "tool_calls": calls}


def _system(system: str | list[Any] | None) -> tuple[list[Message], list[str]]:
    """The system prompt as at most one message, and the names of ignored blocks."""
    blocks = system
    if isinstance(system, list):
        billing = (isinstance(one, dict) and str(one.get("text")).startswith(BILLING) for one in system)
        blocks = [one for one, is_billing in zip(system, billing, strict=True) if not is_billing]
    with naming_fields():
        return with_system([], blocks), [] if blocks == system else [f"system.{BILLING.rstrip(':')}"]


def _defined(message: Message, deferred: Mapping[str, Message]) -> Message:
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
        case {"type": "tool_reference", "tool_name": str(name)} | {
            "type": "tool_addition",
            "tool": {"type": "tool_reference", "name": str(name)},
        } if name in deferred:
            pass
        case {"type": "tool_reference" | "tool_addition" | "tool_removal" as kind}:
            problem = f"a {kind} block must name a tool of this request with defer_loading"
            raise RequestError(problem, field="messages")
        case _:
            return part
    function = deferred[name]["function"]
    fields = {key: function[key] for key in ("description", "name", "parameters") if key in function}
    return {"type": "text", "text": f"<function>{json.dumps(fields, ensure_ascii=False)}</function>\n"}


def _tools(tools: list[Any]) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The tools that the template shows, and the deferred ones by name."""
    for at, tool in enumerate(tools):
        if isinstance(tool, dict) and tool.get("input_schema") is None:
            problem = "is missing: Anthropic's own tools have no schema that a template could show"
            raise RequestError(problem, field=f"tools.{at}.input_schema", code="unsupported_parameter")
    with naming_fields():
        functions = openai_tools(tools or None) or []
    split: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for tool, function in zip(tools, functions, strict=True):
        split[tool.get("defer_loading") is True].append(function)
    return split[False], {function["function"]["name"]: function for function in split[True]}


def signature(id: str) -> str:
    digest = hashlib.blake2b(f"tokentrace thinking {id}".encode(), digest_size=24).digest()
    return base64.b64encode(digest).decode()


class Messages(Dialect):
    """A ``message``, or its events. There is one reply: this API has no choices."""

    name = "messages"
    structure = "output_config.format"
    keep_alive = encode_sse({"type": "ping"})
    read = staticmethod(read_messages)

    @staticmethod
    def error(error: RequestError) -> dict[str, Any]:
        details = {} if error.details is None else {"details": dict(error.details)}
        about = {"type": error.kind, "message": str(error), **details}
        return {"type": "error", "error": about, "request_id": None}

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        [reply] = replies
        content = [self._block(item) for item in reply.items]
        return {**self._message(content), **self._ending(reply), **self._costs(reply)}

    def open(self) -> list[StreamEvent]:
        usage = {"input_tokens": len(self.head.prompt_ids), "output_tokens": 0}
        message = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [{"type": "message_start", "message": message}]

    def encode(self, change: ItemChange) -> list[StreamEvent]:
        item, place = change.item, {"index": change.item.index}
        empty, kind, field = _BLOCKS[item.kind]
        match change.event:
            case "opened":
                block = {**self._block(item), **empty}
                return [{"type": "content_block_start", **place, "content_block": block}]
            case "grew":
                grown = {"type": kind, field: change.text}
                return [{"type": "content_block_delta", **place, "delta": grown}]
        end = {"type": "content_block_stop", **place}
        if item.kind is not PartKind.REASONING:
            return [end]
        delta = {"type": "signature_delta", "signature": signature(self.head.id)}
        return [{"type": "content_block_delta", **place, "delta": delta}, end]

    def close(self, replies: Sequence[Reply]) -> list[StreamEvent]:
        [reply] = replies
        last = {"type": "message_delta", "delta": self._ending(reply), **self._costs(reply)}
        return [last, {"type": "message_stop"}]

    def _message(self, content: list[Any]) -> dict[str, Any]:
        about = {"id": f"msg_{self.head.id}", "type": "message", "role": "assistant"}
        return {**about, "model": self.head.model, "content": content}

    def _block(self, item: Item) -> dict[str, Any]:
        match item.kind:
            case PartKind.TOOL_CALL:
                return {"type": "tool_use", "id": item.id, "name": item.name, "input": item.arguments}
            case PartKind.REASONING:
                return {"type": "thinking", "thinking": item.text, "signature": signature(self.head.id)}
        return {"type": "text", "text": item.text}

    def _ending(self, reply: Reply) -> dict[str, Any]:
        """The stop reason. If there are calls, it is ``tool_use`` even after a stop text."""
        if reply.stopped_by is not None and reply.finish_reason == "stop":
            return {"stop_reason": "stop_sequence", "stop_sequence": reply.stopped_by}
        return {"stop_reason": _STOP_REASONS[reply.finish_reason], "stop_sequence": None}

    def _costs(self, reply: Reply) -> dict[str, Any]:
        usage = self.usage([reply])
        counts = {
            "input_tokens": usage.prompt - usage.cached,
            "cache_read_input_tokens": usage.cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.completion,
            "output_tokens_details": {"thinking_tokens": usage.reasoning},
        }
        return {"usage": counts, **self.token_fields(reply, TokenFields.TOKENTRACE)}


_BLOCKS: Mapping[PartKind, tuple[Mapping[str, Any], str, str]] = {
    PartKind.REASONING: ({"thinking": "", "signature": ""}, "thinking_delta", "thinking"),
    PartKind.CONTENT: ({"text": ""}, "text_delta", "text"),
    PartKind.TOOL_CALL: ({"input": {}}, "input_json_delta", "partial_json"),
}
