"""Why a request does not go on from the turn before it. Pure: two conversations in, a cause out.

A cause is a sentence for people and a label for statistics. No token depends on it: where a conversation branches is
found by the matcher, and what the branch is made of by the renderer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from ..conversation.messages import Messages
from .likeness import (
    changed_words,
    is_cut,
    is_nonce,
    is_similar,
    looks_like_a_summary,
    retells,
    strings_of,
    tells_of_call,
)
from .matching import NOISE, Key, meaning, next_key, reasoning


class BranchCause(StrEnum):
    """What an agent did to the history."""

    SUB_AGENT = "sub_agent"
    """Another conversation altogether: its first messages are not those of any recorded one."""
    CHANGED_TOOLS = "changed_tools"
    """The same messages, with other tools or template variables."""
    CHANGED_SYSTEM = "changed_system"
    """Another system prompt before the same conversation."""
    NONCE = "nonce"
    """A number, a date or an id in an earlier message changed, and nothing else did."""
    RETRY = "retry"
    """The same request again, or one that goes back to an earlier point: another reply is sampled."""
    COMPACTION = "compaction"
    """Messages were left out, or replaced by fewer others, a summary perhaps."""
    TRIMMED_RESULTS = "trimmed_results"
    """An earlier tool result was shortened or blanked."""
    REPAIRED_CALL = "repaired_call"
    """The agent wrote a call of the model's anew: another name, other arguments, or one more or less."""
    CALLS_AS_TEXT = "calls_as_text"
    """Calls of the model's were put into words."""
    EDIT = "edit"
    """An earlier message says something else."""
    TEMPLATE = "template"
    """The conversation goes on, but the template would rewrite what was sampled; the bridge's refusal says how."""
    AMBIGUOUS = "ambiguous"
    """Several recorded turns fit the echo and differ in their tokens. None of them is guessed."""


@dataclass(frozen=True, slots=True)
class BranchReason:
    """Why a branch began, in words for people."""

    cause: BranchCause
    message: int | None
    """The first message of the request that differs; None where all are the same."""
    detail: str


INSTRUCTIONS: Final = frozenset({"system", "developer"})
"""Roles of those who run the agent."""
GIVEN_TASK: Final = "a call of another conversation gave it this task"
_FEW_WORDS: Final = 6
"""In a question of fewer words a number is what it asks about."""
_TELLING: Final = 20
"""A message of so many characters is hardly said twice by chance."""


def find_cause(sent: Messages, recorded: Messages, shared: int, *, others: Sequence[Messages] = ()) -> BranchReason:
    """Why `sent` leaves the `recorded` conversation after the first `shared` messages, which mean the same.

    `recorded` is the conversation that shares most with the request, its last reply included. `others` are further
    recorded conversations, a few of the last: they are searched for the call that gave a sub-agent its task, and for
    the conversation that a request is a compaction of, where nothing but instructions is shared.
    """
    if shared == len(sent):
        return _again(recorded, shared)
    if shared == len(recorded):  # the caller goes on from there; nothing was rewritten
        return BranchReason(BranchCause.RETRY, shared, "the conversation goes on from an earlier point")
    opening = all(message.get("role") in INSTRUCTIONS for message in sent[:shared])
    if opening:
        recorded, shared = _closest(sent, recorded, shared, others)
    return _Difference(sent, recorded, shared, others).cause(opening)


def changed_tools(
    sent: Sequence[Mapping[str, Any]] | None,
    recorded: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any] | None = None,
    recorded_variables: Mapping[str, Any] | None = None,
) -> BranchReason:
    """The cause where the same conversation was sent with other tools or template variables: which they are."""
    ours, theirs = _by_name(sent), _by_name(recorded)
    settings, settings_before = dict(variables or {}), dict(recorded_variables or {})
    both = [name for name in ours if name in theirs]
    lists = {
        "new tools": [name for name in ours if name not in theirs],
        "tools left out": [name for name in theirs if name not in ours],
        "tools described otherwise": [name for name in both if ours[name] != theirs[name]],
        "template variables": sorted(
            name for name in {*settings, *settings_before} if settings.get(name) != settings_before.get(name)
        ),
    }
    said = [f"{what}: {_listed(names)}" for what, names in lists.items() if names]
    if theirs and not ours:
        said[:1] = ["sent without tools"]
    elif not said and list(ours) != list(theirs):
        said = ["the tools are in another order"]
    words = "; ".join(said) or "tools are written in another way"
    return BranchReason(BranchCause.CHANGED_TOOLS, None, f"the same conversation: {words}")


