"""The views of a grammar: what the model writes in its turn, the way a person would write it down."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.cells import cell_len
from rich.text import Text

from ..errors import TokentraceError
from ..formats.dialects import DIALECTS, REASONING, dialect_of
from ..formats.grammar import CallGrammar, Channels, Style, TurnGrammar, Value
from ..rendering.rendered import RenderedTokens
from ..rendering.renderer import Renderer
from ..tokens.tokenizer import Tokenizer
from ..tokens.visible import visible
from .pieces import Kind, pieces, token_texts
from .terminal import _CONTROL, _CONTROL_SAMPLED, COLOURS

Line = list[tuple[str, str]]
"""Pieces of text with their styles."""

_CALL: Final = COLOURS[Kind.CALLS][0]
_TEXT, _SPACES, _PROSE = "bold", "#8a8a8a", ""
_BOX: Final = "bold #ffffff on #3d5a80"
"""A control token that the model writes; not underlined, which would hide its underscores."""
_HOLES: Final = {
    "reasoning": f"italic {COLOURS[Kind.REASONING][0]}",
    "content": f"italic {COLOURS[Kind.ASSISTANT][0]}",
    **dict.fromkeys(("name", "id", "arguments", "key", "value"), f"italic {_CALL}"),
}
_HOLE: Final = re.compile(f"⟨({'|'.join(_HOLES)})⟩")
_SPACE: Final = re.compile(r"([\n\t]+)")
_GLYPHS: Final = str.maketrans({"\n": "⏎", "\t": "⇥", " ": "␣"})
_WORDS: Final = frozenset({_PROSE, "dim", "yellow"})
"""The styles of prose."""
_LABELS: Final = 19
"""The width of the column of labels."""


class Delimiter(NamedTuple):
    """A text that is looked for: the field of the grammar that has it, what it does, and whether it is text."""

    field: str
    role: str
    text: str
    parts: tuple[tuple[str, int | None], ...]
    """Its control tokens with their ids, and the text between them; white space left out."""

    @property
    def control(self) -> bool:
        """Whether it is made of control tokens only."""
        return all(index is not None for _, index in self.parts)

    @property
    def forgeable(self) -> bool:
        """Whether text can spell it."""
        return all(index is None for _, index in self.parts)

    @property
    def kind(self) -> str:
        """``"control token 151657"``, ``"text"``, ``"control token 200058 and text"``."""
        ids = [str(index) for _, index in self.parts if index is not None]
        named = f"control token{'s' if len(ids) > 1 else ''} {', '.join(ids)}" if ids else ""
        return named if self.control else f"{named} and text" if named else "text"


@dataclass(frozen=True, slots=True)
class Sheet:
    """A grammar, and what is needed to show it."""

    grammar: TurnGrammar
    tokenizer: Tokenizer
    stops: Sequence[int]
    family: str = "default"
    example: RenderedTokens | None = None

    @property
    def dialect(self) -> str | None:
        return dialect_of(self.grammar.calls, self.grammar.channels)

    @property
    def stop_texts(self) -> list[str]:
        return [self.tokenizer.decode([index]) for index in self.stops]

    @property
    def prompted(self) -> str:
        """What the generation prompt writes after the head of the turn."""
        grammar = self.grammar
        return grammar.prompt[len(grammar.head) :] if grammar.prompt.startswith(grammar.head) else ""

    @property
    def closes_reasoning(self) -> bool:
        """Whether the generation prompt has closed reasoning before the model writes."""
        frame = self.grammar.reasoning
        return frame is not None and frame.close in self.prompted and not self.grammar.opens_reasoning

    def split(self, text: str) -> Iterator[tuple[str, int | None]]:
        """A text of the grammar in its pieces: control tokens with their ids, and what stands between them."""
        pattern, at = self.tokenizer.vocabulary.control_pattern, 0
        for match in pattern.finditer(text) if pattern is not None else ():
            if match.start() > at:
                yield text[at : match.start()], None
            yield match[0], self.tokenizer.token_id(match[0])
            at = match.end()
        if at < len(text):
            yield text[at:], None

    def delimiters(self) -> list[Delimiter]:
        """All that is looked for in a turn, in the order in which it is written."""
        return [
            Delimiter(field, role, text, tuple((part, index) for part, index in self.split(text) if part.strip()))
            for field, role, text in _delimiters(self.grammar)
            if text.strip()
        ]


def _delimiters(grammar: TurnGrammar) -> Iterator[tuple[str, str, str]]:
    if grammar.channels is not None:
        roles = {
            "start": "begins a message",
            "channel": "before the channel",
            "recipient": "before the recipient",
            "namespace": "before the name",
            "message": "ends the header",
            "end": "ends a message",
            "call_end": "ends a call",
        }
        for field, role in roles.items():
            yield f"channels.{field}", role, getattr(grammar.channels, field)
        return
    for field, frame in (("reasoning", grammar.reasoning), ("content", grammar.content)):
        if frame is not None:
            yield f"{field}.open", f"opens {field}", frame.open
            yield f"{field}.close", f"closes {field}", frame.close
    calls = grammar.calls
    if calls is None:
        return
    yield "calls.section_open", "opens the calls", calls.section_open
    yield "calls.separator", "between calls", calls.separator
    yield "calls.open", "opens a call", calls.open
    for at, (lead, named) in enumerate(calls.head):
        yield f"calls.head[{at}]", f"before the {named}", lead
    yield "calls.begin", "before arguments", calls.begin
    yield "calls.key_open", "before a key", calls.key_open
    yield "calls.string_open", "before a string", calls.string_open
    yield "calls.value_open", "before others" if calls.string_open else "before a value", calls.value_open
    yield "calls.value_close", "after a value", calls.value_close
    yield "calls.end", "after arguments", calls.end
    yield "calls.close", "closes a call", calls.close
    yield "calls.section_close", "closes the calls", calls.section_close


def make_sheet(renderer: Renderer, tools: Any = None) -> Sheet:
    """What a renderer knows of the turns that its model writes."""
    grammar = renderer.grammar(tools)
    example = _example(renderer, grammar, tools)
    return Sheet(grammar, renderer.tokenizer, renderer.get_stop_token_ids(), renderer.family, example)


# -- an example

_QUESTION: Final = {"role": "user", "content": "What is the weather in Rome and in Oslo?"}
_REASONING: Final = "Two places, two calls."
_CONTENT: Final = "I look it up."
_PLACES: Final = ({"city": "Rome", "days": 1}, {"city": "Oslo", "days": 2})


def _example(renderer: Renderer, grammar: TurnGrammar, tools: Any) -> RenderedTokens | None:
    """A turn that shows as much as the template agrees to write."""
    called = grammar.calls is not None or grammar.channels is not None
    thought = grammar.reasoning is not None or grammar.channels is not None
    for count, reasoning, content, as_text in itertools.product(
        (2, 1, 0) if called else (0,), (_REASONING, "") if thought else ("",), (_CONTENT, "", None), (False, True)
    ):
        if not count and not content:
            continue
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        if count:
            message["tool_calls"] = [_call(grammar, at, as_text) for at in range(count)]
        try:
            rendered = renderer.silent().render([_QUESTION, message], tools=tools)
        except TokentraceError:
            continue
        said = "".join(rendered.decode(slice(turn.start, turn.stop)) for turn in rendered.turns)
        places = [str(place["city"]) for place in _PLACES[:count]]
        if all(part in said for part in (content or "", reasoning, *places)):
            return rendered
    return None


def _call(grammar: TurnGrammar, at: int, as_text: bool) -> dict[str, Any]:
    index = f"functions.weather:{at}" if grammar.calls is not None and grammar.calls.id_is_name else f"call0000{at}"
    arguments = json.dumps(_PLACES[at]) if as_text else dict(_PLACES[at])
    return {"id": index, "type": "function", "function": {"name": "weather", "arguments": arguments}}


# -- for programs


def json_view(sheet: Sheet) -> dict[str, Any]:
    """A grammar as plain data: the fields that are not empty, the delimiters, the stop tokens."""
    return {
        "family": sheet.family,
        "dialect": sheet.dialect,
        "grammar": _plain(sheet.grammar),
        "opens_reasoning": sheet.grammar.opens_reasoning,
        "closes_reasoning": sheet.closes_reasoning,
        "delimiters": [
            {
                "field": found.field,
                "role": found.role,
                "text": found.text,
                "control": found.control,
                "forgeable": found.forgeable,
                "ids": [index for _, index in found.parts if index is not None],
            }
            for found in sheet.delimiters()
        ],
        "stop_token_ids": list(sheet.stops),
        "stop_tokens": sheet.stop_texts,
    }


def _plain(value: Any) -> Any:
    """Dataclasses as objects without their empty fields (channels have defaults that are not empty: all of theirs)."""
    if dataclasses.is_dataclass(value):
        found = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return found if isinstance(value, Channels) else {name: some for name, some in found.items() if some}
    if isinstance(value, tuple):
        return [_plain(some) for some in value]
    return value.value if isinstance(value, Enum) else value


# -- for terminals


def plain_view(sheet: Sheet, *, width: int = 100) -> str:
    """A grammar as plain lines."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in _lines(sheet, width, boxed=False))


