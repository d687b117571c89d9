"""Questions about the syntax tree of a template."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

import jinja2.meta
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from ..errors import TemplateError

DICT_ATTRIBUTES = frozenset(dir(dict))
_COUNTS = frozenset(("index", "index0", "revindex", "revindex0", "first", "last", "length"))
_NEIGHBOURS = frozenset(("previtem", "nextitem"))
"""More of them, in a loop over single items."""


def with_children(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    yield from node.find_all(nodes.Node)


def names_in(node: nodes.Node) -> set[str]:
    return {name.name for name in with_children(node) if isinstance(name, nodes.Name)}


def summands(node: nodes.Node) -> list[nodes.Node]:
    """The summands of ``a + b + c``; adjacent constant texts are merged."""
    if not isinstance(node, nodes.Add):
        return [node]
    *parts, last = summands(node.left)
    if is_word(last) and is_word(node.right):
        return [*parts, nodes.Const(last.value + node.right.value, lineno=node.lineno)]
    return [*parts, last, node.right]


def key_of(node: nodes.Node) -> str:
    """The key of ``value.key`` or ``value["key"]``; empty for other expressions."""
    key = node.arg if isinstance(node, nodes.Getitem) else None
    name = key.value if isinstance(key, nodes.Const) else getattr(node, "attr", "")
    return name if type(name) is str else ""


def field_of(node: nodes.Node) -> str | None:
    """The field that an expression names; None if it may be a method."""
    name = key_of(node)
    return name if name and name not in DICT_ATTRIBUTES else None


def is_word(node: nodes.Node | None) -> TypeGuard[nodes.Const]:
    return isinstance(node, nodes.Const) and type(node.value) is str


def is_constant(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and (
        node.value is None or isinstance(node.value, (str, int, float))
    )


def json_options(node: nodes.Filter, context: nodes.EvalContext) -> tuple[Any, ...] | None:
    if node.args or node.dyn_args or node.dyn_kwargs:
        return None
    options: dict[str, Any] = {
        "ensure_ascii": False,
        "indent": None,
        "separators": None,
        "sort_keys": False,
    }
    for option in node.kwargs:
        try:
            options[str(option.key)] = option.value.as_const(context)
        except nodes.Impossible:
            return None
    ensure_ascii, indent, separators, sort_keys, *unknown = options.values()
    is_usual = type(indent) in (int, type(None)) and type(separators) in (tuple, type(None)) and not unknown
    return tuple(options.values()) if is_usual and type(ensure_ascii) is type(sort_keys) is bool else None


def has_arguments(node: nodes.Filter | nodes.Test | nodes.Call) -> bool:
    return bool(node.args or node.kwargs or node.dyn_args or node.dyn_kwargs)


def items_of(node: nodes.Node) -> nodes.Expr | None:
    """The ``x`` of ``x.items()`` or ``x|items``."""
    if not isinstance(node, (nodes.Filter, nodes.Call)) or has_arguments(node):
        return None
    if isinstance(node, nodes.Filter):
        return node.node if node.name == "items" else None
    return node.node.node if isinstance(node.node, nodes.Getattr) and node.node.attr == "items" else None


def plain_targets(node: nodes.For) -> list[nodes.Name] | None:
    """The variables of a loop that needs no loop object; None for a loop that does.

    It runs over single items or ``x.items()``, has no ``{% else %}``, and reads only counts and
    neighbours.
    """
    items = node.target.items if isinstance(node.target, nodes.Tuple) else [node.target]
    names = [name for name in items if isinstance(name, nodes.Name)]
    is_pair = len(items) == 2 and items_of(node.iter) is not None
    is_other = node.recursive or node.test is not None or node.else_
    if is_other or len(names) < len(items) or (len(items) > 1 and not is_pair):
        return None
    if any("loop" in names_in(macro) for macro in node.find_all(nodes.Macro)):
        return None
    if any(name.name == "loop" and name.ctx == "store" for name in node.find_all(nodes.Name)):
        return None  # Jinja refuses it
    plain = _COUNTS | _NEIGHBOURS if len(names) == 1 else _COUNTS
    uses = _uses_of_loop(nodes.Scope(list(node.body)))
    return names if all(isinstance(use, nodes.Getattr) and use.attr in plain for use in uses) else None


def _uses_of_loop(node: nodes.Node) -> Iterator[nodes.Node]:
    """The places where the ``loop`` of `node` is read: ``loop.something`` or the bare name."""
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.For):  # its body has its own ``loop``
            yield from _uses_of_loop(nodes.Scope([child.iter, *child.else_, *filter(None, [child.test])]))
        elif getattr(child.node if isinstance(child, nodes.Getattr) else child, "name", "") == "loop":
            yield child
        else:
            yield from _uses_of_loop(child)


def leaves(body: Iterable[nodes.Node]) -> bool:
    """True if statements break or continue a loop around them."""
    return any(
        isinstance(node, (nodes.Break, nodes.Continue))
        or leaves(node.else_ if isinstance(node, nodes.For) else node.iter_child_nodes())
        for node in body
    )


class Inliner(NodeTransformer):
    """Replaces ``{% block %}`` and ``{% autoescape false %}`` with plain scopes.

    Raises TemplateError for a statement that needs another template or escapes text for HTML.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._depth = 0

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        if isinstance(node, (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
            raise TemplateError(
                "a chat template cannot include, import or extend another", line=node.lineno
            )
        if isinstance(node, nodes.Block) and self._depth and not node.scoped:  # Jinja would hide these
            problem = f"the block {node.name!r} has variables around it; mark it as scoped"
            raise TemplateError(problem, line=node.lineno)
        has_locals = isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock, nodes.With))
        if isinstance(node, (nodes.Block, nodes.Scope)):
            has_locals = any(node.find_all((nodes.Assign, nodes.AssignBlock)))
        self._depth += has_locals
        result = super().visit(node, *args, **kwargs)
        self._depth -= has_locals
        return result

    def visit_Block(self, node: nodes.Block) -> nodes.Scope:
        if node.required or node.name in self._names:
            raise TemplateError(f"the block {node.name!r} is required, or defined twice", line=node.lineno)
        self._names.add(node.name)
        self.generic_visit(node)
        return nodes.Scope(node.body, lineno=node.lineno)

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier) -> nodes.Scope:
        if any(getattr(option.value, "value", True) for option in node.options):
            problem = "{% autoescape true %} is not supported: it escapes text for HTML"
            raise TemplateError(problem, line=node.lineno)
        self.generic_visit(node)
        return nodes.Scope(node.body, lineno=node.lineno)