def changed_message(at: int, new: Mapping[str, Any], old: Mapping[str, Any]) -> BranchReason:
    """The cause where a message means the same as the recorded one, but its reasoning or a printed field differs."""
    thought, before = reasoning(new), reasoning(old)
    if new.get("role") == "assistant" and thought and thought != before:
        words = f"its reasoning is another: {changed_words(thought, before)}"
    else:
        words = f"the text is the same, but another field is not: {_changed_fields(new, old)}"
    return BranchReason(BranchCause.EDIT, at, f"message {at} ({str(new.get('role'))[:20]}): {words}")


def _changed_fields(new: Mapping[str, Any], old: Mapping[str, Any]) -> str:
    names = [name for name in {**old, **new} if name not in NOISE and (new.get(name) or "") != (old.get(name) or "")]
    changes = [f"{name[:60]}: {changed_words(str(new.get(name) or ''), str(old.get(name) or ''))}" for name in names]
    return "; ".join(changes[:3]) or "one that says nothing"


def _by_name(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    return {str((tool.get("function") or tool).get("name")): tool for tool in tools or ()}


def _listed(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(str(name)[:60] for name in names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def _again(recorded: Messages, shared: int) -> BranchReason:
    left = len(recorded) - shared
    if left <= 1:
        return BranchReason(BranchCause.RETRY, None, "the same messages were sent again: another reply is sampled")
    return BranchReason(
        BranchCause.RETRY, None, f"it goes back to an earlier point: the last {left} messages are left out"
    )


def _closest(sent: Messages, recorded: Messages, shared: int, others: Sequence[Messages]) -> tuple[Messages, int]:
    """The recorded conversation with the most of the request's messages, wherever they stand; of equals the longest."""
    ours = [_mark(message) for message in sent]
    said = {mark for mark, message in zip(ours, sent, strict=True) if message.get("role") not in INSTRUCTIONS}
    best, found = (-1, 0, 0), (recorded, shared)
    for at, other in enumerate((recorded, *others)):
        theirs = [_mark(message) for message in other]
        alike = (
            shared
            if at == 0
            else next((place for place, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        )
        if alike is None:  # one is the beginning of the other: nothing was rewritten
            continue
        rank = (len(said.intersection(theirs)), alike, len(other))
        if rank > best:
            best, found = rank, (other, alike)
    return found


class _Difference:
    """The first message in which two conversations differ, and what comes after it."""

    def __init__(self, sent: Messages, recorded: Messages, shared: int, others: Sequence[Messages]) -> None:
        self.sent, self.recorded, self.shared, self.others = sent, recorded, shared, others
        self.new, self.old = sent[shared], recorded[shared]
        self.role, self.old_role = str(self.new.get("role")), str(self.old.get("role"))
        self.text, self.old_text = text_of(self.new), text_of(self.old)
        self.where = f"message {shared} ({self.role[:20]})"
        self.ours = [_mark(message) for message in sent[shared:]]
        self.theirs = [_mark(message) for message in recorded[shared:]]

    def cause(self, opening: bool) -> BranchReason:
        """The first of these that fits."""
        found = self._moved()
        if found is None and opening:
            found = self._of_opening()
        if found is None and self.role == self.old_role:
            found = self._of_same_role()
        return found or self._of_other_role()

    def _is(self, cause: BranchCause, words: str) -> BranchReason:
        return BranchReason(cause, self.shared, f"{self.where}: {words}")

    # -- messages that are gone, or new, while the rest is the same

    def _moved(self) -> BranchReason | None:
        if self.ours[0] in self.theirs[1:] and self._comes_later():
            return self._is(BranchCause.EDIT, "messages are in another order")
        in_place = sum(one == other for one, other in zip(self.ours, self.theirs, strict=False))
        gone, same = _run(self.ours, self.theirs, self.new)
        if gone and same > in_place:
            left = self.recorded[self.shared : self.shared + gone]
            if all(message.get("role") in INSTRUCTIONS for message in left):
                return self._is(BranchCause.CHANGED_SYSTEM, "instructions before it were left out")
            if any(message.get("role") != "user" for message in left):
                return self._is(BranchCause.COMPACTION, f"{_count(gone)} left out before it")
            return self._is(BranchCause.EDIT, f"{_count(gone)} left out before it")
        come, same = _run(self.theirs, self.ours, self.old)
        if come and same > in_place and not self._is_summary():
            if self.role in INSTRUCTIONS:
                return self._is(BranchCause.CHANGED_SYSTEM, "instructions were put in")
            return self._is(BranchCause.EDIT, f"{_count(come)} put in here")
        return None

    # -- the beginning of a conversation

    def _of_opening(self) -> BranchReason | None:
        if self._is_task():
            return self._is(BranchCause.SUB_AGENT, GIVEN_TASK)
        if self.role in INSTRUCTIONS or self.old_role in INSTRUCTIONS:
            return self._of_instructions()
        if self._goes_on_alike():
            return None
        if self._is_summary() or self._keeps_later():
            return self._compacted()
        if self.role != self.old_role or not (
            is_nonce(self.text, self.old_text) or is_similar(self.text, self.old_text)
        ):
            return self._is(BranchCause.SUB_AGENT, "no recorded conversation begins like this")
        return None

    def _of_instructions(self) -> BranchReason:
        """Other instructions: before the same conversation, or before another one."""
        first, first_old = _first_said(self.sent, self.shared), _first_said(self.recorded, self.shared)
        same_start = first is not None and first_old is not None and _mark(first) == _mark(first_old)
        if self.role == self.old_role and is_nonce(self.text, self.old_text):
            starts = [text_of(message) for message in (first, first_old) if message is not None]
            if same_start or len(starts) < 2 or self._keeps_later() or is_nonce(*starts):
                return self._is(BranchCause.NONCE, f"only a number, a date or an id in it changed: {self._words()}")
        if not same_start and (self._keeps_later() or self._is_summary()):
            return self._compacted()
        if same_start and self._is_summary() and len(self.sent) < len(self.recorded):
            return self._compacted()
        if first is not None and first_old is not None and not same_start:
            if looks_like_a_summary(text_of(first)) and len(self.sent) < len(self.recorded):
                return self._compacted()
            alike = is_similar(self.text, self.old_text) and is_similar(text_of(first), text_of(first_old))
            if not alike:
                return self._is(BranchCause.SUB_AGENT, "no recorded conversation begins like this")
        return self._is(BranchCause.CHANGED_SYSTEM, f"the instructions have changed: {self._words()}")

    def _is_task(self) -> bool:
        """Whether the first thing said is what a recorded call asked for."""
        first = _first_said(self.sent, self.shared)
        task = "" if first is None or first.get("role") != "user" else text_of(first).strip()
        if len(task) < _TELLING:
            return False
        calls = (
            call
            for conversation in (self.recorded, *self.others)
            for message in conversation
            for call in message.get("tool_calls") or ()
        )
        given = (text.strip() for call in calls for text in strings_of(_function(call).get("arguments")))
        return any(text == task or (len(text) >= 2 * _TELLING and text in task) for text in given)

    # -- a message that was replaced by one of its role

    def _of_same_role(self) -> BranchReason | None:
        if self._is_summary() and not self._goes_on_alike():
            return self._compacted()
        if self.role in ("tool", "function"):
            return self._of_result()
        if self.role == "assistant":
            return self._of_reply()
        last = self.shared == len(self.sent) - 1
        asked = self.role == "user" and last and len(self.text.split()) < _FEW_WORDS
        if is_nonce(self.text, self.old_text) and not asked:
            return self._is(BranchCause.NONCE, f"only a number, a date or an id in it changed: {self._words()}")
        if self.role in INSTRUCTIONS:
            return self._is(BranchCause.CHANGED_SYSTEM, f"the instructions have changed: {self._words()}")
        if not self._goes_on_alike() and (self._keeps_later() or self._retells()):
            return self._compacted()
        return self._is(BranchCause.EDIT, self._edit_words())

    def _of_result(self) -> BranchReason:
        if is_cut(self.text, self.old_text):
            later = sum(
                is_cut(text_of(new), text_of(old))
                for new, old in zip(self.sent[self.shared + 1 :], self.recorded[self.shared + 1 :], strict=False)
                if new.get("role") == old.get("role") == self.role
            )
            lengths = f"{len(self.old_text)} characters became {len(self.text)}"
            more = f"; and {later} more after it" if later else ""
            return self._is(BranchCause.TRIMMED_RESULTS, f"the result was cut or blanked, {lengths}{more}")
        if is_nonce(self.text, self.old_text):
            return self._is(BranchCause.NONCE, f"only a number, a date or an id in the result changed: {self._words()}")
        return self._is(BranchCause.EDIT, self._edit_words())

    def _of_reply(self) -> BranchReason:
        new, old = _calls(self.new), _calls(self.old)
        if old and not new and self._tells_of_calls():
            return self._is(BranchCause.CALLS_AS_TEXT, "calls of the model's are words now")
        if new and not old:
            return self._is(BranchCause.REPAIRED_CALL, "the agent made calls of what the model had written as text")
        if new and _call_marks(self.new) != _call_marks(self.old):
            return self._is(BranchCause.REPAIRED_CALL, _repair(new, old))
        if old and not new and (later := self._calls_at()) is not None:
            return self._is(BranchCause.EDIT, f"the model's calls are in another message now, in message {later}")
        if old and not new:
            return self._is(BranchCause.EDIT, f"the model's calls were left out ({_listed([name for name, _ in old])})")
        if self._retells() and not self._goes_on_alike():
            return self._compacted()
        return self._is(BranchCause.EDIT, self._edit_words())

    def _edit_words(self) -> str:
        if self.text == self.old_text:
            return f"the text is the same, but another field is not: {_changed_fields(self.new, self.old)}"
        if pieces := self._pieces():
            return f"it was split into {pieces} messages"
        if not self.text:
            return "its content was left out"
        if self.role == "assistant" and (thought := reasoning(self.old)) and thought in self.text:
            return f"its reasoning stands among its words: {self._words()}"
        return f"it says something else than before: {self._words()}"

    def _words(self) -> str:
        return changed_words(self.text, self.old_text)

    # -- a message in the place of one of another role

    def _of_other_role(self) -> BranchReason:
        replies = sum(message.get("role") == "assistant" for message in self.recorded[self.shared :])
        if self._is_summary():
            return self._compacted()
        if self.old_role == "assistant":
            if self._tells_of_calls():
                return self._is(BranchCause.CALLS_AS_TEXT, "calls of the model's are words now")
            if replies == 1 and self.theirs[0] in self.ours:
                return self._is(BranchCause.EDIT, f"{_count(self.ours.index(self.theirs[0]))} put in here")
            if replies == 1:
                return self._is(BranchCause.RETRY, "the reply before it was left out, and another one is asked for")
        if self._keeps_later() or self._retells() or self._follows_a_question():
            return self._compacted()
        if self.old_role == "assistant" and self.shared == len(self.sent) - 1:
            words = f"it goes back to an earlier point: {_count(len(self.theirs))} left out"
            return self._is(BranchCause.RETRY, words)
        if len(self.ours) < len(self.theirs):
            return self._compacted()
        return self._is(BranchCause.EDIT, f"a message of the role {self.old_role[:20]} was here before")

    # -- signs

    def _comes_later(self) -> bool:
        """Whether the message that was here before comes later now, as often as it did, or its calls do."""
        count = self.theirs.count(self.theirs[0])
        return self.ours.count(self.theirs[0]) >= count or self._calls_at() is not None

    def _calls_at(self) -> int | None:
        """The message that has the calls now of the one that was here before."""
        calls = _call_marks(self.old)
        later = range(self.shared + 1, len(self.sent))
        return next((at for at in later if calls and _call_marks(self.sent[at]) == calls), None)

    def _pieces(self) -> int:
        """How many messages of this role say together what the one that was here said, white space aside; else 0."""
        whole, joined = "".join(self.old_text.split()), ""
        for count, message in enumerate(self.sent[self.shared :], 1):
            joined += "".join(text_of(message).split())
            if message.get("role") != self.role or not whole.startswith(joined):
                return 0
            if joined == whole:
                return count if count > 1 else 0
        return 0

    def _goes_on_alike(self) -> bool:
        """Whether the message after the difference is the same in both, at the same place."""
        return len(self.ours) > 1 and len(self.theirs) > 1 and self.ours[1] == self.theirs[1]

    def _keeps_later(self) -> bool:
        """Whether a later message is one that was recorded further on: what is between was replaced.

        Something has to have been answered up to there. opencode asks for a title with the user's question as the
        second message, then begins the conversation with it.
        """
        places = {mark: at for at, mark in enumerate(self.theirs)}
        roles = [message.get("role") for message in self.recorded[self.shared :]]
        answered = roles.index("assistant") if "assistant" in roles else len(roles)
        return any(
            places.get(mark, 0) > at and places[mark] >= answered and _is_telling(self.sent[self.shared + at])
            for at, mark in enumerate(self.ours)
            if at
        )

    def _is_summary(self) -> bool:
        fewer = len(self.ours) < len(self.theirs)
        return fewer and looks_like_a_summary(self.text) and not looks_like_a_summary(self.old_text)

    def _follows_a_question(self) -> bool:
        """Whether a user says more where the model had answered, and several answers are gone: who goes back to an
        earlier point asks something else there, and does not let the first question stand."""
        last = str(self.sent[self.shared - 1].get("role")) if self.shared else ""
        return self.role == last == "user" and self.old_role == "assistant" and len(self.theirs) > 3

    def _retells(self) -> bool:
        dropped = self.recorded[self.shared + 1 :]
        return len(dropped) > 2 and retells(self.text, "\n".join(map(text_of, dropped)))

    def _tells_of_calls(self) -> bool:
        """Whether the new message, or the one after it, has a call of the old one in words."""
        return any(
            tells_of_call(text_of(message), name, arguments, by_user=message.get("role") != "assistant")
            for name, arguments in _calls(self.old)
            for message in self.sent[self.shared : self.shared + 2]
        )

    def _compacted(self) -> BranchReason:
        kept = len({*self.ours[1:]} & {*self.theirs})
        tail = f", {kept} of them kept" if kept else ""
        return self._is(BranchCause.COMPACTION, f"{_count(len(self.theirs))} replaced by {len(self.ours)}{tail}")


# -- messages


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message's content."""
    content = message.get("content")
    if isinstance(content, str) or not content:
        return content or ""
    if not isinstance(content, (list, tuple)):
        return str(content)
    return "".join(str(part.get("text") or "") if isinstance(part, Mapping) else str(part) for part in content)


def _mark(message: Mapping[str, Any]) -> Key:
    """What a message says, whatever comes before it."""
    return next_key(b"", meaning(message))


def _is_telling(message: Mapping[str, Any]) -> bool:
    return len(text_of(message)) >= _TELLING or bool(message.get("tool_calls"))


def _run(ours: Sequence[Key], theirs: Sequence[Key], first: Mapping[str, Any]) -> tuple[int, int]:
    """How many messages of theirs are missing before ours go on as they do, and for how long; 0 where they do not.

    One message that is the same, `first`, is enough if it is the last of either, and not said every day.
    """
    for gone in range(1, len(theirs)):
        if theirs[gone] != ours[0]:
            continue
        same, most = 1, min(len(ours), len(theirs) - gone)
        while same < most and ours[same] == theirs[gone + same]:
            same += 1
        if same > 1 or (most == 1 and _is_telling(first)):
            return gone, same
    return 0, 0


def _first_said(conversation: Messages, start: int) -> Mapping[str, Any] | None:
    """The first message from one on that is not instructions."""
    return next((message for message in conversation[start:] if message.get("role") not in INSTRUCTIONS), None)


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    found = call.get("function") or call
    return found if isinstance(found, Mapping) else {}


def _calls(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    calls = message.get("tool_calls") or ()
    return [(str(_function(call).get("name")), _function(call).get("arguments")) for call in calls]


def _call_marks(message: Mapping[str, Any]) -> list[Key]:
    return [_mark({"role": "assistant", "tool_calls": [call]}) for call in message.get("tool_calls") or ()]


def _repair(new: Sequence[tuple[str, Any]], old: Sequence[tuple[str, Any]]) -> str:
    names, before = [name for name, _ in new], [name for name, _ in old]
    if len(names) != len(before):
        return f"{len(before)} calls of the model's became {len(names)}"
    if names != before:
        return f"the model called {_listed(before)}, the agent says {_listed(names)}"
    return f"the arguments of {_listed(sorted(set(names)))} are not those that the model wrote"


def _count(number: int) -> str:
    return f"{number} message was" if number == 1 else f"{number} messages were"
