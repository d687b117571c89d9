"""OpenAI's Responses API: the input of a request as messages in OpenAI's chat shape.

Consecutive items of an answer are one assistant message. Ids from `item_id` name the response,
which separates two turns in a row. An InputError counts items.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError, brief
from ..values.place import Fields, Place, is_list
from ..values.plain import check_depth
from .forms import MEDIA_PARTS, TEXT_PARTS
from .messages import Messages

_ITEM = re.compile(r"(?:rs|msg|fc)_([A-Za-z0-9]+)_[0-9]+")
_ROLES = ("user", "system", "developer", "assistant")
_SEAL = "tokentrace-"
_SERVED = "message, reasoning, function_call and function_call_output"


def item_id(kind: str, response: str, number: int) -> str:
    """The id of an output item: its kind (``rs``, ``msg``, ``fc``), its response's id, its number there.

    >>> item_id("msg", "7Hx2", 0), response_of_item("msg_7Hx2_0"), response_of_item("msg_68af4030592c")
    ('msg_7Hx2_0', '7Hx2', None)
    """
    return f"{kind}_{response}_{number}"


def response_of_item(id: Any) -> str | None:
    """The id of an item's response; None if the item's `id` does not name it."""
    match = _ITEM.fullmatch(id) if isinstance(id, str) else None
    return match[1] if match else None


def sealed(reasoning: str) -> str:
    """Reasoning as ``encrypted_content``, which clients pass on unread. It is opaque, not secret."""
    return _SEAL + base64.urlsafe_b64encode(reasoning.encode("utf-8", "surrogatepass")).decode("ascii")


def unsealed(content: str) -> str | None:
    """The reasoning in ``encrypted_content``; None for another server's. Raises ValueError if damaged."""
    if not content.startswith(_SEAL):
        return None
    decoded = base64.b64decode(content.removeprefix(_SEAL), altchars=b"-_", validate=True)
    return decoded.decode("utf-8", "surrogatepass")


def in_namespace(namespace: str, name: str) -> str:
    """The model's name for a function in a namespace, joined as by Codex."""
    return namespace + name if namespace.endswith("_") or name.startswith("_") else f"{namespace}__{name}"


def from_responses(items: Any, *, open_calls: bool = False) -> list[Mapping[str, Any]]:
    """The input of a request as messages, like `read_items`, without references."""
    reader = read_items(items, open_calls=open_calls)
    for message in reader.references:
        raise Place(message, "item_reference").error("there is no such item here; send the item itself")
    return reader.messages


def read_items(items: Any, before: Messages = (), *, open_calls: bool = False) -> ItemReader:
    """The input of a request, a string or a list of items, as messages that follow `before`.

    - Reasoning is its turn's ``reasoning_content``: the item's content, else the sealed text in
      ``encrypted_content``, else the summary. Other servers' encrypted content is dropped.
    - Texts of a turn are one content if their ids name one response; otherwise they stay parts.
    - A result must answer an earlier call, unless `open_calls`: the conversation began before.
    - Ids, status, phase, annotations and logprobs are dropped.

    Raises InputError for custom tools, tools that OpenAI itself runs, and compacted items.
    """
    reader = ItemReader([*before], open_calls)
    if isinstance(items, str):
        reader.messages.append({"role": "user", "content": items})
        return reader
    if not is_list(items):
        raise Place(field="input").wrong(items, "a string or a list of items")
    if not items:
        raise InputError("is empty; give at least one item", field="input")
    for at, item in enumerate(items):
        reader.starts.append(len(reader.messages))
        reader.read(Place(at), Place(at).mapping(item))
    return reader


