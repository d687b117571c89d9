"""Which form of messages a template reads, found out by tracing.

A small conversation is rendered in each form, in several places, and the trace says what became of it: the words of a
message stand in the output under the field that they came from, whole and with nothing else beside them, or they do
not (they were left out, printed as Python prints a list, doubly encoded). No name of a model is looked at.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from ..conversation.forms import CallForm, ContentForm, Silence
from ..conversation.messages import RESULT_ROLES
from ..errors import TokentraceError
from ..template.chat_template import REASONING_FIELDS
from ..template.origin import KEY, FieldPath, Origin
from ..template.trace import Rendering

Message = Mapping[str, Any]
Draw = Callable[[Sequence[Message], bool], Rendering]
"""Renders a conversation, with a tool declared or without any."""

_USER: Final = {"role": "user", "content": "question"}
_REPLY: Final = {"role": "assistant", "content": "answer"}
_CALL_ID: Final = "call00001"
_WORDS: Final = ("wordone", "wordtwo")
_CONTENTS: Final[tuple[tuple[Any, Mapping[FieldPath, str]], ...]] = (
    (_WORDS[0], {("content",): _WORDS[0]}),
    (
        [{"type": "text", "text": word} for word in _WORDS],
        {("content", at, "text"): word for at, word in enumerate(_WORDS)},
    ),
)
"""Content as a string and as parts, and what a template that reads it shows."""
_ARGUMENTS: Final = {"place": "value", "other": "more"}
_SILENT: Final[Mapping[Silence, Mapping[str, Any]]] = {
    Silence.EMPTY: {"content": ""},
    Silence.NULL: {"content": None},
    Silence.ABSENT: {},
}
_ODD_ROLE: Final = "probe_role"


class TemplateForms:
    """What one template reads, each thing found out when it is first asked for."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._contents: dict[str, ContentForm] = {}
        self._reasoning: dict[tuple[bool, bool], bool] = {}

    # -- content

    def content(self, role: str) -> ContentForm:
        """The forms of content that the template reads from messages of a role."""
        known = self._contents.get(role)
        if known is None:
            known = self._contents[role] = self._find_content(role)
        return known

    def _find_content(self, role: str) -> ContentForm:
        text, parts, mapping = [], [], []
        for (before, extra, after), tools in itertools.product(self._places(role), (False, True)):
            message = {"role": role, **extra}
            as_text, as_parts = (
                self._reads([*before, {**message, "content": content}, *after], len(before), tools, wanted)
                for content, wanted in _CONTENTS
            )
            if as_text or as_parts:
                text.append(as_text)
                parts.append(as_parts)
                if role in RESULT_ROLES:
                    mapping.append(self._reads_mapping(before, message, tools))
        if not text:
            return ContentForm()
        return ContentForm(all(text) or not all(parts), all(parts), bool(mapping) and all(mapping))

    def _places(self, role: str) -> Iterator[tuple[list[Message], Message, list[Message]]]:
        """Where a message of a role may stand: what comes before it, other fields of it, what comes after."""
        if role in ("system", "developer"):
            yield [], {}, [_USER]
        elif role == "assistant":
            yield [_USER], {}, []
            yield [_USER], {}, [_USER]
            yield [_USER], {"tool_calls": [self._readable_call()]}, [_result("tool")]
        elif role in RESULT_ROLES:
            yield [_USER, self._calling()], {"tool_call_id": _CALL_ID, "name": "probe"}, []
        else:
            yield [], {}, []
            yield [_USER, _REPLY], {}, []

    def _reads_mapping(self, before: list[Message], message: Message, tools: bool) -> bool:
        spans = self._spans([*before, {**message, "content": _ARGUMENTS}], len(before), tools)
        return spans is not None and _is_json(spans, ("content",))

    # -- calls

    @functools.cached_property
    def calls(self) -> CallForm:
        """The forms of tool calls that the template reads; all of them where it reads none."""
        ways = list(itertools.product((True, False), Silence))
        read: list[dict[tuple[bool, Silence], bool]] = []
        for after, tools in itertools.product(([_result("tool")], []), (False, True)):
            found = {way: self._reads_call(*way, after, tools) for way in ways}
            if any(found.values()):
                read.append(found)
        if not read:
            return CallForm(text=False, silence=self.alone)  # as servers do it, which parse
        good = [way for way in ways if all(found[way] for found in read)] or [way for way in ways if read[0][way]]
        mapping = any(as_mapping for as_mapping, _ in good)
        silence = tuple(said for as_mapping, said in good if as_mapping is mapping)
        text = any(not as_mapping for as_mapping, _ in good)
        return CallForm(mapping, text and (not mapping or self._writes_alike(silence[0])), silence)

    def _writes_alike(self, silence: Silence) -> bool:
        """Whether arguments come out the same as a mapping and as JSON text: some templates put the text into braces
        of their own, or take it for a value."""
        for after, tools in itertools.product(([_result("tool")], []), (False, True)):
            drawn = [
                self._drawn([_USER, _calling(_call(as_mapping), silence), *after], tools)
                for as_mapping in (True, False)
            ]
            if drawn[0] is not None and (drawn[1] is None or drawn[0].text != drawn[1].text):
                return False
        return True

    def _reads_call(self, as_mapping: bool, silence: Silence, after: list[Message], tools: bool) -> bool:
        message = _calling(_call(as_mapping), silence)
        spans = self._spans([_USER, message, *after], 1, tools)
        if spans is None or any(path[0] == "content" for path, _ in spans):
            return False
        own = [(path[3:], text) for path, text in spans if path[:3] == ("tool_calls", 0, "function")]
        named = any(path == ("name",) for path, _ in own) or any(path[2:] == ("id",) for path, _ in spans)
        return named and (_is_json(own, ("arguments",)) or _has_leaves(own))

    def _readable_call(self) -> Mapping[str, Any]:
        return _call(self.calls.mapping)

    def _calling(self) -> Message:
        return _calling(self._readable_call(), self.calls.silence[0] if self.calls.silence else Silence.EMPTY)

    @functools.cached_property
    def alone(self) -> tuple[Silence, ...]:
        """How an assistant's message without calls may say that it has no content: what is written as ``""`` is."""
        written: dict[Silence, list[str]] = {}
        for silence in Silence:
            message = {"role": "assistant", **_SILENT[silence]}
            drawn = [self._drawn([_USER, message, *after], False) for after in ((), (_USER,))]
            texts = [one.text for one in drawn if one is not None and Origin.of(1, "content") not in one.origins]
            if len(texts) == len(drawn):
                written[silence] = texts
        return tuple(silence for silence, texts in written.items() if texts == next(iter(written.values())))

    # -- roles, reasoning

    @functools.cached_property
    def prints_roles(self) -> bool:
        """Whether the template prints a role as it is given, whatever it is."""
        message = {"role": _ODD_ROLE, "content": _WORDS[0]}
        drawn = [self._spans([_USER, message, *after], 1, False, role=True) for after in ((), (_USER,))]
        wanted = {(("role",), _ODD_ROLE), (("content",), _WORDS[0])}
        return any(drawn) and all(spans is None or wanted <= set(spans) for spans in drawn)

    def shows_reasoning(self, beside_calls: bool, inline: bool) -> bool:
        """Whether the template shows the reasoning of the last turn: its own field's, or what content brings along."""
        key = (beside_calls, inline)
        if key not in self._reasoning:
            self._reasoning[key] = self._find_reasoning(beside_calls, inline)
        return self._reasoning[key]

    def _find_reasoning(self, beside_calls: bool, inline: bool) -> bool:
        said = {"role": "assistant", "content": "answer"}
        if inline:
            said["content"] = "<think>\nthought\n</think>\n\nanswer"
        ways: list[dict[str, Any]] = [said if inline else {**said, "reasoning_content": "thought"}]
        if beside_calls:
            ways = [{**way, "tool_calls": [self._readable_call()]} for way in ways]
            ways += [] if inline else [{**self._calling(), "reasoning_content": "thought"}]
        names = ("content",) if inline else REASONING_FIELDS
        return any(
            path[0] in names and "thought" in text
            for way in ways
            for path, text in self._spans([_USER, way], 1, beside_calls) or ()
        )

    # -- what a rendering shows

    def _reads(self, messages: list[Message], at: int, tools: bool, wanted: Mapping[FieldPath, str]) -> bool:
        """Whether the content of a message stands in the output as it should: these texts, and nothing else of it."""
        spans = self._spans(messages, at, tools)
        if spans is None:
            return False
        shown = [(path, text.strip('"')) for path, text in spans if path[0] == "content"]
        return {path for path, _ in shown} == set(wanted) and all(wanted[path] == text for path, text in shown)

    def _spans(
        self, messages: list[Message], at: int, tools: bool, *, role: bool = False
    ) -> list[tuple[FieldPath, str]] | None:
        """The spans that one message's fields left, by their path inside of it; None where the template refuses."""
        rendering = self._drawn(messages, tools) or self._drawn(
            [message if index == at else _as_parts(message) for index, message in enumerate(messages)], tools
        )
        if rendering is None:
            return None
        return [
            (origin.path, text)
            for text, _, origin in rendering.spans()
            if origin is not None and origin.message == at and origin.path
            if role or not origin.is_role
        ]

    def _drawn(self, messages: list[Message], tools: bool) -> Rendering | None:
        try:
            return self._draw(messages, tools)
        except TokentraceError:
            return None


