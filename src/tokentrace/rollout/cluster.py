"""Rollouts on a Ray cluster: agents as actors on many machines, and one process that writes the store.

Each worker makes its own agent and all tasks, and gets the numbers of those to run. A rollout comes back whole, is
stored, and only then counts. What a dying worker had under way runs again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import math
import platform
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from ..data.cluster import connected, import_ray
from ..data.job import first_line
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
_DEATHS: Final = 3
"""Ray starts a dead worker again, and runs again what it had under way. A rollout that was under way in so many deaths
runs alone at the end, to know which one kills workers; if it does so again, it has failed."""
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
        options = {"num_cpus": 1, "max_concurrency": concurrency + 16}
        actor = ray.remote(**options, max_restarts=-1, max_task_retries=_DEATHS - 1)(RolloutActor)

        async def finish(rollout: Rollout) -> None:
            if store is not None:
                await asyncio.to_thread(store.start, rollout.task.name)
                await write_finished(store, rollout)
            summary.add(rollout.metrics())
            if done is not None:
                done(rollout)

        hire = functools.partial(actor.remote, make, patience)
        run = _Run(ray, hire, chosen, todo, math.ceil(concurrency / seats), seed, finish, notice, patience)
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
    seed: int | None
    finish: Callable[[Rollout], Awaitable[None]]
    notice: Callable[[Outage | None], None] | None
    patience: float | None
    suspects: list[int] = dataclasses.field(default_factory=list)
    """Rollouts under way when workers died, again and again."""
    first: dict[str, Any] | None = None

    async def all(self, seats: int) -> None:
        """Run everything; rollouts that may kill workers at the end, one by one."""
        await together(self._seat(self._work_through) for _ in range(seats))
        for number in self.suspects:
            await self._seat(functools.partial(self._one, number=number, alone=True))

    async def _seat(self, work: Callable[[Any], Awaitable[None]]) -> None:
        """Start a worker, use it, and close it."""
        worker = self.hire()
        try:
            await self._answer(worker.ready.remote())
            await work(worker)
        except self.ray.exceptions.RayError as error:
            raise TokentraceError(f"a worker cannot be used: {first_line(error)}") from error
        finally:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(worker.close.remote(), _CLOSE_SECONDS)
            self.ray.kill(worker)

    async def _work_through(self, worker: Any) -> None:
        await together(self._slot(worker) for _ in range(self.slots))

    async def _slot(self, worker: Any) -> None:
        while self.todo:
            await self._one(worker, number=self.todo.popleft())

    async def _one(self, worker: Any, *, number: int, alone: bool = False) -> None:
        task, errors = self.tasks[number], self.ray.exceptions
        run = worker.run.options(max_task_retries=0) if alone else worker.run
        try:
            report = await self._answer(run.remote(number, rollout_seed(self.seed, number)))
        except (errors.RayActorError, errors.ObjectLostError, errors.OutOfMemoryError) as error:
            if not alone:
                self.suspects.append(number)
                return
            lost = Rollout(task, Trajectory(name=task.name), task.tools or [], list(task.messages), End.FAILED)
            lost.notes.append(
                f"{_DEATHS} workers died while it was under way, and one with it alone: {first_line(error)}"
            )
            await self.finish(lost)
            return
        if "down" in report:
            raise EngineDown(f"node {report['node']}: {report['down']}")
        if "error" in report:
            raise TokentraceError(f"node {report['node']}, {brief(task.name)}: {report['error']}")
        await self.finish(Rollout(task=task, tools=task.tools or [], **report["rollout"]))

    async def _answer(self, reference: Any) -> dict[str, Any]:
        """Return a worker's answer, checked. Raises EngineDown if the cluster has no node for it for too long.

        Ray waits silently for a node; this reports a cluster without one.
        """
        answer: asyncio.Future[dict[str, Any]] = asyncio.ensure_future(reference)
        began = time.monotonic()
        try:
            while True:
                await asyncio.wait([answer], timeout=_POLL_SECONDS)
                if answer.done():
                    self._check(answer.result())
                    return answer.result()
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
            answer.cancel()

    def _check(self, answer: dict[str, Any]) -> None:
        """Compare the crew that answered with this process's tasks, and with the first crew."""
        node, crew = answer["node"], answer["crew"]
        if "error" in crew:
            raise InputError(f"node {node}: {crew['error']}")
        if self.first is None and crew["tasks"] != _digest_of(self.tasks):
            raise InputError(f"node {node} has other tasks than the process that began the run: they must be the same")
        self.first = self.first or crew
        if change := differing(self.first, crew):
            raise InputError(f"node {node} differs from the first worker: {change}; they must be the same everywhere")


# -- on the nodes


@dataclasses.dataclass(frozen=True, slots=True)
class ConfiguredCrew:
    """Makes agent and tasks of a YAML file, and checks that they are those of the run."""

    path: Path
    options: Mapping[str, Any]
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
    """An actor: numbers of tasks in, rollouts out. Each answer names its node and describes its crew."""

    def __init__(self, make: MakeCrew, patience: float | None) -> None:
        self._make = make
        self._about: dict[str, Any] = {"node": platform.node()}
        self._patience = patience
        self._making = asyncio.Lock()

    async def ready(self) -> dict[str, Any]:
        """Make the crew, if that was not done; report what must be the same on all workers, or an error as text."""
        async with self._making:
            if "crew" not in self._about:
                try:
                    self._about["crew"] = await self._crew()
                except Exception as error:
                    problem = str(error) if isinstance(error, TokentraceError) else describe_error(error)
                    self._about["crew"] = {"error": problem}
        return self._about

    async def _crew(self) -> dict[str, Any]:
        crew = self._make()
        self._agent, tasks = await crew if inspect.isawaitable(crew) else crew
        self._tasks = list(named(tasks))
        self._waiting = Patience(self._patience)
        first, renderer = self._tasks[0], self._agent.renderer
        tools = [tool.tool_schema for tool in (self._agent.tools if first.tools is None else first.tools)]
        prompt = renderer.render_ids(first.messages, tools=tools or None, add_generation_prompt=True)
        return {
            "tasks": _digest_of(self._tasks),
            "version of tokentrace": __version__,
            "first prompt": _digest(prompt),
            "vocabulary": renderer.tokenizer.vocabulary.size,
        }

    async def run(self, number: int, seed: int | None) -> dict[str, Any]:
        """Run a rollout; return it without its task and tools, which need not travel."""
        about = await self.ready()
        if "error" in about["crew"]:
            return about
        try:
            rollout = await self._agent.run(self._tasks[number], seed=seed, patience=self._waiting)
        except EngineDown as error:
            return about | {"down": str(error)}
        except Exception as error:
            return about | {"error": describe_error(error)}
        names = [one.name for one in dataclasses.fields(rollout) if one.init and one.name not in ("task", "tools")]
        report = {name: getattr(rollout, name) for name in names}
        messages = as_plain_json(rollout.messages)  # foreign objects need not be picklable
        return about | {"rollout": report | {"messages": messages}}

    async def close(self) -> None:
        for tool in self._agent.tools:
            await tool.close()
        await self._agent.engine.close()


def _digest_of(tasks: Sequence[Task]) -> str:
    return _digest([(task.name, task.messages) for task in tasks])


def _digest(values: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(list(values), default=str).encode()).hexdigest()[:16]
