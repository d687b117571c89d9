"""Adapt messages that a template cannot render."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from ..conversation.forms import parse_arguments
from ..conversation.messages import Messages
from ..diagnose.conversation_diff import INSTRUCTIONS
from ..diagnose.message_keys import NOISE
from ..errors import InputError, TokentraceError
from ..rendering.rendered import RenderedTokens
from ..rendering.renderer import Renderer
from ..values.place import Place
from ..values.plain import is_unicode
from .turns import Message

_QUESTION = {"role": "user", "content": "pears"}
_ANSWER = {"role": "assistant", "content": "plums"}
_LATE_WORD = "Cherries"
_FIRST_WORDS = ("Oranges", "Cherries", "Apricots", "Quinces", "Lemons")
_JOINABLE = frozenset({"role", "content", *NOISE})
_TEXT_PARTS = ("text", "input_text", "output_text")


def with_readable_roles(renderer: Renderer, messages: Messages, apart: int = 0) -> Messages:
    """Instructions in roles that the template renders; the same sequence if nothing changes.

    Opening instructions become system messages, are joined to the first (unless `apart`), or
    become user messages. Late ones become user messages.
    """
    first = sum(1 for _ in takewhile(lambda message: message.get("role") in INSTRUCTIONS, messages))
    opening = _opening(renderer, messages[:first], apart)
    late = {str(message["role"]) for message in messages[first:] if message.get("role") in INSTRUCTIONS}
    moved = {role for role in late if not _writes(renderer, "system", late=role)}
    if not moved and opening is None:
        return messages
    body = [_as("user", one) if one.get("role") in moved else one for one in messages[first:]]
    return [*(messages[:first] if opening is None else opening), *body]


def _opening(renderer: Renderer, instructions: Sequence[Message], apart: int) -> list[Message] | None:
    if not instructions or (len(instructions) == 1 and instructions[0]["role"] == "system"):
        return None
    roles = [str(message["role"]) for message in instructions]
    role = next((role for role in (roles[0], "system") if _writes(renderer, role)), None)
    if role is None:
        return None
    head, more = _as(role, instructions[0]), instructions[1:]
    later = tuple(dict.fromkeys(roles[1:]))
    if not more or _writes(renderer, role, *later, *later):
        return None if role == roles[0] else [head, *more]
    if _writes(renderer, role, "system", "system"):
        return [head, *(_as("system", message) for message in more)]
    joined = None if apart else _joined([message.get("content") for message in instructions])
    if joined is not None and all(message.keys() <= _JOINABLE for message in more):
        return [{**head, "content": joined}]
    return [head, *(_as("user", message) for message in more)]


def _joined(contents: Sequence[Any]) -> str | None:
    texts: list[str] = []
    for content in contents:
        parts = content if isinstance(content, (list, tuple)) else [{"type": "text", "text": content or ""}]
        if any(not isinstance(part, Mapping) or part.get("type") not in _TEXT_PARTS for part in parts):
            return None
        texts.append("\n".join(str(part.get("text") or "") for part in parts))
    return "\n\n".join(text for text in texts if text)


def _as(role: str, message: Message) -> Message:
    return message if message.get("role") == role else {**message, "role": role}


def _writes(renderer: Renderer, *roles: str, late: str = "") -> bool:
    """True if the template writes these roles first, or a `late` one last."""
    silent, more = renderer.silent(), [_ANSWER, _QUESTION]
    return renderer.cache.once(
        ("writes", *roles, late),
        lambda: _shows(silent, roles, late, []) and _shows(silent, roles, late, more),
    )


def _shows(renderer: Renderer, roles: Sequence[str], late: str, more: Sequence[Message]) -> bool:
    words = _FIRST_WORDS[: len(roles)]
    begin = [{"role": role, "content": word} for role, word in zip(roles, words, strict=True)]
    end = [{"role": late, "content": _LATE_WORD}] if late else []
    try:
        text = renderer.render([*begin, _QUESTION, *more, *end], add_generation_prompt=True).text
    except TokentraceError:
        return False
    question = text.rfind(_QUESTION["content"])
    if late:
        return text.rfind(_LATE_WORD) >= question
    places = [text.find(word) for word in words]
    return -1 not in places and places == sorted(places) and places[-1] <= question


def render_readably(renderer: Renderer, messages: Messages, **how: Any) -> tuple[RenderedTokens, list[str]]:
    """Render a conversation, if necessary without arguments that are not JSON objects."""
    try:
        return renderer.render(messages, **how), []
    except InputError:
        readable = readable_calls(messages)
        changed = [at for at, message in enumerate(messages) if readable[at] is not message]
        if not changed:
            raise
    note = "the arguments of a call are not a JSON object, so the template got none"
    return renderer.render(readable, **how), [f"message {at}: {note}" for at in changed]


def readable_calls(messages: Messages) -> list[Message]:
    """The messages, with empty mappings for arguments that are not JSON objects."""
    readable = list(messages)
    for at, message in enumerate(messages):
        calls = [_readable_call(call) for call in message.get("tool_calls") or ()]
        if any(new is not old for new, old in zip(calls, message.get("tool_calls") or (), strict=True)):
            readable[at] = {**message, "tool_calls": calls}
    return readable


def _readable_call(call: Message) -> Message:
    match call:
        case {"function": {"arguments": str(text)} as function} if text.strip():
            try:
                is_readable = is_unicode(parse_arguments(text, Place()))
            except InputError:
                is_readable = False
            return call if is_readable else {**call, "function": {**function, "arguments": {}}}
    return call
