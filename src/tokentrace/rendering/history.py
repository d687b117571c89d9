"""Renderings put together from several: reasoning that a template drops from the past, kept; history as given.

Nothing here knows a model. A turn whose reasoning is missing is rendered again in a context that keeps it, its
text is put in place of the old one, and the trace proves that only reasoning was added.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..conversation.forms import Change
from ..conversation.messages import Messages
from ..errors import TokentraceError
from ..study.probes import ANSWER, USER, call
from ..study.turns import common_prefix, turn_spans
from ..template.chat_template import REASONING_FIELDS
from ..template.origin import KEY, FieldPath, Origin
from ..template.trace import Rendering, Span

Render = Callable[[Messages], Rendering]


def reasoning_of(message: Mapping[str, Any]) -> tuple[str, str] | None:
    """A message's reasoning and the field that holds it, its own or inline between think tags in content."""
    for name in REASONING_FIELDS:
        value = message.get(name)
        if isinstance(value, str) and value.strip():
            return value, name
    content = message.get("content")
    if isinstance(content, str) and "</think>" in content:
        inline = content.split("</think>")[0].split("<think>")[-1]
        if inline.strip():
            return inline, "content"
    return None


def shows_reasoning(message: Mapping[str, Any], spans: Sequence[Span], index: int) -> bool:
    """Whether the spans of a turn hold its reasoning, by the trace."""
    found = reasoning_of(message)
    if found is None:
        return True
    reasoning, name = found
    written = "".join(text for text, _, origin in spans if origin == Origin.of(index, name))
    return reasoning.strip() in written


def last_user(messages: Messages) -> int:
    return max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)


def keep_reasoning(
    rendering: Rendering, messages: Messages, render: Render, *, since: int = -1
) -> tuple[Rendering, list[Change], list[str]]:
    """Put back reasoning that the template dropped from turns after message `since`. Only ever adds text."""
    changes: list[Change] = []
    notes: list[str] = []
    replaced: dict[int, list[Span]] = {}
    contexts = _Contexts(messages, render)
    for turn in turn_spans(rendering):
        index = turn.message
        message = messages[index]
        if index <= since or message["role"] != "assistant":
            continue
        old = rendering.spans(turn.start, turn.end)
        if shows_reasoning(message, old, index):
            continue
        shown = (new for new in contexts.of(index) if shows_reasoning(message, new, index))
        spans = next((made for new in shown if (made := _inserted(old, new)) is not None), None)
        spans = contexts.as_elsewhere(index, old) if spans is None else spans
        if spans is None:
            notes.append(f"message {index}: the template shows its reasoning in no context; it stays left out")
            continue
        replaced[turn.start] = spans
        changes.append(Change(index, "reasoning kept", _text(old), _text(spans)))
    return _spliced(rendering, replaced), changes, notes


def _inserted(old: list[Span], new: list[Span]) -> list[Span] | None:
    """`new` with the end of `old`, if all that `old` says it says too, in the same order, and more; else None."""
    before, after = _text(old), _text(new)
    old_end, new_end = _body_end(old), _body_end(new)
    if not _is_subsequence(before[:old_end], after[:new_end]):
        return None
    told, tells = _by_field(old), _by_field(new)
    if any(not _is_subsequence(text, tells.get(origin, "")) for origin, text in told.items()):
        return None
    says_nothing = all(origin.is_role for origin in told)
    if after[new_end:].endswith(before[old_end:]) or (says_nothing and _is_subsequence(before, after)):
        return new  # it ends as the old one does, after what closes its reasoning
    return [*_slice_spans(new, 0, new_end), *_slice_spans(old, old_end, len(before))]


def _is_subsequence(short: str, long: str) -> bool:
    at = 0
    for char in short:
        at = long.find(char, at) + 1
        if not at:
            return False
    return True


def _by_field(spans: Sequence[Span]) -> dict[Origin, str]:
    fields: dict[Origin, str] = {}
    for text, _, origin in spans:
        if origin is not None:
            fields[origin] = fields.get(origin, "") + text
    return fields


