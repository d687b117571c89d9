"""Listing, and concurrent writers, of whom one wins: the same in SQLite and in a real PostgreSQL."""

import asyncio
from typing import Any

import pytest

from tests.loop import in_loop
from tests.store.support import opened, session
from tokentrace.store.packing import pack, pack_records, unpack_turn
from tokentrace.store.store import Closed, Conflict, State, Store, StoreError, TurnRecord


async def ids(store: Store, **filters: Any) -> list[str]:
    return [info.id async for info in store.sessions(**filters)]


@in_loop
async def test_sessions_are_listed_newest_first_and_searched_by_id_and_metadata(place: str) -> None:
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
        assert len(await ids(store, state=State.SEALED)) == await store.count(State.SEALED) == 50
        assert await ids(store, state=State.SEALED, search="t14") == ["s147", "s144", "s141"]


@in_loop
async def test_of_two_gateways_that_write_the_same_turn_one_wins(place: str) -> None:
    async with opened(place) as one, opened(place) as two:
        await one.create(session("a"))
        winners = []
        for number in range(30):
            turns = {name: TurnRecord(number, number, (name,), {}) for name in (b"one", b"two")}
            first = one.append("a", turns[b"one"], request=f"one {number}")
            second = two.append("a", turns[b"two"], request=f"two {number}")
            outcomes = await asyncio.gather(first, second, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {type(None), Conflict}, outcomes
            winners.append([*turns][outcomes.index(None)])
        assert [turn.records async for turn in two.turns("a")] == [(name,) for name in winners]


@in_loop
async def test_a_drop_and_a_turn_at_once_end_in_one_of_two_ways(place: str) -> None:
    async with opened(place) as one, opened(place) as two:
        for at in range(20):
            id = f"s{at}"
            await one.create(session(id))
            append = one.append(id, TurnRecord(0, 0, (b"x",), {}), request="r")
            stored, _ = await asyncio.gather(append, two.set_state(id, State.DROPPED), return_exceptions=True)
            assert stored is None or isinstance(stored, Closed)
            info = await one.session(id)
            assert info is not None
            assert (info.state, info.turns) == (State.DROPPED, 1 if stored is None else 0)
            assert [turn async for turn in one.turns(id)] == []


def test_a_damaged_turn_is_a_store_error() -> None:
    info, records = pack(b"[1, 2]" + b" " * 99), pack_records([b"one", b""])
    assert unpack_turn(records, info, pack(b"three")) == ((b"one", b""), [1, 2], b"three")
    wrong: list[Any] = [
        info[:-1],
        b"\1" + info[1:],
        info[:9] + b"x" + info[10:],
        info[:3],
        "text",
        5,
        b"\0{",
        b"\0\xff",
    ]
    for turn in (*((records, one, b"") for one in wrong), *((one, info, b"") for one in wrong)):
        with pytest.raises(StoreError, match="a stored turn is damaged"):
            unpack_turn(*turn)
