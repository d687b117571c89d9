"""Why a request does not continue the conversation before it. Pure.

No token depends on it. The first message that differs is judged in this order: messages that moved
or disappeared, another beginning, a message replaced by another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from ..conversation.messages import RESULT_ROLES, Messages
from .finding import Cause, Finding
from .message_keys import NOISE, Key, Message, message_key, reasoning
from .wording import changed_words, is_cut, is_nonce, is_similar, is_summary, leaves, retells, tells_of_call

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
    cause, words = case.moved() or (case.other_beginning() if opening else None) or case.replaced()
    return Finding(cause, message=shared, words=f"{_place(shared, sent[shared])}: {words}")


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
    words = [f"{what}: {_listed(names)}" for what, names in changes.items() if names]
    if theirs and not ours:
        words[:1] = ["sent without tools"]
    elif not words and list(ours) != list(theirs):
        words = ["the tools are in another order"]
    text = "; ".join(words) or "the tools are formatted another way"
    return Finding(Cause.CHANGED_TOOLS, words=f"the same conversation: {text}")


def changed_message(at: int, new: Message, old: Message) -> Finding:
    """A message of the same meaning with other reasoning, or another printed field."""
    thought, before = reasoning(new), reasoning(old)
    if new.get("role") == "assistant" and thought and thought != before:
        words = f"its reasoning changed: {changed_words(thought, before)}"
    else:
        words = _changed_fields(new, old)
    return Finding(Cause.EDIT, message=at, words=f"{_place(at, new)}: {words}")


def text_of(message: Message) -> str:
    """The text of a message's content."""
    content = message.get("content")
    if isinstance(content, str) or not content:
        return content or ""
    if not isinstance(content, (list, tuple)):
        return str(content)
    return "".join(str(part.get("text") or "") if isinstance(part, Mapping) else str(part) for part in content)


Verdict = tuple[Cause, str]


