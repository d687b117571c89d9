"""``tokentrace keys``."""

from __future__ import annotations

from pathlib import Path

import click

from . import command


@command
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE")
@click.option("--admin", "role", flag_value="admin", help="A key for everything: sessions, rows, rewards, shutdown.")
@click.option("--agent", "role", flag_value="agent", help="A key for sampling in any session.")
@click.option("--name", default="", metavar="TEXT", help="A note beside the key: whose it is.")
def keys(file: Path, role: str | None, name: str) -> None:
    """Make a key, print it once, and add its hash to FILE: what `tokentrace serve --keys FILE` reads.

    The key itself is stored nowhere. Keys for single sessions are made with the session: POST /sessions.

    \b
    Examples:
      tokentrace keys gateway.keys --admin
      tokentrace keys gateway.keys --agent --name "evaluation cluster"
    """
    from ..gateway.access import Role, add_key

    if role is None:
        raise click.UsageError("say what the key is for: --admin or --agent")
    click.echo(add_key(file, Role(role), name))
