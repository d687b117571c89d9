"""What one run of a template leaves behind: marks while it runs, spans when it is done."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from tokentrace.errors import TemplateLimitError
from tokentrace.template.budget import MAX_PIECES, RenderBudget, check_size
from tokentrace.template.origin import InTurn, Origin
from tokentrace.template.spans import KnownRuns, Rendering
from tokentrace.template.strings import TracedStr, join_traced, traced
from tokentrace.template.trace import _in_turn
from tokentrace.template.traced import TracedDict, text_of

MAX_OUTPUT: Final = 64 * 1024 * 1024
"""Characters one render may write."""
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


class Generated(TracedStr):
    """What a ``{% generation %}`` block wrote."""

    __slots__ = ()


class Trace:
    """The state of one run: whose turn is being written, and what it may still do."""

    __slots__ = ("budget", "current", "marks", "rounds", "stack")

    def __init__(self, messages: int) -> None:
        self.marks = [mark(i) for i in range(-1, messages)]
        self.current = -1
        self.rounds = -1
        self.stack: list[int] = []
        self.budget = RenderBudget()

    def enter_macro(self) -> None:
        self.budget.step()

    def enter(self) -> None:
        """A loop begins."""
        self.stack.append(self.current)

    def leave(self) -> Mark | None:
        """A loop ends: what comes next belongs to whom it belonged before."""
        before = self.stack.pop()
        if before == self.current:
            return None
        self.current = before
        return self.marks[before + 1] if before >= -1 else mark(before)

    def turn(self, item: Any) -> Mark | None:
        """A loop's next round, with `item` as its variable."""
        self.budget.step()
        kind = type(item)
        if kind is TracedDict:
            origin = item.origin
            if len(origin) == 2 and origin[0] == "messages":  # `origin.message`, spelled out: the hottest line there is
                return self._begin(origin[1], item)
        elif kind is dict:
            return self._rebuilt(item)
        elif len(self.stack) == 1 and self.stack[0] == -1:
            self.rounds -= 1
            self.current = self.rounds
            return mark(self.rounds)
        return None

    def _begin(self, message: int, item: TracedDict) -> Mark | None:
        """The turn of `message` begins. Inside another's turn only later messages have one (results, written with
        the call they answer); a look back, or at what an assistant said, is a look and no turn."""
        around = self.stack[-1] if self.stack else -1
        if around >= 0 and (message < around or dict.get(item, "role") == "assistant"):
            message = around
        if message == self.current:
            return None
        self.current = message
        return self.marks[message + 1]

    def assigned(self, value: Any) -> Mark | None:
        """``{% set message = messages[i] %}`` inside a loop over ``i`` begins a turn as well."""
        return self.turn(value) if type(value) is TracedDict else None

    def _rebuilt(self, item: dict[Any, Any]) -> Mark | None:
        """A message that the template itself put together, out of fields of one of ours."""
        for value in (item.get("role"), item.get("content")):
            if type(value) is TracedStr and value.runs:
                origin = value.runs[0][1]
                if origin is not None and origin.message is not None and origin.path:
                    self.current = origin.message
                    return self.marks[self.current + 1]
        return None


class Buffer(list[Any]):
    """Where a macro or a set block writes. It may not grow without bounds."""

    size = 0

    def append(self, piece: Any) -> None:
        if isinstance(piece, str):
            self.size += len(piece)
            check_size(self.size)
        list.append(self, piece)

    def extend(self, pieces: Iterable[Any]) -> None:
        for piece in pieces:
            self.append(piece)


def join_buffer(parts: Iterable[Any]) -> TracedStr:
    """The contents of a template's buffer (a macro, a set block). Marks inside become the origin of scaffold."""
    pieces: list[str] = []
    turn: int | None = None
    for part in parts:
        kind = type(part)
        if kind is Mark:
            turn = part.message
            continue
        text = part if kind is str else text_of(part)
        if text:
            pieces.append(text if turn is None else _in_turn(text, turn))
    if len(pieces) == 1 and type(pieces[0]) is TracedStr:
        return pieces[0]
    return join_traced(pieces)


def collect(pieces: Iterable[Any]) -> Rendering:
    """Run a template (or a Python format) to its end and lay its pieces out as spans."""
    texts: list[str] = []
    ends: list[int] = []
    turns: list[int] = []
    origins: list[Origin | None] = []
    generation: list[tuple[int, int]] = []
    wide: list[int] = []
    at = 0
    tail = 0
    inside = 0  # how many runs are in blocks
    current = -1
    last_turn: int | None = None
    last_origin: Any = None
    for piece in pieces:
        kind = type(piece)
        if kind is str:
            if not piece:
                continue
            at += len(piece)
            texts.append(piece)
            if current >= 0:
                tail = at
            if last_origin is None and last_turn == current:
                ends[-1] = at
            else:
                ends.append(at)
                turns.append(current)
                origins.append(None)
                last_origin, last_turn = None, current
            if not piece.isascii():
                wide.append(len(ends) - 1)
            if at > MAX_OUTPUT or len(ends) > MAX_PIECES:
                raise TemplateLimitError(_TOO_MUCH)
            continue
        if kind is Mark:
            current = piece.message
            continue
        if kind is Generated:
            generation.append((at, at + len(piece)))
        elif kind is not TracedStr:
            piece = text_of(piece)
            if type(piece) is str:
                piece = traced(piece, None)
        if not piece:
            continue
        texts.append(piece)
        is_wide = not piece.isascii()
        if type(piece.runs) is KnownRuns:  # one span for all of them
            at += len(piece)
            ends.append(at)
            turns.append(current)
            origins.append(piece.runs.block)
            inside += len(piece.runs)
            last_origin, last_turn = piece.runs, current  # no origin is equal to that
            if is_wide:
                wide.append(len(ends) - 1)
            if current >= 0:
                tail = at
            if at > MAX_OUTPUT or len(ends) + inside > MAX_PIECES:
                raise TemplateLimitError(_TOO_MUCH)
            continue
        for end, origin in piece.runs:
            turn = current
            if type(origin) is InTurn:
                turn, origin = origin.turn, origin.origin
            if origin == last_origin and turn == last_turn:
                ends[-1] = at + end
            else:
                ends.append(at + end)
                turns.append(turn)
                origins.append(origin)
                last_origin, last_turn = origin, turn
            if is_wide:
                wide.append(len(ends) - 1)
            if turn >= 0:
                tail = at + end
        at += len(piece)
        if at > MAX_OUTPUT or len(ends) + inside > MAX_PIECES:
            raise TemplateLimitError(_TOO_MUCH)
    rendering = Rendering("".join(texts), ends, turns, origins, generation, tail, wide, blocks=inside > 0)
    if turns and min(turns) < -1:
        _settle_rounds(rendering)
    return rendering


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


__all__ = [
    "MAX_OUTPUT",
    "Buffer",
    "Generated",
    "Mark",
    "Rendering",
    "Trace",
    "collect",
    "join_buffer",
    "mark",
]
