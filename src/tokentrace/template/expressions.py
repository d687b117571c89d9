"""How the expressions of a chat template are compiled: each into a pair of expressions of Python.

One gives the value, the other its origin (see `pairs`), which is evaluated after the value, and only where something
is printed or stored. ``message.content.strip()`` becomes ``message.get("content").strip()`` and the origin of
``message.content``: what is cut out of text of one origin has that origin. The plain form is taken only for values
on which it cannot fail; all else goes to the environment, boxed, where each operation has its one meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from typing import Any, Final

from jinja2 import nodes
from jinja2.compiler import Frame, operators

from .containers import Containers, is_constant, is_fixed
from .pairs import SMALL
from .sources import DICT_ATTRIBUTES, Pair, asked, beside, field_of, flattened, json_options, told_by_loop

_CUTTING: Final = frozenset(
    (
        *("strip", "lstrip", "rstrip", "removeprefix", "removesuffix"),
        *("capitalize", "casefold", "lower", "swapcase", "title", "upper"),
    )
)
"""Methods whose result is a part of the text, or the text in other letters: it has the text's origin."""
_PEEKING: Final = frozenset(("endswith", "startswith"))
_ASKING: Final = frozenset(("count", "find", "isdigit", "isspace", "isalpha", "isupper"))
"""Methods that tell a count, a place or a truth, in time that grows with the text only."""
_SPLITTING: Final = frozenset(("split", "splitlines"))
_LOOKING: Final = frozenset(
    ("boolean", "callable", "escaped", "false", "float", "integer", "iterable", "number", "sequence", "true")
)
"""Tests that look at what a value is: the same for a plain value as for a boxed one."""
_MOST_SEARCHED: Final = 64
"""Longer constants are searched for where it is paid for."""


