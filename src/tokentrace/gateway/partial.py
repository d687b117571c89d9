"""JSON objects that are not whole: how far a text can be one, and what can be read of it. Pure.

Anthropic's clients read a call's input while it arrives, and fail on what cannot become JSON any more; what is merely
not finished they read as far as it goes. `PartialObject` lets through what they can read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, Final

from ..parsing.values import read_json

_DEEPEST: Final = 100
"""Anthropic's client reads 200 levels."""

_SPACE: Final = re.compile(r"[ \t\n\r]*")
_SCALAR: Final = re.compile(r"[-+.\w]*")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,3999})(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?", re.ASCII)
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]*')
_HEX: Final = "[0-9a-fA-F]"
_HIGH, _LOW = f"[dD][89abAB]{_HEX}{{2}}", f"[dD][c-fC-F]{_HEX}{{2}}"
_ESCAPE: Final = re.compile(rf'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F]){_HEX}{{4}}|u{_HIGH}\\u{_LOW})')
"""An escape. Half of a surrogate pair is none: no text can contain it."""
_ESCAPE_BEGUN: Final = re.compile(rf"\\(?:u(?:{_HEX}{{0,3}}|{_HIGH}(?:\\(?:u{_HEX}{{0,3}})?)?)?)?\Z")

_CLOSERS: Final = {"{": "}", "[": "]"}


class PartialObject:
    """Takes a text in pieces, and lets through what can be the beginning of a JSON object.

    The text of a string passes as it comes. The end of a value waits for what follows it: only then is it certain that
    it is the end. A text that cannot go on as JSON is let through up to there, and nothing after it.
    """

    def __init__(self) -> None:
        self.text = ""
        """What was let through."""
        self.broken = False
        """Whether the text is not the beginning of an object, or something stands after it."""
        self._waiting = ""
        self._expected: Callable[[int, str], bool] = self._object
        self._in_string = False
        self._around: list[str] = []
        """What closes the objects and lists around."""
        self._whole = 0, ""
        """How much of what was let through is whole, and what would close it there."""

    @property
    def closed(self) -> bool:
        """Whether the object was closed, and is all that there is."""
        return bool(self.text) and not self._around and not self.broken

    def feed(self, text: str) -> str:
        """Take more of the text; what may pass."""
        before = len(self.text)
        self._waiting += text
        while not self.broken and self._step():
            pass
        return self.text[before:]

    def value(self) -> dict[str, Any]:
        """What can be read: the members that are whole, of lists and objects that are not closed what they have."""
        length, closing = self._whole
        found = read_json(self.text[:length] + closing) if length else {}
        return found if isinstance(found, dict) else {}

    # -- steps: each lets something through, finds out that the text is broken, or returns False to wait for more

    def _step(self) -> bool:
        if self._in_string:
            return self._string()
        at = self._past_space(0)
        return at < len(self._waiting) and self._expected(at, self._waiting[at])

    def _object(self, at: int, next: str) -> bool:
        return self._open(at, next) if next == "{" else self._break()

    def _first_key(self, at: int, next: str) -> bool:
        return self._close(at) if next == "}" else self._key(at, next)

    def _key(self, at: int, next: str) -> bool:
        """A key passes whole, with its colon."""
        stop = _string_stop(self._waiting, at + 1) if next == '"' else 0
        if not stop:
            return False if stop is None else self._break()
        colon = self._past_space(stop)
        if colon == len(self._waiting):
            return False
        if self._waiting[colon] != ":":
            return self._break()
        self._expected = self._value
        return self._pass(colon + 1)

    def _first_item(self, at: int, next: str) -> bool:
        return self._close(at) if next == "]" else self._value(at, next)

    def _value(self, at: int, next: str) -> bool:
        if next in _CLOSERS:
            return self._open(at, next)
        if next == '"':
            self._in_string = True
            return self._pass(at + 1)
        match = _SCALAR.match(self._waiting, at)
        stop = match.end() if match else at
        if stop == at:
            return self._break()
        if stop == len(self._waiting) and stop - at < 5000:
            return False
        word = self._waiting[at:stop]
        if word not in ("true", "false", "null") and not (_NUMBER.fullmatch(word) and math.isfinite(float(word))):
            return self._break()
        return self._ended(stop)

    def _string(self) -> bool:
        """More of a string that is a value, after its opening."""
        match = _PLAIN.match(self._waiting)
        if match and match.end():
            return self._pass(match.end())
        if not self._waiting:
            return False
        if self._waiting[0] == '"':
            return self._ended(1)
        escape = _ESCAPE.match(self._waiting)
        if escape is not None:
            return self._pass(escape.end())
        return False if _ESCAPE_BEGUN.match(self._waiting) else self._break()

    def _ended(self, stop: int) -> bool:
        """A value ends at `stop`, if what follows can follow a value."""
        at = self._past_space(stop)
        if at == len(self._waiting):
            return False
        if self._waiting[at] not in (",", self._around[-1]):
            return self._break()
        self._expected, self._in_string = self._more, False
        self._pass(stop)
        return self._is_whole()

    def _more(self, at: int, next: str) -> bool:
        if next == self._around[-1]:
            return self._close(at)
        if next != ",":
            return self._break()
        self._expected = self._key if self._around[-1] == "}" else self._value
        return self._pass(at + 1)

    def _nothing(self, at: int, next: str) -> bool:
        return self._break()

    # -- what steps do

    def _open(self, at: int, bracket: str) -> bool:
        if len(self._around) >= _DEEPEST:
            return self._break()
        self._around.append(_CLOSERS[bracket])
        self._expected = self._first_key if bracket == "{" else self._first_item
        self._pass(at + 1)
        return self._is_whole()

    def _close(self, at: int) -> bool:
        self._around.pop()
        self._expected = self._more if self._around else self._nothing
        self._pass(at + 1)
        return self._is_whole()

    def _is_whole(self) -> bool:
        self._whole = len(self.text), "".join(reversed(self._around))
        return True

    def _past_space(self, at: int) -> int:
        space = _SPACE.match(self._waiting, at)
        return space.end() if space else at

    def _pass(self, stop: int) -> bool:
        self.text += self._waiting[:stop]
        self._waiting = self._waiting[stop:]
        return True

    def _break(self) -> bool:
        self.broken = True
        return False


def _string_stop(text: str, at: int) -> int | None:
    """Where a string stops whose text begins at a position: None if it goes on, 0 if it cannot be one."""
    while True:
        plain = _PLAIN.match(text, at)
        at = plain.end() if plain else at
        if at == len(text):
            return None
        if text[at] == '"':
            return at + 1
        escape = _ESCAPE.match(text, at)
        if escape is None:
            return None if _ESCAPE_BEGUN.match(text, at) else 0
        at = escape.end()
