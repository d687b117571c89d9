"""Does each prompt of a recorded rollout continue the stream, and if not, why?

A prompt that begins with the stream of an earlier call extends it, unless it also has something
of what was sampled next. The same prompt again asks for another answer. Everything else is a
break, unless the messages show another conversation.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ..rendering.renderer import Renderer
from ..tokens.ids import common_prefix, runs
from ..tokens.tokenizer import Ids, Tokenizer
from .breaks import Break, conversation_change, explain_break
from .conversation_diff import TASK_OF_A_CALL
from .finding import Cause, Finding
from .records import Call, Floats, Mask, Request, Rollout, Row
from .token_text import hunks

_RECENT: Final = 3
"""Recent conversations in which the origin of a request is searched."""
_TRACE: Final = 8
"""Tokens at either end of a completion by which it is searched in a later prompt."""


class Relation(StrEnum):
    FIRST = "first"
    EXTENDS = "extends"
    REPEATS = "repeats"
    """The prompt of an earlier call again, or one that goes back to an earlier point."""
    TWICE = "recorded twice"
    OTHER = "another conversation"
    """As the messages show: a sub-agent, a title."""
    BREAKS = "breaks"


@dataclass(frozen=True, slots=True, eq=False)
class RolloutBreak:
    """A prompt that leaves the stream, and what that costs in tokens.

    `explained` is why, as the tokens show; None without a tokenizer. `history` is what became of
    the messages, if both requests are known; `recorded` is what the record itself says.
    """

    where: str
    position: int
    stream_length: int
    explained: Break | None
    history: Finding | None
    recorded: str
    reprefilled: int
    """Prompt tokens after the break that a cache had held."""
    lost: int
    """Sampled tokens that the prompt lacks."""

    @property
    def cause(self) -> Cause:
        return Cause.UNKNOWN if self.explained is None else self.explained.cause


@dataclass(slots=True, eq=False)
class Tip:
    """A stream that nothing continues yet: one training row."""

    stream: Ids
    sampled: Mask
    request: Request | None
    ends: list[int]
    """Where the streams end that it extends, and its own end."""
    logprobs: list[tuple[int, Floats, float | None]]
    """Where completions begin, their logprobs, and the temperature."""


@dataclass(slots=True)
class CheckedRollout:
    """What one rollout came to. `counts` are summed over rollouts.

    In them `tokens` counts shared ones once, `prompted` those of all prompts. Masks train `trained`
    tokens; the rollout is `masked`, and `unproven` if nothing else tells what was sampled.
    """

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    steps: list[Relation] = field(default_factory=list)
    breaks: list[RolloutBreak] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    tips: list[Tip] = field(default_factory=list)

    def report(self, cause: Cause, where: str, words: str, tokens: int = 0, position: int | None = None) -> None:
        self.findings.append(Finding(cause, where, words=words, position=position, tokens=tokens))


def check_rollout(rollout: Rollout, model: Tokenizer | Renderer | None = None) -> CheckedRollout:
    """Check one rollout. Without a `model`, breaks have no cause."""
    checker = _Checker(rollout, model)
    in_order = rollout.ordered or rollout.derived
    for call in rollout.calls if in_order else sorted_calls(rollout.calls):
        checker.add_call(call)
    for row in rollout.rows:
        checker.add_row(row)
    return checker.result


class _Checker:
    def __init__(self, rollout: Rollout, model: Any) -> None:
        self.rollout, self.model = rollout, model
        tokenizer = model if model is None or isinstance(model, Tokenizer) else model.tokenizer
        self.size = 1 << 31 if tokenizer is None else tokenizer.vocabulary.size
        self.result = CheckedRollout(rollout.name)
        self.tips = self.result.tips
        self.seen: dict[tuple[int, bytes], Call] = {}
        self.prompts: set[bytes] = set()

    def train(self, where: str, mask: Mask, sampled: Mask | None) -> None:
        """Count what a mask trains. Report what is trained or sampled, not both."""
        self.result.counts |= Counter(masked=1, unproven=int(sampled is None))
        self.result.counts["trained"] += int(mask.sum())
        sampled = mask if sampled is None else sampled
        for cause, wrong in ((Cause.TRAINED_UNSAMPLED, mask & ~sampled), (Cause.SAMPLED_UNTRAINED, sampled & ~mask)):
            if wrong.any():
                at = int(wrong.argmax())
                self.result.report(cause, where, f"the first is token {at:,}", int(wrong.sum()), at)

    def add_call(self, call: Call) -> None:
        """Add a call. Calls derived from rows may come twice: rows share beginnings."""
        result, stream = self.result, call.stream
        earlier = self.seen.setdefault((call.start, stream.tobytes()), call)
        if earlier is not call and self.rollout.derived:
            return
        if earlier is not call and not self.rollout.ordered and _same_logprobs(earlier, call):
            result.report(Cause.DUPLICATE_CALL, call.where, f"the same as {earlier.where}", len(stream))
            result.steps.append(Relation.TWICE)
            return
        result.findings += call.findings
        if call.start == len(stream):
            result.report(Cause.NOTHING_SAMPLED, call.where, "the completion is empty")
        if len(outside := stream[stream >= self.size]):
            words = f"id {int(outside[0])}, and the vocabulary has {self.size:,}"
            result.report(Cause.NO_TOKEN, call.where, words, len(outside))
        step, tip, shared = self.place(call)
        result.steps.append(step)
        sampled = np.arange(len(stream)) >= call.start
        if tip is not None:
            sampled[:shared] = tip.sampled[:shared]
        result.counts.update(tokens=len(stream) - shared, sampled=len(stream) - call.start, prompted=call.start)
        if call.mask is not None:
            new_tokens = np.arange(len(stream)) >= shared  # earlier ones were counted before
            self.train(call.where, call.mask & new_tokens, sampled & new_tokens)
        self.prompts.add(call.prompt.tobytes())
        new = Tip(stream, sampled, call.request, [len(stream)], [])
        if step is Relation.EXTENDS and tip is not None and shared == len(tip.stream):
            self.tips.remove(tip)
            new.ends, new.logprobs = [*tip.ends, len(stream)], [*tip.logprobs]
        if call.logprobs is not None:
            new.logprobs.append((call.start, call.logprobs, call.temperature))
        self.tips.append(new)

    def add_row(self, row: Row) -> None:
        """Compare a row's mask with what was sampled, as its calls or the row itself say."""
        self.result.findings += row.findings
        sampled = None
        if not self.rollout.derived:
            sampled = np.zeros(len(row.ids), np.bool_)
            for call in self.rollout.calls:
                if common_prefix(call.stream, row.ids) == len(call.stream):
                    sampled[call.start : len(call.stream)] = True
        elif row.sampled is not None:  # what another row of the rollout trains is sampled here, and not trained
            sampled = row.mask & row.sampled
        self.train(row.where, row.mask, sampled)

    def place(self, call: Call) -> tuple[Relation, Tip | None, int]:
        """How a call continues the earlier ones, its closest tip, and how much they share."""
        if not self.tips:
            return Relation.FIRST, None, 0
        prompt = call.prompt
        shares = [common_prefix(tip.stream, prompt) for tip in self.tips]
        pairs = list(zip(self.tips, shares, strict=True))
        # the last stream that it begins with, else the one that it shares most with
        tip, shared = max(reversed(pairs), key=lambda pair: (pair[1] == len(pair[0].stream), pair[1]))
        if shared == len(tip.stream):
            return Relation.EXTENDS, tip, shared
        if prompt.tobytes() in self.prompts:
            return Relation.REPEATS, tip, shared
        ends = [end for one, share in pairs for end in one.ends if end <= share]
        if ends and not _goes_on(tip, prompt, shared, max(ends)):
            return Relation.EXTENDS, tip, shared
        requests, history = _requests(tip.request, call.request), None
        if requests and tip.request is not None and tip.request.reply is not None:
            recent = (one.request for one in itertools.islice(reversed(self.tips), _RECENT))
            histories = [[*one.messages, one.reply] for one in recent if one and one.reply and one is not tip.request]
            history = conversation_change(**requests, recent=histories)
        if history is not None and history.cause is Cause.RETRY:
            return Relation.REPEATS, tip, shared
        if history is not None and history.cause is Cause.SUB_AGENT:
            task = TASK_OF_A_CALL in history.words  # which it needs under the same instructions
            if task or not history.message:
                return Relation.OTHER, tip, shared
        self.explain(call, tip, shared, requests, history)
        return Relation.BREAKS, tip, shared

    def explain(self, call: Call, tip: Tip, shared: int, requests: dict[str, Any], history: Finding | None) -> None:
        explained, stream = None, tip.stream
        ranges, after = [], (shared, shared)
        if self.model is not None:
            explained = explain_break(stream, call.prompt, self.model, sampled=tip.sampled, **requests)
        if explained is not None:
            ranges, after = [explained.stream_range], (explained.stream_range[1], explained.prompt_range[1])
        ranges += [(hunk.start, hunk.stop) for hunk in hunks(stream, call.prompt, *after)]
        lost = sum(int(tip.sampled[start:stop].sum()) for start, stop in ranges)
        where = f"{call.where}, call {len(self.result.steps) + 1} of {self.rollout.name}"
        again = min(len(stream), call.start) - shared
        broken = RolloutBreak(where, shared, len(stream), explained, history, call.recorded, again, lost)
        self.result.breaks.append(broken)