def text_view(sheet: Sheet, *, width: int = 100) -> Text:
    """The same in colours, control tokens boxed."""
    return Text("\n").join(Text.assemble(*line) for line in _lines(sheet, width, boxed=True))


def _lines(sheet: Sheet, width: int, *, boxed: bool) -> Iterator[Line]:
    width = max(width, _LABELS + 20)
    name = Path(sheet.tokenizer.name).name if sheet.tokenizer.name else "a tokenizer"
    yield [
        (visible(name), "bold"),
        (f"   family {sheet.family}" if sheet.family != "default" else "   of no known family", "dim"),
        (f"   dialect: {sheet.dialect}" if sheet.dialect else "", "cyan"),
    ]
    for label, line in _notes(sheet.grammar):
        yield from _row(label, line, width, "bold yellow", indent=6)
    yield []
    yield [("The turn", "bold")]
    for label, line in _Turn(sheet).rows():
        yield from _row(f"  {label}", line, width)
    yield from _row("", _legend(boxed), width)
    yield []
    yield [("In words", "bold")]
    for label, found in itertools.groupby(_Words(sheet).rows(), lambda row: row[0]):
        for at, (_, line) in enumerate(found):
            yield from _row("" if at else f"  {label}", line, width)
    yield from _delimiter_table(sheet, width)
    if sheet.example is not None:
        yield []
        yield [("An example", "bold"), ("  as the template writes it", "dim")]
        for line in _tokens(sheet.example):
            yield from _row("", line, width, indent=2)


