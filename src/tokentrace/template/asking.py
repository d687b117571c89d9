"""Whether a template asks for every reply in the same way, read off its syntax tree.

The generation prompt is what a template writes after its loop over the messages. It is the same in every conversation
if that text depends neither on messages nor on tools. An output depends on the names in it and in the tests and loops
around it; a name depends on everything it is ever set to, and on what is around that. Order is ignored, so there are
too many dependencies rather than too few. State that names do not show proves nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from jinja2 import nodes

from .syntax import leaves, names_in, with_children

_PROMPT: Final = "add_generation_prompt"
_NO_PROMPT: Final = "not add_generation_prompt"
_PURE: Final = frozenset({"dict", "namespace", "raise_exception", "range"})
"""Functions of the environment whose result depends on their arguments alone."""
_CHANGING: Final = frozenset({"messages", "tools", "documents", "loop", "caller"})
_STATEFUL: Final = frozenset(
    {"map", "select", "reject", "selectattr", "rejectattr", "slice", "batch", "unique", "random"}
)
"""Filters whose result is used up as it is read, or is not the same every time."""
_UNUSUAL: Final = (nodes.With, nodes.CallBlock, nodes.FilterBlock)
"""Statements that are not followed: where there are any, nothing is proven."""

Names = frozenset[str]
"""Names of variables. ``"ns.x"`` is an attribute of one; `_NO_PROMPT` is ``not add_generation_prompt``."""


def asks_alike(tree: nodes.Template, functions: Collection[str]) -> bool:
    """True if the generation prompt provably depends on nothing but the variables that a renderer is made with.

    `functions` are the names that the environment defines.
    """
    calls = [call for call in tree.find_all(nodes.Call) if getattr(call.node, "name", "") == "namespace"]
    namespaces = _namespaces(tree)
    is_plain = all(not (call.args or call.dyn_args or call.dyn_kwargs) for call in calls) and all(
        target.name in namespaces for target in tree.find_all(nodes.NSRef)
    )
    if next(tree.find_all(_UNUSUAL), None) is not None or not is_plain:
        return False
    reading = _Reading(namespaces, _unclear(tree, namespaces))
    reading.read(tree.body, Names())
    turns = [loop for loop in reading.loops if reading.has_turns(loop.node)]
    if not turns or any(reading.may_write_prompt(loop.node) for loop in turns):
        return False
    in_turns = {at for loop in turns for at in range(loop.start, loop.stop)}
    outputs = [names for at, names in enumerate(reading.outputs) if at >= turns[0].stop and at not in in_turns]
    after = list(map(reading.reach, outputs))
    changing = _CHANGING.union(functions) - _PURE
    has_prompt = any(not names.isdisjoint((_PROMPT, _NO_PROMPT)) for names in after)
    return (_PROMPT in names_in(tree)) == has_prompt and all(names.isdisjoint(changing) for names in after)


def _namespaces(tree: nodes.Template) -> Names:
    """Variables that are set to ``namespace(…)``, and to nothing else anywhere."""
    stores = Counter(name.name for name in tree.find_all(nodes.Name) if name.ctx != "load")
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.node, nodes.Call) and getattr(assign.node.node, "name", "") == "namespace":
            stores.subtract(names_in(assign.target))
    return Names(name for name, count in stores.items() if count == 0)


def _unclear(tree: nodes.Template, namespaces: Names) -> Names:
    """Namespaces that are made more than once, or set inside a macro: names do not show who calls it."""
    stores = Counter(name.name for name in tree.find_all(nodes.Name) if name.ctx == "store")
    inside = {target.name for macro in tree.find_all(nodes.Macro) for target in macro.find_all(nodes.NSRef)}
    return Names(inside.union(name for name in namespaces if stores[name] > 1))


@dataclass(frozen=True, slots=True)
class _Loop:
    """A loop that prints the outputs from `start` to `stop`, and is in no other loop."""

    node: nodes.For
    start: int
    stop: int


@dataclass(slots=True)
class _Reading:
    """What the statements of a template print and set, and the names that each depends on."""

    namespaces: Names
    unclear: Names
    outputs: list[Names] = field(default_factory=list)
    loops: list[_Loop] = field(default_factory=list)
    sources: dict[str, set[str]] = field(default_factory=dict)
    """The names that each name depends on; an attribute of a namespace is a name of its own."""
    values: dict[str, list[nodes.Node]] = field(default_factory=dict)
    """The expressions that each name is set to."""

    def read(self, body: Iterable[nodes.Node], around: Names, *, in_loop: bool = False) -> None:
        """Read statements; `around` are the names in the tests and loops around them."""
        for node in body:
            match node:
                case nodes.Output():
                    self.outputs += [self._names(part) | around for part in node.nodes]
                case nodes.Assign():
                    self._set(node.target, node.node, around)
                case nodes.If():
                    tests = around
                    for branch in (node, *node.elif_):  # a branch depends on its test and on those before it
                        tests |= self._names(branch.test)
                        self.read(branch.body, tests, in_loop=in_loop)
                    self.read(node.else_, tests, in_loop=in_loop)
                case nodes.For():
                    self._read_loop(node, around, in_loop)
                case nodes.Macro() | nodes.AssignBlock():  # prints only where its name is read
                    outputs, loops = len(self.outputs), len(self.loops)
                    self.read(node.body, around, in_loop=in_loop)
                    del self.outputs[outputs:], self.loops[loops:]
                    target = nodes.Name(node.name, "store") if isinstance(node, nodes.Macro) else node.target
                    self._set(target, node, around)
                case _:
                    self.read(getattr(node, "body", ()), around, in_loop=in_loop)

    def _read_loop(self, node: nodes.For, around: Names, in_loop: bool) -> None:
        tests = [one.test for one in node.find_all(nodes.If)] if leaves(node.body) else []
        inner = around.union(*map(self._names, [node.iter, *tests, *([node.test] if node.test is not None else [])]))
        self._set(node.target, node.iter, inner)
        start = len(self.outputs)
        self.read((*node.body, *node.else_), inner, in_loop=True)
        if len(self.outputs) > start and not in_loop:
            self.loops.append(_Loop(node, start, len(self.outputs)))

    def _set(self, target: nodes.Node, value: nodes.Node, around: Names) -> None:
        names = self._names(value) | around
        for part in with_children(target):
            if isinstance(part, nodes.NSRef):
                self.sources.setdefault(f"{part.name}.{part.attr}", set()).update(names)
            if isinstance(part, (nodes.Name, nodes.NSRef)):
                self.sources.setdefault(part.name, set()).update(names)
                self.values.setdefault(part.name, []).append(value)
                if part.name in self.namespaces and isinstance(part, nodes.Name) and isinstance(value, nodes.Call):
                    for pair in value.kwargs:
                        self.sources.setdefault(f"{part.name}.{pair.key}", set()).update(
                            self._names(pair.value), around
                        )

    def has_turns(self, loop: nodes.For) -> bool:
        """True if a loop runs over some of the messages, one in each round."""
        is_plain = isinstance(loop.target, nodes.Name) and not loop.else_ and not loop.recursive
        return is_plain and self._are_messages(loop.iter, Names())

    def _are_messages(self, items: nodes.Node, names: Names) -> bool:
        """True if an expression is the list of messages, a slice of it, or a name that is set to nothing else."""
        if isinstance(items, nodes.CondExpr):
            return all(one is not None and self._are_messages(one, names) for one in (items.expr1, items.expr2))
        if isinstance(items, nodes.Getitem) and isinstance(items.arg, nodes.Slice):
            return self._are_messages(items.node, names)
        if not isinstance(items, nodes.Name):
            return False
        if items.name in names:
            return True
        values = self.values.get(items.name, [])
        is_list = items.name == "messages" or bool(values)
        return is_list and all(self._are_messages(value, names | {items.name}) for value in values)

    def may_write_prompt(self, loop: nodes.For) -> bool:
        """True if a loop may print part of the generation prompt: it reads more than ``not add_generation_prompt``."""
        return _PROMPT in self.reach(self._names(loop))

    def reach(self, names: Iterable[str]) -> set[str]:
        """The names that some names depend on, and these themselves."""
        reached: set[str] = set()
        queue = list(names)
        while queue:
            name = queue.pop()
            name = name if name in self.sources else name.partition(".")[0]
            if name not in reached:
                reached.add(name)
                queue += self.sources.get(name, ())
                queue += ["messages"] if name.partition(".")[0] in self.unclear else []
        return reached

    def _names(self, node: nodes.Node) -> Names:
        return Names(self._names_of(node))

    def _names_of(self, node: nodes.Node) -> Iterator[str]:
        skipped: set[int] = set()
        for part in with_children(node):
            if isinstance(part, nodes.Not) and getattr(part.node, "name", "") == _PROMPT:
                skipped.add(id(part.node))
                yield _NO_PROMPT
            elif isinstance(part, nodes.Filter) and part.name in _STATEFUL:
                yield "messages"  # as if it could be anything
            elif isinstance(part, (nodes.Getattr, nodes.Getitem)) and isinstance(part.node, nodes.Name):
                key = part.attr if isinstance(part, nodes.Getattr) else getattr(part.arg, "value", None)
                if isinstance(key, str):
                    skipped.add(id(part.node))
                    yield f"{part.node.name}.{key}"
            elif isinstance(part, (nodes.Name, nodes.NSRef)) and id(part) not in skipped:
                yield part.name
