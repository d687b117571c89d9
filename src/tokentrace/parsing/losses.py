"""What cannot be read back from a rendered assistant's turn, because the template does not write it, or not as it is.

Parsing inverts rendering where the template lets it. Where it does not, the trace says so: a field with no text of its
own was dropped, one with other text was changed. Text that spells a delimiter, or a bare value that reads as one of
another type, is ambiguous: two messages have the same tokens.
"""

from __future__ import annotations

import dataclasses
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
from .values import Tools, read_value


class LossKind(StrEnum):
    """Why a field cannot be read back."""

    DROPPED = "dropped"
    """The template does not write it."""
    CHANGED = "changed"
    """The template writes something else: without its white space, say."""
    MOVED = "moved"
    """The template writes it where another field belongs."""
    AMBIGUOUS = "ambiguous"
    """What it writes means something else as well."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A field of a message that cannot be read back. ``tool_calls`` are all calls: one of them may end elsewhere."""

    message: int
    field: str
    kind: LossKind
    why: str


def find_losses(
    rendering: Rendering,
    messages: Sequence[Mapping[str, Any]],
    grammar: TurnGrammar,
    tools: Sequence[Mapping[str, Any]] | None,
    forgeable: Mapping[str, Sequence[str]],
) -> list[Loss]:
    """The losses of all assistant messages. `forgeable` are the delimiters that each field's text can spell."""
    schemas = Tools(tools)
    spans = _spans_by_message(rendering)
    return [
        loss
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
        for loss in _Message(rendering.text, spans.get(index, []), index, message, grammar, schemas, forgeable).losses()
    ]


Spans = list[tuple[int, int, FieldPath]]


def _spans_by_message(rendering: Rendering) -> dict[int, Spans]:
    """Where the fields of each message stand: start, end, and the path inside of the message."""
    found: dict[int, Spans] = {}
    for start, end, origin in zip([0, *rendering.ends], rendering.ends, rendering.origins, strict=False):
        if origin is not None and origin.message is not None and origin.path:
            found.setdefault(origin.message, []).append((start, end, origin.path))
    return found


