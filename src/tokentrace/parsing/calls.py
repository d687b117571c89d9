"""Reading tool calls, in whatever way a grammar writes them.

What opens like a call is one, whatever follows. Control tokens, which no text can spell, end it
early; other delimiters only where the grammar expects them.

Attempts are well-formed calls outside their place: in reasoning that is never closed, without
their opening, after text, or in any dialect if the template shows no calls.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

from ..formats.grammar import Style
from ..study.reading import trailing
from .arguments import ArgumentsReader
from .compiled import Compiled, CompiledCalls
from .marked import unforgeable
from .output import OpenCall, Output, Placed
from .reader import Match, Reader, Reading
from .response import CallStatus, ParsedPart, PartKind

_NAME_IN_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)
_INTRODUCTION = rb"(?:\xff[\x80-\xbf]{4}\s*)?"
"""A control token before a call without delimiters: ``<|python_tag|>``."""


class CallParser(ArgumentsReader):
    """Reads calls that open here (`read`), or that have no delimiters (`bare`)."""

    def read(self, start: int | None = None) -> Reading[None]:
        """Read the calls that begin here, the first with the header at `start`, if any."""
        calls, reader = self.calls, self.reader
        if calls.section_open and (yield from reader.sees(calls.section_open[0])):
            yield from self._section()
            return
        again = True
        while again:
            yield from self._delimited(start, outside=calls.named_section)
            start, at, opens = None, reader.at + len(calls.separator), calls.separator + calls.open[0]
            again = (yield from reader.sees(opens)) and (
                yield from reader.sees_all(calls.open, at)
            ) is not None
            reader.at = at if again else reader.at
        for stop in calls.stops if calls.after else ():
            # white space that the grammar writes before the end
            if (yield from reader.sees(calls.after + stop)):
                reader.at += len(calls.after)
                return
        if reader.ended and reader.data[reader.at :] == calls.after:
            reader.at = len(reader.data)

    def _section(self) -> Reading[None]:
        """Read a section of calls, with text as content. Without a call, it is malformed."""
        calls, reader, output = self.calls, self.reader, self.output
        start, any_calls = reader.at, False
        opened = yield from reader.skip_all(calls.section_open)
        reader.at += 0 if opened else len(calls.section_open[0])
        while True:
            at = yield from self._past_separator()
            if calls.style is Style.PYTHON and not calls.open and (yield from self.python_begins(at)):
                reader.at, any_calls = at, True
                yield from self.calls_from(at)
                continue
            text, reader.at = reader.at, at
            match = yield from reader.find(calls.in_section)
            if reader.at > at and (any_calls or (match and match.kind == "open")):
                output.content(text, reader.at)
            if not match or match.kind != "open":
                break
            any_calls = True
            yield from (self._delimited() if calls.open else self.calls_from(reader.at))
        if match and match.kind == "closed" and not (yield from reader.skip_all(calls.section_close)):
            reader.at = match.stop
        output.end_text()
        if not any_calls:
            call = output.start_call(start)
            call.fail("no call follows the opening of calls")
            if not match or match.kind != "closed":
                self._end_early(call, match, "")
            call.finish(reader.at)
        # If a call is cut off inside JSON that no delimiter closes, any text would continue it.
        cut_off = (
            bool(output.calls) and output.calls[-1].status is CallStatus.TRUNCATED and not calls.finish
        )
        if match is None and (any(map(unforgeable, calls.section_close)) or (opened and not cut_off)):
            output.missing.append(calls.grammar.section_close)

    def _past_separator(self) -> Reading[int]:
        reader, separator = self.reader, self.calls.separator.strip()
        at = yield from reader.past_space()
        if separator and (yield from reader.sees(separator, at)):
            at = yield from reader.past_space(at + len(separator))
        return at

    def bare(self) -> Reading[bool]:
        """Read calls without delimiters; True if one begins here. Else stay here."""
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
            space = (at, at) if any_calls or calls.section_open else (start, at)
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
        if self.calls.style is not Style.PYTHON:
            if not (yield from self.reader.sees(b"{")) or not (yield from self.json_call(call)):
                return False
            yield from self._to_its_end(call)
        elif (yield from self.python_begins(self.reader.at)):
            call.announce()
            yield from self.python_call(call)
        return call.announced

    def attempt(self) -> Reading[None]:
        """Read calls that begin here, outside their place."""
        calls, reader = self.calls, self.reader
        if calls.bare:
            if not (yield from self.bare()):
                yield from self.json_value()  # nothing inside other JSON is a call
        elif calls.headless_opener and (yield from reader.sees(calls.headless_opener)):
            yield from self.calls_from(reader.at)
        else:
            yield from self.read()

    def _delimited(self, start: int | None = None, *, outside: bool = False) -> Reading[None]:
        calls, reader = self.calls, self.reader
        start = reader.at if start is None else start
        if not (yield from reader.skip_all(calls.open)):
            reader.at += len(calls.open[0])
        misplaced = f"the call is outside of {calls.grammar.section_open.strip()!r}" if outside else ""
        yield from self.calls_from(start, misplaced)

    def calls_from(self, start: int, misplaced: str = "") -> Reading[None]:
        """Read calls up to their closing or an early end."""
        again = True
        while again:
            call = self.output.start_call(start, closing=self.calls.grammar.end)
            yield from self._body(call)
            again = yield from self._end(call)
            if misplaced:
                call.fail(misplaced, lenient=True)
            call.finish(self.reader.at)
            if again:
                self.reader.at = start = yield from self._past_separator()

    def _body(self, call: OpenCall) -> Reading[None]:
        style, reader = self.calls.style, self.reader
        if style is Style.JSON_CALL:
            start = yield from reader.past_space()
            if (yield from reader.sees(b"{", start)):
                reader.at = start
                yield from self.json_call(call)
            else:
                call.break_off("the call is not a JSON object", CallStatus.INVALID_JSON)
        elif style is Style.PYTHON:
            yield from self.python_call(call)
        elif (yield from self._head(call)):
            readers = {Style.BRACES: self.braces, Style.PAIRS: self.pairs, Style.TREE: self.tree}
            yield from readers.get(style, self.json_arguments)(call)
        else:
            call.ragged = True

    def _head(self, call: OpenCall) -> Reading[bool]:
        """Read the fields before the arguments; True if the arguments follow."""
        calls, reader, grammar = self.calls, self.reader, self.calls.grammar
        fields, problem = dict[str, str](), ""
        for (lead, field), following in zip(calls.head, calls.after_field, strict=True):
            if not (yield from reader.skip_all(lead)):
                problem = "the call does not begin as expected"
                call.closing = call.closing if "name" in fields else trailing(grammar.open)
                break
            start = reader.at
            match = yield from reader.find(following)
            fields[field] = reader.text(start, reader.at).strip() if match is not None else ""
            if field == "id" and grammar.id_is_name and (named := _NAME_IN_ID.fullmatch(fields["id"])):
                fields["name"] = named[1]
            if not match or match.kind == "hard" or (match.kind == "end" and calls.begin):
                problem = "the call breaks off before its arguments"
                call.closing = "" if grammar.end[:1].isspace() else trailing(grammar.begin)
                call.closing += grammar.end
                break
        call.set_name(fields.get("name"), fields.get("id"))
        if not problem and not (yield from reader.skip_all(calls.begin)):
            problem = "something else follows where the arguments should begin"
        if problem:
            call.fail(problem)
        return not problem

    def _end(self, call: OpenCall) -> Reading[bool]:
        """Read the end of a call. True if another follows in the same delimiters."""
        calls, reader = self.calls, self.reader
        if not calls.finish:
            yield from self._to_its_end(call)
            return False
        if (yield from reader.skip_all(calls.finish)):
            return False
        ended, lacks_end = False, f"{calls.grammar.end.strip()!r} is missing"
        if calls.end and calls.close:
            if (yield from reader.skip_all(calls.close)):
                call.fail(lacks_end, CallStatus.UNCLOSED, lenient=True)
                return False
            ended = yield from reader.skip_all(calls.end)
            call.closing = "" if ended else call.closing
        if calls.inner and (yield from self._another_begins()):
            if calls.end and not ended:
                call.fail(lacks_end, CallStatus.UNCLOSED, lenient=True)
            return True
        in_json = calls.style in (Style.JSON_CALL, Style.JSON_ARGUMENTS)
        complete = not call.ragged and not call.problems and (in_json or ended)
        if calls.another and (yield from reader.sees_all(calls.another)) is not None:
            call.fail("the call is not closed", CallStatus.UNCLOSED, lenient=complete)
            return False
        at = yield from reader.past_space()
        match = yield from reader.find(calls.to_close)
        if not match or match.kind != "close":
            complete &= reader.at == at
            self._end_early(call, match, call.closing + calls.grammar.close, complete=complete)
            return False
        if match.start > at:
            status = CallStatus.INVALID_JSON if in_json else CallStatus.MALFORMED
            call.fail("there is other text before its closing", status)
        if not (yield from reader.skip_all(calls.close)):
            reader.at = match.stop
        return False

    def _another_begins(self) -> Reading[bool]:
        if self.calls.style is not Style.JSON_CALL:
            return (yield from self.reader.sees_all(self.calls.head[0][0])) is not None
        return (yield from self.reader.sees(b"{", (yield from self._past_separator())))

    def _to_its_end(self, call: OpenCall) -> Reading[None]:
        """End a call without a closing; a ragged one at the next token that ends calls early."""
        if call.ragged:
            self._end_early(call, (yield from self.reader.find(self.calls.hard)), "")

    def _end_early(
        self, call: OpenCall, match: Match | None, missing: str, *, complete: bool = False
    ) -> None:
        """End a call before its closing, `complete` but for what is `missing`."""
        if match is None:
            call.fail("the completion ends inside the call", CallStatus.TRUNCATED, lenient=complete)
            self.output.missing.append(missing)
        elif self.calls.finish:
            call.fail("the call is not closed", CallStatus.UNCLOSED, lenient=complete)
        if not match or match.kind == "stop":
            self.output.open = PartKind.TOOL_CALL


def find_attempts(compiled: Compiled, output: Output) -> list[Placed]:
    """A completion's attempts; in a strict reading each is MALFORMED, with the reason."""
    if compiled.grammar.channels is not None:
        return []
    if compiled.calls is not None:
        return list(_attempts(compiled.calls, output, ""))
    for name, calls in compiled.dialects.items() if output.tools.declared_any else ():
        problem = f"the template shows no tool calls; tool_parser={name!r} reads this one"
        if attempts := list(_attempts(calls, output, problem)):
            return attempts
    return []


