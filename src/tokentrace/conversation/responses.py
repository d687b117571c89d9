"""OpenAI's Responses: the input of a request as messages in OpenAI's chat shape.

Clients send the items of an answer (reasoning, messages, function calls) back in their next request. Consecutive items
are one assistant message. Ids of `item_id` name the response, and so tell two turns apart that have nothing in between;
items with other ids belong to the turn that they follow. Errors are InputError and count items.
"""

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..errors import InputError, brief
from .forms import MEDIA_PARTS, TEXT_PARTS
from .messages import Messages
from .place import Place, is_list
from .values import check_depth

_ITEM: Final = re.compile(r"(?:rs|msg|fc)_([A-Za-z0-9]+)_[0-9]+")
_ROLES: Final = ("user", "system", "developer", "assistant")
_SEAL: Final = "tokentrace-"
_SERVED: Final = "message, reasoning, function_call and function_call_output"


def item_id(kind: str, response: str, number: int) -> str:
    """The id of an output item: its kind (``rs``, ``msg``, ``fc``), the response's id, and its number there.

    >>> item_id("msg", "7Hx2", 0), response_of_item("msg_7Hx2_0"), response_of_item("msg_68af4030592c")
    ('msg_7Hx2_0', '7Hx2', None)
    """
    return f"{kind}_{response}_{number}"


def response_of_item(id: Any) -> str | None:
    """The id of the response that an item is from, or None if the item's id does not contain it."""
    match = _ITEM.fullmatch(id) if isinstance(id, str) else None
    return match[1] if match else None


def sealed(reasoning: str) -> str:
    """Reasoning as ``encrypted_content``: a string that clients pass on unread. It is opaque, not secret."""
    return _SEAL + base64.urlsafe_b64encode(reasoning.encode("utf-8", "surrogatepass")).decode("ascii")


def unsealed(content: str) -> str | None:
    """The reasoning in ``encrypted_content``, or None if another server wrote it. Raises ValueError if damaged."""
    if not content.startswith(_SEAL):
        return None
    try:
        decoded = base64.b64decode(content.removeprefix(_SEAL), altchars=b"-_", validate=True)
        return decoded.decode("utf-8", "surrogatepass")
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"cannot be decoded: {error}") from None


def in_namespace(namespace: str, name: str) -> str:
    """The model's name for a function in a namespace, joined as Codex does it.

    >>> in_namespace("mcp__files__", "read"), in_namespace("agents", "spawn")
    ('mcp__files__read', 'agents__spawn')
    """
    return namespace + name if namespace.endswith("_") or name.startswith("_") else f"{namespace}__{name}"


def from_responses(
    items: Any,
    instructions: str | None = None,
    *,
    before: Messages = (),
    open_calls: bool = False,
    references: dict[int, list[str]] | None = None,
    starts: list[int] | None = None,
) -> list[Mapping[str, Any]]:
    """The input of a request, a string or a list of items, after its `instructions`, as messages.

    Messages `before` the items come after the instructions. `starts` gets how many messages come before each item.

    - Reasoning is the ``reasoning_content`` of its turn: the item's content, else the sealed text in
      ``encrypted_content``, else its summary. Encrypted content of other servers is dropped.
    - Texts of a turn are one content if their ids name one response; otherwise they stay parts.
    - The result of a function is a tool message. It must answer an earlier call, unless `open_calls`: then the
      conversation began before these items.
    - A reference to an item is part of a turn, like the item. `references` collects its id by the number of the turn's
      message; without `references` it is an error.
    - Ids, status, phase, annotations and logprobs are dropped.

    Raises InputError for custom tools, tools that OpenAI itself runs, and compacted items.
    """
    first = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(items, str):
        return [*first, *before, {"role": "user", "content": items}]
    if not is_list(items):
        raise Place(field="input").wrong(items, "a string or a list of items")
    if not items:
        raise InputError("is empty; give at least one item", field="input")
    call_ids = {call["id"] for message in before for call in message.get("tool_calls") or ()}
    reader = _Reader([*first, *before], open_calls, references, call_ids)
    for at, item in enumerate(items):
        if starts is not None:
            starts.append(len(reader.messages))
        reader.read(Place(at), Place(at).mapping(item))
    return reader.messages


