"""Trajectory: what is written is what is read, whose tokens are trained, what a turn costs."""

from __future__ import annotations

import copy
import json
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import examples
from tests.trajectory.checker import check_trajectory
from tokentrace.errors import ExtensionError, TrajectoryError
from tokentrace.tokens.kinds import Kind
from tokentrace.trajectory import SharedPrefix, Trajectory, Turn, VersionSpan, to_bytes


def two_turns() -> Trajectory:
    """Prompt 1 2 3, completion 10 11 12, tool result and scaffold 4 5, completion 20 21."""
    trajectory = Trajectory()
    trajectory.begin([1, 2, 3], messages=2)
    trajectory.append_completion([10, 11, 12], [-0.1, -0.2, -0.3], finish_reason="tool_calls", version=1)
    trajectory.append_context([4, 5], [Kind.CONTEXT, Kind.SCAFFOLD], message_spans=[(0, 1, 0)], messages=1)
    trajectory.append_completion([20, 21], [-0.4, -0.5], finish_reason="stop", version=2)
    return trajectory


# -- one stream


def test_what_was_written_is_read() -> None:
    trajectory = two_turns()
    assert trajectory.stream().tolist() == [1, 2, 3, 10, 11, 12, 4, 5, 20, 21]
    assert trajectory.stream().dtype == np.int32
    assert trajectory.kinds().tolist() == [0, 0, 0, 1, 1, 1, 2, 3, 1, 1]
    assert trajectory.kinds().dtype == np.uint8
    logprobs = trajectory.logprobs()
    assert logprobs.dtype == np.float32
    assert np.isnan(logprobs).tolist() == (~trajectory.loss_mask()).tolist()
    assert logprobs[trajectory.loss_mask()].tolist() == np.float32([-0.1, -0.2, -0.3, -0.4, -0.5]).tolist()
    assert [(turn.start, turn.stop, turn.version, turn.message) for turn in trajectory.turns()] == [
        (3, 6, 1, 2),
        (8, 10, 2, 4),
    ]
    assert trajectory.table().message_spans() == [(3, 6, 2), (6, 7, 3), (8, 10, 4)]
    assert trajectory.message_count() == 5
    assert len(trajectory) == trajectory.num_tokens == 10
    assert repr(trajectory) == "Trajectory(10 tokens, 5 sampled, 4 writes)"
    check_trajectory(trajectory)


def test_metadata_and_sampling_are_kept_and_cannot_be_changed_through_what_is_returned() -> None:
    metadata = {"task": "a\ud800", "n": [1, 2.5, None, {"deep": True}]}
    trajectory = Trajectory(metadata=metadata)
    trajectory.metadata["n"].append(1)
    assert trajectory.metadata == metadata
    trajectory.begin([1])
    turn = trajectory.append_completion([2], [-1.0], finish_reason="stop", sampling={"temperature": 0.7})
    assert turn.sampling is not None
    turn.sampling["temperature"] = 1.0
    assert trajectory.turns()[0].sampling == {"temperature": 0.7}


# -- logprobs and versions


def test_a_missing_logprob_is_an_error_and_says_so() -> None:
    trajectory = Trajectory()
    trajectory.begin([1])
    with pytest.raises(TrajectoryError, match=r"logprobs\[1\] is None.*missing logprob"):
        trajectory.append_completion([2, 3], [-1.0, None], finish_reason="stop")  # type: ignore[list-item]
    with pytest.raises(TrajectoryError, match="2 sampled ids but 1 logprobs"):
        trajectory.append_completion([2, 3], [-1.0], finish_reason="stop")
    with pytest.raises(TrajectoryError, match="without logprobs"):
        trajectory.append_completion([2, 3], None, finish_reason="stop")
    assert trajectory.num_writes == 1


def test_without_logprobs_none_are_there_to_be_read() -> None:
    trajectory = Trajectory(logprobs=False)
    trajectory.begin([1])
    turn = trajectory.append_completion([2, 3], None, finish_reason="stop")
    assert trajectory.loss_mask().tolist() == [False, True, True]
    with pytest.raises(TrajectoryError, match="logprobs=False"):
        trajectory.logprobs()
    with pytest.raises(TrajectoryError, match="logprobs=False"):
        trajectory.completion_logprobs(turn)
    check_trajectory(trajectory)


