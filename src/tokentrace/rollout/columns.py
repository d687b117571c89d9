"""What rows of rollouts have beside those of all trajectories: how it ended, its metrics, and those of its turns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..data.sources import pyarrow
from ..samples.sample import Sample
from ..trajectory.trajectory import Trajectory


def rollout_fields() -> list[Any]:
    """The columns as fields of an Arrow schema."""
    pa = pyarrow()
    turn = pa.struct(
        [
            ("start", pa.int32()),
            ("stop", pa.int32()),
            ("finish_reason", pa.string()),
            ("prompt_tokens", pa.int32()),
            ("cached_tokens", pa.int32()),
            ("engine_seconds", pa.float64()),
            ("tool_calls", pa.int32()),
            ("tool_errors", pa.int32()),
            ("tool_seconds", pa.float64()),
            ("malformed", pa.bool_()),
            ("reward", pa.float64()),
            ("metrics", pa.string()),
            ("continues", pa.bool_()),
        ]
    )
    return [pa.field("end", pa.string()), pa.field("metrics", pa.string()), pa.field("turns", pa.list_(turn))]


def rollout_columns(rows: Sequence[tuple[Mapping[str, Any], Trajectory, Sample]]) -> Iterator[tuple[Any, Any]]:
    """The columns of some rows: what the journal says of the rollout, its trajectory, and the row."""
    pa = pyarrow()
    values = [
        [row["metrics"]["end"] for row, _, _ in rows],
        [json.dumps(row["metrics"], default=str) for row, _, _ in rows],
        [_turns(row, trajectory, sample) for row, trajectory, sample in rows],
    ]
    for field, column in zip(rollout_fields(), values, strict=True):
        yield field, pa.array(column, field.type)


def _turns(row: Mapping[str, Any], trajectory: Trajectory, sample: Sample) -> list[dict[str, Any]] | None:
    """The turns that a row trains, with where they stand in it; None where the journal says nothing of turns."""
    told = row.get("turns")
    owned = [turn for k in range(trajectory.num_branches) for turn in trajectory.turns(k) if turn.branch == k]
    if told is None or len(told) != len(owned):
        return None
    found = []
    for turn, said in zip(sorted(owned, key=lambda turn: turn.write), told, strict=True):
        if turn.branch == sample.branch:
            metrics = json.dumps(said.get("metrics") or [], default=str)
            known = {key: value for key, value in said.items() if key not in ("sampled", "metrics")}
            found.append({**known, "start": turn.start, "stop": turn.stop, "metrics": metrics})
    return found
