"""Sessions in PostgreSQL: for several gateways behind a load balancer, any of which serves any session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import psycopg
from psycopg_pool import ConnectionPool, PoolTimeout

from .sql import Execute, Rows, SQLStore, prepare
from .store import StoreError

_LOCK: Final = 7_460_953
"""The number under which gateways take turns to make the tables."""


def postgres_store(url: str, *, connections: int = 8, patience: float = 10.0) -> SQLStore:
    """The store in a database, whose tables are made if they are not there.

    A lost connection is opened again; a write that was under way then is not repeated, and raises `StoreError`.
    """
    return SQLStore(_Postgres(url, connections, patience))


class _Postgres:
    def __init__(self, url: str, connections: int, patience: float) -> None:
        check = ConnectionPool.check_connection
        self._pool = ConnectionPool(url, min_size=1, max_size=connections, timeout=patience, check=check, open=False)
        try:
            self._pool.open(wait=True, timeout=patience)
            with self._pool.connection() as connection:
                connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
                prepare(
                    _executor(connection), "BYTEA", lambda: connection.execute("SELECT version FROM format").fetchall()
                )
        except (psycopg.Error, PoolTimeout) as error:
            self._pool.close()
            raise StoreError(f"PostgreSQL: {_said(error)}") from error

    async def read(self, sql: str, *values: Any) -> Rows:
        def read() -> Rows:
            with self._pool.connection() as connection:
                return connection.execute(_placed(sql), values).fetchall()

        rows: Rows = await self._in_thread(read, "")
        return rows

    async def write(self, write: Callable[[Execute], None]) -> None:
        def commit() -> None:
            with self._pool.connection() as connection:
                write(_executor(connection))

        await self._in_thread(commit, "; nothing was acknowledged")

    async def _in_thread(self, work: Callable[[], Any], then: str) -> Any:
        try:
            return await asyncio.to_thread(work)
        except (psycopg.Error, PoolTimeout) as error:
            raise StoreError(f"PostgreSQL: {_said(error)}{then}") from error

    async def close(self) -> None:
        await asyncio.to_thread(self._pool.close)


def _placed(sql: str) -> Any:
    return sql.replace("?", "%s")


def _executor(connection: psycopg.Connection[Any]) -> Execute:
    return lambda sql, *values: connection.execute(_placed(sql), values).rowcount


def _said(error: Exception) -> str:
    """What a database says, in one line. It may name the host, but never the password."""
    return " ".join(str(error).split())[:300] or type(error).__name__
