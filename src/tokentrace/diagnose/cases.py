"""What an audit tries: kinds of turns, and what is appended to them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from ..conversation.messages import Messages
from ..study.probes import SYSTEM, USER, Message
from ..study.study import TemplateStudy
from .finding import WordedEnum

ANSWER: Final = "An Answer, naïve"
THOUGHT: Final = "A Thought, naïve"
"""Texts of replies. Capitals and the ï reveal a template that alters them."""
_PROPERTIES: Final = {"key": {"type": ["string", "object"]}, "number": {"type": "number"}}
_SCHEMA: Final = {"type": "object", "properties": _PROPERTIES, "required": []}
TOOLS: Final[Sequence[Message]] = [
    {"type": "function", "function": {"name": name, "description": "a probe", "parameters": _SCHEMA}}
    for name in ("probe1", "probe2")
]
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


class Append(WordedEnum):
    """What follows an assistant turn: results of its `calls`, then perhaps other messages."""

    words: str
    calls: int
    messages: tuple[Message, ...]

    TOOL = "tool", "a tool's result", 1, ()
    PARALLEL = "parallel tools", "two results", 2, ()
    TOOL_USER = "tool, then user", "a result with a user after it", 1, (USER,)
    USER = "user", "a user", 0, (USER,)
    SYSTEM = "system", "a system message", 0, (SYSTEM,)
    ASSISTANT = "assistant", "another turn", 0, ({"role": "assistant", "content": ANSWER},)


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


def turns() -> Iterator[TurnForm]:
    """Yield every kind of turn that an audit tries."""
    for append in Append:
        plain = "object" if append.calls else ""
        forms = _CALLING if append.calls else ((False, True, plain), (True, True, plain))
        yield from (TurnForm(append, *form) for form in forms)
        yield from (TurnForm(append, False, True, plain, style) for style in (Style.SPACED, Style.INLINE))


def inline_reasoning(study: TemplateStudy) -> str:
    """Return content with reasoning inside, in the usual tags if the grammar has none."""
    frame = study.grammar(True).reasoning
    if frame is not None and frame.open and frame.close:
        return f"{frame.open}{THOUGHT}{frame.close}{ANSWER}"
    return f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"


def call_ids(study: TemplateStudy) -> tuple[str, str]:
    """Return two call ids of a form that the template accepts."""
    calls = study.grammar(True).calls
    named = calls is not None and calls.id_is_name
    return ("functions.probe1:0", "functions.probe2:1") if named else ("call00001", "call00002")
