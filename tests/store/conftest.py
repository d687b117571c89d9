"""Fixtures: a real PostgreSQL, and locations for stores in SQLite and in PostgreSQL."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.support import Postgres, postgres_server


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with postgres_server() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The location of a store that does not exist yet."""
    if request.param == "sqlite":
        return str(tmp_path / "store.db")
    server: Postgres = request.getfixturevalue("postgres")
    return server.fresh()
