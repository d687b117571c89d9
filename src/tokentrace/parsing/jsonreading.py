"""Reading calls and arguments that are JSON, before all of it has arrived.

Follows brackets and strings; whether it is JSON is decided at its end. What JSON cannot contain ends it too.
"""

from __future__ import annotations

import re
from typing import Any, Final

from .compiled import CompiledCalls
from .output import ArgumentsText, CallReader, OpenCall, Output
from .reader import Notation, Reading, Report
from .response import CallStatus
from .values import read_json

_STRINGS: Final = {0x22: re.compile(b'[^"\\\\\n\r\xff]*(?:\\\\[^\xff][^"\\\\\n\r\xff]*)*')}
_JSON: Final = Notation(
    b"{[", b"}]", re.compile(rb"[^\s\w,:.+-]"), _STRINGS, re.compile(b'["\\\\\n\r\xff]'), strict=True
)
_WORD: Final = re.compile(rb"[-+.\w]*")
_ARGUMENT_KEYS: Final = (("arguments",), ("parameters",))
"""The keys under which servers look for arguments."""


class JsonReader(CallReader):
    """Reads JSON for calls. A `lenient` one takes a bare call with either key for its arguments."""

    def __init__(self, calls: CompiledCalls, output: Output, *, lenient: bool) -> None:
        super().__init__(calls, output)
        self._fields = {path: field for field, path in calls.grammar.keys}
        self._inner = {path[:length] for path in self._fields for length in range(1, len(path))}
        usual = any(len(path) == 1 for path, field in self._fields.items() if field == "arguments")
        self._alternatives = _ARGUMENT_KEYS if usual else ()
        self._keys = {path[0] for path in self._fields} | {"type"}
        self._keys |= {key for (key,) in self._alternatives if lenient}

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

    # -- name and arguments in one JSON

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
        """An object; True if it is a call. It is announced once that is certain, if it was not before."""
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
            read_json(self.output.text(start, self.reader.at))
        except ValueError as error:
            call.fail(CallStatus.INVALID_JSON, f"the call is not JSON: {error}")
        if "arguments" not in seen and "arguments" in self._fields.values():
            call.fail(CallStatus.MALFORMED, "the call has no arguments")
        return True

    def _members(self, call: OpenCall, path: tuple[str, ...], seen: set[str]) -> Reading[bool]:
        """The members of an object, noting those that are fields of a call; True if the object is whole."""
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
            if not call.announced and not self._may_be_call(call, here, seen):
                return False
            if not (yield from self._member(call, here, seen)):
                return False
            reader.at = yield from reader.past_space()
            if (yield from reader.skip(b"}")):
                return True
            if not (yield from reader.skip(b",")):
                return False

    def _field(self, here: tuple[str, ...]) -> str | None:
        return self._fields.get(here) or ("arguments" if here in self._alternatives else None)

    def _may_be_call(self, call: OpenCall, here: tuple[str, ...], seen: set[str]) -> bool:
        """True if an object may be a call, at the next of its keys. It is one once name and arguments were seen."""
        if here[0] not in self._keys:
            return False
        field = self._field(here)
        if {"name", "arguments"} <= {*seen, field} and (field == "name" or call.name is not None):
            call.announce()
        return True

    def _member(self, call: OpenCall, here: tuple[str, ...], seen: set[str]) -> Reading[bool]:
        reader, field, start = self.reader, self._field(here), self.reader.at
        if self.calls.grammar.named_key and len(here) == 1 and not seen:
            call.set_name(here[0])
            field = "arguments"
        elif field is not None and here not in self._fields:
            field = None if field in seen else field
            if field is not None:
                call.fail(CallStatus.MALFORMED, f"its arguments are under {here[0]!r}", lenient=True)
        if field is None or field in seen:
            if field is not None:
                call.fail(CallStatus.MALFORMED, f"{here[-1]!r} is given twice")
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
        """The string from `start` to here; None if it is something else."""
        try:
            value: Any = read_json(self.output.text(start, self.reader.at))
        except ValueError:
            return None
        return value if isinstance(value, str) else None

    def value(self, report: Report | None = None) -> Reading[bool]:
        """One JSON value; True if it is whole. Stops where it cannot be JSON any more, or at a control token."""
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
