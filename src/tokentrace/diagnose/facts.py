"""Facts about a template beside its matrix: stops, prompt, roles, defaults, dates, and texts that it alters."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, NamedTuple

from ..conversation.forms import adapt
from ..errors import TokentraceError
from ..rendering.renderer import Renderer
from ..show.visible import listed
from ..study import probes
from ..study.probes import ANSWER as REPLY
from ..study.probes import CONTINUED, RETURNED, SYSTEM, THOUGHT, USER, Message, call, calling, result
from ..study.study import TemplateStudy
from ..study.turns import common_prefix, turn_spans
from ..template.chat_template import REASONING_FIELDS, wrap_tools
from ..template.origin import UNKNOWN
from ..template.trace import Rendering
from .blame import SET, TEST, WRITE, Event, run_traced
from .cases import ANSWER, TOOLS, Request, call_ids, reasoning_tags

_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_FORMS: Final = ("text", "parts", "mapping")
_TIMES: Final = datetime(2001, 2, 3, 4, 5, 6), datetime(2031, 12, 24, 18, 55, 59)
_DATED: Final = ((USER,), (SYSTEM, USER), CONTINUED, RETURNED, (SYSTEM, *RETURNED, THOUGHT, USER))
"""Conversations that may show a date."""
_VALUE: Final = "PROBEVALUE"


@dataclass(frozen=True, slots=True)
class StopToken:
    """A token at which generation stops.

    `trained`: turns of a row end with it. Unless `from_template`, the configuration names it.
    """

    id: int
    text: str
    trained: bool
    from_template: bool
    is_next_head: bool

    def __str__(self) -> str:
        head = ", the head of the next turn" * self.is_next_head
        source = ", from the configuration only" * (not self.from_template)
        return f"{self.text} ({self.id}{head}{source}{', not trained' * (not self.trained)})"


@dataclass(frozen=True, slots=True)
class Altered:
    """A field whose text does not arrive unchanged.

    `unread` says what differs in arguments that are written, but not read back.
    """

    roles: tuple[str, ...]
    field: str
    dropped: bool = False
    expected: str = ""
    actual: str = ""
    line: int | None = None
    source: str = ""
    unread: str = ""

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


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What a template does beside appending.

    `prefill` is what the generation prompt writes after the head of the turn. `roles` are written, rewritten, dropped
    or refused; `content` and `arguments` are the forms that the template reads; `inline_reasoning` is reasoning inside
    content. Users can forge some control tokens under transformers. `date` names the line that writes the
    date of the day, if any. Texts of `altered` fields do not arrive unchanged.
    """

    prompt: str
    prefill: str
    opens_reasoning: bool
    stop_tokens: tuple[StopToken, ...]
    last_turn_without_stop: bool
    past_turn_without_stop: bool
    roles: Mapping[str, str]
    content: Mapping[str, tuple[str, ...]]
    arguments: tuple[str, ...]
    calls: bool
    reasoning: bool
    inline_reasoning: str
    forgeable_under_transformers: tuple[str, ...]
    added_system_prompt: str
    date: str
    random: bool
    altered: tuple[Altered, ...]


def find_facts(renderer: Renderer) -> TemplateFacts:
    """Return what a renderer's template does: that for tools, where a model has one."""
    study = renderer.study(TOOLS)
    grammar, forms, calls = study.grammar(True), study.forms, study.forms.calls
    roles = {role: _role(study, role) for role in _ROLES}
    read = [role for role, outcome in roles.items() if outcome in ("written", "rewritten")]
    arguments = {"object": calls.mapping, "JSON text": calls.text}
    tokens, last, past = _stops(renderer)
    date, random = _changes(study)
    return TemplateFacts(
        prompt=grammar.prompt,
        prefill=grammar.prompt.removeprefix(grammar.head) if grammar.prompt.startswith(grammar.head) else "",
        opens_reasoning=grammar.opens_reasoning,
        stop_tokens=tokens,
        last_turn_without_stop=None in last,
        past_turn_without_stop=None in past,
        roles=roles,
        content={role: tuple(form for form in _FORMS if getattr(forms.content(role), form)) for role in read},
        arguments=tuple(form for form, accepted in arguments.items() if accepted and calls.are_shown),
        calls=calls.are_shown,
        reasoning=forms.shows_reasoning(False, False) or forms.shows_reasoning(True, False),
        inline_reasoning=_inline(study),
        forgeable_under_transformers=tuple(_forgeable(study)),
        added_system_prompt=_system(study),
        date=date,
        random=random,
        altered=_find_altered(renderer, study),
    )


