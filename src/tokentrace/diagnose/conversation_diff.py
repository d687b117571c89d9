"""Why a request does not continue the conversation before it. Pure.

No token depends on it. The first message that differs is judged in this order: messages that moved
or disappeared, another beginning, a message replaced by another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from ..conversation.forms import texts_of
from ..conversation.messages import RESULT_ROLES, Messages
from ..show.visible import counted
from .finding import Cause, Finding
from .message_keys import NOISE, Key, Message, message_key
from .wording import changed_words, is_cut, is_nonce, is_similar, is_summary, leaves, tells_of_call

INSTRUCTIONS: Final = frozenset({"system", "developer"})
"""Roles of the operator."""
TASK_OF_A_CALL: Final = "a call of another conversation gave it this task"
_FEW_WORDS: Final = 6
"""In a shorter question a number is what it asks about."""
_DISTINCT: Final = 20
"""Messages of so many characters are hardly ever sent twice by chance."""


def find_cause(sent: Messages, recorded: Messages, shared: int, *, recent: Sequence[Messages] = ()) -> Finding:
    """Why `sent` leaves the `recorded` conversation after its first `shared` messages.

    `recorded` includes its last reply. One of the `recent` conversations may have the call
    that gave a sub-agent its task, or be the one that was compacted.
    """
    if shared == len(sent):
        dropped = len(recorded) - shared
        words = f"it goes back to an earlier point: the last {dropped} messages are left out"
        words = words if dropped > 1 else "the same messages were sent again: another reply is sampled"
        return Finding(Cause.RETRY, words=words)
    if shared == len(recorded):
        return Finding(Cause.RETRY, message=shared, words="the conversation goes on from an earlier point")
    opening = all(_is_instruction(message) for message in sent[:shared])
    if opening:
        recorded, shared = _closest(sent, recorded, shared, recent)
    case = _Divergence(_Side(sent[shared:]), _Side(recorded[shared:]), sent[:shared], (recorded, *recent))
    moved = case.moved()
    cause = moved or (case.other_beginning() if opening else None) or case.replaced()
    words = f"{counted(len(recorded) - shared, 'message')} before, {len(sent) - shared} now"
    if cause is Cause.SUB_AGENT:
        words = TASK_OF_A_CALL if case.is_task else words
    elif moved is None and case.same_role and cause is not Cause.COMPACTION:
        words = _changes(sent[shared], recorded[shared])
    return _finding(cause, shared, sent[shared], words)


def changed_message(at: int, new: Message, old: Message) -> Finding:
    """A message of the same meaning with other reasoning, or another printed field."""
    return _finding(Cause.EDIT, at, new, _changes(new, old))


def changed_tools(
    sent: Sequence[Message] | None,
    recorded: Sequence[Message] | None,
    variables: Mapping[str, Any] | None = None,
    recorded_variables: Mapping[str, Any] | None = None,
) -> Finding:
    """The same conversation with other tools or template variables: which ones."""
    ours, theirs = ({str(_function(tool).get("name")): tool for tool in tools or ()} for tools in (sent, recorded))
    now, before = variables or {}, recorded_variables or {}
    changes = {
        "new tools": [name for name in ours if name not in theirs],
        "tools left out": [name for name in theirs if name not in ours],
        "tools described otherwise": [name for name in ours if name in theirs and ours[name] != theirs[name]],
        "template variables": sorted(name for name in {*now, *before} if now.get(name) != before.get(name)),
    }
    words = [f"{what}: {', '.join(name[:60] for name in names[:9])}" for what, names in changes.items() if names]
    text = "; ".join(words) or "the tools are in another order, or formatted another way"
    return Finding(Cause.CHANGED_TOOLS, words=f"the same conversation: {text}")


def text_of(message: Message) -> str:
    content = message.get("content")
    return str(content) if isinstance(content, Mapping) else "".join(text for _, text in texts_of(message))


def shared_prefix(ours: Sequence[Key], theirs: Sequence[Key]) -> int:
    """The number of messages that two conversations begin with alike."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, pair in pairs if pair[0] != pair[1]), min(len(ours), len(theirs)))


def _finding(cause: Cause, at: int, message: Message, words: str) -> Finding:
    place = f"message {at} ({str(message.get('role'))[:20]})"
    return Finding(cause, message=at, words=f"{place}: {cause.meaning.rstrip('.')}: {words}")