def _attempts(calls: CompiledCalls, output: Output, problem: str) -> Iterator[Placed]:
    reader, count = Reader(output.reader.marked, ended=True), 0
    reader.base = output.base
    scratch = Output(reader, output.tools, lenient=True)
    scratch.starts = output.starts
    parser, introduction = CallParser(calls, scratch, any_key=True), _INTRODUCTION if calls.bare else b""
    for place in output.placed:
        openers, reason = _openers(calls, output, place, problem)
        if not any(output.reader.data.find(opener, place.start, place.stop) >= 0 for opener in openers):
            continue
        reader.data, at = output.reader.data[: place.stop], place.start
        pattern = re.compile(introduction + b"(" + b"|".join(map(re.escape, openers)) + b")")
        while (match := pattern.search(reader.data, at)) is not None:
            reader.at, scratch.placed, scratch.calls = match.start(1), [], []
            list(parser.attempt())  # all bytes have arrived
            at = max(reader.at, match.end())
            for part, start, stop, call in scratch.placed:
                if call is not None and call.status.runnable:
                    # the first and the last call include the section's opening and closing
                    start = match.start() if call is scratch.calls[0] else start
                    stop = reader.at if call is scratch.calls[-1] else stop
                    raw, span = reader.text(start, stop), output.span(start, stop)
                    call = replace(call, index=count, raw=raw, span=span)
                    if not output.lenient:
                        why = problem or (calls.bare and call.problem) or reason
                        call = replace(call, status=CallStatus.MALFORMED, problem=why)
                    count += 1
                    yield Placed(replace(part, lead=""), start, stop, call)


