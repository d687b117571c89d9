"""What a streaming parser reports, as soon as it is certain. Nothing is ever taken back."""

from dataclasses import dataclass, field

from .response import ParsedResponse, ParsedToolCall, PartKind


@dataclass(slots=True, unsafe_hash=True)
class ReasoningDelta:
    """More reasoning."""

    text: str


@dataclass(slots=True, unsafe_hash=True)
class ContentDelta:
    """More content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call has begun. Calls do not overlap."""

    index: int


@dataclass(frozen=True, slots=True)
class CallNamed:
    """The name of a call, before its arguments, and its id if it is there."""

    index: int
    name: str
    id: str | None


@dataclass(slots=True, unsafe_hash=True)
class ArgumentsDelta:
    """More of the arguments, as JSON. A call's deltas together are its `arguments_text`."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallFinished:
    """A call has ended; its status says how."""

    index: int
    call: ParsedToolCall
    lead: str = field(default="", compare=False)
    """White space that the grammar writes between the preceding text and the call."""


@dataclass(frozen=True, slots=True)
class Done:
    """The completion has ended."""

    response: ParsedResponse


Event = ReasoningDelta | ContentDelta | CallStarted | CallNamed | ArgumentsDelta | CallFinished | Done


def events_of(response: ParsedResponse) -> list[Event]:
    """A whole response as events, without `Done`."""
    events: list[Event] = []
    for part in response.parts:
        if part.call is not None:
            call = response.tool_calls[part.call]
            events.append(CallStarted(call.index))
            if call.name is not None:
                events.append(CallNamed(call.index, call.name, call.id))
                events += [ArgumentsDelta(call.index, call.arguments_text)] if call.arguments_text else []
            events.append(CallFinished(call.index, call, part.lead))
        else:
            events.append((ReasoningDelta if part.kind is PartKind.REASONING else ContentDelta)(part.text))
    return events
