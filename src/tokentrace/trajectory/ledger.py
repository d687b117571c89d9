"""Ledger: what a trajectory consists of, and the only three ways to add to it.

Each of them checks everything, makes room, and then changes: a write that fails has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import TrajectoryError, shown
from ..tokens.ids import INT32_MAX, IdsLike
from ..tokens.kinds import Kind, Kinds
from ..tokens.tokenizer import Ids
from .inputs import (
    KindsLike,
    Logprobs,
    LogprobsLike,
    SpansLike,
    VersionLike,
    as_count,
    as_ids,
    as_kinds,
    as_logprob_kind,
    as_logprobs,
    as_spans,
    as_version,
)
from .log import Detail, Row, WriteLog
from .tree import Node, Tree
from .turns import CompletionWrite, ContextWrite, LogprobKind, Opening, Turn, VersionSpan, Write

UNFINISHED: Final = frozenset({"abort", "length"})
"""Finish reasons after which a completion may go on with the same message."""

LATER_KINDS: Final = frozenset({Kind.CONTEXT, Kind.SCAFFOLD, Kind.SYNTHETIC})
PROMPT_KINDS: Final = LATER_KINDS | {Kind.PROMPT}


class Ledger:
    """The tree of tokens and the log of writes, kept in step."""

    def __init__(self, vocab_size: int | None, has_logprobs: bool) -> None:
        self.vocab_size: Final = vocab_size
        self.has_logprobs: Final = has_logprobs
        self.tree: Final = Tree()
        self.log: Final = WriteLog()
        self.current = -1

    # -- writing

    def open(
        self, source: int, start: int, ids: IdsLike, kinds: KindsLike, spans: SpansLike, messages: int, cause: str
    ) -> int:
        """Make a branch that leaves the stream of `source` at `start`; spans and `messages` count from the very first.

        Returns its index.
        """
        new_ids = as_ids(ids, "ids", self.vocab_size)
        if not isinstance(cause, str):
            raise TrajectoryError(f"cause must be a str, not {shown(cause)}")
        if start and start >= self.tree.nodes[source].stop:
            raise TrajectoryError(
                f"branch {source} ends at {self.tree.nodes[source].stop}, so leaving it at {start} rewrites nothing: "
                "use append_context() or extend_to()"
            )
        if start == 0 and not len(new_ids):
            raise TrajectoryError("a prompt needs at least one id")
        parent = self.tree.owner(source, start)
        inherited = self.messages_at(parent, start)
        if as_count(messages, "messages") < inherited:
            raise TrajectoryError(
                f"messages is {messages}, but the shared prefix holds {inherited}: say how many the whole prompt holds"
            )
        codes = as_kinds(kinds, len(new_ids), "kinds", allowed=PROMPT_KINDS)
        rows = as_spans(spans, start, _end(start, new_ids), messages)
        node = Node(parent, start, cause, messages=inherited)
        self._write(len(self.tree.nodes), node, new_ids, codes, None, inherited, messages, None, rows)
        return self.current

    def add_context(self, index: int, ids: IdsLike, kinds: KindsLike, spans: SpansLike, messages: int) -> None:
        """Add what was put after a stream; spans and `messages` count from the very first."""
        node = self.tree.nodes[index]
        new_ids = as_ids(ids, "new_ids", self.vocab_size)
        if not len(new_ids):
            raise TrajectoryError("no new ids: there is nothing to record")
        codes = as_kinds(kinds, len(new_ids), "kinds", allowed=LATER_KINDS)
        if as_count(messages, "messages") < node.messages:
            raise TrajectoryError(
                f"messages is {messages}, but branch {index} holds {node.messages}: say how many the whole prompt holds"
            )
        rows = as_spans(spans, node.stop, _end(node.stop, new_ids), messages)
        self._write(index, node, new_ids, codes, None, node.messages, messages, None, rows)

    def add_completion(
        self,
        index: int,
        ids: IdsLike,
        logprobs: LogprobsLike | None,
        finish_reason: str,
        version: VersionLike,
        sampling_json: str | None,
        continues: bool,
        logprobs_kind: LogprobKind | str,
        cached_tokens: int | None,
    ) -> Turn:
        """Add what an engine returned."""
        node = self.tree.nodes[index]
        sampled = as_ids(ids, "ids", self.vocab_size)
        _end(node.stop, sampled)
        if not isinstance(finish_reason, str) or not finish_reason:
            raise TrajectoryError(f"finish_reason must say why the engine stopped, not {shown(finish_reason)}")
        if not isinstance(continues, bool):
            raise TrajectoryError(f"continues must be True or False, not {shown(continues)}")
        values = self._checked_logprobs(logprobs, len(sampled))
        kind = as_logprob_kind(logprobs_kind, self.has_logprobs)
        detail = Detail(finish_reason, as_version(version, len(sampled)), sampling_json, continues, kind)
        cached = -1 if cached_tokens is None else as_count(cached_tokens, "cached_tokens")
        message = self._continued(node) if continues else node.messages
        if not continues and self.log.row(node.writes[-1]).is_turn:
            raise TrajectoryError(
                f"branch {index} ends with a completion: append what the engine was given after it, or say "
                "continues=True where it goes on with an unfinished message"
            )
        after = as_count(message + 1, "the number of messages")
        codes = np.full(len(sampled), Kind.SAMPLED, np.uint8)
        number = self._write(index, node, sampled, codes, values, message, after, detail, None, cached)
        return self.turn(number, self.log.row(number), node.stop)

    def replay(self, write: Write) -> None:
        """Do a write that `written` gave, of this ledger or another."""
        nodes = self.tree.nodes
        if not isinstance(write, ContextWrite | CompletionWrite):
            raise TrajectoryError(f"a write is what Trajectory.writes() gives, not {shown(write)}")
        if isinstance(write, ContextWrite) and write.opening is not None:
            parent, start = write.opening.parent, write.start
            if write.branch != len(nodes):
                raise TrajectoryError(f"branch {write.branch} is opened, and {len(nodes)} would be the next")
            if not -1 <= parent < len(nodes) or (start > 0) != (parent >= 0):
                raise TrajectoryError(f"branch {write.branch} starts at {start} of branch {parent}, which cannot be")
            if start and nodes[parent].start >= start:
                raise TrajectoryError(f"branch {write.branch} starts at {start}, which branch {parent} does not own")
            self.open(parent, start, write.ids, write.kinds, write.spans, write.messages, write.opening.cause)
            return
        if not 0 <= write.branch < len(nodes):
            raise TrajectoryError(f"a write to branch {write.branch}, and there are {len(nodes)}")
        if write.start != nodes[write.branch].stop:
            raise TrajectoryError(
                f"a write to branch {write.branch} at {write.start}, and its stream ends at {nodes[write.branch].stop}"
            )
        if isinstance(write, ContextWrite):
            self.add_context(write.branch, write.ids, write.kinds, write.spans, write.messages)
            return
        self.add_completion(
            write.branch,
            write.ids,
            write.logprobs,
            write.finish_reason,
            write.version,
            write.sampling_json,
            write.continues,
            write.logprobs_kind,
            write.cached_tokens,
        )

    def _write(
        self,
        index: int,
        node: Node,
        ids: Ids,
        kinds: Kinds,
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
            Row(index, start, start + count, first, messages, node.sampled, cached, -1, 0), detail=detail, spans=spans
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
        """The message that a completion with `continues` goes on with."""
        for number in reversed(node.writes):
            row = self.log.row(number)
            if row.is_turn:
                reason = self.log.detail(row).finish_reason
                if reason not in UNFINISHED and row.stop > row.start:
                    raise TrajectoryError(
                        f'the turn before finished with "{reason}": a message goes on only after "abort" or "length"'
                    )
                if row.messages != node.messages:
                    raise TrajectoryError("new messages came after the turn before: leave continues out")
                return row.first
        raise TrajectoryError("there is no turn before in this branch to go on with: leave continues out")

    # -- reading

    def messages_at(self, branch: int, position: int) -> int:
        """How many messages the writes hold that lie whole before `position` of a stream."""
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

    def rows(self, branch: int) -> Iterator[tuple[int, Row, int]]:
        """The writes along a stream: number, row, and the position up to which it is part of that stream.

        A write is part of it if it began before the branch left the stream of its owner.
        """
        for owner, _, stop in self.tree.segments(branch):
            writes = self.tree.nodes[owner].writes
            for number, row in zip(writes, self.log.rows(writes), strict=True):
                if owner != branch and row.start >= stop:
                    break
                yield number, row, stop

    def turn(self, number: int, row: Row, limit: int) -> Turn:
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
        )

    def written(self, number: int) -> Write:
        """One write, as it was made."""
        row = self.log.row(number)
        node = self.tree.nodes[row.branch]
        start, stop = row.start - node.start, row.stop - node.start
        if row.is_turn:
            detail = self.log.detail(row)
            return CompletionWrite(
                branch=row.branch,
                start=row.start,
                ids=node.ids.view(start, stop),
                logprobs=node.logprobs.view(row.sampled, row.sampled + stop - start) if self.has_logprobs else None,
                finish_reason=detail.finish_reason,
                version=detail.version,
                sampling_json=detail.sampling_json,
                continues=detail.continues,
                logprobs_kind=detail.logprobs_kind,
                cached_tokens=row.cached if row.cached >= 0 else None,
            )
        return ContextWrite(
            branch=row.branch,
            start=row.start,
            ids=node.ids.view(start, stop),
            kinds=node.kinds.view(start, stop),
            spans=self.log.spans(number),
            messages=row.messages,
            opening=Opening(node.parent, node.cause) if node.writes[0] == number else None,
        )


def _end(start: int, ids: Ids) -> int:
    if start + len(ids) > INT32_MAX:
        raise TrajectoryError(f"a stream holds at most 2**31 - 1 ids, and this one would have {start + len(ids)}")
    return start + len(ids)
