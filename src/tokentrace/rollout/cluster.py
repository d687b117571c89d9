"""Rollouts on a Ray cluster: agents as actors on many machines, and one process that writes the store.

Each worker makes its own agent and all tasks, and gets the numbers of those to run. A rollout comes back whole, is
stored, and only then counts. What a dying worker had under way runs again.
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
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from ..data.ray_connection import connected, first_line, import_ray
from ..errors import InputError, TokentraceError, brief
from ..settings import instance, whole
from ..trajectory.trajectory import Trajectory
from ..version import __version__
from .batch import Summary, checked_seed, named, rollout_seed, write_finished
from .calling import describe_error, together
from .ends import End
from .loop import Agent, Rollout, Task
from .patience import EngineDown, Outage, Patience
from .setup import read_run
from .store import RolloutStore, as_plain_json, differing

Crew: TypeAlias = tuple[Agent, Sequence[Task]]
MakeCrew: TypeAlias = Callable[[], Crew | Awaitable[Crew]]
"""Called once on each worker: returns its agent, and the tasks of the whole run, the same everywhere."""

_SHARED: Final = "the configuration and all that it names must be on storage that all nodes share, under the same paths"
_NO_NODE: Final = "all of its nodes have died or were removed; add one, or start Ray again and repeat the command"
_ALONE: Final = 2
_DEATHS: Final = 3
"""A rollout under way when a worker dies runs again; after `_ALONE` deaths alone, to know which one kills workers;
after `_DEATHS` it has failed."""
_STARTS: Final = 3
"""The run ends after so many workers in a row that die before they are ready."""
_POLL_SECONDS: Final = 5.0
_CLOSE_SECONDS: Final = 10.0


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
) -> Summary:
    """Run `run_rollouts` on a Ray cluster: the same rollouts, whoever runs them.

    `make` is called on each worker; its tasks must equal `tasks`. `workers` is the number of actors, by default all
    CPUs. `concurrency` is for all of them together. `address` is ``"auto"`` for the cluster of this machine,
    ``"local"`` for its cores; None is Ray's default. `patience` is how long a worker waits for an engine, and the run
    for a node, which `notice` reports. Raises InputError if a worker cannot be made, or differs from the others.
    """
    ray = import_ray()
    chosen = list(named(tasks))
    if store is not None:
        instance("store", store, RolloutStore, InputError)
    concurrency = whole("concurrency", concurrency, least=1, error=InputError)
    seed = checked_seed(seed)
    summary = Summary() if store is None else Summary.of(store)
    todo = deque(n for n, task in enumerate(chosen) if store is None or not store.is_finished(task.name))
    if not todo:
        return summary
    with connected(ray, address):
        cpus = int(ray.cluster_resources().get("CPU", 1))
        count = cpus if workers is None else whole("workers", workers, least=1, error=InputError)
        seats = max(1, min(count, len(todo), concurrency))
        actor = ray.remote(num_cpus=1, max_concurrency=concurrency + 16, max_restarts=0)(RolloutActor)

        async def finish(rollout: Rollout) -> None:
            if store is not None:
                await asyncio.to_thread(store.start, rollout.task.name)
                await write_finished(store, rollout)
            summary.add(rollout.metrics())
            if done is not None:
                done(rollout)

        slots = math.ceil(concurrency / seats)
        run = _Run(ray, lambda: actor.remote(make, patience), chosen, todo, slots, seed, finish, notice, patience)
        began = time.monotonic()
        await run.all(seats)
        summary.seconds = time.monotonic() - began
        return summary


@dataclasses.dataclass(slots=True, eq=False)
class _Run:
    """A run on a cluster, in the process that writes the store."""

    ray: Any
    hire: Callable[[], Any]
    tasks: Sequence[Task]
    todo: deque[int]
    slots: int
    """How many rollouts a worker runs at once."""
    seed: int | None
    finish: Callable[[Rollout], Awaitable[None]]
    notice: Callable[[Outage | None], None] | None
    patience: float | None
    deaths: Counter[int] = dataclasses.field(default_factory=Counter)
    """By task, how often a worker died while it was under way."""
    alone: deque[int] = dataclasses.field(default_factory=deque)
    workers: list[Any] = dataclasses.field(default_factory=list)
    first: dict[str, Any] | None = None
    """The report of the first worker."""

    async def all(self, seats: int) -> None:
        """Run everything."""
        try:
            await together(self._seat() for _ in range(seats))
        finally:
            closing = [asyncio.wait_for(worker.close.remote(), _CLOSE_SECONDS) for worker in self.workers]
            await asyncio.gather(*closing, return_exceptions=True)
            for worker in self.workers:
                self.ray.kill(worker)

    async def _seat(self) -> None:
        """Run one worker after another until nothing is left: each replaces one that died."""
        failed = 0
        while self.alone or self.todo:
            worker = self.hire()
            self.workers.append(worker)
            try:
                self._check(await self._ready(worker))
                failed = 0
                if await self._work_through(worker):
                    await worker.close.remote()
            except self.ray.exceptions.RayError as error:
                self._check_death(error)
                failed += 1
                if failed >= _STARTS:
                    raise InputError(f"{failed} workers in a row died as they began: {first_line(error)}") from error
            self.workers.remove(worker)
            self.ray.kill(worker)

    async def _ready(self, worker: Any) -> dict[str, Any]:
        """Return a worker's report. Raises EngineDown if there is no node for it for too long."""
        ready: asyncio.Future[dict[str, Any]] = asyncio.ensure_future(worker.ready.remote())
        began = time.monotonic()
        try:
            while True:
                await asyncio.wait([ready], timeout=_POLL_SECONDS)
                if ready.done():
                    return ready.result()
                nodes = await asyncio.to_thread(self.ray.cluster_resources)
                if nodes.get("CPU", 0) >= 1:
                    began = time.monotonic()
                    continue
                waited = time.monotonic() - began
                remaining = None if self.patience is None else self.patience - waited
                if self.notice is not None:
                    problem = "the Ray cluster has no node with a CPU"
                    self.notice(Outage(_NO_NODE, waited, _POLL_SECONDS, remaining, problem))
                if remaining is not None and remaining <= 0:
                    raise EngineDown(f"the Ray cluster had no node with a CPU for {waited:.0f} s: {_NO_NODE}")
        finally:
            ready.cancel()

    def _check_death(self, error: Exception) -> None:
        """Raise Ray's error, unless a worker or its node is gone."""
        errors = self.ray.exceptions
        deaths = (errors.RayActorError, errors.WorkerCrashedError, errors.NodeDiedError, errors.ObjectLostError)
        if not isinstance(error, (*deaths, errors.OutOfMemoryError)):
            raise TokentraceError(f"Ray gave up: {first_line(error)}") from error

    def _check(self, report: dict[str, Any]) -> None:
        """Compare a worker's report with this process's tasks, and with the first worker's."""
        node = report.pop("node")
        if "error" in report:
            raise InputError(f"node {node}: {report['error']}")
        if report["tasks"] != _digest_of(self.tasks):
            raise InputError(f"node {node} has other tasks than the process that began the run: they must be the same")
        self.first = self.first or report
        if change := differing(self.first, report):
            raise InputError(f"node {node} differs from the first worker: {change}; they must be the same everywhere")

    async def _work_through(self, worker: Any) -> bool:
        """Run what is left on a worker; False if it died."""
        while self.alone or self.todo:
            if self.alone:
                if not await self._one(worker, self.alone.popleft()):
                    return False
            elif not all(await together(self._slot(worker) for _ in range(self.slots))):
                return False
        return True

    async def _slot(self, worker: Any) -> bool:
        """Run one rollout after another on a worker; False if it died."""
        while self.todo:
            if not await self._one(worker, self.todo.popleft()):
                return False
        return True

    async def _one(self, worker: Any, number: int) -> bool:
        """Run and store a rollout; False if the worker died."""
        task = self.tasks[number]
        try:
            report = await worker.run.remote(number, rollout_seed(self.seed, number))
        except self.ray.exceptions.RayError as error:
            self._check_death(error)
            self.deaths[number] += 1
            if self.deaths[number] >= _DEATHS:
                lost = Rollout(task, Trajectory(name=task.name), task.tools or [], list(task.messages), End.FAILED)
                lost.notes.append(f"{_DEATHS} workers died while it was under way: {first_line(error)}")
                await self.finish(lost)
            else:
                (self.alone if self.deaths[number] >= _ALONE else self.todo).appendleft(number)
            return False
        if "down" in report:
            raise EngineDown(f"node {report['node']}: {report['down']}")
        if "error" in report:
            raise TokentraceError(f"node {report['node']}, {brief(task.name)}: {report['error']}")
        await self.finish(Rollout(task=task, tools=task.tools or [], **report))
        return True


