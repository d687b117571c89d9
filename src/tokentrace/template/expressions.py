"""Compiles each expression of a template into a pair of Python expressions: value and origin.

The origin is evaluated after the value, if needed. ``message.content.strip()`` becomes
``message.get("content").strip()`` and the origin of ``message.content``.

Each ``code_X`` compiles one kind of node. Its code calls the environment for boxed values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from io import StringIO
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, operators

from .budget import SMALL
from .strings import ASKING_METHODS, CUTTING_METHODS, FILTER_METHODS
from .syntax import DICT_ATTRIBUTES, field_of, has_arguments, is_constant, is_word, json_options, summands

Lookup = nodes.Getattr | nodes.Getitem
_KIND_TESTS = frozenset({"boolean", "false", "float", "integer", "number", "true"}).union(
    {"callable", "escaped", "iterable", "sequence"}
)
_MAX_WORD = 64
"""The environment searches for longer constants: it checks the cost first."""


@dataclass(frozen=True, slots=True)
class Code:
    value: str
    origin: str = "None"
    is_count: bool = False
    """True for the template's own numbers and booleans."""

    @property
    def boxed(self) -> str:
        return self.value if self.origin == "None" else f"tt_box({self.value}, {self.origin})"


@dataclass(frozen=True, slots=True)
class LoopNames:
    """The Python names of index, items and origins in a loop that needs no loop object."""

    index: str
    items: str
    origins: str

    def code(self, attribute: str) -> Code:
        index, length = self.index, f"len({self.items})"
        if attribute in ("previtem", "nextitem"):
            at = f"{index} {'-' if attribute == 'previtem' else '+'} 1"
            test, missing = f"0 <= {at} < {length}", "undefined('there is no such item in the loop')"
            item = f"({self.items}[{at}] if {test} else {missing})"
            return Code(item, f"({self.origins}[{at}] if {test} else None)")
        values = {
            "index0": index,
            "index": f"({index} + 1)",
            "first": f"({index} == 0)",
            "last": f"({index} + 1 == {length})",
            "length": length,
            "revindex": f"({length} - {index})",
            "revindex0": f"({length} - {index} - 1)",
        }
        return Code(values[attribute], is_count=True)


