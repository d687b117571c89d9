"""How an answer ended and what it cost, for every dialect. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..parsing.response import Finish, ParsedResponse
from ..parsing.telling import ToldEvents, told_response
from .dialect import Head, Reply


def told(head: Head, reply: Reply) -> ParsedResponse:
    """What the agent is told of a reply: attempts without a name are content, and so are calls not allowed."""
    request = head.request
    return told_response(reply.response, calls_allowed=request.calls_allowed, objects=request.object_arguments)


def telling(head: Head) -> ToldEvents:
    """The same in events."""
    return ToldEvents(calls_allowed=head.request.calls_allowed, objects=head.request.object_arguments)


def finish_reason(head: Head, reply: Reply) -> Literal["stop", "length", "tool_calls"]:
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


def usage_of(head: Head, replies: Sequence[Reply]) -> Usage:
    """What an answer cost. Its prompt counts once, however many completions there are."""
    return Usage(
        prompt=len(head.prompt_ids),
        completion=sum(len(reply.completion.ids) for reply in replies),
        cached=max((reply.completion.cached_tokens or 0 for reply in replies), default=0),
        reasoning=sum(reply.reasoning_tokens for reply in replies),
    )
