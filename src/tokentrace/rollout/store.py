"""A run's folder: each rollout is a session in a store (``rollouts.db``), with the rows next to it.

Sessions of finished rollouts say how they ended. Only the owner can read the files.
"""

import asyncio
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator, Mapping
from dataclasses import asdict
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..errors import InputError, brief
from ..files import lock, owned, write_whole
from ..samples.sample import Sample
from ..samples.trajectories import Relative, owned_turns, relative_to_group, trajectory_samples
from ..settings import flat
from ..store.store import Label, SessionInfo, State, TurnRecord, open_store
from ..trajectory.storage import replay_records, write_records
from ..trajectory.trajectory import Trajectory
from .ends import End
from .record import Rollout, Task, TurnMetrics, plain_json

Returned = TypeVar("Returned")

STORE = "rollouts.db"
RUN = "run.json"
ROWS = "rows.parquet"
METRICS = "metrics.json"
_LOCK = "run.lock"
_PENDING = "next"


class RolloutStore:
    """The folder of a run. Raises InputError if another process is writing to it."""

    def __init__(self, folder: str | Path) -> None:
        if not isinstance(folder, str | os.PathLike) or "\0" in os.fspath(folder):
            raise InputError(f"a store needs the path of a folder, not {brief(folder)}")
        self.folder = Path(folder)
        self.folder.mkdir(0o700, parents=True, exist_ok=True)
        self._lock = open(self.folder / _LOCK, "ab", opener=owned)  # noqa: SIM115
        try:
            lock(self._lock, f"another process is writing rollouts to {self.folder}")
            self._store = open_store(str(self.folder / STORE))
        except BaseException:
            self._lock.close()
            raise
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tokentrace-run", daemon=True)
        self._thread.start()
        sessions = self._wait(_listed(self._store.sessions()))
        self._sessions = {str(info.settings["task"]): info for info in reversed(sessions)}

    def _wait(self, work: Coroutine[Any, Any, Returned]) -> Returned:
        """Run work in the store's event loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        self._wait(self._store.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._lock.close()

    def is_finished(self, name: str) -> bool:
        return name in self._sessions and _result(self._sessions[name]) is not None

    @property
    def finished(self) -> list[dict[str, Any]]:
        """The name, metrics, notes and metadata of each finished rollout."""
        rows = [(name, _metadata(info), _result(info)) for name, info in self._sessions.items()]
        return [
            {"name": name, "metadata": metadata, **one} for name, metadata, one in rows if one is not None
        ]

    @property
    def unfinished(self) -> list[str]:
        sessions = self._sessions.items()
        return [name for name, info in sessions if _result(info) is None and info.state is State.OPEN]

    def recorded(self, task: Task) -> Rollout | None:
        """An aborted or unfinished rollout, to continue it; None without turns."""
        info = self._sessions.get(task.name)
        if info is None or info.state is not State.OPEN or not info.turns:
            return None
        return self._wait(self._load(info, task))

    def trajectories(self) -> Iterator[tuple[dict[str, Any], Trajectory]]:
        """Yield each finished rollout's entry, with messages, and its trajectory."""
        for row in sorted(self.finished, key=lambda row: str(row["name"])):
            rollout = self._wait(self._load(self._sessions[row["name"]], Task([], row["name"])))
            yield {**row, "messages": rollout.messages}, rollout.trajectory

    async def _load(self, info: SessionInfo, task: Task) -> Rollout:
        metadata = {**_metadata(info), "task": task.name}
        trajectory = Trajectory(name=task.name, vocab_size=info.settings["vocab_size"], metadata=metadata)
        rollout = Rollout(task, trajectory, task.tools or [], list(task.messages))
        async for turn in self._store.turns(info.id):
            replay_records(trajectory, turn.records)
            rollout.messages[turn.info["shared"] :] = [*turn.info["messages"], turn.info["reply"]]
            rollout.per_turn.append(msgspec.convert(turn.info["metrics"], TurnMetrics))
            if reward := rollout.per_turn[-1].reward:
                trajectory.set_reward(reward, trajectory.turns()[-1])
        for label in await self._store.labels(info.id):  # a tool may end after its turn was stored
            if label.name == "reward" and label.turn is not None:
                trajectory.set_reward(label.value, trajectory.turns()[label.turn])
        for request in await self._store.incomplete(info.id):
            rollout.pending += request["messages"]
        return rollout

    def start(self, name: str) -> None:
        """Start a rollout from scratch. Drops an unfinished attempt."""
        self._wait(self._start(name))

    async def _start(self, name: str) -> SessionInfo:
        info = self._sessions.get(name)
        if info is not None and info.state is State.OPEN:
            await self._store.set_state(info.id, State.DROPPED)
        id, attempts = name, count(2)
        while await self._store.session(id) is not None:
            id = f"{name}~{next(attempts)}"
        info = SessionInfo(id, State.OPEN, time.time(), {}, {"task": name, "vocab_size": None})
        self._sessions[name] = info = await self._store.create(info)
        return info

    def keep(self, rollout: Rollout) -> None:
        """Store the turns of an unfinished rollout, for `recorded`."""
        self._wait(self._save(rollout))

    def finish(self, rollout: Rollout) -> None:
        """Store a rollout and how it ended. It is on disk when this returns."""
        self._wait(self._save(rollout, finished=True))

    async def _save(self, rollout: Rollout, *, finished: bool = False) -> None:
        name = rollout.task.name
        metadata = plain_json(rollout.task.metadata)
        trajectory = rollout.trajectory
        info = self._sessions.get(name) or await self._start(name)
        settings = {**info.settings, "vocab_size": trajectory.vocab_size}
        info = await self._store.update(info.id, metadata=metadata, settings=settings)
        writes, turns = write_records(trajectory, info.records), owned_turns(trajectory)
        for number in range(info.turns, len(turns)):
            turn = turns[number]
            records = tuple(islice(writes, turn.write + 1 - info.records))
            details = _turn_info(rollout, turns, number)
            record = TurnRecord(number, info.records, records, details, b"", len(turn), turn.start)
            await self._store.append(info.id, record, request=str(number))
            info = info.grown(record)
        pending = plain_json(rollout.messages[turns[-1].message + 1 :]) if turns else []
        if pending:
            await self._store.begin(info.id, _PENDING, {"messages": pending})
        else:
            await self._store.abandon(info.id, _PENDING, "answered")
        if finished:
            labels = [
                Label("reward", turn.reward, at) for at, turn in enumerate(rollout.per_turn) if turn.reward
            ]
            labels += [] if rollout.reward is None else [Label("reward", rollout.reward)]
            await self._store.label(info.id, labels)
            result = {"metrics": rollout.metrics(), "notes": rollout.notes}
            info = await self._store.update(info.id, metadata={**metadata, "rollout": plain_json(result)})
            if rollout.end is not End.ABORT:  # an aborted rollout can be continued
                await self._store.set_state(info.id, State.SEALED)
        self._sessions[name] = info

    def run_again(self, ends: Collection[str]) -> list[str]:
        """Let rollouts with these ends run again. Returns their names."""
        names = [row["name"] for row in self.finished if row["metrics"]["end"] in ends]
        for name in names:
            info = self._sessions[name]
            if info.state is not State.OPEN:
                self._wait(self._store.set_state(info.id, State.DROPPED))
            self._sessions[name] = self._wait(self._store.update(info.id, metadata=_metadata(info)))
        return names

    def samples(self, *, advantages: str | None = None) -> Iterator[Sample]:
        """Yield rows of all finished rollouts; ``"group"``: with `group_advantages`."""
        if advantages not in (None, "group"):
            raise InputError(f"advantages are 'group' or None, not {brief(advantages)}")
        values = group_advantages(self.finished).values if advantages else {}
        for row, trajectory in self.trajectories():
            reward = row["metrics"]["reward"]
            for sample in trajectory_samples(trajectory, reward=reward, advantage=values.get(row["name"])):
                yield sample.replace(reward=reward)  # metadata may have another "reward"

    def write_rows(
        self, *, advantages: str | None = None, metadata: Mapping[str, Any] | None = None
    ) -> Path:
        """Write the rows to ``rows.parquet``, whose metadata names the groups."""
        from ..data.tables import CHANNELS, ROLLOUT, sample_columns, sample_writer, samples_table

        groups: dict[str, list[str]] = defaultdict(list)
        for row in self.finished:
            groups[_group(row)].append(row["name"])
        values = ["logprobs", "advantages"] if advantages else ["logprobs"]
        columns = sample_columns("labels", *values, *ROLLOUT, *CHANNELS)
        about = {**(metadata or {}), "advantages": advantages, "groups": groups}
        with sample_writer(self.folder / ROWS, columns, about, private=True) as write:
            samples, numbers = self.samples(advantages=advantages), count(1)
            while some := list(islice(samples, 256)):
                write(samples_table(some, columns, [{"row": next(numbers)} for _ in some]))
        return self.folder / ROWS


