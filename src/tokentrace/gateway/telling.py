"""What a client is told of a completion: reasoning, content and calls, each as soon as it is certain. Pure.

**An attempt whose name is certain is a call**, whatever becomes of its arguments: they are told as they come, and at
the end they are what the model wrote, which may not be whole JSON. Agents are prepared for that, and answer with an
error that the model can learn from. An attempt that never gets a name stands in the content, as it was written.

So a long argument is told while it is sampled, and a stream adds up to the whole answer. What goes into a conversation
of our own is another matter: there an attempt that cannot be run is text (`shapes.history_message`), because it has to
render to the tokens that the model wrote.

Where arguments have to be objects (Anthropic's ``input``), a call begins with its object. What cannot be JSON any more
is not told, and `PartialObject` says what remains.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Final

from ..parsing.events import ArgumentsDelta, CallFinished, CallNamed, CallStarted, ContentDelta, Event
from ..parsing.response import ParsedResponse, ParsedToolCall, PartKind
from .partial import PartialObject


def told_call(call: ParsedToolCall, *, objects: bool = False) -> ParsedToolCall | None:
    """An attempt as the call that a client is told; None where it stands as text.

    Its id is one that was certain with its name. With `objects`, its arguments are those that can be read.
    """
    if call.name is None:
        return None
    told = dataclasses.replace(call, told=True, id=None if call.late_id else call.id, late_id=False)
    if not objects:
        return told
    read = PartialObject()
    if not read.feed(call.arguments_text):
        return None
    value = read.value()
    text = call.arguments_text if read.closed else json.dumps(value, ensure_ascii=False)
    return dataclasses.replace(told, arguments=value, arguments_text=text)


def told_response(response: ParsedResponse, *, calls_allowed: bool = True, objects: bool = False) -> ParsedResponse:
    """The response with the calls that a client is told; the other attempts stand in its content, as written.

    With `calls_allowed` off no call is left. Calls keep their index, so that their ids stay what they are.
    """
    if not response.tool_calls:
        return response
    told = [told_call(call, objects=objects) if calls_allowed else None for call in response.tool_calls]
    left = [at for at, call in enumerate(told) if call is not None]  # positions in the list, as parts name them
    places = {at: place for place, at in enumerate(left)}
    parts = []
    for part in response.parts:
        if part.call is None:
            parts.append(part)
        elif part.call in places:
            parts.append(dataclasses.replace(part, call=places[part.call]))
        else:
            said = part.lead + part.text
            parts.append(dataclasses.replace(part, kind=PartKind.CONTENT, text=said, call=None, lead=""))
    return dataclasses.replace(
        response,
        content="".join(part.text for part in parts if part.kind is PartKind.CONTENT),
        tool_calls=[call for call in told if call is not None],
        parts=parts,
    )


class ToldEvents:
    """The events of a parser as a client is told them: they add up to `told_response`.

    A call's events come when its name is certain, with `objects` when its object begins. An attempt that stands as text
    is content when it has ended.
    """

    def __init__(self, *, calls_allowed: bool = True, objects: bool = False) -> None:
        self._allowed: Final = calls_allowed
        self._objects: Final = objects
        self._held: list[Event] = []
        self._named = self._told = False
        self._input = PartialObject()
        self.calling = False
        """Whether a call has begun that has not ended: it may be told later, or in larger pieces."""

    def feed(self, events: Iterable[Event]) -> list[Event]:
        told: list[Event] = []
        for event in events:
            match event:
                case CallStarted():
                    self.calling, self._named, self._told = True, False, False
                    self._held, self._input = [event], PartialObject()
                case CallNamed():
                    self._named = True
                    self._held.append(event)
                    told += self._tell() if not self._objects else []
                case ArgumentsDelta(index, text):
                    text = self._input.feed(text) if self._objects else text
                    told += self._tell() if text else []
                    told += [ArgumentsDelta(index, text)] if text and self._told else []
                case CallFinished(index, call, lead):
                    self.calling = False
                    made = told_call(call, objects=self._objects) if self._told else None
                    told.append(ContentDelta(lead + call.raw) if made is None else CallFinished(index, made, lead))
                case _:
                    told.append(event)
        return told

    def _tell(self) -> list[Event]:
        """What was held back of a call that is one; nothing if it was told already."""
        if not self._allowed or self._told or not self._named:
            return []
        self._told = True
        return self._held
