"""Reading a turn: reasoning, content and calls, in the order in which they come."""

from __future__ import annotations

import re
from typing import Final

from .calls import CallParser
from .compiled import Compiled
from .output import Output
from .reader import Found, Reader, Reading
from .response import PartKind

_INTRODUCED: Final = re.compile(rb"(?:\xff[\x80-\xbf]{4}\s*)?\Z")
"""A control token right before a call that has no delimiters: Llama's ``<|python_tag|>``."""


class TurnParser:
    """Reads a turn from its head on. What the prompt wrote of it comes first, and is not reported.

    `prompted` says whether the prompt is known. Where it is not, the template's own generation prompt is assumed, and a
    completion may open reasoning that this one opened already.
    """

    def __init__(self, compiled: Compiled, reader: Reader, output: Output, *, prompted: bool) -> None:
        self.compiled = compiled
        self.reader = reader
        self.output = output
        self.prompted = prompted
        self._unclosed = False
        self._answered = False
        """Whether content was closed, where something closes it."""
        self._called: int | None = None
        """Where the last calls ended."""
        self.calls = CallParser(compiled, compiled.calls, reader, output) if compiled.calls is not None else None

    def read(self) -> Reading[Found | None]:
        """All of the turn: its stop token, or None where the completion ends without one."""
        compiled, reader, output = self.compiled, self.reader, self.output
        yield from reader.skip(compiled.head_trail)
        yield from self._begin()
        fresh = True
        while True:
            if fresh and self.calls is not None and compiled.calls is not None and compiled.calls.bare:
                yield from self.calls.bare()
            fresh, begun = False, reader.at
            if output.loose:
                found = yield from self._loose_content()
            else:
                found = yield from reader.find(compiled.in_content, output.content)
            if found is None or found.kind == "stop" or (yield from self._stops(found)):
                output.end_text()
                if found is None:
                    self._end_missing(begun)
                return found
            if found.kind == "reasoning":
                reader.at = found.stop
                yield from self._reasoning()
                fresh = True
            elif found.kind == "answered":
                reader.at = found.stop
                output.end_text()
                output.closed = not compiled.content.open
                self._answered = True
                yield from reader.skip(compiled.content.after)
            elif self.calls is not None:
                yield from self.calls.read()
                self.calls.misplaced = ""
                self._called = reader.at

    def _end_missing(self, begun: int) -> None:
        """Note what the grammar writes before the stop token, where the completion ends in content from `begun` on."""
        frame, calls, missing = self.compiled.grammar.content, self.compiled.grammar.calls, self.output.missing
        if self._called == begun == self.reader.at:
            missing += [calls.after] if calls is not None and missing else []
        elif not frame.close:
            missing.append(frame.trail)
        elif not self._answered:
            missing.append(f"{frame.trail}{frame.close}{frame.after}")

    def _loose_content(self) -> Reading[Found | None]:
        """Content up to the next mark, where calls may also stand that lack what comes before them."""
        compiled, reader, output, calls = self.compiled, self.reader, self.output, self.calls
        while True:
            begun = reader.at
            found = yield from reader.find(compiled.in_loose_content)
            if found is None or found.kind != "loose" or calls is None or compiled.calls is None:
                output.content(begun, found.text if found is not None else reader.at)
                return found
            if not compiled.calls.bare:
                output.content(begun, found.start)
                yield from calls.without_opening()
            else:
                match = _INTRODUCED.search(reader.data, begun, found.start)
                said = match.start() if match else found.start
                output.content(begun, said)
                calls.misplaced = "the call stands after something else, and nothing but its place says that it is one"
                if not (yield from calls.bare(said)):
                    yield from calls.skip_value()
                    output.content(said, reader.at)
            calls.misplaced = ""

    def _stops(self, found: Found) -> Reading[bool]:
        """Whether what may open calls is a stop token here: it is where the rest of the opening does not follow."""
        if bytes(self.reader.data[found.start : found.stop]) not in self.compiled.stops or self.compiled.calls is None:
            return False
        opening = self.compiled.calls.section_open or self.compiled.calls.open
        return (yield from self.reader.sees_all(opening)) is None

    def _begin(self) -> Reading[None]:
        """What stands before content: reasoning, or what is written where there is none."""
        reader, frame = self.reader, self.compiled.reasoning
        if frame is not None:
            at = yield from reader.past_space()
            if frame.open and (yield from reader.sees(frame.open, at)):
                self.output.content(reader.at, at)
                reader.at = at + len(frame.open)
                yield from self._reasoning()
                return
            if (yield from reader.sees(frame.close, at)):
                self.output.content(reader.at, at)
                reader.at = at + len(frame.close)
                yield from reader.skip(self.compiled.after_empty)
        yield from self._answer()

    def _reasoning(self) -> Reading[None]:
        """Reasoning, after its opening."""
        compiled, reader, output = self.compiled, self.reader, self.output
        frame = compiled.reasoning
        assert frame is not None
        by_prompt = reader.at <= output.base
        yield from reader.skip(frame.lead)
        if by_prompt and not self.prompted:
            if frame.open and (yield from reader.skip(frame.open)):
                yield from reader.skip(frame.lead)
            if frame.lead and (yield from reader.sees(frame.lead + frame.trail + frame.close)):
                reader.at += len(frame.lead)
        start = reader.at
        if output.loose and (yield from self._stays_open()):
            found = yield from reader.find(compiled.in_open_reasoning, output.reasoning)
            if self.calls is not None and found is not None and found.kind != "stop":
                self.calls.misplaced = "the call stands inside reasoning that is not closed"
                return
        else:
            found = yield from reader.find(compiled.in_reasoning, output.reasoning)
        output.end_text()
        if found is None or found.kind != "close":
            output.open = PartKind.REASONING
            written = compiled.grammar.reasoning
            if found is None and written is not None:
                after = compiled.grammar.after_empty if start == reader.at else written.after
                output.missing.append(f"{written.trail}{written.close}{after}")
            return
        reader.at = found.stop
        yield from reader.skip(compiled.after_empty if found.text == start else frame.after)
        yield from self._answer()

    def _stays_open(self) -> Reading[bool]:
        """Whether reasoning is never closed, which is known at the end."""
        while not self.reader.ended:
            yield
        if not self._unclosed and self.compiled.reasoning is not None:
            self._unclosed = self.reader.data.find(self.compiled.reasoning.close, self.reader.at) < 0
        return self._unclosed

    def _answer(self) -> Reading[None]:
        """What opens content, where anything does."""
        frame = self.compiled.content
        if frame.open and (yield from self.reader.skip(frame.open)):
            yield from self.reader.skip(frame.lead)
