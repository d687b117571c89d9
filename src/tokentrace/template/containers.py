"""How containers that a chat template spells out are compiled: made anew each time they are reached, and paid for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame

_LITERALS: Final = (nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair)


class Containers(CodeGenerator):
    """The part of the generator that knows lists, tuples and dicts."""

    _pays = True

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._paid(node, lambda: super(Containers, self).visit_List(node, frame))

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load" and node.items:
            self._paid(node, lambda: super(Containers, self).visit_Tuple(node, frame))
        else:
            super().visit_Tuple(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._paid(node, lambda: self._write_dict(node, frame))

    def visit_unpaid(self, node: nodes.Expr, frame: Frame) -> None:
        """A container that is gone again at once."""
        kept, self._pays = self._pays, False
        self.visit(node, frame)
        self._pays = kept

    def _paid(self, node: nodes.Expr, write: Callable[[], None]) -> None:
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
            if is_constant(item.key):
                self.visit(item.key, frame)
            else:
                self.write("environment.key(")
                self.visit(item.key, frame)
                self.write(")")
            self.write(": ")
            self.visit(item.value, frame)
        self.write("}")


def is_constant(node: nodes.Expr) -> bool:
    """Whether an expression is a text, a number, a truth or none, as it stands in the template."""
    return isinstance(node, nodes.Const) and (node.value is None or isinstance(node.value, (str, int, float)))


def is_fixed(node: nodes.Expr) -> bool:
    """A constant, or a list of constants, as it stands in the template."""
    return is_constant(node) or (isinstance(node, (nodes.List, nodes.Tuple)) and all(map(is_constant, node.items)))


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
