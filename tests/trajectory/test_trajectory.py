"""Trajectory: reads match writes, which tokens are trained, and what a turn costs."""

import copy
import pickle
import tracemalloc

import numpy as np
import pytest

from tests.support import FULL
from tests.trajectory.model import check_trajectory
from tests.trajectory.walk import Walk, illegal_operations, walk
from tokentrace.errors import ExtensionError, TrajectoryError
from tokentrace.tokens.kinds import Kind
from tokentrace.trajectory import Trajectory, to_bytes


def two_turns() -> Trajectory:
    """Prompt 1 2 3, completion 10 11 12, tool result and scaffold 4 5, completion 20 21."""
    trajectory = Trajectory()
    trajectory.begin([1, 2, 3], messages=2)
    trajectory.append_completion([10, 11, 12], [-0.1, -0.2, -0.3], finish_reason="tool_calls", version=1)
    trajectory.append_context([4, 5], [Kind.CONTEXT, Kind.SCAFFOLD], message_spans=[(0, 1, 0)], messages=1)
    trajectory.append_completion([20, 21], [-0.4, -0.5], finish_reason="stop", version=2)
    return trajectory


@pytest.mark.parametrize("seed", range(4 if FULL else 2))
def test_random_walk(seed: int) -> None:
    walk(seed, 2_500)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_random_walk_of_a_million_operations(seed: int) -> None:
    walk(1_000 + seed, 100_000)


@pytest.mark.parametrize("seed", range(5))
def test_every_illegal_operation_is_refused_and_changes_nothing(seed: int) -> None:
    random_walk = Walk(seed)
    for _ in range(60):
        random_walk.step()
    random_walk.illegal(len(illegal_operations(random_walk)))
    random_walk.verify()


def test_metadata_and_sampling_cannot_be_changed_through_returned_values() -> None:
    metadata = {"task": "a\ud800", "n": [1, 2.5, None, {"deep": True}]}
    trajectory = Trajectory(metadata=metadata)
    trajectory.metadata["n"].append(1)
    assert trajectory.metadata == metadata
    trajectory.begin([1])
    turn = trajectory.append_completion([2], [-1.0], finish_reason="stop", sampling={"temperature": 0.7})
    assert turn.sampling is not None
    turn.sampling["temperature"] = 1.0
    assert trajectory.turns()[0].sampling == {"temperature": 0.7}


def test_missing_logprobs_are_refused() -> None:
    trajectory = Trajectory()
    trajectory.begin([1])
    with pytest.raises(TrajectoryError, match=r"logprobs\[1\] is None.*missing logprob"):
        trajectory.append_completion([2, 3], [-1.0, None], finish_reason="stop")  # type: ignore[list-item]
    with pytest.raises(TrajectoryError, match="2 sampled ids but 1 logprobs"):
        trajectory.append_completion([2, 3], [-1.0], finish_reason="stop")
    with pytest.raises(TrajectoryError, match="without logprobs"):
        trajectory.append_completion([2, 3], None, finish_reason="stop")
    assert trajectory.num_writes == 1


def test_a_break_names_the_first_id_that_differs() -> None:
    trajectory = two_turns()
    with pytest.raises(ExtensionError, match=r"id 99 at position 4, the stream 11 \(SAMPLED\)") as caught:
        trajectory.extend_to([1, 2, 3, 10, 99, 12, 4, 5, 20, 21, 6])
    assert caught.value.position == 4
    with pytest.raises(ExtensionError, match="ends at 2, inside the recorded stream of 10 ids") as caught:
        trajectory.extend_to([1, 2])
    assert caught.value.position == 2
    assert trajectory.num_writes == 4


def test_a_prompt_that_rewrites_nothing_and_too_few_messages_are_refused() -> None:
    trajectory = two_turns()
    child = trajectory.branch([1, 2, 3, 9])
    with pytest.raises(TrajectoryError, match=r"extend_to\(prompt_ids, branch=1\)"):
        trajectory.branch([1, 2, 3, 9, 9])
    assert trajectory.extend_to([1, 2, 3, 9, 9], branch=child) == 1
    trajectory = two_turns()
    with pytest.raises(TrajectoryError, match="shared prefix holds 4"):
        trajectory.branch([1, 2, 3, 10, 11, 12, 4, 5, 0], messages=3)
    assert trajectory.branch([1, 2, 3, 10, 11, 12, 4, 5, 0], messages=5) == 1
    assert trajectory.message_count() == 5


def test_views_are_read_only_and_do_not_change() -> None:
    trajectory = two_turns()
    trajectory.branch([1, 2, 3, 9])
    for branch in (0, 1):
        views = [trajectory.stream(branch), trajectory.table(branch).kinds]
        views += [turn.tokens.ids for turn in trajectory.turns(branch)]
        before = [view.tolist() for view in views]
        for _ in range(200):
            trajectory.append_context([5] * 7, Kind.CONTEXT, branch=branch)
        for view, values in zip(views, before, strict=True):
            assert view.tolist() == values
            with pytest.raises(ValueError, match="read-only"):
                view[0] = 1


def test_changes_of_the_callers_arrays_have_no_effect() -> None:
    ids, logprobs = np.array([1, 2], np.int32), np.array([-1, -2], np.float32)
    trajectory = Trajectory()
    trajectory.begin(ids)
    trajectory.append_completion(ids, logprobs, finish_reason="stop")
    ids[:], logprobs[:] = 9, 9
    assert trajectory.stream().tolist() == [1, 2, 1, 2]
    assert trajectory.logprobs()[2:].tolist() == [-1, -2]


@pytest.mark.parametrize("branched", [False, True], ids=["first branch", "a branch of it"])
def test_a_turn_of_a_long_rollout_costs_what_is_new(branched: bool) -> None:
    trajectory = Trajectory()
    trajectory.begin(np.arange(1_000_000, dtype=np.int32) % 50_000)
    if branched:
        trajectory.append_completion([1], [-1.0], finish_reason="stop")
        trajectory.branch(trajectory.stream()[:900_000])
    new, logprobs = np.arange(100, dtype=np.int32), np.full(100, -1.0, np.float32)

    def turn() -> None:
        trajectory.append_completion(new, logprobs, finish_reason="stop", version=3)
        trajectory.append_context(new, Kind.CONTEXT, message_spans=[(0, 50, 0)], messages=1)
        trajectory.stream()

    for _ in range(3):  # fills the caches, and grows the buffers
        turn()
    peaks = []
    tracemalloc.start()
    try:
        for _ in range(20):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            turn()
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    assert max(peaks) < 100_000  # the stream alone takes millions of bytes


def test_a_pickled_or_copied_trajectory_is_equal_and_independent() -> None:
    trajectory = two_turns()
    trajectory.branch([1, 2, 9])
    for twin in (pickle.loads(pickle.dumps(trajectory)), copy.deepcopy(trajectory)):
        assert to_bytes(twin) == to_bytes(trajectory)
        twin.append_context([5], Kind.CONTEXT)
        assert len(twin) == len(trajectory) + 1
        check_trajectory(twin)


@pytest.mark.parametrize("dtype", ["u1", "i1", "u4", "i8", "u8"])
def test_kinds_may_have_any_integer_type(dtype: str) -> None:
    trajectory = Trajectory()
    trajectory.begin([1, 2], kinds=np.array([Kind.PROMPT, Kind.SCAFFOLD], dtype))
    assert trajectory.table().kinds.tolist() == [Kind.PROMPT, Kind.SCAFFOLD]