def _legend(boxed: bool) -> Line:
    line: Line = [("⟨…⟩ is what the model fills in, ⏎ a newline", "dim")]
    if boxed:
        line += [(", ", "dim"), ("boxed", _BOX), (" a control token, ", "dim")]
        line += [("bold", _TEXT), (" a delimiter that is text", "dim")]
    return line


def _notes(grammar: TurnGrammar) -> Iterator[tuple[str, Line]]:
    """What the template leaves open, and what to do about it."""
    for note in grammar.notes:
        yield "note", [(_flat(note), "yellow")]
    if grammar.calls is None and grammar.channels is None:
        said = "If the model calls tools all the same, --tool-parser (tool_parser= in Python) says how: "
        yield "", [(said + ", ".join(DIALECTS), _PROSE)]
    elif any("reasoning" in note for note in grammar.notes):
        said = "If it is set off otherwise, --reasoning-parser (reasoning_parser= in Python) says how: "
        yield "", [(said + ", ".join(REASONING), _PROSE)]
    elif grammar.notes:
        yield "", [("Where the model writes otherwise, --tool-parser (tool_parser= in Python) says how.", _PROSE)]


# -- the turn


class _Speller:
    """Texts of the grammar in their styles."""

    def __init__(self, sheet: Sheet) -> None:
        self.sheet = sheet
        self.grammar = sheet.grammar

    def spelled(self, text: str, control: str = _BOX) -> Line:
        """Holes, control tokens, white space and the rest of a text, each in its style."""
        inner = text.strip(" ")
        ends = [text[: len(text) - len(text.lstrip(" "))], text[len(text.rstrip(" ")) :] if inner else ""]
        lead, trail = ([(some.translate(_GLYPHS), _SPACES)] if some else [] for some in ends)
        out: Line = []
        for part, index in self.sheet.split(inner):
            if index is not None:
                out.append((visible(part), control))
                continue
            for at, some in enumerate(_HOLE.split(part)):
                out += [(f"⟨{some}⟩", _HOLES[some])] if at % 2 else _spaced(some)
        return [*lead, *out, *trail]

    def said(self, words: str, *texts: str) -> Line:
        """Prose with texts of the grammar in it."""
        out: Line = []
        for word, text in itertools.zip_longest(words.split("{}"), texts):
            out += [(word, _PROSE)] if word else []
            out += self.spelled(text) if text else []
        return out


