"""Reading arguments in braces that are nearly JSON: ``{place:<|"|>Paris<|"|>,days:3}``.

Keys have no quotes, and strings stand between a mark of the grammar's own. What is in them is told when they end.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from .compiled import CompiledCalls
from .output import Attempt, Output
from .reader import Reader, Reading
from .response import CallStatus
from .values import read_value

_KEY: Final = re.compile(r"\s*([^\s:,{}\[\]]+)\s*:")
_WORD: Final = re.compile(r"[^,{}\[\]]*")
_DEEPEST: Final = 64


class BraceReader:
    """Reads arguments in braces."""

    def __init__(self, calls: CompiledCalls, reader: Reader, output: Output) -> None:
        self.calls = calls
        self.reader = reader
        self.output = output

    def arguments(self, attempt: Attempt) -> Reading[None]:
        """Arguments, after the brace that opens them, up to the one that closes them."""
        reader = self.reader
        start = reader.at - 1
        depth, quoted = 1, False
        while depth:
            found = yield from reader.find(self.calls.in_quotes if quoted else self.calls.in_braces)
            if found is None or found.kind in ("stop", "hard"):
                attempt.blame(CallStatus.MALFORMED, "the braces are not closed")
                return
            quoted = not quoted if found.kind == "quote" else quoted
            depth += {"open": 1, "close": -1}.get(found.kind, 0)
            reader.at = found.stop
        self._read(attempt, self.output.text(start, reader.at))

    def _read(self, attempt: Attempt, text: str) -> None:
        try:
            values, stop = _Braces(text, self.calls.grammar.quote).value(0, 0)
        except ValueError as error:
            attempt.blame(CallStatus.MALFORMED, f"the arguments are not to be read: {error}")
            return
        if not isinstance(values, dict) or text[stop:].strip():
            attempt.blame(CallStatus.MALFORMED, "the arguments are not an object")
            return
        attempt.values = values
        self.output.argue(attempt, json.dumps(values, ensure_ascii=False))


class _Braces:
    """A value of text, at a position: what it is, and where it ends."""

    def __init__(self, text: str, quote: str) -> None:
        self.text = text
        self.quote = quote

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        if depth > _DEEPEST:
            raise ValueError("it is nested too deeply")
        at = self._space(at)
        if self.text.startswith(self.quote, at):
            stop = self.text.find(self.quote, at + len(self.quote))
            if stop < 0:
                raise ValueError("a string is not closed")
            return self.text[at + len(self.quote) : stop], stop + len(self.quote)
        if self.text.startswith("{", at):
            return self._members(at + 1, depth)
        if self.text.startswith("[", at):
            return self._items(at + 1, depth)
        match = _WORD.match(self.text, at)
        word = match[0] if match else ""
        return read_value(word.strip(), None)[0], at + len(word)

    def _members(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        while not self.text.startswith("}", self._space(at)):
            match = _KEY.match(self.text, at)
            if match is None:
                raise ValueError("a key is missing")
            found[match[1].replace(self.quote, "")], at = self.value(match.end(), depth + 1)
            at = self._past_comma(at, "}")
        return found, self._space(at) + 1

    def _items(self, at: int, depth: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        while not self.text.startswith("]", self._space(at)):
            item, at = self.value(at, depth + 1)
            found.append(item)
            at = self._past_comma(at, "]")
        return found, self._space(at) + 1

    def _past_comma(self, at: int, close: str) -> int:
        at = self._space(at)
        if self.text.startswith(",", at):
            return at + 1
        if not self.text.startswith(close, at):
            raise ValueError(f"a comma or {close!r} is missing")
        return at

    def _space(self, at: int) -> int:
        while at < len(self.text) and self.text[at].isspace():
            at += 1
        return at
