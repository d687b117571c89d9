"""Which lines of a template run: a copy of it that reports what it does.

It reports each test, round of a loop, assignment and output, in order. It has the environment
and the limits of any template.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.compiler import operators
from jinja2.visitor import NodeTransformer

from ..errors import TokentraceError
from ..study.study import TemplateStudy
from ..template import chat_template as templates
from ..template.budget import RenderBudget
from ..template.environment import Proven, strftime_now
from ..template.strings import plain_text
from ..template.trace import GENERATION, TURN, Trace
from ..template.traced import TracedDict, plain, text_of
from .cases import TOOLS, Request

_HOOK: Final = "tokentrace_saw"
_STEPS: Final = 1_000_000
"""Events of one run."""
_LONG_LINE: Final = 160
"""Longer lines are not quoted whole: some templates are one line."""


class EventKind(StrEnum):
    """The kind of an event."""

    TEST = "test"
    ROUND = "round"
    SET = "set"
    WRITE = "write"


class TemplatePart(NamedTuple):
    """An expression of a template, the variable it is assigned to, and the whole line."""

    number: int
    kind: EventKind
    line: int
    text: str
    target: str
    source: str


class Event(NamedTuple):
    """A part ran, with this value, when the output was `offset` characters long."""

    part: TemplatePart
    value: Any
    offset: int

    @property
    def kind(self) -> EventKind:
        return self.part.kind


class TracedRun:
    """One run of a template's copy: its events and its text."""

    def __init__(self, parts: Sequence[TemplatePart], trace: Trace, forced: Mapping[int, bool]) -> None:
        self.text = ""
        self.events: list[Event] = []
        self.random = False
        """True if the run drew a random number."""
        self._parts, self._trace, self._forced = parts, trace, forced
        self._size = self._read = 0

    def report(self, number: int, value: Any = None) -> Any:
        """Record an event, and return the value that the template goes on with."""
        part, events, out = self._parts[number], self.events, self._trace.out
        record = plain(value)
        if part.kind is EventKind.TEST:
            record = self._forced.get(len(events), bool(value))
            value = record if len(events) in self._forced else value
        elif part.kind is EventKind.ROUND:
            origin = value.origin if isinstance(value, TracedDict) else None
            record = -1 if origin is None or origin.message is None or origin.path else origin.message
            value = ""
        elif part.kind is EventKind.WRITE:
            record = plain_text(text_of(value))
        elif not isinstance(record, (str, int, float, bool, type(None))):
            record = type(value).__name__.removeprefix("Traced").lower()
        new = zip(out[self._read :: 2], out[self._read + 1 :: 2], strict=True)
        texts = (str(one) for one, origin in new if origin is not TURN and origin is not GENERATION)
        self._size += sum(map(len, texts))
        self._read = len(out)
        events.append(Event(part, record, self._size))
        return value


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
    run, state = TracedRun(parts, trace, forced or {}), random.getstate()
    names = {
        "messages": rows,
        "tools": templates.wrap_tools(TOOLS) if request.tools else None,
        "add_generation_prompt": request.prompt,
        "strftime_now": functools.partial(strftime_now, now=now),
        **study.variables,
        _HOOK: Proven(run.report),
    }
    random.seed(0)
    seeded = random.getstate()
    try:
        run.text = templates.run_template(copy, names, trace).text
    except TokentraceError:
        return None
    finally:
        run.random = random.getstate() != seeded
        random.setstate(state)
    return run


@functools.lru_cache(maxsize=8)
def _instrumented(source: str) -> tuple[jinja2.Template, list[TemplatePart]]:
    tree, instrument = templates.parse_template(source), _Instrument(source)
    instrument.visit(tree)
    return templates.compile_template(tree), instrument.parts