async def _listed(sessions: AsyncIterator[SessionInfo]) -> list[SessionInfo]:
    return [info async for info in sessions]


def _result(info: SessionInfo) -> dict[str, Any] | None:
    return info.metadata.get("rollout") if info.state is not State.DROPPED else None


def _metadata(info: SessionInfo) -> dict[str, Any]:
    return {key: value for key, value in info.metadata.items() if key != "rollout"}


def _turn_info(rollout: Rollout, turns: list[Any], number: int) -> Any:
    """The entry of a completion, in the format of the gateway's turns."""
    turn, messages = turns[number], rollout.messages
    shared = 0 if not number else turn.message if turn.continues else turns[number - 1].message + 1
    info: dict[str, Any] = {"number": number, "base": number - 1 if number else None, "shared": shared}
    info["messages"] = messages[shared : turn.message]
    info["reply"] = [*messages[turn.message :], {"role": "assistant", "content": ""}][0]
    info |= {"root": "", "keys": [], "matcher": "", "dialect": "rollout"}
    info |= {name: getattr(turn, name) for name in ("branch", "start", "stop", "finish_reason")}
    info |= {"tools": None if number else rollout.schemas, "metrics": asdict(rollout.per_turn[number])}
    return plain_json(info)


def group_advantages(rows: Collection[Mapping[str, Any]]) -> Relative:
    """Return each finished rollout's (reward - group mean) / group standard deviation.

    Rollouts without a reward are in no group. A group of one gets 0 and a note.
    """
    rewards = {row["name"]: reward for row in rows if (reward := row["metrics"]["reward"]) is not None}
    return relative_to_group(rewards, {row["name"]: _group(row) for row in rows})