class Expressions(Containers):
    """The part of the generator that knows expressions.

    A visitor of an expression writes it as one value, boxed, which is what Jinja's own visitors ask for; `pair` and
    `condition` are asked where more can be made of it.
    """

    counted_loops: dict[str, tuple[str, str, str]]
    """Of loops that need no object of their own: names of the index, of the items and of their origins."""
    namespaces: frozenset[str]
    """Variables that hold nothing but namespaces."""
    fields: dict[str, dict[str, tuple[str, str]]]
    """Of variables of loops: the names of what is known of each field of theirs in a round, its value and its origin.
    None stands in them for what is not known yet."""
    _pairs: dict[nodes.Node, Pair]
    """Of expressions seen: one that has no plain form asks for its parts twice, and so would each of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pairs = {}
        self.fields = {}

    def pair(self, node: nodes.Node, frame: Frame) -> Pair:
        """Value and origin of an expression."""
        found = self._pairs.get(node)
        if found is None:
            found = self._pairs[node] = self._pair(node, frame)
        return found

    def _pair(self, node: nodes.Node, frame: Frame) -> Pair:
        if self.optimizer is not None and isinstance(node, _FOLDED):
            node = self.optimizer.visit(node, frame.eval_ctx)
        method: Callable[[Any, Frame], Pair | None] | None = getattr(self, f"pair_{type(node).__name__}", None)
        found = method(node, frame) if method is not None else None
        return found if found is not None else Pair(self._source(self._boxed_visitor(node), node, frame))

    def value(self, node: nodes.Node, frame: Frame) -> str:
        """An expression of which the origin does not matter."""
        return self.pair(node, frame).code

    def boxed(self, node: nodes.Node, frame: Frame) -> str:
        return self.pair(node, frame).boxed

    def condition(self, node: nodes.Node, frame: Frame) -> str:
        """An expression of which only the truth matters."""
        if isinstance(node, (nodes.And, nodes.Or)):
            word = "and" if isinstance(node, nodes.And) else "or"
            return f"({self.condition(node.left, frame)} {word} {self.condition(node.right, frame)})"
        if isinstance(node, nodes.Not):
            return f"(not {self.condition(node.node, frame)})"
        return self.seen(node, frame)

    def seen(self, node: nodes.Node, frame: Frame) -> str:
        """An expression where None may stand for what is missing: it is as false, is no text, and equals none."""
        name = field_of(node)
        if name is None or not isinstance(node, (nodes.Getattr, nodes.Getitem)) or self._is_namespace(node.node):
            return self.value(node, frame)
        if self._of_loop(node.node, name, frame) is not None:
            return self.value(node, frame)
        return self._looked_up(node, name, frame, or_none=True).code

    def _is_namespace(self, node: nodes.Node) -> bool:
        return isinstance(node, nodes.Name) and node.name in self.namespaces

    def _boxed_visitor(self, node: nodes.Node) -> Callable[..., None]:
        """The visitor that writes an expression which has no plain form."""
        name = f"visit_{type(node).__name__}"
        return getattr(super(), name)  # type: ignore[no-any-return]

    def _source(self, write: Callable[..., None], *args: Any) -> str:
        """What `write` writes, instead of writing it."""
        kept = self.stream, self._new_lines
        self.stream, self._new_lines = StringIO(), 0
        try:
            write(*args)
            return self.stream.getvalue()
        finally:
            self.stream, self._new_lines = kept

    # -- names and constants

    def pair_Const(self, node: nodes.Const, frame: Frame) -> Pair:
        code = self._source(super().visit_Const, node, frame)
        kind = type(node.value)
        return Pair(code if kind is str else f"({code})", is_count=kind is int or kind is bool)

    def pair_Name(self, node: nodes.Name, frame: Frame) -> Pair:
        origin = beside(frame.symbols.ref(node.name))
        return Pair(self._source(super().visit_Name, node, frame), origin, f"{origin} is not None")

    # -- looking into values

    def pair_Getattr(self, node: nodes.Getattr, frame: Frame) -> Pair:
        counted = self._of_loop(node.node, node.attr, frame)
        if counted is not None:
            return counted
        if node.attr in DICT_ATTRIBUTES:
            return Pair(f"environment.getattr({self.boxed(node.node, frame)}, {node.attr!r})")
        return self._field(node, node.attr, frame)

    def pair_Getitem(self, node: nodes.Getitem, frame: Frame) -> Pair:
        key = node.arg
        if isinstance(key, nodes.Slice):
            return self._slice(node.node, key, frame)
        if isinstance(key, nodes.Const) and type(key.value) is str:
            return self._field(node, key.value, frame)
        base = self.pair(node.node, frame)
        value, index = self.temporary_identifier(), self.temporary_identifier()
        at = self.pair(key, frame)
        if base.is_split:
            return Pair(f"environment.item({base.code}, None, {at.boxed})", base.origin, base.given)
        if base.origin == "None":
            return Pair(f"environment.item({base.code}, None, {at.boxed})")
        if not isinstance(node.node, nodes.Name):
            code = f"environment.item({value} := {base.code}, {base.origin}, {index} := {at.boxed})"
            return Pair(code, f"tt_of_item({base.origin}, {value}, {index})", base.given)
        found = self.temporary_identifier()
        code = (
            f"({found} if (type({value} := {base.code}) is list) & (type({index} := {at.boxed}) is int)"
            f" and 0 <= {index} < len({value}) and type({found} := {value}[{index}]) in tt_plain"
            f" else environment.item({value}, {base.origin}, {index}))"
        )
        return Pair(code, f"tt_of_item({base.origin}, {value}, {index})", base.given)

    def _field(self, node: nodes.Getattr | nodes.Getitem, name: str, frame: Frame) -> Pair:
        """``value.name`` or ``value["name"]``: at hand without a call where a plain dict has it."""
        if self._is_namespace(node.node):
            base = self.pair(node.node, frame).stored
            value, found = self.temporary_identifier(), self.temporary_identifier()
            look = f"({found} := tt_attributes({value}).get({name!r}, missing)) is not missing"
            otherwise = f"environment.{asked(node)}({value}, {base.origin}, {name!r})"
            return Pair(f"({found} if type({value} := {base.code}) is tt_namespace and {look} else {otherwise})")
        return self._looked_up(node, name, frame)

    def _looked_up(self, node: nodes.Getattr | nodes.Getitem, name: str, frame: Frame, or_none: bool = False) -> Pair:
        """A field of a value. `or_none`: None may be given for one that is missing."""
        base = self.pair(node.node, frame).stored
        known, known_origin = self.fields.get(base.code, {}).get(name, ("", ""))
        found, value, here = self.temporary_identifier(), base.code, base.code
        if not value.isidentifier():
            value = self.temporary_identifier()
            here = f"{value} := {base.code}"
        plain = f"type({found} := {value}.get({name!r})) in tt_plain"
        if or_none:
            plain = f"({plain} or {found} is None)"
        rest = f"environment.{asked(node)}({value}, {base.origin}, {name!r})"
        code = f"({found} if type({here}) is dict and {plain} else {rest})"
        if known:
            code = f"({known} if {known} is not None else ({known} := {found}){code.removeprefix(f'({found}')}"
        if base.origin == "None":
            return Pair(code)
        origin = f"tt_inside({base.origin}, {name!r})"
        if known_origin:
            origin = f"({known_origin} if {known_origin} is not None else {origin})"
        return Pair(code, origin, base.given)

    def _slice(self, node: nodes.Expr, key: nodes.Slice, frame: Frame) -> Pair:
        base = self.pair(node, frame).stored
        value, which = self.temporary_identifier(), self.temporary_identifier()
        ends = [self.boxed(end, frame) if end is not None else "None" for end in (key.start, key.stop, key.step)]
        code = f"environment.cut({value} := {base.code}, {base.origin}, {which} := tt_bounds({', '.join(ends)}))"
        if base.origin == "None":
            return Pair(code)
        return Pair(code, f"tt_of_slice({base.origin}, {value}, {which})", base.given)

    def _of_loop(self, node: nodes.Expr, name: str, frame: Frame) -> Pair | None:
        """``loop.index`` and the like, of a loop that has no object."""
        if not isinstance(node, nodes.Name) or node.name != "loop":
            return None
        names = self.counted_loops.get(frame.symbols.find_ref("loop") or "")
        if names is None:
            return None
        return told_by_loop(name, *names)

    # -- calls, filters, tests

    def pair_Call(self, node: nodes.Call, frame: Frame) -> Pair:
        target = node.node
        if not isinstance(target, nodes.Getattr):
            return Pair(self._source(self.write_call, node, frame))
        if self._takes_constants(node):
            found = self._method(self.pair(target.node, frame), target.attr, node, frame)
            if found is not None:
                return found
        return Pair(self._source(self._write_method, node, target, frame))

    def write_call(self, node: nodes.Call, frame: Frame, extra: dict[str, str] | None = None) -> None:
        self.write(f"environment.call(context, {self.boxed(node.node, frame)}")
        self.signature(node, frame, extra)
        self.write(")")

    def _write_method(self, node: nodes.Call, target: nodes.Getattr, frame: Frame) -> None:
        self.write(f"environment.method(context, {self.boxed(target.node, frame)}, {target.attr!r}")
        self.signature(node, frame)
        self.write(")")

    def _method(self, base: Pair, name: str, node: nodes.Call, frame: Frame) -> Pair | None:
        if name == "get" and node.args and type(getattr(node.args[0], "value", None)) is str:
            return self._get(base, node, frame)
        words = [arg.value if isinstance(arg, nodes.Const) else None for arg in node.args]
        if not all(type(word) is str and 0 < len(word) <= _MOST_SEARCHED for word in words):
            return None
        args = ", ".join(self.value(arg, frame) for arg in node.args)
        value = self.temporary_identifier()
        boxed = f"environment.method(context, tt_box({value}, {base.origin}), {name!r}{', ' + args if args else ''})"
        return self._of_text(base, name, args, value, boxed)

    def _of_text(self, base: Pair, name: str, args: str, value: str, otherwise: str) -> Pair | None:
        """A method of strings on a plain text of some field; `otherwise` is what is done to all else."""
        if base.origin == "None" or base.is_split:
            return None
        plain = f"type({value} := {base.code}) is str and {base.given}"
        text = f"({value} if len({value}) < {SMALL} else tt_paid({value}))"
        if name in _PEEKING:
            return Pair(f"({value}.{name}({args}) if {plain} else {otherwise})", is_count=True)
        if name in _ASKING:
            return Pair(f"({text}.{name}({args}) if {plain} else {otherwise})", is_count=True)
        if name in _CUTTING:
            return Pair(f"({text}.{name}({args}) if {plain} else {otherwise})", base.origin, base.given)
        if name in _SPLITTING:
            split = f"tt_pieces_of({value}, {name!r}, {args})"
            return Pair(f"({split} if {plain} else {otherwise})", base.origin, base.given, is_split=True)
        return None

    def _takes_constants(self, node: nodes.Call) -> bool:
        plain = not (node.kwargs or node.dyn_args or node.dyn_kwargs)
        return plain and all(isinstance(arg, (nodes.Const, nodes.Name)) for arg in node.args)

    def _get(self, base: Pair, node: nodes.Call, frame: Frame) -> Pair | None:
        """``value.get("key", default)``."""
        if len(node.args) > 2:
            return None
        base = base.stored
        default = self.pair(node.args[1], frame) if len(node.args) > 1 else Pair("None")
        key = self.value(node.args[0], frame)
        value, found = self.temporary_identifier(), self.temporary_identifier()
        code = (
            f"({found} if type({value} := {base.code}) is dict and type({found} := {value}.get({key})) in tt_plain"
            f" else environment.got(context, {value}, {base.origin}, {key}, {default.code}, {default.origin}))"
        )
        if base.origin == "None":
            return Pair(code) if default.origin == "None" else None
        given = f"({base.given} if type({value}) is dict and {key} in {value} else {default.given})"
        return Pair(code, f"tt_of_get({base.origin}, {value}, {key}, {default.origin})", given)

    def _json(self, node: nodes.Filter, value: nodes.Expr, frame: Frame) -> Pair | None:
        """``value|tojson(…)``."""
        options = json_options(node, frame)
        if options is None:
            return None
        base = self.pair(value, frame).stored
        if base.origin == "None":
            return Pair(f"environment.json({base.code}, None, {options!r})")
        origin = self.temporary_identifier()
        return Pair(f"environment.json({base.code}, {origin} := {base.origin}, {options!r})", origin, base.given)

    def pair_Filter(self, node: nodes.Filter, frame: Frame) -> Pair | None:
        if node.name == "tojson" and node.node is not None and not (node.args or node.dyn_args or node.dyn_kwargs):
            return self._json(node, node.node, frame)
        if node.node is None or node.dyn_args or node.dyn_kwargs or node.kwargs:
            return None
        name, arity = node.name, len(node.args)
        if name not in ("count", "d", "default", "first", "last", "length", "string", "trim", *_CUTTING):
            return None
        base = self.pair(node.node, frame)
        value = self.temporary_identifier()
        function = self.filters[name]
        otherwise = f"{function}(tt_box({value}, {base.origin}))"
        if name in ("length", "count") and not arity:
            code = f"(len({value}) if type({value} := {base.code}) in tt_sized else {otherwise})"
            return Pair(code, is_count=True)
        if name in ("default", "d"):
            return self._default(base, node, frame)
        if arity or base.origin == "None":
            return None
        if name == "string" and not base.is_split:
            code = f"({value} if type({value} := {base.code}) is str else {otherwise})"
            return Pair(code, base.origin, base.given)
        if name in ("first", "last"):
            return self._end_of(base, 0 if name == "first" else -1, function)
        method = "strip" if name == "trim" else name
        if method in ("strip", "upper", "lower", "capitalize"):
            return self._of_text(base, method, "", value, otherwise)
        return None

    def _end_of(self, base: Pair, index: int, function: str) -> Pair:
        """``value|first``, ``value|last``."""
        value = self.temporary_identifier()
        if base.is_split:
            code = f"({value}[{index}] if ({value} := {base.code}) else {function}(environment, {value}))"
            return Pair(code, base.origin, base.given)
        code = (
            f"(environment.item({value}, {base.origin}, {index}) if type({value} := {base.code}) is list and {value}"
            f" else {function}(environment, tt_box({value}, {base.origin})))"
        )
        return Pair(code, f"tt_of_item({base.origin}, {value}, {index})", base.given)

    def _default(self, base: Pair, node: nodes.Filter, frame: Frame) -> Pair | None:
        """``value|default(…)``."""
        if len(node.args) > 2 or not all(isinstance(arg, (nodes.Const, nodes.Name)) for arg in node.args):
            return None
        default = self.pair(node.args[0], frame) if node.args else Pair("''")
        empty = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], nodes.Const) else False
        if len(node.args) > 1 and (not isinstance(node.args[1], nodes.Const) or type(empty) is not bool):
            return None
        base = base.stored
        value, missing = self.temporary_identifier(), self.temporary_identifier()
        asked = f"isinstance({value} := {base.code}, Undefined)" + (f" or not {value}" if empty else "")
        code = f"({default.code} if ({missing} := ({asked})) else {value})"
        return self._either(code, missing, default, base)

    def pair_Test(self, node: nodes.Test, frame: Frame) -> Pair | None:
        if node.kwargs or node.dyn_args or node.dyn_kwargs or node.name not in self.tests:
            return None
        if node.name == "sameas" and len(node.args) == 1:
            sides = [self.pair(side, frame).stored for side in (node.node, node.args[0])]
            args = ", ".join(f"{side.code}, {side.origin}" for side in sides)
            return Pair(f"environment.same({args})", is_count=True)
        if node.args:
            return None
        base = self.pair(node.node, frame)
        if base.is_split:
            return None
        value = self.temporary_identifier()
        forms = {
            "defined": f"(not isinstance({base.code}, Undefined))",
            "undefined": f"isinstance({base.code}, Undefined)",
            "string": f"isinstance({self.seen(node.node, frame)}, str)",
            "none": f"(({value} := {base.code}) is None or type({value}) is tt_none)",
            "mapping": f"(type({value} := {base.code}) is dict or {self.tests[node.name]}({value}))",
            **dict.fromkeys(_LOOKING, f"{self.tests[node.name]}({base.code})"),
        }
        return Pair(forms[node.name], is_count=True) if node.name in forms else None

    # -- operators

    def pair_Compare(self, node: nodes.Compare, frame: Frame) -> Pair:
        if len(node.ops) != 1:
            operands = [node.expr, *(operand.expr for operand in node.ops)]
            codes = [f"environment.weighed({self.boxed(operand, frame)})" for operand in operands]
            rest = (f" {operators[operand.op]} {code}" for operand, code in zip(node.ops, codes[1:], strict=True))
            return Pair(f"({codes[0]}{''.join(rest)})", is_count=True)
        op, sides = node.ops[0].op, (node.expr, node.ops[0].expr)
        if op in ("in", "notin"):
            return self._within(op, *sides, frame)
        left, right = (self.pair(side, frame).stored for side in sides)
        word = operators[op]
        cheap = left.is_count or right.is_count or any(map(is_constant, sides))
        if op in ("eq", "ne"):
            is_word = [isinstance(side, nodes.Const) and type(side.value) is str for side in sides]
            codes = [self.seen(sides[0], frame) if is_word[1] else left.code, right.code]
        else:  # may be refused, in words that name what was compared
            codes = [left.boxed, right.boxed]
        first, second = codes if cheap else [f"environment.weighed({code})" for code in codes]
        return Pair(f"({first} {word} {second})", is_count=True)

    def _within(self, op: str, item: nodes.Expr, container: nodes.Expr, frame: Frame) -> Pair:
        word = "not in" if op == "notin" else "in"
        if is_fixed(container):
            base = self.pair(item, frame).stored
            inner = self._source(self.visit_unpaid, container, frame)
            if not is_constant(container):
                return Pair(f"({base.code} {word} {inner})", is_count=True)
            return Pair(f"({base.boxed} {word} {inner})", is_count=True)
        value = self.temporary_identifier()
        base = self.pair(container, frame).stored
        no = "not " if op == "notin" else ""
        if isinstance(item, nodes.Const) and type(item.value) is str:
            key = self.value(item, frame)
            quick = f"(type({value} := {base.code}) is str and len({value}) < 4096) or type({value}) is dict"
            otherwise = f"environment.within({key}, tt_box({value}, {base.origin}))"
            return Pair(f"({no}({key} in {value} if {quick} else {otherwise}))", is_count=True)
        return Pair(f"({no}environment.within({self.boxed(item, frame)}, {base.boxed}))", is_count=True)

    def pair_And(self, node: nodes.And, frame: Frame) -> Pair:
        left, right = self.pair(node.left, frame).stored, self.pair(node.right, frame).stored
        first = self.temporary_identifier()
        return self._either(f"({right.code} if ({first} := {left.code}) else {first})", first, right, left)

    def pair_Or(self, node: nodes.Or, frame: Frame) -> Pair:
        left, right = self.pair(node.left, frame).stored, self.pair(node.right, frame).stored
        first = self.temporary_identifier()
        return self._either(f"({first} if ({first} := {left.code}) else {right.code})", first, left, right)

    def pair_Not(self, node: nodes.Not, frame: Frame) -> Pair:
        return Pair(self.condition(node, frame), is_count=True)

    def pair_CondExpr(self, node: nodes.CondExpr, frame: Frame) -> Pair:
        frame = frame.soft()
        first = self.pair(node.expr1, frame).stored
        if node.expr2 is not None:
            second = self.pair(node.expr2, frame).stored
        else:
            said = (
                f"the inline if-expression on {self.position(node)} evaluated to false and no else section was defined."
            )
            second = Pair(f"cond_expr_undefined({said!r})")
        test = self.temporary_identifier()
        code = f"({first.code} if ({test} := {self.condition(node.test, frame)}) else {second.code})"
        return self._either(code, test, first, second)

    def _either(self, code: str, test: str, first: Pair, second: Pair) -> Pair:
        """The pair of a value that is the first where `test` is true, else the second."""
        counts = first.is_count and second.is_count
        if first.origin == "None" and second.origin == "None":
            return Pair(code, is_count=counts)
        return Pair(
            code,
            f"({first.origin} if {test} else {second.origin})",
            f"({first.given} if {test} else {second.given})",
        )

    def _counts(self, node: nodes.BinExpr, word: str, frame: Frame) -> Pair | None:
        left, right = self.pair(node.left, frame), self.pair(node.right, frame)
        if left.is_count and right.is_count:
            return Pair(f"({left.code} {word} {right.code})", is_count=True)
        return None

    def pair_Sub(self, node: nodes.Sub, frame: Frame) -> Pair | None:
        return self._counts(node, "-", frame)

    def pair_Mod(self, node: nodes.Mod, frame: Frame) -> Pair | None:
        by = node.right
        return self._counts(node, "%", frame) if isinstance(by, nodes.Const) and by.value else None

    def pair_Add(self, node: nodes.Add, frame: Frame) -> Pair:
        parts = [self.pair(part, frame) for part in flattened(node)]
        if all(part.is_count for part in parts):
            return Pair(f"({' + '.join(part.code for part in parts)})", is_count=True)
        return Pair(f"environment.add({', '.join(part.boxed for part in parts)})")

    def pair_Concat(self, node: nodes.Concat, frame: Frame) -> Pair:
        return Pair(f"environment.concat(({', '.join(self.boxed(part, frame) for part in node.nodes)},))")


_FOLDED: Final = (
    *(nodes.Filter, nodes.Test, nodes.Compare, nodes.CondExpr, nodes.And, nodes.Or, nodes.Not, nodes.Pos, nodes.Neg),
    *(nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow),
)
"""Expressions that are computed while compiling, where they are constant."""


def _writing_pairs(name: str) -> Callable[..., None]:
    """A visitor that writes an expression of this kind as one value."""

    def visit(self: Expressions, node: Any, frame: Frame, **options: Any) -> None:
        if options.get("forward_caller"):
            self.write_call(node, frame, {"caller": "caller"})
        elif getattr(node, "ctx", "load") != "load":
            super(Expressions, self).visit_Name(node, frame)
        else:
            self.write(self.boxed(node, frame))

    return visit


for _name in [name.removeprefix("pair_") for name in vars(Expressions) if name.startswith("pair_")]:
    setattr(Expressions, f"visit_{_name}", _writing_pairs(_name))
