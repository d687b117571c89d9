"""Rows of sessions out of a store, as bytes. Reads one session at a time and sends rows as they are made."""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from ..data.tables import file_schema
from ..data.writers import table_writer
from ..store.store import Closed, SessionInfo, State, Store, StoreError, TurnRecord
from .rows import LAYOUT, SessionRows, session_fields

_TURNS: Final = 16
"""How many turns are replayed at once."""


class ExportFormat(StrEnum):
    """How rows are written."""

    JSONL = "jsonl"
    ARROW = "arrow"
    """Arrow's IPC stream."""
    PARQUET = "parquet"

    @property
    def media_type(self) -> str:
        kinds = {"jsonl": "x-ndjson", "arrow": "vnd.apache.arrow.stream", "parquet": "vnd.apache.parquet"}
        return f"application/{kinds[self]}"


@dataclass(slots=True)
class Exported:
    """What was exported so far."""

    sessions: int = 0
    """How many sessions were read."""
    rows: int = 0
    tokens: int = 0
    trained: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    """How many branches make a row, by their cause."""
    marked: int = 0
    """How many sessions are marked as exported."""


class Export:
    """The rows of some sessions, read one session at a time.

    An open session can be exported and stays open; this export has nothing that is added to it later. One that is
    dropped meanwhile gives no rows.
    """

    def __init__(self, store: Store, sessions: AsyncIterable[SessionInfo] | Iterable[SessionInfo]) -> None:
        self._store, self._sessions = store, sessions
        self._sealed: list[str] = []
        self.done = Exported()

    async def tables(self) -> AsyncGenerator[Any]:
        """The rows as Arrow tables, each of one session."""
        async for info in _each(self._sessions):
            rows = await self._read(info)
            if rows is None:
                continue
            tables = rows.tables()
            while (table := await asyncio.to_thread(next, tables, None)) is not None:
                self.done.rows += table.num_rows
                self.done.tokens += sum(table.column("num_tokens").to_pylist())
                self.done.trained += sum(table.column("num_trained").to_pylist())
                yield table
            self.done.sessions += 1
            self.done.causes.update(rows.causes)
            if info.state is State.SEALED:
                self._sealed.append(info.id)

    async def _read(self, info: SessionInfo) -> SessionRows | None:
        """A session's turns and labels; None if it was dropped."""
        if info.state is State.DROPPED:
            return None
        rows = SessionRows(info, await self._store.labels(info.id))
        some: list[TurnRecord] = []
        async for turn in self._store.turns(info.id):
            some.append(turn)
            if len(some) == _TURNS:
                await asyncio.to_thread(_add, rows, some)
                some = []
        await asyncio.to_thread(_add, rows, some)
        if len(rows.session.turns) >= info.turns:
            return rows
        now = await self._store.session(info.id)
        if now is not None and now.state is not State.DROPPED:
            count = len(rows.session.turns)
            raise StoreError(f"session {info.id!r} is damaged: the store has {count} of its {info.turns} turns")
        return None

    async def mark(self) -> None:
        """Mark the sessions that were sealed when they were read as exported. Call it when the rows are safe."""
        for id in self._sealed:
            try:
                await self._store.set_state(id, State.EXPORTED)
                self.done.marked += 1
            except Closed:  # dropped meanwhile
                continue
        self._sealed = []


async def export_rows(
    store: Store,
    sessions: AsyncIterable[SessionInfo] | Iterable[SessionInfo],
    format: ExportFormat,
    *,
    keep_state: bool = False,
) -> AsyncGenerator[bytes]:
    """The rows of sessions as the bytes of a file, some at a time.

    Marks sealed sessions as exported after the last byte was read, unless `keep_state` is set.
    """
    export, pipe = Export(store, sessions), _Pipe()
    schema = file_schema(LAYOUT, {}, session_fields())
    writer = await asyncio.to_thread(table_writer, f".{format}", pipe, schema)
    try:
        async with aclosing(export.tables()) as tables:
            async for table in tables:
                await asyncio.to_thread(writer.write, table)
                if piece := pipe.take():
                    yield piece
        await asyncio.to_thread(writer.finish)
    except BaseException:
        writer.abandon()
        raise
    if piece := pipe.take():
        yield piece
    if not keep_state:
        await export.mark()


async def _each(sessions: AsyncIterable[SessionInfo] | Iterable[SessionInfo]) -> AsyncIterator[SessionInfo]:
    if isinstance(sessions, AsyncIterable):
        async for info in sessions:
            yield info
    else:
        for info in sessions:
            yield info


def _add(rows: SessionRows, turns: Iterable[TurnRecord]) -> None:
    for turn in turns:
        rows.add(turn)


class _Pipe(io.BytesIO):
    """Collects what is written."""

    def take(self) -> bytes:
        """All that was written since the last call."""
        data = self.getvalue()
        self.seek(0)
        self.truncate()
        return data
