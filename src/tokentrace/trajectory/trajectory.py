"""Trajectory: the append-only record of one rollout."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ExtensionError, TrajectoryError, brief
from ..files import write_whole
from ..settings import as_float32, choose, instance
from ..showing import ShowsItself
from ..tokens.ids import common_prefix
from ..tokens.kinds import Kind
from ..tokens.table import TokenTable
from ..tokens.tokenizer import Ids
from .channels import pack_channels
from .checks import as_count, as_ids, as_kinds, as_logprobs, as_owners, as_versions, mapping_json
from .record import Record, cut, frozen
from .turns import (
    Context,
    IdsLike,
    KindsLike,
    LogprobKind,
    LogprobsLike,
    SpansLike,
    Turn,
    VersionLike,
    Write,
)

if TYPE_CHECKING:
    from ..rendering.bridged import BridgedTokens


class Trajectory(ShowsItself, Record):
    """Ids, kinds, logprobs and turns of one rollout; a tree where its history was rewritten.

    A write that fails raises `TrajectoryError` and changes nothing. Only `append_completion`
    records tokens as `Kind.SAMPLED`. Methods work on the current branch, the one last written
    to, unless `branch` names another. Views are read-only. Only one thread may write.

    `vocab_size` bounds the ids. With `logprobs=False`, no token has a logprob; otherwise every
    sampled token has one. `metadata` is any dict that JSON can hold.

    >>> trajectory = Trajectory(name="demo")
    >>> trajectory.begin([1, 2, 3], messages=1)
    >>> turn = trajectory.append_completion([7, 8], [-0.5, -0.25], finish_reason="stop", version=12)
    >>> trajectory.append_context([4, 5], [Kind.CONTEXT, Kind.SCAFFOLD], messages=1)
    >>> trajectory.stream().tolist()
    [1, 2, 3, 7, 8, 4, 5]
    >>> trajectory.loss_mask().tolist()
    [False, False, False, True, True, False, False]
    """

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save to a file that only its owner may read, whole or not at all."""
        from .storage import to_bytes

        write_whole(Path(path), [to_bytes(self)], private=True)

    def __reduce__(self) -> tuple[Callable[[bytes], Trajectory], tuple[bytes]]:
        from .storage import restore, to_bytes

        return restore, (to_bytes(self),)

    def begin(
        self,
        prompt_ids: IdsLike,
        *,
        kinds: KindsLike = Kind.PROMPT,
        messages: int = 0,
        message_spans: SpansLike = (),
    ) -> None:
        """Record the first prompt, which holds `messages` messages."""
        if self._writes:
            raise TrajectoryError("the trajectory has begun: use extend_to() or branch()")
        ids = as_ids(prompt_ids, "prompt_ids", self.vocab_size)
        owners = as_owners(message_spans, len(ids), as_count(messages, "messages"))
        self.record_context(0, 0, ids, kinds, owners, messages, parent=-1)

    def append_context(
        self,
        new_ids: IdsLike,
        kinds: KindsLike,
        *,
        message_spans: SpansLike = (),
        messages: int = 0,
        branch: int | None = None,
    ) -> None:
        """Record tokens that were not sampled: tool results, scaffold, a generation prompt.

        They add `messages` messages. `message_spans` are rows ``(start, stop, message)``:
        positions in `new_ids`, and the number of the new message, from 0.
        """
        last, added = self._last(branch), as_count(messages, "messages")
        ids = as_ids(new_ids, "new_ids", self.vocab_size)
        owners = as_owners(message_spans, len(ids), added, first=last.messages)
        self.record_context(self._index(branch), last.stop, ids, kinds, owners, last.messages + added)

    def append_bridge(self, bridge: BridgedTokens, *, branch: int | None = None) -> None:
        """Record the new tokens of a bridge that was made for this stream."""
        stream = self.stream(branch)
        if not hasattr(bridge, "stream_length"):
            raise TrajectoryError(f"append_bridge takes BridgedTokens, not {brief(bridge)}")
        length, end = bridge.stream_length, stream[len(stream) - len(bridge.completion) :]
        if length != len(stream) or not np.array_equal(end, bridge.completion):
            raise TrajectoryError(f"the bridge of {length} ids is for another stream")
        new, count = bridge.new, bridge.new_count
        spans = new.message_spans()
        self.append_context(new.ids, new.kinds, message_spans=spans, messages=count, branch=branch)

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

        - `version`: of the weights: one, or rows ``(version, start, stop)`` that cover all tokens.
        - `logprobs_kind`, `sampling`: the distribution of the logprobs; the request's
          temperature, top-p, top-k.
        - `cached_tokens`: how many ids of the prompt the engine had cached.
        - `channels`: more values per token by name (routed experts): arrays or JSON values.
        - `continues`: it continues the message of the turn before, which was empty or ended
          with ``"abort"`` or ``"length"``, with no new message in between.
        """
        index = self._index(branch)
        last = self._last(index)
        new_ids = as_ids(ids, "ids", self.vocab_size)
        if not isinstance(finish_reason, str) or not finish_reason:
            raise TrajectoryError(f"finish_reason says why the engine stopped, not {brief(finish_reason)}")
        instance("continues", continues, bool, TrajectoryError)
        if not continues and isinstance(last, Turn):
            advice = "append what the engine received next, or pass continues=True for an open message"
            raise TrajectoryError(f"branch {index} ends with a completion: {advice}")
        message = self._continued(index) if continues else last.messages
        values = as_logprobs(logprobs, len(new_ids), recorded=self.has_logprobs)
        kind = choose(LogprobKind, "logprobs_kind", logprobs_kind, TrajectoryError)
        if not self.has_logprobs and kind is not LogprobKind.UNKNOWN:
            raise TrajectoryError(f"logprobs_kind is {kind}, but the trajectory has logprobs=False")
        turn = Turn(
            write=self.num_writes,
            branch=index,
            start=last.stop,
            stop=as_count(last.stop + len(new_ids), "the length of the stream"),
            message=message,
            finish_reason=finish_reason,
            versions=as_versions(version, len(new_ids)),
            sampling_json=None if sampling is None else sys.intern(mapping_json(sampling, "sampling")),
            continues=continues,
            logprobs_kind=kind,
            cached_tokens=None if cached_tokens is None else as_count(cached_tokens, "cached_tokens"),
            channels=tuple(pack_channels({} if channels is None else channels, len(new_ids)).items()),
            tokens=frozen(TokenTable.of(new_ids.copy(), Kind.SAMPLED, message, values)),
        )
        as_count(turn.messages, "the number of messages")
        self._add(turn)
        return turn

    def extend_to(
        self,
        prompt_ids: IdsLike,
        kinds: KindsLike = Kind.CONTEXT,
        *,
        message_spans: SpansLike = (),
        messages: int | None = None,
        branch: int | None = None,
    ) -> int:
        """Record a whole next prompt; returns how many of its ids are new.

        Raises `ExtensionError`, naming the first difference, unless it begins with the stream.
        `kinds`, `message_spans` and `messages`, its count, describe the whole prompt.
        """
        index = self._index(branch)
        last = self._last(index)
        ids, stream = as_ids(prompt_ids, "prompt_ids", self.vocab_size), self.stream(index)
        shared = common_prefix(stream, ids)
        if shared < last.stop:
            reason = f"the prompt ends at {shared}, inside the recorded stream of {last.stop} ids"
            if shared < len(ids):
                recorded = f"{int(stream[shared])} ({Kind(int(self.table(index).kinds[shared])).name})"
                reason = f"the prompt has id {int(ids[shared])} at position {shared}, the stream {recorded}"
            advice = f"it does not extend branch {index}; record rewritten history with branch(prompt_ids)"
            raise ExtensionError(f"{reason}: {advice}", position=shared)
        total = last.messages if messages is None else as_count(messages, "messages")
        owners = as_owners(message_spans, len(ids), total)
        if len(ids) > shared:
            self.record_context(index, shared, ids, kinds, owners, total, skip=shared)
        elif total != last.messages:
            raise TrajectoryError(f"messages is {total}, but the {last.messages} messages have no new ids")
        return len(ids) - shared

    def branch(
        self,
        prompt_ids: IdsLike,
        *,
        kinds: KindsLike = Kind.CONTEXT,
        message_spans: SpansLike = (),
        messages: int | None = None,
        cause: str = "",
    ) -> int:
        """Record a prompt whose history was rewritten; returns its branch, now the current one.

        It shares the longest prefix recorded in the tree. Arguments are as in `extend_to`; by
        default no message is new. Raises `TrajectoryError` for a prompt that begins with a
        branch's whole stream: use `extend_to`. To sample again, branch after a completion.
        """
        self._index(None)
        ids = as_ids(prompt_ids, "prompt_ids", self.vocab_size)
        source, shared, extends = self.shared_prefix(ids)
        if extends >= 0:
            advice = f"record it with extend_to(prompt_ids, branch={extends})"
            raise TrajectoryError(f"the prompt begins with all {shared} ids of branch {extends}: {advice}")
        total = self.messages_at(source, shared) if messages is None else as_count(messages, "messages")
        owners = as_owners(message_spans, len(ids), total)
        parent = self._owner(source, shared)
        self.record_context(
            self.num_branches, shared, ids, kinds, owners, total, parent, cause, skip=shared
        )
        return self.current

    def record_context(
        self,
        branch: int,
        start: int,
        prompt: Ids,
        kinds: KindsLike,
        owners: Ids,
        messages: int,
        parent: int | None = None,
        cause: str = "",
        *,
        skip: int = 0,
    ) -> None:
        """Record ids at `start` of a branch, which then holds `messages` messages.

        With a `parent`, the branch that owns the token before `start` (-1 for none), it opens
        the next branch. The first `skip` ids are recorded already.
        """
        count, opening, ids = self.num_branches, parent is not None, prompt[skip:]
        if parent is None:
            self.check_follows(branch, start)
            if not len(ids):
                raise TrajectoryError("no new ids: there is nothing to record")
        elif branch != count or not (self._owns(parent, start) if start else parent == -1 and len(ids)):
            law = (
                f"the next branch is {count}, its parent owns the tokens at both sides, no prompt is empty"
            )
            place = f"at {start} of branch {parent} with {len(ids)} ids"
            raise TrajectoryError(f"branch {branch} cannot open {place}: {law}")
        instance("cause", cause, str, TrajectoryError)
        before = self._last(branch).messages if parent is None else self.messages_at(parent, start)
        if as_count(messages, "messages") < before:
            what = "the shared prefix" if opening else f"branch {branch}"
            raise TrajectoryError(f"messages is {messages}, but {what} holds {before}: count all of them")
        codes = as_kinds(kinds, len(prompt), opening=opening, skip=skip)[skip:]
        tokens = frozen(TokenTable.of(ids.copy(), codes.copy(), owners[skip:]))
        stop = as_count(start + len(ids), "the length of the stream")
        self._add(Context(branch, start, stop, before, messages, tokens, parent, cause))

    def check_follows(self, branch: int, start: int) -> None:
        """Raise `TrajectoryError` if a branch does not end at `start`."""
        if not 0 <= branch < self.num_branches or start != self.length(branch):
            raise TrajectoryError(f"there is no branch {branch} that ends at {start}")

    def _owns(self, branch: int, position: int) -> bool:
        is_branch = 0 <= branch < self.num_branches
        return is_branch and self._by_branch[branch][0].start < position < self.length(branch)

    def _continued(self, index: int) -> int:
        writes = self._by_branch[index]
        turn = next((write for write in reversed(writes) if isinstance(write, Turn)), None)
        if turn is None or turn.messages != writes[-1].messages:
            raise TrajectoryError("continues=True: no turn to continue, or new messages came after it")
        if turn.finish_reason not in ("abort", "length") and len(turn):
            problem = f"the turn before finished with {turn.finish_reason!r}"
            raise TrajectoryError(f"{problem}: a message continues only after 'abort' or 'length'")
        return turn.message

    def _add(self, write: Write) -> None:
        if write.branch == self.num_branches:
            self._by_branch.append([])
        self._by_branch[write.branch].append(write)
        self._writes.append(write)

    def set_reward(self, reward: float | None, turn: Turn | None = None) -> None:
        """Set the reward of a turn or of the rollout. The last value counts; None removes it."""
        value = as_float32(reward)
        if value is None and reward is not None:
            raise TrajectoryError(
                f"a reward must be a finite number (float32) or None, not {brief(reward)}"
            )
        if turn is None:
            self.reward = value
            return
        is_recorded = isinstance(turn, Turn) and 0 <= turn.write < self.num_writes
        recorded = self._writes[turn.write] if is_recorded else None
        if not isinstance(recorded, Turn) or turn != cut(recorded, turn.stop):
            raise TrajectoryError(f"turn must be a Turn that append_completion returned, not {brief(turn)}")
        writes = self._by_branch[recorded.branch]
        writes[writes.index(recorded)] = self._writes[turn.write] = replace(recorded, reward=value)
