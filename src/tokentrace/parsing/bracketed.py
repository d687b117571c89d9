"""Reading calls that are not JSON and not pairs: first their end is found, then a pure function reads them.

Python's calls, ``[look_up(place="Paris", days=3)]``; braces with unquoted keys and quotes of their own,
``{place:<|"|>Paris<|"|>,days:3}``; and elements named after the arguments, nested as the values are.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from ..formats.grammar import Value
from .compiled import CompiledCalls
from .output import OpenCall, Output
from .reader import Notation, Reader, Reading
from .response import CallStatus
from .values import Schema, read_value

_NAME: Final = re.compile(rb"[A-Za-z_][\w.]*")
_PYTHON: Final = Notation(
    opening=b"([{",
    closing=b")]}",
    outside=re.compile(b"[\"'()\\[\\]{}\xff]"),
    strings={
        ord(quote): re.compile(b"[^%b\\\\\xff]*(?:\\\\[^\xff][^%b\\\\\xff]*)*" % (quote, quote))
        for quote in (b'"', b"'")
    },
    in_string=re.compile(b"[\"'\\\\\xff]"),
    strict=False,
)
_CONSTANTS: Final = {"true": True, "false": False, "null": None}
"""JSON's constants, which models write in Python too."""
_KEY: Final = re.compile(rb"\s*([^\s:,{}\[\]]+)\s*:")
_BARE_VALUE: Final = re.compile(rb"[^,{}\[\]\xff]*")
_SPACE: Final = re.compile(rb"\s*")
_DEEPEST: Final = 64


class BracketReader:
    """Finds the end of a call in Python (`call`), of arguments in braces (`arguments`) and of elements (`tree`)."""

    def __init__(self, calls: CompiledCalls, reader: Reader, output: Output) -> None:
        self.calls = calls
        self.reader = reader
        self.output = output

    def begins(self, at: int) -> Reading[bool]:
        """True if a name and a parenthesis are at a position."""
        reader = self.reader
        while True:
            match = _NAME.match(reader.data, at)
            end = match.end() if match else at
            if end < len(reader.data) or reader.ended:
                return end > at and reader.data[end : end + 1] == b"("
            yield

    def call(self, call: OpenCall) -> Reading[None]:
        """One Python call, up to its closing parenthesis."""
        reader, output = self.reader, self.output
        start = yield from reader.past_space()
        if not (yield from self.begins(start)):
            call.break_off(CallStatus.MALFORMED, "no function is called")
            return
        reader.at = reader.data.index(b"(", start)
        call.set_name(reader.data[start : reader.at].decode())
        if not (yield from reader.enclosed(_PYTHON, self.calls.hard_ends)):
            call.break_off(CallStatus.MALFORMED, "the call is not a Python call")
            return
        try:
            values, call.raw_values, repeated = read_python_call(output.text(start, reader.at))
            values = {key: self._typed(call, key, value) for key, value in values.items()}
            json.dumps(values)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
            call.fail(CallStatus.MALFORMED, f"the call is not a Python call: {error}")
            return
        if repeated:
            call.fail(CallStatus.DUPLICATE_ARGUMENT, "an argument is given twice", lenient=True)
        call.set_values(values)

    def arguments(self, call: OpenCall) -> Reading[None]:
        """Arguments in braces, after the opening brace, up to the closing one."""
        reader, calls = self.reader, self.calls
        start = reader.at - 1
        depth, quoted = 1, False
        while depth:
            match = yield from reader.find(calls.in_quotes if quoted else calls.in_braces)
            if match is None or match.kind in ("stop", "hard"):
                call.fail(CallStatus.MALFORMED, "the braces are not closed")
                return
            quoted = not quoted if match.kind == "quote" else quoted
            depth += {"open": 1, "close": -1}.get(match.kind, 0)
            reader.at = match.stop
        braces = _Braces(bytes(reader.data[start : reader.at]), calls.quote, self.output.decoded)
        try:
            values, stop = braces.value(0, 0)
        except ValueError as error:
            call.fail(CallStatus.MALFORMED, f"the arguments cannot be read: {error}")
            return
        if not isinstance(values, dict) or braces.data[stop:].strip():
            call.fail(CallStatus.MALFORMED, "the arguments are not an object")
            return
        call.set_values({key: self._typed(call, key, value) for key, value in values.items()})

    def _typed(self, call: OpenCall, key: str, value: Any) -> Any:
        """A value; by the tool's schema if the format writes all values as strings."""
        schema = self.output.tools.parameter(call.name, key)
        if self.calls.grammar.others is not Value.QUOTED or schema is None or not isinstance(value, str):
            return value
        return read_value(value, schema)[0]

    def tree(self, call: OpenCall) -> Reading[None]:
        """Elements named after the arguments, up to the closing of the call, or to what ends calls early."""
        calls, reader, output = self.calls, self.reader, self.output
        start = reader.at
        while True:
            match = yield from reader.find(calls.to_finish)
            if match is None or match.kind != "finish" or (yield from reader.sees_all(calls.finish)) is not None:
                break
            reader.at = match.stop
        tree = _Tree(bytes(reader.data[start : reader.at]), calls, call, output)
        call.values = {}
        for key, value in tree.arguments():
            lead = ", " if call.has_arguments else "{"
            text = json.dumps(value, ensure_ascii=False)
            call.add_arguments(f"{lead}{json.dumps(key, ensure_ascii=False)}: {text}")
            if key in call.values:
                call.fail(CallStatus.DUPLICATE_ARGUMENT, f"the argument {key!r} is given twice", lenient=True)
            call.values[key] = value
        reader.at = start + tree.at
        if match is None:
            output.missing += tree.unclosed
        if not reader.exhausted:
            call.add_arguments("}" if call.has_arguments else "{}")


