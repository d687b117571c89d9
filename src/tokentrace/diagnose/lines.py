"""Which lines of a template run: an instrumented copy of it.

The copy reports, in order, each test that a branch depends on, each round of a loop, each value that was assigned and
each piece of text that was written, with the place in the output where that happened. It runs in the same environment
and within the same limits as any template.
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
from .expressions import written_out

_HOOK: Final = "tokentrace_saw"
_STEPS: Final = 1_000_000
"""Things that may happen in one run: each is kept."""
_LOGIC: Final = (nodes.And, nodes.Or)
_TESTED: Final = (nodes.If, nodes.CondExpr, nodes.For)


class EventKind(StrEnum):
    """What happened."""

    TEST = "test"
    ROUND = "round"
    SET = "set"
    WRITE = "write"


class TemplatePart(NamedTuple):
    """A part of a template: its line, the expression there, and the name that it is assigned to, if it is."""

    line: int
    text: str
    target: str = ""


class Event(NamedTuple):
    """Something that happened at a place of the template, when the output was `offset` characters long."""

    kind: EventKind
    place: int
    value: Any
    offset: int

    @property
    def what(self) -> tuple[EventKind, int, Any]:
        return self.kind, self.place, self.value


@dataclass(slots=True)
class TracedRun:
    """What one run of a template wrote, and all that happened."""

    text: str = ""
    events: list[Event] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Where each piece of the output ended."""
    drew: bool = False
    """Whether it asked for something random."""


class LineTracer:
    """A template that tells what it does. For one thread.

    A format that is written in Python has no source: nothing is known of its runs.
    """

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
        """A line of the source, without the space around it."""
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
        """Run the template; None where it refuses, or does too much.

        `forced` are tests, by their number, that get another answer.
        """
        if not self.has_lines:
            return None
        given = name_reasoning(messages)
        self._trace = trace = Trace(given)
        trace.budget = RenderBudget(steps=_STEPS)
        self._run, self._forced, self._read = TracedRun(), forced or {}, 0
        names = {
            "messages": given,
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
            run.drew = random.getstate() != seeded
            random.setstate(state)
        return run

    def _measure(self) -> int:
        """The length of the output so far; notes where each new piece of it ends."""
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
        noted = plain(value)
        if kind == EventKind.TEST:
            noted = self._forced.get(len(run.events), bool(value))
            value = noted if len(run.events) in self._forced else value
        elif kind == EventKind.ROUND:
            origin = value.origin if isinstance(value, TracedDict) else None
            noted = -1 if origin is None or origin.message is None or origin.path else origin.message
            value = ""
        elif kind == EventKind.WRITE:
            noted = plain_text(text_of(value))
        elif not isinstance(noted, (str, int, float, bool, type(None))):
            noted = type(value).__name__.removeprefix("Traced").lower()
        run.events.append(Event(EventKind(kind), place, noted, self._measure()))
        return value


class _Instrument:
    """Puts the hook around tests, rounds, assignments and outputs."""

    def __init__(self, places: list[TemplatePart]) -> None:
        self._places = places

    def body(self, node: nodes.Node) -> None:
        """Instrument a node and all below it. Expressions are numbered in the order in which they stand."""
        for name, value in list(node.iter_fields()):
            if isinstance(value, list):
                setattr(node, name, [self._statement(one) if isinstance(one, nodes.Node) else one for one in value])
            elif isinstance(value, nodes.Node):
                setattr(node, name, self._statement(value))

    def _statement(self, node: nodes.Node) -> nodes.Node:
        target, texts = "", []  # what stands there, before the hooks are in it
        if isinstance(node, nodes.Assign):
            target, texts = written_out(node.target), [written_out(node.node)]
        elif isinstance(node, nodes.Output):
            texts = [written_out(one) for one in node.nodes]
        elif isinstance(node, nodes.For):
            texts = [f"for {written_out(node.target)} in {written_out(node.iter)}"]
        leaves = iter(_leaves(node.test) if isinstance(node, _TESTED) else ())
        self.body(node)
        if isinstance(node, _TESTED) and node.test is not None:
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
        """A test with the hook around each of the truths that it is made of."""
        if isinstance(node, _LOGIC):
            node.left, node.right = self._tests(node.left, texts), self._tests(node.right, texts)
            return node
        if isinstance(node, nodes.Not):
            node.node = self._tests(node.node, texts)
            return node
        return self._hook(EventKind.TEST, node.lineno, next(texts), node)

    def _hook(self, kind: EventKind, line: int, text: str, value: nodes.Expr, target: str = "") -> nodes.Expr:
        self._places.append(TemplatePart(line, text, target))
        given: list[nodes.Expr] = [nodes.Const(kind.value), nodes.Const(len(self._places) - 1), value]
        return nodes.Call(nodes.Name(_HOOK, "load"), given, [], None, None, lineno=line)


def _leaves(node: nodes.Node | None) -> list[str]:
    if node is None:
        return []
    if isinstance(node, _LOGIC):
        return [*_leaves(node.left), *_leaves(node.right)]
    return _leaves(node.node) if isinstance(node, nodes.Not) else [written_out(node)]


def _plain(node: nodes.Expr) -> nodes.Expr:
    return nodes.Const(node.data, lineno=node.lineno) if isinstance(node, nodes.TemplateData) else node
