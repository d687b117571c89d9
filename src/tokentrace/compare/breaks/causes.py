"""The causes of breaks, and what to do about each."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class BreakCause(StrEnum):
    """Why the next prompt is no extension of the stream. The value is its name for people."""

    BOOLEAN_CASE = "boolean or None case"
    BPE_REMERGE = "BPE re-merge"
    JSON_FORMAT = "JSON spacing or key order"
    EMPTY_PARAMETER = "empty or missing parameter"
    STRIPPED_REASONING = "stripped reasoning"
    ZEROED_ANCHOR = "zeroed anchor after truncation"
    REWRITTEN_CALL = "scaffold rewrote the tool call"
    CHANGED_TOOLS = "changed tools"
    CHANGED_SYSTEM = "changed system"
    COMPACTION = "compaction"
    STOP_TOKEN = "another stop token"
    WHITESPACE = "whitespace"
    UNKNOWN = "unknown"


_BRIDGE: Final = "keep the sampled ids and bridge to the next turn; do not render the history again"
_BRANCH: Final = "the model now sees another context: begin a new branch here, or keep the history as it was"

ADVICE: Final[Mapping[BreakCause, str]] = {
    BreakCause.BOOLEAN_CASE: _BRIDGE,
    BreakCause.BPE_REMERGE: _BRIDGE,
    BreakCause.JSON_FORMAT: _BRIDGE,
    BreakCause.EMPTY_PARAMETER: _BRIDGE,
    BreakCause.WHITESPACE: _BRIDGE,
    BreakCause.STOP_TOKEN: _BRIDGE,
    BreakCause.STRIPPED_REASONING: "bridge to the next turn, or render with preserve_all_thinking=True",
    BreakCause.ZEROED_ANCHOR: "keep the ids of a turn that is too long; cut samples when they are made, not the record",
    BreakCause.REWRITTEN_CALL: (
        "the history holds a call the model did not make, which no bridge can mend: switch the repair off in the "
        "scaffold, or begin a new branch here"
    ),
    BreakCause.CHANGED_TOOLS: _BRANCH,
    BreakCause.CHANGED_SYSTEM: _BRANCH,
    BreakCause.COMPACTION: _BRANCH,
    BreakCause.UNKNOWN: "compare the two requests; pass before= and after= to have their messages compared",
}
