"""Reading tool calls, in whatever way a grammar writes them.

A call begins at its opening delimiter and is an attempt from then on, whatever comes: it gets a status, and its text is
never lost. A call is ended early by control tokens (a stop token, the opening of another call, the end of the section),
which no text can spell; other delimiters end it only where the grammar expects them.
"""

from __future__ import annotations

from ..formats.grammar import Style
from .bracketed import BracketReader
from .compiled import Compiled, CompiledCalls
from .jsonreading import JsonReader
from .marked import unforgeable
from .output import Attempt, Output
from .pairs import PairReader
from .reader import Found, Reader, Reading
from .response import CallStatus, PartKind


class CallParser:
    """Reads calls: `read` where a section or a call opens, `bare` where a call without delimiters may."""

    def __init__(self, compiled: Compiled, calls: CompiledCalls, reader: Reader, output: Output) -> None:
        self.calls = calls
        self.style = calls.grammar.style
        self.reader = reader
        self.output = output
        self._stops = list(compiled.stops)
        self._json = JsonReader(calls, reader, output)
        self._pairs = PairReader(calls, reader, output)
        self._bracketed = BracketReader(calls, reader, output)
        self.misplaced = ""
        """Why calls that begin now cannot stand where they do."""
        self.introduced: int | None = None
        """Where the next call begins, if that is before its own delimiter: with the header of its message."""

    # -- sections

    def read(self) -> Reading[None]:
        """The calls that begin here, up to where content goes on, or to a stop token."""
        calls, reader = self.calls, self.reader
        if calls.section_open and (yield from reader.sees(calls.section_open[0])):
            yield from self._section()
            return
        if calls.named_section:
            self.misplaced = self.misplaced or f"the call stands outside of {calls.grammar.section_open.strip()!r}"
        while True:
            yield from self._delimited()
            if (yield from self._opens_again()):
                reader.at += len(calls.separator)
                continue
            if calls.after and (yield from self._ends_after(calls.after)):
                reader.at += len(calls.after)
            return

    def _opens_again(self) -> Reading[bool]:
        """Whether another call follows, after what the grammar writes between two."""
        calls, reader = self.calls, self.reader
        if not (yield from reader.sees(calls.separator + calls.open[0])):
            return False
        return (yield from reader.sees_all(calls.open, reader.at + len(calls.separator))) is not None

    def _ends_after(self, pad: bytes) -> Reading[bool]:
        """Whether only white space that the grammar writes comes before the end."""
        reader = self.reader
        if (yield from reader.sees_any(pad + stop for stop in self._stops)):
            return True
        return reader.ended and reader.data.startswith(pad, reader.at) and reader.at + len(pad) == len(reader.data)

    def _section(self) -> Reading[None]:
        """A section: calls, white space, and text that is content all the same. Without a call it is an attempt."""
        calls, reader, output = self.calls, self.reader, self.output
        begun, found_any = reader.at, False
        opened = yield from reader.skip_all(calls.section_open)
        reader.at += 0 if opened else len(calls.section_open[0])
        while True:
            at = yield from self._past_separator()
            if self.style is Style.PYTHON and not calls.open and (yield from self._bracketed.begins(at)):
                reader.at, found_any = at, True
                yield from self._attempts(at)
                continue
            found = yield from self._mark_at(at)
            text = reader.at if found is None else at
            if found is not None:
                reader.at = at
            else:
                found = yield from reader.find(calls.in_section, output.content if found_any else None)
            if found is None or found.kind in ("stop", "reopened"):
                break
            if found.kind == "closed":
                if not (yield from reader.skip_all(calls.section_close)):
                    reader.at = found.stop
                break
            if not found_any:
                output.content(text, reader.at)
            found_any = True
            yield from (self._delimited() if calls.open else self._attempts(reader.at))
        output.end_text()
        if not found_any:
            attempt = output.start_call(begun)
            attempt.fail(CallStatus.MALFORMED, "no call follows the opening of calls")
            if found is None or found.kind != "closed":
                self._broken_off(attempt, found, "")
            output.finish_call(attempt, reader.at)
        if found is None and (any(map(unforgeable, calls.section_close)) or (opened and not self._inside_json())):
            output.missing.append(calls.grammar.section_close)

    def _inside_json(self) -> bool:
        """Whether the last call ends inside JSON that nothing closes: what text comes next would be more of it."""
        cut_off = self.output.calls[-1:] and self.output.calls[-1].status is CallStatus.TRUNCATED
        return bool(cut_off) and not self.calls.finish

    def _past_separator(self) -> Reading[int]:
        reader, separator = self.reader, self.calls.separator.strip()
        at = yield from reader.past_space()
        if separator and (yield from reader.sees(separator, at)):
            at = yield from reader.past_space(at + len(separator))
        return at

    def _mark_at(self, at: int) -> Reading[Found | None]:
        marks, data = self.calls.in_section, self.reader.data
        while not self.reader.ended and (at == len(data) or marks.begins(data, at)):
            yield
        match = marks.pattern.match(data, at) if marks.pattern is not None else None
        return Found(marks.kinds[match[0]], at, at, match.end()) if match else None

    def without_opening(self) -> Reading[None]:
        """Calls that begin with their head, where the delimiter before it is missing."""
        self.misplaced = f"{self.calls.grammar.open.strip()!r} is missing before the call"
        yield from self._attempts(self.reader.at)

    # -- calls without delimiters

    def skip_value(self) -> Reading[None]:
        """Go past a JSON value, or to where it cannot be one any more."""
        start = self.reader.at
        yield from self._json.value()
        self.reader.at = max(self.reader.at, start + 1)

    def bare(self, introduced: int | None = None) -> Reading[bool]:
        """Calls without delimiters, if one begins here. Goes nowhere if none does.

        `introduced` is where a control token stands that belongs to the first of them.
        """
        calls, reader, output = self.calls, self.reader, self.output
        start = reader.at
        at = yield from reader.past_space()
        if calls.section_open:
            past = yield from reader.sees_all(calls.section_open, at)
            if past is None:
                return False
            at = yield from reader.past_space(past)
        found = False
        while True:
            reader.at = at
            space = None if found or calls.section_open else (start, at)
            attempt = Attempt(len(output.calls), at if introduced is None or found else introduced, space=space)
            attempt.misplaced = self.misplaced
            if not (yield from self._bare_call(attempt)):
                reader.at = start
                return found
            output.finish_call(attempt, reader.at)
            found, start = True, reader.at
            if calls.section_close and (yield from reader.skip_all(calls.section_close)):
                return True
            at = yield from self._past_separator()

    def _bare_call(self, attempt: Attempt) -> Reading[bool]:
        if self.style is Style.PYTHON:
            if not (yield from self._bracketed.begins(self.reader.at)):
                return False
            self.output.announce(attempt)
            yield from self._bracketed.call(attempt)
            return True
        if not (yield from self.reader.sees(b"{")) or not (yield from self._json.bare_call(attempt)):
            return False
        yield from self._to_its_end(attempt)
        return True

    # -- attempts

    def _delimited(self) -> Reading[None]:
        """What stands between the opening and the closing of a call: one, or several where the grammar allows it."""
        calls, reader = self.calls, self.reader
        start = reader.at if self.introduced is None else self.introduced
        self.introduced = None
        if not (yield from reader.skip_all(calls.open)):
            reader.at += len(calls.open[0])
        yield from self._attempts(start)

    def _attempts(self, start: int) -> Reading[None]:
        """One call after the other, until the closing delimiter or what ends calls early."""
        reader, output = self.reader, self.output
        again = True
        while again:
            attempt = output.start_call(start)
            attempt.misplaced, attempt.missing = self.misplaced, self.calls.grammar.end
            yield from self._body(attempt)
            again = yield from self._closing(attempt)
            output.finish_call(attempt, reader.at)
            if again:
                reader.at = start = yield from self._past_separator()

    def _body(self, attempt: Attempt) -> Reading[None]:
        if self.style is Style.JSON_CALL:
            yield from self._json.call(attempt)
        elif self.style is Style.PYTHON:
            yield from self._bracketed.call(attempt)
        elif not (yield from self._head(attempt)):
            attempt.ragged = True
        elif self.style is Style.JSON_ARGUMENTS:
            yield from self._json.arguments(attempt)
        elif self.style is Style.BRACES:
            yield from self._bracketed.arguments(attempt)
        elif self.style is Style.PAIRS:
            yield from self._pairs.pairs(attempt)
        else:
            yield from self._pairs.tree(attempt)

    def _head(self, attempt: Attempt) -> Reading[bool]:
        """The fields before the arguments, reported together; whether it got to the arguments."""
        calls, reader, output = self.calls, self.reader, self.output
        name: str | None = None
        call_id: str | None = None
        problem = ""
        for (lead, field), marks in zip(calls.head, calls.after_field, strict=True):
            if not (yield from reader.skip_all(lead)):
                problem = "the call does not begin as calls do"
                attempt.missing = _trailing_space(calls.grammar.open) if name is None else attempt.missing
                break
            start = reader.at
            found = yield from reader.find(marks)
            text = output.text(start, reader.at).strip()
            if found is None:
                text = ""  # there may be more of it
            if field == "name":
                name = text
            elif field == "id":
                call_id = text
                name = calls.name_in_id(text) or name
            if found is None or found.kind == "hard" or (found.kind == "end" and calls.begin):
                problem = "the call breaks off before its arguments"
                end = calls.grammar.end
                attempt.missing = end if end[:1].isspace() else _trailing_space(calls.grammar.begin) + end
                break
        output.name_call(attempt, name, call_id)
        if problem:
            attempt.fail(CallStatus.MALFORMED, problem)
            return False
        if not (yield from reader.skip_all(calls.begin)):
            attempt.fail(CallStatus.MALFORMED, "something else stands where the arguments should begin")
            return False
        return True

    def _closing(self, attempt: Attempt) -> Reading[bool]:
        """The end of a call: its closing delimiter, or what ended it early. Whether another follows in the same."""
        calls, reader = self.calls, self.reader
        if not calls.finish:
            yield from self._to_its_end(attempt)
            return False
        if (yield from reader.skip_all(calls.finish)):
            return False
        ended = False
        if calls.end and calls.close:
            if (yield from reader.skip_all(calls.close)):
                self._missing(attempt, calls.grammar.end)
                return False
            ended = yield from reader.skip_all(calls.end)
            attempt.missing = "" if ended else attempt.missing
        if calls.inner and (yield from self._again()):
            if calls.end and not ended:
                self._missing(attempt, calls.grammar.end)
            return True
        if self.output.loose and (yield from self._is_whole(attempt, ended)):
            return False
        if calls.another and (yield from reader.sees_all(calls.another)) is not None:
            attempt.fail(CallStatus.UNCLOSED, "the call is not closed")
            return False
        at = yield from reader.past_space()
        found = yield from reader.find(calls.to_close)
        if found is None or found.kind != "close":
            self._broken_off(attempt, found, attempt.missing + calls.grammar.close)
            return False
        if found.start > at:
            json_style = self.style in (Style.JSON_CALL, Style.JSON_ARGUMENTS)
            status = CallStatus.INVALID_JSON if json_style else CallStatus.MALFORMED
            attempt.fail(status, "there is something else before its closing")
        if not (yield from reader.skip_all(calls.close)):
            reader.at = found.stop
        return False

    def _missing(self, attempt: Attempt, piece: str) -> None:
        if not self.output.loose:
            attempt.fail(CallStatus.UNCLOSED, f"{piece.strip()!r} is missing")

    def _is_whole(self, attempt: Attempt, ended: bool) -> Reading[bool]:
        """Whether nothing but its closing is missing from a call: servers do without, after JSON only at the end."""
        if attempt.ragged or attempt.problems:
            return False
        if self.style not in (Style.JSON_CALL, Style.JSON_ARGUMENTS):
            return ended
        at = yield from self.reader.past_space()
        return at == len(self.reader.data) or (yield from self.reader.sees_any(self._stops, at))

    def _to_its_end(self, attempt: Attempt) -> Reading[None]:
        """A call without a closing ends where its JSON does; if that is broken, at what ends calls early."""
        if attempt.ragged:
            self._broken_off(attempt, (yield from self.reader.find(self.calls.hard)), "")

    def _broken_off(self, attempt: Attempt, found: Found | None, missing: str) -> None:
        """A call ends early; `missing` would have closed it."""
        if found is None:
            attempt.fail(CallStatus.TRUNCATED, "the completion ends inside the call")
            self.output.missing.append(missing)
        elif self.calls.finish:
            attempt.fail(CallStatus.UNCLOSED, "the call is not closed")
        if found is None or found.kind == "stop":
            self.output.open = PartKind.TOOL_CALL

    def _again(self) -> Reading[bool]:
        """Whether another call begins inside the same delimiters."""
        if self.style is Style.JSON_CALL:
            at = yield from self._past_separator()
            return (yield from self.reader.sees(b"{", at))
        return (yield from self.reader.sees_all(self.calls.head[0][0])) is not None


def _trailing_space(text: str) -> str:
    return text[len(text.rstrip()) :]
