"""The switches of a template: the variables that it reads, each with the values that may change something."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from jinja2 import nodes

from ..errors import TokentraceError
from ..rendering.renderer import Renderer
from ..study.probes import STAND_IN_TOOL, SYSTEM, USER
from ..template.chat_template import ChatTemplate, parse_template, wrap_tools

_MOST: Final = 24
"""Settings that are tried of one template."""


def find_settings(renderer: Renderer, printed: Mapping[str, str]) -> list[dict[str, Any]]:
    """Each switch with each value that it is worth trying on its own.

    A variable that the template compares with texts takes those; one that it prints (`printed`), or that is a list, is
    no switch; any other is tried as true and as false.
    """
    template = renderer.study().template
    tree = parse_template(template.source) if isinstance(template, ChatTemplate) else nodes.Template([])
    compared, own = dict(_compared(tree)), _of_loops(tree)
    found: list[dict[str, Any]] = []
    others = {*compared, *printed, *own, *other_than_truths(renderer)}
    for name, value in renderer.switches():
        if name not in others:
            found.append({name: value})
    for name in sorted(compared.keys() & template.variables - set(renderer.tokenizer.variables) - own):
        found += [{name: value} for value in compared[name] if renderer.template_kwargs.get(name) != value]
    return found[:_MOST]


def other_than_truths(renderer: Renderer) -> set[str]:
    """Variables that are something else than true or false, a list say: with one of these the template fails on it."""
    found = set()
    for name, value in renderer.switches():
        study = renderer.with_variables({name: value}).study()
        for tools in (None, wrap_tools([STAND_IN_TOOL])):
            try:
                study.run((SYSTEM, USER), tools, True)
            except TokentraceError as error:
                found |= {name} if isinstance(error.__cause__, TypeError) else set()
    return found


def _of_loops(tree: nodes.Template) -> set[str]:
    """Names that are assigned inside loops: the template's own, for each message anew."""
    stored = (name for loop in tree.find_all(nodes.For) for name in loop.find_all(nodes.Name) if name.ctx == "store")
    return {name.name for name in stored}


def _compared(tree: nodes.Template) -> Iterator[tuple[str, list[str]]]:
    """The variables that a template compares with texts, and those texts."""
    found: dict[str, dict[str, None]] = {}
    for compare in tree.find_all(nodes.Compare):
        sides = [compare.expr, *(one.expr for one in compare.ops)]
        texts = [one.value for side in sides for one in _constants(side) if isinstance(one.value, str)]
        for side in sides:
            if isinstance(side, nodes.Name):
                found.setdefault(side.name, {}).update(dict.fromkeys(texts))
    yield from ((name, list(texts)) for name, texts in found.items() if texts)


def _constants(node: nodes.Node) -> Iterator[nodes.Const]:
    if isinstance(node, nodes.Const):
        yield node
    elif isinstance(node, (nodes.List, nodes.Tuple)):
        yield from (item for item in node.items if isinstance(item, nodes.Const))
