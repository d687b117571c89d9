"""Sessions in PostgreSQL, for several gateways behind a load balancer.

Transactions run in threads, so a cancelled request cannot leave one half done.
"""

import asyncio
import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, TypeVar

import psycopg
from psycopg import conninfo
from psycopg_pool import ConnectionPool, PoolTimeout

from .sql import Execute, Result, Rows, StoreError, prepare
from .store import Store

_LOCK = 7_460_953
_URL = re.compile(
    r"postgres(?:ql)?://(?:[^:@/?#]*(?::[^@/?#]*)?@)?[^@/?#]*(?:/[^@/?#]*)?(?:\?[^#]*)?", re.IGNORECASE
)
_DURABLE = """
SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'
"""

Connection = psycopg.Connection[tuple[Any, ...]]
Returned = TypeVar("Returned")

logging.getLogger("psycopg.pool").setLevel(logging.ERROR)  # every operation reports its own failure


def postgres_store(url: str, *, connections: int = 8, patience: float = 10.0) -> Store:
    """Open the store in a database. Raises StoreError if that fails.

    `patience`: how many seconds a connection, a lock or a statement may take.
    """
    return Store(_Postgres(url, connections, patience))


class _Lost(Exception):  # noqa: N818
    """A lost connection, or a row inserted meanwhile: try once more."""


class _Postgres:
    contains = "strpos"
    temporary = False

    def __init__(self, url: str, connections: int, patience: float) -> None:
        settings, self._secret, self.where = _read_url(url, patience)
        self._busy = f"all {connections} connections are busy, or the server is unreachable"
        self._closed = False
        try:
            with psycopg.connect(**settings, autocommit=True) as connection, connection.transaction():
                connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
                prepare(partial(_execute, connection), "BYTEA")
        except psycopg.Error as error:
            raise self._failed(error) from None  # its message may contain the password
        except StoreError as error:
            raise StoreError(f"{self.where}: {error}") from None
        self._pool = ConnectionPool(
            kwargs={**settings, "autocommit": True},
            configure=_make_durable,
            min_size=0,
            max_size=connections,
            timeout=patience,
            reconnect_timeout=patience,  # the default waits minutes between attempts after an outage
            open=True,
        )
        self._threads = ThreadPoolExecutor(4 * connections, thread_name_prefix="tokentrace-store")

    async def get(self, sql: str, *values: Any) -> Rows:
        return await self._do(lambda connection: _execute(connection, sql, *values))

    read = get

    async def write(self, write: Callable[[Execute], Result]) -> Result:
        def commit(connection: Connection) -> Result:
            with connection.transaction():
                return write(partial(_execute, connection))

        return await self._do(commit)

    async def _do(self, work: Callable[[Connection], Returned]) -> Returned:
        if self._closed:
            raise StoreError(f"{self.where} is closed")
        running = asyncio.get_running_loop().run_in_executor(self._threads, self._run, work)
        return await asyncio.shield(running)  # a cancelled caller does not cancel the work

    def _run(self, work: Callable[[Connection], Returned]) -> Returned:
        try:
            return self._once(work)
        except _Lost:
            self._pool.check()  # other idle connections may be lost as well
        try:
            return self._once(work)
        except _Lost as error:
            raise self._failed(error.__cause__ or error) from None

    def _once(self, work: Callable[[Connection], Returned]) -> Returned:
        try:
            with self._pool.connection() as connection:
                try:
                    return work(connection)
                except psycopg.errors.UniqueViolation as error:
                    raise _Lost from error
                except psycopg.OperationalError as error:
                    if connection.closed:
                        raise _Lost from error
                    raise
        except PoolTimeout:
            raise StoreError(f"{self.where}: {self._busy}; nothing was recorded") from None
        except (psycopg.Error, UnicodeError) as error:
            raise self._failed(error) from None

    def _failed(self, error: BaseException) -> StoreError:
        diagnosis = getattr(error, "diag", None)
        text = (diagnosis and diagnosis.message_primary) or str(error) or type(error).__name__
        text = " ".join(text.split())
        if self._secret:
            text = text.replace(self._secret, "…")
        return StoreError(f"{self.where}: {text[:300]}; nothing was acknowledged")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._threads.shutdown)
        await asyncio.to_thread(self._pool.close)


def _make_durable(connection: Connection) -> None:
    connection.execute(_DURABLE)


def _execute(connection: Connection, sql: str, *values: Any) -> Rows:
    cursor = connection.execute(_placed(sql), values)
    return cursor.fetchall() if cursor.description else []


@cache
def _placed(sql: str) -> Any:
    return sql.replace("?", "%s")


def _read_url(url: str, patience: float) -> tuple[dict[str, Any], str, str]:
    how = "write it as postgresql://user:password@host:port/database, with %40 for @ in the password"
    unreadable = StoreError(f"the URL of the store cannot be read: {how}")
    if not _URL.fullmatch(url):
        raise unreadable
    try:
        parameters: dict[str, Any] = dict(conninfo.conninfo_to_dict(url))
    except psycopg.Error:
        raise unreadable from None
    seconds, milliseconds = max(2, round(patience)), round(patience * 1000)
    settings = {
        "connect_timeout": seconds,
        "tcp_user_timeout": milliseconds,
        "options": f"-c statement_timeout={milliseconds} -c lock_timeout={milliseconds}",
        "application_name": "tokentrace",
        **parameters,
    }
    host, port = parameters.get("host") or parameters.get("hostaddr") or "", parameters.get("port")
    where = f"postgresql://{host}{f':{port}' if port else ''}/{parameters.get('dbname') or ''}"
    return settings, str(parameters.get("password") or ""), where
