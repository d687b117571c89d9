"""What a conversation is, and what is wrong with one that is not.

A conversation is a list of messages in OpenAI's shape: ``role``, ``content`` (a string, a list of parts, or None
beside tool calls), and on assistant messages ``reasoning_content`` and ``tool_calls``. Checks here are about
shape only; what a template makes of it is the template's affair.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..errors import InputError

ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
"""Roles that every renderer takes. A template may know more: the strings it compares roles with."""

_ROLE_NAME: Final = re.compile(r"[\w.-]+")
"""A role is a word. Templates compare things with ``</think>`` as well, which nobody may be called."""

CONTENT_OPTIONAL: Final = frozenset({"assistant"})

RESULT_ROLES: Final = frozenset({"tool", "function", "ipython"})
"""Roles of tool results, which may be any JSON value that the template can show."""


def check_messages(messages: Any, *, more_roles: frozenset[str] = frozenset()) -> list[Mapping[str, Any]]:
    """`messages` as a list of mappings, or InputError naming the message and the field."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InputError(f"messages must be a list of messages, not {_kind(messages)}; wrap a single message in a list")
    if not messages:
        raise InputError("the conversation is empty; give at least one message")
    return [_check_message(index, message, more_roles) for index, message in enumerate(messages)]


def _check_message(index: int, message: Any, more_roles: frozenset[str]) -> Mapping[str, Any]:
    if type(message) is not dict:
        message = _as_mapping(index, message)
    role = message.get("role")
    if not isinstance(role, str):
        problem = "is missing" if "role" not in message else f"must be a string, not {_kind(role)}"
        raise InputError(problem, message=index, field="role")
    if role not in ROLES and (role not in more_roles or not _ROLE_NAME.fullmatch(role)):
        raise InputError(
            f"{role[:80]!r} is no known role; use one of {', '.join(sorted(ROLES))}, or a template that knows it",
            message=index,
            field="role",
        )
    content = message.get("content")
    if type(content) is not str:
        _check_content(index, role, message, content)
    if role == "assistant":
        _check_assistant(index, message)
    return message  # type: ignore[no-any-return]


def _as_mapping(index: int, message: Any) -> Mapping[str, Any]:
    if isinstance(message, Mapping):
        return message
    if dataclasses.is_dataclass(message) and not isinstance(message, type):
        return {f.name: getattr(message, f.name) for f in dataclasses.fields(message)}
    if callable(getattr(message, "model_dump", None)):
        return dict(message.model_dump(exclude_none=True))
    raise InputError(f"must be a mapping with a role, not {_kind(message)}", message=index)


def _check_content(index: int, role: str, message: Mapping[str, Any], content: Any) -> None:
    if content is None:
        if role in CONTENT_OPTIONAL:
            return
        problem = "is None" if "content" in message else "is missing"
        raise InputError(f"{problem}; a {role} message needs content", message=index, field="content")
    if isinstance(content, str) or (role in RESULT_ROLES and isinstance(content, Mapping)):
        return
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        for at, part in enumerate(content):
            if not isinstance(part, (str, Mapping)):
                raise InputError(
                    f"must be a string or a mapping, not {_kind(part)}", message=index, field=f"content.{at}"
                )
            text = part.get("text", "") if isinstance(part, Mapping) else part
            if not isinstance(text, str):
                raise InputError(f"must be a string, not {_kind(text)}", message=index, field=f"content.{at}.text")
        return
    raise InputError(f"must be a string or a list of parts, not {_kind(content)}", message=index, field="content")


def _check_assistant(index: int, message: Mapping[str, Any]) -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        value = message.get(name)
        if value is not None and not isinstance(value, str):
            raise InputError(f"must be a string, not {_kind(value)}", message=index, field=name)
    calls = message.get("tool_calls")
    if calls is None:
        return
    if isinstance(calls, (str, bytes)) or not isinstance(calls, Sequence):
        raise InputError(f"must be a list of calls, not {_kind(calls)}", message=index, field="tool_calls")
    for at, call in enumerate(calls):
        _check_call(index, f"tool_calls.{at}", call)


def _check_call(index: int, field: str, call: Any) -> None:
    if not isinstance(call, Mapping):
        if callable(getattr(call, "model_dump", None)):
            return
        raise InputError(f"must be a mapping, not {_kind(call)}", message=index, field=field)
    function = call.get("function")
    if function is not None:
        field += ".function"
        if not isinstance(function, Mapping):
            raise InputError(f"must be a mapping, not {_kind(function)}", message=index, field=field)
        call = function
    name = call.get("name")
    if not isinstance(name, str):
        problem = "is missing" if name is None else f"must be a string, not {_kind(name)}"
        raise InputError(problem, message=index, field=f"{field}.name")
    arguments = call.get("arguments")
    if arguments is not None and not isinstance(arguments, (str, Mapping)):
        raise InputError(
            f"must be a mapping or a JSON string, not {_kind(arguments)}",
            message=index,
            field=f"{field}.arguments",
        )


def check_tools(tools: Any) -> list[dict[str, Any]] | None:
    """`tools` as a list of schemas, or InputError. None and an empty list both mean: no tools."""
    if tools is None:
        return None
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise InputError(f"must be a list of tool schemas, not {_kind(tools)}", field="tools")
    return [_check_tool(f"tools.{at}", tool) for at, tool in enumerate(tools)]


def _check_tool(field: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        if callable(getattr(tool, "model_dump", None)):
            tool = tool.model_dump(exclude_none=True)
        else:
            raise InputError(f"must be a tool schema (a mapping), not {_kind(tool)}", field=field)
    function = tool.get("function", tool)
    if "function" in tool:
        field += ".function"
    if not isinstance(function, Mapping):
        raise InputError(f"must be a mapping, not {_kind(function)}", field=field)
    if not isinstance(function.get("name"), str):
        problem = "a tool schema needs a name" if "name" not in function else "must be a string"
        raise InputError(problem, field=f"{field}.name")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InputError(f"must be a JSON schema (a mapping), not {_kind(parameters)}", field=f"{field}.parameters")
    return dict(tool)


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