def test_versions_of_a_turn() -> None:
    trajectory = Trajectory(logprobs=False)
    trajectory.begin([1])
    changed = trajectory.append_completion([2, 3], None, finish_reason="length", version=[("a", 0, 1), (7, 1, 2)])
    assert changed.versions == (VersionSpan("a", 0, 1), VersionSpan(7, 1, 2))
    assert changed.version is None
    one = trajectory.append_completion([4], None, finish_reason="stop", version=[("a", 0, 1)], continues=True)
    assert (one.version, one.versions) == ("a", (VersionSpan("a", 0, 1),))
    trajectory.append_context([5], Kind.CONTEXT)
    assert trajectory.append_completion([6], None, finish_reason="stop").versions == ()
    assert trajectory.branch([1, 2, 9]) == 1
    head = trajectory.turns()[0]
    assert (head.cut, len(head), head.versions) == (True, 1, (VersionSpan("a", 0, 1),))


# -- turns that follow turns


def test_a_completion_needs_a_prompt_before_it() -> None:
    trajectory = two_turns()
    with pytest.raises(TrajectoryError, match="ends with a completion"):
        trajectory.append_completion([1], [-1.0], finish_reason="stop")
    with pytest.raises(TrajectoryError, match='finished with "stop"'):
        trajectory.append_completion([1], [-1.0], finish_reason="stop", continues=True)


@pytest.mark.parametrize("reason", ["abort", "length"])
def test_an_unfinished_turn_can_be_continued_and_stays_one_message(reason: str) -> None:
    trajectory = Trajectory()
    trajectory.begin([1], messages=1)
    trajectory.append_completion([2], [-1.0], finish_reason=reason, version=1)
    trajectory.append_completion([3], [-1.0], finish_reason=reason, version=2, continues=True)
    trajectory.append_context([4], Kind.SYNTHETIC)
    trajectory.append_completion([5], [-1.0], finish_reason=reason, version=2, continues=True)
    assert [turn.message for turn in trajectory.turns()] == [1, 1, 1]
    assert trajectory.message_count() == 2
    trajectory.append_context([6], Kind.CONTEXT, messages=1)
    with pytest.raises(TrajectoryError, match="new messages came"):
        trajectory.append_completion([7], [-1.0], finish_reason="stop", continues=True)
    check_trajectory(trajectory)


def test_an_empty_completion_is_a_turn_that_can_be_tried_again() -> None:
    trajectory = Trajectory()
    trajectory.begin([1])
    turn = trajectory.append_completion([], [], finish_reason="stop", version=[("v", 0, 0)])
    assert (len(turn), turn.version) == (0, "v")
    trajectory.append_completion([2], [-1.0], finish_reason="stop", continues=True)
    assert [(one.start, one.stop, one.message) for one in trajectory.turns()] == [(1, 1, 0), (1, 2, 0)]
    check_trajectory(trajectory)


# -- extension


def test_a_next_prompt_is_recorded_as_far_as_it_is_new() -> None:
    trajectory = two_turns()
    prompt = [*trajectory.stream().tolist(), 6, 7]
    kinds = [*trajectory.kinds().tolist(), Kind.CONTEXT, Kind.SCAFFOLD]
    assert trajectory.extend_to(prompt, kinds, message_spans=[(0, 3, 0), (8, 11, 5)], messages=6) == 2
    assert trajectory.extend_to(prompt) == 0
    assert trajectory.kinds()[-2:].tolist() == [Kind.CONTEXT, Kind.SCAFFOLD]
    assert trajectory.table().message_spans()[-1] == (10, 11, 5)
    assert trajectory.num_writes == 5


