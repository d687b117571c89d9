"""What a client is told of a completion that goes on in a conversation: calls where they are certain, else text. Pure.

A message has no place for an attempt that is not a call. Left out, the client would repeat another message than the
one the model wrote. So such an attempt stands in the content, as it was written: what is told is what `history_message`
has, and a client that repeats it repeats the completion.

Whether an attempt is a call is known at its end. So a stream tells reasoning and content as they come, and each call
when it is finished.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final

from .events import ArgumentsDelta, CallFinished, CallNamed, CallStarted, ContentDelta, Event
from .response import ParsedResponse, PartKind
from .shapes import stands_as_text


def told_response(response: ParsedResponse, *, calls_allowed: bool = True) -> ParsedResponse:
    """The response with only such calls as a message can have; the other attempts stand in its content, as written.

    With `calls_allowed` off no call is left. Calls keep their index, so that their ids stay what they are.
    """
    texts = {
        at for at, call in enumerate(response.tool_calls) if not calls_allowed or stands_as_text(call)
    }  # positions in the list, as parts name them
    if not texts:
        return response
    left = [at for at in range(len(response.tool_calls)) if at not in texts]
    places = {at: place for place, at in enumerate(left)}
    parts = []
    for part in response.parts:
        if part.call in texts:
            said = part.lead + part.text
            parts.append(dataclasses.replace(part, kind=PartKind.CONTENT, text=said, call=None, lead=""))
        elif part.call is not None:
            parts.append(dataclasses.replace(part, call=places[part.call]))
        else:
            parts.append(part)
    return dataclasses.replace(
        response,
        content="".join(part.text for part in parts if part.kind is PartKind.CONTENT),
        tool_calls=[response.tool_calls[at] for at in left],
        parts=parts,
    )


class ToldEvents:
    """The events of a parser as a client is told them: they add up to `told_response`.

    A call's events come together when it has finished, its id among them, wherever that is written; an attempt that
    stands as text is content.
    """

    def __init__(self, *, calls_allowed: bool = True) -> None:
        self._allowed: Final = calls_allowed
        self._held: list[Event] = []

    @property
    def holding(self) -> bool:
        """Whether a call has begun that is not told yet."""
        return bool(self._held)

    def feed(self, events: Iterable[Event]) -> list[Event]:
        told: list[Event] = []
        for event in events:
            match event:
                case CallStarted() | CallNamed() | ArgumentsDelta():
                    self._held.append(event)
                case CallFinished(_, call, lead):
                    if not self._allowed or stands_as_text(call):
                        told.append(ContentDelta(lead + call.raw))
                    else:
                        told += [_with_id(one, call.id) for one in self._held] + [event]
                    self._held = []
                case _:
                    told.append(event)
        return told


def _with_id(event: Event, id: str | None) -> Event:
    return dataclasses.replace(event, id=id) if isinstance(event, CallNamed) else event
