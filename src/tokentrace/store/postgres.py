"""Sessions in PostgreSQL: for several gateways behind a load balancer, any of which serves any session.

Each of a few threads has a connection of its own, opened when it is first needed and again when it was lost. Nothing of
a transaction is done on the event loop, so a request that is cancelled cannot leave one half done.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Final, TypeVar

import psycopg
from psycopg import conninfo

from .sql import Result, Rows, StoreError, Transaction, prepare
from .store import Store

_LOCK: Final = 7_460_953
"""The number under which gateways take turns to make the tables."""
_URL: Final = re.compile(
    r"postgres(?:ql)?://(?:[^:@/?#]*(?::[^@/?#]*)?@)?[^@/?#]*(?:/[^@/?#]*)?(?:\?[^#]*)?", re.IGNORECASE
)
_DURABLE: Final = (
    "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
)

Connection = psycopg.Connection[tuple[Any, ...]]
Done = TypeVar("Done")


def postgres_store(url: str, *, connections: int = 8, patience: float = 10.0) -> Store:
    """The store in a database, whose tables are made if they are not there.

    `patience` is how many seconds a connection, a lock or a statement may take. A lost connection is opened again.
    """
    return Store(_Postgres(url, connections, patience))


class _Postgres:
    contains = "strpos"
    temporary = False

    def __init__(self, url: str, connections: int, patience: float) -> None:
        self._settings, self._secret, self.where = _read_url(url, patience)
        self._patience = patience
        self._mine = threading.local()
        self._open: set[Connection] = set()
        self._closed = False
        try:
            connection = self._connect()
            try:
                with connection.transaction():
                    connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
                    prepare(_Statements(connection), "BYTEA")
            finally:
                self._forget(connection)
        except psycopg.Error as error:
            raise self._failed(error) from None  # what it says may hold the password
        except StoreError as error:
            raise StoreError(f"{self.where}: {error}") from None
        self._threads = ThreadPoolExecutor(connections, thread_name_prefix="tokentrace-store")
        self._busy = f"all {connections} connections are busy"

    async def get(self, sql: str, *values: Any) -> Rows:
        return await self._do(lambda connection: connection.execute(_placed(sql), values).fetchall())

    read = get

    async def write(self, write: Callable[[Transaction], Result]) -> Result:
        def commit(connection: Connection) -> Result:
            with connection.transaction():
                return write(_Statements(connection))

        return await self._do(commit)

    async def _do(self, work: Callable[[Connection], Done]) -> Done:
        """Do something in a thread that has a connection. Where none is free for too long, it is not begun."""
        if self._closed:
            raise StoreError(f"{self.where} is closed")
        future = self._threads.submit(self._run, work)
        timer = asyncio.get_running_loop().call_later(self._patience, future.cancel)  # does nothing once it has begun
        try:
            return await asyncio.shield(asyncio.wrap_future(future))  # who gives up waiting does not take back the work
        except asyncio.CancelledError:
            if future.cancelled():
                raise StoreError(f"{self.where}: {self._busy}; nothing was recorded") from None
            raise
        finally:
            timer.cancel()

    # -- in a thread

    def _run(self, work: Callable[[Connection], Done]) -> Done:
        """Do something, and once more where the connection was lost or another gateway was quicker by a hair."""
        try:
            return self._once(work)
        except (psycopg.OperationalError, psycopg.errors.UniqueViolation) as error:
            if not isinstance(error, psycopg.errors.UniqueViolation) and not self._is_lost():
                raise self._failed(error) from None
        except (psycopg.Error, UnicodeError) as error:
            raise self._failed(error) from None
        try:
            return self._once(work)
        except (psycopg.Error, UnicodeError) as error:
            raise self._failed(error) from None

    def _once(self, work: Callable[[Connection], Done]) -> Done:
        connection: Connection | None = getattr(self._mine, "connection", None)
        if connection is None:
            connection = self._mine.connection = self._connect()
        try:
            return work(connection)
        finally:
            if connection.closed:
                self._forget(connection)
                self._mine.connection = None

    def _is_lost(self) -> bool:
        return getattr(self._mine, "connection", None) is None

    def _connect(self) -> Connection:
        connection = psycopg.connect(**self._settings, autocommit=True)
        try:
            connection.execute(_DURABLE)
        except BaseException:
            connection.close()
            raise
        self._open.add(connection)
        return connection

    def _forget(self, connection: Connection) -> None:
        connection.close()
        self._open.discard(connection)

    def _failed(self, error: Exception) -> StoreError:
        diagnosis = getattr(error, "diag", None)
        said = " ".join(((diagnosis and diagnosis.message_primary) or str(error) or type(error).__name__).split())
        if self._secret:
            said = said.replace(self._secret, "…")
        return StoreError(f"{self.where}: {said[:300]}; nothing was acknowledged")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._threads.shutdown)
        for connection in list(self._open):
            connection.close()


class _Statements:
    """A transaction's statements."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def change(self, sql: str, *values: Any) -> int:
        return self._connection.execute(_placed(sql), values).rowcount

    def rows(self, sql: str, *values: Any) -> Rows:
        return self._connection.execute(_placed(sql), values).fetchall()


@cache
def _placed(sql: str) -> Any:
    return sql.replace("?", "%s")


def _read_url(url: str, patience: float) -> tuple[dict[str, Any], str, str]:
    """What to connect with, the password, and the URL without it."""
    unreadable = StoreError(
        "the URL of the store cannot be read: write it as postgresql://user:password@host:port/database, with "
        "characters like @ / : ? # in the password as %40 %2F %3A %3F %23"
    )
    if not _URL.fullmatch(url):
        raise unreadable
    try:
        given: dict[str, Any] = dict(conninfo.conninfo_to_dict(url))
    except psycopg.Error:
        raise unreadable from None
    seconds, milliseconds = max(2, round(patience)), round(patience * 1000)
    settings = {
        "connect_timeout": seconds,
        "tcp_user_timeout": milliseconds,
        "options": f"-c statement_timeout={milliseconds} -c lock_timeout={milliseconds}",
        "application_name": "tokentrace",
        **given,
    }
    host, port = given.get("host") or given.get("hostaddr") or "", given.get("port")
    where = f"postgresql://{host}{f':{port}' if port else ''}/{given.get('dbname') or ''}"
    return settings, str(given.get("password") or ""), where
