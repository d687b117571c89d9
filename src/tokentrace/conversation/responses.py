"""OpenAI's Responses: the input of a request as messages in OpenAI's chat shape. Pure.

An answer of that API is a list of items (reasoning, messages, function calls), and its clients send the items back in
the input of their next request. What the model wrote in one turn is one assistant message here, however many items it
takes: items that follow one another are one turn. Two turns with nothing in between look the same, unless the items
have ids that say which response they are from. Those that `item_id` makes do, and are told apart; items without ids, or
with ids that others made, belong to the turn that they follow.

Every refusal is an InputError that counts items as they were given.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any, Final

from ..errors import InputError, shown
from .forms import MEDIA_PARTS, TEXT_PARTS
from .place import Place, is_list
from .values import check_depth

_ITEM: Final = re.compile(r"(?:rs|msg|fc)_([A-Za-z0-9]+)_[0-9]+")
_ROLES: Final = ("user", "system", "developer", "assistant")
_SEAL: Final = "tokentrace-"
_SERVED: Final = "message, reasoning, function_call and function_call_output"


def item_id(kind: str, response: str, number: int) -> str:
    """The id of an output item: what it is (``rs``, ``msg`` or ``fc``), the response's id, and its number there.

    >>> item_id("msg", "7Hx2", 0), response_of_item("msg_7Hx2_0"), response_of_item("msg_68af4030592c")
    ('msg_7Hx2_0', '7Hx2', None)
    """
    return f"{kind}_{response}_{number}"


def response_of_item(id: Any) -> str | None:
    """The id of the response that an item is from; None where the item's id does not say."""
    found = _ITEM.fullmatch(id) if isinstance(id, str) else None
    return found[1] if found else None


def sealed(reasoning: str) -> str:
    """Reasoning as ``encrypted_content``: a string that clients pass on unread. It is not a secret, only opaque.

    >>> unsealed(sealed("Hm."))
    'Hm.'
    """
    return _SEAL + base64.urlsafe_b64encode(reasoning.encode("utf-8", "surrogatepass")).decode("ascii")


def unsealed(content: str) -> str | None:
    """The reasoning in ``encrypted_content``; None where somebody else made it. ValueError where it is damaged."""
    if not content.startswith(_SEAL):
        return None
    try:
        decoded = base64.b64decode(content.removeprefix(_SEAL), altchars=b"-_", validate=True)
        return decoded.decode("utf-8", "surrogatepass")
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"cannot be decoded: {error}") from None


def in_namespace(namespace: str, name: str) -> str:
    """What a model knows a function of a namespace by; Codex puts the two together in the same way.

    >>> in_namespace("mcp__files__", "read"), in_namespace("agents", "spawn")
    ('mcp__files__read', 'agents__spawn')
    """
    return namespace + name if namespace.endswith("_") or name.startswith("_") else f"{namespace}__{name}"


