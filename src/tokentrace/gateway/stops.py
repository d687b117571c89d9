"""Stop texts: where an agent wants the content to end. Pure.

An engine stops at ids, never at text. So the gateway looks for the texts in the content as it arrives, and ends the
request where one is complete. Tokens up to there are recorded as sampled; the agent is told what comes before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..parsing.events import ContentDelta, Event
from ..parsing.response import Finish, ParsedPart, ParsedResponse, PartKind


class StopTexts:
    """Looks for texts in the content of one completion. Reasoning and calls are not looked at."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._held = ""
        self.length = 0
        """How many characters of content were let through."""
        self.found: str | None = None

    def feed(self, events: Iterable[Event]) -> list[Event]:
        """The events that may be told already. What might be the beginning of a stop text is held back."""
        if not self._texts:
            return list(events)
        told: list[Event] = []
        for event in events:
            if self.found is not None:
                break
            if not isinstance(event, ContentDelta):
                told += self.flush()
                told.append(event)
                continue
            text = self._held + event.text
            hits = [(at, found) for found in self._texts if (at := text.find(found)) >= 0]
            if hits:
                at, self.found = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
                self._held = ""
                told += self._tell(text[:at])
                continue
            kept = max((_overlap(text, found) for found in self._texts), default=0)
            self._held = text[len(text) - kept :]
            told += self._tell(text[: len(text) - kept])
        return told

    def flush(self) -> list[Event]:
        """What was held back, once it is certain that it is no stop text."""
        held, self._held = self._held, ""
        return self._tell(held)

    def _tell(self, text: str) -> list[Event]:
        self.length += len(text)
        return [ContentDelta(text)] if text else []


def _overlap(text: str, wanted: str) -> int:
    """The length of the longest end of a text that is a beginning of another, but not the whole of it."""
    for length in range(min(len(text), len(wanted) - 1), 0, -1):
        if text.endswith(wanted[:length]):
            return length
    return 0


def cut_response(response: ParsedResponse, length: int) -> ParsedResponse:
    """A response whose content ends after `length` characters, with nothing after it: what a stop text leaves."""
    parts: list[ParsedPart] = []
    left = length
    for part in response.parts:
        if part.kind is not PartKind.CONTENT:
            parts.append(part)
            continue
        if left < len(part.text):  # the stop text begins in this one
            parts.append(replace(part, text=part.text[:left]))
            break
        parts.append(part)
        left -= len(part.text)
    calls = response.tool_calls[: sum(part.call is not None for part in parts)]
    content = response.content[:length]
    return replace(response, content=content, tool_calls=calls, parts=parts, finish=Finish.STOP, open=None)
