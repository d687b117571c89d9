"""What tokentrace does where a template does not only append: tried on every cell that breaks, and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ..errors import TokentraceError
from ..rendering.bridged import BridgedTokens
from ..rendering.renderer import Renderer
from .appends import AppendCell, AppendOutcome
from .cases import TOOLS, Append
from .field_texts import Altered
from .verdicts import Grade, Use, Verdict


@dataclass(frozen=True, slots=True)
class Remedies:
    """How many cells break, for how many of them the bridge appends to the sampled ids, and why it refuses others."""

    broken: int
    bridged: int
    refused: tuple[tuple[str, int], ...]


def try_remedies(renderer: Renderer, cells: Iterable[AppendCell]) -> Remedies:
    """Bridge each cell that breaks."""
    broken = [cell for cell in cells if cell.outcome is AppendOutcome.BREAKS and cell.append is not Append.ASSISTANT]
    refusals = Counter(reason for cell in broken if (reason := _refusal(renderer, cell)))
    return Remedies(len(broken), len(broken) - refusals.total(), tuple(refusals.most_common()))


def _refusal(renderer: Renderer, cell: AppendCell) -> str:
    """Bridge a cell and say why that fails; empty if it does not."""
    tools, before = TOOLS if cell.case.tools else None, len(cell.case.past)
    try:
        prompt = renderer.render(cell.messages[:before], tools=tools, add_generation_prompt=True)
        answered = renderer.render(cell.messages[: before + 1], tools=tools)
        turn = next((turn for turn in answered.turns if turn.message == before), None)
        if turn is None:
            return "the template writes no turn"
        sampled = answered.ids[turn.start : turn.stop]
        bridged = renderer.bridge(prompt.ids, sampled, cell.messages[before + 1 :], tools=tools)
    except TokentraceError as error:
        return str(error)
    return "" if isinstance(bridged, BridgedTokens) else str(bridged.reason)


_ALTERED: Final = "texts that the template alters are altered here as well, with a note: fix that line"


def remedy(verdict: Verdict, counts: Remedies, altered: Sequence[Altered] = ()) -> str:
    """Say what tokentrace does for a use."""
    if verdict.grade is Grade.HOLDS:
        return "nothing is needed"
    if verdict.use in (Use.RL_APPEND_ONLY, Use.RL_USER_TURNS):
        return _bridge_words(counts)
    texts = {str(one) for one in altered if not one.dropped}
    if texts and set(verdict.against) <= texts:
        return _ALTERED
    words = _row_words(verdict.use, counts)
    return f"{words}; {_ALTERED}" if texts & set(verdict.against) else words


def _bridge_words(counts: Remedies) -> str:
    if not counts.broken:
        return "the bridge keeps the sampled ids, which rendering again would lose; what is refused is an error"
    why = "; ".join(f"{reason} ({count})" for reason, count in counts.refused)
    refused = f"; it refuses the others: {why}" if why else ""
    return f"the bridge appends to the sampled ids, id for id, in {counts.bridged} of {counts.broken} cases{refused}"


def _row_words(use: Use, counts: Remedies) -> str:
    if use is Use.PRODUCTION_PARITY and counts.broken:
        return 'history="inference" begins a new row where production rewrites; `audit --on FILE` shows where'
    if use is Use.PRODUCTION_PARITY:
        return "nothing is rewritten; a date is best given as a variable of the template, or left out"
    if not counts.broken:
        return 'nothing is rewritten; what is lost or refused here is a warning or an error (lost="error")'
    if use is Use.SFT_PER_TURN:
        return 'a warning names each turn and field (lost="error" refuses them); the mask begins at the prompt\'s end'
    return 'past="expand" writes a row for each turn as inference shows it; past="preserve" keeps reasoning in one row'
