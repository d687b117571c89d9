"""Which store: a file of SQLite, or a PostgreSQL database."""

from __future__ import annotations

from .store import Store, StoreError


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
