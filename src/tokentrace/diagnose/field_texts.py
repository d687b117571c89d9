"""Do texts arrive unchanged? Every field of every message is tried with texts that templates tend to alter.

The trace says which spans come from a field: they must be the text itself or its JSON. The matrix covers white space
around texts. The instrumented copy names the line that alters a text, or the condition that leaves it out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from ..conversation.forms import adapt
from ..errors import TokentraceError
from ..show.visible import listed
from ..study.probes import ANSWER as REPLY
from ..study.probes import SYSTEM, USER, call, calling, result
from ..study.study import TemplateStudy
from ..template.chat_template import REASONING_FIELDS, wrap_tools
from ..template.origin import UNKNOWN, Origin
from .cases import ANSWER, TOOLS
from .lines import EventKind, LineTracer

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
"""Plain text, line breaks, inner spaces, markup, letters beyond ASCII, JSON, thousands of characters."""
_SIMPLE: Final = "value"
_KEY: Final = "someKey"
_LATER: Final = "later system"


@dataclass(frozen=True, slots=True)
class Altered:
    """A field whose text does not arrive unchanged."""

    roles: tuple[str, ...]
    field: str
    dropped: bool
    """True if nothing of them is written."""
    expected: str = ""
    actual: str = ""
    line: int | None = None
    source: str = ""
    unread: str = ""
    """For arguments that are written, but not read back: the difference."""

    @property
    def of_turns(self) -> bool:
        """True for the assistant's text: rendered again, it is not what was sampled."""
        return self.roles == ("assistant",)

    def __str__(self) -> str:
        by = f" (line {self.line}: `{self.source}`)" if self.line is not None else ""
        if self.unread:
            return f"arguments of calls are not read back as they were given{by}: {self.unread}"
        words = f"{self.field} of {listed(self.roles)} messages is not written as it was given"
        if self.field == "arguments":
            words = "arguments of calls are not written as they were given"
        elif self.dropped:
            words = f"{self.field} of {listed(self.roles)} messages reaches no token"
        return f"{words}{by}" if self.dropped else f"{words}{by}: {self.expected!r} becomes {self.actual!r}"


def contains_text(text: str, output: str) -> bool:
    """True if the output contains a text as it is or as JSON."""
    return any(one in output for one in (text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]))


def is_from(origin: Origin | None, message: int, field: str) -> bool:
    """True if text comes from a field of a message, or if its origin is unknown."""
    names = REASONING_FIELDS if field in REASONING_FIELDS else ("tool_calls",) if field == "arguments" else (field,)
    return origin is not None and (
        origin.source == UNKNOWN.source or (origin.message == message and origin.field in names)
    )


def call_ids(study: TemplateStudy) -> tuple[str, str]:
    """Return two call ids of a form that the template accepts."""
    calls = study.grammar(True).calls
    named = calls is not None and calls.id_is_name
    return ("functions.probe1:0", "functions.probe2:1") if named else ("call00001", "call00002")


def find_altered(study: TemplateStudy, tracer: LineTracer, unread: Sequence[str] = ()) -> tuple[Altered, ...]:
    """Return the fields whose texts do not arrive, each with the first text that shows it.

    `unread` lists arguments that are written, but not read back. Skips fields of the assistant that are never written:
    the matrix reports those.
    """
    altered: dict[tuple[str, str], Altered] = {}
    for slot in _slots(call_ids(study)):
        key = (slot.role, slot.field)
        if key not in altered:
            trial = _Trial(study, tracer, slot)
            one = trial.altered()
            if one is None and slot.field == "arguments" and unread:
                line, source, _ = trial.line(ANSWER, dropped=False)
                one = Altered((slot.role,), slot.field, False, line=line, source=source, unread=unread[0])
            if one is not None:
                altered[key] = one
    groups: dict[Any, list[Altered]] = {}
    for one in altered.values():
        groups.setdefault((one.of_turns, one.field, one.dropped, one.line), []).append(one)
    return tuple(replace(group[0], roles=_joined_roles(group)) for group in groups.values())


def _joined_roles(group: Sequence[Altered]) -> tuple[str, ...]:
    roles = [role for one in group for role in one.roles]
    return tuple(role for role in roles if role != _LATER or "system" not in roles)


class _Slot(NamedTuple):
    """Where a text goes: a field of one message of a conversation."""

    role: str
    field: str
    message: int
    messages: Sequence[Mapping[str, Any]]

    def filled(self, text: str) -> list[dict[str, Any]]:
        messages = [dict(message) for message in self.messages]
        if self.field == "arguments":
            (one,) = messages[self.message]["tool_calls"]
            messages[self.message] = dict(calling({**call(1, {_KEY: text}), "id": one["id"]}))
        else:
            messages[self.message][self.field] = text
        return messages


