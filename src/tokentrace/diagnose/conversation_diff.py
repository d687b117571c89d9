"""Why a request does not continue the conversation before it. Pure: two conversations in, a finding out.

No token depends on it. `find_cause` looks at the first message that differs, in this order:
messages that moved or disappeared, another beginning, a message replaced by one of its role,
a message replaced by one of another role.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from ..conversation.messages import Messages
from .finding import Cause, Finding
from .message_keys import NOISE, Key, Message, message_key, reasoning
from .wording import (
    argument_texts,
    changed_words,
    is_cut,
    is_nonce,
    is_similar,
    is_summary,
    retells,
    tells_of_call,
)

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
        if dropped <= 1:
            return Finding(Cause.RETRY, words="the same messages were sent again: another reply is sampled")
        words = f"it goes back to an earlier point: the last {dropped} messages are left out"
        return Finding(Cause.RETRY, words=words)
    if shared == len(recorded):
        return Finding(Cause.RETRY, message=shared, words="the conversation goes on from an earlier point")
    opening = all(message.get("role") in INSTRUCTIONS for message in sent[:shared])
    if opening:
        recorded, shared = _closest(sent, recorded, shared, recent)
    return _Divergence(sent, recorded, shared, recent).explain(opening)


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
    """A message of the same meaning, but with other reasoning or another printed field."""
    thought, before = reasoning(new), reasoning(old)
    if new.get("role") == "assistant" and thought and thought != before:
        words = f"its reasoning changed: {changed_words(thought, before)}"
    else:
        words = f"the text is the same, but another field is not: {_changed_fields(new, old)}"
    return Finding(Cause.EDIT, message=at, words=f"{_place(at, new)}: {words}")


def text_of(message: Message) -> str:
    """The text of a message's content."""
    content = message.get("content")
    if isinstance(content, str) or not content:
        return content or ""
    if not isinstance(content, (list, tuple)):
        return str(content)
    return "".join(str(part.get("text") or "") if isinstance(part, Mapping) else str(part) for part in content)


