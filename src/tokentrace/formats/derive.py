"""Reading a grammar off a template: small conversations are rendered, and the trace says what stands where.

Reasoning with content shows how reasoning opens and closes, content alone what is written in its place; calls with
no, one and two arguments, once and twice, show their delimiters. What two renders have in common belongs to a call,
what they have not to the section around it. Nothing here knows a model.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..errors import TokentraceError
from ..template.chat_template import REASONING_FIELDS
from ..template.trace import Rendering
from ..template.traced import KEY, Origin
from ..tokens.vocabulary import Vocabulary
from .grammar import CallGrammar, Channels, Frame, Style, TurnGrammar, Value

Message = Mapping[str, Any]
Draw = Callable[[Sequence[Message], Mapping[str, Any]], tuple[Rendering, int, int] | None]
"""Renders a conversation, with changed template variables, and says where the turn of its last message stands."""

USER: Final = {"role": "user", "content": "question"}
_TAG: Final = r"</?[^\s<>=\"'/]+(?:>|=|(?=\s))"
NO_CALLS: Final = "the template shows no tool calls"
AWKWARD: Final = 'two\n "words" \\ é <b> & {x}'


@dataclass(frozen=True, slots=True)
class Hole:
    """Where a field stands in the text of a turn."""

    start: int
    stop: int
    field: str
    call: int = -1
    path: tuple[Any, ...] = ()


class Turn:
    """An assistant's turn as the template writes it, and where its fields stand in it."""

    def __init__(self, rendering: Rendering, start: int, stop: int, stops: Sequence[str]) -> None:
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
        ends = [at for at in (text.find(token, after) for token in stops) if at >= 0]
        self.text = text[: min(ends)] if ends else text
        """Without the stop token and what comes after it."""

    def first(self, field: str, call: int = -1) -> Hole | None:
        return next((hole for hole in self.holes if hole.field == field and hole.call == call), None)

    def arguments(self, call: int) -> list[Hole]:
        return [hole for hole in self.holes if hole.field == "arguments" and hole.call == call]


def _hole(start: int, stop: int, origin: Origin | None) -> Hole | None:
    if origin is None or origin[0] != "messages" or len(origin) < 3:
        return None
    path = origin[2:]
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


def call(number: int, arguments: Any) -> dict[str, Any]:
    function = {"name": f"probe{number}", "arguments": arguments}
    return {"id": f"call0000{number}", "type": "function", "function": function}


