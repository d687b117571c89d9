"""The past of a conversation, as the settings choose it.

A turn that the template shortens is rendered again among other messages, which show all of it.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from ..computed import computed
from ..conversation.forms import Change, with_parsed_arguments
from ..conversation.messages import REASONING_FIELDS, Messages
from ..errors import InputError, TemplateError, TokentraceError
from ..study.probes import ANSWER, USER, call
from ..study.turns import Run, common_prefix, turn_spans
from ..template.origin import KEY, FieldPath, Origin
from ..template.trace import Rendering, Span


class Past(StrEnum):
    """How to show the turns before the last one."""

    TEMPLATE = "template"
    """As the template writes them. A bridge keeps the stream as it is."""
    INFERENCE = "inference"
    """The same, but the bridge refuses where production would rewrite the past."""
    TOOL_CALLS = "tool_calls"
    """With the reasoning of turns after the last user message."""
    PRESERVE = "preserve"
    """With all reasoning."""
    PATCHED = "patched"
    """Each as it was sampled, with all reasoning, and values of the message."""
    EXPAND = "expand"
    """For rows only: rows that show each turn after what the model saw then."""


class WrittenText(NamedTuple):
    rendering: Rendering
    messages: Messages
    """As the template received them."""
    changes: Sequence[Change] = ()
    notes: Sequence[str] = ()


def write_conversation(
    run: Run, messages: Messages, prompted: bool, past: Past, *, originals: Messages | None = None
) -> WrittenText:
    """Run the template. `originals` have the caller's own tool calls."""
    if past is Past.PATCHED:
        return _write_patched(run, messages, prompted, originals or messages)
    rendering = _run(run, messages, prompted)
    if past not in (Past.PRESERVE, Past.TOOL_CALLS):
        return WrittenText(rendering, messages)
    users = (at for at, message in enumerate(messages) if message["role"] == "user")
    since = max(users, default=-1) if past is Past.TOOL_CALLS else -1
    return keep_reasoning(rendering, messages, run, since=since)


def after_prompt(run: Run, rendering: Rendering, messages: Messages, past: Past) -> Rendering:
    """The last turn, after the history as the prompt for that turn shows it."""
    last = len(messages) - 1
    turns = turn_spans(rendering, {last})
    try:
        prompt = write_conversation(run, messages[:last], True, past).rendering
    except TokentraceError:  # no message comes before it, or none that can be answered
        return rendering
    if not turns or rendering.text.startswith(prompt.text[: prompt.tail]):
        return rendering
    joined = Rendering.of([*prompt.spans(0, prompt.tail), *rendering.spans(turns[0].start)])
    joined.tail = len(joined.text)
    return joined


def _run(run: Run, messages: Messages, prompted: bool) -> Rendering:
    """Run the template, and find where the generation prompt begins."""
    rendering = run(messages, prompted)
    if prompted and rendering.tail < rendering.last_field:
        without = run(messages, False).text
        tail = len(without) if rendering.text.startswith(without) else rendering.last_field
        generation = rendering.generation
        rendering = Rendering.of([*rendering.spans(0, tail), *rendering.spans(tail)])
        rendering.generation, rendering.tail = generation, tail
    return rendering


def _rewrite_turns(
    rendering: Rendering, messages: Messages, rewrite: Callable[[int, list[Span]], list[Span] | None]
) -> Rendering:
    """Replace assistant turns by ``rewrite(message, spans)``; None keeps a turn."""
    pieces, at = list[Span](), 0
    for turn in turn_spans(rendering):
        if messages[turn.message]["role"] == "assistant":
            spans = rewrite(turn.message, rendering.spans(turn.start, turn.end))
            if spans is not None:
                pieces += rendering.spans(at, turn.start) + spans
                at = turn.end
    return Rendering.of([*pieces, *rendering.spans(at)]) if at else rendering


def reasoning_of(message: Mapping[str, Any]) -> tuple[str, str] | None:
    """A message's reasoning, and the field that holds it: perhaps content."""
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
    """Whether the spans of a turn hold all of its reasoning."""
    match = reasoning_of(message)
    if match is None:
        return True
    reasoning, name = match
    return reasoning.strip() in "".join(
        text for text, _, origin in spans if origin == Origin.of(index, name)
    )


def keep_reasoning(rendering: Rendering, messages: Messages, run: Run, *, since: int = -1) -> WrittenText:
    """Put back reasoning that turns after message `since` lost. Only adds text."""
    changes, notes = list[Change](), list[str]()
    turns = _TurnRenderer(messages, run)

    def rewrite(index: int, old: list[Span]) -> list[Span] | None:
        if index <= since or shows_reasoning(messages[index], old, index):
            return None
        fuller = (new for new in turns.candidates(index) if shows_reasoning(messages[index], new, index))
        spans = next((spans for new in fuller if (spans := _extended(old, new)) is not None), None)
        spans = spans or turns.with_reasoning_block(index, old)
        if spans is None:
            problem = "no context makes the template show its reasoning; it stays left out"
            notes.append(f"message {index}: {problem}")
        else:
            changes.append(Change(index, "reasoning kept", _text(old), _text(spans)))
        return spans

    return WrittenText(_rewrite_turns(rendering, messages, rewrite), messages, changes, notes)


