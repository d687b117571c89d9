"""Ledger: what a trajectory consists of, and the only three ways to add to it: open a branch, add context, add a
completion.

Each write is first checked as a whole, then memory is reserved, then it is done: a write that fails changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Real
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import ExtensionError, TrajectoryError, shown
from ..settings import as_float
from ..tokens.ids import INT32_MAX
from ..tokens.kinds import Kind, Kinds
from ..tokens.tokenizer import Ids
from .channels import Packed, pack_channels
from .inputs import Logprobs, as_count, as_ids, as_kinds, as_logprob_kind, as_logprobs, as_spans, as_version
from .log import Detail, LogRow, WriteLog
from .tree import Node, Tree
from .turns import CompletionWrite, ContextWrite, LogprobsLike, Turn, VersionSpan, Write

UNFINISHED: Final = frozenset({"abort", "length"})
"""Finish reasons after which a completion may continue the same message."""

LATER_KINDS: Final = frozenset({Kind.CONTEXT, Kind.SCAFFOLD, Kind.SYNTHETIC})
PROMPT_KINDS: Final = LATER_KINDS | {Kind.PROMPT}
_SAMPLED: Final = int(Kind.SAMPLED)


class Ledger:
    """The tree of tokens and the log of writes, kept in step."""

    def __init__(self, vocab_size: int | None, has_logprobs: bool) -> None:
        self.vocab_size: Final = vocab_size
        self.has_logprobs: Final = has_logprobs
        self.tree: Final = Tree()
        self.log: Final = WriteLog()
        self.current = -1
        self.channels: Final[dict[int, dict[str, Packed]]] = {}
        """What was told of the tokens of a completion, by the number of its write."""
        self.rewards: Final[dict[int, float | None]] = {}
        """Rewards of turns, by the number of the write; -1 is the whole rollout."""
        self.rewarded: Final[list[tuple[int, float | None]]] = []
        """The same as they were given, one after another."""

    # -- writing

    def reward(self, number: int, value: Any) -> None:
        """Say what a turn was worth, or with -1 the whole rollout; what is said last counts, None takes it back."""
        if number != -1 and not (0 <= number < len(self.log) and self.log.row(number).is_turn):
            raise TrajectoryError(f"write {shown(number)} is not a turn: there is nothing to reward")
        worth = as_float(value) if not isinstance(value, bool) and isinstance(value, Real) else None
        if worth is None and value is not None:
            raise TrajectoryError(f"a reward is a finite number, or None, not {shown(value)}")
        self.rewards[number] = worth
        self.rewarded.append((number, worth))

    def record(self, write: Write, *, checked: bool = False) -> int:
        """Do one of the three writes; returns its number. Spans and messages count from the start of the stream.

        `checked` says of a context that goes on that its ids and spans were looked at.
        """
        if isinstance(write, CompletionWrite):
            return self._complete(write)
        if not isinstance(write, ContextWrite):
            raise TrajectoryError(f"a write is what Trajectory.writes() gives, not {shown(write)}")
        return self._extend(write, checked) if write.parent is None else self._open(write, write.parent)

    def _open(self, write: ContextWrite, parent: int) -> int:
        """Make a branch that leaves the stream of `parent`, which owns the token before it."""
        nodes, start = self.tree.nodes, write.start
        if write.branch != len(nodes):
            raise TrajectoryError(f"branch {write.branch} is opened, and {len(nodes)} would be the next")
        if not -1 <= parent < len(nodes) or (start > 0) != (parent >= 0):
            raise TrajectoryError(f"branch {write.branch} starts at {start} of branch {parent}, which cannot be")
        if start and nodes[parent].start >= start:
            raise TrajectoryError(f"branch {write.branch} starts at {start}, which branch {parent} does not own")
        ids = as_ids(write.ids, "ids", self.vocab_size)
        if not isinstance(write.cause, str):
            raise TrajectoryError(f"cause must be a str, not {shown(write.cause)}")
        self.check_leaves(parent, start)
        if start == 0 and not len(ids):
            raise TrajectoryError("a prompt needs at least one id")
        node = Node(parent, start, write.cause, messages=self.messages_at(parent, start))
        return self._put(write, node, ids, PROMPT_KINDS, "the shared prefix")

    def check_leaves(self, branch: int, start: int) -> None:
        """Refuse to leave a stream at its end."""
        if start and start >= self.tree.nodes[branch].stop:
            raise TrajectoryError(
                f"branch {branch} ends at {self.tree.nodes[branch].stop}, so leaving it at {start} rewrites nothing: "
                "use append_context() or extend_to()"
            )

    def _extend(self, write: ContextWrite, checked: bool) -> int:
        """Add what was put after a stream."""
        node = self._node(write)
        ids: Any = write.ids if checked else as_ids(write.ids, "new_ids", self.vocab_size)
        if not len(ids):
            raise TrajectoryError("no new ids: there is nothing to record")
        return self._put(write, node, ids, LATER_KINDS, f"branch {write.branch}", checked)

    def _put(
        self, write: ContextWrite, node: Node, ids: Ids, allowed: frozenset[Kind], before: str, checked: bool = False
    ) -> int:
        if as_count(write.messages, "messages") < node.messages:
            raise TrajectoryError(
                f"messages is {write.messages}, but {before} holds {node.messages}: say how many the whole prompt holds"
            )
        kinds = as_kinds(write.kinds, len(ids), allowed=allowed)
        stop = _end(node.stop, ids)
        spans = write.spans if checked else as_spans(write.spans, node.stop, stop, write.messages)
        return self._write(write.branch, node, ids, kinds, None, node.messages, write.messages, None, spans)

    def _complete(self, write: CompletionWrite) -> int:
        """Add what an engine returned."""
        node = self._node(write)
        ids = as_ids(write.ids, "ids", self.vocab_size)
        _end(node.stop, ids)
        reason, continues = write.finish_reason, write.continues
        if not isinstance(reason, str) or not reason:
            raise TrajectoryError(f"finish_reason must say why the engine stopped, not {shown(reason)}")
        if not isinstance(continues, bool):
            raise TrajectoryError(f"continues must be True or False, not {shown(continues)}")
        logprobs = self._checked_logprobs(write.logprobs, len(ids))
        kind = as_logprob_kind(write.logprobs_kind, self.has_logprobs)
        detail = Detail(reason, as_version(write.version, len(ids)), write.sampling_json, continues, kind)
        cached = -1 if write.cached_tokens is None else as_count(write.cached_tokens, "cached_tokens")
        channels = pack_channels(write.channels, len(ids))
        message = self._continued(node) if continues else node.messages
        if not continues and self.log.row(node.writes[-1]).is_turn:
            raise TrajectoryError(
                f"branch {write.branch} ends with a completion: append what the engine was given after it, or say "
                "continues=True where it continues an unfinished message"
            )
        after = as_count(message + 1, "the number of messages")
        number = self._write(write.branch, node, ids, _SAMPLED, logprobs, message, after, detail, None, cached)
        if channels:
            self.channels[number] = channels
        return number

    def _node(self, write: Write) -> Node:
        """The branch that a write adds to, at its end."""
        nodes = self.tree.nodes
        if not 0 <= write.branch < len(nodes):
            raise TrajectoryError(f"a write to branch {write.branch}, and there are {len(nodes)}")
        node = nodes[write.branch]
        if write.start != node.stop:
            raise TrajectoryError(
                f"a write to branch {write.branch} at {write.start}, and its stream ends at {node.stop}"
            )
        return node

    def _write(
        self,
        index: int,
        node: Node,
        ids: Ids,
        kinds: Kinds | int,
        logprobs: Logprobs | None,
        first: int,
        messages: int,
        detail: Detail | None,
        spans: npt.NDArray[np.int32] | None,
        cached: int = -1,
    ) -> int:
        count = len(ids)
        node.ids.reserve(count)
        node.kinds.reserve(count)
        node.logprobs.reserve(0 if logprobs is None else count)
        self.log.reserve(0 if spans is None else len(spans))
        # There is room: nothing below can fail.
        start = node.stop
        number = self.log.add(
            index, start, start + count, first, messages, node.sampled, cached, detail=detail, spans=spans
        )
        node.ids.push(ids, count)
        node.kinds.push(kinds, count)
        if logprobs is not None:
            node.logprobs.push(logprobs, count)
        if detail is not None:
            node.sampled += count
        node.messages = messages
        node.writes.append(number)
        if index == len(self.tree.nodes):
            self.tree.nodes.append(node)
        self.current = index
        return number

    def _checked_logprobs(self, logprobs: LogprobsLike | None, count: int) -> Logprobs | None:
        if not self.has_logprobs:
            if logprobs is not None:
                raise TrajectoryError(
                    "the trajectory was made with logprobs=False: give None, or make it with logprobs"
                )
            return None
        if logprobs is None:
            raise TrajectoryError(
                f"{count} sampled ids without logprobs: ask the engine for them, or make the trajectory with "
                "logprobs=False"
            )
        return as_logprobs(logprobs, count)

    def _continued(self, node: Node) -> int:
        """The message that a completion with `continues` continues."""
        for number in reversed(node.writes):
            row = self.log.row(number)
            if row.is_turn:
                reason = self.log.detail(row).finish_reason
                if reason not in UNFINISHED and row.stop > row.start:
                    raise TrajectoryError(
                        f'the turn before finished with "{reason}": a message continues only after "abort" or "length"'
                    )
                if row.messages != node.messages:
                    raise TrajectoryError("new messages came after the turn before: leave continues out")
                return row.first
        raise TrajectoryError("there is no turn before in this branch to continue: leave continues out")

    # -- reading

    def messages_at(self, branch: int, position: int) -> int:
        """How many messages are in the writes that end at or before `position` of a stream."""
        owner = self.tree.owner(branch, position)
        if owner < 0:
            return 0
        writes = self.tree.nodes[owner].writes
        low, high = 0, len(writes)  # the last write that starts before it; the one that made the owner does
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.log.row(writes[middle]).start < position else (low, middle)
        row = self.log.row(writes[low])
        return row.messages if row.stop <= position else row.first

    def rows(self, branch: int) -> Iterator[tuple[int, LogRow, int]]:
        """The writes along a stream: number, row, and the position up to which it is part of that stream.

        A write is part of it if it began before the branch left the stream of its owner.
        """
        for owner, _, stop in self.tree.segments(branch):
            writes = self.tree.nodes[owner].writes
            for number, row in zip(writes, self.log.rows(writes), strict=True):
                if owner != branch and row.start >= stop:
                    break
                yield number, row, stop

    def turn(self, number: int, row: LogRow, limit: int) -> Turn:
        """A turn, cut off at a position of the stream."""
        detail = self.log.detail(row)
        stop = min(row.stop, limit)
        if detail.version is None:
            versions: tuple[VersionSpan, ...] = ()
        elif isinstance(detail.version, tuple):
            kept = (span._replace(stop=min(span.stop, stop - row.start)) for span in detail.version)
            versions = tuple(span for span in kept if span.start < span.stop)
        else:
            versions = (VersionSpan(detail.version, 0, stop - row.start),)
        return Turn(
            write=number,
            branch=row.branch,
            start=row.start,
            stop=stop,
            message=row.first,
            finish_reason=detail.finish_reason,
            versions=versions,
            sampling_json=detail.sampling_json,
            continues=detail.continues,
            cut=stop < row.stop,
            logprobs_kind=detail.logprobs_kind,
            cached_tokens=row.cached if row.cached >= 0 else None,
            reward=self.rewards.get(number),
        )

    def extension_error(self, index: int, ids: Ids, shared: int) -> ExtensionError:
        """Why a prompt that shares so many ids with a branch does not extend it."""
        node = self.tree.nodes[self.tree.owner(index, shared + 1)]
        recorded = int(node.ids.view()[shared - node.start])
        kind = Kind(int(node.kinds.view()[shared - node.start])).name
        if shared == len(ids):
            length = self.tree.nodes[index].stop
            what = f"the prompt ends at {shared}, inside the recorded stream of {length} ids"
        else:
            what = f"the prompt has id {int(ids[shared])} at position {shared}, the stream {recorded} ({kind})"
        return ExtensionError(
            f"{what}: it does not extend branch {index}; record a rewritten history with branch(prompt_ids)",
            position=shared,
        )

    def written(self, number: int) -> Write:
        """One write, as it was made."""
        row = self.log.row(number)
        node = self.tree.nodes[row.branch]
        start, stop = row.start - node.start, row.stop - node.start
        ids = node.ids.view(start, stop)
        if row.is_turn:
            logprobs = node.logprobs.view(row.sampled, row.sampled + len(ids)) if self.has_logprobs else None
            cached = row.cached if row.cached >= 0 else None
            told = self.channels.get(number, {})
            return CompletionWrite(row.branch, row.start, ids, logprobs, *self.log.detail(row), cached, told)
        opens = node.writes[0] == number
        return ContextWrite(
            branch=row.branch,
            start=row.start,
            ids=ids,
            kinds=node.kinds.view(start, stop),
            spans=self.log.spans(number),
            messages=row.messages,
            parent=node.parent if opens else None,
            cause=node.cause if opens else "",
        )


def _end(start: int, ids: Ids) -> int:
    if start + len(ids) > INT32_MAX:
        raise TrajectoryError(f"a stream holds at most 2**31 - 1 ids, and this one would have {start + len(ids)}")
    return start + len(ids)