class _Divergence:
    """The first message in which two conversations differ, and what follows it."""

    def __init__(self, sent: Messages, recorded: Messages, shared: int, recent: Sequence[Messages]) -> None:
        self.sent, self.recorded, self.recent = sent[shared:], recorded[shared:], (recorded, *recent)
        self.before, self.shared = sent[:shared], shared
        self.new, self.old = sent[shared], recorded[shared]
        self.role, self.old_role = str(self.new.get("role")), str(self.old.get("role"))
        self.text, self.old_text = text_of(self.new), text_of(self.old)
        self.ours, self.theirs = _keys(self.sent), _keys(self.recorded)
        self.fewer = len(self.ours) < len(self.theirs)
        self.is_summary = self.fewer and is_summary(self.text) and not is_summary(self.old_text)
        self.continues_alike = self.ours[1:2] == self.theirs[1:2] != []
        self.is_nonce = is_nonce(self.text, self.old_text)

    @cached_property
    def _changes(self) -> str:
        return changed_words(self.text, self.old_text)

    @property
    def _compacted(self) -> Verdict:
        still = len({*self.ours[1:]} & {*self.theirs})
        tail = f", {still} of them kept" if still else ""
        return Cause.COMPACTION, f"{_count(len(self.theirs))} replaced by {len(self.ours)}{tail}"

    @property
    def _nonce(self) -> Verdict:
        return Cause.NONCE, f"only a number, a date or an id in it changed: {self._changes}"

    @property
    def _changed_system(self) -> Verdict:
        return Cause.CHANGED_SYSTEM, f"the instructions have changed: {self._changes}"

    def moved(self) -> Verdict | None:
        """Messages that are gone, or new, while the remaining ones are the same."""
        ours, theirs = self.ours, self.theirs
        later = ours.count(theirs[0]) >= theirs.count(theirs[0]) or self._calls_at is not None
        if ours[0] in theirs[1:] and later:
            return Cause.EDIT, "messages are in another order"
        in_place = sum(one == other for one, other in zip(ours, theirs, strict=False))
        gone, same = _skipped(ours, theirs, self.new)
        if gone and same > in_place:
            roles = {message.get("role") for message in self.recorded[:gone]}
            if roles <= INSTRUCTIONS:
                return Cause.CHANGED_SYSTEM, "instructions before it were left out"
            return Cause.EDIT if roles == {"user"} else Cause.COMPACTION, f"{_count(gone)} left out before it"
        new, same = _skipped(theirs, ours, self.old)
        if new and same > in_place and not self.is_summary:
            system = self.role in INSTRUCTIONS
            words = "instructions were put in" if system else f"{_count(new)} put in here"
            return Cause.CHANGED_SYSTEM if system else Cause.EDIT, words
        return None

    def other_beginning(self) -> Verdict | None:
        """Another first question, or other instructions."""
        sub_agent = Cause.SUB_AGENT, "no recorded conversation begins like this"
        first, old_first = _first_question(self.sent), _first_question(self.recorded)
        if _is_task(first, self.recent):
            return Cause.SUB_AGENT, TASK_OF_A_CALL
        if self.role not in INSTRUCTIONS and self.old_role not in INSTRUCTIONS:
            alike = self.role == self.old_role and (self.is_nonce or is_similar(self.text, self.old_text))
            if self.continues_alike:
                return None
            return self._compacted if self.is_summary or self._keeps_later else None if alike else sub_agent
        both = first is not None and old_first is not None
        same_start = both and _keys([first or {}]) == _keys([old_first or {}])
        text, old_text = text_of(first or {}), text_of(old_first or {})
        alike = same_start or not both or self._keeps_later or is_nonce(text, old_text)
        if self.role == self.old_role and self.is_nonce and alike:
            return self._nonce
        if self.is_summary or (self._keeps_later and not same_start):
            return self._compacted
        if both and not same_start:
            if is_summary(text) and self.fewer:
                return self._compacted
            if not (is_similar(self.text, self.old_text) and is_similar(text, old_text)):
                return sub_agent
        return self._changed_system

    def replaced(self) -> Verdict:
        """A message replaced by another."""
        if self.role != self.old_role:
            return self._other_role()
        if self.is_summary and not self.continues_alike:
            return self._compacted
        if self.role in RESULT_ROLES:
            return self._changed_result()
        if self.role == "assistant":
            return self._changed_reply()
        short_question = self.role == "user" and len(self.sent) == 1 and len(self.text.split()) < _FEW_WORDS
        if self.is_nonce and not short_question:
            return self._nonce
        if self.role in INSTRUCTIONS:
            return self._changed_system
        if not self.continues_alike and (self._keeps_later or self._retells):
            return self._compacted
        return Cause.EDIT, self._edit_words()

    def _changed_result(self) -> Verdict:
        if not is_cut(self.text, self.old_text):
            return self._nonce if self.is_nonce else (Cause.EDIT, self._edit_words())
        pairs = zip(self.sent[1:], self.recorded[1:], strict=False)
        results = (pair for pair in pairs if pair[0].get("role") == pair[1].get("role") == self.role)
        later = sum(is_cut(text_of(new), text_of(old)) for new, old in results)
        more = f"; and {later} more after it" if later else ""
        lengths = f"{len(self.old_text)} characters became {len(self.text)}"
        return Cause.TRIMMED_RESULTS, f"the result was cut or blanked, {lengths}{more}"

    def _changed_reply(self) -> Verdict:
        new, old = ([name for name, _ in _calls(message)] for message in (self.new, self.old))
        if old and not new:
            if self._tells_of_calls():
                return Cause.CALLS_AS_TEXT, "calls of the model are words now"
            if self._calls_at is not None:
                return Cause.EDIT, f"the model's calls are in another message now, in message {self._calls_at}"
            return Cause.EDIT, f"the model's calls were left out ({_listed(old)})"
        if new and not old:
            return Cause.REWRITTEN_CALL, "the agent turned text of the model into calls"
        if new and _call_keys(self.new) != _call_keys(self.old):
            words = f"the arguments of {_listed(sorted(set(new)))} are not those of the model"
            if new != old:
                words = f"the model called {_listed(old)}, the agent sends {_listed(new)}"
            if len(new) != len(old):
                words = f"{len(old)} calls of the model became {len(new)}"
            return Cause.REWRITTEN_CALL, words
        return self._compacted if self._retells and not self.continues_alike else (Cause.EDIT, self._edit_words())

    def _edit_words(self) -> str:
        if self.text == self.old_text:
            return _changed_fields(self.new, self.old)
        if pieces := self._pieces():
            return f"it was split into {pieces} messages"
        if not self.text:
            return "its content was left out"
        if self.role == "assistant" and (thought := reasoning(self.old)) and thought in self.text:
            return f"its reasoning is part of its text now: {self._changes}"
        return f"it differs from before: {self._changes}"

    def _pieces(self) -> int:
        """How many messages the old one was split into; 0 if it was not."""
        whole, joined = "".join(self.old_text.split()), ""
        for count, message in enumerate(self.sent, 1):
            joined += "".join(text_of(message).split())
            if message.get("role") != self.role or not whole.startswith(joined):
                return 0
            if joined == whole:
                return count if count > 1 else 0
        return 0

    def _other_role(self) -> Verdict:
        by_model = self.old_role == "assistant"
        if self.is_summary:
            return self._compacted
        if by_model and self._tells_of_calls():
            return Cause.CALLS_AS_TEXT, "calls of the model are words now"
        if by_model and sum(message.get("role") == "assistant" for message in self.recorded) == 1:
            if self.theirs[0] in self.ours:
                return Cause.EDIT, f"{_count(self.ours.index(self.theirs[0]))} put in here"
            return Cause.RETRY, "the reply before it was left out, and another one is sampled"
        asks_again = by_model and self.role == "user" and len(self.theirs) > 3
        asks_again = asks_again and bool(self.before) and self.before[-1].get("role") == "user"
        if self._keeps_later or self._retells or asks_again:
            return self._compacted
        if by_model and len(self.sent) == 1:
            return Cause.RETRY, f"it goes back to an earlier point: {_count(len(self.theirs))} left out"
        if self.fewer:
            return self._compacted
        return Cause.EDIT, f"a message of the role {self.old_role[:20]} was here before"

    # -- signs

    @cached_property
    def _calls_at(self) -> int | None:
        """The later message that has the calls of the old one now."""
        calls = _call_keys(self.old)
        later = enumerate(self.sent[1:], self.shared + 1)
        return next((at for at, message in later if calls and _call_keys(message) == calls), None)

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

    @cached_property
    def _retells(self) -> bool:
        dropped = self.recorded[1:]
        return len(dropped) > 2 and retells(self.text, "\n".join(map(text_of, dropped)))

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
    """The conversation closest to the request, and how many messages both start with."""
    ours = _keys(sent)
    questions = {key for key, message in zip(ours, sent, strict=True) if message.get("role") not in INSTRUCTIONS}
    candidates = [(recorded, shared, _keys(recorded))]
    candidates += (
        (other, shared_prefix(ours, keys), keys) for other, keys in zip(recent, map(_keys, recent), strict=True)
    )
    # a conversation that begins the other was not rewritten
    rewritten = [one for at, one in enumerate(candidates) if not at or one[1] < min(len(sent), len(one[0]))]
    best = max(rewritten, key=lambda one: (len(questions.intersection(one[2])), one[1], len(one[0])))
    return best[0], best[1]


