"""Rollouts on a real local Ray: the same results as without it, even if workers die."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from tests.ray_cluster import children_of, local_ray
from tests.rollout.support import Deadly
from tests.support import FULL
from tokentrace import Agent, EmbeddedEngine, create_renderer
from tokentrace.cli import main
from tokentrace.engines import SamplingParams
from tokentrace.errors import InputError
from tokentrace.pocket import POCKET
from tokentrace.rollout import Budget, Rollout, RolloutStore, Task, run_rollouts
from tokentrace.rollout.batch import grouped
from tokentrace.rollout.cluster import Crew, run_rollouts_on_ray

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
    """Three questions with a group of two each."""
    questions = [Task([{"role": "user", "content": f"What is {n} plus {n}?"}], name=f"q{n}") for n in (2, 3, 4)]
    return list(grouped(questions, 2))


def crew() -> Crew:
    """An agent of the pocket model that samples at temperature 1."""
    sampling = SamplingParams(max_tokens=24, temperature=1.0)
    return Agent(EmbeddedEngine(), create_renderer(POCKET), sampling=sampling, budget=Budget(turns=2)), tasks()


def on_ray(make: Callable[[], Any] = crew, chosen: list[Task] | None = None, **options: Any) -> Any:
    return asyncio.run(run_rollouts_on_ray(make, tasks() if chosen is None else chosen, seed=SEED, **options))


Streams: TypeAlias = dict[str, tuple[list[int], list[bool], npt.NDArray[np.float32]]]


def streams(folder: Path) -> Streams:
    """The trajectories of a run. The last bits of the embedded model's logprobs depend on what shares the batch, so
    `assert_same` compares them with a tolerance."""
    with closing(RolloutStore(folder)) as store:
        rollouts = {row["name"]: one for row, one in store.trajectories()}
    return {name: (one.stream().tolist(), one.loss_mask().tolist(), one.logprobs()) for name, one in rollouts.items()}


def assert_same(folder: Path, expected: Streams) -> None:
    actual = streams(folder)
    assert {name: one[:2] for name, one in actual.items()} == {name: one[:2] for name, one in expected.items()}
    for name, (_, _, logprobs) in actual.items():
        np.testing.assert_allclose(logprobs, expected[name][2], atol=1e-4)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Streams:
    """The trajectories of a run in this process."""
    folder = tmp_path_factory.mktemp("local")
    agent, own_tasks = crew()
    store = RolloutStore(folder)
    asyncio.run(run_rollouts(agent, own_tasks, store=store, seed=SEED))
    store.close()
    return streams(folder)


def kill_a_worker() -> None:
    pids = [pid for pid, name in children_of(os.getpid()) if name.startswith("ray::RolloutActor")]
    assert pids
    os.kill(pids[0], signal.SIGKILL)


@pytest.mark.skipif(not FULL, reason="long: make test-long")
def test_trajectories_equal_those_of_one_process_even_if_a_worker_dies(expected: Streams, tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    ended: list[str] = []

    def done(rollout: Rollout) -> None:
        ended.append(rollout.task.name)
        if len(ended) == 1:
            kill_a_worker()

    summary = on_ray(workers=2, store=store, done=done, concurrency=4)
    store.close()
    assert_same(tmp_path, expected)
    assert sorted(ended) == sorted(task.name for task in tasks()), "nothing finished is run again"
    assert summary.rollouts == 6


def deadly_crew() -> Crew:
    agent, own_tasks = crew()
    budget = Budget(turn_tokens=8)
    return Agent(agent.engine, agent.renderer, budget=budget, interaction=Deadly()), own_tasks


@pytest.mark.skipif(not FULL, reason="long: make test-long")
def test_rollout_that_kills_workers_fails_and_the_others_finish(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    done = on_ray(deadly_crew, workers=1, store=store, concurrency=3)
    ends = {row["name"]: (row["metrics"]["end"], row["notes"]) for row in store.finished}
    store.close()
    end, notes = ends.pop("q3-1")
    assert end == "failed"
    assert "3 workers died while it ran, and so did one that ran it alone" in notes[0]
    assert len(ends) == 5
    assert "failed" not in {end for end, _ in ends.values()}
    assert done.rollouts == 6


def broken_crew() -> Crew:
    raise InputError("there is no such tool")


def other_crew() -> Crew:
    agent, own_tasks = crew()
    return agent, [*own_tasks[:-1], Task([{"role": "user", "content": "What else?"}], name=own_tasks[-1].name)]


@pytest.mark.parametrize(
    ("make", "problem"), [(broken_crew, "node .*: there is no such tool"), (other_crew, "node .* differs: tasks was")]
)
def test_worker_that_cannot_start_ends_the_run(make: Callable[[], Crew], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        on_ray(make, workers=1)


def test_command_line_gives_the_rows_of_a_local_run(tmp_path: Path) -> None:
    def rows(name: str, *options: str) -> list[dict[str, Any]]:
        command = ["rollout", str(CONFIG), "-o", str(tmp_path / name), "--limit", "1", "-q", *options]
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, result.output
        return pq.read_table(tmp_path / name / "rows.parquet").to_pylist()

    on_ray, locally = rows("ray", "--ray", "--workers", "1"), rows("local")
    for one, other in zip(on_ray, locally, strict=True):
        np.testing.assert_allclose(one.pop("logprobs"), other.pop("logprobs"), atol=1e-4)
        assert one == other
    result_without_ray = CliRunner().invoke(main, ["rollout", str(CONFIG), "--workers", "2"])
    assert result_without_ray.exit_code == 2
    assert "give --ray, too" in result_without_ray.output
