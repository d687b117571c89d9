"""The line of a template that makes two renderings differ.

The cause is the first test whose answer differs. It is proven if the second run, with that answer
forced, continues like the first.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from ..conversation.messages import Messages
from ..errors import TokentraceError
from ..study.probes import Message
from ..study.study import TemplateStudy
from ..study.turns import common_prefix
from ..template import chat_template as templates
from ..template.budget import RenderBudget
from ..template.environment import Proven, strftime_now
from ..template.strings import plain_text
from ..template.trace import GENERATION, TURN, Trace
from ..template.traced import plain, text_of

TEST = "test"
SET = "set"
WRITE = "write"
_HOOK = "tokentrace_saw"
_STEPS = 1_000_000
_QUOTED = 120
_TRIES = 8
_FLIPS = 300


class Request(NamedTuple):
    messages: Messages
    tools: Sequence[Message] | None = None
    prompt: bool = False


@dataclass(frozen=True, slots=True)
class Blame:
    """A line that writes the text or, unless None, has a condition that was `before`."""

    line: int
    source: str
    before: bool | None = None

    def __str__(self) -> str:
        return f"line {self.line}: `{self.source}`"


def find_blame(
    study: TemplateStudy, first: Request, second: Request, at: int, *, rewrites: bool
) -> Blame | None:
    """The line behind a difference at character `at`, else the line that writes there."""
    one, other = run_traced(study, first), run_traced(study, second)
    if one is None or other is None or common_prefix(one.text, other.text) != at:
        return None
    if not rewrites:
        return _blame_writer(other, at)
    forced: dict[int, bool] = {}
    run: TracedRun | None = other
    while run is not None and len(forced) < _TRIES and (pair := _changed_test(one, run, at)):
        number, test = pair
        forced[number] = test.value
        run = run_traced(study, second, forced=forced)
        if run is not None and common_prefix(one.text, run.text) > at:
            return Blame(test.part.line, test.part.source, test.value)
    flips = flip_tests(study, second, other)
    lengths = [(common_prefix(one.text, flipped.text), test) for test, flipped in flips]
    length, test = max(lengths, key=itemgetter(0), default=(0, one.events[0]))
    if length <= at:
        return _blame_writer(one, at)
    return Blame(test.part.line, test.part.source, not test.value)


def flip_tests(study: TemplateStudy, request: Request, run: TracedRun) -> Iterator[tuple[Event, TracedRun]]:
    """Each test of a run, and the run in which its answer is flipped."""
    tests = ((number, event) for number, event in enumerate(run.events) if event.part.kind == TEST)
    for number, test in itertools.islice(tests, _FLIPS):
        if flipped := run_traced(study, request, forced={number: not test.value}):
            yield test, flipped


def _changed_test(one: TracedRun, other: TracedRun, at: int) -> tuple[int, Event] | None:
    """The test that differs after the last common text, and its number in `other`."""
    offsets = {event.offset for event in one.events} & {event.offset for event in other.events}
    start = max((offset for offset in offsets if offset <= at), default=0)

    def after(run: TracedRun) -> Iterator[tuple[int, Event]]:
        pairs = enumerate(run.events)
        return (pair for pair in pairs if pair[1].offset >= start and pair[1].part.kind != SET)

    for (_, event), (number, changed) in zip(after(one), after(other), strict=False):
        if event[:2] != changed[:2]:
            return (number, event) if event.part.kind == TEST and event.part == changed.part else None
    return None


def _blame_writer(run: TracedRun, at: int) -> Blame | None:
    offsets = {event.offset for event in run.events} | {len(run.text)}
    start = max(offset for offset in offsets if offset <= at)
    text = run.text[at : min(offset for offset in offsets if offset > at)][:20]
    events = (event for event in run.events if event.offset == start and event.value)
    writes = [event for event in events if event.part.kind == WRITE]
    event = next((event for event in writes if text in event.value), writes[-1] if writes else None)
    return None if event is None else Blame(event.part.line, event.part.source)


class TemplatePart(NamedTuple):
    number: int
    kind: str
    line: int
    source: str


class Event(NamedTuple):
    """A part ran, with this value, when the output was `offset` characters long."""

    part: TemplatePart
    value: Any
    offset: int


class TracedRun(NamedTuple):
    """A run of a template's copy. `random`: it drew a random number."""

    text: str
    events: Sequence[Event]
    random: bool


