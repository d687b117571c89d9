"""An assistant's turn as the template writes it: its fields and its scaffold."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..conversation.messages import Messages
from ..template.origin import KEY, Origin
from ..template.trace import Rendering
from .probes import ONE_ARGUMENT, USER, call
from .turns import find_turns

if TYPE_CHECKING:
    from .study import TemplateStudy

_NAME = r"[^\s<>=\"'/\[\]]+"
_TAG = f"</?{_NAME}(?:>|=|(?=\\s))"


@dataclass(frozen=True, slots=True)
class Hole:
    """Where a field is in the text of a turn."""

    start: int
    stop: int
    field: str
    call: int = -1
    path: tuple[Any, ...] = ()

    @property
    def is_key(self) -> bool:
        return self.path[-1:] == (KEY,)


@dataclass(slots=True)
class WrittenTurn:
    """A turn with its ending (`full`) and without (`text`). False if it shows no field."""

    full: str = ""
    text: str = ""
    holes: list[Hole] = field(default_factory=list)

    @classmethod
    def read(cls, rendering: Rendering, start: int, stop: int, ends: Sequence[str]) -> WrittenTurn:
        """The turn's text ends at the earliest of `ends` after its last field."""
        holes: list[Hole] = []
        at = 0
        for text, _, origin in rendering.spans(start, stop):
            hole, at = _hole(at, at + len(text), origin), at + len(text)
            if hole is None:
                continue
            if holes and holes[-1] == replace(hole, start=holes[-1].start, stop=hole.start):
                hole = replace(hole, start=holes.pop().start)
            holes.append(hole)
        full = rendering.text[start:stop]
        after = max((hole.stop for hole in holes), default=0)
        places = [at for at in (full.find(token, after) for token in ends) if at >= 0]
        return cls(full, full[: min(places)] if places else full, holes)

    def __bool__(self) -> bool:
        return bool(self.holes)

    def after(self, at: int) -> WrittenTurn:
        later = (hole for hole in self.holes if hole.start >= at)
        holes = [replace(hole, start=hole.start - at, stop=hole.stop - at) for hole in later]
        return WrittenTurn(self.full[at:], self.text[at:], holes)

    def first(self, name: str, call: int = -1) -> Hole | None:
        return next((hole for hole in self.holes if hole.field == name and hole.call == call), None)

    def between(self, left: Hole, right: Hole) -> str:
        return self.text[left.stop : right.start]

    def arguments(self, call: int) -> list[Hole]:
        return [hole for hole in self.holes if hole.field == "arguments" and hole.call == call]

    def first_of_calls(self) -> Hole | None:
        return next((hole for hole in self.holes if hole.call == 0), None)


def _hole(start: int, stop: int, origin: Origin | None) -> Hole | None:
    if origin is None or origin.field is None:
        return None
    path = origin.path
    if path[0] == "content":
        return Hole(start, stop, "content")
    if path[0] not in ("tool_calls", "role"):  # whatever its name is
        return Hole(start, stop, "reasoning")
    if path[0] == "role" or len(path) < 3 or not isinstance(path[1], int):
        return None
    inside = path[2:] if path[2] != "function" else path[3:]
    if inside in (("name",), ("id",)):
        return Hole(start, stop, str(inside[0]), path[1])
    if inside[:1] == ("arguments",) and inside[1:] != (KEY,):
        return Hole(start, stop, "arguments", path[1], inside[1:])
    return None


