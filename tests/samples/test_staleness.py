"""How old tokens are: by the versions that sampled them, never guessed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tokentrace import collate, trajectory_samples
from tokentrace.errors import SampleError
from tokentrace.samples.batches import fresh_samples, row_staleness, token_staleness, token_versions
from tokentrace.samples.sample import Sample
from tokentrace.tokens.kinds import Kind
from tokentrace.trajectory import Trajectory


def recorded(*versions: Any, name: str = "one") -> Trajectory:
    """Turns of two tokens, one for each version."""
    trajectory = Trajectory(name=name)
    trajectory.begin([1, 2])
    for version in versions:
        trajectory.append_completion([7, 8], [-0.5, -0.5], finish_reason="stop", version=version)
        trajectory.append_context([3], Kind.CONTEXT, messages=1)
    return trajectory


def row(*versions: Any, name: str = "one") -> Sample:
    return trajectory_samples(recorded(*versions, name=name))[0]


def test_every_sampled_token_has_its_version_and_its_age() -> None:
    sample = row(5, [(5, 0, 1), (7, 1, 2)])
    assert token_versions(sample).tolist() == [-1, -1, 5, 5, -1, 5, 7, -1]
    assert token_staleness(sample, 8).tolist() == [-1, -1, 3, 3, -1, 3, 1, -1]
    assert row_staleness(sample, 8) == (3, 2.5)
    empty = sample.slice(0, 2)
    assert row_staleness(empty, 8)[0] == -1
    assert math.isnan(row_staleness(empty, 8)[1])


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_batch_says_how_old_its_tokens_are(side: Any) -> None:
    rows = [row(5, 7), row(8)]
    batch = collate(rows, pad_id=0, side=side, version=8)
    for at, sample in enumerate(rows):
        place = slice(0, len(sample)) if side == "right" else slice(-len(sample), None)
        assert batch["token_versions"][at, place].tolist() == token_versions(sample).tolist()
        assert batch["staleness"][at, place].tolist() == token_staleness(sample, 8).tolist()
    padding = batch["attention_mask"] == 0
    assert (batch["staleness"][padding] == -1).all()
    assert (batch["token_versions"][padding] == -1).all()
    assert batch["max_staleness"].tolist() == [3, 0]
    assert batch["mean_staleness"].tolist() == [2.0, 0.0]
    assert not {"staleness", "token_versions", "max_staleness"} & set(collate(rows, pad_id=0))


@pytest.mark.parametrize(
    ("versions", "now", "why"),
    [
        (["step-7"], 8, "version 'step-7': name versions by integers"),
        ([-3], 8, "version -3"),
        (["9" * 19], 8, "name versions by integers"),
        (["9"], 8, "sampled by version 9, and 8 is trained"),
        ([5, None], 8, "token 5 carries loss and has no version"),
        ([5], "8", "integer that names the weights"),
        ([5], True, "integer that names the weights"),
        ([5], -1, "integer that names the weights"),
    ],
)
def test_what_cannot_be_computed_is_refused(versions: Any, now: Any, why: str) -> None:
    sample = row(*versions)
    with pytest.raises(SampleError, match=why):
        token_staleness(sample, now)
    with pytest.raises(SampleError, match=why):
        collate([sample], pad_id=0, version=now)


def test_rows_that_are_too_old_are_told_apart() -> None:
    rows = [row(8, name="new"), row(4, 8, name="old"), row(6, name="middle"), row(1, name="older")]
    fresh, stale = fresh_samples(rows, 8, max_staleness=2)
    assert [sample.name for sample in fresh] == ["new", "middle"]
    assert [sample.name for sample in stale] == ["old", "older"]
    with pytest.raises(SampleError, match="max_staleness"):
        fresh_samples(rows, 8, max_staleness=-1)