class Expressions(CodeGenerator):
    """The part of the code generator for expressions. Jinja's own visitors get them boxed."""

    fresh = CodeGenerator.temporary_identifier

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loops: dict[str, LoopNames] = {}
        """Loops that need no loop object, by the Python name of their ``loop``."""
        self._codes: dict[nodes.Node, Code] = {}

    def code(self, node: nodes.Node, frame: Frame) -> Code:
        if node not in self._codes:
            is_folded = isinstance(node, _FOLDED) and not isinstance(node, nodes.Add)
            part = self.optimizer.visit(node, frame.eval_ctx) if is_folded and self.optimizer else node
            kind = type(part).__name__
            code: Code | None = getattr(self, f"code_{kind}", lambda *_: None)(part, frame)
            self._codes[node] = code or Code(self._source(getattr(super(), f"visit_{kind}"), part, frame))
        return self._codes[node]

    def condition(self, node: nodes.Node, frame: Frame) -> str:
        if isinstance(node, (nodes.And, nodes.Or)):
            word = "and" if isinstance(node, nodes.And) else "or"
            return f"({self.condition(node.left, frame)} {word} {self.condition(node.right, frame)})"
        if isinstance(node, nodes.Not):
            return f"(not {self.condition(node.node, frame)})"
        return self._or_none(node, frame)

    def _or_none(self, node: nodes.Node, frame: Frame) -> str:
        """A value that may be None instead of undefined: both are false and no text."""
        if isinstance(node, Lookup) and (name := field_of(node)) and not self._loop_of(node.node, frame):
            return self._field(node, name, frame, or_none=True).value
        return self.code(node, frame).value

    def _source(self, write: Callable[..., None], *args: Any) -> str:
        before = self.stream, self._new_lines
        self.stream, self._new_lines = StringIO(), 0
        try:
            write(*args)
            return self.stream.getvalue()
        finally:
            self.stream, self._new_lines = before

    def code_Const(self, node: nodes.Const, frame: Frame) -> Code:
        code = self._source(super().visit_Const, node, frame)
        kind = type(node.value)
        return Code(code if kind is str else f"({code})", is_count=kind is int or kind is bool)

    def code_Name(self, node: nodes.Name, frame: Frame) -> Code:
        return Code(
            self._source(super().visit_Name, node, frame), origin_name(frame.symbols.ref(node.name))
        )

    def code_List(self, node: nodes.List | nodes.Tuple, frame: Frame) -> Code:
        items = "".join(f"{self.code(item, frame).boxed}, " for item in node.items)
        return self._charged(node, f"[{items}]" if isinstance(node, nodes.List) else f"({items})")

    code_Tuple = code_List  # noqa: N815

    def code_Dict(self, node: nodes.Dict, frame: Frame) -> Code:
        rows: list[str] = []
        for item in node.items:
            key, value = (self.code(part, frame).boxed for part in (item.key, item.value))
            rows.append(f"{key if is_constant(item.key) else f'tt_weighed({key})'}: {value}")
        return self._charged(node, f"{{{', '.join(rows)}}}")

    def _charged(self, node: nodes.List | nodes.Tuple | nodes.Dict, source: str) -> Code:
        return Code(f"tt_charged({64 + 64 * len(node.items)}, {source})")

    def code_Getattr(self, node: nodes.Getattr, frame: Frame) -> Code:
        loop = self._loop_of(node.node, frame)
        if loop is not None:
            return loop.code(node.attr)
        if node.attr in DICT_ATTRIBUTES:
            return Code(f"environment.getattr({self.code(node.node, frame).boxed}, {node.attr!r})")
        return self._field(node, node.attr, frame)

    def _loop_of(self, node: nodes.Node, frame: Frame) -> LoopNames | None:
        is_loop = isinstance(node, nodes.Name) and node.name == "loop"
        return self.loops.get(frame.symbols.find_ref("loop") or "") if is_loop else None

    def code_Getitem(self, node: nodes.Getitem, frame: Frame) -> Code:
        base, key = self.code(node.node, frame), node.arg
        value, index = self.fresh(), self.fresh()
        if is_word(key):
            return self._field(node, key.value, frame)
        if isinstance(key, nodes.Slice):
            ends = [
                self.code(end or nodes.Const(None), frame).boxed for end in (key.start, key.stop, key.step)
            ]
            look_up, argument = "cut", f"tt_bounds({', '.join(ends)})"
        else:
            look_up, argument = "item", self.code(key, frame).boxed
        code = f"environment.{look_up}({value} := {base.value}, {base.origin}, {index} := {argument})"
        return Code(code, self._origin(base, f"tt_of_{look_up}({base.origin}, {value}, {index})"))

    def _origin(self, base: Code, origin: str) -> str:
        return "None" if base.origin == "None" else origin

    def _field(self, node: Lookup, name: str, frame: Frame, or_none: bool = False) -> Code:
        base, item = self.code(node.node, frame), self.fresh()
        value = named = base.value
        if not value.isidentifier():
            value = self.fresh()
            named = f"{value} := {base.value}"
        is_plain = f"type({item} := {value}.get({name!r})) in tt_plain"
        if or_none:
            is_plain = f"({is_plain} or {item} is None)"
        lookup = "field" if isinstance(node, nodes.Getattr) else "item"
        code = (
            f"({item} if type({named}) is dict and {is_plain}"
            f" else environment.{lookup}({value}, {base.origin}, {name!r}))"
        )
        return Code(code, self._origin(base, f"tt_inside({base.origin}, {name!r})"))

    def code_Call(self, node: nodes.Call, frame: Frame) -> Code:
        target = node.node
        if isinstance(target, nodes.Getattr) and not (node.kwargs or node.dyn_args or node.dyn_kwargs):
            constants = [arg.value if isinstance(arg, nodes.Const) else None for arg in node.args]
            if target.attr == "get" and constants and type(constants[0]) is str and len(constants) <= 2:
                return self._get(self.code(target.node, frame), node.args, frame)
            if all(type(word) is str and 0 < len(word) <= _MAX_WORD for word in constants):
                base, value = self.code(target.node, frame), self.fresh()
                args = "".join(f", {word!r}" for word in constants)
                boxed = (
                    f"environment.method(context, tt_box({value}, {base.origin}), {target.attr!r}{args})"
                )
                if code := self._text_method(base, target.attr, args, value, boxed):
                    return code
        return Code(self._source(self.write_call, node, frame))

    def write_call(self, node: nodes.Call, frame: Frame, extra: dict[str, str] | None = None) -> None:
        target = node.node
        if isinstance(target, nodes.Getattr):
            self.write(
                f"environment.method(context, {self.code(target.node, frame).boxed}, {target.attr!r}"
            )
        else:
            self.write(f"environment.call(context, {self.code(target, frame).boxed}")
        self.signature(node, frame, extra)
        self.write(")")

    def _text_method(self, base: Code, name: str, args: str, value: str, boxed: str) -> Code | None:
        """A method of strings. `value` names the text, `boxed` is code for other objects."""
        is_plain = f"type({value} := {base.value}) is str"
        text = f"({value} if len({value}) < {SMALL} else tt_paid({value}))"
        if name in ASKING_METHODS:
            return Code(f"({value}.{name}({args[2:]}) if {is_plain} else {boxed})", is_count=True)
        if name in CUTTING_METHODS:
            return Code(f"({text}.{name}({args[2:]}) if {is_plain} else {boxed})", base.origin)
        if name in ("split", "splitlines"):
            pieces = self.fresh()
            code = f"({pieces} := tt_split({value}, {name!r}{args}) if {is_plain} else {boxed})"
            return Code(code, self._origin(base, f"tt_of_pieces({base.origin}, {pieces})"))
        return None

    def _get(self, base: Code, args: list[nodes.Expr], frame: Frame) -> Code:
        default = self.code(args[1], frame) if len(args) > 1 else Code("None")
        key = self.code(args[0], frame).value
        value, item = self.fresh(), self.fresh()
        code = (
            f"({item} if type({value} := {base.value}) is dict and type({item} := {value}.get({key})) in tt_plain"
            f" else environment.got(context, {value}, {base.origin}, {key}, {default.value}, {default.origin}))"
        )
        if base.origin == default.origin == "None":
            return Code(code)
        is_there = f"type({value}) is dict and {key} in {value}"
        return Code(code, f"(tt_inside({base.origin}, {key}) if {is_there} else {default.origin})")

    def code_Filter(self, node: nodes.Filter, frame: Frame) -> Code | None:
        if node.node is None:
            return None
        base, value = self.code(node.node, frame), self.fresh()
        if node.name == "tojson" and (options := json_options(node, frame.eval_ctx)):
            return Code(
                f"({value} := environment.json({base.value}, {base.origin}, {options!r}))[0]", f"{value}[1]"
            )
        if has_arguments(node) or node.name not in ("count", "length", "string", *FILTER_METHODS):
            return None
        boxed = f"{self.filters[node.name]}(tt_box({value}, {base.origin}))"
        test = f"type({value} := {base.value})"
        if node.name in ("length", "count"):
            return Code(f"(len({value}) if {test} in tt_sized else {boxed})", is_count=True)
        if node.name == "string":
            return Code(f"({value} if {test} is str else {boxed})", base.origin)
        return self._text_method(base, FILTER_METHODS[node.name], "", value, boxed)

    def code_Test(self, node: nodes.Test, frame: Frame) -> Code | None:
        if has_arguments(node) or node.name not in self.tests:
            return None
        base, value, test = self.code(node.node, frame).value, self.fresh(), self.tests[node.name]
        forms = {
            "defined": f"(not isinstance({base}, Undefined))",
            "undefined": f"isinstance({base}, Undefined)",
            "string": f"isinstance({self._or_none(node.node, frame)}, str)",
            "none": f"(({value} := {base}) is None or type({value}) is tt_none)",
            "mapping": f"(type({value} := {base}) is dict or {test}({value}))",
            **dict.fromkeys(_KIND_TESTS, f"{test}({base})"),
        }
        return Code(forms[node.name], is_count=True) if node.name in forms else None

    def code_Compare(self, node: nodes.Compare, frame: Frame) -> Code:
        if len(node.ops) != 1:
            operands = [node.expr, *(operand.expr for operand in node.ops)]
            first, *more = (f"tt_weighed({self.code(operand, frame).boxed})" for operand in operands)
            links = (
                f" {operators[operand.op]} {code}" for operand, code in zip(node.ops, more, strict=True)
            )
            return Code(f"({first}{''.join(links)})", is_count=True)
        op, sides = node.ops[0].op, (node.expr, node.ops[0].expr)
        if op in ("in", "notin"):
            return self._within(op, *sides, frame)
        left, right = (self.code(side, frame) for side in sides)
        if op in ("eq", "ne"):
            values = [self._or_none(sides[0], frame) if is_word(sides[1]) else left.value, right.value]
        else:  # may fail, with an error that names the types
            values = [left.boxed, right.boxed]
        if not (left.is_count or right.is_count or any(map(is_constant, sides))):
            values = [f"tt_weighed({value})" for value in values]
        return Code(f"({f' {operators[op]} '.join(values)})", is_count=True)

    def _within(self, op: str, item: nodes.Expr, container: nodes.Expr, frame: Frame) -> Code:
        no = "not " if op == "notin" else ""
        if isinstance(container, (nodes.List, nodes.Tuple)) and all(map(is_constant, container.items)):
            constants = tuple(one.value for one in container.items)  # type: ignore[attr-defined]
            return Code(f"({self.code(item, frame).value} {no}in {constants!r})", is_count=True)
        base = self.code(container, frame)
        if is_word(item):
            value = self.fresh()
            is_plain = f"type({value} := {base.value}) is str or type({value}) is dict"
            boxed = f"environment.within({item.value!r}, tt_box({value}, {base.origin}))"
            return Code(f"({no}({item.value!r} in {value} if {is_plain} else {boxed}))", is_count=True)
        return Code(
            f"({no}environment.within({self.code(item, frame).boxed}, {base.boxed}))", is_count=True
        )

    def code_And(self, node: nodes.And | nodes.Or, frame: Frame) -> Code:
        left, right = self.code(node.left, frame), self.code(node.right, frame)
        first = self.fresh()
        test = f"({first} := {left.value})"
        if isinstance(node, nodes.Or):
            return self._either(f"({first} if {test} else {right.value})", first, left, right)
        return self._either(f"({right.value} if {test} else {first})", first, right, left)

    code_Or = code_And  # noqa: N815

    def code_Not(self, node: nodes.Not, frame: Frame) -> Code:
        return Code(self.condition(node, frame), is_count=True)

    def code_CondExpr(self, node: nodes.CondExpr, frame: Frame) -> Code:
        frame = frame.soft()
        first, test = self.code(node.expr1, frame), self.fresh()
        missing = Code("cond_expr_undefined('an inline if without an else was false')")
        second = missing if node.expr2 is None else self.code(node.expr2, frame)
        code = f"({first.value} if ({test} := {self.condition(node.test, frame)}) else {second.value})"
        return self._either(code, test, first, second)

    def _either(self, value: str, test: str, first: Code, second: Code) -> Code:
        if first.origin == second.origin == "None":
            return Code(value, is_count=first.is_count and second.is_count)
        return Code(value, f"({first.origin} if {test} else {second.origin})")

    def code_Neg(self, node: nodes.Neg, frame: Frame) -> Code | None:
        is_number = isinstance(node.node, nodes.Const) and type(node.node.value) is int
        return Code(f"(-{node.node.value})", is_count=True) if is_number else None  # type: ignore[attr-defined]

    def code_Sub(self, node: nodes.Sub, frame: Frame) -> Code | None:
        return self._counts([node.left, node.right], "-", frame)

    def code_Mod(self, node: nodes.Mod, frame: Frame) -> Code | None:
        by = node.right
        return (
            self._counts([node.left, by], "%", frame) if isinstance(by, nodes.Const) and by.value else None
        )

    def code_Add(self, node: nodes.Add, frame: Frame) -> Code:
        parts = summands(node)
        boxed = (self.code(part, frame).boxed for part in parts)
        return self._counts(parts, "+", frame) or Code(f"environment.add({', '.join(boxed)})")

    def _counts(self, operands: list[nodes.Node], word: str, frame: Frame) -> Code | None:
        codes = [self.code(operand, frame) for operand in operands]
        if not all(code.is_count for code in codes):
            return None
        return Code(f"({f' {word} '.join(code.value for code in codes)})", is_count=True)

    def code_Concat(self, node: nodes.Concat, frame: Frame) -> Code:
        return Code(
            f"environment.concat(({', '.join(self.code(part, frame).boxed for part in node.nodes)},))"
        )


_FOLDED = (nodes.Filter, nodes.Test, nodes.Compare, nodes.CondExpr, nodes.UnaryExpr, nodes.BinExpr)
"""Expressions that are computed while compiling if they are constant, except for sums."""


def origin_name(name: str) -> str:
    """The variable for the origin of another's value: ``o_1_x`` for ``l_1_x``."""
    return f"o{name[1:]}"


def _visitor(kind: str) -> Callable[..., None]:
    def visit(self: Expressions, node: Any, frame: Frame, **options: Any) -> None:
        if options.get("forward_caller"):
            self.write_call(node, frame, {"caller": "caller"})
        elif getattr(node, "ctx", "load") != "load":
            getattr(super(Expressions, self), f"visit_{kind}")(node, frame)
        else:
            self.write(self.code(node, frame).boxed)

    return visit


for _kind in [name.removeprefix("code_") for name in vars(Expressions) if name.startswith("code_")]:
    setattr(Expressions, f"visit_{_kind}", _visitor(_kind))
