"""Tree: streams that share their prefixes."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from ..tokens.alignment import common_prefix
from ..tokens.kinds import Kinds
from ..tokens.tokenizer import Ids
from .buffers import Buffer, WireText
from .turns import SharedPrefix


@dataclass(slots=True, eq=False)
class Node:
    """One branch: its own tokens, from position `start` of its stream on.

    The tokens before are those of the parent's stream. `parent` is the branch that owns the last of them, so a
    child starts after its parent's start and before its parent's end; -1 where `start` is 0.
    """

    parent: int
    start: int
    cause: str
    ids: Buffer[np.int32] = field(default_factory=lambda: Buffer(np.int32))
    kinds: Buffer[np.uint8] = field(default_factory=lambda: Buffer(np.uint8))
    logprobs: Buffer[np.float32] = field(default_factory=lambda: Buffer(np.float32))
    """Of its own sampled tokens, in order, and of no others."""
    sampled: int = 0
    messages: int = 0
    writes: array[int] = field(default_factory=lambda: array("i"))
    """The numbers of its writes, in order; the first one made it."""

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.kinds.nbytes + self.logprobs.nbytes + sys.getsizeof(self.writes)


class Segment(NamedTuple):
    """The part of a stream that one branch owns: positions ``start`` to ``stop``."""

    owner: int
    start: int
    stop: int


Form = TypeVar("Form", Buffer[np.int32], WireText)


class LaidOut(Generic[Form]):
    """The whole stream of one branch at a time, made when asked for: it grows with its branch."""

    def __init__(self, make: Callable[[], Form]) -> None:
        self._make: Callable[[], Form] = make
        self.form: Form = make()
        self.branch = -1

    def of(self, tree: Tree, branch: int) -> Form:
        if self.branch != branch:
            self.form, self.branch = self._make(), branch
        if len(self.form) < tree.nodes[branch].stop:
            self.form.extend(np.concatenate(list(tree.pieces(branch, len(self.form)))))
        return self.form

    def drop(self) -> None:
        self.form, self.branch = self._make(), -1

    @property
    def nbytes(self) -> int:
        return self.form.nbytes if self.branch >= 0 else 0


class Tree:
    """The branches; and beside them one stream as an array, and one as JSON text."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.line = LaidOut[Buffer[np.int32]](lambda: Buffer(np.int32))
        self.wire = LaidOut(WireText)

    def segments(self, branch: int) -> list[Segment]:
        """The owners along a branch's stream, in stream order; the last is the branch itself."""
        found: list[Segment] = []
        stop = self.nodes[branch].stop
        while branch >= 0:
            node = self.nodes[branch]
            found.append(Segment(branch, node.start, stop))
            stop, branch = node.start, node.parent
        return found[::-1]

    def pieces(self, branch: int, start: int = 0) -> Iterator[Ids]:
        """The ids of a stream from `start` on, as views of what each owner holds."""
        for segment in self.segments(branch):
            if segment.stop > start:
                node = self.nodes[segment.owner]
                yield node.ids.view(max(segment.start, start) - node.start, segment.stop - node.start)

    def stream(self, branch: int) -> Ids:
        """The ids of a stream as one view; only a branch that shares something with others has to be laid out."""
        node = self.nodes[branch]
        return node.ids.view() if node.parent < 0 else self.line.of(self, branch).view()

    def kinds(self, branch: int) -> Kinds:
        """The kinds along a stream: a view where the branch owns it all, else a new array; read-only both."""
        node = self.nodes[branch]
        if node.parent < 0:
            return node.kinds.view()
        parts = [
            self.nodes[owner].kinds.view(0, stop - self.nodes[owner].start) for owner, _, stop in self.segments(branch)
        ]
        kinds = np.concatenate(parts)
        kinds.flags.writeable = False
        return kinds

    def owner(self, branch: int, position: int) -> int:
        """The branch that owns the token before `position` of a stream; -1 for position 0."""
        if position == 0:
            return -1
        while self.nodes[branch].start >= position:
            branch = self.nodes[branch].parent
        return branch

    def shared_with(self, ids: Ids, branch: int) -> int:
        """How many ids a prompt shares with one stream."""
        reached = 0
        for piece in self.pieces(branch):
            same = common_prefix(piece, ids[reached:])
            reached += same
            if same < len(piece):
                break
        return reached

    def longest_shared(self, ids: Ids) -> SharedPrefix:
        """Where most of a prompt is already recorded."""
        reached: list[int] = []  # by branch; parents come before their children
        for node in self.nodes:
            before = reached[node.parent] if node.parent >= 0 else 0
            if before < node.start:
                reached.append(before)
            else:
                reached.append(node.start + common_prefix(node.ids.view(), ids[node.start :]))
        longest = max(reached, default=0)
        extends = next(
            (k for k, node in enumerate(self.nodes) if reached[k] == longest == node.stop),
            -1,
        )
        return SharedPrefix(reached.index(longest) if longest else -1, longest, extends)
