"""What a session consists of: what was asked, the prompt made of it, and the turn that was recorded. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..conversation.messages import Messages
from ..diagnose.finding import Finding
from ..diagnose.message_keys import Key
from ..rendering.renderer import Renderer
from ..tokens.kinds import Kind, Kinds
from ..tokens.tokenizer import Ids

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks to be continued."""

    messages: Messages
    tools: Sequence[Mapping[str, Any]] | None
    renderer: Renderer
    """With the template variables of the request."""
    root: Key
    """The key of tools and template variables: conversations under another one share no turn."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    continued: bool = False
    """The last message, an assistant's, is to be continued."""
    prompt_ids: Ids | None = None
    """The prompt itself, where it is given as ids; there are no messages then."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A turn of the session: what it answered, and where its tokens are."""

    number: int
    base: int | None
    """The turn that it went on from."""
    kept: int
    """How many messages of that turn's conversation it kept."""
    messages: tuple[Message, ...]
    """The messages that came after those."""
    reply: Message
    """As the agent was told it, in OpenAI's shape."""
    before: Key
    """The key of the conversation without the reply, and…"""
    key: Key
    """…with it."""
    root: Key
    depth: int
    """How many messages the conversation has with the reply."""
    branch: int
    start: int
    stop: int
    """Where the reply's tokens are in the stream of the branch."""
    finish_reason: str
    cause: Finding | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What else is known of it: the dialect, what its echo needed repaired, how long it took."""


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """A prompt, and what it was made of."""

    asked: Asked
    keys: list[Key]
    base: Recorded | None
    ids: Ids
    new_ids: Ids
    """What comes after the base's stream; the whole prompt where there is no base."""
    kinds: Kinds | Kind
    spans: list[tuple[int, int, int]]
    wire: tuple[bytes, ...] | Callable[[], tuple[bytes, ...]]
    """The prompt as JSON text in pieces."""
    continues: bool = False
    """The base's own turn goes on: it had been cut off."""
    ambiguous: bool = False
    refusal: str = ""
    """Why the bridge from a turn that fits was refused."""
    edit: Finding | None = None
    """The message that is not what was recorded, though it means the same: by reasoning, or a printed field."""
    repairs: tuple[str, ...] = ()
    """How the agent's echo of the reply that it goes on from differs from it."""
    notes: tuple[str, ...] = ()
    choice: int = 0
    """Which of several completions of one request it is."""
    matcher: str = ""
    """The matcher that made the keys."""

    @property
    def reused(self) -> int:
        """How many tokens of the prompt came from the record."""
        return len(self.ids) - len(self.new_ids)
