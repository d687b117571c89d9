"""The parts of a session: a conversation to continue, the prompt made from it, and the recorded turn. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from ..conversation.messages import Messages
from ..diagnose.finding import Finding
from ..diagnose.message_keys import Key
from ..rendering.renderer import Renderer
from ..store.store import TurnRecord
from ..tokens.kinds import Kind, Kinds
from ..tokens.tokenizer import Ids
from ..trajectory.trajectory import Trajectory
from .requests import AnswerOptions

Message: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: Messages
    tools: Sequence[Mapping[str, Any]] | None
    renderer: Renderer
    root: Key
    """The key of tools, template variables and template. Conversations with different roots share no turn."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    continued: bool = False
    prompt_ids: Ids | None = None
    template: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class SentMessages:
    """The messages of a request, kept to compare them with later requests."""

    originals: list[Message] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    """The same, with reasoning in its own field if an agent repeated it as content."""
    keys: list[Key] = field(default_factory=list)
    """The key of each prefix of the conversation, starting with the empty one."""
    matcher: str = ""
    answers: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """A prompt, and the recorded turn that it extends."""

    conversation: Conversation
    sent: SentMessages
    base: RecordedTurn | None
    ids: Ids
    new_ids: Ids
    """What follows the base's stream; the whole prompt if there is no base."""
    kinds: Kinds | Kind
    spans: list[tuple[int, int, int]]
    """Tokens of messages within `new_ids`: start, end and number of the message."""
    ambiguous: bool = False
    refusal: str = ""
    edit: Finding | None = None
    """A message that means the same as the recorded one but has other tokens."""
    repairs: tuple[str, ...] = ()
    """How the agent's echo of the base's reply differs from the reply."""
    notes: tuple[str, ...] = ()
    choice: int = 0

    @property
    def reused(self) -> int:
        return len(self.ids) - len(self.new_ids)


class RecordedTurn(Struct, frozen=True, kw_only=True):
    """A turn as a store keeps it next to its tokens: the messages that it answered, its reply and details."""

    number: int
    base: int | None
    shared: int
    """How many messages of the base's conversation come before this turn's own."""
    messages: list[Mapping[str, Any]]
    reply: Mapping[str, Any]
    root: Key
    keys: list[Key]
    """The keys before its own messages, after each of them, and after the reply."""
    matcher: str
    branch: int
    start: int
    stop: int
    finish_reason: str
    cause: Finding | None = None
    tools: list[Any] | None = None
    variables: dict[str, Any] = {}
    repairs: list[str] = []
    notes: list[str] = []
    reused: int = 0
    response: str = ""
    choice: int = 0
    dialect: str = ""
    model: str = ""
    tokenizer: str = ""
    template: str = ""
    created: int = 0
    time: float = 0.0
    seconds: float = 0.0
    instructions: int = 0
    stopped_by: str | None = None
    calls: list[str] = []
    ignored: list[str] = []
    wishes: list[str] = []
    late_ids: dict[str, str] = {}
    """Maps the id that the agent knows to the id that the model wrote after a call's arguments."""
    options: AnswerOptions = AnswerOptions()

    @property
    def depth(self) -> int:
        return self.shared + len(self.messages) + 1

    def summary(self) -> dict[str, Any]:
        """The turn as a session's state shows it: without messages, keys and tools."""
        hidden = ("messages", "reply", "root", "keys", "matcher", "tools", "variables", "number", "base", "shared")
        fields = {name: value for name, value in msgspec.to_builtins(self).items() if name not in hidden}
        if self.cause is not None:
            fields["cause"]["meaning"] = self.cause.cause.meaning
        return {"turn": self.number, "goes_on_from": self.base, **fields}


@dataclass(frozen=True, slots=True, eq=False)
class PreparedTurn:
    turn: RecordedTurn
    record: TurnRecord
    trajectory: Trajectory
    sent: SentMessages
