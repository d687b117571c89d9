"""Read trajectories, stores, and files of lines or rows as rollouts, one at a time."""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..data.sources import Format, Row, Source, find_sources, read_rows
from ..data.tables import read_metadata
from ..errors import InputError, TrajectoryError
from ..samples.trajectories import owned_turns
from ..settings import as_float
from ..trajectory.storage import MAGIC, load_trajectory, replay_records
from ..trajectory.trajectory import Trajectory
from ..trajectory.turns import Turn
from .records import IDS, ROWS, Call, Rollout, UnknownShapeError, exchange, line_key, read_lines, recognise
from .rows import has_conversation

_FIRST_LINES = 100
"""One of these lines must have a known shape."""
_SQLITE = b"SQLite format 3\0"
_RUN_STORE = "rollouts.db"
Progress = Callable[[float, float], None]
Note = Callable[[str], None]


def read_rollouts(
    inputs: Sequence[str], *, progress: Progress = lambda *_: None, note: Note = lambda _: None
) -> Iterator[Rollout]:
    """Read all rollouts; some may have a `problem`. `note` gets a description of each input.

    Inputs are trajectories, folders of them or of ``tokentrace rollout``, stores of sessions, and
    files of JSON lines, JSON or Parquet. Raises InputError else.
    """
    for name in inputs:
        if store := _store_of(name):
            yield from _read_store(store, note)
        elif files := _trajectories(name):
            note(f"{name}: {'trajectories' if Path(name).expanduser() not in files else 'a trajectory'}")
            for done, (file, where) in enumerate(files.items(), 1):
                yield _read_trajectory(file, where, note)
                progress(done, len(files))
        else:
            for source in find_sources([name]):
                yield from _read_source(source, progress, note)


def holds_rollouts(name: str) -> bool:
    """True if an input holds what engines sampled. Raises InputError if it has no ids."""
    path = Path(name).expanduser()
    if _store_of(name) or _trajectories(name):
        return True
    if name == "-" or not path.exists():
        return False
    metadata = read_metadata(path) if path.is_file() else {}
    if "store" in metadata or "engine" in metadata.get("settings", {}):
        return True
    rows = (row for one in find_sources([name]) for row in read_rows(one))
    line: Any = next((row.value for row in rows if isinstance(row.value, Mapping)), {})
    try:
        return "logprobs" in line or recognise(line) != ROWS
    except UnknownShapeError:
        if not any(column in line for column in IDS) and has_conversation(line):
            advice = "use tokentrace render, tokentrace tokenize or audit --on"
            raise InputError(f"{name} holds conversations, not ids: {advice}") from None
        return False


def highest_id(inputs: Sequence[str]) -> int:
    """The highest id of the first rollout that can be read."""
    for one in read_rollouts(inputs):
        if not one.problem:
            arrays = [*(call.stream for call in one.calls), *(row.ids for row in one.rows)]
            return max((int(ids.max(initial=-1)) for ids in arrays), default=-1)
    return -1


def _store_of(name: str) -> str:
    path = Path(name).expanduser()
    path = path / _RUN_STORE if path.is_dir() else path
    return name if "://" in name else str(path) if _starts_with(path, _SQLITE) else ""


def _trajectories(name: str) -> dict[Path, str]:
    path = Path(name).expanduser()
    if not path.is_dir():
        return {path: name} if is_trajectory(path) else {}
    files = filter(Path.is_file, sorted(path.rglob("*.tt")))
    return {file: f"{name.rstrip('/')}/{file.relative_to(path).as_posix()}" for file in files}


def is_trajectory(path: Path) -> bool:
    return _starts_with(path, MAGIC)


