"""Fixtures: a gateway with the embedded model, and locations for stores in SQLite and in PostgreSQL."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.store.conftest import place, postgres

__all__ = ["place", "postgres"]


@pytest.fixture(scope="module")
def served() -> Iterator[Any]:
    from tests.gateway.server import gateway_server  # here, because `make quick` has no starlette

    with gateway_server() as server:
        yield server
