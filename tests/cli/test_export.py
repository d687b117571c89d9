"""``tokentrace export``: the rows of a store as a file, whole or not at all."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.conversations import user
from tests.gateway.recorded import Recording
from tokentrace import create_renderer
from tokentrace.cli import main
from tokentrace.data.tables import read_metadata, read_samples
from tokentrace.pocket import POCKET
from tokentrace.store.store import State, open_store

RENDERER = create_renderer(POCKET).silent()


def run(*args: Any) -> Result:
    return CliRunner().invoke(main, ["export", *map(str, args)])


def with_store(path: Path, work: Any) -> Any:
    """The result of a coroutine function, called with the opened store."""

    async def inner() -> Any:
        store = open_store(str(path))
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(inner())


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"

    async def fill(store: Any) -> None:
        for number, name in enumerate(("run-1", "run-2", "gone")):
            recording = await Recording(store, name, RENDERER).begin(created=float(number), metadata={"task": name})
            await recording.turn([user("a question")], [310, 311])
            if name == "run-2":
                await recording.turn([user("a question")], [312])
                await store.set_state(name, State.SEALED)
        await store.set_state("gone", State.DROPPED)

    with_store(path, fill)
    return path


def states(path: Path) -> dict[str, str]:
    async def read(store: Any) -> dict[str, str]:
        return {info.id: str(info.state) async for info in store.sessions()}

    return with_store(path, read)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_rows_of_all_sessions_are_written_and_sealed_ones_are_marked(store: Path, tmp_path: Path, name: str) -> None:
    result = run(store, "-o", tmp_path / name)
    assert result.exit_code == 0, result.output
    samples = list(read_samples(tmp_path / name))
    assert [sample.name for sample in samples] == ["run-2", "run-2", "run-1"]
    tokens, trained = sum(map(len, samples)), sum(sample.trained for sample in samples)
    assert f"2 sessions, 3 rows, {tokens} tokens, {trained} trained" in result.stdout
    assert "1 by retry" in result.stdout
    assert states(store) == {"run-1": "open", "run-2": "exported", "gone": "dropped"}
    assert read_metadata(tmp_path / name)["store"] == str(store)
    data = json.loads(run(store, "-o", tmp_path / name, "--overwrite", "--json").stdout)
    assert (data["sessions"], data["rows"], data["marked"], data["causes"]) == (2, 3, 0, {"retry": 1})
    assert (data["trained"], data["longest"]) == (trained, max(map(len, samples)))
    assert all(file.stat().st_mode & 0o077 == 0 for file in tmp_path.glob(f"{name}*"))
    assert not list(tmp_path.glob("*.draft"))


def test_sessions_are_chosen_by_id_state_and_text(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"

    def exported(*options: str) -> set[str]:
        out.unlink(missing_ok=True)
        result = run(store, "-o", out, "-q", "--keep-state", *options)
        assert (result.exit_code, result.output) == (0, "")
        return {json.loads(line)["session"] for line in out.read_text(encoding="utf-8").splitlines()}

    assert exported("--session", "run-1") == {"run-1"}
    assert exported("--session", "run-1", "--session", "run-2", "--session", "run-1") == {"run-1", "run-2"}
    assert exported("--state", "sealed") == {"run-2"}
    assert exported("--search", "N-1") == {"run-1"}
    assert states(store)["run-2"] == "sealed"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--session", "run-9"], "no session 'run-9'"),
        (["--session", "gone"], "was dropped"),
        (["--session", "run-1", "--state", "open"], "--session names sessions"),
        (["--state", "exported"], "no session matches, so there are no rows"),
        (["--session", "idle"], "nothing was sampled in 1 session, so there are no rows"),
        (["-o", "rows.csv"], ".parquet and .jsonl"),
        (["-o", "no/such/rows.jsonl"], "there is no folder"),
    ],
)
def test_errors_are_printed_and_nothing_is_written(store: Path, tmp_path: Path, options: list[str], words: str) -> None:
    async def add_idle(store: Any) -> None:
        await Recording(store, "idle", RENDERER).begin(created=9.0)
        await store.set_state("idle", State.SEALED)

    with_store(store, add_idle)
    result = run(store, "-o", tmp_path / "rows.jsonl", *options)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
    assert not list(tmp_path.glob("rows*"))
    assert states(store)["idle"] == "sealed"


def test_a_store_can_be_read_while_another_writes_to_it(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"

    async def go_on(opened: Any) -> Result:
        recording = await Recording(opened, "run-3", RENDERER).begin(created=9.0)
        await recording.turn([user("a question")], [310, 311])
        await opened.begin("run-3", "under way", {})
        result = await asyncio.to_thread(run, store, "-o", out, "--session", "run-3")
        await recording.turn([user("another question")], [313])
        return result

    result: Result = with_store(store, go_on)
    assert result.exit_code == 0, result.output
    assert len(out.read_text(encoding="utf-8").splitlines()) == 1


def test_a_run_that_fails_leaves_no_file_and_marks_nothing(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokentrace.gateway.rows import SessionRows

    inner = SessionRows.add

    def add(self: SessionRows, *records: Any) -> None:
        if self.info.id == "run-1":
            raise OSError(28, "No space left on device")
        inner(self, *records)

    monkeypatch.setattr(SessionRows, "add", add)
    assert run(store, "-o", tmp_path / "rows.parquet").exit_code == 2
    assert not list(tmp_path.glob("rows*"))
    assert states(store)["run-2"] == "sealed"
