"""A PostgreSQL store raises StoreError if its server is down, busy or restarting, and recovers by itself."""

import asyncio
import socket
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psycopg
import pytest

from tests.loop import in_loop
from tests.store.support import Postgres, check_whole, made_up_turn, postgres_server, session
from tokentrace.store import postgres as postgres_module
from tokentrace.store.postgres import postgres_store
from tokentrace.store.store import StoreError
from tokentrace.trajectory import Trajectory

SECRET = "hush-hush-4711"


@pytest.fixture(scope="module")
def stoppable() -> Iterator[Postgres]:
    """A server that tests may stop."""
    with postgres_server() as server:
        yield server


def test_tables_are_created_once_however_many_gateways_start(postgres: Postgres) -> None:
    url = postgres.fresh()
    with ThreadPoolExecutor(8) as threads:
        stores = list(threads.map(lambda _: postgres_store(url), range(8)))
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT version FROM format").fetchall() == [(1,)]
    for store in stores:
        asyncio.run(store.close())


@pytest.mark.parametrize("after", ["UPDATE sessions", "INSERT INTO turns", "DELETE FROM requests", "COMMIT"])
@in_loop
async def test_a_turn_whose_connection_is_lost_half_way_is_stored_once(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """Also if it was stored and only the acknowledgement was lost."""
    url = postgres.fresh()
    lost: list[str] = []
    execute, once = postgres_module._execute, postgres_module._Postgres._once

    def execute_and_disconnect(connection: postgres_module.Connection, sql: str, *values: object) -> Any:
        result = execute(connection, sql, *values)
        if sql.startswith(after) and not lost:
            lost.append(sql)
            connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        return result

    def run_and_fail(self: object, work: object) -> object:
        result = once(self, work)  # type: ignore[arg-type, var-annotated]
        if after == "COMMIT" and not lost:
            lost.append(after)
            raise postgres_module._Lost("the connection was lost while it was committed")
        return result

    store = postgres_store(url)
    await store.create(session("a"))
    with monkeypatch.context() as patch:
        patch.setattr(postgres_module, "_execute", execute_and_disconnect)
        patch.setattr(postgres_module._Postgres, "_once", run_and_fail)
        await store.append("a", made_up_turn(Trajectory(), 0, "a"), request="r0")
    assert lost
    assert await check_whole(store, "a") == 1
    await store.close()


@in_loop
async def test_the_store_reconnects_after_a_restart_of_the_server(stoppable: Postgres) -> None:
    url = stoppable.fresh()

    store, trajectory = postgres_store(url, patience=1), Trajectory()
    await store.create(session("a"))
    await store.append("a", made_up_turn(trajectory, 0, "a"), request="r0")
    turn = made_up_turn(trajectory, 1, "a")
    await asyncio.to_thread(stoppable.stop)
    try:
        for work in (store.session("a"), store.append("a", turn, request="r1"), store.begin("a", "r2", {})):
            with pytest.raises(StoreError, match="postgresql://"):
                await work
    finally:
        await asyncio.to_thread(stoppable.start)
    stored = False
    async with asyncio.timeout(60):
        while not stored:  # retry until the server is back, as a gateway does
            with suppress(StoreError):
                await store.append("a", turn, request="r1")
                stored = True
    assert await check_whole(store, "a") == 2
    assert await store.incomplete("a") == []
    await store.close()


@in_loop
async def test_when_all_connections_are_busy_a_request_waits_and_is_then_refused(postgres: Postgres) -> None:
    url = postgres.fresh()

    store, patient = postgres_store(url, connections=2, patience=1), postgres_store(url)
    await patient.create(session("a"))
    with psycopg.connect(url) as other:
        other.execute("LOCK TABLE sessions IN ACCESS EXCLUSIVE MODE")
        outcomes = await asyncio.gather(*(store.session("a") for _ in range(8)), return_exceptions=True)
        assert all(isinstance(outcome, StoreError) for outcome in outcomes), outcomes
        assert "all 2 connections are busy" in " ".join(map(str, outcomes))
    assert await store.session("a") is not None
    await store.append("a", made_up_turn(Trajectory(), 0, "a"), request="r")
    assert await check_whole(store, "a") == 1
    await store.close()
    await patient.close()


PASSWORDS = ["{}", "pa/{}", "pa@{}", "pa#{}", "pa?{}", "pa:{}", "%zz{}", "pa {}"]


@pytest.mark.parametrize(
    "url",
    [
        *(f"postgresql://user:{password}@127.0.0.1:{{port}}/db" for password in PASSWORDS),
        "postgres://user:{}@nowhere.invalid/db",
        "postgresql://user@127.0.0.1:{port}/db?password={}&nonsense=1",
        "postgresql://user@127.0.0.1:{port}/db?password={}",
        "postgresql://user:{0}@127.0.0.1:{port}/db?sslmode={0}",
        "PostgreSQL://user:{}@[::1:{port}/db",
    ],
)
def test_no_error_contains_the_password(url: str) -> None:
    with socket.socket() as closed:  # bound but not listening: nothing answers on this port
        closed.bind(("127.0.0.1", 0))
        dsn = url.format(SECRET, port=closed.getsockname()[1])
        with pytest.raises(StoreError) as caught:
            postgres_store(dsn, patience=1)
    assert SECRET not in "".join(traceback.format_exception(caught.value))
