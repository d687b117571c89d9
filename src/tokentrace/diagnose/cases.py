"""The cases of an audit: what is appended to which turn, after which history."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple, Self

from ..conversation.messages import Messages
from ..study.probes import SYSTEM, USER, Message, call, calling, result
from ..study.study import TemplateStudy

LONG: Final = 6
"""Rounds of tools, and earlier answers, in the longest histories."""
ANSWER: Final = "An Answer, naïve"
THOUGHT: Final = "A Thought, naïve"
"""Texts of replies. Capitals and the ï reveal a template that alters them."""
_THINK: Final = ("<think>\n", "\n</think>\n\n")
_PROPERTIES: Final = {"key": {"type": ["string", "object"]}, "number": {"type": "number"}}
_SCHEMA: Final = {"type": "object", "properties": _PROPERTIES, "required": []}
TOOLS: Final[Sequence[Message]] = [
    {"type": "function", "function": {"name": name, "description": "a probe", "parameters": _SCHEMA}}
    for name in ("probe1", "probe2")
]
_ARGUMENTS: Final[Mapping[str, Any]] = {
    "object": {"key": "value"},
    "empty": {},
    "nested": {"key": {"inner": ["one", 2, True, None], "more": {}}, "number": 2.5},
}
_CALLING: Final = (
    *((reasoning, content, "object") for reasoning in (False, True) for content in (False, True)),
    *((False, True, "empty"), (True, False, "empty"), (False, False, "nested"), (True, True, "nested")),
)
"""Reasoning, content and arguments: each two values occur together."""


class Request(NamedTuple):
    """What a template has to write; with `TOOLS`, with a generation prompt."""

    messages: Messages
    tools: bool = False
    prompt: bool = False


class Append(StrEnum):
    """What follows an assistant turn: results of its `calls`, then perhaps another message."""

    calls: int
    words: str
    message: Message | None

    def __new__(cls, value: str, calls: int, words: str, message: Message | None = None) -> Self:
        one = str.__new__(cls, value)
        one._value_, one.calls, one.words, one.message = value, calls, words, message
        return one

    TOOL = "tool", 1, "a tool's result"
    PARALLEL = "parallel tools", 2, "two results"
    TOOL_USER = "tool, then user", 1, "a result with a user after it", USER
    USER = "user", 0, "a user", USER
    SYSTEM = "system", 0, "a system message", SYSTEM
    ASSISTANT = "assistant", 0, "another turn", {"role": "assistant", "content": ANSWER}


class Style(StrEnum):
    """How a turn's content is passed."""

    PLAIN = ""
    SPACED = "white space around content"
    INLINE = "reasoning inside content"
    """As by a client that keeps the sampled text and does not separate reasoning."""


@dataclass(frozen=True, slots=True)
class TurnForm:
    """The kind of an assistant turn, and what is appended to it."""

    append: Append
    reasoning: bool
    content: bool = True
    arguments: str = ""
    style: Style = Style.PLAIN

    def __str__(self) -> str:
        content = (self.style or "content") if self.content else ""
        calls = ["", f"a call ({self.arguments})", f"two calls ({self.arguments})"][self.append.calls]
        return " + ".join(filter(None, ["reasoning" * self.reasoning, content, calls]))


@dataclass(frozen=True, slots=True)
class AppendCase:
    """One conversation: the history, the reply to it, and the appended messages.

    `history` has words for the past; empty for a single question.
    """

    turn: TurnForm
    past: tuple[Message, ...]
    reply: Message
    appended: tuple[Message, ...]
    tools: bool
    history: str = ""

    @property
    def messages(self) -> tuple[Message, ...]:
        return (*self.past, self.reply, *self.appended)


def turns() -> Iterator[TurnForm]:
    """Yield every kind of turn that an audit tries."""
    for append in Append:
        plain = "object" if append.calls else ""
        forms = _CALLING if append.calls else ((False, True, plain), (True, True, plain))
        yield from (TurnForm(append, *form) for form in forms)
        yield from (TurnForm(append, False, True, plain, style) for style in (Style.SPACED, Style.INLINE))


def reasoning_tags(study: TemplateStudy) -> tuple[str, str]:
    """Return the tags around reasoning, the usual ones if the grammar has none."""
    frame = study.grammar(True).reasoning
    return (frame.open, frame.close) if frame is not None and frame.open and frame.close else _THINK


def call_ids(study: TemplateStudy) -> tuple[str, str]:
    """Return two call ids of a form that the template accepts."""
    calls = study.grammar(True).calls
    named = calls is not None and calls.id_is_name
    return ("functions.probe1:0", "functions.probe2:1") if named else ("call00001", "call00002")


def cases(turn: TurnForm, ids: Sequence[str], tags: tuple[str, str] = _THINK) -> Iterator[AppendCase]:
    """Yield conversations for a kind of turn, the smallest first; the longest for plain ones only."""

    def reply(turn: TurnForm) -> Message:
        contents = {Style.SPACED: f"\n {ANSWER} \n", Style.INLINE: f"{tags[0]}{THOUGHT}{tags[1]}{ANSWER}"}
        fields = {"role": "assistant", "content": contents.get(turn.style, ANSWER) if turn.content else ""}
        if turn.reasoning:
            fields["reasoning_content"] = THOUGHT
        arguments = _ARGUMENTS.get(turn.arguments)
        calls = [{**call(number + 1, arguments), "id": ids[number]} for number in range(turn.append.calls)]
        return calling(*calls, **fields) if calls else fields

    append, calls = turn.append, turn.append.calls > 0
    results = [result(number + 1, tool_call_id=ids[number]) for number in range(append.calls)]
    called = TurnForm(Append.TOOL, turn.reasoning, turn.content, turn.arguments or "object")
    tools = (reply(called), result(1, tool_call_id=ids[0]))
    answer = (USER, reply(TurnForm(Append.USER, turn.reasoning)))
    histories: list[tuple[str, tuple[Message, ...], bool]] = [
        ("", (USER,), calls),
        *([] if calls else [("where tools are declared", (USER,), True)]),
        ("where there is a system message", (SYSTEM, USER), calls),
        ("after a round of tools", (USER, *tools), True),
        ("after an earlier answer", (*answer, USER), calls),
        ("after an earlier answer and a round of tools", (*answer, USER, *tools), True),
    ]
    if turn.style is Style.PLAIN and turn.arguments in ("", "object"):
        histories.append((f"after {LONG} rounds of tools", (USER, *tools * LONG), True))
        histories.append((f"after {LONG} earlier answers", (*answer * LONG, USER), calls))
    appended = (*results, *([append.message] if append.message else []))
    for words, past, declared in histories:
        yield AppendCase(turn, past, reply(turn), appended, declared, words)
