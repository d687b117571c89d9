"""ChatTemplate: a model's own chat template, run with traced values."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import jinja2
from jinja2 import nodes

from ..computed import computed
from ..conversation.place import Place
from ..conversation.values import check_depth
from ..errors import InputError, TemplateError, TemplateLimitError
from .asking import asks_alike
from .budget import RenderBudget, TooLarge, charging
from .code_digest import code_digest
from .environment import TracingContext, TracingEnvironment
from .lookups import looked_up
from .origin import Origin
from .trace import Rendering, Trace, collect
from .traced import TracedDict, TracedList, wrap

REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")
"""The names a message's reasoning goes by. Templates read the first, gpt-oss's the second."""


_REASONING: Final = frozenset(REASONING_FIELDS)
_FOLDING_STEPS: Final = 1_000
_FOLDING_MADE: Final = 64 * 1024
"""What Jinja may spend on constants while it compiles; what costs more is computed when the template runs."""

_GIVEN: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class Template(Protocol):
    """What turns messages into spans: a Jinja template, or a format written in Python."""

    @property
    def constants(self) -> frozenset[str]:
        """The string constants it compares things with: roles it knows, words it looks for in content."""

    @property
    def searched(self) -> frozenset[str]:
        """Those of the constants that it may look for in what messages say."""

    @property
    def variables(self) -> frozenset[str]:
        """The names of the variables it reads beside messages and tools: switches, special tokens."""

    @property
    def reads(self) -> frozenset[str]:
        """All names that it looks up in what it is given: its variables, ``documents``, functions of its own choice."""

    @property
    def asks_alike(self) -> bool:
        """True if its generation prompt is known to be the same in every conversation: see `asking`."""

    @property
    def digest(self) -> str:
        """A hash of its source."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: TracedList | None = None,
        *,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
        patch: Patch | None = None,
    ) -> Rendering: ...


Patch = Callable[[TracedList], TracedList]
"""Changes wrapped messages before they are rendered (see `formats.patched`)."""


@functools.cache
def _environment() -> TracingEnvironment:
    return TracingEnvironment()


class ChatTemplate:
    """A compiled Jinja chat template. Immutable; safe to share between threads; compiled once per source."""

    def __init__(self, source: str) -> None:
        if not isinstance(source, str) or not source.strip():
            raise TemplateError("the chat template is empty")
        self.source = source
        self._template, facts = _compile(source)
        self.constants, self.searched = facts.constants, facts.searched
        self.variables, self.reads = facts.variables, facts.reads
        self.tags_generation, self.asks_alike = facts.tags_generation, facts.asks_alike

    def __reduce__(self) -> tuple[type[ChatTemplate], tuple[str]]:
        return ChatTemplate, (self.source,)

    def __deepcopy__(self, memo: Any) -> ChatTemplate:
        return self

    @computed
    def digest(self) -> str:
        return hashlib.sha256(self.source.encode("utf-8", "surrogatepass")).hexdigest()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: TracedList | None = None,
        *,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
        patch: Patch | None = None,
    ) -> Rendering:
        """Render `messages` (validated) with the template. TemplateError names the message it was at."""
        given: list[Any] = name_reasoning(messages) if patch is None else wrap_messages(messages, patch)
        trace = Trace(len(messages), given if patch is None else None)
        names = {"messages": given, "tools": tools, "add_generation_prompt": add_generation_prompt, **(variables or {})}
        return run_template(self._template, names, trace)


def run_template(template: jinja2.Template, names: Mapping[str, Any], trace: Trace) -> Rendering:
    """Run a compiled template within the budget of `trace`: the only place where a template runs."""
    context = TracingContext(
        template.environment, {**template.globals, "documents": None, **names}, template.name, template.blocks
    )
    context.trace = trace
    with told(trace, template), charging(trace.budget):
        for _ in template.root_render_func(context):
            pass
        return collect(trace.out)


class told:  # noqa: N801
    """``with told(trace, template):`` what a running template raises becomes a TemplateError with message and line."""

    __slots__ = ("_template", "_trace")

    def __init__(self, trace: Any, template: jinja2.Template | None = None) -> None:
        self._trace = trace
        self._template = template

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, TemplateError):
            return
        message = self._trace.current if self._trace.current >= 0 else None
        if isinstance(error, (RecursionError, MemoryError)):
            deep = isinstance(error, RecursionError)
            raise TemplateLimitError(
                "the template recurses too deeply" if deep else "out of memory", message=message
            ) from None
        line = _line(error, self._template)
        if isinstance(error, TooLarge):
            raise TemplateLimitError(str(error), message=message, line=line) from None
        raise TemplateError(_problem(error), message=message, line=line) from error