def _openers(calls: CompiledCalls, output: Output, place: Placed, problem: str) -> tuple[list[bytes], str]:
    """What attempts in a part begin with, and why they are not calls."""
    kind = place.part.kind
    if kind is PartKind.REASONING is output.open and place is output.placed[-1]:
        return calls.openers, "the call is inside reasoning that is not closed"
    openers = (
        [*(calls.openers if problem else []), calls.headless_opener] if kind is PartKind.CONTENT else []
    )
    reason = f"{calls.grammar.open.strip()!r} is missing before the call"
    if calls.bare:
        reason = "the call comes after something else, and only its position marks it as a call"
    return list(filter(None, openers)), reason


def count_attempts(output: Output, attempts: list[Placed]) -> list[Placed]:
    """The parts of a lenient reading, in which attempts count as calls."""
    placed, index, starts = list[Placed](), 0, [some.start for some in attempts]
    for one in output.placed:
        kind, start = one.part.kind, one.start
        first, last = bisect_left(starts, start), bisect_left(starts, one.stop)
        inside = attempts[first:last] if one.call is None else [one]
        for part, begin, end, call in (*inside, Placed(one.part, one.stop, one.stop)):
            if start < begin:
                text = ParsedPart(kind, output.reader.text(start, begin), output.span(start, begin))
                placed.append(Placed(text, start, begin))
            start = end
            if call is not None:
                call = replace(call, index=index, problem="" if call.ok else call.problem)
                part = replace(part, text=call.raw, span=call.span, call=index)
                placed.append(Placed(part, begin, end, call))
                index += 1
            if call is not None and one.call is None:
                output.enter(PartKind.TOOL_CALL, begin)
                output.enter(kind, end)
    return placed
