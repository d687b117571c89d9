"""A grammar in words: what is written where in a turn, and what sets it off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ..formats.grammar import CallGrammar, Channels, Style, Value
from .sheet import Sheet

_STRINGS: Final = {
    Value.BARE: "strings bare, as they are",
    Value.CDATA: "strings bare, in a CDATA section where they could be taken for markup",
    Value.JSON: "strings as JSON, quoted",
    Value.PYTHON: "strings as Python writes them",
}


def described(sheet: Sheet) -> Iterator[tuple[str, ...]]:
    """A label, words, and a text of the grammar for each ``{}`` in them; empty texts have none."""
    grammar = sheet.grammar
    if grammar.channels is not None:
        yield from _channel_words(grammar.head, grammar.channels)
        if grammar.calls is None:
            kind = " that the header calls {}" if grammar.channels.content_type else ""
            yield "arguments", f"one JSON object{kind}", grammar.channels.content_type
        else:
            yield from _argument_words(grammar.calls)
        return
    yield from _reasoning_words(sheet)
    frame = grammar.content
    until = "the first call or the stop token" if grammar.calls is not None else "the stop token"
    if frame.open and frame.close:
        yield "content", "between {} and {}", frame.open + frame.lead, frame.trail + frame.close
    elif frame.open:
        yield "content", f"after {{}}, where it is written, up to {until}", frame.open + frame.lead
    elif frame.close:
        yield "content", "up to {}", frame.trail + frame.close
    else:
        yield "content", f"bare, up to {until}"
    if grammar.calls is None:
        yield "calls", "none that the template shows"
    else:
        yield from _call_words(grammar.calls)
        yield from _argument_words(grammar.calls)


def _channel_words(head: str, channels: Channels) -> Iterator[tuple[str, ...]]:
    yield "turn", "several messages, each with a header that says what it is"
    yield "turn", "the prompt begins the first, {} the others", head
    where = "on the channel {}" if channels.channel else "to {}"
    yield "reasoning", f"a message {where}, ended by {{}}", channels.reasoning, channels.end
    yield "content", f"a message {where}", channels.content
    if channels.call:
        yield "calls", "a message on the channel {}, ended by {}", channels.call, channels.call_end
    else:
        yield "calls", "a message to any other, ended by {} or {}", channels.end, channels.call_end
    yield "name", "the recipient in the header: {}", f"{channels.recipient}{channels.namespace}⟨name⟩"
    yield "id", "not written"


def _reasoning_words(sheet: Sheet) -> Iterator[tuple[str, ...]]:
    frame, after = sheet.grammar.reasoning, sheet.grammar.after_empty
    if frame is None:
        yield "reasoning", "none that the template shows (--reasoning-parser adds it)"
        return
    if frame.open:
        yield "reasoning", "between {} and {}", frame.open + frame.lead, frame.trail + frame.close
    else:
        yield "reasoning", "from the beginning of the turn to {}", frame.trail + frame.close
    if after and after == frame.after:
        yield "reasoning", "{} after it", after
    elif frame.after or after:
        some, others = ("{}" if text else "nothing" for text in (frame.after, after))
        yield "reasoning", f"{some} after it, {others} where it is empty", frame.after, after
    if sheet.grammar.opens_reasoning:
        yield "reasoning", "the generation prompt opens it: a completion begins inside"
    elif sheet.closes_reasoning:
        yield "reasoning", "the generation prompt closes it, empty: a completion begins after it"
    else:
        yield "reasoning", "the model opens it, not the generation prompt"


def _call_words(calls: CallGrammar) -> Iterator[tuple[str, ...]]:
    if calls.section_open and calls.section_close:
        yield "calls", "all in one section between {} and {}", calls.section_open, calls.section_close
    elif calls.section_open:
        yield "calls", "all after {}", calls.section_open
    if calls.open and calls.close:
        yield "calls", "each between {} and {}", calls.open, calls.close
    elif calls.open:
        yield "calls", "each after {}", calls.open
    elif not calls.section_open:
        yield "calls", "nothing around them: content that begins as a call is one"
    found = [(calls.separator, "{} between calls"), (calls.before, "{} between content and calls")]
    if any(text for text, _ in found):
        yield "calls", ", ".join(where for text, where in found if text), calls.separator, calls.before
    if calls.id_is_name:
        yield "name", "read out of the id, functions.NAME:INDEX"
    elif calls.style is Style.PYTHON:
        yield "name", "the function that is called"
    elif calls.named_key:
        yield "name", "the only key of a JSON object"
    else:
        yield "name", *_field_words(calls, "name")
    yield "id", *_field_words(calls, "id")


def _field_words(calls: CallGrammar, wanted: str) -> tuple[str, ...]:
    """Where a field stands before the arguments, or under which key."""
    path = dict(calls.keys).get(wanted)
    if path is not None:
        return "in a JSON object, under {}", _quoted(path)
    fields = [field for _, field in calls.head]
    if wanted not in fields:
        return ("not written",)
    at = fields.index(wanted)
    lead = calls.head[at][0] or ("" if at else calls.open)
    follows = calls.head[at + 1][0] if at + 1 < len(fields) else calls.begin
    begins = "after {}" if lead.strip() else "at the beginning"
    return f"{begins}, up to {'{}' if follows else 'the arguments'}", lead if lead.strip() else "", follows


def _argument_words(calls: CallGrammar) -> Iterator[tuple[str, ...]]:
    if calls.named_key:
        yield "arguments", "one JSON object, the value of that key"
    elif calls.style is Style.BRACES:
        yield "arguments", "in braces, nearly JSON: keys without quotes, {} around strings", calls.quote
    elif calls.style is Style.JSON_CALL:
        yield "arguments", "in the same JSON object, under {}", _quoted(dict(calls.keys).get("arguments", ()))
    elif calls.style is Style.JSON_ARGUMENTS:
        ends = (calls.begin, calls.end or calls.close)
        yield (
            ("arguments", "one JSON object, between {} and {}", *ends)
            if all(ends)
            else ("arguments", "one JSON object")
        )
    elif calls.style is Style.PYTHON:
        yield "arguments", "keyword arguments of a Python call, values as Python literals"
    else:
        yield from _value_words(calls)
    if calls.others is Value.QUOTED:
        yield "arguments", "numbers and all other values quoted as strings are: the tool's schema says what they are"
    if calls.ascii:
        yield "arguments", "JSON escapes all that is not ASCII"


def _value_words(calls: CallGrammar) -> Iterator[tuple[str, ...]]:
    python = calls.others is Value.PYTHON
    if calls.style is Style.TREE:
        yield "arguments", "elements named after the arguments, nested as the values are"
        if calls.item:
            yield "arguments", "the elements of a list are called {}", calls.item
        others = "numbers and booleans as " + ("Python writes them" if python else "JSON")
    else:
        yield "arguments", "one by one, each key and each value between tags"
        others = "other values as JSON" + (", but True, False and None as in Python" if python else "")
    if calls.string_open:
        said = "the tag says what it is: {} a string, {} any other value"
        yield "arguments", said, calls.string_open, calls.value_open
    yield "arguments", _STRINGS[calls.strings]
    yield "arguments", others


def _quoted(path: Sequence[str]) -> str:
    return ".".join(f'"{key}"' for key in path)