class _Instrument(NodeTransformer):
    """Adds a hook to each test, loop, assignment and output."""

    def __init__(self, source: str) -> None:
        self.parts: list[TemplatePart] = []
        self._lines = ["", *source.split("\n")]

    def visit_If(self, node: Any) -> nodes.Node:
        if node.test is not None:
            node.test = self._tested(node.test)
        return self.generic_visit(node)

    visit_CondExpr = visit_If  # noqa: N815

    def visit_For(self, node: nodes.For) -> nodes.Node:
        text = f"for {source_text(node.target)} in {source_text(node.iter)}"
        self.visit_If(node)
        item = nodes.Name(node.target.name, "load") if isinstance(node.target, nodes.Name) else nodes.Const(None)
        hook = self._hook(EventKind.ROUND, item, node.lineno, text)
        node.body.insert(0, nodes.Output([hook], lineno=node.lineno))
        return node

    def visit_Assign(self, node: Any) -> nodes.Node:
        node.node = self._hook(EventKind.SET, node.node, node.lineno, target=source_text(node.target))
        return self.generic_visit(node)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        values = [nodes.Const(one.data) if isinstance(one, nodes.TemplateData) else one for one in node.nodes]
        rows = zip(values, node.nodes, strict=True)
        node.nodes = [self._hook(EventKind.WRITE, value, one.lineno) for value, one in rows]
        return self.generic_visit(node)

    def _tested(self, node: Any) -> Any:
        """Add the hook to each operand of a test."""
        if isinstance(node, (nodes.And, nodes.Or)):
            node.left, node.right = self._tested(node.left), self._tested(node.right)
        elif isinstance(node, nodes.Not):
            node.node = self._tested(node.node)
        else:
            return self._hook(EventKind.TEST, node, node.lineno)
        return node

    def _hook(self, kind: EventKind, value: nodes.Expr, line: int, text: str = "", target: str = "") -> nodes.Expr:
        number, text = len(self.parts), text or source_text(value)
        source = self._lines[line].strip() if line < len(self._lines) else ""
        source = source if len(source) <= _LONG_LINE else text
        source = source if len(source) <= _LONG_LINE else f"{source[:_LONG_LINE]}…"
        self.parts.append(TemplatePart(number, kind, line, text, target, source))
        return nodes.Call(nodes.Name(_HOOK, "load"), [nodes.Const(number), value], [], None, None, lineno=line)


# -- expressions as source text


def source_text(node: nodes.Node | None) -> str:
    """Return the source of an expression, up to quotes, brackets and spaces."""
    match node:
        case None:
            return ""
        case nodes.Name():
            return node.name
        case nodes.NSRef():
            return f"{node.name}.{node.attr}"
        case nodes.Const():
            return repr(node.value).lower() if node.value in (True, False, None) else repr(node.value)
        case nodes.Getattr():
            return f"{_tight(node.node)}.{node.attr}"
        case nodes.Getitem():
            return f"{_tight(node.node)}[{source_text(node.arg)}]"
        case nodes.Slice():
            step = [source_text(node.step)] if node.step else []
            return ":".join([source_text(node.start), source_text(node.stop), *step])
        case nodes.Not(node=nodes.Test() as test):
            return f"{_tight(test.node)} is not {test.name}{_arguments(test)}"
        case nodes.Not() | nodes.Neg() | nodes.Pos():
            return f"{node.operator}{' ' * (node.operator == 'not')}{_tight(node.node)}"
        case nodes.Compare():
            return _tight(node.expr) + "".join(f" {operators[one.op]} {_tight(one.expr)}" for one in node.ops)
        case nodes.Test():
            return f"{_tight(node.node)} is {node.name}{_arguments(node)}"
        case nodes.Filter():
            return f"{_tight(node.node)}|{node.name}{_arguments(node)}"
        case nodes.Call():
            return f"{_tight(node.node)}{_arguments(node) or '()'}"
        case nodes.CondExpr():
            other = f" else {source_text(node.expr2)}" if node.expr2 is not None else ""
            return f"{source_text(node.expr1)} if {source_text(node.test)}{other}"
        case nodes.Concat():
            return " ~ ".join(map(_tight, node.nodes))
        case nodes.List():
            return f"[{', '.join(map(source_text, node.items))}]"
        case nodes.Tuple():
            return f"({', '.join(map(source_text, node.items))})"
        case nodes.Dict():
            return "{" + ", ".join(f"{source_text(one.key)}: {source_text(one.value)}" for one in node.items) + "}"
        case nodes.BinExpr():
            return f"{_tight(node.left)} {node.operator} {_tight(node.right)}"
    return f"({type(node).__name__})"


def _arguments(node: nodes.Call | nodes.Filter | nodes.Test) -> str:
    arguments = [*map(source_text, node.args), *(f"{one.key}={source_text(one.value)}" for one in node.kwargs)]
    return f"({', '.join(arguments)})" if arguments else ""


def _tight(node: nodes.Node | None) -> str:
    """Return the source of an operand, in brackets if it needs them."""
    loose = isinstance(node, (nodes.And, nodes.Or, nodes.Not, nodes.CondExpr, nodes.Compare))
    return f"({source_text(node)})" if loose else source_text(node)
