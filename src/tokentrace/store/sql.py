"""The tables, and the interface of a database."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from ..errors import TokentraceError

TABLES = (
    "CREATE TABLE IF NOT EXISTS format (version INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, state TEXT NOT NULL, "
    "created DOUBLE PRECISION NOT NULL, metadata TEXT NOT NULL, settings TEXT NOT NULL, "
    "records INTEGER NOT NULL DEFAULT 0, turns INTEGER NOT NULL DEFAULT 0, "
    "sampled BIGINT NOT NULL DEFAULT 0, prompted BIGINT NOT NULL DEFAULT 0, key TEXT UNIQUE)",
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
VERSION = 1

Rows = list[tuple[Any, ...]]
Execute = Callable[..., Rows]
Result = TypeVar("Result")


class StoreError(TokentraceError):
    """The store cannot be used: a full disk, a lock, a lost server. Nothing was recorded."""


class Database(Protocol):
    """A store's database. Placeholders in SQL are ``?``."""

    where: str
    temporary: bool
    contains: str

    async def get(self, sql: str, *values: Any) -> Rows: ...

    async def read(self, sql: str, *values: Any) -> Rows: ...

    async def write(self, write: Callable[[Execute], Result]) -> Result:
        """Run `write`, perhaps twice, in one transaction; it is on disk when this returns."""
        ...

    async def close(self) -> None: ...


def prepare(execute: Execute, bytes_type: str) -> None:
    """Create the tables. Raises StoreError if they have another version."""
    execute(TABLES[0])
    versions = execute("SELECT version FROM format")
    if versions and versions[0][0] != VERSION:
        problem = f"the store has version {versions[0][0]}, but this tokentrace reads version {VERSION}"
        raise StoreError(f"{problem}: use the release that created it, or another path")
    for statement in TABLES[1:]:
        execute(statement.format(bytes=bytes_type))
    if not versions:
        execute("INSERT INTO format (version) VALUES (?)", VERSION)