def read_python_call(text: str) -> tuple[dict[str, Any], dict[str, str], bool]:
    """The keyword arguments of a call in Python: values, verbatim texts, and whether one is given twice.

    Raises what `ast.parse` raises, and ValueError if an argument has no name or is not a literal.
    """
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:  # line breaks in strings
        tree = ast.parse(text.replace("\n", "\\n"), mode="eval").body
    if not isinstance(tree, ast.Call) or tree.args or any(word.arg is None for word in tree.keywords):
        raise ValueError("it has arguments without a name")
    values = {str(word.arg): _literal(word.value) for word in tree.keywords}
    raw = {str(word.arg): ast.get_source_segment(text, word.value) or "" for word in tree.keywords}
    return values, raw, len(values) < len(tree.keywords)


def _literal(node: ast.expr) -> Any:
    """A literal, JSON's constants included."""
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
    except ValueError:  # its text names the object in memory, another one each time
        raise ValueError("a value is not a literal") from None


class _Braces:
    """Marked bytes in braces, in which text cannot spell a quote that is a control token.

    `value` reads the value at a position: what it is, and where it ends. Raises ValueError.
    """

    def __init__(self, data: bytes, quote: bytes, decoded: Callable[[bytes], str]) -> None:
        self.data = data
        self.quote = quote
        self._decoded = decoded

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        if depth > _DEEPEST:
            raise ValueError("it is nested too deeply")
        at = _past_space(self.data, at)
        if self.data.startswith(self.quote, at):
            stop = self.data.find(self.quote, at + len(self.quote))
            if stop < 0:
                raise ValueError("a string is not closed")
            return self._decoded(self.data[at + len(self.quote) : stop]), stop + len(self.quote)
        if self.data.startswith((b"{", b"["), at):
            return self._members(at + 1, b"}" if self.data.startswith(b"{", at) else b"]", depth)
        match = _BARE_VALUE.match(self.data, at)
        word = match[0] if match else b""
        return read_value(self._decoded(word).strip(), None)[0], at + len(word)

    def _members(self, at: int, close: bytes, depth: int) -> tuple[Any, int]:
        """The members of an object or a list, by what closes it."""
        members: list[tuple[str, Any]] = []
        while not self.data.startswith(close, _past_space(self.data, at)):
            match = _KEY.match(self.data, at) if close == b"}" else None
            if match is None and close == b"}":
                raise ValueError("a key is missing")
            value, at = self.value(match.end() if match else at, depth + 1)
            members.append((self._decoded(match[1].replace(self.quote, b"")) if match else "", value))
            at = _past_space(self.data, at)
            if self.data.startswith(b",", at):
                at += 1
            elif not self.data.startswith(close, at):
                raise ValueError(f"a comma or {close.decode()!r} is missing")
        values = dict(members) if close == b"}" else [value for _, value in members]
        return values, _past_space(self.data, at) + 1


def _past_space(data: bytes, at: int) -> int:
    match = _SPACE.match(data, at)
    return match.end() if match else at


