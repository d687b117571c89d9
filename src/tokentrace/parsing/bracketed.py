"""Reading calls whose arguments stand in brackets and are not JSON. They are read when the bracket has closed.

Python's calls, ``[look_up(place="Paris", days=3)]``, and braces with unquoted keys and a mark of the grammar's own
around strings, ``{place:<|"|>Paris<|"|>,days:3}``.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from typing import Any, Final

from ..formats.grammar import Value
from .compiled import CompiledCalls
from .output import Attempt, Output
from .reader import Brackets, Reader, Reading
from .response import CallStatus
from .values import read_value

_NAME: Final = re.compile(rb"[A-Za-z_][\w.]*")
_OUTSIDE: Final = re.compile(b"[\"'()\\[\\]{}\xff]")
_STRINGS: Final = {
    ord(quote): re.compile(b"[^%b\\\\\xff]*(?:\\\\[^\xff][^%b\\\\\xff]*)*" % (quote, quote)) for quote in (b'"', b"'")
}
_PYTHON: Final = Brackets(b"([{", b")]}", _OUTSIDE, _STRINGS, strict=False)
_CONSTANTS: Final = {"true": True, "false": False, "null": None}
"""JSON's, which models write in place of Python's."""

_KEY: Final = re.compile(rb"\s*([^\s:,{}\[\]]+)\s*:")
_BARE_VALUE: Final = re.compile(rb"[^,{}\[\]\xff]*")
_SPACE: Final = re.compile(rb"\s*")
_DEEPEST: Final = 64


class BracketReader:
    """Reads calls in Python's notation (`call`), and arguments in braces (`arguments`)."""

    def __init__(self, calls: CompiledCalls, reader: Reader, output: Output) -> None:
        self.calls = calls
        self.reader = reader
        self.output = output

    def begins(self, at: int) -> Reading[bool]:
        """Whether a name and a parenthesis stand at a position."""
        reader = self.reader
        while True:
            match = _NAME.match(reader.data, at)
            end = match.end() if match else at
            if end < len(reader.data) or reader.ended:
                return end > at and reader.data[end : end + 1] == b"("
            yield

    def call(self, attempt: Attempt) -> Reading[None]:
        """One Python call, up to the parenthesis that closes it."""
        reader, output = self.reader, self.output
        start = yield from reader.past_space()
        if not (yield from self.begins(start)):
            attempt.broken(CallStatus.MALFORMED, "no function is called")
            return
        reader.at = reader.data.index(b"(", start)
        output.name_call(attempt, reader.data[start : reader.at].decode())
        if not (yield from reader.enclosed(_PYTHON, self.calls.hard_pieces)):
            attempt.broken(CallStatus.MALFORMED, "the call is not a Python call")
            return
        text = output.text(start, reader.at)
        try:
            tree = _parsed(text)
            if not isinstance(tree, ast.Call) or tree.args or any(word.arg is None for word in tree.keywords):
                raise ValueError("it has arguments without a name")
            values: dict[str, Any] = {}
            for word in tree.keywords:
                values[str(word.arg)] = self._meant(attempt, str(word.arg), _value(word.value))
                attempt.raw_values[str(word.arg)] = ast.get_source_segment(text, word.value) or ""
            written = json.dumps(values, ensure_ascii=False)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
            attempt.fail(CallStatus.MALFORMED, f"the call is not a Python call: {error}")
            return
        if len(values) < len(tree.keywords):
            attempt.fail(CallStatus.DUPLICATE_ARGUMENT, "an argument is given twice")
        attempt.values = values
        output.add_arguments(attempt, written)

    def arguments(self, attempt: Attempt) -> Reading[None]:
        """Arguments in braces, after the one that opens them, up to the one that closes them."""
        reader = self.reader
        start = reader.at - 1
        depth, quoted = 1, False
        while depth:
            found = yield from reader.find(self.calls.in_quotes if quoted else self.calls.in_braces)
            if found is None or found.kind in ("stop", "hard"):
                attempt.fail(CallStatus.MALFORMED, "the braces are not closed")
                return
            quoted = not quoted if found.kind == "quote" else quoted
            depth += {"open": 1, "close": -1}.get(found.kind, 0)
            reader.at = found.stop
        braces = _Braces(bytes(reader.data[start : reader.at]), self.calls.quote, self.output.decoded)
        try:
            values, stop = braces.value(0, 0)
        except ValueError as error:
            attempt.fail(CallStatus.MALFORMED, f"the arguments cannot be read: {error}")
            return
        if not isinstance(values, dict) or braces.data[stop:].strip():
            attempt.fail(CallStatus.MALFORMED, "the arguments are not an object")
            return
        attempt.values = values = {key: self._meant(attempt, key, value) for key, value in values.items()}
        self.output.add_arguments(attempt, json.dumps(values, ensure_ascii=False))

    def _meant(self, attempt: Attempt, key: str, value: Any) -> Any:
        """A value; what the tool's schema says it is, where all values are written as strings."""
        schema = self.output.tools.parameter(attempt.name, key)
        if self.calls.grammar.others is not Value.QUOTED or schema is None or not isinstance(value, str):
            return value
        return read_value(value, schema)[0]


def _parsed(text: str) -> ast.expr:
    """A call as Python reads it; line breaks in strings are taken as they are."""
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        return ast.parse(text.replace("\n", "\\n"), mode="eval").body


def _value(node: ast.expr) -> Any:
    """A literal, JSON's constants included."""
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_value(key) if key is not None else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key is not a string")
        return dict(zip(keys, map(_value, node.values), strict=True))
    try:
        return ast.literal_eval(node)
    except ValueError:  # its text names the object in memory, another one each time
        raise ValueError("a value is not a literal") from None


class _Braces:
    """Marked bytes in braces, in which text cannot spell a quote that is a control token.

    `value` reads the value at a position: what it is, and where it ends.
    """

    def __init__(self, data: bytes, quote: bytes, decoded: Callable[[bytes], str]) -> None:
        self.data = data
        self.quote = quote
        self._decoded = decoded

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        if depth > _DEEPEST:
            raise ValueError("it is nested too deeply")
        at = self._past_space(at)
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
        while not self.data.startswith(close, self._past_space(at)):
            match = _KEY.match(self.data, at) if close == b"}" else None
            if match is None and close == b"}":
                raise ValueError("a key is missing")
            value, at = self.value(match.end() if match else at, depth + 1)
            members.append((self._decoded(match[1].replace(self.quote, b"")) if match else "", value))
            at = self._past_space(at)
            if self.data.startswith(b",", at):
                at += 1
            elif not self.data.startswith(close, at):
                raise ValueError(f"a comma or {close.decode()!r} is missing")
        return (dict(members) if close == b"}" else [value for _, value in members]), self._past_space(at) + 1

    def _past_space(self, at: int) -> int:
        match = _SPACE.match(self.data, at)
        return match.end() if match else at
