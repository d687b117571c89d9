"""What one run of a template leaves behind: values with their origins, then spans."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jinja2.utils import Namespace

from ..errors import TemplateLimitError
from .budget import MAX_ITEMS, MAX_TEXT, RenderBudget, TooLarge, attrs_of
from .origin import InTurn, Origin
from .pairs import box
from .strings import TracedStr, cut, join_traced, promoted, runs_of, traced
from .traced import TracedDict, text_of

Span = tuple[str, int, Origin | None]
"""A piece of text, the message in whose turn it was written, and where it came from."""


@dataclass(slots=True)
class Rendering:
    """Rendered text as spans. Span k is ``text[ends[k-1]:ends[k]]``.

    `turns[k]` is the message in whose turn it was written (-1: none), `origins[k]` its field (None:
    the template wrote it). `generation`: ranges in ``{% generation %}`` tags; `tail`: where the
    text after the last turn starts.
    """

    text: str
    ends: list[int] = field(default_factory=list, repr=False)
    turns: list[int] = field(default_factory=list, repr=False)
    origins: list[Origin | None] = field(default_factory=list, repr=False)
    generation: list[tuple[int, int]] = field(default_factory=list)
    tail: int = 0

    @property
    def last_field(self) -> int:
        spans = zip(reversed(self.ends), reversed(self.origins), strict=True)
        return next((end for end, origin in spans if origin is not None and origin.source == "messages"), 0)

    def spans(self, start: int = 0, stop: int | None = None) -> list[Span]:
        """``[(text, turn, origin), …]`` of the text from `start` to `stop`."""
        text, ends = self.text, self.ends
        start, stop = max(start, 0), len(text) if stop is None else stop
        window = slice(bisect.bisect_right(ends, start), bisect.bisect_left(ends, stop) + 1)
        ends = ends[window]
        rows = zip([start, *ends], ends, self.turns[window], self.origins[window], strict=False)
        return [(text[at : min(end, stop)], turn, origin) for at, end, turn, origin in rows if at < stop]

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Rendering:
        rendering = cls("")
        texts: list[str] = []
        end = 0
        for text, turn, origin in spans:
            if text:
                end += len(text)
                texts.append(text)
                rendering.ends.append(end)
                rendering.turns.append(turn)
                rendering.origins.append(origin)
                if turn >= 0:
                    rendering.tail = end
        rendering.text = "".join(texts)
        return rendering


TURN = Origin(("@turn",))
"""In place of an origin: the value is the message whose turn begins (-1: none).

Below -1: a round of another loop, which belongs to the only message whose text it prints, if any.
"""
GENERATION = Origin(("@generation",))
"""In place of an origin: the length of a ``{% generation %}`` block that begins here."""

_MESSAGES = Origin(("messages",))
_MAX_ENTRIES = 4 * MAX_ITEMS
"""Values and origins that a buffer may have."""


class Trace:
    """The state of one run: what it wrote, whose turn it is, and what it may still do.

    `out` is a flat list of values, each before its origin (see `pairs`). `messages` is None if
    they are boxed.
    """

    __slots__ = ("blocks", "budget", "collected", "current", "messages", "out", "rounds", "stack")

    def __init__(self, messages: list[Any] | None = None) -> None:
        self.messages = messages
        self.current = -1
        self.rounds = -1
        self.stack: list[int] = []
        self.budget = RenderBudget()
        self.out: list[Any] = []
        self.blocks: list[int] = []
        """Where the open ``{% generation %}`` blocks begin in the lists they write to."""
        self.collected: dict[tuple[int, str], tuple[int, Any, Any]] = {}
        """Texts of namespaces: the turn that stored each, its value before that turn and now."""

    def origin_of(self, value: Any) -> Origin | None:
        return _MESSAGES if value is self.messages and value is not None else None

    def enter(self) -> None:
        self.stack.append(self.current)

    def leave(self, out: list[Any]) -> None:
        self._begin(self.stack.pop(), out)

    def round(self, item: Any, origin: Any, out: list[Any]) -> None:
        """Start a loop's next round: a step, and perhaps the turn of `item`."""
        budget = self.budget
        budget.steps = steps = budget.steps - 1
        if not steps & 31:
            budget.check()
            if len(out) > _MAX_ENTRIES:
                raise TooLarge(f"the template printed more than {_MAX_ENTRIES // 2} times")
        if type(item) is dict and type(origin) is Origin:
            if len(origin) == 2:  # plain values come from messages only
                self._begin(origin[1], out, item)
        elif isinstance(item, dict):
            self.show(item, origin, out)
        elif self.stack == [-1]:
            self.rounds -= 1
            self._begin(self.rounds, out)

    def show(self, item: dict[Any, Any], origin: Any, out: list[Any]) -> None:
        """A variable is set to `item`, whose turn begins if it is a message."""
        if type(item) is TracedDict:
            origin = item.origin
        if type(origin) is not Origin:  # a dict that the template built from a message
            texts = [value for value in (item.get("role"), item.get("content")) if type(value) is TracedStr]
            origins = [text.runs[0][1] for text in texts if text.runs]
            messages = (one.message for one in origins if one and one.path and one.message is not None)
            self._begin(next(messages, self.current), out)
        elif len(origin) == 2 and origin[0] == "messages":
            self._begin(origin[1], out, item)

    def _begin(self, message: Any, out: list[Any], item: dict[Any, Any] | None = None) -> None:
        """Begin a turn.

        Inside another turn, only later results do so: they may be written with their call.
        """
        around = self.stack[-1] if item is not None and self.stack else -1
        if around >= 0 and (message < around or dict.get(item, "role") == "assistant"):  # type: ignore[arg-type]
            message = around
        if message != self.current:
            self.current = message
            if out and out[-1] is TURN:  # nothing was written since
                del out[-2:]
            out += (message, TURN)

    def end_block(self, out: list[Any]) -> None:
        """End a ``{% generation %}`` block. In a macro, it covers what is written next."""
        start = self.blocks.pop()
        if not self.blocks:
            place = start if out is self.out else len(self.out)
            size = 0
            for value, origin in zip(out[start::2], out[start + 1 :: 2], strict=True):
                if origin is not TURN:
                    size += len(value if type(value) is str else text_of(box(value, origin)))
            self.out[place:place] = (size, GENERATION)

    def store(self, namespace: Namespace, name: str) -> None:
        """Assign text that a namespace collects to the turn that put it together."""
        values, key = attrs_of(namespace), (id(namespace), name)
        value = values[name]
        if type(value) is TracedStr or type(value) is list:
            turn, before, latest = self.collected.get(key, (self.current, None, None))
            before = before if turn == self.current else latest  # the value when this turn began
            if self.current >= 0:
                values[name] = value = _collected(value, before, self.current)
            self.collected[key] = self.current, before, value


