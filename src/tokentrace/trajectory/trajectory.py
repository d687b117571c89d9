"""Trajectory: the append-only record of one rollout."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import ExtensionError, TrajectoryError, shown
from ..showing import ShowsItself
from ..tokens.kinds import Kind, Kinds
from ..tokens.tokenizer import Ids
from .channels import Channel, Entries
from .inputs import (
    LATER_KINDS,
    PROMPT_KINDS,
    Logprobs,
    Spans,
    as_count,
    as_ids,
    as_kinds,
    as_spans,
    from_json,
    mapping_json,
    owner_spans,
)
from .tree import Tree, cut
from .turns import (
    Branch,
    CompletionWrite,
    Context,
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


class Trajectory(ShowsItself):
    """Ids, kinds, logprobs and turns of one rollout; a tree of branches where its history was rewritten.

    It is append-only. Every write is checked as a whole before anything changes: one that fails raises
    `TrajectoryError` and leaves the trajectory as it was. Only `append_completion` records tokens as
    `Kind.SAMPLED`. Methods work on the current branch, the one last written to, unless `branch` names another.
    Views are read-only and never change. Not safe for writers in several threads.

    `vocab_size` bounds the ids. With `logprobs=False` the trajectory has no logprobs and accepts none; otherwise every
    sampled token has one. `metadata` is any dict that JSON can hold, stored exactly.

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
        self._tree = Tree(None if vocab_size is None else int(vocab_size), logprobs)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole trajectory to a file; see `save_trajectory`. `load_trajectory` reads it."""
        from .storage import save_trajectory

        save_trajectory(self, path)

    def __reduce__(self) -> tuple[Callable[[bytes], Trajectory], tuple[bytes]]:
        from .storage import restore, to_bytes

        return restore, (to_bytes(self),)

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
        spans = as_spans(message_spans, 0, len(ids), as_count(messages, "messages"))
        self._open(-1, 0, ids, Kind.PROMPT if kinds is None else kinds, spans, messages, "")

    def append_context(
        self,
        new_ids: IdsLike,
        kinds: KindsLike,
        *,
        message_spans: SpansLike = (),
        messages: int = 0,
        branch: int | None = None,
    ) -> None:
        """Record what follows the stream without being sampled: tool results, scaffold, a generation prompt, a close.

        It adds `messages` messages. `message_spans` are rows ``(start, stop, message)``: positions in `new_ids`, and
        the number of the new message, counted from 0. The cost depends on the new ids alone.
        """
        index = self._index(branch)
        node = self._tree.nodes[index]
        added = as_count(messages, "messages")
        ids = as_ids(new_ids, "new_ids", self.vocab_size)
        spans = np.add(as_spans(message_spans, 0, len(ids), added), (node.stop, node.stop, node.messages))
        self._tree.record(ContextWrite(index, node.stop, ids, kinds, spans, node.messages + added))

    def append_bridge(self, bridge: BridgedTokens, *, branch: int | None = None) -> None:
        """Record the new tokens of a bridge that was made for this stream."""
        length = self._tree.nodes[self._index(branch)].stop
        if not hasattr(bridge, "stream_length"):
            raise TrajectoryError(f"append_bridge takes BridgedTokens, not {shown(bridge)}; was the bridge refused?")
        if as_count(bridge.stream_length, "bridge.stream_length") != length:
            raise TrajectoryError(
                f"the bridge was made for a stream of {bridge.stream_length} ids, and this one has {length}: "
                "make the bridge from the stream as it is recorded"
            )
        completion = np.asarray(bridge.completion, None if type(bridge.completion) is np.ndarray else np.int64)
        if not np.array_equal(self.stream(branch)[length - len(completion) :], completion):
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

        - `version`: the weights, one version for all tokens, or rows ``(version, start, stop)`` that cover them.
        - `logprobs_kind` and `sampling`: the distribution that the logprobs are of, and the temperature, top-p and
          top-k of the request. Without both, the meaning of a logprob is unknown.
        - `cached_tokens`: how many ids of the prompt the engine had cached.
        - `channels`: more values per token by name, such as routed experts or top logprobs: arrays or JSON values.
        - `continues`: this completion continues the message of the turn before, which ended with ``"abort"`` or
          ``"length"`` or was empty, with no new message in between. Otherwise a completion follows a prompt or context.
        """
        index = self._index(branch)
        self._tree.record(
            CompletionWrite(
                branch=index,
                start=self._tree.nodes[index].stop,
                ids=ids,
                logprobs=logprobs,
                finish_reason=finish_reason,
                version=version,
                sampling_json=None if sampling is None else mapping_json(sampling, "sampling"),
                continues=continues,
                logprobs_kind=logprobs_kind,
                cached_tokens=cached_tokens,
                channels={} if channels is None else channels,
            )
        )
        turn = self._tree.writes[-1]
        assert isinstance(turn, Turn)
        return turn

    def extend_to(
        self,
        prompt_ids: IdsLike,
        kinds: KindsLike | None = None,
        *,
        message_spans: SpansLike = (),
        messages: int | None = None,
        branch: int | None = None,
    ) -> int:
        """Record a whole next prompt; returns how many of its ids are new.

        It must begin with the stream, id for id; `ExtensionError` names the first position that differs. `kinds`
        (CONTEXT by default) and `message_spans` describe the whole prompt, but only the new part is recorded.
        `messages` is how many messages the prompt holds. A prompt equal to the stream changes nothing.
        """
        index = self._index(branch)
        node = self._tree.nodes[index]
        ids = as_ids(prompt_ids, "prompt_ids", self.vocab_size)
        shared = self._tree.shared_with(ids, index)
        if shared < node.stop:
            raise self._extension_error(index, ids, shared)
        total = node.messages if messages is None else as_count(messages, "messages")
        if total < node.messages:
            raise TrajectoryError(
                f"messages is {total}, but {node.messages} are recorded: say how many the whole prompt holds"
            )
        new_kinds, spans = _from(shared, kinds, message_spans, len(ids), total, LATER_KINDS)
        if len(ids) == shared:
            if total > node.messages:
                raise TrajectoryError(f"{total - node.messages} new messages without a token: nothing was recorded")
            return 0
        self._tree.record(ContextWrite(index, shared, ids[shared:], new_kinds, spans, total))
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
        """Record a whole prompt whose history was rewritten; returns its branch, which is now the current one.

        It shares the longest prefix that is recorded anywhere in the tree, or in the stream of `from_branch`. The
        kinds, turns and messages of the shared part stay with the branch that owns them. `kinds` (CONTEXT by
        default), `message_spans` and `messages` describe the whole prompt, as in `extend_to`; by default no message
        is new.

        Raises `TrajectoryError` for a prompt that begins with the whole stream of a branch, since it rewrites nothing:
        use `extend_to`. To sample again from the same prompt, branch after the first completion is recorded.
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
        total = self._tree.messages_at(source, shared) if messages is None else as_count(messages, "messages")
        new_kinds, spans = _from(shared, kinds, message_spans, len(ids), total, PROMPT_KINDS)
        return self._open(source, shared, ids[shared:], new_kinds, spans, total, cause)

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
        """Branch at a known position: the first `position` ids of a stream, and `new_ids` after them.

        As with `append_context`, arguments and cost are about what is new.
        """
        source = self._index(branch)
        shared = as_count(position, "position")
        ids = as_ids(new_ids, "new_ids", self.vocab_size)
        inherited, added = self._tree.messages_at(source, shared), as_count(messages, "messages")
        spans = np.add(as_spans(message_spans, 0, len(ids), added), (shared, shared, inherited))
        return self._open(source, shared, ids, kinds, spans, inherited + added, cause)

    def _open(self, source: int, start: int, ids: Ids, kinds: KindsLike, spans: Any, messages: int, cause: str) -> int:
        """Open a branch that shares the first `start` ids of the stream of `source`; returns its index."""
        self._tree.check_leaves(source, start)
        index, parent = self.num_branches, self._tree.owner(source, start)
        self._tree.record(ContextWrite(index, start, ids, kinds, spans, messages, parent, cause))
        return index

    def _extension_error(self, index: int, ids: Ids, shared: int) -> ExtensionError:
        if shared == len(ids):
            length = self._tree.nodes[index].stop
            reason = f"the prompt ends at {shared}, inside the recorded stream of {length} ids"
        else:
            node = self._tree.nodes[self._tree.owner(index, shared + 1)]
            at = shared - node.start
            recorded, kind = int(node.ids.view()[at]), Kind(int(node.kinds.view()[at])).name
            reason = f"the prompt has id {int(ids[shared])} at position {shared}, the stream {recorded} ({kind})"
        return ExtensionError(
            f"{reason}: it does not extend branch {index}; record a rewritten history with branch(prompt_ids)",
            position=shared,
        )

    def set_reward(self, reward: float | None, turn: Turn | None = None) -> None:
        """Set the reward of a turn, or of the whole rollout. The last value counts; None removes the reward."""
        if turn is not None:
            self._check_turn(turn)
        self._tree.reward(-1 if turn is None else turn.write, reward)

    def replay(self, write: Write) -> None:
        """Repeat a write of another trajectory, as `writes` returns it."""
        self._tree.record(write)

    def replay_reward(self, write: int, reward: float | None) -> None:
        """Repeat a reward of another trajectory, as `rewarded` returns it."""
        self._tree.reward(write, reward)

    # -- reading

    def stream(self, branch: int | None = None) -> Ids:
        """The ids so far, as a read-only view: the next prompt of the engine, and what a trainer sees.

        A branch without a parent costs no copy. Of the others, one at a time is copied into a row, which then grows
        with its branch.
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
        self._require_logprobs()
        logprobs = np.full(self._tree.nodes[self._index(branch)].stop, np.nan, np.float32)
        for turn in self.turns(branch):
            logprobs[turn.start : turn.stop] = self._tree.logprobs(turn)
        return logprobs

    def turns(self, branch: int | None = None) -> list[Turn]:
        """The turns along a stream, in order, inherited ones included.

        A turn is on the branch if it began before the branch left. One that the branch left in the middle of is
        `cut`: its head is in the stream, sampled, and its owner trains it.
        """
        return [write for _, write in self._tree.along(self._index(branch)) if isinstance(write, Turn)]

    def completion(self, turn: Turn) -> Ids:
        """The ids of a turn, as a read-only view."""
        self._check_turn(turn)
        node = self._tree.nodes[turn.branch]
        return node.ids.view(turn.start - node.start, turn.stop - node.start)

    def completion_logprobs(self, turn: Turn) -> Logprobs:
        """The logprobs of a turn, as a read-only view."""
        self._require_logprobs()
        self._check_turn(turn)
        return self._tree.logprobs(turn)

    def channels(self, branch: int | None = None) -> dict[str, Channel]:
        """The side channels along a stream, by name; shared prefixes included.

        A channel has an entry for each token of the completions that came with it, and None for other tokens.
        """
        index = self._index(branch)
        pieces: dict[str, list[tuple[int, Entries]]] = {}
        for number, write in self._tree.along(index):
            for name, packed in self._tree.channels.get(number, {}).items():
                pieces.setdefault(name, []).append((write.start, packed.entries()[: write.stop - write.start]))
        length = self._tree.nodes[index].stop
        return {name: Channel(length, tuple(runs)) for name, runs in pieces.items()}

    def message_spans(self, branch: int | None = None) -> list[MessageSpan]:
        """Which tokens of a stream belong to which message, turns included, in stream order."""
        spans: list[MessageSpan] = []
        for _, write in self._tree.along(self._index(branch)):
            if isinstance(write, Context):
                spans += map(MessageSpan._make, write.spans.tolist())
            elif len(write):
                spans.append(MessageSpan(write.start, write.stop, write.message))
        return spans

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

        The text of one branch at a time is cached, so that the next call encodes only what is new.
        """
        return self._tree.text(self._index(branch))

    def wire(self, branch: int | None = None) -> bytes:
        """The stream as JSON text in one piece."""
        return b"".join(self.wire_parts(branch))

    def writes(self, start: int = 0) -> Iterator[Write]:
        """The writes of this trajectory, in order, from number `start` on."""
        for number in range(as_count(start, "start"), self.num_writes):
            yield self._tree.write(number)

    def drop_caches(self) -> None:
        """Free the copied stream and the wire text; the next read makes them again."""
        self._tree.drop_caches()

    # -- counting

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata, as a new dict."""
        metadata: dict[str, Any] = from_json(self._metadata)
        return metadata

    @property
    def reward(self) -> float | None:
        """The reward of the whole rollout, None if there is none. Turns have their own."""
        return next((reward for number, reward in reversed(self._tree.rewards) if number == -1), None)

    @property
    def rewarded(self) -> tuple[tuple[int, float | None], ...]:
        """Every call of `set_reward`, in order: the write of the turn, -1 for the whole rollout, and the reward."""
        return tuple(self._tree.rewards)

    @property
    def vocab_size(self) -> int | None:
        return self._tree.vocab_size

    @property
    def has_logprobs(self) -> bool:
        """Whether every sampled token has a logprob; otherwise none has."""
        return self._tree.has_logprobs

    @property
    def current(self) -> int:
        """The branch last written to; -1 before `begin`."""
        return self._tree.current

    @property
    def branches(self) -> tuple[Branch, ...]:
        return tuple(
            Branch(index, node.parent, node.start, node.stop, node.sampled, node.cause, self._retries(index))
            for index, node in enumerate(self._tree.nodes)
        )

    def _retries(self, index: int) -> bool:
        opening, *more = (self._tree.writes[number] for number in self._tree.nodes[index].writes[:2])
        return index > 0 and opening.start == opening.stop and all(isinstance(write, Turn) for write in more)

    @property
    def num_branches(self) -> int:
        return len(self._tree.nodes)

    @property
    def num_writes(self) -> int:
        return len(self._tree.writes)

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
        """The memory of the arrays and channels in bytes, unused room included, without caches and write objects."""
        packed = (one for channels in self._tree.channels.values() for one in channels.values())
        return sum(len(one.data) for one in packed) + sum(node.nbytes for node in self._tree.nodes)

    @property
    def cache_nbytes(self) -> int:
        """The memory of the copied stream and of the wire text; 0 before the first read."""
        return self._tree.cache_nbytes

    def __len__(self) -> int:
        """The length of the current stream."""
        return self._tree.nodes[self.current].stop if self._tree.nodes else 0

    def __repr__(self) -> str:
        label = f"{self.name!r}, " if self.name else ""
        tree = f"{self.num_branches} branches, " if self.num_branches > 1 else ""
        return (
            f"Trajectory({label}{tree}{self.num_tokens} tokens, {self.num_sampled} sampled, {self.num_writes} writes)"
        )

    def _index(self, branch: int | None) -> int:
        if not self._tree.nodes:
            raise TrajectoryError("nothing is recorded yet: begin(prompt_ids) first")
        if branch is None:
            return self._tree.current
        if as_count(branch, "branch") >= len(self._tree.nodes):
            raise TrajectoryError(f"there is no branch {branch}: the trajectory has {len(self._tree.nodes)}")
        return int(branch)

    def _check_turn(self, turn: Turn) -> None:
        if not isinstance(turn, Turn):
            raise TrajectoryError(f"a turn is what turns() and append_completion() return, not {shown(turn)}")
        if not 0 <= turn.write < self.num_writes or turn != cut(self._tree.writes[turn.write], turn.stop):
            raise TrajectoryError(f"the turn at {turn.start}..{turn.stop} is not of this trajectory")

    def _require_logprobs(self) -> None:
        if not self.has_logprobs:
            raise TrajectoryError("the trajectory was made with logprobs=False: it has none")


def _from(
    position: int, kinds: KindsLike | None, spans: SpansLike, length: int, messages: int, allowed: frozenset[Kind]
) -> tuple[Kinds, Spans]:
    """Kinds and spans of a whole prompt, from a position on."""
    rows = as_spans(spans, 0, length, messages)
    rows = rows[rows[:, 1] > position]
    rows[:, 0] = np.maximum(rows[:, 0], position)
    return as_kinds(Kind.CONTEXT if kinds is None else kinds, length, allowed=allowed, skip=position)[position:], rows
