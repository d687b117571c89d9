"""Reading an assistant's turn: where its fields stand in the text, and the scaffold between them taken apart."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..template.chat_template import REASONING_FIELDS
from ..template.origin import KEY, Origin
from ..template.trace import Rendering
from ..tokens.vocabulary import Vocabulary
from .probes import USER, call

Message = Mapping[str, Any]
Draw = Callable[[Sequence[Message], Mapping[str, Any]], tuple[Rendering, int, int] | None]
"""Renders a conversation, with changed template variables, and says where the turn of its last message stands."""

_NAME: Final = r"[^\s<>=\"'/\[\]]+"
_TAG: Final = f"</?{_NAME}(?:>|=|(?=\\s))"


@dataclass(frozen=True, slots=True)
class Hole:
    """Where a field stands in the text of a turn."""

    start: int
    stop: int
    field: str
    call: int = -1
    path: tuple[Any, ...] = ()

    @property
    def is_key(self) -> bool:
        return self.path[-1:] == (KEY,)


class WrittenTurn:
    """An assistant's turn as the template writes it, and where its fields stand in it."""

    def __init__(self, rendering: Rendering, start: int, stop: int, ends: Sequence[str]) -> None:
        self.holes: list[Hole] = []
        begin = 0
        for end, origin in zip(rendering.ends, rendering.origins, strict=True):
            low, high = max(begin, start), min(end, stop)
            begin = end
            hole = _hole(low - start, high - start, origin) if low < high else None
            last = self.holes[-1] if self.holes else None
            if hole is None:
                continue
            if last is not None and last == dataclasses.replace(hole, start=last.start, stop=hole.start):
                self.holes[-1] = dataclasses.replace(last, stop=hole.stop)
            else:
                self.holes.append(hole)
        self.full = text = rendering.text[start:stop]
        after = max((hole.stop for hole in self.holes), default=0)
        found = [at for at in (text.find(token, after) for token in ends) if at >= 0]
        self.text = text[: min(found)] if found else text
        """Without what ends the turn."""

    def after(self, at: int) -> WrittenTurn:
        """The turn from a position on."""
        other = copy.copy(self)
        other.full, other.text = self.full[at:], self.text[at:]
        other.holes = [
            dataclasses.replace(hole, start=hole.start - at, stop=hole.stop - at)
            for hole in self.holes
            if hole.start >= at
        ]
        return other

    def first(self, field: str, call: int = -1) -> Hole | None:
        return next((hole for hole in self.holes if hole.field == field and hole.call == call), None)

    def arguments(self, call: int) -> list[Hole]:
        return [hole for hole in self.holes if hole.field == "arguments" and hole.call == call]

    def called(self) -> Hole | None:
        """The first field of the first call."""
        return next((hole for hole in self.holes if hole.call == 0), None)


def _hole(start: int, stop: int, origin: Origin | None) -> Hole | None:
    if origin is None or origin.field is None:
        return None
    path = origin.path
    if path[0] in REASONING_FIELDS:
        return Hole(start, stop, "reasoning")
    if path[0] == "content":
        return Hole(start, stop, "content")
    if path[0] != "tool_calls" or len(path) < 3 or not isinstance(path[1], int):
        return None
    inside = path[2:] if path[2] != "function" else path[3:]
    if inside in (("name",), ("id",)):
        return Hole(start, stop, str(inside[0]), path[1])
    if inside[:1] == ("arguments",) and inside[1:] != (KEY,):
        return Hole(start, stop, "arguments", path[1], inside[1:])
    return None


