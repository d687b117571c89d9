"""How a model sets off reasoning and calls: as its renderer's grammar says, then as the dialects in use do.

With ids and a tokenizer alone there is no grammar, and what is known is what the dialects have in common.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from ..errors import TokentraceError
from ..formats.dialects import DIALECTS, REASONING
from ..formats.grammar import CallGrammar, Channels, Style, TurnGrammar
from ..parsing.compiled import Compiled
from ..parsing.parser import parse
from ..parsing.response import CallStatus, ParsedToolCall
from ..tokens.tokenizer import Ids, Tokenizer
from ..tokens.vocabulary import Vocabulary
from .turn_heads import TurnHeads

Tags = tuple[str, str]
"""Texts that open and close something."""


def _reasoning_message(channels: Channels) -> Tags:
    """Reasoning that is a message of its own, up to the next message."""
    return channels.opening(channels.reasoning), f"{channels.end}{channels.start}assistant"


REASONING_TAGS: Final[tuple[Tags, ...]] = (
    *((frame.open, frame.close) for frame in REASONING.values() if frame is not None),
    _reasoning_message(Channels()),
    ("◁think▷", "◁/think▷"),
    ("<reasoning>", "</reasoning>"),
    ("<thinking>", "</thinking>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought\n", "<channel|>"),
    ("<unused94>thought\n", "<unused95>"),
)
"""Ways of setting off reasoning that are in use, by dialects and by models that have no dialect here."""

TOOL_SECTIONS: Final[tuple[Tags, ...]] = (
    ("<tools>", "</tools>"),
    ("tool_declare<|im_middle|>", "<|im_end|>"),
    ("namespace functions {", "} // namespace functions"),
    ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    ("<functions>", "</functions>"),
    ("Calls to these tools must go to the commentary channel", "<|end|>"),
    ("\n## Tools\n", "<｜User｜>"),
)
"""Texts between which templates declare tools."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way of writing calls: what opens and closes one, and the grammar that reads it."""

    opening: str
    closing: str
    grammar: TurnGrammar

    @classmethod
    def of(cls, written: CallGrammar | Channels | None) -> CallFormat | None:
        """None where calls are not set off by texts of their own."""
        if isinstance(written, Channels):
            head = f"{written.start}assistant"
            opening = f" {written.recipient}{written.namespace}"
            return cls(opening, written.call_end, TurnGrammar(head=head, prompt=head, channels=written))
        if written is None:
            return None
        if written.open.strip() and written.close.strip():  # a single call, be it in a section or not
            written = dataclasses.replace(written, section_open="", section_close="")
        opening = written.open.strip() or written.section_open.strip()
        closing = written.close.strip() or written.section_close.strip()
        return cls(opening, closing, TurnGrammar(calls=written)) if opening.strip("[{") and closing else None

    def has_read(self, call: ParsedToolCall) -> bool:
        """Whether a call was understood: its name and its arguments, or that it has none."""
        calls = self.grammar.calls
        left_out = call.status is CallStatus.MALFORMED and calls is not None and calls.style is Style.JSON_CALL
        return bool(call.name) and (call.arguments is not None or left_out)


CALL_FORMATS: Final = tuple(
    known for dialect in DIALECTS.values() if (known := CallFormat.of(dialect.calls or dialect.channels)) is not None
)
"""The ways of writing calls that are in use."""
_CALL_TAGS: Final = tuple((known.opening, known.closing) for known in CALL_FORMATS)


@dataclass(frozen=True, slots=True)
class Markup:
    """How turns, reasoning and calls are set off; of several ways, the most likely first."""

    tokenizer: Tokenizer
    turns: TurnHeads
    reasoning: tuple[Tags, ...]
    calls: tuple[CallFormat, ...]

    @property
    def vocabulary(self) -> Vocabulary:
        return self.tokenizer.vocabulary

    @classmethod
    def of(cls, known: Any, reasoning: Tags | None = None) -> Markup:
        """What a tokenizer, or better a renderer, knows; `reasoning` is what the caller says of it."""
        tokenizer: Tokenizer = known if isinstance(known, Tokenizer) else known.tokenizer
        grammar = _grammar(known)
        tags = [reasoning] if reasoning is not None else []
        if grammar.reasoning is not None and grammar.reasoning.open:
            tags.append((grammar.reasoning.open, grammar.reasoning.close))
        own = [CallFormat.of(grammar.calls), CallFormat.of(grammar.channels)]
        formats = dict.fromkeys(known for known in (*own, *CALL_FORMATS) if known is not None)
        known_tags = {tag for pair in (*REASONING_TAGS, *_CALL_TAGS) for tag in pair}
        turns = TurnHeads.of(tokenizer.vocabulary, known_tags)
        return cls(tokenizer, turns, (*tags, *REASONING_TAGS), tuple(formats))

    def call_openings(self) -> dict[Tags, None]:
        """The texts that open and close calls, each pair once."""
        return dict.fromkeys((known.opening, known.closing) for known in self.calls)

    def read_calls(self, opening: str, *sides: Ids) -> Iterator[tuple[CallFormat, list[ParsedToolCall]]]:
        """The first call on each of several sides, in each format that begins so and reads all of them."""
        for known in self.calls:
            if known.opening == opening:
                compiled = Compiled(known.grammar, self.tokenizer, ())
                read = [parse(compiled, ids.tolist()).tool_calls[:1] for ids in sides]
                calls = [call for found in read for call in found if known.has_read(call)]
                if len(calls) == len(sides):
                    yield known, calls


def _grammar(renderer: Any) -> TurnGrammar:
    if not callable(getattr(renderer, "grammar", None)):
        return TurnGrammar()
    try:
        grammar: TurnGrammar = renderer.grammar()
    except TokentraceError:
        return TurnGrammar()
    return grammar
