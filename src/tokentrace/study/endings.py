"""How an assistant's turns end: which control tokens close them, and at which the model stops.

If a template closes turns with nothing, the model stops by sampling the head of the next turn (GLM), and that token is
the stop. A token after each of several calls ends a call, not the turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

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
    """Closers that also stand inside a turn (Harmony's ``<|end|>``, after reasoning): no reason to stop there."""
    seen: bool = False
    """Whether the end of an answer was seen at all."""

    @property
    def stops(self) -> frozenset[int]:
        """The tokens at which generation has to stop."""
        return (self.closers - self.inner or self.closers) | self.heads


_PROBES: Final[tuple[tuple[Probe, bool], ...]] = (
    (ANSWERED, False),
    (CONTINUED, False),
    (RETURNED, True),
    (CALLED, True),
)


def find_endings(study: TemplateStudy, tools: bool) -> TurnEndings:
    """Look at how the template ends turns: with an answer, with a tool call, last and not last."""
    closers: set[int] = set()
    heads: set[int] = set()
    open_ended = seen = False
    for probe, is_call in _PROBES:
        ending = _ending(study, probe, tools)
        if ending is None:
            continue
        closer, head = ending
        if not is_call:
            seen = True
            if closer is not None:
                closers.add(closer)
            elif head is not None:
                open_ended = True
                heads.add(head)
        elif open_ended:
            if head is not None:
                heads.add(head)
        elif seen and not closers and closer not in study.eos:
            continue  # answers end in text, and so do calls: what stands at their end is a delimiter
        elif closer is not None and (closer in closers | study.eos or not _ends_each_call(study, closer, tools)):
            closers.add(closer)
        elif head is not None:
            heads.add(head)
    inner = closers & _between_fields(study, tools)
    return TurnEndings(frozenset(closers), frozenset(heads), open_ended, frozenset(inner), seen)


def _ending(study: TemplateStudy, probe: Probe, tools: bool) -> tuple[int | None, int | None] | None:
    """The last control token of the assistant's turn after its text, and the token that comes next."""
    rendering = study.readable(probe, tools)
    turns = [turn for turn in turn_spans(rendering) if turn.message == 1 and turn.start < turn.end] if rendering else []
    if rendering is None or not turns:
        return None
    encoded = study.encode(rendering)
    first, stop = encoded.tokens_touching(turns[0].body_end, turns[0].end)
    inside = [int(encoded.ids[at]) for at in range(first, stop) if encoded.control[at]]
    after = int(encoded.ids[stop]) if stop < len(encoded.ids) and encoded.control[stop] else None
    return inside[-1] if inside else None, after


def past_close(study: TemplateStudy) -> str:
    """What the template writes after the words of a past answer, in its turn."""
    for probe in (CONTINUED, ANSWERED):
        rendering = study.probe(probe)
        turns = [turn for turn in turn_spans(rendering) if turn.message == 1] if rendering else []
        if rendering is not None and turns:
            return rendering.text[turns[0].body_end : turns[0].end]
    return ""


def _between_fields(study: TemplateStudy, tools: bool) -> set[int]:
    """Control tokens that stand between an assistant's reasoning and what it says."""
    rendering = study.probe(REASONED, tools)
    if rendering is None:
        return set()
    encoded = study.encode(rendering)
    tokens: set[int] = set()
    for turn in turn_spans(rendering):
        if turn.message == 1 and turn.body < turn.body_end:
            first, stop = encoded.tokens_touching(turn.body, turn.body_end)
            tokens.update(int(encoded.ids[at]) for at in range(first, stop) if encoded.control[at])
    return tokens


def _ends_each_call(study: TemplateStudy, token: int, tools: bool) -> bool:
    rendering = study.readable(CALLED_TWICE, tools)
    return rendering is not None and int((study.encode(rendering).ids == token).sum()) > 1
