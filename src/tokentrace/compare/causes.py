"""Why two sequences of ids differ: every cause, under one name, and what to do about those that break a stream."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class Cause(StrEnum):
    """Why ids differ. The value is its name for people.

    The first are the causes of breaks (`explain_break`); checks of datasets find them too, and those that follow.
    """

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

    BOS_DOUBLED = "BOS token doubled"
    BOS_ADDED = "BOS token added"
    BOS_MISSING = "BOS token missing"
    SYSTEM_ADDED = "system prompt added that the conversation does not have"
    SYSTEM_MISSING = "the template's default system prompt missing"
    REASONING_KEPT = "reasoning kept that the template leaves out"
    GENERATION_PROMPT = "generation prompt at the end"
    LAST_WHITESPACE = "white space at the end added or missing"
    END_ADDED = "end token added"
    END_MISSING = "end token missing"
    TOOLS_MISSING = "tools missing"
    CONTROL_AS_TEXT = "control token spelled as text"
    TEXT_AS_CONTROL = "text turned into a control token"
    OTHER_CALL = "another tool call"
    CUT = "cut"
    NO_TOKEN = "an id that the vocabulary does not have"
    MASK_SHIFTED = "mask shifted by one"


_OTHER_TOKENIZER: Final = (
    "the ids were made by another tokenizer, or by another setting of it: compare who encoded each prompt"
)
_BRIDGE: Final = "keep the sampled ids and bridge to the next turn; do not render the history again"
_BRANCH: Final = "the model now sees another context: begin a new branch here, or keep the history as it was"

ADVICE: Final[Mapping[Cause, str]] = {
    Cause.BOOLEAN_CASE: _BRIDGE,
    Cause.BPE_REMERGE: _BRIDGE,
    Cause.JSON_FORMAT: _BRIDGE,
    Cause.EMPTY_PARAMETER: _BRIDGE,
    Cause.WHITESPACE: _BRIDGE,
    Cause.STOP_TOKEN: _BRIDGE,
    Cause.STRIPPED_REASONING: "bridge to the next turn, or render with preserve_all_thinking=True",
    Cause.ZEROED_ANCHOR: "keep the ids of a turn that is too long; cut samples when they are made, not the record",
    Cause.REWRITTEN_CALL: (
        "the history holds a call the model did not make, which no bridge can mend: switch the repair off in the "
        "scaffold, or begin a new branch here"
    ),
    Cause.CHANGED_TOOLS: _BRANCH,
    Cause.CHANGED_SYSTEM: _BRANCH,
    Cause.COMPACTION: _BRANCH,
    Cause.NO_TOKEN: _OTHER_TOKENIZER,
    Cause.BOS_MISSING: _OTHER_TOKENIZER,
    Cause.BOS_ADDED: _OTHER_TOKENIZER,
    Cause.UNKNOWN: "compare the two requests; given their messages (in Python before= and after=), these are compared",
}
"""What to do about a break."""
