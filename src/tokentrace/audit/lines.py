"""Which lines of a template run: an instrumented copy of it, run by plain Jinja.

The copy tells, in order, each truth that a branch was decided by, each round of a loop, each value that was assigned
and each piece of text that was written, with the place in the output where that happened. The engine that renders knows
nothing of it, so it costs nothing where nobody asks; and as it is plain Jinja with transformers' settings, its text is
an independent check of what the tracing engine wrote.

A template may run without end: a run that does too much is given up. What one expression makes has no limit here, so
give only conversations that the tracing engine, which has limits, has rendered.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, NamedTuple, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..study.holes import GenerationTag, tojson
from ..template.budget import RenderBudget
from ..template.chat_template import REASONING_FIELDS
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
        self._budget = RenderBudget(steps=_STEPS)
        self._forced: Mapping[int, bool] = {}
        self._messages: list[int] = []
        environment = chat_environment()
        environment.globals[_HOOK] = self._saw
        tree = environment.parse(source or "")
        _Instrument(self.places).body(tree)
        code = environment.compile(tree)
        self._template = jinja2.Template.from_code(environment, code, environment.globals)

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
        given = [_named_reasoning(json.loads(json.dumps(message))) for message in messages]
        self._run, self._forced, self._messages = TracedRun(), forced or {}, list(map(id, given))
        self._budget = RenderBudget(steps=_STEPS)
        self._template.environment.globals["strftime_now"] = (now or datetime.now()).strftime
        values = {
            "messages": given,
            "tools": [dict(tool) for tool in tools] if tools is not None else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **{name: str(value) if isinstance(value, str) else value for name, value in (variables or {}).items()},
        }
        state, run, pieces = random.getstate(), self._run, []
        random.seed(0)
        seeded = random.getstate()
        try:
            at = 0
            for piece in self._template.root_render_func(self._template.new_context(values)):
                if piece:
                    pieces.append(piece)
                    at += len(piece)
                    self._budget.make(len(piece))
                    run.ends.append(at)
        except Exception:  # whatever a template raises is its refusal
            return None
        finally:
            run.drew = random.getstate() != seeded
            random.setstate(state)
        run.text = "".join(pieces)
        return run

    def _saw(self, kind: str, place: int, value: Any = None) -> Any:
        self._budget.step()
        run = self._run
        noted = value
        if kind == EventKind.TEST:
            noted = self._forced.get(len(run.events), bool(value))
            value = noted if len(run.events) in self._forced else value
        elif kind == EventKind.ROUND:
            noted = self._messages.index(id(value)) if id(value) in self._messages else -1
            value = ""
        elif kind == EventKind.WRITE:
            noted = str(value)
        elif not isinstance(value, (str, int, float, bool, type(None))):
            noted = type(value).__name__
        run.events.append(Event(EventKind(kind), place, noted, run.ends[-1] if run.ends else 0))
        return value


def _named_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose reasoning is there under each of its names, as transformers offers it."""
    for name in REASONING_FIELDS:
        if message.get(name) is not None:
            return {**message, "thinking": message.get("thinking", message[name]), "reasoning_content": message[name]}
    return message


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


def chat_environment() -> jinja2.Environment:
    """Jinja as transformers sets it up for chat templates."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, LoopControlExtension]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = _raise_exception
    return made


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)
