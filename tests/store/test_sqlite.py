"""A SQLite store that cannot be used says why, records nothing wrong, and recovers by itself."""

import asyncio
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw
import pytest

from tests.loop import in_loop
from tests.store.support import check_whole, made_up_turn, session
from tokentrace.store.sqlite import sqlite_store
from tokentrace.store.store import Conflict, StoreError, TurnRecord, open_store
from tokentrace.trajectory import Trajectory


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """Simulate a full disk: no file may grow beyond a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@in_loop
async def test_a_full_disk_undoes_only_the_turns_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = open_store(str(path))
    trajectory = Trajectory()
    await store.create(session("a"))
    await store.append("a", made_up_turn(trajectory, 0, "a"), request="r0")
    with no_file_larger_than(200_000):
        for at in range(3):
            large = TurnRecord(1, 2, (os.urandom(400_000),), {})
            with pytest.raises(StoreError, match="nothing was recorded"):
                await store.append("a", large, request=f"large {at}")
        assert await check_whole(store, "a") == 1
        # a turn that fits is stored, though others at the same time do not fit
        small, *failures = await asyncio.gather(
            store.append("a", made_up_turn(trajectory, 1, "a"), request="r1"),
            *(store.append("a", TurnRecord(2, 4, (os.urandom(400_000),), {}), request=f"l{at}") for at in range(3)),
            return_exceptions=True,
        )
        assert small is None
        assert all(isinstance(failure, StoreError) and not isinstance(failure, Conflict) for failure in failures)
    await store.append("a", made_up_turn(trajectory, 2, "a"), request="r2")
    assert await check_whole(store, "a") == 3
    await store.close()
    store = open_store(str(path))
    assert await check_whole(store, "a") == 3
    await store.close()


@in_loop
async def test_a_store_that_another_process_locks_is_waited_for_and_then_an_error(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = sqlite_store(path, patience=0.05)
    await store.create(session("a"))
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE; UPDATE sessions SET metadata = '{}'")
    errors = await asyncio.gather(*(store.begin("a", f"r{at}", {}) for at in range(5)), return_exceptions=True)
    assert ["another process locks it" in str(each) and isinstance(each, StoreError) for each in errors] == [True] * 5
    assert await store.session("a") is not None, "reading goes on"
    assert await store.incomplete("a") == []
    other.execute("COMMIT")
    other.close()
    await store.append("a", made_up_turn(Trajectory(), 0, "a"), request="r")
    assert await check_whole(store, "a") == 1
    await store.close()


def other_database(path: Path) -> None:
    connection = apsw.Connection(str(path))
    connection.execute("CREATE TABLE bookmarks (url TEXT); INSERT INTO bookmarks VALUES ('x')")
    connection.close()


def newer_store(path: Path) -> None:
    asyncio.run(open_store(str(path)).close())
    connection = apsw.Connection(str(path))
    connection.execute("UPDATE format SET version = 99")
    connection.close()


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: path.write_bytes(b"not a database, but long enough to look like a header " * 40), "not a store"),
        (other_database, "the database of another program"),
        (newer_store, "version 99, but this tokentrace reads version 1"),
        (lambda path: path.mkdir(), "is a folder"),
        (lambda path: path.symlink_to(path.with_name("elsewhere")), "is a link, and|cannot be opened"),
    ],
)
def test_a_path_that_is_no_store_is_refused_and_left_unchanged(make: object, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    make(path)  # type: ignore[operator]
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(StoreError, match=problem) as caught:
        open_store(str(path))
    assert str(path) in str(caught.value)
    assert (path.read_bytes() if path.is_file() else None) == before
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("module", "where", "advice"),
    [
        ("apsw", "store.db", r'pip install "tokentrace\[gateway\]"'),
        ("psycopg", "postgresql://localhost/x", r'pip install "tokentrace\[postgres\]"'),
    ],
)
def test_a_missing_package_is_named(module: str, where: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tokentrace.store.sqlite", "tokentrace.store.postgres"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(StoreError, match=advice):
        open_store(where)