def _spaced(text: str) -> Line:
    """A text with its newlines and tabs made visible."""
    parts = enumerate(_SPACE.split(text))
    return [(part.translate(_GLYPHS), _SPACES) if at % 2 else (visible(part), _TEXT) for at, part in parts if part]


class _Turn(_Speller):
    """The turn from head to stop, part by part."""

    def rows(self) -> Iterator[tuple[str, Line]]:
        head, prompt = self.grammar.head, self.grammar.prompt
        if prompt:
            yield "prompt", self.spelled(prompt, _CONTROL)
        if head.startswith(prompt) and head != prompt:
            yield "begins" if prompt else "head", self.spelled(head[len(prompt) :])
        elif not prompt.startswith(head):
            yield "head", self.spelled(head)
        rows = self._messages(self.grammar.channels) if self.grammar.channels is not None else self._parts()
        for label, text in rows:
            if text:
                yield label, self.spelled(text)
        if self.sheet.stops:
            yield "stop", _listed([self.spelled(text) for text in self.sheet.stop_texts], " or ")

    def _messages(self, channels: Channels) -> Iterator[tuple[str, str]]:
        head = self.grammar.head
        yield "reasoning", f"{channels.channel}{channels.reasoning}{channels.message}⟨reasoning⟩{channels.end}"
        yield "content", f"{head}{channels.channel}{channels.content}{channels.message}⟨content⟩"
        yield "each call", head + channels.written("⟨name⟩", "⟨arguments⟩")

    def _parts(self) -> Iterator[tuple[str, str]]:
        frame, prompted = self.grammar.reasoning, self.sheet.prompted
        if frame is not None and not self.sheet.closes_reasoning:
            text = frame.written("⟨reasoning⟩")
            if self.grammar.opens_reasoning:
                text = text[len(prompted) :] if text.startswith(prompted) else text[text.index("⟨") :]
            yield "reasoning", text
        yield "content", self.grammar.content.written("⟨content⟩")
        calls = self.grammar.calls
        if calls is not None:
            yield "before calls", calls.before
            yield "calls begin", calls.section_open
            yield from _call_rows(calls)
            yield "between calls", calls.separator
            yield "calls end", calls.section_close
            yield "after calls", calls.after


def _call_rows(calls: CallGrammar) -> Iterator[tuple[str, str]]:
    head = "".join(f"{lead}⟨{field}⟩" for lead, field in calls.head)
    if calls.style is Style.JSON_CALL:
        yield "each call", f"{calls.open}{_object(calls)}{calls.end}{calls.close}"
    elif calls.style is Style.BRACES:
        yield "each call", f"{calls.open}{head}{calls.begin}"
        yield "  each string", f"⟨key⟩:{calls.quote}⟨value⟩{calls.quote}"
        yield "  each other", "⟨key⟩:⟨value⟩"
        yield "call ends", f"}}{calls.end}{calls.close}"
    elif calls.style is Style.PYTHON:
        yield "each call", f"{calls.open}⟨name⟩(⟨key⟩=⟨value⟩, …){calls.close}"
    elif calls.style is Style.JSON_ARGUMENTS:
        yield "each call", f"{calls.open}{head}{calls.begin}⟨arguments⟩{calls.end}{calls.close}"
    else:
        yield "each call", f"{calls.open}{head}{calls.begin}"
        named = f"⟨key⟩{calls.value_open}" if calls.style is Style.TREE else ""
        closed = f"⟨value⟩{calls.value_close}{named}"
        if calls.string_open:
            yield "  each string", f"{calls.key_open}⟨key⟩{calls.string_open}{closed}"
        label = "  each other" if calls.string_open else "  each argument"
        yield label, f"{calls.key_open}⟨key⟩{calls.value_open}{closed}"
        yield "call ends", f"{calls.end}{calls.close}"


