"""The streams of a rollout as a tree: what a prompt has in common with all of them is found by walking down once."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from ..tokens.ids import common_prefix
from ..tokens.tokenizer import Ids

Tip = TypeVar("Tip")


class _Asked(Protocol):
    """A call: its prompt, and the stream that it leaves."""

    @property
    def prompt(self) -> Ids: ...
    @property
    def stream(self) -> Ids: ...


Asked = TypeVar("Asked", bound=_Asked)


class Met(NamedTuple, Generic[Tip]):
    """What a prompt has in common with the streams before it."""

    shared: int
    """How many tokens it begins with that a stream begins with as well."""
    last: Tip | None
    """The last of the streams that have them."""
    end: int
    """The length of the longest stream that it begins with, whether or not something goes on from that; 0: of none."""
    tip: Tip | None
    """The longest stream that it begins with and that nothing goes on from."""


@dataclass(slots=True, eq=False)
class _Node(Generic[Tip]):
    """A stretch that streams have in common."""

    stream: Ids
    start: int
    stop: int
    last: Tip | None = None
    ends: list[int] = field(default_factory=list)
    """Where streams end in it, the first first."""
    tips: dict[int, list[Tip]] = field(default_factory=dict)
    """Those of them that nothing goes on from, by where they end."""
    children: dict[int, _Node[Tip]] = field(default_factory=dict)
    """What comes next, by its first id."""

    def split(self, at: int) -> _Node[Tip]:
        """Leave what comes from a token on to a child."""
        rest = _Node(self.stream, at, self.stop, self.last, children=self.children)
        first = bisect_right(self.ends, at)
        self.ends, rest.ends = self.ends[:first], self.ends[first:]
        rest.tips = {end: self.tips.pop(end) for end in list(self.tips) if end > at}
        self.stop, self.children = at, {int(self.stream[at]): rest}
        return rest


class Streams(Generic[Tip]):
    """Streams that were added, each with whatever stands for it."""

    def __init__(self, nothing: Ids) -> None:
        self._root: _Node[Tip] = _Node(nothing, 0, 0)
        self._ending: dict[Tip, _Node[Tip]] = {}
        """In which node a stream ends that nothing goes on from."""

    def _walk(self, ids: Ids) -> tuple[list[_Node[Tip]], int]:
        """The nodes that some ids begin with, and how many of the ids those have."""
        path, at = [self._root], 0
        while at == path[-1].stop and at < len(ids) and (child := path[-1].children.get(int(ids[at]))) is not None:
            path.append(child)
            at += common_prefix(child.stream[child.start : child.stop], ids[at:])
        return path, at

    def meet(self, prompt: Ids) -> Met[Tip]:
        """What a prompt has in common with the streams."""
        path, shared = self._walk(prompt)
        end, tip = 0, None
        for node in reversed(path):
            if not end and node.ends and node.ends[0] <= shared:
                end = node.ends[bisect_right(node.ends, shared) - 1]
            if node.tips and (found := max((at for at in node.tips if at <= shared), default=None)) is not None:
                tip = node.tips[found][-1]
                break
        return Met(shared, path[-1].last, end, tip)

    def add(self, stream: Ids, tip: Tip) -> None:
        """A stream that nothing goes on from yet."""
        path, at = self._walk(stream)
        node: Any = path[-1]
        if at < node.stop:
            rest = node.split(at)
            self._ending.update((one, rest) for tips in rest.tips.values() for one in tips)
        if at < len(stream):
            if node.children or node is self._root:
                node.children[int(stream[at])] = node = _Node(stream, at, len(stream))
                path.append(node)
            else:  # nothing else goes on from here: the stretch becomes longer
                node.stream, node.stop = stream, len(stream)
        if len(stream) not in node.ends[-1:]:
            insort(node.ends, len(stream))
        node.tips.setdefault(len(stream), []).append(tip)
        self._ending[tip] = node
        for one in path:
            one.last = tip

    def extended(self, stream: Ids, tip: Tip) -> None:
        """Something goes on from a stream now."""
        tips = self._ending.pop(tip).tips
        tips[len(stream)].remove(tip)
        if not tips[len(stream)]:
            del tips[len(stream)]


def in_order(calls: Sequence[Asked]) -> list[Asked]:
    """Calls in an order in which they may have been made: each after the one that its prompt goes on from.

    A prompt that begins with the stream of a call, or with its prompt alone where the stream was not kept, was asked
    after it. Otherwise calls stay as they are.
    """
    least = math.inf
    for one in reversed(calls):
        if len(one.prompt) > least:
            break
        least = min(least, len(one.prompt))
    else:
        return list(calls)  # no prompt is longer than a later one
    ends: dict[bytes, int] = {}
    for kind in ("prompt", "stream"):
        for at, one in enumerate(calls):
            ends.setdefault(digest(getattr(one, kind)), at)
    lengths = sorted({len(ids) for one in calls for ids in (one.prompt, one.stream)} - {0})
    placed: dict[int, None] = {}
    for at in range(len(calls)):
        path: dict[int, None] = {}
        here: int | None = at
        while here is not None and here not in placed and here not in path:
            path[here] = None
            here = _before(calls[here].prompt, lengths, ends)
        placed |= dict.fromkeys(reversed(path))
    return [calls[at] for at in placed]


def _before(prompt: Ids, lengths: Sequence[int], ends: Mapping[bytes, int]) -> int | None:
    """The call that a prompt goes on from: the longest that it begins with, if there is one."""
    found, read, at = None, blake2b(digest_size=16), 0
    for length in lengths[: bisect_left(lengths, len(prompt))]:
        read.update(np.ascontiguousarray(prompt[at:length]).data)
        at = length
        found = ends.get(read.digest(), found)
    return found


def digest(ids: Ids) -> bytes:
    """What stands for ids where they are looked up."""
    return blake2b(np.ascontiguousarray(ids).data, digest_size=16).digest()
