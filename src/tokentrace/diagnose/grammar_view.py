"""The views of a grammar: what the model writes in its turn, the way a person would write it down."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..formats.dialects import DIALECTS, REASONING
from ..formats.grammar import CallGrammar, Channels, Style, TurnGrammar, Value
from ..rendering.rendered import RenderedTokens
from ..show.document import ORIGINS
from ..show.results import rendering_track
from ..show.terminal import COLOURS, CONTROL, CONTROL_SAMPLED, flat, layout, plain_lines
from ..tokens.visible import visible
from .grammar_sheet import Sheet

Line = list[tuple[str, str]]
"""Pieces of text with their styles."""

_CALL: Final = COLOURS["calls"][0]
_TEXT, _SPACES, _PROSE = "bold", "#8a8a8a", ""
_BOX: Final = "bold #ffffff on #3d5a80"
"""A control token that the model writes; not underlined, which would hide its underscores."""
_HOLES: Final = {
    "reasoning": f"italic {COLOURS['reasoning'][0]}",
    "content": f"italic {COLOURS['assistant'][0]}",
    **dict.fromkeys(("name", "id", "arguments", "key", "value"), f"italic {_CALL}"),
}
_HOLE: Final = re.compile(f"⟨({'|'.join(_HOLES)})⟩")
_SPACE: Final = re.compile(r"([\n\t]+)")
_GLYPHS: Final = str.maketrans({"\n": "⏎", "\t": "⇥", " ": "␣"})
_WORDS: Final = frozenset({_PROSE, "dim", "yellow"})
"""The styles of prose."""
_LABELS: Final = 19
"""The width of the column of labels."""


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
    return plain_lines(layout(*_parts(sheet, width, boxed=False)))


def text_view(sheet: Sheet, *, width: int = 100) -> Text:
    """The same in colours, control tokens boxed."""
    return layout(*_parts(sheet, width, boxed=True))


def _parts(sheet: Sheet, width: int, *, boxed: bool) -> Iterator[RenderableType]:
    width = max(width, _LABELS + 20)
    name = Path(sheet.tokenizer.name).name if sheet.tokenizer.name else "a tokenizer"
    yield Text.assemble(
        (visible(name), "bold"),
        (f"   family {sheet.family}" if sheet.family != "default" else "   of no known family", "dim"),
        (f"   dialect: {sheet.dialect}" if sheet.dialect else "", "cyan"),
    )
    yield _labelled(_notes(sheet.grammar), width, indent=6, style="bold yellow")
    yield Text("\nThe turn", "bold")
    turn = [(f"  {label}", line) for label, line in _turn(sheet)]
    yield _labelled([*turn, ("", _legend(boxed))], width)
    if sheet.delimiters():
        yield Text("\nDelimiters", "bold")
        yield from _delimiter_table(sheet, width)
    if sheet.example is not None:
        yield Text.assemble(("\nAn example", "bold"), ("  as the template writes it", "dim"))
        yield _labelled((("", line) for line in _tokens(sheet.example)), width, indent=2)


def _labelled(rows: Iterable[tuple[str, Line]], width: int, *, indent: int = _LABELS, style: str = "dim") -> Table:
    """Lines beside their labels, each broken into as many as it takes."""
    grid = Table.grid()
    grid.add_column(width=indent, style=style)
    for label, line in rows:
        grid.add_row(label, Text("\n").join(Text.assemble(*some) for some in _packed(line, width - indent)))
    return grid


def _legend(boxed: bool) -> Line:
    line: Line = [("⟨…⟩ is what the model fills in, ⏎ a newline", "dim")]
    if boxed:
        line += [(", ", "dim"), ("boxed", _BOX), (" a control token, ", "dim")]
        line += [("bold", _TEXT), (" a delimiter that is text", "dim")]
    return line


def _notes(grammar: TurnGrammar) -> Iterator[tuple[str, Line]]:
    """What the template leaves open, and what to do about it."""
    for note in grammar.notes:
        yield "note", [(flat(note), "yellow")]
    if grammar.calls is None and grammar.channels is None:
        said = "If the model calls tools all the same, --tool-parser (tool_parser= in Python) says how: "
        yield "", [(said + ", ".join(DIALECTS), _PROSE)]
    elif any("reasoning" in note for note in grammar.notes):
        said = "If it is set off otherwise, --reasoning-parser (reasoning_parser= in Python) says how: "
        yield "", [(said + ", ".join(REASONING), _PROSE)]
    elif grammar.notes:
        yield "", [("Where the model writes otherwise, --tool-parser (tool_parser= in Python) says how.", _PROSE)]


# -- the turn


def _spelled(sheet: Sheet, text: str, control: str = _BOX) -> Line:
    """Holes, control tokens, white space and the rest of a text, each in its style."""
    inner = text.strip(" ")
    ends = [text[: len(text) - len(text.lstrip(" "))], text[len(text.rstrip(" ")) :] if inner else ""]
    lead, trail = ([(some.translate(_GLYPHS), _SPACES)] if some else [] for some in ends)
    out: Line = []
    for part, index in sheet.split(inner):
        if index is not None:
            out.append((visible(part), control))
            continue
        for at, some in enumerate(_HOLE.split(part)):
            out += [(f"⟨{some}⟩", _HOLES[some])] if at % 2 else _spaced(some)
    return [*lead, *out, *trail]


def _spaced(text: str) -> Line:
    """A text with its newlines and tabs made visible."""
    parts = enumerate(_SPACE.split(text))
    return [(part.translate(_GLYPHS), _SPACES) if at % 2 else (visible(part), _TEXT) for at, part in parts if part]


def _turn(sheet: Sheet) -> Iterator[tuple[str, Line]]:
    """The turn from head to stop, part by part."""
    head, prompt = sheet.grammar.head, sheet.grammar.prompt
    if prompt:
        yield "prompt", _spelled(sheet, prompt, CONTROL)
    if head.startswith(prompt) and head != prompt:
        yield "begins" if prompt else "head", _spelled(sheet, head[len(prompt) :])
    elif not prompt.startswith(head):
        yield "head", _spelled(sheet, head)
    channels = sheet.grammar.channels
    for label, text in _turn_parts(sheet) if channels is None else _turn_messages(sheet.grammar, channels):
        if text:
            yield label, _spelled(sheet, text)
    if sheet.stops:
        yield "stop", _stops(sheet)


def _turn_messages(grammar: TurnGrammar, channels: Channels) -> Iterator[tuple[str, str]]:
    head = grammar.head
    yield "reasoning", f"{channels.opening(channels.reasoning)}⟨reasoning⟩{channels.end}"
    yield "content", f"{head}{channels.opening(channels.content)}⟨content⟩"
    body = "⟨arguments⟩" if grammar.calls is None else grammar.calls.shown
    yield "each call", head + channels.written("⟨name⟩", body)


def _turn_parts(sheet: Sheet) -> Iterator[tuple[str, str]]:
    grammar, prompted = sheet.grammar, sheet.prompted
    if grammar.reasoning is not None and not sheet.closes_reasoning:
        text = grammar.reasoning.written("⟨reasoning⟩")
        if grammar.opens_reasoning:
            text = text[len(prompted) :] if text.startswith(prompted) else text[text.index("⟨") :]
        yield "reasoning", text
    yield "content", grammar.content.written("⟨content⟩")
    calls = grammar.calls
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
        if calls.others is not Value.QUOTED:
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
        for kind, opened in calls.typed_opens:
            yield f"  each {kind}", f"{calls.key_open}⟨key⟩{opened}{closed}"
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


def _stops(sheet: Sheet) -> Line:
    stops = zip(sheet.stop_texts, sheet.stops, strict=True)
    return _joined([[*_spelled(sheet, text), (f" {index}", "dim")] for text, index in stops], " or ")


def _joined(lines: Sequence[Line], between: str) -> Line:
    """One line after another, something between them."""
    return [part for at, line in enumerate(lines) for part in ([(between, "dim")] if at else []) + line]


def _delimiter_table(sheet: Sheet, width: int) -> Iterator[RenderableType]:
    found = sheet.delimiters()
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column()
    grid.add_column(style="dim")
    for one in found:
        text = Text.assemble("  ", *_spelled(sheet, one.text.strip("\n")))
        grid.add_row(text, one.role, Text(one.kind, "yellow" if one.forgeable else "cyan"))
    yield grid
    if any(one.forgeable for one in found):
        said = (
            "No text can spell a control token: it is one id. What is text may stand in content and arguments as well."
        )
        yield _labelled([("", [(said, _PROSE)])], width, indent=2)


# -- lines


def _packed(line: Line, width: int) -> list[Line]:
    """A line in lines that fit: prose is broken between words, else first of all after newlines."""
    if _size(line) <= width:
        return [line]
    prose = any(style in _WORDS for _, style in line)
    out: list[Line] = [[]]
    for atom in _prose_words(line) if prose else _chunks(line):
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
        begins = style in (_BOX, CONTROL, CONTROL_SAMPLED) or text.startswith(" ")
        if chunk and ((begins and not chunk[-1][0].endswith(("<", "</"))) or chunk[-1][0].endswith("⏎")):
            yield chunk
            chunk = []
        chunk.append((text, style))
    if chunk:
        yield chunk


def _prose_words(line: Line) -> Iterator[Line]:
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


def _tokens(rendered: RenderedTokens) -> Iterator[Line]:
    """The turn of an example, which answers the one message before it, token by token."""
    track = rendering_track(rendered)
    texts, control = track.texts or (), rendered.control
    line: Line = []
    for piece in track.pieces():
        if piece.message != 1:
            continue
        for at in range(piece.start, piece.stop):
            if control[at]:
                line.append((visible(texts[at]), CONTROL_SAMPLED if piece.marked else CONTROL))
                continue
            shade = COLOURS[ORIGINS[piece.hue].name][at % 2]
            style = f"bold underline {shade}" if piece.marked else shade
            first, *rest = visible(texts[at]).replace("\t", "⇥   ").split("\n")
            line += [(first, style)] if first else []
            for some in rest:
                yield [*line, ("⏎", style)]
                line = [(some, style)] if some else []
    if line:
        yield line
