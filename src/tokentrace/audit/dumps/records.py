"""Our own records as calls: trajectories, and the sessions of a gateway's store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ...errors import InputError, TrajectoryError
from ...samples.trajectories import owned_turns
from ...trajectory.storage import MAGIC, load_trajectory
from ...trajectory.trajectory import Trajectory
from ...trajectory.turns import Turn
from .calls import Call, DumpedRequest, DumpedRollout, UnreadSource

SQLITE: Final = b"SQLite format 3\0"


def begins_with(path: Path, magic: bytes) -> bool:
    """Whether a file begins with these bytes."""
    try:
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def is_trajectory(path: Path) -> bool:
    return begins_with(path, MAGIC)


def read_trajectory(path: Path, where: str) -> DumpedRollout | UnreadSource:
    """A trajectory file. One that was cut off is read as far as it goes, which is noted."""
    try:
        loaded = load_trajectory(path)
    except (TrajectoryError, OSError) as error:
        return UnreadSource(where, str(error).removeprefix(f"{path}: "))
    notes = [f"{where}: {loaded.problem}"] if loaded.truncated else []
    trajectory = loaded.trajectory
    if not trajectory.num_branches:
        return UnreadSource(where, "nothing is recorded in it")
    calls = [_call(trajectory, turn, where) for turn in owned_turns(trajectory)]
    return DumpedRollout(trajectory.name or Path(where).stem, where, calls, notes=notes)


def _call(
    trajectory: Trajectory, turn: Turn, where: str, request: DumpedRequest | None = None, cause: str = ""
) -> Call:
    branch = trajectory.branches[turn.branch]
    first = next(one for one in trajectory.turns(turn.branch) if one.branch == turn.branch)
    sampling = turn.sampling or {}
    temperature = sampling.get("temperature")
    return Call(
        trajectory.stream(turn.branch)[: turn.stop],
        turn.start,
        f"{where}, turn {turn.message}" + (f" of branch {turn.branch}" if turn.branch else ""),
        np.asarray(trajectory.completion_logprobs(turn), np.float64) if trajectory.has_logprobs else None,
        None,
        request,
        (cause or branch.cause) if first.write == turn.write else "",
        float(temperature) if isinstance(temperature, (int, float)) else None,
    )


# -- the gateway's store


class OpenedStore(NamedTuple):
    """A store that was found: what it is, without its password, and how many sessions it has."""

    where: str
    sessions: int


def read_store(where: str) -> Iterator[OpenedStore | DumpedRollout | UnreadSource]:
    """What store it is, then its sessions, the newest first."""
    with asyncio.Runner() as runner:
        sessions = _sessions(where)
        try:
            while (found := runner.run(_next(sessions))) is not None:
                yield found
        finally:
            runner.run(sessions.aclose())


async def _next(sessions: AsyncGenerator[Any]) -> Any:
    return await anext(sessions, None)


async def _sessions(where: str) -> AsyncGenerator[OpenedStore | DumpedRollout | UnreadSource]:
    from ...gateway.rows import SessionRows
    from ...store.opening import open_store
    from ...store.store import State, StoreError

    store = open_store(where)
    try:
        states = (State.OPEN, State.SEALED, State.EXPORTED)
        yield OpenedStore(store.where, sum([await store.count(state) for state in states]))
        async for info in store.sessions():
            if info.state is State.DROPPED:
                continue
            place = f"{store.where}, session {info.id}"
            rows = SessionRows(info)
            try:
                async for turn in store.turns(info.id):
                    rows.add(turn)
            except (TrajectoryError, StoreError, KeyError, TypeError, ValueError) as error:
                yield UnreadSource(place, f"its record cannot be read: {error}")
                continue
            if rows.session.turns:
                yield _session(rows.session, info.id, place)
    finally:
        await store.close()


def _session(session: Any, name: str, where: str) -> DumpedRollout:
    """A session with what was asked in it."""
    trajectory = session.trajectory
    turns = {(turn.branch, turn.start): turn for turn in owned_turns(trajectory)}
    calls = []
    for recorded in session.turns:
        messages = session.conversation(recorded.number)
        request = DumpedRequest(messages[:-1], session.roots[recorded.root][0], messages[-1])
        cause = f"{recorded.cause.cause.value}: {recorded.cause.words}" if recorded.cause is not None else ""
        calls.append(_call(trajectory, turns[recorded.branch, recorded.start], where, request, cause))
    last = session.turns[-1].notes.get("tokenizer")
    return DumpedRollout(name, where, calls, tokenizer=last if isinstance(last, str) else None)