class Deriver:
    """Derives a grammar. `toggles` are template variables that may show reasoning where it is hidden."""

    def __init__(
        self,
        draw: Draw,
        vocabulary: Vocabulary,
        *,
        prompt: str,
        stops: Sequence[str],
        constants: frozenset[str] = frozenset(),
        toggles: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._draw = draw
        self._stops = sorted(stops, key=len, reverse=True)
        self._prompt = prompt
        self._constants = constants
        self._toggles = toggles
        controls = sorted(vocabulary.control, key=len, reverse=True)
        marks = "|".join([*map(re.escape, controls), _TAG])
        self._mark = re.compile(marks)
        self._lexeme = re.compile(f"{marks}|\\s|\\w+|.", re.DOTALL)
        self._notes: list[str] = []

    def derive(self) -> TurnGrammar:
        """The grammar of the template's turns."""
        plain = self._turn({"content": "answer"})
        thought = self._reasoned()
        channels = self._channels(thought)
        if channels is not None:
            return TurnGrammar(head=self._prompt, prompt=self._prompt, channels=channels, notes=tuple(self._notes))
        frame, content = self._frames(thought)
        if frame is None:
            frame = self._hidden(plain)
        head, after_empty = self._head(plain, thought, frame, content)
        grammar = TurnGrammar(head, self._prompt, frame, after_empty, content)
        calls = self._calls(grammar)
        return grammar.replace(calls=calls, notes=tuple(dict.fromkeys(self._notes)))

    # -- probes

    def _turn(self, fields: Mapping[str, Any], variables: Mapping[str, Any] | None = None) -> Turn | None:
        message = {"role": "assistant", **fields}
        try:
            drawn = self._draw([USER, message], variables or {})
        except TokentraceError:
            return None
        return Turn(*drawn, self._stops) if drawn is not None else None

    def _reasoned(self) -> Turn | None:
        """A turn with reasoning and content that shows both, or as much of that as the template shows."""
        calls = {"tool_calls": [call(1, {"key": "value"})]}
        for variables, more in itertools.product(({}, *self._toggles), ({}, calls)):
            turn = self._turn({"content": "answer", "reasoning_content": "thought", **more}, variables)
            if turn is not None and turn.first("reasoning") is not None:
                return turn
        return None

    def _called(self, *arguments: Any, content: str | None = None) -> Turn | None:
        """A turn with calls, in the first form in which the template shows all of them."""
        contents: tuple[str | None, ...] = (content,) if content else ("", None)
        for said, as_text in itertools.product(contents, (False, True)):
            calls = [
                call(at, json.dumps(some, ensure_ascii=False) if as_text else some)
                for at, some in enumerate(arguments, 1)
            ]
            turn = self._turn({"content": said, "tool_calls": calls})
            if turn is None:
                continue
            shown = [at for at in range(len(calls)) if turn.first("name", at) or turn.first("id", at)]
            if len(shown) == len(calls) and (content is None or turn.first("content") is not None):
                return turn
        return None

    # -- lexemes

    def _lexemes(self, text: str) -> list[str]:
        return self._lexeme.findall(text)

    def _common_prefix(self, one: str, other: str) -> str:
        pairs = zip(self._lexemes(one), self._lexemes(other), strict=False)
        return "".join(left for left, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _common_suffix(self, one: str, other: str) -> str:
        pairs = zip(reversed(self._lexemes(one)), reversed(self._lexemes(other)), strict=False)
        found = [left for left, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
        return "".join(reversed(found))

    def _groups(self, text: str) -> list[tuple[int, int]]:
        """The marks of a text; those with nothing between them are one."""
        found: list[tuple[int, int]] = []
        for match in self._mark.finditer(text):
            if found and found[-1][1] == match.start():
                found[-1] = (found[-1][0], match.end())
            else:
                found.append(match.span())
        return found

    # -- reasoning and content

    def _channels(self, turn: Turn | None) -> Channels | None:
        """Reasoning and content in messages of their own: both come after the same mark, with another header."""
        reasoning, content = (turn.first("reasoning"), turn.first("content")) if turn else (None, None)
        if turn is None or reasoning is None or content is None or content.start < reasoning.stop:
            return None
        before = list(self._mark.finditer(turn.text[: reasoning.start]))
        between = turn.text[reasoning.stop : content.start]
        marks = list(self._mark.finditer(between))
        if not before or len(marks) < 3 or before[-1][0] != marks[-1][0] or before[-1].end() != reasoning.start:
            return None
        message, channel, end = marks[-1][0], marks[-2][0], marks[0][0]
        start = marks[1][0] if len(marks) > 3 else channel
        lead = turn.text[: reasoning.start]
        named = lead[lead.rindex(channel) + len(channel) : lead.rindex(message)]
        said = between[between.rindex(channel) + len(channel) : between.rindex(message)]
        found = Channels(start, channel, message, end, named.strip(), said.strip())
        return self._channel_calls(found)

    def _channel_calls(self, channels: Channels) -> Channels:
        turn = self._called({"key": "value"})
        name = turn.first("name", 0) if turn else None
        arguments = turn.arguments(0) if turn else []
        if turn is None or name is None or not arguments:
            self._notes.append(NO_CALLS)
            return channels
        lead = turn.text[: name.start].rsplit(maxsplit=1)[-1]
        recipient, _, namespace = lead.rpartition("=")
        header = turn.text[name.stop : arguments[0].start]
        words = header[header.find(channels.channel) + len(channels.channel) : header.rfind(channels.message)].split()
        ending = self._mark.match(turn.full, arguments[-1].stop)
        return dataclasses.replace(
            channels,
            recipient=f"{recipient}=",
            namespace=namespace,
            call=words[0] if words else "",
            content_type=" ".join(words[1:]),
            call_end=ending[0] if ending else channels.call_end,
        )

    def _frames(self, turn: Turn | None) -> tuple[Frame | None, Frame]:
        """What stands around reasoning, and around content where something does."""
        reasoning, content = (turn.first("reasoning"), turn.first("content")) if turn else (None, None)
        if turn is None or reasoning is None or content is None or content.start < reasoning.stop:
            return None, Frame()
        before = turn.text[: reasoning.start]
        opening = [match for match in self._mark.finditer(before) if not before[match.end() :].strip()]
        between = turn.text[reasoning.stop : content.start]
        closing = self._mark.search(between)
        if closing is None or between[: closing.start()].strip():
            self._notes.append("nothing that could be looked for closes the reasoning")
            return None, Frame()
        rest = between[closing.end() :]
        answer = rest.strip()
        frame = Frame(
            open=opening[-1][0] if opening else "",
            lead=before[opening[-1].end() :] if opening else "",
            trail=between[: closing.start()],
            close=closing[0],
            after=rest[: len(rest) - len(rest.lstrip())],
        )
        if not answer:
            return frame, Frame()
        after = turn.text[content.stop :]
        ending = self._mark.search(after)
        found = Frame(
            open=answer,
            lead=rest[len(rest.rstrip()) :],
            trail=after[: ending.start()] if ending else "",
            close=ending[0] if ending else "",
            after=after[ending.end() :] if ending else "",
        )
        return frame, found

    def _hidden(self, plain: Turn | None) -> Frame | None:
        """Reasoning that is never shown, known by what the template looks for in content, or by what it prompts.

        How the model sets it off is then not to be seen: nothing is taken for white space of the grammar.
        """
        said = plain.first("content") if plain else None
        before = plain.text[: said.start] if plain is not None and said is not None else ""
        prompt = self._prompt.rstrip()
        for opened, closed in self._tags():
            beyond = prompt.endswith(opened) and opened not in before
            turn = self._turn({"content": f"{opened}alpha{closed}omega"})
            dropped = turn is not None and "omega" in turn.text and "alpha" not in turn.text
            if beyond or dropped or prompt.endswith(closed):
                self._notes.append(
                    f"the template never shows reasoning; it prompts with {opened} or looks for {closed}"
                )
                lead = self._prompt[self._prompt.rindex(opened) + len(opened) :] if beyond else ""
                return Frame(opened, lead, "", closed, "")
        return None

    def _tags(self) -> list[tuple[str, str]]:
        """Tags that stand in the generation prompt, or that the template looks for in texts."""
        found: dict[tuple[str, str], None] = {}
        for text in (self._prompt, *sorted(self._constants)):
            for left, name, right in re.findall(r"([<\[])/?(\w[\w:.-]*)([>\]])", text):
                found[f"{left}{name}{right}", f"{left}/{name}{right}"] = None
        return list(found)

    def _head(self, plain: Turn | None, thought: Turn | None, frame: Frame | None, content: Frame) -> tuple[str, str]:
        """What a turn begins with, and the white space after an empty place for reasoning."""
        after_empty = frame.after if frame is not None else ""
        heads: list[str] = []
        said = plain.first("content") if plain else None
        if plain is not None and said is not None:
            before = plain.text[: said.start]
            if content.open and content.open in before:
                before = before[: before.rindex(content.open)]
            if frame is not None and frame.close in before:
                after_empty = before[before.rindex(frame.close) + len(frame.close) :]
                before = before[: before.rindex(frame.close)]
                if frame.open and frame.open in before:
                    before = before[: before.rindex(frame.open)]
            heads.append(before)
        reasoning = thought.first("reasoning") if thought else None
        if thought is not None and reasoning is not None and frame is not None and frame.open:
            before = thought.text[: reasoning.start]
            heads.append(before[: before.rindex(frame.open)])
        prompt = self._prompt
        if frame is not None:
            for piece in (frame.open, frame.close):
                if piece and piece in prompt:
                    if piece == frame.close and not prompt[prompt.rindex(piece) + len(piece) :].strip():
                        after_empty = prompt[prompt.rindex(piece) + len(piece) :]
                    prompt = prompt[: prompt.index(piece)]
        heads.append(prompt)
        starting = [head for head in heads if head.strip()]
        return (
            (min(starting, key=len) if not heads[0].strip() else heads[0], after_empty)
            if starting
            else ("", after_empty)
        )

    # -- calls

    def _calls(self, grammar: TurnGrammar) -> CallGrammar | None:
        one = self._called({"key": "value"})
        beside = self._called({"key": "value"}, content="answer")
        if beside is not None and one is None:
            one = beside
        if one is None:
            self._notes.append(NO_CALLS)
            return None
        if beside is None:
            self._notes.append("the template shows no content beside tool calls")
        two = self._called({"key": "value"}, {"key": "value"})
        if two is None:
            self._notes.append("the template writes one call a turn")
        reader = _Calls(self, grammar, one, beside, two)
        calls = reader.read()
        self._notes += reader.notes
        return calls


class _Calls:
    """The delimiters of calls, read off turns with one and with two of them."""

    def __init__(
        self, deriver: Deriver, grammar: TurnGrammar, one: Turn, beside: Turn | None, two: Turn | None
    ) -> None:
        self.deriver = deriver
        self.grammar = grammar
        self.one = one
        self.beside = beside
        self.two = two
        self.notes: list[str] = []

    def read(self) -> CallGrammar | None:
        extent = self._object(self.one, 0)
        if extent is not None:
            return self._json_call(*extent)
        name = self.one.first("name", 0) or self.one.first("id", 0)
        arguments = self.one.arguments(0)
        if name is None or not arguments:
            self.notes.append("calls were not understood: where the arguments stand is not to be seen")
            return None
        gapless = all(left.stop == right.start for left, right in itertools.pairwise(arguments))
        return self._json_arguments() if gapless else self._pairs()

    # -- one JSON object

    def _object(self, turn: Turn, number: int) -> tuple[int, int, dict[str, Any]] | None:
        """The JSON object that holds the name and the arguments of a call, if there is one."""
        name = turn.first("name", number)
        arguments = turn.arguments(number)
        if name is None or not arguments:
            return None
        floor = max(
            (hole.stop for hole in turn.holes if hole.stop <= name.start and hole.call == number - 1), default=0
        )
        for match in re.finditer(r"\{", turn.text[floor : name.start]):
            start = floor + match.start()
            try:
                value, stop = json.JSONDecoder().raw_decode(turn.text, start)
            except ValueError:
                continue
            if isinstance(value, dict) and stop >= arguments[-1].stop:
                return start, stop, value
        return None

    def _json_call(self, start: int, stop: int, value: dict[str, Any]) -> CallGrammar | None:
        wanted = {"probe1": "name", "call00001": "id"}
        keys: list[tuple[str, tuple[str, ...]]] = []
        for path, leaf in _leaves(value, ()):
            if isinstance(leaf, str) and leaf in wanted:
                keys.append((wanted[leaf], path))
            elif leaf in ({"key": "value"}, '{"key": "value"}'):
                keys.append(("arguments", path))
        if {"name", "arguments"} - {field for field, _ in keys}:
            self.notes.append("calls were not understood: they are JSON, but name or arguments are not in it")
            return None
        between = None
        first, second = (self._object(self.two, 0), self._object(self.two, 1)) if self.two else (None, None)
        if self.two is not None and first is not None and second is not None:
            between = self.two.text[first[1] : second[0]]
        lead, before = self._lead(start, lambda turn: (self._object(turn, 0) or (None,))[0])
        last = self.two.text[second[1] :] if self.two is not None and second is not None else None
        around = self._around(lead, between, self._tail(self.one.text[stop:], last))
        return CallGrammar(Style.JSON_CALL, before=before, keys=tuple(keys), ascii=self._ascii(), **around)

    # -- a name, and arguments that are JSON

    def _json_arguments(self) -> CallGrammar | None:
        head, start = self._fields(self.one)
        arguments = self.one.arguments(0)
        between = None
        if self.two is not None and self.two.arguments(0):
            _, other = self._fields(self.two, 1)
            between = self.two.text[self.two.arguments(0)[-1].stop : other]
        lead, before = self._lead(start, lambda turn: self._fields(turn)[1])
        last = self.two.text[self.two.arguments(1)[-1].stop :] if self.two and self.two.arguments(1) else None
        around = self._around(lead, between, self._tail(self.one.text[arguments[-1].stop :], last))
        head_stop = max(hole.stop for hole in self.one.holes if hole.call == 0 and hole.stop <= arguments[0].start)
        opened, leads = self._split_open(around.pop("open"), head)
        ended, closed = self._split_close(around.pop("close"))
        return CallGrammar(
            Style.JSON_ARGUMENTS,
            before=before,
            open=opened,
            head=leads,
            begin=self.one.text[head_stop : arguments[0].start],
            end=ended,
            close=closed,
            id_is_name=all(field != "name" for _, field in leads),
            ascii=self._ascii(),
            **around,
        )

    def _fields(self, turn: Turn, number: int = 0) -> tuple[list[tuple[str, str]], int]:
        """The fields of a call before its arguments, with what stands between them, and where the first one stands."""
        arguments = turn.arguments(number)
        floor = arguments[0].start if arguments else len(turn.text)
        holes = [
            hole for hole in turn.holes if hole.call == number and hole.field != "arguments" and hole.stop <= floor
        ]
        leads = [turn.text[left.stop : right.start] for left, right in itertools.pairwise(holes)]
        fields = [hole.field for hole in holes]
        return list(zip(["", *leads], fields, strict=True)), holes[0].start if holes else floor

    # -- arguments one by one

    def _pairs(self) -> CallGrammar | None:
        deriver = self.deriver
        none = deriver._called({})
        several = deriver._called({"key": "value", "more": "value"})
        number = deriver._called({"key": 7})
        if several is None or number is None:
            self.notes.append("calls were not understood: the template refuses several arguments")
            return None
        head, start = self._fields(several)
        holes = several.arguments(0)
        keys = [hole for hole in holes if hole.path[-1:] == (KEY,)]
        values = [hole for hole in holes if hole.path[-1:] != (KEY,)]
        if len(values) != 2 or len(keys) not in (2, 4):
            self.notes.append("calls were not understood: keys and values are not to be told apart")
            return None
        text = several.text
        if len(keys) == 4:
            return self._tree(several, head, start, keys, values)
        name_stop = max(hole.stop for hole in several.holes if hole.call == 0 and hole.stop <= keys[0].start)
        to_key = text[name_stop : keys[0].start]
        to_next = text[values[0].stop : keys[1].start]
        value_open = text[keys[0].stop : values[0].start]
        tail = text[values[1].stop :]
        value_close = deriver._common_prefix(to_next, tail)
        begin = to_key
        if none is not None:
            fields = [hole for hole in none.holes if hole.call == 0]
            begin = deriver._common_prefix(to_key, none.text[fields[-1].stop :]) if fields else to_key
        key_open = deriver._common_suffix(to_next[len(value_close) :], to_key[len(begin) :])
        if not key_open.strip():
            begin, key_open = "", deriver._common_suffix(to_key, to_next[len(value_close) :])
            begin = to_key[: len(to_key) - len(key_open)]
        if not value_open.strip() or not key_open.strip():
            self.notes.append("calls were not understood: nothing stands around the names of arguments")
            return None
        other = number.arguments(0)
        other_open = number.text[other[0].stop : other[1].start] if len(other) > 1 else value_open
        between = None
        if self.two is not None and self.two.arguments(0) and self.two.arguments(1):
            _, second = self._fields(self.two, 1)
            between = self.two.text[self.two.arguments(0)[-1].stop : second][len(value_close) :]
        lead, before = self._lead(self._fields(self.one)[1], lambda turn: self._fields(turn)[1])
        around = self._around(lead, between, tail[len(value_close) :])
        opened, leads = self._split_open(around.pop("open"), head)
        ended, closed = self._split_close(around.pop("close"))
        strings, others = self._values()
        return CallGrammar(
            Style.PAIRS,
            before=before,
            open=opened,
            head=leads,
            begin=begin,
            end=ended,
            close=closed,
            key_open=key_open,
            value_open=other_open,
            value_close=value_close,
            string_open=value_open if other_open != value_open else "",
            strings=strings,
            others=others,
            ascii=self._ascii(),
            **around,
        )

    def _tree(
        self, turn: Turn, head: list[tuple[str, str]], start: int, keys: list[Hole], values: list[Hole]
    ) -> CallGrammar | None:
        """Elements that are named after the arguments, at both ends."""
        deriver, text = self.deriver, turn.text
        value_open = text[keys[0].stop : values[0].start]
        value_close = text[values[0].stop : keys[1].start]
        name_stop = max(hole.stop for hole in turn.holes if hole.call == 0 and hole.stop <= keys[0].start)
        to_key = text[name_stop : keys[0].start]
        key_open = deriver._common_suffix(to_key, text[keys[1].stop + len(value_open) : keys[2].start])
        begin = to_key[: len(to_key) - len(key_open)]
        tail = text[keys[3].stop + len(value_open) :]
        listed = deriver._called({"key": ["one", "two"]})
        item = ""
        if listed is not None:
            opened = listed.text[listed.arguments(0)[0].stop : listed.arguments(0)[1].start]
            found = re.findall(re.escape(key_open) + r"([^\s<>]+)" + re.escape(value_open), opened)
            item = found[-1] if found else ""
        between = None
        if self.two is not None and self.two.arguments(0) and self.two.arguments(1):
            _, second = self._fields(self.two, 1)
            between = self.two.text[self.two.arguments(0)[-1].stop : second][len(value_open) :]
        lead, before = self._lead(self._fields(self.one)[1], lambda some: self._fields(some)[1])
        around = self._around(lead, between, tail)
        opened, leads = self._split_open(around.pop("open"), head)
        ended, closed = self._split_close(around.pop("close"))
        strings, others = self._values()
        return CallGrammar(
            Style.TREE,
            before=before,
            open=opened,
            head=leads,
            begin=begin,
            end=ended,
            close=closed,
            key_open=key_open,
            value_open=value_open,
            value_close=value_close,
            item=item,
            strings=strings,
            others=others,
            **around,
        )

    def _values(self) -> tuple[Value, Value]:
        """How strings and other values are written."""
        turn = self.deriver._called({"key": AWKWARD})
        text = self._value_text(turn)
        strings = Value.BARE if text == AWKWARD else Value.JSON
        if text is not None and text not in (
            AWKWARD,
            *(json.dumps(AWKWARD, ensure_ascii=some) for some in (False, True)),
        ):
            self.notes.append("strings among the arguments are changed by the template")
            strings = Value.BARE
        flag = self._value_text(self.deriver._called({"key": True}))
        return strings, Value.PYTHON if flag == "True" else Value.JSON

    def _value_text(self, turn: Turn | None) -> str | None:
        holes = [hole for hole in turn.arguments(0) if hole.path[-1:] != (KEY,)] if turn else []
        return turn.text[holes[0].start : holes[-1].stop] if turn and holes else None

    def _ascii(self) -> bool:
        turn = self.deriver._called({"key": "é"})
        holes = turn.arguments(0) if turn else []
        return bool(turn and holes and "\\u00e9" in turn.text[holes[0].start : holes[-1].stop])

    # -- what stands around calls

    def _lead(self, start: int, of: Callable[[Turn], int | None]) -> tuple[str, str]:
        """What stands before the first call, and the white space between it and content."""
        content = self.beside.first("content") if self.beside else None
        begins = of(self.beside) if self.beside is not None else None
        if self.beside is not None and content is not None and begins is not None:
            lead = self.beside.text[content.stop : begins]
            close = self.grammar.content.trail + self.grammar.content.close
            if close.strip() and lead.startswith(close):
                lead = lead[len(close) :]
            return lead.lstrip(), lead[: len(lead) - len(lead.lstrip())]
        lead = self.one.text[:start]
        for piece in (self.grammar.reasoning.close if self.grammar.reasoning else "", self.grammar.head.strip()):
            if piece and piece in lead:
                lead = lead[lead.rindex(piece) + len(piece) :]
                break
        return lead.lstrip(), ""

    def _tail(self, alone: str, last: str | None) -> str:
        """What comes after the last call, of one and of two."""
        if last is None or last == alone:
            return alone
        self.notes.append(
            f"the template disagrees with itself: one call ends with {alone!r}, the last of two with {last!r}"
        )
        return max(alone, last, key=len)

    def _around(self, lead: str, between: str | None, tail: str) -> dict[str, Any]:
        """Split what stands before, between and after calls into what belongs to a call and to the section."""
        deriver = self.deriver
        if between is None:
            groups = deriver._groups(tail)
            cut = groups[-1][1] if groups else len(tail.rstrip())
            return {"open": lead, "close": tail[:cut], "after": tail[cut:]}
        opened = deriver._common_suffix(lead, between).lstrip()
        closed = deriver._common_prefix(between[: len(between) - len(opened)], tail)
        if not deriver._groups(closed):
            closed = closed.rstrip() if closed.strip() else ""
        else:
            closed = closed[: deriver._groups(closed)[-1][1]]
        rest = tail[len(closed) :]
        separator = between[len(closed) : len(between) - len(opened)]
        section_open = lead[: len(lead) - len(opened)]
        section_close = rest.rstrip() if section_open.strip() else ""
        return {
            "open": opened,
            "close": closed,
            "separator": separator,
            "section_open": section_open,
            "section_close": section_close,
            "after": rest[len(section_close) :],
        }

    def _split_open(self, opened: str, head: list[tuple[str, str]]) -> tuple[str, tuple[tuple[str, str], ...]]:
        """The outer delimiter of a call, and the head inside of it."""
        groups = self.deriver._groups(opened)
        cut = len(opened)
        if len(groups) > 1:
            cut = groups[0][1] + len(opened[groups[0][1] :]) - len(opened[groups[0][1] :].lstrip())
        leads = [(opened[cut:] + head[0][0], head[0][1]), *head[1:]] if head else []
        return opened[:cut], tuple(leads)

    def _split_close(self, closed: str) -> tuple[str, str]:
        groups = self.deriver._groups(closed)
        cut = groups[-1][0] if groups else 0
        return closed[:cut], closed[cut:]


def _leaves(value: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, inner in value.items():
        yield (*path, key), inner
        if isinstance(inner, dict):
            yield from _leaves(inner, (*path, key))
