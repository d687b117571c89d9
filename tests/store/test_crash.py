"""What a store acknowledged is there after a crash, whole; what it did not is there whole or not at all."""

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
    """What a writer said until it was killed, some lines later than the given number."""
    command = [sys.executable, "-m", "tests.store.writer", where, str(round)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(lines)]
        process.kill()
        said += process.stdout.readlines()
    assert all(line.endswith("\n") for line in said), f"the writer ended by itself with {process.returncode}"
    return [line.split() for line in said]


class Acknowledged:
    """What the store has promised so far."""

    def __init__(self) -> None:
        self.begun: dict[str, set[str]] = defaultdict(set)
        self.stored: dict[str, dict[int, str]] = defaultdict(dict)

    def add(self, said: list[list[str]]) -> None:
        for kind, id, *rest in said:
            if kind == "begun":
                self.begun[id].add(rest[0])
            else:
                self.stored[id][int(rest[0])] = rest[1]

    async def check(self, store: Store, id: str) -> None:
        count = await check_whole(store, id)
        stored = self.stored[id]
        assert all(number < count for number in stored)
        for number in stored:
            assert await store.turn_named(id, f"n{number}") == number
        left = {one["request"] for one in await store.incomplete(id)}
        assert not left & set(stored.values()), "a turn that was stored counts as incomplete"
        # a turn may have been stored without anybody hearing of it: then its request is neither here nor there
        unheard = self.begun[id] - set(stored.values()) - left
        assert len(unheard) == count - len(stored), f"{unheard} began, gave no turn, and are not listed as incomplete"


@pytest.mark.parametrize("where", ["sqlite", "postgres"])
def test_nothing_acknowledged_is_lost_when_the_writer_is_killed_again_and_again(
    where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    chance = random.Random(0)

    async def check(place: str, acknowledged: Acknowledged) -> None:
        async with opened(place) as store:
            for id in SESSIONS:
                if await store.session(id) is not None:
                    await acknowledged.check(store, id)

    turns = 0
    for round in range(ROUNDS):
        if not round % 5:  # each check reads everything
            file, acknowledged = str(tmp_path / f"store-{round}.db"), Acknowledged()
            place = file if where == "sqlite" else request.getfixturevalue("postgres").fresh()
        acknowledged.add(killed_writer(place, round, chance.randrange(1, 300)))
        asyncio.run(check(place, acknowledged))
        turns += sum(map(len, acknowledged.stored.values()))
    assert turns > 20 * ROUNDS


@pytest.mark.skipif(not FULL, reason="long: make test-long")
def test_nothing_acknowledged_is_lost_when_the_database_is_killed() -> None:
    """The server and its processes die under load; the gateway lives, and goes on when the server is back."""
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