@dataclass(slots=True)
class _Reader:
    """The messages from the items so far, and the assistant's turn that may continue."""

    messages: list[Mapping[str, Any]]
    open_calls: bool
    references: dict[int, list[str]] | None
    call_ids: set[str]
    turn: dict[str, Any] | None = None
    response: str | None = None
    """The response of the turn, if the ids of its items name it."""
    answered: bool = False
    """Whether results followed the turn."""
    text_has_id: bool = False
    """Whether the id of the turn's last text names its response."""

    def read(self, place: Place, item: Mapping[str, Any]) -> None:
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
                call = {"id": id, "type": "function", "function": function}
                self.call_ids.add(id)
                self._turn_of(item).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                message: dict[str, Any] = {"role": "tool"}
                if item.get("call_id") is not None:
                    message["tool_call_id"] = id = place.string(item, "call_id")
                    if id not in self.call_ids and not self.open_calls:
                        problem = f"no function_call before it has the id {brief(id)}"
                        raise place.at("call_id").error(f"{problem}; send the call too, or previous_response_id")
                self.answered = True
                self.messages.append({**message, "content": _content(place.at("output"), item.get("output"))})
            case "item_reference":
                id = place.string(item, "id")
                if self.references is None or response_of_item(id) is None:
                    problem = f"there is no item {brief(id)} here; send the item itself, or previous_response_id"
                    raise place.error(f"item_reference: {problem}")
                turn = self._turn_of(item)
                index = next(at for at, message in enumerate(self.messages) if message is turn)
                self.references.setdefault(index, []).append(id)
                self.open_calls = True
            case kind:
                problem = f"items of type {brief(kind)} are not served; those that are: {_SERVED}"
                raise place.at("type").error(problem)

    def _message(self, place: Place, item: Mapping[str, Any]) -> None:
        role, content = item.get("role"), _content(place.at("content"), item.get("content"))
        if role not in _ROLES:
            raise place.at("role").error(f"must be one of {', '.join(_ROLES)}, not {brief(role)}")
        if role != "assistant":
            self.turn = None
            self.messages.append({"role": role, "content": content})
            return
        texts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for at, part in enumerate(texts):
            if part["type"] != "text":
                raise place.at("content").at(at).error(f"{part['type']} has no place in an assistant's message")
        turn, has_id = self._turn_of(item), response_of_item(item.get("id")) is not None
        text = "".join(part["text"] for part in texts)
        turn["content"] = _joined(turn["content"], text, has_id and self.text_has_id)
        self.text_has_id = has_id

    def _turn_of(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """The assistant's message that an item is part of.

        Results end a turn, unless the next item is from the same response: some clients send a call, its result, the
        next call of the same turn, and its result.
        """
        response = response_of_item(item.get("id"))
        is_same = response is not None and response == self.response
        is_other = not is_same and None not in (response, self.response)
        if self.turn is None or is_other or (self.answered and not is_same):
            self.turn, self.response, self.answered = {"role": "assistant", "content": ""}, None, False
            self.messages.append(self.turn)
        self.response = self.response or response
        return self.turn


def _reasoning(place: Place, item: Mapping[str, Any]) -> str:
    content, text = item.get("encrypted_content"), _texts(place, item, "content")
    if not text and content is not None:
        try:
            text = unsealed(place.string(item, "encrypted_content")) or ""
        except ValueError as error:
            raise place.at("encrypted_content").error(f"{error}; send it as it was received") from None
    return text or _texts(place, item, "summary")


def _texts(place: Place, item: Mapping[str, Any], field: str) -> str:
    place, parts = place.at(field), item.get(field) or ()
    if not is_list(parts):
        raise place.wrong(parts, "a list of texts")
    return "".join(place.at(at).string(place.at(at).mapping(part), "text") for at, part in enumerate(parts))


def _content(place: Place, content: Any) -> str | list[Mapping[str, Any]]:
    """One text as a string, several parts as a list: of text, or media as they are."""
    parts: list[Mapping[str, Any]] = []
    for at, part in place.parts(content):
        kind = part["type"]
        if kind in TEXT_PARTS:
            part = {"type": "text", "text": at.string(part, TEXT_PARTS[kind])}
        elif kind not in MEDIA_PARTS:
            raise at.at("type").error(f"parts of type {brief(kind)} are not known; use input_text")
        check_depth(part, at)
        parts.append(part)
    if len(parts) == 1 and parts[0]["type"] == "text":
        return str(parts[0]["text"])
    return parts or ""


def _joined(before: str | list[Mapping[str, Any]], text: str, directly: bool) -> str | list[Mapping[str, Any]]:
    """A turn's content with the text of one more message, joined to the last text or as a new part."""
    if not before or not text:
        return before or text
    texts = [before] if isinstance(before, str) else [part["text"] for part in before]
    texts = [*texts[:-1], texts[-1] + text] if directly else [*texts, text]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": each} for each in texts]
