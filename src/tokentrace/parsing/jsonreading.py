"""Reading calls and arguments that are JSON, before all of it is there.

Brackets and strings are followed as they come; whether it is JSON is settled when it has ended. A control token that
ends calls ends JSON too; so does what no JSON can hold: a line break in a string, a letter that is none of its own.
"""

from __future__ import annotations

import re
from typing import Any, Final

from .compiled import CompiledCalls
from .output import Attempt, Output
from .reader import Reader, Reading, Say
from .response import CallStatus, PartKind
from .values import read_json

_STRING: Final = re.compile(b'[^"\\\\\n\r\xff]*(?:\\\\.[^"\\\\\n\r\xff]*)*', re.DOTALL)
_OUTSIDE: Final = re.compile(rb"[^\s\w,:.+-]")
_WORD: Final = re.compile(rb"[-+.\w]*")
_ARGUMENTS: Final = (("arguments",), ("parameters",))
"""The keys under which servers look for arguments."""
_QUOTE, _ESCAPE, _CONTROL = 0x22, 0x5C, 0xFF


def _silent(start: int, stop: int) -> None:
    """Nobody listens."""


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
        say, done = self.output.arguing(attempt)
        if not (yield from self.value(say)):
            start = reader.at
            found = yield from reader.find(self.calls.to_end)
            text = reader.data[start : reader.at]
            say(start, start + len(text.rstrip() if found is not None else text))
            attempt.blame(CallStatus.INVALID_JSON, "the arguments are not JSON")
            attempt.ragged = True
        done()

    # -- name and arguments in one JSON

    def call(self, attempt: Attempt) -> Reading[None]:
        """A call that is one object."""
        reader = self.reader
        start = yield from reader.past_space()
        if not (yield from reader.sees(b"{", start)):
            attempt.blame(CallStatus.INVALID_JSON, "the call is not a JSON object")
            attempt.ragged = True
            return
        reader.at = start
        yield from self._object(attempt, bare=False)

    def bare_call(self, attempt: Attempt) -> Reading[bool]:
        """A call that is known by nothing but what it holds; whether it is one. It is told of once that is certain."""
        yield from self._object(attempt, bare=True)
        if not attempt.announced:
            return False
        if attempt.ragged:
            found = yield from self.reader.find(self.calls.hard)
            if found is None:
                attempt.blame(CallStatus.TRUNCATED, "the completion ends inside the call")
            if found is None or found.kind == "stop":
                self.output.open = PartKind.TOOL_CALL
        return True

    def _object(self, attempt: Attempt, *, bare: bool) -> Reading[None]:
        reader, output = self.reader, self.output
        start = reader.at
        seen: set[str] = set()
        whole = yield from self._members(attempt, (), seen, bare=bare)
        if bare and not attempt.announced:
            named = whole is False and reader.ended and attempt.name is not None and output.tools.given
            if not (named and attempt.name is not None and output.tools.knows(attempt.name)):
                return
            output.announce(attempt)
        if not whole:
            attempt.blame(CallStatus.INVALID_JSON, "the call is not JSON")
            attempt.ragged = True
            return
        try:
            read_json(output.text(start, reader.at))
        except ValueError as error:
            attempt.blame(CallStatus.INVALID_JSON, f"the call is not JSON: {error}")
        if "arguments" not in seen and "arguments" in self._fields.values():
            attempt.blame(CallStatus.MALFORMED, "the call has no arguments")

    def _members(self, attempt: Attempt, path: tuple[str, ...], seen: set[str], *, bare: bool) -> Reading[bool]:
        """The members of an object, those that are fields of a call noted; whether it is whole."""
        reader = self.reader
        reader.at += 1
        while True:
            reader.at = yield from reader.past_space()
            if not path and not seen and (yield from reader.sees(b"}")):
                reader.at += 1
                return True
            start = reader.at
            if not (yield from reader.sees(b'"')) or not (yield from self.value(_silent)):
                return False
            key = self._text(start, reader.at)
            colon = yield from reader.past_space()
            if key is None or not (yield from reader.sees(b":", colon)):
                return False
            reader.at = yield from reader.past_space(colon + 1)
            here = (*path, key)
            if bare and not attempt.announced and not self._may_be(attempt, here, seen):
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

    def _may_be(self, attempt: Attempt, here: tuple[str, ...], seen: set[str]) -> bool:
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
        if field is not None and field not in seen:
            seen.add(field)
            if field == "arguments" and not (yield from reader.sees(b'"')):
                say, done = output.arguing(attempt)
                whole = yield from self.value(say)
                done()
                return whole
            if not (yield from self.value(_silent)):
                return False
            text = self._text(start, reader.at)
            if field == "arguments":
                output.argue(attempt, text or "")
            elif field == "id":
                output.name_call(attempt, None, text)
            elif text is None:
                attempt.blame(CallStatus.MISSING_NAME, "the name is not a string")
            else:
                output.name_call(attempt, text)
            return True
        if field is not None:
            attempt.blame(CallStatus.MALFORMED, f"{here[-1]!r} is given twice")
        if here in self._inner and (yield from reader.sees(b"{")):
            return (yield from self._members(attempt, here, seen, bare=bare))
        return (yield from self.value(_silent))

    def _text(self, start: int, stop: int) -> str | None:
        """A string of JSON."""
        try:
            value: Any = read_json(self.output.text(start, stop))
        except ValueError:
            return None
        return value if isinstance(value, str) else None

    # -- values

    def skip(self) -> Reading[None]:
        """Go past a value, or to where it breaks off."""
        yield from self.value(_silent)

    def value(self, say: Say) -> Reading[bool]:
        """One JSON value; whether it is whole. Stops where it cannot be JSON any more, or at a control token."""
        reader = self.reader
        data = reader.data
        while len(data) <= reader.at and not reader.ended:
            yield
        if bytes(data[reader.at : reader.at + 1]) not in (b"{", b"[", b'"'):
            return (yield from self._word(say))
        depth, in_string = 0, False
        said = at = reader.at
        while True:
            match = _STRING.match(data, at) if in_string else _OUTSIDE.search(data, at)
            at = len(data) if match is None else match.end() if in_string else match.start()
            if at == len(data) or (in_string and data[at] == _ESCAPE and at + 1 == len(data)):
                stop = len(data) if reader.ended else at  # an escape may be half of one
                say(said, stop)
                reader.at = said = stop
                if reader.ended:
                    return False
                yield
                continue
            byte, here = data[at], at
            at += 1
            if in_string and byte == _CONTROL and not (yield from self._ends(here)):
                continue
            if byte == _QUOTE:
                in_string = not in_string
            elif not in_string and byte in b"{[":
                depth += 1
            elif not in_string and byte in b"}]":
                depth -= 1
            else:
                reader.at = here
                say(said, here)
                return False
            if depth <= 0 and not in_string:
                reader.at = at
                say(said, at)
                return True

    def _word(self, say: Say) -> Reading[bool]:
        """A number, or true, false, null."""
        reader = self.reader
        start = at = reader.at
        while True:
            match = _WORD.match(reader.data, at)
            at = match.end() if match else at
            if at < len(reader.data) or reader.ended:
                break
            yield
        reader.at = at
        say(start, at)
        return at > start

    def _ends(self, at: int) -> Reading[bool]:
        """Whether the control token at a position ends calls; any other is a part of the string it stands in."""
        for piece in self.calls.hard_pieces:
            if (yield from self.reader.sees(piece, at)):
                return True
        return False