def shared_prefix(ours: Sequence[Key], theirs: Sequence[Key]) -> int:
    """The number of messages that two conversations begin with alike."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, pair in pairs if pair[0] != pair[1]), min(len(ours), len(theirs)))


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


def _is_task(first: Message | None, conversations: Sequence[Messages]) -> bool:
    """True if the first question is the argument of a recorded call."""
    task = "" if first is None or first.get("role") != "user" else text_of(first).strip()
    if len(task) < _DISTINCT:
        return False
    calls = (call for messages in conversations for message in messages for call in _calls(message))
    texts = (text.strip() for _, arguments in calls for text in leaves(arguments) if isinstance(text, str))
    return any(text == task or (len(text) >= 2 * _DISTINCT and text in task) for text in texts)


def _function(call: Message) -> Message:
    function = call.get("function") or call
    return function if isinstance(function, Mapping) else {}


def _calls(message: Message) -> list[tuple[str, Any]]:
    functions = map(_function, message.get("tool_calls") or ())
    return [(str(function.get("name")), function.get("arguments")) for function in functions]


def _call_keys(message: Message) -> list[Key]:
    return _keys({"role": "assistant", "tool_calls": [call]} for call in message.get("tool_calls") or ())


def _changed_fields(new: Message, old: Message) -> str:
    names = [name for name in {**old, **new} if name not in NOISE and (new.get(name) or "") != (old.get(name) or "")]
    changes = [f"{name[:60]}: {changed_words(str(new.get(name) or ''), str(old.get(name) or ''))}" for name in names]
    return f"the text is the same, but another field is not: {'; '.join(changes[:3]) or 'an empty one'}"


def _place(at: int, message: Message) -> str:
    return f"message {at} ({str(message.get('role'))[:20]})"


def _listed(names: Sequence[str], limit: int = 5) -> str:
    text = ", ".join(str(name)[:60] for name in names[:limit])
    return f"{text} and {len(names) - limit} more" if len(names) > limit else text


def _count(number: int) -> str:
    return f"{number} message was" if number == 1 else f"{number} messages were"
