"""Where a turn, parsed, does not say what its message said: held against each other, whatever the trace shows."""

from __future__ import annotations

import contextlib
import itertools
import json
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from ..conversation.forms import texts_of
from ..template.chat_template import REASONING_FIELDS
from .response import CallStatus, ParsedResponse, ParsedToolCall

_READ: Final = frozenset({CallStatus.OK, CallStatus.UNKNOWN_TOOL})
"""What becomes of a call whose name and arguments are read."""


def misread_fields(
    message: Mapping[str, Any], parsed: Sequence[ParsedResponse], known: Collection[str], moved: bool
) -> Iterator[tuple[str, str]]:
    """The fields that are not read back equal, without those `known` already, each with both sides in words.

    `parsed` is what the tokens of the message's turn say: a template that writes results inside of it makes several of
    one. Content that was `moved` is read as reasoning.
    """
    calls = [(at, call) for at, call in enumerate(message.get("tool_calls") or ()) if f"tool_calls.{at}" not in known]
    said = "".join(text for _, text in texts_of(message))
    name = next((name for name in REASONING_FIELDS if message.get(name)), "reasoning_content")
    thought = message.get(name) or ""
    known = {*known, *(["content"] if any(field.startswith("content.") for field in known) else [])}
    if not parsed:
        given = {name: thought, "content": said, "tool_calls": calls}
        yield from (
            (field, "no turn of the message is found") for field in given if given[field] and field not in known
        )
        return
    read_said = "".join(one.content for one in parsed)
    read_thought = "".join(one.reasoning_content or "" for one in parsed)
    read_calls = [call for one in parsed for call in one.tool_calls]
    if read_thought != thought and name not in known and not moved:
        yield name, _both(thought, read_thought)
    if read_said != said and "content" not in known:
        yield "content", _both(said, read_said)
    if "tool_calls" in known:
        return
    if len(calls) != len(read_calls):
        yield "tool_calls", f"{_names(calls)} are read as {[call.name for call in read_calls]}"
        return
    for (at, call), found in zip(calls, read_calls, strict=True):
        yield from _call(f"tool_calls.{at}", call, found, known)


def _call(
    field: str, call: Mapping[str, Any], read: ParsedToolCall, known: Collection[str]
) -> Iterator[tuple[str, str]]:
    function = call.get("function", call)
    if call.get("id") and read.id != call["id"] and f"{field}.id" not in known:
        yield f"{field}.id", _both(call["id"], read.id)
    if read.name != function["name"] and f"{field}.function.name" not in known:
        yield f"{field}.function.name", _both(function["name"], read.name)
    field = f"{field}.function.arguments"
    given = function.get("arguments")
    if isinstance(given, str):
        with contextlib.suppress(ValueError, RecursionError):  # what is not JSON is not read either
            given = json.loads(given)
    if read.status not in _READ or not isinstance(given, Mapping) or read.arguments is None:
        if not any(name.startswith(field) for name in known):
            yield field, f"{_short(function.get('arguments'))} is read as a call that is {read.status}: {read.problem}"
        return
    if field in known:
        return
    for key in (*given, *(key for key in read.arguments if key not in given)):
        if f"{field}.{key}" in known:
            continue
        if key not in given or key not in read.arguments:
            yield f"{field}.{key}", "is read, and was not given" if key not in given else "is not read"
        elif not _same(given[key], read.arguments[key]):
            yield f"{field}.{key}", _both(given[key], read.arguments[key])


def _same(given: Any, read: Any) -> bool:
    """Whether two values are the same in JSON, where 1, 1.0 and true are three."""
    if isinstance(given, Mapping) and isinstance(read, Mapping):
        return given.keys() == read.keys() and all(_same(given[key], read[key]) for key in given)
    if isinstance(given, list | tuple) and isinstance(read, list | tuple):
        return len(given) == len(read) and all(map(_same, given, read))
    kinds = [(isinstance(value, bool), isinstance(value, float)) for value in (given, read)]
    return kinds[0] == kinds[1] and (given == read or repr(given) == repr(read))


def _names(calls: Sequence[tuple[int, Mapping[str, Any]]]) -> list[str]:
    return [call.get("function", call)["name"] for _, call in calls]


def _both(given: Any, read: Any) -> str:
    """Both sides, from shortly before they part."""
    if not isinstance(given, str) or not isinstance(read, str):
        return f"{_short(given)} is read as {_short(read)}"
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(given, read, strict=False))
    start = max(0, sum(1 for _ in same) - 8)
    shown = ascii if unicodedata.normalize("NFC", given) == read else repr  # which look alike on a screen
    return f"{shown(given[start : start + 40])} is read as {shown(read[start : start + 40])}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
