"""What a dialect is: an API that agents speak. It reads requests and writes answers, and knows no session. Pure.

A dialect's `Encoder` writes the changes of an answer's items as the events of its stream; `Dialect.answer` writes the
same items whole.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import msgspec

from ..engines.channels import TOP_LOGPROBS
from ..engines.protocol import Completion, Delta
from ..parsing.response import CallStatus, Finish, ParsedResponse, PartKind
from ..tokens.tokenizer import Ids
from .items import CallId, Change, Item
from .problems import RequestError
from .requests import AnswerOptions, Request, TokenFields

StreamEvent: TypeAlias = dict[str, Any]
_ALPHABET: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_LOWEST: Final = -9999.0
"""OpenAI's logprob of a token that cannot be drawn; JSON has no infinity."""
OPENAI_END: Final = b"data: [DONE]\n\n"
"""The frame after the last chunk of OpenAI's streams."""
_UNSAFE: Final = re.compile("\x85|\u2028|\u2029".encode())
"""Characters that JSON allows but some readers take for the end of a line."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Counted tokens of an answer."""

    prompt: int
    completion: int
    cached: int
    """Tokens of the prompt that the engine had in its cache. 0 if it does not report them."""
    reasoning: int

    def openai(self) -> dict[str, Any]:
        """As chat completions report it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """One completion of the answer, whole and stored."""

    items: Sequence[Item]
    completion: Completion
    response: ParsedResponse
    stopped_by: str | None = None
    statuses: Sequence[CallStatus] = ()
    """What became of each attempt at a call."""
    late_ids: Mapping[str, str] = field(default_factory=dict)

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        """Why it ended, in the words of chat completions: calls are to be answered, and a stop text is a stop."""
        if self.stopped_by is None and self.response.finish is Finish.LENGTH:
            return "length"
        return "tool_calls" if any(item.kind is PartKind.TOOL_CALL for item in self.items) else "stop"


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """What is certain about an answer before its first token."""

    request: Request
    id: str
    """Unique letters and digits. Dialects add a prefix (``chatcmpl-``, ``resp_``, ``msg_``)."""
    created: int
    model: str
    prompt_ids: Ids
    token_bytes: Callable[[int], bytes]

    @property
    def options(self) -> AnswerOptions:
        return self.request.answer

    @property
    def prompt_fields(self) -> dict[str, Any]:
        """The ids of the prompt, if the request asks for them as vLLM has them."""
        is_requested = TokenFields.VLLM in self.options.token_fields
        return {"prompt_token_ids": self.prompt_ids.tolist()} if is_requested else {}

    def usage(self, replies: Sequence[Reply]) -> Usage:
        """What an answer cost. Its prompt counts once, whatever the number of completions."""
        spans = [reply.response.span(PartKind.REASONING) for reply in replies]
        return Usage(
            prompt=len(self.prompt_ids),
            completion=sum(len(reply.completion.ids) for reply in replies),
            cached=max((reply.completion.cached_tokens or 0 for reply in replies), default=0),
            reasoning=sum(0 if span is None else span.stop - span.start for span in spans),
        )

    def token_fields(self, reply: Reply, way: TokenFields) -> dict[str, Any]:
        """The ids and logprobs of a completion, if the request asks for them in this way."""
        if way not in self.options.token_fields:
            return {}
        ids, logprobs = reply.completion.ids.tolist(), reply.completion.logprobs.tolist()
        match way:
            case TokenFields.VLLM:
                return {"token_ids": ids}
            case TokenFields.NEMO_GYM:
                fields = {"generation_token_ids": ids, "generation_log_probs": logprobs}
                return {"prompt_token_ids": self.prompt_ids.tolist(), **fields}
            case TokenFields.TOKENTRACE:
                fields = {"completion_token_ids": ids, "logprobs": logprobs}
                return {"tokentrace": {"prompt_token_ids": self.prompt_ids.tolist(), **fields}}

    def logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        """Logprobs as OpenAI's APIs report them: every sampled token, the stop token too, with its text and bytes."""

        def entry(id: int, logprob: float) -> dict[str, Any]:
            raw = self.token_bytes(id)
            text = f"token_id:{id}" if self.options.tokens_as_ids else raw.decode("utf-8", "replace")
            return {"token": text, "logprob": max(float(logprob), _LOWEST), "bytes": list(raw)}

        most = self.options.logprobs or 0
        alternatives = delta.channels.get(TOP_LOGPROBS, ()) if most else ()
        if len(alternatives) != len(delta.ids):  # a channel that comes with the last piece covers the whole completion
            alternatives = [()] * len(delta.ids)
        return [
            {**entry(id, logprob), "top_logprobs": [entry(*one) for one in list(some)[:most]]}
            for id, logprob, some in zip(delta.ids.tolist(), delta.logprobs.tolist(), alternatives, strict=True)
        ]


