"""Instructions that a template has no place for: in the middle, a developer's, or more than one at the beginning.

Claude Code sends system messages after the first user message; codex, pi and opencode send their instructions as a
developer's. Some templates write them where they stand. Others refuse them, leave them out, or put those in the middle
at the beginning, which would change every token after it. With those, instructions at the beginning are the system
message, or are joined to it, and those in the middle are a user's: their words reach the model, where they were said.
Which kind a template is of is found out by trying, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

from ..errors import TokentraceError
from ..rendering.renderer import Renderer
from .matching import NOISE

INSTRUCTIONS: Final = ("system", "developer")
"""Roles of those who run the agent."""

_WORDS: Final = ("Oranges", "pears", "plums", "Cherries")
_FIRST_WORDS: Final = ("Oranges", "Cherries", "Apricots", "Quinces", "Lemons")
_JOINED: Final = frozenset({"role", "content", *NOISE})
"""A message with other fields than these is not joined to another: they would be lost."""
_TEXT_PARTS: Final = ("text", "input_text", "output_text")
_KNOWN: Final[WeakKeyDictionary[Renderer, dict[tuple[str, ...], bool]]] = WeakKeyDictionary()

Message = Mapping[str, Any]


def with_late_instructions(renderer: Renderer, messages: Sequence[Message], apart: int = 0) -> Sequence[Message]:
    """The messages as the template can show them: the same ones, or instructions in another place or role.

    Nothing is joined to the first `apart` messages: instructions that a later request may replace. What has no place at
    all stays as it is: the renderer refuses it, or notes that it was lost.
    """
    first = next((at for at, message in enumerate(messages) if message.get("role") not in INSTRUCTIONS), len(messages))
    begin = _at_the_beginning(renderer, messages[:first], apart)
    late = {str(message["role"]) for message in messages[first:] if message.get("role") in INSTRUCTIONS}
    moved = {role for role in late if not _writes_late(renderer, role)}
    if not moved:
        return messages if begin is None else [*begin, *messages[first:]]
    rest = [_as("user", message) if message.get("role") in moved else message for message in messages[first:]]
    return [*(messages[:first] if begin is None else begin), *rest]


# -- at the beginning


def _at_the_beginning(renderer: Renderer, given: Sequence[Message], apart: int) -> list[Message] | None:
    """The instructions that a conversation begins with, as the template writes them; None: as they are."""
    if not given or (len(given) == 1 and given[0]["role"] == "system"):
        return None
    roles = [str(message["role"]) for message in given]
    role = next((role for role in (roles[0], "system") if _writes_first(renderer, role)), None)
    if role is None:
        return None
    head, more = _as(role, given[0]), given[1:]
    if not more or _writes_first(renderer, role, *dict.fromkeys(roles[1:])):
        return None if role == roles[0] else [head, *more]
    if _writes_first(renderer, role, "system"):
        return [head, *(_as("system", message) for message in more)]
    joined = None if apart else _joined([message.get("content") for message in given])
    if joined is not None and all(message.keys() <= _JOINED for message in more):
        return [{**head, "content": joined}]
    return [head, *(_as("user", message) for message in more)]


def _joined(contents: Sequence[Any]) -> str | None:
    """Texts as one, with a blank line between them and a new line between parts; None where there is more than text."""
    texts: list[str] = []
    for content in contents:
        parts = content if isinstance(content, (list, tuple)) else [{"type": "text", "text": content or ""}]
        if any(not isinstance(part, Mapping) or part.get("type") not in _TEXT_PARTS for part in parts):
            return None
        texts.append("\n".join(str(part.get("text") or "") for part in parts))
    return "\n\n".join(text for text in texts if text)


def _as(role: str, message: Message) -> Message:
    return message if message.get("role") == role else {**message, "role": role}


# -- what a template does


def _writes_first(renderer: Renderer, role: str, *more: str) -> bool:
    """Whether a conversation may begin with a message of a role and several of others, which are written in order."""
    known = _KNOWN.setdefault(renderer, {})
    key = ("first", role, *more)
    if key not in known:
        known[key] = _tried_first(renderer.silent(), [role, *more, *more])
    return known[key]


def _tried_first(renderer: Renderer, roles: Sequence[str]) -> bool:
    _, asked, answered, _ = _WORDS
    words = _FIRST_WORDS[: len(roles)]
    begin = [{"role": role, "content": word} for role, word in zip(roles, words, strict=True)]
    question = {"role": "user", "content": asked}
    for more in ([], [{"role": "assistant", "content": answered}, question]):
        try:
            text = renderer.render([*begin, question, *more], add_generation_prompt=True).text
        except TokentraceError:
            return False
        places = [text.find(word) for word in words]
        if -1 in places or places != sorted(places) or places[-1] > text.rfind(asked):
            return False
    return True


def _writes_late(renderer: Renderer, role: str) -> bool:
    known = _KNOWN.setdefault(renderer, {})
    key = ("late", role)
    if key not in known:
        known[key] = _tried(renderer.silent(), role)
    return known[key]


def _tried(renderer: Renderer, role: str) -> bool:
    """Whether a late message of a role is written after what was said before it, which stays as it was."""
    begin, asked, answered, late = _WORDS
    before = [{"role": "system", "content": begin}, {"role": "user", "content": asked}]
    for more in ([], [{"role": "assistant", "content": answered}, {"role": "user", "content": asked}]):
        try:
            text = renderer.render([*before, *more, {"role": role, "content": late}], add_generation_prompt=True).text
        except TokentraceError:
            return False
        if text.rfind(late) < text.rfind(asked):
            return False
    return True
