"""``tokentrace families``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

from ..errors import RendererError
from ..settings import nearest
from . import command
from .options import OneOf, complete_families
from .output import make_console

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from ..formats.families import Family

COLUMNS: Final = (
    ("name", "Family"),
    ("models", "Models"),
    ("reasoning", "Reasoning"),
    ("tool_calls", "Tool calls"),
    ("ends", "A turn ends"),
)
DETAILS: Final = (*COLUMNS[1:], ("notes", "Notes"))
GRAMMAR: Final = (("turn", "An assistant's turn"), ("tool", "A tool's result"))


@command
@click.argument("name", required=False, shell_complete=complete_families)
@click.option("-f", "--format", "form", type=OneOf(["text", "json"]), default="text", show_default=True)
@click.option("--json", "form", flag_value="json", help="The same as --format json.")
def families(*, name: str | None, form: str) -> None:
    """List the families of models that are known by how their templates behave, or show the one called NAME.

    A family only adds what a template does not tell by itself. Templates of no family work as well.

    \b
    Examples:
      tokentrace families
      tokentrace families qwen3
      tokentrace families --json | jq .[].name
    """
    from ..formats.families import FAMILIES

    known = [family for family in FAMILIES if name in (None, family.name)]
    if not known:
        raise RendererError(f"there is no family {name!r}; {nearest(name, [family.name for family in FAMILIES])}")
    if form == "json":
        rows = [as_row(family) for family in known]
        click.echo(json.dumps(rows if name is None else rows[0], indent=2, ensure_ascii=False))
        return
    console = make_console()
    if name is not None:
        console.print(_details(known[0]))
    else:
        console.print(_table(known) if console.width >= 100 else _list(known))


def as_row(family: Family) -> dict[str, str]:
    """A family as plain data."""
    keys = ("name", "title", *(key for key, _ in DETAILS + GRAMMAR))
    return {key: str(getattr(family, key, "") or "") for key in keys}


def _table(known: Sequence[Family]) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_lines=False, expand=False)
    for key, label in COLUMNS:
        table.add_column(label, no_wrap=key == "name", overflow="fold", ratio=None if key == "name" else 2)
    for family in known:
        row = as_row(family)
        table.add_row(Text(row["name"], "bold"), *(Text(row[key]) for key, _ in COLUMNS[1:]))
    return table


def _list(known: Sequence[Family]) -> RenderableType:
    """The same for narrow terminals."""
    from rich.text import Text

    grid = _grid()
    for family in known:
        row = as_row(family)
        grid.add_row(Text(row["name"], "bold"), Text(row["models"], "bold"))
        for key, label in COLUMNS[2:]:
            grid.add_row(Text(f"  {label.lower()}", "dim"), Text(row[key]))
    return grid


def _grid() -> Table:
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def _details(family: Family) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    row, grid = as_row(family), _grid()
    for key, label in DETAILS:
        if row[key]:
            grid.add_row(Text(label, "dim"), Text(row[key]))
    parts: list[RenderableType] = [Text.assemble((row["name"], "bold"), "  ", row["title"]), grid]
    for key, label in GRAMMAR:
        if row[key]:
            grammar = Text("\n".join(f"  {line}" for line in row[key].rstrip("\n").split("\n")))
            grammar.highlight_regex("⟨[^⟩]*⟩", "bold cyan")
            parts += [Text(f"\n{label}, holes in ⟨⟩:", "dim"), grammar]
    return Group(*parts)
