"""Why a request does not continue the conversation before it. Pure.

No token depends on it. The first message that differs is judged in this order: messages that moved
or disappeared, another beginning, a message replaced by another.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

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
    opening = all(message.get("role") in INSTRUCTIONS for message in sent[:shared])
    if opening:
        recorded, shared = _closest(sent, recorded, shared, recent)
    case = _Divergence(sent, recorded, shared, recent)
    moved = case.moved()
    cause = moved or (case.other_beginning() if opening else None) or case.replaced()
    words = _counts(case.sent, case.recorded)
    if cause is Cause.SUB_AGENT:
        words = TASK_OF_A_CALL if case.is_task else words
    elif moved is None and case.role == case.old_role and cause is not Cause.COMPACTION:
        words = _changes(case.new, case.old)
    return _finding(cause, shared, case.new, words)


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
    now, before = dict(variables or {}), dict(recorded_variables or {})
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
    if isinstance(content, str) or not content:
        return content or ""
    if not isinstance(content, (list, tuple)):
        return str(content)
    return "".join(str(part.get("text") or "") if isinstance(part, Mapping) else str(part) for part in content)


def shared_prefix(ours: Sequence[Key], theirs: Sequence[Key]) -> int:
    """The number of messages that two conversations begin with alike."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, pair in pairs if pair[0] != pair[1]), min(len(ours), len(theirs)))


# -- sentences


def _finding(cause: Cause, at: int | None, message: Message, words: str) -> Finding:
    place = "" if at is None else f"message {at} ({str(message.get('role'))[:20]}): "
    return Finding(cause, message=at, words=f"{place}{cause.meaning.rstrip('.')}: {words}")


def _counts(sent: Messages, recorded: Messages) -> str:
    return f"{counted(len(recorded), 'message')} before, {len(sent)} now"


def _changes(new: Message, old: Message) -> str:
    """The first field in which two messages differ, and its words."""
    names = [name for name in ("content", "tool_calls", *old, *new) if name not in NOISE]
    for name in names:
        one, other = (_field_text(message, name) for message in (new, old))
        if one != other:
            return f"{name[:60]}: {changed_words(one, other)}"
    return "an empty field"


def _field_text(message: Message, name: str) -> str:
    if name == "content":
        return text_of(message)
    if name == "tool_calls":
        calls = (
            f"{name} {json.dumps([*leaves(arguments)], ensure_ascii=False, default=str)}"
            for name, arguments in _calls(message)
        )
        return "\n".join(calls)
    return str(message.get(name) or "")