@dataclass(slots=True)
class ItemReader:
    """The messages from the items so far, and the assistant's turn that may continue."""

    messages: list[Any]
    open_calls: bool
    starts: list[int] = field(default_factory=list)
    """How many messages come before each item."""
    references: dict[int, list[str]] = field(default_factory=dict)
    """The ids of referenced items, by the number of their turn's message."""
    turn: int = -1  # the number of the open turn's message, if one is open
    response: str | None = None  # the turn's, if the ids of its items name it
    texts: list[str] = field(default_factory=list)
    text_has_id: bool = False  # True if the id of the last text names its response

    def read(self, place: Place, item: Fields) -> None:
        kind = "message" if "role" in item or "id" not in item else "item_reference"
        match kind if item.get("type") is None else place.string(item, "type"):
            case "message":
                self._message(place, item)
            case "reasoning":
                text, turn = _reasoning(place, item), self._turn_of(item)
                if text:
                    turn["reasoning_content"] = turn.get("reasoning_content", "") + text
            case "function_call":
                name, id = place.string(item, "name"), place.string(item, "call_id")
                if item.get("namespace") is not None:
                    name = in_namespace(place.string(item, "namespace"), name)
                function = {"name": name, "arguments": place.string(item, "arguments")}
                calls = self._turn_of(item).setdefault("tool_calls", [])
                calls.append({"id": id, "type": "function", "function": function})
            case "function_call_output":
                message: dict[str, Any] = {"role": "tool"}
                if item.get("call_id") is not None:
                    message["tool_call_id"] = id = place.string(item, "call_id")
                    self._check_called(place.at("call_id"), id)
                self.messages.append({**message, "content": _content(_parts(place, item, "output"))})
            case "item_reference":
                id = place.string(item, "id")
                if response_of_item(id) is None:
                    problem = f"item_reference: there is no item {brief(id)} here"
                    raise place.error(f"{problem}; send the item itself, or previous_response_id")
                self._turn_of(item)
                self.references.setdefault(self.turn, []).append(id)
                self.open_calls = True
            case kind:
                problem = f"items of type {brief(kind)} are not supported; supported types are {_SERVED}"
                raise place.at("type").error(problem)

    def _message(self, place: Place, item: Fields) -> None:
        role, parts = item.get("role"), _parts(place, item, "content")
        if role not in _ROLES:
            raise place.at("role").error(f"must be one of {', '.join(_ROLES)}, not {brief(role)}")
        if role != "assistant":
            self.turn = -1
            self.messages.append({"role": role, "content": _content(parts)})
            return
        for at, part in place.at("content").each(parts):
            if part["type"] != "text":
                raise at.error(f"{part['type']} has no place in an assistant's message")
        turn, has_id = self._turn_of(item), response_of_item(item.get("id")) is not None
        text = "".join(part["text"] for part in parts)
        if text and self.texts and has_id and self.text_has_id:
            self.texts[-1] += text
        elif text:
            self.texts.append(text)
        turn["content"] = _content([{"type": "text", "text": each} for each in self.texts])
        self.text_has_id = has_id

    def _turn_of(self, item: Fields) -> Any:
        """The assistant's message that an item is part of.

        Results end a turn, unless the next item is from its response: some clients alternate
        calls and results.
        """
        response = response_of_item(item.get("id"))
        is_same = response is not None and response == self.response
        is_answered = self.turn != len(self.messages) - 1
        if self.turn < 0 or (not is_same and (is_answered or (response and self.response))):
            self.turn, self.response, self.texts = len(self.messages), None, []
            self.messages.append({"role": "assistant", "content": ""})
        self.response = self.response or response
        return self.messages[self.turn]

    def _check_called(self, place: Place, id: str) -> None:
        calls = (call for message in reversed(self.messages) for call in message.get("tool_calls") or ())
        if not self.open_calls and all(call["id"] != id for call in calls):
            problem = f"no function_call before it has the id {brief(id)}"
            raise place.error(f"{problem}; send the call too, or previous_response_id")


def _reasoning(place: Place, item: Fields) -> str:
    content, text = item.get("encrypted_content"), _texts(place, item, "content")
    if not text and content is not None:
        try:
            text = unsealed(place.string(item, "encrypted_content")) or ""
        except ValueError as error:
            problem = f"cannot be decoded: {error}; send it as it was received"
            raise place.at("encrypted_content").error(problem) from None
    return text or _texts(place, item, "summary")


def _texts(place: Place, item: Fields, field: str) -> str:
    place, parts = place.at(field), item.get(field) or ()
    if not is_list(parts):
        raise place.wrong(parts, "a list of texts")
    return "".join(at.string(at.mapping(part), "text") for at, part in place.each(parts))


def _parts(place: Place, item: Fields, field: str) -> list[Fields]:
    parts: list[Fields] = []
    for at, part in place.at(field).parts(item.get(field)):
        kind = part["type"]
        if kind in TEXT_PARTS:
            part = {"type": "text", "text": at.string(part, TEXT_PARTS[kind])}
        elif kind not in MEDIA_PARTS:
            raise at.at("type").error(f"{brief(kind)} is not a known type of part; use input_text")
        check_depth(part, at)
        parts.append(part)
    return parts


def _content(parts: list[Any]) -> str | list[Any]:
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts or ""
