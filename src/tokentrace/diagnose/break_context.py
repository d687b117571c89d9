"""Evidence in the context around completions: turns that are gone, declared tools, system text.

Text alone suggests these; where the conversations of the two requests are known, `compared` proves or disproves them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from ..tokens.alignment import Hunk
from ..tokens.ids import common_prefix
from ..tokens.tokenizer import Ids
from .break_case import Case, Evidence, counted
from .break_markup import TOOL_SECTIONS
from .break_spelling import openers, value_at, value_of
from .finding import Cause
from .resync import up_to_shared_end
from .texts import quoted, text_of

_AFTER_FIRST: Final = 8
"""Tokens after the first that show that it alone is missing."""


def no_token(case: Case) -> Evidence | None:
    """An id that no token has."""
    size = case.vocabulary.size
    for name, ids in zip(("stream", "next prompt"), case.hunk.sides(case.stream, case.prompt), strict=True):
        outside = ids[ids >= size]
        if len(outside):
            return Evidence(Cause.NO_TOKEN, f"the {name} has id {int(outside[0])}, and the vocabulary {size:,} tokens")
    return None


def first_token(case: Case) -> Evidence | None:
    """The control token that a text begins with, there in one of the two alone: all else is the same for a while."""
    stream, prompt = case.stream, case.prompt
    if case.hunk.start > 1 or case.hunk.other_start > 1 or min(len(stream), len(prompt)) < 2:  # 1: it is doubled
        return None
    control = {token.id for token in case.vocabulary.control.values()}
    for cause, one, other in ((Cause.BOS_MISSING, stream, prompt), (Cause.BOS_ADDED, prompt, stream)):
        same = common_prefix(one[1:], other)
        if int(one[0]) in control and same >= min(len(one) - 1, len(other), _AFTER_FIRST):
            text = quoted(text_of(case.vocabulary, one[:1]))
            has = "the stream begins with" if cause is Cause.BOS_MISSING else "the next prompt begins with"
            return Evidence(cause, f"{has} {text} where the other does not; the tokens after it are the same")
    return None


def compaction(case: Case) -> Evidence | None:
    """Turns that are gone: up to a later turn, up to what the stream ends with, or in this difference."""
    stream, prompt, hunk = case.stream, case.prompt, case.hunk
    whole = up_to_shared_end(stream, prompt, hunk.start) if hunk.start == hunk.other_start else None
    skipped = case.turns.skipped(stream, prompt, hunk)
    found = _fewer_turns(case, skipped, 1) or _fewer_turns(case, whole, 1) or _fewer_turns(case, hunk, 2)
    if found is not None:
        return found
    ours, theirs = hunk.sides(stream, prompt)
    region = case.region
    outside = region is not None and region.completion is None and not region.first_prompt
    meets = hunk.stop < len(stream)
    if outside and meets and not case.turns.count(ours) and len(ours) >= max(64, 4 * len(theirs)):
        role = case.turns.role(stream, hunk.start) or "context"
        return Evidence(Cause.COMPACTION, f"{_sizes(ours, theirs)}: text of the {role} was cut or cleared")
    return None


def cut_short(case: Case) -> Evidence | None:
    """A prompt that is much shorter from here on, whatever little it has in common with the rest of the stream."""
    return _fewer_turns(case, Hunk(case.hunk.start, len(case.stream), case.hunk.other_start, len(case.prompt)), 2)


def _fewer_turns(case: Case, hunk: Hunk | None, least: int) -> Evidence | None:
    if hunk is None:
        return None
    ours, theirs = hunk.sides(case.stream, case.prompt)
    turns = case.turns.count(ours)
    if turns < least or turns <= case.turns.count(theirs) or len(ours) < 2 * len(theirs):
        return None
    if turns == 1 and case.turns.role(case.stream, hunk.start) in ("system", "developer"):
        return None  # only that message is gone
    why = "messages are missing, or something shorter is in their place"
    return Evidence(Cause.COMPACTION, f"{_sizes(ours, theirs)}: {why}", hunk)


def _sizes(ours: Ids, theirs: Ids) -> str:
    left = counted(len(theirs)) if len(theirs) else "nothing"
    return f"{counted(len(ours))} of history are {left} in the next prompt"


def changed_tools(case: Case) -> Evidence | None:
    """Other tools, or none, where a template declares them."""
    if case.in_completion:
        return None
    ours, theirs = case.hunk_texts()
    differ = f"the declared tools differ: the stream has {quoted(ours)}, the next prompt {quoted(theirs)}"
    if _in_schema(case):
        return Evidence(Cause.CHANGED_TOOLS, differ)
    if not {"system", "developer", None} & set(case.roles()):  # anybody may write of tools
        return None
    turn = case.turns.lead(case.stream, case.hunk.start)
    for opening, closing in TOOL_SECTIONS:
        begun = turn.rfind(opening)
        if begun >= 0 and closing not in turn[begun:]:
            return Evidence(Cause.CHANGED_TOOLS, differ)
        if (opening in ours) != (opening in theirs):
            if opening in case.text.stream and opening in case.text.prompt:
                moved = "the template declares the tools at another place in the next prompt"
                return Evidence(Cause.UNKNOWN, f"{moved}: {quoted(ours)} where the next prompt has {quoted(theirs)}")
            one, other = ("stream", "next prompt") if opening in ours else ("next prompt", "stream")
            return Evidence(Cause.CHANGED_TOOLS, f"the {one} declares tools here, the {other} does not")
    return None


def _in_schema(case: Case) -> bool:
    """Whether the difference lies in the JSON of a function's declaration."""
    ours, theirs, at = case.sides()
    for text in (ours, theirs):
        for start in openers(text, at):
            value = value_at(text, start)
            if value is not None and value[1] > at and isinstance(value[0], dict):
                function = _function(value[0])
                if "name" in function and ("parameters" in function or "description" in function):
                    return True
    return False


