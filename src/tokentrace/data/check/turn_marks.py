"""Turn marks: which tokens of a row an assistant samples, read from the ids alone.

Where a row's conversation is not at hand, the template still says how its turns are set off: small conversations are
rendered once, and what comes before each sampled turn (its mark) and at its end is remembered. In a row, whatever
follows a mark is sampled, up to and including the token that ends the turn.

This is less than a render knows. A mark that a user spells with control tokens counts as one; a turn that begins with
the very tokens that a prompt may end with (an empty block of reasoning) is taken to begin after them; a row that was
cut at its beginning has lost the mark of its first turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np
import numpy.typing as npt

from ...errors import TokentraceError
from ...rendering.rendered import RenderedTokens
from ...rendering.renderer import Renderer
from ...study.probes import ANSWER, STAND_IN_TOOL, SYSTEM, THOUGHT, USER, Probe, call, calling, result
from ...tokens.tokenizer import Ids

_PROBES: Final[tuple[Probe, ...]] = (
    (USER, ANSWER, USER, ANSWER),
    (SYSTEM, USER, ANSWER, USER, ANSWER),
    (USER, THOUGHT, USER, THOUGHT),
    *((USER, calling(call(as_text=as_text)), result(), ANSWER, USER, ANSWER) for as_text in (False, True)),
)
"""Small conversations in which assistants take turns in the circumstances that templates tell apart."""

_MORE: Final = 4
"""By how many tokens the beginning of a turn may be longer than the generation prompt that it goes on from."""

_LONGEST: Final = 5
"""Tokens of the longest mark that is made longer than a generation prompt."""


@dataclass(frozen=True, slots=True)
class ReadTurn:
    """A turn found in a row: its mark from `mark` on, its sampled tokens from `start` to `stop`."""

    mark: int
    start: int
    stop: int
    ended: bool
    """Whether the last of them is a token that ends turns."""


class TurnMarks:
    """What sets the turns of an assistant off, for one renderer."""

    def __init__(self, renderer: Renderer) -> None:
        self._vocabulary = renderer.tokenizer.vocabulary
        seen = list(_sampled_turns(renderer))
        inside = {index for turn in seen for index in turn.body}
        elsewhere = inside.union(*(turn.elsewhere() for turn in seen))
        stops = {turn.stop for turn in seen if turn.stop is not None}
        marks = {mark for turn in seen for mark in (tuple(turn.prompt), turn.mark(elsewhere)) if mark}
        self._marks = sorted((one for one in marks if len(one) > 1 or one[0] not in elsewhere), key=len, reverse=True)
        self._stops = frozenset(stops or renderer.turn_stop_ids())
        self._inner = frozenset(stops & inside)
        self._first = np.asarray(sorted({mark[0] for mark in self._marks}), np.int32)

    @property
    def problem(self) -> str | None:
        """Why turns cannot be found in ids; None where they can."""
        if not self._marks:
            return "the template writes nothing before an assistant's turn that tells it from others"
        return None

    def turns(self, ids: Ids) -> Iterator[ReadTurn]:
        """The assistant's turns among the ids, in order."""
        listed = ids.tolist()
        at = 0
        for candidate in np.flatnonzero(np.isin(ids, self._first)).tolist():
            if candidate < at:
                continue
            start = self._after_mark(listed, candidate)
            if start is None:
                continue
            stop, ended = self._end(listed, start)
            yield ReadTurn(candidate, start, stop, ended)
            at = stop - 1 if ended else stop  # the token that ends this turn may be the mark of the next one

    def mask(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Where a token is sampled, as far as ids tell."""
        mask = np.zeros(len(ids), np.bool_)
        for turn in self.turns(ids):
            mask[turn.start : turn.stop] = True
        return mask

    def is_prompt(self, ids: Ids) -> bool:
        """Whether the ids are a mark and nothing else: a generation prompt."""
        return tuple(ids.tolist()) in self._marks

    def _after_mark(self, ids: list[int], at: int) -> int | None:
        """Where the sampled tokens begin if there is a mark here; a token that also spells the end of it is sampled."""
        for mark in self._marks:
            stop = at + len(mark)
            if tuple(ids[at:stop]) == mark:
                return stop
            if len(mark) > 1 and tuple(ids[at : stop - 1]) == mark[:-1] and stop <= len(ids):
                last, found = (self._vocabulary.token_bytes(index) for index in (mark[-1], ids[stop - 1]))
                if not last.strip() and found.startswith(last):
                    return stop - 1
        return None

    def _end(self, ids: list[int], start: int) -> tuple[int, bool]:
        for at in range(start, len(ids)):
            if ids[at] in self._stops:
                goes_on = ids[at] in self._inner and self._after_mark(ids, at + 1) is not None
                if not goes_on:
                    return at + 1, True
        return len(ids), False


@dataclass(frozen=True, slots=True, eq=False)
class _SampledTurn:
    """A sampled turn of a small conversation."""

    whole: RenderedTokens
    start: int
    body: list[int]
    """Its tokens but the stop."""
    stop: int | None
    prompt: list[int]
    """The generation prompt that the template writes at that point."""

    def elsewhere(self) -> set[int]:
        """Tokens in places where no turn is about to begin."""
        free = np.ones(len(self.whole.ids), np.bool_)
        for turn in self.whole.turns:
            free[max(0, turn.start - len(self.prompt) - _MORE) : turn.start] = False
        return set(self.whole.ids[free].tolist())

    def mark(self, elsewhere: set[int]) -> tuple[int, ...]:
        """What comes before the turn: from where its generation prompt begins, or from the last control token on.

        A single token that may also be elsewhere (``</think>``) is not a mark without the scaffold before it.
        """
        before = self.whole.ids[: self.start].tolist()
        near = range(max(0, self.start - len(self.prompt) - _MORE), self.start)
        begun = [at for at in near if before[at] in self.prompt[:1]]
        control = np.flatnonzero(self.whole.control[: self.start]).tolist()
        first = [self.start, *control[-1:], *begun[-1:]][-1]
        if self.start - first == 1 and before[first] in elsewhere:
            fields = self.whole.fields
            while first > 0 and fields[first - 1] == "scaffold" and self.start - first < _LONGEST:
                first -= 1
        return tuple(before[first:])


def _sampled_turns(renderer: Renderer) -> Iterator[_SampledTurn]:
    """The turns of the small conversations that the template takes."""
    renderer = renderer.silent()
    for tools, probe in product((None, [STAND_IN_TOOL]), _PROBES):
        messages = [dict(message) for message in probe]
        try:
            whole = renderer.render(messages, tools=tools)
        except TokentraceError:
            continue
        for turn in whole.turns:
            try:
                asked = renderer.render(messages[: turn.message], tools=tools, add_generation_prompt=True)
            except TokentraceError:
                continue
            prompt = asked.ids[[field == "generation_prompt" for field in asked.fields]].tolist()
            body = whole.ids[turn.start : turn.stop - (turn.stop_token is not None)].tolist()
            yield _SampledTurn(whole, turn.start, body, turn.stop_token, prompt)
