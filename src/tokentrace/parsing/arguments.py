"""Reading arguments: one JSON while it arrives, or one by one between tags."""

from __future__ import annotations

import re
from typing import Any, Final

from ..formats.grammar import Value
from .compiled import CompiledCalls, ValueOpening
from .marked import unforgeable
from .output import ArgumentsText, CallReader, OpenCall, Output
from .reader import Match, Notation, Reading, Report
from .response import CallStatus
from .values import Schema, read_json, read_value

_STRINGS: Final = {0x22: re.compile(b'[^"\\\\\n\r\xff]*(?:\\\\[^\xff][^"\\\\\n\r\xff]*)*')}
_JSON: Final = Notation(
    b"{[", b"}]", re.compile(rb"[^\s\w,:.+-]"), _STRINGS, re.compile(b'["\\\\\n\r\xff]'), strict=True
)
_WORD: Final = re.compile(rb"[-+.\w]*")
_ARGUMENT_KEYS: Final[tuple[tuple[str, ...], ...]] = (("arguments",), ("parameters",))
"""The keys under which servers look for arguments."""
_SPACES: Final = " \t\r\n"
_CDATA: Final = ("<![CDATA[", "]]>")


class JsonReader(CallReader):
    """Reads JSON for calls. With `any_key`, an object is one under either key for arguments."""

    def __init__(self, calls: CompiledCalls, output: Output, *, any_key: bool) -> None:
        super().__init__(calls, output)
        self._paths = {path: field for field, path in calls.grammar.keys}
        self._inner = {path[:length] for path in self._paths for length in range(1, len(path))}
        self._keys = {path[0] for path in self._paths} | {"type"}
        usual = any(len(path) == 1 for path, field in self._paths.items() if field == "arguments")
        self._fields = {**dict.fromkeys(_ARGUMENT_KEYS if usual else (), "arguments"), **self._paths}
        """The field at each path, with those that servers accept for arguments."""
        self._keys |= {path[0] for path in self._fields if any_key}

    def arguments(self, call: OpenCall) -> Reading[None]:
        """Arguments as one JSON, up to the end of the call."""
        reader = self.reader
        reader.at = yield from reader.past_space()
        report = ArgumentsText(call)
        if not (yield from self.value(report)):
            start = reader.at
            match = yield from reader.find(self.calls.to_end)
            text = reader.data[start : reader.at]
            report(start, start + len(text.rstrip() if match is not None else text))
            call.fail(CallStatus.INVALID_JSON, "the arguments are not JSON", ragged=True)
        report.done()

    def call(self, call: OpenCall) -> Reading[None]:
        """A call that is one object."""
        reader = self.reader
        start = yield from reader.past_space()
        if (yield from reader.sees(b"{", start)):
            reader.at = start
            yield from self.bare_call(call)
        else:
            call.fail(CallStatus.INVALID_JSON, "the call is not a JSON object", ragged=True)

    def bare_call(self, call: OpenCall) -> Reading[bool]:
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
        if "arguments" not in seen and "arguments" in self._paths.values():
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
            if not (yield from reader.sees(b'"')) or not (yield from self.value()):
                return False
            key = self._string(start)
            colon = yield from reader.past_space()
            if key is None or not (yield from reader.sees(b":", colon)):
                return False
            reader.at = yield from reader.past_space(colon + 1)
            here = (*path, key)
            if not call.announced:
                if here[0] not in self._keys:
                    return False
                field = self._fields.get(here)
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
        reader, field, start = self.reader, self._fields.get(here), self.reader.at
        if self.calls.grammar.named_key and len(here) == 1 and not seen:
            call.set_name(here[0])
            field = "arguments"
        elif field is not None and field in seen:
            if here in self._paths:
                call.fail(CallStatus.MALFORMED, f"{here[-1]!r} is given twice")
            field = None
        elif field is not None and here not in self._paths:
            call.fail(CallStatus.MALFORMED, f"its arguments are under {here[0]!r}", lenient=True)
        if field is None:
            if here in self._inner and (yield from reader.sees(b"{")):
                return (yield from self._members(call, here, seen))
            return (yield from self.value())
        seen.add(field)
        if field == "arguments" and not (yield from reader.sees(b'"')):
            report = ArgumentsText(call)
            whole = yield from self.value(report)
            report.done()
            return whole
        if not (yield from self.value()):
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

    def value(self, report: Report | None = None) -> Reading[bool]:
        """One JSON value; True if it is whole. Stops where it cannot be JSON."""
        reader = self.reader
        yield from reader.past_space()
        if bytes(reader.data[reader.at : reader.at + 1]) in (b"{", b"[", b'"'):
            return (yield from reader.enclosed(_JSON, self.calls.hard_ends, report))
        start = at = reader.at  # a number, or true, false, null
        while True:
            match = _WORD.match(reader.data, at)
            at = match.end() if match else at
            if at < len(reader.data) or reader.ended:
                break
            yield
        reader.at = at
        if report is not None:
            report(start, at)
        return at > start


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
        call.raw_values[key] = reader.text(start, match.text if match is not None else reader.at)
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
        calls, reader = self.calls, self.reader
        start = reader.at
        match = yield from reader.find(calls.to_value)
        if match is not None and match.kind == "value":
            return self.reader.text(start, match.start).strip(_SPACES)
        call.fail(CallStatus.MALFORMED, "an argument breaks off at its name")
        if reader.exhausted and not unforgeable(calls.value_opens[0].pieces[0]):
            self.output.missing.append(calls.grammar.value_close)  # else its name would go on in the call's closing
        return None

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

    def _string(self, call: OpenCall, key: str) -> Reading[Match | None]:
        """A value that can only be a string: reported as it comes."""
        start, report = self.reader.at, ArgumentsText(call, quoted=True)
        call.add_arguments('"')
        match = yield from self._value_end(call, report)
        report.done()
        if match is not None:
            call.add_arguments('"')
            call.add_value(key, self.reader.text(start, match.text), reported=True)
        return match

    def _typed(self, call: OpenCall, key: str, schema: Schema | None, is_string: bool | None) -> Reading[Match | None]:
        """A value of any type: reported when it is whole."""
        strings, start = self.calls.grammar.strings, self.reader.at
        match = yield from self._value_end(call, None)
        if match is None:
            return None
        text, certain = self.reader.text(start, match.text), True
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
