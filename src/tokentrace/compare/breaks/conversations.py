"""What the two requests say: the messages and tools themselves, held against what their text shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from .case import Case, Finding
from .causes import BreakCause
from .written import function_of, value_of

_GUESSED: Final = frozenset(
    {
        BreakCause.CHANGED_TOOLS,
        BreakCause.CHANGED_SYSTEM,
        BreakCause.COMPACTION,
        BreakCause.REWRITTEN_CALL,
        BreakCause.EMPTY_PARAMETER,
        BreakCause.UNKNOWN,
    }
)
"""Causes that comparing the conversations can prove or disprove."""


def compared(case: Case, found: Finding) -> Finding:
    """What the text shows, proven or disproven by the two conversations where they are known."""
    if found.cause not in _GUESSED or case.before is None or case.after is None:
        return found
    first, second = _mappings(case.before.get("messages")), _mappings(case.after.get("messages"))
    early = case.region is None or case.region.first_prompt
    shown = found.cause in (BreakCause.REWRITTEN_CALL, BreakCause.EMPTY_PARAMETER)
    tools = _changed_tools(case.before.get("tools"), case.after.get("tools"))
    if tools and not shown and (early or found.cause is BreakCause.CHANGED_TOOLS):
        return replace(found, cause=BreakCause.CHANGED_TOOLS, detail=tools)
    systems = [[row for row in rows if row.get("role") in ("system", "developer")] for rows in (first, second)]
    if not _equal(*systems) and not shown and (early or found.cause is BreakCause.CHANGED_SYSTEM):
        said = f"the system messages of the two requests differ: {found.detail}"
        return replace(found, cause=BreakCause.CHANGED_SYSTEM, detail=said)
    differs = next((n for n, rows in enumerate(zip(first, second, strict=False)) if not _equal(*rows)), None)
    if differs is None and len(second) >= len(first):
        return _disproven(found)
    at = len(second) if differs is None else differs
    gone = len(first) - len(second)
    ahead = next((n for n in range(at + 1, len(first)) if at < len(second) and _equal(first[n], second[at])), None)
    if ahead is not None or gone > 0:
        count = ahead - at if ahead is not None else gone
        missing = "a message is missing" if count == 1 else f"{count} messages are missing"
        said = f"{missing} from message {at} on: the history was cut or summarised"
        return replace(found, cause=BreakCause.COMPACTION, detail=said)
    one, other = first[at], second[at]
    if not _equal(_calls(one), _calls(other)):
        said = f"message {at} has other tool calls than it had: {found.detail}"
        return replace(found, cause=BreakCause.REWRITTEN_CALL, detail=said)
    if found.cause in (BreakCause.CHANGED_TOOLS, BreakCause.CHANGED_SYSTEM):
        return _disproven(found)
    if found.cause is BreakCause.UNKNOWN:
        return replace(found, detail=f"message {at} ({one.get('role')}) is not what it was: {found.detail}")
    return found


_SAME: Final = {
    BreakCause.CHANGED_TOOLS: "the tools of both requests are the same, but the template wrote them another way",
    BreakCause.COMPACTION: "the next request has all messages of the one before, but the prompt is shorter",
}


def _disproven(found: Finding) -> Finding:
    if found.cause is BreakCause.CHANGED_SYSTEM:
        note = "though the system messages are the same: the template, or a variable of it such as the date, changed"
        return replace(found, detail=f"{found.detail}, {note}")
    if found.cause in _SAME:
        return Finding(BreakCause.UNKNOWN, f"{_SAME[found.cause]}: {found.detail}", found.hunk)
    return found


def _changed_tools(before: Any, after: Any) -> str | None:
    """What became of the tools; None where they are the same."""
    first, second = _mappings(before), _mappings(after)
    if _equal(first, second):
        return None
    was, now = ({str(function_of(row).get("name")): row for row in rows} for rows in (first, second))
    said = [f"`{name}` was added" for name in now if name not in was]
    said += [f"`{name}` was removed" for name in was if name not in now]
    said += [f"`{name}` changed" for name in was if name in now and not _equal(was[name], now[name])]
    return "the tools of the two requests differ: " + (", ".join(said) or "their order changed")


def _calls(message: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Names and arguments of a message's calls; arguments as values, be they written as a string or not."""
    calls = [function_of(row) for row in _mappings(message.get("tool_calls"))]
    return [(call.get("name"), value_of(call.get("arguments"))) for call in calls]


def _mappings(rows: Any) -> list[Mapping[str, Any]]:
    if not isinstance(rows, Iterable) or isinstance(rows, (str, bytes, Mapping)):
        return []
    return [row for row in rows if isinstance(row, Mapping)]


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # whatever a caller's own types do when compared
        return False
