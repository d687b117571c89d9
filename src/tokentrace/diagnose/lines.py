"""Which lines of a template run: an instrumented copy of it.

The copy reports, in order, each test of a branch, each round of a loop, each assignment and each output, with the
length of the text so far. It runs in the same environment and within the same limits as any template.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, NamedTuple, cast

from jinja2 import nodes

from ..errors import TokentraceError
from ..template.budget import RenderBudget
from ..template.chat_template import compile_template, name_reasoning, parse_template, run_template, wrap_tools
from ..template.environment import Proven, strftime_now
from ..template.strings import plain_text
from ..template.trace import Trace
from ..template.traced import TracedDict, plain, text_of
from .expressions import source_text

_HOOK: Final = "tokentrace_saw"
_STEPS: Final = 1_000_000
"""Events of one run."""
_LOGIC: Final = (nodes.And, nodes.Or)
_BRANCHES: Final = (nodes.If, nodes.CondExpr, nodes.For)


class EventKind(StrEnum):
    """The kind of an event."""

    TEST = "test"
    ROUND = "round"
    SET = "set"
    WRITE = "write"


class TemplatePart(NamedTuple):
    """An expression of a template, its line, and the variable that it is assigned to."""

    line: int
    text: str
    target: str = ""


class Event(NamedTuple):
    """An event at a place of the template, when the output was `offset` characters long."""

    kind: EventKind
    place: int
    value: Any
    offset: int

    @property
    def what(self) -> tuple[EventKind, int, Any]:
        return self.kind, self.place, self.value


@dataclass(slots=True)
class TracedRun:
    """The text and the events of one run."""

    text: str = ""
    events: list[Event] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """The end of each piece of output."""
    random: bool = False
    """True if the run drew a random number."""


class LineTracer:
    """A template that reports what it does. Not thread-safe. A format written in Python has no lines and no runs."""

    def __init__(self, source: str | None) -> None:
        self.has_lines = source is not None
        self.lines = (source or "").split("\n")
        self.places: list[TemplatePart] = []
        self._run = TracedRun()
        self._trace = Trace()
        self._read = 0
        self._forced: Mapping[int, bool] = {}
        tree = parse_template(source or "")
        _Instrument(self.places).body(tree)
        self._template = compile_template(tree)

    def line(self, number: int) -> str:
        """Return a line of the source, stripped."""
        return self.lines[number - 1].strip() if 0 < number <= len(self.lines) else ""

    def run(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
        forced: Mapping[int, bool] | None = None,
        now: datetime | None = None,
    ) -> TracedRun | None:
        """Run the template; return None if it refuses the conversation or exceeds its limits.

        `forced` maps the numbers of test events to other answers.
        """
        if not self.has_lines:
            return None
        named = name_reasoning(messages)
        self._trace = trace = Trace(named)
        trace.budget = RenderBudget(steps=_STEPS)
        self._run, self._forced, self._read = TracedRun(), forced or {}, 0
        names = {
            "messages": named,
            "tools": wrap_tools(tools) if tools is not None else None,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": functools.partial(strftime_now, now=now),
            **(variables or {}),
            _HOOK: Proven(self._report),
        }
        run, state = self._run, random.getstate()
        random.seed(0)
        seeded = random.getstate()
        try:
            run.text = run_template(self._template, names, trace).text
            self._measure()
        except TokentraceError:
            return None
        finally:
            run.random = random.getstate() != seeded
            random.setstate(state)
        return run

    def _measure(self) -> int:
        """Return the length of the output so far, and record the end of each new piece."""
        ends, out = self._run.ends, self._trace.out
        end = ends[-1] if ends else 0
        for value in out[self._read :: 2]:
            if size := len(value if isinstance(value, str) else str(value)):
                end += size
                ends.append(end)
        self._read = len(out)
        return end

    def _report(self, kind: str, place: int, value: Any = None) -> Any:
        run = self._run
        record = plain(value)
        if kind == EventKind.TEST:
            record = self._forced.get(len(run.events), bool(value))
            value = record if len(run.events) in self._forced else value
        elif kind == EventKind.ROUND:
            origin = value.origin if isinstance(value, TracedDict) else None
            record = -1 if origin is None or origin.message is None or origin.path else origin.message
            value = ""
        elif kind == EventKind.WRITE:
            record = plain_text(text_of(value))
        elif not isinstance(record, (str, int, float, bool, type(None))):
            record = type(value).__name__.removeprefix("Traced").lower()
        run.events.append(Event(EventKind(kind), place, record, self._measure()))
        return value


class _Instrument:
    """Adds the hook to tests, loops, assignments and outputs."""

    def __init__(self, places: list[TemplatePart]) -> None:
        self._places = places

    def body(self, node: nodes.Node) -> None:
        """Instrument a node and its children; expressions are numbered in source order."""
        for name, value in list(node.iter_fields()):
            if isinstance(value, list):
                setattr(node, name, [self._statement(one) if isinstance(one, nodes.Node) else one for one in value])
            elif isinstance(value, nodes.Node):
                setattr(node, name, self._statement(value))

    def _statement(self, node: nodes.Node) -> nodes.Node:
        target, texts = "", []  # the source, before hooks are added to it
        if isinstance(node, nodes.Assign):
            target, texts = source_text(node.target), [source_text(node.node)]
        elif isinstance(node, nodes.Output):
            texts = [source_text(one) for one in node.nodes]
        elif isinstance(node, nodes.For):
            texts = [f"for {source_text(node.target)} in {source_text(node.iter)}"]
        leaves = iter(_leaves(node.test) if isinstance(node, _BRANCHES) else ())
        self.body(node)
        if isinstance(node, _BRANCHES) and node.test is not None:
            node.test = self._tests(cast(nodes.Expr, node.test), leaves)
        if isinstance(node, nodes.For):
            item = nodes.Name(node.target.name, "load") if isinstance(node.target, nodes.Name) else nodes.Const(None)
            node.body.insert(
                0, nodes.Output([self._hook(EventKind.ROUND, node.lineno, texts[0], item)], lineno=node.lineno)
            )
        elif isinstance(node, nodes.Assign):
            node.node = self._hook(EventKind.SET, node.lineno, texts[0], cast(nodes.Expr, node.node), target)
        elif isinstance(node, nodes.Output):
            pairs = zip(node.nodes, texts, strict=True)
            node.nodes = [self._hook(EventKind.WRITE, one.lineno, text, _plain(one)) for one, text in pairs]
        return node

    def _tests(self, node: nodes.Expr, texts: Any) -> nodes.Expr:
        """Add the hook to each operand of a test."""
        if isinstance(node, _LOGIC):
            node.left, node.right = self._tests(node.left, texts), self._tests(node.right, texts)
            return node
        if isinstance(node, nodes.Not):
            node.node = self._tests(node.node, texts)
            return node
        return self._hook(EventKind.TEST, node.lineno, next(texts), node)

    def _hook(self, kind: EventKind, line: int, text: str, value: nodes.Expr, target: str = "") -> nodes.Expr:
        self._places.append(TemplatePart(line, text, target))
        arguments: list[nodes.Expr] = [nodes.Const(kind.value), nodes.Const(len(self._places) - 1), value]
        return nodes.Call(nodes.Name(_HOOK, "load"), arguments, [], None, None, lineno=line)


def _leaves(node: nodes.Node | None) -> list[str]:
    if node is None:
        return []
    if isinstance(node, _LOGIC):
        return [*_leaves(node.left), *_leaves(node.right)]
    return _leaves(node.node) if isinstance(node, nodes.Not) else [source_text(node)]


def _plain(node: nodes.Expr) -> nodes.Expr:
    return nodes.Const(node.data, lineno=node.lineno) if isinstance(node, nodes.TemplateData) else node
