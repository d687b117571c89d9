"""A cluster without a node is reported and ends the run. Ray itself is not started here."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tokentrace.rollout import Task, cluster
from tokentrace.rollout.patience import EngineDown, Outage


class Unplaced:
    """An actor that Ray finds no node for."""

    def options(self, **_: Any) -> Any:
        return self

    def remote(self, *_: Any) -> Any:
        return SimpleNamespace(ready=SimpleNamespace(remote=lambda: asyncio.Event().wait()))


def test_a_cluster_without_a_node_is_reported_and_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_POLL_SECONDS", 0.001)
    notices: list[Outage | None] = []
    exceptions = SimpleNamespace(RayError=type("RayError", (Exception,), {}))
    ray = SimpleNamespace(exceptions=exceptions, kill=lambda _: None, cluster_resources=lambda: {"memory": 1.0})
    tasks = [Task([{"role": "user", "content": "?"}], name="one")]
    workers = cluster._Workers(ray, Unplaced(), (), tasks, notices.append, 0.0)
    with pytest.raises(EngineDown, match="the Ray cluster had no node with a CPU"):
        asyncio.run(workers.seat(1))
    assert "the Ray cluster has no node with a CPU, and all rollouts wait" in str(notices[0])
