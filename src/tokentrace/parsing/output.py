"""What a parser has found so far: parts, calls, and the events that report them."""

from __future__ import annotations

import bisect
import codecs
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..errors import kind_of
from .events import ArgumentsDelta, CallFinished, CallNamed, CallStarted, ContentDelta, Event, ReasoningDelta
from .lanes import DeltaMaker, Lane
from .marked import MarkedBytes
from .reader import Reader, Say, Waiting
from .response import CallStatus, ParsedPart, ParsedToolCall, PartKind, TokenRange
from .values import Tools, read_json

_SEVERITY: Final = (
    CallStatus.TRUNCATED,
    CallStatus.UNCLOSED,
    CallStatus.MISSING_NAME,
    CallStatus.MALFORMED,
    CallStatus.INVALID_JSON,
    CallStatus.DUPLICATE_ARGUMENT,
    CallStatus.UNKNOWN_TOOL,
)
"""Of several things that are wrong with a call, the first is its status."""

_SURROGATE: Final = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair: JSON and Python can escape one, but no text can contain it."""


_TELLING: Final = {PartKind.REASONING: DeltaMaker(ReasoningDelta), PartKind.CONTENT: DeltaMaker(ContentDelta)}


@dataclass(slots=True)
class Attempt:
    """A call that is being read."""

    index: int
    start: int
    name: str | None = None
    id: str | None = None
    space: tuple[int, int] | None = None
    """White space before a call that has no delimiters: content, once it is known to be one."""
    announced: bool = False
    named: bool = False
    """Whether its name was reported; arguments wait for that."""
    waiting: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    values: dict[str, Any] | None = None
    """Its arguments where they came one by one."""
    raw_values: dict[str, str] = field(default_factory=dict)
    takes_json: bool = True
    """Whether its arguments have to be a JSON object."""
    ragged: bool = False
    """Whether its contents did not show where it ends."""
    late_id: bool = False
    """Whether its id came after its name was reported."""
    misplaced: str = ""
    """Why a call cannot stand where this one does."""
    missing: str = ""
    """What comes before its closing delimiter, where it is cut off."""
    problems: dict[CallStatus, str] = field(default_factory=dict)

    def fail(self, status: CallStatus, problem: str) -> None:
        """Note what is wrong with it; the first of each status counts."""
        if self.takes_json or status not in (CallStatus.INVALID_JSON, CallStatus.MALFORMED):
            self.problems.setdefault(status, problem)

    def broken(self, status: CallStatus, problem: str) -> None:
        """Note that it is wrong in a way that hides where it ends."""
        self.fail(status, problem)
        self.ragged = True


class Output:
    """Collects what a parser says of the bytes in `reader`, from `base` on."""

    def __init__(self, reader: Reader, marked: MarkedBytes, base: int, tools: Tools, *, loose: bool = False) -> None:
        self.reader = reader
        self.loose = loose
        """Whether it is read as servers do."""
        self.misplaced: dict[int, str] = {}
        """For each call that stands where it cannot, why that is."""
        self.base = base
        self.tools = tools
        self.events: list[Event] = []
        self.parts: list[ParsedPart] = []
        self.calls: list[ParsedToolCall] = []
        self.starts: list[int] = []
        """Where each token begins."""
        self.open: PartKind | None = None
        """What the end found open."""
        self.missing: list[str] = []
        """What the grammar would write to close what the end found open, from the inside out; without a stop token."""
        self.blank_reasoning = False
        """Whether a message of reasoning was written that says nothing."""
        self.closed = False
        """Whether the turn was closed in letters, where its grammar has no token for that."""
        self._marked = marked
        self._kind: PartKind | None = None
        self._begun = self._stop = 0
        self._texts: list[str] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    # -- text

    def text(self, start: int, stop: int) -> str:
        """Bytes as people read them."""
        return self.decoded(self.reader.data[start:stop])

    def decoded(self, data: bytes | bytearray) -> str:
        """Marked bytes as people read them."""
        return self._marked.visible(data).decode("utf-8", "replace")

    def visible(self, start: int, stop: int) -> bytes:
        return self._marked.visible(self.reader.data[start:stop])

    def span(self, start: int, stop: int) -> TokenRange:
        """The tokens that bytes touch."""
        start, stop = max(start, self.base), max(stop, self.base)
        if stop <= start:
            at = bisect.bisect_left(self.starts, start)
            return TokenRange(at, at)
        return TokenRange(bisect.bisect_right(self.starts, start) - 1, bisect.bisect_left(self.starts, stop))

    def reasoning(self, start: int, stop: int) -> None:
        self._say(PartKind.REASONING, start, stop)

    def content(self, start: int, stop: int) -> None:
        self._say(PartKind.CONTENT, start, stop)

    def _say(self, kind: PartKind, start: int, stop: int) -> None:
        start = max(start, self.base)
        if stop <= start:
            return
        if self._kind is not kind or start > self._stop:
            self.end_text()
            self._kind, self._begun = kind, start
        self._stop = stop
        self._tell(self._decoder.decode(self.visible(start, stop)))

    def _tell(self, delta: str) -> None:
        if delta and self._kind is not None:
            self._texts.append(delta)
            self.events.append(_TELLING[self._kind].make(delta))

    def end_text(self) -> None:
        """The text that was being said has ended."""
        if self._kind is None:
            return
        self._tell(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        self.parts.append(ParsedPart(self._kind, "".join(self._texts), self.span(self._begun, self._stop)))
        self._kind, self._texts = None, []

    # -- calls

    def start_call(self, start: int) -> Attempt:
        attempt = Attempt(len(self.calls), start)
        self.announce(attempt)
        return attempt

    def announce(self, attempt: Attempt) -> None:
        """It is certain that this is a call: report it, and what is known of it."""
        if attempt.space is not None:
            self.content(*attempt.space)
        self.end_text()
        attempt.announced = True
        self.events.append(CallStarted(attempt.index))
        self.name_call(attempt, None)

    def name_call(self, attempt: Attempt, name: str | None, call_id: str | None = None) -> None:
        """The name is known: report it, and the arguments that have been waiting for it."""
        if call_id and not attempt.id:
            attempt.id, attempt.late_id = _SURROGATE.sub("\ufffd", call_id), attempt.named
        attempt.name = attempt.name or _SURROGATE.sub("\ufffd", name or "") or None
        if attempt.name is None or attempt.named or not attempt.announced:
            return
        attempt.named = True
        self.events.append(CallNamed(attempt.index, attempt.name, attempt.id))
        waiting, attempt.waiting = attempt.waiting, []
        for text in waiting:
            self.add_arguments(attempt, text)

    def add_arguments(self, attempt: Attempt, text: str) -> None:
        """More of the arguments' JSON."""
        if not text:
            return
        text = without_surrogates(text)
        if not attempt.named:
            attempt.waiting.append(text)
            return
        attempt.said.append(text)
        self.events.append(ArgumentsDelta(attempt.index, text))

    def arguments_sink(self, attempt: Attempt, *, quoted: bool = False) -> tuple[ArgumentsSink, Callable[[], None]]:
        """Two functions: one takes bytes of the arguments' JSON, the other says that there are no more.

        `quoted`: the bytes are the text of a string, and are reported as JSON would write them.
        """
        sink = ArgumentsSink(self, attempt, quoted)
        return sink, sink.done

    # -- text that goes by

    def lane(self, waiting: Waiting) -> Lane | None:
        """Where plain tokens can go by from here on; None where what is said next is not just more of the same."""
        say = waiting.say
        if isinstance(say, ArgumentsSink):
            telling, ready = say.telling, say.attempt.named and say.is_settled
        else:
            kind = PartKind.REASONING if say == self.reasoning else PartKind.CONTENT
            telling = _TELLING[kind]
            ready = self._kind is kind and self._stop == waiting.held and not self._decoder.getstate()[0]
        return (
            self._marked.lanes.lane(waiting.plain, telling, bytes(self.reader.data[waiting.held :])) if ready else None
        )

    def pass_on(self, say: Say, start: int, stop: int) -> None:
        """Text that went by, and was reported."""
        text = self.reader.data[start:stop].decode()
        if isinstance(say, ArgumentsSink):
            say.attempt.said.append(say.written(text))
        else:
            self._texts.append(text)
            self._stop = stop

    def finish_call(self, attempt: Attempt, stop: int) -> None:
        """A call has ended, well or not: give it its status. One that the prompt wrote to its end is left out."""
        if not self.starts and not self.reader.ended:
            self.events.clear()
            return
        if attempt.name is None:
            attempt.fail(CallStatus.MISSING_NAME, "the call has no name")
        elif not self.tools.knows(attempt.name):
            attempt.fail(CallStatus.UNKNOWN_TOOL, f"there is no tool {attempt.name!r}")
        if attempt.misplaced:
            self.misplaced[attempt.index] = attempt.misplaced
            if not self.loose:
                attempt.fail(CallStatus.MALFORMED, attempt.misplaced)
        text = "".join(attempt.said or attempt.waiting)
        arguments = attempt.values if attempt.values is not None else _arguments(attempt, text)
        if self.loose:
            attempt.problems.pop(CallStatus.DUPLICATE_ARGUMENT, None)
        status = next((status for status in _SEVERITY if status in attempt.problems), CallStatus.OK)
        call = ParsedToolCall(
            index=attempt.index,
            name=attempt.name,
            arguments=arguments,
            arguments_text=text,
            id=attempt.id,
            status=status,
            problem=attempt.problems.get(status, ""),
            raw=self.text(max(attempt.start, self.base), stop),
            raw_arguments=attempt.raw_values,
            span=self.span(attempt.start, stop),
            late_id=attempt.late_id,
        )
        self.calls.append(call)
        between = self.text(self._stop, attempt.start) if self.base <= self._stop <= attempt.start else ""
        lead = between if between.isspace() else ""
        self.parts.append(ParsedPart(PartKind.TOOL_CALL, call.raw, call.span, call.index, lead))
        self._stop = stop
        self.events.append(CallFinished(call.index, call, lead))


