"""Where a template rewrites the past, does the bridge append? Tried on every cell that breaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import TokentraceError
from ..rendering.bridged import BridgedTokens
from ..rendering.renderer import Renderer
from .appends import AppendCell, AppendOutcome
from .cases import TOOLS, Append


@dataclass(frozen=True, slots=True)
class Bridging:
    """How many cells break, for how many of them the bridge appends to the sampled ids, and why it refuses others."""

    broken: int
    bridged: int
    refused: tuple[tuple[str, int], ...]


def try_bridge(renderer: Renderer, cells: Iterable[AppendCell]) -> Bridging:
    """Bridge each cell that breaks."""
    broken = [cell for cell in cells if cell.outcome is AppendOutcome.BREAKS and cell.append is not Append.ASSISTANT]
    refusals = Counter(reason for cell in broken if (reason := _refusal(renderer, cell)))
    return Bridging(len(broken), len(broken) - refusals.total(), tuple(refusals.most_common()))


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
