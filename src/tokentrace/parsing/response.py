"""What a completion says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from ..showing import ShowsItself


class CallStatus(StrEnum):
    """What became of one attempt to call a tool."""

    OK = "ok"
    INVALID_JSON = "invalid_json"
    """What should be JSON is not."""
    UNCLOSED = "unclosed"
    """The turn went on, or ended, before the call was closed."""
    MISSING_NAME = "missing_name"
    MALFORMED = "malformed"
    """It does not have the shape of a call."""
    UNKNOWN_TOOL = "unknown_tool"
    """Tools were given, and none of them has this name."""
    DUPLICATE_ARGUMENT = "duplicate_argument"
    """An argument was given twice; the last one counts."""
    TRUNCATED = "truncated"
    """The completion ended inside the call, with no stop token."""


class ReadAs(StrEnum):
    """How strictly a completion is read for calls."""

    STRICT = "strict"
    """As the grammar says. What a server would take for a call besides is in `ParsedResponse.attempts`."""
    SERVER = "server"
    """As vLLM and SGLang read it: the same grammar, entered more easily."""


class Finish(StrEnum):
    """How a completion ended."""

    STOP = "stop"
    """With a stop token."""
    LENGTH = "length"
    """With none: it was cut off."""


class PartKind(StrEnum):
    REASONING = "reasoning"
    CONTENT = "content"
    TOOL_CALL = "tool_call"


class TokenRange(NamedTuple):
    """Tokens ``start`` to ``stop`` (exclusive) of the completion."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """One attempt to call a tool, successful or not."""

    index: int
    name: str | None
    arguments: dict[str, Any] | None
    """The arguments as values; None where they could not be read."""
    arguments_text: str
    """The arguments as JSON: as the model wrote them where it wrote JSON, else made of its values."""
    id: str | None
    """The id that the model wrote, in formats that have one."""
    status: CallStatus
    problem: str
    """What is wrong, in words; ``""`` if nothing is."""
    raw: str
    """The whole attempt as it was written, delimiters included."""
    raw_arguments: dict[str, str]
    """The text of each value as it was written, in formats that write them one by one."""
    span: TokenRange
    late_id: bool = field(default=False, compare=False)
    """Whether its id came after its name and arguments, too late for a stream."""
    told: bool = field(default=False, compare=False)
    """Whether a client is told that it is a call, whatever its status. The gateway decides it."""

    @property
    def ok(self) -> bool:
        return self.status is CallStatus.OK


@dataclass(frozen=True, slots=True)
class ParsedPart:
    """A stretch of a completion: reasoning, content, or a call."""

    kind: PartKind
    text: str
    span: TokenRange
    call: int | None = None
    """Which of the tool calls it is."""
    lead: str = field(default="", compare=False)
    """White space that the grammar writes between the text before and a call."""


@dataclass(frozen=True, slots=True)
class ParsedResponse(ShowsItself):
    """A completion: what it says, what it calls, how it ended, and which tokens say so."""

    content: str
    reasoning_content: str | None
    tool_calls: list[ParsedToolCall]
    finish: Finish
    stop_token: int | None
    """The token that ended it."""
    open: PartKind | None
    """What the completion ended inside of: reasoning or a call that was not closed."""
    parts: list[ParsedPart] = field(default_factory=list)
    """Everything in the order in which it was written."""
    unread: TokenRange | None = None
    """Tokens after the stop token, which no engine should have returned."""
    attempts: list[ParsedToolCall] = field(default_factory=list)
    """Calls where none can stand: vLLM or SGLang would run them, this reading has them as content or reasoning.

    None of them is OK; `problem` says why it is not a call.
    """

    @property
    def calls(self) -> list[ParsedToolCall]:
        """The calls that can be run."""
        return [call for call in self.tool_calls if call.status is CallStatus.OK]

    @property
    def finish_reason(self) -> str:
        """As OpenAI's clients know it: ``"stop"``, ``"tool_calls"`` or ``"length"``."""
        if self.finish is Finish.LENGTH:
            return "length"
        return "tool_calls" if self.calls else "stop"

    def span(self, kind: PartKind | str) -> TokenRange | None:
        """The tokens from the first part of a kind to the last; None where there is none."""
        found = [part.span for part in self.parts if part.kind == kind]
        return TokenRange(found[0].start, found[-1].stop) if found else None

    def to_message(self, *, call_id: Callable[[int], str] | None = None) -> dict[str, Any]:
        """An assistant message in OpenAI's shape: rendered after its history, it gives the completion's tokens back.

        See `parsing.messages.history_message`.
        """
        from .messages import history_message

        return history_message(self, call_id=call_id)
