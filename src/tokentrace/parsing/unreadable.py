"""What cannot be read back from a rendered assistant's turn, because the template does not write it, or changes it.

Parsing inverts rendering where the template lets it. Where it does not, the trace says so: a field with no text of its
own was dropped, one with other text was changed. Text that spells a delimiter, or a bare value that reads as another
type, is ambiguous: two messages have the same tokens. And since what is not reported has to be read back equal, each
turn's own tokens are parsed in the end, and what they say is held against the message.
"""

from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ..conversation.forms import texts_of
from ..formats.grammar import Style, TurnGrammar, Value
from ..template.chat_template import REASONING_FIELDS
from ..template.origin import KEY, FieldPath
from ..template.trace import Rendering
from .misread import misread_fields
from .proof import PROOFS, parts_of
from .response import ParsedResponse
from .values import Tools, read_value


class UnreadableKind(StrEnum):
    """Why a field cannot be read back."""

    DROPPED = "dropped"
    """The template does not write it."""
    CHANGED = "changed"
    """The template writes something else: without its white space, say."""
    MOVED = "moved"
    """The template writes it where another field belongs."""
    AMBIGUOUS = "ambiguous"
    """What it writes means something else as well."""
    MISREAD = "misread"
    """Its own tokens are read as something else, and nothing of the above tells why."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A field of a message that cannot be read back.

    The field ``tool_calls`` stands for all calls of the message: one that spells a delimiter may end elsewhere. Where
    it or ``content`` is ambiguous, the rest of the turn may be read otherwise too.
    """

    message: int
    field: str
    kind: UnreadableKind
    why: str


DROPPED, CHANGED, MOVED, AMBIGUOUS, MISREAD = UnreadableKind
_Reason = tuple[str, UnreadableKind, str]
"""Field, kind and why."""


def find_unreadable(
    rendering: Rendering,
    messages: Sequence[Mapping[str, Any]],
    grammar: TurnGrammar,
    tools: Sequence[Mapping[str, Any]] | None,
    forgeable: Mapping[str, Sequence[str]],
    misread: Sequence[tuple[str, str]],
    read: Mapping[int, Sequence[ParsedResponse]],
) -> list[Unreadable]:
    """What of the assistant messages cannot be read back.

    `forgeable`: delimiters that text of a field can spell; `misread`: parts of proofs that are not read back; `read`:
    what the tokens of each message say when they are parsed.
    """
    schemas = Tools(tools)
    spans: dict[int, list[tuple[int, int, FieldPath]]] = {}
    for start, end, origin in zip([0, *rendering.ends], rendering.ends, rendering.origins, strict=False):
        if origin is not None and origin.message is not None and origin.path:
            spans.setdefault(origin.message, []).append((start, end, origin.path))
    found: list[Unreadable] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        traced = _Message(rendering.text, spans.get(index, []), message, grammar, schemas, forgeable).reasons()
        reasons = [*traced, *_not_understood(message, misread)]
        kinds = {field: kind for field, kind, _ in reasons}
        if AMBIGUOUS not in (kinds.get("content"), kinds.get("tool_calls")):
            unequal = misread_fields(message, read.get(index, ()), kinds, MOVED in kinds.values())
            reasons += [(field, MISREAD, why) for field, why in unequal]
        found += [Unreadable(index, *reason) for reason in reasons]
    return found


def _not_understood(message: Mapping[str, Any], misread: Sequence[tuple[str, str]]) -> Iterator[_Reason]:
    """Parts of a message that are not read back where a proof has them."""
    parts = parts_of(message)
    found: dict[str, str] = {}
    for part, name in misread:
        if parts_of(PROOFS[name]) <= parts:
            found.setdefault(part, name)
    reasoning = next((name for name in REASONING_FIELDS if message.get(name)), "")
    for part, name in found.items():
        field = {"content": "content", "reasoning": reasoning, "calls": "tool_calls"}[part]
        if field and (part in parts or part == "content"):
            yield field, AMBIGUOUS, f"tried on {name}, the grammar derived from the template reads something else"


