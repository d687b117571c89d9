"""The fixtures of the gateway's tests for stores in SQLite and in PostgreSQL."""

from tests.gateway.conftest import place, postgres

__all__ = ["place", "postgres"]
