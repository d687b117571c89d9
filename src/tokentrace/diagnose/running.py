"""What a template adds itself, what changes between runs, and what it costs to run."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from ..errors import TokentraceError
from ..rendering.renderer import Renderer
from ..study.probes import ANSWER, CONTINUED, RETURNED, SYSTEM, THOUGHT, USER
from ..study.study import TemplateStudy
from ..study.turns import turn_spans
from .cases import TOOLS
from .lines import EventKind, LineTracer, TracedRun

_PROBE: Final = "PROBEVALUE"
_SHORT: Final = 200
"""Characters of a default that are told."""
_TRIED: Final = (
    (USER,),
    (SYSTEM, USER),
    CONTINUED,
    RETURNED,
    (SYSTEM, *RETURNED, THOUGHT, USER),
)
"""Conversations in which a date may stand."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What changes between runs: whether the clock, and whether chance, changes what is written."""

    clock: bool = False
    random: bool = False
    line: int | None = None
    """The line that writes the date, and what stands there."""
    source: str = ""

    @property
    def by(self) -> str:
        return f" (line {self.line}: `{self.source}`)" if self.line is not None else ""


STEADY: Final = Changes()


@dataclass(frozen=True, slots=True)
class Defaults:
    """What stands in a prompt that nobody gave, and what changes between runs."""

    system: str
    variables: Mapping[str, str]
    """Variables whose value is written, with the text that stands there without one."""
    changes: Changes


@dataclass(frozen=True, slots=True)
class Cost:
    """What it costs to run."""

    lines: int
    characters: int
    first_prompt: int
    """Runs of the template until the first prompt is there."""
    first_answer: int
    first_bridge: int
    later_bridge: int
    steps: tuple[int, int] | None
    """What an instrumented run counts for 8 and for 64 messages: tests, rounds, assignments, outputs."""

    @property
    def growth(self) -> float | None:
        """The power of the number of messages that the work grows with: 1 is linear."""
        return None if self.steps is None else math.log(self.steps[1] / self.steps[0], 8)


def find_defaults(study: TemplateStudy, tracer: LineTracer) -> Defaults:
    found: dict[str, str] = {}
    for name in sorted(study.template.variables - set(study.tokenizer.variables)):
        for tools in (False, True):
            plain, changed = study.probe((USER,), tools, True), study.probe((USER,), tools, True, {name: _PROBE})
            if plain is not None and changed is not None and _PROBE in changed.text:
                at = changed.text.index(_PROBE)
                rest = changed.text[at + len(_PROBE) :]
                end = plain.text.find(rest[:40], at) if rest else len(plain.text)
                if plain.text[:at] == changed.text[:at] and end >= at:
                    found[name] = plain.text[at:end][:_SHORT]
                    break
    return Defaults(_system(study), found, changes_by_itself(study, tracer))


def _system(study: TemplateStudy) -> str:
    """What the template says before a question, without its control tokens."""
    rendering = study.probe((USER,))
    turns = turn_spans(rendering) if rendering is not None else []
    if rendering is None or not turns:
        return ""
    head, pattern = rendering.text[: turns[0].start], study.tokenizer.vocabulary.control_pattern
    said = head if pattern is None else pattern.sub(" ", head)
    said = " ".join(said.split())
    return said if any(char.isalpha() for char in said) else ""


def changes_by_itself(study: TemplateStudy, tracer: LineTracer) -> Changes:
    """What two runs at different times write otherwise, and by which line."""
    times = datetime(2001, 2, 3, 4, 5, 6), datetime(2031, 12, 24, 18, 55, 59)
    clock = chance = False
    line, source = None, ""
    for messages, tools in itertools.product(_TRIED, (None, TOOLS)):
        if study.probe(messages, tools is not None, True) is None:
            continue
        given: dict[str, Any] = {"add_generation_prompt": True, "variables": study.variables}
        runs = [tracer.run(messages, tools, **given, now=now) for now in times]
        texts = [None if run is None else run.text for run in runs]
        chance |= any(run is not None and run.drew for run in runs)
        if texts[0] != texts[1]:
            clock = True
            if line is None and None not in runs:
                line, source = _dated_line(tracer, *runs)  # type: ignore[arg-type]
    return Changes(clock, chance, line, source)


def _dated_line(tracer: LineTracer, one: TracedRun, other: TracedRun) -> tuple[int | None, str]:
    """The first line that assigns or writes another text in one run than in the other."""
    for event, later in zip(one.events, other.events, strict=False):
        if event.kind in (EventKind.SET, EventKind.WRITE) and event.what != later.what:
            place = tracer.places[event.place]
            return place.line, place.text
    return None, ""


class _Counted:
    """A template that counts its runs. A study of its own begins with it."""

    def __init__(self, template: Any) -> None:
        self._template = template
        self.runs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._template, name)

    def render(self, *given: Any, **named: Any) -> Any:
        self.runs += 1
        return self._template.render(*given, **named)


def find_cost(renderer: Renderer, tracer: LineTracer) -> Cost:
    template = renderer.study().template
    source = getattr(template, "source", "")
    counted = _Counted(template)
    own = Renderer(renderer.tokenizer, {"default": counted}, variables=renderer.template_kwargs).silent()
    counts = []
    completion: Any = []
    prompt: Any = []

    def bridge() -> None:
        own.bridge(prompt, completion, [USER])

    def answer() -> None:
        nonlocal completion
        rendered = own.render([USER, ANSWER])
        turn = rendered.turns[0] if rendered.turns else None
        completion = rendered.ids[turn.start : turn.stop] if turn is not None else rendered.ids[:0]

    def ask() -> None:
        nonlocal prompt
        prompt = own.render([USER], add_generation_prompt=True).ids

    for do in (ask, answer, bridge, bridge):
        before = counted.runs
        with contextlib.suppress(TokentraceError):
            do()
        counts.append(counted.runs - before)
    asked, answered, bridged, later = counts
    return Cost(
        len(source.splitlines()), len(source), asked, answered, bridged, later, _steps(renderer.study(), tracer)
    )


def _steps(study: TemplateStudy, tracer: LineTracer) -> tuple[int, int] | None:
    asked = [[USER, ANSWER] * (count // 2) for count in (8, 64)]
    if any(study.probe(messages, False, False) is None for messages in asked):
        return None
    runs = [tracer.run(messages, variables=study.variables) for messages in asked]
    return None if None in runs else (len(runs[0].events), len(runs[1].events))  # type: ignore[union-attr]
