"""Reading arguments: one JSON while it arrives, or one by one between tags."""

import re
from typing import Any, Final

from ..formats.grammar import Value
from .compiled import ValueOpening
from .marked import unforgeable
from .output import ArgumentsText, CallReader, OpenCall
from .reader import Match, Notation, Reading, Report
from .response import CallStatus
from .values import Schema, read_json, read_value

_STRINGS: Final = {0x22: re.compile(b'[^"\\\\\n\r\xff]*(?:\\\\[^\xff][^"\\\\\n\r\xff]*)*')}
_JSON: Final = Notation(
    b"{[", b"}]", re.compile(rb"[^\s\w,:.+-]"), _STRINGS, re.compile(b'["\\\\\n\r\xff]'), strict=True
)
_WORD: Final = re.compile(rb"[-+.\w]*")
_SPACES: Final = " \t\r\n"
_CDATA: Final = ("<![CDATA[", "]]>")


class JsonReader(CallReader):
    def json_arguments(self, call: OpenCall) -> Reading[None]:
        reader = self.reader
        reader.at = yield from reader.past_space()
        report = ArgumentsText(call)
        if not (yield from self.json_value(report)):
            start = reader.at
            match = yield from reader.find(self.calls.to_end)
            text = reader.data[start : reader.at]
            report(start, start + len(text.rstrip() if match is not None else text))
            call.fail(CallStatus.INVALID_JSON, "the arguments are not JSON", ragged=True)
        report.done()

    def json_call(self, call: OpenCall) -> Reading[bool]:
        """An object; True if it is a call, which is announced once that is certain."""
        start, tools = self.reader.at, self.output.tools
        seen: set[str] = set()
        whole = yield from self._members(call, (), seen)
        if not call.announced:
            if whole or not self.reader.ended or not (call.name and tools.declared_any and tools.knows(call.name)):
                return False
            call.announce()
        if not whole:
            call.fail(CallStatus.INVALID_JSON, "the call is not JSON", ragged=True)
            return True
        try:
            read_json(self.reader.text(start, self.reader.at))
        except ValueError as error:
            call.fail(CallStatus.INVALID_JSON, f"the call is not JSON: {error}")
        if "arguments" not in seen and "arguments" in self.calls.paths.values():
            call.fail(CallStatus.MALFORMED, "the call has no arguments")
        return True

    def _members(self, call: OpenCall, path: tuple[str, ...], seen: set[str]) -> Reading[bool]:
        """The members of an object, with the fields of a call; True if it is whole."""
        reader = self.reader
        reader.at += 1
        while True:
            reader.at = yield from reader.past_space()
            if not path and not seen and (yield from reader.skip(b"}")):
                return True
            start = reader.at
            if not (yield from reader.sees(b'"')) or not (yield from self.json_value()):
                return False
            key = self._string(start)
            if key is None or not (yield from reader.skip_all((b":",))):
                return False
            reader.at = yield from reader.past_space()
            here = (*path, key)
            if not call.announced:
                if here[0] not in self.keys:
                    return False
                field = self.calls.fields.get(here)
                if {"name", "arguments"} <= {*seen, field} and (field == "name" or call.name is not None):
                    call.announce()
            if not (yield from self._member(call, here, seen)):
                return False
            reader.at = yield from reader.past_space()
            if (yield from reader.skip(b"}")):
                return True
            if not (yield from reader.skip(b",")):
                return False

    def _member(self, call: OpenCall, here: tuple[str, ...], seen: set[str]) -> Reading[bool]:
        reader, calls, start = self.reader, self.calls, self.reader.at
        field = calls.fields.get(here)
        if calls.grammar.named_key and len(here) == 1 and not seen:
            call.set_name(here[0])
            field = "arguments"
        elif field is not None and field in seen:
            if here in calls.paths:
                call.fail(CallStatus.MALFORMED, f"{here[-1]!r} is given twice")
            field = None
        elif field is not None and here not in calls.paths:
            call.fail(CallStatus.MALFORMED, f"its arguments are under {here[0]!r}", lenient=True)
        if field is None:
            if here in calls.inner_paths and (yield from reader.sees(b"{")):
                return (yield from self._members(call, here, seen))
            return (yield from self.json_value())
        seen.add(field)
        if field == "arguments" and not (yield from reader.sees(b'"')):
            report = ArgumentsText(call)
            whole = yield from self.json_value(report)
            report.done()
            return whole
        if not (yield from self.json_value()):
            return False
        text = self._string(start)
        if field == "arguments":
            call.add_arguments(text or "")
        elif field == "id":
            call.set_name(None, text)
        elif text is None:
            call.fail(CallStatus.MISSING_NAME, "the name is not a string")
        else:
            call.set_name(text)
        return True

    def _string(self, start: int) -> str | None:
        try:
            value: Any = read_json(self.reader.text(start, self.reader.at))
        except ValueError:
            return None
        return value if isinstance(value, str) else None

    def json_value(self, report: Report | None = None) -> Reading[bool]:
        """One JSON value; True if it is whole. Stops where it cannot be JSON."""
        reader = self.reader
        yield from reader.past_space()
        if bytes(reader.data[reader.at : reader.at + 1]) in (b"{", b"[", b'"'):
            return (yield from reader.enclosed(_JSON, self.calls.hard_ends, report))
        start = reader.at
        reader.at = at = yield from reader.past(_WORD)  # a number, or true, false, null
        if report is not None:
            report(start, at)
        return at > start