def _changes(new: Message, old: Message) -> str:
    """The first field in which two messages differ, and its words."""
    for name in ("content", "tool_calls", *old, *new):
        one, other = (_field_text(message, name) for message in (new, old))
        if one != other and name not in NOISE:
            return f"{name[:60]}: {changed_words(one, other)}"
    return "an empty field"


def _field_text(message: Message, name: str) -> str:
    if name == "content":
        return text_of(message)
    if name != "tool_calls":
        return str(message.get(name) or "")
    calls = ((name, json.dumps([*leaves(it)], ensure_ascii=False, default=str)) for name, it in _calls(message))
    return "\n".join(map(" ".join, calls))


# -- the two conversations, from the first message that differs on


class _Side:
    def __init__(self, messages: Messages) -> None:
        self.messages, self.first = messages, messages[0]
        self.keys = [message_key(message) for message in messages]
        self.role, self.text = str(self.first.get("role")), text_of(self.first)
        self.is_instruction = _is_instruction(self.first)
        calls = ({"role": "assistant", "tool_calls": [call]} for call in self.first.get("tool_calls") or ())
        self.calls = [message_key(call) for call in calls]
        self.question: Message = next((one for one in messages if not _is_instruction(one)), {})

    def gone(self, other: _Side) -> tuple[int, int]:
        """How many messages are missing before `other` continues with the next ones, and with how many.

        One equal message is enough if it is the last of either conversation and distinct.
        """
        for gone in range(1, len(self.keys)):
            if self.keys[gone] == other.keys[0]:
                same = shared_prefix(other.keys, self.keys[gone:])
                last = min(len(other.keys), len(self.keys) - gone) == 1
                if same > 1 or (last and _is_distinct(other.first)):
                    return gone, same
        return 0, 0


