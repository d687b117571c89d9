"""Where sessions are kept: what every store promises.

A session's record is append-only. A turn is one `append`: the records of its trajectory (bytes, as in a trajectory's
file) and what was said in it. It is on disk, whole, when `append` returns, or it is not there at all. `append` says how
many records the writer has seen; where another one was quicker it is refused with `Conflict`, and the writer reads what
is new and tries again. So any number of gateways can serve one session, and none of them can fork its record.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from ..errors import TokentraceError


class StoreError(TokentraceError):
    """The store cannot be used: its disk is full, it is locked, or its server is gone. Nothing was recorded."""


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


class Store(Protocol):
    """Keeps sessions. Safe to use from many tasks of one event loop.

    Every method but `close` raises `StoreError` where the store cannot be used; the next call tries again, so a store
    that was full, locked or away works again by itself. What was being written then is whole or not there, and every
    write may be repeated: a second one like the first changes nothing.
    """

    where: str
    """What the store is, for people: a path, or a URL without its password."""
    temporary: bool
    """Whether it is gone when it is closed."""

    async def create(self, session: SessionInfo, *, key: str | None = None) -> SessionInfo:
        """Make a session, or get the one that has this id already, as it is.

        `key` is a hash. Raises `Taken` where it belongs to another session, or where the session has another key.
        """
        ...

    async def session(self, id: str) -> SessionInfo | None: ...

    async def session_of_key(self, key: str) -> SessionInfo | None:
        """The session that a key (a hash of it) belongs to."""
        ...

    def sessions(
        self, *, state: State | None = None, search: str = "", after: SessionInfo | None = None
    ) -> AsyncIterator[SessionInfo]:
        """All sessions, the newest first: those in a state, with a text in their id or metadata, from one on.

        The text is looked for in metadata as JSON has it, and A to Z are as good as a to z.
        """
        ...

    async def count(self, state: State = State.OPEN) -> int:
        """How many sessions are in a state."""
        ...

    async def update(
        self, id: str, *, metadata: Mapping[str, Any] | None = None, settings: Mapping[str, Any] | None = None
    ) -> SessionInfo:
        """Put other metadata or settings in the place of those that are there; None leaves them. Raises `Missing`."""
        ...

    async def begin(self, id: str, request: str, info: Mapping[str, Any]) -> None:
        """Note that a request is under way: what a crash leaves behind is known to be an incomplete turn.

        Raises `Missing`, or `Closed` where the session is not open. It may be awaited while the engine samples.
        """
        ...

    async def append(self, id: str, turn: TurnRecord, *, request: str, names: Sequence[str] = ()) -> None:
        """Store a turn and end its request; on disk when it returns. `Conflict` where the session has grown.

        `names` are what `turn_named` finds it by later: the id of a response, the digest of a request. A name that an
        earlier turn has goes to the new one. Raises `Closed` where the session is not open any more. A turn that is
        there already, by the same request and with the same records, is stored: that is no conflict.
        """
        ...

    async def abandon(self, id: str, request: str, why: str) -> None:
        """End a request that gave no turn. One that nobody began, or that gave a turn, is left alone."""
        ...

    async def incomplete(self, id: str) -> list[Mapping[str, Any]]:
        """The requests that began and gave no turn, the oldest first: what was known of each when it began, with
        `request`, `began` (seconds since 1970) and `ended` (why it was abandoned; None where nobody ended it)."""
        ...

    def turns(self, id: str, first: int = 0) -> AsyncIterator[TurnRecord]:
        """The turns of a session from one on, in order. They are read some at a time."""
        ...

    async def turn_named(self, id: str, name: str) -> int | None:
        """The number of the turn that has a name; None where there is none."""
        ...

    async def set_state(self, id: str, state: State) -> None:
        """Seal, mark as exported, or drop. A dropped session loses its turns, labels and requests.

        A session goes on in this order and never back: `Closed` where it is further than that. Raises `Missing`.
        """
        ...

    async def label(self, id: str, labels: Sequence[Label]) -> None:
        """Keep rewards and labels; a later one of the same name and turn replaces an earlier one.

        Raises `Missing`, or `Closed` where the session was dropped.
        """
        ...

    async def labels(self, id: str) -> list[Label]:
        """The session's labels: its own first, then by turn, each by name."""
        ...

    async def values(self, name: str, ids: Sequence[str]) -> dict[str, Any]:
        """The value that a label has for each of some sessions as a whole; those that have none are left out."""
        ...

    async def close(self) -> None:
        """Finish what is being written, and let go of the store."""
        ...


def open_store(where: str | None = None) -> Store:
    """The store in a file (SQLite), or at ``postgresql://user@host/database``; it is made if it is not there.

    None and ``":memory:"`` give a temporary one: what it keeps is gone when it is closed, and it says so. Raises
    `StoreError` where it cannot be opened: no such folder, not a store, one of a newer tokentrace, no such server.
    """
    scheme = where.partition("://")[0].lower() if where and "://" in where else ""
    if scheme in ("postgresql", "postgres"):
        try:
            from .postgres import postgres_store
        except ImportError as error:
            raise StoreError(
                f'a PostgreSQL store needs psycopg: pip install "tokentrace[postgres]" ({error})'
            ) from None
        return postgres_store(str(where))
    if scheme:
        raise StoreError(
            f"no store is known for {scheme}://…: give a path for SQLite, or postgresql://user@host/database"
        )
    try:
        from .sqlite import sqlite_store
    except ImportError as error:
        raise StoreError(f'a store needs apsw: pip install "tokentrace[gateway]" ({error})') from None
    return sqlite_store(None if where in (None, "", ":memory:") else where)