class PairReader(CallReader):
    def pairs(self, call: OpenCall) -> Reading[None]:
        more = True
        while more:
            if (yield from self.reader.skip_all(self.calls.key_open)):
                more = yield from self._pair(call)
            else:
                more = yield from self._skip_junk(call)
        call.end_values()

    def _skip_junk(self, call: OpenCall) -> Reading[bool]:
        calls, reader = self.calls, self.reader
        if (yield from reader.sees_one([one for one in (calls.finish[:1], calls.another) if one])):
            return False
        start = reader.at
        while True:
            match = yield from reader.find(calls.to_key)
            if match is None or match.kind != "key":
                reader.at = start
                return False
            if (yield from reader.sees_all(calls.key_open)) is not None:
                call.fail(CallStatus.MALFORMED, "there is something else between its arguments")
                return True
            reader.at = match.stop

    def _pair(self, call: OpenCall) -> Reading[bool]:
        calls, reader, missing = self.calls, self.reader, self.output.missing
        start = reader.at
        match = yield from reader.find(calls.to_value)
        if match is None or match.kind != "value":
            call.fail(CallStatus.MALFORMED, "an argument breaks off at its name")
            if reader.exhausted and not unforgeable(calls.value_opens[0].pieces[0]):
                missing.append(calls.grammar.value_close)  # else its name would go on in the call's closing
            return False
        key = reader.text(start, match.start).strip(_SPACES)
        opening = yield from self._open_value(call, key)
        if opening is None:
            return False
        call.add_key(key)
        start = reader.at
        match = yield from self._value(call, key, opening)
        call.raw_values[key] = reader.text(start, match.text if match is not None else reader.at)
        if match is None:
            missing.append(calls.grammar.value_close)
            return False
        if match.kind != "value":
            call.fail(CallStatus.UNCLOSED, f"the argument {key!r} is not closed")
            return match.kind.startswith("key ")
        if not (yield from reader.skip_all(calls.value_close)):
            reader.at = match.stop
        return True

    def _open_value(self, call: OpenCall, key: str) -> Reading[ValueOpening | None]:
        """Go past what opens a value; None if the completion ends inside of it."""
        ways, reader = self.calls.value_opens, self.reader
        for way in ways:
            if (yield from reader.skip_all(way.pieces)):
                yield from reader.skip(way.lead)
                return way
        call.fail(CallStatus.MALFORMED, f"the argument {key!r} does not open as arguments do")
        remaining = b"".join(reader.data[reader.at :].split())
        if reader.ended and any(b"".join(way.pieces).startswith(remaining) for way in ways):
            reader.at = len(reader.data)
            return None
        reader.at += len(ways[0].pieces[0])
        return ways[0]._replace(is_string=None)

    def _value(self, call: OpenCall, key: str, opening: ValueOpening) -> Reading[Match | None]:
        """A value up to its end. One that can only be a string is reported as it comes."""
        schema, strings = self.output.tools.parameter(call.name, key), self.calls.grammar.strings
        is_text = opening.is_string
        if is_text is None:
            is_text = schema is not None and schema.only_text and strings is Value.BARE
        start, report = self.reader.at, ArgumentsText(call, quoted=True) if is_text else None
        call.add_arguments('"' if is_text else "")
        match = yield from self._value_end(call, report)
        if report is not None:
            report.done()
        if match is not None:
            text = self.reader.text(start, match.text)
            call.add_arguments('"' if is_text else "")
            value, certain = (text, True) if is_text else _typed(text, schema, strings, opening.is_string)
            if not certain:
                call.fail(CallStatus.INVALID_JSON, f"the argument {key!r} is not JSON")
            call.add_value(key, value, reported=is_text)
        return match

    def _value_end(self, call: OpenCall, report: Report | None) -> Reading[Match | None]:
        reader = self.reader
        ends = self.calls.value_ends(self.output.tools.declared(call.name))
        while True:
            match = yield from reader.find(ends, report)
            if match is None or (yield from self._ends_value(call, match)):
                return match
            if report is not None:
                report(match.text, match.stop)
            reader.at = match.stop

    def _ends_value(self, call: OpenCall, match: Match) -> Reading[bool]:
        calls, reader = self.calls, self.reader
        if match.kind == "finish":
            return (yield from reader.sees_one(calls.certain_ends, match.start))
        if match.kind.startswith("key "):
            return match.kind[4:] not in (call.values or {}) and match.kind[4:] not in call.raw_values
        if match.kind != "value" or unforgeable(calls.value_close[0]):
            return True
        past = yield from reader.sees_all(calls.value_close, match.start)
        at = yield from reader.past_space(past if past is not None else match.stop)
        return at == len(reader.data) or (yield from reader.sees_one(calls.after_value, at))


def _typed(text: str, schema: Schema | None, strings: Value, is_string: bool | None) -> tuple[Any, bool]:
    """The value of a text between tags, and whether that is certain."""
    if strings is Value.CDATA and text.startswith(_CDATA[0]) and text.endswith(_CDATA[1]):
        return text[len(_CDATA[0]) : -len(_CDATA[1])], True
    if is_string is False or (strings is Value.JSON and text.startswith('"')):
        try:
            return read_json(text), True
        except ValueError:
            return text, False
    return read_value(text, schema)
