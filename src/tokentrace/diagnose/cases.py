"""The matrix: what is appended to which turn of an assistant, after which past.

Each case is one small conversation in three cuts: the past that the model is asked after, its turn, and what is
appended to that. Pasts are ordered by size, so that the first case that shows something is the smallest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from ..study.probes import SYSTEM, USER, call, calling, result

Message = Mapping[str, Any]


class Append(StrEnum):
    """What comes after an assistant's turn."""

    TOOL = "tool"
    PARALLEL = "parallel tools"
    TOOL_USER = "tool, then user"
    USER = "user"
    SYSTEM = "system"
    ASSISTANT = "assistant"


CALLS: Final[Mapping[Append, int]] = {Append.TOOL: 1, Append.PARALLEL: 2, Append.TOOL_USER: 1}
"""How many calls the turn before makes."""


LONG: Final = 6
"""Rounds of tools, and earlier answers, in the longest pasts."""
THINK: Final = ("<think>\n", "\n</think>\n\n")
"""What reasoning stands between where a grammar has no marks of its own."""


class Arguments(StrEnum):
    """The shapes that a call's arguments are given in."""

    NONE = ""
    OBJECT = "object"
    EMPTY = "empty"
    NESTED = "nested"
    TEXT = "JSON text"


_ARGUMENTS: Final[Mapping[Arguments, Any]] = {
    Arguments.OBJECT: {"key": "value"},
    Arguments.EMPTY: {},
    Arguments.NESTED: {"key": {"inner": ["one", 2, True, None], "more": {}}, "number": 2.5},
    Arguments.TEXT: {"key": "value"},
}


def _tool(number: int) -> Message:
    properties = {"key": {"type": ["string", "object"]}, "number": {"type": "number"}}
    schema = {"type": "object", "properties": properties, "required": []}
    function = {"name": f"probe{number}", "description": "a probe", "parameters": schema}
    return {"type": "function", "function": function}


TOOLS: Final[Sequence[Message]] = (_tool(1), _tool(2))


ANSWER: Final = "An Answer, naïve"
THOUGHT: Final = "A Thought, naïve"
"""What turns say: with capitals, and not in ASCII alone, so that a template which writes it otherwise is seen."""


class Said(StrEnum):
    """How a turn's content is given."""

    PLAIN = ""
    SPACED = "white space around content"
    INLINE = "reasoning inside content"
    """As a client has it that keeps what was sampled, and takes no reasoning out."""


@dataclass(frozen=True, slots=True)
class TurnForm:
    """What an assistant's turn has."""

    append: Append
    reasoning: bool
    content: bool = True
    arguments: Arguments = Arguments.NONE
    said: Said = Said.PLAIN

    @property
    def words(self) -> str:
        has = [*(["reasoning"] if self.reasoning else []), *([self.said or "content"] if self.content else [])]
        calls = CALLS.get(self.append, 0)
        if calls:
            has.append(f"{'a call' if calls == 1 else 'two calls'} ({self.arguments})")
        return " + ".join(has)


@dataclass(frozen=True, slots=True)
class AppendCase:
    """One conversation of the matrix: the past, the turn that answers it, and what is appended."""

    turn: TurnForm
    past: tuple[Message, ...]
    said: Message
    appended: tuple[Message, ...]
    tools: bool
    given: str = ""
    """What the past has beside a question, in words."""

    @property
    def messages(self) -> tuple[Message, ...]:
        return (*self.past, self.said, *self.appended)


def turns(shapes: Sequence[Arguments] = tuple(_ARGUMENTS)) -> Iterator[TurnForm]:
    """Every kind of turn of the matrix, calls with arguments of these shapes."""
    for append in Append:
        for reasoning in (False, True):
            if append not in CALLS:
                yield TurnForm(append, reasoning)
                continue
            for content in (False, True):
                for arguments in shapes:
                    yield TurnForm(append, reasoning, content, arguments)
        for said in (Said.SPACED, Said.INLINE):
            yield TurnForm(append, False, True, Arguments.OBJECT if append in CALLS else Arguments.NONE, said)


def cases(turn: TurnForm, ids: Sequence[str], tags: tuple[str, str] = THINK) -> Iterator[AppendCase]:
    """The conversations that a kind of turn is tried in, the smallest first.

    `ids` are two ids of calls, `tags` what reasoning inside content stands between. Content that is given in another
    way than plainly is not tried after the longest pasts.
    """
    said = _said(turn, ids, tags)
    appended = _appended(turn.append, ids)
    calls = turn.append in CALLS
    called = _said(TurnForm(Append.TOOL, turn.reasoning, turn.content, turn.arguments or Arguments.OBJECT), ids, tags)
    answered = _said(TurnForm(Append.USER, turn.reasoning), ids, tags)
    round_ = (called, _result(1, ids))
    yield AppendCase(turn, (USER,), said, appended, calls)
    if not calls:
        yield AppendCase(turn, (USER,), said, appended, True, "where tools are declared")
    yield AppendCase(turn, (SYSTEM, USER), said, appended, calls, "where there is a system message")
    yield AppendCase(turn, (USER, *round_), said, appended, True, "after a round of tools")
    yield AppendCase(turn, (USER, answered, USER), said, appended, calls, "after an earlier answer")
    yield AppendCase(
        turn, (USER, answered, USER, *round_), said, appended, True, "after an earlier answer and a round of tools"
    )
    if turn.said is not Said.PLAIN:
        return
    yield AppendCase(turn, (USER, *round_ * LONG), said, appended, True, f"after {LONG} rounds of tools")
    yield AppendCase(turn, (*(USER, answered) * LONG, USER), said, appended, calls, f"after {LONG} earlier answers")


def _said(turn: TurnForm, ids: Sequence[str], tags: tuple[str, str]) -> Message:
    content = {Said.PLAIN: ANSWER, Said.SPACED: f"\n {ANSWER} \n", Said.INLINE: f"{tags[0]}{THOUGHT}{tags[1]}{ANSWER}"}
    fields: dict[str, Any] = {"role": "assistant", "content": content[turn.said] if turn.content else ""}
    if turn.reasoning:
        fields["reasoning_content"] = THOUGHT
    given, as_text = _ARGUMENTS.get(turn.arguments), turn.arguments is Arguments.TEXT
    calls = [{**call(n + 1, given, as_text=as_text), "id": ids[n]} for n in range(CALLS.get(turn.append, 0))]
    return calling(*calls, **fields) if calls else fields


def _result(number: int, ids: Sequence[str]) -> Message:
    return result(number, tool_call_id=ids[number - 1])


def _appended(append: Append, ids: Sequence[str]) -> tuple[Message, ...]:
    results = tuple(_result(number + 1, ids) for number in range(CALLS.get(append, 0)))
    return *results, *_SAID_NEXT.get(append, ())


_SAID_NEXT: Final[Mapping[Append, tuple[Message, ...]]] = {
    Append.TOOL_USER: (USER,),
    Append.USER: (USER,),
    Append.SYSTEM: (SYSTEM,),
    Append.ASSISTANT: ({"role": "assistant", "content": ANSWER},),
}
"""What comes after the results of calls, if there are any."""
