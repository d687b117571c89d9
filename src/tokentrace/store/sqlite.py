"""Sessions in one SQLite file: the default store, for one process.

One thread writes. It commits all pending writes together, each in a savepoint. Short reads run on
the event loop, as in WAL mode they never wait for a writer; longer ones have a thread.
"""

import asyncio
import contextlib
import os
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import apsw

from ..errors import InputError
from ..files import owned
from .sql import Execute, Result, Rows, StoreError, prepare
from .store import Store

_APPLICATION = 0x54545231
"""Marks the file as ours: "TTR1"."""

Waiting = tuple[Callable[[Execute], Any], "asyncio.Future[Any]", asyncio.AbstractEventLoop]


def sqlite_store(path: str | os.PathLike[str] | None, *, patience: float = 5.0) -> Store:
    """Open the store in a file that only its owner may read, or a temporary one.

    `patience`: how many seconds to wait while another process locks the file.
    """
    if path is not None:
        if Path(path).is_dir():
            raise StoreError(f"{path} is a folder: name a file in it")
        if not Path(path).absolute().parent.is_dir():
            raise StoreError(f"{path}: there is no folder {Path(path).absolute().parent}; create it first")
        return Store(_SQLite(Path(path), patience, None))
    folder = Path(tempfile.mkdtemp(prefix="tokentrace-"))
    try:
        return Store(_SQLite(folder / "store.db", patience, folder))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


