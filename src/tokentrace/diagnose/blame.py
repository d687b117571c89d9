"""The line of a template that makes two renderings differ, and the condition behind it.

A copy of the template reports each test, assignment and output. The cause is the first test after the last common text
that gets another answer. It is proven only if the second run, with that answer forced, continues like the first.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.compiler import operators
from jinja2.visitor import NodeTransformer

from ..errors import TokentraceError
from ..study.study import TemplateStudy
from ..study.turns import common_prefix
from ..template import chat_template as templates
from ..template.budget import RenderBudget
from ..template.environment import Proven, strftime_now
from ..template.strings import plain_text
from ..template.trace import GENERATION, TURN, Trace
from ..template.traced import plain, text_of
from .cases import TOOLS, Request

TEST: Final = "test"
SET: Final = "set"
WRITE: Final = "write"
"""The kinds of events."""
_HOOK: Final = "tokentrace_saw"
_STEPS: Final = 1_000_000
"""Events of one run."""
_LONG_LINE: Final = 160
"""Longer lines are not quoted whole: some templates are one line."""
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
        return _blamed(_writer(other, at))
    forced: dict[int, bool] = {}
    suspect, again = None, other
    for _ in range(_TRIES):
        pair = _first_difference(one, again, at)
        if pair is None:
            break
        here, there = pair
        event = one.events[here]
        suspect = suspect or event
        if event.part.kind != TEST or again.events[there].part != event.part:
            break
        forced[there] = event.value
        run = run_traced(study, second, forced=forced)
        if run is None:
            break
        if common_prefix(one.text, run.text) > at:
            sides = (one.events[:here], again.events[:there])
            old, new = ({each.part.target: each for each in events if each.part.target} for events in sides)
            names = dict.fromkeys(re.findall(r"[A-Za-z_][\w.]*", event.part.text))
            because = tuple(
                (new[name].part.line, name, old[name].value, new[name].value)
                for name in names
                if name in old and name in new and old[name].value != new[name].value
            )
            return _blamed(event, event.value, proven=True, because=because)
        again = run
    if flipped := _flipped(study, second, one, other, at):
        return _blamed(flipped, not flipped.value, proven=True)
    suspect = suspect or _writer(one, at)
    return _blamed(suspect, suspect.value if suspect is not None and suspect.part.kind == TEST else None)


def _blamed(event: Event | None, before: bool | None = None, **more: Any) -> Blame | None:
    """Blame a test for its answer, or a line for what it writes."""
    if event is None:
        return None
    condition = event.part.text if before is not None else ""
    return Blame(event.part.line, event.part.source, condition, before, **more)


def _flipped(study: TemplateStudy, second: Request, one: TracedRun, other: TracedRun, at: int) -> Event | None:
    """Find the test that, flipped, keeps the second run equal to the first for longest."""
    best, event = at, None
    for number, test in [pair for pair in enumerate(other.events) if pair[1].part.kind == TEST][:_FLIPS]:
        run = run_traced(study, second, forced={number: not test.value})
        same = 0 if run is None else common_prefix(one.text, run.text)
        if same > best:
            best, event = same, test
    return event


def _first_difference(one: TracedRun, other: TracedRun, at: int) -> tuple[int, int] | None:
    """Find the first differing events after the last common text up to `at`."""
    here, there = _lengths(one, at), _lengths(other, at)
    shared = max(here.keys() & there.keys())
    left, right = (
        [number for number in range(start, len(run.events)) if run.events[number].part.kind != SET]
        for run, start in ((one, here[shared]), (other, there[shared]))
    )
    pairs = zip(left, right, strict=False)
    return next((pair for pair in pairs if one.events[pair[0]][:2] != other.events[pair[1]][:2]), None)


def _lengths(run: TracedRun, at: int) -> dict[int, int]:
    """Map each length of the output up to `at` to the first event after it.

    A variable that collects the output counts as output.
    """
    lengths = {0: 0}
    for number, (part, value, offset) in enumerate(run.events):
        if offset <= at:
            lengths.setdefault(offset, number)
        is_text = part.kind == SET and isinstance(value, str) and 8 <= len(value) <= at
        if is_text and run.text.startswith(value):
            lengths.setdefault(len(value), number + 1)
    return lengths


def _writer(run: TracedRun, at: int) -> Event | None:
    """Find the innermost output that wrote character `at`."""
    offsets = {event.offset for event in run.events} | {len(run.text)}
    start, end = max(offset for offset in offsets if offset <= at), min(offset for offset in offsets if offset > at)
    text = run.text[at:end][:20]
    writes = [event for event in run.events if event.part.kind == WRITE and event.offset == start and event.value]
    return next((event for event in writes if text in event.value), writes[-1] if writes else None)


# -- the copy that reports what it does


class TemplatePart(NamedTuple):
    """An expression of a template, the variable it is assigned to, and the whole line."""

    number: int
    kind: str
    line: int
    text: str
    target: str
    source: str


class Event(NamedTuple):
    """A part ran, with this value, when the output was `offset` characters long."""

    part: TemplatePart
    value: Any
    offset: int


class TracedRun(NamedTuple):
    """One run of a template's copy. `random`: it drew a random number."""

    text: str
    events: Sequence[Event]
    random: bool


