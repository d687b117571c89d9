"""The line of a template that makes two renderings differ, and the condition behind it.

The cause is the first test after the last common text that gets another answer. It is proven only
if the second run, with that answer forced, continues like the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..study.study import TemplateStudy
from ..study.turns import common_prefix
from .cases import Request
from .lines import Event, EventKind, TracedRun, run_traced

_TRIES: Final = 8
"""Conditions to force one after another."""
_FLIPS: Final = 300
"""Tests to flip one by one, where the runs pass different lines."""


@dataclass(frozen=True, slots=True)
class Blame:
    """Where a template makes two renderings differ.

    `condition` is the test whose answer changed from `before`; without one, `line` writes the text.
    `because` has the variables that changed: the line that sets each, its name, both values.
    """

    line: int
    source: str
    condition: str = ""
    before: bool | None = None
    proven: bool = False
    because: tuple[tuple[int, str, Any, Any], ...] = ()


def find_blame(
    study: TemplateStudy, first: Request, second: Request, at: int, texts: tuple[str, str], *, rewrites: bool
) -> Blame | None:
    """Find the line by which the `texts` of two requests differ at character `at`.

    Unless the template `rewrites` the first, it is the line that writes the second.
    """
    one, other = run_traced(study, first), run_traced(study, second)
    if one is None or other is None or (one.text, other.text) != texts:
        return None
    if not rewrites:
        return _writing(_writer(other, at))
    forced: dict[int, bool] = {}
    suspect: Event | None = None
    for _ in range(_TRIES):
        pair = _first_difference(one, other, at)
        if pair is None:
            break
        here, there = pair
        event = one.events[here]
        suspect = suspect or event
        if event.kind is not EventKind.TEST or other.events[there].part != event.part:
            break
        forced[there] = event.value
        again = run_traced(study, second, forced=forced)
        if again is None:
            break
        if common_prefix(one.text, again.text) > at:
            because = tuple(_because(event, one.events[:here], other.events[:there]))
            return Blame(event.part.line, event.part.source, event.part.text, event.value, True, because)
        other = again
    if flipped := _flipped(study, second, one, at):
        return Blame(flipped.part.line, flipped.part.source, flipped.part.text, not flipped.value, True)
    if suspect is not None and suspect.kind is EventKind.TEST:
        return Blame(suspect.part.line, suspect.part.source, suspect.part.text, suspect.value)
    return _writing(suspect or _writer(one, at))


def _writing(event: Event | None) -> Blame | None:
    return None if event is None else Blame(event.part.line, event.part.source)


def _flipped(study: TemplateStudy, second: Request, one: TracedRun, at: int) -> Event | None:
    """Find the test that, flipped, keeps the second run equal to the first for longest."""
    best, event = at, None
    run = run_traced(study, second)
    tests = [(number, one) for number, one in enumerate(run.events if run else ()) if one.kind is EventKind.TEST]
    for number, test in tests[:_FLIPS]:
        again = run_traced(study, second, forced={number: not test.value})
        same = 0 if again is None else common_prefix(one.text, again.text)
        if same > best:
            best, event = same, test
    return event


def _first_difference(one: TracedRun, other: TracedRun, at: int) -> tuple[int, int] | None:
    """Find the first differing events after the last common text up to `at`."""
    here, there = _lengths(one, at), _lengths(other, at)
    shared = max(here.keys() & there.keys())
    left = (k for k in range(here[shared], len(one.events)) if one.events[k].kind is not EventKind.SET)
    right = (k for k in range(there[shared], len(other.events)) if other.events[k].kind is not EventKind.SET)
    pairs = zip(left, right, strict=False)
    return next(((k, j) for k, j in pairs if one.events[k][:2] != other.events[j][:2]), None)


def _lengths(run: TracedRun, at: int) -> dict[int, int]:
    """Map each length of the output up to `at` to the first event after it.

    A variable that collects the output counts as output.
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
    offsets = {event.offset for event in run.events} | {len(run.text)}
    start, end = max(offset for offset in offsets if offset <= at), min(offset for offset in offsets if offset > at)
    text = run.text[at:end][:20]
    writes = [event for event in run.events if event.kind is EventKind.WRITE and event.offset == start and event.value]
    return next((event for event in writes if text in event.value), writes[-1] if writes else None)


def _because(event: Event, one: Sequence[Event], other: Sequence[Event]) -> Iterator[tuple[int, str, Any, Any]]:
    """Yield the line, name and values of each variable of a condition that differs."""
    for name in dict.fromkeys(re.findall(r"[A-Za-z_][\w.]*", event.part.text)):
        here, there = _last_set(name, one), _last_set(name, other)
        if here is not None and there is not None and here.value != there.value:
            yield there.part.line, name, here.value, there.value


def _last_set(name: str, events: Sequence[Event]) -> Event | None:
    assignments = (event for event in reversed(events) if event.kind is EventKind.SET)
    return next((event for event in assignments if event.part.target == name), None)
