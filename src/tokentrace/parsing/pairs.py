"""Reading arguments one by one, each between tags. The tool's schema says what bare text means."""

from __future__ import annotations

from typing import Any, Final

from ..formats.grammar import Value
from .compiled import ValueOpening
from .marked import unforgeable
from .output import ArgumentsText, CallReader, OpenCall
from .reader import Match, Reading, Report
from .response import CallStatus
from .values import Schema, read_json, read_value

_SPACES: Final = " \t\r\n"
_CDATA: Final = ("<![CDATA[", "]]>")


class PairReader(CallReader):
    """Reads pairs of key and value."""

    def read(self, call: OpenCall) -> Reading[None]:
        """Arguments, until something else comes."""
        more = True
        while more:
            if (yield from self.reader.skip_all(self.calls.key_open)):
                more = yield from self._pair(call)
            else:
                more = yield from self._skip_junk(call)
        call.end_values()

    def _skip_junk(self, call: OpenCall) -> Reading[bool]:
        """Go past anything between arguments that does not belong there; True if an argument follows."""
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
        """One argument, after its opening; True if the call goes on."""
        calls, reader, output = self.calls, self.reader, self.output
        key = yield from self._key(call)
        opening = (yield from self._open_value(call, key)) if key is not None else None
        if key is None or opening is None:
            return False
        schema = output.tools.parameter(call.name, key)
        call.add_key(key)
        start = reader.at
        is_text = schema is not None and schema.only_text and calls.grammar.strings is Value.BARE
        if opening.is_string if opening.is_string is not None else is_text:
            match = yield from self._string(call, key)
        else:
            match = yield from self._typed(call, key, schema, opening.is_string)
        call.raw_values[key] = output.text(start, match.text if match is not None else reader.at)
        if match is None:
            output.missing.append(calls.grammar.value_close)
            return False
        if match.kind != "value":
            call.fail(CallStatus.UNCLOSED, f"the argument {key!r} is not closed")
            return match.kind.startswith("key ")
        if not (yield from reader.skip_all(calls.value_close)):
            reader.at = match.stop
        return True

    def _key(self, call: OpenCall) -> Reading[str | None]:
        """The name of an argument, after its opening; None if it breaks off."""
        calls, reader = self.calls, self.reader
        start = reader.at
        match = yield from reader.find(calls.to_value)
        if match is not None and match.kind == "value":
            return self.output.text(start, match.start).strip(_SPACES)
        call.fail(CallStatus.MALFORMED, "an argument breaks off at its name")
        if reader.exhausted and not unforgeable(calls.value_opens[0].pieces[0]):
            self.output.missing.append(calls.grammar.value_close)  # else its name would go on in the call's closing
        return None

    def _open_value(self, call: OpenCall, key: str) -> Reading[ValueOpening | None]:
        """Go past what opens a value: in which way it opens; None if the completion ends inside the opening."""
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

    def _string(self, call: OpenCall, key: str) -> Reading[Match | None]:
        """A value that can only be a string: reported as it comes."""
        start, report = self.reader.at, ArgumentsText(call, quoted=True)
        call.add_arguments('"')
        match = yield from self._value_end(call, report)
        report.done()
        if match is not None:
            call.add_arguments('"')
            call.add_value(key, self.output.text(start, match.text), reported=True)
        return match

    def _typed(self, call: OpenCall, key: str, schema: Schema | None, is_string: bool | None) -> Reading[Match | None]:
        """A value of any type: reported when it is whole."""
        strings, start = self.calls.grammar.strings, self.reader.at
        match = yield from self._value_end(call, None)
        if match is None:
            return None
        text, certain = self.output.text(start, match.text), True
        if strings is Value.CDATA and text.startswith(_CDATA[0]) and text.endswith(_CDATA[1]):
            value: Any = text[len(_CDATA[0]) : -len(_CDATA[1])]
        elif is_string is False or (strings is Value.JSON and text.startswith('"')):
            try:
                value = read_json(text)
            except ValueError:
                value, certain = text, False
        else:
            value, certain = read_value(text, schema)
        if not certain:
            call.fail(CallStatus.INVALID_JSON, f"the argument {key!r} is not JSON")
        call.add_value(key, value)
        return match

    def _value_end(self, call: OpenCall, report: Report | None) -> Reading[Match | None]:
        """The end of a value: its closing, or what is certain to come after it if that is missing."""
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
        """True if a delimiter ends the value, False if it is a part of it."""
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