class _Divergence:
    """The first message in which two conversations differ, and what follows it."""

    def __init__(self, sent: Messages, recorded: Messages, shared: int, recent: Sequence[Messages]) -> None:
        self.sent, self.recorded, self.shared, self.recent = sent, recorded, shared, recent
        self.new, self.old = sent[shared], recorded[shared]
        self.role, self.old_role = str(self.new.get("role")), str(self.old.get("role"))
        self.text, self.old_text = text_of(self.new), text_of(self.old)
        self.ours = [message_key(message) for message in sent[shared:]]
        self.theirs = [message_key(message) for message in recorded[shared:]]

    def explain(self, opening: bool) -> Finding:
        """The first cause that fits."""
        return (
            self._moved()
            or (self._other_beginning() if opening else None)
            or (self._same_role() if self.role == self.old_role else None)
            or self._other_role()
        )

    def _finding(self, cause: Cause, words: str) -> Finding:
        return Finding(cause, message=self.shared, words=f"{_place(self.shared, self.new)}: {words}")

    def _compacted(self) -> Finding:
        still = len({*self.ours[1:]} & {*self.theirs})
        tail = f", {still} of them kept" if still else ""
        return self._finding(Cause.COMPACTION, f"{_count(len(self.theirs))} replaced by {len(self.ours)}{tail}")

    def _edit(self, words: str = "") -> Finding:
        return self._finding(Cause.EDIT, words or self._edit_words())

    def _nonce(self) -> Finding:
        return self._finding(Cause.NONCE, f"only a number, a date or an id in it changed: {self._changed_words()}")

    def _changed_system(self) -> Finding:
        return self._finding(Cause.CHANGED_SYSTEM, f"the instructions have changed: {self._changed_words()}")

    def _changed_words(self) -> str:
        return changed_words(self.text, self.old_text)

    # -- messages that are gone, or new, while the remaining ones are the same

    def _moved(self) -> Finding | None:
        if self.ours[0] in self.theirs[1:] and self._comes_later():
            return self._edit("messages are in another order")
        in_place = sum(one == other for one, other in zip(self.ours, self.theirs, strict=False))
        gone, same = _skipped(self.ours, self.theirs, self.new)
        if gone and same > in_place:
            roles = {message.get("role") for message in self.recorded[self.shared : self.shared + gone]}
            if roles <= INSTRUCTIONS:
                return self._finding(Cause.CHANGED_SYSTEM, "instructions before it were left out")
            return self._finding(
                Cause.EDIT if roles == {"user"} else Cause.COMPACTION, f"{_count(gone)} left out before it"
            )
        new, same = _skipped(self.theirs, self.ours, self.old)
        if new and same > in_place and not self._is_summary:
            if self.role in INSTRUCTIONS:
                return self._finding(Cause.CHANGED_SYSTEM, "instructions were put in")
            return self._edit(f"{_count(new)} put in here")
        return None

    def _comes_later(self) -> bool:
        """True if the message that was here, or its calls, come later now."""
        count = self.theirs.count(self.theirs[0])
        return self.ours.count(self.theirs[0]) >= count or self._calls_at is not None

    # -- another beginning

    def _other_beginning(self) -> Finding | None:
        if self._is_task():
            return self._finding(Cause.SUB_AGENT, TASK_OF_A_CALL)
        if self.role in INSTRUCTIONS or self.old_role in INSTRUCTIONS:
            return self._other_instructions()
        if self._continues_alike:
            return None
        if self._is_summary or self._keeps_later:
            return self._compacted()
        alike = is_nonce(self.text, self.old_text) or is_similar(self.text, self.old_text)
        return None if self.role == self.old_role and alike else self._sub_agent()

    def _other_instructions(self) -> Finding:
        """Other instructions, before the same conversation or before another one."""
        first, old_first = _first_question(self.sent, self.shared), _first_question(self.recorded, self.shared)
        both = first is not None and old_first is not None
        same_start = both and message_key(first or {}) == message_key(old_first or {})
        fewer = len(self.sent) < len(self.recorded)
        text, old_text = text_of(first or {}), text_of(old_first or {})
        alike = same_start or not both or self._keeps_later or is_nonce(text, old_text)
        if self.role == self.old_role and is_nonce(self.text, self.old_text) and alike:
            return self._nonce()
        if (self._is_summary and fewer) if same_start else (self._keeps_later or self._is_summary):
            return self._compacted()
        if both and not same_start:
            if is_summary(text) and fewer:
                return self._compacted()
            if not (is_similar(self.text, self.old_text) and is_similar(text, old_text)):
                return self._sub_agent()
        return self._changed_system()

    def _sub_agent(self) -> Finding:
        return self._finding(Cause.SUB_AGENT, "no recorded conversation begins like this")

    def _is_task(self) -> bool:
        """True if the first question is the argument of a recorded call."""
        first = _first_question(self.sent, self.shared)
        task = "" if first is None or first.get("role") != "user" else text_of(first).strip()
        if len(task) < _DISTINCT:
            return False
        messages = (message for conversation in (self.recorded, *self.recent) for message in conversation)
        calls = (call for message in messages for call in message.get("tool_calls") or ())
        texts = (text.strip() for call in calls for text in argument_texts(_function(call).get("arguments")))
        return any(text == task or (len(text) >= 2 * _DISTINCT and text in task) for text in texts)

    # -- a message replaced by one of its role

    def _same_role(self) -> Finding:
        if self._is_summary and not self._continues_alike:
            return self._compacted()
        if self.role in ("tool", "function"):
            return self._changed_result()
        if self.role == "assistant":
            return self._changed_reply()
        last = self.shared == len(self.sent) - 1
        short_question = self.role == "user" and last and len(self.text.split()) < _FEW_WORDS
        if is_nonce(self.text, self.old_text) and not short_question:
            return self._nonce()
        if self.role in INSTRUCTIONS:
            return self._changed_system()
        if not self._continues_alike and (self._keeps_later or self._retells):
            return self._compacted()
        return self._edit()

    def _changed_result(self) -> Finding:
        if is_cut(self.text, self.old_text):
            later = sum(
                is_cut(text_of(new), text_of(old))
                for new, old in zip(self.sent[self.shared + 1 :], self.recorded[self.shared + 1 :], strict=False)
                if new.get("role") == old.get("role") == self.role
            )
            more = f"; and {later} more after it" if later else ""
            lengths = f"{len(self.old_text)} characters became {len(self.text)}"
            return self._finding(Cause.TRIMMED_RESULTS, f"the result was cut or blanked, {lengths}{more}")
        return self._nonce() if is_nonce(self.text, self.old_text) else self._edit()

    def _changed_reply(self) -> Finding:
        new, old = _calls(self.new), _calls(self.old)
        if old and not new and self._tells_of_calls():
            return self._finding(Cause.CALLS_AS_TEXT, "calls of the model are words now")
        if new and not old:
            return self._finding(Cause.REWRITTEN_CALL, "the agent turned text of the model into calls")
        if new and _call_keys(self.new) != _call_keys(self.old):
            return self._finding(Cause.REWRITTEN_CALL, _changed_calls(new, old))
        if old and not new and self._calls_at is not None:
            return self._edit(f"the model's calls are in another message now, in message {self._calls_at}")
        if old and not new:
            return self._edit(f"the model's calls were left out ({_listed([name for name, _ in old])})")
        return self._compacted() if self._retells and not self._continues_alike else self._edit()

    def _edit_words(self) -> str:
        if self.text == self.old_text:
            return f"the text is the same, but another field is not: {_changed_fields(self.new, self.old)}"
        if pieces := self._pieces():
            return f"it was split into {pieces} messages"
        if not self.text:
            return "its content was left out"
        if self.role == "assistant" and (thought := reasoning(self.old)) and thought in self.text:
            return f"its reasoning is part of its text now: {self._changed_words()}"
        return f"it differs from before: {self._changed_words()}"

    def _pieces(self) -> int:
        """How many messages of this role have the text of the old one together; 0 if they do not."""
        whole, joined = "".join(self.old_text.split()), ""
        for count, message in enumerate(self.sent[self.shared :], 1):
            joined += "".join(text_of(message).split())
            if message.get("role") != self.role or not whole.startswith(joined):
                return 0
            if joined == whole:
                return count if count > 1 else 0
        return 0

    # -- a message in the place of one of another role

    def _other_role(self) -> Finding:
        replies = sum(message.get("role") == "assistant" for message in self.recorded[self.shared :])
        if self._is_summary:
            return self._compacted()
        if self.old_role == "assistant":
            if self._tells_of_calls():
                return self._finding(Cause.CALLS_AS_TEXT, "calls of the model are words now")
            if replies == 1 and self.theirs[0] in self.ours:
                return self._edit(f"{_count(self.ours.index(self.theirs[0]))} put in here")
            if replies == 1:
                return self._finding(Cause.RETRY, "the reply before it was left out, and another one is sampled")
        if self._keeps_later or self._retells or self._follows_a_question():
            return self._compacted()
        if self.old_role == "assistant" and self.shared == len(self.sent) - 1:
            words = f"it goes back to an earlier point: {_count(len(self.theirs))} left out"
            return self._finding(Cause.RETRY, words)
        if len(self.ours) < len(self.theirs):
            return self._compacted()
        return self._edit(f"a message of the role {self.old_role[:20]} was here before")

    def _follows_a_question(self) -> bool:
        """True if a user adds to a question, and several answers are gone."""
        last = str(self.sent[self.shared - 1].get("role")) if self.shared else ""
        return self.role == last == "user" and self.old_role == "assistant" and len(self.theirs) > 3

    # -- signs

    @cached_property
    def _calls_at(self) -> int | None:
        """The later message that has the calls of the old one now."""
        calls = _call_keys(self.old)
        later = range(self.shared + 1, len(self.sent))
        return next((at for at in later if calls and _call_keys(self.sent[at]) == calls), None)

    @cached_property
    def _continues_alike(self) -> bool:
        """True if the next message is the same in both."""
        return len(self.ours) > 1 and len(self.theirs) > 1 and self.ours[1] == self.theirs[1]

    @cached_property
    def _keeps_later(self) -> bool:
        """True if a later message was recorded further on, after an answer: what is between was replaced.

        opencode asks for a title of the user's question, then asks the question itself.
        """
        places = {key: at for at, key in enumerate(self.theirs)}
        roles = [message.get("role") for message in self.recorded[self.shared :]]
        answered = roles.index("assistant") if "assistant" in roles else len(roles)
        return any(
            places.get(key, 0) > at and places[key] >= answered and _is_distinct(self.sent[self.shared + at])
            for at, key in enumerate(self.ours)
            if at
        )

    @cached_property
    def _is_summary(self) -> bool:
        fewer = len(self.ours) < len(self.theirs)
        return fewer and is_summary(self.text) and not is_summary(self.old_text)

    @cached_property
    def _retells(self) -> bool:
        dropped = self.recorded[self.shared + 1 :]
        return len(dropped) > 2 and retells(self.text, "\n".join(map(text_of, dropped)))

    def _tells_of_calls(self) -> bool:
        """True if the new message, or the next one, puts a call of the old one into words."""
        return any(
            tells_of_call(text_of(message), name, arguments, by_user=message.get("role") != "assistant")
            for name, arguments in _calls(self.old)
            for message in self.sent[self.shared : self.shared + 2]
        )