def without_surrogates(text: str) -> str:
    """JSON in which halves of surrogate pairs are escaped."""
    return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def in_json(text: str) -> str:
    """Text as it stands between the quotes of a string in JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class ArgumentsSink:
    """Takes bytes of a call's arguments."""

    def __init__(self, output: Output, attempt: Attempt, quoted: bool) -> None:
        self.attempt = attempt
        self.telling = DeltaMaker(ArgumentsDelta, (attempt.index,), in_json if quoted else None)
        self._output = output
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, start: int, stop: int) -> None:
        self._add(self._decoder.decode(self._output.visible(start, stop)))

    def done(self) -> None:
        self._add(self._decoder.decode(b"", final=True))

    @property
    def is_settled(self) -> bool:
        """Whether no character is half written."""
        return not self._decoder.getstate()[0]

    def written(self, text: str) -> str:
        """Text as it stands in the arguments' JSON."""
        return self.telling.written(text) if self.telling.written else text

    def _add(self, text: str) -> None:
        self._output.add_arguments(self.attempt, self.written(text))


def _arguments(attempt: Attempt, text: str) -> dict[str, Any] | None:
    """Arguments that were written as one JSON."""
    doubled: list[str] = []

    def members(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        doubled[:] = [key for key, _ in pairs] if len(found) < len(pairs) else []
        return found

    try:
        value = read_json(text)
        json.loads(text, object_pairs_hook=members)
    except (ValueError, RecursionError) as error:
        attempt.fail(CallStatus.INVALID_JSON, f"the arguments are not JSON: {error}")
        return None
    if not isinstance(value, dict):
        attempt.fail(CallStatus.MALFORMED, f"the arguments are {kind_of(value)}, not an object")
        return None
    if doubled:
        key = next(key for key, count in Counter(doubled).items() if count > 1)
        attempt.fail(CallStatus.DUPLICATE_ARGUMENT, f"the argument {key!r} is given twice")
    return value
