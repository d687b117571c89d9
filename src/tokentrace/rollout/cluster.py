"""Rollouts on a Ray cluster: agents as actors on many machines, and one process with the store.

Each worker makes its agent and all tasks, and gets numbers to run. If it dies, they run again.
"""

import asyncio
import hashlib
import inspect
import json
import math
import platform
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..data.job import connected, first_line, import_ray
from ..engines.errors import EngineUnavailable
from ..errors import InputError, TokentraceError, brief
from ..settings import whole
from ..trajectory.trajectory import Trajectory
from ..version import __version__
from .batch import Summary, named, run_all
from .calling import describe_error
from .ends import End
from .loop import Agent, Rollout, Task
from .patience import EngineDown, Patience
from .record import plain_json
from .setup import read_run
from .store import RolloutStore, differing

Crew = tuple[Agent, Sequence[Task]]
MakeCrew = Callable[[], Crew | Awaitable[Crew]]
"""Returns a worker's agent and all tasks of the run, the same on every worker."""

_SHARED = "all nodes need the configuration, and all it names, on shared storage under the same paths"
_DEATHS = 3
"""After so many dead workers, a rollout runs alone; if that one dies too, it failed."""
_POLL_SECONDS = 5.0


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
) -> Summary:
    """Run `run_rollouts` on a Ray cluster, with the same rollouts on any worker.

    `make` is called on each of the `workers`, by default one per CPU; its tasks must equal
    `tasks`. The workers share `concurrency`. `address` is ``"auto"`` for this machine's
    cluster, ``"local"`` for its cores. `patience` is how long a worker waits for an engine, and
    the run for a node. Raises InputError if a worker cannot start or differs.
    """
    ray, chosen = import_ray(), list(named(tasks))
    todo = sum(store is None or not store.is_finished(task.name) for task in chosen)
    concurrency = whole("concurrency", concurrency, least=1, error=InputError)
    if not todo:
        return Summary.of(store)
    with connected(ray, address):
        cpus = int(ray.cluster_resources().get("CPU", 1))
        count = cpus if workers is None else whole("workers", workers, least=1, error=InputError)
        seats = max(1, min(count, todo, concurrency))
        actor = ray.remote(num_cpus=1, max_concurrency=concurrency + 16)(RolloutActor)
        crew = _Workers(ray, actor, (make, patience), chosen, Patience(patience))

        async def run(number: int, task: Task, seed: int | None) -> Rollout:
            if store is not None:
                await asyncio.to_thread(store.start, task.name)
            return await crew.run(number, seed)

        try:
            async with asyncio.TaskGroup() as group:
                slots = math.ceil(concurrency / seats)
                sitting = [group.create_task(crew.seat(slots)) for _ in range(seats)]
                summary = await run_all(
                    run, chosen, concurrency=concurrency, store=store, done=done, seed=seed
                )
                for one in sitting:
                    one.cancel()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        return summary