def variables_of(tree: nodes.Template) -> set[str]:
    """The names that a template may read before it sets them."""
    return jinja2.meta.find_undeclared_variables(tree) & set(_reads(tree.body, set()))


def _reads(body: Iterable[nodes.Node], bound: set[str]) -> Iterator[str]:
    """Names that statements may read before they set them. Adds those always set to `bound`."""
    for node in body:
        match node:
            case nodes.If():  # sets the names that all branches set; a branch that refuses does not count
                ends: list[set[str]] = []
                for branch in (node, *node.elif_, None):
                    yield from _unset(branch and branch.test, bound)
                    statements, inner = node.else_ if branch is None else branch.body, set(bound)
                    yield from _reads(statements, inner)
                    ends += [] if any(map(_refuses, statements)) else [inner]
                bound |= set.intersection(*ends) if ends else set()
            case nodes.For():
                yield from _unset(node.iter, bound)
                inner = {*bound, "loop", *names_in(node.target)}
                yield from _unset(node.test, inner)
                yield from _reads(node.body, inner)
                yield from _reads(node.else_, set(bound))
            case nodes.Macro():
                for default in node.defaults:
                    yield from _unset(default, bound)
                bound.add(node.name)
                inner = bound.union(("caller", "kwargs", "varargs"), *map(names_in, node.args))
                yield from _reads(node.body, inner)
            case nodes.Assign() | nodes.AssignBlock():
                yield from _reads(getattr(node, "body", ()), set(bound))
                yield from _unset(node.node if isinstance(node, nodes.Assign) else node.filter, bound)
                if isinstance(node.target, nodes.NSRef):
                    yield from {node.target.name} - bound
                bound |= names_in(node.target)
            case nodes.Scope():
                yield from _reads(node.body, set(bound))
            case _:
                yield from _unset(node, bound)