def _slots(ids: Sequence[str]) -> Iterator[_Slot]:
    called = calling({**call(1), "id": ids[0]})
    returned = result(1, tool_call_id=ids[0])
    yield _Slot("system", "content", 0, (SYSTEM, USER))
    yield _Slot("user", "content", 0, (USER,))
    yield _Slot("user", "content", 0, (USER, REPLY, USER))
    yield _Slot("user", "content", 2, (USER, REPLY, USER))
    yield _Slot("tool", "content", 2, (USER, called, returned))
    yield _Slot("tool", "content", 2, (USER, called, returned, REPLY))
    yield _Slot("assistant", "content", 1, (USER, REPLY))
    yield _Slot("assistant", "content", 1, (USER, REPLY, USER))
    yield _Slot("assistant", "content", 1, (USER, called))
    yield _Slot("assistant", "reasoning_content", 1, (USER, REPLY))
    yield _Slot("assistant", "arguments", 1, (USER, called))
    yield _Slot("assistant", "arguments", 1, (USER, called, returned, REPLY))
    yield _Slot(_LATER, "content", 2, (USER, REPLY, SYSTEM, USER))


@dataclass(frozen=True, slots=True)
class _Trial:
    """Texts tried in one slot."""

    study: TemplateStudy
    tracer: LineTracer
    slot: _Slot

    def altered(self) -> Altered | None:
        """Return the first text that does not arrive; None if all do or the template refuses the conversation."""
        slot = self.slot
        plain = self._output(_SIMPLE if slot.field == "arguments" else ANSWER)
        if slot.role == "assistant" and plain is not None and not plain.strip():
            return None
        for text in _TEXTS:
            output = self._output(text)
            if output is None or (contains_text(text, output) and (slot.field != "arguments" or _KEY in output)):
                continue
            output = output.strip()
            line, source, actual = self.line(text, dropped=not output)
            parts = _around(text, (actual or output).strip()) if output else ("", "")
            return Altered((slot.role,), slot.field, not output, *parts, line, source)
        return None

    def _output(self, text: str) -> str | None:
        """Return what the template writes from the field; None if it refuses."""
        messages = self.slot.filled(text)
        try:
            adapted = adapt(messages, self.study.forms).messages
            tools = wrap_tools(TOOLS) if self._has_calls else None
            spans = self.study.run(adapted, tools, False).spans()
        except TokentraceError:
            return None
        return "".join(span for span, _, origin in spans if is_from(origin, self.slot.message, self.slot.field))

    @property
    def _has_calls(self) -> bool:
        return any(message.get("tool_calls") for message in self.slot.messages)

    def line(self, text: str, *, dropped: bool) -> tuple[int | None, str, str]:
        """Find the line by which a text does not arrive, its source, and what it makes of the text.

        It is the first that assigns or writes something else than the text; for a dropped text, the last condition
        that, flipped, would write it.
        """
        tracer, arguments = self.tracer, self._run_arguments(text)
        run, plain = tracer.run(**arguments), tracer.run(**self._run_arguments(_SIMPLE))
        if run is None or plain is None:
            return None, "", ""
        event = None
        if dropped:
            for number, one in enumerate(run.events[:_FLIPS]):
                if one.kind is EventKind.TEST:
                    flipped = tracer.run(**arguments, forced={number: not one.value})
                    event = one if flipped is not None and contains_text(text, flipped.text) else event
        else:
            events = [one for one, two in zip(run.events, plain.events, strict=False) if one.value != two.value]
            events = [one for one in events if one.kind in (EventKind.SET, EventKind.WRITE)]
            texts = [one for one in events if isinstance(one.value, str)]
            event = next((one for one in texts if not contains_text(text, one.value)), texts[-1] if texts else None)
        if event is None:
            return None, "", ""
        place = tracer.places[event.place]
        return place.line, place.text, "" if dropped else event.value

    def _run_arguments(self, text: str) -> dict[str, Any]:
        return {
            "messages": adapt(self.slot.filled(text), self.study.forms).messages,
            "tools": TOOLS if self._has_calls else None,
            "variables": self.study.variables,
        }


def _around(expected: str, actual: str) -> tuple[str, str]:
    """Cut two texts around the first character that differs."""
    pairs = enumerate(zip(expected, actual, strict=False))
    at = next((number for number, (one, other) in pairs if one != other), min(len(expected), len(actual)))
    start = max(0, at - _EXCERPT // 2)
    return expected[start : start + _EXCERPT], actual[start : start + _EXCERPT]