def _object(calls: CallGrammar) -> str:
    """The JSON object of a call, with holes."""
    if calls.named_key:
        return '{"⟨name⟩": ⟨arguments⟩}'
    value: dict[str, Any] = {}
    for field, path in calls.keys:
        inside = value
        for key in path[:-1]:
            inside = inside.setdefault(key, {})
        inside[path[-1]] = f"⟨{field}⟩"
    return json.dumps(value, ensure_ascii=False).replace('"⟨arguments⟩"', "⟨arguments⟩")


# -- in words


class _Words(_Speller):
    """The same in words."""

    def rows(self) -> Iterator[tuple[str, Line]]:
        channels, calls = self.grammar.channels, self.grammar.calls
        if channels is not None:
            yield from self._channels(channels)
        else:
            yield from (("reasoning", line) for line in self._reasoning())
            yield from (("content", line) for line in self._content())
            if calls is None:
                yield "calls", self.said("none that the template shows")
            else:
                yield from (("calls", line) for line in self._calls(calls))
                yield "name", self._name(calls)
                yield "id", self._id(calls)
                yield from (("arguments", line) for line in self._arguments(calls))
        yield "stop", self._stops()

    def _channels(self, channels: Channels) -> Iterator[tuple[str, Line]]:
        head = self.grammar.head
        yield "turn", self.said("several messages, each with a header that says what it is")
        yield "turn", self.said("the prompt begins the first, {} the others", head)
        yield "reasoning", self.said("a message on the channel {}, ended by {}", channels.reasoning, channels.end)
        yield "content", self.said("a message on the channel {}", channels.content)
        yield "calls", self.said("a message on the channel {}, ended by {}", channels.call, channels.call_end)
        yield "name", self.said("the recipient in the header: {}", f"{channels.recipient}{channels.namespace}⟨name⟩")
        yield "id", self.said("not written")
        kind = " that the header calls {}" if channels.content_type else ""
        yield "arguments", self.said(f"one JSON object{kind}", channels.content_type)

    def _reasoning(self) -> Iterator[Line]:
        frame = self.grammar.reasoning
        if frame is None:
            yield self.said("none that the template shows (--reasoning-parser adds it)")
            return
        if frame.open:
            yield self.said("between {} and {}", frame.open + frame.lead, frame.trail + frame.close)
        else:
            yield self.said("from the beginning of the turn to {}", frame.trail + frame.close)
        after = self.grammar.after_empty
        if after and after == frame.after:
            yield self.said("{} after it", after)
        elif frame.after or after:
            yield self.said(f"{_or_nothing(frame.after)} after it, {_or_nothing(after)} where it is empty",
                            *filter(None, (frame.after, after)))  # fmt: skip
        if self.grammar.opens_reasoning:
            yield self.said("the generation prompt opens it: a completion begins inside")
        elif self.sheet.closes_reasoning:
            yield self.said("the generation prompt closes it, empty: a completion begins after it")
        else:
            yield self.said("the model opens it, not the generation prompt")

    def _content(self) -> Iterator[Line]:
        frame = self.grammar.content
        if frame.open or frame.close:
            yield self.said("between {} and {}", frame.open + frame.lead, frame.trail + frame.close)
            return
        until = "the first call or the stop token" if self.grammar.calls is not None else "the stop token"
        yield self.said(f"bare, up to {until}")

    def _calls(self, calls: CallGrammar) -> Iterator[Line]:
        if calls.section_open:
            yield self.said("all in one section between {} and {}", calls.section_open, calls.section_close)
        if calls.open and calls.close:
            yield self.said("each between {} and {}", calls.open, calls.close)
        elif calls.open:
            yield self.said("each after {}", calls.open)
        elif not calls.section_open:
            yield self.said("nothing around them: content that begins as a call is one")
        found = [(calls.separator, "between calls"), (calls.before, "between content and calls")]
        if calls.separator or calls.before:
            yield _listed([self.said(f"{{}} {where}", text) for text, where in found if text], ", ")

    def _name(self, calls: CallGrammar) -> Line:
        if calls.id_is_name:
            return self.said("read out of the id, functions.NAME:INDEX")
        if calls.style is Style.PYTHON:
            return self.said("the function that is called")
        if calls.named_key:
            return self.said("the only key of a JSON object")
        return self._field(calls, "name") or self.said("not written")

    def _id(self, calls: CallGrammar) -> Line:
        return self._field(calls, "id") or self.said("not written")

    def _field(self, calls: CallGrammar, wanted: str) -> Line:
        """Where a field stands before the arguments, or under which key."""
        path = dict(calls.keys).get(wanted)
        if path is not None:
            return self.said("in a JSON object, under {}", _quoted(path))
        fields = [field for _, field in calls.head]
        if wanted not in fields:
            return []
        at = fields.index(wanted)
        lead = calls.head[at][0] or ("" if at else calls.open)
        follows = calls.head[at + 1][0] if at + 1 < len(fields) else calls.begin
        begins = "after {}" if lead.strip() else "at the beginning"
        return self.said(f"{begins}, up to {_or_nothing(follows, 'the arguments')}",
                         *filter(None, (lead if lead.strip() else "", follows)))  # fmt: skip

    def _arguments(self, calls: CallGrammar) -> Iterator[Line]:
        if calls.named_key:
            yield self.said("one JSON object, the value of that key")
        elif calls.style is Style.BRACES:
            yield self.said("in braces, nearly JSON: keys without quotes, {} around strings", calls.quote)
        elif calls.style is Style.JSON_CALL:
            yield self.said("in the same JSON object, under {}", _quoted(dict(calls.keys).get("arguments", ())))
        elif calls.style is Style.JSON_ARGUMENTS:
            ends = calls.begin, calls.end or calls.close
            yield self.said(
                "one JSON object" + (", between {} and {}" if all(ends) else ""), *(ends if all(ends) else ())
            )
        elif calls.style is Style.PYTHON:
            yield self.said("keyword arguments of a Python call, values as Python literals")
        else:
            yield from self._values(calls)
        if calls.ascii:
            yield self.said("JSON escapes all that is not ASCII")

    def _values(self, calls: CallGrammar) -> Iterator[Line]:
        if calls.style is Style.TREE:
            yield self.said("elements named after the arguments, nested as the values are")
            if calls.item:
                yield self.said("the elements of a list are called {}", calls.item)
        else:
            yield self.said("one by one, each key and each value between tags")
        if calls.string_open:
            yield self.said("the tag says what it is: {} a string, {} any other value",
                            calls.string_open, calls.value_open)  # fmt: skip
        yield self.said(_STRINGS[calls.strings])
        python = calls.others is Value.PYTHON
        if calls.style is Style.TREE:
            yield self.said("numbers and booleans as " + ("Python writes them" if python else "JSON"))
        else:
            yield self.said("other values as JSON" + (", but True, False and None as in Python" if python else ""))

    def _stops(self) -> Line:
        if not self.sheet.stops:
            return self.said("nothing that is known ends a turn")
        texts = zip(self.sheet.stop_texts, self.sheet.stops, strict=True)
        return _listed([[*self.spelled(text), (f" {index}", "dim")] for text, index in texts], ", ")


