"""Pieces of the source of a compiled template: a pair of expressions of Python, and names for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from jinja2 import nodes
from jinja2.compiler import Frame

DICT_ATTRIBUTES: Final = frozenset(dir(dict))


@dataclass(frozen=True, slots=True)
class Pair:
    """The source of a value, and of what stands beside it."""

    code: str
    origin: str = "None"
    given: str = "False"
    """The source of a cheap expression that tells whether the origin is not None."""
    is_count: bool = False
    """It is a number or a truth of the template's own: a count, a place, an answer."""
    is_split: bool = False
    """It is a plain list of parts of a text, all of the text's origin."""

    @property
    def boxed(self) -> str:
        """The source of the two as one value."""
        if self.is_split:
            return f"tt_parts({self.code}, {self.origin})"
        return self.code if self.origin == "None" else f"tt_box({self.code}, {self.origin})"

    @property
    def stored(self) -> Pair:
        """As a variable can hold it."""
        return Pair(self.boxed) if self.is_split else self


@dataclass(frozen=True, slots=True)
class Printed:
    """What an expression prints: constants, and sources of values and origins."""

    quick: list[str | tuple[str, str]]
    test: str = ""
    """The source of what must be true of the values for that; they are evaluated in it. Empty: nothing."""
    otherwise: tuple[str, str] = ("None", "None")


def spelled(parts: Iterable[str | tuple[str, str]]) -> str:
    """The source of what is written: a value, its origin, the next value, and so on."""
    source, constant = "", ""
    for part in parts:
        if isinstance(part, str):
            constant += part
            continue
        source += f"{constant!r}, None, " if constant else ""
        source += f"{part[0]}, {part[1]}, "
        constant = ""
    return source + (f"{constant!r}, None, " if constant else "")


def beside(ref: str) -> str:
    """The name of the variable that holds the origin of what another holds."""
    return f"o{ref[1:]}"


def flattened(node: nodes.Node) -> list[nodes.Node]:
    """The summands of ``a + b + c``."""
    return [*flattened(node.left), node.right] if isinstance(node, nodes.Add) else [node]


def field_of(node: nodes.Node) -> str | None:
    """The field that an expression names, as ``value.name`` or ``value["name"]``; None for a method of dicts."""
    key = node.arg if isinstance(node, nodes.Getitem) else None
    name = key.value if isinstance(key, nodes.Const) else node.attr if isinstance(node, nodes.Getattr) else None
    return name if type(name) is str and name not in DICT_ATTRIBUTES else None


def asked(node: nodes.Getattr | nodes.Getitem) -> str:
    """The method of the environment that has the last word on a field."""
    return "field" if isinstance(node, nodes.Getattr) else "item"


def told_by_loop(name: str, index: str, items: str, origins: str) -> Pair:
    """``loop.index`` and the like, of a loop that has no object but these names."""
    if name in ("previtem", "nextitem"):
        by = "-1" if name == "previtem" else "1"
        code = f"tt_neighbour({items}, {index}, {by}, undefined)"
        return Pair(code, f"tt_of_neighbour({items}, {origins}, {index} + {by})", f"{origins} is not None")
    length = f"(len({items}) if type({items}) is list else tt_length({items}))"
    forms = {
        "index0": index,
        "index": f"({index} + 1)",
        "first": f"({index} == 0)",
        "last": f"({index} + 1 == len({items}) if type({items}) is list else tt_is_last({items}, {index}))",
        "length": length,
        "revindex": f"({length} - {index})",
        "revindex0": f"({length} - {index} - 1)",
    }
    return Pair(forms[name], is_count=True)


def json_options(node: nodes.Filter, frame: Frame) -> tuple[Any, ...] | None:
    """The options of ``value|tojson(…)``, where they are constants of the usual kinds."""
    options: dict[str, Any] = {"ensure_ascii": False, "indent": None, "separators": None, "sort_keys": False}
    for option in node.kwargs:
        try:
            options[str(option.key)] = option.value.as_const(frame.eval_ctx)
        except nodes.Impossible:
            return None
    ensure_ascii, indent, separators, sort_keys, *others = options.values()
    usual = type(indent) in (int, type(None)) and type(separators) in (tuple, type(None))
    return tuple(options.values()) if usual and not others and type(ensure_ascii) is type(sort_keys) is bool else None


def namespaces_of(tree: nodes.Template) -> frozenset[str]:
    """Variables that are set to ``namespace(…)``, and to nothing else anywhere."""
    stores: dict[str, int] = {}
    for name in tree.find_all(nodes.Name):
        if name.ctx != "load":
            stores[name.name] = stores.get(name.name, 0) + 1
    for assign in tree.find_all(nodes.Assign):
        target, call = assign.target, assign.node
        made = isinstance(call, nodes.Call) and isinstance(call.node, nodes.Name) and call.node.name == "namespace"
        if made and isinstance(target, nodes.Name):
            stores[target.name] -= 1
    return frozenset(name for name, others in stores.items() if not others)
