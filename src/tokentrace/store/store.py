"""Where sessions are kept: what every store promises.

A session's record is append-only. A turn is one `append`: the records of its trajectory (bytes, as in a trajectory's
file) and what was said in it. It is on disk, whole, when `append` returns, or it is not there at all. `append` says how
many records the writer has seen; where another one was quicker it is refused with `Conflict`, and the writer reads what
is new and tries again. So any number of gateways can serve one session, and none of them can fork its record.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from .packing import as_json, pack, pack_records, unpack, unpack_records
from .sql import Database, Rows, Transaction
from .sql import StoreError as StoreError  # noqa: PLC0414


class Conflict(StoreError):  # noqa: N818
    """Somebody else wrote to the session: read what is new, and write again."""


class Closed(StoreError):  # noqa: N818
    """The session is sealed, exported or dropped: nothing can be added to it."""


class Missing(StoreError):  # noqa: N818
    """There is no session of that id."""


class Taken(StoreError):  # noqa: N818
    """A session cannot be made: its key belongs to another one, or one of its id has another key."""


class State(StrEnum):
    """How far a session is."""

    OPEN = "open"
    SEALED = "sealed"
    """Nothing can be added; rewards can."""
    EXPORTED = "exported"
    """Its rows were read after it was sealed."""
    DROPPED = "dropped"
    """Its tokens are gone; that it was there is not forgotten."""


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What is known of a session beside its record."""

    id: str
    state: State
    created: float
    metadata: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Forced sampling parameters, budgets, the matcher."""
    records: int = 0
    """How many records its trajectory has."""
    turns: int = 0
    sampled: int = 0
    """How many tokens its turns sampled."""
    prompted: int = 0
    """How many tokens the prompts of its turns had."""

    def grown(self, turn: TurnRecord) -> SessionInfo:
        """What is known of the session when a turn was added to it."""
        return replace(
            self,
            records=turn.first + len(turn.records),
            turns=turn.number + 1,
            sampled=self.sampled + turn.sampled,
            prompted=self.prompted + turn.prompted,
        )


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn, as it is stored: the records it added to the trajectory, and what was said in it."""

    number: int
    first: int
    """The number of its first record."""
    records: tuple[bytes, ...]
    info: Mapping[str, Any]
    """The messages that were new, the reply, the cause of a branch: see `gateway.session`."""
    channels: bytes = b""
    """What the engine said of each token beside its logprob, packed; empty where it said nothing."""
    sampled: int = 0
    prompted: int = 0
    """How many tokens it sampled, and how many its prompt had: `SessionInfo` has their sums."""


@dataclass(frozen=True, slots=True)
class Label:
    """A reward or another value for a session, or for one of its turns."""

    name: str
    value: Any
    turn: int | None = None


_COLUMNS: Final = "id, state, created, metadata, settings, records, turns, sampled, prompted"
_BY_ID: Final = f"SELECT {_COLUMNS} FROM sessions WHERE id = ?"
_BY_KEY: Final = f"SELECT {_COLUMNS} FROM sessions WHERE key = ?"
_ORDER: Final = tuple(State)
_SESSIONS: Final = 64
_TURNS: Final = 16
"""How many sessions and turns are read at a time."""
_ASKED: Final = 500
"""How many sessions one statement asks for."""