class _Message:
    """One message, and the spans that its fields left in the rendering."""

    def __init__(
        self,
        text: str,
        spans: Spans,
        index: int,
        message: Mapping[str, Any],
        grammar: TurnGrammar,
        tools: Tools,
        forgeable: Mapping[str, Sequence[str]],
    ) -> None:
        self.index = index
        self.message = message
        self.grammar = grammar
        self.tools = tools
        self.forgeable = forgeable
        self.text = text
        self.spans = spans

    def losses(self) -> Iterator[Loss]:
        reasoning = next((name for name in REASONING_FIELDS if self.message.get(name)), None)
        if reasoning is not None:
            yield from self._said(reasoning, REASONING_FIELDS)
        content = self.message.get("content")
        if isinstance(content, str) and content:
            yield from self._said("content", ("content",))
        elif content:
            yield from self._parts()
        for at, call in enumerate(self.message.get("tool_calls") or ()):
            yield from self._call(at, call.get("function", call), call.get("id"))

    def _loss(self, field: str, kind: LossKind, why: str) -> Loss:
        return Loss(self.index, field, kind, why)

    def _shown(self, *path: Any) -> str:
        """The text of a field, and of what lies below it."""
        return "".join(self.text[start:end] for start, end, own in self.spans if own[: len(path)] == path)

    # -- what it says

    def _said(self, field: str, names: Sequence[str]) -> Iterator[Loss]:
        given = self.message[field]
        shown = "".join(self.text[start:end] for start, end, own in self.spans if own[0] in names)
        if field == "content" and (self._on_channel_of_reasoning() or self._split_by_reasoning()):
            yield self._loss(field, LossKind.MOVED, "the template writes it as reasoning")
        elif not shown:
            yield self._loss(field, LossKind.DROPPED, "the template does not write it")
        elif shown != given:
            yield self._loss(field, LossKind.CHANGED, f"the template writes {shown[:40]!r}")
        else:
            yield from self._spells(field, shown)

    def _parts(self) -> Iterator[Loss]:
        """Text parts, each on its own."""
        for path, text in texts_of(self.message):
            field, shown = ".".join(map(str, path)), self._shown(*path)
            if not shown and text.strip():
                yield self._loss(field, LossKind.DROPPED, "the template does not write it")
            elif shown != text:
                yield self._loss(field, LossKind.CHANGED, f"the template writes {shown[:40]!r}")
            else:
                for loss in self._spells("content", shown):
                    yield dataclasses.replace(loss, field=field)

    def _on_channel_of_reasoning(self) -> bool:
        channels = self.grammar.channels
        start = next((start for start, _, own in self.spans if own[0] == "content"), 0)
        return channels is not None and self.text.endswith(
            f"{channels.channel}{channels.reasoning}{channels.message}", 0, start
        )

    def _split_by_reasoning(self) -> bool:
        """Whether the end of reasoning stands in the midst of content, which held it itself."""
        frame = self.grammar.reasoning
        places = [(start, end) for start, end, own in self.spans if own[0] == "content"]
        if frame is None or not places:
            return False
        if any(frame.close in self.text[left[1] : right[0]] for left, right in itertools.pairwise(places)):
            return True
        before = self.text[: places[0][0]].rstrip()
        return frame.close in self.message["content"] and bool(frame.open) and before.endswith(frame.open)

    def _spells(self, field: str, text: str) -> Iterator[Loss]:
        """Text that the parser would take for a delimiter."""
        for delimiter in self.forgeable["content" if field == "content" else "reasoning"]:
            if delimiter in text:
                yield self._loss(field, LossKind.AMBIGUOUS, f"it spells {delimiter!r}")
                return
        calls = self.grammar.calls
        bare = calls is not None and not (calls.section_open + calls.open).strip("[{ \n")
        if field == "content" and bare and text.lstrip()[:1] in ("{", "["):
            yield self._loss(field, LossKind.AMBIGUOUS, "it may be a call, which has no delimiters")

    # -- what it calls

    def _call(self, at: int, function: Mapping[str, Any], call_id: Any) -> Iterator[Loss]:
        field = f"tool_calls.{at}"
        own = [own for _, _, own in self.spans if own[:2] == ("tool_calls", at)]
        paths = {path[3:] if path[2:3] == ("function",) else path[2:] for path in own}
        if not any(path[:1] in (("name",), ("id",)) for path in paths):
            yield self._loss(field, LossKind.DROPPED, "the template does not write the call")
            return
        if call_id and not any(path == ("id",) for path in paths):
            yield self._loss(f"{field}.id", LossKind.DROPPED, "the template writes no ids")
        if not any(path == ("name",) for path in paths):
            calls = self.grammar.calls
            named = str(call_id or "").removeprefix("functions.").rpartition(":")[0] == function["name"]
            if calls is None or not calls.id_is_name or not named:
                yield self._loss(f"{field}.function.name", LossKind.DROPPED, "the template writes the id in its place")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                return
        if isinstance(arguments, Mapping):
            yield from self._arguments(at, f"{field}.function.arguments", function["name"], arguments)

    def _arguments(self, at: int, field: str, name: str, arguments: Mapping[str, Any]) -> Iterator[Loss]:
        calls = self.grammar.calls
        one_json = self.grammar.channels is not None or (
            calls is not None and calls.style in (Style.JSON_CALL, Style.JSON_ARGUMENTS)
        )
        path: tuple[Any, ...] = ("tool_calls", at, "function")
        if not any(own[:3] == path for _, _, own in self.spans):
            path = path[:2]
        if one_json:
            shown = self._shown(*path, "arguments")
            try:
                read = json.loads(shown)
                read = json.loads(read) if isinstance(read, str) else read
            except ValueError:
                read = None
            if read != arguments:
                yield self._loss(field, LossKind.CHANGED, f"the template writes {shown[:40]!r}")
            elif self._delimits(shown):
                yield self._loss("tool_calls", LossKind.AMBIGUOUS, "an argument spells a delimiter")
            return
        for key, value in arguments.items():
            yield from self._value((*path, "arguments", key), f"{field}.{key}", name, key, value)

    def _value(self, path: tuple[Any, ...], field: str, name: str, key: str, value: Any) -> Iterator[Loss]:
        calls = self.grammar.calls
        runs = [(own, self.text[start:end]) for start, end, own in self.spans if own[: len(path)] == path]
        if not runs or not any(own[-1] == KEY for own, _ in runs):
            yield self._loss(field, LossKind.DROPPED, "the template does not write it")
            return
        if calls is not None and calls.style is Style.TREE:
            yield from self._leaves(runs, path, field, value)
            return
        shown = "".join(text for own, text in runs if own[-1] != KEY or len(own) > len(path) + 1)
        typed = calls is not None and (bool(calls.string_open) or calls.style in (Style.PYTHON, Style.BRACES))
        if isinstance(value, str):
            if shown != value and not (calls is not None and calls.strings in (Value.JSON, Value.CDATA)):
                yield self._loss(field, LossKind.CHANGED, f"the template writes {shown[:40]!r}")
            elif self._delimits(value):
                yield self._loss("tool_calls", LossKind.AMBIGUOUS, f"the argument {key!r} spells a delimiter")
            elif not typed and read_value(value, self.tools.parameter(name, key))[0] != value:
                yield self._loss(field, LossKind.AMBIGUOUS, "written bare, it reads as another type")
        elif self._delimits(shown):
            yield self._loss("tool_calls", LossKind.AMBIGUOUS, f"the argument {key!r} spells a delimiter")
        elif not typed:
            read = read_value(shown, self.tools.parameter(name, key))[0]
            if read != value or type(read) is not type(value):
                yield self._loss(field, LossKind.AMBIGUOUS, f"it is written {shown[:40]!r}, which reads as {read!r}")

    def _delimits(self, text: str) -> bool:
        return any(delimiter in text for delimiter in self.forgeable["arguments"])

    def _leaves(
        self, runs: Sequence[tuple[tuple[Any, ...], str]], path: tuple[Any, ...], field: str, value: Any
    ) -> Iterator[Loss]:
        """Values of elements: what is empty, or a number in a string, leaves nothing to tell it by."""
        calls = self.grammar.calls
        for inner, leaf in _leaves_of(value, ()):
            keys = [key for key in inner if isinstance(key, str)]
            if calls is not None and any(key == calls.item or set(key) & set("<>/ \t\n\r") or not key for key in keys):
                yield self._loss("tool_calls", LossKind.AMBIGUOUS, f"a key inside {field!r} is no name for an element")
                return
            shown = "".join(text for own, text in runs if own == (*path, *inner))
            if leaf in (None, "", {}) or leaf == []:
                yield self._loss(field, LossKind.AMBIGUOUS, "what is empty is written as nothing, whatever it is")
            elif isinstance(leaf, str) and (shown != leaf or (inner and read_value(leaf, None)[0] != leaf)):
                yield self._loss(field, LossKind.AMBIGUOUS, "a string inside reads as another type")


def _leaves_of(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves_of(inner, (*path, key))
    elif isinstance(value, list) and value:
        for at, inner in enumerate(value):
            yield from _leaves_of(inner, (*path, at))
    else:
        yield path, value