@dataclass(slots=True)
class _Element:
    """An element that is being read: its name, where its text begins, its schema and its children."""

    name: str
    start: int
    schema: Schema | None
    children: list[tuple[str, Any]] = field(default_factory=list)


class _Tree:
    """Elements named after arguments, as marked bytes: ``<key>`` value or elements ``</key>``.

    `arguments` yields those that are whole. Afterwards `at` is where reading stopped, and `unclosed` is what would
    close the elements that are open there.
    """

    def __init__(self, data: bytes, calls: CompiledCalls, call: OpenCall, output: Output) -> None:
        self.data = data
        self.at = 0
        self.unclosed: list[str] = []
        self._call = call
        self._output = output
        self._open, self._close = calls.key_open[0], calls.value_close[0]
        self._tag_end = calls.value_opens[0].pieces[0]
        self._grammar = calls.grammar

    def arguments(self) -> Iterator[tuple[str, Any]]:
        """Each argument that is closed, with its value."""
        stack: list[_Element] = []
        while True:
            at = _past_space(self.data, self.at)
            opens = self.data.startswith(self._open, at) and not self.data.startswith(self._close, at)
            if opens and len(stack) <= _DEEPEST:
                end = self.data.find(self._tag_end, at + len(self._open))
                if end < 0:
                    self._call.fail(CallStatus.MALFORMED, "an argument breaks off at its name")
                    break
                name = self._output.decoded(self.data[at + len(self._open) : end]).strip()
                self.at = end + len(self._tag_end)
                stack.append(_Element(name, self.at, self._schema(stack, name)))
                continue
            if not stack:
                return
            stop = self.data.find(self._close, self.at)
            if stop < 0:
                break
            element = stack.pop()
            if element.children and stop > at:
                self._call.fail(CallStatus.MALFORMED, f"there is something else in {element.name!r}")
            value = self._closed(element, stop)
            if stack:
                stack[-1].children.append((element.name, value))
            else:
                self._call.raw_values[element.name] = self._output.decoded(self.data[element.start : stop])
                yield element.name, value
        for element in reversed(stack):
            self._call.fail(CallStatus.UNCLOSED, f"the argument {element.name!r} is not closed")
            self.unclosed.append(f"{self._grammar.value_close}{element.name}{self._grammar.value_open}")
        if stack:
            self._call.raw_values[stack[0].name] = self._output.decoded(self.data[stack[0].start :])
        self.at = len(self.data)

    def _schema(self, stack: list[_Element], name: str) -> Schema | None:
        if not stack:
            return self._output.tools.parameter(self._call.name, name)
        outer = stack[-1].schema
        if outer is None:
            return None
        return outer.items() if name == self._grammar.item else outer.property(name)

    def _closed(self, element: _Element, stop: int) -> Any:
        """The value of an element whose closing tag begins at `stop`; goes past that tag."""
        end = self.data.find(self._tag_end, stop + len(self._close))
        if end < 0 or self._output.decoded(self.data[stop + len(self._close) : end]) != element.name:
            self._call.fail(CallStatus.MALFORMED, f"{element.name!r} is closed by another name")
        self.at = end + len(self._tag_end) if end >= 0 else stop + len(self._close)
        if element.children:
            return self._nested(element)
        text, schema = self._output.decoded(self.data[element.start : stop]), element.schema
        value, certain = read_value(text, schema)
        if not certain and not text and schema is not None:  # an empty list or object, where text is not allowed
            types = schema.types or ()
            value, certain = ([], True) if "array" in types else ({}, True) if "object" in types else ("", False)
        if not certain:
            self._call.fail(CallStatus.INVALID_JSON, f"{element.name!r} is not of its type")
        return value

    def _nested(self, element: _Element) -> Any:
        """Elements as a list or an object. In an object, several of one name are a list, so that none is lost."""
        if all(name == self._grammar.item for name, _ in element.children):
            return [value for _, value in element.children]
        values: dict[str, list[Any]] = {}
        for name, value in element.children:
            values.setdefault(name, []).append(value)
        repeated = [name for name, some in values.items() if len(some) > 1]
        if repeated:
            problem = f"{repeated[0]!r} is given more than once in {element.name!r}"
            self._call.fail(CallStatus.DUPLICATE_ARGUMENT, problem, lenient=True)
        return {name: some if len(some) > 1 else some[0] for name, some in values.items()}
