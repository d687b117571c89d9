"""Reading arguments, by the style of the grammar.

JSON and arguments between tags are read as they arrive; Python (``[look_up(place="Paris")]``),
braces (``{place:<|"|>Paris<|"|>}``) and elements once their end is found.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..formats.grammar import Value
from ..values.schema import JSON_SPACE, Schema, read_json, read_value
from .compiled import CompiledCalls, ValueOpening
from .marked import unforgeable
from .output import ArgumentsText, OpenCall, Output
from .reader import Delimiters, Match, Notation, Reading, Report
from .response import CallStatus

_JSON_STRING = re.compile(b'[^"\\\\\n\r\xff]*(?:\\\\[^\xff][^"\\\\\n\r\xff]*)*')
_JSON = Notation(b"{[", b"}]", re.compile(rb"[^\s\w,:.+-]"), {ord('"'): _JSON_STRING}, strict=True)
_WORD = re.compile(rb"[-+.\w]*")
_CDATA = ("<![CDATA[", "]]>")
_NAME = re.compile(rb"(?:[A-Za-z_]|(?<=[\w.-])[\w.-])[\w.-]*")
"""A name, or more of one that arrives in several pieces."""
_STRING = b"[^%c\\\\\xff]*(?:\\\\[^\xff][^%c\\\\\xff]*)*"
_STRINGS = {quote: re.compile(_STRING % (quote, quote)) for quote in b"\"'"}
_PYTHON = Notation(b"([{", b")]}", re.compile(b"[\"'()\\[\\]{}\xff]"), _STRINGS)
_IN_PYTHON = re.compile(r"""('{3}|"{3}|['"])(?:\\.|(?!\1)[^\\])*+\1|[()\[\]{},]""", re.DOTALL)
_ESCAPES = re.compile(r"""(\\[\n\\'"abfnrtvxuUN0-7])|\\""")
_CONSTANTS = {"true": True, "false": False, "null": None}
_KEY = rb"([^\s:,{}\[\]]+)\s*:"
_DEEPEST = 64
_KEYWORD = re.compile(r"[^\W\d][\w-]*")
_AFTER = (b"]", b"}")
"""What may follow arguments that are not JSON, from the end."""


@dataclass(slots=True)
class _Element:
    """An open element, whose text begins at `start`."""

    name: str
    start: int
    schema: Schema | None
    children: list[tuple[str, Any]] = field(default_factory=list)


class ArgumentsReader:
    """Reads arguments of calls. With `any_key`, JSON arguments may be under either usual key."""

    def __init__(self, calls: CompiledCalls, output: Output, *, any_key: bool = False) -> None:
        self.calls, self.reader, self.output = calls, output.reader, output
        self.keys = calls.keys | ({path[0] for path in calls.fields} if any_key else set())

    def json_arguments(self, call: OpenCall) -> Reading[None]:
        reader = self.reader
        reader.at = yield from reader.past_space()
        report = ArgumentsText(call)
        if not (yield from self._arguments(report, self.calls.to_end)):
            call.break_off("the arguments are not JSON", CallStatus.INVALID_JSON)
        report.done()

    def _arguments(
        self, report: ArgumentsText, ends: Delimiters, after: tuple[bytes, ...] = ()
    ) -> Reading[bool]:
        """Read arguments; True if they are JSON. If not, the rest of the call is their text."""
        if (yield from self.json_value(report)):
            return True
        reader, start = self.reader, self.reader.at
        match = yield from reader.find(ends)
        text = reader.data[start : reader.at]
        for closing in () if match is None else (*after, b""):
            text = text.rstrip().removesuffix(closing)
        report(start, start + len(text))
        return False

    def json_call(self, call: OpenCall) -> Reading[bool]:
        """Read an object; True if it is a call. Announces the call once that is certain."""
        reader, seen = self.reader, set[str]()
        start = reader.at
        whole = yield from self._members(call, (), seen)
        if not call.announced:
            if whole or not reader.ended or not self.output.tools.declares(call.name):
                return False
            call.announce()
        if not whole:
            call.break_off("the call is not JSON", CallStatus.INVALID_JSON)
            return True
        try:
            read_json(reader.text(start, reader.at))
        except ValueError as error:
            call.fail(f"the call is not JSON: {error}", CallStatus.INVALID_JSON)
        if "arguments" not in seen and "arguments" in self.calls.paths.values():
            call.fail("the call has no arguments")
        return True

    def _members(self, call: OpenCall, path: tuple[str, ...], seen: set[str]) -> Reading[bool]:
        """Read an object's members, perhaps fields of a call; True if it is whole."""
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
        elif calls.grammar.named_key and len(here) == 1:
            call.fail("the object has more than one key")
        elif field in seen:
            if here in calls.paths:
                call.fail(f"{here[-1]!r} is given twice")
            field = None
        elif field is not None and here not in calls.paths:
            call.fail(f"its arguments are under {here[0]!r}", lenient=True)
        if field is None:
            if here in calls.inner_paths and (yield from reader.sees(b"{")):
                return (yield from self._members(call, here, seen))
            return (yield from self.json_value())
        seen.add(field)
        if field == "arguments" and not (yield from reader.sees(b'"')):
            return (yield from self._arguments(ArgumentsText(call), self.calls.to_close, _AFTER))
        if not (yield from self.json_value()):
            return False
        text = self._string(start)
        if field == "arguments":
            call.add_arguments(text or "")
        elif field == "id":
            call.set_name(None, text)
        else:
            call.set_name(text)
        if field == "name" and text is None:
            call.fail("the name is not a string", CallStatus.MISSING_NAME)
        return True

    def _string(self, start: int) -> str | None:
        try:
            value = read_json(self.reader.text(start, self.reader.at))
        except ValueError:
            return None
        return value if isinstance(value, str) else None

    def json_value(self, report: Report | None = None) -> Reading[bool]:
        """Read one JSON value; True if it is whole. Stops where it cannot be JSON."""
        reader = self.reader
        yield from reader.past_space()
        if bytes(reader.data[reader.at : reader.at + 1]) in (b"{", b"[", b'"'):
            return (yield from reader.enclosed(_JSON, self.calls.hard_ends, report))
        start = reader.at
        reader.at = at = yield from reader.past(_WORD)  # a number, or true, false, null
        if report is not None:
            report(start, at)
        return at > start

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
        while (match := (yield from reader.find(calls.to_key))) and match.kind == "key":
            if (yield from reader.sees_all(calls.key_open)) is not None:
                call.fail("there is other text between its arguments")
                return True
            reader.at = match.stop
        reader.at = start
        return False

    def _pair(self, call: OpenCall) -> Reading[bool]:
        calls, reader, missing = self.calls, self.reader, self.output.missing
        start = reader.at
        match = yield from reader.find(calls.to_value)
        if not match or match.kind != "value":
            call.fail("an argument breaks off at its name")
            if reader.exhausted and not unforgeable(calls.value_opens[0].pieces[0]):
                missing.append(calls.grammar.value_close)  # else the call's closing would continue its name
            return False
        key = reader.text(start, match.start).strip(JSON_SPACE)
        if (opening := (yield from self._open_value(call, key))) is None:
            return False
        call.add_key(key)
        start = reader.at
        match = yield from self._value(call, key, opening)
        call.raw_values[key] = reader.text(start, match.text if match is not None else reader.at)
        if match is None:
            missing.append(calls.grammar.value_close)
            return False
        if match.kind != "value":
            call.fail(f"the argument {key!r} is not closed", CallStatus.UNCLOSED)
            return match.kind.startswith("key ")
        if not (yield from reader.skip_all(calls.value_close)):
            reader.at = match.stop
        return True

    def _open_value(self, call: OpenCall, key: str) -> Reading[ValueOpening | None]:
        """Go past the opening of a value; None if the completion ends inside it."""
        ways, reader = self.calls.value_opens, self.reader
        for way in ways:
            if (yield from reader.skip_all(way.pieces)):
                yield from reader.skip(way.lead)
                return way
        call.fail(f"the argument {key!r} does not open as expected")
        remaining = b"".join(reader.data[reader.at :].split()) if reader.ended else None
        if remaining is not None and any(b"".join(way.pieces).startswith(remaining) for way in ways):
            reader.at = len(reader.data)
            return None
        reader.at += len(ways[0].pieces[0])
        return ways[0]._replace(is_string=None)

    def _value(self, call: OpenCall, key: str, opening: ValueOpening) -> Reading[Match | None]:
        """Read a value up to its end. Reports one that can only be a string as it arrives."""
        reader, tools, strings = self.reader, self.output.tools, self.calls.grammar.strings
        schema, is_text = tools.parameter(call.name, key), opening.is_string
        if is_text is None:
            is_text = schema is not None and schema.only_text and strings is Value.BARE
        start = reader.at
        report = ArgumentsText(call, quoted=True) if is_text else None
        quote = '"' * is_text
        call.add_arguments(quote)
        ends = self.calls.value_ends(tools.declared(call.name))
        while match := (yield from reader.find(ends, report)):
            if (yield from self._ends_value(call, match)):
                break
            if report is not None:
                report(match.text, match.stop)
            reader.at = match.stop
        if match is not None:
            text = reader.text(start, match.text)
            call.add_arguments(quote)
            value, certain = (text, True) if is_text else _typed(text, schema, strings, opening.is_string)
            if not certain:
                call.fail(f"the argument {key!r} is not JSON", CallStatus.INVALID_JSON)
            call.add_value(key, value, reported=is_text)
        return match

    def _ends_value(self, call: OpenCall, match: Match) -> Reading[bool]:
        calls, reader = self.calls, self.reader
        if match.kind == "finish":
            return (yield from reader.sees_one(calls.certain_ends, match.start))
        if match.kind.startswith("key "):
            return match.kind[4:] not in call.raw_values
        if match.kind != "value" or unforgeable(calls.value_close[0]):
            return True
        past = yield from reader.sees_all(calls.value_close, match.start)
        at = yield from reader.past_space(match.stop if past is None else past)
        return at == len(reader.data) or (yield from reader.sees_one(calls.after_value, at))

    def python_begins(self, at: int) -> Reading[bool]:
        end = yield from self.reader.past(_NAME, at)
        return end > at and self.reader.data.startswith(b"(", end)

    def python_call(self, call: OpenCall) -> Reading[None]:
        reader = self.reader
        start = yield from reader.past_space()
        if not (yield from self.python_begins(start)):
            call.break_off("no function is called")
            return
        reader.at = reader.data.index(b"(", start)
        call.set_name(reader.data[start : reader.at].decode())
        if not (yield from reader.enclosed(_PYTHON, self.calls.hard_ends)):
            call.break_off("the call is not a Python call")
            return
        try:
            words = list(_keywords(reader.text(start, reader.at)))
            call.raw_values = dict(words)
            values = {key: self._by_schema(call, key, _evaluated(text)) for key, text in words}
            values = json.loads(json.dumps(values, allow_nan=False))
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
            call.fail(f"the call is not a Python call: {error}")
            return
        if len(values) < len(words):
            call.fail("an argument is given twice", CallStatus.DUPLICATE_ARGUMENT, lenient=True)
        call.set_values(values)

    def braces(self, call: OpenCall) -> Reading[None]:
        reader, calls = self.reader, self.calls
        start, depth, quoted = reader.at - 1, 1, False
        while depth:
            match = yield from reader.find(calls.in_braces)
            if not match or match.kind in ("stop", "hard"):
                call.fail("the braces are not closed")
                return
            quoted ^= match.kind == "quote"
            depth += 0 if quoted else {"open": 1, "close": -1}.get(match.kind, 0)
            reader.at = match.stop
        try:
            text = bytes(reader.data[start : reader.at])
            values = _Braces(text, calls.quote, reader.marked.text).arguments()
        except ValueError as error:
            call.fail(f"the arguments cannot be read: {error}")
            return
        call.set_values({key: self._by_schema(call, key, value) for key, value in values.items()})

    def _by_schema(self, call: OpenCall, key: str, value: Any) -> Any:
        """A value, read by the tool's schema if the format writes all values as strings."""
        schema = self.output.tools.parameter(call.name, key)
        if self.calls.grammar.others is not Value.QUOTED or schema is None or not isinstance(value, str):
            return value
        return read_value(value, schema)[0]

    def tree(self, call: OpenCall) -> Reading[None]:
        calls, reader = self.calls, self.reader
        start = reader.at
        while (match := (yield from reader.find(calls.to_finish))) and match.kind == "finish":
            if (yield from reader.sees_all(calls.finish)) is not None:
                break
            reader.at = match.stop
        stack = self._elements(call, start, reader.at)
        if match is None:
            closing, opening = calls.grammar.value_close, calls.grammar.value_open
            self.output.missing += [f"{closing}{element.name}{opening}" for element in reversed(stack)]
        call.end_values()

    def _elements(self, call: OpenCall, at: int, stop: int) -> list[_Element]:
        """Read elements up to `stop`, add closed ones to the call, return open ones."""
        reader, tools, stack = self.reader, self.output.tools, list[_Element]()
        for tag in self.calls.tags.finditer(reader.data, at, stop):
            between, name = reader.data[at : tag.start()].strip(), reader.marked.text(tag["name"])
            if not stack and (between or tag["close"]):
                break
            inside = stack and not tag["close"]
            if inside and (len(stack) > _DEEPEST or (between and not stack[-1].children)):
                continue  # part of the text
            if tag["close"]:
                element = stack.pop()
                if element.children and between:
                    call.fail(f"there is other text in {element.name!r}")
                if name != element.name or not tag["end"]:
                    call.fail(f"{element.name!r} is closed by another name")
                text = reader.text(element.start, tag.start())
                value = self._element_value(call, element, text)
                if stack:
                    stack[-1].children.append((element.name, value))
                else:
                    call.raw_values[element.name] = text
                    call.add_key(element.name)
                    call.add_value(element.name, value)
            elif not tag["end"]:
                call.fail("an argument breaks off at its name")
                at = stop
                break
            else:
                name, outer = name.strip(), stack[-1].schema if stack else None
                schema = tools.parameter(call.name, name) if not stack else None
                if outer is not None:
                    schema = outer.items() if name == self.calls.grammar.item else outer.property(name)
                stack.append(_Element(name, tag.end(), schema))
            at = tag.end() if tag["end"] else tag.start("name")
        for element in reversed(stack):
            call.fail(f"the argument {element.name!r} is not closed", CallStatus.UNCLOSED)
        if stack:
            call.raw_values[stack[0].name] = reader.text(stack[0].start, stop)
        reader.at = stop if stack else at
        return stack

    def _element_value(self, call: OpenCall, element: _Element, text: str) -> Any:
        """An element's children as a list or an object; else its text."""
        values: dict[str, list[Any]] = {}
        for name, value in element.children:
            values.setdefault(name, []).append(value)
        types = (element.schema and element.schema.types) or ()
        if values.keys() == {self.calls.grammar.item} and (not types or "array" in types):
            return values[self.calls.grammar.item]
        if twice := [name for name, some in values.items() if len(some) > 1]:
            problem = f"{twice[0]!r} is given more than once in {element.name!r}"
            call.fail(problem, CallStatus.DUPLICATE_ARGUMENT, lenient=True)
        if values:
            return {name: some if len(some) > 1 else some[0] for name, some in values.items()}
        value, certain = read_value(text, element.schema)
        if not certain and not text:  # empty, where text is not allowed
            value = [] if "array" in types else {} if "object" in types else ""
        if not certain and value == text:
            call.fail(f"{element.name!r} is not of its declared type", CallStatus.INVALID_JSON)
        return value


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


def _keywords(text: str) -> Iterator[tuple[str, str]]:
    """The arguments of a call, whose names may be none in Python: ``from``, ``user-id``."""
    inner, start, depth = text[text.index("(") + 1 : -1].strip().removesuffix(","), 0, 0
    for match in _IN_PYTHON.finditer(inner + "," * bool(inner)):
        depth += (match[0] in "([{") - (match[0] in ")]}")
        if match[0] == "," and not depth:
            name, _, value = inner[start : match.start()].partition("=")
            if not _KEYWORD.fullmatch(name := name.strip()) or not value:
                raise ValueError("it has arguments without a name or a value")
            yield name, value.strip()
            start = match.end()


def _evaluated(text: str) -> Any:
    text = _ESCAPES.sub(lambda match: match[1] or r"\\", text)  # Python 3.12 warns about unknown ones
    try:
        return _literal(ast.parse(text, mode="eval").body)
    except SyntaxError:  # line breaks in strings
        return _literal(ast.parse(text.replace("\n", "\\n"), mode="eval").body)


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_literal(key) if key is not None else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key is not a string")
        return dict(zip(keys, map(_literal, node.values), strict=True))
    try:
        return ast.literal_eval(node)
    except ValueError:  # its message holds a memory address, which changes each time
        raise ValueError("a value is not a literal") from None


class _Braces:
    """Reads marked bytes in braces. Raises ValueError."""

    def __init__(self, data: bytes, quote: bytes, decode: Callable[[bytes], str]) -> None:
        self.data, self.at, self.quote, self._decode = data, 0, quote, decode

    def arguments(self) -> dict[str, Any]:
        values = self._value(0)
        if not isinstance(values, dict) or self.data[self.at :].strip():
            raise ValueError("they are not an object")
        return values

    def _take(self, pattern: bytes) -> re.Match[bytes] | None:
        """Go past a pattern, and white space before it, if it follows."""
        match = re.compile(rb"\s*" + pattern).match(self.data, self.at)
        self.at = match.end() if match else self.at
        return match

    def _value(self, depth: int) -> Any:
        if depth > _DEEPEST:
            raise ValueError("it is nested too deeply")
        if self._take(re.escape(self.quote)):
            start, stop = self.at, self.data.find(self.quote, self.at)
            if stop < 0:
                raise ValueError("a string is not closed")
            self.at = stop + len(self.quote)
            return self._decode(self.data[start:stop])
        if self._take(b"{"):
            return dict(self._members(b"}", depth))
        if self._take(rb"\["):
            return [value for _, value in self._members(b"]", depth)]
        match = self._take(rb"[^,{}\[\]\xff]*")
        return read_value(self._decode(match[0]).strip(), None)[0] if match else ""

    def _members(self, close: bytes, depth: int) -> Iterator[tuple[str, Any]]:
        while not self._take(close):
            key = self._take(_KEY) if close == b"}" else None
            if key is None and close == b"}":
                raise ValueError("a key is missing")
            yield self._decode(key[1].replace(self.quote, b"")) if key else "", self._value(depth + 1)
            if not self._take(b",") and not self._take(b"(?=%b)" % close):
                raise ValueError(f"a comma or {close.decode()!r} is missing")
