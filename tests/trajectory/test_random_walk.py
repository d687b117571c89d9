"""No sequence of legal and illegal operations leaves a trajectory inconsistent, or other than the model says."""

from __future__ import annotations

import pytest

from tests.support import FULL
from tests.trajectory.walk import Walk, illegal_operations, walk


@pytest.mark.parametrize("seed", range(4 if FULL else 2))
def test_random_walk(seed: int) -> None:
    walk(seed, 2_500)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_random_walk_of_a_million_operations(seed: int) -> None:
    walk(1_000 + seed, 100_000)


@pytest.mark.parametrize("seed", range(5))
def test_every_illegal_operation_is_refused_and_changes_nothing(seed: int) -> None:
    one = Walk(seed)
    for _ in range(60):
        one.step()
    one.illegal(len(illegal_operations(one)))
    one.verify()
