"""OpenAI's Chat Completions: requests in, completions and chunks out. Pure.

An answer has the message as OpenAI's has it, with ``reasoning_content`` where there is reasoning; `token_fields` says
how it carries ids. ``logprobs.content`` has every token that was sampled, those of reasoning and the stop token too.
Streams tell reasoning, content and the arguments of calls as they are sampled: put together they are the answer. An
attempt whose name is certain is a call, and its arguments are what the model wrote, whole JSON or not.

For the ``functions`` of old the first call is the message's ``function_call``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..engines.protocol import Delta
from ..parsing.events import Done, Event
from ..parsing.shapes import CallId, openai_message
from ..parsing.sse import OPENAI_END, OpenAIChunks, encode_sse
from .chat_request import read_chat
from .dialect import Dialect, Frames, Head, Reply
from .endings import finish_reason, telling, told, usage_of
from .logprobs import logprob_entries
from .requests import Request, RequestError
from .token_fields import TokenFields, nemo_gym_fields, tokentrace_fields

QUIET: Final = 32
"""How many pieces of a call may pass untold before an empty chunk shows that the stream is alive."""


class Chat:
    """The dialect."""

    name = "chat"

    def read(self, body: Any, headers: Mapping[str, str]) -> Request:
        """A body of ``POST /v1/chat/completions``."""
        return read_chat(body, headers)

    def answer(self, head: Head, replies: Sequence[Reply]) -> dict[str, Any]:
        """A ``chat.completion``."""
        answer = {
            "id": f"chatcmpl-{head.id}",
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "choices": [_choice(head, at, reply) for at, reply in enumerate(replies)],
            "usage": _usage(head, replies),
            "system_fingerprint": None,
        }
        return answer | _prompt_field(head)

    def stream(self, head: Head, call_ids: Sequence[CallId]) -> Frames:
        """Chunks, and ``[DONE]``."""
        return ChatFrames(head, call_ids)

    def error(self, error: RequestError) -> dict[str, Any]:
        """OpenAI's error object."""
        said = {"message": str(error), "type": error.kind, "param": error.field, "code": error.code or None}
        return {"error": said}


CHAT: Final[Dialect] = Chat()


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

    def close(self, replies: Sequence[Reply]) -> list[str]:
        """How each choice ended, what all cost, and the end."""
        ends = [self._choices[at].close(reply) for at, reply in enumerate(replies)]
        frames = self._encoded(ends)
        if self._head.request.usage_in_stream:
            usage = {**ends[-1], "choices": [], "usage": _usage(self._head, replies)}
            frames.append(encode_sse(usage))
        return [*frames, OPENAI_END]

    def fail(self, error: RequestError) -> list[str]:
        """The error, and no end: nobody is to take what came for an answer."""
        return [encode_sse(CHAT.error(error))]

    def _encoded(self, chunks: Sequence[Mapping[str, Any]]) -> list[str]:
        return [encode_sse({**chunk, **self._no_usage}) for chunk in chunks]


class _Choice:
    """The chunks of one completion."""

    def __init__(self, head: Head, at: int, call_id: CallId) -> None:
        self._head: Final = head
        self._telling: Final = telling(head)
        self._fields: Final = _asked(head)
        self._quiet = 0
        self.chunks: Final = OpenAIChunks(
            id=f"chatcmpl-{head.id}", model=head.model, created=head.created, call_id=call_id, choice=at
        )

    def feed(self, events: Sequence[Event], delta: Delta | None) -> list[dict[str, Any]]:
        chunks = self.chunks.feed(self._telling.feed(events))
        more = self._token_fields(delta)
        self._quiet = 0 if chunks or not self._telling.calling else self._quiet + 1
        if not chunks and (more or self._quiet >= QUIET):
            chunks, self._quiet = [self.chunks.empty()], 0
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
        if TokenFields.VLLM in self._fields:
            more["token_ids"] = delta.ids.tolist()
        return more

    def close(self, reply: Reply) -> dict[str, Any]:
        """The chunk that says how it ended."""
        [chunk] = self.chunks.feed([Done(told(self._head, reply))])
        choice = chunk["choices"][0]
        choice["finish_reason"] = _finish(self._head, reply)
        if TokenFields.NEMO_GYM in self._fields:
            choice["delta"] |= nemo_gym_fields(self._head.prompt_ids, reply.completion)
        if TokenFields.TOKENTRACE in self._fields:
            choice |= tokentrace_fields(self._head.prompt_ids, reply.completion)
        return chunk


def _choice(head: Head, at: int, reply: Reply) -> dict[str, Any]:
    fields = _asked(head)
    message = openai_message(told(head, reply), call_id=reply.call_id)
    if head.request.echo.get("functions"):
        _as_function_call(message)
    if TokenFields.NEMO_GYM in fields:
        message |= nemo_gym_fields(head.prompt_ids, reply.completion)
    choice: dict[str, Any] = {
        "index": at,
        "message": message,
        "logprobs": None if head.request.logprobs is None else _logprobs(head, reply.completion),
        "finish_reason": _finish(head, reply),
    }
    if TokenFields.VLLM in fields:
        choice["token_ids"] = reply.completion.ids.tolist()
    if TokenFields.TOKENTRACE in fields:
        choice |= tokentrace_fields(head.prompt_ids, reply.completion)
    return choice


def _finish(head: Head, reply: Reply) -> str:
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


def _asked(head: Head) -> Sequence[str]:
    """In which ways the answer is to carry ids."""
    return head.request.echo.get("token_fields", ()) if head.request.token_ids else ()


def _prompt_field(head: Head) -> dict[str, Any]:
    return {"prompt_token_ids": head.prompt_ids.tolist()} if TokenFields.VLLM in _asked(head) else {}


def _logprobs(head: Head, piece: Delta) -> dict[str, Any]:
    as_ids = bool(head.request.echo.get("tokens_as_ids"))
    entries = logprob_entries(piece, head.token_bytes, head.request.logprobs or 0, as_ids=as_ids)
    return {"content": entries, "refusal": None}


def _usage(head: Head, replies: Sequence[Reply]) -> dict[str, Any]:
    usage = usage_of(head, replies)
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }
