"""What one run of a template leaves behind: marks while it runs, spans when it is done."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Any, ClassVar, Final

from ..errors import TemplateLimitError
from .budget import MAX_PIECES, RenderBudget, TooLarge
from .origin import InTurn, Origin
from .spans import Block, KnownRuns, Rendering, Span
from .strings import TracedStr, join_traced, plain_text, traced, with_runs
from .traced import TracedDict, text_of, wrap

MAX_OUTPUT: Final = 64 * 1024 * 1024
"""Characters one render may write."""
_MOST_KEPT: Final = 2048
_MOST_FIELDS: Final = 32
"""Origins are kept from one render to the next for so many messages, and for so many of their fields."""
_TOO_MUCH: Final = f"the template wrote more than {MAX_OUTPUT} characters, or {MAX_PIECES} spans"


class Mark(str):
    """An empty piece of output: from here on, the scaffold belongs to this message (-1: to none).

    Below -1 it stands for a round of a loop over something else than messages (their numbers, say). It belongs to
    the message whose text is printed in that round, if that is one message.
    """

    __slots__ = ("message",)
    message: int


def mark(message: int) -> Mark:
    self = str.__new__(Mark, "")
    self.message = message
    return self


class Boundary(str):
    """Where a ``{% generation %}`` block begins or ends. An empty piece of output, like `Mark`."""

    __slots__ = ()


BEGINS: Final = Boundary()
ENDS: Final = Boundary()


class _Kept:
    """What is the same in every render, for as many messages as any had. Only ever replaced by more."""

    marks: ClassVar[list[Mark]] = []
    origins: ClassVar[list[Origin]] = []
    fields: ClassVar[dict[str, list[Origin]]] = {}


def message_marks(count: int) -> list[Mark]:
    """The marks of the turns of so many messages, or of more: first that of none, then those of messages 0, 1, …"""
    marks = _Kept.marks
    if count >= len(marks):
        marks = _Kept.marks = [mark(number) for number in range(-1, 2 * count + 64)]
    return marks


def message_origins(count: int) -> list[Origin]:
    """The origins of so many messages, or of more."""
    origins = _Kept.origins
    if count > len(origins):
        origins = _Kept.origins = [Origin(("messages", number)) for number in range(2 * count + 64)]
    return origins


def field_origins(name: str, count: int) -> list[Origin] | None:
    """The origins of a field of so many messages, or of more; None where that is too much to keep."""
    origins = _Kept.fields.get(name)
    if origins is None or count > len(origins):
        if count > _MOST_KEPT or (origins is None and len(_Kept.fields) >= _MOST_FIELDS):
            return None
        origins = _Kept.fields[name] = [Origin(("messages", number, name)) for number in range(2 * count + 64)]
    return origins


class Trace:
    """The state of one run: what it wrote, whose turn is being written, and what it may still do.

    What is written is a flat list: a value, what stands beside it (see `pairs`), the next value, and so on.
    """

    __slots__ = ("budget", "current", "marks", "messages", "out", "rounds", "stack")

    def __init__(self, count: int, messages: list[Any] | None = None) -> None:
        """A run on so many messages. `messages` are those that stand in it as they were given."""
        self.messages = messages
        self.marks = message_marks(count)
        self.current = -1
        self.rounds = -1
        self.stack: list[int] = []
        self.budget = RenderBudget()
        self.out: list[Any] = []

    def origin_of(self, value: Any) -> Origin | None:
        """What stands beside a variable of the template's context."""
        return _MESSAGES if value is self.messages and value is not None else None

    def enter(self) -> None:
        """A loop begins."""
        self.stack.append(self.current)

    def leave(self) -> Mark | None:
        """A loop ends: what comes next belongs to whom it belonged before."""
        before = self.stack.pop()
        return None if before == self.current else self._back(before)

    def _back(self, before: int) -> Mark:
        self.current = before
        return self.marks[before + 1] if before >= -1 else mark(before)

    def left(self, before: int, out: list[Any]) -> None:
        """A loop that has written something, and in which another's turn began, ends."""
        out += (self._back(before), None)

    def round(self, item: Any, origin: Any, out: list[Any]) -> None:
        """A loop's next round, which is paid for, with `item` as its variable; its mark is written to `out`."""
        if type(item) is not dict or origin is None:
            found = self._turn(item)
        else:
            is_message = len(origin) == 2 and origin[0] == "messages"
            found = self._begin(origin[1], item) if is_message else None
        if found is not None:
            out += (found, None)

    def look(self, item: Any, origin: Any) -> None:
        """The next round of a loop that writes nothing: only an error would name the message."""
        if type(item) is dict or type(item) is TracedDict:
            self.round(item, origin, [])

    def pause(self, out: list[Any]) -> None:
        """Now and then: may the template go on?"""
        self.budget.check()
        if len(out) > _MAX_ENTRIES:
            raise TooLarge(f"the template printed more than {_MAX_ENTRIES // 2} times")

    def turn(self, item: Any) -> Mark | None:
        """A loop's next round, with a boxed `item` as its variable."""
        self.budget.step()
        return self._turn(item)

    def _turn(self, item: Any) -> Mark | None:
        kind = type(item)
        if kind is TracedDict:
            origin = item.origin
            if len(origin) == 2 and origin[0] == "messages":
                return self._begin(origin[1], item)
        elif kind is dict:
            return self._rebuilt(item)
        elif len(self.stack) == 1 and self.stack[0] == -1:
            self.rounds -= 1
            self.current = self.rounds
            return mark(self.rounds)
        return None

    def _begin(self, message: int, item: dict[Any, Any]) -> Mark | None:
        """The turn of `message` begins. Inside another's turn only later messages have one (results, written with
        the call they answer); a look back, or at what an assistant said, is a look and no turn."""
        around = self.stack[-1] if self.stack else -1
        if around >= 0 and (message < around or dict.get(item, "role") == "assistant"):
            message = around
        if message == self.current:
            return None
        self.current = message
        return self.marks[message + 1]

    def assigned(self, value: Any, origin: Any, out: list[Any]) -> None:
        """``{% set message = messages[i] %}`` inside a loop over ``i`` begins a turn as well."""
        if type(value) is TracedDict or (type(value) is dict and origin is not None):
            self.budget.step()
            self.round(value, origin, out)

    def _rebuilt(self, item: dict[Any, Any]) -> Mark | None:
        """A message that the template itself put together, out of fields of one of ours."""
        for value in (item.get("role"), item.get("content")):
            if type(value) is TracedStr and value.runs:
                origin = value.runs[0][1]
                if origin is not None and origin.message is not None and origin.path:
                    self.current = origin.message
                    return self.marks[self.current + 1]
        return None


_MESSAGES: Final = Origin(("messages",))
_LAID_OUT: Final = frozenset({str, TracedStr, Mark, Boundary})
_NO_SPAN: Final = object()
_MAX_ENTRIES: Final = 4 * MAX_PIECES
"""Values and origins that may be written before they are laid out as spans, or joined."""


def join_buffer(parts: Iterable[Any]) -> TracedStr:
    """Join what was written into a buffer. All text after a mark remembers whose turn it was written in."""
    pieces: list[str] = []
    turn: int | None = None
    for part in parts:
        kind = type(part)
        if kind is Mark:
            turn = part.message
        elif kind is not Boundary:  # `generation` does not cover what a macro or a set block wrote
            text = part if kind is str else text_of(part)
            if text:
                pieces.append(text if turn is None else _in_turn(text, turn))
    if len(pieces) == 1 and type(pieces[0]) is TracedStr:
        return pieces[0]
    return join_traced(pieces)


def _in_turn(text: str, turn: int) -> TracedStr:
    """`text`, written in a turn; parts that an inner buffer has given to a turn stay there."""
    if type(text) is not TracedStr:
        return traced(text, InTurn.within(None, turn))
    runs = ((end, origin if type(origin) is InTurn else InTurn.within(origin, turn)) for end, origin in text.runs)
    return with_runs(plain_text(text), tuple(runs))