class _Contexts:
    """The turn of one message, rendered in contexts that may show more of it. Renderings are made once."""

    def __init__(self, messages: Messages, render: Render) -> None:
        self._messages = messages
        self._render = render
        self._made: dict[tuple[int, ...], Rendering | None] = {}

    def of(self, index: int) -> Iterator[list[Span]]:
        """In its own exchange (from its user message to before the next), then as the last message."""
        roles = [message["role"] for message in self._messages]
        users = [i for i, role in enumerate(roles) if role == "user"]
        begin = max((i for i in users if i < index), default=0)
        end = min((i for i in users if i > index), default=len(roles))
        head = [i for i, role in enumerate(roles[:begin]) if role in ("system", "developer")]
        for stop in (end, index + 1):
            yield from self._turn(index, (*head, *range(begin, stop)))
            yield from self._turn(index, tuple(range(stop)))

    def as_elsewhere(self, index: int, old: list[Span]) -> list[Span] | None:
        """`old` with its reasoning where the template writes that of other turns, for templates that show it in
        some turns only (beside tool calls, say). None where no turn tells how, or the turn begins otherwise."""
        found = reasoning_of(self._messages[index])
        if found is None or found[1] == "content":
            return None
        origin = Origin.of(index, found[1])
        for before, opening, closing in self._frames():
            if _text(old).startswith(before):
                block: list[Span] = [(opening, index, None), (found[0], index, origin), (closing, index, None)]
                end = len(_text(old))
                return [*_slice_spans(old, 0, len(before)), *block, *_slice_spans(old, len(before), end)]
        return None

    def _frames(self) -> Iterator[tuple[str, str, str]]:
        """How the template writes reasoning: what stands before it in the turn, what opens and what closes it.

        Found by rendering a small exchange with reasoning and without: what is more is the reasoning's own.
        """
        for extra in ({}, {"tool_calls": [call()]}):
            spoken = {**ANSWER, **extra}
            thought = {**spoken, "reasoning_content": "reasoning"}
            try:
                without, shown = (_turns(self._render([USER, said])).get(1, []) for said in (spoken, thought))
            except TokentraceError:
                continue
            before, after = _text(without), _text(shown)
            shared = common_prefix(before, after)
            added = after[shared : shared + len(after) - len(before)]
            if added and after == before[:shared] + added + before[shared:] and "reasoning" in added:
                opening, _, closing = added.partition("reasoning")
                yield before[:shared], opening, closing

    def as_last(self, index: int) -> list[Span] | None:
        """The turn as it stood when it was the last message, after all that came before."""
        return next(self._turn(index, tuple(range(index + 1))), None)

    def _turn(self, index: int, chosen: tuple[int, ...]) -> Iterator[list[Span]]:
        if chosen not in self._made:
            try:
                self._made[chosen] = self._render([self._messages[i] for i in chosen])
            except TokentraceError:
                self._made[chosen] = None
        rendering = self._made[chosen]
        if rendering is None:
            return
        for turn in turn_spans(rendering):
            if chosen[turn.message] == index:
                spans = rendering.spans(turn.start, turn.end)
                yield [(text, index, origin and origin.renumbered(chosen)) for text, _, origin in spans]
                return


# -- history as given


def patch_history(
    rendering: Rendering, messages: Messages, render: Render, given: Messages
) -> tuple[Rendering, list[str]]:
    """Every assistant turn as it stood when it was sampled, with its values as they were given.

    Turns are written as when they were last; white space that the template strips off a field is put back;
    booleans and null are spelled as in JSON; arguments given as a JSON string stay that string. `given` are
    the messages before `parsed_arguments` made them fit for the template. Notes say where the template itself
    moves things about, which no turn on its own can mend.
    """
    replaced: dict[int, list[Span]] = {}
    contexts = _Contexts(messages, render)
    for turn in turn_spans(rendering):
        index = turn.message
        if messages[index]["role"] != "assistant":
            continue
        old = rendering.spans(turn.start, turn.end)
        new = (contexts.as_last(index) if index < len(messages) - 1 else None) or old
        as_given = _spans_as_given(new, given[index])
        if as_given != old:
            replaced[turn.start] = as_given
    return _spliced(rendering, replaced), _moved(rendering)


def _moved(rendering: Rendering) -> list[str]:
    """Notes on messages and tools that the template writes out of their order: history cannot be append-only."""
    notes: dict[str, None] = {}
    latest = -1
    for origin in rendering.origins:
        if origin is None or origin.is_role:
            continue
        if origin.source == "tools" and latest > 0:
            notes["the template writes tools after messages: its history is not append-only"] = None
        index = origin.message
        if index is not None and origin.field == "content":
            if index < latest:
                notes[f"message {index}: the template writes it after later ones: its history is not append-only"] = (
                    None
                )
            latest = max(latest, index)
    return list(notes)


def compare_turns(shipped: Rendering, patched: Rendering, messages: Messages) -> list[Change]:
    """Every assistant turn that a patched rendering writes otherwise than the shipped template, and how."""
    before, after = _turns(shipped), _turns(patched)
    changes = []
    for index in sorted(before.keys() | after.keys()):
        if messages[index]["role"] == "assistant":
            old, new = before.get(index, []), after.get(index, [])
            if _text(old) != _text(new):
                changes.append(Change(index, _difference(old, new), _text(old), _text(new)))
    return changes


def _turns(rendering: Rendering) -> dict[int, list[Span]]:
    turns: dict[int, list[Span]] = {}
    for turn in turn_spans(rendering):
        turns.setdefault(turn.message, []).extend(rendering.spans(turn.start, turn.end))
    return turns


