"""The rows of a session as they are exported, beside what its engine was given and answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.gateway.real_agents.scripted import Stage

Row = Mapping[str, Any]


def check_rows(stage: Stage, session: str, rows: Sequence[Row]) -> None:
    """Every turn is in a row as the engine had it, and carries loss in exactly one; nothing else has a logprob."""
    exchanges = stage.exchanges[session]
    assert sum(sum(row["loss_mask"]) for row in rows) == sum(len(each.ids) for each in exchanges)
    for each in exchanges:
        start, stream = len(each.prompt), [*each.prompt, *each.ids]
        holding = [row for row in rows if row["input_ids"][: len(stream)] == stream]
        trained = [row for row in holding if all(row["loss_mask"][start : len(stream)])]
        logprobs = [np.asarray(row["logprobs"][start : len(stream)], np.float32) for row in trained]
        # logprobs are never alike, so they tell a turn from one that was sampled again with the same tokens
        assert sum(np.array_equal(some, np.asarray(each.logprobs, np.float32)) for some in logprobs) == 1
    for row in rows:
        sampled = {at for span in row["completions"] for at in range(span["start"], span["stop"])}
        assert {at for at, logprob in enumerate(row["logprobs"]) if logprob is not None} == sampled
        assert {at for at, one in enumerate(row["loss_mask"]) if one} <= sampled
