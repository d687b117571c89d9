"""Places for a store in SQLite and in PostgreSQL, as the gateway's tests have them."""

from tests.gateway.conftest import place, postgres

__all__ = ["place", "postgres"]
