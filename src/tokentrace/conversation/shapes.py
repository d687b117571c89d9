"""Conversations in other shapes, as OpenAI's messages and tools: Anthropic's blocks, ShareGPT's turns. Pure.

`parsing.messages` is the way back. Nothing is made up (a call without an id stays without) and nothing that a model
could have seen is left out in silence: what has no place in OpenAI's shape stays as it is, as a part of a list
content, or is refused. Every refusal is an InputError that counts messages as they were given.

An assistant that only calls tools gets the content ``""``, not None: many templates write None out as a word.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ..errors import InputError, shown
from ..settings import choose
from .messages import check_messages, check_tools
from .place import Place, is_list

_SPEAKERS: Final[Mapping[str, str]] = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function", "function_response", "tool_response"), "tool"),
}
"""What ``from`` says, and the role it stands for."""

_CALLERS: Final = frozenset({"function_call", "tool_call"})
"""Turns whose value is JSON of calls."""

_LOSS: Final = ("weight", "train")
"""Fields by which rows say what is trained; they belong to a whole message."""

_CARRIED: Final = (*_LOSS, "reasoning_content", "name", "tool_call_id", "tool_calls")
"""Fields of a ShareGPT turn that are a message's own."""

_FOREIGN: Final = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Fields of OpenAI's that Anthropic says in blocks."""

_CALL_FIELDS: Final = frozenset({"id", "type", "name", "arguments"})

_TOOL_BLOCKS: Final = ("tool_use", "tool_result")
_THINKING_BLOCKS: Final = ("thinking", "redacted_thinking")


class Shape(enum.StrEnum):
    """How a conversation is written down."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    SHAREGPT = "sharegpt"


def shape_of(messages: Any) -> Shape:
    """The shape that `messages` show; OpenAI's where nothing tells otherwise. Refuses nothing.

    ShareGPT: a message has ``from`` and no ``role``. Anthropic: a block of tool use or of a tool result; or a block of
    an assistant's thinking, unless it is a list or others show OpenAI's calls, tool or developer messages: Mistral's
    templates take thinking blocks in OpenAI's shape. A list of text parts is the same in both, and stays OpenAI's.
    """
    rows = [message for message in messages if isinstance(message, Mapping)] if is_list(messages) else []
    if any(row.get("role") is None and row.get("from") is not None for row in rows):
        return Shape.SHAREGPT
    blocks = [(row.get("role"), block) for row in rows for block in _typed(row.get("content"))]
    if any(isinstance(block["type"], str) and block["type"] in _TOOL_BLOCKS for _, block in blocks):
        return Shape.ANTHROPIC
    thinks = any(
        isinstance(role, str)
        and role == "assistant"
        and isinstance(block["type"], str)
        and block["type"] in _THINKING_BLOCKS
        and not is_list(block.get("thinking"))
        for role, block in blocks
    )
    openai = any(
        is_list(row.get("tool_calls"))
        or (isinstance(row.get("role"), str) and row["role"] in ("tool", "function", "developer"))
        for row in rows
    )
    return Shape.ANTHROPIC if thinks and not openai else Shape.OPENAI


def _typed(content: Any) -> Iterator[Mapping[str, Any]]:
    """The blocks of a content that have a type, if it is a list."""
    for block in content if is_list(content) else ():
        if isinstance(block, Mapping) and "type" in block:
            yield block


def openai_messages(messages: Any, shape: Shape | None = None) -> list[Mapping[str, Any]]:
    """`messages` in OpenAI's shape, whatever `shape` they are in (None: `shape_of`)."""
    match shape_of(messages) if shape is None else choose(Shape, "shape", shape, InputError):
        case Shape.ANTHROPIC:
            return from_anthropic(messages)
        case Shape.SHAREGPT:
            return from_sharegpt(messages)
        case _:
            return from_openai(messages)


# -- OpenAI's own


def from_openai(messages: Any) -> list[Mapping[str, Any]]:
    """`messages` as they are, but for an assistant's ``function_call`` of old, which becomes ``tool_calls``.

    Contents and arguments are not touched, so that a template makes the same ids of the messages as before. Refuses
    what is not a list of mappings, and a message with both ``function_call`` and ``tool_calls``. Roles and contents are
    checked by `check_messages`.
    """
    return [
        message
        if type(message) is dict and "function_call" not in message
        else _without_function_call(place, place.mapping(message))
        for place, message in _placed(messages)
    ]


