"""Record: a list of writes, and everything that is read from them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from ..errors import TrajectoryError
from ..settings import instance, whole
from ..tokens.ids import INT32_MAX, common_prefix
from ..tokens.table import TokenTable, join
from ..tokens.tokenizer import Ids
from .channels import Channel, Entries
from .checks import as_count, as_ids, from_json, mapping_json
from .turns import Branch, Context, IdsLike, Logprobs, SharedPrefix, Turn, Write


@dataclass(slots=True)
class _Stream:
    """A branch's ids. A full array moves to a larger one: earlier views never change."""

    branch: int = -1
    length: int = 0
    array: Ids = field(default_factory=lambda: np.empty(0, np.int32))

    def extend(self, ids: Ids) -> None:
        start, stop = self.length, self.length + len(ids)
        if stop > len(self.array):
            room = np.empty(len(ids) + stop // 8 + 16, np.int32)
            self.array = np.concatenate([self.array[:start], room])
        self.array[start:stop] = ids
        self.length = stop

    @property
    def ids(self) -> Ids:
        view = self.array[: self.length]
        view.flags.writeable = False
        return view


class Record:
    """The reading half of a `Trajectory`. Its arrays are read-only and never change.

    A branch is a list of writes. Its stream is the head of its parent's, then these writes.
    """

    def __init__(
        self,
        *,
        name: str = "",
        vocab_size: int | None = None,
        logprobs: bool = True,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        if vocab_size is not None:
            vocab_size = whole("vocab_size", vocab_size, least=1, most=INT32_MAX, error=TrajectoryError)
        self.vocab_size: Final = vocab_size
        self.name: Final = instance("name", name, str, TrajectoryError)
        self.has_logprobs: Final = instance("logprobs", logprobs, bool, TrajectoryError)
        """Whether every sampled token has a logprob; if not, none has."""
        self.reward: float | None = None
        """The reward of the whole rollout, if any. Turns have their own."""
        self._metadata = mapping_json({} if metadata is None else metadata, "metadata")
        self._writes: list[Write] = []
        self._by_branch: list[list[Write]] = []
        self._stream = _Stream()

    def __copy__(self) -> Self:
        """A copy that can be written to. Shares the tokens of all writes."""
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        twin._writes = [*self._writes]
        twin._by_branch = [[*writes] for writes in self._by_branch]
        # new ids of the copy do not fit into this part of the array: they get another
        stream = self._stream
        twin._stream = _Stream(stream.branch, stream.length, stream.array[: stream.length])
        return twin

    def stream(self, branch: int | None = None) -> Ids:
        """The ids so far: what the engine and a trainer see. Cached for one branch."""
        index = self._index(branch)
        if self._stream.branch != index:
            self._stream = _Stream(index)
        for write in self._along(index, since=self._stream.length):
            self._stream.extend(write.tokens.ids)
        return self._stream.ids

    prompt = stream

    def table(self, branch: int | None = None) -> TokenTable:
        """The tokens of a stream with all columns. The mask is True for sampled ones."""
        return frozen(join([write.tokens for write in self._along(self._index(branch))]))

    def loss_mask(self, branch: int | None = None) -> npt.NDArray[np.bool_]:
        """True for sampled tokens that the branch owns: each in exactly one branch."""
        mask = self.table(branch).mask.copy()
        mask[: self._by_branch[self._index(branch)][0].start] = False
        return mask

    def logprobs(self, branch: int | None = None) -> Logprobs:
        """The logprob of each token, NaN if it was not sampled; shared prefixes included."""
        if not self.has_logprobs:
            raise TrajectoryError("the trajectory was made with logprobs=False: it has none")
        table = self.table(branch)
        return np.full(len(table), np.nan, np.float32) if table.logprobs is None else table.logprobs

    def turns(self, branch: int | None = None) -> list[Turn]:
        """The turns along a stream. One is `cut` if the branch starts inside it."""
        return [write for write in self._along(self._index(branch)) if isinstance(write, Turn)]

    def channels(self, branch: int | None = None) -> dict[str, Channel]:
        pieces: dict[str, list[tuple[int, Entries]]] = {}
        for turn in self.turns(branch):
            for name, packed in turn.channels:
                pieces.setdefault(name, []).append((turn.start, packed.entries()[: len(turn)]))
        return {name: Channel(self.length(branch), tuple(runs)) for name, runs in pieces.items()}

    def message_count(self, branch: int | None = None) -> int:
        return self._last(branch).messages

    def length(self, branch: int | None = None) -> int:
        return self._last(branch).stop

    def shared_prefix(self, prompt_ids: IdsLike) -> SharedPrefix:
        """How much of a prompt is recorded, and where: decides between `extend_to` and `branch`."""
        ids = as_ids(prompt_ids, "prompt_ids", self.vocab_size)
        lengths: list[int] = []  # by branch; parents come before their children
        for writes in self._by_branch:
            parent = _parent(writes)
            length = lengths[parent] if parent >= 0 else 0
            for write in writes:
                if length < write.start:
                    break
                length = write.start + common_prefix(write.tokens.ids, ids[write.start :])
            lengths.append(length)
        longest = max(lengths, default=0)
        extends = (at for at, length in enumerate(lengths) if length == longest == self._last(at).stop)
        return SharedPrefix(lengths.index(longest) if longest else -1, longest, next(extends, -1))

    def writes(self, start: int = 0) -> list[Write]:
        """The writes in order, from number `start` on."""
        return self._writes[as_count(start, "start") :]

    @property
    def metadata(self) -> dict[str, Any]:
        return dict(from_json(self._metadata))

    @property
    def current(self) -> int:
        """The branch last written to; -1 before `begin`."""
        return self._writes[-1].branch if self._writes else -1

    @property
    def branches(self) -> tuple[Branch, ...]:
        branches = []
        for index, writes in enumerate(self._by_branch):
            start, stop, cause = writes[0].start, writes[-1].stop, getattr(writes[0], "cause", "")
            sampled = sum(len(write) for write in writes if isinstance(write, Turn))
            branches.append(Branch(index, _parent(writes), start, stop, sampled, cause))
        return tuple(branches)

    @property
    def num_branches(self) -> int:
        return len(self._by_branch)

    @property
    def num_writes(self) -> int:
        return len(self._writes)

    @property
    def num_tokens(self) -> int:
        """How many tokens are recorded; a shared one counts once."""
        return sum(len(write.tokens) for write in self._writes)

    @property
    def num_sampled(self) -> int:
        """How many tokens were sampled; a shared one counts once."""
        return sum(len(write) for write in self._writes if isinstance(write, Turn))

    @property
    def num_samples(self) -> int:
        """How many branches own sampled tokens: rows that train each once."""
        return len({write.branch for write in self._writes if isinstance(write, Turn) and len(write)})

    def __len__(self) -> int:
        return self._writes[-1].stop if self._writes else 0

    def __repr__(self) -> str:
        label = f"{self.name!r}, " if self.name else ""
        label += f"{self.num_branches} branches, " if self.num_branches > 1 else ""
        counts = f"{self.num_tokens} tokens, {self.num_sampled} sampled, {self.num_writes} writes"
        return f"Trajectory({label}{counts})"

    def _index(self, branch: int | None) -> int:
        if not self._writes:
            raise TrajectoryError("nothing is recorded yet: call begin(prompt_ids) first")
        if branch is None:
            return self.current
        if as_count(branch, "branch") >= len(self._by_branch):
            raise TrajectoryError(f"there is no branch {branch}: the trajectory has {self.num_branches}")
        return int(branch)

    def _last(self, branch: int | None) -> Write:
        return self._by_branch[self._index(branch)][-1]

    def _along(self, index: int, since: int = 0) -> Iterator[Write]:
        """The writes of a stream from `since` on, one cut if the branch starts inside it."""
        lineage: list[tuple[list[Write], int]] = []
        limit = INT32_MAX + 1
        while index >= 0:
            writes = self._by_branch[index]
            lineage.append((writes, limit))
            index, limit = _parent(writes), writes[0].start
        for writes, limit in reversed(lineage):
            for write in writes[bisect_left(writes, since, key=attrgetter("start")) :]:
                if write.start >= limit:
                    break
                yield cut(write, limit)

    def _owner(self, index: int, position: int) -> int:
        """The branch that owns the token before `position` of a stream; -1 for position 0."""
        while position and self._by_branch[index][0].start >= position:
            index = _parent(self._by_branch[index])
        return index if position else -1

    def messages_at(self, index: int, position: int) -> int:
        """How many messages end at `position` of a stream or before."""
        owner = self._owner(index, position)
        if owner < 0:
            return 0
        writes = self._by_branch[owner]  # the first starts before the position, since its branch owns it
        write = writes[bisect_left(writes, position, key=attrgetter("start")) - 1]
        return write.messages if write.stop <= position else write.message


def frozen(table: TokenTable) -> TokenTable:
    for column in table.columns().values():
        column.flags.writeable = False
    return table


def _parent(writes: list[Write]) -> int:
    opening = writes[0]
    return opening.parent if isinstance(opening, Context) and opening.parent is not None else -1


def cut(write: Write, limit: int) -> Write:
    """A write up to a position of its stream."""
    if limit >= write.stop:
        return write
    tokens = write.tokens.slice(0, limit - write.start)
    if isinstance(write, Context):
        return replace(write, stop=limit, tokens=tokens)
    spans = (span for span in write.versions if span.start < len(tokens))
    versions = tuple(span._replace(stop=min(span.stop, len(tokens))) for span in spans)
    return replace(write, stop=limit, tokens=tokens, versions=versions, cut=True)
