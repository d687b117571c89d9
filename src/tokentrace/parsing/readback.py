"""What cannot be read back from a rendered assistant turn: its tokens are parsed, and compared with the message.

Parsing inverts rendering if the template lets it. A template may leave a field out or trim it; text may spell a
delimiter; a bare ``42`` may be a number or a string. Whatever is not reported here reads back equal.
"""

from __future__ import annotations

import contextlib
import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from ..conversation.forms import texts_of
from ..study.turns import common_prefix
from ..template.chat_template import REASONING_FIELDS
from .response import CallStatus, ParsedResponse, ParsedToolCall

_READ: Final = frozenset({CallStatus.OK, CallStatus.UNKNOWN_TOOL})


class UnreadableKind(StrEnum):
    """What is read instead of a field."""

    DROPPED = "dropped"
    """Nothing."""
    CHANGED = "changed"
    """Something else."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A field of a message that is not read back. The field ``tool_calls`` is all calls of the message."""

    message: int
    field: str
    kind: UnreadableKind
    why: str
    """Both values, from shortly before they differ."""


def find_unreadable(index: int, message: Mapping[str, Any], turns: Sequence[ParsedResponse]) -> Iterator[Unreadable]:
    """The fields of an assistant message that are not read back.

    `turns` are the parsed tokens of message `index`: several if the template writes tool results inside its turn.
    """
    calls = message.get("tool_calls") or ()
    parsed_calls = [call for turn in turns for call in turn.tool_calls]
    name = next((name for name in REASONING_FIELDS if message.get(name)), "reasoning_content")
    reasoning = "".join(turn.reasoning_content or "" for turn in turns)
    content = "".join(text for _, text in texts_of(message))
    yield from _compared(index, name, message.get(name) or "", reasoning)
    yield from _compared(index, "content", content, "".join(turn.content for turn in turns))
    if len(calls) != len(parsed_calls):
        names = [call.get("function", call)["name"] for call in calls]
        yield from _compared(index, "tool_calls", names, [call.name for call in parsed_calls])
        return
    for at, (call, parsed) in enumerate(zip(calls, parsed_calls, strict=True)):
        yield from _unreadable_call(index, f"tool_calls.{at}", call, parsed)


def _unreadable_call(index: int, field: str, call: Mapping[str, Any], parsed: ParsedToolCall) -> Iterator[Unreadable]:
    function = call.get("function", call)
    if call.get("id"):
        yield from _compared(index, f"{field}.id", call["id"], parsed.id)
    field = f"{field}.function"
    yield from _compared(index, f"{field}.name", function["name"], parsed.name)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    field = f"{field}.arguments"
    if parsed.status not in _READ or not isinstance(arguments, Mapping) or parsed.arguments is None:
        why = f"{_short(arguments)} is read as a call that is {parsed.status}: {parsed.problem}"
        yield Unreadable(index, field, UnreadableKind.CHANGED, why)
        return
    for key in dict.fromkeys([*arguments, *parsed.arguments]):
        yield from _compared(index, f"{field}.{key}", arguments.get(key), parsed.arguments.get(key))


def _compared(index: int, field: str, expected: Any, actual: Any) -> Iterator[Unreadable]:
    if not _same(expected, actual):
        kind = UnreadableKind.CHANGED if actual else UnreadableKind.DROPPED
        yield Unreadable(index, field, kind, _both(expected, actual))


def _same(one: Any, other: Any) -> bool:
    """True if two values are the same in JSON, where 1, 1.0 and true are three values."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    kinds = [(isinstance(value, bool), isinstance(value, float)) for value in (one, other)]
    return kinds[0] == kinds[1] and (one == other or repr(one) == repr(other))


def _both(expected: Any, actual: Any) -> str:
    if not isinstance(expected, str) or not isinstance(actual, str):
        return f"{_short(expected)} is read as {_short(actual)}"
    start = max(0, common_prefix(expected, actual) - 8)
    show = ascii if unicodedata.normalize("NFC", expected) == actual else repr  # which look alike on a screen
    return f"{show(expected[start : start + 40])} is read as {show(actual[start : start + 40])}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