class Encoder(ABC):
    """Writes one streamed answer."""

    def __init__(self, head: Head) -> None:
        self.head: Final = head

    def open(self) -> list[StreamEvent]:
        """The events before the first token."""
        return []

    def feed(self, choice: int, changes: Sequence[Change], delta: Delta | None) -> list[StreamEvent]:
        """The events for these changes of a choice. `delta` has the tokens, or None."""
        return [event for change in changes for event in self.encode(change)]

    def encode(self, change: Change) -> list[StreamEvent]:
        """The events for one change, in an API without choices and tokens."""
        raise NotImplementedError

    @abstractmethod
    def close(self, replies: Sequence[Reply]) -> list[StreamEvent]:
        """The last events. They are sent after the turn is stored."""

    def fail(self, error: RequestError) -> list[StreamEvent]:
        """The events for an answer that cannot be finished. No end follows: nobody is to take it for an answer."""
        return [openai_error(error)]


@dataclass(frozen=True, slots=True)
class Dialect:
    """An API that agents speak."""

    name: str
    read: Callable[..., Request]
    """Reads a body and headers, and what was read before of its history.

    Raises RequestError that names the field which cannot be served."""
    answer: Callable[[Head, Sequence[Reply]], dict[str, Any]]
    stream: Callable[[Head], Encoder]
    error: Callable[[RequestError], dict[str, Any]]
    """Writes the body of an error as the dialect's own clients read it."""
    end: bytes = b""
    """The frame that ends a stream, after the last event."""
    history: str = "messages"
    """The field that has the conversation so far."""


def encode_sse(event: Mapping[str, Any]) -> bytes:
    """One server-sent event, named by its ``type`` if it has one."""
    try:
        data = msgspec.json.encode(event)
    except UnicodeEncodeError:  # half of a surrogate pair
        data = json.dumps(event, separators=(",", ":")).encode("ascii")
    data = _UNSAFE.sub(lambda match: b"\\u%04x" % ord(match[0].decode()), data)
    name = f"event: {event['type']}\n".encode() if "type" in event else b""
    return b"%sdata: %s\n\n" % (name, data)


def openai_error(error: RequestError) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": str(error), "type": error.kind, "param": error.field, "code": error.code or None}}


def random_id() -> str:
    """An id for an answer."""
    return _letters(secrets.token_bytes(24))


def response_name(id: str) -> str:
    """The name of an answer in a store. Ignores the prefix that a dialect gives its id."""
    return "response:" + id.rsplit("_", 1)[-1].rsplit("-", 1)[-1]


def call_ids_of(id: str, choice: int) -> CallId:
    """Ids of calls: nine letters and digits, as Mistral's templates want, always the same for the same answer."""

    def call_id(index: int) -> str:
        return _letters(hashlib.blake2b(f"{id}/{choice}/{index}".encode(), digest_size=9).digest())

    return call_id


def _letters(data: bytes) -> str:
    return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in data)
