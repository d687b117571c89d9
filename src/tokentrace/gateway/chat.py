"""OpenAI's Chat Completions: requests in, completions and chunks out. Pure.

An answer has the message as OpenAI's has it, with ``reasoning_content`` where there is reasoning; `token_fields` says
how it carries ids. ``logprobs.content`` has every token that was sampled, those of reasoning and the stop token too.
Streams tell reasoning, content and the arguments of calls as they are sampled: put together they are the answer. An
attempt whose name is certain is a call, and its arguments are what the model wrote, whole JSON or not.

For the ``functions`` of old the first call is the message's ``function_call``.

Also read: vLLM's ``top_k``, ``min_p``, ``repetition_penalty``, ``chat_template_kwargs``, ``continue_final_message`` and
``add_generation_prompt``, ``return_token_ids`` and ``return_tokens_as_token_ids``, and the ``thinking`` and
``enable_thinking`` of others.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..conversation.messages import check_messages
from ..conversation.shapes import from_openai, openai_tools
from ..engines.protocol import OPTIONAL, Delta
from ..errors import InputError
from ..parsing.events import Done, Event
from ..parsing.messages import CallId, openai_message
from .dialect import AgentDialect, Head, Replied, Telling, finish_reason, logprob_entries, openai_error, told, usage_of
from .requests import Body, Request, RequestError, offered, refusing, structure_of, thinking_hints
from .sse import OPENAI_END, OpenAIChunks, encode_sse
from .token_fields import TokenFields, asked_fields, asks, carried

_HARMLESS: Final = (
    "metadata", "store", "user", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "prediction", "skip_special_tokens", "spaces_between_special_tokens", "include_reasoning", "separate_reasoning",
)  # fmt: skip
"""Fields that say nothing about the tokens that are sampled."""

_TEXT_ONLY: Final = "there is only text here"


def read_chat(body: Any, headers: Mapping[str, str]) -> Request:
    """A body of ``POST /v1/chat/completions``. RequestError names the field that cannot be served."""
    said = Body(body)
    messages = said.get("messages", list, "a list of messages", ())
    with refusing():
        messages = check_messages(from_openai(messages), any_role=lambda role: True)
    tools, old = _tools(said)
    allowed, wishes = _tool_choice(said, tools)
    said.refuse_unserved(served=OPTIONAL)
    said.refuse("audio", (), _TEXT_ONLY)
    said.refuse("modalities", (["text"], []), _TEXT_ONLY)
    said.refuse("web_search_options", (), "nothing here searches the web")
    said.refuse("chat_template", (), "the model's own template is used, and is the same in every request")
    said.refuse("documents", ([],), "documents cannot be given; put their text into a message")
    said.skip(*_HARMLESS)
    logprobs, alternatives = said.flag("logprobs"), said.whole("top_logprobs", 0, 20)
    if alternatives and not logprobs:
        raise RequestError("needs logprobs to be true", field="top_logprobs")
    limits = [limit for limit in (said.whole("max_completion_tokens", 1), said.whole("max_tokens", 1)) if limit]
    options = said.get("stream_options", Mapping, "an object", {})
    fields = asked_fields(said, headers, TokenFields.VLLM)
    if said.get("verbosity", str, "a string") not in (None, "medium"):
        wishes.append("verbosity")
    return Request(
        messages=messages,
        tools=tools,
        **said.sampling(),
        max_tokens=min(limits, default=None),
        shaping=said.shaping(),
        stop=said.texts("stop", 16),
        n=said.whole("n", 1, 128) or 1,
        usage_in_stream=options.get("include_usage") is True,
        logprobs=(alternatives or 0) if logprobs else None,
        continued=_continued(said, messages),
        calls_allowed=allowed,
        structure=_structure(said),
        hints=_hints(said),
        echo={
            "token_fields": list(fields),
            "functions": old,
            "tokens_as_ids": said.flag("return_tokens_as_token_ids"),
        },
        wishes=tuple(wishes),
        ignored=said.unread,
    )


def _tools(said: Body) -> tuple[list[dict[str, Any]] | None, bool]:
    """The tools, and whether they were given as the ``functions`` of old."""
    tools = said.get("tools", list, "a list of tools", ())
    functions = said.get("functions", list, "a list of functions", ())
    if tools and functions:
        raise RequestError("stands beside tools; give one of them", field="functions")
    for at, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind not in (None, "function"):
            problem = "only tools of the type function have a schema that a template can show"
            raise RequestError(problem, field=f"tools.{at}.type", code="unsupported_parameter")
    if not tools and not functions:
        return None, False
    with refusing():
        try:
            text = json.dumps([*tools, *functions])
        except RecursionError:
            raise InputError("is nested too deeply", field="tools") from None
        return _read_tools(text), bool(functions)


@functools.lru_cache(maxsize=64)
def _read_tools(text: str) -> list[dict[str, Any]] | None:
    """Tools of JSON text, checked: the same ones come with every request of a session."""
    return openai_tools(json.loads(text), wrap=True)


def _tool_choice(said: Body, tools: Sequence[Mapping[str, Any]] | None) -> tuple[bool, list[str]]:
    """Whether calls are allowed, and what of the choice no engine can be made to keep to."""
    wishes = []
    if not said.flag("parallel_tool_calls", True):
        wishes.append("parallel_tool_calls")
    allowed = True
    for name in ("tool_choice", "function_call"):
        choice = said.get(name, (str, Mapping), "none, auto, required, or a tool")
        if choice == "none":
            allowed = False
        elif isinstance(choice, str) and choice not in ("auto", "required", "any"):
            raise RequestError("must be none, auto, required, or a tool", field=name)
        elif choice not in (None, "auto"):
            wishes.append(name)
        if isinstance(choice, Mapping):
            _check_choice(name, choice, tools)
    return allowed, wishes


def _check_choice(name: str, choice: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Refuse a tool that is not there; a set of allowed tools is taken as it is."""
    if choice.get("type") == "allowed_tools":
        return
    function = choice.get("function", choice)
    offered(name, function.get("name") if isinstance(function, Mapping) else None, tools)


