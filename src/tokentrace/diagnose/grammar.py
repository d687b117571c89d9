"""The grammar of a model's turn, for people: its parts, delimiters and stop tokens."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import PurePath
from typing import Any

from ..formats.dialects import DIALECTS, REASONING, dialect_of
from ..formats.grammar import TurnGrammar
from ..rendering.renderer import Renderer
from ..show.document import Document, Table
from ..tokens.tokenizer import Tokenizer


def describe_grammar(renderer: Renderer, tools: Any = None) -> dict[str, Any]:
    """Return the grammar of a renderer's turns as plain data."""
    grammar, stops = renderer.grammar(tools), renderer.get_stop_token_ids()
    prefill = grammar.prompt[len(grammar.head) :] if grammar.prompt.startswith(grammar.head) else ""
    closed = grammar.reasoning is not None and grammar.reasoning.close in prefill
    return {
        "family": renderer.family,
        "dialect": dialect_of(grammar.calls, grammar.channels),
        "grammar": asdict(grammar),
        "opens_reasoning": grammar.opens_reasoning,
        "closes_reasoning": closed and not grammar.opens_reasoning,
        "delimiters": list(_delimiters(grammar, renderer.tokenizer)),
        "stop_token_ids": stops,
        "stop_tokens": [renderer.tokenizer.decode([index]) for index in stops],
    }


def grammar_document(renderer: Renderer, tools: Any = None) -> Document:
    """Return the grammar of a renderer's turns as a document."""
    data, grammar = describe_grammar(renderer, tools), renderer.grammar(tools)
    notes = list(grammar.notes)
    if grammar.calls is None and grammar.channels is None:
        names = ", ".join(DIALECTS)
        notes.append(f"if the model calls tools anyway, pass --tool-parser (tool_parser=): {names}")
    elif any("reasoning" in note for note in notes):
        names = ", ".join(REASONING)
        notes.append(f"if reasoning has other tags, pass --reasoning-parser (reasoning_parser=): {names}")
    stops = " or ".join(map("{} {}".format, data["stop_tokens"], data["stop_token_ids"]))
    parts = [*_parts(grammar, data["closes_reasoning"]), ("stop", stops)]
    turn = [[label, text.replace("\n", "⏎")] for label, text in parts if text]
    rows = []
    for one in data["delimiters"]:
        tokens = f"control token{'s' * (len(one['ids']) > 1)} {', '.join(map(str, one['ids']))}" if one["ids"] else ""
        kind = " and ".join(filter(None, [tokens, "text" * (not one["control"])]))
        rows.append([one["text"].strip("\n").replace("\n", "⏎"), one["field"], kind])
    return Document(
        f"Grammar of {PurePath(renderer.tokenizer.name).name or 'a tokenizer'}",
        "tokentrace audit --grammar",
        lead=f"family {renderer.family} · dialect {data['dialect']}",
        notes=notes,
        tables=[
            Table("The turn", ["", " "], turn, "⟨…⟩ is what the model fills in, ⏎ a newline", words=2),
            Table("Delimiters", ["", "field", "kind"], rows, words=3),
        ],
    )


def _parts(grammar: TurnGrammar, closes_reasoning: bool) -> Iterator[tuple[str, str]]:
    """Yield the parts of the turn with holes."""
    channels, calls = grammar.channels, grammar.calls
    yield "prompt", grammar.prompt
    yield "head", "" if grammar.prompt.startswith(grammar.head) else grammar.head
    if channels is not None:
        yield "reasoning", f"{channels.opening(channels.reasoning)}⟨reasoning⟩{channels.end}"
        yield "content", f"{grammar.head}{channels.opening(channels.content)}⟨content⟩"
        yield "each call", grammar.head + channels.call_text("⟨name⟩", calls.outline() if calls else "⟨arguments⟩")
        return
    if grammar.reasoning is not None and not closes_reasoning:
        text = grammar.reasoning.wrap("⟨reasoning⟩")
        yield "reasoning", text[text.index("⟨") :] if grammar.opens_reasoning else text
    yield "content", grammar.content.wrap("⟨content⟩")
    if calls is not None:
        labels = "before calls", "calls", "between calls", "after calls"
        yield from zip(labels, (calls.before, calls.outline(), calls.separator, calls.after), strict=True)


def _delimiters(grammar: TurnGrammar, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Yield every text that the parser looks for; `control`: it consists of control tokens only."""
    texts: list[tuple[str, Any]] = []
    for name in ("reasoning", "content", "calls", "channels"):
        part = getattr(grammar, name)
        texts += [(f"{name}.{field}", text) for field, text in (asdict(part) if part else {}).items()]
    if grammar.calls is not None:
        texts += [(f"calls.head[{at}]", lead) for at, (lead, _) in enumerate(grammar.calls.head)]
        texts += [(f"calls.typed_opens.{kind}", text) for kind, text in grammar.calls.typed_opens]
    pattern = tokenizer.vocabulary.control_pattern
    for field, text in texts:
        if type(text) is str and text.strip():
            tokens = [] if pattern is None else pattern.findall(text)
            ids = [index for token in tokens if (index := tokenizer.token_id(token)) is not None]
            plain = text if pattern is None else pattern.sub("", text)
            yield {"field": field, "text": text, "ids": ids, "control": not plain.strip()}
