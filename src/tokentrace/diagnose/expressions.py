"""Write Jinja expressions back as source text."""

from __future__ import annotations

from typing import Final

from jinja2 import nodes
from jinja2.compiler import operators

_BINARY: Final = {
    nodes.Add: "+",
    nodes.Sub: "-",
    nodes.Mul: "*",
    nodes.Div: "/",
    nodes.FloorDiv: "//",
    nodes.Mod: "%",
    nodes.Pow: "**",
    nodes.And: "and",
    nodes.Or: "or",
}
_WORDS: Final = {"notin": "not in", "in": "in"}


def source_text(node: nodes.Node | None) -> str:
    """Return the source of an expression, perhaps with other quotes, brackets and spaces."""
    match node:
        case None:
            return ""
        case nodes.Name() | nodes.NSRef():
            return node.name if isinstance(node, nodes.Name) else f"{node.name}.{node.attr}"
        case nodes.Const():
            return repr(node.value).lower() if node.value in (True, False, None) else repr(node.value)
        case nodes.TemplateData():
            return repr(node.data)
        case nodes.Getattr():
            return f"{_tight(node.node)}.{node.attr}"
        case nodes.Getitem():
            return f"{_tight(node.node)}[{source_text(node.arg)}]"
        case nodes.Slice():
            parts = [source_text(node.start), source_text(node.stop), source_text(node.step)]
            return ":".join(parts[: 3 if node.step else 2])
        case nodes.Not():
            return _negated(node.node)
        case nodes.Neg() | nodes.Pos():
            return f"{node.operator}{_tight(node.node)}"
        case nodes.Compare():
            operands = (f" {_WORDS.get(one.op, operators[one.op])} {_tight(one.expr)}" for one in node.ops)
            return _tight(node.expr) + "".join(operands)
        case nodes.Test():
            return f"{_tight(node.node)} is {node.name}{_arguments(node)}"
        case nodes.Filter():
            return f"{_tight(node.node)}|{node.name}{_arguments(node)}"
        case nodes.Call():
            return f"{_tight(node.node)}{_arguments(node) or '()'}"
        case nodes.CondExpr():
            other = f" else {source_text(node.expr2)}" if node.expr2 is not None else ""
            return f"{source_text(node.expr1)} if {source_text(node.test)}{other}"
        case nodes.Concat():
            return " ~ ".join(map(_tight, node.nodes))
        case nodes.List():
            return f"[{', '.join(map(source_text, node.items))}]"
        case nodes.Tuple():
            return f"({', '.join(map(source_text, node.items))})"
        case nodes.Dict():
            return "{" + ", ".join(f"{source_text(one.key)}: {source_text(one.value)}" for one in node.items) + "}"
    if isinstance(node, nodes.BinExpr):
        return f"{_tight(node.left)} {_BINARY[type(node)]} {_tight(node.right)}"
    return f"({type(node).__name__})"


def _negated(node: nodes.Node) -> str:
    if isinstance(node, nodes.Test):
        return f"{_tight(node.node)} is not {node.name}{_arguments(node)}"
    return f"not {_tight(node)}"


def _arguments(node: nodes.Call | nodes.Filter | nodes.Test) -> str:
    named = [f"{one.key}={source_text(one.value)}" for one in node.kwargs]
    arguments = [*map(source_text, node.args), *named]
    return f"({', '.join(arguments)})" if arguments else ""


def _tight(node: nodes.Node | None) -> str:
    """Return the source of an operand, in brackets if it needs them."""
    text = source_text(node)
    loose = isinstance(node, (nodes.And, nodes.Or, nodes.Not, nodes.CondExpr, nodes.Compare))
    return f"({text})" if loose else text
