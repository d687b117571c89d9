"""Whether a template asks for every reply in the same way, read off its syntax tree.

The generation prompt is what a template writes after the last turn, when its loop over the messages is done. It is the
same in every conversation if that text depends neither on messages nor on tools. The analysis follows names backwards:
an output depends on the names in it and in the tests and loops around it; a name depends on everything it is ever set
to, and on the tests and loops around that. Order is ignored, so it finds too many dependencies rather than too few.
State that names do not show proves nothing: a namespace that is set anew or inside a macro, a lazy filter whose result
is used up as it is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from jinja2 import nodes

from .sources import namespaces_of

_ASKED: Final = "add_generation_prompt"
_PURE: Final = frozenset({"dict", "namespace", "raise_exception", "range"})
"""Functions of the environment whose result depends on their arguments alone."""
_CHANGING: Final = frozenset({"messages", "tools", "documents", "loop", "caller"})
_STATEFUL: Final = frozenset(
    {"map", "select", "reject", "selectattr", "rejectattr", "slice", "batch", "unique", "random"}
)
"""Filters whose result is used up as it is read, or is not the same every time."""
_ELSEWHERE: Final = (nodes.Block, nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)

_LEAVING: Final = (nodes.Break, nodes.Continue)

Parts = tuple[nodes.Node, ...]


def asks_alike(tree: nodes.Template, functions: Collection[str]) -> bool:
    """True if the generation prompt provably depends on nothing but the variables that a renderer is made with.

    `functions` are the names that the environment defines.
    """
    namespaces = namespaces_of(tree)
    if next(tree.find_all(_ELSEWHERE), None) is not None or not _has_plain_namespaces(tree, namespaces):
        return False
    reading = _Reading(namespaces, _unclear(tree, namespaces))
    reading.read(tree.body, ())
    turns = [loop for loop in reading.loops if reading.has_turns(loop.node)]
    if not turns:
        return False
    inside = [any(loop.start <= at < loop.stop for loop in turns) for at in range(len(reading.outputs))]
    if any(reading.asks_in(loop.node) for loop in turns):
        return False
    after = [reading.reach(parts) for at, parts in enumerate(reading.outputs) if at >= turns[0].stop and not inside[at]]
    is_asked = any(name.name == _ASKED for name in tree.find_all(nodes.Name))
    changing = _CHANGING.union(functions).difference(_PURE)
    return is_asked == any(_ASKED in names for names in after) and all(names.isdisjoint(changing) for names in after)


def _has_plain_namespaces(tree: nodes.Template, namespaces: frozenset[str]) -> bool:
    """True if all attributes of namespaces are set by their name, and none through another name of the namespace."""
    calls = (call for call in tree.find_all(nodes.Call) if getattr(call.node, "name", "") == "namespace")
    by_name = all(not (call.args or call.dyn_args or call.dyn_kwargs) for call in calls)
    return by_name and all(target.name in namespaces for target in tree.find_all(nodes.NSRef))


def _unclear(tree: nodes.Template, namespaces: frozenset[str]) -> frozenset[str]:
    """Namespaces that are made more than once, or set inside of a macro: who calls it does not show in the names."""
    targets = Counter(name.name for name in tree.find_all(nodes.Name) if name.ctx == "store")
    macros = tree.find_all((nodes.Macro, nodes.CallBlock))
    inside = {target.name for macro in macros for target in macro.find_all(nodes.NSRef)}
    return frozenset(inside.union(name for name in namespaces if targets[name] > 1))


@dataclass(frozen=True, slots=True)
class _Loop:
    """A loop that prints the outputs from `start` to `stop`, and is in no other loop."""

    node: nodes.For
    start: int
    stop: int


@dataclass(slots=True)
class _Reading:
    """What the statements of a template print and set, each with the tests and loops around it."""

    namespaces: frozenset[str]
    unclear: frozenset[str]
    outputs: list[Parts] = field(default_factory=list)
    loops: list[_Loop] = field(default_factory=list)
    sources: dict[str, list[Parts]] = field(default_factory=dict)
    """What each name depends on; an attribute of a namespace is a name of its own."""

    def read(self, body: Iterable[nodes.Node], around: Parts, *, in_loop: bool = False) -> None:
        for node in body:
            match node:
                case nodes.Output():
                    self.outputs += [(part, *around) for part in node.nodes]
                case nodes.Assign():
                    self._set(node.target, (node.node, *around))
                case nodes.If():
                    tests = around
                    for branch in (node, *node.elif_):  # a branch depends on its test and on those before it
                        tests = (branch.test, *tests)
                        self.read(branch.body, tests, in_loop=in_loop)
                    self.read(node.else_, tests, in_loop=in_loop)
                case nodes.For():
                    self._read_loop(node, around, in_loop)
                case nodes.Macro() | nodes.AssignBlock() | nodes.CallBlock() | nodes.FilterBlock():
                    self._read_buffer(node, around, in_loop)
                case nodes.With():
                    for target, value in zip(node.targets, node.values, strict=True):
                        self._set(target, (value, *around))
                    self.read(node.body, around, in_loop=in_loop)
                case _:
                    self.read(getattr(node, "body", ()), around, in_loop=in_loop)

    def _read_loop(self, node: nodes.For, around: Parts, in_loop: bool) -> None:
        leaves = next(node.find_all(_LEAVING), None) is not None
        leaving = [one.test for one in node.find_all(nodes.If)] if leaves else []
        inner = tuple(part for part in (node.iter, node.test, *leaving, *around) if part is not None)
        self._set(node.target, inner)
        start = len(self.outputs)
        self.read((*node.body, *node.else_), inner, in_loop=True)
        if len(self.outputs) > start and not in_loop:
            self.loops.append(_Loop(node, start, len(self.outputs)))

    def _read_buffer(self, node: nodes.Node, around: Parts, in_loop: bool) -> None:
        """A buffer depends on everything in it. A macro and a set block print only where their name is read."""
        outputs, loops = len(self.outputs), len(self.loops)
        self.read(getattr(node, "body", ()), around, in_loop=in_loop)
        del self.outputs[outputs:], self.loops[loops:]
        if isinstance(node, (nodes.Macro, nodes.AssignBlock)):
            self._set(nodes.Name(node.name, "store") if isinstance(node, nodes.Macro) else node.target, (node, *around))
        else:
            self.outputs.append((node, *around))

    def _set(self, target: nodes.Node, parts: Parts) -> None:
        for name in _with_children(target):
            if isinstance(name, nodes.NSRef):
                for key in (f"{name.name}.{name.attr}", name.name):
                    self.sources.setdefault(key, []).append(parts)
            elif isinstance(name, nodes.Name):
                value, *around = parts
                for pair in value.kwargs if name.name in self.namespaces and isinstance(value, nodes.Call) else ():
                    self.sources.setdefault(f"{name.name}.{pair.key}", []).append((pair.value, *around))
                self.sources.setdefault(name.name, []).append(parts)

    def has_turns(self, loop: nodes.For) -> bool:
        """True if a loop runs over some of the messages, one in each round."""
        is_plain = isinstance(loop.target, nodes.Name) and not loop.else_ and not loop.recursive
        return is_plain and self._are_messages(loop.iter, frozenset())

    def asks_in(self, loop: nodes.For) -> bool:
        """True if a loop may print part of the generation prompt: it reads more than ``not add_generation_prompt``."""
        asking: set[str] = {_ASKED}
        grows = True
        while grows:
            more = {name for name, sources in self.sources.items() if any(_reads(parts, asking) for parts in sources)}
            grows = not more <= asking
            asking |= more
        return _reads((loop,), asking)

    def _are_messages(self, items: nodes.Node, names: frozenset[str]) -> bool:
        """True if an expression is the list of messages, a slice of it, or a name that is set to nothing else."""
        if isinstance(items, nodes.CondExpr):
            return all(one is not None and self._are_messages(one, names) for one in (items.expr1, items.expr2))
        if isinstance(items, nodes.Getitem) and isinstance(items.arg, nodes.Slice):
            return self._are_messages(items.node, names)
        if not isinstance(items, nodes.Name) or items.name in names:
            return isinstance(items, nodes.Name)
        sources = self.sources.get(items.name, ())
        is_given = items.name == "messages"
        return (is_given or bool(sources)) and all(self._are_messages(one[0], names | {items.name}) for one in sources)

    def reach(self, parts: Iterable[nodes.Node]) -> set[str]:
        """The names that something depends on."""
        reached: set[str] = set()
        queue = list(parts)
        while queue:
            for name in self._names(queue.pop()):
                if name not in reached:
                    reached.add(name)
                    queue += [part for some in self.sources.get(name, ()) for part in some]
        return reached

    def _names(self, node: nodes.Node) -> Iterator[str]:
        attributes: set[int] = set()
        for part in _with_children(node):
            if isinstance(part, (nodes.Name, nodes.NSRef)) and part.name in self.unclear:
                yield "messages"
            if isinstance(part, (nodes.Name, nodes.NSRef)) and id(part) not in attributes:
                yield part.name
            elif isinstance(part, nodes.Filter) and part.name in _STATEFUL:
                yield "messages"  # as if it could be anything
            elif isinstance(part, (nodes.Getattr, nodes.Getitem)) and isinstance(part.node, nodes.Name):
                key = part.attr if isinstance(part, nodes.Getattr) else getattr(part.arg, "value", None)
                if (name := f"{part.node.name}.{key}") in self.sources:
                    attributes.add(id(part.node))
                    yield name


def _reads(parts: Iterable[nodes.Node], names: Collection[str]) -> bool:
    """True if one of these names is read, otherwise than in ``not add_generation_prompt``."""
    for part in parts:
        negated = {id(one.node) for one in part.find_all(nodes.Not) if getattr(one.node, "name", "") == _ASKED}
        negated |= {id(part.node)} if isinstance(part, nodes.Not) else set()
        for name in _with_children(part):
            if isinstance(name, nodes.Name) and name.ctx == "load" and name.name in names and id(name) not in negated:
                return True
    return False


def _with_children(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    yield from node.find_all(nodes.Node)
