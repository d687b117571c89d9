"""OpenAI's Chat Completions, with fields of other servers, and legacy functions. Pure."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from ..conversation.messages import check_messages
from ..conversation.shapes import from_openai, openai_tools
from ..engines.protocol import Delta
from ..parsing.response import PartKind
from . import requests as wire
from .dialect import OPENAI_END, Dialect, Head, ItemChange, Reply, StreamEvent
from .requests import NOTHING_READ, ReadHistory, Request, RequestError, TokenFields

_HARMLESS = (
    "metadata", "store", "user", "service_tier", "prompt_cache_key", "prompt_cache_retention",
    "safety_identifier", "prediction", "skip_special_tokens", "spaces_between_special_tokens",
    "include_reasoning", "separate_reasoning",
)  # fmt: skip

_REFUSED: wire.Refused = {
    **wire.REFUSED,
    "audio": ((), "the gateway serves text only"),
    "modalities": ((["text"], []), "the gateway serves text only"),
    "web_search_options": ((), "the gateway does not search the web"),
    "chat_template": ((), "every request uses the model's own template"),
    "documents": (([],), "documents cannot be passed; put their text into a message"),
}


class _Thinking(Struct):
    type: Literal["enabled", "disabled", "auto", "adaptive"]


class ChatBody(wire.AgentBody):
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    tool_choice: Literal["none", "auto", "required", "any"] | dict[str, Any] | None = None
    function_call: Literal["none", "auto"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: str | list[str] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream_options: wire.StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking: _Thinking | None = None
    verbosity: str | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    return_tokens_as_token_ids: bool | None = None


def read_chat(raw: Any, headers: Mapping[str, str], past: ReadHistory = NOTHING_READ) -> Request:
    body, shared = wire.read_body(raw, ChatBody, _REFUSED, _HARMLESS)
    if body.tools and body.functions:
        raise RequestError("cannot be used together with tools", field="functions")
    if body.top_logprobs and not body.logprobs:
        raise RequestError("needs logprobs to be true", field="top_logprobs")
    with wire.naming_fields(first=past.items):
        new = check_messages(from_openai(body.messages or []), is_role=lambda _: True)
    messages = [*past.messages, *new]
    legacy = [one for one in body.messages or () if one["role"] == "function" or one.get("function_call")]
    continued = bool(body.continue_final_message)
    prompted = body.add_generation_prompt
    if prompted == continued:
        rule = "cannot be true together with" if prompted else "can be false only with"
        raise RequestError(f"{rule} continue_final_message", field="add_generation_prompt")
    if continued and messages[-1].get("role") != "assistant":
        raise RequestError("needs an assistant message at the end", field="continue_final_message")
    limits = [limit for limit in (body.max_tokens, body.max_completion_tokens) if limit]
    thinking = body.thinking.type if body.thinking else ""
    on = {"enabled": True, "disabled": False}.get(thinking, body.enable_thinking)
    form = body.response_format or {}
    outer = form.get("json_schema")
    schema = outer.get("schema") if isinstance(outer, dict) else None
    return Request(
        messages=messages,
        tools=(body.tools and past.tools) or _tools(body.tools or body.functions or []),
        **shared,
        max_tokens=min(limits, default=None),
        stop=wire.stop_texts(body.stop, "stop", 16),
        n=body.n or 1,
        continued=continued,
        structure=wire.structure_of(form.get("type"), schema, "response_format", "json_schema.schema"),
        hints=wire.thinking_hints(on, body.reasoning_effort),
        starts=range(len(messages)),
        # a legacy result is read with its call
        joined=past.joined or bool(legacy),
        unenforced=wire.unenforced(
            parallel_tool_calls=body.parallel_tool_calls is False,
            tool_choice=body.tool_choice not in (None, "none", "auto"),
            function_call=isinstance(body.function_call, dict),
            verbosity=body.verbosity not in (None, "medium"),
        ),
        answer=wire.AnswerOptions(
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            calls_allowed="none" not in (body.tool_choice, body.function_call),
            functions=bool(body.functions),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            usage_in_stream=bool(body.stream_options and body.stream_options.include_usage),
            token_fields=wire.requested_token_fields(body, headers, TokenFields.VLLM, tuple(TokenFields)),
        ),
    )


def _tools(tools: list[Any]) -> Sequence[Mapping[str, Any]] | None:
    for at, tool in enumerate(tools):
        if isinstance(tool, dict) and tool.get("type") not in (None, "function"):
            problem = "only tools of type function have a schema that a template can show"
            raise RequestError(problem, field=f"tools.{at}.type", code="unsupported_parameter")
    with wire.naming_fields():
        return openai_tools(tools, wrap=True)


class Chat(Dialect):
    name = "chat"
    end = OPENAI_END
    read = staticmethod(read_chat)

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._calls: Final = [0] * head.request.n

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        choices = [self._choice(index, reply) for index, reply in enumerate(replies)]
        usage = self.usage(replies).openai()
        frame = self._frame("chat.completion", choices, usage=usage, system_fingerprint=None)
        return frame | self.prompt_fields

    def _choice(self, index: int, reply: Reply) -> dict[str, Any]:
        message = self._with_legacy_call(reply.message)
        return {
            "index": index,
            "message": {**message, **self.token_fields(reply, TokenFields.NEMO_GYM)},
            "logprobs": self._logprobs(reply.completion),
            "finish_reason": self._finish_reason(reply),
            **self.token_fields(reply, TokenFields.VLLM),
            **self.token_fields(reply, TokenFields.TOKENTRACE),
        }

    def open(self) -> list[StreamEvent]:
        chunks = [self._chunk(choice, {"role": "assistant"}) for choice in range(self.head.request.n)]
        chunks[0] |= self.prompt_fields
        return chunks

    def feed(self, choice: int, changes: Sequence[ItemChange], delta: Delta | None) -> list[StreamEvent]:
        deltas = [one for change in changes if (one := self._delta(choice, change))]
        tokens: dict[str, Any] = {}
        if delta is not None and len(delta.ids):
            if self.options.logprobs is not None:
                tokens["logprobs"] = self._logprobs(delta)
            if TokenFields.VLLM in self.options.token_fields:
                tokens["token_ids"] = delta.ids.tolist()
        if tokens and not deltas:
            deltas = [{}]
        chunks = [self._chunk(choice, self._with_legacy_call(one)) for one in deltas]
        if tokens:
            chunks[-1]["choices"][0] |= tokens
        return chunks

    def close(self, replies: Sequence[Reply]) -> list[StreamEvent]:
        chunks = []
        for choice, reply in enumerate(replies):
            delta = self.token_fields(reply, TokenFields.NEMO_GYM)
            if not reply.message["content"] and not self._calls[choice]:
                delta |= {"content": ""}
            chunk = self._chunk(choice, delta, self._finish_reason(reply))
            chunk["choices"][0] |= self.token_fields(reply, TokenFields.TOKENTRACE)
            chunks.append(chunk)
        if self.options.usage_in_stream:
            chunks.append(self._frame("chat.completion.chunk", [], usage=self.usage(replies).openai()))
        return chunks

    def _delta(self, choice: int, change: ItemChange) -> dict[str, Any]:
        item, at = change.item, self._calls[choice]
        match change.event, item.kind:
            case "opened", PartKind.TOOL_CALL:
                self._calls[choice] += 1
                empty = {"function": {"name": item.name, "arguments": ""}}
                return {"tool_calls": [{"index": at, **item.openai_call(), **empty}]}
            case "grew", PartKind.TOOL_CALL:
                return {"tool_calls": [{"index": at - 1, "function": {"arguments": change.text}}]}
            case "grew", kind:
                return {"content" if kind is PartKind.CONTENT else "reasoning_content": change.text}
        return {}

    def _chunk(self, choice: int, delta: dict[str, Any], finish_reason: str | None = None) -> StreamEvent:
        choices = [{"index": choice, "delta": delta, "finish_reason": finish_reason}]
        usage = {"usage": None} if self.options.usage_in_stream else {}
        return self._frame("chat.completion.chunk", choices, **usage)

    def _frame(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = self.head
        frame = {"id": f"chatcmpl-{head.id}", "object": kind, "created": head.created, "model": head.model}
        return {**frame, "choices": choices, **more}

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if self.options.logprobs is None:
            return None
        return {"content": self.logprobs(delta), "refusal": None}

    def _finish_reason(self, reply: Reply) -> str:
        is_legacy = self.options.functions and reply.finish_reason == "tool_calls"
        return "function_call" if is_legacy else reply.finish_reason

    def _with_legacy_call(self, message: dict[str, Any]) -> dict[str, Any]:
        calls = message.get("tool_calls")
        if not self.options.functions or not calls or calls[0].get("index", 0):
            return message
        later = {"tool_calls": calls[1:]} if calls[1:] else {}
        del message["tool_calls"]
        return {**message, "function_call": calls[0]["function"], **later}