def _without_function_call(place: Place, message: Mapping[str, Any]) -> Mapping[str, Any]:
    call = message.get("function_call")
    if call is None or message.get("role") != "assistant":
        return message
    if message.get("tool_calls"):
        raise place.at("function_call").error("stands beside tool_calls; give one of them")
    call = place.at("function_call").mapping(call)
    made = {key: value for key, value in message.items() if key not in ("function_call", "tool_calls")}
    made["tool_calls"] = [{"type": "function", "function": call}]
    return _checked(place, made, {"tool_calls.0.function": "function_call"})


def with_system(messages: Sequence[Mapping[str, Any]], system: Any) -> list[Mapping[str, Any]]:
    """`messages` after a system message that says `system`: a string, or Anthropic's text blocks.

    None, ``""`` and no blocks mean no such message. One that is there already and says the same is enough; InputError
    if it says something else.
    """
    blocks = () if system is None else _blocks(Place(field="system"), system)
    text = _content([_part(place, block, "a system prompt") for place, block in blocks])
    if not text:
        return list(messages)
    if not isinstance(text, str):
        raise InputError("must be a string or a list of text blocks", field="system")
    if not is_list(messages) or not all(isinstance(message, Mapping) for message in messages):
        raise InputError(f"must be a list of messages, not {shown(messages)}", field="messages")
    if not messages or messages[0].get("role") != "system":
        return [{"role": "system", "content": text}, *messages]
    said: Any = messages[0].get("content")
    if is_list(said):
        texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in said]
        said = "".join(texts) if all(isinstance(each, str) for each in texts) else None
    if said != text:
        raise InputError("differs from the system message that the conversation begins with", field="system")
    return list(messages)


# -- Anthropic's


def from_anthropic(messages: Any, system: Any = None) -> list[Mapping[str, Any]]:
    """Anthropic's messages, and the `system` prompt that stands beside them, in OpenAI's shape.

    - Text blocks that follow one another are one text, with nothing in between: citations split a text like that.
    - Thinking is the message's ``reasoning_content``. Redacted thinking is left out: it is encrypted, nothing in it
      can be shown. OpenAI's shape has one place each for reasoning, text and calls, so their order is lost.
    - A tool result is a tool message, with the ``name`` of the call it answers if that came before, and with
      ``is_error`` if it is one. Texts before, between and after results are user messages, in that order.
    - Other blocks (images, documents, server tools) make the content a list, in which they stay as they are.
    - Of a message's other fields ``weight`` and ``train`` are kept, on every message made of it. ``cache_control``,
      signatures and citations say nothing to a model and are left out.

    Refuses roles and blocks that are not Anthropic's or stand where they cannot, and OpenAI's fields among them.
    """
    made: list[Mapping[str, Any]] = []
    names: dict[str, str] = {}
    for place, message in _placed(messages):
        message = place.mapping(message)
        for field in _FOREIGN:
            if message.get(field) is not None:
                problem = "is OpenAI's, but the conversation is in Anthropic's shape; say it in content blocks"
                raise place.at(field).error(problem)
        blocks = list(_blocks(place.at("content"), message.get("content")))
        loss = {key: message[key] for key in _LOSS if message.get(key) is not None}
        spoken = message.get("role")
        match spoken if spoken is None or isinstance(spoken, str) else shown(spoken):
            case "assistant":
                made.append(_from_assistant_blocks(blocks, names) | loss)
            case "user":
                made += [each | loss for each in _from_user_blocks(blocks, names)]
            case "system":
                parts = [_part(own, block, "a system message") for own, block in blocks]
                made.append({"role": "system", "content": _content(parts)} | loss)
            case role:
                problem = "is missing" if role is None else f"{shown(role)} is not a role of Anthropic's"
                raise place.at("role").error(f"{problem}; use user, assistant or system")
    return with_system(made, system)


Placed = tuple[Place, Mapping[str, Any]]
"""A block and where it stands."""


