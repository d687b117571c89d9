"""Conversations in OpenAI's shape, and their validation."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Required, TypedDict

from ..errors import InputError, kind_of, place
from ..values.functions import cached_schema
from ..values.place import Fields, Place, is_list
from ..values.plain import check_depth, is_flat, no_constant, parse_json

Messages = Sequence[Mapping[str, Any]]
"""A conversation as functions accept it."""


class ToolCall(TypedDict, total=False):
    """An assistant's tool call, in OpenAI's shape."""

    id: str
    type: Literal["function"]
    function: Required[Mapping[str, Any]]
    """Its ``name`` and its ``arguments``, a mapping or JSON text."""


class Message(TypedDict, total=False):
    """A message in OpenAI's shape, for editors. Templates may read other fields, too."""

    role: Required[str]
    content: str | Sequence[str | Mapping[str, Any]] | Mapping[str, Any] | None
    reasoning_content: str | None
    tool_calls: Sequence[ToolCall] | None
    tool_call_id: str
    name: str


class Tool(TypedDict, total=False):
    """A tool's schema, in OpenAI's shape."""

    type: Literal["function"]
    function: Required[Mapping[str, Any]]
    """Its ``name``, and usually ``description`` and ``parameters``, a JSON schema."""


ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
"""Roles that every renderer accepts. A template may accept more."""
RESULT_ROLES = frozenset({"tool", "function", "ipython"})
"""Roles of tool results, which may be any JSON value that the template can show."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning. Most templates read the first, gpt-oss's the second."""
ARGUMENTS = (str, Mapping, type(None))  # types of a call's arguments
RoleTest = Callable[[str], bool] | None
_ROLE_NAME = re.compile(r"[\w.-]{1,64}")
"""Templates also compare with ``</think>``, which is no role."""


def check_messages(messages: Any, *, is_role: RoleTest = None) -> list[Mapping[str, Any]]:
    """`messages` as a list of mappings. Raises InputError that names the message and the field.

    `is_role` decides about roles outside `ROLES`.
    """
    return [
        message if is_usual(message) else check_message(Place(index), message, is_role)
        for index, message in enumerate(checked_list(messages))
    ]


def is_usual(message: Any) -> bool:
    """True for a common message that needs no further check."""
    if type(message) is not dict:
        return False
    role, content = message.get("role"), message.get("content")
    if type(role) is not str or type(content) is not str or role not in ROLES:
        return False
    calls = message.get("tool_calls", ())
    return role != "assistant" or (
        type(calls) in (list, tuple)
        and all(map(_is_usual_call, calls))
        and (
            message.keys().isdisjoint(REASONING_FIELDS)
            or all(type(message.get(name, "")) is str for name in REASONING_FIELDS)
        )
    )


def _is_usual_call(call: Any) -> bool:
    function = call.get("function") if type(call) is dict else None
    if type(function) is not dict or type(call.get("id", "")) is not str:
        return False
    name, arguments = function.get("name"), function.get("arguments")
    return type(name) is str and (type(arguments) is str or is_flat(arguments))


def placed(messages: Any) -> Iterator[tuple[Place, Fields]]:
    """Messages with their places. Raises InputError unless it is a list of mappings."""
    return ((Place(at), Place(at).mapping(message)) for at, message in enumerate(checked_list(messages)))


def checked_list(messages: Any) -> Sequence[Any]:
    if not is_list(messages):
        is_row = isinstance(messages, Mapping) and "messages" in messages
        advice = 'pass its "messages"' if is_row else "wrap a single message in a list"
        raise InputError(f"messages must be a list of messages, not {kind_of(messages)}; {advice}")
    if not messages:
        raise InputError("the conversation is empty; give at least one message")
    return messages


def check_message(place: Place, value: Any, is_role: RoleTest = None) -> Fields:
    message = place.mapping(value)
    role = place.string(message, "role")
    if role not in ROLES and not (is_role and _ROLE_NAME.fullmatch(role) and is_role(role)):
        advice = f"use one of {', '.join(sorted(ROLES))}, or a template that reads it"
        raise place.at("role").error(f"{role[:80]!r} is not a known role; {advice}")
    check_content(place.at("content"), role, message.get("content"))
    if role == "assistant":
        for name in filter(message.__contains__, REASONING_FIELDS):
            place.get(message, name, str | None, "a string")
        if message.get("tool_calls") is not None:
            _check_calls(place.at("tool_calls"), message["tool_calls"])
    return message