class Store:
    """Keeps sessions, in the tables of a database. Safe to use from many tasks of one event loop.

    Every method but `close` raises `StoreError` where the store cannot be used; the next call tries again, so a store
    that was full, locked or away works again by itself. What was being written then is whole or not there, and every
    write may be repeated: a second one like the first changes nothing.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.where = database.where
        """What the store is, for people: a path, or a URL without its password."""
        self.temporary = database.temporary
        """Whether it is gone when it is closed."""

    # -- sessions

    async def create(self, session: SessionInfo, *, key: str | None = None) -> SessionInfo:
        """Make a session, or get the one that has this id already, as it is.

        `key` is a hash. Raises `Taken` where it belongs to another session, or where the session has another key.
        """
        if not is_storable(session.id + (key or "")):
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
                raise Taken(f"session {session.id!r} already exists, with another key or none")
            return transaction.rows(_BY_ID, session.id)

        return _session((await self._database.write(write))[0])

    async def session(self, id: str) -> SessionInfo | None:
        return _one(await self._database.get(_BY_ID, id)) if is_storable(id) else None

    async def session_of_key(self, key: str) -> SessionInfo | None:
        """The session that a key (a hash of it) belongs to."""
        return _one(await self._database.get(_BY_KEY, key)) if is_storable(key) else None

    async def sessions(
        self, *, state: State | None = None, search: str = "", after: SessionInfo | None = None
    ) -> AsyncIterator[SessionInfo]:
        """All sessions, the newest first: those in a state, with a text in their id or metadata, from one on.

        The text is looked for in metadata as JSON has it, and A to Z are as good as a to z.
        """
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
        """How many sessions are in a state."""
        rows = await self._database.read("SELECT count(*) FROM sessions WHERE state = ?", state.value)
        return int(rows[0][0])

    async def update(
        self, id: str, *, metadata: Mapping[str, Any] | None = None, settings: Mapping[str, Any] | None = None
    ) -> SessionInfo:
        """Put other metadata or settings in the place of those that are there; None leaves them. Raises `Missing`."""
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
        """Seal, mark as exported, or drop. A dropped session loses its turns, labels and requests.

        A session goes on in this order and never back: `Closed` where it is further than that. Raises `Missing`.
        """
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
        """Note that a request is under way: what a crash leaves behind is known to be an incomplete turn.

        Raises `Missing`, or `Closed` where the session is not open. It may be awaited while the engine samples.
        """
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
        """End a request that gave no turn. One that nobody began, or that gave a turn, is left alone."""

        def write(transaction: Transaction) -> None:
            sql = "UPDATE requests SET ended = ? WHERE session = ? AND request = ? AND ended IS NULL"
            transaction.change(sql, _storable(why), id, request)

        await self._database.write(write)

    async def append(self, id: str, turn: TurnRecord, *, request: str, names: Sequence[str] = ()) -> None:
        """Store a turn and end its request; on disk when it returns. `Conflict` where the session has grown.

        `names` are what `turn_named` finds it by later: the id of a response, the digest of a request. A name that an
        earlier turn has goes to the new one. Raises `Closed` where the session is not open any more. A turn that is
        there already, by the same request and with the same records, is stored: that is no conflict.
        """
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
        """The requests that began and gave no turn, the oldest first: what was known of each when it began, with
        `request`, `began` (seconds since 1970) and `ended` (why it was abandoned; None where nobody ended it)."""
        rows = await self._database.read(
            "SELECT request, began, info, ended FROM requests WHERE session = ? ORDER BY began, request", id
        )
        return [
            {**json.loads(info), "request": request, "began": began, "ended": ended}
            for request, began, info, ended in rows
        ]

    async def turns(self, id: str, first: int = 0) -> AsyncIterator[TurnRecord]:
        """The turns of a session from one on, in order. They are read some at a time."""
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
        """The number of the turn that has a name; None where there is none."""
        if not is_storable(id + name):
            return None
        rows = await self._database.get("SELECT turn FROM names WHERE session = ? AND name = ?", id, name)
        return rows[0][0] if rows else None

    # -- labels

    async def label(self, id: str, labels: Sequence[Label]) -> None:
        """Keep rewards and labels; a later one of the same name and turn replaces an earlier one.

        Raises `Missing`, or `Closed` where the session was dropped.
        """
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
        """The session's labels: its own first, then by turn, each by name."""
        sql = "SELECT name, value, turn FROM labels WHERE session = ? ORDER BY turn, name"
        rows = await self._database.read(sql, id)
        return [Label(name, json.loads(value), None if turn < 0 else turn) for name, value, turn in rows]

    async def values(self, name: str, ids: Sequence[str]) -> dict[str, Any]:
        """The value that a label has for each of some sessions as a whole; those that have none are left out."""
        found: dict[str, Any] = {}
        for at in range(0, len(ids), _ASKED):
            some = ids[at : at + _ASKED]
            places = ", ".join("?" * len(some))
            sql = f"SELECT session, value FROM labels WHERE turn = -1 AND name = ? AND session IN ({places})"
            found |= {id: json.loads(value) for id, value in await self._database.read(sql, name, *some)}
        return found

    async def close(self) -> None:
        """Finish what is being written, and let go of the store."""
        await self._database.close()


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


def is_storable(text: str) -> bool:
    """Whether every database takes a text as it is: it has no NUL and no lone surrogate."""
    return text == _storable(text)


def _storable(text: str) -> str:
    """A text that every database takes: no lone surrogates, no NUL."""
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\0", "\\u0000").encode("utf-8", "backslashreplace").decode("utf-8")
