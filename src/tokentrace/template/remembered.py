"""What a loop over tools writes, kept with the tools: they come again and again, and are written the same each time.

That is so where the loop looks at nothing but the tools. Whether it does is read off the template.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Final, TypeGuard

import jinja2
import jinja2.meta
from jinja2 import nodes

from .origin import InTurn
from .pairs import pieces
from .strings import TracedStr, plain_text
from .trace import join_buffer
from .traced import TracedList

_NEVER: Final[tuple[type[nodes.Node], ...]] = (
    *(nodes.Block, nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends),
    *(nodes.CallBlock, nodes.FilterBlock, nodes.ScopedEvalContextModifier, nodes.EvalContextModifier),
)
_TEXT: Final = frozenset({str, TracedStr})


def repeatable(tree: nodes.Template, environment: jinja2.Environment) -> dict[int, list[str]]:
    """The loops of a template that write the same whenever they run over the same list, by their `id`.

    Each with the names that it sets, and may read before it does: nobody else may have set them.
    """
    if tree.find(nodes.Block) is not None:
        return {}
    macros = {node.name: node for node in tree.body if isinstance(node, nodes.Macro)}
    others = {macro.name for macro in tree.find_all(nodes.Macro) if macro is not macros.get(macro.name)}
    names = macros.keys() - others
    good = {
        name: asked
        for name in names
        if not _stored(tree, name) and (asked := _own(macros[name], tree, environment, names)) is not None
    }
    while not all(called <= good.keys() for _, called in good.values()):
        good = {name: (read, called) for name, (read, called) in good.items() if called <= good.keys()}
    found: dict[int, list[str]] = {}
    for loop in tree.find_all(nodes.For):
        simple = not loop.recursive and not loop.else_ and loop.test is None and isinstance(loop.target, nodes.Name)
        own = _own(loop, tree, environment, names, loop.iter.name) if simple and _is_name(loop.iter) else None
        if own is not None and own[1] <= good.keys():
            called = own[1]
            while called != (more := called.union(*(good[name][1] for name in called))):
                called = more
            if all(macros[name].lineno < loop.lineno for name in called):  # they are what they are when it runs
                found[id(loop)] = sorted(own[0].union(*(good[name][0] for name in called)))
    return found


def _is_name(node: nodes.Node) -> TypeGuard[nodes.Name]:
    return isinstance(node, nodes.Name)


def _own(
    node: nodes.Node, tree: nodes.Template, environment: jinja2.Environment, macros: Set[str], items: str = ""
) -> tuple[frozenset[str], frozenset[str]] | None:
    """What a statement looks up outside of itself: names that are set nowhere but inside of it, and macros.

    None where it looks up more than that, beside the `items` that it runs over.
    """
    asked = _asked_for(node, environment)
    if asked is None:
        return None
    called = asked.intersection(macros)
    read = asked - called - {items}
    if not all(0 < _stored(tree, name) == _stored(node, name) for name in read):
        return None
    return read, called


def _stored(node: nodes.Node, name: str) -> int:
    """How often a name is set in a part of a template."""
    return sum(1 for one in node.find_all(nodes.Name) if one.ctx != "load" and one.name == name)


def _asked_for(node: nodes.Node, environment: jinja2.Environment) -> frozenset[str] | None:
    """The names that a statement looks up outside of itself; None where it does more than look them up."""
    if next(node.find_all(_NEVER), None) is not None or any(
        filter.name == "random" for filter in node.find_all(nodes.Filter)
    ):
        return None
    stored = {name.name for name in node.find_all(nodes.Name) if name.ctx != "load"}
    if any(target.name not in stored for target in node.find_all(nodes.NSRef)):
        return None
    if any(name.name in environment.globals for name in node.find_all(nodes.Name)):
        return None  # a function: the caller may have set another, and some never give the same again
    alone = nodes.Template([node], lineno=1)
    alone.set_environment(environment)
    return frozenset(jinja2.meta.find_undeclared_variables(alone))


# -- while the template runs


def recall(items: Any, loop: Any) -> tuple[Any, ...] | None:
    """What `loop` wrote when it ran over these items before."""
    memo = getattr(items, "memo", None) if type(items) is TracedList else None
    return None if memo is None else memo.get(loop)


def remember(items: Any, loop: Any, written: list[Any], start: int, *, printed: bool) -> None:
    """Keep what `loop` wrote, if it will be asked for and is text; `printed`, or else joined with more."""
    memo = getattr(items, "memo", None) if type(items) is TracedList else None
    if memo is None or not _TEXT.issuperset(map(type, written[start::2])):
        return
    if not printed:
        memo[loop] = (join_buffer(pieces(written[start:])), None)
        return
    kept: list[Any] = []
    for value, origin in zip(written[start::2], written[start + 1 :: 2], strict=True):
        one = type(value) is TracedStr and len(value.runs) == 1 and type(value.runs[0][1]) is not InTurn
        kept += (plain_text(value), value.runs[0][1]) if one else (value, origin)
    memo[loop] = tuple(kept)