def run_traced(
    study: TemplateStudy, request: Request, *, forced: Mapping[int, bool] | None = None, now: datetime | None = None
) -> TracedRun | None:
    """Run a template, with other answers for some test events (`forced`).

    Returns None if it refuses the request, exceeds its limits, or is written in Python.
    """
    if not isinstance(study.template, templates.ChatTemplate):
        return None
    copy, parts = _instrumented(study.template.source)
    rows = templates.name_reasoning(request.messages)
    trace = Trace(rows)
    trace.budget = RenderBudget(steps=_STEPS)
    events: list[Event] = []
    size = read = 0

    def report(number: int, value: Any) -> Any:
        """Record an event, and return the value that the template goes on with."""
        nonlocal size, read
        part, record, out = parts[number], plain(value), trace.out
        if part.kind == TEST:
            record = (forced or {}).get(len(events), bool(value))
            value = record if len(events) in (forced or {}) else value
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
        "tools": templates.wrap_tools(TOOLS) if request.tools else None,
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
    """Adds a hook to each test, assignment and output."""

    def __init__(self, source: str) -> None:
        self.parts: list[TemplatePart] = []
        self._lines = ["", *source.split("\n")]

    def visit_If(self, node: Any) -> nodes.Node:
        node.test = node.test and self._tested(node.test)
        return self.generic_visit(node)

    visit_CondExpr = visit_For = visit_If  # noqa: N815

    def visit_Assign(self, node: Any) -> nodes.Node:
        node.node = self._hook(SET, node.node, node.lineno, source_text(node.target))
        return self.generic_visit(node)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        values = [nodes.Const(one.data) if isinstance(one, nodes.TemplateData) else one for one in node.nodes]
        node.nodes = [self._hook(WRITE, value, one.lineno) for value, one in zip(values, node.nodes, strict=True)]
        return self.generic_visit(node)

    def _tested(self, node: Any) -> Any:
        """Add the hook to each operand of a test."""
        if isinstance(node, (nodes.And, nodes.Or)):
            node.left, node.right = self._tested(node.left), self._tested(node.right)
        elif isinstance(node, nodes.Not):
            node.node = self._tested(node.node)
        else:
            return self._hook(TEST, node, node.lineno)
        return node

    def _hook(self, kind: str, value: nodes.Expr, line: int, target: str = "") -> nodes.Expr:
        number, text = len(self.parts), source_text(value)
        source = self._lines[line].strip() if line < len(self._lines) else ""
        source = source if len(source) <= _LONG_LINE else text
        source = source if len(source) <= _LONG_LINE else f"{source[:_LONG_LINE]}…"
        self.parts.append(TemplatePart(number, kind, line, text, target, source))
        return nodes.Call(nodes.Name(_HOOK, "load"), [nodes.Const(number), value], [], None, None, lineno=line)


# -- expressions as source text

_FORMS: Final[Mapping[type[nodes.Node], str]] = {
    nodes.Name: "{name}",
    nodes.NSRef: "{name}.{attr}",
    nodes.Getattr: "{node}.{attr}",
    nodes.Getitem: "{node}[{arg}]",
    nodes.Slice: "{start}:{stop}:{step}",
    nodes.Call: "{node}({args})",
    nodes.Filter: "{node}|{name}{call}",
    nodes.Test: "{node} is {name}{call}",
    nodes.Not: "not {node}",
    nodes.Neg: "-{node}",
    nodes.Compare: "{expr}{ops}",
    nodes.Operand: " {op} {expr}",
    nodes.CondExpr: "{expr1} if {test} else {expr2}",
    nodes.Concat: "{nodes}",
    nodes.List: "[{items}]",
    nodes.Tuple: "({items})",
    nodes.Dict: "{{{items}}}",
    nodes.Pair: "{key}: {value}",
    nodes.Keyword: "{key}={value}",
}
"""How expressions are written, with the names of Jinja's fields. All others are binary."""
_SEPARATORS: Final = {"ops": "", "nodes": " ~ "}
_LOOSE: Final = (nodes.And, nodes.Or, nodes.Not, nodes.CondExpr, nodes.Compare)
"""Operands in brackets."""


def source_text(node: Any) -> str:
    """Return the source of an expression, up to quotes, brackets and spaces."""
    if isinstance(node, nodes.Const):
        return repr(node.value).lower() if node.value in (True, False, None) else repr(node.value)
    if not isinstance(node, nodes.Node):
        return operators.get(node, node or "")
    fields = dict(node.iter_fields())
    fields["args"] = [*fields.get("args", ()), *fields.get("kwargs", ())]
    texts = {}
    for name, value in fields.items():
        operands = value if isinstance(value, list) else [value]
        each = (f"({source_text(one)})" if isinstance(one, _LOOSE) else source_text(one) for one in operands)
        texts[name] = _SEPARATORS.get(name, ", ").join(each)
    texts["call"] = f"({texts['args']})" if texts["args"] else ""
    form = _FORMS.get(type(node), f"{{left}} {getattr(node, 'operator', '')} {{right}}")
    return form.format(**texts).removesuffix(" else ").replace("::]", ":]")
