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


@dataclass(frozen=True, slots=True)
class Label:
    """A reward or another value for a session, or for one of its turns."""

    name: str
    value: Any
    turn: int | None = None


class Store(Protocol):
    """Keeps sessions. Safe to use from many tasks of one event loop."""

    async def create(self, session: SessionInfo, *, key: str | None = None) -> SessionInfo:
        """Make a session, or get the one that has this id already."""
        ...

    async def session(self, id: str) -> SessionInfo | None: ...

    async def session_of_key(self, key: str) -> SessionInfo | None:
        """The session that a key (a hash of it) belongs to."""
        ...

    def sessions(self, *, state: State | None = None, search: str = "") -> AsyncIterator[SessionInfo]:
        """All sessions, the newest first."""
        ...

    async def begin(self, id: str, request: str, info: Mapping[str, Any]) -> None:
        """Note that a request is under way: what a crash leaves behind is known to be an incomplete turn."""
        ...

    async def append(self, id: str, turn: TurnRecord, *, request: str, names: Sequence[str] = ()) -> None:
        """Store a turn and end its request; on disk when it returns. Conflict where the session has grown.

        `names` are what `turn_named` finds it by later: the id of a response, the digest of a request. A name that an
        earlier turn has goes to the new one. Raises `Closed` where the session is not open any more.
        """
        ...

    async def abandon(self, id: str, request: str, why: str) -> None:
        """End a request that gave no turn."""
        ...

    async def incomplete(self, id: str) -> list[Mapping[str, Any]]:
        """The requests that began and gave no turn, with what is known of each."""
        ...

    def turns(self, id: str, first: int = 0) -> AsyncIterator[TurnRecord]:
        """The turns of a session from one on, in order."""
        ...

    async def turn_named(self, id: str, name: str) -> int | None:
        """The number of the turn that has a name; None where there is none."""
        ...

    async def set_state(self, id: str, state: State) -> None:
        """Seal, mark as exported, or drop. A dropped session loses its turns."""
        ...

    async def label(self, id: str, labels: Sequence[Label]) -> None:
        """Keep rewards and labels; a later one of the same name and turn replaces an earlier one."""
        ...

    async def labels(self, id: str) -> list[Label]: ...

    async def close(self) -> None: ...
