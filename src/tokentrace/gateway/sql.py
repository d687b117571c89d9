"""Sessions in tables: the statements that SQLite and PostgreSQL share. What differs is how each is talked to."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from .store import Conflict, Label, SessionInfo, State, StoreError, TurnRecord

TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, state TEXT NOT NULL, created DOUBLE PRECISION NOT NULL, "
    "metadata TEXT NOT NULL, settings TEXT NOT NULL, records INTEGER NOT NULL DEFAULT 0, "
    "turns INTEGER NOT NULL DEFAULT 0, key TEXT UNIQUE)",
    "CREATE TABLE IF NOT EXISTS turns (session TEXT NOT NULL, number INTEGER NOT NULL, first INTEGER NOT NULL, "
    "info TEXT NOT NULL, request TEXT NOT NULL, PRIMARY KEY (session, number), UNIQUE (session, request))",
    "CREATE TABLE IF NOT EXISTS records (session TEXT NOT NULL, number INTEGER NOT NULL, turn INTEGER NOT NULL, "
    "record {bytes} NOT NULL, PRIMARY KEY (session, number))",
    "CREATE TABLE IF NOT EXISTS requests (session TEXT NOT NULL, request TEXT NOT NULL, "
    "began DOUBLE PRECISION NOT NULL, info TEXT NOT NULL, ended TEXT, PRIMARY KEY (session, request))",
    "CREATE TABLE IF NOT EXISTS labels (session TEXT NOT NULL, turn INTEGER NOT NULL, name TEXT NOT NULL, "
    "value TEXT NOT NULL, PRIMARY KEY (session, turn, name))",
    "CREATE TABLE IF NOT EXISTS format (version INTEGER NOT NULL)",
)
VERSION: Final = 1
_COLUMNS: Final = "id, state, created, metadata, settings, records, turns"
_PAGE: Final = 64

Rows = list[tuple[Any, ...]]
Execute = Callable[..., int]
"""Runs a statement with its values inside a transaction, and tells how many rows it changed."""


class Database(Protocol):
    """A way to talk to a database. Placeholders are ``?``."""

    async def read(self, sql: str, *values: Any) -> Rows: ...

    async def write(self, write: Callable[[Execute], None]) -> None:
        """Run statements in one transaction, which is on disk when this returns, or undone when it raises."""
        ...

    async def close(self) -> None: ...


class SQLStore:
    """A `Store` in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._read = database.read

    # -- sessions

    async def create(self, session: SessionInfo, *, key: str | None = None) -> SessionInfo:
        values = (session.id, session.state, session.created, _json(session.metadata), _json(session.settings), key)
        await self._run(
            "INSERT INTO sessions (id, state, created, metadata, settings, key) VALUES (?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (id) DO NOTHING",
            *values,
        )
        made = await self.session(session.id)
        if made is None:
            raise StoreError(f"session {session.id!r} could not be made: another one has its key")
        return made

    async def session(self, id: str) -> SessionInfo | None:
        return _one(await self._read(f"SELECT {_COLUMNS} FROM sessions WHERE id = ?", id))

    async def session_of_key(self, key: str) -> SessionInfo | None:
        return _one(await self._read(f"SELECT {_COLUMNS} FROM sessions WHERE key = ?", key))

    async def sessions(self, *, state: State | None = None, search: str = "") -> AsyncIterator[SessionInfo]:
        after: tuple[float, str] = (float("inf"), "")
        like = f"%{search}%"
        while True:
            rows = await self._read(
                f"SELECT {_COLUMNS} FROM sessions WHERE (created, id) < (?, ?) AND state LIKE ? "
                "AND (id LIKE ? OR metadata LIKE ?) ORDER BY created DESC, id DESC LIMIT ?",
                *after, state or "%", like, like, _PAGE,
            )  # fmt: skip
            for row in rows:
                yield _session(row)
            if len(rows) < _PAGE:
                return
            after = (rows[-1][2], rows[-1][0])

    async def set_state(self, id: str, state: State) -> None:
        def write(execute: Execute) -> None:
            execute("UPDATE sessions SET state = ? WHERE id = ?", state, id)
            if state is State.DROPPED:
                for table in ("records", "turns", "requests", "labels"):
                    execute(f"DELETE FROM {table} WHERE session = ?", id)

        await self._database.write(write)

    # -- turns

    async def begin(self, id: str, request: str, info: Mapping[str, Any]) -> None:
        await self._run(
            "INSERT INTO requests (session, request, began, info) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (session, request) DO UPDATE SET began = excluded.began, info = excluded.info, ended = NULL",
            id, request, time.time(), _json(info),
        )  # fmt: skip

    async def abandon(self, id: str, request: str, why: str) -> None:
        await self._run("UPDATE requests SET ended = ? WHERE session = ? AND request = ?", why, id, request)

    async def append(self, id: str, turn: TurnRecord, *, request: str) -> None:
        def write(execute: Execute) -> None:
            grown = execute(
                "UPDATE sessions SET records = ?, turns = ? WHERE id = ? AND state = ? AND records = ? AND turns = ?",
                turn.first + len(turn.records), turn.number + 1, id, State.OPEN, turn.first, turn.number,
            )  # fmt: skip
            if not grown:
                raise Conflict(f"session {id!r} is not open, or has grown past its {turn.number} turns")
            execute(
                "INSERT INTO turns (session, number, first, info, request) VALUES (?, ?, ?, ?, ?)",
                id, turn.number, turn.first, _json(turn.info), request,
            )  # fmt: skip
            for at, record in enumerate(turn.records):
                execute(
                    "INSERT INTO records (session, number, turn, record) VALUES (?, ?, ?, ?)",
                    id, turn.first + at, turn.number, record,
                )  # fmt: skip
            execute("DELETE FROM requests WHERE session = ? AND request = ?", id, request)

        await self._database.write(write)

    async def incomplete(self, id: str) -> list[Mapping[str, Any]]:
        rows = await self._read("SELECT request, began, info, ended FROM requests WHERE session = ?", id)
        return [
            {"request": request, "began": began, "ended": ended, **json.loads(info)}
            for request, began, info, ended in rows
        ]

    async def turns(self, id: str, first: int = 0) -> AsyncIterator[TurnRecord]:
        while True:
            rows = await self._read(
                "SELECT number, first, info FROM turns WHERE session = ? AND number >= ? ORDER BY number LIMIT ?",
                id, first, _PAGE,
            )  # fmt: skip
            for number, start, info in rows:
                records = await self._read(
                    "SELECT record FROM records WHERE session = ? AND number >= ? AND turn = ? ORDER BY number",
                    id, start, number,
                )  # fmt: skip
                yield TurnRecord(number, start, tuple(record for (record,) in records), json.loads(info))
            if len(rows) < _PAGE:
                return
            first = rows[-1][0] + 1

    async def answered(self, id: str, request: str) -> int | None:
        rows = await self._read("SELECT number FROM turns WHERE session = ? AND request = ?", id, request)
        return rows[0][0] if rows else None

    # -- labels

    async def label(self, id: str, labels: Sequence[Label]) -> None:
        def write(execute: Execute) -> None:
            for label in labels:
                execute(
                    "INSERT INTO labels (session, turn, name, value) VALUES (?, ?, ?, ?) "
                    "ON CONFLICT (session, turn, name) DO UPDATE SET value = excluded.value",
                    id, -1 if label.turn is None else label.turn, label.name, _json(label.value),
                )  # fmt: skip

        await self._database.write(write)

    async def labels(self, id: str) -> list[Label]:
        rows = await self._read("SELECT name, value, turn FROM labels WHERE session = ? ORDER BY turn, name", id)
        return [Label(name, json.loads(value), None if turn < 0 else turn) for name, value, turn in rows]

    async def close(self) -> None:
        await self._database.close()

    async def _run(self, sql: str, *values: Any) -> None:
        def write(execute: Execute) -> None:
            execute(sql, *values)

        await self._database.write(write)


def prepare(execute: Execute, bytes_type: str, versions: Callable[[], Rows]) -> None:
    """Make the tables, or see that those that are there can be read."""
    for table in TABLES:
        execute(table.format(bytes=bytes_type))
    found = versions()
    if not found:
        execute("INSERT INTO format (version) VALUES (?)", VERSION)
    elif found[0][0] != VERSION:
        raise StoreError(f"the store is of version {found[0][0]}; this tokentrace reads version {VERSION}")


def _one(rows: list[tuple[Any, ...]]) -> SessionInfo | None:
    return _session(rows[0]) if rows else None


def _session(row: tuple[Any, ...]) -> SessionInfo:
    id, state, created, metadata, settings, records, turns = row
    return SessionInfo(id, State(state), created, json.loads(metadata), json.loads(settings), records, turns)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))
