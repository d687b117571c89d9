"""After a crash a store has every turn that it acknowledged; any other turn is complete or absent."""

import asyncio
import random
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.store.support import Postgres, check_whole, made_up_turn, opened, postgres_server, session
from tests.store.writer import SESSIONS
from tests.support import FULL
from tokentrace.store.store import Store, StoreError, open_store
from tokentrace.trajectory import Trajectory

ROUNDS = 100 if FULL else 1


def killed_writer(where: str, round: int, lines: int) -> list[list[str]]:
    """Run a writer and kill it after the given number of lines; returns all the lines that it printed."""
    command = [sys.executable, "-m", "tests.store.writer", where, str(round)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = [process.stdout.readline() for _ in range(lines)]
        process.kill()
        printed += process.stdout.readlines()
    assert all(line.endswith("\n") for line in printed), f"the writer ended by itself with {process.returncode}"
    return [line.split() for line in printed]


class Acknowledged:
    """The requests and turns that the store has acknowledged so far."""

    def __init__(self) -> None:
        self.requests: dict[str, set[str]] = defaultdict(set)
        self.stored: dict[str, dict[int, str]] = defaultdict(dict)

    def add(self, lines: list[list[str]]) -> None:
        for kind, id, *values in lines:
            if kind == "begun":
                self.requests[id].add(values[0])
            else:
                self.stored[id][int(values[0])] = values[1]

    async def check(self, store: Store, id: str) -> None:
        count = await check_whole(store, id)
        stored = self.stored[id]
        assert all(number < count for number in stored)
        for number in stored:
            assert await store.turn_named(id, f"n{number}") == number
        incomplete = {request["request"] for request in await store.incomplete(id)}
        assert not incomplete & set(stored.values()), "a turn that was stored counts as incomplete"
        # a turn may be stored though its acknowledgement was lost: then its request is in neither set
        unknown = self.requests[id] - set(stored.values()) - incomplete
        assert len(unknown) == count - len(stored), f"{unknown} began, gave no turn, and are not listed as incomplete"


@pytest.mark.parametrize("where", ["sqlite", "postgres"])
def test_nothing_acknowledged_is_lost_when_the_writer_is_killed_repeatedly(
    where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    rng = random.Random(0)

    async def check(place: str, acknowledged: Acknowledged) -> None:
        async with opened(place) as store:
            for id in SESSIONS:
                if await store.session(id) is not None:
                    await acknowledged.check(store, id)

    turns = 0
    for round in range(ROUNDS):
        if not round % 5:  # a new store, since each check reads all of it
            file, acknowledged = str(tmp_path / f"store-{round}.db"), Acknowledged()
            place = file if where == "sqlite" else request.getfixturevalue("postgres").fresh()
        acknowledged.add(killed_writer(place, round, rng.randrange(1, 300)))
        asyncio.run(check(place, acknowledged))
        turns += sum(map(len, acknowledged.stored.values()))
    assert turns > 20 * ROUNDS


@pytest.mark.skipif(not FULL, reason="long: make test-long")
def test_nothing_acknowledged_is_lost_when_the_database_is_killed() -> None:
    """The database is killed under load; the store survives, and works again when the database is back."""
    with postgres_server() as server:
        asyncio.run(_database_killed(server, open_store(server.url)))


async def _database_killed(server: Postgres, store: Store) -> None:
    stored: dict[str, int] = {}
    enough, failures = asyncio.Event(), list[StoreError]()

    async def write(id: str) -> None:
        await store.create(session(id))
        trajectory, number = Trajectory(), 0
        stored[id] = 0
        try:
            while True:
                await store.append(id, made_up_turn(trajectory, number, id), request=f"r{number}")
                number += 1
                stored[id] = number
                if sum(stored.values()) > 150:
                    enough.set()
        except StoreError as error:
            failures.append(error)

    names = [f"s{at}" for at in range(12)]
    writers = [asyncio.create_task(write(id)) for id in names]
    await enough.wait()
    await asyncio.to_thread(server.kill)
    await asyncio.gather(*writers)
    assert len(failures) == len(names)
    with pytest.raises(StoreError):
        await store.session("s0")
    await asyncio.to_thread(server.start)
    for id in names:
        count = await check_whole(store, id)
        assert stored[id] <= count <= stored[id] + 1
        trajectory = Trajectory()
        for number in range(count):
            made_up_turn(trajectory, number, id)
        await store.append(id, made_up_turn(trajectory, count, id), request="after")
        assert await check_whole(store, id) == count + 1
    await store.close()
