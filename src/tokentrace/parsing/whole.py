"""A completion that has arrived in full and is written as its template writes turns: read in one go.

Nearly all completions are. What is read here is what `parsing.parser` would come to, with nothing in the way that
serves streams: no steps that wait, no events. Whatever is not as the grammar has it (a call that is broken, of no tool,
or out of place, a delimiter that is missing, text that is no UTF-8) is `OddTurnError`, and the parser reads it.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Any, Final

from ..formats.grammar import Style, Value
from .compiled import Compiled, CompiledCalls
from .marked import Starts, unforgeable
from .output import without_surrogates
from .pairs import SPACES, is_text, read_typed, value_marks
from .response import CallStatus, Finish, ParsedPart, ParsedResponse, ParsedToolCall, PartKind, TokenRange
from .values import Tools, read_object

_SPACES: Final = re.compile(rb"\s*")
_CLOSING: Final = re.compile(rb"[ \t\n\r]*\}")


class OddTurnError(Exception):
    """The completion is not written as the template writes turns."""


class WholeReader:
    """Reads one completion: `data` is the beginning of the turn that the prompt wrote, and from `base` on the tokens.

    `starts` are the places where tokens begin.
    """

    def __init__(self, compiled: Compiled, data: bytes, starts: Starts, base: int, tools: Tools) -> None:
        self.compiled = compiled
        self.data = data
        self.starts = starts
        self.base = base
        self.tools = tools
        self.at = 0
        self.parts: list[ParsedPart] = []
        self.calls: list[ParsedToolCall] = []
        self._said = 0
        """Where the last part ends."""

    def read(self, *, prompted: bool) -> ParsedResponse:
        """What `StreamingParser.response` would be; `OddTurnError` where that takes the parser."""
        compiled, data = self.compiled, self.data
        if compiled.grammar.channels is not None or not len(self.starts):
            raise OddTurnError
        self._skip(compiled.head_trail)
        thought = self._reasoning(prompted)
        said: list[str] = []
        while True:
            begun, match = self.at, _search(compiled.in_content.pattern, data, self.at)
            if match is None:
                said.append(self._part(PartKind.CONTENT, begun, len(data)))
                break
            kind = compiled.in_content.kinds[match[0]]
            said.append(
                self._part(PartKind.CONTENT, begun, self._end(match, compiled.in_content.pads.get(kind), begun))
            )
            self.at = match.start()
            if kind == "stop":
                break
            if kind != "call" or compiled.calls is None or match[0] in compiled.stops or self.at < self.base:
                raise OddTurnError
            self._read_calls(compiled.calls)
        self._check_readings()
        count = len(self.starts)
        stop = self._span(match.start(), match.end()).stop if match is not None else count
        return ParsedResponse(
            "".join(said),
            thought,
            self.calls,
            Finish.STOP if match is not None else Finish.LENGTH,
            compiled.stops[match[0]] if match is not None else None,
            None,
            self.parts,
            TokenRange(stop, count) if stop < count else None,
        )

    def _check_readings(self) -> None:
        """Nothing but these calls begins as servers let calls begin, nor as calls without delimiters do."""
        calls, data = self.compiled.calls, self.data
        if calls is None:
            others = self.compiled.other_dialects if self.tools.given else ()
            if any(opener in data for other in others if other.calls is not None for opener in other.calls.openers):
                raise OddTurnError
        elif data.count(calls.loose_opener) != len(self.calls) if calls.loose_opener else calls.bare:
            raise OddTurnError

    # -- text

    def _text(self, start: int, stop: int) -> str:
        try:
            return self.compiled.marked.visible(self.data[start:stop]).decode()
        except UnicodeDecodeError:
            raise OddTurnError from None

    def _part(self, kind: PartKind, start: int, stop: int) -> str:
        """A stretch of reasoning or content, unless there is none."""
        start = max(start, self.base)
        if stop <= start:
            return ""
        text = self._text(start, stop)
        self.parts.append(ParsedPart(kind, text, self._span(start, stop)))
        self._said = stop
        return text

    def _span(self, start: int, stop: int) -> TokenRange:
        return TokenRange(bisect_right(self.starts, start) - 1, bisect_left(self.starts, stop))

    def _end(self, match: re.Match[bytes], pad: bytes | None, begun: int) -> int:
        """Where the text before a mark ends: white space that belongs to the mark is left out."""
        end = match.start()
        return end - len(pad) if pad and self.data.endswith(pad, begun, end) else end

    # -- delimiters

    def _skip(self, pad: bytes) -> bool:
        there = bool(pad) and self.data.startswith(pad, self.at)
        self.at += len(pad) if there else 0
        return there

    def _space(self, at: int) -> int:
        match = _SPACES.match(self.data, at)
        return at if match is None else match.end()

    def _past(self, pieces: Iterable[bytes], at: int) -> int | None:
        """Where a delimiter that stands at a position ends, white space within it being free; None if it does not."""
        for piece in pieces:
            if not self.data.startswith(piece, at):
                at = self._space(at)
                if not self.data.startswith(piece, at):
                    return None
            at += len(piece)
        return at

    def _take(self, pieces: Iterable[bytes]) -> None:
        """Go past a delimiter that has to stand here."""
        past = self._past(pieces, self.at)
        if past is None:
            raise OddTurnError
        self.at = past

    # -- reasoning

    def _reasoning(self, prompted: bool) -> str | None:
        """What stands before content."""
        compiled, data = self.compiled, self.data
        frame = compiled.reasoning
        thought: str | None = None
        if frame is not None:
            at = self._space(self.at)
            if frame.open and data.startswith(frame.open, at):
                stop = at + len(frame.open)
                if at > max(self.at, self.base) or (stop <= self.base and not prompted):
                    raise OddTurnError
                self.at = stop
                self._skip(frame.lead)
                begun, match = self.at, _search(compiled.in_reasoning.pattern, data, self.at)
                if match is None or compiled.in_reasoning.kinds[match[0]] != "close":
                    raise OddTurnError
                end = self._end(match, frame.trail, begun)
                thought = self._part(PartKind.REASONING, begun, end) or None
                self.at = match.end()
                self._skip(compiled.after_empty if end == begun else frame.after)
            elif data.startswith(frame.close, at):
                if at > max(self.at, self.base):
                    raise OddTurnError
                self.at = at + len(frame.close)
                self._skip(compiled.after_empty)
        if self._skip(compiled.content.open):
            self._skip(compiled.content.lead)
        return thought

    # -- calls

    def _read_calls(self, calls: CompiledCalls) -> None:
        """The calls that begin here, up to where content goes on."""
        if not calls.finish:
            raise OddTurnError
        if calls.section_open:
            self._section(calls)
            return
        while True:
            self._call(calls)
            again = self.at + len(calls.separator)
            if not self.data.startswith(calls.separator + calls.open[0], self.at) or not self._past(calls.open, again):
                break
            self.at = again
        if calls.after and self.data.startswith(calls.after, self.at):
            past = self.at + len(calls.after)
            if past == len(self.data) or any(self.data.startswith(stop, past) for stop in self.compiled.stops):
                self.at = past

    def _section(self, calls: CompiledCalls) -> None:
        self._take(calls.section_open)
        separator, marks, count = calls.separator.strip(), calls.in_section, len(self.calls)
        while True:
            at = self._space(self.at)
            if separator and self.data.startswith(separator, at):
                at = self._space(at + len(separator))
            self.at = at
            match = marks.pattern.match(self.data, at) if marks.pattern is not None else None
            kind = marks.kinds[match[0]] if match is not None else ""
            if kind == "open":
                self._call(calls)
            elif kind == "closed" and len(self.calls) > count:
                self._take(calls.section_close)
                return
            else:
                raise OddTurnError

    def _call(self, calls: CompiledCalls) -> None:
        """One call, from its opening to its closing."""
        start, style = self.at, calls.grammar.style
        self._take(calls.open)
        raw: dict[str, str] = {}
        own: str | None = None
        if style is Style.JSON_CALL:
            name, arguments, text = self._json_call(calls)
        elif style is Style.JSON_ARGUMENTS:
            name, own = self._head(calls)
            arguments, text = self._object(self._space(self.at))
        elif style is Style.PAIRS:
            name, own = self._head(calls)
            arguments, text = self._pairs(calls, name, raw)
        else:
            raise OddTurnError
        self._take(calls.finish)
        if not name or not self.tools.knows(name):
            raise OddTurnError
        index, written, span = len(self.calls), self._text(start, self.at), self._span(start, self.at)
        self.calls.append(
            ParsedToolCall(index, name, arguments, text, own or None, CallStatus.OK, "", written, raw, span)
        )
        between = self._text(self._said, start) if self.base <= self._said <= start else ""
        lead = between if between.isspace() else ""
        self.parts.append(ParsedPart(PartKind.TOOL_CALL, written, span, index, lead))
        self._said = self.at

    def _json_call(self, calls: CompiledCalls) -> tuple[str, dict[str, Any], str]:
        """One object that holds name and arguments, in this order, and nothing else."""
        head = calls.json_head.match(self.data, self.at) if calls.json_head is not None else None
        if head is None:
            raise OddTurnError
        found, text = self._object(head.end())
        closing = _CLOSING.match(self.data, self.at)
        if closing is None:
            raise OddTurnError
        self.at = closing.end()
        return head[1].decode(), found, text

    def _object(self, start: int) -> tuple[dict[str, Any], str]:
        """The JSON object that stands at a position, and its text; goes past it."""
        if not self.data.startswith(b"{", start):
            raise OddTurnError
        end = self.data.find(b"\xff", start)
        try:
            text = self.data[start : end if end >= 0 else None].decode()
            found, length = read_object(text)
        except ValueError:
            raise OddTurnError from None
        text = text[:length]
        self.at = start + (length if text.isascii() else len(text.encode()))
        return found, text

    def _head(self, calls: CompiledCalls) -> tuple[str, str | None]:
        """The fields before the arguments."""
        name, own = "", None
        for (lead, field), marks in zip(calls.head, calls.after_field, strict=True):
            self._take(lead)
            match = _search(marks.pattern, self.data, self.at)
            if match is None or marks.kinds[match[0]] != "next":
                raise OddTurnError
            text = self._text(self.at, match.start()).strip()
            if field == "name":
                name = text
            elif field == "id":
                own, name = text, calls.name_in_id(text) or name
            self.at = match.start()
        self._take(calls.begin)
        return name, own

    def _pairs(self, calls: CompiledCalls, name: str, raw: dict[str, str]) -> tuple[dict[str, Any], str]:
        """Arguments between tags, up to the end of the call."""
        data, values, said = self.data, dict[str, Any](), list[str]()
        marks = value_marks(calls, self.tools.declared(name))
        while (past := self._past(calls.key_open, self.at)) is not None:
            match = _search(calls.to_value.pattern, data, past)
            if match is None or calls.to_value.kinds[match[0]] != "value":
                raise OddTurnError
            key = self._text(past, match.start()).strip(SPACES)
            self.at = match.start()
            is_string = self._open_value(calls)
            schema = self.tools.parameter(name, key)
            start, match = self.at, _search(marks.pattern, data, self.at)
            if key in values or match is None or marks.kinds[match[0]] != "value":
                raise OddTurnError
            text = self._text(start, self._end(match, marks.pads.get("value"), start))
            if is_text(calls.grammar, is_string, schema):
                values[key] = text
            else:
                quoted = calls.grammar.strings is Value.JSON and data[start : start + 1] == b'"'
                values[key], sure = read_typed(calls.grammar, text, schema, as_json=quoted or is_string is False)
                if not sure:
                    raise OddTurnError
            raw[key] = text
            said.append(f"{json.dumps(key, ensure_ascii=False)}: {json.dumps(values[key], ensure_ascii=False)}")
            self.at = match.start()
            self._take(calls.value_close)
            if not unforgeable(calls.value_close[0]) and not self._is_followed(calls):
                raise OddTurnError
        return values, without_surrogates(f"{{{', '.join(said)}}}")

    def _open_value(self, calls: CompiledCalls) -> bool | None:
        """Go past what opens a value; whether that says that it is a string."""
        for pieces, lead, is_string in calls.value_opens:
            past = self._past(pieces, self.at)
            if past is not None:
                self.at = past
                self._skip(lead)
                return is_string
        raise OddTurnError

    def _is_followed(self, calls: CompiledCalls) -> bool:
        """Whether what comes after a value is what may come after one: else it is a part of the value."""
        at = self._space(self.at)
        return any(self._past(some, at) is not None for some in calls.after_value)


def _search(pattern: re.Pattern[bytes] | None, data: bytes, at: int) -> re.Match[bytes] | None:
    return None if pattern is None else pattern.search(data, at)