_STRINGS: Final = {
    Value.BARE: "strings bare, as they are",
    Value.CDATA: "strings bare, in a CDATA section where they could be taken for markup",
    Value.JSON: "strings as JSON, quoted",
    Value.PYTHON: "strings as Python writes them",
}


def _quoted(path: Sequence[str]) -> str:
    return ".".join(f'"{key}"' for key in path)


def _or_nothing(text: str, nothing: str = "nothing") -> str:
    return "{}" if text else nothing


def _listed(lines: Sequence[Line], between: str) -> Line:
    """One line after another, something between them."""
    return [part for at, line in enumerate(lines) for part in ([(between, "dim")] if at else []) + line]


# -- delimiters


def _delimiter_table(sheet: Sheet, width: int) -> Iterator[Line]:
    found = sheet.delimiters()
    if not found:
        return
    yield []
    yield [("Delimiters", "bold")]
    speller = _Speller(sheet)
    spelled = [speller.spelled(delimiter.text.strip("\n")) for delimiter in found]
    first = max(map(_size, spelled))
    second = max(len(delimiter.role) for delimiter in found)
    for delimiter, line in zip(found, spelled, strict=True):
        role = f"{' ' * (first - _size(line))}  {delimiter.role:<{second}}  "
        yield [("  ", ""), *line, (role, "dim"), (delimiter.kind, "yellow" if delimiter.forgeable else "cyan")]
    if any(delimiter.forgeable for delimiter in found):
        said = (
            "No text can spell a control token: it is one id. What is text may stand in content and arguments as well."
        )
        yield from _row("", [(said, _PROSE)], width, indent=2)