def changed_system(case: Case) -> Evidence | None:
    """A difference in text of the system or the developer."""
    if case.in_completion:
        return None
    one, other = case.roles()
    if one is None and other is None and case.turns.before_user(case.stream, case.hunk.start):
        one = other = "system"
    if not {"system", "developer"} & {one, other}:
        return None
    if None in (one, other):
        ours, theirs = case.hunk_texts()
        said = f"the stream has {quoted(ours)}, the next prompt {quoted(theirs)}, beside text of the {one or other}"
        return Evidence(Cause.CHANGED_SYSTEM, said)
    if one != other:
        said = f"the stream has a {one} message where the next prompt has a {other} message"
        return Evidence(Cause.CHANGED_SYSTEM, said)
    ours, theirs = case.hunk_texts()
    said = f"the {one} text differs: the stream has {quoted(ours)}, the next prompt {quoted(theirs)}"
    return Evidence(Cause.CHANGED_SYSTEM, said)


# -- the conversations of the two requests

_GUESSED: Final = frozenset(
    {
        Cause.CHANGED_TOOLS,
        Cause.CHANGED_SYSTEM,
        Cause.COMPACTION,
        Cause.REWRITTEN_CALL,
        Cause.EMPTY_PARAMETER,
        Cause.UNKNOWN,
    }
)
"""Causes that comparing the conversations can prove or disprove."""


def compared(case: Case, found: Evidence) -> Evidence:
    """What the text shows, proven or disproven by the two conversations where they are known."""
    if found.cause not in _GUESSED or case.before is None or case.after is None:
        return found
    first, second = _mappings(case.before.get("messages")), _mappings(case.after.get("messages"))
    early = case.region is None or case.region.first_prompt
    shown = found.cause in (Cause.REWRITTEN_CALL, Cause.EMPTY_PARAMETER)
    tools = _tool_changes(case.before.get("tools"), case.after.get("tools"))
    if tools and not shown and (early or found.cause is Cause.CHANGED_TOOLS):
        return replace(found, cause=Cause.CHANGED_TOOLS, detail=tools)
    systems = [[row for row in rows if row.get("role") in ("system", "developer")] for rows in (first, second)]
    if not _equal(*systems) and not shown and (early or found.cause is Cause.CHANGED_SYSTEM):
        said = f"the system messages of the two requests differ: {found.detail}"
        return replace(found, cause=Cause.CHANGED_SYSTEM, detail=said)
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
        return replace(found, cause=Cause.COMPACTION, detail=said)
    one, other = first[at], second[at]
    if not _equal(_calls(one), _calls(other)):
        said = f"message {at} has other tool calls than it had: {found.detail}"
        return replace(found, cause=Cause.REWRITTEN_CALL, detail=said)
    if found.cause in (Cause.CHANGED_TOOLS, Cause.CHANGED_SYSTEM):
        return _disproven(found)
    if found.cause is Cause.UNKNOWN:
        return replace(found, detail=f"message {at} ({one.get('role')}) is not what it was: {found.detail}")
    return found


_SAME: Final = {
    Cause.CHANGED_TOOLS: "the tools of both requests are the same, but the template wrote them another way",
    Cause.COMPACTION: "the next request has all messages of the one before, but the prompt is shorter",
}


def _disproven(found: Evidence) -> Evidence:
    if found.cause is Cause.CHANGED_SYSTEM:
        note = "though the system messages are the same: the template, or a variable of it such as the date, changed"
        return replace(found, detail=f"{found.detail}, {note}")
    if found.cause in _SAME:
        return Evidence(Cause.UNKNOWN, f"{_SAME[found.cause]}: {found.detail}", found.hunk)
    return found


def _tool_changes(before: Any, after: Any) -> str | None:
    """What became of the tools; None where they are the same."""
    first, second = _mappings(before), _mappings(after)
    if _equal(first, second):
        return None
    was, now = ({str(_function(row).get("name")): row for row in rows} for rows in (first, second))
    said = [f"`{name}` was added" for name in now if name not in was]
    said += [f"`{name}` was removed" for name in was if name not in now]
    said += [f"`{name}` changed" for name in was if name in now and not _equal(was[name], now[name])]
    return "the tools of the two requests differ: " + (", ".join(said) or "their order changed")


def _calls(message: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Names and arguments of a message's calls; arguments as values, be they written as a string or not."""
    calls = [_function(row) for row in _mappings(message.get("tool_calls"))]
    return [(call.get("name"), value_of(call.get("arguments"))) for call in calls]


def _function(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a tool or a call says of its function, be it below ``function`` or not."""
    function = row.get("function")
    return function if isinstance(function, Mapping) else row


def _mappings(rows: Any) -> list[Mapping[str, Any]]:
    if not isinstance(rows, Iterable) or isinstance(rows, (str, bytes, Mapping)):
        return []
    return [row for row in rows if isinstance(row, Mapping)]


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # whatever a caller's own types do when compared
        return False
