"""What a renderer knows of the turns that its model writes, gathered to be shown."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ..errors import TokentraceError
from ..formats.dialects import dialect_of
from ..formats.grammar import TurnGrammar
from ..rendering.rendered import RenderedTokens
from ..rendering.renderer import Renderer
from ..tokens.tokenizer import Tokenizer


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
    for kind, opened in calls.typed_opens:
        yield f"calls.typed_opens.{kind}", f"before a value of type {kind}", opened
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