def _problem(error: Exception) -> str:
    if isinstance(error, jinja2.exceptions.UndefinedError):
        return f"the template needs something that is not there: {_plain_names(str(error))}"
    if isinstance(error, jinja2.exceptions.SecurityError):
        return f"the template tried something that is not allowed: {_plain_names(error.message or '')}"
    if isinstance(error, jinja2.exceptions.TemplateError):
        return f"the template refused the conversation: {error.message}"
    return f"the template failed on this conversation: {type(error).__name__}: {_plain_names(str(error))}"


def _line(error: BaseException, template: jinja2.Template | None) -> int | None:
    """The template line an exception came from."""
    line, frame = None, error.__traceback__
    while frame is not None and template is not None:
        if frame.tb_frame.f_code.co_filename == "<template>" and frame.tb_lineno is not None:  # some code has none
            line = template.get_corresponding_lineno(frame.tb_lineno)
        frame = frame.tb_next
    return line


def _plain_names(said: str) -> str:
    """An error text of Python's or Jinja's with the names of our types as those they stand for."""
    return re.sub(r"(?:[\w.]+\.)?Traced(Str|Dict|List|Tuple|Int|Float|Bool|None)", lambda name: name[1].lower(), said)


def name_reasoning(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Messages as templates read them: plain, with the reasoning of each under each of its names."""
    given: list[Any] = []
    for index, message in enumerate(messages):
        item = message if type(message) is dict else dict(message)
        if not _REASONING.isdisjoint(item):
            for name in REASONING_FIELDS:
                own = item.get(name)
                if own is not None:
                    if name != "reasoning_content":
                        item = item.copy()
                        _name_reasoning(item, wrap(own, Origin(("messages", index, name))))
                        item[name] = own  # which is where it is looked for
                    elif "thinking" not in item:
                        item = {**item, "thinking": wrap(own, Origin(("messages", index, name)))}
                    break
        given.append(item)
    return given


def _name_reasoning(message: dict[Any, Any], reasoning: Any) -> None:
    """Reasoning is offered under both names that templates know, as transformers does."""
    if "thinking" not in message:
        dict.__setitem__(message, "thinking", reasoning)
    dict.__setitem__(message, "reasoning_content", reasoning)


def wrap_messages(messages: Sequence[Mapping[str, Any]], patch: Patch | None = None) -> TracedList:
    """Messages with their origins, boxed, as a format written in Python reads them."""
    wrapped = TracedList()
    wrapped.origin = Origin(("messages",))
    for index, message in enumerate(messages):
        item = TracedDict(message)
        item.origin = Origin(("messages", index))
        item.raw = item
        for name in REASONING_FIELDS:
            value = message.get(name)
            if value is not None:
                _name_reasoning(item, wrap(value, Origin(("messages", index, name))))
                break
        wrapped.append(item)
    return wrapped if patch is None else patch(wrapped)


def wrap_tools(tools: Sequence[Mapping[str, Any]]) -> TracedList:
    """Tool schemas with their origins; each remembers its JSON, as the same tools come again and again."""
    wrapped = wrap([dict(tool) for tool in tools], Origin(("tools",)))
    assert isinstance(wrapped, TracedList)
    wrapped.memo = {}
    for index, tool in enumerate(wrapped):
        try:
            _remember_json(tool)
        except RecursionError:
            raise InputError("is nested too deeply, or contains itself", field=f"tools.{index}") from None
    return wrapped


def _remember_json(value: Any) -> None:
    if isinstance(value, TracedDict):
        value.memo = {}
        for key in dict.__iter__(value):
            _remember_json(value[key])


def wrap_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Template variables (``enable_thinking=False``, ``documents=…``): strings in them are traced too."""
    for name, value in variables.items():
        check_depth(value, Place(field=f"kwargs.{name}"))
    return {name: _wrap_variable(value, Origin(("kwargs", name))) for name, value in variables.items()}


def _wrap_variable(value: Any, origin: Origin) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return wrap(value, origin)


class _Facts(NamedTuple):
    """What is read off the syntax tree of a template."""

    constants: frozenset[str]
    searched: frozenset[str]
    variables: frozenset[str]
    reads: frozenset[str]
    tags_generation: bool
    asks_alike: bool


@functools.lru_cache(maxsize=256)
def _compile(source: str) -> tuple[jinja2.Template, _Facts]:
    environment = _environment()
    with _compile_errors():
        tree = environment.parse(source)
        names = looked_up(tree)
        functions = {name.name for name in tree.find_all(nodes.Name) if name.name in environment.globals}
        if tree.find(nodes.ScopedEvalContextModifier):
            raise TemplateError("the chat template uses {% autoescape %}, which chat templates have no use for")
        facts = _Facts(
            constants=frozenset(_constants(tree)),
            searched=frozenset(_searched(tree)),
            variables=frozenset(names - _GIVEN),
            reads=frozenset(names | functions),
            tags_generation=any("tt_begins" in getattr(node, "line", "") for node in tree.find_all(nodes.Output)),
            asks_alike=asks_alike(tree, environment.globals),
        )
    return compile_template(tree), facts


def parse_template(source: str) -> nodes.Template:
    """The syntax tree of a template. Raises TemplateError if it is not valid Jinja."""
    with _compile_errors():
        return _environment().parse(source)


def compile_template(tree: nodes.Template) -> jinja2.Template:
    """Compile a syntax tree, which is used up. Jinja may spend only so much on folding constants."""
    environment = _environment()
    with _compile_errors(), charging(RenderBudget(steps=_FOLDING_STEPS, made=_FOLDING_MADE)):
        return jinja2.Template.from_code(environment, environment.compile(tree), dict(environment.globals))


@contextlib.contextmanager
def _compile_errors() -> Iterator[None]:
    try:
        yield
    except jinja2.exceptions.TemplateSyntaxError as error:
        raise TemplateError(f"the chat template is not valid Jinja: {error.message}", line=error.lineno) from error
    except (RecursionError, MemoryError, SyntaxError) as error:  # Python's own parser, on what Jinja made of it
        raise TemplateLimitError(f"the chat template is nested too deeply to compile: {error}") from None


def _constants(tree: nodes.Template) -> Iterator[str]:
    """Strings the template compares values with, looks for in them, or cuts them at."""
    for compare in tree.find_all(nodes.Compare):
        yield from _strings(compare)
    for test in tree.find_all(nodes.Test):
        yield from _strings(test)
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr):
            yield from _strings(call)


