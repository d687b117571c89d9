"""Trajectory: the append-only record of one rollout."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import TrajectoryError, shown
from ..showing import ShowsItself
from ..tokens.kinds import Kind
from ..tokens.tokenizer import Ids
from .inputs import as_count, as_ids, as_spans, from_position, mapping_json, owner_spans
from .ledger import LATER_KINDS, PROMPT_KINDS, Ledger
from .reading import Record
from .turns import (
    CompletionWrite,
    ContextWrite,
    IdsLike,
    KindsLike,
    LogprobKind,
    LogprobsLike,
    SpansLike,
    Turn,
    VersionLike,
    Write,
)

if TYPE_CHECKING:
    from ..rendering.bridged import BridgedTokens


class Trajectory(ShowsItself, Record):
    """Ids, kinds, logprobs and turns of one rollout; a tree of branches where its history was rewritten.

    It is only ever added to. Every write is checked as a whole before anything is changed: one that fails raises
    `TrajectoryError` and leaves the trajectory as it was. Tokens are `Kind.SAMPLED` only through
    `append_completion`. Reads and writes are about the current branch, the one last written to, unless `branch`
    says otherwise; views handed out are read-only and never change. Not safe for writers in several threads.

    `vocab_size` bounds the ids. With `logprobs=False` none are recorded and none may be given; otherwise every
    sampled token has one. `metadata` is any dict that JSON can hold, kept exactly.

    >>> trajectory = Trajectory(name="demo")
    >>> trajectory.begin([1, 2, 3], messages=1)
    >>> turn = trajectory.append_completion([7, 8], [-0.5, -0.25], finish_reason="stop", version=12)
    >>> trajectory.append_context([4, 5], [Kind.CONTEXT, Kind.SCAFFOLD], messages=1)
    >>> trajectory.stream().tolist()
    [1, 2, 3, 7, 8, 4, 5]
    >>> trajectory.loss_mask().tolist()
    [False, False, False, True, True, False, False]
    >>> trajectory.wire()
    b'[1,2,3,7,8,4,5]'
    """

    def __init__(
        self,
        *,
        name: str = "",
        vocab_size: int | None = None,
        logprobs: bool = True,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(name, str):
            raise TrajectoryError(f"name must be a str, not {shown(name)}")
        if not isinstance(logprobs, bool):
            raise TrajectoryError(f"logprobs says whether they are recorded: True or False, not {shown(logprobs)}")
        if vocab_size is not None and as_count(vocab_size, "vocab_size") == 0:
            raise TrajectoryError("vocab_size must be at least 1, or None where it is not known")
        ledger = Ledger(None if vocab_size is None else int(vocab_size), logprobs)
        super().__init__(name, mapping_json({} if metadata is None else metadata, "metadata"), ledger)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole trajectory to a file; see `save_trajectory`. `load_trajectory` reads it."""
        from .storage import save_trajectory

        save_trajectory(self, path)

    # -- writing

    def begin(
        self, prompt_ids: IdsLike, *, kinds: KindsLike | None = None, messages: int = 0, message_spans: SpansLike = ()
    ) -> None:
        """Record the first prompt, which holds `messages` messages."""
        if self._tree.nodes:
            raise TrajectoryError(
                "begin: the trajectory has begun; extend_to() takes the next prompt, branch() a rewritten history"
            )
        ids = as_ids(prompt_ids, "prompt_ids", self.vocab_size)
        kinds = Kind.PROMPT if kinds is None else kinds
        spans = as_spans(message_spans, 0, len(ids), as_count(messages, "messages"))
        self._open(-1, 0, ids, kinds, spans, messages, "")

    def append_context(
        self,
        new_ids: IdsLike,
        kinds: KindsLike,
        *,
        message_spans: SpansLike = (),
        messages: int = 0,
        branch: int | None = None,
    ) -> None:
        """Record what was put after the stream: tool results, scaffold, a generation prompt, a synthetic close.

        It adds `messages` messages. `message_spans` are rows ``(start, stop, message)``: positions in `new_ids`, and
        the number of the new message, counted from 0. The cost depends on the new ids alone.
        """
        index = self._index(branch)
        node = self._tree.nodes[index]
        added = as_count(messages, "messages")
        ids = as_ids(new_ids, "new_ids", self.vocab_size)
        spans = as_spans(message_spans, 0, len(ids), added, node.stop, node.messages)
        self._ledger.record(ContextWrite(index, node.stop, ids, kinds, spans, node.messages + added), checked=True)

    def append_bridge(self, bridge: BridgedTokens, *, branch: int | None = None) -> None:
        """Record the new tokens of a bridge that was made for this stream."""
        node = self._tree.nodes[self._index(branch)]
        if not hasattr(bridge, "stream_length"):
            raise TrajectoryError(f"append_bridge takes BridgedTokens, not {shown(bridge)}; was the bridge refused?")
        if as_count(bridge.stream_length, "bridge.stream_length") != node.stop:
            raise TrajectoryError(
                f"the bridge was made for a stream of {bridge.stream_length} ids, and this one has {node.stop}: "
                "make the bridge from the stream as it is recorded"
            )
        sampled = np.asarray(bridge.completion, None if type(bridge.completion) is np.ndarray else np.int64)
        own = self.stream(branch)[node.stop - len(sampled) :]
        same = sampled.dtype == own.dtype and sampled.tobytes() == own.tobytes()
        if not same and not np.array_equal(own, sampled):
            raise TrajectoryError(
                "the bridge was made for another completion than the one recorded last: make it from the ids that "
                "the engine returned"
            )
        spans = getattr(bridge, "message_spans", None)
        if spans is None:
            spans = owner_spans(bridge.messages, len(bridge.new_ids))
        self.append_context(bridge.new_ids, bridge.kinds, message_spans=spans, messages=bridge.new_count, branch=branch)

    def append_completion(
        self,
        ids: IdsLike,
        logprobs: LogprobsLike | None,
        *,
        finish_reason: str,
        version: VersionLike = None,
        sampling: Mapping[str, Any] | None = None,
        continues: bool = False,
        logprobs_kind: LogprobKind | str = LogprobKind.UNKNOWN,
        cached_tokens: int | None = None,
        channels: Mapping[str, Any] | None = None,
        branch: int | None = None,
    ) -> Turn:
        """Record the tokens that an engine returned for the stream as its prompt.

        `version` names the weights: one for all, or rows ``(version, start, stop)`` that cover the completion if they
        changed during it. `logprobs_kind` says of which distribution the logprobs are, and `sampling` with which
        temperature, top-p and top-k they were sampled: without both, the meaning of a logprob is unknown.
        `cached_tokens` is how many ids of the prompt the engine had cached. A completion needs a prompt or context
        before it. `channels` is what else the engine told of the tokens, by name, with one entry for each: routed
        experts, top logprobs, anything that is an array or that JSON can hold. `continues` says that it continues the
        message of the turn before, which ended with ``"abort"`` or ``"length"`` or was empty, with no new message in
        between.
        """
        index = self._index(branch)
        sampling_json = None if sampling is None else mapping_json(sampling, "sampling")
        number = self._ledger.record(
            CompletionWrite(
                branch=index,
                start=self._tree.nodes[index].stop,
                ids=ids,
                logprobs=logprobs,
                finish_reason=finish_reason,
                version=version,
                sampling_json=sampling_json,
                continues=continues,
                logprobs_kind=logprobs_kind,
                cached_tokens=cached_tokens,
                channels={} if channels is None else channels,
            )
        )
        row = self._log.row(number)
        return self._ledger.turn(number, row, row.stop)

    def extend_to(
        self,
        prompt_ids: IdsLike,
        kinds: KindsLike | None = None,
        *,
        message_spans: SpansLike = (),
        messages: int | None = None,
        branch: int | None = None,
    ) -> int:
        """Record the next prompt, given whole; returns how many of its ids are new.

        It must begin with the stream, id for id; `ExtensionError` names the first position that differs. `kinds`
        (CONTEXT by default) and `message_spans` are about the whole prompt, and count for what is new: what is
        recorded stays. `messages` is how many messages the prompt holds. A prompt that is the stream changes nothing.
        """
        index = self._index(branch)
        node = self._tree.nodes[index]
        ids = as_ids(prompt_ids, "prompt_ids", self.vocab_size)
        shared = self._tree.shared_with(ids, index)
        if shared < node.stop:
            raise self._ledger.extension_error(index, ids, shared)
        total = node.messages if messages is None else as_count(messages, "messages")
        if total < node.messages:
            raise TrajectoryError(
                f"messages is {total}, but {node.messages} are recorded: say how many the whole prompt holds"
            )
        fresh, spans = from_position(kinds, message_spans, len(ids), shared, total, LATER_KINDS)
        if len(ids) == shared:
            if total > node.messages:
                raise TrajectoryError(f"{total - node.messages} new messages without a token: nothing was recorded")
            return 0
        self._ledger.record(ContextWrite(index, shared, ids[shared:], fresh, spans, total), checked=True)
        return len(ids) - shared

    def branch(
        self,
        prompt_ids: IdsLike,
        *,
        kinds: KindsLike | None = None,
        message_spans: SpansLike = (),
        messages: int | None = None,
        cause: str = "",
        from_branch: int | None = None,
    ) -> int:
        """Record a prompt whose history was rewritten, given whole; returns its branch, which is now the current one.

        It shares the longest prefix that is recorded anywhere in the tree, or in the stream of `from_branch`; the
        kinds, turns and messages of the shared part are inherited, and stay with the branch that owns them. `kinds`
        (CONTEXT by default), `message_spans` and `messages` are about the whole prompt, as in `extend_to`; by
        default no message is new.

        A prompt that begins with the whole stream of a branch rewrites nothing, and is refused: it belongs to
        `extend_to`. To sample once more from the same prompt, branch after the first completion is recorded.
        """
        current = self._index(from_branch)
        ids = as_ids(prompt_ids, "prompt_ids", self.vocab_size)
        if from_branch is None:
            source, shared, extends = self._tree.longest_shared(ids)
        else:
            source, shared = current, self._tree.shared_with(ids, current)
            extends = current if shared == self._tree.nodes[current].stop else -1
        if extends >= 0:
            raise TrajectoryError(
                f"the prompt begins with all {shared} ids of branch {extends}, so no history was rewritten: record it "
                f"with extend_to(prompt_ids, branch={extends})"
            )
        inherited = self._ledger.messages_at(source, shared)
        total = inherited if messages is None else as_count(messages, "messages")
        fresh, spans = from_position(kinds, message_spans, len(ids), shared, total, PROMPT_KINDS)
        return self._open(source, shared, ids[shared:], fresh, spans, total, cause)

    def branch_at(
        self,
        position: int,
        new_ids: IdsLike = (),
        kinds: KindsLike = Kind.CONTEXT,
        *,
        message_spans: SpansLike = (),
        messages: int = 0,
        cause: str = "",
        branch: int | None = None,
    ) -> int:
        """Branch where it is known how much is shared: the first `position` ids of a stream, and `new_ids` after them.

        As with `append_context`, arguments and cost are about what is new.
        """
        source = self._index(branch)
        shared = as_count(position, "position")
        ids = as_ids(new_ids, "new_ids", self.vocab_size)
        inherited = self._ledger.messages_at(source, shared)
        added = as_count(messages, "messages")
        spans = as_spans(message_spans, 0, len(ids), added, shared, inherited)
        return self._open(source, shared, ids, kinds, spans, inherited + added, cause)

    def set_reward(self, reward: float | None, turn: Turn | None = None) -> None:
        """Record what a turn was worth; without a turn, the whole rollout. What is said last counts: None takes back
        what was said before."""
        if turn is not None:
            self._recorded(turn)
        self._ledger.reward(-1 if turn is None else turn.write, reward)

    def replay(self, write: Write) -> None:
        """Do a write of another trajectory, as `writes` gives it. Storage loads a trajectory so."""
        self._ledger.record(write)

    def replay_reward(self, write: int, reward: float | None) -> None:
        """Say a reward again that another trajectory was told, as `rewarded` gives it."""
        self._ledger.reward(write, reward)

    def __reduce__(self) -> tuple[Callable[[bytes], Trajectory], tuple[bytes]]:
        from .storage import restore, to_bytes

        return restore, (to_bytes(self),)

    def _open(self, source: int, start: int, ids: Ids, kinds: KindsLike, spans: Any, messages: int, cause: str) -> int:
        """Make a branch that shares the first `start` ids of the stream of `source`; returns its index."""
        self._ledger.check_leaves(source, start)
        index, parent = self.num_branches, self._tree.owner(source, start)
        self._ledger.record(ContextWrite(index, start, ids, kinds, spans, messages, parent, cause))
        return index
