"""A model of trajectories in plain lists, each branch with its whole stream, and checks of any trajectory."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from tokentrace.errors import TrajectoryError
from tokentrace.samples.trajectories import owned_turns
from tokentrace.tokens.kinds import Kind
from tokentrace.trajectory import Trajectory, to_bytes
from tokentrace.trajectory.storage import replay_records, write_records
from tokentrace.trajectory.turns import Context


@dataclass(frozen=True)
class Token:
    id: int
    kind: Kind
    owner: int
    logprob: float | None = None
    message: int = -1


@dataclass(frozen=True)
class Piece:
    """A write along a branch; `cut` if only a part of it lies in the branch."""

    owner: int
    start: int
    stop: int
    before: int
    after: int
    turn: dict[str, Any] | None = None
    cut: bool = False


@dataclass
class ModelBranch:
    parent: int
    start: int
    cause: str
    tokens: list[Token] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def messages(self) -> int:
        return self.pieces[-1].after


class Model:
    def __init__(self) -> None:
        self.branches: list[ModelBranch] = []
        self.current = -1
        self.reward: float | None = None

    def context(
        self, index: int, ids: list[int], kinds: list[Kind], spans: list[tuple[int, int, int]], messages: int
    ) -> None:
        branch = self.branches[index]
        before = branch.messages if branch.pieces else 0
        owners = [-1] * len(ids)
        for start, stop, message in spans:
            owners[start:stop] = [before + message] * (stop - start)
        start = len(branch.tokens)
        for token, kind, message in zip(ids, kinds, owners, strict=True):
            branch.tokens.append(Token(token, kind, index, None, message))
        branch.pieces.append(Piece(index, start, len(branch.tokens), before, before + messages))
        self.current = index

    def completion(
        self, index: int, ids: list[int], logprobs: list[float] | None, turn: dict[str, Any], continues: bool
    ) -> None:
        branch = self.branches[index]
        last = next((piece for piece in reversed(branch.pieces) if piece.turn is not None), None)
        message = last.before if continues and last is not None else branch.messages
        start = len(branch.tokens)
        values: list[float | None] = [None] * len(ids) if logprobs is None else list(logprobs)
        for token, value in zip(ids, values, strict=True):
            branch.tokens.append(Token(token, Kind.SAMPLED, index, value, message))
        branch.pieces.append(Piece(index, start, len(branch.tokens), message, message + 1, turn | {"c": continues}))
        self.current = index

    def open(self, source: int, position: int, cause: str) -> int:
        """Open a branch with its shared tokens; the caller adds its context."""
        if position == 0:
            self.branches.append(ModelBranch(-1, 0, cause))
            return len(self.branches) - 1
        old = self.branches[source]
        pieces = [piece for piece in old.pieces if piece.start < position]
        messages = 0
        for number, piece in enumerate(pieces):
            if piece.stop > position:
                pieces[number] = replace(piece, stop=position, cut=piece.turn is not None)
                messages = piece.before
            else:
                messages = piece.before if piece.cut else piece.after
        if pieces and pieces[-1].after != messages:  # a cut turn does not count as a message
            pieces[-1] = replace(pieces[-1], after=messages)
        tokens = old.tokens[:position]
        self.branches.append(ModelBranch(tokens[-1].owner, position, cause, tokens, pieces))
        return len(self.branches) - 1

    def shared(self, prompt: list[int], index: int) -> int:
        ids = self.branches[index].ids
        return next(
            (k for k, (a, b) in enumerate(zip(ids, prompt, strict=False)) if a != b), min(len(ids), len(prompt))
        )

    def longest(self, prompt: list[int]) -> tuple[int, int, bool]:
        lengths = [self.shared(prompt, index) for index in range(len(self.branches))]
        best = max(lengths)
        extends = any(
            length == best == len(branch.tokens) for length, branch in zip(lengths, self.branches, strict=True)
        )
        return lengths.index(best), best, extends

    def can_complete(self, index: int) -> bool:
        last = self.branches[index].pieces[-1]
        return last.turn is None or last.owner != index

    def can_continue(self, index: int) -> bool:
        branch = self.branches[index]
        own_pieces = [piece for piece in branch.pieces if piece.owner == index]
        last = next((piece for piece in reversed(own_pieces) if piece.turn is not None), None)
        if last is None or last.turn is None or last.after != branch.messages:
            return False
        return last.start == last.stop or last.turn["finish_reason"] in {"abort", "length"}


def assert_same(model: Model, trajectory: Trajectory) -> None:
    assert trajectory.current == model.current
    assert trajectory.num_branches == len(model.branches)
    trained = 0
    for index, (expected, actual) in enumerate(zip(model.branches, trajectory.branches, strict=True)):
        assert (actual.parent, actual.start, actual.cause) == (expected.parent, expected.start, expected.cause)
        tokens = expected.tokens
        assert actual.stop == len(tokens)
        assert trajectory.stream(index).tolist() == expected.ids
        assert trajectory.table(index).kinds.tolist() == [token.kind for token in tokens]
        assert trajectory.table(index).mask.tolist() == [token.kind == Kind.SAMPLED for token in tokens]
        once = [token.kind == Kind.SAMPLED and token.owner == index for token in tokens]
        assert trajectory.loss_mask(index).tolist() == once
        assert actual.sampled == sum(once)
        trained += sum(once)
        if trajectory.has_logprobs:
            logprobs = np.array([math.nan if token.logprob is None else token.logprob for token in tokens], np.float32)
            assert trajectory.logprobs(index).tobytes() == logprobs.tobytes()
        else:
            with pytest.raises(TrajectoryError, match="logprobs=False"):
                trajectory.logprobs(index)
        assert trajectory.table(index).messages.tolist() == [token.message for token in tokens]
        assert trajectory.message_count(index) == expected.messages
        assert_same_turns(expected, trajectory, index)
        assert_same_channels(expected, trajectory, index)
    assert trajectory.reward == model.reward
    assert trained == trajectory.num_sampled


def assert_same_channels(expected: ModelBranch, trajectory: Trajectory, index: int) -> None:
    entries_by_name: dict[str, list[Any]] = {}
    for piece in expected.pieces:
        for name, entries in (piece.turn or {}).get("channels", {}).items():
            if entries:
                row = entries_by_name.setdefault(name, [None] * len(expected.tokens))
                row[piece.start : piece.stop] = entries[: piece.stop - piece.start]
    channels = trajectory.channels(index)
    assert {name: channel.entries() for name, channel in channels.items()} == entries_by_name
    for name, channel in channels.items():
        assert channel.present.tolist() == [entry is not None for entry in entries_by_name[name]]
        start = len(channel) // 3
        assert channel.slice(start, len(channel)).entries() == entries_by_name[name][start:]


def assert_same_turns(expected: ModelBranch, trajectory: Trajectory, index: int) -> None:
    turns = trajectory.turns(index)
    pieces = [piece for piece in expected.pieces if piece.turn is not None]
    assert len(turns) == len(pieces)
    for turn, piece in zip(turns, pieces, strict=True):
        assert piece.turn is not None
        assert (turn.branch, turn.start, turn.stop, turn.cut) == (piece.owner, piece.start, piece.stop, piece.cut)
        assert turn.message == piece.before
        assert (turn.finish_reason, turn.sampling) == (piece.turn["finish_reason"], piece.turn["sampling"])
        assert (turn.logprobs_kind, turn.cached_tokens) == (piece.turn["logprobs_kind"], piece.turn["cached_tokens"])
        assert turn.continues == piece.turn["c"]
        assert turn.reward == piece.turn["rewards"].get("reward")
        by_token = [span.version for span in turn.versions for _ in range(span.start, span.stop)]
        assert by_token == piece.turn["by_token"][: len(turn)]
        assert turn.tokens.ids.tolist() == expected.ids[piece.start : piece.stop]
        if trajectory.has_logprobs:
            logprobs = np.array([token.logprob for token in expected.tokens[piece.start : piece.stop]], np.float32)
            assert turn.tokens.logprobs is not None
            assert turn.tokens.logprobs.tobytes() == logprobs.tobytes()


# -- checks through the public API


def check_trajectory(trajectory: Trajectory) -> None:
    """Assert that replaying the writes gives this trajectory, and that every read agrees with them."""
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
        assert branch.stop == len(stream)
        if branch.parent >= 0:
            parent = branches[branch.parent]
            assert branch.parent < branch.index
            assert parent.start < branch.start < parent.stop
        else:
            assert branch.start == 0 < branch.stop
        _check_tokens(trajectory, branch.index)


def replayed(trajectory: Trajectory) -> Trajectory:
    copy = Trajectory(
        name=trajectory.name,
        vocab_size=trajectory.vocab_size,
        logprobs=trajectory.has_logprobs,
        metadata=trajectory.metadata,
    )
    replay_records(copy, write_records(trajectory))
    copy.set_reward(trajectory.reward)
    for turn in owned_turns(trajectory):
        copy.set_reward(turn.reward, turn)
    return copy


def _check_tokens(trajectory: Trajectory, index: int) -> None:
    stream, kinds = trajectory.stream(index), trajectory.table(index).kinds
    assert len(kinds) == len(stream)
    assert stream.min() >= 0
    assert trajectory.vocab_size is None or stream.max() < trajectory.vocab_size
    sampled = kinds == Kind.SAMPLED
    in_turns = np.zeros(len(stream), bool)
    for turn in trajectory.turns(index):
        in_turns[turn.start : turn.stop] = True
        assert turn.tokens.ids.tolist() == stream[turn.start : turn.stop].tolist()
        assert sum(span.stop - span.start for span in turn.versions) in (0, len(turn))
    assert (in_turns == sampled).all()
    assert trajectory.loss_mask(index).sum() == trajectory.branches[index].sampled
    if trajectory.has_logprobs:
        logprobs = trajectory.logprobs(index)
        assert (np.isfinite(logprobs) == sampled).all()
        assert (logprobs[sampled] <= np.float32(1e-4)).all()
    for channel in trajectory.channels(index).values():
        assert not (channel.present & ~sampled).any()
