"""What a run on a cluster does when Ray does not start, or has no node left. Ray itself is not started here."""

from __future__ import annotations

import asyncio
import builtins
from types import SimpleNamespace
from typing import Any

import pytest

from tokentrace.data.ray_connection import connected, import_ray
from tokentrace.errors import InputError
from tokentrace.rollout import Summary, Task, cluster
from tokentrace.rollout.patience import EngineDown, Outage


class RaySystemError(Exception):
    """As Ray's own, which is neither an OSError nor a RuntimeError."""


@pytest.mark.parametrize(
    "error",
    [
        Exception("The current node timed out during startup.\nThe raylet's log is below."),
        RaySystemError("System error: Broken pipe"),
        AssertionError(),
        ConnectionError("could not find any running Ray instance"),
    ],
)
def test_whatever_ray_raises_as_it_starts_is_one_line(error: Exception) -> None:
    ended = []

    def init(**_: Any) -> None:
        raise error

    ray = SimpleNamespace(is_initialized=lambda: False, init=init, shutdown=lambda: ended.append(True))
    with (
        pytest.raises(InputError, match=f"there is no Ray at 'local': {type(error).__name__}") as caught,
        connected(ray, "local"),
    ):
        pass
    assert "\n" not in str(caught.value)
    assert ended, "what had started by then is ended"


def test_a_ray_that_cannot_be_imported_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    original = builtins.__import__

    def imported(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "ray":
            raise ImportError("cannot import name 'cygrpc'")
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", imported)
    with pytest.raises(InputError, match="Ray is installed and cannot be imported: ImportError: cannot import name"):
        import_ray()


class Unplaced:
    """A worker that Ray finds no node for."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=self._never)

    async def _never(self, *_: Any) -> Any:
        await asyncio.Event().wait()


def waiting_run(nodes: Any, notices: list[Outage | None], patience: float) -> Any:
    names = ("RayError", "RayActorError", "WorkerCrashedError", "NodeDiedError", "ObjectLostError", "OutOfMemoryError")
    exceptions = SimpleNamespace(**{name: type(name, (Exception,), {}) for name in names})
    ray = SimpleNamespace(exceptions=exceptions, kill=lambda _: None, cluster_resources=nodes)
    tasks = [Task([{"role": "user", "content": "?"}], name="one")]
    queue = cluster._Queue([[0]])
    return cluster._Run(ray, Unplaced, tasks, queue, 1, None, None, None, notices.append, Summary(), patience=patience)


def test_a_cluster_without_a_node_is_reported_and_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_LOOKS", 0.001)
    monkeypatch.setattr(cluster, "_FAREWELL", 0.001)
    notices: list[Outage | None] = []
    run = waiting_run(lambda: {"memory": 1.0}, notices, patience=0.0)
    with pytest.raises(EngineDown, match="the Ray cluster had no node with a CPU"):
        asyncio.run(run.all(1))
    assert "the Ray cluster has no node with a CPU, and all rollouts wait" in str(notices[0])


def test_a_worker_that_takes_long_to_start_on_a_node_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_LOOKS", 0.001)
    notices: list[Outage | None] = []

    async def started() -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        looks: list[int] = []

        def nodes() -> dict[str, float]:
            looks.append(1)
            if len(looks) == 3:
                answer.get_loop().call_soon_threadsafe(answer.set_result, {"node": "a"})
            return {"CPU": 8.0}

        run = waiting_run(nodes, notices, patience=0.0)
        return await run._started(SimpleNamespace(ready=SimpleNamespace(remote=lambda: answer)))

    assert asyncio.run(started()) == {"node": "a"}
    assert not notices
