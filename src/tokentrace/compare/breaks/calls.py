"""Evidence that a tool call is another one: its name, its arguments, or that it is gone."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Final

from .case import Case, Finding, quoted
from .causes import BreakCause
from .written import WrittenCall, same_value, written_call

_EMPTY: Final = ("", "null", "None", "{}", "[]")


def changed_call(case: Case) -> Finding | None:
    """A call around the difference that is whole on both sides, and not the same."""
    ours, theirs, at = case.sides()
    start, opening, closing = max((ours.rfind(opening, 0, at), opening, closing) for opening, closing in case.call_tags)
    if start < 0 or ours.find(closing, start, at) >= 0 or (case.region is not None and case.region.first_prompt):
        return None
    one, other = (written_call(text, start, opening, closing) for text in (ours, theirs))
    if one is None or other is None:
        return None
    found = _compared(one, other)
    return found and replace(found, until=ours.find(closing, start + len(opening)) + len(closing))


def lost_call(case: Case) -> Finding | None:
    """A call of the stream that the next prompt has not."""
    if case.in_completion is False:
        return None
    ours, theirs = case.hunk_texts()
    for opening, closing in case.call_tags:
        start = ours.find(opening)
        if start >= 0 and opening not in theirs and closing not in theirs:
            call = written_call(ours, start, opening, closing)
            if call is not None:
                said = f"the model called `{call.name}`, and the next prompt has no such call"
                return Finding(BreakCause.REWRITTEN_CALL, said)
    return None


def _compared(one: WrittenCall, other: WrittenCall) -> Finding | None:
    if one.name != other.name:
        said = f"the model called `{one.name}`, the next prompt has a call of `{other.name}`"
        return Finding(BreakCause.REWRITTEN_CALL, said)
    for key, value in one.arguments.items():
        if key in other.arguments and not same_value(value, other.arguments[key]):
            return _changed(f"argument `{key}` of `{one.name}`", value, other.arguments[key])
    for some, others, has, lacks in ((one, other, "stream", "next prompt"), (other, one, "next prompt", "stream")):
        for key, value in some.arguments.items():
            if key not in others.arguments:
                empty = "empty " if _spelled(value).strip() in _EMPTY else ""
                said = f"the {has} gives `{one.name}` the {empty}argument `{key}`, the {lacks} does not"
                return Finding(BreakCause.EMPTY_PARAMETER, said)
    if one.stray != other.stray:
        has = "stream" if one.stray > other.stray else "next prompt"
        said = f"only the {has} has a closing tag in the call of `{one.name}` that closes no parameter"
        return Finding(BreakCause.EMPTY_PARAMETER, said)
    if one.declared != other.declared:
        has = "stream" if one.declared else "next prompt"
        return Finding(BreakCause.EMPTY_PARAMETER, f"only the {has} writes out that `{one.name}` takes no arguments")
    if list(one.arguments) != list(other.arguments):
        said = f"the arguments of `{one.name}` are the same, with their keys in another order"
        return Finding(BreakCause.JSON_FORMAT, said)
    return None


def _changed(what: str, one: Any, other: Any) -> Finding:
    was, now = (quoted(_spelled(value).strip()) for value in (one, other))
    said = f"{what} is {was} in the stream and {now} in the next prompt"
    if isinstance(one, bool) != isinstance(other, bool) and str(one).lower() == str(other).lower():
        return Finding(BreakCause.BOOLEAN_CASE, f"{said}: a boolean became a string, or a string a boolean")
    if isinstance(one, str) and isinstance(other, str) and one.split() == other.split():
        return Finding(BreakCause.WHITESPACE, f"{said}: only white space differs")
    return Finding(BreakCause.REWRITTEN_CALL, said)


def _spelled(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)
