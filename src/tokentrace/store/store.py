"""The store of sessions, for rollouts and the gateway alike.

A session's record is append-only. A turn is one `append`, and on disk when that returns. If another
writer was faster, it raises `Conflict`: read the new turns, and try again.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ..values.plain import json_bytes
from .packing import as_json, pack, pack_records, unpack_turn
from .sql import Database, Execute, Rows
from .sql import StoreError as StoreError  # noqa: PLC0414


class Conflict(StoreError):  # noqa: N818
    """Another writer was faster: read its turns, and write again."""


class Closed(StoreError):  # noqa: N818
    """The session is sealed, exported or dropped."""


class Missing(StoreError):  # noqa: N818
    """There is no such session."""


class KeyConflict(StoreError):  # noqa: N818
    """A session's key belongs to another one, or it has another key."""


class State(StrEnum):
    """The life of a session, in order."""

    OPEN = "open"
    SEALED = "sealed"
    """No more turns; rewards can be added."""
    EXPORTED = "exported"
    """Its rows were exported after it was sealed."""
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class SessionInfo:
    id: str
    state: State
    created: float
    metadata: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Forced sampling parameters, budgets, the matcher."""
    records: int = 0
    turns: int = 0
    sampled: int = 0
    prompted: int = 0
    """Prompt tokens of its turns."""

    def grown(self, turn: TurnRecord) -> SessionInfo:
        about = (self.id, self.state, self.created, self.metadata, self.settings)
        sampled, prompted = self.sampled + turn.sampled, self.prompted + turn.prompted
        records = turn.first + len(turn.records)
        return SessionInfo(*about, records, turn.number + 1, sampled, prompted)


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One stored turn: the records of its trajectory, and its conversation."""

    number: int
    first: int
    records: tuple[bytes, ...]
    info: Any
    """See `gateway.turns`."""
    channels: bytes = b""
    """Packed by `pack_channels`."""
    sampled: int = 0
    prompted: int = 0
    """Tokens of completion and prompt."""


@dataclass(frozen=True, slots=True)
class Label:
    name: str
    value: Any
    turn: int | None = None


_COLUMNS = "id, state, created, metadata, settings, records, turns, sampled, prompted"
_BY_ID = f"SELECT {_COLUMNS} FROM sessions WHERE id = ?"
_BY_KEY = f"SELECT {_COLUMNS} FROM sessions WHERE key = ?"
_ORDER = tuple(State)
_SESSIONS = 64
_TURNS = 16
_BATCH = 500
"""So many sessions are named in one statement."""


