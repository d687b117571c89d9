"""ChatTemplate: a model's own chat template, run with traced values."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import re
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import jinja2
from jinja2 import nodes

from ..computed import computed
from ..conversation.messages import REASONING_FIELDS
from ..errors import TemplateError, TemplateLimitError
from ..values.place import Place
from ..values.plain import check_depth, plain_json
from .asking import asks_alike
from .budget import RenderBudget, TooLarge, charging
from .environment import TracingContext, TracingEnvironment
from .origin import Origin
from .syntax import Inliner, constants_of, fields_of, names_in, searched_words, variables_of
from .trace import Rendering, Trace, collect
from .traced import TracedList, wrap

_TRACED_TYPE = re.compile(r"(?:[\w.]+\.)?Traced(Str|Dict|List|Int|Float|Bool|None)")
_REASONING = frozenset(REASONING_FIELDS)
_TEXT_FIELDS = _REASONING | {"content", "text"}
_FOLDING = {"steps": 1_000, "size": 64 * 1024}
"""The budget for folding constants at compile time; others are computed at run time."""
_ARGUMENTS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class Template:
    """Turns messages into spans: a Jinja template, or a format written in Python."""

    constants: frozenset[str]
    """The strings it compares values with: roles, words in content."""
    fields: frozenset[str] = frozenset()
    """All fields that it reads."""
    searched: Sequence[str] = ()
    """Constants of two or more characters that it may look for in a message's text."""
    digest: str
    """A hash of its source."""
    variables: frozenset[str]
    """The variables it reads besides messages and tools: switches, special tokens."""
    reads: frozenset[str]
    """All names it looks up: variables, ``documents``, functions that a caller may replace."""
    asks_alike = False
    """True if its generation prompt is provably the same in every conversation: see `asking`."""
    reads_boxed = False

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: TracedList | None = None,
        *,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> Rendering:
        rows = name_reasoning(messages)
        if self.reads_boxed:
            rows = wrap(rows, Origin(("messages",)))
        names = {"messages": rows, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return self._run(names | dict(variables or {}), Trace(None if self.reads_boxed else rows))

    def _run(self, names: dict[str, Any], trace: Trace) -> Rendering:
        raise NotImplementedError


_environment = functools.cache(TracingEnvironment)


class ChatTemplate(Template):
    """A Jinja chat template, compiled once per source. Threads may share it."""

    def __init__(self, source: str) -> None:
        if not isinstance(source, str) or not source.strip():
            raise TemplateError("the chat template is empty")
        self.source = source
        self.digest = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()
        self._template, facts = _compile(source)
        vars(self).update(facts)

    def __reduce__(self) -> tuple[type[ChatTemplate], tuple[str]]:
        return ChatTemplate, (self.source,)

    def __deepcopy__(self, memo: Any) -> ChatTemplate:
        return self

    def _run(self, names: dict[str, Any], trace: Trace) -> Rendering:
        return run_template(self._template, names, trace)


def run_template(template: jinja2.Template, names: Mapping[str, Any], trace: Trace) -> Rendering:
    """Run a compiled template within the budget of `trace`. No template runs elsewhere."""
    values = {**template.globals, "documents": None, **names}
    context = TracingContext(template.environment, values, template.name, template.blocks)
    context.trace = trace
    with _running(trace, template):
        deque(template.root_render_func(context), maxlen=0)
        return collect(trace.out)


@contextlib.contextmanager
def _running(trace: Trace, template: jinja2.Template | None = None) -> Iterator[None]:
    """Charge a run to its budget. Raises TemplateError."""
    try:
        with charging(trace.budget):
            yield
    except TemplateError:
        raise
    except Exception as error:
        message = trace.current if trace.current >= 0 else None
        is_limit = isinstance(error, (RecursionError, MemoryError, TooLarge))
        text = _TRACED_TYPE.sub(lambda name: name[1].lower(), str(error))
        match error:
            case RecursionError():
                problem = "the template recurses too deeply"
            case MemoryError():
                problem = "out of memory"
            case TooLarge():
                problem = text
            case jinja2.exceptions.UndefinedError():
                problem = f"the template needs something that is missing: {text}"
            case jinja2.exceptions.SecurityError():
                problem = f"the template tried something that is not allowed: {text}"
            case jinja2.exceptions.TemplateError():
                problem = f"the template refused the conversation: {error.message}"
            case _:
                problem = f"the template failed on this conversation: {type(error).__name__}: {text}"
        kind = TemplateLimitError if is_limit else TemplateError
        raise kind(problem, message=message, line=_line(error, template)) from error


def _line(error: BaseException, template: jinja2.Template | None) -> int | None:
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == "<template>" and line]
    return template.get_corresponding_lineno(lines[-1]) if template and lines else None


