"""Reading calls in Python, ``[look_up(place="Paris")]``, in braces, ``{place:<|"|>Paris<|"|>}``, and as elements.

First their end is found, then they are read at once.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from ..formats.grammar import Value
from .output import CallReader, OpenCall
from .reader import Notation, Reading
from .response import CallStatus
from .values import Schema, read_value

_NAME: Final = re.compile(rb"[A-Za-z_][\w.]*")
_STRINGS: Final = {
    ord(quote): re.compile(b"[^%b\\\\\xff]*(?:\\\\[^\xff][^%b\\\\\xff]*)*" % (quote, quote)) for quote in (b'"', b"'")
}
_PYTHON: Final = Notation(b"([{", b")]}", re.compile(b"[\"'()\\[\\]{}\xff]"), _STRINGS, re.compile(b"[\"'\\\\\xff]"))
_CONSTANTS: Final = {"true": True, "false": False, "null": None}
"""JSON's constants, which models write in Python too."""
_KEY: Final = re.compile(rb"\s*([^\s:,{}\[\]]+)\s*:")
_BARE_VALUE: Final = re.compile(rb"[^,{}\[\]\xff]*")
_SPACE: Final = re.compile(rb"\s*")
_DEEPEST: Final = 64


@dataclass(slots=True)
class _Element:
    """An element that is open; `start` is where its text begins."""

    name: str
    start: int
    schema: Schema | None
    children: list[tuple[str, Any]] = field(default_factory=list)


class BracketReader(CallReader):
    def python_begins(self, at: int) -> Reading[bool]:
        data = self.reader.data
        while True:
            match = _NAME.match(data, at)
            end = match.end() if match else at
            if end < len(data) or self.reader.ended:
                return end > at and data.startswith(b"(", end)
            yield

    def python_call(self, call: OpenCall) -> Reading[None]:
        reader = self.reader
        start = yield from reader.past_space()
        if not (yield from self.python_begins(start)):
            call.fail(CallStatus.MALFORMED, "no function is called", ragged=True)
            return
        reader.at = reader.data.index(b"(", start)
        call.set_name(reader.data[start : reader.at].decode())
        if not (yield from reader.enclosed(_PYTHON, self.calls.hard_ends)):
            call.fail(CallStatus.MALFORMED, "the call is not a Python call", ragged=True)
            return
        try:
            text = reader.text(start, reader.at)
            words = _keywords(text)
            values = {key: self._typed(call, key, _literal(node)) for key, node in words}
            call.raw_values = {key: ast.get_source_segment(text, node) or "" for key, node in words}
            json.dumps(values)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
            call.fail(CallStatus.MALFORMED, f"the call is not a Python call: {error}")
            return
        if len(values) < len(words):
            call.fail(CallStatus.DUPLICATE_ARGUMENT, "an argument is given twice", lenient=True)
        call.set_values(values)

    def braces(self, call: OpenCall) -> Reading[None]:
        reader, calls = self.reader, self.calls
        start, depth, quoted = reader.at - 1, 1, False
        while depth:
            match = yield from reader.find(calls.in_quotes if quoted else calls.in_braces)
            if match is None or match.kind in ("stop", "hard"):
                call.fail(CallStatus.MALFORMED, "the braces are not closed")
                return
            quoted = not quoted if match.kind == "quote" else quoted
            depth += {"open": 1, "close": -1}.get(match.kind, 0)
            reader.at = match.stop
        try:
            values = _Braces(bytes(reader.data[start : reader.at]), calls.quote, reader.marked.text).arguments()
        except ValueError as error:
            call.fail(CallStatus.MALFORMED, f"the arguments cannot be read: {error}")
            return
        call.set_values({key: self._typed(call, key, value) for key, value in values.items()})

    def _typed(self, call: OpenCall, key: str, value: Any) -> Any:
        """A value; by the tool's schema if the format writes all values as strings."""
        schema = self.output.tools.parameter(call.name, key)
        if self.calls.grammar.others is not Value.QUOTED or schema is None or not isinstance(value, str):
            return value
        return read_value(value, schema)[0]

    def tree(self, call: OpenCall) -> Reading[None]:
        calls, reader = self.calls, self.reader
        start = reader.at
        while True:
            match = yield from reader.find(calls.to_finish)
            if match is None or match.kind != "finish" or (yield from reader.sees_all(calls.finish)) is not None:
                break
            reader.at = match.stop
        stack = self._elements(call, start, reader.at)
        if match is None:
            closing, opening = calls.grammar.value_close, calls.grammar.value_open
            self.output.missing += [f"{closing}{element.name}{opening}" for element in reversed(stack)]
        call.end_values()

    def _elements(self, call: OpenCall, at: int, stop: int) -> list[_Element]:
        """Go past elements up to `stop`, and add those that are whole to the call. Returns the others."""
        reader, tools, stack = self.reader, self.output.tools, list[_Element]()
        for tag in self.calls.tags.finditer(reader.data, at, stop):
            between, name = reader.data[at : tag.start()].strip(), reader.marked.text(tag["name"])
            if not stack and (between or tag["close"]):
                break
            if stack and not tag["close"] and (len(stack) > _DEEPEST or (between and not stack[-1].children)):
                continue  # a part of the text
            if tag["close"]:
                element = stack.pop()
                if element.children and between:
                    call.fail(CallStatus.MALFORMED, f"there is something else in {element.name!r}")
                if name != element.name or not tag["end"]:
                    call.fail(CallStatus.MALFORMED, f"{element.name!r} is closed by another name")
                text = reader.text(element.start, tag.start())
                value = self._element_value(call, element, text)
                if stack:
                    stack[-1].children.append((element.name, value))
                else:
                    call.raw_values[element.name] = text
                    call.add_key(element.name)
                    call.add_value(element.name, value)
            elif not tag["end"]:
                call.fail(CallStatus.MALFORMED, "an argument breaks off at its name")
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
            call.fail(CallStatus.UNCLOSED, f"the argument {element.name!r} is not closed")
        if stack:
            call.raw_values[stack[0].name] = reader.text(stack[0].start, stop)
        reader.at = stop if stack else at
        return stack

    def _element_value(self, call: OpenCall, element: _Element, text: str) -> Any:
        """Elements as a list or an object, in which several of one name are a list; or the text."""
        if element.children and all(name == self.calls.grammar.item for name, _ in element.children):
            return [value for _, value in element.children]
        if element.children:
            values: dict[str, list[Any]] = {}
            for name, value in element.children:
                values.setdefault(name, []).append(value)
                if len(values[name]) == 2:
                    problem = f"{name!r} is given more than once in {element.name!r}"
                    call.fail(CallStatus.DUPLICATE_ARGUMENT, problem, lenient=True)
            return {name: some if len(some) > 1 else some[0] for name, some in values.items()}
        value, certain = read_value(text, element.schema)
        if not certain and not text and element.schema is not None:  # empty, where text is not allowed
            types = element.schema.types or ()
            value, certain = ([], True) if "array" in types else ({}, True) if "object" in types else ("", False)
        if not certain:
            call.fail(CallStatus.INVALID_JSON, f"{element.name!r} is not of its type")
        return value


