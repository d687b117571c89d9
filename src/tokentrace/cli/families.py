"""``tokentrace families``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from .options import debug_option

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS: Final = (
    ("name", "Family"),
    ("models", "Models"),
    ("reasoning", "Reasoning"),
    ("tool_calls", "Tool calls"),
    ("ends", "A turn ends"),
)
DETAILS: Final = (*COLUMNS[1:], ("notes", "Notes"))
GRAMMAR: Final = (("turn", "An assistant's turn"), ("tool", "A tool's result"))


@click.command(short_help="Show what is known of each family of models.")
@click.argument("name", required=False)
@click.option("-f", "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@debug_option
def families(*, name: str | None, form: str) -> None:
    """List the families of models that are known by how their templates behave, or show the one called NAME.

    A family only adds what a template does not tell by itself. Templates of no family work as well.

    \b
    Examples:
      tokentrace families
      tokentrace families qwen3
      tokentrace families --format json
    """
    known: Sequence[Any] = _known()
    if name is not None:
        known = [family for family in known if family.name == name]
        if not known:
            from ..errors import RendererError

            names = ", ".join(family.name for family in _known())
            raise RendererError(f"there is no family {name!r}; there are: {names}")
    if form == "json":
        rows = [as_row(family) for family in known]
        click.echo(json.dumps(rows if name is None else rows[0], indent=2, ensure_ascii=False))
        return
    from rich.console import Console

    console = Console()
    if name is not None:
        console.print(_details(known[0]))
    else:
        console.print(_table(known) if console.width >= 100 else _list(known))


def _known() -> Sequence[Any]:
    from ..formats import families as module

    found: Sequence[Any] = module.FAMILIES
    return found


def as_row(family: Any) -> dict[str, str]:
    """A family as plain data."""
    keys = ("name", "title", *(key for key, _ in DETAILS + GRAMMAR))
    return {key: str(getattr(family, key, "") or "") for key in keys}


def _table(known: Sequence[Any]) -> RenderableType:
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


def _list(known: Sequence[Any]) -> RenderableType:
    """The same for narrow terminals."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for family in known:
        row = as_row(family)
        grid.add_row(Text(row["name"], "bold"), Text(row["models"], "bold"))
        for key, label in COLUMNS[2:]:
            grid.add_row(Text(f"  {label.lower()}", "dim"), Text(row[key]))
    return grid


def _details(family: Any) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    row = as_row(family)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for key, label in DETAILS:
        if row[key]:
            grid.add_row(label, Text(row[key]))
    parts: list[RenderableType] = [Text.assemble((row["name"], "bold"), "  ", (row["title"], "")), grid]
    for key, label in GRAMMAR:
        if row[key]:
            grammar = Text("\n".join(f"  {line}" for line in row[key].rstrip("\n").split("\n")))
            grammar.highlight_regex("⟨[^⟩]*⟩", "bold cyan")
            parts += [Text(f"\n{label}, holes in ⟨⟩:", "dim"), grammar]
    return Group(*parts)
