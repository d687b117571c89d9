"""Rollouts on a Ray cluster: agents as actors on many machines, and one process that writes the store.

Each worker makes its own agent and has all tasks; it is told which to run, by number. A rollout comes back whole, is
written to the store, and only then counts. A worker that dies takes with it what was not written: that is run again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import inspect
import json
import math
import platform
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from ..data.ray_connection import connected, first_line, import_ray
from ..engines.routing import Circuit, circuits_of
from ..errors import InputError, TokentraceError, shown
from ..settings import instance
from ..trajectory.storage import restore, to_bytes
from ..trajectory.trajectory import Trajectory
from ..version import __version__
from .batch import Summary, named, rollout_seed, write_finished
from .calling import together
from .checks import MOST_SEED
from .checks import count as checked_count
from .ends import End
from .loop import Agent, Rollout, Task
from .patience import EngineDown, Outage, Patience
from .setup import read_run
from .store import RolloutStore, differing

Crew: TypeAlias = tuple[Agent, Sequence[Task]]
MakeCrew: TypeAlias = Callable[[], Crew | Awaitable[Crew]]
"""Called once on each worker: its agent, and the tasks of the whole run, the same and in the same order everywhere."""

_SHARED: Final = "the configuration and all that it names must be on storage that all nodes share, under the same paths"
_NO_NODE: Final = "all of its nodes have died or were removed; add one, or start Ray again and repeat the command"
_ALONE: Final = 2
_DEATHS: Final = 3
"""A rollout that was under way when a worker died is run again; after `_ALONE` deaths with nothing beside it, so that
it is known which one kills workers; after `_DEATHS` it has failed."""
_STARTS: Final = 3
"""Workers that die in a row before they are ready: then the run ends."""
_LOOKS: Final = 5.0
"""Seconds between two looks at whether the workers' engines answer."""
_FAREWELL: Final = 10.0
"""Seconds that workers have to hand over what is unfinished when a run ends early."""


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterRun:
    """What came of a run on a cluster."""

    summary: Summary
    waited: float
    """The most seconds that a worker waited for an engine that was down."""
    circuits: list[Circuit]
    """The endpoints of each worker's engine, where it has several."""


async def run_rollouts_on_ray(
    make: MakeCrew,
    tasks: Iterable[Task],
    *,
    workers: int | None = None,
    address: str | None = None,
    concurrency: int = 64,
    store: RolloutStore | None = None,
    done: Callable[[Rollout], None] | None = None,
    seed: int | None = None,
    patience: float | None = 600.0,
    notice: Callable[[Outage | None], None] | None = None,
) -> ClusterRun:
    """`run_rollouts` on a Ray cluster: the same rollouts, whoever runs them.

    `make` is called on each worker, so it needs what it imports and reads there. `tasks` are the same as its own.
    `workers` is the number of actors, each on one CPU; by default as many as the cluster has CPUs. `concurrency` is
    how many rollouts are under way in all of them together. Members of a group are run by one worker, as long as there
    is other work for the others. `address` is that of a cluster: ``"auto"`` for the one this machine is a node of,
    ``"local"`` for this machine's cores; None is the default of ``ray.init()``. A program that is already connected to
    Ray stays connected. `patience` is how long a worker waits for an engine that is down, and the run for a node when
    the cluster has none left; `notice` is told of both.

    What is finished stays finished: tasks that the store has are skipped. `InputError` where a worker cannot be made,
    or has other tasks or another template than the others.
    """
    ray = import_ray()
    chosen = list(named(tasks))
    if store is not None:
        instance("store", store, RolloutStore, InputError)
    concurrency = checked_count("concurrency", concurrency)
    seed = None if seed is None else checked_count("seed", seed, least=0, most=MOST_SEED)
    summary = Summary() if store is None else Summary.of(store)
    todo = [n for n, task in enumerate(chosen) if store is None or not store.is_finished(task.name)]
    if not todo:
        return ClusterRun(summary, 0.0, [])
    with connected(ray, address):
        there = int(ray.cluster_resources().get("CPU", 1)) if workers is None else checked_count("workers", workers)
        seats = max(1, min(there, len(todo), concurrency))
        actor = ray.remote(num_cpus=1, max_concurrency=concurrency + 16, max_restarts=0)(RolloutActor)
        queue, slots = _Queue(_groups(chosen, todo)), math.ceil(concurrency / seats)
        run = _Run(ray, lambda: actor.remote(make, patience), chosen, queue, slots, seed, store, done, notice, summary)
        run.patience = patience
        return await run.all(seats)