def _keywords(text: str) -> list[tuple[str, ast.expr]]:
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:  # line breaks in strings
        tree = ast.parse(text.replace("\n", "\\n"), mode="eval").body
    if not isinstance(tree, ast.Call) or tree.args or any(word.arg is None for word in tree.keywords):
        raise ValueError("it has arguments without a name")
    return [(str(word.arg), word.value) for word in tree.keywords]


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
    except ValueError:  # its text names the object in memory, another one each time
        raise ValueError("a value is not a literal") from None


class _Braces:
    """Marked bytes in braces. Raises ValueError."""

    def __init__(self, data: bytes, quote: bytes, decoded: Callable[[bytes], str]) -> None:
        self.data, self.at, self.quote, self._decoded = data, 0, quote, decoded

    def arguments(self) -> dict[str, Any]:
        values = self._value(0)
        if not isinstance(values, dict) or self.data[self.at :].strip():
            raise ValueError("they are not an object")
        return values

    def _take(self, pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
        match = pattern.match(self.data, self.at)
        self.at = match.end() if match else self.at
        return match

    def _skip(self, text: bytes) -> bool:
        """Go past white space, and past `text` if it follows; True if it does."""
        self._take(_SPACE)
        matches = self.data.startswith(text, self.at)
        self.at += len(text) if matches else 0
        return matches

    def _value(self, depth: int) -> Any:
        if depth > _DEEPEST:
            raise ValueError("it is nested too deeply")
        if self._skip(self.quote):
            start, stop = self.at, self.data.find(self.quote, self.at)
            if stop < 0:
                raise ValueError("a string is not closed")
            self.at = stop + len(self.quote)
            return self._decoded(self.data[start:stop])
        if self._skip(b"{"):
            return dict(self._members(b"}", depth))
        if self._skip(b"["):
            return [value for _, value in self._members(b"]", depth)]
        match = self._take(_BARE_VALUE)
        return read_value(self._decoded(match[0]).strip(), None)[0] if match else ""

    def _members(self, close: bytes, depth: int) -> Iterator[tuple[str, Any]]:
        while not self._skip(close):
            key = self._take(_KEY) if close == b"}" else None
            if key is None and close == b"}":
                raise ValueError("a key is missing")
            yield self._decoded(key[1].replace(self.quote, b"")) if key else "", self._value(depth + 1)
            if not self._skip(b",") and not self.data.startswith(close, self.at):
                raise ValueError(f"a comma or {close.decode()!r} is missing")
