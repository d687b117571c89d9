"""What cannot be right in a conversation, though a template renders it.

None of it is an error: a recorded conversation is what it is. The result of a render reports it, in sentences without
values, so that a summary can count equal ones.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ..errors import place
from .messages import RESULT_ROLES, THOUGHTS, Messages
from .place import Place
from .values import no_constant

_JSON: Final = json.JSONDecoder(strict=False, parse_constant=no_constant)


def conversation_remarks(messages: Messages, *, continued: bool = False) -> Iterator[str]:
    """Notes on checked messages.

    - Arguments of a call that are not a JSON object, or contain null.
    - A tool result that answers no earlier call, or has another name than the call that it answers.
    - An assistant's message without text, reasoning or calls, unless it is the last and `continued`.
    """
    names: dict[str, Any] = {}  # of the called functions, by the id of the call
    latest: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
        role = message["role"]
        if role == "assistant":
            calls = [Place().mapping(call) for call in message.get("tool_calls") or ()]
            for at, call in enumerate(calls):
                names[str(call.get("id"))] = _function(call).get("name")
                arguments = _function(call).get("arguments")
                if problem := _problem(arguments):
                    field = "function.arguments" if "function" in call else "arguments"
                    yield f"{place(index, f'tool_calls.{at}.{field}')}{problem}"
            is_open = continued and index == len(messages) - 1
            if not is_open and not any(_has(message.get(name)) for name in ("content", "tool_calls", *THOUGHTS)):
                yield f"{place(index, 'content')}the assistant says nothing: only the end of its turn is sampled"
            latest = calls or latest
        elif role in RESULT_ROLES:
            answered, name = message.get("tool_call_id"), message.get("name")
            called = [_function(call).get("name") for call in latest]
            is_id = isinstance(answered, (str, int)) and answered != ""
            if is_id and str(answered) in names:
                called = [names[str(answered)]]
            elif is_id and all(_has(call.get("id")) for call in latest):
                yield f"{place(index, 'tool_call_id')}the result answers no call before it"
                continue
            if isinstance(name, str) and name and called and name not in called:
                yield f"{place(index, 'name')}the result has another name than the function that was called"


def _has(value: Any) -> bool:
    return value is not None and not (isinstance(value, (str, list, tuple)) and not value)


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    return function if isinstance(function, Mapping) else call


def _problem(arguments: Any) -> str | None:
    """What is wrong with a call's arguments. Empty text means no arguments."""
    if isinstance(arguments, str) and arguments.strip():
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(_JSON.decode(arguments), dict):
                return None
        return "the arguments of a call are not a JSON object"
    if isinstance(arguments, dict) and any(value is None for value in arguments.values()):
        return "an argument is null: tables (Parquet, datasets) fill in null for keys a row lacks"
    return None