# -- lines


def _row(label: str, line: Line, width: int, style: str = "dim", indent: int = _LABELS) -> Iterator[Line]:
    """A labelled line, as many lines as it takes."""
    for at, some in enumerate(_packed(line, width - indent)):
        yield [((label if not at else "").ljust(indent), style), *some]


def _packed(line: Line, width: int) -> list[Line]:
    """A line in lines that fit: prose is broken between words, else first of all after newlines."""
    if _size(line) <= width:
        return [line]
    prose = any(style in _WORDS for _, style in line)
    out: list[Line] = [[]]
    for atom in _words(line) if prose else _chunks(line):
        if out[-1] and _size(out[-1]) + _size(atom) > width + (1 if atom[-1][0].endswith(" ") else 0):
            out.append([])
        out[-1] += atom
        if not prose and atom[-1][0].endswith("⏎"):
            out.append([])
    return [some for some in out if some]


def _chunks(line: Line) -> Iterator[Line]:
    """Parts of a turn that begin with a control token (not one in a tag), a space, or after a newline."""
    chunk: Line = []
    for text, style in line:
        begins = style in (_BOX, _CONTROL, _CONTROL_SAMPLED) or text.startswith(" ")
        if chunk and ((begins and not chunk[-1][0].endswith(("<", "</"))) or chunk[-1][0].endswith("⏎")):
            yield chunk
            chunk = []
        chunk.append((text, style))
    if chunk:
        yield chunk


def _words(line: Line) -> Iterator[Line]:
    """Words of prose, each with the texts of the grammar that touch it."""
    word: Line = []
    for text, style in line:
        for part in re.findall(r"\S+\s*|\s+", text) if style in _WORDS else (text,):
            word.append((part, style))
            if style in _WORDS and part[-1].isspace():
                yield word
                word = []
    if word:
        yield word


def _size(line: Line) -> int:
    return sum(cell_len(text) for text, _ in line)


def _flat(text: str) -> str:
    return visible(text).replace("\n", "⏎")


def _tokens(rendered: RenderedTokens) -> Iterator[Line]:
    """The turn of an example, which answers the one message before it, token by token."""
    texts, control = token_texts(rendered), rendered.control
    line: Line = []
    for piece in pieces(rendered):
        if piece.message != 1:
            continue
        for at in range(piece.start, piece.stop):
            if control[at]:
                line.append((visible(texts[at]), _CONTROL_SAMPLED if piece.sampled else _CONTROL))
                continue
            shade = COLOURS[piece.kind][at % 2]
            style = f"bold underline {shade}" if piece.sampled else shade
            first, *rest = visible(texts[at]).replace("\t", "⇥   ").split("\n")
            line += [(first, style)] if first else []
            for some in rest:
                yield [*line, ("⏎", style)]
                line = [(some, style)] if some else []
    if line:
        yield line
