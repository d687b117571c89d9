"""A gateway with the embedded model, and places for a store in SQLite and in PostgreSQL."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.store.conftest import place, postgres

__all__ = ["place", "postgres"]


@pytest.fixture(scope="module")
def served() -> Iterator[Any]:
    from tests.gateway.server import gateway_server  # not above: `make quick` has no starlette

    with gateway_server() as server:
        yield server
