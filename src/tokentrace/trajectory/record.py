"""Record: a list of writes, the tokens of each branch, and everything that is read from them."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import TrajectoryError, shown
from ..tokens.ids import common_prefix
from ..tokens.kinds import Kind, Kinds
from ..tokens.tokenizer import Ids
from .buffers import Buffer, WireText
from .channels import Channel, Entries
from .inputs import Logprobs, as_count, as_ids, from_json
from .turns import Branch, Context, IdsLike, MessageSpan, SharedPrefix, Turn, Write


@dataclass(slots=True, eq=False)
class Node:
    """One branch: the tokens it owns, from position `start` of its stream on.

    The tokens before are those of the parent's stream. `parent` is the branch that owns the last of them, so a
    child starts after its parent's start and before its parent's end; -1 where `start` is 0.
    """

    parent: int
    start: int
    messages: int
    """How many messages its conversation holds."""
    ids: Buffer[np.int32] = field(default_factory=lambda: Buffer(np.int32))
    kinds: Buffer[np.uint8] = field(default_factory=lambda: Buffer(np.uint8))
    logprobs: Buffer[np.float32] = field(default_factory=lambda: Buffer(np.float32))
    """One for each sampled token, none for the others."""
    sampled: int = 0
    writes: array[int] = field(default_factory=lambda: array("i"))
    """The numbers of its writes, in order; the first one opened it."""
    offsets: array[int] = field(default_factory=lambda: array("i"))
    """For each write, how many sampled tokens the branch owned before it: where its logprobs begin."""

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)

    @property
    def nbytes(self) -> int:
        numbers = sys.getsizeof(self.writes) + sys.getsizeof(self.offsets)
        return self.ids.nbytes + self.kinds.nbytes + self.logprobs.nbytes + numbers


class Record:
    """The reading half of a `Trajectory`. Views are read-only and never change."""

    def __init__(self, name: str, vocab_size: int | None, has_logprobs: bool, metadata_json: str) -> None:
        self.name: Final = name
        self.vocab_size: Final = vocab_size
        self.has_logprobs: Final = has_logprobs
        """Whether every sampled token has a logprob; otherwise none has."""
        self._metadata = metadata_json
        self._writes: list[Write] = []
        self._nodes: list[Node] = []
        self._rewards: list[tuple[int, float | None]] = []
        self._row: Buffer[np.int32] = Buffer(np.int32)
        self._text = WireText()
        self._row_branch = self._text_branch = -1

    # -- one stream

    def stream(self, branch: int | None = None) -> Ids:
        """The ids so far, as a read-only view: the next prompt of the engine, and what a trainer sees.

        A branch without a parent costs no copy. Of the others, one at a time is copied into a row, which then grows
        with its branch.
        """
        index = self._index(branch)
        if self._nodes[index].parent < 0:
            return self._nodes[index].ids.view()
        if self._row_branch != index:
            self._row, self._row_branch = Buffer(np.int32), index
        self._grow(self._row, index)
        return self._row.view()

    prompt = stream

    def wire_parts(self, branch: int | None = None) -> tuple[bytes, ...]:
        """The stream as JSON text, ``[1,2,3]``, in a few pieces to be sent one after another.

        The text of one branch at a time is cached, so that the next call encodes only what is new.
        """
        index = self._index(branch)
        if self._text_branch != index:
            self._text, self._text_branch = WireText(), index
        self._grow(self._text, index)
        return self._text.parts

    def wire(self, branch: int | None = None) -> bytes:
        """The stream as JSON text in one piece."""
        return b"".join(self.wire_parts(branch))

    def _grow(self, copy: Buffer[np.int32] | WireText, index: int) -> None:
        """Add to a copy of a stream what it does not hold yet."""
        for node, stop in self._segments(index):
            if stop > len(copy):
                copy.extend(node.ids.view(max(0, len(copy) - node.start), stop - node.start))

    def drop_caches(self) -> None:
        """Free the copied stream and the wire text; the next read makes them again."""
        self._row, self._row_branch = Buffer(np.int32), -1
        self._text, self._text_branch = WireText(), -1

    def kinds(self, branch: int | None = None) -> Kinds:
        """The kind of each token, read-only."""
        index = self._index(branch)
        if self._nodes[index].parent < 0:
            return self._nodes[index].kinds.view()
        kinds = np.concatenate([node.kinds.view(0, stop - node.start) for node, stop in self._segments(index)])
        kinds.flags.writeable = False
        return kinds

    def loss_mask(self, branch: int | None = None, *, once: bool = True) -> npt.NDArray[np.bool_]:
        """True where a token was sampled.

        With `once` only in the branch that owns the token: over all branches each is True exactly once. Without,
        also where it is part of a shared prefix.
        """
        mask: npt.NDArray[np.bool_] = self.kinds(branch) == Kind.SAMPLED
        if once:
            mask[: self._nodes[self._index(branch)].start] = False
        return mask

    def logprobs(self, branch: int | None = None) -> Logprobs:
        """The logprob of each token, NaN where none was sampled; shared prefixes included."""
        logprobs = np.full(self._nodes[self._index(branch)].stop, np.nan, np.float32)
        self._require_logprobs()
        for turn in self.turns(branch):
            logprobs[turn.start : turn.stop] = self._turn_logprobs(turn)
        return logprobs

    def turns(self, branch: int | None = None) -> list[Turn]:
        """The turns along a stream, in order, inherited ones included.

        A turn is on the branch if it began before the branch left. One that the branch left in the middle of is
        `cut`: its head is in the stream, sampled, and its owner trains it.
        """
        return [write for write in self._along(self._index(branch)) if isinstance(write, Turn)]

    def completion(self, turn: Turn) -> Ids:
        """The ids of a turn, as a read-only view."""
        self._check_turn(turn)
        return self.tokens(turn)[0]

    def completion_logprobs(self, turn: Turn) -> Logprobs:
        """The logprobs of a turn, as a read-only view."""
        self._require_logprobs()
        self._check_turn(turn)
        return self._turn_logprobs(turn)

    def channels(self, branch: int | None = None) -> dict[str, Channel]:
        """The side channels along a stream, by name; shared prefixes included.

        A channel has an entry for each token of the completions that came with it, and None for other tokens.
        """
        pieces: dict[str, list[tuple[int, Entries]]] = {}
        for turn in self.turns(branch):
            for name, packed in turn.channels:
                pieces.setdefault(name, []).append((turn.start, packed.entries()[: len(turn)]))
        length = self._nodes[self._index(branch)].stop
        return {name: Channel(length, tuple(runs)) for name, runs in pieces.items()}

    def message_spans(self, branch: int | None = None) -> list[MessageSpan]:
        """Which tokens of a stream belong to which message, turns included, in stream order."""
        spans: list[MessageSpan] = []
        for write in self._along(self._index(branch)):
            if isinstance(write, Context):
                spans += map(MessageSpan._make, write.spans.tolist())
            elif len(write):
                spans.append(MessageSpan(write.start, write.stop, write.message))
        return spans

    def message_indices(self, branch: int | None = None) -> npt.NDArray[np.int32]:
        """The message of each token of a stream, -1 for none."""
        owners = np.full(self._nodes[self._index(branch)].stop, -1, np.int32)
        for start, stop, message in self.message_spans(branch):
            owners[start:stop] = message
        return owners

    def message_count(self, branch: int | None = None) -> int:
        """How many messages the conversation of a branch holds."""
        return self._nodes[self._index(branch)].messages

    # -- the whole record

    def shared_prefix(self, prompt_ids: IdsLike) -> SharedPrefix:
        """How much of a prompt is recorded, and where: whether `extend_to` or `branch` is the way to record it."""
        ids = as_ids(prompt_ids, "prompt_ids", self.vocab_size)
        lengths: list[int] = []  # by branch; parents come before their children
        for node in self._nodes:
            length = lengths[node.parent] if node.parent >= 0 else 0
            if length >= node.start:
                length = node.start + common_prefix(node.ids.view(), ids[node.start :])
            lengths.append(length)
        longest = max(lengths, default=0)
        extends = (at for at, node in enumerate(self._nodes) if lengths[at] == longest == node.stop)
        return SharedPrefix(lengths.index(longest) if longest else -1, longest, next(extends, -1))

    def writes(self, start: int = 0) -> list[Write]:
        """The writes of this trajectory, in order, from number `start` on."""
        return self._writes[as_count(start, "start") :]

    def tokens(self, write: Write) -> tuple[Ids, Kinds]:
        """The ids and kinds of a write of this trajectory, as read-only views."""
        node = self._nodes[write.branch]
        start, stop = write.start - node.start, write.stop - node.start
        return node.ids.view(start, stop), node.kinds.view(start, stop)

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata, as a new dict."""
        metadata: dict[str, Any] = from_json(self._metadata)
        return metadata

    @property
    def reward(self) -> float | None:
        """The reward of the whole rollout, None if there is none. Turns have their own."""
        return next((reward for number, reward in reversed(self._rewards) if number == -1), None)

    @property
    def rewarded(self) -> tuple[tuple[int, float | None], ...]:
        """Every call of `set_reward`, in order: the write of the turn, -1 for the whole rollout, and the reward."""
        return tuple(self._rewards)

    @property
    def current(self) -> int:
        """The branch last written to; -1 before `begin`."""
        return self._writes[-1].branch if self._writes else -1

    @property
    def branches(self) -> tuple[Branch, ...]:
        return tuple(map(self._branch, range(self.num_branches)))

    def _branch(self, index: int) -> Branch:
        node = self._nodes[index]
        opening, *more = (self._writes[number] for number in node.writes[:2])
        retries = index > 0 and opening.start == opening.stop and all(isinstance(write, Turn) for write in more)
        cause = opening.cause if isinstance(opening, Context) else ""
        return Branch(index, node.parent, node.start, node.stop, node.sampled, cause, retries)

    @property
    def num_branches(self) -> int:
        return len(self._nodes)

    @property
    def num_writes(self) -> int:
        return len(self._writes)

    @property
    def num_tokens(self) -> int:
        """How many tokens are recorded; a shared one counts once."""
        return sum(len(node.ids) for node in self._nodes)

    @property
    def num_sampled(self) -> int:
        """How many tokens were sampled; a shared one counts once."""
        return sum(node.sampled for node in self._nodes)

    @property
    def num_samples(self) -> int:
        """How many branches own sampled tokens: the rows it takes to train each of them once."""
        return sum(node.sampled > 0 for node in self._nodes)

    @property
    def nbytes(self) -> int:
        """The memory of the arrays and channels in bytes, unused room included, without caches and write objects."""
        turns = (write for write in self._writes if isinstance(write, Turn))
        channels = sum(len(packed.data) for turn in turns for _, packed in turn.channels)
        return channels + sum(node.nbytes for node in self._nodes)

    @property
    def cache_nbytes(self) -> int:
        """The memory of the copied stream and of the wire text; 0 before the first read."""
        return self._row.nbytes + (self._text.nbytes if self._text_branch >= 0 else 0)

    def __len__(self) -> int:
        """The length of the current stream."""
        return self._nodes[self.current].stop if self._nodes else 0

    def __repr__(self) -> str:
        label = f"{self.name!r}, " if self.name else ""
        tree = f"{self.num_branches} branches, " if self.num_branches > 1 else ""
        return (
            f"Trajectory({label}{tree}{self.num_tokens} tokens, {self.num_sampled} sampled, {self.num_writes} writes)"
        )

    # -- the tree

    def _index(self, branch: int | None) -> int:
        if not self._nodes:
            raise TrajectoryError("nothing is recorded yet: begin(prompt_ids) first")
        if branch is None:
            return self.current
        if as_count(branch, "branch") >= len(self._nodes):
            raise TrajectoryError(f"there is no branch {branch}: the trajectory has {len(self._nodes)}")
        return int(branch)

    def _segments(self, index: int) -> list[tuple[Node, int]]:
        """The branches that own parts of a stream, in stream order, each with the position where its part ends."""
        segments = [(node := self._nodes[index], node.stop)]
        while node.parent >= 0:
            stop, node = node.start, self._nodes[node.parent]
            segments.append((node, stop))
        return segments[::-1]

    def _along(self, index: int) -> Iterator[Write]:
        """The writes of a stream, in order; one that the branch left in the middle of is cut there.

        A write belongs to the stream if it began before the branch left its owner.
        """
        for node, stop in self._segments(index):
            for number in node.writes:
                write = self._writes[number]
                if write.start >= stop and node is not self._nodes[index]:
                    break
                yield _cut(write, stop)

    def _owner(self, index: int, position: int) -> int:
        """The branch that owns the token before `position` of a stream; -1 for position 0."""
        while position and self._nodes[index].start >= position:
            index = self._nodes[index].parent
        return index if position else -1

    def _messages_at(self, index: int, position: int) -> int:
        """How many messages are in the writes that end at or before `position` of a stream."""
        owner = self._owner(index, position)
        if owner < 0:
            return 0
        numbers = self._nodes[owner].writes  # the first starts before the position, since its branch owns it
        at = bisect_left(numbers, position, key=lambda number: self._writes[number].start)
        write = self._writes[numbers[at - 1]]
        return write.messages if write.stop <= position else write.message

    def _shared_with(self, ids: Ids, index: int) -> int:
        """How many ids a prompt shares with one stream."""
        for node, stop in self._segments(index):
            shared = node.start + common_prefix(node.ids.view(0, stop - node.start), ids[node.start :])
            if shared < stop:
                return shared
        return self._nodes[index].stop

    def _turn_logprobs(self, turn: Turn) -> Logprobs:
        node = self._nodes[turn.branch]
        offset = node.offsets[bisect_left(node.writes, turn.write)]
        return node.logprobs.view(offset, offset + len(turn))

    def _check_turn(self, turn: Turn) -> None:
        if not isinstance(turn, Turn):
            raise TrajectoryError(f"a turn is what turns() and append_completion() return, not {shown(turn)}")
        if not 0 <= turn.write < self.num_writes or turn != _cut(self._writes[turn.write], turn.stop):
            raise TrajectoryError(f"the turn at {turn.start}..{turn.stop} is not of this trajectory")

    def _require_logprobs(self) -> None:
        if not self.has_logprobs:
            raise TrajectoryError("the trajectory was made with logprobs=False: it has none")


def _cut(write: Write, limit: int) -> Write:
    """A write up to a position of its stream."""
    if limit >= write.stop:
        return write
    if isinstance(write, Context):
        spans = write.spans[write.spans[:, 0] < limit]
        np.minimum(spans[:, 1], limit, out=spans[:, 1])
        return replace(write, stop=limit, spans=spans)
    length = limit - write.start
    versions = (span._replace(stop=min(span.stop, length)) for span in write.versions if span.start < length)
    return replace(write, stop=limit, versions=tuple(versions), cut=True)
