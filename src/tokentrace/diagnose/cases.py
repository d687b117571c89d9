"""The cases of an audit: what is appended to which turn, after which history."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple

from ..conversation.messages import Messages
from ..study.probes import SYSTEM, USER, call, calling, result
from ..study.study import TemplateStudy

Message = Mapping[str, Any]

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


class Request(NamedTuple):
    """What a template has to write; with `TOOLS`, with a generation prompt."""

    messages: Messages
    tools: bool = False
    prompt: bool = False


class Append(StrEnum):
    """What follows an assistant turn."""

    TOOL = "tool"
    PARALLEL = "parallel tools"
    TOOL_USER = "tool, then user"
    USER = "user"
    SYSTEM = "system"
    ASSISTANT = "assistant"

    @property
    def calls(self) -> int:
        """The number of calls in the turn before."""
        return {Append.TOOL: 1, Append.PARALLEL: 2, Append.TOOL_USER: 1}.get(self, 0)


_NEXT: Final[Mapping[Append, tuple[Message, ...]]] = {
    Append.TOOL_USER: (USER,),
    Append.USER: (USER,),
    Append.SYSTEM: (SYSTEM,),
    Append.ASSISTANT: ({"role": "assistant", "content": ANSWER},),
}
"""The message after the results of calls, if any."""


_ARGUMENTS: Final[Mapping[str, Any]] = {
    "object": {"key": "value"},
    "empty": {},
    "nested": {"key": {"inner": ["one", 2, True, None], "more": {}}, "number": 2.5},
}


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
    """One conversation: the history, the reply to it, and the appended messages."""

    turn: TurnForm
    past: tuple[Message, ...]
    reply: Message
    appended: tuple[Message, ...]
    tools: bool
    history: str = ""
    """Words for the history; empty for a single question."""

    @property
    def messages(self) -> tuple[Message, ...]:
        return (*self.past, self.reply, *self.appended)


_CALLING: Final = (
    *((reasoning, content, "object") for reasoning in (False, True) for content in (False, True)),
    *((False, True, "empty"), (True, False, "empty"), (False, False, "nested"), (True, True, "nested")),
)
"""Reasoning, content and arguments: each two values occur together."""


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
    append, calls = turn.append, turn.append.calls > 0
    reply = _reply(turn, ids, tags)
    results = [result(number + 1, tool_call_id=ids[number]) for number in range(append.calls)]
    called = TurnForm(Append.TOOL, turn.reasoning, turn.content, turn.arguments or "object")
    tools = (_reply(called, ids, tags), result(1, tool_call_id=ids[0]))
    answer = (USER, _reply(TurnForm(Append.USER, turn.reasoning), ids, tags))
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
    for words, past, declared in histories:
        yield AppendCase(turn, past, reply, (*results, *_NEXT.get(append, ())), declared, words)


def _reply(turn: TurnForm, ids: Sequence[str], tags: tuple[str, str]) -> Message:
    spaced, inline = f"\n {ANSWER} \n", f"{tags[0]}{THOUGHT}{tags[1]}{ANSWER}"
    content = {Style.PLAIN: ANSWER, Style.SPACED: spaced, Style.INLINE: inline}[turn.style] if turn.content else ""
    fields: dict[str, Any] = {"role": "assistant", "content": content}
    if turn.reasoning:
        fields["reasoning_content"] = THOUGHT
    arguments = _ARGUMENTS.get(turn.arguments)
    calls = [{**call(number + 1, arguments), "id": ids[number]} for number in range(turn.append.calls)]
    return calling(*calls, **fields) if calls else fields