@dataclass(frozen=True, slots=True)
class _Message:
    """One message, and the spans of its fields: start, end, and the path within the message."""

    text: str
    spans: list[tuple[int, int, FieldPath]]
    message: Mapping[str, Any]
    grammar: TurnGrammar
    tools: Tools
    forgeable: Mapping[str, Sequence[str]]

    def reasons(self) -> Iterator[_Reason]:
        reasoning = next((name for name in REASONING_FIELDS if self.message.get(name)), None)
        if reasoning is not None:
            shown = "".join(self.text[start:end] for start, end, own in self.spans if own[0] in REASONING_FIELDS)
            yield from self._said(reasoning, self.message[reasoning], shown, "reasoning")
        content = self.message.get("content")
        if isinstance(content, str) and content:
            if self._on_channel_of_reasoning() or self._split_by_reasoning(content):
                yield "content", MOVED, "the template writes it as reasoning"
            else:
                yield from self._said("content", content, self._shown("content"), "content")
        elif content:
            for path, text in texts_of(self.message):
                yield from self._said(".".join(map(str, path)), text, self._shown(*path), "content")
        for at, call in enumerate(self.message.get("tool_calls") or ()):
            yield from self._call(at, call.get("function", call), call.get("id"))

    def _shown(self, *path: Any) -> str:
        """The text of a field, and of what lies below it."""
        return "".join(self.text[start:end] for start, end, own in self.spans if own[: len(path)] == path)

    # -- reasoning and content

    def _said(self, field: str, given: str, shown: str, place: str) -> Iterator[_Reason]:
        """A text, given and shown, in the place of reasoning or content."""
        calls = self.grammar.calls
        bare = calls is not None and not (calls.section_open + calls.open).strip("[{ \n")
        spelled = next((delimiter for delimiter in self.forgeable[place] if delimiter in shown), None)
        if shown != given:
            yield _altered(field, shown)
        elif spelled is not None:
            yield field, AMBIGUOUS, f"it spells {spelled!r}"
        elif place == "content" and bare and shown.lstrip()[:1] in ("{", "["):
            yield field, AMBIGUOUS, "it may be a call, which has no delimiters"

    def _on_channel_of_reasoning(self) -> bool:
        channels = self.grammar.channels
        start = next((start for start, _, own in self.spans if own[0] == "content"), 0)
        return channels is not None and self.text.endswith(channels.opening(channels.reasoning), 0, start)

    def _split_by_reasoning(self, content: str) -> bool:
        """Whether the end of reasoning stands within the content, because the content itself held it."""
        frame = self.grammar.reasoning
        places = [(start, end) for start, end, own in self.spans if own[0] == "content"]
        if frame is None or not places:
            return False
        if any(frame.close in self.text[left[1] : right[0]] for left, right in itertools.pairwise(places)):
            return True
        before = self.text[: places[0][0]].rstrip()
        return frame.close in content and bool(frame.open) and before.endswith(frame.open)

    # -- calls

    def _call(self, at: int, function: Mapping[str, Any], call_id: Any) -> Iterator[_Reason]:
        calls, field = self.grammar.calls, f"tool_calls.{at}"
        own = [own for _, _, own in self.spans if own[:2] == ("tool_calls", at)]
        paths = {path[3:] if path[2:3] == ("function",) else path[2:] for path in own}
        if not any(path[:1] in (("name",), ("id",)) for path in paths):
            yield field, DROPPED, "the template does not write the call"
            return
        if call_id and ("id",) not in paths:
            yield f"{field}.id", DROPPED, "the template writes no ids"
        if ("name",) not in paths:
            named = str(call_id or "").removeprefix("functions.").rpartition(":")[0] == function["name"]
            if calls is None or not calls.id_is_name or not named:
                yield f"{field}.function.name", DROPPED, "the template writes the id in its place"
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                return
        if not isinstance(arguments, Mapping):
            return
        field = f"{field}.function.arguments"
        nested = any(path[2:3] == ("function",) for path in own)
        path = ("tool_calls", at, "function", "arguments") if nested else ("tool_calls", at, "arguments")
        style = calls.style if calls is not None else None
        in_messages = self.grammar.channels is not None and calls is None
        if in_messages or style in (Style.JSON_CALL, Style.JSON_ARGUMENTS):
            yield from self._one_json(field, self._shown(*path), arguments)
        else:
            for key, value in arguments.items():
                yield from self._value((*path, key), f"{field}.{key}", function["name"], key, value)

    def _one_json(self, field: str, shown: str, arguments: Mapping[str, Any]) -> Iterator[_Reason]:
        try:
            read = json.loads(shown)
            read = json.loads(read) if isinstance(read, str) else read
        except ValueError:
            read = None
        if read != arguments:
            yield field, CHANGED, f"the template writes {shown[:40]!r}"
        elif self._delimits(shown):
            yield "tool_calls", AMBIGUOUS, "an argument spells a delimiter"

    def _value(self, path: tuple[Any, ...], field: str, name: str, key: str, value: Any) -> Iterator[_Reason]:
        calls = self.grammar.calls
        runs = [(own, self.text[start:end]) for start, end, own in self.spans if own[: len(path)] == path]
        if not any(own[-1] == KEY for own, _ in runs):
            yield _altered(field, "")
            return
        if calls is not None and calls.style is Style.TREE:
            yield from self._elements(runs, path, field, value)
            return
        shown = "".join(text for own, text in runs if own[-1] != KEY or len(own) > len(path) + 1)
        marked = calls is not None and calls.style in (Style.PYTHON, Style.BRACES)
        unnamed = calls is not None and calls.others is Value.QUOTED
        typed = calls is not None and (bool(calls.string_open) or (marked and not unnamed))
        quoted = calls is not None and (
            calls.strings in (Value.JSON, Value.CDATA) or (calls.style is Style.PYTHON and _is_literal(shown, value))
        )
        text = value if isinstance(value, str) else shown
        if text != shown and not quoted:
            yield field, CHANGED, f"the template writes {shown[:40]!r}"
        elif self._delimits(text):
            yield "tool_calls", AMBIGUOUS, f"the argument {key!r} spells a delimiter"
        elif not typed:
            schema = self.tools.parameter(name, key)
            read = text if unnamed and schema is None else read_value(text, schema)[0]
            if isinstance(value, str) and read != value:
                yield field, AMBIGUOUS, "written bare, it reads as another type"
            elif read != value or type(read) is not type(value):
                yield field, AMBIGUOUS, f"it is written {shown[:40]!r}, which reads as {read!r}"

    def _delimits(self, text: str) -> bool:
        return any(delimiter in text for delimiter in self.forgeable["arguments"])

    def _elements(
        self, runs: Sequence[tuple[tuple[Any, ...], str]], path: tuple[Any, ...], field: str, value: Any
    ) -> Iterator[_Reason]:
        """A value written as elements: what is empty, or a number in a string, leaves nothing to tell it by."""
        calls = self.grammar.calls
        for inner, leaf in _leaves(value, ()):
            keys = [key for key in inner if isinstance(key, str)]
            if calls is not None and any(key == calls.item or set(key) & set("<>/ \t\n\r") or not key for key in keys):
                yield "tool_calls", AMBIGUOUS, f"a key inside {field!r} cannot be the name of an element"
                return
            shown = "".join(text for own, text in runs if own == (*path, *inner))
            if leaf in (None, "", {}, []):
                yield field, AMBIGUOUS, "it has an empty value, and all of these are written the same"
            elif isinstance(leaf, str) and (shown != leaf or (inner and read_value(leaf, None)[0] != leaf)):
                yield field, AMBIGUOUS, "a string inside reads as another type"


def _is_literal(shown: str, value: Any) -> bool:
    """Whether text is a string as Python writes it."""
    try:
        return isinstance(value, str) and ast.literal_eval(shown) == value
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _altered(field: str, shown: str) -> _Reason:
    if not shown:
        return field, DROPPED, "the template does not write it"
    return field, CHANGED, f"the template writes {shown[:40]!r}"


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if value and isinstance(value, Mapping | list):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value
