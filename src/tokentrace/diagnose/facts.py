"""Facts about a template beside its matrix, each found by running it: stops, prompt, roles, defaults, dates."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from ..errors import TokentraceError
from ..rendering.renderer import Renderer
from ..study.probes import (
    ANSWER,
    ASSISTANT_TURNS,
    CONTINUED,
    OTHER_TURNS,
    RETURNED,
    SYSTEM,
    THOUGHT,
    USER,
    call,
    calling,
    result,
    role_turn,
)
from ..study.study import TemplateStudy
from ..study.turns import turn_spans
from .cases import ANSWER as TEXT
from .cases import THINK, TOOLS
from .field_texts import call_ids, contains_text
from .lines import EventKind, LineTracer

_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_DATED: Final = ((USER,), (SYSTEM, USER), CONTINUED, RETURNED, (SYSTEM, *RETURNED, THOUGHT, USER))
"""Conversations that may show a date."""
_VALUE: Final = "PROBEVALUE"
_STRINGS: Final[Mapping[str, Any]] = {
    "text": "Line One\n\nline  \"two\" & 'three' \\four é 雨 <b>",
    "number": "12",
    "word": "true",
    "empty": "",
    "spaces": "  padded ",
}
_VALUES: Final[Mapping[str, Any]] = {"whole": 12, "part": 2.5, "truth": True, "none": None, "list": [1, "a"], "map": {}}


@dataclass(frozen=True, slots=True)
class StopToken:
    """A token at which generation stops."""

    id: int
    text: str
    trained: bool
    """True if a turn of a rendered conversation ends with it."""
    from_template: bool
    """True if the template ends turns with it; otherwise only the model's configuration names it."""
    is_next_head: bool
    """True if it is also the head of the next turn."""


@dataclass(frozen=True, slots=True)
class Stops:
    """How turns end."""

    tokens: tuple[StopToken, ...]
    untrained_end: bool
    """True if the last turn of a row has no stop token."""
    untrained_inside: bool
    """True if an earlier turn has none."""


@dataclass(frozen=True, slots=True)
class Prompting:
    """The generation prompt, and what it writes after the head of the turn."""

    prompt: str
    prefill: str
    opens_reasoning: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """Which messages the template reads."""

    roles: Mapping[str, str]
    """For each role: written, rewritten, dropped or refused."""
    content: Mapping[str, tuple[str, ...]]
    arguments: tuple[str, ...]
    reasoning: bool
    inline_reasoning: str
    """What happens to reasoning inside content: read as reasoning, kept as text, left out, or refused."""
    calls: bool


@dataclass(frozen=True, slots=True)
class Changes:
    """What changes between runs: the clock or chance, and the line that writes the date."""

    clock: bool = False
    random: bool = False
    line: int | None = None
    source: str = ""

    @property
    def by(self) -> str:
        return f" (line {self.line}: `{self.source}`)" if self.line is not None else ""


def find_stops(renderer: Renderer) -> Stops:
    endings = renderer.study().endings(False), renderer.study(TOOLS).endings(True)
    trained: set[int] = set()
    untrained = inside = False
    for messages, tools in (([USER, ANSWER, USER, ANSWER], None), ([USER, calling(), result(), ANSWER], TOOLS)):
        try:
            turns = renderer.silent().render(messages, tools=tools).turns
        except TokentraceError:
            continue
        trained |= {turn.stop_token for turn in turns if turn.stop_token is not None}
        untrained |= any(turn.stop_token is None for turn in turns[-1:])
        inside |= any(turn.stop_token is None for turn in turns[:-1])
    stops, heads = endings[0].stops | endings[1].stops, endings[0].heads | endings[1].heads
    tokens = [
        StopToken(index, renderer.tokenizer.decode([index]), index in trained, index in stops, index in heads)
        for index in renderer.get_stop_token_ids()
    ]
    return Stops(tuple(tokens), untrained, inside)


def find_prompting(study: TemplateStudy) -> Prompting:
    grammar = study.grammar(True)
    prompt = grammar.prompt
    prefill = prompt[len(grammar.head) :] if prompt.startswith(grammar.head) else ""
    return Prompting(prompt, prefill, grammar.opens_reasoning)


def find_forgeable(study: TemplateStudy) -> tuple[str, ...]:
    """Return the scaffold's control tokens that a user message forges by spelling them, as transformers encodes."""
    scaffold: dict[int, None] = {}
    for probe, tools, prompt in itertools.product((*ASSISTANT_TURNS, *OTHER_TURNS), (False, True), (False, True)):
        rendering = study.readable(probe, tools, prompt)
        if rendering is not None:
            encoded = study.encode(rendering)
            scaffold |= dict.fromkeys(encoded.ids[encoded.control].tolist())
    texts = {index: study.tokenizer.vocabulary.added[index].text for index in scaffold}
    return tuple(text for index, text in texts.items() if _forges(study, index, text))