_TEXTS: Final = frozenset({"content", "text", *REASONING_FIELDS})
"""Fields that hold what messages say."""


def _searched(tree: nodes.Template) -> Iterator[str]:
    """Of the constants, those that may be looked for in what a message says.

    The others are compared with fields that are something else (a role, a schema's type), or looked up in mappings.
    """
    called = {id(call.node) for call in tree.find_all(nodes.Call)}
    accesses: list[Any] = [*tree.find_all(nodes.Getattr), *tree.find_all(nodes.Getitem)]
    fields = [node for node in accesses if id(node) not in called and isinstance(node.node, nodes.Name)]
    mappings = {node.node.name for node in fields if _field_name(node)}
    kinds = [test for test in tree.find_all(nodes.Test) if test.name in ("string", "mapping", "iterable", "sequence")]
    mappings -= {test.node.name for test in kinds if isinstance(test.node, nodes.Name)}  # it may be either
    for compare in tree.find_all(nodes.Compare):
        operands = [compare.expr, *(operand.expr for operand in compare.ops)]
        if any(_may_be_text(operand, mappings) for operand in operands):
            yield from _strings(compare)
    for test in tree.find_all(nodes.Test):
        if test.args and _may_be_text(test.node, mappings):
            yield from _strings(test)
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and _may_be_text(call.node.node, mappings):
            yield from _strings(call)


def _field_name(node: nodes.Node) -> str:
    if isinstance(node, nodes.Getattr):
        return node.attr
    key = node.arg if isinstance(node, nodes.Getitem) else None
    return key.value if isinstance(key, nodes.Const) and isinstance(key.value, str) else ""


def _may_be_text(operand: nodes.Node, mappings: set[str]) -> bool:
    """Whether an operand may be what a message says, or a part of it; what is not certain may."""
    if isinstance(operand, (nodes.Const, nodes.List, nodes.Tuple, nodes.Dict)):
        return False
    if isinstance(operand, nodes.Name):
        return operand.name not in mappings
    name = _field_name(operand)
    return name in _TEXTS if name else True


def _strings(node: nodes.Node) -> Iterator[str]:
    for constant in node.find_all(nodes.Const):
        if isinstance(constant.value, str) and constant.value:
            yield constant.value


class PythonFormat:
    """A format with no Jinja template: a generator that yields the same traced pieces a template prints.

    `function(messages, tools, add_generation_prompt, trace, **variables)` gets wrapped messages and calls
    ``trace.turn(message)`` (yielding what it returns) where a message's turn begins. `variables` are switches that may
    show or hide reasoning, `also` what else it reads. `digest` changes with its code.
    """

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
        self.searched: frozenset[str] = frozenset()
        self.variables = frozenset(variables)
        self.reads = self.variables.union(also)
        self.tags_generation = False
        self.asks_alike = False

    @computed
    def digest(self) -> str:
        """A hash of its code. To read that takes long, and is done when somebody asks."""
        return code_digest(self.name, self._function)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: TracedList | None = None,
        *,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
        patch: Patch | None = None,
    ) -> Rendering:
        trace = Trace(len(messages))
        with told(trace), charging(trace.budget):
            wrapped = wrap_messages(messages, patch)
            for piece in self._function(wrapped, tools, add_generation_prompt, trace, **(variables or {})):
                trace.out += (piece, None)
            return collect(trace.out)
