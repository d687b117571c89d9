"""What a conversation is, and what is wrong with one that is not.

A conversation is a list of messages in OpenAI's shape: ``role``, ``content`` (a string, a list of parts, or None
beside tool calls), and on assistant messages ``reasoning_content`` and ``tool_calls``. Checks here are about
shape only; what a template makes of it is up to the template.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, Required, TypeAlias, TypedDict

from ..errors import InputError, kind_of
from .functions import known_schema
from .place import Place, is_list
from .values import check_depth, is_plain, is_usual

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A conversation as functions take it: any mappings, a ``list[Message]`` among them."""


class FunctionCall(TypedDict):
    name: str
    arguments: str | Mapping[str, Any]


class ToolCall(TypedDict, total=False):
    """A tool call in an assistant's message, in OpenAI's shape."""

    id: str
    type: Literal["function"]
    function: Required[FunctionCall]


class Message(TypedDict, total=False):
    """A message in OpenAI's shape, for editors and type checkers. Other fields, which a template may read, are welcome:
    whatever takes messages takes plain mappings as well."""

    role: Required[str]
    content: str | Sequence[str | Mapping[str, Any]] | Mapping[str, Any] | None
    reasoning_content: str | None
    tool_calls: Sequence[ToolCall] | None
    tool_call_id: str
    name: str


class FunctionSchema(TypedDict, total=False):
    name: Required[str]
    description: str
    parameters: Mapping[str, Any]
    strict: bool


class Tool(TypedDict, total=False):
    """A tool's schema, in OpenAI's shape."""

    type: Literal["function"]
    function: Required[FunctionSchema]


ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
"""Roles that every renderer takes. A template may know more: the strings it compares roles with."""

_ROLE_NAME: Final = re.compile(r"[\w.-]+")
"""A role is a word. Templates compare things with ``</think>`` as well, which is not a role."""

MAX_ROLE: Final = 64
"""No role's name is longer."""

THOUGHTS: Final = ("reasoning_content", "reasoning", "thinking")
"""The fields of a message that hold its reasoning."""
TEXT_OR_NONE: Final = frozenset({str, type(None)})

RESULT_ROLES: Final = frozenset({"tool", "function", "ipython"})
"""Roles of tool results, which may be any JSON value that the template can show."""


def check_messages(
    messages: Any, *, more_roles: frozenset[str] = frozenset(), any_role: Callable[[str], bool] | None = None
) -> list[Mapping[str, Any]]:
    """`messages` as a list of mappings, or InputError naming the message and the field.

    `more_roles` are those that the template knows; `any_role` is asked whether it takes another one as well.
    """
    if not is_list(messages):
        is_row = isinstance(messages, Mapping) and "messages" in messages
        advice = 'pass its "messages"' if is_row else "wrap a single message in a list"
        raise InputError(f"messages must be a list of messages, not {kind_of(messages)}; {advice}")
    if not messages:
        raise InputError("the conversation is empty; give at least one message")
    return [
        message
        if type(message) is dict and _is_plain(message)
        else _check_message(index, message, more_roles, any_role)
        for index, message in enumerate(messages)
    ]


def _check_message(
    index: int, message: Any, more_roles: frozenset[str], any_role: Callable[[str], bool] | None
) -> Mapping[str, Any]:
    place = Place(index)
    if type(message) is not dict:
        message = _as_mapping(place, message)
    role = message.get("role")
    if not isinstance(role, str):
        problem = "is missing" if "role" not in message else f"must be a string, not {kind_of(role)}"
        raise place.at("role").error(problem)
    if role not in ROLES and not _is_role(role, more_roles, any_role):
        raise place.at("role").error(
            f"{role[:80]!r} is not a known role; use one of {', '.join(sorted(ROLES))}, or a template that knows it"
        )
    content = message.get("content")
    if type(content) is not str:
        _check_content(place.at("content"), role, message, content)
    if role == "assistant":
        _check_assistant(place, message)
    return message  # type: ignore[no-any-return]


def _is_plain(message: dict[str, Any]) -> bool:
    """Whether a message is of the usual form, in which nothing can be wrong: texts, and calls as JSON has them."""
    role = message.get("role")
    if type(role) is not str or role not in ROLES:
        return False
    content = message.get("content")
    if role != "assistant":
        return type(content) is str
    if type(content) is not str and content is not None:
        return False
    for name in THOUGHTS:
        if type(message.get(name)) not in TEXT_OR_NONE:
            return False
    calls = message.get("tool_calls")
    if calls is None:
        return True
    if type(calls) is not list:
        return False
    for call in calls:
        function = call.get("function") if type(call) is dict else None
        if type(function) is not dict or type(function.get("name")) is not str:
            return False
        arguments = function.get("arguments")
        if type(arguments) not in TEXT_OR_NONE and not is_usual(arguments):
            return False
    return True


def _is_role(role: str, more_roles: frozenset[str], any_role: Callable[[str], bool] | None) -> bool:
    if len(role) > MAX_ROLE or not _ROLE_NAME.fullmatch(role):
        return False
    return role in more_roles or (any_role is not None and any_role(role))


