"""What a parser has read so far: parts, calls, regions and events."""

from __future__ import annotations

import itertools
import json
import re
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import kind_of
from ..values.schema import Tools, read_json
from .events import (
    ArgumentsDelta,
    CallFinished,
    CallNamed,
    CallStarted,
    ContentDelta,
    Event,
    ReasoningDelta,
)
from .reader import Reader, Report
from .response import CallStatus, ParsedPart, ParsedToolCall, PartKind, Region, TokenRange

_to_json = json.JSONEncoder(ensure_ascii=False).encode
_SURROGATE = re.compile("[\ud800-\udfff]")
"""Halves of surrogate pairs, which JSON can escape, but no text can contain."""


@dataclass(slots=True)
class OpenCall:
    output: Output
    index: int
    start: int
    name: str | None = None
    id: str | None = None
    space: tuple[int, int] = (0, 0)
    """White space before a call without delimiters: content if it is a call."""
    announced: bool = False
    named: bool = False
    """True once the name was reported. Arguments wait for that."""
    late_id: bool = False
    texts: list[str] = field(default_factory=list)
    values: dict[str, Any] | None = None
    raw_values: dict[str, str] = field(default_factory=dict)
    takes_json: bool = True
    ragged: bool = False
    """True if its contents do not show where it ends."""
    closing: str = ""
    """What the grammar writes between its arguments and its closing delimiter."""
    problems: dict[CallStatus, str] = field(default_factory=dict)
    severe: set[CallStatus] = field(default_factory=set)

    def fail(
        self, problem: str, status: CallStatus = CallStatus.MALFORMED, *, lenient: bool = False
    ) -> None:
        """Note a problem; the first of each status counts. A `lenient` reading forgives it."""
        if self.takes_json or status not in (CallStatus.INVALID_JSON, CallStatus.MALFORMED):
            self.severe |= set() if lenient else {status}
            self.problems.setdefault(status, problem)

    def break_off(self, problem: str, status: CallStatus = CallStatus.MALFORMED) -> None:
        """Note a problem that leaves open where the call ends."""
        self.ragged = True
        self.fail(problem, status)

    def announce(self) -> None:
        """Report that this is surely a call."""
        self.output.content(*self.space)
        self.output.end_text()
        self.announced = True
        self.output.events.append(CallStarted(self.index))
        self.set_name(None)

    def set_name(self, name: str | None, call_id: str | None = None) -> None:
        """Report the name once it is certain, and the arguments that waited for it."""
        if call_id and not self.id:
            self.id, self.late_id = _SURROGATE.sub("\ufffd", call_id), self.named
        self.name = self.name or _SURROGATE.sub("\ufffd", name or "") or None
        if self.name is not None and self.announced and not self.named:
            self.named = True
            self.output.events.append(CallNamed(self.index, self.name, self.id))
            self.output.events += [ArgumentsDelta(self.index, text) for text in self.texts]

    def add_arguments(self, text: str) -> None:
        if not text:
            return
        if not text.isascii():
            text = _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)
        self.texts.append(text)
        if self.named:
            self.output.events.append(ArgumentsDelta(self.index, text))

    def add_key(self, key: str) -> None:
        self.add_arguments(f"{', ' if self.texts else '{'}{_to_json(key)}: ")

    def add_value(self, key: str, value: Any, *, reported: bool = False) -> None:
        """Add an argument's value, perhaps `reported` as it arrived."""
        self.values = self.values or {}
        if key in self.values:
            self.fail(f"the argument {key!r} is given twice", CallStatus.DUPLICATE_ARGUMENT, lenient=True)
        self.values[key] = value
        self.add_arguments("" if reported else _to_json(value))

    def end_values(self) -> None:
        """End the arguments, unless the completion ends here."""
        self.values = self.values or {}
        if not self.output.reader.exhausted:
            self.add_arguments("}" if self.texts else "{}")

    def set_values(self, values: dict[str, Any]) -> None:
        self.values = values
        self.add_arguments(_to_json(values))

    def finish(self, stop: int) -> None:
        """End the call, well-formed or not. Drop one of the prompt."""
        output, reader = self.output, self.output.reader
        if not output.starts and not reader.ended:
            output.events.clear()
            return
        if self.name is None:
            self.fail("the call has no name", CallStatus.MISSING_NAME)
        elif not output.tools.knows(self.name):
            self.fail(f"there is no tool {self.name!r}", CallStatus.UNKNOWN_TOOL)
        index, start, before = self.index, self.start, output.stop
        text, span = "".join(self.texts), output.span(start, stop)
        raw = reader.text(max(start, output.base), stop)
        values = self.values if self.values is not None else self._read_arguments(text)
        statuses = [status for status in CallStatus if status in self.problems]
        problem = self.problems[statuses[0]] if statuses else ""
        counted = self.severe if output.lenient else self.problems
        status = next((status for status in statuses if status in counted), CallStatus.OK)
        call = ParsedToolCall(
            index,
            self.name,
            values,
            text,
            self.id,
            status,
            problem,
            raw,
            self.raw_values,
            span,
            self.late_id,
        )
        between = reader.text(before, start) if output.base <= before <= start else ""
        lead = between if between.isspace() else ""
        output.calls.append(call)
        output.stop = stop
        output.placed.append(
            Placed(ParsedPart(PartKind.TOOL_CALL, raw, span, index, lead), start, stop, call)
        )
        output.events.append(CallFinished(index, call, lead))

    def _read_arguments(self, text: str) -> dict[str, Any] | None:
        keys: list[str] = []

        def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            keys[:] = [key for key, _ in pairs]  # the outermost object comes last
            return dict(pairs)

        try:
            value = read_json(text, members)
        except ValueError as error:
            self.fail(f"the arguments are not JSON: {error}", CallStatus.INVALID_JSON)
            return None
        if not isinstance(value, dict):
            self.fail(f"the arguments are {kind_of(value)}, not an object")
            return None
        if len(value) < len(keys):
            twice = next(key for key, count in Counter(keys).items() if count > 1)
            self.fail(f"the argument {twice!r} is given twice", CallStatus.DUPLICATE_ARGUMENT, lenient=True)
        return value