def _stops(renderer: Renderer) -> tuple[tuple[StopToken, ...], set[int | None], set[int | None]]:
    """Return the stop tokens, and those of last and past turns; None for a turn that has none."""
    endings = renderer.study().endings(False), renderer.study(TOOLS).endings(True)
    stops, heads = endings[0].stops | endings[1].stops, endings[0].heads | endings[1].heads
    last, past = set[int | None](), set[int | None]()
    for messages, tools in (([USER, REPLY, USER, REPLY], None), ([USER, calling(), result(), REPLY], TOOLS)):
        try:
            turns = renderer.render(messages, tools=tools).turns
        except TokentraceError:
            continue
        last |= {turn.stop_token for turn in turns[-1:]}
        past |= {turn.stop_token for turn in turns[:-1]}
    tokens = (
        StopToken(one, renderer.tokenizer.decode([one]), one in last | past, one in stops, one in heads)
        for one in renderer.get_stop_token_ids()
    )
    return tuple(tokens), last, past


def probe_renderings(study: TemplateStudy) -> Iterator[Rendering | None]:
    """Render the probes, with and without tools and prompt; None where refused."""
    for probe in (*probes.ASSISTANT_TURNS, *probes.OTHER_TURNS):
        yield from (study.readable(probe, tools, prompt) for tools in (False, True) for prompt in (False, True))


def printed_variables(study: TemplateStudy) -> set[str]:
    """Return the variables that the template prints."""
    names = study.template.variables - set(study.tokenizer.variables)
    texts = ((name, study.probe((USER,), tools, True, {name: _VALUE})) for name in names for tools in (False, True))
    return {name for name, rendering in texts if rendering is not None and _VALUE in rendering.text}


def _forgeable(study: TemplateStudy) -> Iterator[str]:
    """Yield the scaffold's control tokens that a user message can spell."""
    probes = [study.encode(rendering) for rendering in probe_renderings(study) if rendering is not None]
    for index in dict.fromkeys(index for one in probes for index in one.ids[one.control].tolist()):
        text = study.tokenizer.vocabulary.added[index].text
        rendering = study.probe([{"role": "user", "content": f"a {text} b"}])
        if rendering is not None:
            encoded = study.encode(rendering)
            origins = (rendering.origins[int(span)] for span in encoded.spans[encoded.ids == index])
            if any(origin is not None and origin.field == "content" for origin in origins):
                yield text


def _inline(study: TemplateStudy) -> str:
    """Say what happens to reasoning inside the content of the last turn."""
    (first, last), thought = reasoning_tags(study), THOUGHT["reasoning_content"]
    rendering = study.readable((USER, {**REPLY, "content": f"{first}{thought}{last}{THOUGHT['content']}"}))
    if rendering is None:
        return "refused"
    separate = study.readable((USER, THOUGHT))
    if separate is not None and thought in separate.text and separate.text == rendering.text:
        return "read as reasoning"
    return "kept as text" if thought in rendering.text else "left out"


def _role(study: TemplateStudy, role: str) -> str:
    """Say what happens to a message of a role."""
    is_result, message = role in ("tool", "function", "ipython"), {"role": role, "content": ANSWER}
    before = RETURNED[:2] if is_result else (USER,) if role == "assistant" else ()
    after = (USER,) if role in ("system", "developer") else ()
    rendering = study.readable([*before, {**result(), **message} if is_result else message, *after])
    if rendering is None:
        return "refused"
    text = text_from(rendering, len(before), "content")
    return "dropped" if not text else "written" if contains_text(ANSWER, text) else "rewritten"


def _system(study: TemplateStudy) -> str:
    """Return the text before a lone question, without control tokens."""
    rendering = study.probe((USER,))
    turns = turn_spans(rendering) if rendering is not None else []
    if rendering is None or not turns:
        return ""
    head, pattern = rendering.text[: turns[0].start], study.tokenizer.vocabulary.control_pattern
    words = " ".join((head if pattern is None else pattern.sub(" ", head)).split())
    return words if any(char.isalpha() for char in words) else ""