class _SQLite:
    contains = "instr"

    def __init__(self, path: Path, patience: float, folder: Path | None) -> None:
        self._path, self._folder = path, folder
        self.temporary = folder is not None
        self.where = "a temporary store" if self.temporary else os.fspath(path)
        self._connections: list[apsw.Connection] = []
        try:
            writer = self._open(patience)
            self._inline, self._reader = self._connect(0), self._connect(patience)
        except BaseException:
            self._disconnect()
            raise
        self._closed = False
        self._writes: queue.SimpleQueue[Waiting | None] = queue.SimpleQueue()
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="tokentrace-store-reader")
        self._thread = threading.Thread(
            target=self._write_all, args=(writer,), name="tokentrace-store", daemon=True
        )
        self._thread.start()

    def _open(self, patience: float) -> apsw.Connection:
        try:
            with contextlib.suppress(FileExistsError):
                open(self._path, "xb", opener=owned).close()
            connection = self._connect(patience)
            connection.execute("BEGIN IMMEDIATE")
            application = connection.pragma("application_id")
            if application != _APPLICATION:
                if application or connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall():
                    raise StoreError("it is the database of another program: use another path")
                connection.pragma("application_id", _APPLICATION)
            prepare(partial(_execute, connection), "BLOB")
            connection.execute("COMMIT")
            connection.pragma("journal_mode", "wal")
            return connection
        except (OSError, InputError) as error:
            problem = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            raise StoreError(f"{self.where} cannot be opened: {problem}") from error
        except apsw.NotADBError as error:
            raise StoreError(f"{self.where} is not a store: use another path") from error
        except apsw.Error as error:
            raise StoreError(f"{self.where} cannot be opened: {_describe(error)}") from error
        except StoreError as error:
            raise StoreError(f"{self.where}: {error}") from error

    def _connect(self, patience: float) -> apsw.Connection:
        connection = apsw.Connection(os.fspath(self._path), flags=apsw.SQLITE_OPEN_READWRITE)
        self._connections.append(connection)
        connection.set_busy_timeout(int(patience * 1000))
        connection.pragma("synchronous", "off" if self.temporary else "full")
        return connection

    async def get(self, sql: str, *values: Any) -> Rows:
        try:
            return self._rows(self._inline, sql, values)
        except _Busy:  # another process recovers or copies the file
            return await self.read(sql, *values)

    async def read(self, sql: str, *values: Any) -> Rows:
        self._check_open()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, self._rows, self._reader, sql, values)

    def _rows(self, connection: apsw.Connection, sql: str, values: tuple[Any, ...]) -> Rows:
        self._check_open()
        try:
            return connection.execute(sql, values).fetchall()
        except apsw.BusyError as error:
            raise _Busy(f"{self.where}: {_describe(error)}") from error
        except (apsw.Error, UnicodeError) as error:
            raise StoreError(f"{self.where}: {_describe(error)}") from error

    async def write(self, write: Callable[[Execute], Result]) -> Result:
        self._check_open()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._writes.put((write, future, loop))
        return await asyncio.shield(future)  # a cancelled caller does not cancel the write

    def _write_all(self, connection: apsw.Connection) -> None:
        stopped = False
        while not stopped:
            waiting = [self._writes.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting.append(self._writes.get_nowait())
            stopped = None in waiting
            writes = [each for each in waiting if each is not None]
            outcomes = self._commit(connection, [write for write, _, _ in writes]) if writes else []
            loops: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
            for (_, future, loop), outcome in zip(writes, outcomes, strict=True):
                loops.setdefault(loop, []).append((future, outcome))
            for loop, answers in loops.items():
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                    loop.call_soon_threadsafe(_settle, answers)

    def _commit(self, connection: apsw.Connection, writes: list[Callable[[Execute], Any]]) -> list[Any]:
        """Run writes in one transaction, or in one each if that fails."""
        try:
            connection.execute("BEGIN IMMEDIATE")
            if len(writes) == 1:
                outcomes = [writes[0](partial(_execute, connection))]
            else:
                outcomes = [self._attempt(connection, write) for write in writes]
            connection.execute("COMMIT")
        except Exception as error:  # every caller needs an answer
            if connection.in_transaction:
                with contextlib.suppress(apsw.Error):
                    connection.execute("ROLLBACK")
            if len(writes) == 1 or isinstance(error, apsw.BusyError):
                return [self._failed(error)] * len(writes)
            return [outcome for write in writes for outcome in self._commit(connection, [write])]
        return outcomes

    def _attempt(self, connection: apsw.Connection, write: Callable[[Execute], Any]) -> Any:
        """Run a write. Returns its result, or its error after undoing it."""
        connection.execute("SAVEPOINT one")
        try:
            result = write(partial(_execute, connection))
        except Exception as error:
            if not connection.in_transaction:  # some errors undo everything
                raise
            connection.execute("ROLLBACK TO one")
            result = self._failed(error)
        connection.execute("RELEASE one")
        return result

    def _failed(self, error: Exception) -> StoreError:
        if isinstance(error, StoreError):
            return error
        return StoreError(f"{self.where}: {_describe(error)}; nothing was recorded")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._writes.put(None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._readers.shutdown)
        await asyncio.to_thread(self._disconnect)  # closing the last one merges the log into the file
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def _disconnect(self) -> None:
        for connection in self._connections:
            connection.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"{self.where} is closed")


class _Busy(StoreError):  # noqa: N818
    """Another process locks the file."""


def _execute(connection: apsw.Connection, sql: str, *values: Any) -> Rows:
    return connection.execute(sql, values).fetchall()


def _settle(answers: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, outcome in answers:
        if not future.done():
            failed = isinstance(outcome, Exception)
            (future.set_exception if failed else future.set_result)(outcome)


def _describe(error: Exception) -> str:
    advice: dict[type[Exception], str] = {
        apsw.FullError: "there is no room left on its disk",
        apsw.BusyError: "another process locks it",
        apsw.LockedError: "another process locks it",
        apsw.ReadOnlyError: "it is read-only",
        apsw.CorruptError: "the file is damaged: restore it from a copy, or use another path",
        apsw.CantOpenError: "it is not readable, or its folder is not writable",
    }
    message, explanation = str(error) or type(error).__name__, advice.get(type(error))
    return f"{explanation} ({message})" if explanation else message
