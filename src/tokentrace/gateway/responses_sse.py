"""A parser's events as the wire events of OpenAI's Responses API, streamed. Pure: dicts, no I/O.

An item is announced with its first text, and is done when another begins, or at the end. The caller writes the events
about the whole response (``response.created`` and so on) with `ResponsesEvents.numbered`, so that all are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from ..parsing.events import ArgumentsDelta, CallFinished, CallNamed, ContentDelta, Event, ReasoningDelta
from ..parsing.messages import CallId, numbered_call_id
from .shapes import (
    ItemId,
    call_item,
    call_item_status,
    message_item,
    numbered_item_id,
    reasoning_item,
)

Item = dict[str, Any]

_TEXTS: Final = {"reasoning": "response.reasoning_text", "message": "response.output_text"}
_ARGUMENTS: Final = "response.function_call_arguments"


class ResponsesEvents:
    """The events of a response's items, in OpenAI's Responses. Put together they are its `shapes.responses_items`.

    They may have more calls than that: those announced that turned out not to be `expressible`, which are done as
    incomplete; `telling.ToldEvents` leaves none. `finished` is asked for every item before it is said to be done, and
    may add to it.

    With `hold_messages`, messages are done only at the end, when `close` is given them whole, logprobs included: which
    tokens a text is made of is not certain before.
    """

    def __init__(
        self,
        *,
        call_id: CallId | None = None,
        item_id: ItemId | None = None,
        finished: Callable[[Item], Item] = dict,
        hold_messages: bool = False,
    ) -> None:
        self._call_id: Final = call_id or numbered_call_id
        self._item_id: Final = item_id or numbered_item_id
        self._finished: Final = finished
        self._hold: Final = hold_messages
        self._sent = 0
        self._items: Final[list[Item]] = []
        """All items announced, as far as they are known."""
        self._undone: Final[list[int]] = []
        """The positions of those that are not done."""
        self._writing: str | int | None = None
        """The item being written: its type, or the index of its call."""

    def numbered(self, type: str, **fields: Any) -> dict[str, Any]:
        """An event of this type with the next sequence number."""
        self._sent += 1
        return {"type": type, **fields, "sequence_number": self._sent - 1}

    def feed(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        """The wire events that say these events. `Done` says nothing; `close` does."""
        said: list[dict[str, Any]] = []
        for event in events:
            said += self._events(event)
        return said

    def close(self, items: Sequence[Item]) -> list[dict[str, Any]]:
        """Say what of these items, which are all there are, was not said yet."""
        whole = {item["id"]: item for item in items}
        self._writing = None
        said: list[dict[str, Any]] = []
        for at in list(self._undone):
            said += self._done(at, whole.get(self._items[at]["id"]))
        announced = {item["id"] for item in self._items}
        for item in items:
            if item["id"] not in announced:
                said += [*self._announce(_unsaid(item)), *self._done(len(self._items) - 1, item)]
        return said

    def _events(self, event: Event) -> list[dict[str, Any]]:
        match event:
            case ReasoningDelta(text) if text:
                return self._text("reasoning", "rs", reasoning_item, text)
            case ContentDelta(text) if text:
                return self._text("message", "msg", message_item, text)
            case CallNamed(index, name, id):
                ended = self._end()
                self._writing = index
                item = call_item(self._next_id("fc"), id or self._call_id(index), name, "")
                return [*ended, *self._announce(item)]
            case ArgumentsDelta(index, text) if text and self._writing == index:
                return [self._delta(len(self._items) - 1, text)]
            case CallFinished(index, call) if self._writing == index:
                return self._end(call_item_status(call))
        return []

    def _text(self, kind: str, prefix: str, make: Callable[[str, str], Item], text: str) -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = []
        if self._writing != kind:
            said += self._end()
            self._writing = kind
            said += self._announce(make(self._next_id(prefix), ""))
        return [*said, self._delta(len(self._items) - 1, text)]

    def _next_id(self, prefix: str) -> str:
        return self._item_id(prefix, len(self._items))

    def _announce(self, item: Item) -> list[dict[str, Any]]:
        """Say that an item begins; it has no text yet."""
        at = len(self._items)
        self._items.append(item)
        self._undone.append(at)
        begun = dict(item)
        if item["type"] != "reasoning":
            begun["status"] = "in_progress"
        if item["type"] == "function_call":
            return [self.numbered("response.output_item.added", output_index=at, item=begun)]
        begun["content"] = []
        added = self.numbered("response.output_item.added", output_index=at, item=begun)
        return [added, self._about(at, "response.content_part.added", content_index=0, part=dict(item["content"][0]))]

    def _delta(self, at: int, text: str) -> dict[str, Any]:
        item = self._items[at]
        if item["type"] == "function_call":
            item["arguments"] += text
            return self._about(at, f"{_ARGUMENTS}.delta", delta=text)
        item["content"][0]["text"] += text
        logprobs: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        return self._about(at, f"{_TEXTS[item['type']]}.delta", content_index=0, delta=text, **logprobs)

    def _end(self, status: str | None = None) -> list[dict[str, Any]]:
        """Whatever is being written is over."""
        kind, self._writing = self._writing, None
        if kind is None or (kind == "message" and self._hold):
            return []
        return self._done(len(self._items) - 1, None, status)

    def _done(self, at: int, whole: Item | None, status: str | None = None) -> list[dict[str, Any]]:
        """Say that an item is done: as it is known `whole`, or as it was written."""
        said: list[dict[str, Any]] = []
        written = self._items[at]
        if whole is None:
            whole = self._finished(written if status is None else {**written, "status": status})
        else:
            said_so_far, text = _text_of(written), _text_of(whole)
            if text != said_so_far and text.startswith(said_so_far):
                said.append(self._delta(at, text[len(said_so_far) :]))
        self._undone.remove(at)
        self._items[at] = whole
        if whole["type"] == "function_call":
            said.append(self._about(at, f"{_ARGUMENTS}.done", arguments=whole["arguments"]))
        else:
            part = whole["content"][0]
            logprobs = {"logprobs": part.get("logprobs", [])} if whole["type"] == "message" else {}
            said += [
                self._about(at, f"{_TEXTS[whole['type']]}.done", content_index=0, text=part["text"], **logprobs),
                self._about(at, "response.content_part.done", content_index=0, part=part),
            ]
        return [*said, self.numbered("response.output_item.done", output_index=at, item=whole)]

    def _about(self, at: int, type: str, **fields: Any) -> dict[str, Any]:
        return self.numbered(type, item_id=self._items[at]["id"], output_index=at, **fields)


def _text_of(item: Mapping[str, Any]) -> str:
    return str(item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


def _unsaid(item: Item) -> Item:
    """An item as it is before any of its text is known."""
    match item["type"]:
        case "function_call":
            begun = call_item(item["id"], item["call_id"], item["name"], "")
            return {**begun, "namespace": item["namespace"]} if "namespace" in item else begun
        case "reasoning":
            return reasoning_item(item["id"], "")
    return message_item(item["id"], "")
