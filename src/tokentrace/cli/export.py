"""``tokentrace export`` and ``keys``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError
from ..show.visible import counted
from . import command, options
from .output import ProgressBars, note, print_rows

if TYPE_CHECKING:
    from ..data.trainers import Trainer
    from ..gateway.rows import Export


@command
@click.argument("store", metavar="STORE", type=click.Path())
@options.rows_option(required=True)
@options.trainer_option
@click.option(
    "--session", "sessions", multiple=True, metavar="ID", help="Only this session; may be repeated."
)
@options.one_of("--state", ["open", "sealed", "exported"], "Only sessions in this state.")
@options.value("--search", "TEXT", "Only sessions with this text in id or metadata.")
@options.overwrite_option
@options.flag("--keep-state", text="Leave sealed sessions sealed: do not mark them as exported.")
@options.json_option("Print what was written as JSON.")
@options.quiet_option
def export(*, store: str, **chosen: Any) -> None:
    """Write the training rows of the sessions in STORE, from `tokentrace serve` or `tokentrace rollout`.

    STORE is a file, such as a run's rollouts.db, or postgresql://user@host/database; a gateway may be writing to
    it. Sealed sessions are marked as exported once the file is complete; open ones stay open. docs/rows.md has
    the columns. With --for, the file has only the columns that the trainer reads, and rows of any reward.

    An existing file is replaced only with --overwrite. If there are no rows, no file is written.

    \b
    Examples:
      tokentrace export store.db -o rows.parquet
      tokentrace export runs/7/rollouts.db -o new.parquet --state sealed
      tokentrace export store.db -o one.jsonl --session run-7 --keep-state
      tokentrace export postgresql://gateway@db/traces -o rows.jsonl --search batch-17
    """
    from ..data.tables import target_path
    from ..data.trainers import find_trainer

    job = SimpleNamespace(**chosen)
    trainer = find_trainer(job.trainer)
    target_path(job.output, trainer, overwrite=job.overwrite)
    if job.sessions and (job.state or job.search):
        raise click.UsageError("--session names sessions: it cannot be combined with --state or --search")
    if "://" not in store and not Path(store).is_file():
        what = "is a folder" if Path(store).is_dir() else "does not exist"
        raise InputError(f"{store} {what}: name the file of `tokentrace serve --store`, or a rollouts.db")
    done = asyncio.run(_export(store, job, trainer))
    names = ("sessions", "rows", "tokens", "trained", "causes", "marked", "longest")
    data = {name: getattr(done, name) for name in names} | {"output": str(job.output)}
    counts = f"{counted(done.sessions, 'session')}, {counted(done.rows, 'row')}, {counted(done.tokens)}"
    causes = [f"{count:,} by {cause.replace('_', ' ')}" for cause, count in done.causes.most_common()]
    summary = f"{counts}, {done.trained:,} trained" + (f"\nbranches: {', '.join(causes)}" if causes else "")
    print_rows(data, summary, job, done.longest)
    if not job.as_json and not job.quiet:
        note(f"wrote {job.output}" + (f", and marked {done.marked:,} as exported" if done.marked else ""))


async def _export(where: str, job: SimpleNamespace, trainer: Trainer | None) -> Export:
    from ..data.tables import sample_writer
    from ..gateway.rows import COLUMNS, Export
    from ..store.store import State, open_store

    store = open_store(where)
    try:
        sessions: Any = []
        for id in dict.fromkeys(job.sessions):
            info = await store.session(id)
            if info is None:
                raise InputError(f"{store.where} has no session {id!r}")
            if info.state == "dropped":
                raise InputError(f"session {id!r} was dropped: its tokens are gone")
            sessions.append(info)
        total, state = len(sessions), job.state and State(job.state)
        if not sessions:
            states = [state] if state else [State.OPEN, State.SEALED, State.EXPORTED]
            total = sum([await store.count(each) for each in states])
            sessions = store.sessions(state=state, search=job.search or "")
        export = Export(store, sessions)
        about = {
            "store": store.where,
            "sessions": job.sessions or None,
            "state": state,
            "search": job.search,
        }
        with ProgressBars(quiet=job.quiet, counts=True) as bars:
            with sample_writer(job.output, COLUMNS, about, private=True, trainer=trainer) as write:
                async for table in export.tables():
                    write(table)
                    status = f"{counted(export.rows, 'row')}, {counted(export.tokens)}"
                    line = f"{counted(export.sessions, 'session')}, {status}"
                    bars.show("sessions", export.sessions, total, status, line)
                if not export.rows:
                    matching = counted(export.sessions, "session")
                    why = f"nothing was sampled in {matching}" if export.sessions else "no session matches"
                    raise InputError(f"{why}, so there are no rows: {job.output} is not written")
            bars.show("sessions", export.sessions, export.sessions)
            if not job.keep_state:
                await export.mark()
        return export
    finally:
        await store.close()


@command
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE")
@options.flag("--admin", text="A key for everything: sessions, rows, rewards, shutdown.")
@options.flag("--agent", text="A key for sampling in any session.")
@options.value("--name", "TEXT", "A note next to the key, such as its owner.")
def keys(file: Path, admin: bool, agent: bool, name: str | None) -> None:
    """Make a key, print it once, and add its hash to FILE, which `tokentrace serve --keys FILE` reads.

    The key itself is not stored. Keys for single sessions come with the session: POST /sessions.

    \b
    Examples:
      tokentrace keys gateway.keys --admin
      tokentrace keys gateway.keys --agent --name "evaluation cluster"
    """
    from ..gateway.access import Role, add_key

    if admin == agent:
        raise click.UsageError("say what the key is for: --admin or --agent")
    click.echo(add_key(file, Role.ADMIN if admin else Role.AGENT, name or ""))
