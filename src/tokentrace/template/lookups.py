"""The names that a template may look up in what it is given: those it reads before it has surely set them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import jinja2.meta
from jinja2 import nodes


def looked_up(tree: nodes.Template) -> set[str]:
    """The variables that a caller can set.

    Not a name that is always overwritten first, like the ``content`` of a loop that begins with ``{% set content %}``.
    Jinja counts a name that is set in one branch only, whether or not it is read outside of that branch.
    """
    reads = _Reads()
    reads.statements(tree.body, set())
    return jinja2.meta.find_undeclared_variables(tree) & reads.names


@dataclass(slots=True)
class _Reads:
    """Names that are read where they may not have been set. `known` are those that are set at a place."""

    names: set[str] = field(default_factory=set)

    def statements(self, body: Iterable[nodes.Node], known: set[str]) -> None:
        """Go through statements in order; adds to `known` what they set in any case."""
        for node in body:
            match node:
                case nodes.Assign():
                    self._read(node.node, known)
                    self._set(node.target, known)
                case nodes.If():
                    self._branches(node, known)
                case nodes.For():
                    self._read(node.iter, known)
                    inner = {*known, "loop", *_targets(node.target)}
                    self._read(node.test, inner)
                    self.statements(node.body, inner)
                    self.statements(node.else_, set(known))
                case nodes.With():
                    for value in node.values:
                        self._read(value, known)
                    self.statements(node.body, known.union(*map(_targets, node.targets)))
                case nodes.Macro() | nodes.CallBlock():
                    for part in (*node.defaults, getattr(node, "call", None)):
                        self._read(part, known)
                    known |= {node.name} if isinstance(node, nodes.Macro) else set()
                    own = {"caller", "kwargs", "varargs", *(name.name for name in node.args)}
                    self.statements(node.body, known | own)
                case nodes.AssignBlock() | nodes.FilterBlock():
                    self.statements(node.body, set(known))
                    self._read(node.filter, known)
                    if isinstance(node, nodes.AssignBlock):
                        self._set(node.target, known)
                case nodes.Scope():
                    self.statements(node.body, set(known))
                case _:
                    self._read(node, known)

    def _branches(self, node: nodes.If, known: set[str]) -> None:
        """A name is set after an ``if`` if every branch sets it that does not refuse the conversation."""
        ends: list[set[str]] = []
        for branch in (node, *node.elif_, None):
            inner = set(known)
            if branch is not None:
                self._read(branch.test, known)
            body = node.else_ if branch is None else branch.body
            self.statements(body, inner)
            ends += [] if any(map(_refuses, body)) else [inner]
        known |= set.intersection(*ends) if ends else set()

    def _set(self, target: nodes.Node, known: set[str]) -> None:
        if isinstance(target, nodes.NSRef):
            self.names |= {target.name} - known
        known |= _targets(target)

    def _read(self, node: nodes.Node | None, known: set[str]) -> None:
        for name in [] if node is None else [node, *node.find_all(nodes.Name)]:
            if isinstance(name, nodes.Name) and name.ctx == "load" and name.name not in known:
                self.names.add(name.name)


def _refuses(node: nodes.Node) -> bool:
    calls = node.nodes if isinstance(node, nodes.Output) else ()
    return any(isinstance(call, nodes.Call) and getattr(call.node, "name", "") == "raise_exception" for call in calls)


def _targets(target: nodes.Node) -> set[str]:
    return {name.name for name in [target, *target.find_all(nodes.Name)] if isinstance(name, nodes.Name)}
