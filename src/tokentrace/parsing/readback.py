"""What cannot be read back from a rendered turn: parse the turn and compare."""

import contextlib
import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ..conversation.forms import texts_of
from ..conversation.messages import REASONING_FIELDS
from ..formats.grammar import TurnGrammar
from ..study.turns import common_prefix
from ..template.trace import Rendering
from .response import ParsedResponse, ParsedToolCall


class UnreadableKind(StrEnum):
    """What is read instead of a field: nothing, or something else."""

    DROPPED = "dropped"
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A field that parsing does not give back; ``tool_calls`` are all calls of a message."""

    message: int
    field: str
    kind: UnreadableKind
    why: str
    """Both values, from shortly before they differ."""


def find_unreadable(
    index: int, message: Mapping[str, Any], turns: Sequence[ParsedResponse]
) -> Iterator[Unreadable]:
    """The fields of an assistant message that are not read back from its `turns`.

    It has several if the template writes tool results inside its turn.
    """
    calls = message.get("tool_calls") or ()
    parsed_calls = [call for turn in turns for call in turn.tool_calls]
    name = next((name for name in REASONING_FIELDS if message.get(name)), "reasoning_content")
    content, reasoning = "".join(text for _, text in texts_of(message)), message.get(name) or ""
    fields: list[tuple[str, Any, Any]] = [
        (name, reasoning, "".join(turn.reasoning_content or "" for turn in turns)),
        ("content", content, "".join(turn.content for turn in turns)),
    ]
    if len(calls) != len(parsed_calls):
        names = [call.get("function", call)["name"] for call in calls]
        fields.append(("tool_calls", names, [call.name for call in parsed_calls]))
        parsed_calls = []
    for at, (call, parsed) in enumerate(zip(calls, parsed_calls, strict=False)):
        fields += _call_fields(f"tool_calls.{at}", call, parsed)
    for field, expected, actual in fields:
        if not _same(expected, actual):
            dropped = not actual or actual is _NOTHING
            kind = UnreadableKind.DROPPED if dropped else UnreadableKind.CHANGED
            yield Unreadable(index, field, kind, _why(expected, actual))


_NOTHING = object()


def _call_fields(
    field: str, call: Mapping[str, Any], parsed: ParsedToolCall
) -> Iterator[tuple[str, Any, Any]]:
    function = call.get("function", call)
    if call.get("id"):
        yield f"{field}.id", call["id"], parsed.id
    yield f"{field}.function.name", function["name"], parsed.name
    arguments, field = function.get("arguments"), f"{field}.function.arguments"
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    actual = parsed.arguments if parsed.status.runnable else None
    if actual is None or not isinstance(arguments, Mapping):
        yield field, arguments, parsed
        return
    for key in dict.fromkeys([*arguments, *actual]):
        yield f"{field}.{key}", arguments.get(key, _NOTHING), actual.get(key, _NOTHING)


def _same(one: Any, other: Any) -> bool:
    """True if two values are the same in JSON, where 1, 1.0 and true are three values."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    kinds = [(isinstance(value, bool), isinstance(value, float)) for value in (one, other)]
    return kinds[0] == kinds[1] and (one == other or repr(one) == repr(other))


def _why(expected: Any, actual: Any) -> str:
    if isinstance(expected, str) and isinstance(actual, str):
        start = max(0, common_prefix(expected, actual) - 8)
        form = ascii if unicodedata.normalize("NFC", expected) == actual else repr  # where they look alike
        return " is read as ".join(form(text[start : start + 40]) for text in (expected, actual))
    is_call = isinstance(actual, ParsedToolCall)
    outcome = f"a call that is {actual.status}: {actual.problem}" if is_call else _short(actual)
    return f"{_short(expected)} is read as {outcome}"


def _short(value: Any) -> str:
    text = "nothing" if value is _NOTHING else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


MISREAD = "the parser does not read back everything that the template writes"


def misread_parts(rendering: Rendering, parsed: ParsedResponse, grammar: TurnGrammar) -> Iterator[str]:
    """The fields of a probe's answer that the parser reads differently from the trace."""
    spans = [(text, origin.path) for text, _, origin in rendering.spans() if origin and origin.message == 1]
    if grammar.channels is None:  # with channels, a template may write content as reasoning
        if parsed.content != "".join(text for text, path in spans if path[:1] == ("content",)):
            yield "content"
        reasoning = "".join(text for text, path in spans if path and path[0] in REASONING_FIELDS)
        is_read = (parsed.reasoning_content or "") == reasoning
        if not is_read and (grammar.reasoning is not None or not grammar.notes):
            yield "reasoning"
    calls = {path[1] for _, path in spans if path[:1] == ("tool_calls",) and path[-1] in ("name", "id")}
    if not len(parsed.calls) == len(parsed.tool_calls) == len(calls):
        yield "calls"
