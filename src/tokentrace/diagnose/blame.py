"""The line of a template that makes two renderings part, and the condition behind it.

Both conversations are run by the instrumented copy. Up to the place where their texts part they wrote the same, so what
is looked for happened after the last piece that both wrote: the first truth that differs there. It counts as the cause
only if it is proven: with that one answer forced to what it was, the second run goes on like the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..study.turns import common_prefix
from .lines import Event, EventKind, LineTracer, TracedRun

_TRIES: Final = 8
"""Conditions that are tried one after another."""
_TURNED: Final = 300
"""Answers that are turned round, where the runs do not pass the same places."""
_LONG_LINE: Final = 160
"""Characters above which a line is not quoted whole: some templates are one line."""


@dataclass(frozen=True, slots=True)
class Blame:
    """Where a template makes two renderings part.

    `condition` is the truth that differs, `before` what it was for the first, and `line` where it is asked; where no
    condition is the cause, it is empty and `line` is where the text that differs is written. `because` are the values
    that the condition depends on: the line that assigned each, its name, and its values in the first and the second.
    """

    line: int
    source: str
    condition: str = ""
    before: bool | None = None
    proven: bool = False
    writes: int | None = None
    """The line that wrote the text which is there no more, or is written otherwise."""
    because: tuple[tuple[int, str, Any, Any], ...] = ()

    def __str__(self) -> str:
        if not self.condition:
            other = f", line {self.writes} what it was" if self.writes not in (None, self.line) else ""
            return f"line {self.line} writes it{other}: {self.source}"
        turned = "true, then false" if self.before else "false, then true"
        said = f"line {self.line}: `{self.condition}` is {turned}"
        if self.because:
            told = "; ".join(f"line {line} sets {name}: {one}, then {other}" for line, name, one, other in self.because)
            said += f" ({told})"
        return said


def find_blame(
    tracer: LineTracer, first: Mapping[str, Any], second: Mapping[str, Any], at: int, same_text: tuple[str, str]
) -> Blame | None:
    """The line by which the renderings of `first` and `second` part at character `at`.

    Both are what `LineTracer.run` is given. `same_text` is what the tracing engine wrote for them: None where plain
    Jinja does not write the same, as nothing is known then.
    """
    one, other = tracer.run(**first), tracer.run(**second)
    if one is None or other is None or (one.text, other.text) != same_text:
        return None
    wrote = _writer(one, at)
    writes = None if wrote is None else _line(tracer, wrote)
    forced: dict[int, bool] = {}
    shown: Event | None = None
    for _ in range(_TRIES):
        found = _parting(one, other, at)
        if found is None:
            break
        here, there = found
        event = one.events[here]
        shown = shown or event
        if event.kind is not EventKind.TEST or other.events[there].place != event.place:
            break
        forced[there] = bool(event.value)
        again = tracer.run(**second, forced=forced)
        if again is None:
            break
        if common_prefix(one.text, again.text) > at:
            because = tuple(_because(tracer, event, one.events[:here], other.events[:there]))
            return _proven(tracer, event, bool(event.value), writes, because)
        other = again
    turned = _turned(tracer, second, one, at)
    if turned is not None:
        return _proven(tracer, turned, not turned.value, writes)
    if shown is None or shown.kind is not EventKind.TEST:
        wrote = shown or wrote
        return None if wrote is None else Blame(_line(tracer, wrote), _source(tracer, wrote), writes=writes)
    place = tracer.places[shown.place]
    return Blame(place.line, _source(tracer, shown), place.text, bool(shown.value), False, writes)


def _turned(tracer: LineTracer, second: Mapping[str, Any], one: TracedRun, at: int) -> Event | None:
    """The answer of the second run that, turned round, lets it go on like the first for longest; None if none does.

    Asked where the two runs do not pass the same places: a message is written by another loop, say.
    """
    best, found = at, None
    run = tracer.run(**second)
    tests = [k for k, event in enumerate(run.events) if event.kind is EventKind.TEST] if run is not None else []
    for number in tests[:_TURNED]:
        assert run is not None
        again = tracer.run(**second, forced={number: not run.events[number].value})
        same = 0 if again is None else common_prefix(one.text, again.text)
        if same > best:
            best, found = same, run.events[number]
    return found


def _proven(
    tracer: LineTracer,
    event: Event,
    before: bool,
    writes: int | None,
    because: tuple[tuple[int, str, Any, Any], ...] = (),
) -> Blame:
    place = tracer.places[event.place]
    return Blame(place.line, _source(tracer, event), place.text, before, True, writes, because)


def find_writers(
    tracer: LineTracer, first: Mapping[str, Any], second: Mapping[str, Any], at: int, same_text: tuple[str, str]
) -> Blame | None:
    """The lines that wrote character `at` of two renderings that go different ways by design: a prompt and a turn."""
    one, other = tracer.run(**first), tracer.run(**second)
    if one is None or other is None or (one.text, other.text) != same_text:
        return None
    now, before = _writer(other, at), _writer(one, at)
    if now is None:
        return None
    return Blame(_line(tracer, now), _source(tracer, now), writes=None if before is None else _line(tracer, before))


def _line(tracer: LineTracer, event: Event) -> int:
    return tracer.places[event.place].line


def _source(tracer: LineTracer, event: Event) -> str:
    """The line of the template; of one that is a whole program, the expression at the place."""
    line, text = tracer.line(_line(tracer, event)), tracer.places[event.place].text
    whole = line if len(line) <= _LONG_LINE else text
    return whole if len(whole) <= _LONG_LINE else f"{whole[:_LONG_LINE]}…"


def _parting(one: TracedRun, other: TracedRun, at: int) -> tuple[int, int] | None:
    """The first thing that happens differently after the last piece of text, up to `at`, that both have written."""
    here, there = _anchors(one, at), _anchors(other, at)
    shared = max(here.keys() & there.keys())
    left = (k for k in range(here[shared], len(one.events)) if one.events[k].kind is not EventKind.SET)
    right = (k for k in range(there[shared], len(other.events)) if other.events[k].kind is not EventKind.SET)
    for k, j in zip(left, right, strict=False):
        if one.events[k].what != other.events[j].what:
            return k, j
    return None


def _anchors(run: TracedRun, at: int) -> dict[int, int]:
    """For each length that the output had before `at`, the number of the first thing that happened after that.

    A template may put its text together in a variable: a value that the output begins with counts as written.
    """
    found = {0: 0}
    for number, event in enumerate(run.events):
        if event.offset <= at:
            found.setdefault(event.offset, number)
        value = event.value
        if (
            event.kind is EventKind.SET
            and isinstance(value, str)
            and 8 <= len(value) <= at
            and run.text.startswith(value)
        ):
            found.setdefault(len(value), number + 1)
    return found


def _writer(run: TracedRun, at: int) -> Event | None:
    """What wrote character `at`: the innermost output whose text has it, as far as can be told."""
    piece = next((k for k, end in enumerate(run.ends) if end > at), None)
    if piece is None:
        return None
    start = run.ends[piece - 1] if piece else 0
    rest = run.text[at : run.ends[piece]]
    written = [event for event in run.events if event.kind is EventKind.WRITE and event.offset == start and event.value]
    inner = [event for event in written if rest[:20] in event.value]
    return inner[0] if inner else written[-1] if written else None


def _because(
    tracer: LineTracer, event: Event, one: Sequence[Event], other: Sequence[Event]
) -> Iterator[tuple[int, str, Any, Any]]:
    """The values that a condition asks for which are not the same in both runs, and where each was set last."""
    for name in dict.fromkeys(re.findall(r"[A-Za-z_][\w.]*", tracer.places[event.place].text)):
        here, there = _last_set(tracer, name, one), _last_set(tracer, name, other)
        if here is not None and there is not None and here.value != there.value:
            yield tracer.places[there.place].line, name, here.value, there.value


def _last_set(tracer: LineTracer, name: str, events: Sequence[Event]) -> Event | None:
    own = (event for event in reversed(events) if event.kind is EventKind.SET)
    return next((event for event in own if tracer.places[event.place].target == name), None)