def _extended(old: list[Span], new: list[Span]) -> list[Span] | None:
    """`new` with the end of `old`, if it has all text of `old` in order, field by field."""
    before, after = Rendering.of(old), Rendering.of(new)
    turns = (zip(turn.ends, turn.origins, strict=True) for turn in (before, after))
    old_end, new_end = (max([0, *(end for end, origin in turn if origin is not None)]) for turn in turns)
    old_fields, new_fields = _by_field(old), _by_field(new)
    pairs = [(text, new_fields.get(origin, "")) for origin, text in old_fields.items()]
    pairs.append((before.text[:old_end], after.text[:new_end]))
    if not all(itertools.starmap(_is_subsequence, pairs)):
        return None
    is_empty = all(origin.is_role for origin in old_fields) and _is_subsequence(before.text, after.text)
    if is_empty or after.text[new_end:].endswith(before.text[old_end:]):
        return new  # it ends as the old one does, after what closes its reasoning
    return [*after.spans(0, new_end), *before.spans(old_end)]


def _is_subsequence(short: str, long: str) -> bool:
    remaining = iter(long)
    return all(char in remaining for char in short)


class _TurnRenderer:
    """Renders the turn of one message among chosen other messages."""

    def __init__(self, messages: Messages, run: Run) -> None:
        self._messages = messages
        self._run = run
        self._turns: dict[tuple[int, ...], dict[int, list[Span]]] = {}

    def turn(self, index: int, chosen: Sequence[int]) -> list[Span] | None:
        key = tuple(chosen)
        if key not in self._turns:
            try:
                rendering = self._run([self._messages[i] for i in key], False)
                first = {key[turn.message]: turn for turn in reversed(turn_spans(rendering))}
                self._turns[key] = {at: rendering.spans(turn.start, turn.end) for at, turn in first.items()}
            except TokentraceError:
                self._turns[key] = {}
        spans = self._turns[key].get(index)
        return spans and [(text, index, origin and origin.renumbered(key)) for text, _, origin in spans]

    def candidates(self, index: int) -> Iterator[list[Span]]:
        """The turn in its exchange, then as the last message; alone, then after all."""
        roles = [message["role"] for message in self._messages]
        begin = max((at for at in range(index) if roles[at] == "user"), default=0)
        end = next((at for at in range(index, len(roles)) if roles[at] == "user"), len(roles))
        head = [at for at in range(begin) if roles[at] in ("system", "developer")]
        for stop in (end, index + 1):
            for chosen in ((*head, *range(begin, stop)), range(stop)):
                spans = self.turn(index, chosen)
                if spans is not None:
                    yield spans

    def with_reasoning_block(self, index: int, old: list[Span]) -> list[Span] | None:
        """`old` with its reasoning where other turns have theirs, if known."""
        match = reasoning_of(self._messages[index])
        if match is None or match[1] == "content":
            return None
        turn, origin = Rendering.of(old), Origin.of(index, match[1])
        for before, opening, closing in self._reasoning_blocks:
            if turn.text.startswith(before):
                block: list[Span] = [
                    (opening, index, None),
                    (match[0], index, origin),
                    (closing, index, None),
                ]
                return [*turn.spans(0, len(before)), *block, *turn.spans(len(before))]
        return None

    @computed
    def _reasoning_blocks(self) -> list[tuple[str, str, str]]:
        """What reasoning adds to a turn: the text before it, its opening, its closing."""
        blocks = []
        for extra in ({}, {"tool_calls": [call()]}):
            plain = {**ANSWER, **extra}
            ways: list[Messages] = [[USER, plain], [USER, {**plain, "reasoning_content": "reasoning"}]]
            try:
                without, thinking = (_text(_turns(self._run(way, False)).get(1, [])) for way in ways)
            except TokentraceError:
                continue
            shared = common_prefix(without, thinking)
            added = thinking[shared : shared + len(thinking) - len(without)]
            if "reasoning" in added and thinking == without[:shared] + added + without[shared:]:
                opening, _, closing = added.partition("reasoning")
                blocks.append((without[:shared], opening, closing))
        return blocks