@dataclass(slots=True, eq=False)
class _Workers:
    ray: Any
    actor: Any
    arguments: tuple[Any, ...]
    tasks: Sequence[Task]
    patience: Patience
    first: Mapping[str, Any] | None = None
    free: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)

    async def seat(self, slots: int) -> None:
        """Start a worker for `slots` rollouts at a time. Closes it on cancellation."""
        try:
            async with self._worker(max_restarts=-1, max_task_retries=_DEATHS - 1) as worker:
                for _ in range(slots):
                    self.free.put_nowait(worker)
                await asyncio.Event().wait()
        except self.ray.exceptions.RayError as error:
            raise TokentraceError(f"a worker cannot be used: {first_line(error)}") from error

    @asynccontextmanager
    async def _worker(self, **options: Any) -> AsyncIterator[Any]:
        worker = self.actor.options(**options).remote(*self.arguments)
        try:
            await self._answer(worker.ready.remote())
            try:
                yield worker
            finally:
                with suppress(Exception):
                    await asyncio.wait_for(worker.close.remote(), 10.0)
        finally:
            self.ray.kill(worker)

    async def run(self, number: int, seed: int | None) -> Rollout:
        """Run a task on a free worker; if workers die while it runs, on a new one."""
        errors, task = self.ray.exceptions, self.tasks[number]
        lost = (errors.RayActorError, errors.ObjectLostError, errors.OutOfMemoryError)

        async def run(worker: Any) -> Rollout:
            answer = await self._answer(worker.run.remote(number, seed))
            return Rollout(task=task, tools=task.tools or [], **answer["rollout"])

        worker = await self.free.get()
        with suppress(*lost):
            try:
                return await run(worker)
            finally:
                self.free.put_nowait(worker)
        try:
            async with self._worker(num_cpus=0) as alone:  # the other workers may hold all CPUs
                return await run(alone)
        except lost as error:
            note = f"{_DEATHS} workers died while it ran, and so did one that ran it alone: {first_line(error)}"
            trajectory, messages = Trajectory(name=task.name), list(task.messages)
            return Rollout(task, trajectory, task.tools or [], messages, End.FAILED, notes=[note])

    async def _answer(self, reference: Any) -> dict[str, Any]:
        """A worker's checked answer. Ray would wait forever for a node."""
        answer: asyncio.Future[dict[str, Any]] = asyncio.ensure_future(reference)

        async def probe() -> None:
            if (await asyncio.to_thread(self.ray.cluster_resources)).get("CPU", 0) < 1:
                raise EngineUnavailable("the Ray cluster has no node with a CPU")

        async def request() -> dict[str, Any]:
            while not (await asyncio.wait([answer], timeout=_POLL_SECONDS))[0]:
                await probe()
            return self._checked(answer.result())

        try:
            return await self.patience.ask(request, probe)
        finally:
            answer.cancel()

    def _checked(self, answer: dict[str, Any]) -> dict[str, Any]:
        node, crew, error = answer["node"], answer["crew"], answer.get("error")
        if error is not None:
            raise type(error)(f"node {node}: {error}")
        self.first = self.first or {**crew, "tasks": _tasks_digest(self.tasks)}
        if change := differing(self.first, crew):
            raise InputError(f"node {node} differs: {change}; workers must be the same everywhere")
        return answer


async def configured_crew(path: Path, options: Mapping[str, Any], settings: Mapping[str, Any]) -> Crew:
    """Make the agent and tasks of a YAML file, which must have these `settings`."""
    if not path.is_file():
        raise InputError(f"cannot find {path}: {_SHARED}")
    run = read_run(path, **options)
    if change := differing(settings, run.settings):
        raise InputError(f"{path}, or something it names, is different here: {change}; {_SHARED}")
    return run.agent(await run.connect()), run.tasks


class RolloutActor:
    """A Ray actor: task numbers in, rollouts out."""

    def __init__(self, make: MakeCrew, patience: float | None) -> None:
        self._make, self._making = make, asyncio.Lock()
        self._about: dict[str, Any] = {"node": platform.node(), "crew": {}}
        self._waiting = Patience(patience)

    async def ready(self) -> dict[str, Any]:
        """Make the crew, once. Returns what must be the same everywhere, or an error."""
        async with self._making:
            if not self._about["crew"] and "error" not in self._about:
                try:
                    self._about["crew"] = await self._crew()
                except Exception as error:
                    self._about["error"] = InputError(describe_error(error))
        return self._about

    async def _crew(self) -> dict[str, Any]:
        crew = self._make()
        self._agent, tasks = await crew if inspect.isawaitable(crew) else crew
        self._tasks = list(named(tasks))
        first, renderer = self._tasks[0], self._agent.renderer
        tools = [tool.tool_schema for tool in (self._agent.tools if first.tools is None else first.tools)]
        prompt = renderer.render_ids(first.messages, tools=tools or None, add_generation_prompt=True)
        return {
            "tasks": _tasks_digest(self._tasks),
            "version of tokentrace": __version__,
            "first prompt": _digest(list(prompt)),
            "vocabulary": renderer.tokenizer.vocabulary.size,
        }

    async def run(self, number: int, seed: int | None) -> dict[str, Any]:
        about = await self.ready()
        if "error" in about:
            return about
        try:
            rollout = await self._agent.run(self._tasks[number], seed=seed, patience=self._waiting)
        except Exception as error:
            kind = EngineDown if isinstance(error, EngineDown) else TokentraceError
            return about | {"error": kind(f"{brief(self._tasks[number].name)}: {describe_error(error)}")}
        names = {one.name for one in fields(rollout)} - {"task", "tools"}  # which the caller has
        report = {name: getattr(rollout, name) for name in names}
        messages = plain_json(rollout.messages)  # user objects may not be picklable
        return about | {"rollout": report | {"messages": messages}}

    async def close(self) -> None:
        for tool in self._agent.tools:
            await tool.close()
        await self._agent.engine.close()


def _tasks_digest(tasks: Sequence[Task]) -> str:
    return _digest([(task.name, task.messages) for task in tasks])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:16]