def _as_parts(message: Message) -> Message:
    """A message of the probe's surroundings, for templates that read nothing but parts."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _call(as_mapping: bool) -> Mapping[str, Any]:
    arguments = _ARGUMENTS if as_mapping else json.dumps(_ARGUMENTS)
    return {"id": _CALL_ID, "type": "function", "function": {"name": "probe", "arguments": arguments}}


def _calling(call: Mapping[str, Any], silence: Silence) -> Message:
    return {"role": "assistant", **_SILENT[silence], "tool_calls": [call]}


def _result(role: str) -> Message:
    return {"role": role, "tool_call_id": _CALL_ID, "name": "probe", "content": "result"}


def _is_json(spans: Sequence[tuple[FieldPath, str]], path: FieldPath) -> bool:
    """Whether the spans of a field are JSON of the probe's mapping: not its repr, not JSON of its JSON."""
    written = "".join(text for own, text in spans if own[: len(path)] == path and own != (*path, KEY))
    try:
        return bool(json.loads(written) == _ARGUMENTS)
    except ValueError:
        return False


def _has_leaves(spans: Sequence[tuple[FieldPath, str]]) -> bool:
    """Whether every argument of the probe's call is written on its own, with its key."""
    shown = {path: text for path, text in spans if path[:1] == ("arguments",)}
    return ("arguments",) not in shown and all(
        value in shown.get(("arguments", key), "") and ("arguments", key, KEY) in shown
        for key, value in _ARGUMENTS.items()
    )