# -- conversations


def _closest(sent: Messages, recorded: Messages, shared: int, recent: Sequence[Messages]) -> tuple[Messages, int]:
    """The conversation with most messages of the request, and how many both start with."""
    ours = [message_key(message) for message in sent]
    questions = {key for key, message in zip(ours, sent, strict=True) if message.get("role") not in INSTRUCTIONS}
    candidates = [(recorded, shared, [message_key(message) for message in recorded])]
    for other in recent:
        keys = [message_key(message) for message in other]
        same = next((at for at, pair in enumerate(zip(ours, keys, strict=False)) if pair[0] != pair[1]), None)
        if same is not None:  # else one is the beginning of the other: nothing was rewritten
            candidates.append((other, same, keys))
    best = max(candidates, key=lambda one: (len(questions.intersection(one[2])), one[1], len(one[0])))
    return best[0], best[1]


def _skipped(ours: Sequence[Key], theirs: Sequence[Key], first: Message) -> tuple[int, int]:
    """How many of `theirs` are missing before `ours` continue with them, and for how long.

    One equal message, `first`, is enough if it is the last of either conversation and distinct.
    """
    for gone in range(1, len(theirs)):
        if theirs[gone] != ours[0]:
            continue
        same, limit = 1, min(len(ours), len(theirs) - gone)
        while same < limit and ours[same] == theirs[gone + same]:
            same += 1
        if same > 1 or (limit == 1 and _is_distinct(first)):
            return gone, same
    return 0, 0


