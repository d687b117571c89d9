"""Whether a template leaves the past as it is."""

from collections.abc import Callable, Iterator
from typing import Any

from ..conversation.messages import Messages
from ..errors import TokentraceError
from ..study import probes


def holds(check: Callable[[Messages, Messages, Any], bool]) -> bool:
    """Return whether a check holds for all conversations that the template accepts."""
    outcomes = []
    for before, after, tools in _conversations():
        try:
            outcomes.append(check(before, after, tools))
        except TokentraceError:
            continue
    return bool(outcomes) and all(outcomes)


def _conversations() -> Iterator[tuple[Messages, Messages, Any]]:
    """Yield prefixes that end with an assistant, with each longer prefix and the tools."""
    user, thought, result = probes.USER, probes.THOUGHT, probes.RESULT
    answers: list[Any] = [probes.ANSWER, thought, probes.INLINE_THOUGHT]
    answers.append({**probes.ANSWER, "reasoning_content": ""})
    answers.append({**thought, "content": " answer \n", "reasoning_content": " thought \n"})
    cases: list[tuple[Messages, Any]] = [([user, answer, user, thought, user], None) for answer in answers]
    for fields in ({}, {"reasoning_content": "thought"}, {"content": "answer", "reasoning_content": "thought"}):
        call = probes.calling(**fields)
        for answer in (probes.ANSWER, thought):
            cases.append(([user, call, result, answer, user, call, result], [probes.STAND_IN_TOOL]))
    for messages, tools in cases:
        for at, message in enumerate(messages, 1):
            if message["role"] == "assistant":
                yield from ((messages[:at], messages[:end], tools) for end in range(at + 1, len(messages) + 1))