# -- on the nodes


@dataclasses.dataclass(frozen=True, slots=True)
class ConfiguredCrew:
    """Makes agent and tasks of a YAML file, and checks that they are those of the run."""

    path: Path
    options: Mapping[str, Any]
    """Those of `read_run`."""
    settings: Mapping[str, Any]
    """`Run.settings` of the process that began the run."""

    async def __call__(self) -> Crew:
        if not self.path.is_file():
            raise InputError(f"does not see {self.path}: {_SHARED}")
        run = read_run(self.path, **self.options)
        if change := differing(self.settings, run.settings):
            raise InputError(f"{self.path} or what it names is not the same here: {change}; {_SHARED}")
        return run.agent(await run.connect()), run.tasks


class RolloutActor:
    """An actor: numbers of tasks in, rollouts out."""

    def __init__(self, make: MakeCrew, patience: float | None) -> None:
        self._make = make
        self._node = platform.node()
        self._patience = patience

    async def ready(self) -> dict[str, Any]:
        """Make the agent; report what must be the same on all workers, or an error as text."""
        try:
            crew = self._make()
            self._agent, tasks = await crew if inspect.isawaitable(crew) else crew
            self._tasks = list(named(tasks))
            self._waiting = Patience(self._patience)
            first, renderer = self._tasks[0], self._agent.renderer
            tools = [tool.tool_schema for tool in (self._agent.tools if first.tools is None else first.tools)]
            prompt = renderer.render_ids(first.messages, tools=tools or None, add_generation_prompt=True)
        except Exception as error:
            problem = str(error) if isinstance(error, TokentraceError) else describe_error(error)
            return {"node": self._node, "error": problem}
        return {
            "node": self._node,
            "tasks": _digest_of(self._tasks),
            "version of tokentrace": __version__,
            "first prompt": _digest(prompt),
            "vocabulary": renderer.tokenizer.vocabulary.size,
        }

    async def run(self, number: int, seed: int | None) -> dict[str, Any]:
        """Run a rollout; return it without its task and tools, which need not travel."""
        try:
            rollout = await self._agent.run(self._tasks[number], seed=seed, patience=self._waiting)
        except EngineDown as error:
            return {"node": self._node, "down": str(error)}
        except Exception as error:
            return {"node": self._node, "error": describe_error(error)}
        names = [one.name for one in dataclasses.fields(rollout) if one.init and one.name not in ("task", "tools")]
        report = {name: getattr(rollout, name) for name in names}
        return report | {"messages": as_plain_json(rollout.messages)}  # foreign objects need not be picklable

    async def close(self) -> None:
        """Close the tools and the engine."""
        for tool in self._agent.tools:
            await tool.close()
        await self._agent.engine.close()


def _digest_of(tasks: Sequence[Task]) -> str:
    return _digest([(task.name, task.messages) for task in tasks])


def _digest(values: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(list(values), default=str).encode()).hexdigest()[:16]