def check_content(place: Place, role: str, content: Any) -> None:
    if isinstance(content, str):
        return
    if content is None:
        if role != "assistant":
            raise place.error(f"is missing; a {role} message needs content")
    elif role in RESULT_ROLES and isinstance(content, Mapping):
        check_depth(content, place)
    elif not is_list(content):
        raise place.wrong(content, "a string or a list of parts")
    else:
        for inner, part in place.each(content):
            if isinstance(part, Mapping):
                if "text" in part and role not in RESULT_ROLES:
                    inner.string(part, "text")
                check_depth(part, inner)
            elif not isinstance(part, str):
                raise inner.error(f"must be a string or a mapping, not {kind_of(part)}")


def placed_functions(calls: Any, place: Place) -> Iterator[tuple[Place, Fields, Fields]]:
    """For each call, the place of its function, the call, and its function (or the call itself)."""
    for inner, call in place.each(calls):
        function = fields = inner.mapping(call)
        if fields.get("function") is not None:
            inner = inner.at("function")
            function = inner.mapping(fields["function"])
        yield inner, fields, function


def _check_calls(place: Place, calls: Any) -> None:
    if not is_list(calls):
        raise place.wrong(calls, "a list of calls")
    for at, (inner, call, function) in enumerate(placed_functions(calls, place)):
        place.at(at).get(call, "id", str | int | float | None, "a string")
        inner.string(function, "name")
        arguments = inner.get(function, "arguments", ARGUMENTS, "a mapping or a JSON string")
        check_depth(arguments, inner.at("arguments"))


def check_tools(tools: Any) -> list[dict[str, Any]] | None:
    """`tools`, schemas or Python functions, as a list of schemas or None. Raises InputError."""
    if tools is None:
        return None
    place = Place(field="tools")
    if not is_list(tools):
        raise place.wrong(tools, "a list of tool schemas")
    return [_check_tool(place.at(at), tool) for at, tool in enumerate(tools)]


def _check_tool(place: Place, tool: Any) -> dict[str, Any]:
    if inspect.isfunction(tool) or inspect.ismethod(tool):
        try:
            tool = cached_schema(tool)
        except InputError as error:
            raise place.error(error.problem) from None
    tool = place.mapping(tool, "a tool schema (a mapping) or a function")
    check_depth(tool, place)
    if "function" in tool:
        place = place.at("function")
    function = place.mapping(tool.get("function", tool))
    place.string(function, "name")
    place.get(function, "parameters", Mapping | None, "a JSON schema (a mapping)")
    return {**tool, "function": function} if "function" in tool else dict(tool)


def conversation_remarks(messages: Messages, *, continued: bool = False) -> Iterator[str]:
    """Notes on checked messages. The last of them may be empty if it is `continued`."""
    names: dict[str, Any] = {}  # of functions, by the ids of their calls
    latest: list[tuple[Any, Any]] = []  # the ids and names of the last message's calls
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            calls, field = list[tuple[Any, Any]](), Place(index, "tool_calls")
            for inner, call, function in placed_functions(message.get("tool_calls") or (), field):
                calls.append((call.get("id"), function.get("name")))
                if problem := _problem(function.get("arguments")):
                    yield f"{place(*inner.at('arguments'))}{problem}"
            names |= {str(id): name for id, name in calls}
            latest = calls or latest
            is_open = continued and index == len(messages) - 1
            if not is_open and not any(map(message.get, ("content", "tool_calls", *REASONING_FIELDS))):
                yield f"{place(index, 'content')}the assistant says nothing: only the end of its turn is sampled"
        elif message["role"] in RESULT_ROLES:
            id, name = message.get("tool_call_id"), message.get("name")
            key = str(id) if isinstance(id, str | int) and id != "" else None
            called = [names[key]] if key in names else [function for _, function in latest]
            if key is not None and key not in names and all(id not in (None, "") for id, _ in latest):
                yield f"{place(index, 'tool_call_id')}the result answers no call before it"
            elif isinstance(name, str) and name and called and name not in called:
                yield f"{place(index, 'name')}the result's name differs from the called function's"


def _problem(arguments: Any) -> str | None:
    """What is wrong with a call's arguments. Empty text means no arguments."""
    if isinstance(arguments, str) and arguments.strip():
        try:
            value = parse_json(arguments, Place(), strict=False, parse_constant=no_constant)
        except InputError:
            value = None
        return None if isinstance(value, dict) else "the arguments of a call are not a JSON object"
    if isinstance(arguments, dict) and any(value is None for value in arguments.values()):
        return "an argument is null: tables (Parquet, datasets) fill in null for keys a row lacks"
    return None
