"""OpenAI's Responses API, with ``top_k``, ``seed``, ``stop`` and ``chat_template_kwargs``. Pure.

Ids of output items contain `Head.id`, so items that come back name their turn. Every answer has
an item, so that clients have something to repeat. The model does not see OpenAI's own tools.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from ..conversation.responses import in_namespace, item_id, read_items, sealed
from ..engines.protocol import FinishReason
from ..errors import brief
from ..parsing.response import PartKind
from . import requests as wire
from .dialect import Dialect, Head, Item, ItemChange, Reply, StreamEvent, changes_of, token_spans
from .requests import NOTHING_READ, ReadHistory, Request, RequestError, TokenFields, convert

PREFIX = "resp_"

_RESPONSE = re.compile(f"{PREFIX}[0-9A-Za-z]+")
_HARMLESS = ("service_tier", "prompt_cache_retention", "prompt_cache_options", "image", "stream_options")
_REFUSED: wire.Refused = {
    **wire.REFUSED,
    "background": ((False,), "background responses are not supported"),
    "conversation": ((), "conversations are not stored by name; send the input, or previous_response_id"),
    "prompt": ((), "prompts are not stored here; send instructions and input"),
    "context_management": (([],), "the gateway does not rewrite conversations"),
    "moderation": ((), "the gateway does not moderate"),
}
_LOGPROBS = "message.output_text.logprobs"
_Included = Literal[
    "message.output_text.logprobs", "reasoning.encrypted_content", "file_search_call.results",
    "web_search_call.results", "web_search_call.action.sources", "message.input_image.image_url",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs",
]  # fmt: skip
"""Those for tools that are not served have no effect."""
_NULLABLE = ("previous_response_id", "max_output_tokens", "temperature", "top_p", "max_tool_calls")
_OPTIONAL = ("user", "safety_identifier", "prompt_cache_key")
_HOSTED = re.compile(
    r"web_search(_preview)?(_\d{4}_\d\d_\d\d)?|image_generation|code_interpreter|file_search|tool_search"
)


class _Reasoning(Struct):
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class _Text(Struct):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class _Function(Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Namespace(Struct):
    name: str
    tools: list[Any]
    description: str | None = None


class ResponsesBody(wire.AgentBody):
    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    include: list[_Included] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    reasoning: _Reasoning | None = None
    text: _Text | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    stop: str | list[str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


def read_responses(raw: Any, headers: Mapping[str, str], past: ReadHistory = NOTHING_READ) -> Request:
    body, shared = wire.read_body(raw, ResponsesBody, _REFUSED, _HARMLESS)
    previous = body.previous_response_id
    if previous is not None and not _RESPONSE.fullmatch(previous):
        problem = f"there is no response {brief(previous)}; response ids begin with {PREFIX}"
        raise RequestError(problem, field="previous_response_id", code="previous_response_not_found")
    if body.input is None:
        raise RequestError("is missing; send a string or a list of items", field="input")
    with wire.naming_fields("input", past.items):
        system = [{"role": "system", "content": body.instructions}] if body.instructions else []
        items = read_items(body.input, [*system, *past.messages], open_calls=previous is not None)
    tools, namespaces, hidden = _tools(body.tools or [])
    reasoning, text = body.reasoning or _Reasoning(), body.text or _Text()
    included = body.include or []
    unenforced = {
        "tool_choice": body.tool_choice not in (None, "none", "auto"),
        "reasoning.summary": reasoning.summary is not None,
        "text.verbosity": text.verbosity is not None,
        "parallel_tool_calls": body.parallel_tool_calls is False and bool(tools),
        "truncation": body.truncation == "auto",
        "max_tool_calls": body.max_tool_calls is not None,
    }
    ways = (TokenFields.TOKENTRACE, TokenFields.NEMO_GYM)
    structure, form = _format(text)
    return Request(
        messages=items.messages,
        tools=tools or None,
        **shared,
        max_tokens=body.max_output_tokens,
        stop=wire.stop_texts(body.stop, "stop", 16),
        structure=structure,
        hints=wire.thinking_hints(None, reasoning.effort, field="reasoning.effort"),
        previous=previous,
        references={at: tuple(ids) for at, ids in items.references.items()},
        instructions=len(system),
        joined=True,
        starts=[*(len(system) + start for start in past.starts), *items.starts],
        stored=body.store is not False,
        unenforced=(*hidden, *wire.unenforced(**unenforced)),
        answer=wire.AnswerOptions(
            logprobs=body.top_logprobs or 0 if body.top_logprobs or _LOGPROBS in included else None,
            calls_allowed=body.tool_choice != "none",
            token_fields=wire.requested_token_fields(body, headers, TokenFields.NEMO_GYM, ways),
            encrypted="reasoning.encrypted_content" in included,
            namespaces=namespaces,
            repeated=_repeated(body, text, form),
        ),
    )


def _repeated(body: ResponsesBody, text: _Text, form: dict[str, Any]) -> dict[str, Any]:
    return {
        **{name: getattr(body, name) for name in _NULLABLE},
        **{name: value for name in _OPTIONAL if (value := getattr(body, name)) is not None},
        "top_logprobs": body.top_logprobs or 0,
        "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": msgspec.structs.asdict(body.reasoning or _Reasoning()),
        "text": {"format": form, **({"verbosity": text.verbosity} if text.verbosity else {})},
        "truncation": body.truncation or "disabled",
        "metadata": body.metadata or {},
        "store": body.store is not False,
    }


def _tools(tools: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, list[str]], list[str]]:
    """Functions, their namespaces by name, and what the model does not see."""
    functions: list[dict[str, Any]] = []
    namespaces: dict[str, list[str]] = {}
    hidden: list[str] = []
    for at, tool in enumerate(tools):
        path, kind = f"tools.{at}", tool.get("type")
        if isinstance(kind, str) and _HOSTED.fullmatch(kind):
            hidden.append(f"{path} ({kind})")
        elif kind == "namespace":
            space = convert(tool, _Namespace, path)
            hidden += [f"{path}.description"] if space.description else []
            for number, inner in enumerate(space.tools):
                function = _function(inner, f"{path}.tools.{number}")
                name = function["name"]
                function["name"] = in_namespace(space.name, name)
                namespaces[function["name"]] = [space.name, name]
                functions.append(function)
        else:
            functions.append(_function(tool, path))
    counts = Counter(function["name"] for function in functions)
    for name in namespaces:
        if counts[name] > 1:
            raise RequestError(f"two functions are named {brief(name)}", field="tools")
    return [{"type": "function", "function": function} for function in functions], namespaces, hidden


def _function(tool: Any, path: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else tool
    if not isinstance(tool, dict) or kind != "function":
        problem = f"tools of type {brief(kind)} are not served; only functions are"
        raise RequestError(problem, field=f"{path}.type")
    if tool.get("function") is not None:
        tool, path = tool["function"], f"{path}.function"
    fields = msgspec.structs.asdict(convert(tool, _Function, path))
    for name in ("defer_loading", "async"):
        if tool.get(name):
            raise RequestError("is not served; leave it out", field=f"{path}.{name}")
    return {name: value for name, value in fields.items() if value is not None}


def _format(text: _Text) -> tuple[Mapping[str, Any] | None, dict[str, Any]]:
    form = text.format or {}
    kind = form.get("type", "text")
    schema = form.get("schema")
    name = form.get("name")
    structure = wire.structure_of(kind, schema, "text.format")
    if kind != "json_schema":
        return structure, {"type": kind}
    if not isinstance(name, str):
        raise RequestError("must be a string", field="text.format.name")
    return structure, {"type": kind, "name": name, "schema": schema, "strict": bool(form.get("strict"))}


_PREFIXES = {PartKind.REASONING: "rs", PartKind.CONTENT: "msg", PartKind.TOOL_CALL: "fc"}
_TEXTS = {
    PartKind.REASONING: "response.reasoning_text",
    PartKind.CONTENT: "response.output_text",
    PartKind.TOOL_CALL: "response.function_call_arguments",
}


def output_item(response: str, item: Item) -> dict[str, Any]:
    id = item_id(_PREFIXES[item.kind], response, item.index)
    status = "incomplete" if item.cut_off else "completed"
    if item.kind is PartKind.TOOL_CALL:
        call = {"call_id": item.id, "name": item.name, "arguments": item.text, "status": status}
        return {"type": "function_call", "id": id, **call}
    if item.kind is PartKind.REASONING:
        thought = {"type": "reasoning_text", "text": item.text}
        return {"type": "reasoning", "id": id, "summary": [], "content": [thought]}
    text = {"type": "output_text", "text": item.text, "annotations": []}
    return {"type": "message", "id": id, "role": "assistant", "status": status, "content": [text]}


class Responses(Dialect):
    """With logprobs, messages close last: only then are tokens certain."""

    name = "responses"
    history = "input"
    structure = "text.format"
    read = staticmethod(read_responses)

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._sent = 0
        self._pending: Final[list[Item]] = []

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        [reply] = replies
        usage = self.usage(replies).openai("input", "output")
        usage["input_tokens_details"]["cache_write_tokens"] = 0
        cut_off = reply.finish_reason == "length"
        answer = self._response("incomplete" if cut_off else "completed") | {
            "output": [self._item(item, reply) for item in _items(reply)],
            "usage": usage,
            **self.token_fields(reply, TokenFields.TOKENTRACE),
        }
        answer["output"][-1] |= self.token_fields(reply, TokenFields.NEMO_GYM)
        if cut_off and reply.completion.finish_reason is FinishReason.LENGTH:
            answer["incomplete_details"] = {"reason": "max_output_tokens"}
        return answer

    def open(self) -> list[StreamEvent]:
        response = self._response("in_progress")
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def encode(self, change: ItemChange) -> list[StreamEvent]:
        item, is_text = change.item, change.item.kind is PartKind.CONTENT
        match change.event:
            case "grew":
                logprobs: dict[str, Any] = {"logprobs": []} if is_text else {}
                return [self._about(item, f"{_TEXTS[item.kind]}.delta", delta=change.text, **logprobs)]
            case "closed" if is_text and self.options.logprobs is not None:
                self._pending.append(item)
                return []
            case "closed":
                return self._done(item)
        output = self._item(Item(item.index, item.kind, "", item.name, item.id))
        output |= {} if item.kind is PartKind.REASONING else {"status": "in_progress"}
        output.pop("encrypted_content", None)
        parts = output.get("content", ())
        output |= {"content": []} if parts else {}
        added = self._event("response.output_item.added", output_index=item.index, item=output)
        return [added, *(self._about(item, "response.content_part.added", part=part) for part in parts)]

    def close(self, replies: Sequence[Reply]) -> list[StreamEvent]:
        [reply] = replies
        events = [] if reply.items else self.feed(0, changes_of(_items(reply)), None)
        for item in self._pending:
            events += self._done(item, reply)
        answer = self.whole(replies)
        return [*events, self._event(f"response.{answer['status']}", response=answer)]

    def fail(self, error: RequestError) -> list[StreamEvent]:
        """Clients look for either event."""
        code = "invalid_prompt" if error.status < 500 else "server_error"
        about = {"code": "rate_limit_exceeded" if error.status == 429 else code, "message": str(error)}
        failed = self._response("failed") | {"error": about}
        fields = {**about, "code": error.code or about["code"], "param": error.field}
        return [self._event("response.failed", response=failed), self._event("error", **fields)]

    def _response(self, status: str) -> dict[str, Any]:
        request = self.head.request
        empty = {"type": "function", "description": None, "parameters": None}
        # not strict: nothing enforces the schema
        tools = [{**empty, **tool["function"], "strict": False} for tool in request.tools or ()]
        return {
            "id": PREFIX + self.head.id,
            "object": "response",
            "created_at": self.head.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.messages[0]["content"] if request.instructions else None,
            "model": self.head.model,
            "output": [],
            "tools": tools,
            "usage": None,
            **self.options.repeated,
        }

    def _item(self, item: Item, reply: Reply | None = None) -> dict[str, Any]:
        """A message gets logprobs only from a complete `reply`."""
        output, options = output_item(self.head.id, item), self.options
        if item.kind is PartKind.REASONING and options.encrypted:
            output["encrypted_content"] = sealed(item.text)
        if item.kind is PartKind.TOOL_CALL and item.name in options.namespaces:
            output["namespace"], output["name"] = options.namespaces[item.name]
        if item.kind is PartKind.CONTENT and reply is not None and options.logprobs is not None:
            entries = self.logprobs(reply.completion)
            spans = token_spans(reply.response, reply.items).get(item.index, ())
            shares = [entries[span.start : span.stop] for span in spans]
            output["content"][0]["logprobs"] = list(chain.from_iterable(shares))
        return output

    def _done(self, item: Item, reply: Reply | None = None) -> list[StreamEvent]:
        output, name = self._item(item, reply), f"{_TEXTS[item.kind]}.done"
        if item.kind is PartKind.TOOL_CALL:
            events = [self._about(item, name, arguments=item.text)]
        else:
            [part] = output["content"]
            logprobs = {"logprobs": part.get("logprobs", [])} if item.kind is PartKind.CONTENT else {}
            events = [self._about(item, name, text=item.text, **logprobs)]
            events.append(self._about(item, "response.content_part.done", part=part))
        return [*events, self._event("response.output_item.done", output_index=item.index, item=output)]

    def _about(self, item: Item, type: str, **fields: Any) -> StreamEvent:
        place = {} if item.kind is PartKind.TOOL_CALL else {"content_index": 0}
        id = item_id(_PREFIXES[item.kind], self.head.id, item.index)
        return self._event(type, item_id=id, output_index=item.index, **place, **fields)

    def _event(self, type: str, **fields: Any) -> StreamEvent:
        self._sent += 1
        return {"type": type, **fields, "sequence_number": self._sent - 1}


def _items(reply: Reply) -> Sequence[Item]:
    return reply.items or [Item(0, PartKind.CONTENT, cut_off=reply.finish_reason == "length")]