def test_a_break_names_the_first_id_that_differs() -> None:
    trajectory = two_turns()
    with pytest.raises(ExtensionError, match=r"id 99 at position 4, the stream 11 \(SAMPLED\)") as caught:
        trajectory.extend_to([1, 2, 3, 10, 99, 12, 4, 5, 20, 21, 6])
    assert caught.value.position == 4
    with pytest.raises(ExtensionError, match="ends at 2, inside the recorded stream of 10 ids") as caught:
        trajectory.extend_to([1, 2])
    assert caught.value.position == 2
    assert trajectory.num_writes == 4


# -- the tree


def test_a_rewritten_history_branches_where_it_parts() -> None:
    trajectory = two_turns()
    child = trajectory.branch([1, 2, 3, 10, 11, 12, 8, 8], cause="tool result shortened")
    branch = trajectory.branches[child]
    assert (branch.parent, branch.start, branch.stop, branch.cause) == (0, 6, 8, "tool result shortened")
    trajectory.append_completion([30], [-0.9], finish_reason="stop")
    assert trajectory.loss_mask(child, once=False).nonzero()[0].tolist() == [3, 4, 5, 8]
    assert trajectory.loss_mask(child).nonzero()[0].tolist() == [8]
    assert [(turn.branch, turn.start, turn.message) for turn in trajectory.turns()] == [(0, 3, 2), (1, 8, 3)]
    assert trajectory.logprobs(child)[3:6].tolist() == np.float32([-0.1, -0.2, -0.3]).tolist()
    assert trajectory.num_samples == 2
    check_trajectory(trajectory)


def test_a_branch_may_leave_inside_a_completion() -> None:
    trajectory = two_turns()
    child = trajectory.branch([1, 2, 3, 10, 11, 77])
    assert trajectory.branches[child].start == 5
    (head,) = trajectory.turns()
    assert (head.branch, head.start, head.stop, head.cut, head.finish_reason) == (0, 3, 5, True, "tool_calls")
    assert trajectory.completion(head).tolist() == [10, 11]
    assert trajectory.completion_logprobs(head).tolist() == np.float32([-0.1, -0.2]).tolist()
    assert trajectory.kinds().tolist() == [0, 0, 0, 1, 1, 2]
    assert not trajectory.loss_mask().any()
    assert trajectory.message_count() == 2  # the message that was cut is not whole
    turn = trajectory.append_completion([50], [-2.0], finish_reason="stop")
    assert turn.message == head.message
    check_trajectory(trajectory)


def test_a_prompt_that_is_a_prefix_is_sampled_from_again() -> None:
    trajectory = Trajectory()
    trajectory.begin([1, 2], messages=1)
    trajectory.append_completion([3], [-1.0], finish_reason="stop")
    again = trajectory.branch([1, 2])
    trajectory.append_completion([3], [-1.0], finish_reason="stop")
    assert trajectory.stream(0).tolist() == trajectory.stream(again).tolist()
    assert [trajectory.loss_mask(index).sum() for index in range(2)] == [1, 1]
    assert trajectory.shared_prefix([1, 2, 3, 4]) == SharedPrefix(branch=0, length=3, extends=0)
    trajectory.append_context([9], Kind.CONTEXT, branch=0)
    assert trajectory.shared_prefix([1, 2, 3, 4]) == SharedPrefix(branch=0, length=3, extends=1)


def test_the_longest_prefix_anywhere_in_the_tree_is_shared() -> None:
    trajectory = two_turns()
    first = trajectory.branch([1, 2, 3, 50, 51, 52])
    trajectory.append_context([53], Kind.CONTEXT, branch=0)
    trajectory.branch([1, 2, 3, 50, 51, 60])
    assert [(one.parent, one.start) for one in trajectory.branches] == [(-1, 0), (0, 3), (first, 5)]
    third = trajectory.branch([9, 9], kinds=Kind.PROMPT, messages=1)
    assert (trajectory.branches[third].parent, trajectory.branches[third].start) == (-1, 0)
    assert trajectory.message_count() == 1
    check_trajectory(trajectory)


