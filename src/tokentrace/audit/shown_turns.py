"""Which tokens of a row may be an assistant's, as its ids show: the witness where a row has nothing but its mask."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from ..data.check.turn_marks import TurnMarks
from ..errors import TokentraceError
from ..rendering.renderer import Renderer
from ..study.probes import SYSTEM, USER
from ..tokens.tokenizer import Ids
from .dumps.calls import Mask


class ShownTurns:
    """The turns of rows that one renderer's template sets off."""

    def __init__(self, marks: TurnMarks, begin: frozenset[int]) -> None:
        self._marks = marks
        self._begin = begin

    @classmethod
    def of(cls, known: Any) -> ShownTurns | None:
        """Those of a renderer; None for a tokenizer alone, and where a template sets no turns off."""
        if not isinstance(known, Renderer):
            return None
        silent, begin = known.silent(), set()
        for messages in ([USER], [SYSTEM, USER]):
            with contextlib.suppress(TokentraceError):
                begin |= set(silent.render_ids(messages)[:1])
        try:
            marks = TurnMarks(silent)
        except TokentraceError:
            return None
        return cls(marks, frozenset(begin)) if begin and marks.problem is None else None

    def mask(self, ids: Ids) -> Mask:
        """True from the mark of each turn to its end. A row that was cut at its beginning may begin inside a turn."""
        mask = np.zeros(len(ids), np.bool_)
        turns = list(self._marks.turns(ids))
        for turn in turns:
            mask[turn.mark : turn.stop] = True
        if len(ids) and int(ids[0]) not in self._begin:
            mask[: turns[0].mark if turns else len(ids)] = True
        return mask
