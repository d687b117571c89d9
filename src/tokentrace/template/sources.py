"""Pieces of the source of a compiled template: a pair of expressions of Python, and names for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jinja2 import nodes


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
