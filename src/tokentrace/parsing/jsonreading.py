"""Reading calls and arguments that are JSON, before all of it is there.

Brackets and strings are followed as they come; whether it is JSON is settled when it has ended. A control token that
ends calls ends JSON too; so does what JSON cannot contain: a line break in a string, a symbol outside of one.
"""

from __future__ import annotations

import re
from typing import Any, Final

from .compiled import CompiledCalls
from .output import Attempt, Output
from .reader import Brackets, Reader, Reading, Say
from .response import CallStatus
from .values import read_json

_STRING: Final = re.compile(b'[^"\\\\\n\r\xff]*(?:\\\\[^\xff][^"\\\\\n\r\xff]*)*')
_OUTSIDE: Final = re.compile(rb"[^\s\w,:.+-]")
_NOTATION: Final = Brackets(b"{[", b"}]", _OUTSIDE, {0x22: _STRING}, strict=True)
_WORD: Final = re.compile(rb"[-+.\w]*")
_ARGUMENTS: Final = (("arguments",), ("parameters",))
"""The keys under which servers look for arguments."""


class JsonReader:
    """Reads JSON for calls."""

    def __init__(self, calls: CompiledCalls, reader: Reader, output: Output) -> None:
        self.calls = calls
        self.reader = reader
        self.output = output
        self._fields = {path: field for field, path in calls.grammar.keys}
        if output.loose and any(len(path) == 1 for path, field in self._fields.items() if field == "arguments"):
            self._fields = {**dict.fromkeys(_ARGUMENTS, "arguments"), **self._fields}
        self._inner = {path[:length] for path in self._fields for length in range(1, len(path))}
        self._known = {path[0] for path in self._fields} | {"type"}

    # -- the name, then arguments as one JSON

    def arguments(self, attempt: Attempt) -> Reading[None]:
        """Arguments as one JSON, up to the end of the call."""
        reader = self.reader
        reader.at = yield from reader.past_space()
        say, done = self.output.arguments_sink(attempt)
        if not (yield from self.value(say)):
            start = reader.at
            found = yield from reader.find(self.calls.to_end)
            text = reader.data[start : reader.at]
            say(start, start + len(text.rstrip() if found is not None else text))
            attempt.broken(CallStatus.INVALID_JSON, "the arguments are not JSON")
        done()

    # -- name and arguments in one JSON

    def call(self, attempt: Attempt) -> Reading[None]:
        """A call that is one object."""
        reader = self.reader
        start = yield from reader.past_space()
        if (yield from reader.sees(b"{", start)):
            reader.at = start
            yield from self._object(attempt, bare=False)
        else:
            attempt.broken(CallStatus.INVALID_JSON, "the call is not a JSON object")

    def bare_call(self, attempt: Attempt) -> Reading[bool]:
        """An object without delimiters that may be a call; whether it is one. It is announced once that is certain."""
        yield from self._object(attempt, bare=True)
        return attempt.announced

    def _object(self, attempt: Attempt, *, bare: bool) -> Reading[None]:
        reader, output = self.reader, self.output
        start = reader.at
        seen: set[str] = set()
        whole = yield from self._members(attempt, (), seen, bare=bare)
        if bare and not attempt.announced:
            named = not whole and reader.ended and attempt.name is not None and output.tools.given
            if not (named and attempt.name is not None and output.tools.knows(attempt.name)):
                return
            output.announce(attempt)
        if not whole:
            attempt.broken(CallStatus.INVALID_JSON, "the call is not JSON")
            return
        try:
            read_json(output.text(start, reader.at))
        except ValueError as error:
            attempt.fail(CallStatus.INVALID_JSON, f"the call is not JSON: {error}")
        if "arguments" not in seen and "arguments" in self._fields.values():
            attempt.fail(CallStatus.MALFORMED, "the call has no arguments")

    def _members(self, attempt: Attempt, path: tuple[str, ...], seen: set[str], *, bare: bool) -> Reading[bool]:
        """The members of an object, noting those that are fields of a call; whether the object is whole."""
        reader = self.reader
        reader.at += 1
        while True:
            reader.at = yield from reader.past_space()
            if not path and not seen and (yield from reader.sees(b"}")):
                reader.at += 1
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
            if bare and not attempt.announced and not self._may_be_call(attempt, here, seen):
                return False
            if not (yield from self._member(attempt, here, seen, bare=bare)):
                return False
            at = yield from reader.past_space()
            if (yield from reader.sees(b"}", at)):
                reader.at = at + 1
                return True
            if not (yield from reader.sees(b",", at)):
                return False
            reader.at = at + 1

    def _may_be_call(self, attempt: Attempt, here: tuple[str, ...], seen: set[str]) -> bool:
        """Whether an object may be a call, at the next of its keys. It is one when name and arguments are seen."""
        if here[0] not in self._known:
            return False
        field = self._fields.get(here)
        if {"name", "arguments"} <= {*seen, field} and (field == "name" or attempt.name is not None):
            self.output.announce(attempt)
        return True

    def _member(self, attempt: Attempt, here: tuple[str, ...], seen: set[str], *, bare: bool) -> Reading[bool]:
        reader, output = self.reader, self.output
        field = self._fields.get(here)
        start = reader.at
        if self.calls.grammar.named_key and len(here) == 1 and not seen:
            output.name_call(attempt, here[0])
            field = "arguments"
        if field is None or field in seen:
            if field is not None:
                attempt.fail(CallStatus.MALFORMED, f"{here[-1]!r} is given twice")
            if here in self._inner and (yield from reader.sees(b"{")):
                return (yield from self._members(attempt, here, seen, bare=bare))
            return (yield from self.value())
        seen.add(field)
        if field == "arguments" and not (yield from reader.sees(b'"')):
            say, done = output.arguments_sink(attempt)
            whole = yield from self.value(say)
            done()
            return whole
        if not (yield from self.value()):
            return False
        text = self._string(start)
        if field == "arguments":
            output.add_arguments(attempt, text or "")
        elif field == "id":
            output.name_call(attempt, None, text)
        elif text is None:
            attempt.fail(CallStatus.MISSING_NAME, "the name is not a string")
        else:
            output.name_call(attempt, text)
        return True

    def _string(self, start: int) -> str | None:
        """The string that was written from `start` to here; None if it is something else."""
        try:
            value: Any = read_json(self.output.text(start, self.reader.at))
        except ValueError:
            return None
        return value if isinstance(value, str) else None

    # -- values

    def value(self, say: Say | None = None) -> Reading[bool]:
        """One JSON value; whether it is whole. Stops where it cannot be JSON any more, or at a control token."""
        reader = self.reader
        while len(reader.data) <= reader.at and not reader.ended:
            yield
        if bytes(reader.data[reader.at : reader.at + 1]) in (b"{", b"[", b'"'):
            return (yield from reader.enclosed(_NOTATION, self.calls.hard_pieces, say))
        start = at = reader.at  # a number, or true, false, null
        while True:
            match = _WORD.match(reader.data, at)
            at = match.end() if match else at
            if at < len(reader.data) or reader.ended:
                break
            yield
        reader.at = at
        if say is not None:
            say(start, at)
        return at > start
