"""Convert Anthropic's blocks and ShareGPT's turns to OpenAI's messages and tools.

Conversion invents nothing (a call without an id gets none) and drops nothing in silence that a
model could have seen. Errors count messages as the caller passed them.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import InputError, brief
from ..settings import choose
from ..values.place import Fields, Place, is_list
from ..values.plain import parse_json
from . import messages as checks
from .forms import texts_of
from .messages import ARGUMENTS, REASONING_FIELDS, Messages, placed

_CALLERS = ("function_call", "tool_call")  # speakers whose value is JSON of calls
_SPEAKERS: Mapping[str, str] = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", *_CALLERS), "assistant"),
    **dict.fromkeys(("observation", "tool", "function", "function_response", "tool_response"), "tool"),
}
"""Values of ShareGPT's ``from``, and the role of each."""
_CALL_FIELDS = ("id", "type", "function", "name", "arguments")
_LOSS = ("weight", "train")  # choose what is trained
_CARRIED = (*_LOSS, "reasoning_content", "name", "tool_call_id", "tool_calls")  # from a ShareGPT turn
_FOREIGN = ("tool_calls", "function_call", *REASONING_FIELDS)  # not Anthropic's
_TOOL_BLOCKS = ("tool_use", "tool_result")
_THINKING_BLOCKS = ("thinking", "redacted_thinking")

PlacedBlock = tuple[Place, Fields]


class Shape(enum.StrEnum):
    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    SHAREGPT = "sharegpt"


def shape_of(messages: Any) -> Shape:
    """The shape of `messages`; OpenAI's if nothing indicates another. Never raises.

    ShareGPT's have ``from`` and no ``role``. Anthropic's have blocks of tools or thinking.
    Mistral's thinking has lists in it, or is next to OpenAI's calls or roles.
    """
    rows = [message for message in messages if isinstance(message, Mapping)] if is_list(messages) else []
    if any(row.get("role") is None and row.get("from") is not None for row in rows):
        return Shape.SHAREGPT
    thinks = openai = False
    for row in rows:
        role, content = row.get("role"), row.get("content")
        role = role if isinstance(role, str) else ""
        openai |= is_list(row.get("tool_calls")) or role in ("tool", "function", "developer")
        for block in content if is_list(content) else ():
            kind = block.get("type") if isinstance(block, Mapping) else None
            if not isinstance(kind, str):
                continue
            if kind in _TOOL_BLOCKS:
                return Shape.ANTHROPIC
            thinks |= (
                role == "assistant" and kind in _THINKING_BLOCKS and not is_list(block.get("thinking"))
            )
    return Shape.ANTHROPIC if thinks and not openai else Shape.OPENAI


def openai_messages(messages: Any, shape: Shape | None = None) -> list[Mapping[str, Any]]:
    """`messages` in OpenAI's shape, whatever `shape` they are in (None: `shape_of`)."""
    shape = shape_of(messages) if shape is None else choose(Shape, "shape", shape, InputError)
    if shape is Shape.OPENAI:
        return from_openai(messages)
    return from_anthropic(messages) if shape is Shape.ANTHROPIC else from_sharegpt(messages)


def from_openai(messages: Any) -> list[Fields]:
    """`messages`, with legacy ``function_call`` as ``tool_calls``. Raises InputError for both."""
    converted: list[Fields] = []
    is_legacy = False
    for place, message in placed(messages):
        call, field = message.get("function_call"), place.at("function_call")
        role = role if isinstance(role := message.get("role"), str) else None
        if call is not None and role == "assistant":
            if message.get("tool_calls"):
                raise field.error("cannot be combined with tool_calls; give one of them")
            function = field.mapping(call)
            _call(field, function, "arguments", ARGUMENTS)
            message = {key: value for key, value in message.items() if key != "function_call"}
            message["tool_calls"] = [{"type": "function", "function": function}]
        elif role == "function" and is_legacy:
            role, message = "tool", {**message, "role": "tool"}
        is_legacy = is_legacy if role == "tool" else call is not None
        converted.append(message)
    return converted


def with_system(messages: Messages, system: Any) -> list[Fields]:
    """`messages` after a system message with the text `system`: a string, or Anthropic's text blocks.

    An empty one adds nothing. Raises InputError if there is a system message with another text.
    """
    text = "" if system is None else _content(Place(field="system").parts(system), "a system prompt")
    if not text:
        return list(messages)
    if not isinstance(text, str):
        raise InputError("must be a string or a list of text blocks", field="system")
    if not messages or messages[0].get("role") != "system":
        return [{"role": "system", "content": text}, *messages]
    if "".join(words for _, words in texts_of(messages[0])) != text:
        raise InputError(
            "differs from the system message that the conversation begins with", field="system"
        )
    return list(messages)


