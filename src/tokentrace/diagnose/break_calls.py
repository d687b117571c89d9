"""Evidence that a tool call is another one: its name, its arguments, or that it is gone."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Final

from ..parsing.response import ParsedToolCall
from .break_case import Case, Evidence
from .break_markup import CallFormat
from .break_spelling import same_value
from .finding import Cause
from .texts import quoted

_EMPTY: Final = ("", "null", "None", "{}", "[]")


def changed_call(case: Case) -> Evidence | None:
    """A call around the difference that is whole on both sides, and not the same."""
    ours, theirs, at = case.sides()
    tags = case.markup.call_openings()
    start, opening, closing = max((ours.rfind(opening, 0, at), opening, closing) for opening, closing in tags)
    if start < 0 or ours.find(closing, start, at) >= 0 or (case.region is not None and case.region.first_prompt):
        return None
    stops = [text.find(closing, start + len(opening)) for text in (ours, theirs)]
    if min(stops) < 0:
        return None
    sides = [
        case.tokens_of(start, stop + len(closing), prompt=prompt)
        for stop, prompt in zip(stops, (False, True), strict=True)
    ]
    for known, (one, other) in case.markup.read_calls(opening, *sides):
        found = _compared(known, one, other)
        if found is not None:
            return replace(found, until=stops[0] + len(closing))
    return None


def lost_call(case: Case) -> Evidence | None:
    """A call of the stream that the next prompt has not."""
    if case.in_completion is False:
        return None
    ours, theirs = case.hunk_texts()
    for opening, closing in case.markup.call_openings():
        start = ours.find(opening)
        if start < 0 or opening in theirs or closing in theirs or ours.find(closing, start) < 0:
            continue
        for _, (call,) in case.markup.read_calls(opening, case.hunk.sides(case.stream, case.prompt)[0][:4096]):
            said = f"the model called `{call.name}`, and the next prompt has no such call"
            return Evidence(Cause.REWRITTEN_CALL, said)
    return None


def _compared(known: CallFormat, one: ParsedToolCall, other: ParsedToolCall) -> Evidence | None:
    if one.name != other.name:
        said = f"the model called `{one.name}`, the next prompt has a call of `{other.name}`"
        return Evidence(Cause.REWRITTEN_CALL, said)
    ours, theirs = _arguments(one), _arguments(other)
    for key, value in ours.items():
        if key in theirs and not same_value(value, theirs[key]):
            return _changed(f"argument `{key}` of `{one.name}`", value, theirs[key])
    for some, others, has, lacks in ((ours, theirs, "stream", "next prompt"), (theirs, ours, "next prompt", "stream")):
        for key, value in some.items():
            if key not in others:
                empty = "empty " if _spelled(value).strip() in _EMPTY else ""
                said = f"the {has} gives `{one.name}` the {empty}argument `{key}`, the {lacks} does not"
                return Evidence(Cause.EMPTY_PARAMETER, said)
    stray, others_stray = (_stray_closings(known, call) for call in (one, other))
    if stray != others_stray:
        has = "stream" if stray > others_stray else "next prompt"
        said = f"only the {has} has a closing tag in the call of `{one.name}` that closes no parameter"
        return Evidence(Cause.EMPTY_PARAMETER, said)
    if (one.arguments is None) != (other.arguments is None):
        has = "stream" if other.arguments is None else "next prompt"
        return Evidence(Cause.EMPTY_PARAMETER, f"only the {has} writes out that `{one.name}` takes no arguments")
    if list(ours) != list(theirs):
        said = f"the arguments of `{one.name}` are the same, with their keys in another order"
        return Evidence(Cause.JSON_FORMAT, said)
    return None


def _arguments(call: ParsedToolCall) -> dict[str, Any]:
    """The arguments, as they were written where each is written by itself."""
    return dict(call.raw_arguments or call.arguments or {})


def _stray_closings(known: CallFormat, call: ParsedToolCall) -> int:
    """Closing tags of parameters that close none."""
    closing = known.grammar.calls.value_close.strip() if known.grammar.calls is not None else ""
    return call.raw.count(closing) - len(call.raw_arguments) if closing else 0


def _changed(what: str, one: Any, other: Any) -> Evidence:
    was, now = (quoted(_spelled(value).strip()) for value in (one, other))
    said = f"{what} is {was} in the stream and {now} in the next prompt"
    if isinstance(one, bool) != isinstance(other, bool) and str(one).lower() == str(other).lower():
        return Evidence(Cause.BOOLEAN_CASE, f"{said}: a boolean became a string, or a string a boolean")
    if isinstance(one, str) and isinstance(other, str) and one.split() == other.split():
        return Evidence(Cause.WHITESPACE, f"{said}: only white space differs")
    return Evidence(Cause.REWRITTEN_CALL, said)


def _spelled(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)
