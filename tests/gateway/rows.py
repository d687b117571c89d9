"""The rows of a session, beside what its engine was given and answered."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.gateway.agents.scripted import Stage
from tests.gateway.server import Served
from tokentrace.samples import Sample, trajectory_samples


def rows_of(served: Served, session: str) -> list[Sample]:
    async def samples() -> list[Sample]:
        live = await served.app.gateway.sessions.get(session)
        return trajectory_samples(live.session.trajectory)

    return list(served.run(samples()))


def check_rows(stage: Stage, session: str, rows: Sequence[Sample]) -> None:
    """Every turn is in a row as the engine had it, and carries loss in exactly one."""
    exchanges = stage.exchanges[session]
    assert sum(int(row.mask.sum()) for row in rows) == sum(len(each.ids) for each in exchanges)
    for each in exchanges:
        start, stream = len(each.prompt), [*each.prompt, *each.ids]
        holding = [row for row in rows if row.ids[: len(stream)].tolist() == stream]
        trained = [row for row in holding if row.mask[start : len(stream)].all()]
        assert len(trained) == 1
        assert trained[0].logprobs is not None
        assert np.array_equal(trained[0].logprobs[start : len(stream)], np.asarray(each.logprobs, np.float32))