def _as_mapping(place: Place, message: Any) -> Mapping[str, Any]:
    if dataclasses.is_dataclass(message) and not isinstance(message, (type, Mapping)):
        return {f.name: getattr(message, f.name) for f in dataclasses.fields(message)}
    if not isinstance(message, Mapping) and not callable(getattr(message, "model_dump", None)):
        raise place.error(f"must be a mapping with a role, not {kind_of(message)}")
    return place.mapping(message)


def _check_content(place: Place, role: str, message: Mapping[str, Any], content: Any) -> None:
    if content is None:
        if role == "assistant":
            return
        problem = "is None" if "content" in message else "is missing"
        raise place.error(f"{problem}; a {role} message needs content")
    if isinstance(content, str):
        return
    if role in RESULT_ROLES and isinstance(content, Mapping):
        check_depth(content, place)
        return
    if not is_list(content):
        raise place.error(f"must be a string or a list of parts, not {kind_of(content)}")
    for at, part in enumerate(content):
        if not isinstance(part, (str, Mapping)):
            raise place.at(at).error(f"must be a string or a mapping, not {kind_of(part)}")
        if isinstance(part, Mapping):
            text = part.get("text", "")
            if not isinstance(text, str):
                raise place.at(at).at("text").error(f"must be a string, not {kind_of(text)}")
            check_depth(part, place.at(at))


def _check_assistant(place: Place, message: Mapping[str, Any]) -> None:
    for name in THOUGHTS:
        value = message.get(name)
        if value is not None and not isinstance(value, str):
            raise place.at(name).wrong(value, "a string")
    calls = message.get("tool_calls")
    if calls is None:
        return
    place = place.at("tool_calls")
    if not is_list(calls):
        raise place.wrong(calls, "a list of calls")
    for at, call in enumerate(calls):
        _check_call(place.at(at), call)


def _check_call(place: Place, call: Any) -> None:
    if not isinstance(call, Mapping) and callable(getattr(call, "model_dump", None)):
        return
    if not isinstance(call, Mapping):
        raise place.error(f"must be a mapping, not {kind_of(call)}")
    function = call.get("function")
    if function is not None:
        place = place.at("function")
        if not isinstance(function, Mapping):
            raise place.wrong(function, "a mapping")
        call = function
    place.string(call, "name")
    arguments, place = call.get("arguments"), place.at("arguments")
    if arguments is not None and not isinstance(arguments, (str, Mapping)):
        raise place.wrong(arguments, "a mapping or a JSON string")
    check_depth(arguments, place)


class KnownTools(list[dict[str, Any]]):
    """Tools that were checked and that nobody changes any more, with their JSON text: for those that come with every
    turn of a conversation. `check_tools` takes them as they are. What is rendered is what the text says."""

    __slots__ = ("text",)

    def __init__(self, tools: Any, text: str) -> None:
        super().__init__(check_tools(tools) or ())
        self.text = text

    def _refuse(self, *_: Any) -> Any:
        raise TypeError("tools that are known are not changed; make a list of your own of them: list(tools)")

    append = extend = insert = remove = pop = clear = sort = reverse = _refuse  # type: ignore[assignment]
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return KnownTools, (list(self), self.text)


def known_tools(tools: Any) -> Any:
    """Tools for many calls with the same ones: checked and copied once, and known by who they are from then on.

    Give the result as `tools` to `render`, `bridge` and `parse_response` for as long as a conversation goes on: a list
    of one's own has to be looked through each time, since it may have changed. Tools that JSON would change (tuples,
    objects) are given back as they are; so are None and an empty list. Raises InputError for what is not a list of
    tools.
    """
    if not tools or type(tools) is KnownTools:
        return tools
    checked = check_tools(tools)
    try:
        text = json.dumps(checked)
        copied = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return tools
    return KnownTools(copied, text) if copied == checked and is_plain(checked) else tools


def tools_text(tools: Any) -> str:
    """Tools as JSON text: what they are remembered by. Raises what `json.dumps` raises."""
    return tools.text if type(tools) is KnownTools else json.dumps(tools)


def check_tools(tools: Any) -> list[dict[str, Any]] | None:
    """`tools` as a list of schemas, or InputError. None and an empty list both mean: no tools.

    A Python function is a tool too: its schema is read off its signature and docstring (`conversation.functions`).
    """
    if tools is None or type(tools) is KnownTools:
        return tools
    place = Place(field="tools")
    if not is_list(tools):
        raise place.wrong(tools, "a list of tool schemas")
    return [_check_tool(place.at(at), tool) for at, tool in enumerate(tools)]


def _check_tool(place: Place, tool: Any) -> dict[str, Any]:
    whole = place
    if inspect.isfunction(tool) or inspect.ismethod(tool):
        tool = known_schema(tool, str(place.field))
    elif not isinstance(tool, Mapping) and not callable(getattr(tool, "model_dump", None)):
        raise place.error(f"must be a tool schema (a mapping) or a function, not {kind_of(tool)}")
    tool = place.mapping(tool)
    function = tool.get("function", tool)
    if "function" in tool:
        place = place.at("function")
    if not isinstance(function, Mapping):
        raise place.error(f"must be a mapping, not {kind_of(function)}")
    if not isinstance(function.get("name"), str):
        problem = "a tool schema needs a name" if "name" not in function else "must be a string"
        raise place.at("name").error(problem)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise place.at("parameters").wrong(parameters, "a JSON schema (a mapping)")
    check_depth(tool, whole)
    return dict(tool)
