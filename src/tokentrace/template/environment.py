"""The tracing Jinja environment: the semantics of transformers' chat templates, with the trace kept.

Three things differ from a plain sandbox, none of them visible in the text:

- what is printed is handed over as it is, not turned into a plain ``str`` first (`_Generator`);
- loops tell the trace whose turn is being written (`mark_turns`);
- everything that makes new text out of old keeps its runs or says UNKNOWN (`filters.py`, `method`, `call`).
"""

from __future__ import annotations

import operator
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import Any, Final, cast

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, LoopControlExtension
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment
from jinja2.utils import Namespace
from markupsafe import Markup

from . import filters
from .trace import Buffer, Generated, join_buffer
from .traced import (
    TRACED_TYPES,
    UNKNOWN,
    TooLarge,
    TracedBool,
    TracedDict,
    TracedFloat,
    TracedInt,
    TracedList,
    TracedMarkup,
    TracedNone,
    TracedStr,
    as_markup,
    check_pieces,
    check_size,
    is_traced,
    is_traced_deep,
    join_traced,
    percent_format,
    traced,
)

_DICT_ATTRIBUTES: Final = frozenset(dir(dict))
_SAFE_DICT_METHODS: Final = frozenset({"items", "keys", "values", "get", "copy"})
_SAFE_STR_METHODS: Final = frozenset(
    name for name in dir(str) if not name.startswith("_") and name not in ("format", "format_map", "maketrans")
)
_LOOP_ATTRIBUTES: Final = frozenset(
    ("index", "index0", "revindex", "revindex0", "first", "last", "length", "previtem", "nextitem")
)
_PLAIN_TYPES: Final[dict[type, type]] = {
    TracedList: list,
    TracedInt: int,
    TracedFloat: float,
    TracedBool: int,
    TracedNone: type(None),
}
_MARKING_HOOKS: Final = frozenset({"turn", "leave", "assigned"})
_MAX_BITS: Final = 100_000
_MISSING: Final = object()
_PLAIN_TEXT: Final = frozenset({str, TracedStr})
"""Text that is joined as it is. Markup escapes what it is joined with."""


def _flatten(node: nodes.Expr, kind: type[nodes.Expr]) -> list[nodes.Expr]:
    if type(node) is kind and isinstance(node, nodes.BinExpr):
        return [*_flatten(node.left, kind), node.right]
    return [node]


