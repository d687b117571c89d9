"""Reading arguments that come one by one, between tags. The tool's schema says what bare text means."""

from __future__ import annotations

import json
from typing import Any, Final

from ..formats.grammar import Value
from .compiled import CompiledCalls
from .marked import unforgeable
from .output import Attempt, Output
from .reader import Found, Marks, Reader, Reading, Say
from .response import CallStatus
from .values import Schema, read_json, read_value

SPACES: Final = " \t\r\n"
_CDATA: Final = ("<![CDATA[", "]]>")
_DEEPEST: Final = 64
"""How far elements may be nested."""


def _nothing(schema: Schema) -> tuple[Any, bool]:
    """What an empty element is where neither text nor null is admitted: a list or an object that is empty."""
    types = schema.types() or ()
    return ([], True) if "array" in types else ({}, True) if "object" in types else ("", False)


class PairReader:
    """Reads arguments one by one."""

    def __init__(self, calls: CompiledCalls, reader: Reader, output: Output) -> None:
        self.calls = calls
        self.reader = reader
        self.output = output

    def pairs(self, attempt: Attempt) -> Reading[None]:
        """Arguments, until something else comes."""
        calls, reader = self.calls, self.reader
        attempt.values = {}
        while True:
            past = yield from reader.sees_all(calls.key_open)
            if past is None:
                if not (yield from self._past_junk(attempt)):
                    break
            else:
                reader.at = past
                if not (yield from self._pair(attempt)):
                    break
        self._end(attempt)

    def _past_junk(self, attempt: Attempt) -> Reading[bool]:
        """Go past what is neither an argument nor the end of the call; whether an argument follows."""
        calls, reader = self.calls, self.reader
        if (yield from reader.sees_all(calls.finish[:1])) is not None or (yield from self._another(reader.at)):
            return False
        start = reader.at
        while True:
            found = yield from reader.find(calls.to_key)
            if found is None or found.kind != "key":
                reader.at = start
                return False
            if (yield from reader.sees_all(calls.key_open)) is not None:
                attempt.blame(CallStatus.MALFORMED, "there is something else between its arguments")
                return True
            reader.at = found.stop

    def _another(self, at: int) -> Reading[bool]:
        """Whether another call begins at a position."""
        another = self.calls.another
        return bool(another) and (yield from self.reader.sees_all(another, at)) is not None

    def _pair(self, attempt: Attempt) -> Reading[bool]:
        """One argument, after its opening; whether the call goes on."""
        calls, reader, output = self.calls, self.reader, self.output
        start = reader.at
        found = yield from reader.find(calls.to_value)
        if found is None or found.kind != "value":
            attempt.blame(CallStatus.MALFORMED, "an argument breaks off at its name")
            return False
        key = output.text(start, reader.at).strip(SPACES)
        opened, is_string = yield from self._opening(attempt, key)
        if not opened:
            return False
        schema = output.tools.parameter(attempt.name, key)
        self._begin(attempt, key)
        start = reader.at
        only_text = schema is not None and schema.only_text and calls.grammar.strings is Value.BARE
        if is_string or (is_string is None and only_text):
            found = yield from self._string(attempt, key)
        else:
            found = yield from self._value_end(attempt, None)
            if found is not None:
                self._typed(
                    attempt,
                    key,
                    output.text(start, found.text),
                    schema,
                    as_json=is_string is False or self._quotes(start),
                )
        attempt.raw_values[key] = output.text(start, found.text if found is not None else reader.at)
        return (yield from self._after_value(attempt, found, key))

    def _quotes(self, start: int) -> bool:
        """Whether a string begins here in a grammar that writes strings as JSON."""
        return self.calls.grammar.strings is Value.JSON and self.reader.data[start : start + 1] == b'"'

    def _opening(self, attempt: Attempt, key: str) -> Reading[tuple[bool, bool | None]]:
        """Go past what opens a value; whether one follows, and whether it is said to be a string, if that is said."""
        calls, reader = self.calls, self.reader
        for pieces, lead, says_string in calls.value_opens:
            past = yield from reader.sees_all(pieces)
            if past is not None:
                reader.at = past
                yield from reader.skip(lead)
                if len(calls.value_opens) > 1:
                    return True, says_string
                return True, True if calls.grammar.others is Value.BARE else None
        attempt.blame(CallStatus.MALFORMED, f"the argument {key!r} does not open as arguments do")
        if any(reader.breaks_off(pieces) for pieces, _, _ in calls.value_opens):
            reader.at = len(reader.data)
            return False, None
        reader.at += len(calls.value_opens[0][0][0])
        return True, None

    def _string(self, attempt: Attempt, key: str) -> Reading[Found | None]:
        """A value that can only be a string: it is told as it comes."""
        output, start = self.output, self.reader.at
        say, done = output.quoting(attempt)
        output.argue(attempt, '"')
        found = yield from self._value_end(attempt, say)
        done()
        if found is not None:
            output.argue(attempt, '"')
            self._put(attempt, key, output.text(start, found.text))
        return found

    def _value_end(self, attempt: Attempt, say: Say | None) -> Reading[Found | None]:
        """The end of a value: its closing, or what is certain to come after it where that is missing."""
        reader = self.reader
        marks = self._value_marks(attempt.name)
        while True:
            found = yield from reader.find(marks, say)
            if found is None or (yield from self._certain(attempt, found)):
                return found
            if say is not None:
                say(found.text, found.stop)
            reader.at = found.stop

    def _value_marks(self, name: str | None) -> Marks:
        """What may end a value of a tool. The openings of its other arguments are among it."""
        calls = self.calls
        declared = self.output.tools.declared(name)
        known = calls.value_marks.get(declared)
        if known is None:
            marks = [("value", calls.value_close[0])]
            marks += [("finish", sequence[0]) for sequence in calls.sure_ends]
            opening, after = b" ".join(calls.key_open), calls.value_opens[0][0][0]
            for key in declared:
                marks.append((f"key {key}", opening + key.encode("utf-8", "replace") + after))
            pads = {kind: calls.value_trail for kind, _ in marks}
            if len(calls.value_marks) > 1000:
                calls.value_marks.clear()
            known = calls.value_marks[declared] = Marks([*marks, *calls.hard_marks], pads)
        return known

    def _certain(self, attempt: Attempt, found: Found) -> Reading[bool]:
        """Whether a mark ends the value, or is a part of it."""
        if found.kind == "value":
            return unforgeable(self.calls.value_close[0]) or (yield from self._followed(found))
        if found.kind == "finish":
            for sequence in self.calls.sure_ends:
                if (yield from self.reader.sees_all(sequence, found.start)) is not None:
                    return True
            return False
        if found.kind.startswith("key "):
            return found.kind[4:] not in (attempt.values or {}) and found.kind[4:] not in attempt.raw_values
        return True

    def _followed(self, found: Found) -> Reading[bool]:
        """Whether what may come after a value comes after this closing; if not, it is text like any other."""
        calls, reader = self.calls, self.reader
        past = yield from reader.sees_all(calls.value_close, found.start)
        at = yield from reader.past_space(past if past is not None else found.stop)
        if at == len(reader.data):
            return True
        for pieces in calls.after_value:
            if (yield from reader.sees_all(pieces, at)) is not None:
                return True
        return False

    def _after_value(self, attempt: Attempt, found: Found | None, key: str) -> Reading[bool]:
        reader = self.reader
        if found is None:
            return False
        if found.kind == "value":
            past = yield from reader.sees_all(self.calls.value_close)
            reader.at = past if past is not None else found.stop
            return True
        attempt.blame(CallStatus.UNCLOSED, f"the argument {key!r} is not closed")
        return found.kind.startswith("key ")

    # -- trees

    def tree(self, attempt: Attempt) -> Reading[None]:
        """Elements named after the arguments, until something else comes."""
        calls, reader, output = self.calls, self.reader, self.output
        attempt.values = {}
        while (yield from reader.sees_all(calls.finish)) is None:
            past = yield from reader.sees_all(calls.key_open)
            if past is None or (yield from self._another(reader.at)):
                break
            reader.at = past
            start = reader.at
            found = yield from reader.find(calls.to_value)
            if found is None or found.kind != "value":
                attempt.blame(CallStatus.MALFORMED, "an argument breaks off at its name")
                break
            key = output.text(start, reader.at).strip(SPACES)
            reader.at = start = found.stop
            schema = output.tools.parameter(attempt.name, key)
            whole, value, stop = yield from self._element(attempt, key, schema, 0)
            attempt.raw_values[key] = output.text(start, stop)
            if not whole:
                break
            self._begin(attempt, key)
            output.argue(attempt, json.dumps(value, ensure_ascii=False))
            self._put(attempt, key, value)
        self._end(attempt)

    def _element(
        self, attempt: Attempt, name: str, schema: Schema | None, depth: int
    ) -> Reading[tuple[bool, Any, int]]:
        """The value of an element, after its opening: whether it is whole, what it is, where its text ends."""
        calls, reader, output = self.calls, self.reader, self.output
        start = reader.at
        children: list[tuple[str, Any]] = []
        while True:
            at = yield from reader.past_space()
            ends = (yield from reader.sees(calls.value_close[0], at)) or (yield from self._another(at))
            if not ends and depth < _DEEPEST and (yield from reader.sees(calls.key_open[0], at)):
                reader.at = at + len(calls.key_open[0])
                begun = reader.at
                found = yield from reader.find(calls.to_value)
                if found is None or found.kind != "value":
                    break
                child = output.text(begun, reader.at).strip(SPACES)
                reader.at = found.stop
                inner = None
                if schema is not None:
                    inner = schema.items() if child == calls.grammar.item else schema.property(child)
                whole, value, _ = yield from self._element(attempt, child, inner, depth + 1)
                if not whole:
                    return False, None, reader.at
                children.append((child, value))
                continue
            found = yield from reader.find(calls.to_value_close)
            if found is None or found.kind != "value":
                break
            if children and found.start > at:
                attempt.blame(CallStatus.MALFORMED, f"there is something else in {name!r}")
            past = yield from reader.sees_all((calls.value_close[0] + name.encode() + calls.value_opens[0][0][0],))
            if past is None:
                attempt.blame(CallStatus.MALFORMED, f"{name!r} is closed by another name")
                closing = yield from reader.find(calls.to_value)
                past = closing.stop if closing is not None and closing.kind == "value" else found.stop
            reader.at = past
            if not children:
                text = output.text(start, found.start)
                value, sure = read_value(text, schema)
                if not sure and not text and schema is not None:
                    value, sure = _nothing(schema)
                if not sure:
                    attempt.blame(CallStatus.INVALID_JSON, f"{name!r} is not of its type")
                return True, value, found.start
            if all(child == calls.grammar.item for child, _ in children):
                return True, [value for _, value in children], found.start
            return True, self._members(attempt, name, children), found.start
        attempt.blame(CallStatus.UNCLOSED, f"the argument {name!r} is not closed")
        return False, None, reader.at

    def _members(self, attempt: Attempt, name: str, children: list[tuple[str, Any]]) -> dict[str, Any]:
        """Elements as an object. Several of one name are a list under it, so that none is lost."""
        found: dict[str, list[Any]] = {}
        for child, value in children:
            found.setdefault(child, []).append(value)
        doubled = [child for child, values in found.items() if len(values) > 1]
        if doubled:
            attempt.blame(CallStatus.DUPLICATE_ARGUMENT, f"{doubled[0]!r} is given more than once in {name!r}")
        return {child: values if len(values) > 1 else values[0] for child, values in found.items()}

    # -- telling

    def _begin(self, attempt: Attempt, key: str) -> None:
        told = attempt.said or attempt.waiting
        self.output.argue(attempt, (", " if told else "{") + json.dumps(key, ensure_ascii=False) + ": ")

    def _typed(self, attempt: Attempt, key: str, text: str, schema: Schema | None, *, as_json: bool) -> None:
        """A value whose text is known."""
        if self.calls.grammar.strings is Value.CDATA and text.startswith(_CDATA[0]) and text.endswith(_CDATA[1]):
            value, sure = text[len(_CDATA[0]) : -len(_CDATA[1])], True
        elif as_json:
            try:
                value, sure = read_json(text), True
            except ValueError:
                value, sure = text, False
        else:
            value, sure = read_value(text, schema)
        if not sure:
            attempt.blame(CallStatus.INVALID_JSON, f"the argument {key!r} is not JSON")
        self.output.argue(attempt, json.dumps(value, ensure_ascii=False))
        self._put(attempt, key, value)

    def _put(self, attempt: Attempt, key: str, value: Any) -> None:
        assert attempt.values is not None
        if key in attempt.values:
            attempt.blame(CallStatus.DUPLICATE_ARGUMENT, f"the argument {key!r} is given twice")
        attempt.values[key] = value

    def _end(self, attempt: Attempt) -> None:
        """No more arguments come: close the object, unless more would have come."""
        if not (self.reader.ended and self.reader.at == len(self.reader.data)):
            self.output.argue(attempt, "}" if attempt.said or attempt.waiting else "{}")