def _unset(node: nodes.Node | None, bound: set[str]) -> Iterator[str]:
    for name in () if node is None else with_children(node):
        if isinstance(name, nodes.Name) and name.ctx == "load" and name.name not in bound:
            yield name.name


def _refuses(node: nodes.Node) -> bool:
    parts = node.nodes if isinstance(node, nodes.Output) else ()
    called = (getattr(part.node, "name", "") for part in parts if isinstance(part, nodes.Call))
    return "raise_exception" in called


def constants_of(tree: nodes.Template) -> frozenset[str]:
    return frozenset(text for node, _ in _searches(tree) for text in _strings(node))


def fields_of(tree: nodes.Template) -> frozenset[str]:
    keys = {key_of(node) for node in tree.find_all((nodes.Getattr, nodes.Getitem))}
    gets = (call.args[0] for call in tree.find_all(nodes.Call) if key_of(call.node) == "get" and call.args)
    return frozenset(keys | {key.value for key in gets if is_word(key)}) - DICT_ATTRIBUTES - {""}


def searched_words(tree: nodes.Template, text_fields: Iterable[str]) -> list[str]:
    """Constants of two or more characters that the template may look for in one of a message's `text_fields`.

    Others are compared with other fields (a role, a schema's type), or looked up in mappings.
    """
    called = {id(call.node) for call in tree.find_all(nodes.Call)}
    accesses: list[Any] = list(tree.find_all((nodes.Getattr, nodes.Getitem)))
    named = (node for node in accesses if id(node) not in called and isinstance(node.node, nodes.Name))
    mappings = {node.node.name for node in named if key_of(node)}
    kinds = ("string", "mapping", "iterable", "sequence")
    tested = (test.node for test in tree.find_all(nodes.Test) if test.name in kinds)
    mappings -= {node.name for node in tested if isinstance(node, nodes.Name)}  # it may be either

    def may_be_text(operand: nodes.Node) -> bool:
        if isinstance(operand, (nodes.Const, nodes.List, nodes.Tuple, nodes.Dict)):
            return False
        if isinstance(operand, nodes.Name):
            return operand.name not in mappings
        name = key_of(operand)
        return name in text_fields if name else True

    searches = [node for node, operands in _searches(tree) if any(map(may_be_text, operands))]
    names = set[str]().union(*map(names_in, searches))
    for assign in tree.find_all(nodes.Assign):
        if is_constant(assign.node) and not names.isdisjoint(names_in(assign.target)):
            searches.append(assign.node)
    return sorted({text for node in searches for text in _strings(node) if len(text) > 1})


def _searches(tree: nodes.Template) -> Iterator[tuple[nodes.Node, list[nodes.Node]]]:
    for compare in tree.find_all(nodes.Compare):
        yield compare, [compare.expr, *(operand.expr for operand in compare.ops)]
    for test in tree.find_all(nodes.Test):
        yield test, [test.node] if test.args else []
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr):
            yield call, [call.node.node]


def _strings(node: nodes.Node) -> Iterator[str]:
    for constant in with_children(node):
        if isinstance(constant, nodes.Const):
            values = constant.value if isinstance(constant.value, (list, tuple)) else [constant.value]
            yield from (value for value in values if isinstance(value, str) and value)