class _Generator(CodeGenerator):
    """Generates code that prints traced values instead of strings."""

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:
        hook = getattr(node, "trace_hook", None)
        if hook is not None:
            self._call_hook(hook, node, frame)
            return
        if frame.require_output_check:
            if self.has_known_extends:
                return
            self.writeline("if parent_template is None:")
            self.indent()
        finalize = self._make_finalize()
        group: list[str] = []
        for child in node.nodes:
            try:
                group.append(self._output_child_to_const(child, frame, finalize))
                continue
            except Exception:  # not a constant, or one that fails: both are a matter for the run
                self._emit_constants(group, frame)
                group = []
            self._emit_expression(child, frame)
        self._emit_constants(group, frame)
        if frame.require_output_check:
            self.outdent()

    def buffer(self, frame: Frame) -> None:
        frame.buffer = self.temporary_identifier()
        self.writeline(f"{frame.buffer} = environment.buffer()")

    def _call_hook(self, hook: str, node: nodes.Output, frame: Frame) -> None:
        """Call ``context.trace.<hook>``; print the mark that it returns, if it returns one."""
        mark = self.temporary_identifier()
        self.writeline(f"{mark} = context.trace.{hook}(")
        if node.nodes:
            self.visit(node.nodes[0], frame)
        self.write(")")
        if hook in _MARKING_HOOKS:
            self.writeline(f"if {mark} is not None: ")
            self.write(f"yield {mark}" if frame.buffer is None else f"{frame.buffer}.append({mark})")

    def _emit_start(self, frame: Frame, unbuffered: str, buffered: str, node: nodes.Node | None = None) -> None:
        self.writeline(unbuffered if frame.buffer is None else f"{frame.buffer}{buffered}", node)

    def _emit_constants(self, group: list[str], frame: Frame) -> None:
        if group:
            self._emit_start(frame, "yield ", ".append(")
            self.write(repr("".join(group)) + ("" if frame.buffer is None else ")"))

    def _emit_expression(self, node: nodes.Expr, frame: Frame) -> None:
        """Print one expression. ``a + b + c`` is printed part by part: nothing is joined to be cut again."""
        parts = node.nodes if isinstance(node, nodes.Concat) else _flatten(node, nodes.Add)
        if len(parts) > 1:
            self._emit_start(frame, "yield from ", ".extend(", node)
            self.write("(" if isinstance(node, nodes.Concat) else "environment.summands(")
            for part in parts:
                self.visit(part, frame)
                self.write(", ")
            self.write(")" if frame.buffer is None else "))")
        else:
            self._emit_start(frame, "yield ", ".append(", node)
            self.visit(node, frame)
            if frame.buffer is not None:
                self.write(")")

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        self.write("environment.add(")
        for part in _flatten(node, nodes.Add):
            self.visit(part, frame)
            self.write(", ")
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def write_commons(self) -> None:
        super().write_commons()
        self.writeline("tt_dict, tt_types, tt_get = environment.fast_access")

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:
        """``message.role``: where the field was looked at before, it is at hand without a call."""
        if node.attr in _DICT_ATTRIBUTES:
            super().visit_Getattr(node, frame)
            return
        self.write("(tt_v if type(tt_o := ")
        self.visit(node.node, frame)
        self.write(f") is tt_dict and type(tt_v := tt_get(tt_o, {node.attr!r})) in tt_types ")
        self.write(f"else environment.getattr(tt_o, {node.attr!r}))")

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:
        target = node.node
        if isinstance(target, nodes.Getattr) and not forward_caller:
            self.write("environment.method(context, ")
            self.visit(target.node, frame)
            self.write(f", {target.attr!r}")
            self.signature(node, frame)
            self.write(")")
        else:
            super().visit_Call(node, frame, forward_caller=forward_caller)

    def macro_body(self, node: Any, frame: Frame) -> Any:
        node.body = [_hook("enter_macro"), *node.body]
        return super().macro_body(node, frame)


def _hook(name: str, *arguments: nodes.Expr) -> nodes.Output:
    """A statement that calls ``context.trace.<name>``."""
    node = nodes.Output(list(arguments))
    node.trace_hook = name  # type: ignore[attr-defined]
    return node


def mark_turns(node: nodes.Node, index: str = "") -> None:
    """Put a hook at the head of every loop's body, and around the loop, so that turns are known.

    `index` is the variable of the loop around `node`: ``{% set message = messages[index] %}`` begins a turn too.
    """
    for name in ("body", "else_", "elif_"):
        children = getattr(node, name, None)
        if not isinstance(children, list):
            continue
        marked: list[nodes.Node] = []
        for child in children:
            if isinstance(child, nodes.For):
                target = child.target
                item = nodes.Name(target.name, "load") if isinstance(target, nodes.Name) else nodes.Const(None)
                mark_turns(child, getattr(item, "name", ""))
                child.body.insert(0, _hook("turn", item))
                marked += [_hook("enter"), child, _hook("leave")]
                continue
            mark_turns(child, index)
            marked.append(child)
            if isinstance(child, nodes.Assign) and isinstance(child.target, nodes.Name) and _indexed(child.node, index):
                marked.append(_hook("assigned", nodes.Name(child.target.name, "load")))
        setattr(node, name, marked)


def _indexed(node: nodes.Node, index: str) -> bool:
    """Whether an expression is ``something[index]``."""
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Name) and node.arg.name == index


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}``, scoped as transformers scopes it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("generated")
        return nodes.CallBlock(call, [], [], body, lineno=line)

    def generated(self, caller: Any) -> Generated:
        text: TracedStr = join_buffer((caller(),))
        result = str.__new__(Generated, str.__getitem__(text, slice(None)))
        result.runs = text.runs
        return result


class TracingEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates as transformers does; see the module's own words for what differs."""

    code_generator_class = _Generator
    concat = staticmethod(join_buffer)
    fast_access = (TracedDict, TRACED_TYPES, dict.get)
    buffer = Buffer
    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControlExtension])
        self.filters.update(filters.traced_filters(self.filters))
        self.tests.update(filters.TRACED_TESTS)
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            dict=_TemplateDict(),
            namespace=_TemplateNamespace,
            lipsum=_lipsum,
        )

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        mark_turns(source)
        return super()._generate(source, *args, **kwargs)

    # -- access

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is TracedDict:
            if attribute not in _DICT_ATTRIBUTES:
                value = dict.get(obj, attribute, _MISSING)
                kind = type(value)
                if kind in TRACED_TYPES:
                    return value
                if kind is str:
                    value = traced(value, (*obj.origin, attribute))
                    dict.__setitem__(obj, attribute, value)
                    return value
                return self.undefined(obj=obj, name=attribute) if value is _MISSING else obj[attribute]
        elif kind is LoopContext:
            if attribute in _LOOP_ATTRIBUTES:
                return getattr(obj, attribute)
        elif kind is _TemplateNamespace:
            value = object.__getattribute__(obj, "_Namespace__attrs").get(attribute, _MISSING)
            if value is not _MISSING:
                return value
        elif kind is TracedMarkup and (attribute in _SAFE_STR_METHODS or attribute in ("unescape", "striptags")):
            return lambda *args, **kwargs: obj.method(attribute, args, kwargs)
        elif kind is TracedStr or kind is str or isinstance(obj, TracedStr):
            if attribute in _SAFE_STR_METHODS:
                return getattr(_promoted(obj), attribute)
            if attribute in ("format", "format_map"):
                return self._formatter(obj, attribute)
            return self._no_attribute(obj, attribute, str)
        elif kind in _PLAIN_TYPES:
            return self._no_attribute(obj, attribute, _PLAIN_TYPES[kind])
        return super().getattr(obj, attribute)

    def _no_attribute(self, obj: Any, attribute: str, base: type) -> Any:
        """Nothing of ours (``runs``, ``origin``) may be seen: only what the plain type has."""
        if attribute in dir(base):
            return super().getattr(obj, attribute)
        return self.undefined(obj=obj, name=attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(obj) is TracedDict and isinstance(argument, str):
            if argument in obj:
                return obj[argument]
            if argument not in _DICT_ATTRIBUTES:
                return self.undefined(obj=obj, name=argument)
        elif type(obj) is TracedList and type(argument) is int:
            try:
                return obj[argument]
            except IndexError:
                return self.undefined(obj=obj, name=argument)  # type: ignore[arg-type]
        elif isinstance(argument, str) and (isinstance(obj, str) or type(obj) in _PLAIN_TYPES):
            return self.getattr(obj, argument)
        return super().getitem(obj, argument)

    def _formatter(self, text: str, name: str) -> Any:
        """``str.format``, sandboxed. Its result is traced piece by piece where that is simple, else UNKNOWN."""
        plain = str.__getitem__(text, slice(None))
        is_markup = isinstance(text, TracedMarkup)
        sandboxed = SandboxedEnvironment.wrap_str_format(self, getattr(Markup(plain) if is_markup else plain, name))
        assert sandboxed is not None

        def format(*args: Any, **kwargs: Any) -> str:
            filters.check_format(plain, args, kwargs)
            result: str = sandboxed(*args, **kwargs)
            check_size(len(result))
            if is_markup:
                return as_markup(traced(str(result), UNKNOWN))
            values = (text, *args, *kwargs.values())
            if not filters.CODE_POINT.search(plain) and not any(map(is_traced_deep, values)):
                return result
            pieces = filters.format_pieces(text, args, kwargs) if name == "format" else None
            whole = join_traced(pieces) if pieces is not None else None
            return whole if whole is not None and whole == result else traced(result, UNKNOWN)

        return format

    # -- calls

    def method(__self, __context: Any, __obj: Any, __name: str, *args: Any, **kwargs: Any) -> Any:
        """``obj.name(…)`` in a template."""
        kind = type(__obj)
        if kind is TracedStr and __name in _SAFE_STR_METHODS:
            return getattr(__obj, __name)(*args, **kwargs)
        if kind is TracedMarkup and __name in _SAFE_STR_METHODS:
            return __obj.method(__name, args, kwargs)
        if kind is str and __name in _SAFE_STR_METHODS:
            return getattr(traced(__obj, None), __name)(*args, **kwargs)
        if kind is TracedDict and __name in _SAFE_DICT_METHODS:
            return getattr(__obj, __name)(*args, **kwargs)
        return __self.call(__context, __self.getattr(__obj, __name), *args, **kwargs)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if type(__obj) is Macro:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return __obj(__context.eval_ctx, *args, **kwargs)
        if __obj is __self.globals["range"]:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            result = cast(Any, __obj)(*args, **kwargs)
            __context.trace.step(1 + len(result) // 16)
            return result
        result = super().call(__context, __obj, *args, **kwargs)
        if type(result) is str and result:
            owner = __obj.__self__ if isinstance(__obj, (MethodType, BuiltinMethodType)) else None
            if isinstance(owner, bytes) or any(is_traced(value) for value in (owner, *args, *kwargs.values())):
                return traced(result, UNKNOWN)
        return result

    # -- operators

    def add(self, *parts: Any) -> Any:
        """``a + b + …``, left to right, as Python has it."""
        if all(type(part) in _PLAIN_TEXT for part in parts):
            return join_traced(parts)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
            if isinstance(total, (list, tuple)):
                check_pieces(len(total))
            elif isinstance(total, (str, bytes)):
                check_size(len(total))
        return total

    def summands(self, *parts: Any) -> tuple[Any, ...]:
        """What printing ``a + b + …`` prints: the parts themselves if all are text, else their sum."""
        for part in parts:
            if type(part) not in _PLAIN_TEXT:
                return (self.add(*parts),)
        return parts

    def call_binop(self, context: Any, name: str, left: Any, right: Any) -> Any:
        if name == "%":
            if isinstance(left, str):
                filters.check_percent(left, right)
                return left % right if isinstance(left, TracedMarkup) else percent_format(left, right)
            return left % right
        if name == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, (str, list, tuple, bytes)) and isinstance(other, int):
                    (check_pieces if isinstance(one, (list, tuple)) else check_size)(len(one) * other)
                    context.trace.step(1 + len(one) * other // 64)
                    return _promoted(one) * other if isinstance(one, str) else one * other
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if name == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_BITS:
                raise TooLarge(f"the template tried to compute a number of {bits} bits")
        return operator.mul(left, right) if name == "*" else operator.pow(left, right)


def _promoted(text: str) -> TracedStr:
    """A constant of the template as a traced string, so that what it is joined with keeps its trace."""
    return text if isinstance(text, TracedStr) else traced(text, None)


def _raise_exception(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    text = datetime.now().strftime(format)
    return traced(text, UNKNOWN) if is_traced(format) else text


def _lipsum(*args: Any, **kwargs: Any) -> str:
    from jinja2.utils import generate_lorem_ipsum

    if any(isinstance(value, int) and value > 10_000 for value in (*args, *kwargs.values())):
        raise TooLarge("the template asked for too much placeholder text")
    return str(generate_lorem_ipsum(*args, **{"html": False, **kwargs}))


class _TemplateDict:
    """``dict(…)`` in a template, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _TemplateNamespace(Namespace):
    """``namespace(…)``; names with a leading underscore are refused, as in transformers."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, arguments = args[0], args[1:]
        attributes = dict(*arguments, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}: leading underscore")