def collect(written: list[Any]) -> Rendering:
    """Lay out what a template wrote (values and their origins, in turn) as spans."""
    starts: list[int] = []
    turns: list[int] = []  # known up to the last mark
    origins: list[Origin | None] = []
    generation: list[tuple[int, int]] = []
    opened: list[int] = []  # where blocks of generation began that have not ended yet
    at = 0
    inside = 0  # how many runs are in blocks
    current = -1
    last: Any = _NO_SPAN  # the origin of the span that may grow
    made: list[str] = []  # of what was no text yet: numbers, markup, what call blocks gave
    entries = iter(written)
    for value, origin in zip(entries, entries, strict=True):
        if type(value) is not str:
            if type(value) not in _LAID_OUT:
                value, origin = text_of(value if origin is None else wrap(value, origin)), None
                made.append(value)
            kind = type(value)
            if kind is TracedStr and len(value.runs) == 1 and type(value.runs[0][1]) is not InTurn:
                origin = value.runs[0][1]
            elif kind is not str:
                turns += [current] * (len(starts) - len(turns))
                if kind is Mark:
                    current = value.message
                elif value is BEGINS:
                    opened.append(at)
                elif value is ENDS:
                    start = opened.pop()
                    generation += [] if opened else [(start, at)]
                elif type(value.runs) is KnownRuns:  # one span for all of them
                    starts.append(at)
                    turns.append(current)
                    origins.append(value.runs.block)
                    inside += len(value.runs)
                else:
                    start = at
                    for end, origin in value.runs:
                        turn = current
                        if type(origin) is InTurn:
                            turn, origin = origin.turn, origin.origin
                        if not turns or turn != turns[-1] or type(origins[-1]) is Block or origin != origins[-1]:
                            starts.append(start)
                            turns.append(turn)
                            origins.append(origin)
                        start = at + end
                at += len(value)
                last = origins[-1] if turns and turns[-1] == current and type(origins[-1]) is not Block else _NO_SPAN
                continue
        if origin is not last and value and (origin is None or last is None or origin != last):
            starts.append(at)
            origins.append(origin)
            last = origin
        at += len(value)
    turns += [current] * (len(starts) - len(turns))
    ends = [*starts[1:], at] if starts else []
    if at > MAX_OUTPUT or len(ends) + inside > MAX_PIECES:
        raise TemplateLimitError(_TOO_MUCH)
    texts = written[::2]
    if made:
        rest = iter(made)
        texts = [value if type(value) in _LAID_OUT else next(rest) for value in texts]
    text = "".join(texts)
    wide = [] if text.isascii() else _wide(texts, ends)
    tail = next((end for end, turn in zip(reversed(ends), reversed(turns), strict=True) if turn >= 0), 0)
    rendering = Rendering(text, ends, turns, origins, generation, tail, wide, blocks=inside > 0)
    if turns and min(turns) < -1:
        _settle_rounds(rendering)
    return rendering


def _wide(texts: list[str], ends: list[int]) -> list[int]:
    """The spans that hold more than ASCII."""
    wide: list[int] = []
    at = 0
    for text in texts:
        if not text.isascii():
            wide += range(bisect.bisect_right(ends, at), bisect.bisect_left(ends, at + len(text)) + 1)
        at += len(text)
    return wide


def _settle_rounds(rendering: Rendering) -> None:
    """Give rounds of loops over other things than messages to the one message that each printed, or to none."""
    printed: dict[int, set[int]] = {}
    for turn, origin in zip(rendering.turns, rendering.origins, strict=True):
        if turn < -1:
            found = printed.setdefault(turn, set())
            if origin is not None and origin.message is not None:
                found.add(origin.message)
    owners = {turn: found.pop() if len(found) == 1 else -1 for turn, found in printed.items()}
    rendering.turns = [owners.get(turn, turn) for turn in rendering.turns]
    rendering.tail = max(
        (end for end, turn in zip(rendering.ends, rendering.turns, strict=True) if turn >= 0), default=0
    )


__all__ = ["BEGINS", "ENDS", "MAX_OUTPUT", "Mark", "Rendering", "Span", "Trace", "collect", "join_buffer", "mark"]
