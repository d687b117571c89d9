"""What a streaming parser reports, in the order in which it becomes certain. Nothing is ever taken back."""

from __future__ import annotations

from dataclasses import dataclass, field

from .response import ParsedResponse, ParsedToolCall


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """An attempt to call a tool has begun. Attempts do not overlap."""

    index: int


@dataclass(frozen=True, slots=True)
class CallNamed:
    """The name of a call, whole, and its id where the format writes one before the arguments.

    Comes before the arguments, whatever the order in the completion; never for a call without a name.
    """

    index: int
    name: str
    id: str | None


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the arguments, as JSON. All of a call's together are its `arguments_text`."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallFinished:
    """A call has ended; its status tells how."""

    index: int
    call: ParsedToolCall
    lead: str = field(default="", compare=False)
    """White space that the grammar writes between the text before and the call."""


@dataclass(frozen=True, slots=True)
class Done:
    """The completion has ended."""

    response: ParsedResponse


Event = ReasoningDelta | ContentDelta | CallStarted | CallNamed | ArgumentsDelta | CallFinished | Done
