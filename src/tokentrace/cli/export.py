"""``tokentrace export``."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError
from ..tokens.visible import counted
from . import command
from .options import OneOf, complete_files, json_option, quiet_option, trainer_option
from .output import ProgressBars, note, print_advice, short_number, trainer_advice

if TYPE_CHECKING:
    from ..data.trainers import Trainer
    from ..gateway.rows import Export
    from ..store.store import SessionInfo, State, Store


@command
@click.argument("store", metavar="STORE", shell_complete=complete_files)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="Where the rows go: .parquet or .jsonl.",
)
@trainer_option
@click.option("--session", "sessions", multiple=True, metavar="ID", help="Only this session; may be repeated.")
@click.option("--state", type=OneOf(["open", "sealed", "exported"]), help="Only sessions that are in this state.")
@click.option("--search", default="", metavar="TEXT", help="Only sessions with this text in their id or metadata.")
@click.option("--overwrite", is_flag=True, help="Replace an output that already exists.")
@click.option("--keep-state", is_flag=True, help="Leave sealed sessions sealed instead of marking them as exported.")
@json_option("Print what was written as JSON.")
@quiet_option
def export(
    store: str,
    output: Path,
    trainer: str | None,
    sessions: tuple[str, ...],
    state: str | None,
    search: str,
    overwrite: bool,
    keep_state: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write the training rows of the sessions in STORE: what `tokentrace serve --store STORE` recorded.

    STORE is a file, or postgresql://user@host/database. A gateway may be writing to it meanwhile. docs/rows.md has the
    columns. Sessions that are sealed are marked as exported once the file is there, whole; open ones stay open, and
    what is added to them later is not in the file. With --for, a file for supervised training: ids and labels alone,
    of every row, whatever its reward.

    A file that already exists is replaced only with --overwrite. Without rows no file is written.

    \b
    Examples:
      tokentrace export store.db -o rows.parquet
      tokentrace export store.db -o new.parquet --state sealed
      tokentrace export store.db -o one.jsonl --session run-7 --keep-state
      tokentrace export postgresql://gateway@db/traces -o rows.jsonl --search batch-17
    """
    from ..data.tables import check_target
    from ..data.trainers import find_trainer
    from ..store.store import State

    target = None if trainer is None else find_trainer(trainer)
    check_target(output, target, overwrite=overwrite)
    if sessions and (state or search):
        raise click.UsageError("--session names the sessions: leave out --state and --search, or --session")
    if "://" not in store and not Path(store).is_file():
        what = "is a folder" if Path(store).is_dir() else "is not there"
        raise InputError(f"{store} {what}: name the file that `tokentrace serve --store` was given")
    which = (sessions, None if state is None else State(state), search)
    done, longest = asyncio.run(_export(store, output, target, which, keep_state, quiet))
    if as_json:
        summary = {name: getattr(done, name) for name in ("sessions", "rows", "tokens", "trained", "causes", "marked")}
        summary |= {"output": str(output), "longest": longest}
        if trainer is not None:
            summary["advice"] = trainer_advice(trainer, output, longest)
        click.echo(json.dumps(summary))
    elif not quiet:
        _summarize(done, output)
        if trainer is not None:
            print_advice(trainer, output, longest)


async def _export(
    where: str,
    output: Path,
    trainer: Trainer | None,
    which: tuple[tuple[str, ...], State | None, str],
    keep_state: bool,
    quiet: bool,
) -> tuple[Export, int]:
    """Return what was exported and the length of the longest row. `which` is (ids, state, search)."""
    from ..data.tables import sample_writer
    from ..gateway.rows import LAYOUT, Export, session_fields
    from ..store.opening import open_store

    store = open_store(where)
    (ids, state, search), longest = which, 0
    try:
        sessions = await _find_sessions(store, ids)
        total = len(sessions) if ids else await _count(store, state)
        export = Export(store, sessions if ids else store.sessions(state=state, search=search))
        about = {"store": store.where, "sessions": list(ids) or None, "state": state, "search": search}
        how: dict[str, Any] = {"private": True, "trainer": trainer}
        with ProgressBars(quiet=quiet, counts=True) as bars:
            with sample_writer(output, LAYOUT, about, more=session_fields(), **how) as write:
                async for table in export.tables():
                    longest = max([longest, *table.column("num_tokens").to_pylist()])
                    write(table)
                    status = f"{short_number(export.rows)} rows, {short_number(export.tokens)} tokens"
                    bars.show("sessions", export.sessions, total, status, f"{export.sessions:,} sessions, {status}")
                if not export.rows:
                    matching = counted(export.sessions, "session")
                    why = f"nothing was sampled in {matching}" if export.sessions else "no session matches"
                    raise InputError(f"{why}, so there are no rows: {output} is not written")
            bars.show("sessions", export.sessions, export.sessions)
            if not keep_state:
                await export.mark()
        return export, longest
    finally:
        await store.close()


async def _find_sessions(store: Store, ids: tuple[str, ...]) -> list[SessionInfo]:
    """Return the sessions of these ids. Raises InputError if one is missing or dropped."""
    sessions = []
    for id in dict.fromkeys(ids):
        info = await store.session(id)
        if info is None:
            raise InputError(f"{store.where} has no session {id!r}")
        if info.state == "dropped":
            raise InputError(f"session {id!r} was dropped: its tokens are gone")
        sessions.append(info)
    return sessions


async def _count(store: Store, state: State | None) -> int:
    from ..store.store import State

    states = [state] if state is not None else [State.OPEN, State.SEALED, State.EXPORTED]
    return sum([await store.count(each) for each in states])


def _summarize(done: Export, output: Path) -> None:
    counts = f"{counted(done.sessions, 'session')}, {counted(done.rows, 'row')}, {done.tokens:,} tokens"
    click.echo(f"{counts}, {done.trained:,} trained")
    if done.causes:
        causes = ", ".join(f"{count:,} by {cause.replace('_', ' ')}" for cause, count in done.causes.most_common())
        click.echo(f"branches: {causes}")
    if done.marked:
        note(f"marked as exported: {done.marked:,}")
    note(f"wrote {output}")
