"""Do texts arrive unchanged? Each field is tried with texts that templates tend to alter.

The spans that come from a field must be its text or its JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ..conversation.forms import adapt
from ..errors import TokentraceError
from ..rendering.renderer import Renderer
from ..show.visible import listed
from ..study.probes import ANSWER as REPLY
from ..study.probes import SYSTEM, USER, call, calling, result
from ..study.study import TemplateStudy
from ..template.chat_template import REASONING_FIELDS, wrap_tools
from ..template.origin import UNKNOWN
from ..template.trace import Rendering
from .cases import ANSWER, TOOLS, Request, call_ids
from .lines import Event, EventKind, run_traced

_EXCERPT: Final = 40
"""Characters quoted around the first that differs."""
_FLIPS: Final = 1000
"""Events among which to look for the condition that leaves a text out."""
_TEXTS: Final = (
    ANSWER,
    "First line\nsecond line\n\nthird line\n\n\nlast line",
    "one  two   three\tfour",
    "if a<b && c>\"d\": print('e', \\f) # <i>100%</i>, [g](h) {j} @k",
    "Ünïcödé 雨 ﬁ ½ e\u0301 İı",
    '{"Key": [1, 2.50, true, null], "more": {}}',
    " ".join(f"word{number}" for number in range(1, 1200)),
)
_ARGUMENTS: Final[Sequence[Mapping[str, Any]]] = (
    {"key": "value"},
    {
        "text": "Line One\n\nline  \"two\" & 'three' \\four é 雨 <b>",
        "number": "12",
        "word": "true",
        "empty": "",
        "spaces": "  padded ",
    },
    {"whole": 12, "part": 2.5, "truth": True, "none": None, "list": [1, "a"], "map": {}},
)
"""Arguments to read back: a plain one, strings, other values."""
_SIMPLE: Final = "value"
_KEY: Final = "someKey"
_LATER: Final = "later system"


@dataclass(frozen=True, slots=True)
class Altered:
    """A field whose text does not arrive unchanged."""

    roles: tuple[str, ...]
    field: str
    dropped: bool = False
    expected: str = ""
    actual: str = ""
    line: int | None = None
    source: str = ""
    unread: str = ""
    """What differs in arguments that are written, but not read back."""

    @property
    def of_turns(self) -> bool:
        """True for the assistant's text: rendered again, it is not what was sampled."""
        return self.roles == ("assistant",)

    def __str__(self) -> str:
        by = f" (line {self.line}: `{self.source}`)" if self.line is not None else ""
        if self.unread:
            return f"arguments of calls are not read back as they were given{by}: {self.unread}"
        what = f"{self.field} of {listed(self.roles)} messages"
        if self.dropped and self.field != "arguments":
            return f"{what} reaches no token{by}"
        words = f"{what} is not written as it was given"
        if self.field == "arguments":
            words = "arguments of calls are not written as they were given"
        return f"{words}{by}" if self.dropped else f"{words}{by}: {self.expected!r} becomes {self.actual!r}"


def text_from(rendering: Rendering, message: int, field: str) -> str:
    """Return the text from a field of a message, and all text of unknown origin."""
    names = REASONING_FIELDS if field in REASONING_FIELDS else ("tool_calls",) if field == "arguments" else (field,)
    spans = ((text, origin) for text, _, origin in rendering.spans() if origin is not None)
    return "".join(
        text
        for text, origin in spans
        if origin.source == UNKNOWN.source or (origin.message == message and origin.field in names)
    )


def contains_text(text: str, output: str) -> bool:
    """True if the output contains a text as it is or as JSON."""
    return any(one in output for one in (text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]))


def find_altered(renderer: Renderer, study: TemplateStudy) -> tuple[Altered, ...]:
    """Return the fields whose texts do not arrive, but for those that the matrix reports."""
    altered: dict[tuple[str, str], Altered] = {}
    for slot in _slots(study):
        key = (slot.role, slot.field)
        if key not in altered and (one := slot.altered()):
            altered[key] = one
        elif key not in altered and slot.field == "arguments" and (unread := _unread(renderer)):
            line, source = slot.writing(ANSWER)[:2]
            altered[key] = Altered((slot.role,), slot.field, line=line, source=source, unread=unread)
    groups: dict[Any, list[Altered]] = {}
    for one in altered.values():
        groups.setdefault((one.of_turns, one.field, one.dropped, one.line), []).append(one)
    return tuple(replace(group[0], roles=_joined_roles(group)) for group in groups.values())


