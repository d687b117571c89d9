"""What one run of a template leaves behind: marks while it runs, spans when it is done."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Final

from ..errors import TemplateLimitError
from .budget import MAX_ITEMS, MAX_TEXT, RenderBudget, TooLarge
from .origin import InTurn, Origin
from .spans import Rendering, Span
from .strings import TracedStr, join_traced, promoted, runs_of, traced
from .traced import TracedDict, text_of, wrap

_MESSAGES: Final = Origin(("messages",))
_MAX_ENTRIES: Final = 4 * MAX_ITEMS
"""Values and origins that may be written before they are laid out as spans, or joined."""


class Mark(str):
    """An empty piece of output: from here on, the scaffold belongs to this message (-1: to none).

    Below -1 it stands for a round of a loop over something else than messages (their numbers, say). It belongs to
    the message whose text is printed in that round, if that is one message.
    """

    __slots__ = ("message",)
    message: int


@functools.lru_cache(maxsize=1 << 12)
def _mark(message: int) -> Mark:
    mark = Mark()
    mark.message = message
    return mark


class Boundary(str):
    """Where a ``{% generation %}`` block begins or ends. An empty piece of output, like `Mark`."""

    __slots__ = ()


BEGINS: Final = Boundary()
ENDS: Final = Boundary()


class Trace:
    """The state of one run: what it wrote, whose turn is being written, and what it may still do.

    `out` is a flat list: a value, its origin (see `pairs`), the next value, and so on.
    """

    __slots__ = ("budget", "current", "messages", "out", "rounds", "stack")

    def __init__(self, messages: list[Any] | None = None) -> None:
        """A run on `messages`, if these are plain; None for boxed ones."""
        self.messages = messages
        self.current = -1
        self.rounds = -1
        self.stack: list[int] = []
        self.budget = RenderBudget()
        self.out: list[Any] = []

    def origin_of(self, value: Any) -> Origin | None:
        """The origin of the template's variable ``messages``."""
        return _MESSAGES if value is self.messages and value is not None else None

    def enter(self) -> None:
        """A loop begins."""
        self.stack.append(self.current)

    def leave(self, out: list[Any]) -> None:
        """A loop ends: what comes next belongs to whom it belonged before."""
        self._begin(self.stack.pop(), out)

    def round(self, item: Any, origin: Any, out: list[Any]) -> None:
        """A loop's next round, with `item` as its variable: one step, and maybe the beginning of a turn."""
        budget = self.budget
        budget.steps = steps = budget.steps - 1
        if not steps & 31:
            budget.check()
            if len(out) > _MAX_ENTRIES:
                raise TooLarge(f"the template printed more than {_MAX_ENTRIES // 2} times")
        if isinstance(item, dict):
            if type(origin) is not Origin or len(origin) == 2:
                self.show(item, origin, out)
        elif self.stack == [-1]:
            self.rounds -= 1
            self._begin(self.rounds, out)

    def show(self, item: dict[Any, Any], origin: Any, out: list[Any]) -> None:
        """A variable is set to `item`: if that is a message, its turn begins.

        Inside another's turn only later messages have one (results, written with the call they answer); a look back, or
        at an assistant's message, begins no turn.
        """
        if type(item) is TracedDict:
            origin = item.origin
        if type(origin) is not Origin:
            self._begin(_rebuilt(item, self.current), out)
        elif len(origin) == 2 and origin[0] == "messages":
            message: Any = origin[1]
            around = self.stack[-1] if self.stack else -1
            is_look = around >= 0 and (message < around or dict.get(item, "role") == "assistant")
            self._begin(around if is_look else message, out)

    def _begin(self, message: int, out: list[Any]) -> None:
        if message == self.current:
            return
        self.current = message
        if out and type(out[-2]) is Mark:  # nothing was written since
            out[-2] = _mark(message)
        else:
            out += (_mark(message), None)


def _rebuilt(item: dict[Any, Any], otherwise: int) -> int:
    """The message that a dict of the template's own was put together from."""
    for value in (item.get("role"), item.get("content")):
        if type(value) is TracedStr and value.runs:
            origin = value.runs[0][1]
            if origin is not None and origin.message is not None and origin.path:
                return origin.message
    return otherwise


