"""The laws of a trajectory, checked from the first token to the last through its public names."""

from __future__ import annotations

import json

import numpy as np

from tokentrace.tokens.kinds import Kind
from tokentrace.trajectory import Trajectory, to_bytes
from tokentrace.trajectory.storage import replay_records, write_records
from tokentrace.trajectory.turns import Context


def check_trajectory(trajectory: Trajectory) -> None:
    """Assert that the writes alone give this trajectory, and that every read agrees with them."""
    assert to_bytes(replayed(trajectory)) == to_bytes(trajectory)
    branches = trajectory.branches
    streams: list[list[int]] = []
    for write in trajectory.writes():
        if isinstance(write, Context) and write.parent is not None:
            assert write.branch == len(streams)
            streams.append(streams[write.parent][: write.start] if write.parent >= 0 else [])
        assert write.start == len(streams[write.branch])
        streams[write.branch] += write.tokens.ids.tolist()
    assert len(branches) == len(streams)
    assert trajectory.num_tokens == sum(branch.stop - branch.start for branch in branches)
    assert trajectory.num_sampled == sum(branch.sampled for branch in branches)
    for branch, stream in zip(branches, streams, strict=True):
        assert trajectory.stream(branch.index).tolist() == stream
        assert json.loads(trajectory.wire(branch.index)) == stream
        assert branch.stop == len(stream)
        if branch.parent >= 0:
            parent = branches[branch.parent]
            assert branch.parent < branch.index
            assert parent.start < branch.start < parent.stop
        else:
            assert branch.start == 0 < branch.stop
        _check_tokens(trajectory, branch.index)


def replayed(trajectory: Trajectory) -> Trajectory:
    """A new trajectory from the writes and rewards of another."""
    copy = Trajectory(
        name=trajectory.name,
        vocab_size=trajectory.vocab_size,
        logprobs=trajectory.has_logprobs,
        metadata=trajectory.metadata,
    )
    assert replay_records(copy, write_records(trajectory)) == trajectory.num_writes
    for number, reward in trajectory.rewarded:
        copy.replay_reward(number, reward)
    return copy


def _check_tokens(trajectory: Trajectory, index: int) -> None:
    stream, kinds = trajectory.stream(index), trajectory.kinds(index)
    assert len(kinds) == len(stream)
    assert stream.min() >= 0
    assert trajectory.vocab_size is None or stream.max() < trajectory.vocab_size
    sampled = kinds == Kind.SAMPLED
    in_turns = np.zeros(len(stream), bool)
    for turn in trajectory.turns(index):
        in_turns[turn.start : turn.stop] = True
        assert trajectory.completion(turn).tolist() == stream[turn.start : turn.stop].tolist()
        assert sum(span.stop - span.start for span in turn.versions) in (0, len(turn))
    assert (in_turns == sampled).all()
    assert trajectory.loss_mask(index).sum() == trajectory.branches[index].sampled
    if trajectory.has_logprobs:
        logprobs = trajectory.logprobs(index)
        assert (np.isfinite(logprobs) == sampled).all()
        assert (logprobs[sampled] <= np.float32(1e-4)).all()
    for channel in trajectory.channels(index).values():
        assert not (channel.present & ~sampled).any()
