"""The grammar of a model's turn in readable form."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ..formats.dialects import DIALECTS, dialect_of
from ..formats.grammar import TurnGrammar
from ..rendering.renderer import Renderer
from .document import Document, Table
from .results import template_name


def describe_grammar(renderer: Renderer, tools: Any = None) -> dict[str, Any]:
    """The grammar of a renderer's turns as plain data."""
    grammar, stops = renderer.grammar(tools), renderer.get_stop_token_ids()
    return {
        "family": renderer.family,
        "dialect": dialect_of(grammar.calls, grammar.channels),
        "grammar": asdict(grammar),
        "opens_reasoning": grammar.opens_reasoning,
        "closes_reasoning": _closes_reasoning(grammar),
        "stop_token_ids": stops,
        "stop_tokens": [renderer.tokenizer.decode([index]) for index in stops],
    }


def grammar_document(renderer: Renderer, tools: Any = None) -> Document:
    data, grammar = describe_grammar(renderer, tools), renderer.grammar(tools)
    notes = list(grammar.notes)
    if grammar.calls is None and grammar.channels is None:
        dialects = ", ".join(DIALECTS)
        notes.append(f"if the model calls tools anyway, pass --tool-parser (tool_parser=): {dialects}")
    stops = " or ".join(map("{} {}".format, data["stop_tokens"], data["stop_token_ids"]))
    turn = [[label, text.replace("\n", "⏎")] for label, text in (*_parts(grammar), ("stop", stops)) if text]
    return Document(
        f"Grammar of {template_name(renderer.tokenizer) or 'a tokenizer'}",
        "tokentrace audit --grammar",
        lead=f"family {renderer.family} · dialect {data['dialect']}",
        notes=notes,
        tables=[Table("The turn", ["", " "], turn, "⟨…⟩ is what the model fills in, ⏎ a newline", words=2)],
    )


def _closes_reasoning(grammar: TurnGrammar) -> bool:
    """True if the generation prompt has empty reasoning."""
    prompt, frame = grammar.prompt, grammar.reasoning
    prefill = prompt[len(grammar.head) :] if prompt.startswith(grammar.head) else ""
    return frame is not None and frame.close in prefill and not grammar.opens_reasoning


def _parts(grammar: TurnGrammar) -> Iterator[tuple[str, str]]:
    """The parts of the turn with holes."""
    channels, calls = grammar.channels, grammar.calls
    yield "prompt", grammar.prompt
    yield "head", "" if grammar.prompt.startswith(grammar.head) else grammar.head
    if channels is not None:
        yield "reasoning", f"{channels.opening(channels.reasoning)}⟨reasoning⟩{channels.end}"
        yield "content", f"{grammar.head}{channels.opening(channels.content)}⟨content⟩"
        arguments = calls.outline() if calls else "⟨arguments⟩"
        yield "each call", grammar.head + channels.call_text("⟨name⟩", arguments)
        return
    if grammar.reasoning is not None and not _closes_reasoning(grammar):
        text = grammar.reasoning.wrap("⟨reasoning⟩")
        yield "reasoning", text[text.index("⟨") :] if grammar.opens_reasoning else text
    yield "content", grammar.content.wrap("⟨content⟩")
    if calls is not None:
        labels = "before calls", "calls", "between calls", "after calls"
        yield from zip(labels, (calls.before, calls.outline(), calls.separator, calls.after), strict=True)
