"""Which tokens of a row an assistant sampled, read from the ids alone.

Without a row's conversation, the template still tells how it sets off turns: small conversations are rendered once, and
what comes before each sampled turn (its mark) and ends it is noted. In a row, everything from a mark to the next token
that ends a turn is sampled. A render knows more: a mark that a user spells with control tokens counts as one, and a
turn that starts with what a prompt may end with (an empty block of reasoning) is taken to start after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import TokentraceError
from ..rendering.rendered import RenderedTokens
from ..rendering.renderer import Renderer
from ..study.probes import ANSWER, STAND_IN_TOOL, SYSTEM, THOUGHT, USER, Probe, call, calling, result
from ..tokens.tokenizer import Ids

_PROBES: Final[tuple[Probe, ...]] = (
    (USER, ANSWER, USER, ANSWER),
    (SYSTEM, USER, ANSWER, USER, ANSWER),
    (USER, THOUGHT, USER, THOUGHT),
    *((USER, calling(call(as_text=as_text)), result(), ANSWER, USER, ANSWER) for as_text in (False, True)),
)
_MORE: Final = 4
"""How many tokens the start of a turn may be longer than the generation prompt."""
_LONGEST: Final = 5
"""Tokens of the longest mark that is longer than a generation prompt."""


@dataclass(frozen=True, slots=True)
class ReadTurn:
    """A turn in a row: its mark from `mark` on, its sampled tokens from `start` to `stop`."""

    mark: int
    start: int
    stop: int
    ended: bool


class TurnMarks:
    """What sets off an assistant's turns, for one renderer."""

    def __init__(self, renderer: Renderer) -> None:
        self._vocabulary = renderer.tokenizer.vocabulary
        turns = list(_probe_turns(renderer))
        inside = {index for turn in turns for index in turn.body}
        elsewhere = inside.union(*(turn.elsewhere() for turn in turns))
        stops = {turn.stop for turn in turns if turn.stop is not None}
        marks = {mark for turn in turns for mark in (tuple(turn.prompt), turn.mark(elsewhere)) if mark}
        self._marks = sorted((one for one in marks if len(one) > 1 or one[0] not in elsewhere), key=len, reverse=True)
        self._stops = frozenset(stops or renderer.turn_stop_ids())
        self._inner = frozenset(stops & inside)
        self._first = np.asarray(sorted({mark[0] for mark in self._marks}), np.int32)
        self._starts = {int(turn.whole.ids[0]) for turn in turns}

    @property
    def problem(self) -> str | None:
        """Why turns cannot be found in ids, or None."""
        return None if self._marks else "the template writes nothing before an assistant's turn that tells it apart"

    def turns(self, ids: Ids) -> Iterator[ReadTurn]:
        """The assistant's turns in a row."""
        listed = ids.tolist()
        at = 0
        for candidate in np.flatnonzero(np.isin(ids, self._first)).tolist():
            start = self._after_mark(listed, candidate) if candidate >= at else None
            if start is not None:
                stop, ended = self._end(listed, start)
                yield ReadTurn(candidate, start, stop, ended)
                at = stop - 1 if ended else stop  # the token that ends this turn may be the mark of the next one

    def mask(self, ids: Ids, *, cut: bool = False) -> npt.NDArray[np.bool_]:
        """Mark sampled tokens. With `cut`, also marks, and the start of a row that may begin inside a turn."""
        mask = np.zeros(len(ids), np.bool_)
        turns = list(self.turns(ids))
        for turn in turns:
            mask[turn.mark if cut else turn.start : turn.stop] = True
        if cut and len(ids) and int(ids[0]) not in self._starts:
            mask[: turns[0].mark if turns else len(ids)] = True
        return mask

    def is_prompt(self, ids: Ids) -> bool:
        """True if the ids are a generation prompt."""
        return tuple(ids.tolist()) in self._marks

    def _after_mark(self, ids: list[int], at: int) -> int | None:
        """Where sampled tokens begin if there is a mark here; a token that also spells its last white space is one."""
        for mark in self._marks:
            stop = at + len(mark)
            if tuple(ids[at:stop]) == mark:
                return stop
            if len(mark) > 1 and tuple(ids[at : stop - 1]) == mark[:-1] and stop <= len(ids):
                last, actual = (self._vocabulary.token_bytes(index) for index in (mark[-1], ids[stop - 1]))
                if not last.strip() and actual.startswith(last):
                    return stop - 1
        return None

    def _end(self, ids: list[int], start: int) -> tuple[int, bool]:
        for at in range(start, len(ids)):
            goes_on = ids[at] in self._inner and self._after_mark(ids, at + 1) is not None
            if ids[at] in self._stops and not goes_on:
                return at + 1, True
        return len(ids), False


@dataclass(frozen=True, slots=True, eq=False)
class _ProbeTurn:
    """A sampled turn of a small conversation: its tokens but the stop, and the generation prompt at that point."""

    whole: RenderedTokens
    start: int
    body: list[int]
    stop: int | None
    prompt: list[int]

    def elsewhere(self) -> set[int]:
        """Tokens in places where no turn is about to begin."""
        free = np.ones(len(self.whole.ids), np.bool_)
        for turn in self.whole.turns:
            free[max(0, turn.start - len(self.prompt) - _MORE) : turn.start] = False
        return set(self.whole.ids[free].tolist())

    def mark(self, elsewhere: set[int]) -> tuple[int, ...]:
        """What comes before the turn, from where its generation prompt begins or from the last control token on.

        A single token that also occurs elsewhere (``</think>``) is no mark without the scaffold before it.
        """
        before = self.whole.ids[: self.start].tolist()
        near = range(max(0, self.start - len(self.prompt) - _MORE), self.start)
        prompted = [at for at in near if before[at] in self.prompt[:1]]
        control = np.flatnonzero(self.whole.control[: self.start]).tolist()
        first = [self.start, *control[-1:], *prompted[-1:]][-1]
        if self.start - first == 1 and before[first] in elsewhere:
            fields = self.whole.fields
            while first > 0 and fields[first - 1] == "scaffold" and self.start - first < _LONGEST:
                first -= 1
        return tuple(before[first:])


def _probe_turns(renderer: Renderer) -> Iterator[_ProbeTurn]:
    """The turns of the small conversations that the template accepts."""
    renderer = renderer.silent()
    for tools, probe in product((None, [STAND_IN_TOOL]), _PROBES):
        messages = [dict(message) for message in probe]
        try:
            whole = renderer.render(messages, tools=tools)
            for turn in whole.turns:
                asked = renderer.render(messages[: turn.message], tools=tools, add_generation_prompt=True)
                prompt = asked.ids[[field == "generation_prompt" for field in asked.fields]].tolist()
                body = whole.ids[turn.start : turn.stop - (turn.stop_token is not None)].tolist()
                yield _ProbeTurn(whole, turn.start, body, turn.stop_token, prompt)
        except TokentraceError:
            continue
