"""What a run on a cluster does when Ray does not start, or has no node left. Ray itself is not started here."""

from __future__ import annotations

import asyncio
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from tokentrace.rollout import Task, cluster
from tokentrace.rollout.patience import EngineDown, Outage


class Unplaced:
    """A worker that Ray finds no node for."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=self._never)

    async def _never(self, *_: Any) -> Any:
        await asyncio.Event().wait()


def waiting_run(nodes: Any, notices: list[Outage | None], patience: float) -> Any:
    names = ("RayError", "RayActorError", "ObjectLostError", "OutOfMemoryError")
    exceptions = SimpleNamespace(**{name: type(name, (Exception,), {}) for name in names})
    ray = SimpleNamespace(exceptions=exceptions, kill=lambda _: None, cluster_resources=nodes)
    tasks = [Task([{"role": "user", "content": "?"}], name="one")]
    queue = deque([0])

    async def finish(rollout: Any) -> None:
        raise AssertionError("nothing runs")

    return cluster._Run(ray, Unplaced, tasks, queue, 1, None, finish, notices.append, patience)


def test_a_cluster_without_a_node_is_reported_and_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr(cluster, "_CLOSE_SECONDS", 0.001)
    notices: list[Outage | None] = []
    run = waiting_run(lambda: {"memory": 1.0}, notices, patience=0.0)
    with pytest.raises(EngineDown, match="the Ray cluster had no node with a CPU"):
        asyncio.run(run.all(1))
    assert "the Ray cluster has no node with a CPU, and all rollouts wait" in str(notices[0])
