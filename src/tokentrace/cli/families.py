"""``tokentrace families``."""

from __future__ import annotations

import json
from typing import Final

import click

from ..errors import RendererError
from ..settings import nearest
from . import command
from .options import complete_families, json_option
from .output import print_result

COLUMNS: Final = {"name": "family", "models": "models"}
DETAILS: Final = {**COLUMNS, "turn": "an assistant's turn", "tool": "a tool result", "tool_parser": "dialect of calls"}


@command
@click.argument("name", required=False, shell_complete=complete_families)
@json_option("Print the families as JSON.")
def families(*, name: str | None, as_json: bool) -> None:
    """List the known families of models, or show the one called NAME.

    A family is recognised by how its template behaves. Templates of no family work as well.

    \b
    Examples:
      tokentrace families
      tokentrace families qwen3
      tokentrace families --json | jq .[].name
    """
    from ..formats.families import FAMILIES
    from ..show.document import Document, Table

    choices = [family for family in FAMILIES if name in (None, family.name)]
    if not choices:
        raise RendererError(f"there is no family {name!r}; {nearest(name, [family.name for family in FAMILIES])}")
    rows = [{key: str(getattr(family, key, "") or "") for key in DETAILS} for family in choices]
    if as_json:
        click.echo(json.dumps(rows if name is None else rows[0], indent=2, ensure_ascii=False))
    elif name is None:
        cells = [[row[key] for key in COLUMNS] for row in rows]
        table = Table("Families", list(COLUMNS.values()), cells, words=len(COLUMNS))
        print_result(Document("Families", tables=[table]), fold=True)
    else:
        for key, label in DETAILS.items():
            if rows[0][key]:
                click.echo(f"{label}:\n" + "".join(f"  {line}\n" for line in rows[0][key].splitlines()), nl=False)
