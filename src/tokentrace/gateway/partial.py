"""JSON objects that are not whole: how far a text can be one, and what can be read of it. Pure.

Anthropic's clients read a call's input while it arrives. They fail on text that cannot become JSON, and read what is
merely unfinished as far as it goes. `PartialObject` lets through what they can read.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final, Literal, TypeAlias

from ..parsing.values import read_json

_DEEPEST: Final = 100
"""Anthropic's client reads 200 levels."""
_LONGEST_SCALAR: Final = 5000

_SPACE: Final = re.compile(r"[ \t\n\r]*")
_SCALAR: Final = re.compile(r"[-+.\w]*")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,3999})(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?", re.ASCII)
_HEX: Final = "[0-9a-fA-F]"
_HIGH, _LOW = f"[dD][89abAB]{_HEX}{{2}}", f"[dD][c-fC-F]{_HEX}{{2}}"
_ESCAPE: Final = rf'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F]){_HEX}{{4}}|u{_HIGH}\\u{_LOW})'
"""An escape. Half of a surrogate pair is not one: no text can contain it."""
_STRING: Final = re.compile(rf'(?:[^"\\\x00-\x1f]|{_ESCAPE})*')
_OPEN_ESCAPE: Final = re.compile(rf"\\(?:u(?:{_HEX}{{0,3}}|{_HIGH}(?:\\(?:u{_HEX}{{0,3}})?)?)?)?\Z")
_CLOSERS: Final = {"{": "}", "[": "]"}

_Expected: TypeAlias = Literal["object", "first", "key", "value", "more", "nothing"]
"""What comes next; ``first`` is a member, an item or the end."""


class PartialObject:
    """Takes a text in pieces, and lets through what can be the beginning of a JSON object.

    The text of a string passes as it comes. The end of a value waits for what follows it: only then is it certain. Text
    that cannot continue as JSON passes up to there, and nothing after it.
    """

    def __init__(self) -> None:
        self.text = ""
        """What was let through."""
        self.broken = False
        """True if the text is not the beginning of an object, or if something follows it."""
        self._pending = ""
        self._expected: _Expected = "object"
        self._in_string = False
        self._closers: list[str] = []
        """What closes the open objects and lists."""
        self._whole = 0, ""
        """How much of `text` is whole, and what would close it there."""

    @property
    def closed(self) -> bool:
        """True if the object was closed, and nothing follows it."""
        return bool(self.text) and not self._closers and not self.broken

    def feed(self, text: str) -> str:
        """Take more of the text; returns what may pass."""
        before = len(self.text)
        self._pending += text
        while not self.broken and self._step():
            pass
        return self.text[before:]

    def value(self) -> dict[str, Any]:
        """What can be read: the members that are whole, and what unclosed lists and objects have."""
        length, closing = self._whole
        value = read_json(self.text[:length] + closing) if length else {}
        return value if isinstance(value, dict) else {}

    def _step(self) -> bool:
        """Let one token pass. False if it needs more text."""
        if self._in_string:
            return self._string()
        at = _end(_SPACE, self._pending, 0)
        if at == len(self._pending):
            return False
        char, closer = self._pending[at], self._closers[-1] if self._closers else ""
        match self._expected:
            case "object" if char == "{":
                return self._open(at)
            case "first" | "more" if char == closer:
                self._closers.pop()
                return self._pass(at + 1, "more" if self._closers else "nothing", whole=True)
            case "more" if char == ",":
                return self._pass(at + 1, "key" if closer == "}" else "value")
            case "key" | "first" if closer == "}":
                return self._key(at)
            case "value" | "first":
                return self._value(at, char)
        return self._break()

    def _key(self, at: int) -> bool:
        """A key passes whole, with its colon."""
        if self._pending[at] != '"':
            return self._break()
        end = _end(_STRING, self._pending, at + 1)
        if end == len(self._pending) or _OPEN_ESCAPE.match(self._pending, end):
            return False
        colon = _end(_SPACE, self._pending, end + 1)
        if self._pending[end] != '"' or self._pending[colon : colon + 1] not in ("", ":"):
            return self._break()
        return colon < len(self._pending) and self._pass(colon + 1, "value")

    def _value(self, at: int, char: str) -> bool:
        if char in _CLOSERS:
            return self._open(at)
        if char == '"':
            self._in_string = True
            return self._pass(at + 1, "value")
        end = _end(_SCALAR, self._pending, at)
        if end == len(self._pending) and end - at < _LONGEST_SCALAR:
            return False
        word = self._pending[at:end]
        is_number = _NUMBER.fullmatch(word) and math.isfinite(float(word))
        return self._end_value(end) if is_number or word in ("true", "false", "null") else self._break()

    def _string(self) -> bool:
        """More of a string that is a value, after its opening."""
        end = _end(_STRING, self._pending, 0)
        if end:
            return self._pass(end, "value")
        if not self._pending or _OPEN_ESCAPE.match(self._pending):
            return False
        return self._end_value(1) if self._pending[0] == '"' else self._break()

    def _end_value(self, end: int) -> bool:
        """A value ends here, if what follows can follow a value."""
        at = _end(_SPACE, self._pending, end)
        if at == len(self._pending):
            return False
        if self._pending[at] not in (",", self._closers[-1]):
            return self._break()
        self._in_string = False
        return self._pass(end, "more", whole=True)

    def _open(self, at: int) -> bool:
        if len(self._closers) >= _DEEPEST:
            return self._break()
        self._closers.append(_CLOSERS[self._pending[at]])
        return self._pass(at + 1, "first", whole=True)

    def _pass(self, end: int, expected: _Expected, *, whole: bool = False) -> bool:
        self.text += self._pending[:end]
        self._pending = self._pending[end:]
        self._expected = expected
        if whole:
            self._whole = len(self.text), "".join(reversed(self._closers))
        return True

    def _break(self) -> bool:
        self.broken = True
        return False


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where a pattern that matches everywhere ends."""
    match = pattern.match(text, at)
    return at if match is None else match.end()