def _starts_with(path: Path, magic: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return False
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def _read_trajectory(path: Path, where: str, note: Note) -> Rollout:
    try:
        loaded = load_trajectory(path)
    except (TrajectoryError, OSError) as error:
        return Rollout("", where, problem=str(error).removeprefix(f"{path}: "))
    trajectory = loaded.trajectory
    if not trajectory.num_branches:
        return Rollout("", where, problem="the trajectory is empty")
    if loaded.truncated:
        note(f"{where}: {loaded.problem}")
    turns = enumerate(owned_turns(trajectory))
    calls = [_turn_call(trajectory, turn, f"{where}, turn {number}") for number, turn in turns]
    return Rollout(trajectory.name or path.stem, where, calls)


def _turn_call(trajectory: Trajectory, turn: Turn, where: str, cause: str = "", **request: Any) -> Call:
    first = next(one for one in trajectory.turns(turn.branch) if one.branch == turn.branch)
    cause = (cause or trajectory.branches[turn.branch].cause) if first.write == turn.write else ""
    place = where + (f" of branch {turn.branch}" if turn.branch else "")
    request["temperature"] = as_float((turn.sampling or {}).get("temperature"))
    stream = trajectory.stream(turn.branch)[: turn.stop]
    logprobs = None if turn.tokens.logprobs is None else turn.tokens.logprobs.astype(np.float64)
    return Call(stream, turn.start, place, logprobs, recorded=cause, **request)


def _read_store(name: str, note: Note) -> Iterator[Rollout]:
    from ..store.store import State, StoreError, open_store

    async def all_of(items: Any) -> list[Any]:
        return [item async for item in items]

    store = open_store(name)
    note(f"{store.where}: a store of sessions")
    with asyncio.Runner() as runner:
        try:
            for info in runner.run(all_of(store.sessions())):
                where = f"{store.where}, session {info.id}"
                try:
                    turns = [] if info.state is State.DROPPED else runner.run(all_of(store.turns(info.id)))
                    yield from [_session(info.id, turns, where)] if turns else []
                except (TrajectoryError, StoreError, KeyError, TypeError, ValueError) as error:
                    yield Rollout("", where, problem=f"its record cannot be read: {error}")
        finally:
            runner.run(store.close())


def _session(name: str, records: Sequence[Any], where: str) -> Rollout:
    trajectory, calls = Trajectory(name=name), []
    conversations: list[list[Any]] = []
    tools: dict[str, Any] = {}
    for record in records:
        replay_records(trajectory, record.records)
        info, cause = record.info, record.info.get("cause")
        base = [] if info["base"] is None else conversations[info["base"]][: info["shared"]]
        conversations.append([*base, *info["messages"], info["reply"]])
        tools.setdefault(info["root"], info.get("tools"))
        request = exchange(conversations[-1][:-1], tools[info["root"]], info["reply"])
        turns = {turn.start: turn for turn in trajectory.turns(info["branch"])}
        words = f"{cause['cause']}: {cause['words']}" if cause else ""
        place = f"{where}, turn {record.number}"
        calls.append(_turn_call(trajectory, turns[info["start"]], place, words, **request))
    return Rollout(name, where, calls, tokenizer=records[-1].info.get("tokenizer"))


def _read_source(source: Source, progress: Progress, note: Note) -> Iterator[Rollout]:
    note(f"{source.name}: {_recognise(source)}")
    neighbours = (list(rows) for _, rows in itertools.groupby(read_rows(source), key=_key))
    for rows in _line_groups(source) if source.format is Format.LINES else neighbours:
        lines = []
        for row in rows:
            if isinstance(row.value, Mapping):
                lines.append((row.value, _place(row)))
            else:
                yield Rollout("", _place(row), problem=row.problem or "it is not an object")
        yield from read_lines(lines)
        progress(rows[-1].end, source.size)
    progress(source.size, source.size)


def _recognise(source: Source) -> str:
    problems = []
    for row in itertools.islice(read_rows(source), _FIRST_LINES):
        try:
            if row.problem is None:
                return recognise(row.value)
            problems.append(f"{_place(row)}: {row.problem}")
        except UnknownShapeError as error:
            problems.append(f"{_place(row)}: {error}")
    raise InputError(problems[0] if problems else f"{source.name} holds no rows")


def _key(row: Row) -> str:
    """A row that names no rollout is its own."""
    name = line_key(row.value)
    return f"\0{row.number}" if name is None else name


def _line_groups(source: Source) -> Iterator[list[Row]]:
    """Yield the lines of each rollout. A first pass notes where they are in the file."""
    groups: dict[str, list[tuple[int, int, int]]] = {}
    start = 0
    for row in read_rows(source):
        groups.setdefault(_key(row), []).append((row.number, start, row.end))
        start = row.end
    with open(source.path, "rb") as file:

        def read(number: int, start: int, end: int) -> Row:
            file.seek(start)
            text = file.read(end - start)
            return Row(number, number, text=text, end=end, source=source.name).parsed()

        yield from ([read(*place) for place in group] for group in groups.values())


def _place(row: Row) -> str:
    return f"{row.source}, line {row.line}" if row.line is not None else f"{row.source}, row {row.number}"