def _continued(said: Body, messages: Sequence[Mapping[str, Any]]) -> bool:
    continued = said.flag("continue_final_message")
    prompted = said.get("add_generation_prompt", bool, "true or false")
    if continued and prompted:
        raise RequestError("cannot be true beside continue_final_message", field="add_generation_prompt")
    if prompted is False and not continued:
        raise RequestError("false needs continue_final_message: a turn has to begin", field="add_generation_prompt")
    if continued and messages[-1].get("role") != "assistant":
        raise RequestError("needs a last message of the assistant's", field="continue_final_message")
    return continued


def _structure(said: Body) -> Mapping[str, Any] | None:
    """What the content has to be; None for text."""
    form = said.get("response_format", Mapping, "an object", {})
    given = form.get("json_schema")
    schema = given.get("schema") if isinstance(given, Mapping) else None
    return structure_of(form.get("type", "text"), schema, "response_format", "json_schema.schema")


def _hints(said: Body) -> dict[str, Any]:
    """Thinking, as OpenAI, Qwen's, DeepSeek's and Z.ai's servers are told of it."""
    on = said.get("enable_thinking", bool, "true or false")
    thinking = said.get("thinking", Mapping, "an object with a type")
    if thinking is not None:
        kind = thinking.get("type")
        if kind not in ("enabled", "disabled", "auto", "adaptive"):
            raise RequestError("must be enabled or disabled", field="thinking.type")
        on = {"enabled": True, "disabled": False}.get(kind, on)
    return thinking_hints(on, said.get("reasoning_effort", str, "a string"))


# -- answers


def write_chat(head: Head, replies: Sequence[Replied]) -> dict[str, Any]:
    """A ``chat.completion``."""
    return {
        "id": f"chatcmpl-{head.id}",
        "object": "chat.completion",
        "created": head.created,
        "model": head.model,
        "choices": [_choice(head, at, reply) for at, reply in enumerate(replies)],
        "usage": chat_usage(head, replies),
        "system_fingerprint": None,
        **_prompt_field(head),
    }


class ChatFrames:
    """The frames of one streamed chat completion."""

    def __init__(self, head: Head, call_ids: Sequence[CallId]) -> None:
        self._head: Final = head
        self._choices: Final = [_Choice(head, at, call_id) for at, call_id in enumerate(call_ids)]
        self._no_usage: Final[dict[str, Any]] = {"usage": None} if head.request.usage_in_stream else {}

    def open(self) -> list[str]:
        """The role of each choice; the first chunk has the prompt's ids where they were asked for."""
        chunks = [chunk for choice in self._choices for chunk in choice.chunks.feed([])]
        chunks[0] |= _prompt_field(self._head)
        return self._encoded(chunks)

    def feed(self, choice: int, events: Sequence[Event], delta: Delta | None) -> list[str]:
        return self._encoded(self._choices[choice].feed(events, delta))

    def close(self, replies: Sequence[Replied]) -> list[str]:
        """How each choice ended, what all cost, and the end."""
        ends = [self._choices[at].close(reply) for at, reply in enumerate(replies)]
        frames = self._encoded(ends)
        if self._head.request.usage_in_stream:
            usage = {**ends[-1], "choices": [], "usage": chat_usage(self._head, replies)}
            frames.append(encode_sse(usage))
        return [*frames, OPENAI_END]

    def fail(self, error: RequestError) -> list[str]:
        """The error, and no end: nobody is to take what came for an answer."""
        return [encode_sse(openai_error(error))]

    def _encoded(self, chunks: Sequence[Mapping[str, Any]]) -> list[str]:
        return [encode_sse({**chunk, **self._no_usage}) for chunk in chunks]


