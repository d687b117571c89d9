"""A gateway with the embedded model, and places for a store in SQLite and in PostgreSQL."""

from collections.abc import Iterator

import pytest

from tests.gateway.server import Served, gateway_server
from tests.store.conftest import place, postgres

__all__ = ["place", "postgres"]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with gateway_server() as server:
        yield server
