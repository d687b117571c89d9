"""Why a request does not continue the conversation before it. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..conversation.forms import texts_of
from ..conversation.messages import RESULT_ROLES, Messages
from ..show.visible import counted
from .finding import Cause, Finding
from .message_keys import NOISE, Key, Message, meaning, next_key, shared_prefix
from .wording import changed_words, is_cut, is_nonce, is_similar, is_summary, leaves, tells_of_call

Rules = Sequence[tuple[Any, Cause]]
INSTRUCTIONS = frozenset({"system", "developer"})
TASK_OF_A_CALL = "a call in another conversation gave it this task"
_FEW_WORDS = 6
"""A number in a shorter question is its subject, not a nonce."""
_DISTINCT = 20
"""Messages with this many characters are rarely sent twice by chance."""


def find_cause(
    sent: Messages, recorded: Messages, shared: int, *, recent: Sequence[Messages] = ()
) -> Finding:
    """Why `sent` diverges from the `recorded` conversation, with its last reply, after `shared` messages.

    A `recent` conversation may have called a sub-agent, or been compacted into `sent`.
    """
    if shared == len(sent):
        words, dropped = "the same messages were sent again, for another reply", len(recorded) - shared
        if dropped > 1:
            words = f"the request goes back to an earlier point and leaves out the last {dropped} messages"
        return Finding(Cause.RETRY, words=words)
    if shared == len(recorded):
        words = "the conversation continues from an earlier point"
        return Finding(Cause.RETRY, message=shared, words=words)
    opening = all(_is_instruction(message) for message in sent[:shared])
    if opening:
        recorded, shared = _closest(sent, recorded, shared, recent)
    case = _Divergence(_Side(sent[shared:]), _Side(recorded[shared:]), sent[:shared])
    is_task = opening and _is_task(case.new.question, (recorded, *recent))
    beginning = ((is_task, Cause.SUB_AGENT), *case.other_beginning()) if opening else ()
    moved = next((cause for holds, cause in case.moved() if holds), None)
    replaced = case.replaced() if case.same_role else case.other_role()
    cause = moved or next(cause for holds, cause in (*beginning, *replaced) if holds)
    words = f"{counted(len(recorded) - shared, 'message')} before, {len(sent) - shared} now"
    if cause is Cause.SUB_AGENT:
        words = TASK_OF_A_CALL if is_task else words
    elif moved is None and case.same_role and cause is not Cause.COMPACTION:
        words = _changes(sent[shared], recorded[shared])
    return _finding(cause, shared, sent[shared], words)


def changed_message(at: int, new: Message, old: Message) -> Finding:
    return _finding(Cause.EDIT, at, new, _changes(new, old))


def changed_tools(
    sent: Messages | None,
    recorded: Messages | None,
    variables: Mapping[str, Any] | None = None,
    recorded_variables: Mapping[str, Any] | None = None,
) -> Finding:
    both = ({str(_function(tool).get("name")): tool for tool in tools or ()} for tools in (sent, recorded))
    ours, theirs = both
    now, before = variables or {}, recorded_variables or {}
    changes = {
        "new tools": [name for name in ours if name not in theirs],
        "tools left out": [name for name in theirs if name not in ours],
        "changed tools": [name for name in ours if name in theirs and ours[name] != theirs[name]],
        "template variables": sorted(name for name in {*now, *before} if now.get(name) != before.get(name)),
    }
    cut = ((what, [one[:60] for one in names[:9]]) for what, names in changes.items() if names)
    text = "; ".join(f"{what}: {', '.join(names)}" for what, names in cut)
    words = f"the same conversation: {text or 'the tools are in another order, or formatted differently'}"
    return Finding(Cause.CHANGED_TOOLS, words=words)


def text_of(message: Message) -> str:
    content = message.get("content")
    return str(content) if isinstance(content, Mapping) else "".join(text for _, text in texts_of(message))


def _finding(cause: Cause, at: int, message: Message, words: str) -> Finding:
    place = f"message {at} ({str(message.get('role'))[:20]})"
    return Finding(cause, message=at, words=f"{place}: {cause.meaning.rstrip('.')}: {words}")


def _changes(new: Message, old: Message) -> str:
    """The first field in which two messages differ, and the changed words."""

    def text(message: Message, name: str) -> str:
        if name == "tool_calls":
            return "\n".join(" ".join((name, *map(str, leaves(one)))) for name, one in _calls(message))
        return text_of(message) if name == "content" else str(message.get(name) or "")

    for name in ("content", "tool_calls", *old, *new):
        one, other = text(new, name), text(old, name)
        if one != other and name not in NOISE:
            return f"{name[:60]}: {changed_words(one, other)}"
    one, other = (str(list(_calls(message))) for message in (new, old))
    return "an empty field" if one == other else f"tool_calls: {changed_words(one, other)}"


class _Side:
    def __init__(self, messages: Messages) -> None:
        self.messages, self.first = messages, messages[0]
        self.keys = _keys(messages)
        self.role, self.text = str(self.first.get("role")), text_of(self.first)
        self.is_instruction = _is_instruction(self.first)
        self.calls = _call_keys(self.first)
        self.question: Message = next((one for one in messages if not _is_instruction(one)), {})

    def gone(self, other: _Side) -> tuple[int, int]:
        """The number of missing messages, and of those that follow in both."""
        for gone in range(1, len(self.keys)):
            if self.keys[gone] == other.keys[0]:
                same = shared_prefix(other.keys, self.keys[gone:])
                is_last = min(len(other.keys), len(self.keys) - gone) == 1
                if same > 1 or (is_last and _is_distinct(other.first)):
                    return gone, same
        return 0, 0


class _Divergence:
    """What was sent instead. The first rule that holds is the cause."""

    def __init__(self, new: _Side, old: _Side, before: Messages) -> None:
        self.new, self.old = new, old
        self.same_role, self.fewer = new.role == old.role, len(new.keys) < len(old.keys)
        self.summary = self.fewer and is_summary(new.text) and not is_summary(old.text)
        self.same_next = new.keys[1:2] == old.keys[1:2] != []
        self.nonce = is_nonce(new.text, old.text)
        self.after_user = [message.get("role") for message in before[-1:]] == ["user"]
        # if a later message was recorded after an answer, those before it were replaced
        places = {key: at for at, key in enumerate(old.keys)}
        roles = [*(message.get("role") for message in old.messages), "assistant"]
        answered = roles.index("assistant")
        later = [at for at, key in enumerate(new.keys) if 0 < at < places.get(key, 0) >= answered]
        self.keeps_later = any(_is_distinct(new.messages[at]) for at in later)
        self.tells_of_calls = any(
            tells_of_call(text_of(message), name, arguments, by_user=message.get("role") != "assistant")
            for name, arguments in _calls(old.first)
            for message in new.messages[:2]
        )

    def moved(self) -> Rules:
        """Messages are missing or new; the other ones are the same."""
        new, old = self.new, self.old
        apart = bool(old.calls) and any(_call_keys(message) == old.calls for message in new.messages[1:])
        apart = apart or new.keys.count(old.keys[0]) >= old.keys.count(old.keys[0])
        in_place = sum(one == other for one, other in zip(new.keys, old.keys, strict=False))
        gone, same = old.gone(new)
        is_gone, is_new = same > in_place, new.gone(old)[1] > in_place and not self.summary
        roles = {message.get("role") for message in old.messages[:gone]}
        return (
            (apart and new.keys[0] in old.keys[1:], Cause.EDIT),  # in another order
            (is_gone and roles <= INSTRUCTIONS, Cause.CHANGED_SYSTEM),
            (is_gone and roles == {"user"}, Cause.EDIT),
            (is_gone, Cause.COMPACTION),
            (is_new and new.is_instruction, Cause.CHANGED_SYSTEM),
            (is_new, Cause.EDIT),
        )

    def other_beginning(self) -> Rules:
        new, old = self.new, self.old
        similar = is_similar(new.text, old.text)
        if not new.is_instruction and not old.is_instruction:
            alike = self.same_role and (self.nonce or similar)
            replaced = self.summary or self.keeps_later
            cause = Cause.COMPACTION if replaced else Cause.SUB_AGENT
            return [(not self.same_next and (replaced or not alike), cause)]
        both = bool(new.question and old.question)
        same = not both or _keys([new.question]) == _keys([old.question])
        text, old_text = text_of(new.question), text_of(old.question)
        alike = same or self.keeps_later or is_nonce(text, old_text)
        summary = self.summary or (not same and self.fewer and is_summary(text))
        return (
            (self.same_role and self.nonce and alike, Cause.NONCE),
            (summary or (self.keeps_later and not (both and same)), Cause.COMPACTION),
            (same or (similar and is_similar(text, old_text)), Cause.CHANGED_SYSTEM),
            (True, Cause.SUB_AGENT),
        )

    def replaced(self) -> Rules:
        new, old, is_result = self.new, self.old, self.new.role in RESULT_ROLES
        by_model, again = new.role == "assistant", not is_result and self.keeps_later
        short_question = new.role == "user" and len(new.keys) == 1 and len(new.text.split()) < _FEW_WORDS
        return (
            (self.summary and not self.same_next, Cause.COMPACTION),
            (by_model and not new.calls and self.tells_of_calls, Cause.CALLS_AS_TEXT),
            (by_model and new.calls and new.calls != old.calls, Cause.REWRITTEN_CALL),
            (by_model, Cause.EDIT),
            (is_result and is_cut(new.text, old.text), Cause.TRIMMED_RESULTS),
            (self.nonce and not short_question, Cause.NONCE),
            (new.is_instruction, Cause.CHANGED_SYSTEM),
            (again and not self.same_next, Cause.COMPACTION),
            (True, Cause.EDIT),
        )

    def other_role(self) -> Rules:
        new, old = self.new, self.old
        by_model = old.role == "assistant"
        last = by_model and sum(message.get("role") == "assistant" for message in old.messages) == 1
        asks_again = by_model and new.role == "user" and self.after_user and len(old.keys) > 3
        return (
            (self.summary, Cause.COMPACTION),
            (by_model and self.tells_of_calls, Cause.CALLS_AS_TEXT),
            (last and old.keys[0] in new.keys, Cause.EDIT),
            (last, Cause.RETRY),
            (self.keeps_later or asks_again, Cause.COMPACTION),
            (by_model and len(new.keys) == 1, Cause.RETRY),
            (self.fewer, Cause.COMPACTION),
            (True, Cause.EDIT),
        )


def _is_task(question: Message, conversations: Iterable[Messages]) -> bool:
    """True if a question is the argument of a recorded call."""
    task = text_of(question).strip() if question.get("role") == "user" else ""
    messages = itertools.chain.from_iterable(conversations)
    calls = itertools.chain.from_iterable(map(_calls, messages))
    texts = (text.strip() for _, arguments in calls for text in leaves(arguments) if isinstance(text, str))
    is_task = (text == task or (len(text) >= 2 * _DISTINCT and text in task) for text in texts)
    return len(task) >= _DISTINCT and any(is_task)


def _closest(
    sent: Messages, recorded: Messages, shared: int, recent: Sequence[Messages]
) -> tuple[Messages, int]:
    """The conversation that shares the most, and for how long."""
    ours = _keys(sent)
    questions = {key for key, message in zip(ours, sent, strict=True) if not _is_instruction(message)}
    candidates = [(recorded, shared, _keys(recorded))]
    for other in recent:
        keys = _keys(other)
        same = shared_prefix(ours, keys)
        if same < min(len(ours), len(keys)):  # else it was continued, not rewritten
            candidates.append((other, same, keys))
    return max(candidates, key=lambda one: (len(questions.intersection(one[2])), one[1], len(one[2])))[:2]


def _keys(messages: Iterable[Message]) -> list[Key]:
    return [next_key(b"", meaning(message)) for message in messages]


def _is_instruction(message: Message) -> bool:
    return message.get("role") in INSTRUCTIONS


def _is_distinct(message: Message) -> bool:
    return len(text_of(message)) >= _DISTINCT or bool(message.get("tool_calls"))


def _function(call: Message) -> Message:
    function = call.get("function") or call
    return function if isinstance(function, Mapping) else {}


def _call_keys(message: Message) -> list[Key]:
    return _keys({"role": "assistant", "tool_calls": [call]} for call in message.get("tool_calls") or ())


def _calls(message: Message) -> list[tuple[str, Any]]:
    functions = map(_function, message.get("tool_calls") or ())
    return [(str(function.get("name")), function.get("arguments")) for function in functions]
