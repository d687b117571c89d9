"""An answer as its client sees it: reasoning, text and calls, each as soon as it is certain. Pure.

`ItemStream` turns a parser's events into changes of items. Every dialect writes the changes as its stream and the
items as its whole answer, so that a stream always adds up to the answer.

**An attempt with a certain name is a call**, whatever becomes of its arguments: agents answer broken arguments with an
error that the model can learn from. An attempt without a name is text, as the model wrote it. Where arguments must be
an object (Anthropic's ``input``, whose client raises on pieces that cannot become JSON), a call comes whole when it has
ended, and an attempt whose arguments are broken or cut off is text too: no tool runs with arguments that the model did
not write.

Engines stop at ids, not at text, so `ItemStream` also looks for stop texts. It withholds what may become one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from ..parsing.events import ArgumentsDelta, CallFinished, CallNamed, CallStarted, ContentDelta, Event, ReasoningDelta
from ..parsing.response import CallStatus, ParsedResponse, ParsedToolCall, PartKind, TokenRange

QUIET: Final = 32
"""How many silent pieces of a call pass before a `Waiting` shows that the stream is alive."""

CallId: TypeAlias = Callable[[int], str]
"""Makes an id for the attempt with this index, if the model wrote none."""


@dataclass(slots=True, eq=False)
class Item:
    """A stretch of reasoning or text, or one call."""

    index: int
    kind: PartKind
    text: str = ""
    """The text; the arguments of a call, which may not be whole JSON."""
    name: str = ""
    id: str = ""
    attempt: int = -1
    """The call's index among all attempts."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The arguments as an object. Set only if they must be one."""
    cut_off: bool = False


class Opened(NamedTuple):
    """An item begins. It has no text yet."""

    item: Item


class Grew(NamedTuple):
    """An item has more text."""

    item: Item
    text: str


class Closed(NamedTuple):
    """An item is complete."""

    item: Item


class Waiting(NamedTuple):
    """The model writes a call of which nothing can be shown yet."""


Change: TypeAlias = Opened | Grew | Closed | Waiting


