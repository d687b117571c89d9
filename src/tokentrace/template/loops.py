"""What the loops of a chat template ask for: fields of their variable, their counts, their neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from jinja2 import nodes

from .sources import field_of

_COUNTS: Final = frozenset(("index", "index0", "revindex", "revindex0", "first", "last", "length"))
"""What a loop knows without an object of its own."""
_NEIGHBOURS: Final = frozenset(("previtem", "nextitem"))
"""What a loop over single items knows, too; a loop over keys and values has its items in another form."""


def fields_read(node: nodes.For) -> dict[str, int]:
    """The fields of a loop's variable that its body names, and how often."""
    found: dict[str, int] = {}
    for body in node.body:
        for access in body.find_all((nodes.Getattr, nodes.Getitem)):
            if isinstance(access.node, nodes.Name) and access.node.name == node.target.name:  # type: ignore[attr-defined]
                name = field_of(access)
                if name is not None:
                    found[name] = found.get(name, 0) + 1
    return found


def targets(node: nodes.For) -> list[nodes.Name] | None:
    """The variables of a loop that may run over plain items."""
    if isinstance(node.target, nodes.Name):
        return [node.target]
    items = node.target.items if isinstance(node.target, nodes.Tuple) else []
    names = [name for name in items if isinstance(name, nodes.Name)]
    return names if len(items) == len(names) == 2 and items_of(node.iter) is not None else None


def items_of(node: nodes.Node) -> nodes.Expr | None:
    """The ``x`` of ``x.items()`` or ``x|items``."""
    if isinstance(node, nodes.Filter) and node.name == "items" and not (node.args or node.kwargs or node.dyn_args):
        return node.node
    plain = isinstance(node, nodes.Call) and not (node.args or node.kwargs or node.dyn_args or node.dyn_kwargs)
    if plain and isinstance(node.node, nodes.Getattr) and node.node.attr == "items":  # type: ignore[attr-defined]
        return node.node.node  # type: ignore[attr-defined]
    return None


def _loop_names(node: nodes.Node) -> Iterator[nodes.Node]:
    """The places below `node` where its ``loop`` is read: as ``loop.something``, or (a bare name) in another way."""
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.For):  # its body has a ``loop`` of its own
            parts = [child.iter, *child.else_] + ([child.test] if child.test is not None else [])
            yield from _loop_names(nodes.Scope(parts))
        elif (
            isinstance(child, nodes.Getattr) and isinstance(child.node, nodes.Name) and child.node.name == "loop"
        ) or (isinstance(child, nodes.Name) and child.name == "loop"):
            yield child
        else:
            yield from _loop_names(child)


def leaves(body: Iterable[nodes.Node]) -> bool:
    """Whether statements break off, or continue, a loop that they stand in."""
    return any(
        isinstance(node, (nodes.Break, nodes.Continue))
        or leaves(node.else_ if isinstance(node, nodes.For) else node.iter_child_nodes())
        for node in body
    )


def _body(node: nodes.For) -> nodes.Node:
    return nodes.Scope(list(node.body))


def uses_loop(node: nodes.For) -> bool:
    return next(_loop_names(_body(node)), None) is not None


def counts_only(node: nodes.For) -> bool:
    """Whether a loop's body asks its ``loop`` for nothing but counts and neighbours."""
    if node.find(nodes.Block) is not None or any(_uses_loop_name(macro) for macro in node.find_all(nodes.Macro)):
        return False
    if any(name.name == "loop" and name.ctx == "store" for name in node.find_all(nodes.Name)):
        return False  # which Jinja refuses
    known = _COUNTS | _NEIGHBOURS if isinstance(node.target, nodes.Name) else _COUNTS
    return all(isinstance(found, nodes.Getattr) and found.attr in known for found in _loop_names(_body(node)))


def _uses_loop_name(node: nodes.Node) -> bool:
    return any(found.name == "loop" for found in node.find_all(nodes.Name))