def _write_patched(run: Run, messages: Messages, prompted: bool, originals: Messages) -> WrittenText:
    """Every assistant turn as it was written when it was the last, with all reasoning.

    Values are those of `originals`: unstripped, booleans and null as JSON, arguments that were
    JSON text. Notes report text that the template moves, which this cannot fix.
    """
    try:
        parsed = with_parsed_arguments(messages)
        rendering = _run(run, parsed, prompted)
    except (InputError, TemplateError):
        # arguments that are not JSON, or a template that takes only JSON text
        parsed, rendering = list(messages), _run(run, messages, prompted)
    turns = _TurnRenderer(parsed, run)

    def rewrite(index: int, old: list[Span]) -> list[Span] | None:
        message, calls = messages[index], originals[index].get("tool_calls")
        sampled = {**message, "tool_calls": calls} if message.get("tool_calls") else message
        is_past = index < len(messages) - 1
        new = _with_original_values((is_past and turns.turn(index, range(index + 1))) or old, sampled)
        return None if new == old else new

    text = keep_reasoning(_rewrite_turns(rendering, parsed, rewrite), parsed, run)
    changes, notes = list[Change](), [*dict.fromkeys(_moved(rendering)), *text.notes]
    try:
        changes = _compare_turns(run(messages, False), text.rendering, messages)
    except TemplateError as refusal:
        notes.append(f"the shipped template refuses this conversation as it is ({refusal.problem})")
    return WrittenText(text.rendering, parsed, changes, notes)


def _moved(rendering: Rendering) -> Iterator[str]:
    """Notes on messages and tools that the template writes out of order."""
    latest = -1
    for origin in rendering.origins:
        index = None if origin is None or origin.field != "content" else origin.message
        if origin is not None and origin.source == "tools" and latest > 0:
            yield "the template writes tools after messages: its history is not append-only"
        if index is not None and index < latest:
            yield f"message {index}: the template writes it after later ones: its history is not append-only"
        latest = max(latest, -1 if index is None else index)


def _compare_turns(shipped: Rendering, patched: Rendering, messages: Messages) -> list[Change]:
    before, after = _turns(shipped), _turns(patched)
    changes = []
    for index in sorted(before.keys() | after.keys()):
        old, new = before.get(index, []), after.get(index, [])
        if messages[index]["role"] == "assistant" and _text(old) != _text(new):
            was, now = _by_field(old), _by_field(new)
            fields = [origin for origin in {**was, **now} if was.get(origin) != now.get(origin)]
            names = dict.fromkeys(".".join(map(str, origin.path)) or "message" for origin in fields)
            what = f"{', '.join(names)} as given" if names else "scaffold as when it was the last turn"
            changes.append(Change(index, what, _text(old), _text(new)))
    return changes


def _with_original_values(spans: Sequence[Span], message: Mapping[str, Any]) -> list[Span]:
    """A turn's spans with the text of each field as the message has it."""
    out: list[Span] = []
    for member, group in itertools.groupby(spans, key=lambda span: _argument(span[2])):
        pieces = list(group)
        value, inside = _value(member, message) if member is not None else (None, ())
        if isinstance(value, str) and len(inside) == 1:  # arguments as JSON text
            try:
                members = msgspec.json.decode(value.encode(), type=dict[str, msgspec.Raw])
            except (msgspec.DecodeError, ValueError):
                members = {}
            text = bytes(members.get(str(inside[0]), b"")).decode()
            out += [(text, pieces[0][1], member)] if text and not text.startswith('"') else pieces
        else:
            out += [(_original(text, origin, message), turn, origin) for text, turn, origin in pieces]
    return out


def _argument(origin: Origin | None) -> Origin | None:
    """The call argument whose value contains an origin, if any, else the origin."""
    if origin is None or "arguments" not in origin:
        return origin
    first = origin.index("arguments") + 1
    inside = origin[first:]
    return Origin(origin[: first + 1]) if inside and inside[1:] != (KEY,) else origin


def _value(origin: Origin, message: Mapping[str, Any]) -> tuple[Any, FieldPath]:
    """The value at an origin, and the remaining path if that value is text."""
    value: Any = message
    for at, key in enumerate(origin.path):
        if isinstance(value, str):
            return value, origin.path[at:]
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None, ()
    return value, ()


def _original(text: str, origin: Origin | None, message: Mapping[str, Any]) -> str:
    """A span's text as its field has it: unstripped, booleans and JSON as they are."""
    if origin is None or origin.field is None or origin.is_key:
        return text
    value, inside = _value(origin, message)
    if isinstance(value, str) and not inside:
        is_whole = origin[-1] == "arguments" or (text and value.strip() == text.strip())
        return value if is_whole else text
    return json.dumps(value) if isinstance(value, bool) or (value is None and text == "None") else text


def _turns(rendering: Rendering) -> dict[int, list[Span]]:
    turns: dict[int, list[Span]] = {}
    for turn in turn_spans(rendering):
        turns.setdefault(turn.message, []).extend(rendering.spans(turn.start, turn.end))
    return turns


def _by_field(spans: Sequence[Span]) -> dict[Origin, str]:
    fields: dict[Origin, str] = {}
    for text, _, origin in spans:
        if origin is not None:
            fields[origin] = fields.get(origin, "") + text
    return fields


def _text(spans: Sequence[Span]) -> str:
    return "".join(text for text, _, _ in spans)