def _forges(study: TemplateStudy, index: int, text: str) -> bool:
    rendering = study.probe([{"role": "user", "content": f"a {text} b"}])
    if rendering is None:
        return False
    encoded = study.encode(rendering)
    origins = [rendering.origins[int(span)] for span in encoded.spans[encoded.ids == index]]
    return any(origin is not None and origin.field == "content" for origin in origins)


def find_reading(study: TemplateStudy) -> Reading:
    forms = study.forms
    roles = {role: _role(study, role) for role in _ROLES}
    content = {
        role: tuple(name for name in ("text", "parts", "mapping") if getattr(forms.content(role), name))
        for role, outcome in roles.items()
        if outcome in ("written", "rewritten")
    }
    arguments = [*(["object"] if forms.calls.mapping else []), *(["JSON text"] if forms.calls.text else [])]
    return Reading(
        roles,
        content,
        tuple(arguments) if forms.calls.are_shown else (),
        forms.shows_reasoning(False, False) or forms.shows_reasoning(True, False),
        _inline(study),
        forms.calls.are_shown,
    )


def reasoning_tags(study: TemplateStudy) -> tuple[str, str]:
    """Return the tags around reasoning."""
    frame = study.grammar(True).reasoning
    return (frame.open, frame.close) if frame is not None and frame.open and frame.close else THINK


def _inline(study: TemplateStudy) -> str:
    """Say what happens to reasoning inside the content of the last turn."""
    first, last = reasoning_tags(study)
    thought = THOUGHT["reasoning_content"]
    rendering = study.readable((USER, {**ANSWER, "content": f"{first}{thought}{last}{THOUGHT['content']}"}))
    if rendering is None:
        return "refused"
    separate = study.readable((USER, THOUGHT))
    if separate is not None and thought in separate.text and separate.text == rendering.text:
        return "read as reasoning"
    return "kept as text" if thought in rendering.text else "left out"


def _role(study: TemplateStudy, role: str) -> str:
    """Say what happens to a message of a role."""
    message = {"role": role, "content": TEXT}
    probe, at = [dict(one) for one in role_turn(role)], 1
    if role in ("tool", "function", "ipython"):
        probe, at = [*map(dict, RETURNED)], 2
    elif role in ("system", "developer", "user"):
        probe, at = ([{}] if role == "user" else [{}, USER]), 0
    elif role == "assistant":
        probe = [USER, ANSWER]
    probe[at] = {**probe[at], **message}
    rendering = study.readable(probe)
    if rendering is None:
        return "refused"
    origins = [(text, origin) for text, _, origin in rendering.spans() if origin is not None]
    text = "".join(text for text, origin in origins if origin.message == at and origin.field == "content")
    return "dropped" if not text else "written" if contains_text(TEXT, text) else "rewritten"


def printed_variables(study: TemplateStudy) -> set[str]:
    """Return the variables that the template prints."""
    names = study.template.variables - set(study.tokenizer.variables)
    probes = ((name, study.probe((USER,), tools, True, {name: _VALUE})) for name in names for tools in (False, True))
    return {name for name, rendering in probes if rendering is not None and _VALUE in rendering.text}


def find_system(study: TemplateStudy) -> str:
    """Return the text before a lone question, without control tokens."""
    rendering = study.probe((USER,))
    turns = turn_spans(rendering) if rendering is not None else []
    if rendering is None or not turns:
        return ""
    head, pattern = rendering.text[: turns[0].start], study.tokenizer.vocabulary.control_pattern
    words = " ".join((head if pattern is None else pattern.sub(" ", head)).split())
    return words if any(char.isalpha() for char in words) else ""


def find_changes(study: TemplateStudy, tracer: LineTracer) -> Changes:
    """Compare runs at two times, and name the first line that assigns or writes something else."""
    times = datetime(2001, 2, 3, 4, 5, 6), datetime(2031, 12, 24, 18, 55, 59)
    changes = Changes()
    for messages, tools in itertools.product(_DATED, (None, TOOLS)):
        if study.probe(messages, tools is not None, True) is None:
            continue
        arguments: dict[str, Any] = {"add_generation_prompt": True, "variables": study.variables}
        runs = [tracer.run(messages, tools, **arguments, now=now) for now in times]
        random = changes.random or any(run is not None and run.random for run in runs)
        clock, line, source = changes.clock, changes.line, changes.source
        one, other = runs
        if (one and one.text) != (other and other.text):
            clock = True
            for event, later in zip(one.events, other.events, strict=False) if one and other and line is None else ():
                if event.kind in (EventKind.SET, EventKind.WRITE) and event.what != later.what:
                    line, source = tracer.places[event.place].line, tracer.places[event.place].text
                    break
        changes = Changes(clock, random, line, source)
    return changes


def find_unread(renderer: Renderer) -> tuple[str, ...]:
    """Return the arguments that differ once a call is rendered and parsed; none if a plain call is not read either."""
    if not renderer.study(TOOLS).forms.calls.are_shown or _unread(renderer, {"key": "value"}):
        return ()
    return (*_unread(renderer, _STRINGS), *_unread(renderer, _VALUES))


def _unread(renderer: Renderer, arguments: Mapping[str, Any]) -> list[str]:
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
