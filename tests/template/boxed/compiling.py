"""How a chat template is compiled: Jinja's code generator, so that what is printed keeps its trace.

- What is printed is handed over as it is, not turned into a plain ``str`` first.
- Loops tell the trace whose turn is being written (`mark_turns`).
- Comparisons, sums, slices and containers go through the environment, which keeps their trace and charges for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, operators

DICT_ATTRIBUTES: Final = frozenset(dir(dict))
_LITERALS: Final = (nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair)
_MARKING_HOOKS: Final = frozenset({"turn", "leave", "assigned"})


def _flatten(node: nodes.Expr, kind: type[nodes.Expr]) -> list[nodes.Expr]:
    if type(node) is kind and isinstance(node, nodes.BinExpr):
        return [*_flatten(node.left, kind), node.right]
    return [node]


def _spelled_out(node: nodes.Node) -> int:
    """The bytes of a container that a template spells out, about: each item, and each container in it."""
    if isinstance(node, nodes.Const):
        return _constant_size(node.value)
    if not isinstance(node, _LITERALS):
        return 0
    items = list(node.iter_child_nodes())
    return 64 + 16 * len(items) + sum(map(_spelled_out, items))


def _constant_size(value: Any) -> int:
    if isinstance(value, dict):
        return 64 + sum(16 + _constant_size(key) + _constant_size(item) for key, item in value.items())
    return 64 + sum(16 + _constant_size(item) for item in value) if isinstance(value, (list, tuple)) else 0


class TracingGenerator(CodeGenerator):
    """Generates code that prints traced values instead of strings."""

    _pays = True

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
            self._wrapped("" if isinstance(node, nodes.Concat) else "environment.summands", parts, frame)
        else:
            self._emit_start(frame, "yield ", ".append(", node)
            self.visit(node, frame)
        if frame.buffer is not None:
            self.write(")")

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        self._wrapped("environment.add", _flatten(node, nodes.Add), frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self._wrapped("environment.concat(", node.nodes, frame)
        self.write(")")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        """What is compared is weighed first, unless it is compared with a constant, which costs next to nothing."""
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        within = any(operand.op in ("in", "notin") for operand in node.ops)
        if _fixed(operands[-1]) if within else any(map(_scalar, operands)) and len(operands) == 2:
            kept, self._pays = self._pays, not within  # what is looked into is gone again at once
            super().visit_Compare(node, frame)
            self._pays = kept
        elif within and len(operands) == 2:
            self.write("(not " if node.ops[0].op == "notin" else "(")
            self._wrapped("environment.within", operands, frame)
            self.write(")")
        else:
            self.write("(")
            self._wrapped("environment.weighed", operands[:1], frame)
            for operand in node.ops:
                self.write(f" {operators[operand.op]} ")
                self._wrapped("environment.weighed", [operand.expr], frame)
            self.write(")")

    def _wrapped(self, function: str, parts: list[nodes.Expr], frame: Frame) -> None:
        self.write(f"{function}(")
        for part in parts:
            self.visit(part, frame)
            self.write(", ")
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._wrapped("environment.sliced", [node.node], frame)
            self.write("[")
            self.visit(node.arg, frame)
            self.write("]")
        else:
            super().visit_Getitem(node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._paid(node, lambda: super(TracingGenerator, self).visit_List(node, frame))

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load" and node.items:
            self._paid(node, lambda: super(TracingGenerator, self).visit_Tuple(node, frame))
        else:
            super().visit_Tuple(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._paid(node, lambda: self._write_dict(node, frame))

    def _paid(self, node: nodes.Expr, write: Callable[[], None]) -> None:
        """A container that is spelled out is made anew each time it is reached, and paid for then."""
        if not self._pays:
            write()
            return
        self.write(f"environment.spelled({_spelled_out(node)}, ")
        write()
        self.write(")")

    def _write_dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("{")
        for index, item in enumerate(node.items):
            if index:
                self.write(", ")
            if _scalar(item.key):
                self.visit(item.key, frame)
            else:
                self._wrapped("environment.key", [item.key], frame)
            self.write(": ")
            self.visit(item.value, frame)
        self.write("}")

    def write_commons(self) -> None:
        super().write_commons()
        self.writeline("tt_dict, tt_types, tt_get = environment.fast_access")

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:
        """``message.role``: where the field was looked at before, it is at hand without a call."""
        if node.attr in DICT_ATTRIBUTES:
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


def _scalar(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.Const)


def _fixed(node: nodes.Expr) -> bool:
    """A constant, or a list of constants, as it stands in the template."""
    return _scalar(node) or (isinstance(node, (nodes.List, nodes.Tuple)) and all(map(_scalar, node.items)))


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
                if child.test is not None:  # a round that the test skips is a round
                    child.test = nodes.And(nodes.EnvironmentAttribute("round"), child.test)
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
