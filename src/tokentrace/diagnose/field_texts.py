"""Whether texts arrive as they were given: every field of every message, with texts that templates tend to alter.

The trace says which spans of a rendering come from a field: what these say must be the text itself, or its JSON. White
space around it is for the matrix to look at. The instrumented copy of the template tells the line that writes a text
otherwise, or the condition that leaves it out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ..conversation.forms import adapt
from ..errors import TokentraceError
from ..study.probes import ANSWER as ANSWERED
from ..study.probes import SYSTEM, USER, call, calling, result
from ..study.study import TemplateStudy
from ..template.chat_template import REASONING_FIELDS, wrap_tools
from ..template.origin import UNKNOWN, Origin
from .cases import ANSWER, TOOLS
from .lines import EventKind, LineTracer

_EXCERPT: Final = 40
"""Characters that are quoted around the first that differs."""
_TURNED: Final = 1000
"""Things that happen in a run among which the condition is looked for that leaves a text out."""
_TEXTS: Final[Mapping[str, str]] = {
    "": ANSWER,
    "with line breaks": "First line\nsecond line\n\nthird line\n\n\nlast line",
    "with spaces and tabs inside": "one  two   three\tfour",
    "with marks such as <, & and quotes": "if a<b && c>\"d\": print('e', \\f) # <i>100%</i>, [g](h) {j} @k",
    "with letters beyond ASCII": "Ünïcödé 雨 ﬁ ½ e\u0301 İı",
    "that is JSON": '{"Key": [1, 2.50, true, null], "more": {}}',
    "of some thousand characters": " ".join(f"word{number}" for number in range(1, 1200)),
}
"""What texts may have in them. The first is what every text may have: letters, large and small."""

_SIMPLE: Final = "value"
_KEY: Final = "someKey"
_LATER: Final = "later system"
_INDENTED: Final = re.compile(rf'^(?P<brace>[ \t]*).*\n(?P<key>[ \t]+)"{_KEY}"', re.MULTILINE)

Said = tuple[list[dict[str, Any]], int]
"""A conversation, and which of its messages has the text."""


@dataclass(frozen=True, slots=True)
class Altered:
    """A field of messages that does not arrive as it was given."""

    roles: tuple[str, ...]
    field: str
    texts: str
    """Which texts of it, in words; empty: all."""
    dropped: bool
    """Whether nothing of them is written."""
    given: str = ""
    written: str = ""
    line: int | None = None
    source: str = ""
    unread: str = ""
    """What is read of arguments that are written, but cannot be read back."""

    @property
    def of_turns(self) -> bool:
        """Whether it is what the assistant says: rendered again, it is not what was sampled."""
        return self.roles == ("assistant",)

    def __str__(self) -> str:
        *first, last = self.roles
        roles = f"{', '.join(first)} and {last}" if first else last
        by = f" (line {self.line}: `{self.source}`)" if self.line is not None else ""
        which = f" {self.texts}" if self.texts else ""
        if self.unread:
            return f"arguments of calls are not read back as they were given{by}: {self.unread}"
        if self.field == "arguments":
            what = f"arguments of calls{which} are not written as they were given"
        else:
            done = "reaches no token" if self.dropped else "is not written as it was given"
            what = f"{self.field} of {roles} messages{which} {done}"
        return f"{what}{by}" if self.dropped else f"{what}{by}: {self.given!r} becomes {self.written!r}"


def is_written(given: str, text: str) -> bool:
    """Whether a text stands in another, as it is or as JSON."""
    return any(one in text for one in (given, json.dumps(given, ensure_ascii=False)[1:-1], json.dumps(given)[1:-1]))


def call_ids(study: TemplateStudy) -> tuple[str, str]:
    """Ids for two calls, of a form that the template takes."""
    calls = study.grammar(True).calls
    named = calls is not None and calls.id_is_name
    return ("functions.probe1:0", "functions.probe2:1") if named else ("call00001", "call00002")


def find_altered(study: TemplateStudy, tracer: LineTracer, unread: Sequence[str] = ()) -> tuple[Altered, ...]:
    """The fields that do not arrive as given, each once, with the first kind of texts that shows it.

    `unread` says which arguments are not read back as they were given, though the template writes them. Fields of the
    assistant that are never written are left out: the matrix tells of them.
    """
    found: dict[tuple[str, str], Altered] = {}
    for role, field, said in _places(call_ids(study)):
        if (role, field) not in found:
            place = _Place(study, tracer, role, field, said)
            one = place.altered()
            if one is None and field == "arguments" and unread:
                one = place.unread(unread[0])
            if one is not None:
                found[role, field] = one
    alike: dict[Any, list[Altered]] = {}
    for one in found.values():
        alike.setdefault((one.of_turns, one.field, one.texts, one.dropped, one.line), []).append(one)
    return tuple(replace(some[0], roles=_together(some)) for some in alike.values())


def _together(some: Sequence[Altered]) -> tuple[str, ...]:
    roles = [role for one in some for role in one.roles]
    return tuple(role for role in roles if role != _LATER or "system" not in roles)


def _places(ids: Sequence[str]) -> Iterator[tuple[str, str, Callable[[str], Said]]]:
    """Where texts may stand: whose message, which field, and the conversation that has a text there."""

    def called(arguments: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        return dict(calling({**call(1, arguments), "id": ids[0]}, **fields))

    def returned(**fields: Any) -> dict[str, Any]:
        return dict(result(1, tool_call_id=ids[0], **fields))

    plain = called({"key": "value"})

    def at(number: int, *messages: Mapping[str, Any], field: str = "content") -> Callable[[str], Said]:
        def with_text(text: str) -> Said:
            said = [dict(message) for message in messages]
            said[number][field] = text
            return said, number

        return with_text

    def arguments(*after: Mapping[str, Any]) -> Callable[[str], Said]:
        return lambda text: ([USER, called({_KEY: text}), *map(dict, after)], 1)

    yield "system", "content", at(0, SYSTEM, USER)
    yield "user", "content", at(0, USER)
    yield "user", "content", at(0, USER, ANSWERED, USER)
    yield "user", "content", at(2, USER, ANSWERED, USER)
    yield "tool", "content", at(2, USER, plain, returned())
    yield "tool", "content", at(2, USER, plain, returned(), ANSWERED)
    yield "assistant", "content", at(1, USER, ANSWERED)
    yield "assistant", "content", at(1, USER, ANSWERED, USER)
    yield "assistant", "content", at(1, USER, plain)
    yield "assistant", "reasoning_content", at(1, USER, ANSWERED, field="reasoning_content")
    yield "assistant", "arguments", arguments()
    yield "assistant", "arguments", arguments(returned(), ANSWERED)
    yield _LATER, "content", at(2, USER, ANSWERED, SYSTEM, USER)


@dataclass(frozen=True, slots=True)
class _Place:
    """A field of a message in a small conversation."""

    study: TemplateStudy
    tracer: LineTracer
    role: str
    field: str
    said: Callable[[str], Said]

    def altered(self) -> Altered | None:
        """What becomes of texts in it; None where all arrive, or the template refuses the conversation."""
        plain = self._written(_SIMPLE if self.field == "arguments" else ANSWER)
        if self.role == "assistant" and plain is not None and not plain[1].strip():
            return None
        for texts, given in _TEXTS.items():
            if self._arrives(given):
                continue
            _, own = self._written(given) or ("", "")
            own = own.strip()
            line, source, written = self._line(given, dropped=not own)
            parts = ("", "") if not own else _around(given, (written or own).strip())
            return Altered((self.role,), self.field, texts, not own, *parts, line, source)
        return None

    def unread(self, loss: str) -> Altered:
        """Arguments that are written, but so that they are not read back."""
        line, source, _ = self._line(_TEXTS[""], dropped=False)
        return Altered((self.role,), self.field, "", False, line=line, source=source, unread=loss)

    def _arrives(self, given: str) -> bool:
        """Whether a text arrives as it was given; also where the template refuses the conversation."""
        written = self._written(given)
        return written is None or (is_written(*written) and (self.field != "arguments" or _KEY in written[1]))

    def _written(self, given: str) -> tuple[str, str] | None:
        """A text, and what the template writes that is from its field, or may be; None: it refuses."""
        messages, at = self.said(given)
        try:
            adapted = adapt(messages, self.study.forms).messages
            rendering = self.study.run(adapted, self._tools(messages), False)
        except TokentraceError:
            return None
        return given, "".join(text for text, _, origin in rendering.spans() if is_of(origin, at, self.field))

    @staticmethod
    def _tools(messages: Sequence[Mapping[str, Any]]) -> Any:
        return wrap_tools(TOOLS) if any(message.get("tool_calls") for message in messages) else None

    def _line(self, given: str, *, dropped: bool) -> tuple[int | None, str, str]:
        """The line by which a text does not arrive, what stands there, and what it makes of the text.

        It is the first that writes, or assigns, something else than the text where it has another one for another
        text; of a text that is left out, the last condition which, turned round, would have it written.
        """
        tracer = self.tracer
        given_to, other = self._given(given), self._given(_SIMPLE)
        run, plain = tracer.run(**given_to), tracer.run(**other)
        if run is None or plain is None:
            return None, "", ""
        found = None
        if not dropped:
            pairs = zip(run.events, plain.events, strict=False)
            makes = (
                one for one, two in pairs if one.kind in (EventKind.SET, EventKind.WRITE) and one.value != two.value
            )
            texts = [one for one in makes if isinstance(one.value, str)]
            found = next((one for one in texts if not is_written(given, one.value)), texts[-1] if texts else None)
        else:
            for number, event in enumerate(run.events[:_TURNED]):
                if event.kind is EventKind.TEST:
                    turned = tracer.run(**given_to, forced={number: not event.value})
                    found = event if turned is not None and is_written(given, turned.text) else found
        if found is None:
            return None, "", ""
        place = tracer.places[found.place]
        return place.line, place.text, "" if dropped else found.value

    def _given(self, text: str) -> dict[str, Any]:
        """The conversation with a text, as the instrumented copy takes it."""
        messages, _ = self.said(text)
        return {
            "messages": adapt(messages, self.study.forms).messages,
            "tools": TOOLS if self._tools(messages) else None,
            "variables": self.study.variables,
        }


@dataclass(frozen=True, slots=True)
class Indent:
    """How arguments of calls are indented: by so many characters, by this line of the template."""

    width: int
    line: int | None = None
    source: str = ""

    def __str__(self) -> str:
        by = f" (line {self.line}: `{self.source}`)" if self.line is not None else ""
        return f"arguments are indented by {self.width}{by}"


def find_indent(study: TemplateStudy, tracer: LineTracer) -> Indent | None:
    """The indentation of arguments, where the template writes each on a line of its own."""
    places = {field: said for _, field, said in _places(call_ids(study))}
    messages, _ = places["arguments"](_SIMPLE)
    adapted, tools = adapt(messages, study.forms).messages, wrap_tools(TOOLS)
    try:
        match = _INDENTED.search(study.run(adapted, tools, False).text)
    except TokentraceError:
        return None
    if match is None:
        return None
    width = len(match["key"]) - len(match["brace"])
    run = tracer.run(adapted, TOOLS, variables=study.variables)
    writes = (EventKind.SET, EventKind.WRITE)
    for event in run.events if run is not None else ():
        if event.kind in writes and isinstance(event.value, str) and _INDENTED.search(event.value):
            place = tracer.places[event.place]
            return Indent(width, place.line, place.text)
    return Indent(width)


def is_of(origin: Origin | None, message: int, field: str) -> bool:
    """Whether text may come from a field of a message: it does, or it cannot be told."""
    names = REASONING_FIELDS if field in REASONING_FIELDS else ("tool_calls",) if field == "arguments" else (field,)
    return origin is not None and (
        origin.source == UNKNOWN.source or (origin.message == message and origin.field in names)
    )


def _around(given: str, written: str) -> tuple[str, str]:
    """What two texts have around the first character that differs."""
    at = next((n for n, (one, other) in enumerate(zip(given, written, strict=False)) if one != other), None)
    first = max(0, (min(len(given), len(written)) if at is None else at) - _EXCERPT // 2)
    return given[first : first + _EXCERPT], written[first : first + _EXCERPT]