def _from_assistant_blocks(blocks: list[Placed], names: dict[str, str]) -> dict[str, Any]:
    thinking: list[str] = []
    parts: list[Mapping[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for place, block in blocks:
        match block["type"]:
            case "thinking":
                thinking.append(place.string(block, "thinking"))
            case "redacted_thinking":
                pass
            case "tool_use":
                calls.append(_call_of_block(place, block))
                if "id" in calls[-1]:
                    names[calls[-1]["id"]] = calls[-1]["function"]["name"]
            case _:
                parts.append(_part(place, block, "an assistant message"))
    made: dict[str, Any] = {"role": "assistant", "content": _content(parts)}
    if any(thinking):
        made["reasoning_content"] = "".join(thinking)
    if calls:
        made["tool_calls"] = calls
    return made


def _call_of_block(place: Place, block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, Mapping):
        raise place.at("input").wrong(arguments, "a mapping")
    return _call(place, block, arguments)


def _call(place: Place, given: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    made = {"id": place.string(given, "id")} if given.get("id") is not None else {}
    function = {"name": place.string(given, "name"), "arguments": arguments}
    return {**made, "type": "function", "function": function}


def _from_user_blocks(blocks: list[Placed], names: Mapping[str, str]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    said: list[Mapping[str, Any]] = []
    for place, block in blocks:
        if block["type"] != "tool_result":
            said.append(_part(place, block, "a user message"))
            continue
        if said:
            made.append({"role": "user", "content": _content(said)})
            said = []
        made.append(_from_result(place, block, names))
    if said or not made:
        made.append({"role": "user", "content": _content(said)})
    return made


def _from_result(place: Place, block: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "tool"}
    if block.get("tool_use_id") is not None:
        made["tool_call_id"] = place.string(block, "tool_use_id")
        if made["tool_call_id"] in names:
            made["name"] = names[made["tool_call_id"]]
    content = block.get("content")
    blocks = _blocks(place.at("content"), "" if content is None else content)
    made["content"] = _content([_part(inner, each, "a tool result") for inner, each in blocks])
    failed = block.get("is_error")
    if failed is not None and not isinstance(failed, bool):
        raise place.at("is_error").wrong(failed, "true or false")
    if failed:
        made["is_error"] = True
    return made


def _blocks(place: Place, content: Any) -> Iterator[Placed]:
    """The blocks of a content; a string is one block of text."""
    if isinstance(content, str):
        yield place, {"type": "text", "text": content}
        return
    if not is_list(content):
        raise place.wrong(content, "a string or a list of blocks")
    for at, block in enumerate(content):
        block = place.at(at).mapping(block)
        place.at(at).string(block, "type")
        yield place.at(at), block


def _part(place: Place, block: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    if block["type"] in (*_TOOL_BLOCKS, *_THINKING_BLOCKS):
        raise place.error(f"a {block['type']} block has no place in {where}")
    if block["type"] == "text" or block.get("text") is not None:
        place.string(block, "text")
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    return {key: value for key, value in block.items() if key != "cache_control" and (key, value) != ("text", None)}


def _content(parts: list[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


# -- ShareGPT's


def from_sharegpt(turns: Any, system: Any = None) -> list[Mapping[str, Any]]:
    """ShareGPT's turns (``from`` and ``value``), and a `system` prompt beside them, in OpenAI's shape.

    A turn is a message. The value of a ``function_call`` or ``tool_call`` is JSON of one call or of several; their
    arguments stay as written, a mapping or a JSON string. Such a turn right after what the assistant says is part of
    the same message: the model wrote both before anybody answered. Calls after calls are messages of their own.
    ``weight``, ``train``, ``reasoning_content``, ``name``, ``tool_call_id`` and ``tool_calls`` of a turn are kept;
    its other fields are not part of a conversation, and are left out.

    Refuses an unknown ``from``, a turn without a value, calls that are not ``name`` and ``arguments`` (an ``id`` may
    be there), and two turns that are one message but differ in what is trained.
    """
    made: list[Mapping[str, Any]] = []
    for place, turn in _placed(turns):
        turn = place.mapping(turn)
        message = _from_turn(place, turn)
        last = made[-1] if made else {}
        if turn["from"] in _CALLERS and last.get("role") == "assistant" and not last.get("tool_calls"):
            made[-1] = _joined(place, last, message)
        else:
            made.append(message)
    return with_system(made, system)


def _from_turn(place: Place, turn: Mapping[str, Any]) -> Mapping[str, Any]:
    speaker, value = turn.get("from"), turn.get("value")
    if not isinstance(speaker, str) or speaker not in _SPEAKERS:
        problem = "is missing" if speaker is None else f"{shown(speaker)} is not a known speaker"
        raise place.at("from").error(f"{problem}; use one of {', '.join(sorted(_SPEAKERS))}")
    carried = {key: turn[key] for key in _CARRIED if turn.get(key) is not None}
    if speaker in _CALLERS:
        if "tool_calls" in carried:
            raise place.at("tool_calls").error("says the calls twice, here and in value")
        carried["tool_calls"] = _calls_of_value(place.at("value"), value)
        value = ""
    if value is None:
        if not (carried.get("tool_calls") and _SPEAKERS[speaker] == "assistant"):
            raise place.at("value").error("is missing")
        value = ""
    return _checked(place, {"role": _SPEAKERS[speaker], "content": value, **carried}, {"content": "value"})


def _calls_of_value(place: Place, value: Any) -> list[dict[str, Any]]:
    calls = parsed_json(value, place) if isinstance(value, str) else value
    calls = calls if is_list(calls) else [calls]
    if not calls:
        raise place.error("holds no call")
    return [_call_of_value(place.at(at), call) for at, call in enumerate(calls)]


def _call_of_value(place: Place, call: Any) -> dict[str, Any]:
    call = place.mapping(call)
    function = call.get("function")
    if function is not None:
        call = {**{key: value for key, value in call.items() if key != "function"}, **place.mapping(function)}
    if more := [str(key)[:80] for key in call if key not in _CALL_FIELDS]:
        raise place.error(f"a call is name and arguments; {', '.join(more)} is neither")
    place.string(call, "name")
    if not isinstance(call.get("arguments"), (str, Mapping)):
        raise place.at("arguments").wrong(call.get("arguments"), "a mapping or a JSON string")
    return _call(place, call, call["arguments"])


def _joined(place: Place, said: Mapping[str, Any], called: Mapping[str, Any]) -> Mapping[str, Any]:
    """One message of what the assistant said and the calls right after it."""
    for key in _CARRIED:
        one_sided = key not in _LOSS and (said.get(key) is None or called.get(key) is None)
        if not one_sided and said.get(key) != called.get(key):
            problem = "differs from that of the turn before, but what an assistant says and then calls is one message"
            raise place.at(key).error(problem)
    return {**said, **called, "content": said["content"]}


# -- tools


def openai_tools(tools: Any, *, wrap: bool = False) -> list[dict[str, Any]] | None:
    """Tool schemas in OpenAI's shape: those of Anthropic turned into it, others as they are. JSON text is parsed.

    A function's bare schema (``name``, ``parameters``) is left as it is too, as a template shows what it is given;
    with `wrap` it becomes a tool, as ShareGPT's datasets and the ``functions`` of old mean it. None and an empty
    string are None. Refuses what is not a list of schemas, and Anthropic's server tools, which have no schema to show.
    """
    if isinstance(tools, str):
        tools = parsed_json(tools, Place(field="tools")) if tools.strip() else None
    checked = check_tools(tools)
    return (
        None if checked is None else [_tool(Place(field=f"tools.{at}"), tool, wrap) for at, tool in enumerate(checked)]
    )


def _tool(place: Place, tool: dict[str, Any], wrap: bool) -> dict[str, Any]:
    if "function" in tool:
        return tool
    schema = tool.get("input_schema")
    if schema is not None:
        if not isinstance(schema, Mapping):
            raise place.at("input_schema").wrong(schema, "a JSON schema")
        description = {"description": tool["description"]} if tool.get("description") is not None else {}
        return {"type": "function", "function": {"name": tool["name"], **description, "parameters": schema}}
    if tool.get("type") not in (None, "function"):
        problem = f"is missing; a server tool ({shown(tool['type'])}) has no schema that a template could show"
        raise place.at("input_schema").error(problem)
    if not wrap:
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


# -- what all of them need


def parsed_json(text: str, place: Place) -> Any:
    """The value of JSON text, or InputError."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise place.error("is nested too deeply") from error
    except (ValueError, TypeError) as error:
        raise place.error(f"is not valid JSON: {str(error)[:200]}") from error


def _placed(messages: Any) -> Iterator[tuple[Place, Any]]:
    if not is_list(messages):
        raise Place(field="messages").wrong(messages, "a list of messages")
    if not messages:
        raise InputError("the conversation is empty; give at least one message")
    return ((Place(index), message) for index, message in enumerate(messages))


def _checked(place: Place, message: Mapping[str, Any], given_as: Mapping[str, str]) -> Mapping[str, Any]:
    """A message that `check_messages` takes; its errors name the fields as they were `given_as`."""
    try:
        check_messages([message])
    except InputError as error:
        field = error.field or ""
        for made, given in given_as.items():
            if field == made or field.startswith(f"{made}."):
                field = given + field.removeprefix(made)
        raise InputError(error.problem, message=place.message, field=field) from error
    return message