def from_anthropic(
    messages: Any, system: Any = None, *, names: dict[str, str] | None = None
) -> list[Mapping[str, Any]]:
    """Anthropic's messages, and their `system` prompt, in OpenAI's shape.

    `names` maps ids of earlier calls to names; the calls in these messages are added.

    - Consecutive text blocks become one text.
    - Thinking is ``reasoning_content``; its place, and redacted thinking, are lost.
    - A result is a tool message with its call's ``name``, and ``is_error`` if set. Text around
      it is a user's.
    - Other blocks (images, documents, server tools) stay as they are and make the content a
      list.
    - ``weight`` and ``train`` go to each new message; signatures, citations and
      ``cache_control`` are dropped.

    Raises InputError for roles and blocks that Anthropic does not define or allow there, and
    for OpenAI's fields.
    """
    converted: list[Fields] = []
    names = {} if names is None else names
    for place, message in placed(messages):
        for field in _FOREIGN:
            if message.get(field) is not None:
                problem = "is OpenAI's, but the conversation is in Anthropic's shape; use content blocks"
                raise place.at(field).error(problem)
        if (role := message.get("role")) not in ("user", "assistant", "system"):
            raise place.at("role").error(f"must be user, assistant or system, not {brief(role)}")
        loss = {key: message[key] for key in _LOSS if message.get(key) is not None}
        blocks = place.at("content").parts(message.get("content"))
        converted += [one | loss for one in _from_blocks(role, blocks, names)]
    return with_system(converted, system)


def _from_blocks(
    role: str, blocks: Iterable[PlacedBlock], names: dict[str, str]
) -> Iterator[dict[str, Any]]:
    where, thinking = f"the {role}'s message", ""
    calls: list[dict[str, Any]] = []
    parts: list[PlacedBlock] = []
    has_results = False
    for place, block in blocks:
        match role, block["type"]:
            case "assistant", "thinking":
                thinking += place.string(block, "thinking")
            case "assistant", "redacted_thinking":
                pass
            case "assistant", "tool_use":
                calls.append(call := _call(place, block, "input", Mapping))
                names |= {call["id"]: call["function"]["name"]} if "id" in call else {}
            case "user", "tool_result":
                if parts:
                    yield {"role": "user", "content": _content(parts, where)}
                parts, has_results = [], True
                yield _result(place, block, names)
            case _:
                parts.append((place, block))
    if parts or not has_results:
        message = {"role": role, "content": _content(parts, where)}
        message |= {"reasoning_content": thinking} if thinking else {}
        yield message | ({"tool_calls": calls} if calls else {})


def _result(place: Place, block: Fields, names: Mapping[str, str]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "tool"}
    if block.get("tool_use_id") is not None:
        message["tool_call_id"] = id = place.string(block, "tool_use_id")
        message |= {"name": names[id]} if id in names else {}
    content = "" if block.get("content") is None else block["content"]
    message["content"] = _content(place.at("content").parts(content), "a tool result")
    failed = place.get(block, "is_error", bool | None, "true or false")
    return message | ({"is_error": True} if failed else {})


def _call(place: Place, fields: Fields, key: str, kinds: Any) -> dict[str, Any]:
    expected = "a mapping" if kinds is Mapping else "a mapping or a JSON string"
    arguments = place.get(fields, key, kinds, expected)
    id = {"id": place.string(fields, "id")} if fields.get("id") is not None else {}
    function = {"name": place.string(fields, "name"), "arguments": arguments}
    return {**id, "type": "function", "function": function}


def _content(blocks: Iterable[PlacedBlock], where: str) -> str | list[Fields]:
    parts: list[Fields] = []
    for place, block in blocks:
        if block["type"] in (*_TOOL_BLOCKS, *_THINKING_BLOCKS):
            raise place.error(f"a {block['type']} block has no place in {where}")
        is_text = block["type"] == "text"
        if is_text or block.get("text") is not None:
            place.string(block, "text")
        names = ("type", "text") if is_text else [key for key in block if key != "cache_control"]
        parts.append({key: block[key] for key in names if (key, block[key]) != ("text", None)})
    return (
        parts if any(part["type"] != "text" for part in parts) else "".join(part["text"] for part in parts)
    )


