"""Which forms of messages a template reads, learned by tracing.

The template reads a form if the output has a message's words with the origin of their field, whole
and alone: not printed as a Python list, not encoded twice.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..computed import computed
from ..conversation.forms import Silence
from ..conversation.messages import REASONING_FIELDS, RESULT_ROLES
from ..template.origin import KEY, FieldPath, Origin
from .memory import learned
from .probes import ANSWER, CONTINUED, INLINE_THOUGHT, RESULT, THOUGHT, TWO_ARGUMENTS, USER, call
from .turns import shows_field

if TYPE_CHECKING:
    from .probes import Message, Probe
    from .study import TemplateStudy

    Case = tuple[Probe, int, bool]
    """A probe, the message to look at, and whether a tool is declared."""

Spans = Sequence[tuple[FieldPath, str]]
"""Texts of one message's fields, each with its path."""
_PARTS = [{"type": "text", "text": word} for word in ("wordone", "wordtwo")]
_ODD_ROLE = "probe_role"
_AFTER: tuple[Probe, ...] = ((), (USER,))
_TOOLS = (False, True)
_CALL_CASES = tuple(itertools.product(((RESULT,), ()), _TOOLS))
"""What follows a call, and whether a tool is declared."""
_WAYS = tuple(itertools.product((True, False), Silence))


class TemplateForms:
    """What one template reads."""

    def __init__(self, study: TemplateStudy) -> None:
        self._study, self.cache = study, study.cache
        self.calls = ReadCalls(study, self)

    @learned
    def content(self, role: str) -> ReadContent:
        return ReadContent(self._study, self, role)

    @computed
    def alone(self) -> tuple[Silence, ...]:
        """The kinds of missing content that are written alike without calls."""
        renderings: dict[Silence, list[str]] = {}
        for silence in Silence:
            message = {"role": "assistant", **silence.fields}
            drawn = [self._study.probe([USER, message, *after]) for after in _AFTER]
            texts = [one.text for one in drawn if one and Origin.of(1, "content") not in one.origins]
            if len(texts) == len(drawn):
                renderings[silence] = texts
        first = next(iter(renderings.values()), [])
        return tuple(silence for silence, texts in renderings.items() if texts == first)

    @computed
    def prints_roles(self) -> bool:
        message = {"role": _ODD_ROLE, "content": "wordone"}
        drawn = [_spans(self._study, [USER, message, *after], 1, role=True) for after in _AFTER]
        expected = {(("role",), _ODD_ROLE), (("content",), "wordone")}
        return any(drawn) and all(spans is None or expected <= set(spans) for spans in drawn)

    @learned
    def shows_reasoning(self, beside_calls: bool, inline: bool) -> bool:
        """Whether the template shows the last reasoning, as a field or inline."""
        reply = INLINE_THOUGHT if inline else THOUGHT
        ways: list[Message] = [{**reply, "tool_calls": [self.calls.readable]} if beside_calls else reply]
        if beside_calls and not inline:
            ways.append({**self.calls.message, "reasoning_content": "thought"})
        spans = (span for way in ways for span in _spans(self._study, [USER, way], 1, beside_calls) or ())
        names = ("content",) if inline else REASONING_FIELDS
        return any(path[0] in names and "thought" in text for path, text in spans)


class ReadContent:
    """The forms of content that a template reads from messages of one role."""

    def __init__(self, study: TemplateStudy, forms: TemplateForms, role: str) -> None:
        self._study, self._forms, self._role = study, forms, role

    @computed
    def text(self) -> bool:
        return (
            all(self._reads(case) or not self._reads(case, _PARTS) for case in self._cases)
            or not self.parts
        )

    @computed
    def parts(self) -> bool:
        reads = [(self._reads(case, _PARTS), case) for case in self._cases]
        return any(read for read, _ in reads) and all(read or not self._reads(case) for read, case in reads)

    @computed
    def mapping(self) -> bool:
        """A tool's result that is a JSON object."""
        if self._role not in RESULT_ROLES:
            return False
        read = [case for case in self._cases if self._reads(case) or self._reads(case, _PARTS)]
        return bool(read) and all(
            _is_json(_spans(self._study, _replaced(probe, at, TWO_ARGUMENTS), at, tools), ("content",))
            for probe, at, tools in read
        )

    @computed
    def _cases(self) -> list[Case]:
        role, calls = self._role, self._forms.calls
        message = {"role": role, "content": "question"}
        places: list[tuple[Probe, int]] = [([message], 0), ([USER, ANSWER, message], 2)]
        if role == "user":
            places = [(CONTINUED, 0), (CONTINUED, 2)]
        elif role in ("system", "developer"):
            places = [([message, USER], 0)]
        elif role == "assistant":
            beside = {**ANSWER, "tool_calls": [calls.readable]}
            places = [([USER, ANSWER], 1), (CONTINUED, 1), ([USER, beside, RESULT], 1)]
        elif role in RESULT_ROLES:
            places = [([USER, calls.message, {**RESULT, "role": role}], 2)]
        return [(probe, at, tools) for probe, at in places for tools in _TOOLS]

    def _reads(self, case: Case, parts: list[dict[str, str]] | None = None) -> bool:
        """Whether the template reads content as text, or as these parts."""
        probe, at, tools = case
        expected: dict[FieldPath, str] = {("content",): str(probe[at]["content"])}
        if parts is not None:
            expected = {("content", n, "text"): part["text"] for n, part in enumerate(parts)}
            probe = _replaced(probe, at, parts)
        spans = _spans(self._study, probe, at, tools) or ()
        actual = {(path, text.strip('"')) for path, text in spans if path[0] == "content"}
        return actual == set(expected.items())