def _groups(tasks: Sequence[Task], todo: Sequence[int]) -> Iterator[list[int]]:
    """The tasks to run, those of a group together."""
    found: dict[Any, list[int]] = {}
    for number in todo:
        group = tasks[number].metadata.get("group")
        found.setdefault(("group", group) if isinstance(group, str) else number, []).append(number)
    return iter(found.values())


class _Queue:
    """What is left to run. A worker takes a group at a time; one that finds none takes from another's."""

    def __init__(self, groups: Iterable[list[int]]) -> None:
        self._groups = deque(map(deque, groups))
        self._own: list[deque[int]] = []

    def own(self) -> deque[int]:
        """What a worker has taken and not begun."""
        self._own.append(deque())
        return self._own[-1]

    def take(self, own: deque[int]) -> int | None:
        """The next for a worker; None when nothing is left."""
        if not own and self._groups:
            own.extend(self._groups.popleft())
        if own:
            return own.popleft()
        longest = max(self._own, key=len)
        return longest.pop() if longest else None

    def give_back(self, number: int) -> None:
        """Let it be run by whoever comes next."""
        self._groups.appendleft(deque([number]))

    @property
    def is_empty(self) -> bool:
        return not self._groups and not any(self._own)


@dataclasses.dataclass(slots=True, eq=False)
class _Run:
    """A run on a cluster, as the process sees it that began it and writes the store."""

    ray: Any
    hire: Callable[[], Any]
    tasks: Sequence[Task]
    queue: _Queue
    slots: int
    """How many rollouts a worker runs at once."""
    seed: int | None
    store: RolloutStore | None
    done: Callable[[Rollout], None] | None
    notice: Callable[[Outage | None], None] | None
    summary: Summary
    deaths: Counter[int] = dataclasses.field(default_factory=Counter)
    """By task, how often a worker died while it was under way."""
    alone: deque[int] = dataclasses.field(default_factory=deque)
    workers: list[Any] = dataclasses.field(default_factory=list)
    first: dict[str, Any] | None = None
    """What the first worker said of itself."""
    patience: float | None = 600.0
    """Seconds to wait for a node when none is left; None is forever."""
    waited: float = 0.0
    circuits: list[Circuit] = dataclasses.field(default_factory=list)

    async def all(self, seats: int) -> ClusterRun:
        """Run everything; what is under way when it ends early is kept in the store as unfinished."""
        began = time.monotonic()
        watching = asyncio.create_task(self._watch())
        try:
            await together(self._seat() for _ in range(seats))
        except BaseException:
            await self._keep_unfinished()
            raise
        finally:
            watching.cancel()
            closing = [asyncio.wait_for(worker.close.remote(), _FAREWELL) for worker in self.workers]
            await asyncio.gather(*closing, return_exceptions=True)
            for worker in self.workers:
                self.ray.kill(worker)
        self.summary.seconds = time.monotonic() - began
        return ClusterRun(self.summary, self.waited, self.circuits)

    async def _seat(self) -> None:
        """One worker after another, until nothing is left: each next one because the last died."""
        failed = 0
        while self.alone or not self.queue.is_empty:
            worker = self.hire()
            self.workers.append(worker)
            try:
                self._check(await self._started(worker))
                failed = 0
                if await self._work_through(worker):
                    await self._look(worker)
                    await worker.close.remote()
            except self.ray.exceptions.RayError as error:
                self._check_death(error)
                failed += 1
                if failed >= _STARTS:
                    raise InputError(f"{failed} workers in a row died as they began: {first_line(error)}") from error
            self.workers.remove(worker)  # where the run ends early, it is still asked for what is unfinished
            self.ray.kill(worker)

    async def _started(self, worker: Any) -> dict[str, Any]:
        """What a worker says of itself. Ray waits without a word for a node to start it on; where the cluster has none,
        this reports it, and raises `EngineDown` when patience runs out."""
        ready: asyncio.Future[dict[str, Any]] = asyncio.ensure_future(worker.ready.remote())
        began = time.monotonic()
        try:
            while True:
                await asyncio.wait([ready], timeout=_LOOKS)
                if ready.done():
                    return ready.result()
                nodes = await asyncio.to_thread(self.ray.cluster_resources)
                if nodes.get("CPU", 0) >= 1:
                    began = time.monotonic()
                    continue
                waited = time.monotonic() - began
                left = None if self.patience is None else self.patience - waited
                if self.notice is not None:
                    self.notice(Outage(_NO_NODE, waited, _LOOKS, left, "the Ray cluster has no node with a CPU"))
                if left is not None and left <= 0:
                    raise EngineDown(f"the Ray cluster had no node with a CPU for {waited:.0f} s: {_NO_NODE}")
        finally:
            ready.cancel()

    def _check_death(self, error: Exception) -> None:
        """Raise what Ray says, unless it says that a worker or its node is gone, with what it had to tell."""
        known = self.ray.exceptions
        deaths = (known.RayActorError, known.WorkerCrashedError, known.NodeDiedError, known.ObjectLostError)
        if not isinstance(error, (*deaths, known.OutOfMemoryError)):
            raise TokentraceError(f"Ray gave up: {first_line(error)}") from error

    def _check(self, told: dict[str, Any]) -> None:
        """Compare what a worker says of itself with this process's tasks, and with the first worker."""
        node = told.pop("node")
        if "error" in told:
            raise InputError(f"node {node}: {told['error']}")
        if told["tasks"] != _digest_of(self.tasks):
            raise InputError(f"node {node} has other tasks than the process that began the run: they must be the same")
        self.first = self.first or told
        for name, value in told.items():
            if value != self.first[name]:
                raise InputError(
                    f"node {node} has another {name} than the first worker, {shown(value)} instead of "
                    f"{shown(self.first[name])}: they must be the same everywhere"
                )

    async def _work_through(self, worker: Any) -> bool:
        """Run what is left on a worker; False where it died."""
        own = self.queue.own()
        while True:
            if self.alone:
                if not await self._one(worker, self.alone.popleft()):
                    return False
            elif not self.queue.is_empty:
                if not all(await together(self._slot(worker, own) for _ in range(self.slots))):
                    for number in own:
                        self.queue.give_back(number)
                    own.clear()
                    return False
            else:
                return True

    async def _slot(self, worker: Any, own: deque[int]) -> bool:
        """Run one after another on a worker; False where it died."""
        while (number := self.queue.take(own)) is not None:
            if not await self._one(worker, number):
                return False
        return True

    async def _one(self, worker: Any, number: int) -> bool:
        """Have a rollout run and write it to the store; False where the worker died."""
        task = self.tasks[number]
        if self.store is not None:
            self.store.start(task.name)
        try:
            told = await worker.run.remote(number, rollout_seed(self.seed, number))
        except self.ray.exceptions.RayError as error:
            self._check_death(error)
            self.deaths[number] += 1
            if self.deaths[number] >= _DEATHS:
                why = f"{_DEATHS} workers died while it was under way, the last with nothing beside it"
                gone = Rollout(task, Trajectory(name=task.name), task.tools or [], list(task.messages), End.FAILED)
                gone.notes.append(f"{why}: {first_line(error)}")
                await self._finish(gone)
            elif self.deaths[number] >= _ALONE:
                self.alone.append(number)
            else:
                self.queue.give_back(number)
            return False
        if "down" in told:
            raise EngineDown(f"node {told['node']}: {told['down']}")
        if "error" in told:
            raise TokentraceError(f"node {told['node']}, {shown(task.name)}: {told['error']}")
        await self._finish(_rollout(task, told))
        return True

    async def _finish(self, rollout: Rollout) -> None:
        if self.store is not None:
            await write_finished(self.store, rollout)
        self.summary.add(rollout.metrics())
        if self.done is not None:
            self.done(rollout)

    async def _look(self, worker: Any) -> Outage | None:
        """What a worker says of its engine."""
        outage: Outage | None
        outage, waited, circuits = await worker.engine_state.remote()
        self.waited = max(self.waited, waited)
        known = {one.name: one for one in self.circuits} | {one.name: one for one in circuits}
        self.circuits = list(known.values())
        return outage

    async def _watch(self) -> None:
        """Say now and then whether an engine does not answer."""
        was_down = False
        while self.notice is not None:
            await asyncio.sleep(_LOOKS)
            looks = (asyncio.wait_for(self._look(worker), _LOOKS) for worker in self.workers)
            found = [one for one in await asyncio.gather(*looks, return_exceptions=True) if isinstance(one, Outage)]
            if found or was_down:
                self.notice(found[0] if found else None)
            was_down = bool(found)

    async def _keep_unfinished(self) -> None:
        """Write what there is of rollouts under way, to be looked at. They will be run again."""
        store = self.store
        if store is None:
            return
        asked = [asyncio.wait_for(worker.unfinished.remote(), _FAREWELL) for worker in self.workers]
        for told in await asyncio.gather(*asked, return_exceptions=True):
            for number, one in told if isinstance(told, list) else ():
                if not store.is_finished(self.tasks[number].name):
                    store.keep(_rollout(self.tasks[number], one))


