"""Reading arguments that come one by one, between tags. The tool's schema says what bare text means."""

from __future__ import annotations

import json
from typing import Any, Final

from ..formats.grammar import CallGrammar, Value
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


def is_text(grammar: CallGrammar, said: bool | None, schema: Schema | None) -> bool:
    """Whether a value can only be a string; `said` is what its opening says, if it says anything."""
    if said is not None:
        return said
    return schema is not None and schema.only_text and grammar.strings is Value.BARE


def read_typed(grammar: CallGrammar, text: str, schema: Schema | None, *, as_json: bool) -> tuple[Any, bool]:
    """The value of a text, and whether it is sure to be what was meant."""
    if grammar.strings is Value.CDATA and text.startswith(_CDATA[0]) and text.endswith(_CDATA[1]):
        return text[len(_CDATA[0]) : -len(_CDATA[1])], True
    if not as_json:
        return read_value(text, schema)
    try:
        return read_json(text), True
    except ValueError:
        return text, False


def value_marks(calls: CompiledCalls, declared: frozenset[str]) -> Marks:
    """What may end a value: among others, the openings of other arguments that its tool declares."""
    known = calls.value_marks.get(declared)
    if known is None:
        marks = [("value", calls.value_close[0])]
        marks += [("finish", sequence[0]) for sequence in calls.sure_ends]
        opening, after = b" ".join(calls.key_open), calls.value_opens[0][0][0]
        marks += [(f"key {key}", opening + key.encode("utf-8", "replace") + after) for key in declared]
        pads = {kind: calls.value_trail for kind, _ in marks}
        if len(calls.value_marks) > 1000:
            calls.value_marks.clear()
        known = calls.value_marks[declared] = Marks([*marks, *calls.hard_marks], pads)
    return known


