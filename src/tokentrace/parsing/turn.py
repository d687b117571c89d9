"""Reading a turn: reasoning, content and calls, in the order in which they come."""

from __future__ import annotations

from .calls import CallParser
from .compiled import Compiled
from .output import Output
from .reader import Match, Reading
from .response import PartKind


class TurnParser:
    """Reads a turn from its head on. What the prompt wrote of it comes first, and is not reported.

    `prompted`: the prompt is known. Otherwise the template's own generation prompt is assumed, and a completion may
    open reasoning that this prompt opened already.
    """

    def __init__(self, compiled: Compiled, output: Output, *, prompted: bool) -> None:
        self.compiled, self.reader, self.output = compiled, output.reader, output
        self.prompted = prompted
        self.calls = CallParser(compiled, compiled.calls, output) if compiled.calls is not None else None

    def read(self) -> Reading[Match | None]:
        """All of the turn: its stop token, or None if the completion ends without one."""
        compiled, reader, output, calls = self.compiled, self.reader, self.output, self.calls
        yield from reader.skip(compiled.head_trail)
        yield from self._begin()
        fresh, answered, after_calls = True, False, -1
        while True:
            if fresh and calls is not None and calls.calls.bare:
                output.enter(PartKind.TOOL_CALL, reader.at)
                yield from calls.bare()
                output.enter(PartKind.CONTENT, reader.at)
            fresh, start = False, reader.at
            match = yield from reader.find(compiled.in_content, output.content)
            if match is None or match.kind == "stop" or (yield from self._is_stop(match)):
                output.end_text()
                if match is not None:
                    output.enter(PartKind.STOP, match.start)
                elif after_calls == start == reader.at:
                    output.missing += (
                        [compiled.grammar.calls.after] if compiled.grammar.calls and output.missing else []
                    )
                elif not answered:
                    frame = compiled.grammar.content
                    output.missing.append(f"{frame.trail}{frame.close}{frame.after if frame.close else ''}")
                return match
            if match.kind == "reasoning":
                output.enter(PartKind.REASONING, match.start)
                reader.at = match.stop
                yield from self._reasoning()
                fresh = True
            elif match.kind == "answered":
                reader.at = match.stop
                output.end_text()
                output.closed = not compiled.content.open
                answered = True
                yield from reader.skip(compiled.content.after)
            elif calls is not None:
                output.enter(PartKind.TOOL_CALL, match.text)
                yield from calls.read()
                output.enter(PartKind.CONTENT, reader.at)
                after_calls = reader.at

    def _is_stop(self, match: Match) -> Reading[bool]:
        """True if a token that may open calls is a stop token here: the remainder of the opening does not follow."""
        calls = self.compiled.calls
        if bytes(self.reader.data[match.start : match.stop]) not in self.compiled.stops or calls is None:
            return False
        return (yield from self.reader.sees_all(calls.section_open or calls.open)) is None

    def _begin(self) -> Reading[None]:
        """What comes before content: reasoning, or an empty place for it."""
        reader, frame, output = self.reader, self.compiled.reasoning, self.output
        output.enter(PartKind.CONTENT, reader.at)
        if frame is not None:
            at = yield from reader.past_space()
            opens = bool(frame.open) and (yield from reader.sees(frame.open, at))
            if opens or (yield from reader.sees(frame.close, at)):
                output.content(reader.at, at)
                output.enter(PartKind.REASONING, at)
                reader.at = at + len(frame.open if opens else frame.close)
                if opens:
                    yield from self._reasoning()
                    return
                yield from reader.skip(self.compiled.after_empty)
                output.enter(PartKind.CONTENT, reader.at)
        yield from self._open_content()

    def _reasoning(self) -> Reading[None]:
        """Reasoning, after its opening."""
        compiled, reader, output = self.compiled, self.reader, self.output
        frame, grammar = compiled.reasoning, compiled.grammar.reasoning
        assert frame is not None
        assert grammar is not None
        by_prompt = reader.at <= output.base
        yield from reader.skip(frame.lead)
        if by_prompt and not self.prompted:
            if frame.open and (yield from reader.skip(frame.open)):
                yield from reader.skip(frame.lead)
            if frame.lead and (yield from reader.sees(frame.lead + frame.trail + frame.close)):
                reader.at += len(frame.lead)
        start = reader.at
        match = yield from reader.find(compiled.in_reasoning, output.reasoning)
        output.end_text()
        if match is None or match.kind != "close":
            output.open = PartKind.REASONING
            if match is None:
                after = compiled.grammar.after_empty if start == reader.at else grammar.after
                output.missing.append(f"{grammar.trail}{grammar.close}{after}")
            return
        reader.at = match.stop
        yield from reader.skip(compiled.after_empty if match.text == start else frame.after)
        output.enter(PartKind.CONTENT, reader.at)
        yield from self._open_content()

    def _open_content(self) -> Reading[None]:
        """Go past what opens content, if the grammar opens it."""
        frame = self.compiled.content
        if frame.open and (yield from self.reader.skip(frame.open)):
            yield from self.reader.skip(frame.lead)