def run_traced(
    study: TemplateStudy, request: Request, *, forced: Mapping[int, bool] = {}, now: datetime | None = None
) -> TracedRun | None:
    """Run a template with some answers `forced`; None if it fails or is written in Python."""
    if not isinstance(study.template, templates.ChatTemplate):
        return None
    copy, parts = _instrumented(study.template.source)
    rows = templates.name_reasoning(request.messages)
    trace = Trace(rows)
    trace.budget = RenderBudget(steps=_STEPS)
    events: list[Event] = []
    size = read = 0

    def report(number: int, value: Any) -> Any:
        nonlocal size, read
        part, record, out = parts[number], plain(value), trace.out
        if part.kind == TEST:
            record = forced.get(len(events), bool(value))
            value = forced.get(len(events), value)
        elif part.kind == WRITE:
            record = plain_text(text_of(value))
        elif not isinstance(record, (str, int, float, bool, type(None))):
            record = type(value).__name__.removeprefix("Traced").lower()
        new = zip(out[read::2], out[read + 1 :: 2], strict=True)
        size += sum(len(str(one)) for one, origin in new if origin is not TURN and origin is not GENERATION)
        read = len(out)
        events.append(Event(part, record, size))
        return value

    names = {
        "messages": rows,
        "tools": templates.wrap_tools(request.tools) if request.tools else None,
        "add_generation_prompt": request.prompt,
        "strftime_now": functools.partial(strftime_now, now=now),
        **study.variables,
        _HOOK: Proven(report),
    }
    state = random.getstate()
    random.seed(0)
    seeded = random.getstate()
    try:
        text = templates.run_template(copy, names, trace).text
        return TracedRun(text, events, random.getstate() != seeded)
    except TokentraceError:
        return None
    finally:
        random.setstate(state)


@functools.lru_cache(maxsize=8)
def _instrumented(source: str) -> tuple[jinja2.Template, list[TemplatePart]]:
    tree, instrument = templates.parse_template(source), _Instrument(source)
    instrument.visit(tree)
    return templates.compile_template(tree), instrument.parts


class _Instrument(NodeTransformer):
    def __init__(self, source: str) -> None:
        self.parts: list[TemplatePart] = []
        self._lines = ["", *source.split("\n")]

    def visit_If(self, node: Any) -> nodes.Node:
        node.test = node.test and self._tested(node.test)
        return self.generic_visit(node)

    visit_CondExpr = visit_For = visit_If  # noqa: N815

    def visit_Assign(self, node: Any) -> nodes.Node:
        node.node = self._hook(SET, node.node, node.lineno)
        return self.generic_visit(node)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        for at, one in enumerate(node.nodes):
            value = nodes.Const(one.data) if isinstance(one, nodes.TemplateData) else one
            node.nodes[at] = self._hook(WRITE, value, one.lineno)
        return self.generic_visit(node)

    def _tested(self, node: Any) -> Any:
        if isinstance(node, (nodes.And, nodes.Or)):
            node.left, node.right = self._tested(node.left), self._tested(node.right)
        elif isinstance(node, nodes.Not):
            node.node = self._tested(node.node)
        else:
            return self._hook(TEST, node, node.lineno)
        return node

    def _hook(self, kind: str, value: nodes.Expr, line: int) -> nodes.Expr:
        number = len(self.parts)
        source = self._lines[line].strip() if line < len(self._lines) else ""
        source = source if len(source) <= _QUOTED else _excerpt(source, value)
        self.parts.append(TemplatePart(number, kind, line, source))
        hook, arguments = nodes.Name(_HOOK, "load"), [nodes.Const(number), value]
        return nodes.Call(hook, arguments, [], None, None, lineno=line)


def _excerpt(line: str, expression: nodes.Expr) -> str:
    """The part of a long line that has most of the expression's names and constants."""
    parts = (expression, *expression.find_all(nodes.Expr))
    texts = {repr(str(getattr(one, key, "")))[1:-1] for one in parts for key in ("name", "attr", "value")}
    words = [text for text in texts if text in line]
    places = [match.start() for match in re.finditer(re.escape(max(words, key=len)), line)]
    starts = [max(0, place - _QUOTED // 2) for place in places]
    start = max(starts, key=lambda at: sum(word in line[at : at + _QUOTED] for word in words))
    start = line.rfind(" ", 0, start + 1) + 1
    return f"{'…' * (start > 0)}{line[start : start + _QUOTED]}…"
