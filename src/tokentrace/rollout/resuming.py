"""Continuing a recorded rollout: the stream stays as it is, and the next tokens follow it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ..engines.answers import StopFinder
from ..engines.protocol import Completion, FinishReason, SamplingParams
from ..errors import ContinuationError
from ..rendering.renderer import Renderer
from ..tokens.ids import common_prefix
from ..tokens.tokenizer import Ids
from .record import Rollout


class OpenTurn(NamedTuple):
    """The turn that a recorded stream ends with, which nothing answers yet."""

    start: int
    aborted: bool
    """True if the engine aborted it: it can be sampled on."""


def check_resumable(sampling: SamplingParams) -> None:
    """Raise ContinuationError for settings that an engine counts from the first token of a request."""
    used = {**sampling.penalties, **({} if sampling.structure is None else {"structure": True})}
    counted = [name for name in ("presence_penalty", "frequency_penalty", "structure") if name in used]
    if counted:
        raise ContinuationError(
            f"an aborted turn cannot be sampled on with {' and '.join(counted)}: the engine would forget its first "
            "part. Leave that out, or sample the rollout anew"
        )


def cut_at_stop(part: Completion, before: Ids, texts: Sequence[str], renderer: Renderer) -> Completion:
    """Cut a later part of a turn at a stop text, which may begin in the part `before` it."""
    finder = StopFinder(texts, renderer.tokenizer.vocabulary.token_bytes)
    for one in before.tolist():
        finder.feed(one)
    for end, one in enumerate(part.ids.tolist(), 1):
        text = finder.feed(one)
        if text is not None:
            spans = (span._replace(stop=min(span.stop, end)) for span in part.versions if span.start < end)
            return replace(
                part,
                ids=part.ids[:end],
                logprobs=part.logprobs[:end],
                finish_reason=FinishReason.STOP,
                versions=tuple(spans),
                channels={name: entries[:end] for name, entries in part.channels.items()},
                stopped_by=text,
            )
    return part


def resume(rollout: Rollout, renderer: Renderer, sampling: SamplingParams) -> OpenTurn | None:
    """Prepare a recorded rollout to be continued; return the turn that its stream ends with.

    Raises ContinuationError if it cannot be continued.
    """
    trajectory, problem = rollout.trajectory, ""
    prompt = renderer.render(rollout.task.messages, tools=rollout.schemas, add_generation_prompt=True).ids
    first, size, parts = trajectory.writes()[0].tokens.ids, renderer.tokenizer.vocabulary.size, trajectory.turns()
    is_open = bool(parts) and parts[-1].stop == len(trajectory)
    at = common_prefix(first, prompt)
    if trajectory.name != rollout.task.name:
        problem = f"its task is called {rollout.task.name!r}"
    elif trajectory.num_branches > 1:
        problem = f"it has {trajectory.num_branches} branches, and the loop continues one stream"
    elif not trajectory.has_logprobs:
        problem = "it has no logprobs"
    elif trajectory.vocab_size not in (None, size):
        problem = f"it was recorded with a vocabulary of {trajectory.vocab_size} ids, and this tokenizer has {size}"
    elif not at == len(first) == len(prompt):
        problem = (
            f"it begins with another prompt than its task renders to, from token {at} on: the messages, the tools, the "
            "template or the tokenizer have changed"
        )
    elif is_open and parts[-1].finish_reason == "length":
        problem = "it ends with a turn that ran out of tokens: its rollout is over"
    if problem:
        raise ContinuationError(f"trajectory {trajectory.name!r} cannot be continued: {problem}")
    rollout.end, rollout.reward, open_turn = None, None, None
    if is_open and not rollout.pending:
        start = next(part for part in reversed(parts) if not part.continues).start
        open_turn = OpenTurn(start, parts[-1].finish_reason == "abort")
        if open_turn.aborted and len(trajectory) > start:
            check_resumable(sampling)
        if rollout.messages[-1].get("role") == "assistant":
            rollout.messages.pop()
        if parts[-1].reward is not None:
            trajectory.set_reward(None, parts[-1])
        last = rollout.per_turn[-1]
        last.reward, last.tool_calls, last.malformed = None, 0, False
    if trajectory.reward is not None:
        trajectory.set_reward(None)
    return open_turn
