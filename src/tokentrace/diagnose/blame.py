"""The line of a template that makes two renderings differ, and the condition behind it.

An instrumented copy of the template runs both conversations. Up to the first difference both write the same text, so
the cause is the first test after the last common piece that gets another answer. It is reported as proven only if the
second run, with that answer forced to what it was, continues like the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..study.turns import common_prefix
from .lines import Event, EventKind, LineTracer, TracedRun

_TRIES: Final = 8
"""Conditions to force one after another."""
_FLIPS: Final = 300
"""Tests to flip one by one, where the runs pass different lines."""
_LONG_LINE: Final = 160
"""Longer lines are not quoted whole: some templates are one line."""


@dataclass(frozen=True, slots=True)
class Blame:
    """Where a template makes two renderings differ.

    `condition` is the test whose answer changed, `before` its first answer. Without a condition, `line` writes the text
    that differs. `because` has the variables of the condition that changed: the line that sets each, its name and both
    values.
    """

    line: int
    source: str
    condition: str = ""
    before: bool | None = None
    proven: bool = False
    because: tuple[tuple[int, str, Any, Any], ...] = ()


def find_blame(
    tracer: LineTracer, first: Mapping[str, Any], second: Mapping[str, Any], at: int, texts: tuple[str, str]
) -> Blame | None:
    """Find the line by which the renderings of `first` and `second` differ at character `at`.

    Both are arguments of `LineTracer.run`, `texts` their renderings. Returns None if the copy writes something else.
    """
    one, other = tracer.run(**first), tracer.run(**second)
    if one is None or other is None or (one.text, other.text) != texts:
        return None
    forced: dict[int, bool] = {}
    suspect: Event | None = None
    for _ in range(_TRIES):
        pair = _first_difference(one, other, at)
        if pair is None:
            break
        here, there = pair
        event = one.events[here]
        suspect = suspect or event
        if event.kind is not EventKind.TEST or other.events[there].place != event.place:
            break
        forced[there] = bool(event.value)
        again = tracer.run(**second, forced=forced)
        if again is None:
            break
        if common_prefix(one.text, again.text) > at:
            because = tuple(_because(tracer, event, one.events[:here], other.events[:there]))
            return _blame(tracer, event, bool(event.value), proven=True, because=because)
        other = again
    flipped = _flipped(tracer, second, one, at)
    if flipped is not None:
        return _blame(tracer, flipped, not flipped.value, proven=True)
    if suspect is not None and suspect.kind is EventKind.TEST:
        return _blame(tracer, suspect, bool(suspect.value))
    return _blame(tracer, suspect or _writer(one, at))


def find_writer(
    tracer: LineTracer, first: Mapping[str, Any], second: Mapping[str, Any], at: int, texts: tuple[str, str]
) -> Blame | None:
    """Find the line that writes character `at` of `second`, where two renderings may differ: a prompt and a turn."""
    one, other = tracer.run(**first), tracer.run(**second)
    if one is None or other is None or (one.text, other.text) != texts:
        return None
    return _blame(tracer, _writer(other, at))


def _blame(
    tracer: LineTracer,
    event: Event | None,
    before: bool | None = None,
    *,
    proven: bool = False,
    because: tuple[tuple[int, str, Any, Any], ...] = (),
) -> Blame | None:
    """Blame an event: a test if it has an answer `before`, else the line that writes."""
    if event is None:
        return None
    place = tracer.places[event.place]
    line = tracer.line(place.line)
    source = line if len(line) <= _LONG_LINE else place.text
    source = source if len(source) <= _LONG_LINE else f"{source[:_LONG_LINE]}…"
    condition = "" if before is None else place.text
    return Blame(place.line, source, condition, before, proven, because)


def _flipped(tracer: LineTracer, second: Mapping[str, Any], one: TracedRun, at: int) -> Event | None:
    """Find the test of the second run that, flipped, keeps it equal to the first for longest; None if none does.

    For runs that pass different lines: another loop writes the message, say.
    """
    best, event = at, None
    run = tracer.run(**second)
    events = [] if run is None else run.events
    tests = [number for number, event in enumerate(events) if event.kind is EventKind.TEST]
    for number in tests[:_FLIPS]:
        again = tracer.run(**second, forced={number: not events[number].value})
        same = 0 if again is None else common_prefix(one.text, again.text)
        if same > best:
            best, event = same, events[number]
    return event


def _first_difference(one: TracedRun, other: TracedRun, at: int) -> tuple[int, int] | None:
    """Find the first differing events after the last piece of text, up to `at`, that both runs wrote."""
    here, there = _lengths(one, at), _lengths(other, at)
    shared = max(here.keys() & there.keys())
    left = (k for k in range(here[shared], len(one.events)) if one.events[k].kind is not EventKind.SET)
    right = (k for k in range(there[shared], len(other.events)) if other.events[k].kind is not EventKind.SET)
    for k, j in zip(left, right, strict=False):
        if one.events[k].what != other.events[j].what:
            return k, j
    return None


def _lengths(run: TracedRun, at: int) -> dict[int, int]:
    """Map each length of the output up to `at` to the number of the first event after it.

    A template may collect its text in a variable: a value that the output begins with counts as output.
    """
    lengths = {0: 0}
    for number, event in enumerate(run.events):
        if event.offset <= at:
            lengths.setdefault(event.offset, number)
        value = event.value
        is_text = event.kind is EventKind.SET and isinstance(value, str) and 8 <= len(value) <= at
        if is_text and run.text.startswith(value):
            lengths.setdefault(len(value), number + 1)
    return lengths


def _writer(run: TracedRun, at: int) -> Event | None:
    """Find the innermost output that wrote character `at`."""
    piece = next((number for number, end in enumerate(run.ends) if end > at), None)
    if piece is None:
        return None
    start = run.ends[piece - 1] if piece else 0
    text = run.text[at : run.ends[piece]][:20]
    writes = [event for event in run.events if event.kind is EventKind.WRITE and event.offset == start and event.value]
    return next((event for event in writes if text in event.value), writes[-1] if writes else None)


def _because(
    tracer: LineTracer, event: Event, one: Sequence[Event], other: Sequence[Event]
) -> Iterator[tuple[int, str, Any, Any]]:
    """Yield the variables of a condition that differ, with the line that sets each and both values."""
    for name in dict.fromkeys(re.findall(r"[A-Za-z_][\w.]*", tracer.places[event.place].text)):
        here, there = _last_set(tracer, name, one), _last_set(tracer, name, other)
        if here is not None and there is not None and here.value != there.value:
            yield tracer.places[there.place].line, name, here.value, there.value


def _last_set(tracer: LineTracer, name: str, events: Sequence[Event]) -> Event | None:
    assignments = (event for event in reversed(events) if event.kind is EventKind.SET)
    return next((event for event in assignments if tracer.places[event.place].target == name), None)
