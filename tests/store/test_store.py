"""Stores keep what they acknowledged, whole and once, whoever else writes; SQLite and a real PostgreSQL alike."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.store.support import check_whole, made_up_turn, session
from tests.trajectory.model import assert_same
from tests.trajectory.walk import Walk
from tokentrace.store.opening import open_store
from tokentrace.store.store import (
    Closed,
    Conflict,
    Label,
    Missing,
    State,
    Store,
    StoreError,
    Taken,
    TurnRecord,
)
from tokentrace.trajectory import Trajectory, to_bytes
from tokentrace.trajectory.storage import replay_records, write_records

ODD = "Ünï %_\\ \"quoted\" 'x' \n\t\0 \ud800 🙂"
"""Characters that some database, or some way of searching, would stumble over."""


@asynccontextmanager
async def opened(where: str) -> AsyncIterator[Store]:
    store = open_store(where)
    try:
        yield store
    finally:
        await store.close()


def in_store(where: str, test: Callable[[Store], Awaitable[None]]) -> None:
    """Run a test in a store, which is closed afterwards."""

    async def run() -> None:
        async with opened(where) as store:
            await test(store)

    asyncio.run(run())


def turn(number: int, first: int, *records: bytes, **rest: Any) -> TurnRecord:
    return TurnRecord(number, first, records, rest.pop("info", {}), **rest)


async def ids(store: Store, **which: Any) -> list[str]:
    return [found.id async for found in store.sessions(**which)]


# -- sessions


def test_a_session_is_made_once_and_keeps_what_it_was_made_with(place: str) -> None:
    async def test(store: Store) -> None:
        made = session("a", 12.5, metadata={"task": ODD, "n": [1, 2.5, None]}, settings={"temperature": 1.0})
        assert await store.create(made, key="hash") == made
        assert await store.create(session("a", 99.0, metadata={"other": 1}), key="hash") == made
        assert await store.create(session("a")) == made
        assert await store.session("a") == made
        assert await store.session_of_key("hash") == made
        assert await store.session("b") is None
        assert await store.session_of_key("a") is None

    in_store(place, test)


def test_a_key_belongs_to_one_session(place: str) -> None:
    async def test(store: Store) -> None:
        await store.create(session("a"), key="of a")
        with pytest.raises(Taken, match="its key belongs to another session"):
            await store.create(session("b"), key="of a")
        assert await store.session("b") is None
        with pytest.raises(Taken, match="another key"):
            await store.create(session("a"), key="new")
        assert await store.session_of_key("new") is None
        await store.create(session("c"))
        await store.create(session("d"))  # no key is nobody's
        with pytest.raises(Taken):
            await store.create(session("c"), key="new")
        raced = await asyncio.gather(
            *(store.create(session(f"r{at}"), key="raced") for at in range(8)), return_exceptions=True
        )
        assert sorted(type(one).__name__ for one in raced) == ["SessionInfo"] + ["Taken"] * 7
        assert len([found for found in await ids(store) if found.startswith("r")]) == 1

    in_store(place, test)


def test_ids_that_no_database_could_hold_name_nothing(place: str) -> None:
    async def test(store: Store) -> None:
        for odd in ("\0", "a\0b", "\ud800", "Ü"):
            assert await store.session(odd) is None
            assert await store.session_of_key(odd) is None
            assert await store.turn_named(odd, odd) is None
        for odd in ("a\0b", "\ud800"):
            with pytest.raises(StoreError, match="cannot be stored"):
                await store.create(session(odd))
            with pytest.raises(StoreError, match="cannot be stored"):
                await store.create(session("a"), key=odd)
        assert (await store.create(session("Ü ñ"))).id == "Ü ñ"

    in_store(place, test)


def test_sessions_are_listed_from_the_newest_on_and_found_by_what_is_in_them(place: str) -> None:
    async def test(store: Store) -> None:
        for at in range(150):  # more than are read at a time
            await store.create(session(f"s{at:03}", float(at // 2), metadata={"task": f"T{at}"}))
        everything = [f"s{at:03}" for at in range(149, -1, -1)]
        assert await ids(store) == everything
        last = await store.session("s100")
        assert await ids(store, after=last) == everything[50:]
        assert await ids(store, search="t14") == [
            "s149",
            "s148",
            "s147",
            "s146",
            "s145",
            "s144",
            "s143",
            "s142",
            "s141",
            "s140",
            "s014",
        ]
        assert await ids(store, search="S01") == [f"s{at:03}" for at in range(19, 9, -1)]
        for at in range(0, 150, 3):
            await store.set_state(f"s{at:03}", State.SEALED)
        assert await store.count() == 100
        assert await store.count(State.SEALED) == 50
        assert await store.count(State.DROPPED) == 0
        assert len(await ids(store, state=State.SEALED)) == 50
        assert await ids(store, state=State.SEALED, search="t14") == ["s147", "s144", "s141"]

    in_store(place, test)


@pytest.mark.parametrize("wanted", ["Ünï", "%_", "_\\", "\\", '"quoted"', "'x'", "\n", "\0", "\ud800", "🙂", "%"])
def test_a_search_takes_every_character_as_itself(place: str, wanted: str) -> None:
    async def test(store: Store) -> None:
        await store.create(session("a", metadata={"task": ODD}))
        await store.create(session("b", metadata={"task": "plain text, nothing odd"}))
        assert await ids(store, search=wanted) == ["a"]
        assert await ids(store, search=wanted * 60_000) == []

    in_store(place, test)


def test_metadata_and_settings_can_be_replaced(place: str) -> None:
    async def test(store: Store) -> None:
        await store.create(session("a", metadata={"one": 1}, settings={"two": 2}))
        changed = await store.update("a", metadata={"three": ODD})
        assert (changed.metadata, changed.settings) == ({"three": ODD}, {"two": 2})
        changed = await store.update("a", settings={})
        assert (changed.metadata, changed.settings) == ({"three": ODD}, {})
        assert await store.session("a") == changed
        with pytest.raises(Missing, match="no session 'b'"):
            await store.update("b", metadata={})

    in_store(place, test)


def test_a_session_goes_from_open_to_dropped_and_never_back(place: str) -> None:
    async def test(store: Store) -> None:
        await store.create(session("a", metadata={"kept": True}), key="hash")
        await store.begin("a", "r0", {})
        await store.append("a", turn(0, 0, b"x", sampled=3, prompted=9), request="r0", names=["name"])
        await store.begin("a", "r1", {})
        await store.label("a", [Label("reward", 1.0)])
        await store.set_state("a", State.SEALED)
        await store.set_state("a", State.SEALED)
        with pytest.raises(Closed, match="session 'a' is sealed"):
            await store.append("a", turn(1, 1, b"y"), request="r1")
        with pytest.raises(Closed):
            await store.begin("a", "r2", {})
        await store.label("a", [Label("late", 2.0)])
        await store.set_state("a", State.EXPORTED)
        with pytest.raises(Closed, match="is exported"):
            await store.set_state("a", State.SEALED)
        assert len([one async for one in store.turns("a")]) == 1
        await store.set_state("a", State.DROPPED)
        with pytest.raises(Closed, match="is dropped"):
            await store.set_state("a", State.EXPORTED)
        with pytest.raises(Closed):
            await store.label("a", [Label("reward", 1.0)])
        assert [one async for one in store.turns("a")] == []
        assert await store.labels("a") == []
        assert await store.incomplete("a") == []
        assert await store.turn_named("a", "name") is None
        left = await store.session_of_key("hash")
        assert left is not None
        assert (left.state, left.metadata, left.turns, left.sampled) == (State.DROPPED, {"kept": True}, 1, 3)
        for wrong in (store.set_state("b", State.SEALED), store.begin("b", "r", {}), store.label("b", [])):
            with pytest.raises(Missing):
                await wrong
        with pytest.raises(Missing):
            await store.append("b", turn(0, 0, b"x"), request="r")

    in_store(place, test)


# -- turns


def test_turns_come_back_as_they_were_given(place: str) -> None:
    given = [
        turn(0, 0, b"", b"\0\1", info={"odd": ODD, "nested": [{"a": None}]}, channels=b"\0" * 500, sampled=2**31 - 1),
        turn(1, 2, random.Random(0).randbytes(300_000), info={"text": "long " * 50_000}, prompted=7),
        turn(2, 3, *[b"r%d" % at for at in range(1000)]),
        turn(3, 1003),
        *(turn(4 + at, 1003 + at, b"x" * at) for at in range(40)),
    ]  # fmt: skip

    async def test(store: Store) -> None:
        await store.create(session("a"))
        for one in given:
            await store.append("a", one, request=f"r{one.number}")
        assert [one async for one in store.turns("a")] == given
        assert [one async for one in store.turns("a", 30)] == given[30:]
        assert [one async for one in store.turns("a", 44)] == []
        known = await store.session("a")
        assert known is not None
        assert (known.records, known.turns) == (1043, 44)
        assert (known.sampled, known.prompted) == (2**31 - 1, 7)

    in_store(place, test)


def test_a_turn_that_does_not_follow_is_refused_whole(place: str) -> None:
    async def test(store: Store) -> None:
        await store.create(session("a"))
        await store.append("a", turn(0, 0, b"x", b"y"), request="r0", names=["first"])
        await store.begin("a", "r1", {"kept": 1})
        for wrong in (turn(0, 0, b"z"), turn(0, 0, b"x", b"y"), turn(1, 1, b"z"), turn(1, 3, b"z"), turn(2, 2, b"z")):
            with pytest.raises(Conflict, match="has 1 turns and 2 records"):
                await store.append("a", wrong, request="r1", names=["first", "second"])
        assert [one async for one in store.turns("a")] == [turn(0, 0, b"x", b"y")]
        assert await store.turn_named("a", "first") == 0
        assert await store.turn_named("a", "second") is None
        assert [one["request"] for one in await store.incomplete("a")] == ["r1"]

    in_store(place, test)


def test_a_turn_that_is_sent_twice_is_stored_once(place: str) -> None:
    async def test(store: Store) -> None:
        await store.create(session("a"))
        for _ in range(2):
            await store.append("a", turn(0, 0, b"x", sampled=5), request="r0", names=["n"])
        await store.append("a", turn(1, 1, b"y"), request="r1")
        await store.append("a", turn(0, 0, b"x", sampled=5), request="r0")
        known = await store.session("a")
        assert known is not None
        assert (known.turns, known.sampled) == (2, 5)
        with pytest.raises(Conflict):
            await store.append("a", turn(0, 0, b"other"), request="r0")

    in_store(place, test)


def test_turns_are_found_by_name_in_their_own_session(place: str) -> None:
    async def test(store: Store) -> None:
        for id in ("a", "b"):
            await store.create(session(id))
            for number in range(3):
                names = [f"{id}{number}", "latest", "latest"]
                await store.append(id, turn(number, number, b"x"), request=f"r{number}", names=names)
        await store.append("b", turn(3, 3, b"x"), request="r3")
        assert [await store.turn_named("a", name) for name in ("a0", "a2", "latest", "b0")] == [0, 2, 2, None]
        assert await store.turn_named("b", "latest") == 2

    in_store(place, test)


def test_requests_that_gave_no_turn_are_known(place: str) -> None:
    async def test(store: Store) -> None:
        await store.create(session("a"))
        for request in ("r0", "r1", "r2"):
            await store.begin("a", request, {"dialect": "chat", "request": "shadowed"})
        await store.append("a", turn(0, 0, b"x"), request="r1")
        await store.abandon("a", "r2", f"the engine {ODD}")
        await store.abandon("a", "r2", "again")
        await store.abandon("a", "r1", "it gave a turn")
        await store.abandon("a", "never begun", "nobody knows it")
        left = await store.incomplete("a")
        assert [one["request"] for one in left] == ["r0", "r2"]
        assert left[0]["ended"] is None
        assert left[0]["dialect"] == "chat"
        assert left[1]["ended"].startswith("the engine Ünï")
        await store.begin("a", "r2", {})
        assert [one["ended"] for one in await store.incomplete("a")] == [None, None]

    in_store(place, test)


def test_a_trajectory_is_rebuilt_from_the_turns_of_its_session(place: str) -> None:
    async def test(store: Store) -> None:
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

    in_store(place, test)


# -- many at once


def test_many_sessions_at_once_are_each_kept_whole(place: str) -> None:
    async def write(store: Store, id: str) -> None:
        await store.create(session(id))
        trajectory = Trajectory()
        for number in range(5):
            await store.begin(id, f"r{number}", {})
            await store.append(id, made_up_turn(trajectory, number, id), request=f"r{number}")

    async def test(store: Store) -> None:
        names = [f"s{at}" for at in range(60)]
        await asyncio.gather(*(write(store, id) for id in names))
        for id in names:
            assert await check_whole(store, id) == 5
            assert await store.incomplete(id) == []

    in_store(place, test)


def test_of_two_gateways_that_write_the_same_turn_one_wins(place: str) -> None:
    async def test(one: Store) -> None:
        async with opened(place) as two:
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

    in_store(place, test)


def test_a_seal_and_a_turn_at_once_end_in_one_of_two_ways(place: str) -> None:
    async def test(one: Store) -> None:
        async with opened(place) as two:
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

    in_store(place, test)


def test_who_gives_up_waiting_does_not_take_back_the_write(place: str) -> None:
    async def test(store: Store) -> None:
        await store.create(session("a"))
        task = asyncio.create_task(store.append("a", turn(0, 0, b"x"), request="r0"))
        await asyncio.sleep(0)  # it has begun
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.gather(*(store.begin("a", f"r{at}", {}) for at in range(1, 30)))
        await store.append("a", turn(0, 0, b"x"), request="r0")
        assert [found async for found in store.turns("a")] == [turn(0, 0, b"x")]

    in_store(place, test)


# -- labels


def test_labels_are_kept_by_session_turn_and_name(place: str) -> None:
    async def test(store: Store) -> None:
        await store.create(session("a"))
        await store.create(session("b"))
        await store.label("a", [Label("reward", 0.5), Label("reward", 1, turn=0), Label("note", {"odd": ODD}, turn=1)])
        await store.label("a", [Label("reward", 0.75), Label("advantage", None)])
        await store.label("b", [Label("reward", -1.0)])
        assert await store.labels("a") == [
            Label("advantage", None),
            Label("reward", 0.75),
            Label("reward", 1, turn=0),
            Label("note", {"odd": ODD}, turn=1),
        ]
        assert await store.labels("b") == [Label("reward", -1.0)]
        assert await store.labels("c") == []
        many = [f"n{number}" for number in range(1200)]
        assert await store.values("reward", ["a", *many, "b", "c"]) == {"a": 0.75, "b": -1.0}
        assert await store.values("note", ["a"]) == {}, "of a turn, not of the session"
        assert await store.values("reward", []) == {}

    in_store(place, test)


# -- opening and closing


def test_a_store_is_the_same_when_it_is_opened_again(place: str) -> None:
    async def test() -> None:
        trajectory = Trajectory()
        for number in range(4):
            async with opened(place) as store:
                await store.create(session("a"))
                await store.append("a", made_up_turn(trajectory, number, "a"), request=f"r{number}")
        async with opened(place) as store:
            assert await check_whole(store, "a") == 4
            assert not store.temporary

    asyncio.run(test())


def test_a_closed_store_says_so(place: str) -> None:
    async def test() -> None:
        async with opened(place) as store:
            await store.create(session("a"))
        await store.close()
        for work in (store.session("a"), store.create(session("b")), store.labels("a")):
            with pytest.raises(StoreError, match="is closed"):
                await work

    asyncio.run(test())


def test_writes_that_wait_are_done_before_a_store_is_closed(place: str) -> None:
    async def test() -> None:
        async with opened(place) as store:
            made = [asyncio.create_task(store.create(session(f"s{at}"))) for at in range(50)]
            await asyncio.sleep(0)
        await asyncio.gather(*made)
        async with opened(place) as store:
            assert await store.count() == 50

    asyncio.run(test())