class PairReader:
    """Reads arguments one by one."""

    def __init__(self, calls: CompiledCalls, reader: Reader, output: Output) -> None:
        self.calls = calls
        self.reader = reader
        self.output = output

    def _name(self) -> Reading[tuple[str, Found] | None]:
        """The name of an argument, after its opening, and the mark that ends it; None if it breaks off."""
        start = self.reader.at
        found = yield from self.reader.find(self.calls.to_value)
        if found is None or found.kind != "value":
            return None
        return self.output.text(start, found.start).strip(SPACES), found

    def _another(self, at: int) -> Reading[bool]:
        """Whether another call begins at a position."""
        another = self.calls.another
        return bool(another) and (yield from self.reader.sees_all(another, at)) is not None

    def _add(self, attempt: Attempt, key: str, value: Any, *, written: bool = False) -> None:
        """Note an argument; report its value, unless that was `written` already."""
        assert attempt.values is not None
        if not written:
            self.output.add_arguments(attempt, json.dumps(value, ensure_ascii=False))
        if key in attempt.values:
            attempt.fail(CallStatus.DUPLICATE_ARGUMENT, f"the argument {key!r} is given twice")
        attempt.values[key] = value

    def _add_key(self, attempt: Attempt, key: str) -> None:
        lead = ", " if attempt.said or attempt.waiting else "{"
        self.output.add_arguments(attempt, f"{lead}{json.dumps(key, ensure_ascii=False)}: ")

    def _end(self, attempt: Attempt) -> None:
        """No more arguments come: close the object, unless the completion was cut off."""
        if not (self.reader.ended and self.reader.at == len(self.reader.data)):
            self.output.add_arguments(attempt, "}" if attempt.said or attempt.waiting else "{}")

    # -- pairs of key and value

    def pairs(self, attempt: Attempt) -> Reading[None]:
        """Arguments, until something else comes."""
        calls, reader = self.calls, self.reader
        attempt.values = {}
        goes_on = True
        while goes_on:
            if (yield from reader.skip_all(calls.key_open)):
                goes_on = yield from self._pair(attempt)
            else:
                goes_on = yield from self._past_junk(attempt)
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
                attempt.fail(CallStatus.MALFORMED, "there is something else between its arguments")
                return True
            reader.at = found.stop

    def _pair(self, attempt: Attempt) -> Reading[bool]:
        """One argument, after its opening; whether the call goes on."""
        calls, reader, output = self.calls, self.reader, self.output
        named = yield from self._name()
        if named is None:
            attempt.fail(CallStatus.MALFORMED, "an argument breaks off at its name")
            if reader.ended and reader.at == len(reader.data) and not unforgeable(calls.value_opens[0][0][0]):
                self.output.missing.append(
                    calls.grammar.value_close
                )  # else its name would go on in what closes the call
            return False
        key = named[0]
        opened, is_string = yield from self._opening(attempt, key)
        if not opened:
            return False
        schema = output.tools.parameter(attempt.name, key)
        self._add_key(attempt, key)
        start = reader.at
        if is_text(calls.grammar, is_string, schema):
            found = yield from self._string(attempt, key)
        else:
            found = yield from self._value_end(attempt, None)
            if found is not None:
                quoted = calls.grammar.strings is Value.JSON and reader.data[start : start + 1] == b'"'
                text = output.text(start, found.text)
                value, sure = read_typed(calls.grammar, text, schema, as_json=quoted or is_string is False)
                if not sure:
                    attempt.fail(CallStatus.INVALID_JSON, f"the argument {key!r} is not JSON")
                self._add(attempt, key, value)
        attempt.raw_values[key] = output.text(start, found.text if found is not None else reader.at)
        if found is None:
            self.output.missing.append(calls.grammar.value_close)
            return False
        if found.kind != "value":
            attempt.fail(CallStatus.UNCLOSED, f"the argument {key!r} is not closed")
            return found.kind.startswith("key ")
        if not (yield from reader.skip_all(calls.value_close)):
            reader.at = found.stop
        return True

    def _opening(self, attempt: Attempt, key: str) -> Reading[tuple[bool, bool | None]]:
        """Go past what opens a value; whether one follows, and whether it is said to be a string, if that is said."""
        calls, reader = self.calls, self.reader
        for pieces, lead, says_string in calls.value_opens:
            if (yield from reader.skip_all(pieces)):
                yield from reader.skip(lead)
                return True, says_string
        attempt.fail(CallStatus.MALFORMED, f"the argument {key!r} does not open as arguments do")
        if any(reader.breaks_off(pieces) for pieces, _, _ in calls.value_opens):
            reader.at = len(reader.data)
            return False, None
        reader.at += len(calls.value_opens[0][0][0])
        return True, None

    def _string(self, attempt: Attempt, key: str) -> Reading[Found | None]:
        """A value that can only be a string: it is reported as it comes."""
        output, start = self.output, self.reader.at
        say, done = output.arguments_sink(attempt, quoted=True)
        output.add_arguments(attempt, '"')
        found = yield from self._value_end(attempt, say)
        done()
        if found is not None:
            output.add_arguments(attempt, '"')
            self._add(attempt, key, output.text(start, found.text), written=True)
        return found

    def _value_end(self, attempt: Attempt, say: Say | None) -> Reading[Found | None]:
        """The end of a value: its closing, or what is certain to come after it where that is missing."""
        reader = self.reader
        marks = value_marks(self.calls, self.output.tools.declared(attempt.name))
        while True:
            found = yield from reader.find(marks, say)
            if found is None or (yield from self._ends_value(attempt, found)):
                return found
            if say is not None:
                say(found.text, found.stop)
            reader.at = found.stop

    def _ends_value(self, attempt: Attempt, found: Found) -> Reading[bool]:
        """Whether a mark ends the value, or is a part of it."""
        calls, reader = self.calls, self.reader
        if found.kind == "finish":
            return (yield from self._sees_one_of(calls.sure_ends, found.start))
        if found.kind.startswith("key "):
            return found.kind[4:] not in (attempt.values or {}) and found.kind[4:] not in attempt.raw_values
        if found.kind != "value" or unforgeable(calls.value_close[0]):
            return True
        past = yield from reader.sees_all(calls.value_close, found.start)
        at = yield from reader.past_space(past if past is not None else found.stop)
        return at == len(reader.data) or (yield from self._sees_one_of(calls.after_value, at))

    def _sees_one_of(self, sequences: list[tuple[bytes, ...]], at: int) -> Reading[bool]:
        for sequence in sequences:
            if (yield from self.reader.sees_all(sequence, at)) is not None:
                return True
        return False

    # -- trees of elements

    def tree(self, attempt: Attempt) -> Reading[None]:
        """Elements named after the arguments, until something else comes."""
        calls, reader, output = self.calls, self.reader, self.output
        attempt.values = {}
        while (yield from reader.sees_all(calls.finish)) is None:
            past = yield from reader.sees_all(calls.key_open)
            if past is None or (yield from self._another(reader.at)):
                break
            reader.at = past
            named = yield from self._name()
            if named is None:
                attempt.fail(CallStatus.MALFORMED, "an argument breaks off at its name")
                break
            key, start = named[0], named[1].stop
            reader.at = start
            schema = output.tools.parameter(attempt.name, key)
            whole, value, stop = yield from self._element(attempt, key, schema, 0)
            attempt.raw_values[key] = output.text(start, stop)
            if not whole:
                break
            self._add_key(attempt, key)
            self._add(attempt, key, value)
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
            if ends or depth >= _DEEPEST or not (yield from reader.sees(calls.key_open[0], at)):
                break
            reader.at = at + len(calls.key_open[0])
            named = yield from self._name()
            if named is None:
                return self._unclosed(attempt, name)
            child, reader.at = named[0], named[1].stop
            inner = None
            if schema is not None:
                inner = schema.items() if child == calls.grammar.item else schema.property(child)
            whole, value, _ = yield from self._element(attempt, child, inner, depth + 1)
            if not whole:
                return self._unclosed(attempt, name)
            children.append((child, value))
        found = yield from reader.find(calls.to_value_close)
        if found is None or found.kind != "value":
            return self._unclosed(attempt, name)
        if children and found.start > at:
            attempt.fail(CallStatus.MALFORMED, f"there is something else in {name!r}")
        past = yield from reader.sees_all((calls.value_close[0] + name.encode() + calls.value_opens[0][0][0],))
        if past is None:
            attempt.fail(CallStatus.MALFORMED, f"{name!r} is closed by another name")
            closing = yield from reader.find(calls.to_value)
            past = closing.stop if closing is not None and closing.kind == "value" else found.stop
        reader.at = past
        if children:
            return True, self._nested(attempt, name, children), found.start
        text = output.text(start, found.start)
        value, sure = read_value(text, schema)
        if not sure and not text and schema is not None:  # an empty list or object, where text is not admitted
            types = schema.admitted.types or ()
            value, sure = ([], True) if "array" in types else ({}, True) if "object" in types else ("", False)
        if not sure:
            attempt.fail(CallStatus.INVALID_JSON, f"{name!r} is not of its type")
        return True, value, found.start

    def _unclosed(self, attempt: Attempt, name: str) -> tuple[bool, Any, int]:
        attempt.fail(CallStatus.UNCLOSED, f"the argument {name!r} is not closed")
        if self.reader.ended and self.reader.at == len(self.reader.data):
            grammar = self.calls.grammar
            self.output.missing.append(f"{grammar.value_close}{name}{grammar.value_open}")
        return False, None, self.reader.at

    def _nested(self, attempt: Attempt, name: str, children: list[tuple[str, Any]]) -> Any:
        """Elements as a list or an object. In an object, several of one name are a list, so that none is lost."""
        if all(child == self.calls.grammar.item for child, _ in children):
            return [value for _, value in children]
        found: dict[str, list[Any]] = {}
        for child, value in children:
            found.setdefault(child, []).append(value)
        doubled = [child for child, values in found.items() if len(values) > 1]
        if doubled:
            attempt.fail(CallStatus.DUPLICATE_ARGUMENT, f"{doubled[0]!r} is given more than once in {name!r}")
        return {child: values if len(values) > 1 else values[0] for child, values in found.items()}
