"""Stores keep what they acknowledged, whole and once, whoever else writes; SQLite and a real PostgreSQL alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.loop import in_loop
from tests.store.support import session
from tests.trajectory.model import assert_same
from tests.trajectory.walk import Walk
from tokentrace.store.store import Closed, Conflict, State, Store, TurnRecord, open_store
from tokentrace.trajectory import Trajectory, to_bytes
from tokentrace.trajectory.storage import replay_records, write_records


@asynccontextmanager
async def opened(where: str) -> AsyncIterator[Store]:
    store = open_store(where)
    try:
        yield store
    finally:
        await store.close()


def turn(number: int, first: int, *records: bytes, **rest: Any) -> TurnRecord:
    return TurnRecord(number, first, records, rest.pop("info", {}), **rest)


async def ids(store: Store, **which: Any) -> list[str]:
    return [found.id async for found in store.sessions(**which)]


# -- sessions


@in_loop
async def test_sessions_are_listed_from_the_newest_on_and_found_by_what_is_in_them(place: str) -> None:
    async with opened(place) as store:
        for at in range(150):  # more than are read at a time
            await store.create(session(f"s{at:03}", float(at // 2), metadata={"task": f"T{at}"}))
        everything = [f"s{at:03}" for at in range(149, -1, -1)]
        assert await ids(store) == everything
        last = await store.session("s100")
        assert await ids(store, after=last) == everything[50:]
        assert await ids(store, search="t14") == [*(f"s{at}" for at in range(149, 139, -1)), "s014"]
        assert await ids(store, search="S01") == [f"s{at:03}" for at in range(19, 9, -1)]
        for at in range(0, 150, 3):
            await store.set_state(f"s{at:03}", State.SEALED)
        assert await store.count() == 100
        assert await store.count(State.SEALED) == 50
        assert await store.count(State.DROPPED) == 0
        assert len(await ids(store, state=State.SEALED)) == 50
        assert await ids(store, state=State.SEALED, search="t14") == ["s147", "s144", "s141"]


# -- turns


@in_loop
async def test_a_trajectory_is_rebuilt_from_the_turns_of_its_session(place: str) -> None:
    async with opened(place) as store:
        for seed in range(4):
            walk, id, turns = Walk(seed, rewards=False), f"walk {seed}", 0
            await store.create(session(id))
            stored = 0
            while walk.trajectory.num_writes < 60:
                walk.step()
                if walk.random.random() < 0.4 and walk.trajectory.num_writes > stored:
                    records = tuple(write_records(walk.trajectory, stored))
                    await store.append(id, TurnRecord(turns, stored, records, {}), request=f"r{turns}")
                    turns, stored = turns + 1, stored + len(records)
            rest = tuple(write_records(walk.trajectory, stored))
            await store.append(id, TurnRecord(turns, stored, rest, {}), request="last")
            again = Trajectory(
                name=walk.trajectory.name,
                vocab_size=walk.trajectory.vocab_size,
                logprobs=walk.trajectory.has_logprobs,
                metadata=walk.trajectory.metadata,
            )
            async for one in store.turns(id):
                replay_records(again, one.records)
            assert to_bytes(again) == to_bytes(walk.trajectory)
            assert_same(walk.model, again)


# -- many at once


@in_loop
async def test_of_two_gateways_that_write_the_same_turn_one_wins(place: str) -> None:
    async with opened(place) as one, opened(place) as two:
        await one.create(session("a"))
        winners = []
        for number in range(30):
            outcomes = await asyncio.gather(
                *(
                    store.append("a", turn(number, number, name), request=f"{name!r} {number}")
                    for name, store in ((b"one", one), (b"two", two))
                ),
                return_exceptions=True,
            )
            assert sorted(map(str, map(type, outcomes))) == sorted(map(str, (type(None), Conflict))), outcomes
            winners.append((b"one", b"two")[outcomes.index(None)])
        assert [found.records async for found in two.turns("a")] == [(name,) for name in winners]


@in_loop
async def test_a_seal_and_a_turn_at_once_end_in_one_of_two_ways(place: str) -> None:
    async with opened(place) as one, opened(place) as two:
        for at in range(20):
            id = f"s{at}"
            await one.create(session(id))
            dropped = two.set_state(id, State.DROPPED)
            stored, _ = await asyncio.gather(
                one.append(id, turn(0, 0, b"x"), request="r"), dropped, return_exceptions=True
            )
            assert stored is None or isinstance(stored, Closed)
            known = await one.session(id)
            assert known is not None
            assert known.state is State.DROPPED
            assert known.turns == (1 if stored is None else 0)
            assert [found async for found in one.turns(id)] == []