def sorted_calls(calls: Sequence[Call]) -> list[Call]:
    """Calls in a possible order: those that a prompt begins with come before it."""
    placed: dict[int, Call] = {}
    for call in calls:
        before = [
            one
            for one in calls
            if one.start < call.start
            and id(one) not in placed
            and any(common_prefix(ids, call.prompt) == len(ids) for ids in (one.stream, one.prompt))
        ]
        placed |= {id(one): one for one in (*sorted(before, key=lambda one: one.start), call)}
    return list(placed.values())


def _requests(before: Request | None, after: Request | None) -> dict[str, Any]:
    """The arguments of `explain_break` for two requests; empty if one is unknown."""
    if before is None or after is None:
        return {}
    messages = [*before.messages, *([before.reply] if before.reply is not None else [])]
    return {
        "before": {"messages": messages, "tools": before.tools},
        "after": {"messages": list(after.messages), "tools": after.tools},
    }


def _goes_on(tip: Tip, prompt: Ids, shared: int, end: int) -> bool:
    """True if a prompt has something of what was sampled after its first `end` tokens."""
    if shared == len(prompt):
        return False
    if tip.sampled[end : shared + 1].any():
        return True
    start, stop = next(iter(runs(tip.sampled[shared:])), (0, 0))
    answer = tip.stream[shared + start : shared + stop]
    size = min(_TRACE, len(answer))
    places = sliding_window_view(prompt[shared:], size) if 0 < size <= len(prompt) - shared else answer[:0]
    return any((places == trace).all(-1).any() for trace in (answer[:size], answer[-size:]) if len(places))


def _same_logprobs(one: Call, other: Call) -> bool:
    if one.logprobs is None or other.logprobs is None:
        return one.logprobs is other.logprobs
    return np.array_equal(one.logprobs, other.logprobs, equal_nan=True)