class Store:
    """Sessions in a database. Safe to use from many tasks of one event loop.

    Methods raise StoreError if the store cannot be used; the next call tries again. A failed
    write took effect completely or not at all, and may be repeated.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.where = database.where
        """A path, or a URL without its password."""
        self.temporary = database.temporary

    async def create(self, session: SessionInfo, *, key: str | None = None) -> SessionInfo:
        """Create a session, or return the one that already has this id.

        `key` is a hash. Raises KeyConflict if another session has it, or the session has
        another one.
        """
        if not is_storable(session.id + (key or "")):
            raise StoreError(f"the id or key of session {session.id!r} has a NUL or a lone surrogate")
        values = (session.id, session.state.value, session.created, as_json(session.metadata))
        settings = as_json(session.settings)

        def write(execute: Execute) -> Rows:
            owner = execute("SELECT id FROM sessions WHERE key = ?", key) if key is not None else []
            if owner and owner[0][0] != session.id:
                problem = "cannot be created: its key belongs to another session"
                raise KeyConflict(f"session {session.id!r} {problem}")
            new = execute(
                "INSERT INTO sessions (id, state, created, metadata, settings, key) VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (id) DO NOTHING RETURNING id",
                *values, settings, key,
            )  # fmt: skip
            if not new and key is not None and not owner:
                raise KeyConflict(f"session {session.id!r} already exists, with another key or none")
            return execute(_BY_ID, session.id)

        return _session((await self._database.write(write))[0])

    async def session(self, id: str) -> SessionInfo | None:
        return _one(await self._database.get(_BY_ID, id)) if is_storable(id) else None

    async def session_of_key(self, key: str) -> SessionInfo | None:
        return _one(await self._database.get(_BY_KEY, key)) if is_storable(key) else None

    async def sessions(
        self, *, state: State | None = None, search: str = "", after: SessionInfo | None = None
    ) -> AsyncIterator[SessionInfo]:
        """Yield sessions, newest first: in `state`, with `search` in id or metadata, after `after`."""
        conditions, values = ["(created, id) < (?, ?)"], list[Any]()
        if state is not None:
            conditions.append("state = ?")
            values.append(state.value)
        if search:
            contains = self._database.contains
            conditions.append(f"({contains}(lower(id), ?) > 0 OR {contains}(lower(metadata), ?) > 0)")
            values += [_storable(search).lower(), as_json(search)[1:-1].lower()]
        where = " AND ".join(conditions)
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
        self,
        id: str,
        *,
        metadata: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> SessionInfo:
        """Replace metadata or settings that are not None. Raises Missing."""
        new = {"metadata": metadata, "settings": settings}
        texts = {name: as_json(value) for name, value in new.items() if value is not None}

        def write(execute: Execute) -> Rows:
            for name, text in texts.items():
                execute(f"UPDATE sessions SET {name} = ? WHERE id = ?", text, id)
            return execute(_BY_ID, id)

        info = _one(await self._database.write(write))
        if info is None:
            raise Missing(f"there is no session {id!r}")
        return info

    async def set_state(self, id: str, state: State) -> None:
        """Seal a session, mark it as exported, or drop it with its turns, labels and requests.

        Raises Missing, or Closed if the session is already in a later state.
        """
        before = [each.value for each in _ORDER[: _ORDER.index(state) + 1]]
        marks = ", ".join("?" * len(before))

        def write(execute: Execute) -> None:
            sql = f"UPDATE sessions SET state = ? WHERE id = ? AND state IN ({marks}) RETURNING id"
            if not execute(sql, state.value, id, *before):
                raise _refusal(execute, id)
            if state is State.DROPPED:
                for table in ("turns", "names", "requests", "labels"):
                    execute(f"DELETE FROM {table} WHERE session = ?", id)

        await self._database.write(write)

    async def begin(self, id: str, request: str, info: Mapping[str, Any]) -> None:
        """Record that a request is under way. Raises Missing, or Closed if the session is not open."""
        values = (request, time.time(), as_json(info), id, State.OPEN.value)
        sql = (
            "INSERT INTO requests (session, request, began, info) "
            "SELECT id, ?, ?, ? FROM sessions WHERE id = ? AND state = ? "
            "ON CONFLICT (session, request) "
            "DO UPDATE SET began = excluded.began, info = excluded.info, ended = NULL RETURNING request"
        )

        def write(execute: Execute) -> None:
            if not execute(sql, *values):
                raise _refusal(execute, id)

        await self._database.write(write)

    async def abandon(self, id: str, request: str, why: str) -> None:
        """End a request, unless it has a turn."""
        sql = "UPDATE requests SET ended = ? WHERE session = ? AND request = ? AND ended IS NULL"
        await self._database.write(lambda execute: execute(sql, _storable(why), id, request))

    async def append(self, id: str, turn: TurnRecord, *, request: str, names: Sequence[str] = ()) -> None:
        """Store a turn and end its request; it is on disk when this returns.

        `turn_named` finds it by its `names`, which move from earlier turns. Raises Conflict if
        the session has grown, and Closed if it is not open. Repeating it changes nothing.
        """
        info = json_bytes(turn.info)

        def write(execute: Execute) -> None:
            records = pack_records(turn.records)
            grown = execute(
                "UPDATE sessions SET records = ?, turns = ?, sampled = sampled + ?, prompted = prompted + ? "
                "WHERE id = ? AND state = ? AND records = ? AND turns = ? RETURNING id",
                turn.first + len(turn.records), turn.number + 1, turn.sampled, turn.prompted,
                id, State.OPEN.value, turn.first, turn.number,
            )  # fmt: skip
            if not grown:
                sql = "SELECT request, records FROM turns WHERE session = ? AND number = ?"
                stored = execute(sql, id, turn.number)
                if stored == [(request, records)]:
                    return
                raise _refusal(execute, id, turn)
            execute(
                "INSERT INTO turns (session, number, first, sampled, prompted, request, info, records, channels) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                id, turn.number, turn.first, turn.sampled, turn.prompted, request,
                pack(info), records, pack(turn.channels),
            )  # fmt: skip
            for name in names:
                execute(
                    "INSERT INTO names (session, name, turn) VALUES (?, ?, ?) "
                    "ON CONFLICT (session, name) DO UPDATE SET turn = excluded.turn",
                    id, name, turn.number,
                )  # fmt: skip
            execute("DELETE FROM requests WHERE session = ? AND request = ?", id, request)

        await self._database.write(write)

    async def incomplete(self, id: str) -> list[Mapping[str, Any]]:
        """The requests without a turn, the oldest first, with why they `ended` or None."""
        names = ("request", "began", "ended")
        sql = f"SELECT info, {', '.join(names)} FROM requests WHERE session = ? ORDER BY began, request"
        rows = await self._database.read(sql, id)
        return [{**json.loads(info), **dict(zip(names, more, strict=True))} for info, *more in rows]

    async def turns(self, id: str, first: int = 0) -> AsyncIterator[TurnRecord]:
        """Yield turns from number `first` on."""
        columns = "number, first, records, info, channels, sampled, prompted"
        where = f"WHERE session = ? AND number >= ? ORDER BY number LIMIT {_TURNS}"
        sql = f"SELECT {columns} FROM turns {where}"
        while True:
            rows = await self._database.read(sql, id, first)
            for number, start, records, info, channels, sampled, prompted in rows:
                packed = unpack_turn(records, info, channels)
                yield TurnRecord(number, start, *packed, sampled, prompted)
            if len(rows) < _TURNS:
                return
            first = rows[-1][0] + 1

    async def turn_named(self, id: str, name: str) -> int | None:
        if not is_storable(id + name):
            return None
        rows = await self._database.get("SELECT turn FROM names WHERE session = ? AND name = ?", id, name)
        return rows[0][0] if rows else None

    async def label(self, id: str, labels: Sequence[Label]) -> None:
        """Store labels. A label replaces an earlier one with the same name and turn.

        Raises Missing, or Closed if the session was dropped.
        """
        turns = [-1 if each.turn is None else each.turn for each in labels]
        entries = [(id, each.name, as_json(each.value), at) for each, at in zip(labels, turns, strict=True)]

        def write(execute: Execute) -> None:
            if execute("SELECT state FROM sessions WHERE id = ?", id) in ([], [(State.DROPPED,)]):
                raise _refusal(execute, id)
            for entry in entries:
                execute(
                    "INSERT INTO labels (session, name, value, turn) VALUES (?, ?, ?, ?) "
                    "ON CONFLICT (session, turn, name) DO UPDATE SET value = excluded.value",
                    *entry,
                )

        await self._database.write(write)

    async def labels(self, id: str) -> list[Label]:
        sql = "SELECT name, value, turn FROM labels WHERE session = ? ORDER BY turn, name"
        rows = await self._database.read(sql, id)
        return [Label(name, json.loads(value), None if turn < 0 else turn) for name, value, turn in rows]

    async def values(self, name: str, ids: Sequence[str]) -> dict[str, Any]:
        """The value of a session label, for those of `ids` that have it."""
        values: dict[str, Any] = {}
        for at in range(0, len(ids), _BATCH):
            some = ids[at : at + _BATCH]
            places = ", ".join("?" * len(some))
            sql = (
                f"SELECT session, value FROM labels WHERE turn = -1 AND name = ? AND session IN ({places})"
            )
            values |= {id: json.loads(value) for id, value in await self._database.read(sql, name, *some)}
        return values

    async def close(self) -> None:
        await self._database.close()


def _refusal(execute: Execute, id: str, turn: TurnRecord | None = None) -> StoreError:
    rows = execute("SELECT state, records, turns FROM sessions WHERE id = ?", id)
    if not rows:
        return Missing(f"there is no session {id!r}")
    state, records, turns = rows[0]
    if turn is None or state != State.OPEN:
        return Closed(f"session {id!r} is {state}")
    problem = (
        f"{turns} turns and {records} records, but the new turn expects {turn.number} and {turn.first}"
    )
    return Conflict(f"session {id!r} has {problem}: read the new turns, and write again")


def _one(rows: Rows) -> SessionInfo | None:
    return next(map(_session, rows), None)


def _session(row: tuple[Any, ...]) -> SessionInfo:
    metadata, settings = ({} if text == "{}" else json.loads(text) for text in row[3:5])
    return SessionInfo(row[0], State(row[1]), row[2], metadata, settings, *row[5:])


def is_storable(text: str) -> bool:
    """True if a text has no NUL and no lone surrogate."""
    return text == _storable(text)


def _storable(text: str) -> str:
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\0", "\\u0000").encode("utf-8", "backslashreplace").decode("utf-8")


def open_store(where: str | None = None) -> Store:
    """Open the store in a file (SQLite), or at ``postgresql://user@host/database``, or create it.

    None and ``":memory:"`` open a temporary store. Raises StoreError if it cannot be opened.
    """
    scheme = where.partition("://")[0].lower() if where and "://" in where else ""
    if scheme in ("postgresql", "postgres"):
        try:
            from .postgres import postgres_store
        except ImportError as error:
            needs = 'pip install "tokentrace[postgres]"'
            raise StoreError(f"a PostgreSQL store needs psycopg: {needs} ({error})") from None
        return postgres_store(str(where))
    if scheme:
        raise StoreError(
            f"there is no store for {scheme}://…: use a path, or postgresql://user@host/database"
        )
    try:
        from .sqlite import sqlite_store
    except ImportError as error:
        raise StoreError(f'a store needs apsw: pip install "tokentrace[gateway]" ({error})') from None
    return sqlite_store(None if where in (None, "", ":memory:") else where)
