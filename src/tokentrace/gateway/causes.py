"""Why a request does not go on from the turn before it. Pure: two conversations in, a cause out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import StrEnum
from typing import Any, Final

Messages = Sequence[Mapping[str, Any]]


class BranchCause(StrEnum):
    """What an agent did to the history. The first that fits is the cause."""

    SUB_AGENT = "sub_agent"
    """Another conversation altogether: its first messages are not those of any recorded one."""
    CHANGED_TOOLS = "changed_tools"
    """The same messages, with other tools or template variables."""
    CHANGED_SYSTEM = "changed_system"
    """Another system prompt before the same conversation."""
    NONCE = "nonce"
    """A number, a date or an id in an earlier message changed, and nothing else did."""
    RETRY = "retry"
    """The same request again, or one that goes back to an earlier point: another reply is sampled."""
    COMPACTION = "compaction"
    """Messages were replaced by fewer others, a summary perhaps."""
    TRIMMED_RESULTS = "trimmed_results"
    """An earlier tool result was shortened or blanked."""
    REPAIRED_CALL = "repaired_call"
    """The agent wrote a call of the model's anew: another name or other arguments."""
    CALLS_AS_TEXT = "calls_as_text"
    """Calls of the model's were put into words."""
    EDIT = "edit"
    """An earlier message says something else."""
    TEMPLATE = "template"
    """The conversation goes on, but the template would rewrite what was sampled; the bridge's refusal says how."""
    AMBIGUOUS = "ambiguous"
    """Several recorded turns fit the echo and differ in their tokens. None of them is guessed."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a branch began, in words for people."""

    cause: BranchCause
    message: int | None
    """The first message of the request that differs; None where all are the same."""
    detail: str


_CHANGING: Final = re.compile(r"[0-9]")
"""What a nonce, a date and an id have in common."""
_ALIKE: Final = 0.5


def find_cause(sent: Messages, recorded: Messages, shared: int) -> Cause:
    """Why `sent` leaves the `recorded` conversation after the first `shared` messages, which mean the same."""
    if shared == len(sent):
        return Cause(BranchCause.RETRY, None, "the same messages were sent again: another reply is sampled")
    if shared == len(recorded):  # the caller goes on from there; nothing was rewritten
        return Cause(BranchCause.RETRY, shared, "the conversation goes on from an earlier point")
    new, old = sent[shared], recorded[shared]
    where = f"message {shared} ({new.get('role')})"
    if shared == 0 and not _goes_on_alike(sent, recorded, 1) and not _similar(_text(new), _text(old)):
        return Cause(BranchCause.SUB_AGENT, 0, "its first message is not that of any recorded conversation")
    if _text(new) != _text(old) and _is_nonce(_text(new), _text(old)) and new.get("role") == old.get("role"):
        return Cause(BranchCause.NONCE, shared, f"{where}: only a number, a date or an id in it changed")
    if new.get("role") == old.get("role") in ("system", "developer"):
        return Cause(BranchCause.CHANGED_SYSTEM, shared, f"{where}: the instructions are others")
    if new.get("role") == old.get("role") == "tool" and len(_text(new)) < len(_text(old)):
        lengths = f"{len(_text(old))} characters became {len(_text(new))}"
        return Cause(BranchCause.TRIMMED_RESULTS, shared, f"{where}: the result was shortened, {lengths}")
    if old.get("role") == "assistant" and old.get("tool_calls"):
        names = [str((call.get("function") or call).get("name")) for call in old["tool_calls"]]
        if new.get("role") == "assistant" and new.get("tool_calls"):
            return Cause(BranchCause.REPAIRED_CALL, shared, f"{where}: the calls are not those that the model wrote")
        if any(name in _text(message) for name in names for message in sent[shared : shared + 2]):
            return Cause(BranchCause.CALLS_AS_TEXT, shared, f"{where}: calls of the model's are words now")
    if len(sent) < len(recorded) and not _goes_on_alike(sent, recorded, shared + 1):
        left = len(recorded) - shared
        return Cause(
            BranchCause.COMPACTION, shared, f"{where}: {left} messages were replaced by {len(sent) - shared} others"
        )
    return Cause(BranchCause.EDIT, shared, f"{where}: it says something else than before")


def _goes_on_alike(sent: Messages, recorded: Messages, start: int) -> bool:
    """Whether the message after a difference is the same in both, at the same place."""
    return start < min(len(sent), len(recorded)) and _text(sent[start]) == _text(recorded[start])


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str) or not content:
        return content or ""
    return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))


def _similar(one: str, other: str) -> bool:
    """Whether two texts share most of their words; long ones are judged by their beginnings and ends."""
    return SequenceMatcher(None, _ends(one).split(), _ends(other).split(), autojunk=False).ratio() >= _ALIKE


def _ends(text: str, most: int = 4000) -> str:
    return text if len(text) <= most else text[: most // 2] + text[-most // 2 :]


def _is_nonce(one: str, other: str) -> bool:
    """Whether texts differ in a few words only, all of which have a digit in them."""
    ours, theirs = one.split(), other.split()
    if len(ours) != len(theirs):
        return False
    changed = [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]]
    telling = [_CHANGING.search(word) for pair in changed for word in pair]
    return 0 < len(changed) <= max(1, len(ours) // 10) and all(telling)
