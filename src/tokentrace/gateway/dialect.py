"""What a dialect is: an API that agents speak. It reads requests and writes answers, and knows no session. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from ..engines.protocol import TOP_LOGPROBS, Completion, Delta
from ..parsing.events import Event
from ..parsing.messages import CallId
from ..parsing.response import Finish, ParsedResponse
from ..tokens.tokenizer import Ids
from .requests import Request, RequestError
from .telling import ToldEvents, told_response

QUIET: Final = 32
"""How many pieces of a call may pass untold before something empty shows that the stream is alive."""
LOWEST: Final = -9999.0
"""What OpenAI says for a token that cannot be drawn; JSON has no infinity."""


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """What is known of an answer before its first token."""

    request: Request
    id: str
    """Unique; letters and digits. Dialects put their own prefix before it (``chatcmpl-``, ``resp_``, ``msg_``)."""
    created: int
    """Seconds since 1970."""
    model: str
    prompt_ids: Ids
    token_bytes: Callable[[int], bytes]
    """The bytes that a token stands for; what a control token is written as."""


@dataclass(frozen=True, slots=True, eq=False)
class Replied:
    """One completion of the answer, whole and stored. `response` is what the agent is told of it."""

    response: ParsedResponse
    """Its content ends before a stop text."""
    completion: Completion
    call_id: CallId
    """The id of a call for which the model wrote none."""
    reasoning_tokens: int = 0
    stopped_by: str | None = None
    """The stop text that ended it."""


class AnswerFrames(Protocol):
    """The server-sent events of one streamed answer. Every method returns whole frames, to be sent as they are."""

    def open(self) -> list[str]:
        """The frames before the first token."""
        ...

    def feed(self, choice: int, events: Sequence[Event], delta: Delta | None) -> list[str]:
        """What these events of a choice's parser say; `Done` is never among them. `delta` has the tokens, or None."""
        ...

    def close(self, replies: Sequence[Replied]) -> list[str]:
        """The last frames: they are sent when the turn is stored."""
        ...

    def fail(self, error: RequestError) -> list[str]:
        """The frames for an answer that cannot be finished."""
        ...


@dataclass(frozen=True, slots=True)
class AgentDialect:
    """An API that agents speak."""

    name: str
    """``chat``, ``responses``, ``messages`` or ``tokens``."""
    read: Callable[[Any, Mapping[str, str]], Request]
    """Reads a body. RequestError names the field that cannot be served; names of headers are in lower case."""
    answer: Callable[[Head, Sequence[Replied]], dict[str, Any]]
    """Writes the answer, whole."""
    stream: Callable[[Head, Sequence[CallId]], AnswerFrames]
    """Makes the frames of the answer; there is a function for ids for each of the request's `n` choices."""
    error: Callable[[RequestError], dict[str, Any]]
    """Writes the body of an answer that says what is wrong, in the shape that the dialect's own clients read."""


def openai_error(error: RequestError) -> dict[str, Any]:
    """OpenAI's error object."""
    said = {"message": str(error), "type": error.kind, "param": error.field, "code": error.code or None}
    return {"error": said}


# -- what the agent is told


def told(head: Head, reply: Replied) -> ParsedResponse:
    """What the agent is told of a reply: attempts without a name are content, and so are calls not allowed."""
    request = head.request
    return told_response(reply.response, calls_allowed=request.calls_allowed, objects=request.object_arguments)


class Telling(ToldEvents):
    """The same in events. It knows, too, when a stream has to show that it is alive."""

    def __init__(self, head: Head) -> None:
        super().__init__(calls_allowed=head.request.calls_allowed, objects=head.request.object_arguments)
        self._quiet = 0

    def is_quiet(self, said: bool) -> bool:
        """Whether a sign of life is due after a piece of which something was `said`, or nothing."""
        if said or not self.calling:
            self._quiet = 0
            return False
        self._quiet = (self._quiet + 1) % QUIET
        return self._quiet == 0


def finish_reason(head: Head, reply: Replied) -> Literal["stop", "length", "tool_calls"]:
    """Why a completion ended, in the words of chat completions.

    Calls that the message has are to be answered, of an unknown tool and with broken arguments too. A stop text is a
    stop, though the completion has no stop token then.
    """
    if reply.stopped_by is None and reply.response.finish is Finish.LENGTH:
        return "length"
    return "tool_calls" if told(head, reply).tool_calls else "stop"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens, counted as the engine was given and sampled them."""

    prompt: int
    completion: int
    cached: int
    """Of the prompt: those that the engine had in its cache. 0 where it does not say."""
    reasoning: int
    """Of the completion."""


def usage_of(head: Head, replies: Sequence[Replied]) -> Usage:
    """What an answer cost. Its prompt counts once, however many completions there are."""
    return Usage(
        prompt=len(head.prompt_ids),
        completion=sum(len(reply.completion.ids) for reply in replies),
        cached=max((reply.completion.cached_tokens or 0 for reply in replies), default=0),
        reasoning=sum(reply.reasoning_tokens for reply in replies),
    )


def logprob_entries(
    piece: Delta, token_bytes: Callable[[int], bytes], most: int, *, as_ids: bool = False
) -> list[dict[str, Any]]:
    """Logprobs as OpenAI's APIs tell them: for every token that was sampled, the stop token too, its text, its bytes,
    and up to `most` alternatives.

    With `as_ids` a token's text is ``token_id:`` and its id, as vLLM's ``return_tokens_as_token_ids`` has it.
    """

    def entry(id: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(id)
        text = f"token_id:{id}" if as_ids else raw.decode("utf-8", "replace")
        return {"token": text, "logprob": max(float(logprob), LOWEST), "bytes": list(raw)}

    ids, logprobs = piece.ids.tolist(), piece.logprobs.tolist()
    others = piece.channels.get(TOP_LOGPROBS, ()) if most else ()
    if len(others) != len(ids):  # a channel that comes with the last piece covers the whole completion
        others = [()] * len(ids)
    return [
        {**entry(id, logprob), "top_logprobs": [entry(*one) for one in list(some)[:most]]}
        for id, logprob, some in zip(ids, logprobs, others, strict=True)
    ]
