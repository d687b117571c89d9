"""Reads the delimiters of tool calls off turns with one call and with two.

Text that both calls have belongs to each call, other text to the section around them. Arguments
without scaffold among them are one JSON object; with the name in it, the object is the call.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..formats.grammar import CallGrammar, Style, TurnGrammar, Value
from .probes import ONE_ARGUMENT, TWO_ARGUMENTS
from .reading import Hole, TurnReader, WrittenTurn, leading

_TYPED = {"boolean": True, "null": None, "array": ["one"], "object": {"inner": "one"}}
AWKWARD = 'two\n "words" \\ é <b> & {x}'
_CDATA = ("<![CDATA[", "]]>")

Holes = list[Hole]
Leads = list[tuple[str, str]]
Extent = Callable[[WrittenTurn, int], tuple[int, int, Any] | None]
"""Where a call is in a turn, and its value if it is JSON."""


@dataclass(frozen=True, slots=True)
class CallDeriver:
    """Derives how calls are written, from turns with `one`, `beside` content, and `two`."""

    reader: TurnReader
    grammar: TurnGrammar
    one: WrittenTurn
    beside: WrittenTurn
    two: WrittenTurn

    def derive(self) -> CallGrammar | None:
        if (json_object := self._object(self.one, 0)) is not None:
            return self._json_call(json_object[2])
        arguments = self.one.arguments(0)
        if self.one.first_of_calls() is None or not arguments:
            return self._not_understood("no arguments are shown")
        gapless = all(left.stop == right.start for left, right in itertools.pairwise(arguments))
        return self._json_arguments() if gapless else self._one_by_one()

    def _not_understood(self, why: str) -> CallGrammar | None:
        self.reader.note(f"calls were not understood: {why}; choose a tool_parser")
        return None

    def _object(self, turn: WrittenTurn, number: int) -> tuple[int, int, dict[str, Any]] | None:
        name, arguments = turn.first("name", number), turn.arguments(number)
        if name is None or not arguments:
            return None
        earlier = [hole.stop for hole in turn.holes if hole.stop <= name.start and hole.call == number - 1]
        for match in re.compile(r"\{").finditer(turn.text, max(earlier, default=0), name.start):
            start = match.start()
            try:
                value, stop = json.JSONDecoder().raw_decode(turn.text, start)
            except ValueError:
                continue
            if isinstance(value, dict) and stop >= arguments[-1].stop:
                return start, stop, value
        return None

    def _json_call(self, value: dict[str, Any]) -> CallGrammar | None:
        fields = {"probe1": "name", "call00001": "id", json.dumps(ONE_ARGUMENT): "arguments"}
        keys = tuple((fields[leaf], path) for path, leaf in _leaves(value) if leaf in fields)
        named_key = value == {"probe1": ONE_ARGUMENT}
        if not named_key and {"name", "arguments"} - {field for field, _ in keys}:
            return self._not_understood("they are JSON, but without a name or arguments")
        keys, around = () if named_key else keys, self._around(self._object)
        return CallGrammar(Style.JSON_CALL, ascii=self._ascii(), named_key=named_key, keys=keys, **around)

    def _json_arguments(self) -> CallGrammar | None:
        head, begin = self._head(self.one, 0)
        around = self._parts(self._extent(), head)
        opened, leads = around["open"], around["head"]
        id_is_name = all(field != "name" for _, field in leads)
        numbered, begin = self._numbered(begin)
        if any(len(lead.split()) > 1 for lead, _ in numbered):
            # separate from the name, so not part of an id
            leads = (*leads, *numbered)
        elif self.two:
            begin, other = self._head(self.one, 0)[1], self._head(self.two, 1)[1]
            shared = self.reader.common_suffix(begin, other)
            if shared != begin and re.sub(r"\d+", "0", begin) == re.sub(r"\d+", "0", other):
                # the call's number follows its name: both, with the text before them, are an id
                begin, id_is_name, leads = shared, True, (("", "id"),)
                opened = self._up_to_last_tag(opened, opened)
        around |= {"open": opened, "head": leads, "begin": begin, "id_is_name": id_is_name}
        return CallGrammar(Style.JSON_ARGUMENTS, ascii=self._ascii(), **around)

    def _fields(self, turn: WrittenTurn, number: int = 0) -> list[Hole]:
        arguments = turn.arguments(number)
        floor = arguments[0].start if arguments else len(turn.text)
        fields = (hole for hole in turn.holes if hole.call == number and hole.field != "arguments")
        return [hole for hole in fields if hole.stop <= floor]

    def _head(self, turn: WrittenTurn, number: int) -> tuple[Leads, str]:
        fields, arguments = self._fields(turn, number), turn.arguments(number)
        leads = ["", *itertools.starmap(turn.between, itertools.pairwise(fields))]
        begin = turn.between(fields[-1], arguments[0]) if fields and arguments else ""
        return [(lead, hole.field) for lead, hole in zip(leads, fields, strict=False)], begin

    def _one_by_one(self) -> CallGrammar | None:
        reader = self.reader
        several, number = reader.called(TWO_ARGUMENTS), reader.called({"key": 7})
        if not several or not number:
            return self._not_understood("the template refuses several arguments")
        holes = several.arguments(0)
        keys, values = ([hole for hole in holes if hole.is_key is is_key] for is_key in (True, False))
        if len(values) != 2 or len(keys) not in (2, 4) or not self._fields(several):
            return self._not_understood("keys and values, or the name before them, cannot be distinguished")
        opened = several.between(keys[0], values[0])
        begin = several.between(self._fields(several)[-1], keys[0])
        alike = len(opened.strip()) > 1 and _value_opening(number) == opened
        if begin == "(" and opened.startswith("="):
            others = Value.QUOTED if alike else self._other_values()
            return CallGrammar(Style.PYTHON, others=others, **self._around(self._extent(bracket=")")))
        if begin == "{" and opened.startswith(":"):
            around = self._around(self._extent(bracket="}"))
            around["open"], around["head"] = self._split_open(around["open"], self._head(self.one, 0)[0])
            others = Value.QUOTED if alike else Value.JSON
            return CallGrammar(Style.BRACES, begin="{", quote=opened[1:].strip(), others=others, **around)
        if len(keys) == 4:
            return self._tree(several, keys, values)
        return self._pairs(several, number, keys, values)

    def _pairs(
        self, several: WrittenTurn, other: WrittenTurn, keys: Holes, values: Holes
    ) -> CallGrammar | None:
        reader, text = self.reader, several.text
        to_key = several.between(self._fields(several)[-1], keys[0])
        to_next = several.between(values[0], keys[1])
        value_open = several.between(keys[0], values[0])
        value_close = reader.common_prefix(to_next, text[values[1].stop :])
        none = reader.called({})
        named = self._fields(none)
        begin = reader.common_prefix(to_key, none.text[named[-1].stop :]) if named else to_key
        key_open = reader.common_suffix(to_next[len(value_close) :], to_key[len(begin) :])
        if not key_open.strip():
            key_open = reader.common_suffix(to_key, to_next[len(value_close) :])
            begin = to_key.removesuffix(key_open)
        if not value_open.strip() or not key_open.strip() or not value_close.strip():
            return self._not_understood("the arguments have no delimiters")
        other_open = _value_opening(other) or value_open
        numbered, begin = self._numbered(begin)
        opens: dict[str, Any] = {"value_open": other_open}
        if other_open != value_open:
            ways = {kind: _value_opening(reader.called({"key": value})) for kind, value in _TYPED.items()}
            typed = tuple((kind, way) for kind, way in ways.items() if way and way != other_open)
            opens |= {"string_open": value_open, "typed_opens": typed}
        around = self._parts(self._extent(len(value_close)), [*self._head(several, 0)[0], *numbered])
        tags = {"begin": begin, "key_open": key_open, "value_close": value_close, **opens}
        return CallGrammar(Style.PAIRS, ascii=self._ascii(), **tags, **self._values(), **around)

    def _numbered(self, begin: str) -> tuple[Leads, str]:
        """Split a call's number off the text before its arguments."""
        first, second = (self._head(self.two, at)[1] for at in (0, 1))
        for match in re.finditer(r"\d+", first):
            lead, after = first[: match.start()], first[match.end() :]
            counts = int(match[0]) < 2 and second == f"{lead}{int(match[0]) + 1}{after}"
            if counts and begin.startswith(lead + match[0]):
                return [(lead, "number" if match[0] == "1" else "index")], begin[match.end() :]
        return [], begin

    def _tree(self, several: WrittenTurn, keys: Holes, values: Holes) -> CallGrammar | None:
        reader, text = self.reader, several.text
        value_open = several.between(keys[0], values[0])
        to_key = several.between(self._fields(several)[-1], keys[0])
        key_open = reader.common_suffix(to_key, text[keys[1].stop + len(value_open) : keys[2].start])
        begin, value_close = to_key[: len(to_key) - len(key_open)], several.between(values[0], keys[1])
        around = self._parts(self._extent(len(value_open)), self._head(several, 0)[0])
        opened = _value_opening(reader.called({"key": ["one", "two"]}))
        items = re.findall(re.escape(key_open) + r"([^\s<>]+)" + re.escape(value_open), opened)
        around |= {
            "begin": begin,
            "key_open": key_open,
            "value_open": value_open,
            "value_close": value_close,
        }
        return CallGrammar(Style.TREE, item=items[-1] if items else "", **self._values(), **around)

    def _values(self) -> dict[str, Any]:
        text = self._value_text(AWKWARD)
        ways = {json.dumps(AWKWARD): Value.JSON, json.dumps(AWKWARD, ensure_ascii=False): Value.JSON}
        ways |= {AWKWARD.join(_CDATA): Value.CDATA, AWKWARD: Value.BARE}
        if text not in ways:
            self.reader.note("the template changes strings among the arguments")
        return {"strings": ways.get(text or "", Value.BARE), "others": self._other_values()}

    def _other_values(self) -> Value:
        return Value.PYTHON if self._value_text(True) == "True" else Value.JSON

    def _value_text(self, value: Any) -> str | None:
        turn = self.reader.called({"key": value})
        holes = turn.arguments(0)
        if len(holes) < 2:
            return None
        last = self.one.arguments(0)[-1]
        closed = "" if last.is_key else self.one.text[last.stop :]
        start, stop = holes[0].stop + len(_value_opening(self.one)), len(turn.text) - len(closed)
        inside = [hole for hole in holes if not hole.is_key]
        return turn.text[start:stop] if closed else turn.text[inside[0].start : inside[-1].stop]

    def _ascii(self) -> bool:
        turn = self.reader.called({"key": "é"})
        holes = turn.arguments(0)
        return bool(holes) and "\\u00e9" in turn.text[holes[0].start : holes[-1].stop]

    def _extent(self, more: int = 0, bracket: str = "") -> Extent:
        """Ends a call `more` characters after its arguments, or at a bracket."""

        def extent(turn: WrittenTurn, at: int) -> tuple[int, int, Any] | None:
            fields, arguments = self._fields(turn, at), turn.arguments(at)
            if not fields or not arguments or bracket not in turn.text[arguments[-1].stop :]:
                return None
            stop = arguments[-1].stop + more
            return fields[0].start, turn.text.index(bracket, stop) + 1 if bracket else stop, None

        return extent

    def _parts(self, extent: Extent, head: Leads) -> dict[str, Any]:
        around = self._around(extent)
        closed, groups = around["close"], self.reader.groups(around["close"])
        cut = groups[-1][0] if groups else 0
        around["open"], around["head"] = self._split_open(around["open"], head)
        return {**around, "end": closed[:cut], "close": closed[cut:]}

    def _around(self, extent: Extent) -> dict[str, Any]:
        """Split the text around calls into the delimiters of a call and of a section."""
        reader = self.reader
        before, lead = self._lead(extent)
        alone = extent(self.one, 0)
        tail = self.one.text[alone[1] :] if alone is not None else ""
        first, second = extent(self.two, 0), extent(self.two, 1)
        if first is None or second is None:
            close = self._up_to_last_tag(tail, tail.rstrip())
            return {"before": before, "open": lead, "close": close, "after": tail[len(close) :]}
        between = self.two.text[first[1] : second[0]]
        last = self.two.text[second[1] :]
        if last != tail:
            problem = f"one call ends with {tail!r}, the last of two with {last!r}"
            reader.note(f"the template disagrees with itself: {problem}")
            tail = max(tail, last, key=len)
        opened = reader.common_suffix(lead, between).lstrip()
        closed = reader.common_prefix(between[: len(between) - len(opened)], tail)
        closed = self._up_to_last_tag(closed, closed.rstrip())
        section_open, after = lead[: len(lead) - len(opened)], tail[len(closed) :]
        section_close = after.rstrip() if section_open.strip() else ""
        separator = between[len(closed) : len(between) - len(opened)]
        section = {"section_open": section_open, "section_close": section_close, "separator": separator}
        after = after.removeprefix(section_close)
        return {"before": before, "open": opened, "close": closed, "after": after, **section}

    def _up_to_last_tag(self, text: str, without: str) -> str:
        groups = self.reader.groups(text)
        return text[: groups[-1][1]] if groups else without

    def _lead(self, extent: Extent) -> tuple[str, str]:
        """The white space after content, and the text before the first call."""
        content, beside = self.beside.first("content"), extent(self.beside, 0)
        if content is not None and beside is not None:
            lead = self.beside.text[content.stop : beside[0]]
            close = self.grammar.content.trail + self.grammar.content.close
            lead = lead.removeprefix(close) if close.strip() else lead
            return leading(lead), lead.lstrip()
        alone = extent(self.one, 0)
        lead = self.one.text[: alone[0]] if alone is not None else ""
        for piece in (
            self.grammar.reasoning.close if self.grammar.reasoning else "",
            self.grammar.head.strip(),
        ):
            if piece and piece in lead:
                return "", lead.rpartition(piece)[2].lstrip()
        return "", lead.lstrip()

    def _split_open(self, opened: str, head: Leads) -> tuple[str, tuple[tuple[str, str], ...]]:
        """The outer delimiter of a call, and the head inside it."""
        cut, groups = len(opened), self.reader.groups(opened)
        if len(groups) > 1:
            cut = groups[0][1] + len(leading(opened[groups[0][1] :]))
        leads = [(opened[cut:] + head[0][0], head[0][1]), *head[1:]] if head else []
        return opened[:cut], tuple(leads)


def _value_opening(turn: WrittenTurn) -> str:
    holes = turn.arguments(0)
    return turn.between(holes[0], holes[1]) if len(holes) > 1 else ""


def _leaves(value: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """The values in an object by their paths, as text or JSON."""
    for key, inner in value.items():
        yield (*path, key), inner if isinstance(inner, str) else json.dumps(inner)
        if isinstance(inner, dict):
            yield from _leaves(inner, (*path, key))
