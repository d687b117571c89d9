"""Going on with a rollout that a trajectory has recorded: whether that can be done, how far it is, and what was said.

Nothing is rendered again for the engine: the stream stays as it is, and the next tokens come after it. Messages are
read back from the recorded ids, for rewards, simulated users and people.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..engines.protocol import Completion, FinishReason, SamplingParams
from ..engines.stopping import StopFinder
from ..errors import ContinuationError
from ..parsing.response import ParsedResponse
from ..rendering.renderer import Renderer
from ..study.seams import BridgeRefusal
from ..tokens.ids import common_prefix
from ..tokens.kinds import Kind
from ..tokens.tokenizer import Ids
from ..trajectory.trajectory import Trajectory
from ..trajectory.turns import Context, Turn
from .record import Rollout, TurnMetrics, call_id, result_message


class Begun(NamedTuple):
    """The turn that a recorded stream ends with, which nothing answers yet."""

    start: int
    finish_reason: str

    @property
    def aborted(self) -> bool:
        """The engine was told to end it: it can be sampled on."""
        return self.finish_reason == "abort"


def check_goes_on(sampling: SamplingParams) -> None:
    """`ContinuationError` for settings with which a turn cannot be sampled in parts.

    An engine counts from the first token of a request: it would forget what the earlier parts have used up of these.
    A repetition penalty counts the prompt too, where they are.
    """
    asked = {**sampling.penalties, **({} if sampling.structure is None else {"structure": True})}
    counted = [name for name in ("presence_penalty", "frequency_penalty", "structure") if name in asked]
    if counted:
        raise ContinuationError(
            f"a turn that was aborted cannot be sampled on with {' and '.join(counted)}: the engine would take the "
            "rest of the turn for the whole of it. Leave that out, or sample the rollout anew"
        )


def cut_at_stop(rest: Completion, before: Ids, texts: Sequence[str], renderer: Renderer) -> Completion:
    """The rest of a turn, up to the id that completes a stop text: the engine has not seen what `before` has of it."""
    token_bytes = renderer.tokenizer.vocabulary.token_bytes
    finder = StopFinder(texts, token_bytes)
    for one in before.tolist():
        if finder.feed(one) is not None:  # it did not end the turn then, and does not now
            finder = StopFinder(texts, token_bytes)
    for stop, one in enumerate(rest.ids.tolist(), 1):
        text = finder.feed(one)
        if text is not None:
            spans = (span._replace(stop=min(span.stop, stop)) for span in rest.versions if span.start < stop)
            return replace(
                rest,
                ids=rest.ids[:stop],
                logprobs=rest.logprobs[:stop],
                finish_reason=FinishReason.STOP,
                versions=tuple(spans),
                channels={name: entries[:stop] for name, entries in rest.channels.items()},
                stopped_by=text,
            )
    return rest


def check_takes(trajectory: Trajectory, renderer: Renderer, task: str) -> None:
    """`ContinuationError` where a trajectory, empty or not, cannot take what the loop writes of a task of that name."""
    if trajectory.name != task:
        raise ContinuationError(f"the trajectory is called {trajectory.name!r}, and its task {task!r}")
    who = f"trajectory {trajectory.name!r}"
    if trajectory.num_branches > 1:
        raise ContinuationError(f"{who} has {trajectory.num_branches} branches, and the loop goes on with one stream")
    if not trajectory.has_logprobs:
        raise ContinuationError(f"{who} was made without logprobs, and the loop records them")
    size = renderer.tokenizer.vocabulary.size
    if trajectory.vocab_size not in (None, size):
        raise ContinuationError(
            f"{who} was recorded with a vocabulary of {trajectory.vocab_size} ids, and this tokenizer has {size}"
        )


def check_continues(trajectory: Trajectory, prompt: Ids) -> None:
    """`ContinuationError` where the loop cannot go on with a trajectory; `prompt` is what its task renders to."""
    who = f"trajectory {trajectory.name!r}"
    first = trajectory.writes()[0].tokens.ids
    at = common_prefix(first, prompt)
    if not at == len(first) == len(prompt):
        raise ContinuationError(
            f"{who} begins with another prompt than its task renders to, from token {at} on: the messages, the tools, "
            "the template or the tokenizer are not those that it was recorded with"
        )
    turns = trajectory.turns()
    if turns and turns[-1].stop == len(trajectory) and turns[-1].finish_reason == "length":
        raise ContinuationError(f"{who} ends with a turn that ran out of tokens: its rollout is over")


def take_up(rollout: Rollout, renderer: Renderer, sampling: SamplingParams) -> Begun | None:
    """Fill a rollout with what its trajectory has recorded: messages, and the metrics of its turns.

    Returns the turn that the stream ends with, where there is one. A message that was put after a turn is read back
    from its ids; where it does not render to the same ids again, a note says so. Rewards that are found anew, that of
    the whole rollout and that of the turn which is answered next, are taken back.
    """
    reader = _RecordedStream(rollout, renderer)
    for write in rollout.trajectory.writes():
        if isinstance(write, Turn):
            reader.said(write)
        elif write.start:
            if write.messages == write.message:
                raise ContinuationError(
                    f"trajectory {rollout.trajectory.name!r} has tokens of no message at {write.start}, after a turn: "
                    "the loop did not put them there"
                )
            reader.answered(write, write.messages - write.message)
    begun = reader.begun
    if begun is not None and begun.aborted and begun.start < len(rollout.trajectory):
        check_goes_on(sampling)
    rollout.use.calls = sum(turn.tool_calls for turn in rollout.per_turn)
    rollout.use.reward = sum(turn.reward for turn in rollout.per_turn)
    rollout.use.is_rewarded = any(turn.reward for turn in rollout.per_turn)
    last = None if reader.begun is None else rollout.trajectory.turns()[-1]
    if last is not None and last.reward is not None:
        rollout.trajectory.set_reward(None, last)
    if rollout.trajectory.reward is not None:
        rollout.trajectory.set_reward(None)
    return begun


class _RecordedStream:
    """Reads a recorded stream from its first turn on."""

    def __init__(self, rollout: Rollout, renderer: Renderer) -> None:
        self._rollout = rollout
        self._renderer = renderer
        self._stream = rollout.trajectory.stream()
        self.begun: Begun | None = None
        self._reward: float | None = None

    def said(self, turn: Turn) -> None:
        """A completion: a turn, or more of one."""
        start = self.begun.start if turn.continues and self.begun is not None else turn.start
        self.begun = Begun(start, turn.finish_reason)
        self._reward = turn.reward
        self._rollout.per_turn.append(
            TurnMetrics(
                prompt_tokens=turn.start,
                sampled=len(turn),
                finish_reason=turn.finish_reason,
                cached_tokens=turn.cached_tokens,
                continues=turn.continues,
            )
        )

    def answered(self, write: Context, count: int) -> None:
        """What was put after a turn: `count` messages."""
        if self.begun is None:
            raise ContinuationError(f"trajectory {self._rollout.trajectory.name!r} has messages after no turn")
        rollout, start = self._rollout, self.begun.start
        prompt, completion = self._stream[:start], self._stream[start : write.start]
        parsed = self._renderer.parse_response(completion, tools=rollout.schemas, prompt_ids=prompt)
        turn = rollout.per_turn[-1]
        turn.malformed = any(not call.ok for call in (*parsed.tool_calls, *parsed.attempts))
        turn.reward = self._reward or 0.0
        turn.tool_calls = len(parsed.tool_calls) if rollout.tools else 0
        texts = self._texts(write, count)
        new = self._messages(parsed, texts)
        before = list(rollout.messages)
        rollout.messages.append(parsed.to_message(call_id=functools.partial(call_id, rollout.turns)))
        if not self._is_same(prompt, completion, new, before, write):
            numbers = f"{len(rollout.messages)} to {len(rollout.messages) + count - 1}"
            rollout.notes.append(
                f"messages {numbers} were read back from their ids and do not render to the same ids: what rewards and "
                "simulated users see of them may differ from what was said"
            )
        rollout.messages += new
        self.begun = None

    def _texts(self, write: Context, count: int) -> list[str]:
        """The text of each message that was put after a turn."""
        tokens = write.tokens
        owners = np.where(tokens.kinds == Kind.CONTEXT, tokens.messages, -1)
        return [self._renderer.tokenizer.decode(tokens.ids[owners == write.message + at]) for at in range(count)]

    def _messages(self, parsed: ParsedResponse, texts: Sequence[str]) -> list[dict[str, Any]]:
        rollout = self._rollout
        if not parsed.tool_calls or not rollout.tools:
            return [{"role": "user", "content": text} for text in texts]
        if len(texts) != len(parsed.tool_calls):
            raise ContinuationError(
                f"trajectory {rollout.trajectory.name!r}: turn {rollout.turns} has {len(parsed.tool_calls)} calls and "
                f"{len(texts)} results"
            )
        answered = zip(parsed.tool_calls, texts, strict=True)
        return [result_message(call, rollout.turns, text) for call, text in answered]

    def _is_same(
        self,
        prompt: Ids,
        completion: Ids,
        new: list[dict[str, Any]],
        before: list[Mapping[str, Any]],
        write: Context,
    ) -> bool:
        """Whether messages that were read back bridge to the ids that were recorded."""
        bridged = self._renderer.bridge(prompt, completion, new, tools=self._rollout.schemas)
        if isinstance(bridged, BridgeRefusal):
            bridged = self._renderer.bridge(prompt, completion, new, tools=self._rollout.schemas, messages=before)
        return not isinstance(bridged, BridgeRefusal) and np.array_equal(
            bridged.new_ids, self._stream[write.start : write.stop]
        )
