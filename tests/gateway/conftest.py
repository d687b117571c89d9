"""Places for a store in SQLite and in PostgreSQL: the fixtures of `tests/store`."""

from tests.store.conftest import place, postgres

__all__ = ["place", "postgres"]