class ArgumentsText(Report):
    """Reports bytes of a call's arguments, perhaps `quoted` as in a JSON string."""

    def __init__(self, call: OpenCall, *, quoted: bool = False) -> None:
        super().__init__(call.output.reader)
        self._call, self._quoted = call, quoted

    def put(self, text: str) -> None:
        self._call.add_arguments(_to_json(text)[1:-1] if self._quoted else text)


class Text(Report):
    """Reports reasoning or content. Each stretch is a part."""

    def __init__(self, output: Output, kind: PartKind) -> None:
        super().__init__(output.reader)
        self._output, self.kind = output, kind
        self._event = ReasoningDelta if kind is PartKind.REASONING else ContentDelta
        self._texts: list[str] = []
        self._start = -1

    def __call__(self, start: int, stop: int) -> None:
        output = self._output
        start = max(start, output.base)
        if start < stop:
            if start > output.stop:
                output.end_text()
            if output.current is not self:
                self._begin(start)
            output.stop = stop
            super().__call__(start, stop)

    def _begin(self, start: int) -> None:
        self._output.end_text()
        self._output.current, self._start = self, start

    def put(self, text: str) -> None:
        output = self._output
        if output.current is not self:
            self._begin(len(self.reader.data) - len(self.reader.pending))
        if text:
            self._texts.append(text)
            output.events.append(self._event(text))

    def done(self) -> None:
        output = self._output
        if output.current is self:
            super().done()
            part = ParsedPart(self.kind, "".join(self._texts), output.span(self._start, output.stop))
            output.placed.append(Placed(part, self._start, output.stop))
            output.current, self._texts = None, []


class Placed(NamedTuple):
    part: ParsedPart
    start: int
    stop: int
    call: ParsedToolCall | None = None


class Output:
    """Collects what a parser reads, from byte `base` on."""

    def __init__(self, reader: Reader, tools: Tools, *, lenient: bool = False) -> None:
        self.reader, self.base, self.tools, self.lenient = reader, reader.base, tools, lenient
        self.events: list[Event] = []
        self.placed: list[Placed] = []
        self.calls: list[ParsedToolCall] = []
        self.starts: list[int] = []
        self.stop = 0
        self.open: PartKind | None = None
        self.missing: list[str] = []
        """What would close a completion that was cut off, from the inside out."""
        self.blank_reasoning = False
        """True if there was a message of reasoning without text."""
        self.closed = False
        """True if text closed the turn, in a grammar that has no token for that."""
        self._regions: list[tuple[int, PartKind]] = []
        self.reasoning, self.content = Text(self, PartKind.REASONING), Text(self, PartKind.CONTENT)
        self.current: Text | None = None

    def span(self, start: int, stop: int) -> TokenRange:
        """The tokens that bytes touch."""
        start, stop = max(start, self.base), max(stop, self.base)
        first = bisect_right(self.starts, start) - 1 if start < stop else bisect_left(self.starts, start)
        return TokenRange(first, max(first, bisect_left(self.starts, stop)))

    def end_text(self) -> None:
        if self.current is not None:
            self.current.done()

    def start_call(self, start: int, **fields: Any) -> OpenCall:
        """Start a call that is certain to be one."""
        call = OpenCall(self, len(self.calls), start, **fields)
        call.announce()
        return call

    def enter(self, kind: PartKind, at: int) -> None:
        """From byte `at` on, tokens belong to this kind of part, delimiters included."""
        entry = max(at, self.base) if self._regions else self.base, kind
        insort(self._regions, entry, key=lambda region: region[0])

    def answer(self) -> str:
        """Content and calls, with the text around and between calls."""
        pieces = [(one.start, one.stop) for one in self.placed if one.part.kind is PartKind.CONTENT]
        for (start, kind), (stop, _) in itertools.pairwise(self._bounds()):
            pieces += [(start, stop)] if kind is PartKind.TOOL_CALL else []
        text, end = "", 0
        for start, stop in sorted(pieces, key=lambda piece: (piece[0], -piece[1])):
            if start >= end:  # else it is content among calls
                text += self.reader.text(start, stop)
                end = stop
        return text

    def _bounds(self) -> list[tuple[int, PartKind]]:
        return [*self._regions, (len(self.reader.data), PartKind.STOP)]

    def regions(self) -> list[Region]:
        """The regions, which cover all tokens up to the stop token."""
        regions: list[Region] = []
        bounds = self._bounds()
        if len(bounds) > 2 and bounds[1][1] is not PartKind.STOP:
            (first, _), (second, kind) = bounds[:2]
            if not bytes(self.reader.data[first:second]).strip():
                bounds[:2] = [(first, kind)]  # white space at the beginning goes with what follows
        for (start, kind), (stop, _) in itertools.pairwise(bounds):
            first, end = (bisect_left(self.starts, at) for at in (start, stop))
            if kind is PartKind.STOP:
                regions += [Region(kind, TokenRange(first, first + 1))] if first < len(self.starts) else []
                break
            if regions and regions[-1].kind is kind:
                first = regions.pop().span.start
            if first < end:
                regions.append(Region(kind, TokenRange(first, end)))
        return regions