def _joined_roles(group: Sequence[Altered]) -> tuple[str, ...]:
    roles = [role for one in group for role in one.roles]
    return tuple(role for role in roles if role != _LATER or "system" not in roles)


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a text goes: a field of one message of a conversation."""

    study: TemplateStudy
    role: str
    field: str
    message: int
    messages: Sequence[Mapping[str, Any]]

    def altered(self) -> Altered | None:
        """Return the first text that does not arrive, if any."""
        plain = self._output(_SIMPLE if self.field == "arguments" else ANSWER)
        if self.role == "assistant" and plain is not None and not plain.strip():
            return None
        for text in _TEXTS:
            output = self._output(text)
            if output is None or (contains_text(text, output) and (self.field != "arguments" or _KEY in output)):
                continue
            if not output.strip():
                return Altered((self.role,), self.field, True, "", "", *self._dropping(text))
            line, source, actual = self.writing(text)
            parts = _around(text, (actual or output).strip())
            return Altered((self.role,), self.field, False, *parts, line, source)
        return None

    def _request(self, text: str) -> Request:
        messages = [dict(message) for message in self.messages]
        if self.field == "arguments":
            (one,) = messages[self.message]["tool_calls"]
            messages[self.message] = dict(calling({**call(1, {_KEY: text}), "id": one["id"]}))
        else:
            messages[self.message][self.field] = text
        tools = any(message.get("tool_calls") for message in messages)
        return Request(adapt(messages, self.study.forms).messages, tools)

    def _output(self, text: str) -> str | None:
        """Return what the template writes from the field; None if it refuses."""
        try:
            request = self._request(text)
            rendering = self.study.run(wrap_tools(TOOLS) if request.tools else None, request.messages, False)
        except TokentraceError:
            return None
        return text_from(rendering, self.message, self.field)

    def writing(self, text: str) -> tuple[int | None, str, str]:
        """Find the first line that assigns or writes another text: number, source, text."""
        runs = [run_traced(self.study, self._request(one)) for one in (text, _SIMPLE)]
        pairs = zip(*(run.events for run in runs if run is not None), strict=False) if None not in runs else ()
        texts: list[Event] = [one for one, other in pairs if one.value != other.value and isinstance(one.value, str)]
        texts = [one for one in texts if one.kind in (EventKind.SET, EventKind.WRITE)]
        event = next((one for one in texts if not contains_text(text, one.value)), texts[-1] if texts else None)
        return (None, "", "") if event is None else (event.part.line, event.part.text, event.value)

    def _dropping(self, text: str) -> tuple[int | None, str]:
        """Find the last condition that, flipped, would write the text."""
        request, event = self._request(text), None
        run = run_traced(self.study, request)
        for number, one in enumerate(run.events[:_FLIPS] if run is not None else ()):
            if one.kind is EventKind.TEST:
                flipped = run_traced(self.study, request, forced={number: not one.value})
                event = one if flipped is not None and contains_text(text, flipped.text) else event
        return (None, "") if event is None else (event.part.line, event.part.text)


def _slots(study: TemplateStudy) -> Iterator[_Slot]:
    ids = call_ids(study)
    called, returned = calling({**call(1), "id": ids[0]}), result(1, tool_call_id=ids[0])
    for role, field, message, messages in (
        ("system", "content", 0, (SYSTEM, USER)),
        ("user", "content", 0, (USER,)),
        ("user", "content", 0, (USER, REPLY, USER)),
        ("user", "content", 2, (USER, REPLY, USER)),
        ("tool", "content", 2, (USER, called, returned)),
        ("tool", "content", 2, (USER, called, returned, REPLY)),
        ("assistant", "content", 1, (USER, REPLY)),
        ("assistant", "content", 1, (USER, REPLY, USER)),
        ("assistant", "content", 1, (USER, called)),
        ("assistant", "reasoning_content", 1, (USER, REPLY)),
        ("assistant", "arguments", 1, (USER, called)),
        ("assistant", "arguments", 1, (USER, called, returned, REPLY)),
        (_LATER, "content", 2, (USER, REPLY, SYSTEM, USER)),
    ):
        yield _Slot(study, role, field, message, messages)


def _around(expected: str, actual: str) -> tuple[str, str]:
    """Cut two texts around the first character that differs."""
    pairs = enumerate(zip(expected, actual, strict=False))
    at = next((number for number, (one, other) in pairs if one != other), min(len(expected), len(actual)))
    start = max(0, at - _EXCERPT // 2)
    return expected[start : start + _EXCERPT], actual[start : start + _EXCERPT]


def _unread(renderer: Renderer) -> str:
    """Name the first argument that is not read back from a rendered call."""
    plain, *more = (_differences(renderer, arguments) for arguments in _ARGUMENTS)
    return "" if plain else next((words for some in more for words in some), "")


def _differences(renderer: Renderer, arguments: Mapping[str, Any]) -> list[str]:
    properties = {key: {"type": "string"} if isinstance(value, str) else {} for key, value in arguments.items()}
    schema = {"type": "object", "properties": properties}
    tools = [{"type": "function", "function": {"name": "probe1", "description": "a tool", "parameters": schema}}]
    message = calling({**call(1, arguments), "id": call_ids(renderer.study(TOOLS))[0]})
    try:
        rendered = renderer.render([USER, message], tools=tools)
    except TokentraceError:
        return []
    turn = next((turn for turn in rendered.turns if turn.message == 1), None)
    if turn is None:
        return []
    ids = rendered.ids
    parsed = renderer.parse_response(ids[turn.start : turn.stop], tools=tools, prompt_ids=ids[: turn.start])
    calls = [one.arguments for one in parsed.tool_calls if isinstance(one.arguments, Mapping)]
    actual = calls[0] if len(calls) == 1 else {}
    return [
        f"argument {key} {value!r} {f'is read as {actual[key]!r}' if key in actual else 'is not read'}"
        for key, value in arguments.items()
        if key not in actual or (actual[key], type(actual[key])) != (value, type(value))
    ]
