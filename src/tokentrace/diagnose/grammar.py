"""The grammar of a model's turn, for people: its parts, delimiters and stop tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any, Final, Self

from ..formats.dialects import DIALECTS, REASONING, dialect_of
from ..formats.grammar import TurnGrammar
from ..rendering.renderer import Renderer
from ..show.document import Document, Table
from ..tokens.tokenizer import Tokenizer

_GLYPHS: Final = str.maketrans({"\n": "⏎", "\t": "⇥"})
_CHANNELS: Final = ("start", "channel", "recipient", "namespace", "message", "end", "call_end")
_OPENING: Final = ("section_open", "separator", "open", "begin", "key_open", "string_open", "value_open", "value_close")


@dataclass(frozen=True, slots=True)
class Delimiter:
    """A text that the parser looks for, its field, and the ids of its control tokens.

    `control`: it consists of control tokens only.
    """

    field: str
    text: str
    ids: tuple[int, ...]
    control: bool

    @property
    def kind(self) -> str:
        """``"control token 151657"``, ``"text"``, ``"control token 200058 and text"``."""
        names = f"control token{'s' if len(self.ids) > 1 else ''} {', '.join(map(str, self.ids))}"
        return names if self.control else f"{names} and text" if self.ids else "text"


@dataclass(frozen=True, slots=True)
class GrammarReport:
    """A grammar and its stop tokens."""

    grammar: TurnGrammar
    tokenizer: Tokenizer
    stops: Sequence[int]
    family: str = "default"

    @classmethod
    def of(cls, renderer: Renderer, tools: Any = None) -> Self:
        """Return the grammar of a renderer's turns."""
        return cls(renderer.grammar(tools), renderer.tokenizer, renderer.get_stop_token_ids(), renderer.family)

    @property
    def dialect(self) -> str | None:
        return dialect_of(self.grammar.calls, self.grammar.channels)

    @property
    def closes_reasoning(self) -> bool:
        """True if the generation prompt closes reasoning before the model writes."""
        grammar = self.grammar
        prefill = grammar.prompt[len(grammar.head) :] if grammar.prompt.startswith(grammar.head) else ""
        return grammar.reasoning is not None and grammar.reasoning.close in prefill and not grammar.opens_reasoning

    def delimiters(self) -> Iterator[Delimiter]:
        """Yield every text that the parser looks for."""
        pattern = self.tokenizer.vocabulary.control_pattern
        for field, text in _delimiters(self.grammar):
            if text.strip():
                tokens = [] if pattern is None else pattern.findall(text)
                ids = [index for token in tokens if (index := self.tokenizer.token_id(token)) is not None]
                plain = text if pattern is None else pattern.sub("", text)
                yield Delimiter(field, text, tuple(ids), not plain.strip())

    def to_json(self) -> dict[str, Any]:
        """Return the grammar as plain data without empty fields."""
        return {
            "family": self.family,
            "dialect": self.dialect,
            "grammar": _filled(asdict(self.grammar)),
            "opens_reasoning": self.grammar.opens_reasoning,
            "closes_reasoning": self.closes_reasoning,
            "delimiters": [asdict(one) for one in self.delimiters()],
            "stop_token_ids": list(self.stops),
            "stop_tokens": [self.tokenizer.decode([index]) for index in self.stops],
        }

    def document(self, _: Any = None) -> Document:
        """Return the grammar as a document."""
        stops = " or ".join(f"{self.tokenizer.decode([index])} {index}" for index in self.stops)
        turn = [[label, text.translate(_GLYPHS)] for label, text in (*self._turn(), ("stop", stops)) if text]
        rows = [[one.text.strip("\n").translate(_GLYPHS), one.field, one.kind] for one in self.delimiters()]
        notes, grammar = list(self.grammar.notes), self.grammar
        if grammar.calls is None and grammar.channels is None:
            names = ", ".join(DIALECTS)
            notes.append(f"if the model calls tools anyway, pass --tool-parser (tool_parser=): {names}")
        elif any("reasoning" in note for note in notes):
            names = ", ".join(REASONING)
            notes.append(f"if reasoning has other tags, pass --reasoning-parser (reasoning_parser=): {names}")
        return Document(
            f"Grammar of {PurePath(self.tokenizer.name).name or 'a tokenizer'}",
            "tokentrace audit --grammar",
            lead=f"family {self.family} · dialect {self.dialect}",
            notes=notes,
            tables=[
                Table("The turn", ["", " "], turn, "⟨…⟩ is what the model fills in, ⏎ a newline", words=2),
                Table("Delimiters", ["", "field", "kind"], rows, words=3),
            ],
        )

    def _turn(self) -> Iterator[tuple[str, str]]:
        """Yield the parts of the turn with holes."""
        grammar, channels, calls = self.grammar, self.grammar.channels, self.grammar.calls
        yield "prompt", grammar.prompt
        if not grammar.prompt.startswith(grammar.head):
            yield "head", grammar.head
        if channels is not None:
            yield "reasoning", f"{channels.opening(channels.reasoning)}⟨reasoning⟩{channels.end}"
            yield "content", f"{grammar.head}{channels.opening(channels.content)}⟨content⟩"
            yield "each call", grammar.head + channels.call_text("⟨name⟩", calls.outline() if calls else "⟨arguments⟩")
            return
        if grammar.reasoning is not None and not self.closes_reasoning:
            text = grammar.reasoning.wrap("⟨reasoning⟩")
            yield "reasoning", text[text.index("⟨") :] if grammar.opens_reasoning else text
        yield "content", grammar.content.wrap("⟨content⟩")
        if calls is not None:
            labels = "before calls", "calls", "between calls", "after calls"
            yield from zip(labels, (calls.before, calls.outline(), calls.separator, calls.after), strict=True)


def _delimiters(grammar: TurnGrammar) -> Iterator[tuple[str, str]]:
    """Yield the field and the text of each delimiter."""
    if grammar.channels is not None:
        yield from ((f"channels.{name}", getattr(grammar.channels, name)) for name in _CHANNELS)
        return
    for field, frame in (("reasoning", grammar.reasoning), ("content", grammar.content)):
        if frame is not None:
            yield from ((f"{field}.open", frame.open), (f"{field}.close", frame.close))
    if calls := grammar.calls:
        yield from ((f"calls.{name}", getattr(calls, name)) for name in _OPENING)
        yield from ((f"calls.head[{at}]", lead) for at, (lead, _) in enumerate(calls.head))
        yield from ((f"calls.typed_opens.{kind}", text) for kind, text in calls.typed_opens)
        yield from ((f"calls.{name}", getattr(calls, name)) for name in ("end", "close", "section_close"))


def _filled(value: Any) -> Any:
    """Drop empty fields, but for those of channels, which have defaults."""
    if not isinstance(value, dict):
        return value
    items = {name: item if name == "channels" else _filled(item) for name, item in value.items()}
    return {name: item for name, item in items.items() if item}