def _rollout(task: Task, told: dict[str, Any]) -> Rollout:
    """A rollout as a worker told it."""
    told = dict(told)
    told["trajectory"] = restore(told["trajectory"])
    return Rollout(task=task, tools=task.tools or [], **told)


# -- on the nodes


@dataclasses.dataclass(frozen=True, slots=True)
class ConfiguredCrew:
    """Makes agent and tasks of a YAML file, as `read_run` does, and makes sure that they are those of the run."""

    path: Path
    options: Mapping[str, Any]
    """Those of `read_run`."""
    settings: Mapping[str, Any]
    """`Run.settings` of the process that began the run."""

    async def __call__(self) -> Crew:
        if not self.path.is_file():
            raise InputError(f"does not see {self.path}: {_SHARED}")
        run = read_run(self.path, **self.options)
        if differs := differing(self.settings, run.settings):
            raise InputError(f"{self.path} or what it names is not the same here: {differs}; {_SHARED}")
        return run.agent(await run.connect()), run.tasks


class RolloutActor:
    """An actor: numbers of tasks in, rollouts out."""

    def __init__(self, make: MakeCrew, patience: float | None) -> None:
        self._make = make
        self._node = platform.node()
        self._outage: Outage | None = None
        self._patience_seconds = patience
        self._under_way: dict[int, Rollout] = {}

    async def ready(self) -> dict[str, Any]:
        """Make the agent, and say what must be the same on all workers; an error as text, as they do not all travel."""
        try:
            made = self._make()
            self._agent, tasks = await made if inspect.isawaitable(made) else made
            self._tasks = list(named(tasks))
            self._patience = Patience(self._patience_seconds, notice=self._noticed)
            first = self._tasks[0]
            tools = [tool.tool_schema for tool in (self._agent.tools if first.tools is None else first.tools)]
            prompt = self._agent.renderer.render_ids(first.messages, tools=tools or None, add_generation_prompt=True)
        except Exception as error:
            words = str(error) if isinstance(error, TokentraceError) else f"{type(error).__name__}: {error}"
            return {"node": self._node, "error": words}
        return {
            "node": self._node,
            "tasks": _digest_of(self._tasks),
            "version of tokentrace": __version__,
            "first prompt": _digest(prompt),
            "vocabulary": self._agent.renderer.tokenizer.vocabulary.size,
        }

    def _noticed(self, outage: Outage | None) -> None:
        self._outage = outage

    async def run(self, number: int, seed: int | None) -> dict[str, Any]:
        """A rollout: what it is but for its task."""

        def grown(rollout: Rollout) -> None:
            self._under_way[number] = rollout

        try:
            rollout = await self._agent.run(self._tasks[number], grown=grown, seed=seed, patience=self._patience)
            return _told(rollout)
        except EngineDown as error:
            return {"node": self._node, "down": str(error)}
        except Exception as error:
            return {"node": self._node, "error": f"{type(error).__name__}: {error}"}
        finally:
            if number in self._under_way and self._under_way[number].end is not None:
                del self._under_way[number]

    async def unfinished(self) -> list[tuple[int, dict[str, Any]]]:
        """What is under way and has turns."""
        return [(number, _told(one)) for number, one in self._under_way.items() if one.turns]

    async def close(self) -> None:
        """Let go of what the agent's tools and its engine hold."""
        for tool in self._agent.tools:
            await tool.close()
        await self._agent.engine.close()

    async def engine_state(self) -> tuple[Outage | None, float, list[Circuit]]:
        """Whether the engine answers, for how long it was waited for, and its endpoints."""
        circuits = [
            dataclasses.replace(one, name=f"{self._node}: {one.name}") for one in circuits_of(self._agent.engine)
        ]
        return self._outage, self._patience.waited, circuits


def _told(rollout: Rollout) -> dict[str, Any]:
    """A rollout in what every process can read: its trajectory as in a file, what tools measured as in a journal."""
    apart = ("task", "tools", "trajectory")
    kept = [one.name for one in dataclasses.fields(rollout) if one.init and one.name not in apart]
    told = {name: getattr(rollout, name) for name in kept}
    told["use"] = dataclasses.replace(rollout.use, metrics=_plain(rollout.use.metrics))
    told["per_turn"] = [dataclasses.replace(turn, metrics=_plain(turn.metrics)) for turn in rollout.per_turn]
    told["messages"] = _plain(rollout.messages)
    return {**told, "trajectory": to_bytes(rollout.trajectory)}


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _digest_of(tasks: Sequence[Task]) -> str:
    """What tells tasks from others: their names, and what is asked."""
    return _digest([(task.name, task.messages) for task in tasks])


def _digest(values: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(list(values), default=str).encode()).hexdigest()[:16]