def _changes(study: TemplateStudy) -> tuple[str, bool]:
    """Return where the template writes the date, and whether it draws at random."""
    date, random = "", False
    for messages, tools in itertools.product(_DATED, (False, True)):
        if study.probe(messages, tools, True) is None:
            continue
        one, other = (run_traced(study, Request(messages, tools, True), now=now) for now in _TIMES)
        random |= any(run is not None and run.random for run in (one, other))
        if date or (one and one.text) == (other and other.text):
            continue
        events = zip(one.events, other.events, strict=False) if one and other else ()
        changed = (event.part for event, later in events if event[:2] != later[:2])
        part = next((one for one in changed if one.kind in (SET, WRITE)), None)
        date = "an unknown line" if part is None else f"line {part.line}: `{part.text}`"
    return date, random


# -- do texts arrive unchanged? each field is tried with texts that templates tend to alter

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
_OBJECT: Final = {"type": "object"}
_SIMPLE: Final = "value"
_KEY: Final = "someKey"
_LATER: Final = "later system"


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


def _find_altered(renderer: Renderer, study: TemplateStudy) -> tuple[Altered, ...]:
    """Return the fields whose texts do not arrive, but for those that the matrix reports."""
    altered: dict[tuple[str, str], Altered] = {}
    for slot in _slots(study):
        key = (slot.role, slot.field)
        if key in altered:
            continue
        if one := slot.altered():
            altered[key] = one
        elif slot.field == "arguments" and (unread := _unread(renderer)):
            line, source, _ = slot.writing(ANSWER)
            altered[key] = Altered((slot.role,), slot.field, line=line, source=source, unread=unread)
    groups: dict[Any, list[Altered]] = {}
    for one in altered.values():
        groups.setdefault((one.of_turns, one.field, one.dropped, one.line), []).append(one)
    merged = []
    for group in groups.values():
        roles = [role for one in group for role in one.roles]
        roles = [role for role in roles if role != _LATER or "system" not in roles]
        merged.append(replace(group[0], roles=tuple(roles)))
    return tuple(merged)


class _Slot(NamedTuple):
    """Where a text goes: a field of one message of a conversation."""

    study: TemplateStudy
    role: str
    field: str
    message: int
    messages: Sequence[Message]

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
                line, source = self._dropping(text)
                return Altered((self.role,), self.field, dropped=True, line=line, source=source)
            line, source, actual = self.writing(text)
            actual = (actual or output).strip()
            start = max(0, common_prefix(text, actual) - _EXCERPT // 2)
            expected, actual = (one[start : start + _EXCERPT] for one in (text, actual))
            return Altered((self.role,), self.field, False, expected, actual, line, source)
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
        texts = [one for one in texts if one.part.kind in (SET, WRITE)]
        event = next((one for one in texts if not contains_text(text, one.value)), texts[-1] if texts else None)
        return (None, "", "") if event is None else (event.part.line, event.part.text, event.value)

    def _dropping(self, text: str) -> tuple[int | None, str]:
        """Find the last condition that, flipped, would write the text."""
        request, event = self._request(text), None
        run = run_traced(self.study, request)
        for number, one in enumerate(run.events[:_FLIPS] if run is not None else ()):
            if one.part.kind == TEST:
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


def _unread(renderer: Renderer) -> str:
    """Name the first argument that is not read back from a rendered call, unless not even a plain one is."""
    for arguments in _ARGUMENTS:
        properties = {key: {"type": "string"} if isinstance(value, str) else {} for key, value in arguments.items()}
        function = {"name": "probe1", "description": "a tool", "parameters": {**_OBJECT, "properties": properties}}
        message = calling({**call(1, arguments), "id": call_ids(renderer.study(TOOLS))[0]})
        try:
            unread = renderer.find_unreadable([USER, message], tools=[{"type": "function", "function": function}])
        except TokentraceError:
            continue
        fields = {one.field.removeprefix("tool_calls.0.function."): one.why for one in unread}
        for field, why in fields.items():
            if field.startswith("arguments") or field == "tool_calls":
                return "" if arguments is _ARGUMENTS[0] else f"{field}: {why}"
    return ""