def from_responses(
    items: Any,
    instructions: str | None = None,
    *,
    open_calls: bool = False,
    references: dict[int, list[str]] | None = None,
) -> list[Mapping[str, Any]]:
    """The input of a request, a string or a list of items, after its `instructions`, as messages.

    - Reasoning is the ``reasoning_content`` of the turn it belongs to: the item's content, else what `sealed` put into
      its ``encrypted_content``, else its summary. Encrypted content that others made cannot be read, and is left out.
    - Texts of a turn's messages are one content if their ids say that one response wrote them; others are parts of it,
      for the template to separate. Of other messages several parts stay parts.
    - The result of a function is a tool message. It has to answer a call that came before, unless `open_calls` says
      that there is more of the conversation than this.
    - A function in a namespace is called by the name that `in_namespace` makes.
    - A reference to an item that `item_id` named is part of a turn like the item itself. What it stands for is not
      known here: `references` is given its id, by the number of the turn's message. Without `references` it is refused.
    - Images, files and audio stay parts, as they are; it is the renderer that refuses them.
    - Ids, status, phase, annotations and logprobs of items say nothing to a model and are left out.

    Refuses custom tools, tools that OpenAI itself runs, and compacted items, by name.
    """
    made: list[Mapping[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(items, str):
        return [*made, {"role": "user", "content": items}]
    if not is_list(items):
        raise Place(field="input").wrong(items, "a string or a list of items")
    if not items:
        raise InputError("is empty; give at least one item", field="input")
    reading = _Reading(made, open_calls, references)
    for at, item in enumerate(items):
        place = Place(at)
        reading.take(place, place.mapping(item))
    return reading.made


class _Reading:
    """The messages that the items so far have become."""

    def __init__(
        self, made: list[Mapping[str, Any]], open_calls: bool, references: dict[int, list[str]] | None
    ) -> None:
        self.made = made
        self._open_calls = open_calls
        self._references = references
        self._called: set[str] = set()
        self._turn: dict[str, Any] | None = None
        """The assistant's last message, as long as more may belong to it, and…"""
        self._at = 0
        """…its number."""
        self._response: str | None = None
        """Which response that message is from, as far as its items say."""
        self._answered = False
        """Whether results came after it."""
        self._known = False
        """Whether the id of its last text says which response wrote it."""

    def take(self, place: Place, item: Mapping[str, Any]) -> None:
        match _type(place, item):
            case "message":
                self._message(place, item)
            case "reasoning":
                text = _reasoning(place, item)
                turn = self._own(item)
                if text:
                    turn["reasoning_content"] = turn.get("reasoning_content", "") + text
            case "function_call":
                call = _call(place, item)
                self._called.add(call["id"])
                self._own(item).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                self._result(place, item)
            case "item_reference":
                self._reference(place, item)
            case kind:
                problem = f"items of type {shown(kind)} are not served; those that are: {_SERVED}"
                raise place.at("type").error(problem)

    def _message(self, place: Place, item: Mapping[str, Any]) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            problem = "is missing" if role is None else f"{shown(role)} is not a role"
            raise place.at("role").error(f"{problem}; use one of {', '.join(_ROLES)}")
        parts = _parts(place.at("content"), item.get("content"))
        if role != "assistant":
            self._turn = None
            self.made.append({"role": role, "content": _content(parts)})
            return
        for at, part in enumerate(parts):
            if part["type"] != "text":
                raise place.at("content").at(at).error(f"{part['type']} has no place in an assistant's message")
        turn, known = self._own(item), response_of_item(item.get("id")) is not None
        turn["content"] = _joined(turn["content"], "".join(part["text"] for part in parts), known and self._known)
        self._known = known

    def _result(self, place: Place, item: Mapping[str, Any]) -> None:
        made: dict[str, Any] = {"role": "tool"}
        if item.get("call_id") is not None:
            made["tool_call_id"] = id = place.string(item, "call_id")
            if id not in self._called and not self._open_calls:
                problem = f"no function_call before it has the id {shown(id)}"
                raise place.at("call_id").error(f"{problem}; send the call too, or previous_response_id")
        self._answered = True
        self.made.append({**made, "content": _content(_parts(place.at("output"), item.get("output")))})

    def _reference(self, place: Place, item: Mapping[str, Any]) -> None:
        id = place.string(item, "id")
        if self._references is None or response_of_item(id) is None:
            problem = f"there is no item {shown(id)} here; send the item itself, or go on from previous_response_id"
            raise place.error(f"item_reference: {problem}")
        self._own(item)
        self._references.setdefault(self._at, []).append(id)
        self._open_calls = True

    def _own(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """The assistant's message that an item is part of.

        After results a new one begins, unless the item is from the same response: some clients send a call, its
        result, the next call of the same turn, and its result.
        """
        response = response_of_item(item.get("id"))
        other = None not in (response, self._response) and response != self._response
        same = response is not None and response == self._response
        if self._turn is None or other or (self._answered and not same):
            self._turn, self._response, self._answered = {"role": "assistant", "content": ""}, None, False
            self._at = len(self.made)
            self.made.append(self._turn)
        self._response = self._response or response
        return self._turn


def _type(place: Place, item: Mapping[str, Any]) -> str:
    kind = item.get("type")
    if kind is None:
        return "message" if "role" in item or "id" not in item else "item_reference"
    return place.string(item, "type")


def _reasoning(place: Place, item: Mapping[str, Any]) -> str:
    said = _texts(place.at("content"), item.get("content"))
    if said:
        return said
    if item.get("encrypted_content") is not None:
        try:
            said = unsealed(place.string(item, "encrypted_content")) or ""
        except ValueError as error:
            raise place.at("encrypted_content").error(f"{error}; send it as it was received") from None
    return said or _texts(place.at("summary"), item.get("summary"))


def _texts(place: Place, parts: Any) -> str:
    if parts is None:
        return ""
    if not is_list(parts):
        raise place.wrong(parts, "a list of texts")
    return "".join(place.at(at).string(place.at(at).mapping(part), "text") for at, part in enumerate(parts))


def _call(place: Place, item: Mapping[str, Any]) -> dict[str, Any]:
    name = place.string(item, "name")
    if item.get("namespace") is not None:
        name = in_namespace(place.string(item, "namespace"), name)
    function = {"name": name, "arguments": place.string(item, "arguments")}
    return {"id": place.string(item, "call_id"), "type": "function", "function": function}


def _content(parts: list[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
    """One text, or a list: whoever writes one text as a string and then as a part means the same."""
    if not parts:
        return ""
    if len(parts) == 1 and parts[0]["type"] == "text":
        return str(parts[0]["text"])
    return parts


def _joined(before: str | list[Mapping[str, Any]], text: str, directly: bool) -> str | list[Mapping[str, Any]]:
    """A turn's content with the text of one more message, in one piece or as a part of its own."""
    if not before or not text:
        return before or text
    if isinstance(before, str):
        return before + text if directly else [{"type": "text", "text": each} for each in (before, text)]
    last = {"type": "text", "text": before[-1]["text"] + text}
    return [*before[:-1], last] if directly else [*before, {"type": "text", "text": text}]


def _parts(place: Place, content: Any) -> list[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not is_list(content):
        raise place.wrong(content, "a string or a list of parts")
    return [_part(place.at(at), place.at(at).mapping(part)) for at, part in enumerate(content)]


def _part(place: Place, part: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = place.string(part, "type")
    if kind in TEXT_PARTS:
        return {"type": "text", "text": place.string(part, TEXT_PARTS[kind])}
    if kind not in MEDIA_PARTS:
        raise place.at("type").error(f"parts of type {shown(kind)} are not known; use input_text")
    check_depth(part, place)
    return part
