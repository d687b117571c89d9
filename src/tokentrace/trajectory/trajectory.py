"""Trajectory: the append-only record of one rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import TrajectoryError, shown
from ..tokens.kinds import Kind, Kinds
from ..tokens.tokenizer import Ids
from .inputs import Logprobs, as_count, as_ids, as_spans, from_json, from_position, mapping_json, owner_spans
from .invariants import check_ledger
from .ledger import LATER_KINDS, PROMPT_KINDS, Ledger
from .log import Row
from .tree import Node
from .turns import (
    Branch,
    CompletionWrite,
    ContextWrite,
    IdsLike,
    KindsLike,
    LogprobKind,
    LogprobsLike,
    MessageSpan,
    SharedPrefix,
    SpansLike,
    Turn,
    VersionLike,
    Write,
)

if TYPE_CHECKING:
    from ..rendering.bridged import BridgedTokens


class Trajectory:
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
        self.name: Final = name
        self._metadata = mapping_json({} if metadata is None else metadata, "metadata")
        self._ledger = Ledger(None if vocab_size is None else int(vocab_size), logprobs)
        self._tree, self._log = self._ledger.tree, self._ledger.log

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
        spans = as_spans(message_spans, 0, len(ids), added)
        spans = spans + np.array([node.stop, node.stop, node.messages], np.int64)
        self._ledger.record(ContextWrite(index, node.stop, ids, kinds, spans, node.messages + added))

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
        sampled = np.asarray(bridge.completion, np.int64)
        if not np.array_equal(self.stream(branch)[node.stop - len(sampled) :], sampled):
            raise TrajectoryError(
                "the bridge was made for another completion than the one recorded last: make it from the ids that "
                "the engine returned"
            )
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
        branch: int | None = None,
    ) -> Turn:
        """Record the tokens that an engine returned for the stream as its prompt.

        `version` names the weights: one for all, or rows ``(version, start, stop)`` that cover the completion if they
        changed during it. `logprobs_kind` says of which distribution the logprobs are, and `sampling` with which
        temperature, top-p and top-k they were sampled: without both, the meaning of a logprob is unknown.
        `cached_tokens` is how many ids of the prompt the engine had cached. A completion needs a prompt or context
        before it. `continues` says that it continues the message of the turn before, which ended with ``"abort"``
        or ``"length"`` or was empty, with no new message in between.
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
        self._ledger.record(ContextWrite(index, shared, ids[shared:], fresh, spans, total))
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
        spans = as_spans(message_spans, 0, len(ids), added) + np.array([shared, shared, inherited], np.int64)
        return self._open(source, shared, ids, kinds, spans, inherited + added, cause)

    def replay(self, write: Write) -> None:
        """Do a write of another trajectory, as `writes` gives it. Storage loads a trajectory so."""
        self._ledger.record(write)

    # -- reading

    def stream(self, branch: int | None = None) -> Ids:
        """The ids so far, as a read-only view: what an engine is given next, and what a trainer sees.

        The first branch costs no copy. Of others, one at a time is laid out in a row, and grows with its branch.
        """
        return self._tree.stream(self._index(branch))

    prompt = stream

    def kinds(self, branch: int | None = None) -> Kinds:
        """The kind of each token, read-only."""
        return self._tree.kinds(self._index(branch))

    def loss_mask(self, branch: int | None = None, *, once: bool = True) -> npt.NDArray[np.bool_]:
        """True where a token was sampled.

        With `once` only in the branch that owns the token: over all branches each is True exactly once. Without,
        also where it is part of a shared prefix.
        """
        index = self._index(branch)
        mask: npt.NDArray[np.bool_] = self._tree.kinds(index) == Kind.SAMPLED
        if once:
            mask[: self._tree.nodes[index].start] = False
        return mask

    def logprobs(self, branch: int | None = None) -> Logprobs:
        """The logprob of each token, NaN where none was sampled; shared prefixes included."""
        index = self._index(branch)
        self._require_logprobs()
        kinds = self._tree.kinds(index)
        result = np.full(len(kinds), np.nan, np.float32)
        for owner, start, stop in self._tree.segments(index):
            where = np.flatnonzero(kinds[start:stop] == Kind.SAMPLED) + start
            result[where] = self._tree.nodes[owner].logprobs.view(0, len(where))
        return result

    def turns(self, branch: int | None = None) -> list[Turn]:
        """The turns along a stream, in order, inherited ones included.

        A turn is on the branch if it began before the branch left. One that the branch left in the middle of is
        `cut`: its head is there, sampled, and its owner's to train.
        """
        return [
            self._ledger.turn(number, row, stop)
            for number, row, stop in self._ledger.rows(self._index(branch))
            if row.is_turn
        ]

    def completion(self, turn: Turn) -> Ids:
        """The ids of a turn, as a read-only view."""
        node, row = self._recorded(turn)
        return node.ids.view(row.start - node.start, turn.stop - node.start)

    def completion_logprobs(self, turn: Turn) -> Logprobs:
        """The logprobs of a turn, as a read-only view."""
        self._require_logprobs()
        node, row = self._recorded(turn)
        return node.logprobs.view(row.sampled, row.sampled + len(turn))

    def message_spans(self, branch: int | None = None) -> list[MessageSpan]:
        """Which tokens of a stream belong to which message, turns included, in stream order."""
        found: list[MessageSpan] = []
        for number, row, limit in self._ledger.rows(self._index(branch)):
            if row.is_turn:
                spans = [[row.start, row.stop, row.first]]
            else:
                spans = self._log.spans(number).tolist()
            found += [
                MessageSpan(start, min(stop, limit), who) for start, stop, who in spans if start < min(stop, limit)
            ]
        return found

    def message_indices(self, branch: int | None = None) -> npt.NDArray[np.int32]:
        """The message of each token of a stream, -1 for none."""
        owners = np.full(self._tree.nodes[self._index(branch)].stop, -1, np.int32)
        for start, stop, message in self.message_spans(branch):
            owners[start:stop] = message
        return owners

    def message_count(self, branch: int | None = None) -> int:
        """How many messages the conversation of a branch holds."""
        return self._tree.nodes[self._index(branch)].messages

    def shared_prefix(self, prompt_ids: IdsLike) -> SharedPrefix:
        """How much of a prompt is recorded, and where: whether `extend_to` or `branch` is the way to record it."""
        return self._tree.longest_shared(as_ids(prompt_ids, "prompt_ids", self.vocab_size))

    def wire_parts(self, branch: int | None = None) -> tuple[bytes, ...]:
        """The stream as JSON text, ``[1,2,3]``, in a few pieces to be sent one after another.

        The text is kept once it is asked for, of one branch at a time, so that the next call encodes what is new.
        """
        return self._tree.wire.of(self._tree, self._index(branch)).parts

    def wire(self, branch: int | None = None) -> bytes:
        """The stream as JSON text in one piece."""
        return b"".join(self.wire_parts(branch))

    def writes(self, start: int = 0) -> Iterator[Write]:
        """The writes that made this trajectory, in order, from number `start` on."""
        for number in range(as_count(start, "start"), len(self._log)):
            yield self._ledger.written(number)

    def check(self) -> None:
        """Verify every invariant, from first to last token; `TrajectoryError` names the one that does not hold."""
        check_ledger(self._ledger)

    def drop_caches(self) -> None:
        """Free the laid out stream and the wire text; they are made again when asked for."""
        self._tree.line.drop()
        self._tree.wire.drop()

    # -- counting

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata it was made with, as a new dict."""
        metadata: dict[str, Any] = from_json(self._metadata)
        return metadata

    @property
    def vocab_size(self) -> int | None:
        return self._ledger.vocab_size

    @property
    def has_logprobs(self) -> bool:
        """Whether every sampled token has a logprob; otherwise none has."""
        return self._ledger.has_logprobs

    @property
    def current(self) -> int:
        """The branch last written to; -1 before `begin`."""
        return self._ledger.current

    @property
    def branches(self) -> tuple[Branch, ...]:
        return tuple(
            Branch(index, node.parent, node.start, node.stop, node.sampled, node.cause)
            for index, node in enumerate(self._tree.nodes)
        )

    @property
    def num_branches(self) -> int:
        return len(self._tree.nodes)

    @property
    def num_writes(self) -> int:
        return len(self._log)

    @property
    def num_tokens(self) -> int:
        """How many tokens are recorded; a shared one counts once."""
        return sum(len(node.ids) for node in self._tree.nodes)

    @property
    def num_sampled(self) -> int:
        """How many tokens were sampled; a shared one counts once."""
        return sum(node.sampled for node in self._tree.nodes)

    @property
    def num_samples(self) -> int:
        """How many branches own sampled tokens: the rows it takes to train each of them once."""
        return sum(node.sampled > 0 for node in self._tree.nodes)

    @property
    def nbytes(self) -> int:
        """The memory of the record's arrays in bytes, slack included; caches are counted apart."""
        return self._log.nbytes + sum(node.nbytes for node in self._tree.nodes)

    @property
    def cache_nbytes(self) -> int:
        """The memory of the laid out stream and of the wire text; 0 until they are asked for."""
        return self._tree.line.nbytes + self._tree.wire.nbytes

    def __len__(self) -> int:
        """The length of the current stream."""
        return self._tree.nodes[self._ledger.current].stop if self._ledger.current >= 0 else 0

    def __repr__(self) -> str:
        label = f"{self.name!r}, " if self.name else ""
        tree = f"{self.num_branches} branches, " if self.num_branches > 1 else ""
        return (
            f"Trajectory({label}{tree}{self.num_tokens} tokens, {self.num_sampled} sampled, {self.num_writes} writes)"
        )

    def __reduce__(self) -> tuple[Callable[[bytes], Trajectory], tuple[bytes]]:
        from .storage import restore, to_bytes

        return restore, (to_bytes(self),)

    # -- what the methods are made of

    def _open(self, source: int, start: int, ids: Ids, kinds: KindsLike, spans: Any, messages: int, cause: str) -> int:
        """Make a branch that shares the first `start` ids of the stream of `source`; returns its index."""
        self._ledger.check_leaves(source, start)
        index, parent = self.num_branches, self._tree.owner(source, start)
        self._ledger.record(ContextWrite(index, start, ids, kinds, spans, messages, parent, cause))
        return index

    def _index(self, branch: int | None) -> int:
        if not self._tree.nodes:
            raise TrajectoryError("nothing is recorded yet: begin(prompt_ids) first")
        if branch is None:
            return self._ledger.current
        if as_count(branch, "branch") >= len(self._tree.nodes):
            raise TrajectoryError(f"there is no branch {branch}: the trajectory has {len(self._tree.nodes)}")
        return int(branch)

    def _recorded(self, turn: Turn) -> tuple[Node, Row]:
        if not isinstance(turn, Turn):
            raise TrajectoryError(f"a turn is what turns() and append_completion() return, not {shown(turn)}")
        if 0 <= turn.write < len(self._log):
            row = self._log.row(turn.write)
            if row.is_turn and turn == self._ledger.turn(turn.write, row, turn.stop):
                return self._tree.nodes[row.branch], row
        raise TrajectoryError(f"the turn at {turn.start}..{turn.stop} is not of this trajectory")

    def _require_logprobs(self) -> None:
        if not self.has_logprobs:
            raise TrajectoryError("the trajectory was made with logprobs=False: it has none")