def test_a_prompt_that_rewrites_nothing_is_sent_to_extend_to() -> None:
    trajectory = two_turns()
    child = trajectory.branch([1, 2, 3, 9])
    with pytest.raises(TrajectoryError, match=r"extend_to\(prompt_ids, branch=1\)"):
        trajectory.branch([1, 2, 3, 9, 9])
    assert trajectory.extend_to([1, 2, 3, 9, 9], branch=child) == 1


def test_fewer_messages_than_the_shared_prefix_holds_are_refused() -> None:
    trajectory = two_turns()
    with pytest.raises(TrajectoryError, match="shared prefix holds 4"):
        trajectory.branch([1, 2, 3, 10, 11, 12, 4, 5, 0], messages=3)
    assert trajectory.branch([1, 2, 3, 10, 11, 12, 4, 5, 0], messages=5) == 1
    assert trajectory.message_count() == 5


# -- views and wire


def test_views_are_read_only_and_stay_what_they_were() -> None:
    trajectory = two_turns()
    trajectory.branch([1, 2, 3, 9])
    for branch in (0, 1):
        views = [trajectory.stream(branch), trajectory.kinds(branch)]
        views += [trajectory.completion(turn) for turn in trajectory.turns(branch)]
        before = [view.tolist() for view in views]
        for _ in range(200):
            trajectory.append_context([5] * 7, Kind.CONTEXT, branch=branch)
        for view, values in zip(views, before, strict=True):
            assert view.tolist() == values
            with pytest.raises(ValueError, match="read-only"):
                view[0] = 1


def test_what_the_caller_does_to_its_arrays_does_not_matter() -> None:
    ids, logprobs = np.array([1, 2], np.int32), np.array([-1, -2], np.float32)
    trajectory = Trajectory()
    trajectory.begin(ids)
    trajectory.append_completion(ids, logprobs, finish_reason="stop")
    ids[:], logprobs[:] = 9, 9
    assert trajectory.stream().tolist() == [1, 2, 1, 2]
    assert trajectory.logprobs()[2:].tolist() == [-1, -2]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40), min_size=1, max_size=30))
def test_wire_text_is_that_of_json(chunks: list[list[int]]) -> None:
    trajectory = Trajectory()
    trajectory.begin(chunks[0])
    for chunk in chunks[1:]:
        trajectory.append_context(chunk, Kind.CONTEXT)
        assert trajectory.wire() == json.dumps(trajectory.stream().tolist(), separators=(",", ":")).encode()
    check_trajectory(trajectory)


# -- cost and memory


@pytest.mark.parametrize("branched", [False, True], ids=["first branch", "a branch of it"])
def test_a_turn_of_a_long_rollout_costs_what_is_new(branched: bool) -> None:
    trajectory = Trajectory()
    trajectory.begin(np.arange(1_000_000, dtype=np.int32) % 50_000)
    if branched:
        trajectory.append_completion([1], [-1.0], finish_reason="stop")
        trajectory.branch(trajectory.stream()[:900_000])
    new, logprobs = np.arange(100, dtype=np.int32), np.full(100, -1.0, np.float32)

    def turn() -> Turn:
        turn = trajectory.append_completion(new, logprobs, finish_reason="stop", version=3)
        trajectory.append_context(new, Kind.CONTEXT, message_spans=[(0, 50, 0)], messages=1)
        trajectory.wire_parts()
        trajectory.stream()
        return turn

    for _ in range(3):  # makes the caches, and room in the buffers
        turn()
    peaks = []
    tracemalloc.start()
    try:
        for _ in range(20):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            trajectory.completion_logprobs(turn())
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    assert max(peaks) < 100_000  # the stream alone has millions of bytes
    assert len(trajectory.wire_parts()) <= 20


# -- copies


def test_a_pickled_or_copied_trajectory_is_the_same_and_goes_its_own_way() -> None:
    trajectory = two_turns()
    trajectory.branch([1, 2, 9])
    for twin in (pickle.loads(pickle.dumps(trajectory)), copy.deepcopy(trajectory)):
        assert to_bytes(twin) == to_bytes(trajectory)
        twin.append_context([5], Kind.CONTEXT)
        assert len(twin) == len(trajectory) + 1
        check_trajectory(twin)
