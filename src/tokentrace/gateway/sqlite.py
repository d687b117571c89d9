"""Sessions in one SQLite file: the default store, for one gateway.

One thread writes. It takes all writes that wait, does each of them by itself (a savepoint), and commits them together:
many sessions share one wait for the disk. Reads have a connection of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import apsw

from ..files import owned
from .sql import Execute, Rows, SQLStore, prepare
from .store import StoreError

Write = Callable[[Execute], None]


def sqlite_store(path: str | os.PathLike[str]) -> SQLStore:
    """The store in a file, which is made if it is not there. Only its owner may read it."""
    return SQLStore(_SQLite(Path(path)))


class _SQLite:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._writes: queue.SimpleQueue[tuple[Write, Future[None]] | None] = queue.SimpleQueue()
        with contextlib.suppress(FileExistsError):
            open(path, "xb", opener=owned).close()
        try:
            self._reader, writer = _connect(path), _connect(path)
            with writer:
                prepare(_executor(writer), "BLOB", lambda: list(writer.execute("SELECT version FROM format")))
        except apsw.Error as error:
            raise StoreError(f"{path}: {error}; give another file") from error
        self._reading = threading.Lock()
        self._thread = threading.Thread(target=self._write_all, args=(writer,), name="tokentrace-store", daemon=True)
        self._thread.start()

    async def read(self, sql: str, *values: Any) -> Rows:
        def read() -> Rows:
            with self._reading:
                return list(self._reader.execute(sql, values))

        try:
            return await asyncio.to_thread(read)
        except apsw.Error as error:
            raise StoreError(f"{self._path}: {error}") from error

    async def write(self, write: Write) -> None:
        future: Future[None] = Future()
        self._writes.put((write, future))
        await asyncio.shield(asyncio.wrap_future(future))

    async def close(self) -> None:
        self._writes.put(None)
        await asyncio.to_thread(self._thread.join)
        self._reader.close()

    def _write_all(self, connection: apsw.Connection) -> None:
        stopped = False
        while not stopped:
            waiting = [self._writes.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting.append(self._writes.get_nowait())
            stopped = None in waiting
            self._commit(connection, [each for each in waiting if each is not None])
        connection.close()

    def _commit(self, connection: apsw.Connection, writes: list[tuple[Write, Future[None]]]) -> None:
        """Do several writes in one transaction; one that fails takes back itself alone."""
        outcomes: list[Exception | None] = []
        try:
            with connection:
                for write, _ in writes:
                    try:
                        with connection:
                            write(_executor(connection))
                        outcomes.append(None)
                    except (StoreError, apsw.ConstraintError) as error:
                        outcomes.append(error if isinstance(error, StoreError) else self._failed(error))
        except Exception as error:  # whatever it was, those that wait have to hear of it
            outcomes = [self._failed(error)] * len(writes)
        for (_, future), outcome in zip(writes, outcomes, strict=True):
            if outcome is None:
                future.set_result(None)
            else:
                future.set_exception(outcome)

    def _failed(self, error: Exception) -> StoreError:
        return StoreError(f"{self._path}: {error}; nothing was recorded")


def _connect(path: Path) -> apsw.Connection:
    connection = apsw.Connection(os.fspath(path))
    connection.set_busy_timeout(5000)
    connection.pragma("journal_mode", "wal")
    connection.pragma("synchronous", "full")
    return connection


def _executor(connection: apsw.Connection) -> Execute:
    def execute(sql: str, *values: Any) -> int:
        connection.execute(sql, values)
        return connection.changes()

    return execute
