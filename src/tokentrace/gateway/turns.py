"""A conversation to continue, its prompt, and the recorded turn. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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

Message = Mapping[str, Any]
_HIDDEN = ("number", "shared", "messages", "reply", "root", "keys", "matcher", "tools", "variables")


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: Messages
    tools: Sequence[Mapping[str, Any]] | None
    renderer: Renderer
    root: Key
    variables: Mapping[str, Any] = field(default_factory=dict)
    continued: bool = False
    prompt_ids: Ids | None = None
    template: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class SentMessages:
    """A request's messages, and the key of each prefix."""

    originals: list[Message] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    matcher: str = ""
    answers: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """A request's prompt: the stream of the turn `base`, if any, then `new_ids`."""

    conversation: Conversation
    sent: SentMessages
    base: RecordedTurn | None
    ids: Ids
    new_ids: Ids
    kinds: Kinds | Kind
    owners: Ids
    ambiguous: bool = False
    refusal: str = ""
    edit: Finding | None = None
    repairs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    choice: int = 0

    @property
    def reused(self) -> int:
        return len(self.ids) - len(self.new_ids)


class RecordedTurn(Struct, frozen=True, kw_only=True):
    """A turn as a store keeps it: `messages` come after the `shared` ones of `base`."""

    number: int
    base: int | None
    shared: int
    messages: list[Message]
    reply: Message
    root: Key
    keys: list[Key]
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
    unenforced: list[str] = []
    late_ids: dict[str, str] = {}
    """The model's ids of calls, by the ids that the agent knows."""
    options: AnswerOptions = AnswerOptions()

    @property
    def depth(self) -> int:
        return self.shared + len(self.messages) + 1

    def summary(self) -> dict[str, Any]:
        fields = {name: value for name, value in msgspec.to_builtins(self).items() if name not in _HIDDEN}
        if self.cause is not None:
            fields["cause"]["meaning"] = self.cause.cause.meaning
        return {"turn": self.number, **fields}


@dataclass(frozen=True, slots=True, eq=False)
class PreparedTurn:
    turn: RecordedTurn
    record: TurnRecord
    trajectory: Trajectory
    sent: SentMessages
