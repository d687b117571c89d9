"""Grammars: what an assistant writes in its turn, as data.

A grammar is text as the template writes it. Delimiters that are control tokens of the
vocabulary are matched by id, others by text. White space next to the assistant's text is exact;
between delimiters any is accepted. `study.derive` reads a grammar off a template;
`formats.dialects` has the common ones by name.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

NO_CALLS = "the template shows no tool calls"
ONE_CALL = "the template writes one call per turn"
"""Notes of a derived grammar that other modules act on."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The text around another: ``<think>`` ``\\n`` ⟨text⟩ ``\\n`` ``</think>`` ``\\n\\n``.

    `lead`, `trail` and `after` are white space: before the text, after it, after the closing.
    """

    open: str = ""
    lead: str = ""
    trail: str = ""
    close: str = ""
    after: str = ""

    def wrap(self, text: str) -> str:
        return f"{self.open}{self.lead}{text}{self.trail}{self.close}{self.after}"


class Style(StrEnum):
    """How a call is written inside its delimiters."""

    JSON_CALL = "json-call"
    """One JSON object that holds name and arguments."""
    JSON_ARGUMENTS = "json-arguments"
    """The name, then the arguments as one JSON object."""
    PAIRS = "pairs"
    """The name, then each argument between tags."""
    TREE = "tree"
    """The name, then elements named after the arguments, nested as the values are."""
    PYTHON = "python"
    """A Python call with keyword arguments."""
    BRACES = "braces"
    """The name, then arguments in braces: bare keys, strings in special quotes."""


class Value(StrEnum):
    """How a value is written between tags."""

    BARE = "bare"
    """A string as it is."""
    JSON = "json"
    CDATA = "cdata"
    """A string as it is, in ``<![CDATA[`` and ``]]>`` if it looks like markup."""
    PYTHON = "python"
    """As JSON, but with Python's ``True``, ``False`` and ``None``."""
    QUOTED = "quoted"
    """In quotes like a string: only the tool's schema distinguishes the two."""


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """``before section_open (open head… begin arguments end close)… section_close after``.

    `before` and `after` are white space. `head` has the fields before the arguments, each after
    a text: ``name``, ``id``, and the number of the call in its turn, from one (``number``) or
    zero (``index``).
    """

    style: Style
    before: str = ""
    section_open: str = ""
    section_close: str = ""
    separator: str = ""
    open: str = ""
    head: tuple[tuple[str, str], ...] = ()
    begin: str = ""
    end: str = ""
    close: str = ""
    after: str = ""
    keys: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """JSON_CALL: the path of each field in the object, in order."""
    named_key: bool = False
    """JSON_CALL: the object's one key is the name, its value the arguments."""
    id_is_name: bool = False
    """The name is written only in the id: ``functions.NAME:INDEX``."""
    key_open: str = ""
    value_open: str = ""
    value_close: str = ""
    string_open: str = ""
    """Opens strings, if that differs from `value_open`: ``" string="true">``."""
    typed_opens: tuple[tuple[str, str], ...] = ()
    """Opens values of other JSON types, if that differs from `value_open`."""
    quote: str = ""
    """BRACES: the quotes of strings."""
    item: str = ""
    """TREE: the name of a list's elements."""
    strings: Value = Value.BARE
    others: Value = Value.JSON
    ascii: bool = False
    """JSON escapes everything but ASCII."""

    def outline(self, repeated: str = "[{}]…") -> str:
        """One call with holes for its fields; `repeated` formats arguments written one by one."""
        head = "".join(f"{lead}⟨{field}⟩" for lead, field in self.head)
        match self.style:
            case Style.JSON_CALL:
                keys = (
                    (".".join(path), "" if field == "arguments" else '"', field)
                    for field, path in self.keys
                )
                members = ", ".join(f'"{key}": {quote}⟨{field}⟩{quote}' for key, quote, field in keys)
                body = '{"⟨name⟩": ⟨arguments⟩}' if self.named_key else f"{{{members}}}"
            case Style.PYTHON:
                body = "⟨name⟩(⟨key⟩=⟨value⟩, …)"
            case Style.BRACES:
                value = f"{self.quote}⟨value⟩{self.quote}"
                value = value if self.others is Value.QUOTED else f"{{{value} | ⟨value⟩}}"
                body = f"{head}{{⟨key⟩:{value},…}}"
            case Style.JSON_ARGUMENTS:
                body = f"{head}{self.begin}⟨arguments⟩{self.end}"
            case _:
                ways = [self.string_open, self.value_open, *(text for _, text in self.typed_opens)]
                opened = f"{{{' | '.join(ways)}}}" if self.string_open else self.value_open
                closed = "⟨key⟩>" if self.style is Style.TREE else ""
                argument = f"{self.key_open}⟨key⟩{opened}⟨value⟩{self.value_close}{closed}"
                body = f"{head}{self.begin}{repeated.format(argument)}{self.end}"
        return f"{self.section_open}{self.open}{body}{self.close}{self.section_close}"


@dataclass(frozen=True, slots=True)
class Channels:
    """A turn made of messages with headers (Harmony).

    Without a `channel`, headers name a message's recipient, and `reasoning` and `content` are
    recipients.
    """

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    message: str = "<|message|>"
    end: str = "<|end|>"
    reasoning: str = "analysis"
    content: str = "final"
    recipient: str = "to="
    namespace: str = "functions."
    """Prefix of function names."""
    call: str = "commentary"
    """The channel of calls."""
    content_type: str = "json"
    call_end: str = "<|call|>"

    def opening(self, name: str) -> str:
        """What a message of reasoning or content begins with, after its head."""
        return f"{self.channel or f' {self.recipient}'}{name}{self.message}"

    def call_text(self, name: str, arguments: Any) -> str:
        body = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        header = f" {self.recipient}{self.namespace}{name}{self.channel}{self.call} {self.content_type}"
        return f"{header.rstrip()}{self.message}{body}{self.call_end}"


@dataclass(frozen=True, slots=True)
class TurnGrammar:
    """What an assistant writes in its turn."""

    head: str = ""
    """What the turn begins with: ``<|im_start|>assistant\\n``."""
    prompt: str = ""
    """The generation prompt. It may go on after the head and open reasoning."""
    reasoning: Frame | None = None
    after_empty: str = ""
    """White space after the closing delimiter of no reasoning."""
    content: Frame = Frame()
    calls: CallGrammar | None = None
    channels: Channels | None = None
    notes: tuple[str, ...] = ()
    """Where probes disagree, and what the template does not show."""

    @property
    def opens_reasoning(self) -> bool:
        """True if the generation prompt ends inside reasoning."""
        if self.reasoning is None or not self.reasoning.open:
            return False
        tail = self.prompt[len(self.head) :]
        return tail.rfind(self.reasoning.open) > tail.rfind(self.reasoning.close)

    def replace(self, **changes: object) -> TurnGrammar:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]
