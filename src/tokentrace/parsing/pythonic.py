"""Reading calls that are written as Python: ``[look_up(place="Paris", days=3)]``."""

from __future__ import annotations

import ast
import json
import re
from typing import Any, Final

from .compiled import CompiledCalls
from .output import Attempt, Output
from .reader import Reader, Reading
from .response import CallStatus

_NAME: Final = re.compile(rb"[A-Za-z_][\w.]*")
_BRACKETS: Final = re.compile(b"[\"'()\\[\\]{}\xff]")
_IN_STRING: Final = {quote: re.compile(b"[" + bytes((quote,)) + b"\\\\\xff]") for quote in b"\"'"}
_CONSTANTS: Final = {"true": True, "false": False, "null": None}
"""JSON's, which models write in place of Python's."""


class PythonReader:
    """Reads Python calls with keyword arguments."""

    def __init__(self, calls: CompiledCalls, reader: Reader, output: Output) -> None:
        self.calls = calls
        self.reader = reader
        self.output = output

    def begins(self, at: int) -> Reading[bool]:
        """Whether a name and a parenthesis stand at a position."""
        reader = self.reader
        end = at
        while True:
            match = _NAME.match(reader.data, at)
            end = match.end() if match else at
            if end < len(reader.data) or reader.ended:
                return end > at and reader.data[end : end + 1] == b"("
            yield

    def call(self, attempt: Attempt) -> Reading[None]:
        """One call, up to the parenthesis that closes it."""
        reader, output = self.reader, self.output
        start = yield from reader.past_space()
        if not (yield from self.begins(start)):
            attempt.blame(CallStatus.MALFORMED, "no function is called")
            attempt.ragged = True
            return
        match = _NAME.match(reader.data, start)
        assert match is not None
        output.name_call(attempt, match[0].decode())
        reader.at = match.end()
        if not (yield from self._parentheses()):
            attempt.blame(CallStatus.MALFORMED, "the call is not a Python call")
            attempt.ragged = True
            return
        self._read(attempt, output.text(start, reader.at))

    def _parentheses(self) -> Reading[bool]:
        """Go past all that the parenthesis here encloses; whether it is closed."""
        reader = self.reader
        data = reader.data
        at, depth, quote = reader.at, 0, 0
        while True:
            match = (_IN_STRING[quote] if quote else _BRACKETS).search(data, at)
            if match is None:
                reader.at = at = len(data)
                if reader.ended:
                    return False
                yield
                continue
            byte, at = data[match.start()], match.end()
            if byte == 0xFF:
                for piece in self.calls.hard_pieces:
                    if (yield from reader.sees(piece, match.start())):
                        reader.at = match.start()
                        return False
            elif byte == 0x5C:
                while len(data) <= at and not reader.ended:
                    yield
                at += 1
            elif quote:
                quote = 0
            elif byte in b"\"'":
                quote = byte
            else:
                depth += 1 if byte in b"([{" else -1
                if depth == 0:
                    reader.at = at
                    return True

    def _read(self, attempt: Attempt, text: str) -> None:
        try:
            tree = _parsed(text)
            if not isinstance(tree, ast.Call) or tree.args or any(word.arg is None for word in tree.keywords):
                raise ValueError("it has arguments without a name")
            values: dict[str, Any] = {}
            for word in tree.keywords:
                values[str(word.arg)] = _value(word.value)
                attempt.raw_values[str(word.arg)] = ast.get_source_segment(text, word.value) or ""
            written = json.dumps(values, ensure_ascii=False)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
            attempt.blame(CallStatus.MALFORMED, f"the call is not a Python call: {error}")
            return
        if len(values) < len(tree.keywords):
            attempt.blame(CallStatus.DUPLICATE_ARGUMENT, "an argument is given twice")
        attempt.values = values
        self.output.argue(attempt, written)


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
    return ast.literal_eval(node)
