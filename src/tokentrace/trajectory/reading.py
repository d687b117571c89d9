"""Record: what a trajectory tells of itself. It is read here, and written in `trajectory.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import TrajectoryError, shown
from ..tokens.kinds import Kind, Kinds
from ..tokens.tokenizer import Ids
from .channels import Channel, Entries
from .inputs import Logprobs, as_count, as_ids, from_json
from .ledger import Ledger
from .log import LogRow
from .tree import Node
from .turns import Branch, IdsLike, MessageSpan, SharedPrefix, Turn, Write


class Record:
    """The reading half of a `Trajectory`. Views handed out are read-only and never change."""

    def __init__(self, name: str, metadata_json: str, ledger: Ledger) -> None:
        self.name: Final = name
        self._metadata = metadata_json
        self._ledger = ledger
        self._tree, self._log = ledger.tree, ledger.log

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

    def channels(self, branch: int | None = None) -> dict[str, Channel]:
        """What engines told of the tokens of a stream beside logprobs, by name; shared prefixes included.

        A channel has an entry for each token of the completions that came with it, and nothing for other tokens.
        """
        index = self._index(branch)
        pieces: dict[str, list[tuple[int, Entries]]] = {}
        for number, row, limit in self._ledger.rows(index):
            for name, packed in self._ledger.channels.get(number, {}).items():
                pieces.setdefault(name, []).append((row.start, packed.entries()[: limit - row.start]))
        length = self._tree.nodes[index].stop
        return {name: Channel(length, tuple(found)) for name, found in pieces.items()}

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
    def reward(self) -> float | None:
        """What the whole rollout was worth, as `set_reward` was told; None where it was not. Turns have their own."""
        return self._ledger.rewards.get(-1)

    @property
    def rewarded(self) -> tuple[tuple[int, float | None], ...]:
        """Every reward that was said, in order: the write of its turn, -1 for the whole rollout, and the reward, or
        None where it was taken back."""
        return tuple(self._ledger.rewarded)

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
            Branch(index, node.parent, node.start, node.stop, node.sampled, node.cause, self._retries(index))
            for index, node in enumerate(self._tree.nodes)
        )

    def _retries(self, index: int) -> bool:
        opened, *more = (self._log.row(number) for number in self._tree.nodes[index].writes[:2])
        return index > 0 and opened.start == opened.stop and all(row.is_turn for row in more)

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
        """The memory of the record's arrays and channels in bytes, slack included; caches are counted apart."""
        told = sum(len(packed.data) for channels in self._ledger.channels.values() for packed in channels.values())
        return self._log.nbytes + told + sum(node.nbytes for node in self._tree.nodes)

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

    # -- what the methods are made of

    def _index(self, branch: int | None) -> int:
        if not self._tree.nodes:
            raise TrajectoryError("nothing is recorded yet: begin(prompt_ids) first")
        if branch is None:
            return self._ledger.current
        if as_count(branch, "branch") >= len(self._tree.nodes):
            raise TrajectoryError(f"there is no branch {branch}: the trajectory has {len(self._tree.nodes)}")
        return int(branch)

    def _recorded(self, turn: Turn) -> tuple[Node, LogRow]:
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
