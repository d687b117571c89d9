"""Sessions in tables: the statements that SQLite and PostgreSQL share. What differs is how each is talked to."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from .packing import as_json, pack, pack_records, unpack, unpack_records
from .store import Closed, Conflict, Label, Missing, SessionInfo, State, StoreError, Taken, TurnRecord

TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS format (version INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, state TEXT NOT NULL, created DOUBLE PRECISION NOT NULL, "
    "metadata TEXT NOT NULL, settings TEXT NOT NULL, records INTEGER NOT NULL DEFAULT 0, "
    "turns INTEGER NOT NULL DEFAULT 0, sampled BIGINT NOT NULL DEFAULT 0, prompted BIGINT NOT NULL DEFAULT 0, "
    "key TEXT UNIQUE)",
    "CREATE INDEX IF NOT EXISTS sessions_by_age ON sessions (created, id)",
    "CREATE INDEX IF NOT EXISTS sessions_by_state ON sessions (state)",
    "CREATE TABLE IF NOT EXISTS turns (session TEXT NOT NULL, number INTEGER NOT NULL, first INTEGER NOT NULL, "
    "sampled INTEGER NOT NULL, prompted INTEGER NOT NULL, request TEXT NOT NULL, "
    "info {bytes} NOT NULL, records {bytes} NOT NULL, channels {bytes} NOT NULL, PRIMARY KEY (session, number))",
    "CREATE TABLE IF NOT EXISTS names (session TEXT NOT NULL, name TEXT NOT NULL, turn INTEGER NOT NULL, "
    "PRIMARY KEY (session, name))",
    "CREATE TABLE IF NOT EXISTS requests (session TEXT NOT NULL, request TEXT NOT NULL, "
    "began DOUBLE PRECISION NOT NULL, info TEXT NOT NULL, ended TEXT, PRIMARY KEY (session, request))",
    "CREATE TABLE IF NOT EXISTS labels (session TEXT NOT NULL, turn INTEGER NOT NULL, name TEXT NOT NULL, "
    "value TEXT NOT NULL, PRIMARY KEY (session, turn, name))",
)
VERSION: Final = 1
_COLUMNS: Final = "id, state, created, metadata, settings, records, turns, sampled, prompted"
_BY_ID: Final = f"SELECT {_COLUMNS} FROM sessions WHERE id = ?"
_BY_KEY: Final = f"SELECT {_COLUMNS} FROM sessions WHERE key = ?"
_ORDER: Final = tuple(State)
_SESSIONS: Final = 64
_TURNS: Final = 16
"""How many sessions and turns are read at a time."""
_ASKED: Final = 500
"""How many sessions one statement asks for."""

Rows = list[tuple[Any, ...]]
Result = TypeVar("Result")


class Transaction(Protocol):
    """A transaction under way. Placeholders are ``?``."""

    def change(self, sql: str, *values: Any) -> int:
        """Run a statement; how many rows it changed."""
        ...

    def rows(self, sql: str, *values: Any) -> Rows: ...


class Database(Protocol):
    """A way to talk to a database."""

    where: str
    temporary: bool
    contains: str
    """The function that says where a text is in another one: 0 where it is not."""

    async def get(self, sql: str, *values: Any) -> Rows:
        """A short read: a few small rows, found by an index."""
        ...

    async def read(self, sql: str, *values: Any) -> Rows:
        """A read that may take a while."""
        ...

    async def write(self, write: Callable[[Transaction], Result]) -> Result:
        """Run statements in one transaction, which is on disk when this returns, or undone when it raises.

        They may be run again where it is not known whether they were.
        """
        ...

    async def close(self) -> None: ...


class SQLStore:
    """A `Store` in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.where, self.temporary = database.where, database.temporary

    # -- sessions

    async def create(self, session: SessionInfo, *, key: str | None = None) -> SessionInfo:
        if not _is_storable(session.id + (key or "")):
            raise StoreError(f"session {session.id!r} cannot be stored: no NUL and no lone surrogate in its id or key")
        made = (session.id, session.state.value, session.created, as_json(session.metadata), as_json(session.settings))

        def write(transaction: Transaction) -> Rows:
            owner = transaction.rows("SELECT id FROM sessions WHERE key = ?", key) if key is not None else []
            if owner and owner[0][0] != session.id:
                raise Taken(f"session {session.id!r} cannot be made: its key belongs to another session")
            new = transaction.change(
                "INSERT INTO sessions (id, state, created, metadata, settings, key) VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (id) DO NOTHING",
                *made, key,
            )  # fmt: skip
            if not new and key is not None and not owner:
                raise Taken(f"session {session.id!r} is there already, with another key or none")
            return transaction.rows(_BY_ID, session.id)

        return _session((await self._database.write(write))[0])

    async def session(self, id: str) -> SessionInfo | None:
        return _one(await self._database.get(_BY_ID, id)) if _is_storable(id) else None

    async def session_of_key(self, key: str) -> SessionInfo | None:
        return _one(await self._database.get(_BY_KEY, key)) if _is_storable(key) else None

    async def sessions(
        self, *, state: State | None = None, search: str = "", after: SessionInfo | None = None
    ) -> AsyncIterator[SessionInfo]:
        wanted, values = ["(created, id) < (?, ?)"], list[Any]()
        if state is not None:
            wanted.append("state = ?")
            values.append(state.value)
        if search:
            contains = self._database.contains
            wanted.append(f"({contains}(lower(id), ?) > 0 OR {contains}(lower(metadata), ?) > 0)")
            values += [_storable(search).lower(), as_json(search)[1:-1].lower()]
        where = " AND ".join(wanted)
        sql = f"SELECT {_COLUMNS} FROM sessions WHERE {where} ORDER BY created DESC, id DESC LIMIT {_SESSIONS}"
        last: tuple[float, str] = (float("inf"), "") if after is None else (after.created, after.id)
        while True:
            rows = await self._database.read(sql, *last, *values)
            for row in rows:
                yield _session(row)
            if len(rows) < _SESSIONS:
                return
            last = (rows[-1][2], rows[-1][0])

    async def count(self, state: State = State.OPEN) -> int:
        rows = await self._database.read("SELECT count(*) FROM sessions WHERE state = ?", state.value)
        return int(rows[0][0])

    async def update(
        self, id: str, *, metadata: Mapping[str, Any] | None = None, settings: Mapping[str, Any] | None = None
    ) -> SessionInfo:
        new = {"metadata": metadata, "settings": settings}
        given = {name: as_json(value) for name, value in new.items() if value is not None}

        def write(transaction: Transaction) -> Rows:
            for name, text in given.items():
                transaction.change(f"UPDATE sessions SET {name} = ? WHERE id = ?", text, id)
            return transaction.rows(_BY_ID, id)

        rows = await self._database.write(write)
        if not rows:
            raise _missing(id)
        return _session(rows[0])

    async def set_state(self, id: str, state: State) -> None:
        before = [each.value for each in _ORDER[: _ORDER.index(state) + 1]]
        marks = ", ".join("?" * len(before))

        def write(transaction: Transaction) -> None:
            sql = f"UPDATE sessions SET state = ? WHERE id = ? AND state IN ({marks})"
            if not transaction.change(sql, state.value, id, *before):
                raise _closed(transaction, id)
            if state is State.DROPPED:
                for table in ("turns", "names", "requests", "labels"):
                    transaction.change(f"DELETE FROM {table} WHERE session = ?", id)

        await self._database.write(write)

    # -- turns

    async def begin(self, id: str, request: str, info: Mapping[str, Any]) -> None:
        values = (request, time.time(), as_json(info), id, State.OPEN.value)

        def write(transaction: Transaction) -> None:
            noted = transaction.change(
                "INSERT INTO requests (session, request, began, info) "
                "SELECT id, ?, ?, ? FROM sessions WHERE id = ? AND state = ? "
                "ON CONFLICT (session, request) "
                "DO UPDATE SET began = excluded.began, info = excluded.info, ended = NULL",
                *values,
            )
            if not noted:
                raise _closed(transaction, id)

        await self._database.write(write)

    async def abandon(self, id: str, request: str, why: str) -> None:
        def write(transaction: Transaction) -> None:
            sql = "UPDATE requests SET ended = ? WHERE session = ? AND request = ? AND ended IS NULL"
            transaction.change(sql, _storable(why), id, request)

        await self._database.write(write)

    async def append(self, id: str, turn: TurnRecord, *, request: str, names: Sequence[str] = ()) -> None:
        info = as_json(turn.info)

        def write(transaction: Transaction) -> None:
            records = pack_records(turn.records)
            grown = transaction.change(
                "UPDATE sessions SET records = ?, turns = ?, sampled = sampled + ?, prompted = prompted + ? "
                "WHERE id = ? AND state = ? AND records = ? AND turns = ?",
                turn.first + len(turn.records), turn.number + 1, turn.sampled, turn.prompted,
                id, State.OPEN.value, turn.first, turn.number,
            )  # fmt: skip
            if not grown:
                there = transaction.rows(
                    "SELECT request, records FROM turns WHERE session = ? AND number = ?", id, turn.number
                )
                if there == [(request, records)]:
                    return
                raise _refusal(transaction, id, turn)
            transaction.change(
                "INSERT INTO turns (session, number, first, sampled, prompted, request, info, records, channels) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                id, turn.number, turn.first, turn.sampled, turn.prompted, request,
                pack(info.encode("ascii")), records, pack(turn.channels),
            )  # fmt: skip
            for name in names:
                transaction.change(
                    "INSERT INTO names (session, name, turn) VALUES (?, ?, ?) "
                    "ON CONFLICT (session, name) DO UPDATE SET turn = excluded.turn",
                    id, name, turn.number,
                )  # fmt: skip
            transaction.change("DELETE FROM requests WHERE session = ? AND request = ?", id, request)

        await self._database.write(write)

    async def incomplete(self, id: str) -> list[Mapping[str, Any]]:
        rows = await self._database.read(
            "SELECT request, began, info, ended FROM requests WHERE session = ? ORDER BY began, request", id
        )
        return [
            {**json.loads(info), "request": request, "began": began, "ended": ended}
            for request, began, info, ended in rows
        ]

    async def turns(self, id: str, first: int = 0) -> AsyncIterator[TurnRecord]:
        sql = (
            "SELECT number, first, records, info, channels, sampled, prompted FROM turns "
            f"WHERE session = ? AND number >= ? ORDER BY number LIMIT {_TURNS}"
        )
        while True:
            rows = await self._database.read(sql, id, first)
            for number, start, records, info, channels, sampled, prompted in rows:
                said = json.loads(unpack(info))
                yield TurnRecord(number, start, unpack_records(records), said, unpack(channels), sampled, prompted)
            if len(rows) < _TURNS:
                return
            first = rows[-1][0] + 1

    async def turn_named(self, id: str, name: str) -> int | None:
        if not _is_storable(id + name):
            return None
        rows = await self._database.get("SELECT turn FROM names WHERE session = ? AND name = ?", id, name)
        return rows[0][0] if rows else None

    # -- labels

    async def label(self, id: str, labels: Sequence[Label]) -> None:
        given = [(each.name, as_json(each.value), -1 if each.turn is None else each.turn) for each in labels]

        def write(transaction: Transaction) -> None:
            rows = transaction.rows("SELECT state FROM sessions WHERE id = ?", id)
            if not rows or rows[0][0] == State.DROPPED:
                raise _closed(transaction, id)
            for name, value, turn in given:
                transaction.change(
                    "INSERT INTO labels (session, name, value, turn) VALUES (?, ?, ?, ?) "
                    "ON CONFLICT (session, turn, name) DO UPDATE SET value = excluded.value",
                    id, name, value, turn,
                )  # fmt: skip

        await self._database.write(write)

    async def labels(self, id: str) -> list[Label]:
        sql = "SELECT name, value, turn FROM labels WHERE session = ? ORDER BY turn, name"
        rows = await self._database.read(sql, id)
        return [Label(name, json.loads(value), None if turn < 0 else turn) for name, value, turn in rows]

    async def values(self, name: str, ids: Sequence[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for at in range(0, len(ids), _ASKED):
            some = ids[at : at + _ASKED]
            places = ", ".join("?" * len(some))
            sql = f"SELECT session, value FROM labels WHERE turn = -1 AND name = ? AND session IN ({places})"
            found |= {id: json.loads(value) for id, value in await self._database.read(sql, name, *some)}
        return found

    async def close(self) -> None:
        await self._database.close()


def prepare(transaction: Transaction, bytes_type: str) -> None:
    """Make the tables, or see that those that are there can be read."""
    transaction.change(TABLES[0])
    found = transaction.rows("SELECT version FROM format")
    if found and found[0][0] != VERSION:
        raise StoreError(
            f"it is a store of version {found[0][0]}, and this tokentrace reads version {VERSION}: use the tokentrace "
            "that made it, or another place"
        )
    for statement in TABLES[1:]:
        transaction.change(statement.format(bytes=bytes_type))
    if not found:
        transaction.change("INSERT INTO format (version) VALUES (?)", VERSION)


def _refusal(transaction: Transaction, id: str, turn: TurnRecord) -> StoreError:
    """Why a turn cannot be added."""
    rows = transaction.rows("SELECT state, records, turns FROM sessions WHERE id = ?", id)
    if not rows or rows[0][0] != State.OPEN:
        return _closed(transaction, id)
    _, records, turns = rows[0]
    return Conflict(
        f"session {id!r} has {turns} turns and {records} records, and a turn came that follows on {turn.number} and "
        f"{turn.first}: read what is new, and write again"
    )


def _closed(transaction: Transaction, id: str) -> StoreError:
    rows = transaction.rows("SELECT state FROM sessions WHERE id = ?", id)
    return Closed(f"session {id!r} is {rows[0][0]}") if rows else _missing(id)


def _missing(id: str) -> Missing:
    return Missing(f"there is no session {id!r}")


def _one(rows: Rows) -> SessionInfo | None:
    return _session(rows[0]) if rows else None


def _session(row: tuple[Any, ...]) -> SessionInfo:
    id, state, created, metadata, settings, *counts = row
    return SessionInfo(id, State(state), created, json.loads(metadata), json.loads(settings), *counts)


def _is_storable(text: str) -> bool:
    return text == _storable(text)


def _storable(text: str) -> str:
    """A text that every database takes: no lone surrogates, no NUL."""
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\0", "\\u0000").encode("utf-8", "backslashreplace").decode("utf-8")