def _is_distinct(message: Message) -> bool:
    return len(text_of(message)) >= _DISTINCT or bool(message.get("tool_calls"))


def _first_question(conversation: Messages, start: int) -> Message | None:
    """The first message from `start` on that is not instructions."""
    return next((message for message in conversation[start:] if message.get("role") not in INSTRUCTIONS), None)


# -- calls and fields


def _function(call: Message) -> Message:
    function = call.get("function") or call
    return function if isinstance(function, Mapping) else {}


def _calls(message: Message) -> list[tuple[str, Any]]:
    functions = map(_function, message.get("tool_calls") or ())
    return [(str(function.get("name")), function.get("arguments")) for function in functions]


def _call_keys(message: Message) -> list[Key]:
    return [message_key({"role": "assistant", "tool_calls": [call]}) for call in message.get("tool_calls") or ()]


def _changed_calls(new: Sequence[tuple[str, Any]], old: Sequence[tuple[str, Any]]) -> str:
    names, before = [name for name, _ in new], [name for name, _ in old]
    if len(names) != len(before):
        return f"{len(before)} calls of the model became {len(names)}"
    if names != before:
        return f"the model called {_listed(before)}, the agent sends {_listed(names)}"
    return f"the arguments of {_listed(sorted(set(names)))} are not those of the model"


def _changed_fields(new: Message, old: Message) -> str:
    names = [name for name in {**old, **new} if name not in NOISE and (new.get(name) or "") != (old.get(name) or "")]
    changes = [f"{name[:60]}: {changed_words(str(new.get(name) or ''), str(old.get(name) or ''))}" for name in names]
    return "; ".join(changes[:3]) or "an empty one"


def _place(at: int, message: Message) -> str:
    return f"message {at} ({str(message.get('role'))[:20]})"


def _listed(names: Sequence[str], limit: int = 5) -> str:
    text = ", ".join(str(name)[:60] for name in names[:limit])
    return f"{text} and {len(names) - limit} more" if len(names) > limit else text


def _count(number: int) -> str:
    return f"{number} message was" if number == 1 else f"{number} messages were"
