"""Tree: the writes of a trajectory in order, and the tokens of each branch.

There are three writes: open a branch, add context, add a completion. Each is checked as a whole, then memory is
reserved, then it is done: a write that fails changes nothing.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Final, NamedTuple

import numpy as np

from ..errors import TrajectoryError, shown
from ..settings import as_float
from ..tokens.alignment import common_prefix
from ..tokens.ids import INT32_MAX
from ..tokens.kinds import Kind, Kinds
from ..tokens.tokenizer import Ids
from .buffers import Buffer, WireText
from .channels import Packed, pack_channels
from .inputs import (
    LATER_KINDS,
    PROMPT_KINDS,
    Logprobs,
    as_count,
    as_ids,
    as_kinds,
    as_logprob_kind,
    as_logprobs,
    as_spans,
    as_versions,
)
from .turns import CompletionWrite, Context, ContextWrite, SharedPrefix, Turn, Write

UNFINISHED: Final = frozenset({"abort", "length"})
"""Finish reasons after which a completion may continue the same message."""


@dataclass(slots=True, eq=False)
class Node:
    """One branch: the tokens it owns, from position `start` of its stream on.

    The tokens before are those of the parent's stream. `parent` is the branch that owns the last of them, so a
    child starts after its parent's start and before its parent's end; -1 where `start` is 0.
    """

    parent: int
    start: int
    cause: str
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


class Segment(NamedTuple):
    """The part of a stream that one branch owns: positions ``start`` to ``stop``."""

    owner: int
    start: int
    stop: int


class Tree:
    """Every write, the branches, and beside them one stream as an array and one as JSON text."""

    def __init__(self, vocab_size: int | None, has_logprobs: bool) -> None:
        self.vocab_size: Final = vocab_size
        self.has_logprobs: Final = has_logprobs
        self.nodes: Final[list[Node]] = []
        self.writes: Final[list[Turn | Context]] = []
        self.channels: Final[dict[int, dict[str, Packed]]] = {}
        """Side channels of completions, by the number of the write."""
        self.rewards: Final[list[tuple[int, float | None]]] = []
        """Every reward in order: the number of the turn's write, -1 for the whole rollout, and the value."""
        self.drop_caches()

    def drop_caches(self) -> None:
        """Free the copied stream and the JSON text."""
        self._row, self._row_branch = Buffer(np.int32), -1
        self._text, self._text_branch = WireText(), -1

    @property
    def current(self) -> int:
        """The branch last written to; -1 before the first write."""
        return self.writes[-1].branch if self.writes else -1

    # -- writing

    def reward(self, number: int, value: Any) -> None:
        """Set the reward of a turn, or with -1 of the whole rollout; None removes it."""
        turn = self.writes[number] if 0 <= number < len(self.writes) else None
        if number != -1 and not isinstance(turn, Turn):
            raise TrajectoryError(f"write {shown(number)} is not a turn: there is nothing to reward")
        reward = as_float(value) if not isinstance(value, bool) and isinstance(value, Real) else None
        if reward is None and value is not None:
            raise TrajectoryError(f"a reward is a finite number, or None, not {shown(value)}")
        if isinstance(turn, Turn):
            self.writes[number] = replace(turn, reward=reward)
        self.rewards.append((number, reward))

    def record(self, write: Write) -> None:
        """Do one write. Its spans and messages count from the start of the stream."""
        if isinstance(write, CompletionWrite):
            self._complete(write)
        elif not isinstance(write, ContextWrite):
            raise TrajectoryError(f"a write is what Trajectory.writes() returns, not {shown(write)}")
        elif write.parent is None:
            node = self._node(write)
            ids = as_ids(write.ids, "new_ids", self.vocab_size)
            if not len(ids):
                raise TrajectoryError("no new ids: there is nothing to record")
            self._add_context(write, node, ids, f"branch {write.branch}")
        else:
            self._open(write, write.parent)

    def _node(self, write: Write) -> Node:
        """The branch that a write extends, at its end."""
        if not 0 <= write.branch < len(self.nodes):
            raise TrajectoryError(f"a write to branch {write.branch}, and there are {len(self.nodes)}")
        node = self.nodes[write.branch]
        if write.start != node.stop:
            raise TrajectoryError(
                f"a write to branch {write.branch} at {write.start}, and its stream ends at {node.stop}"
            )
        return node

    def _open(self, write: ContextWrite, parent: int) -> None:
        count, start = len(self.nodes), write.start
        if write.branch != count:
            raise TrajectoryError(f"branch {write.branch} is opened, and {count} would be the next")
        if not -1 <= parent < count or (start > 0) != (parent >= 0):
            raise TrajectoryError(f"branch {write.branch} starts at {start} of branch {parent}, which cannot be")
        if start and self.nodes[parent].start >= start:
            raise TrajectoryError(f"branch {write.branch} starts at {start}, which branch {parent} does not own")
        ids = as_ids(write.ids, "ids", self.vocab_size)
        if not isinstance(write.cause, str):
            raise TrajectoryError(f"cause must be a str, not {shown(write.cause)}")
        self.check_leaves(parent, start)
        if start == 0 and not len(ids):
            raise TrajectoryError("a prompt needs at least one id")
        node = Node(parent, start, write.cause, self.messages_at(parent, start))
        self._add_context(write, node, ids, "the shared prefix")

    def check_leaves(self, branch: int, start: int) -> None:
        """Raise `TrajectoryError` if a branch at `start` would begin at the end of the stream it leaves."""
        if start and start >= self.nodes[branch].stop:
            raise TrajectoryError(
                f"branch {branch} ends at {self.nodes[branch].stop}, so leaving it at {start} rewrites nothing: "
                "use append_context() or extend_to()"
            )

    def _add_context(self, write: ContextWrite, node: Node, ids: Ids, before: str) -> None:
        messages = as_count(write.messages, "messages")
        if messages < node.messages:
            raise TrajectoryError(
                f"messages is {messages}, but {before} holds {node.messages}: say how many the whole prompt holds"
            )
        kinds = as_kinds(write.kinds, len(ids), allowed=LATER_KINDS if write.parent is None else PROMPT_KINDS)
        stop = _end(node.stop, ids)
        spans = as_spans(write.spans, node.stop, stop, messages).astype(np.int32)
        spans.flags.writeable = False
        self._add(node, Context(write.branch, node.stop, stop, node.messages, messages, spans), ids, kinds, None)

    def _complete(self, write: CompletionWrite) -> None:
        node = self._node(write)
        ids = as_ids(write.ids, "ids", self.vocab_size)
        reason, continues, sampling = write.finish_reason, write.continues, write.sampling_json
        if not isinstance(reason, str) or not reason:
            raise TrajectoryError(f"finish_reason must say why the engine stopped, not {shown(reason)}")
        if not isinstance(continues, bool):
            raise TrajectoryError(f"continues must be True or False, not {shown(continues)}")
        logprobs = as_logprobs(write.logprobs, len(ids), recorded=self.has_logprobs)
        channels = pack_channels(write.channels, len(ids))
        message = self._continued(node) if continues else node.messages
        if not continues and isinstance(self.writes[node.writes[-1]], Turn):
            raise TrajectoryError(
                f"branch {write.branch} ends with a completion: append what the engine was given after it, or say "
                "continues=True where it continues an unfinished message"
            )
        as_count(message + 1, "the number of messages")
        turn = Turn(
            write=len(self.writes),
            branch=write.branch,
            start=node.stop,
            stop=_end(node.stop, ids),
            message=message,
            finish_reason=reason,
            versions=as_versions(write.version, len(ids)),
            sampling_json=None if sampling is None else sys.intern(sampling),
            continues=continues,
            logprobs_kind=as_logprob_kind(write.logprobs_kind, self.has_logprobs),
            cached_tokens=None if write.cached_tokens is None else as_count(write.cached_tokens, "cached_tokens"),
        )
        self._add(node, turn, ids, np.uint8(Kind.SAMPLED), logprobs)
        if channels:
            self.channels[turn.write] = channels

    def _continued(self, node: Node) -> int:
        """The message that a completion with `continues` continues."""
        turns = (turn for turn in map(self.writes.__getitem__, reversed(node.writes)) if isinstance(turn, Turn))
        last = next(turns, None)
        if last is None:
            raise TrajectoryError("there is no turn before in this branch to continue: leave continues out")
        if last.finish_reason not in UNFINISHED and len(last):
            raise TrajectoryError(
                f'the turn before finished with "{last.finish_reason}": a message continues only after "abort" or '
                '"length"'
            )
        if last.message + 1 != node.messages:
            raise TrajectoryError("new messages came after the turn before: leave continues out")
        return last.message

    def _add(self, node: Node, write: Turn | Context, ids: Ids, kinds: Kinds | np.uint8, logprobs: Any) -> None:
        count = len(ids)
        node.ids.reserve(count)
        node.kinds.reserve(count)
        node.logprobs.reserve(0 if logprobs is None else count)
        # There is room: nothing below can fail.
        node.ids.push(ids, count)
        node.kinds.push(kinds, count)
        if logprobs is not None:
            node.logprobs.push(logprobs, count)
        node.writes.append(len(self.writes))
        node.offsets.append(node.sampled)
        if isinstance(write, Turn):
            node.sampled += count
            node.messages = write.message + 1
        else:
            node.messages = write.messages
        if write.branch == len(self.nodes):
            self.nodes.append(node)
        self.writes.append(write)

    # -- reading

    def segments(self, branch: int) -> list[Segment]:
        """The owners along a branch's stream, in stream order; the last is the branch itself."""
        segments: list[Segment] = []
        stop = self.nodes[branch].stop
        while branch >= 0:
            node = self.nodes[branch]
            segments.append(Segment(branch, node.start, stop))
            stop, branch = node.start, node.parent
        return segments[::-1]

    def stream(self, branch: int) -> Ids:
        """The ids of a stream as one view; only a branch with a parent has to be copied into a row."""
        node = self.nodes[branch]
        if node.parent < 0:
            return node.ids.view()
        if self._row_branch != branch:
            self._row, self._row_branch = Buffer(np.int32), branch
        self._grow(self._row, branch)
        return self._row.view()

    def text(self, branch: int) -> tuple[bytes, ...]:
        """The ids of a stream as JSON text, in pieces."""
        if self._text_branch != branch:
            self._text, self._text_branch = WireText(), branch
        self._grow(self._text, branch)
        return self._text.parts

    def _grow(self, copy: Buffer[np.int32] | WireText, branch: int) -> None:
        """Add to a copy of a stream what it does not hold yet."""
        for owner, start, stop in self.segments(branch):
            if stop > len(copy):
                copy.extend(self.nodes[owner].ids.view(max(0, len(copy) - start), stop - start))

    @property
    def cache_nbytes(self) -> int:
        return self._row.nbytes + (self._text.nbytes if self._text_branch >= 0 else 0)

    def kinds(self, branch: int) -> Kinds:
        """The kinds along a stream, read-only: a view if the branch has no parent, else a new array."""
        if self.nodes[branch].parent < 0:
            return self.nodes[branch].kinds.view()
        kinds = np.concatenate(
            [self.nodes[owner].kinds.view(0, stop - start) for owner, start, stop in self.segments(branch)]
        )
        kinds.flags.writeable = False
        return kinds

    def logprobs(self, turn: Turn) -> Logprobs:
        node = self.nodes[turn.branch]
        offset = node.offsets[bisect_left(node.writes, turn.write)]
        return node.logprobs.view(offset, offset + len(turn))

    def owner(self, branch: int, position: int) -> int:
        """The branch that owns the token before `position` of a stream; -1 for position 0."""
        while position and self.nodes[branch].start >= position:
            branch = self.nodes[branch].parent
        return branch if position else -1

    def messages_at(self, branch: int, position: int) -> int:
        """How many messages are in the writes that end at or before `position` of a stream."""
        owner = self.owner(branch, position)
        if owner < 0:
            return 0
        numbers = self.nodes[owner].writes  # the first starts before the position, since its branch owns it
        write = self.writes[numbers[bisect_left(numbers, position, key=lambda number: self.writes[number].start) - 1]]
        if write.stop > position:
            return write.message
        return write.messages if isinstance(write, Context) else write.message + 1

    def along(self, branch: int) -> Iterator[tuple[int, Turn | Context]]:
        """The writes of a stream with their numbers; one that the branch left in the middle of is cut there.

        A write belongs to the stream if it began before the branch left its owner.
        """
        for owner, _, stop in self.segments(branch):
            for number in self.nodes[owner].writes:
                write = self.writes[number]
                if owner != branch and write.start >= stop:
                    break
                yield number, cut(write, stop)

    def shared_with(self, ids: Ids, branch: int) -> int:
        """How many ids a prompt shares with one stream."""
        for owner, start, stop in self.segments(branch):
            piece = self.nodes[owner].ids.view(0, stop - start)
            same = common_prefix(piece, ids[start:])
            if same < len(piece):
                return start + same
        return self.nodes[branch].stop

    def longest_shared(self, ids: Ids) -> SharedPrefix:
        """Where most of a prompt is already recorded."""
        lengths: list[int] = []  # by branch; parents come before their children
        for node in self.nodes:
            length = lengths[node.parent] if node.parent >= 0 else 0
            if length >= node.start:
                length = node.start + common_prefix(node.ids.view(), ids[node.start :])
            lengths.append(length)
        longest = max(lengths, default=0)
        extends = (at for at, node in enumerate(self.nodes) if lengths[at] == longest == node.stop)
        return SharedPrefix(lengths.index(longest) if longest else -1, longest, next(extends, -1))

    def write(self, number: int) -> Write:
        """One write with its tokens."""
        write = self.writes[number]
        node = self.nodes[write.branch]
        start, stop = write.start - node.start, write.stop - node.start
        ids = node.ids.view(start, stop)
        if isinstance(write, Context):
            opens = node.writes[0] == number
            return ContextWrite(
                branch=write.branch,
                start=write.start,
                ids=ids,
                kinds=node.kinds.view(start, stop),
                spans=write.spans,
                messages=write.messages,
                parent=node.parent if opens else None,
                cause=node.cause if opens else "",
            )
        return CompletionWrite(
            branch=write.branch,
            start=write.start,
            ids=ids,
            logprobs=self.logprobs(write) if self.has_logprobs else None,
            finish_reason=write.finish_reason,
            version=write.version if len(write.versions) < 2 else write.versions,
            sampling_json=write.sampling_json,
            continues=write.continues,
            logprobs_kind=write.logprobs_kind,
            cached_tokens=write.cached_tokens,
            channels=self.channels.get(number, {}),
        )


def cut(write: Turn | Context, limit: int) -> Turn | Context:
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


def _end(start: int, ids: Ids) -> int:
    if start + len(ids) > INT32_MAX:
        raise TrajectoryError(f"a stream holds at most 2**31 - 1 ids, and this one would have {start + len(ids)}")
    return start + len(ids)