@dataclass
class _Divergence:
    """What was sent in place of what was recorded."""

    new: _Side
    old: _Side
    before: Messages
    recent: Sequence[Messages]

    def __post_init__(self) -> None:
        new, old = self.new, self.old
        self.same_role = new.role == old.role
        self.fewer = len(new.keys) < len(old.keys)
        self.is_summary = self.fewer and is_summary(new.text) and not is_summary(old.text)
        self.continues_alike = new.keys[1:2] == old.keys[1:2] != []
        self.is_nonce = is_nonce(new.text, old.text)

    def moved(self) -> Cause | None:
        """Messages that are gone, or new, while the remaining ones are the same."""
        new, old = self.new, self.old
        apart = bool(old.calls) and any(_Side([message]).calls == old.calls for message in new.messages[1:])
        if new.keys[0] in old.keys[1:] and (apart or new.keys.count(old.keys[0]) >= old.keys.count(old.keys[0])):
            return Cause.EDIT  # in another order
        in_place = sum(one == other for one, other in zip(new.keys, old.keys, strict=False))
        gone, same = old.gone(new)
        if gone and same > in_place:
            roles = {message.get("role") for message in old.messages[:gone]}
            other = Cause.EDIT if roles == {"user"} else Cause.COMPACTION
            return Cause.CHANGED_SYSTEM if roles <= INSTRUCTIONS else other
        if new.gone(old)[1] > in_place and not self.is_summary:
            return Cause.CHANGED_SYSTEM if new.is_instruction else Cause.EDIT
        return None

    def other_beginning(self) -> Cause | None:
        """Another first question, or other instructions."""
        new, old = self.new, self.old
        if self.is_task:
            return Cause.SUB_AGENT
        if not new.is_instruction and not old.is_instruction:
            if self.continues_alike:
                return None
            alike = self.same_role and (self.is_nonce or is_similar(new.text, old.text))
            other = None if alike else Cause.SUB_AGENT
            return Cause.COMPACTION if self.is_summary or self._keeps_later else other
        both = bool(new.question and old.question)
        same_start = both and message_key(new.question) == message_key(old.question)
        text, old_text = text_of(new.question), text_of(old.question)
        alike = same_start or not both or self._keeps_later or is_nonce(text, old_text)
        if self.same_role and self.is_nonce and alike:
            return Cause.NONCE
        summary = both and not same_start and self.fewer and is_summary(text)
        if self.is_summary or summary or (self._keeps_later and not same_start):
            return Cause.COMPACTION
        similar = is_similar(new.text, old.text) and is_similar(text, old_text)
        return Cause.CHANGED_SYSTEM if not both or same_start or similar else Cause.SUB_AGENT

    def replaced(self) -> Cause:
        new, old, is_result = self.new, self.old, self.new.role in RESULT_ROLES
        if not self.same_role:
            return self._other_role()
        if self.is_summary and not self.continues_alike:
            return Cause.COMPACTION
        if new.role == "assistant":
            if old.calls and not new.calls:
                return Cause.CALLS_AS_TEXT if self._tells_of_calls() else Cause.EDIT
            return Cause.REWRITTEN_CALL if new.calls != old.calls else Cause.EDIT
        if is_result and is_cut(new.text, old.text):
            return Cause.TRIMMED_RESULTS
        short_question = new.role == "user" and len(new.keys) == 1 and len(new.text.split()) < _FEW_WORDS
        if self.is_nonce and not short_question:
            return Cause.NONCE
        if new.is_instruction:
            return Cause.CHANGED_SYSTEM
        replaces = not is_result and self._keeps_later and not self.continues_alike
        return Cause.COMPACTION if replaces else Cause.EDIT

    def _other_role(self) -> Cause:
        new, old = self.new, self.old
        by_model = old.role == "assistant"
        if self.is_summary:
            return Cause.COMPACTION
        if by_model and self._tells_of_calls():
            return Cause.CALLS_AS_TEXT
        if by_model and sum(message.get("role") == "assistant" for message in old.messages) == 1:
            return Cause.EDIT if old.keys[0] in new.keys else Cause.RETRY
        asks_again = new.role == "user" and [one.get("role") for one in self.before[-1:]] == ["user"]
        if self._keeps_later or (by_model and asks_again and len(old.keys) > 3):
            return Cause.COMPACTION
        if by_model and len(new.keys) == 1:
            return Cause.RETRY
        return Cause.COMPACTION if self.fewer else Cause.EDIT

    # -- signs

    @cached_property
    def is_task(self) -> bool:
        """True if the first question is the argument of a recorded call."""
        task = text_of(self.new.question).strip() if self.new.question.get("role") == "user" else ""
        if len(task) < _DISTINCT:
            return False
        calls = (call for messages in self.recent for message in messages for call in _calls(message))
        texts = (text.strip() for _, arguments in calls for text in leaves(arguments) if isinstance(text, str))
        return any(text == task or (len(text) >= 2 * _DISTINCT and text in task) for text in texts)

    @cached_property
    def _keeps_later(self) -> bool:
        """True if a later message was recorded after an answer: what is between was replaced.

        opencode asks for a title of the user's question, then asks the question itself.
        """
        places = {key: at for at, key in enumerate(self.old.keys)}
        roles = [message.get("role") for message in self.old.messages]
        answered = roles.index("assistant") if "assistant" in roles else len(roles)
        pairs = enumerate(zip(self.new.keys, self.new.messages, strict=True))
        return any(0 < at < places.get(key, 0) >= answered and _is_distinct(one) for at, (key, one) in pairs)

    def _tells_of_calls(self) -> bool:
        """True if the next two messages put a call of the old one into words."""
        return any(
            tells_of_call(text_of(message), name, arguments, by_user=message.get("role") != "assistant")
            for name, arguments in _calls(self.old.first)
            for message in self.new.messages[:2]
        )


def _closest(sent: Messages, recorded: Messages, shared: int, recent: Sequence[Messages]) -> tuple[Messages, int]:
    """The conversation that shares most messages, and with how many both begin."""
    ours = [message_key(message) for message in sent]
    questions = {key for key, message in zip(ours, sent, strict=True) if not _is_instruction(message)}
    best = recorded, shared
    most = (-1, 0, 0)
    for other in (recorded, *recent):
        keys = [message_key(message) for message in other]
        same = shared if other is recorded else shared_prefix(ours, keys)
        rank = (len(questions.intersection(keys)), same, len(other))
        # a conversation that begins the other was not rewritten
        if rank > most and (other is recorded or same < min(len(sent), len(other))):
            best, most = (other, same), rank
    return best


def _is_instruction(message: Message) -> bool:
    return message.get("role") in INSTRUCTIONS


def _is_distinct(message: Message) -> bool:
    return len(text_of(message)) >= _DISTINCT or bool(message.get("tool_calls"))


def _function(call: Message) -> Message:
    function = call.get("function") or call
    return function if isinstance(function, Mapping) else {}


def _calls(message: Message) -> list[tuple[str, Any]]:
    functions = map(_function, message.get("tool_calls") or ())
    return [(str(function.get("name")), function.get("arguments")) for function in functions]