def _group(row: Mapping[str, Any]) -> str:
    group = row["metadata"].get("group")
    return str(row["name"] if group is None else group)


def check_run(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write a new run's settings. Raises InputError if an earlier run has others."""
    path = folder / RUN
    if not path.is_file():
        text = json.dumps(settings, indent=2, ensure_ascii=False, default=str) + "\n"
        write_whole(path, text.encode("utf-8", "replace"), private=True)
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} does not hold the settings of a run: {error}") from error
    if change := differing(before, settings):
        raise InputError(f"{folder} holds a run with other settings: {change}")


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    old, new = (flat(plain_json(settings)) for settings in (before, now))
    for key in [*new, *old]:
        if new.get(key) != old.get(key):
            was, is_now = (json.dumps(one.get(key), ensure_ascii=False) for one in (old, new))
            return f"{key} was {was} and is {is_now} now"
    return None


def discard_run(folder: Path) -> None:
    """Remove a run's files. Raises InputError if another process writes to the folder."""
    if not (folder / STORE).is_file():
        return
    with open(folder / _LOCK, "ab", opener=owned) as file:
        lock(file, f"another process is writing rollouts to {folder}")
        for name in (ROWS, METRICS, RUN, STORE, f"{STORE}-wal", f"{STORE}-shm"):
            (folder / name).unlink(missing_ok=True)