class _Divergence:
    """The first message in which two conversations differ, and what follows it."""

    def __init__(self, sent: Messages, recorded: Messages, shared: int, recent: Sequence[Messages]) -> None:
        self.sent, self.recorded, self.recent = sent[shared:], recorded[shared:], (recorded, *recent)
        self.before, self.new, self.old = sent[:shared], sent[shared], recorded[shared]
        self.role, self.old_role = str(self.new.get("role")), str(self.old.get("role"))
        self.text, self.old_text = text_of(self.new), text_of(self.old)
        self.ours, self.theirs = _keys(self.sent), _keys(self.recorded)
        self.fewer = len(self.ours) < len(self.theirs)
        self.is_summary = self.fewer and is_summary(self.text) and not is_summary(self.old_text)
        self.continues_alike = self.ours[1:2] == self.theirs[1:2] != []
        self.is_nonce = is_nonce(self.text, self.old_text)
        self.first, self.old_first = _first_question(self.sent), _first_question(self.recorded)

    def moved(self) -> Cause | None:
        """Messages that are gone, or new, while the remaining ones are the same."""
        ours, theirs = self.ours, self.theirs
        calls = _call_keys(self.old)
        apart = any(calls and _call_keys(message) == calls for message in self.sent[1:])
        if ours[0] in theirs[1:] and (apart or ours.count(theirs[0]) >= theirs.count(theirs[0])):
            return Cause.EDIT  # in another order
        in_place = sum(one == other for one, other in zip(ours, theirs, strict=False))
        gone, same = _skipped(ours, theirs, self.new)
        if gone and same > in_place:
            roles = {message.get("role") for message in self.recorded[:gone]}
            other = Cause.EDIT if roles == {"user"} else Cause.COMPACTION
            return Cause.CHANGED_SYSTEM if roles <= INSTRUCTIONS else other
        new, same = _skipped(theirs, ours, self.old)
        if new and same > in_place and not self.is_summary:
            return Cause.CHANGED_SYSTEM if self.role in INSTRUCTIONS else Cause.EDIT
        return None

    def other_beginning(self) -> Cause | None:
        """Another first question, or other instructions."""
        if self.is_task:
            return Cause.SUB_AGENT
        if self.role not in INSTRUCTIONS and self.old_role not in INSTRUCTIONS:
            alike = self.role == self.old_role and (self.is_nonce or is_similar(self.text, self.old_text))
            if self.is_summary or self._keeps_later:
                return None if self.continues_alike else Cause.COMPACTION
            return None if alike or self.continues_alike else Cause.SUB_AGENT
        both = self.first is not None and self.old_first is not None
        same_start = both and _keys([self.first or {}]) == _keys([self.old_first or {}])
        text, old_text = text_of(self.first or {}), text_of(self.old_first or {})
        alike = same_start or not both or self._keeps_later or is_nonce(text, old_text)
        if self.role == self.old_role and self.is_nonce and alike:
            return Cause.NONCE
        summary = both and not same_start and self.fewer and is_summary(text)
        if self.is_summary or summary or (self._keeps_later and not same_start):
            return Cause.COMPACTION
        similar = is_similar(self.text, self.old_text) and is_similar(text, old_text)
        return Cause.CHANGED_SYSTEM if not both or same_start or similar else Cause.SUB_AGENT

    def replaced(self) -> Cause:
        if self.role != self.old_role:
            return self._other_role()
        if self.is_summary and not self.continues_alike:
            return Cause.COMPACTION
        if self.role == "assistant":
            new, old = _call_keys(self.new), _call_keys(self.old)
            if old and not new:
                return Cause.CALLS_AS_TEXT if self._tells_of_calls() else Cause.EDIT
            if new != old:
                return Cause.REWRITTEN_CALL
            return Cause.EDIT
        if self.role in RESULT_ROLES and is_cut(self.text, self.old_text):
            return Cause.TRIMMED_RESULTS
        short_question = self.role == "user" and len(self.sent) == 1 and len(self.text.split()) < _FEW_WORDS
        if self.is_nonce and not short_question:
            return Cause.NONCE
        if self.role in INSTRUCTIONS:
            return Cause.CHANGED_SYSTEM
        replaces = self.role not in RESULT_ROLES and self._keeps_later
        return Cause.COMPACTION if replaces and not self.continues_alike else Cause.EDIT

    def _other_role(self) -> Cause:
        by_model = self.old_role == "assistant"
        if self.is_summary:
            return Cause.COMPACTION
        if by_model and self._tells_of_calls():
            return Cause.CALLS_AS_TEXT
        if by_model and sum(message.get("role") == "assistant" for message in self.recorded) == 1:
            return Cause.EDIT if self.theirs[0] in self.ours else Cause.RETRY
        asks_again = by_model and self.role == "user" and len(self.theirs) > 3
        asks_again = asks_again and bool(self.before) and self.before[-1].get("role") == "user"
        if self._keeps_later or asks_again:
            return Cause.COMPACTION
        if by_model and len(self.sent) == 1:
            return Cause.RETRY
        return Cause.COMPACTION if self.fewer else Cause.EDIT

    # -- signs

    @cached_property
    def is_task(self) -> bool:
        """True if the first question is the argument of a recorded call."""
        first = self.first or {}
        task = text_of(first).strip() if first.get("role") == "user" else ""
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
        places = {key: at for at, key in enumerate(self.theirs)}
        roles = [message.get("role") for message in self.recorded]
        answered = roles.index("assistant") if "assistant" in roles else len(roles)
        return any(
            places.get(key, 0) > at and places[key] >= answered and _is_distinct(self.sent[at])
            for at, key in enumerate(self.ours)
            if at
        )

    def _tells_of_calls(self) -> bool:
        """True if the next two messages put a call of the old one into words."""
        return any(
            tells_of_call(text_of(message), name, arguments, by_user=message.get("role") != "assistant")
            for name, arguments in _calls(self.old)
            for message in self.sent[:2]
        )


# -- messages


def _keys(messages: Iterable[Message]) -> list[Key]:
    return [message_key(message) for message in messages]


def _closest(sent: Messages, recorded: Messages, shared: int, recent: Sequence[Messages]) -> tuple[Messages, int]:
    ours = _keys(sent)
    questions = {key for key, message in zip(ours, sent, strict=True) if message.get("role") not in INSTRUCTIONS}
    candidates = [(recorded, shared, _keys(recorded))]
    candidates += ((other, shared_prefix(ours, keys), keys) for other in recent for keys in [_keys(other)])
    # a conversation that begins the other was not rewritten
    rewritten = [one for at, one in enumerate(candidates) if not at or one[1] < min(len(sent), len(one[0]))]
    best = max(rewritten, key=lambda one: (len(questions.intersection(one[2])), one[1], len(one[0])))
    return best[0], best[1]


def _skipped(ours: Sequence[Key], theirs: Sequence[Key], first: Message) -> tuple[int, int]:
    """How many of `theirs` are missing before `ours` continue with them, and for how long.

    One equal message, `first`, is enough if it is the last of either conversation and distinct.
    """
    for gone in range(1, len(theirs)):
        same = shared_prefix(ours, theirs[gone:]) if theirs[gone] == ours[0] else 0
        if same > 1 or (same == min(len(ours), len(theirs) - gone) == 1 and _is_distinct(first)):
            return gone, same
    return 0, 0


def _is_distinct(message: Message) -> bool:
    return len(text_of(message)) >= _DISTINCT or bool(message.get("tool_calls"))


def _first_question(conversation: Messages) -> Message | None:
    return next((message for message in conversation if message.get("role") not in INSTRUCTIONS), None)


def _function(call: Message) -> Message:
    function = call.get("function") or call
    return function if isinstance(function, Mapping) else {}


def _calls(message: Message) -> list[tuple[str, Any]]:
    functions = map(_function, message.get("tool_calls") or ())
    return [(str(function.get("name")), function.get("arguments")) for function in functions]


def _call_keys(message: Message) -> list[Key]:
    return _keys({"role": "assistant", "tool_calls": [call]} for call in message.get("tool_calls") or ())