def name_reasoning(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Plain messages, with reasoning under transformers' names, in transformers' order."""
    rows: list[Any] = []
    for index, message in enumerate(messages):
        row = message if type(message) is dict else dict(message)
        if not _REASONING.isdisjoint(row):
            name = next((name for name in REASONING_FIELDS if row.get(name) is not None), None)
            if name is not None:
                check_depth(row[name], Place(index, name))
                reasoning = wrap(row[name], Origin.of(index, name))
                row = {"thinking": reasoning, **row, "reasoning_content": reasoning, name: row[name]}
        rows.append(row)
    return rows


def wrap_tools(tools: Sequence[Mapping[str, Any]]) -> TracedList:
    return cast(TracedList, wrap([dict(tool) for tool in tools], Origin(("tools",))))


def wrap_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Template variables (``enable_thinking=False``, ``documents=…``), strings in them traced."""
    wrapped = dict(variables)
    for name, value in variables.items():
        value = plain_json(value, Place(field=f"kwargs.{name}"))
        if value is not None and not isinstance(value, (bool, int, float)):
            wrapped[name] = wrap(value, Origin(("kwargs", name)))
    return wrapped


@functools.lru_cache(maxsize=256)
def _compile(source: str) -> tuple[jinja2.Template, dict[str, Any]]:
    environment = _environment()
    tree = parse_template(source)
    with _compile_errors():
        names = variables_of(tree)
        facts = {
            "constants": constants_of(tree),
            "fields": fields_of(tree),
            "searched": searched_words(tree, _TEXT_FIELDS),
            "variables": frozenset(names - _ARGUMENTS),
            "reads": frozenset(names | (names_in(tree) & environment.globals.keys())),
            "asks_alike": asks_alike(tree, environment.globals),
        }
    return compile_template(tree), facts


def parse_template(source: str) -> nodes.Template:
    """A template's syntax tree. Raises TemplateError if it is invalid or needs another template."""
    with _compile_errors():
        return cast(nodes.Template, Inliner().visit(_environment().parse(source)))


def compile_template(tree: nodes.Template) -> jinja2.Template:
    environment = _environment()
    with _compile_errors(), charging(RenderBudget(**_FOLDING)):
        return jinja2.Template.from_code(environment, environment.compile(tree), dict(environment.globals))


@contextlib.contextmanager
def _compile_errors() -> Iterator[None]:
    try:
        yield
    except jinja2.exceptions.TemplateSyntaxError as error:
        raise TemplateError(
            f"the chat template is not valid Jinja: {error.message}", line=error.lineno
        ) from error
    except (RecursionError, MemoryError, SyntaxError) as error:  # SyntaxError: in the generated code
        raise TemplateLimitError(f"the chat template is nested too deeply to compile: {error}") from None


class PythonFormat(Template):
    """A format with no Jinja template: a generator of the traced pieces that one would print.

    `function(messages, tools, add_generation_prompt, trace, **variables)` gets wrapped messages
    and calls ``trace.enter``, ``trace.show`` and ``trace.leave`` around each turn.
    """

    reads_boxed = True

    def __init__(
        self,
        name: str,
        function: Callable[..., Iterator[Any]],
        constants: Iterable[str],
        variables: Iterable[str] = (),
        also: Iterable[str] = (),
    ) -> None:
        self.name = name
        self._function = function
        self.constants = frozenset(constants)
        self.variables = frozenset(variables)
        self.reads = self.variables.union(also)

    @computed
    def digest(self) -> str:
        module = inspect.getmodule(self._function)
        text = inspect.getsource(module) if module is not None else ""
        return hashlib.sha256(f"python:{self.name}\n{text}".encode()).hexdigest()

    def _run(self, names: dict[str, Any], trace: Trace) -> Rendering:
        with _running(trace):
            for piece in self._function(trace=trace, **names):
                trace.out += (piece, None)
            return collect(trace.out)