class _Choice:
    """The chunks of one completion."""

    def __init__(self, head: Head, at: int, call_id: CallId) -> None:
        self._head: Final = head
        self._telling: Final = Telling(head)
        self.chunks: Final = OpenAIChunks(
            id=f"chatcmpl-{head.id}", model=head.model, created=head.created, call_id=call_id, choice=at
        )

    def feed(self, events: Sequence[Event], delta: Delta | None) -> list[dict[str, Any]]:
        chunks = self.chunks.feed(self._telling.feed(events))
        more = self._token_fields(delta)
        if self._telling.is_quiet(bool(chunks or more)) or (more and not chunks):
            chunks = [self.chunks.empty()]
        if more:
            chunks[-1]["choices"][0] |= more
        if self._head.request.echo.get("functions"):
            for chunk in chunks:
                _as_function_call(chunk["choices"][0]["delta"])
        return chunks

    def _token_fields(self, delta: Delta | None) -> dict[str, Any]:
        """What the choice says of the tokens of a piece."""
        if delta is None or not len(delta.ids):
            return {}
        more: dict[str, Any] = {}
        if self._head.request.logprobs is not None:
            more["logprobs"] = _logprobs(self._head, delta)
        if asks(self._head, TokenFields.VLLM):
            more["token_ids"] = delta.ids.tolist()
        return more

    def close(self, reply: Replied) -> dict[str, Any]:
        """The chunk that says how it ended."""
        [chunk] = self.chunks.feed([Done(told(self._head, reply))])
        choice = chunk["choices"][0]
        choice["finish_reason"] = _finish(self._head, reply)
        choice["delta"] |= carried(self._head, reply, TokenFields.NEMO_GYM)
        choice |= carried(self._head, reply, TokenFields.TOKENTRACE)
        return chunk


def _choice(head: Head, at: int, reply: Replied) -> dict[str, Any]:
    message = openai_message(told(head, reply), call_id=reply.call_id)
    if head.request.echo.get("functions"):
        _as_function_call(message)
    return {
        "index": at,
        "message": message | carried(head, reply, TokenFields.NEMO_GYM),
        "logprobs": None if head.request.logprobs is None else _logprobs(head, reply.completion),
        "finish_reason": _finish(head, reply),
        **carried(head, reply, TokenFields.VLLM),
        **carried(head, reply, TokenFields.TOKENTRACE),
    }


def _finish(head: Head, reply: Replied) -> str:
    reason = finish_reason(head, reply)
    return "function_call" if reason == "tool_calls" and head.request.echo.get("functions") else reason


def _as_function_call(said: dict[str, Any]) -> None:
    """The first call of a message, or of a message's piece, in the shape of old; later calls stay where they are."""
    calls = said.get("tool_calls") or ()
    if calls and calls[0].get("index", 0) == 0:
        said["function_call"] = calls[0]["function"]
        said["tool_calls"] = calls[1:]
        if not said["tool_calls"]:
            del said["tool_calls"]


def _prompt_field(head: Head) -> dict[str, Any]:
    return {"prompt_token_ids": head.prompt_ids.tolist()} if asks(head, TokenFields.VLLM) else {}


def _logprobs(head: Head, piece: Delta) -> dict[str, Any]:
    as_ids = bool(head.request.echo.get("tokens_as_ids"))
    entries = logprob_entries(piece, head.token_bytes, head.request.logprobs or 0, as_ids=as_ids)
    return {"content": entries, "refusal": None}


def chat_usage(head: Head, replies: Sequence[Replied]) -> dict[str, Any]:
    """What an answer cost, as chat completions say it."""
    usage = usage_of(head, replies)
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


CHAT: Final = AgentDialect("chat", read_chat, write_chat, ChatFrames, openai_error)
