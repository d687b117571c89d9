"""A turn: parts with token ranges, calls, what is still open, the stop."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from ..showing import ShowsItself


class CallStatus(StrEnum):
    """A call's outcome. Of several problems, the first in this order counts."""

    OK = "ok"
    TRUNCATED = "truncated"
    """The completion ended inside the call, without a stop token."""
    UNCLOSED = "unclosed"
    """The turn went on, or ended, before the call was closed."""
    MISSING_NAME = "missing_name"
    MALFORMED = "malformed"
    INVALID_JSON = "invalid_json"
    DUPLICATE_ARGUMENT = "duplicate_argument"
    """An argument appears twice; the last one counts."""
    UNKNOWN_TOOL = "unknown_tool"
    """Tools are declared, but none has this name."""

    @property
    def runnable(self) -> bool:
        """True for calls that servers pass on to an agent."""
        return self in (CallStatus.OK, CallStatus.UNKNOWN_TOOL)


class CallReading(StrEnum):
    """Which calls count: those in their place, or any that can be run."""

    STRICT = "strict"
    LENIENT = "lenient"


class Finish(StrEnum):
    """How a completion ended: with a stop token, or cut off."""

    STOP = "stop"
    LENGTH = "length"


class PartKind(StrEnum):
    """What a stretch of a completion is. Only regions can be STOP."""

    REASONING = "reasoning"
    CONTENT = "content"
    TOOL_CALL = "tool_call"
    STOP = "stop"


class TokenRange(NamedTuple):
    """Tokens ``start`` to ``stop`` (exclusive) of the completion."""

    start: int
    stop: int


class Region(NamedTuple):
    """Tokens of one kind, delimiters included."""

    kind: PartKind
    span: TokenRange


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """A call, well-formed or not."""

    index: int
    name: str | None
    arguments: dict[str, Any] | None
    """None if they cannot be read."""
    arguments_text: str
    """The arguments as JSON: verbatim if the model wrote JSON, else built from its values."""
    id: str | None
    status: CallStatus
    problem: str
    """What is wrong; ``""`` if nothing is."""
    raw: str
    """The call verbatim, delimiters included."""
    raw_arguments: dict[str, str]
    """The verbatim text of each value, if the format writes arguments one by one."""
    span: TokenRange
    late_id: bool = field(default=False, compare=False)
    """True if the id came after name and arguments, too late for a stream."""

    @property
    def ok(self) -> bool:
        return self.status is CallStatus.OK


@dataclass(frozen=True, slots=True)
class ParsedPart:
    """A stretch of a completion; `span` are the tokens its text touches."""

    kind: PartKind
    text: str
    span: TokenRange
    call: int | None = None
    """Its index among the tool calls."""
    lead: str = field(default="", compare=False)
    """White space that the grammar writes between the preceding text and a call."""


@dataclass(frozen=True, slots=True)
class ParsedResponse(ShowsItself):
    """A completion as one turn."""

    content: str
    reasoning_content: str | None
    tool_calls: list[ParsedToolCall]
    finish: Finish
    stop_token: int | None
    open: PartKind | None
    """The reasoning or call that the completion ends inside."""
    parts: list[ParsedPart] = field(default_factory=list)
    unread: TokenRange | None = None
    """Tokens after the stop token. No engine should return any."""
    attempts: list[ParsedToolCall] = field(default_factory=list)
    """Well-formed calls outside their place. Here they are content or reasoning, and MALFORMED.

    vLLM or SGLang would run them; ``calls="lenient"`` counts them as calls.
    """
    closing: str = field(default="", compare=False)
    """What would close a cut-off completion, before its stop token."""
    regions: list[Region] = field(default_factory=list, compare=False)
    """The kinds of all tokens, delimiters included, up to the stop token."""
    answer: str = field(default="", compare=False)
    """If a call is not well-formed: content, calls and what is around them, as written."""

    @property
    def calls(self) -> list[ParsedToolCall]:
        """The calls that can be run."""
        return [call for call in self.tool_calls if call.ok]

    @property
    def finish_reason(self) -> str:
        """As OpenAI's clients know it: ``"stop"``, ``"tool_calls"`` or ``"length"``."""
        if self.finish is Finish.LENGTH:
            return "length"
        return "tool_calls" if self.calls else "stop"

    def span(self, kind: PartKind | str) -> TokenRange | None:
        """The tokens from the first part of a kind to the last, if any."""
        spans = [part.span for part in self.parts if part.kind == kind]
        return TokenRange(spans[0].start, spans[-1].stop) if spans else None

    def to_message(self, *, call_id: Callable[[int], str] | None = None) -> dict[str, Any]:
        """An assistant message in OpenAI's shape. Rendered, it gives the completion's tokens.

        Arguments are JSON text, as the model wrote them. Calls that cannot be run or repeat an
        argument stay text in the content, with their wrapper if none can be run. `call_id`
        makes missing ids: by default nine letters and digits, as Mistral's templates require.
        """
        calls = {}
        for call in self.tool_calls:
            if call.status.runnable and call.arguments is not None:
                function = {"name": call.name, "arguments": call.arguments_text}
                name = call.id or (call_id or "call{:05}".format)(call.index)
                calls[call.index] = {"id": name, "type": "function", "function": function}
        texts = (
            part for part in self.parts if part.kind is not PartKind.REASONING and part.call not in calls
        )
        content = (
            "".join(part.lead + part.text for part in texts) if calls or not self.answer else self.answer
        )
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
        message |= {} if self.reasoning_content is None else {"reasoning_content": self.reasoning_content}
        return message | ({"tool_calls": list(calls.values())} if calls else {})
