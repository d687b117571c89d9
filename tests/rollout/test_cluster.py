"""Rollouts on a real Ray of this machine: the same as without, whatever dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from tests.ray_cluster import children_of, local_ray
from tests.rollout.users import Deadly, Waiting
from tokentrace import Agent, EmbeddedEngine, create_renderer
from tokentrace.cli import main
from tokentrace.engines import EngineUnavailable, SamplingParams
from tokentrace.errors import InputError
from tokentrace.pocket import POCKET
from tokentrace.rollout import Budget, Rollout, RolloutStore, Summary, Task, cluster, run_rollouts
from tokentrace.rollout.batch import grouped
from tokentrace.rollout.cluster import Crew, run_rollouts_on_ray
from tokentrace.rollout.patience import EngineDown
from tokentrace.trajectory.storage import load_trajectory

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc"),
]

CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "pocket.yaml"
SEED = 11


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[Any]:
    with local_ray() as ray:
        yield ray


def tasks() -> list[Task]:
    """Three questions, a group of two each."""
    asked = [Task([{"role": "user", "content": f"What is {n} plus {n}?"}], name=f"q{n}") for n in (2, 3, 4)]
    return list(grouped(asked, 2))


def crew() -> Crew:
    """An agent of the pocket model that samples at temperature 1."""
    sampling = SamplingParams(max_tokens=24, temperature=1.0)
    return Agent(EmbeddedEngine(), create_renderer(POCKET), sampling=sampling, budget=Budget(turns=2)), tasks()


def on_ray(make: Callable[[], Any] = crew, of: list[Task] | None = None, **options: Any) -> Any:
    return asyncio.run(run_rollouts_on_ray(make, tasks() if of is None else of, seed=SEED, **options))


Streams: TypeAlias = dict[str, tuple[list[int], list[bool], npt.NDArray[np.float32]]]


def streams(folder: Path) -> Streams:
    """The trajectories of a run by their files. The logprobs of the embedded model depend on what else it computes at
    the same time, in their last bits."""
    found: Streams = {}
    for path in sorted((folder / "trajectories").iterdir()):
        one = load_trajectory(path).trajectory
        found[path.name] = one.stream().tolist(), one.loss_mask().tolist(), one.logprobs()
    return found


def assert_same(folder: Path, expected: Streams) -> None:
    found = streams(folder)
    assert {name: one[:2] for name, one in found.items()} == {name: one[:2] for name, one in expected.items()}
    for name, (_, _, logprobs) in found.items():
        np.testing.assert_allclose(logprobs, expected[name][2], atol=1e-4)


def finished(folder: Path) -> Counter[str]:
    """How often the journal says of each rollout that it is finished."""
    lines = map(json.loads, (folder / "rollouts.jsonl").read_text(encoding="utf-8").splitlines())
    return Counter(line["name"] for line in lines if line["event"] == "finished")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Streams:
    """What a run in this process leaves behind."""
    folder = tmp_path_factory.mktemp("local")
    agent, mine = crew()
    store = RolloutStore(folder)
    asyncio.run(run_rollouts(agent, mine, store=store, seed=SEED))
    store.close()
    return streams(folder)


def kill_a_worker() -> None:
    pids = [pid for pid, name in children_of(os.getpid()) if name.startswith("ray::RolloutActor")]
    assert pids
    os.kill(pids[0], signal.SIGKILL)


def test_same_trajectories_as_in_one_process(expected: Streams, tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    done = on_ray(workers=2, store=store, concurrency=4)
    store.close()
    assert_same(tmp_path, expected)
    assert finished(tmp_path) == Counter(task.name for task in tasks())
    assert done.summary.rollouts == 6


def test_dead_worker_is_replaced_and_nothing_finished_is_run_again(expected: Streams, tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    ended: list[str] = []

    def done(rollout: Rollout) -> None:
        ended.append(rollout.task.name)
        if len(ended) == 1:
            kill_a_worker()

    on_ray(workers=1, store=store, done=done, concurrency=2)
    store.close()
    assert_same(tmp_path, expected)
    assert sorted(ended) == sorted(task.name for task in tasks())
    assert set(finished(tmp_path).values()) == {1}


class StopError(Exception):
    pass


def test_run_that_began_in_one_process_is_finished_on_ray(expected: Streams, tmp_path: Path) -> None:
    def stop(_: Rollout) -> None:
        raise StopError

    store = RolloutStore(tmp_path)
    agent, mine = crew()
    with pytest.raises(StopError):
        asyncio.run(run_rollouts(agent, mine, store=store, seed=SEED, concurrency=1, done=stop))
    store.close()
    before = finished(tmp_path)
    assert len(before) == 1
    store = RolloutStore(tmp_path)
    done = on_ray(workers=1, store=store)
    store.close()
    assert_same(tmp_path, expected)
    assert set(finished(tmp_path).values()) == {1}
    assert (done.summary.rollouts, done.summary.resumed) == (6, 1)


def deadly_crew() -> Crew:
    agent, mine = crew()
    budget = Budget(turn_tokens=8)
    return Agent(agent.engine, agent.renderer, budget=budget, interaction=Deadly()), mine


def test_rollout_that_kills_workers_fails_and_the_others_are_run(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    done = on_ray(deadly_crew, workers=1, store=store, concurrency=3)
    ends = {row["name"]: (row["metrics"]["end"], row["notes"]) for row in store.finished}
    store.close()
    end, notes = ends.pop("q3-1")
    assert end == "failed"
    assert "3 workers died while it was under way, the last with nothing beside it" in notes[0]
    assert len(ends) == 5
    assert "failed" not in {end for end, _ in ends.values()}
    assert done.summary.rollouts == 6


def broken_crew() -> Crew:
    raise InputError("there is no such tool")


def other_crew() -> Crew:
    agent, mine = crew()
    return agent, [*mine[:-1], Task([{"role": "user", "content": "What else?"}], name=mine[-1].name)]


@pytest.mark.parametrize(
    ("make", "problem"), [(broken_crew, "node .*: there is no such tool"), (other_crew, "has other tasks")]
)
def test_worker_that_cannot_be_made_ends_the_run(make: Callable[[], Crew], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        on_ray(make, workers=1)


class DownEngine(EmbeddedEngine):
    async def _generate(self, request: Any) -> Any:
        raise EngineUnavailable("nobody answers")


def down_crew() -> Crew:
    return Agent(DownEngine(), create_renderer(POCKET)), tasks()


def test_engine_that_is_down_for_too_long_ends_the_run() -> None:
    with pytest.raises(EngineDown, match=r"node .*: the engine did not answer"):
        on_ray(down_crew, workers=1, patience=0.0)


def hanging_crew(folder: str) -> Crew:
    """An agent whose simulated user says that it was asked, and never answers."""
    agent, mine = crew()
    return Agent(agent.engine, agent.renderer, budget=Budget(turn_tokens=512), interaction=Waiting(folder)), mine


def test_what_is_under_way_is_kept_when_a_run_is_cancelled(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path / "store")
    asked = tmp_path / "asked"
    asked.mkdir()

    async def cancelled() -> None:
        run = run_rollouts_on_ray(partial(hanging_crew, str(asked)), tasks(), workers=1, store=store, concurrency=1)
        running = asyncio.create_task(run)
        async with asyncio.timeout(60):
            while not list(asked.iterdir()):
                await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancelled())
    store.close()
    assert list(streams(tmp_path / "store")) == ["q2-0.partial.tt"]
    assert not finished(tmp_path / "store")


def test_command_line_gives_the_rows_of_a_local_run(tmp_path: Path) -> None:
    def rows(name: str, *options: str) -> list[dict[str, Any]]:
        command = ["rollout", str(CONFIG), "-o", str(tmp_path / name), "--limit", "2", "-q", *options]
        made = CliRunner().invoke(main, command)
        assert made.exit_code == 0, made.output
        return pq.read_table(tmp_path / name / "rows.parquet").drop_columns(["metrics", "turns"]).to_pylist()

    on_ray, locally = rows("ray", "--ray", "--workers", "2"), rows("local")
    for one, other in zip(on_ray, locally, strict=True):
        np.testing.assert_allclose(one.pop("logprobs"), other.pop("logprobs"), atol=1e-4)
        assert one == other
    again = CliRunner().invoke(main, ["rollout", str(CONFIG), "--workers", "2"])
    assert again.exit_code == 2
    assert "give --ray as well" in again.output


def test_file_after_ray_is_not_taken_for_an_address() -> None:
    made = CliRunner().invoke(main, ["rollout", "--ray", str(CONFIG)])
    assert made.exit_code == 2
    assert "name it before --ray" in " ".join(made.output.split())


class FakeWorker:
    """What a run sees of an actor; the first one is gone, as Ray says it, when it is to tell of its first rollout."""

    def __init__(self, gone: Exception | None) -> None:
        self._gone = gone
        self._worker = cluster.RolloutActor(crew, 0.0)

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=partial(self._call, name))

    async def _call(self, name: str, *arguments: Any) -> Any:
        if name == "run" and self._gone is not None:
            raise self._gone
        return await getattr(self._worker, name)(*arguments)


@pytest.mark.parametrize("error", ["OutOfMemoryError", "WorkerCrashedError", "ObjectReconstructionFailedError"])
def test_whatever_ray_calls_a_death_is_one(ray: Any, error: str, expected: Streams, tmp_path: Path) -> None:
    arguments = ("id", None, None) if error.startswith("Object") else ()
    gone = getattr(ray.exceptions, error)(*(("out of memory",) if error == "OutOfMemoryError" else arguments))
    workers = iter([FakeWorker(gone), FakeWorker(None)])
    store = RolloutStore(tmp_path)
    fake = SimpleNamespace(exceptions=ray.exceptions, kill=lambda _: None, cluster_resources=lambda: {"CPU": 2.0})
    queue = cluster._Queue([[n] for n in range(6)])
    run = cluster._Run(fake, lambda: next(workers), tasks(), queue, 1, SEED, store, None, None, Summary())
    asyncio.run(run.all(1))
    store.close()
    assert_same(tmp_path, expected)
    assert set(finished(tmp_path).values()) == {1}
