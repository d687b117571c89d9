"""What a dialect is: an API that agents speak. It reads requests and writes answers, and knows no session. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..engines.protocol import Completion, Delta
from ..parsing.events import Event
from ..parsing.response import ParsedResponse
from ..parsing.shapes import CallId
from ..tokens.tokenizer import Ids
from .requests import Request, RequestError


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
class Reply:
    """One completion of the answer, whole and stored. `response` is what the agent is told of it."""

    response: ParsedResponse
    """Its content ends before a stop text."""
    completion: Completion
    call_id: CallId
    """The id of a call for which the model wrote none."""
    reasoning_tokens: int = 0
    stopped_by: str | None = None
    """The stop text that ended it."""


class Frames(Protocol):
    """The server-sent events of one streamed answer. Every method returns whole frames, to be sent as they are."""

    def open(self) -> list[str]:
        """The frames before the first token."""
        ...

    def feed(self, choice: int, events: Sequence[Event], delta: Delta | None) -> list[str]:
        """What these events of a choice's parser say; `Done` is never among them. `delta` has the tokens, or None."""
        ...

    def close(self, replies: Sequence[Reply]) -> list[str]:
        """The last frames: they are sent when the turn is stored."""
        ...

    def fail(self, error: RequestError) -> list[str]:
        """The frames for an answer that cannot be finished."""
        ...


class Dialect(Protocol):
    """An API that agents speak."""

    name: str
    """``chat``, ``responses``, ``messages`` or ``tokens``."""

    def read(self, body: Any, headers: Mapping[str, str]) -> Request:
        """A request's body. RequestError names the field that cannot be served; names of headers are in lower case."""
        ...

    def answer(self, head: Head, replies: Sequence[Reply]) -> dict[str, Any]:
        """The answer, whole."""
        ...

    def stream(self, head: Head, call_ids: Sequence[CallId]) -> Frames:
        """The frames of the answer; `call_ids` has one function for each of the request's `n` choices."""
        ...

    def error(self, error: RequestError) -> dict[str, Any]:
        """The body of an answer that says what is wrong, in the shape that the dialect's own clients read."""
        ...
