"""How an assistant's turns end: which control tokens close them, and at which the model stops.

If a template closes turns with nothing, the model stops by sampling the head of the next turn (GLM), and that token is
the stop. A token after each of several calls ends a call, not the turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..tokens.encoded import Encoded
from .probes import ANSWERED, CALLED, CALLED_TWICE, CONTINUED, REASONED, RETURNED, Probe
from .turns import turn_spans

if TYPE_CHECKING:
    from .study import TemplateStudy


@dataclass(frozen=True, slots=True)
class TurnEndings:
    """How turns end, as probes show."""

    closers: frozenset[int] = frozenset()
    """Control tokens that end an assistant's turn."""
    heads: frozenset[int] = frozenset()
    """Control tokens that begin the next turn and are sampled as the stop of the one before."""
    open_ended: bool = False
    """Nothing closes a turn: the head of the next one does."""
    inner: frozenset[int] = frozenset()
    """Closers that are also inside a turn (Harmony's ``<|end|>``): do not stop."""
    seen: bool = False
    """True if the end of an answer was seen at all."""

    @property
    def stops(self) -> frozenset[int]:
        """The tokens at which generation has to stop."""
        return (self.closers - self.inner or self.closers) | self.heads


def find_endings(study: TemplateStudy, tools: bool) -> TurnEndings:
    """How the template ends turns: answers and calls, last and not last."""
    closers: set[int] = set()
    heads: set[int] = set()
    open_ended = seen = False
    for probe in (ANSWERED, CONTINUED, RETURNED, CALLED):
        ending = _ending(study, probe, tools)
        if ending is None:
            continue
        closer, head = ending
        if probe in (ANSWERED, CONTINUED):
            seen = True
            open_ended |= closer is None and head is not None
        elif open_ended:
            closer = None
        elif seen and not closers and closer not in study.eos:
            continue  # answers end in text, and so do calls: what is at their end is a delimiter
        elif closer is not None and closer not in closers | study.eos and _ends_each_call(study, closer, tools):
            closer = None
        if closer is not None:
            closers.add(closer)
        elif head is not None:
            heads.add(head)
    rendering = study.probe(REASONED, tools)
    between = {
        token
        for turn in (turn_spans(rendering) if rendering is not None else ())
        if rendering is not None and turn.message == 1 and turn.body < turn.body_end
        for token in _control_tokens(study.encode(rendering), turn.body, turn.body_end)
    }
    return TurnEndings(frozenset(closers), frozenset(heads), open_ended, frozenset(closers & between), seen)


def _ending(study: TemplateStudy, probe: Probe, tools: bool) -> tuple[int | None, int | None] | None:
    """The last control token after the turn's text, and the next after the turn."""
    rendering = study.readable(probe, tools)
    turns = [turn for turn in turn_spans(rendering) if turn.message == 1 and turn.start < turn.end] if rendering else []
    if rendering is None or not turns:
        return None
    encoded = study.encode(rendering)
    inside = _control_tokens(encoded, turns[0].body_end, turns[0].end)
    stop = encoded.tokens_touching(turns[0].body_end, turns[0].end)[1]
    after = int(encoded.ids[stop]) if stop < len(encoded.ids) and encoded.control[stop] else None
    return inside[-1] if inside else None, after


def _control_tokens(encoded: Encoded, start: int, end: int) -> list[int]:
    """The control tokens that touch a stretch of text."""
    first, stop = encoded.tokens_touching(start, end)
    return [int(encoded.ids[at]) for at in range(first, stop) if encoded.control[at]]


def past_close(study: TemplateStudy) -> str:
    """What the template writes after the words of a past answer, in its turn."""
    for probe in (CONTINUED, ANSWERED):
        rendering = study.probe(probe)
        turns = [turn for turn in turn_spans(rendering) if turn.message == 1] if rendering else []
        if rendering is not None and turns:
            return rendering.text[turns[0].body_end : turns[0].end]
    return ""


def _ends_each_call(study: TemplateStudy, token: int, tools: bool) -> bool:
    rendering = study.readable(CALLED_TWICE, tools)
    return rendering is not None and int((study.encode(rendering).ids == token).sum()) > 1
