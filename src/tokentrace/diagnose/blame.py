"""The line of a template that makes two renderings differ, and the condition behind it.

A copy of the template reports each test, assignment and output. The cause is the first test after the last common text
whose answer differs. It is proven only if the second run, with that answer forced, continues like the first.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from typing import Any, Final, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.compiler import operators
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

TEST: Final = "test"
SET: Final = "set"
WRITE: Final = "write"
"""The kinds of events."""
_HOOK: Final = "tokentrace_saw"
_STEPS: Final = 1_000_000
"""Steps that one run may take."""
_LONG_LINE: Final = 160
"""Of longer lines, only the expression is quoted: some templates are a single line."""
_TRIES: Final = 8
"""How many conditions to force, one after another."""
_FLIPS: Final = 300
"""How many tests to flip one by one, if forcing conditions does not help."""


class Request(NamedTuple):
    """A conversation to render; `prompt` adds the generation prompt."""

    messages: Messages
    tools: Sequence[Message] | None = None
    prompt: bool = False


@dataclass(frozen=True, slots=True)
class Blame:
    """Where a template makes two renderings differ.

    `condition` is the proven test whose answer changed from `before`; without one, `line` is where the text is written.
    """

    line: int
    source: str
    condition: str = ""
    before: bool | None = None


def find_blame(study: TemplateStudy, first: Request, second: Request, at: int, *, rewrites: bool) -> Blame | None:
    """Find the line that makes the texts of two requests differ at character `at`; None if not found.

    Unless the template `rewrites` the first text, this is the line that writes the second.
    """
    one, other = run_traced(study, first), run_traced(study, second)
    if one is None or other is None or common_prefix(one.text, other.text) != at:
        return None
    if not rewrites:
        return _blame_writer(other, at)
    forced: dict[int, bool] = {}
    run: TracedRun | None = other
    while run is not None and len(forced) < _TRIES and (pair := _changed_test(one, run, at)):
        test = one.events[pair[0]]
        forced[pair[1]] = test.value
        run = run_traced(study, second, forced=forced)
        if run is not None and common_prefix(one.text, run.text) > at:
            return Blame(test.part.line, test.part.source, test.part.text, test.value)
    lengths = ((common_prefix(one.text, flipped.text), test) for test, flipped in flip_tests(study, second, other))
    length, test = max(lengths, key=itemgetter(0), default=(0, one.events[0]))
    if length <= at:
        return _blame_writer(one, at)
    return Blame(test.part.line, test.part.source, test.part.text, not test.value)


def flip_tests(study: TemplateStudy, request: Request, run: TracedRun) -> Iterator[tuple[Event, TracedRun]]:
    """Yield each test of a run with the run in which its answer is flipped."""
    tests = [(number, event) for number, event in enumerate(run.events) if event.part.kind == TEST]
    for number, test in tests[:_FLIPS]:
        flipped = run_traced(study, request, forced={number: not test.value})
        if flipped is not None:
            yield test, flipped


def _changed_test(one: TracedRun, other: TracedRun, at: int) -> tuple[int, int] | None:
    """Find the test that is the first difference after the last common text up to `at`."""
    offsets = {event.offset for event in one.events} & {event.offset for event in other.events}
    start = max((offset for offset in offsets if offset <= at), default=0)
    left, right = (
        [pair for pair in enumerate(run.events) if pair[1].offset >= start and pair[1].part.kind != SET]
        for run in (one, other)
    )
    for (here, event), (there, changed) in zip(left, right, strict=False):
        if event[:2] != changed[:2]:
            return (here, there) if event.part.kind == TEST and event.part == changed.part else None
    return None


def _blame_writer(run: TracedRun, at: int) -> Blame | None:
    """Blame the innermost output that wrote character `at`."""
    offsets = {event.offset for event in run.events} | {len(run.text)}
    start, end = max(offset for offset in offsets if offset <= at), min(offset for offset in offsets if offset > at)
    text = run.text[at:end][:20]
    writes = [event for event in run.events if event.part.kind == WRITE and event.offset == start and event.value]
    event = next((event for event in writes if text in event.value), writes[-1] if writes else None)
    return None if event is None else Blame(event.part.line, event.part.source)


# -- the copy that reports what it does


class TemplatePart(NamedTuple):
    """An expression of a template, and its whole line."""

    number: int
    kind: str
    line: int
    text: str
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
    study: TemplateStudy, request: Request, *, forced: Mapping[int, bool] = {}, now: datetime | None = None
) -> TracedRun | None:
    """Run a template. `forced` overrides the answers of some test events, by number.

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
        """Record an event, and return the value that the template continues with."""
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
    """Adds a hook to each test, assignment and output."""

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

    def _hook(self, kind: str, value: nodes.Expr, line: int) -> nodes.Expr:
        number, text = len(self.parts), source_text(value)
        source = self._lines[line].strip() if line < len(self._lines) else ""
        source = source if len(source) <= _LONG_LINE else f"{text[:_LONG_LINE]}{'…' * (len(text) > _LONG_LINE)}"
        self.parts.append(TemplatePart(number, kind, line, text, source))
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
"""How to write each expression, with Jinja's field names. All other expressions are binary."""
_SEPARATORS: Final = {"ops": "", "nodes": " ~ "}
_LOOSE: Final = (nodes.And, nodes.Or, nodes.Not, nodes.CondExpr, nodes.Compare)
"""Operands to put in brackets."""


def source_text(node: Any) -> str:
    """Return the source of an expression. Quotes, brackets and spaces may differ."""
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