def join_buffer(parts: Iterable[Any]) -> TracedStr:
    """Join what was written into a buffer. All text after a mark remembers whose turn it was written in."""
    pieces: list[str] = []
    turn: int | None = None
    for part in parts:
        if type(part) is Mark:
            turn = part.message
        elif type(part) is not Boundary:  # `generation` does not cover what a macro or a set block wrote
            text = text_of(part)
            pieces.append(text if turn is None else _in_turn(promoted(text), turn))
    return join_traced(pieces)


def _in_turn(text: TracedStr, turn: int) -> TracedStr:
    """`text`, written in a turn; parts that an inner buffer has given to a turn stay there."""
    parts = (
        traced(part, origin if type(origin) is InTurn else InTurn.within(origin, turn))
        for part, origin in runs_of(text)
    )
    return join_traced(parts)


def collect(out: list[Any]) -> Rendering:
    """Lay out what a template wrote as spans. Raises TemplateLimitError if it wrote too much."""
    texts: list[str] = []
    spans = Rendering("")
    ends, turns, origins = spans.ends, spans.turns, spans.origins
    open_tags: list[int] = []
    end, turn = 0, -1
    last: Any = collect  # the origin of the last span, if that may grow; no origin is ever this
    entries = iter(out)
    for value, origin in zip(entries, entries, strict=True):
        kind = type(value)
        if kind is Mark:
            turn = value.message
            last = origins[-1] if turns and turns[-1] == turn else collect
            continue
        if kind is Boundary:
            if value is BEGINS:
                open_tags.append(end)
            else:
                start = open_tags.pop()
                spans.generation += [] if open_tags else [(start, end)]
            continue
        if kind is not str:
            text = text_of(value if origin is None else wrap(value, origin))
            texts.append(text)
            start = end
            for stop, origin in promoted(text).runs:
                is_bound = type(origin) is InTurn
                owner = origin.turn if is_bound else turn  # type: ignore[union-attr]
                origin = origin.origin if is_bound else origin  # type: ignore[union-attr]
                end = start + stop
                _extend(spans, end, owner, origin)
            last = origins[-1] if turns and turns[-1] == turn else collect
            continue
        if value:
            texts.append(value)
            end += len(value)
            if origin is last or (last is not None and origin is not None and origin == last):
                ends[-1] = end
            else:
                ends.append(end)
                turns.append(turn)
                origins.append(origin)
                last = origin
    if end > MAX_TEXT or len(ends) > MAX_ITEMS:
        raise TemplateLimitError(f"the template wrote more than {MAX_TEXT} characters, or {MAX_ITEMS} spans")
    spans.text = "".join(texts)
    if turns and min(turns) < -1:
        _settle_rounds(spans)
    spans.tail = next((end for end, turn in zip(reversed(ends), reversed(spans.turns), strict=True) if turn >= 0), 0)
    return spans


def _extend(spans: Rendering, end: int, turn: int, origin: Origin | None) -> None:
    """Add a span, or let the last one grow if it is of the same turn and origin."""
    if spans.turns and spans.turns[-1] == turn and spans.origins[-1] == origin:
        spans.ends[-1] = end
    else:
        spans.ends.append(end)
        spans.turns.append(turn)
        spans.origins.append(origin)


def _settle_rounds(spans: Rendering) -> None:
    """Give rounds of loops over other things than messages to the one message that each printed, or to none."""
    printed: dict[int, set[int]] = {}
    for turn, origin in zip(spans.turns, spans.origins, strict=True):
        if turn < -1:
            messages = printed.setdefault(turn, set())
            if origin is not None and origin.message is not None:
                messages.add(origin.message)
    owners = {turn: messages.pop() if len(messages) == 1 else -1 for turn, messages in printed.items()}
    spans.turns = [owners.get(turn, turn) for turn in spans.turns]


__all__ = ["BEGINS", "ENDS", "Mark", "Rendering", "Span", "Trace", "collect", "join_buffer"]