class TurnReader:
    """Renders turns of one template, and takes its scaffold apart."""

    def __init__(self, study: TemplateStudy, ends: Iterable[int], tools: bool) -> None:
        self._study, self._tools = study, tools
        vocabulary = study.tokenizer.vocabulary
        stops = [vocabulary.added[index].text for index in sorted(ends) if index in vocabulary.added]
        self.ends = sorted(stops, key=len, reverse=True)
        """The texts that end a turn."""
        self.body = ""
        """What a call's arguments follow, if calls are messages."""
        self.notes: list[str] = []
        controls = sorted(vocabulary.control, key=len, reverse=True)
        self._compile(map(re.escape, controls))
        pattern = vocabulary.control_pattern
        if pattern is not None and (tag := self._control_tag(pattern)) is not None:
            opens, closes = (f"(?:{'|'.join(map(re.escape, some))})" for some in tag)
            plain = (re.escape(text) for text in controls if text not in {*tag[0], *tag[1]})
            self._compile([f"{opens}{_NAME}(?:{closes}|=|(?=\\s))", *plain])

    def _compile(self, controls: Iterable[str]) -> None:
        either = "|".join([*controls, _TAG])
        self.tag = re.compile(either)
        """A control token, or a tag that is spelled out."""
        self._lexeme = re.compile(f"{either}|\\s|\\w+|.", re.DOTALL)

    def _control_tag(self, pattern: re.Pattern[str]) -> tuple[list[str], list[str]] | None:
        """What begins and ends tags such as ``<|open|>think<|sep|>…<|close|>think<|sep|>``."""
        for turn in (self.turn({"content": "answer"}), self.called()):
            openings: dict[tuple[str, str], str] = {}
            for left, right in itertools.pairwise(pattern.finditer(turn.full)):
                name = turn.full[left.end() : right.start()]
                if re.fullmatch(_NAME, name):
                    opened = openings.setdefault((name, right[0]), left[0])
                    if len({opened, left[0], right[0]}) == 3:
                        return [opened, left[0]], [right[0]]
        return None

    def note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def turn(self, fields: Mapping[str, Any], variables: Mapping[str, Any] | None = None) -> WrittenTurn:
        def render(some: Messages, prompt: bool) -> Rendering | None:
            return self._study.probe(some, self._tools, prompt, variables)

        messages = [USER, {"role": "assistant", **fields}]
        if (rendering := render(messages, False)) is None:
            return WrittenTurn()
        turns, _ = find_turns(rendering, messages, render, self._study.tokenizer, only=1)
        turns = [turn for turn in turns if turn.message == 1 and turn.start < turn.end]
        return (
            WrittenTurn.read(rendering, turns[0].start, turns[-1].end, self.ends)
            if turns
            else WrittenTurn()
        )

    def called(self, *arguments: Mapping[str, Any], content: str | None = None) -> WrittenTurn:
        """A turn with calls, in the first form that the template shows all of."""
        contents: tuple[str | None, ...] = (content,) if content else ("", None)
        for text, as_text in itertools.product(contents, (False, True)):
            calls = [
                call(at, some, as_text=as_text) for at, some in enumerate(arguments or (ONE_ARGUMENT,), 1)
            ]
            turn = self.turn({"content": text, "tool_calls": calls})
            first, before = turn.first_of_calls(), turn.first("content")
            complete = all(turn.first("name", at) or turn.first("id", at) for at in range(len(calls)))
            if first is None or not complete:
                continue
            if content is None or (before is not None and before.stop <= first.start):
                at = turn.text.find(self.body, first.stop) if self.body else -1
                return turn if at < 0 else turn.after(at + len(self.body))
        return WrittenTurn()

    def common_prefix(self, *texts: str) -> str:
        """What two texts begin with, in whole lexemes."""
        return "".join(_common(*map(self._lexeme.findall, texts)))

    def common_suffix(self, *texts: str) -> str:
        return "".join(reversed(_common(*(self._lexeme.findall(text)[::-1] for text in texts))))

    def groups(self, text: str) -> list[tuple[int, int]]:
        """Where the tags of a text are. Adjacent tags count as one."""
        groups: list[tuple[int, int]] = []
        for match in self.tag.finditer(text):
            if groups and groups[-1][1] == match.start():
                groups[-1] = (groups[-1][0], match.end())
            else:
                groups.append(match.span())
        return groups


def _common(*lists: list[str]) -> list[str]:
    same = itertools.takewhile(lambda row: len(set(row)) == 1, zip(*lists, strict=False))
    return [row[0] for row in same]


def leading(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def trailing(text: str) -> str:
    return text[len(text.rstrip()) :]