class TurnReader:
    """Renders turns of one template, and takes its scaffold apart."""

    def __init__(self, draw: Draw, vocabulary: Vocabulary, ends: Sequence[str]) -> None:
        self._draw = draw
        self.ends = sorted(ends, key=len, reverse=True)
        """What ends a turn."""
        self.body = ""
        """What the body of a call's message begins after, where calls are messages: `called` gives the body."""
        self.notes: list[str] = []
        controls = sorted(vocabulary.control, key=len, reverse=True)
        self._know(map(re.escape, controls))
        tag = self._control_tag(vocabulary)
        if tag is not None:
            opens, closes = (f"(?:{'|'.join(map(re.escape, some))})" for some in tag)
            others = (re.escape(text) for text in controls if text not in {*tag[0], *tag[1]})
            self._know([f"{opens}{_NAME}(?:{closes}|=|(?=\\s))", *others])

    def _know(self, marks: Iterable[str]) -> None:
        either = "|".join([*marks, _TAG])
        self.mark = re.compile(either)
        """A control token, or a tag that is spelled out."""
        self._lexeme = re.compile(f"{either}|\\s|\\w+|.", re.DOTALL)

    def _control_tag(self, vocabulary: Vocabulary) -> tuple[list[str], list[str]] | None:
        """What begins and what ends tags that are made of control tokens and a name, if the template writes such.

        ``<|open|>think<|sep|>…<|close|>think<|sep|>``: after two tokens the same name stands before the same third.
        """
        pattern = vocabulary.control_pattern
        for turn in (self.turn({"content": "answer"}), self.called({"key": "value"})) if pattern is not None else ():
            tokens = list(pattern.finditer(turn.full)) if pattern is not None and turn is not None else []
            begun: dict[tuple[str, str], str] = {}
            for left, right in itertools.pairwise(tokens):
                name = turn.full[left.end() : right.start()] if turn is not None else ""
                opened = begun.setdefault((name, right[0]), left[0]) if re.fullmatch(_NAME, name) else left[0]
                if len({opened, left[0], right[0]}) == 3:
                    return [opened, left[0]], [right[0]]
        return None

    # -- turns

    def turn(self, fields: Mapping[str, Any], variables: Mapping[str, Any] | None = None) -> WrittenTurn | None:
        """An assistant's turn with these fields; None where the template refuses it or writes none."""
        message = {"role": "assistant", **fields}
        drawn = self._draw([USER, message], variables or {})
        return WrittenTurn(*drawn, self.ends) if drawn is not None else None

    def called(self, *arguments: Any, content: str | None = None) -> WrittenTurn | None:
        """A turn with calls, in the first form in which the template shows all of them (and content before them)."""
        contents: tuple[str | None, ...] = (content,) if content else ("", None)
        for said, as_text in itertools.product(contents, (False, True)):
            calls = [call(at, some, as_text=as_text) for at, some in enumerate(arguments, 1)]
            turn = self.turn({"content": said, "tool_calls": calls})
            first = turn.called() if turn is not None else None
            if turn is None or first is None:
                continue
            shown = all(turn.first("name", at) or turn.first("id", at) for at in range(len(calls)))
            spoken = turn.first("content")
            if shown and (content is None or (spoken is not None and spoken.stop <= first.start)):
                at = turn.text.find(self.body, first.stop) if self.body else -1
                return turn if at < 0 else turn.after(at + len(self.body))
        return None

    # -- scaffold

    def lexemes(self, text: str) -> list[str]:
        return self._lexeme.findall(text)

    def common_prefix(self, one: str, other: str) -> str:
        pairs = zip(self.lexemes(one), self.lexemes(other), strict=False)
        return "".join(left for left, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def common_suffix(self, one: str, other: str) -> str:
        pairs = zip(reversed(self.lexemes(one)), reversed(self.lexemes(other)), strict=False)
        found = [left for left, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
        return "".join(reversed(found))

    def groups(self, text: str) -> list[tuple[int, int]]:
        """The marks of a text; those with nothing between them are one."""
        found: list[tuple[int, int]] = []
        for match in self.mark.finditer(text):
            if found and found[-1][1] == match.start():
                found[-1] = (found[-1][0], match.end())
            else:
                found.append(match.span())
        return found


def leading(text: str) -> str:
    """The white space a text begins with."""
    return text[: len(text) - len(text.lstrip())]


def trailing(text: str) -> str:
    """The white space a text ends with."""
    return text[len(text.rstrip()) :]