class ReadCalls:
    """The forms of tool calls that a template reads."""

    def __init__(self, study: TemplateStudy, forms: TemplateForms) -> None:
        self._study, self._forms = study, forms

    @computed
    def mapping(self) -> bool:
        """Whether arguments may be a mapping."""
        return any(as_mapping for as_mapping, _ in self._good) or not self._good

    @computed
    def text(self) -> bool:
        """Whether arguments may be JSON text, written as a mapping would be."""
        if all(as_mapping for as_mapping, _ in self._good):
            return False
        for after, tools in _CALL_CASES if self.mapping else ():
            probes = ([USER, _calling(as_mapping, self.silence[0]), *after] for as_mapping in (True, False))
            mapping, text = (self._study.probe(probe, tools) for probe in probes)
            if mapping is not None and (text is None or mapping.text != text.text):
                return False
        return True

    @computed
    def silence(self) -> tuple[Silence, ...]:
        """The kinds of missing content next to calls, the best first."""
        if not self._good:
            return self._forms.alone
        return tuple(silence for silence in Silence if (self.mapping, silence) in self._good)

    @property
    def readable(self) -> Mapping[str, Any]:
        return call(1, TWO_ARGUMENTS, as_text=not self.mapping)

    @property
    def message(self) -> Message:
        return _calling(self.mapping, self.silence[0] if self.silence else Silence.EMPTY)

    @computed
    def are_shown(self) -> bool:
        """Whether the template writes any part of a call, in any form."""
        for way, (after, tools) in itertools.product(_WAYS, _CALL_CASES):
            rendering = self._study.probe([USER, _calling(*way), *after], tools)
            if rendering is not None and shows_field(rendering, ("tool_calls",)):
                return True
        return False

    @computed
    def _good(self) -> list[tuple[bool, Silence]]:
        """The ways that are read whenever any way is, or else in the first case."""
        cases = []
        for after, tools in _CALL_CASES:
            cases.append([way for way in _WAYS if self._reads([USER, _calling(*way), *after], tools)])
        cases = list(filter(None, cases))
        always = [way for way in _WAYS if all(way in ways for ways in cases)]
        return (always or cases[0]) if cases else []

    def _reads(self, probe: Probe, tools: bool) -> bool:
        spans = _spans(self._study, probe, 1, tools)
        if spans is None or any(path[0] == "content" for path, _ in spans):
            return False
        inner = [(path[3:], text) for path, text in spans if path[:3] == ("tool_calls", 0, "function")]
        named = any(path == ("name",) for path, _ in inner) or any(path[2:] == ("id",) for path, _ in spans)
        texts = {path: text for path, text in inner if path[:1] == ("arguments",)}
        base: FieldPath = ("arguments",)
        by_itself = base not in texts and all(
            value in texts.get((*base, key), "") and (*base, key, KEY) in texts
            for key, value in TWO_ARGUMENTS.items()
        )
        return named and (by_itself or _is_json(inner, base))


def _calling(as_mapping: bool, silence: Silence) -> Message:
    calls = [call(1, TWO_ARGUMENTS, as_text=not as_mapping)]
    return {"role": "assistant", **silence.fields, "tool_calls": calls}


def _replaced(probe: Probe, at: int, content: Any) -> Probe:
    return [{**message, "content": content} if i == at else message for i, message in enumerate(probe)]


def _spans(
    study: TemplateStudy, probe: Probe, at: int, tools: bool = False, *, role: bool = False
) -> Spans | None:
    """The spans of one message's fields; None if the template refuses."""
    rendering = study.probe(probe, tools)
    if rendering is None:  # it may read only parts
        as_parts = list(probe)
        for index, message in enumerate(probe):
            if index != at and isinstance(text := message.get("content"), str):
                as_parts[index] = {**message, "content": [{"type": "text", "text": text}]}
        rendering = study.probe(as_parts, tools)
    if rendering is None:
        return None
    spans = ((origin, text) for text, _, origin in rendering.spans() if origin and origin.message == at)
    return [(origin.path, text) for origin, text in spans if origin.path and (role or not origin.is_role)]


def _is_json(spans: Spans | None, path: FieldPath) -> bool:
    text = "".join(
        text for inner, text in spans or () if inner[: len(path)] == path and inner != (*path, KEY)
    )
    try:
        return bool(json.loads(text) == TWO_ARGUMENTS)
    except ValueError:
        return False