def from_sharegpt(turns: Any, system: Any = None) -> list[Mapping[str, Any]]:
    """ShareGPT's turns (``from`` and ``value``), and a `system` prompt, in OpenAI's shape.

    The value of a ``function_call`` or ``tool_call`` is JSON of one or several calls. Such a
    turn right after the assistant's text belongs to the same message; calls after calls are a
    new message. Of the other fields, only ``weight``, ``train``, ``reasoning_content``,
    ``name``, ``tool_call_id`` and ``tool_calls`` carry over.

    Raises InputError for an unknown ``from``, a turn without a value, calls with unknown
    fields, and two turns of one message that disagree about what is trained.
    """
    messages: list[Fields] = []
    for place, turn in placed(turns):
        message = _from_turn(place, turn)
        last = messages[-1] if messages else {}
        if turn["from"] not in _CALLERS or last.get("role") != "assistant" or last.get("tool_calls"):
            messages.append(message)
            continue
        for key in _CARRIED:
            one_sided = key not in _LOSS and (last.get(key) is None or message.get(key) is None)
            if not one_sided and last.get(key) != message.get(key):
                reason = "an assistant's text and the calls after it are one message"
                raise place.at(key).error(f"differs from the turn before, but {reason}")
        messages[-1] = {**last, **message, "content": last["content"]}
    return with_system(messages, system)


def _from_turn(place: Place, turn: Fields) -> Fields:
    value, role = turn.get("value"), _SPEAKERS.get(str(turn.get("from")))
    if role is None:
        speakers = ", ".join(sorted(_SPEAKERS))
        raise place.at("from").error(f"must be one of {speakers}, not {brief(turn.get('from'))}")
    carried = {key: turn[key] for key in _CARRIED if turn.get(key) is not None}
    if turn["from"] in _CALLERS:
        if "tool_calls" in carried:
            raise place.at("tool_calls").error("cannot be combined with calls in value; give one of them")
        carried["tool_calls"], value = _calls_of_value(place.at("value"), value), ""
    elif value is None and not (carried.get("tool_calls") and role == "assistant"):
        raise place.at("value").error("is missing")
    message = {"role": role, "content": "" if value is None else value, **carried}
    checks.check_content(place.at("value"), role, message["content"])
    return checks.check_message(place, message)


def _calls_of_value(place: Place, value: Any) -> list[dict[str, Any]]:
    values = parse_json(value, place) if isinstance(value, str) else value
    calls = []
    for inner, one in place.each(values if is_list(values) else [values]):
        call = inner.mapping(one)
        if call.get("function") is not None:
            call = {**call, **inner.mapping(call["function"])}
        if more := [str(key)[:80] for key in call if key not in _CALL_FIELDS]:
            raise inner.error(f"a call has a name and arguments; {', '.join(more)} is neither")
        calls.append(_call(inner, call, "arguments", str | Mapping))
    if not calls:
        raise place.error("contains no call")
    return calls


def openai_tools(tools: Any, *, wrap: bool = False) -> list[dict[str, Any]] | None:
    """Tool schemas, a list or JSON text, in OpenAI's shape. Converts Anthropic's.

    `wrap` makes a function's bare schema a tool, as in ShareGPT's datasets and the legacy
    ``functions``. Raises InputError for Anthropic's server tools, which have no schema.
    """
    if isinstance(tools, str):
        tools = parse_json(tools, Place(field="tools")) if tools.strip() else None
    checked = Place(field="tools").each(checks.check_tools(tools) or ())
    return [_tool(place, tool, wrap) for place, tool in checked] or None


def _tool(place: Place, tool: dict[str, Any], wrap: bool) -> dict[str, Any]:
    schema = tool.get("input_schema")
    if "function" in tool:
        return tool
    if schema is not None:
        place.get(tool, "input_schema", Mapping, "a JSON schema")
        description = {"description": tool["description"]} if tool.get("description") is not None else {}
        return {"type": "function", "function": {"name": tool["name"], **description, "parameters": schema}}
    if tool.get("type") not in (None, "function"):
        problem = (
            f"is missing; a server tool ({brief(tool['type'])}) has no schema that a template could show"
        )
        raise place.at("input_schema").error(problem)
    function = {key: value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": function} if wrap else tool
