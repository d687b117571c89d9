"""Renderings put together from several: reasoning that a template drops from the past, kept; history as given.

Nothing here knows a model. A turn whose reasoning is missing is rendered again in a context that keeps it, its
text is put in place of the old one, and the trace proves that only reasoning was added.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..computed import computed
from ..conversation.forms import Change
from ..conversation.messages import Messages
from ..errors import TokentraceError
from ..study.probes import ANSWER, USER, call
from ..study.turns import TurnSpan, common_prefix, turn_spans
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
    missing: dict[int, tuple[int, list[Span]]] = {}  # by where they begin
    for turn in turn_spans(rendering):
        index = turn.message
        if index > since and messages[index]["role"] == "assistant":
            old = rendering.spans(turn.start, turn.end)
            if not shows_reasoning(messages[index], old, index):
                missing[turn.start] = index, old

    def shown(start: int, ways: Callable[[int], Iterable[list[Span]]]) -> list[Span] | None:
        index, old = missing[start]
        fitting = (new for new in ways(index) if shows_reasoning(messages[index], new, index))
        spans = next((made for new in fitting if (made := _inserted(old, new)) is not None), None)
        return contexts.as_elsewhere(index, old) if spans is None else spans

    found = _by_kind(
        {start: (contexts.kind(index), old) for start, (index, old) in missing.items()},
        lambda start: shown(start, contexts.of),
        lambda start: shown(start, contexts.near),
    )
    for start, (index, old) in missing.items():
        spans = found[start]
        if spans is None:
            notes.append(f"message {index}: the template shows its reasoning in no context; it stays left out")
            continue
        replaced[start] = spans
        changes.append(Change(index, "reasoning kept", _text(old), _text(spans)))
    return _spliced(rendering, replaced), changes, notes


def _by_kind(
    turns: Mapping[int, tuple[Hashable, list[Span]]],
    written: Callable[[int], list[Span] | None],
    nearby: Callable[[int], list[Span] | None],
) -> dict[int, list[Span] | None]:
    """What `written` says of each turn, where its cost grows with all that came before the turn.

    `nearby` says it out of a few messages around the turn. Turns are alike that are of one kind and have the same
    scaffold, as they stand in the conversation and as `nearby` writes them. Of those that are alike the first, the
    second, the fourth, the eighth and so on are asked for both ways, so that all of it takes no longer than a few
    renders of the conversation; where one differs, each of them is asked for in full.
    """
    found: dict[int, list[Span] | None] = {}
    of_kind: dict[Hashable, list[int]] = {}
    differing: set[Hashable] = set()
    for turn, (kind, old) in turns.items():
        near = nearby(turn)
        look = (kind, _scaffold(old), None if near is None else _scaffold(near))
        alike = of_kind.setdefault(look, [])
        alike.append(turn)
        if look in differing:
            found[turn] = written(turn)
        elif len(alike) & (len(alike) - 1):
            found[turn] = near
        else:
            found[turn] = written(turn)
            if near != found[turn]:
                differing.add(look)
                found |= {earlier: written(earlier) for earlier in alike[:-1]}
    return found


def _scaffold(spans: Sequence[Span]) -> tuple[str | None, ...]:
    """A turn without the texts of its fields."""
    return tuple(text if origin is None else None for text, _, origin in spans)


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
        self._roles = [message["role"] for message in messages]
        self._users = [i for i, role in enumerate(self._roles) if role == "user"]
        self._systems = [i for i, role in enumerate(self._roles) if role in ("system", "developer")]
        self._made: dict[tuple[int, ...], tuple[Rendering, dict[int, TurnSpan]] | None] = {}

    def _around(self, index: int) -> tuple[list[int], int, int]:
        """The exchange of a message: what stands at the head of a prompt, its user message, and the next one."""
        at = bisect.bisect_left(self._users, index)
        begin = self._users[at - 1] if at else 0
        after = at + (at < len(self._users) and self._users[at] == index)
        end = self._users[after] if after < len(self._users) else len(self._roles)
        return self._systems[: bisect.bisect_left(self._systems, begin)], begin, end

    def kind(self, index: int) -> Hashable:
        """What a template may make the turn of a message depend on."""
        message = self._messages[index]
        found = reasoning_of(message)
        calls, content = message.get("tool_calls"), message.get("content")
        spoken = content.strip() if isinstance(content, str) else content
        before = self._roles[index - 1] if index else ""
        place = (before, index > self._users[-1] if self._users else True, index == len(self._roles) - 1)
        return found and found[1], len(calls) if calls else 0, bool(spoken), place

    def of(self, index: int) -> Iterator[list[Span]]:
        """In its own exchange (from its user message to before the next), then as the last message."""
        head, begin, end = self._around(index)
        for stop in (end, index + 1):
            yield from self._turn(index, (*head, *range(begin, stop)))
            yield from self._turn(index, tuple(range(stop)))

    def near(self, index: int) -> Iterator[list[Span]]:
        """In its own exchange, then as the last message after the call and the results before it."""
        head, begin, end = self._around(index)
        yield from self._turn(index, (*head, *range(begin, end)))
        yield from self.as_last_nearby(index)

    def as_last_nearby(self, index: int) -> Iterator[list[Span]]:
        """As the last message of its exchange, of which only its user message and what it answers are there."""
        head, begin, _ = self._around(index)
        first = index
        while first > begin + 1 and self._roles[first - 1] != "assistant":
            first -= 1
        first -= first > begin + 1
        yield from self._turn(index, (*head, *((begin,) if begin < first else ()), *range(first, index + 1)))

    def as_elsewhere(self, index: int, old: list[Span]) -> list[Span] | None:
        """`old` with its reasoning where the template writes that of other turns, for templates that show it in
        some turns only (beside tool calls, say). None where no turn tells how, or the turn begins otherwise."""
        found = reasoning_of(self._messages[index])
        if found is None or found[1] == "content":
            return None
        origin = Origin.of(index, found[1])
        for before, opening, closing in self._frames:
            if _text(old).startswith(before):
                block: list[Span] = [(opening, index, None), (found[0], index, origin), (closing, index, None)]
                end = len(_text(old))
                return [*_slice_spans(old, 0, len(before)), *block, *_slice_spans(old, len(before), end)]
        return None

    @computed
    def _frames(self) -> list[tuple[str, str, str]]:
        """How the template writes reasoning: what stands before it in the turn, what opens and what closes it.

        Found by rendering a small exchange with reasoning and without: what is more is the reasoning's own.
        """
        frames = []
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
                frames.append((before[:shared], opening, closing))
        return frames

    def as_last(self, index: int) -> Iterator[list[Span]]:
        """The turn as it stood when it was the last message, after all that came before."""
        yield from self._turn(index, tuple(range(index + 1)))

    def _turn(self, index: int, chosen: tuple[int, ...]) -> Iterator[list[Span]]:
        if chosen not in self._made:
            try:
                rendering = self._render([self._messages[i] for i in chosen])
                first = {chosen[turn.message]: turn for turn in reversed(turn_spans(rendering))}
                self._made[chosen] = rendering, first
            except TokentraceError:
                self._made[chosen] = None
        made = self._made[chosen]
        turn = made[1].get(index) if made is not None else None
        if made is not None and turn is not None:
            spans = made[0].spans(turn.start, turn.end)
            yield [(text, index, origin and origin.renumbered(chosen)) for text, _, origin in spans]


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
    turns = [turn for turn in turn_spans(rendering) if messages[turn.message]["role"] == "assistant"]
    past = {turn.message: rendering.spans(turn.start, turn.end) for turn in turns if turn.message < len(messages) - 1}
    found = _by_kind(
        {index: (contexts.kind(index), old) for index, old in past.items()},
        lambda index: next(contexts.as_last(index), None),
        lambda index: next(contexts.as_last_nearby(index), None),
    )
    for turn in turns:
        index = turn.message
        old = rendering.spans(turn.start, turn.end)
        new = found.get(index) or old
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