def _difference(old: Sequence[Span], new: Sequence[Span]) -> str:
    """The fields that differ, or the scaffold if none does."""
    was, now = _by_field(old), _by_field(new)
    fields = [origin for origin in {**was, **now} if was.get(origin) != now.get(origin)]
    names = dict.fromkeys(".".join(map(str, origin.path)) or "message" for origin in fields)
    return f"{', '.join(names)} as given" if names else "scaffold as when it was the last turn"


def parsed_arguments(messages: Messages) -> list[Mapping[str, Any]]:
    """Messages whose arguments are mappings: JSON strings are parsed, so that any template can show them."""
    return [_parsed(message) if message.get("tool_calls") else message for message in messages]


def _parsed(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = []
    for given in message["tool_calls"]:
        holder = given.get("function") if isinstance(given.get("function"), Mapping) else given
        arguments = holder.get("arguments")
        if isinstance(arguments, str):
            try:
                value = json.loads(arguments)
            except ValueError:
                value = None
            if isinstance(value, dict):
                holder = {**holder, "arguments": value}
                given = {**given, "function": holder} if isinstance(given.get("function"), Mapping) else holder
        calls.append(given)
    return {**message, "tool_calls": calls}


def _spans_as_given(spans: Sequence[Span], message: Mapping[str, Any]) -> list[Span]:
    """A turn's spans with the text of each field as it was given."""
    out: list[Span] = []
    for member, group in itertools.groupby(spans, key=lambda span: _member(span[2])):
        some = list(group)
        value, rest = _given(member, message) if member is not None else (None, ())
        if isinstance(value, str) and len(rest) == 1:  # arguments given as a JSON string: the member as it stands there
            text = _json_member(value, rest)
            out += some if text is None else [(text, some[0][1], member)]
        else:
            out += [(_as_given(text, origin, message), turn, origin) for text, turn, origin in some]
    return out


def _member(origin: Origin | None) -> Origin | None:
    """The argument of a call whose value an origin lies in; the origin itself if it lies in none."""
    if origin is None or "arguments" not in origin:
        return origin
    first = origin.index("arguments") + 1
    inside = origin[first:]
    return Origin(origin[: first + 1]) if inside and inside[1:] != (KEY,) else origin


def _given(origin: Origin, message: Mapping[str, Any]) -> tuple[Any, FieldPath]:
    """The value that a message has at an origin, and what is left of the path where it ends in a string."""
    value: Any = message
    for at, key in enumerate(origin.path):
        if isinstance(value, str):
            return value, origin.path[at:]
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None, ()
    return value, ()


def _as_given(text: str, origin: Origin | None, message: Mapping[str, Any]) -> str:
    """A span's text as its field was given: unstripped, booleans and JSON as they were."""
    if origin is None or origin.field is None or origin.is_key:
        return text
    value, rest = _given(origin, message)
    if isinstance(value, str) and not rest:
        if origin[-1] == "arguments":
            return value
        return value if text and value.strip() == text.strip() else text
    if isinstance(value, bool) or (value is None and text == "None"):
        return json.dumps(value)
    return text


def _json_member(source: str, path: Sequence[str | int]) -> str | None:
    """The text of one member of a JSON object, exactly as it stands in `source`; None for a string or a miss."""
    decoder = json.JSONDecoder()
    at = source.find("{") + 1
    try:
        while True:
            at = _skip(source, at, " \t\r\n,")
            key, at = decoder.raw_decode(source, at)
            at = _skip(source, at, " \t\r\n:")
            value, end = decoder.raw_decode(source, at)
            if key == path[0]:
                return None if isinstance(value, str) else source[at:end]
            at = end
    except (ValueError, IndexError):
        return None


def _skip(source: str, at: int, characters: str) -> int:
    while source[at] in characters:
        at += 1
    return at


# -- spans


def _text(spans: Sequence[Span]) -> str:
    return "".join(text for text, _, _ in spans)


def _body_end(spans: Sequence[Span]) -> int:
    """Where the last text of a field ends."""
    at = end = 0
    for text, _, origin in spans:
        at += len(text)
        if origin is not None:
            end = at
    return end


def _slice_spans(spans: Sequence[Span], start: int, stop: int) -> list[Span]:
    out: list[Span] = []
    at = 0
    for text, turn, origin in spans:
        piece = text[max(0, start - at) : max(0, stop - at)]
        if piece:
            out.append((piece, turn, origin))
        at += len(text)
    return out


def _spliced(rendering: Rendering, replaced: Mapping[int, list[Span]]) -> Rendering:
    """The rendering with some of its turns replaced, each given by where it began."""
    if not replaced:
        return rendering
    pieces: list[Span] = []
    at = 0
    for turn in turn_spans(rendering):
        if turn.start in replaced:
            pieces += rendering.spans(at, turn.start) + replaced[turn.start]
            at = turn.end
    return Rendering.of([*pieces, *rendering.spans(at)])
