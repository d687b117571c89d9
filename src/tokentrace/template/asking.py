"""Whether a template asks for every reply in the same way, read off its syntax tree.

The generation prompt is always the same if it depends neither on messages nor on tools. An output
depends on the names in it and in the tests and loops around it; a name on everything it is ever set
to, with the tests and loops there. Ignoring order can only add dependencies. State that names do
not show prevents the proof.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from jinja2 import nodes

from .syntax import leaves, names_in, with_children

_PROMPT = "add_generation_prompt"
_NO_PROMPT = "not add_generation_prompt"
_PURE = frozenset({"dict", "namespace", "raise_exception", "range"})
"""Functions of the environment whose result depends only on their arguments."""
_CHANGING = frozenset({"messages", "tools", "documents", "loop", "caller"})
_STATEFUL = frozenset(
    {"map", "select", "reject", "selectattr", "rejectattr", "slice", "batch", "unique", "random"}
)
"""Filters whose result can be read only once, or varies."""
_UNUSUAL = (nodes.With, nodes.CallBlock, nodes.FilterBlock)
"""Statements that prevent the proof."""

Names = frozenset[str]


def asks_alike(tree: nodes.Template, functions: Collection[str]) -> bool:
    """True if the generation prompt provably depends on variables only."""
    if next(tree.find_all(_UNUSUAL), None) is not None or not _has_plain_namespaces(tree):
        return False
    reading = _Reading()
    reading.read(tree.body, Names())
    turns = [(loop, outputs) for loop, outputs in reading.loops if reading.has_turns(loop)]
    if not turns or any(_PROMPT in reading.reach(_names(loop)) for loop, _ in turns):
        return False
    in_turns = {at for _, outputs in turns for at in outputs}
    after = range(turns[0][1].stop, len(reading.outputs))
    tails = [reading.reach(reading.outputs[at]) for at in after if at not in in_turns]
    changing = _CHANGING.union(functions) - _PURE
    has_prompt = any(not names.isdisjoint((_PROMPT, _NO_PROMPT)) for names in tails)
    return (_PROMPT in names_in(tree)) == has_prompt and all(names.isdisjoint(changing) for names in tails)


def _has_plain_namespaces(tree: nodes.Template) -> bool:
    """True if each namespace has one name and is created with keyword arguments only."""
    stores = Counter(name.name for name in tree.find_all(nodes.Name) if name.ctx != "load")
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.node, nodes.Call) and getattr(assign.node.node, "name", "") == "namespace":
            stores.subtract(names_in(assign.target))
    calls = [call for call in tree.find_all(nodes.Call) if getattr(call.node, "name", "") == "namespace"]
    return not any(call.args or call.dyn_args or call.dyn_kwargs for call in calls) and all(
        target.name in stores and not stores[target.name] for target in tree.find_all(nodes.NSRef)
    )


def _names(node: nodes.Node) -> Names:
    names: set[str] = set()
    negated: set[int] = set()
    for part in with_children(node):
        if isinstance(part, nodes.Not) and getattr(part.node, "name", "") == _PROMPT:
            negated.add(id(part.node))
            names.add(_NO_PROMPT)
        elif isinstance(part, nodes.Filter) and part.name in _STATEFUL:
            names.add("messages")  # it may depend on anything
        elif isinstance(part, (nodes.Name, nodes.NSRef)) and id(part) not in negated:
            names.add(part.name)
    return Names(names)


@dataclass(slots=True)
class _Reading:
    outputs: list[Names] = field(default_factory=list)
    loops: list[tuple[nodes.For, range]] = field(default_factory=list)
    """The outermost loops that print, each with its outputs."""
    sources: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The names that each name depends on."""
    values: defaultdict[str, list[nodes.Node]] = field(default_factory=lambda: defaultdict(list))

    def read(self, body: Iterable[nodes.Node], around: Names, *, in_loop: bool = False) -> None:
        for node in body:
            match node:
                case nodes.Output():
                    self.outputs += [_names(part) | around for part in node.nodes]
                case nodes.Assign():
                    self._set(node.target, node.node, around)
                case nodes.If():
                    tests = around
                    for branch in (node, *node.elif_):
                        # a branch depends on its test and the tests before it
                        tests |= _names(branch.test)
                        self.read(branch.body, tests, in_loop=in_loop)
                    self.read(node.else_, tests, in_loop=in_loop)
                case nodes.For():
                    leaving = [one.test for one in node.find_all(nodes.If)] if leaves(node.body) else []
                    read = [node.iter, *leaving, *([] if node.test is None else [node.test])]
                    inner = around.union(*map(_names, read))
                    self._set(node.target, node.iter, inner)
                    start = len(self.outputs)
                    self.read((*node.body, *node.else_), inner, in_loop=True)
                    if len(self.outputs) > start and not in_loop:
                        self.loops.append((node, range(start, len(self.outputs))))
                case nodes.Macro() | nodes.AssignBlock():  # prints only where its name is read
                    outputs, loops = len(self.outputs), len(self.loops)
                    self.read(node.body, around, in_loop=in_loop)
                    del self.outputs[outputs:], self.loops[loops:]
                    if isinstance(node, nodes.AssignBlock):
                        self._set(node.target, node, around)
                        continue
                    self._set(nodes.Name(node.name, "store"), node, around)
                    for target in node.find_all(nodes.NSRef):  # whoever calls the macro
                        self.sources[target.name].add("messages")
                case _:
                    self.read(getattr(node, "body", ()), around, in_loop=in_loop)

    def _set(self, target: nodes.Node, value: nodes.Node, around: Names) -> None:
        for part in with_children(target):
            if isinstance(part, (nodes.Name, nodes.NSRef)):
                self.sources[part.name] |= _names(value) | around
                self.values[part.name].append(value)

    def has_turns(self, loop: nodes.For) -> bool:
        """True if a loop runs over some or all of the messages, one per round."""
        is_plain = isinstance(loop.target, nodes.Name) and not loop.else_ and not loop.recursive
        return is_plain and self._are_messages(loop.iter, Names())

    def _are_messages(self, items: nodes.Node | None, names: Names) -> bool:
        """True for the list of messages, a slice of it, or a name that is set to nothing else."""
        if isinstance(items, nodes.CondExpr):
            return all(self._are_messages(one, names) for one in (items.expr1, items.expr2))
        if isinstance(items, nodes.Getitem) and isinstance(items.arg, nodes.Slice):
            return self._are_messages(items.node, names)
        if not isinstance(items, nodes.Name):
            return False
        values = self.values[items.name]
        return items.name in names or (
            (items.name == "messages" or bool(values))
            and all(self._are_messages(value, names | {items.name}) for value in values)
        )

    def reach(self, names: Iterable[str]) -> set[str]:
        reached: set[str] = set()
        queue = set(names)
        while queue:
            reached |= queue
            queue = {source for name in queue for source in self.sources[name]} - reached
        return reached