def _collected(value: Any, before: Any, turn: int) -> Any:
    """`value`, its text after `before` in the turn if it mixes scaffold and a field of its message."""
    if type(value) is list:
        start = len(before) if type(before) is list and before == value[: len(before)] else 0
        return value[:start] + [_collected(item, "", turn) for item in value[start:]]
    if type(value) is not TracedStr:
        return value
    start = len(before) if isinstance(before, str) and value.startswith(before) else 0
    new = cut(value, start, len(value))
    origins = [origin for _, origin in new.runs]
    if None not in origins or all(origin is None or origin.message != turn for origin in origins):
        return value
    return join_traced((cut(value, 0, start), _in_turn(new, turn)))


def join_output(out: list[Any]) -> TracedStr:
    pieces: list[str] = []
    turn: int | None = None
    entries = iter(out)
    for value, origin in zip(entries, entries, strict=True):
        if origin is TURN:
            turn = value
        else:
            text = text_of(box(value, origin))
            pieces.append(text if turn is None else _in_turn(promoted(text), turn))
    return join_traced(pieces)


def _in_turn(text: TracedStr, turn: int) -> TracedStr:
    """`text`, marked as written in a turn where no inner buffer marked it."""
    return join_traced(
        traced(part, origin if type(origin) is InTurn else InTurn.within(origin, turn))
        for part, origin in runs_of(text)
    )


def collect(out: list[Any]) -> Rendering:
    spans = Rendering("")
    ends, turns, origins = spans.ends, spans.turns, spans.origins
    texts: list[str] = []
    end, turn = 0, -1
    last: Any = collect  # the origin of the last span, if that may grow; no origin is ever this
    entries = iter(out)
    for value, origin in zip(entries, entries, strict=True):
        if type(value) is str:
            texts.append(value)
            end += len(value)
            if origin is last or (last is not None and origin is not None and origin == last):
                ends[-1] = end
            elif value:
                ends.append(end)
                turns.append(turn)
                origins.append(origin)
                last = origin
            continue
        if origin is TURN:
            turn = value
        elif origin is GENERATION:
            spans.generation.append((end, end + value))
        else:
            text = text_of(box(value, origin))
            texts.append(text)
            _extend(spans, promoted(text), end, turn)
            end += len(text)
        last = origins[-1] if turns and turns[-1] == turn else collect
    if end > MAX_TEXT or len(ends) > MAX_ITEMS:
        raise TemplateLimitError(
            f"the template wrote more than {MAX_TEXT} characters, or {MAX_ITEMS} spans"
        )
    spans.text = "".join(texts)
    if turns and min(turns) < -1:
        _settle_rounds(spans)
    backwards = zip(reversed(ends), reversed(spans.turns), strict=True)
    spans.tail = next((end for end, turn in backwards if turn >= 0), 0)
    return spans


def _extend(spans: Rendering, text: TracedStr, start: int, turn: int) -> None:
    """Add the runs of a text as spans. One with the turn and origin of the last span extends that."""
    for end, origin in text.runs:
        owner = turn
        if type(origin) is InTurn:
            owner, origin = origin.turn, origin.origin
        if spans.turns and spans.turns[-1] == owner and spans.origins[-1] == origin:
            spans.ends[-1] = start + end
        else:
            spans.ends.append(start + end)
            spans.turns.append(owner)
            spans.origins.append(origin)


def _settle_rounds(spans: Rendering) -> None:
    """Assign each round of another loop to the one message it printed, or to none."""
    printed: dict[int, set[int]] = {}
    for turn, origin in zip(spans.turns, spans.origins, strict=True):
        if turn < -1:
            messages = printed.setdefault(turn, set())
            if origin is not None and origin.message is not None:
                messages.add(origin.message)
    owners = {turn: messages.pop() if len(messages) == 1 else -1 for turn, messages in printed.items()}
    spans.turns = [owners.get(turn, turn) for turn in spans.turns]
