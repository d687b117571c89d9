"""Open a store: a SQLite file, or a PostgreSQL database."""

from __future__ import annotations

from .store import Store, StoreError


def open_store(where: str | None = None) -> Store:
    """Return the store in a file (SQLite), or at ``postgresql://user@host/database``; creates it if it is new.

    None and ``":memory:"`` are a temporary one. Raises StoreError if it cannot be opened.
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
            f"there is no store for {scheme}://…: use a path for SQLite, or postgresql://user@host/database"
        )
    try:
        from .sqlite import sqlite_store
    except ImportError as error:
        raise StoreError(f'a store needs apsw: pip install "tokentrace[gateway]" ({error})') from None
    return sqlite_store(None if where in (None, "", ":memory:") else where)
