"""Whether a template leaves the past as it is."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from ..conversation.messages import Messages
from ..errors import TokentraceError
from ..study import probes


def holds(check: Callable[[Messages, Messages, Any], bool]) -> bool:
    """Whether a check holds for all conversations that the template accepts."""
    outcomes = []
    for conversation in _conversations():
        with suppress(TokentraceError):
            outcomes.append(check(*conversation))
    return bool(outcomes) and all(outcomes)


def _conversations() -> Iterator[tuple[Messages, Messages, Any]]:
    """Yield prefixes that end with an assistant, with each longer prefix and the tools."""
    user, thought, result = probes.USER, probes.THOUGHT, probes.RESULT
    answers: list[Any] = [probes.ANSWER, thought, probes.INLINE_THOUGHT]
    answers.append({**probes.ANSWER, "reasoning_content": ""})
    answers.append({**thought, "content": " answer \n", "reasoning_content": " thought \n"})
    cases: list[tuple[Messages, Any]] = [([user, answer, user, thought, user], None) for answer in answers]
    reasoning = {"reasoning_content": "thought"}
    for fields in ({}, reasoning, {"content": "answer", **reasoning}):
        call = probes.calling(**fields)
        for answer in answers[:2]:
            cases.append(([user, call, result, answer, user, call, result], [probes.STAND_IN_TOOL]))
    for messages, tools in cases:
        for end in range(2, len(messages) + 1):
            for at in range(1, end):
                if messages[at - 1]["role"] == "assistant":
                    yield messages[:at], messages[:end], tools