class ItemStream:
    """Builds the items of one completion and reports every change."""

    def __init__(
        self, call_id: CallId, *, calls_allowed: bool = True, object_arguments: bool = False, stop: Sequence[str] = ()
    ) -> None:
        self.items: list[Item] = []
        self.statuses: list[CallStatus] = []
        """What became of each attempt at a call."""
        self.late_ids: dict[str, str] = {}
        """By the id that the client knows: the id that the model wrote after the arguments."""
        self.stopped_by: str | None = None
        """The stop text that ended the content."""
        self._call_id: Final = call_id
        self._calls_allowed: Final = calls_allowed
        self._object_arguments: Final = object_arguments
        self._stop: Final = tuple(stop)
        self._withheld = ""
        """The end of the content, which may be the beginning of a stop text."""
        self._open: Item | None = None
        self._in_call = False
        self._silent = 0

    def feed(self, events: Iterable[Event]) -> list[Change]:
        """Add what the parser reports. Ignores everything after a stop text."""
        changes: list[Change] = []
        for event in events:
            if self.stopped_by is not None:
                break
            if type(event) is ContentDelta:
                changes += self._content(event.text)
                continue
            changes += self._release()
            match event:
                case ReasoningDelta(text):
                    changes += self._grow(PartKind.REASONING, text)
                case CallStarted():
                    self._in_call = True
                case CallNamed(index, name, id) if self._calls_allowed and not self._object_arguments:
                    item = Item(len(self.items), PartKind.TOOL_CALL, "", name, id or self._call_id(index), index)
                    changes += self._start(item)
                case ArgumentsDelta(_, text) if text and self._call is not None:
                    self._call.text += text
                    changes.append(Grew(self._call, text))
                case CallFinished(_, call, lead):
                    changes += self._end_call(call, lead)
        self._silent = 0 if changes or not self._in_call else self._silent + 1
        if self._silent == QUIET:
            self._silent = 0
            return [Waiting()]
        return changes

    def finish(self, events: Iterable[Event], *, cut_off: bool) -> list[Change]:
        """Add the parser's last events and close the open item. `cut_off`: the completion has no stop token."""
        changes = self.feed(events)
        if self.stopped_by is None:
            changes += self._release()
            if self._open is not None:
                self._open.cut_off = cut_off
        return [*changes, *self._close()]

    # -- text

    def _content(self, text: str) -> list[Change]:
        if not self._stop:
            return self._grow(PartKind.CONTENT, text)
        text = self._withheld + text
        matches = [(at, -len(stop), stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if matches:
            end, _, self.stopped_by = min(matches)
            self._withheld = ""
        else:
            end = len(text) - max(_overlap(text, stop) for stop in self._stop)
            self._withheld = text[end:]
        return self._grow(PartKind.CONTENT, text[:end])

    def _release(self) -> list[Change]:
        """What was withheld, now that it cannot become a stop text."""
        text, self._withheld = self._withheld, ""
        return self._grow(PartKind.CONTENT, text)

    def _grow(self, kind: PartKind, text: str) -> list[Change]:
        if not text:
            return []
        changes: list[Change] = []
        if self._open is None or self._open.kind is not kind:
            changes += self._start(Item(len(self.items), kind))
        assert self._open is not None
        self._open.text += text
        return [*changes, Grew(self._open, text)]

    def _start(self, item: Item) -> list[Change]:
        closed = self._close()
        self._open = item
        self.items.append(item)
        return [*closed, Opened(item)]

    def _close(self) -> list[Change]:
        item, self._open = self._open, None
        return [] if item is None else [Closed(item)]

    # -- calls

    @property
    def _call(self) -> Item | None:
        """The item of the attempt that is being written, if the client knows of it."""
        return self._open if self._open is not None and self._open.kind is PartKind.TOOL_CALL else None

    def _end_call(self, call: ParsedToolCall, lead: str) -> list[Change]:
        self.statuses.append(call.status)
        self._in_call, item = False, self._call
        if item is None:
            is_call = self._calls_allowed and self._object_arguments and call.name and _has_object(call)
            return self._whole_call(call) if is_call else self._grow(PartKind.CONTENT, lead + call.raw)
        if call.late_id and call.id:
            self.late_ids[item.id] = call.id
        item.cut_off = call.status is CallStatus.TRUNCATED
        return self._close()

    def _whole_call(self, call: ParsedToolCall) -> list[Change]:
        """A call that has ended, with an object of arguments."""
        id = call.id or self._call_id(call.index)
        item = Item(len(self.items), PartKind.TOOL_CALL, "", call.name or "", id, call.index, call.arguments or {})
        changes = self._start(item)
        item.text = call.arguments_text
        return [*changes, Grew(item, item.text), *self._close()]


def _has_object(call: ParsedToolCall) -> bool:
    """True if the model wrote the arguments of a call to their end. They may be empty only if the call is closed."""
    is_closed = call.status not in (CallStatus.TRUNCATED, CallStatus.UNCLOSED)
    return call.arguments is not None and (is_closed or (call.status is CallStatus.UNCLOSED and bool(call.arguments)))


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of a text that begins a stop text."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def changes_of(items: Iterable[Item]) -> list[Change]:
    """The changes that build complete items at once."""
    changes: list[Change] = []
    for item in items:
        changes += [Opened(item), *([Grew(item, item.text)] if item.text else []), Closed(item)]
    return changes


def openai_message(items: Sequence[Item]) -> dict[str, Any]:
    """A message of chat completions. Arguments are JSON text, as written; ``content`` is None only beside calls."""

    def text(kind: PartKind) -> str:
        return "".join(item.text for item in items if item.kind is kind)

    calls = [openai_call(item) for item in items if item.kind is PartKind.TOOL_CALL]
    message = {"role": "assistant", "content": text(PartKind.CONTENT) or (None if calls else "")}
    if reasoning := text(PartKind.REASONING):
        message["reasoning_content"] = reasoning
    return {**message, "tool_calls": calls} if calls else message


def openai_call(item: Item) -> dict[str, Any]:
    """A call as in OpenAI's chat completions."""
    return {"id": item.id, "type": "function", "function": {"name": item.name, "arguments": item.text}}


def token_spans(response: ParsedResponse, items: Sequence[Item]) -> dict[int, list[TokenRange]]:
    """The tokens of each text item, by its index. A stop text's tokens belong to the text that it ended."""
    calls = {item.attempt for item in items if item.kind is PartKind.TOOL_CALL}
    texts = [item for item in items if item.kind is PartKind.CONTENT]
    spans: dict[int, list[TokenRange]] = {item.index: [] for item in texts}
    remaining = [len(item.text) for item in texts]
    at = 0
    for part in response.parts:
        is_call = part.call is not None and response.tool_calls[part.call].index in calls
        length = len(part.lead) + len(part.text)
        if is_call or part.kind is PartKind.REASONING or not length or at == len(texts):
            continue
        spans[texts[at].index].append(part.span)
        remaining[at] -= length
        if remaining[at] <= 0:
            at += 1
    return spans
