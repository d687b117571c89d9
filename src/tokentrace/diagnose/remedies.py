"""What tokentrace does where a template does not only append: tried on every cell that breaks, and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ..errors import TokentraceError
from ..rendering.bridged import BridgedTokens
from ..rendering.past import Past
from ..rendering.renderer import Renderer
from .appends import AppendCell, AppendOutcome
from .cases import TOOLS, Append
from .field_texts import Altered
from .verdicts import Grade, Use, Verdict


@dataclass(frozen=True, slots=True)
class Remedies:
    """Of the cells that break: how many there are, and what each way of tokentrace makes of them."""

    broken: int
    bridged: int
    """The bridge appends to the sampled ids."""
    refused: tuple[tuple[str, int], ...]
    """Why it does not, and how often."""
    preserved: int
    """One row with ``past="preserve"`` begins with the stream."""
    patched: int
    """One row with ``use_patched=True`` does."""


def try_remedies(renderer: Renderer, cells: Iterable[AppendCell]) -> Remedies:
    """Bridge each cell that breaks, and render it with the settings that keep history."""
    silent = renderer.silent()
    patched = silent.with_past(Past.PATCHED)
    broken = [cell for cell in cells if cell.outcome is AppendOutcome.BREAKS and cell.append is not Append.ASSISTANT]
    reasons: Counter[str] = Counter()
    counts = Counter[str]()
    for cell in broken:
        tools = TOOLS if cell.case.tools else None
        before = len(cell.case.past)
        try:
            prompt = silent.render(cell.messages[:before], tools=tools, add_generation_prompt=True)
            turned = silent.render(cell.messages[: before + 1], tools=tools)
        except TokentraceError as error:
            reasons[str(error)] += 1
            continue
        turn = next((turn for turn in turned.turns if turn.message == before), None)
        if turn is None:
            reasons["the template writes no turn"] += 1
            continue
        sampled = turned.ids[turn.start : turn.stop]
        try:
            bridged = silent.bridge(prompt.ids, sampled, cell.messages[before + 1 :], tools=tools)
        except TokentraceError as error:
            reasons[str(error)] += 1
        else:
            if isinstance(bridged, BridgedTokens):
                counts["bridged"] += 1
            else:
                reasons[str(bridged.reason)] += 1
        text = turned.text[: len(turned.decode(slice(0, turn.stop)))]
        counts["preserved"] += _begins(silent.with_past(Past.PRESERVE), cell, tools, text)
        counts["patched"] += _begins(patched, cell, tools, text)
    refused = tuple(reasons.most_common())
    return Remedies(len(broken), counts["bridged"], refused, counts["preserved"], counts["patched"])


def _begins(renderer: Renderer, cell: AppendCell, tools: Sequence[object] | None, text: str) -> bool:
    try:
        return renderer.render_text(cell.messages, tools=tools).text.startswith(text)
    except TokentraceError:
        return False


_ALTERED: Final = "texts that the template alters are altered here as well, with a note: fix that line"


def remedy(verdict: Verdict, all_broken: Remedies, altered: Sequence[Altered] = ()) -> str:
    """What tokentrace does for a use, in words."""
    if verdict.grade is Grade.HOLDS:
        return "nothing is needed"
    if verdict.use in (Use.RL_APPEND_ONLY, Use.RL_USER_TURNS):
        return _remedy(verdict, all_broken)
    written = [str(one) for one in altered if not one.dropped]
    if not any(one in verdict.against for one in written):
        return _remedy(verdict, all_broken)
    return _ALTERED if set(verdict.against) <= set(written) else f"{_remedy(verdict, all_broken)}; {_ALTERED}"


def _remedy(verdict: Verdict, all_broken: Remedies) -> str:
    n = all_broken.broken
    if not n and verdict.use in (Use.RL_APPEND_ONLY, Use.RL_USER_TURNS):
        return (
            "the bridge keeps the sampled ids, with what rendering them again would lose; what is refused is an error"
        )
    if not n and verdict.use is not Use.PRODUCTION_PARITY:
        return 'nothing is rewritten; what is lost or refused here is a warning or an error (lost="error")'
    match verdict.use:
        case Use.SFT_ONE_ROW:
            return (
                'past="expand" writes a row for each turn as inference shows it; in one row, past="preserve" keeps '
                f"what breaks in {all_broken.preserved} of {n} cases, use_patched=True in {all_broken.patched} of {n}"
            )
        case Use.SFT_PER_TURN:
            return (
                'a warning names each turn and field (lost="error" refuses them); the mask begins at the prompt\'s end'
            )
        case Use.PRODUCTION_PARITY:
            if not n:
                return "nothing is rewritten; a date is best given as a variable of the template, or left out"
            return 'history="inference" begins a new row where production rewrites; `audit --on FILE` shows where'
        case _:
            why = "; ".join(f"{reason} ({count})" for reason, count in all_broken.refused)
            rest = f"; it refuses the others: {why}" if why else ""
            return f"the bridge appends to the sampled ids, id for id, in {all_broken.bridged} of {n} cases{rest}"
