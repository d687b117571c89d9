"""Instructions in the middle of a conversation, for templates that have no place for them.

Claude Code sends system messages after the first user message. Some templates write them where they stand. Others
refuse them, leave them out, or put them at the beginning, which would change every token after it. With those such a
message is a user's: its words reach the model, where they were said. Which kind a template is of is found out by
trying, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

from ..errors import TokentraceError
from ..rendering.renderer import Renderer

INSTRUCTIONS: Final = ("system", "developer")
"""Roles of those who run the agent."""

_WORDS: Final = ("Oranges", "pears", "plums", "Cherries")
_KNOWN: Final[WeakKeyDictionary[Renderer, dict[str, bool]]] = WeakKeyDictionary()

Message = Mapping[str, Any]


def with_late_instructions(renderer: Renderer, messages: Sequence[Message]) -> Sequence[Message]:
    """The messages as the template can show them: the same ones, or late instructions as a user's."""
    first = next((at for at, message in enumerate(messages) if message.get("role") not in INSTRUCTIONS), len(messages))
    late = {str(message["role"]) for message in messages[first:] if message.get("role") in INSTRUCTIONS}
    moved = {role for role in late if not _writes_late(renderer, role)}
    if not moved:
        return messages
    return [
        {**message, "role": "user"} if at >= first and message.get("role") in moved else message
        for at, message in enumerate(messages)
    ]


def _writes_late(renderer: Renderer, role: str) -> bool:
    known = _KNOWN.setdefault(renderer, {})
    if role not in known:
        known[role] = _tried(renderer.silent(), role)
    return known[role]


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
