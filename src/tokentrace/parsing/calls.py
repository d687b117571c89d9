"""Reading tool calls, in whatever way a grammar writes them.

What opens as a call is one, whatever follows. Control tokens end it early, because no text can spell them; other
delimiters only where the grammar expects them.
"""

from __future__ import annotations

import re
from typing import Final

from ..formats.grammar import Style
from ..study.reading import trailing
from .arguments import JsonReader, PairReader
from .bracketed import BracketReader
from .compiled import Compiled, CompiledCalls
from .marked import unforgeable
from .output import CallReader, OpenCall, Output
from .reader import Match, Reading
from .response import CallStatus, PartKind

_NAME_IN_ID: Final = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)
"""Kimi's ids: ``functions.NAME:INDEX``."""


class CallParser(CallReader):
    """Reads calls that open here (`read`), or that have no delimiters (`bare`)."""

    def __init__(self, compiled: Compiled, calls: CompiledCalls, output: Output, *, any_key: bool = False) -> None:
        super().__init__(calls, output)
        self.style, self._stops = calls.grammar.style, list(compiled.stops)
        self.json = JsonReader(calls, output, any_key=any_key)
        self._pairs, self._bracketed = PairReader(calls, output), BracketReader(calls, output)
        self.header: int | None = None
        """Where the header of the next call's message begins, in formats that have such."""

    def read(self) -> Reading[None]:
        """The calls that begin here, up to where content goes on, or to a stop token."""
        calls, reader = self.calls, self.reader
        if calls.section_open and (yield from reader.sees(calls.section_open[0])):
            yield from self._section()
            return
        while True:
            yield from self._delimited(outside=calls.named_section)
            at, opens = reader.at + len(calls.separator), calls.separator + calls.open[0]
            if (yield from reader.sees(opens)) and (yield from reader.sees_all(calls.open, at)) is not None:
                reader.at = at
                continue
            break
        for stop in self._stops if calls.after else ():  # white space that the grammar writes before the end
            if (yield from reader.sees(calls.after + stop)):
                reader.at += len(calls.after)
                return
        if reader.ended and reader.data[reader.at :] == calls.after:
            reader.at = len(reader.data)

    def _section(self) -> Reading[None]:
        """A section of calls. Text in it is content; without a call it is malformed."""
        calls, reader, output = self.calls, self.reader, self.output
        start, any_calls = reader.at, False
        opened = yield from reader.skip_all(calls.section_open)
        reader.at += 0 if opened else len(calls.section_open[0])
        while True:
            at = yield from self._past_separator()
            if self.style is Style.PYTHON and not calls.open and (yield from self._bracketed.begins(at)):
                reader.at, any_calls = at, True
                yield from self.calls_from(at)
                continue
            text, reader.at = reader.at, at
            match = yield from reader.find(calls.in_section)
            if reader.at > at and (any_calls or (match is not None and match.kind == "open")):
                output.content(text, reader.at)
            if match is None or match.kind != "open":
                break
            any_calls = True
            yield from (self._delimited() if calls.open else self.calls_from(reader.at))
        if match is not None and match.kind == "closed" and not (yield from reader.skip_all(calls.section_close)):
            reader.at = match.stop
        output.end_text()
        if not any_calls:
            call = output.start_call(start)
            call.fail(CallStatus.MALFORMED, "no call follows the opening of calls")
            if match is None or match.kind != "closed":
                self._end_early(call, match, "")
            call.finish(reader.at)
        # A call that is cut off inside JSON which nothing closes goes on in any text.
        cut_off = bool(output.calls) and output.calls[-1].status is CallStatus.TRUNCATED and not calls.finish
        if match is None and (any(map(unforgeable, calls.section_close)) or (opened and not cut_off)):
            output.missing.append(calls.grammar.section_close)

    def _past_separator(self) -> Reading[int]:
        reader, separator = self.reader, self.calls.separator.strip()
        at = yield from reader.past_space()
        if separator and (yield from reader.sees(separator, at)):
            at = yield from reader.past_space(at + len(separator))
        return at

    def bare(self) -> Reading[bool]:
        """Calls without delimiters, if one begins here; True if so. Otherwise goes nowhere."""
        calls, reader, output = self.calls, self.reader, self.output
        start = reader.at
        at = yield from reader.past_space()
        if calls.section_open:
            past = yield from reader.sees_all(calls.section_open, at)
            if past is None:
                return False
            at = yield from reader.past_space(past)
        any_calls = False
        while True:
            reader.at = at
            space = None if any_calls or calls.section_open else (start, at)
            call = OpenCall(output, len(output.calls), at, space=space)
            if not (yield from self._bare_call(call)):
                reader.at = start
                return any_calls
            call.finish(reader.at)
            any_calls, start = True, reader.at
            if calls.section_close and (yield from reader.skip_all(calls.section_close)):
                return True
            at = yield from self._past_separator()

    def _bare_call(self, call: OpenCall) -> Reading[bool]:
        if self.style is not Style.PYTHON:
            if not (yield from self.reader.sees(b"{")) or not (yield from self.json.bare_call(call)):
                return False
            yield from self._to_its_end(call)
        elif (yield from self._bracketed.begins(self.reader.at)):
            call.announce()
            yield from self._bracketed.call(call)
        return call.announced

    def _delimited(self, *, outside: bool = False) -> Reading[None]:
        calls, reader = self.calls, self.reader
        start = reader.at if self.header is None else self.header
        self.header = None
        if not (yield from reader.skip_all(calls.open)):
            reader.at += len(calls.open[0])
        misplaced = f"the call is outside of {calls.grammar.section_open.strip()!r}" if outside else ""
        yield from self.calls_from(start, misplaced)

    def calls_from(self, start: int, misplaced: str = "") -> Reading[None]:
        """One call after the other, until their closing or what ends them early."""
        again = True
        while again:
            call = self.output.start_call(start, closing=self.calls.grammar.end)
            yield from self._body(call)
            again = yield from self._end(call)
            if misplaced:
                call.fail(CallStatus.MALFORMED, misplaced, lenient=True)
            call.finish(self.reader.at)
            if again:
                self.reader.at = start = yield from self._past_separator()

    def _body(self, call: OpenCall) -> Reading[None]:
        if self.style is Style.JSON_CALL:
            yield from self.json.call(call)
        elif self.style is Style.PYTHON:
            yield from self._bracketed.call(call)
        elif not (yield from self._head(call)):
            call.ragged = True
        elif self.style is Style.JSON_ARGUMENTS:
            yield from self.json.arguments(call)
        elif self.style is Style.BRACES:
            yield from self._bracketed.arguments(call)
        elif self.style is Style.PAIRS:
            yield from self._pairs.read(call)
        else:
            yield from self._bracketed.tree(call)

    def _head(self, call: OpenCall) -> Reading[bool]:
        """The fields before the arguments, reported together; True if the arguments follow."""
        calls, reader = self.calls, self.reader
        fields: dict[str, str] = {}
        problem = ""
        for (lead, field), following in zip(calls.head, calls.after_field, strict=True):
            if not (yield from reader.skip_all(lead)):
                problem = "the call does not begin as calls do"
                call.closing = call.closing if "name" in fields else trailing(calls.grammar.open)
                break
            start = reader.at
            match = yield from reader.find(following)
            fields[field] = reader.text(start, reader.at).strip() if match is not None else ""  # else more may follow
            if field == "id" and calls.grammar.id_is_name and (named := _NAME_IN_ID.fullmatch(fields["id"])):
                fields["name"] = named[1]
            if match is None or match.kind == "hard" or (match.kind == "end" and calls.begin):
                problem = "the call breaks off before its arguments"
                end = calls.grammar.end
                call.closing = end if end[:1].isspace() else trailing(calls.grammar.begin) + end
                break
        call.set_name(fields.get("name"), fields.get("id"))
        if not problem and not (yield from reader.skip_all(calls.begin)):
            problem = "something else follows where the arguments should begin"
        if problem:
            call.fail(CallStatus.MALFORMED, problem)
        return not problem

    def _end(self, call: OpenCall) -> Reading[bool]:
        """The end of a call. True if another follows in the same delimiters."""
        calls, reader = self.calls, self.reader
        if not calls.finish:
            yield from self._to_its_end(call)
            return False
        if (yield from reader.skip_all(calls.finish)):
            return False
        ended, lacks_end = False, f"{calls.grammar.end.strip()!r} is missing"
        if calls.end and calls.close:
            if (yield from reader.skip_all(calls.close)):
                call.fail(CallStatus.UNCLOSED, lacks_end, lenient=True)
                return False
            ended = yield from reader.skip_all(calls.end)
            call.closing = "" if ended else call.closing
        json_call = self.style is Style.JSON_CALL
        at = (yield from self._past_separator()) if json_call and calls.inner else reader.at
        if calls.inner and (yield from reader.sees_all((b"{",) if json_call else calls.head[0][0], at)) is not None:
            if calls.end and not ended:
                call.fail(CallStatus.UNCLOSED, lacks_end, lenient=True)
            return True
        in_json = self.style in (Style.JSON_CALL, Style.JSON_ARGUMENTS)
        complete = not call.ragged and not call.problems and (in_json or ended)
        if calls.another and (yield from reader.sees_all(calls.another)) is not None:
            call.fail(CallStatus.UNCLOSED, "the call is not closed", lenient=complete)
            return False
        at = yield from reader.past_space()
        match = yield from reader.find(calls.to_close)
        if match is None or match.kind != "close":
            self._end_early(call, match, call.closing + calls.grammar.close, complete=complete and reader.at == at)
            return False
        if match.start > at:
            status = CallStatus.INVALID_JSON if in_json else CallStatus.MALFORMED
            call.fail(status, "there is something else before its closing")
        if not (yield from reader.skip_all(calls.close)):
            reader.at = match.stop
        return False

    def _to_its_end(self, call: OpenCall) -> Reading[None]:
        """End a call without a closing; if it is broken, at what ends calls early."""
        if call.ragged:
            self._end_early(call, (yield from self.reader.find(self.calls.hard)), "")

    def _end_early(self, call: OpenCall, match: Match | None, missing: str, *, complete: bool = False) -> None:
        """End a call before its closing. `complete`: only `missing` is missing."""
        if match is None:
            call.fail(CallStatus.TRUNCATED, "the completion ends inside the call", lenient=complete)
            self.output.missing.append(missing)
        elif self.calls.finish:
            call.fail(CallStatus.UNCLOSED, "the call is not closed", lenient=complete)
        if match is None or match.kind == "stop":
            self.output.open = PartKind.TOOL_CALL
