"""Does each prompt of a recorded rollout continue the stream, and if not, why?

A prompt that begins with the stream of an earlier call extends it, unless it also has something
of what was sampled next. The same prompt again asks for another answer. Everything else is a
break, unless the messages show another conversation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import numpy as np

from ..rendering.renderer import Renderer
from ..tokens.ids import common_prefix, runs
from ..tokens.tokenizer import Ids, Tokenizer
from .breaks import Break, conversation_change, explain_break
from .conversation_diff import TASK_OF_A_CALL
from .finding import Cause, Finding
from .records import Call, Floats, Mask, Request, Rollout, Row
from .resync import hunks

_RECENT: Final = 3
"""Recent conversations in which the origin of a request is searched."""
_TRACE: Final = 8
"""Tokens at either end of a completion by which it is searched in a later prompt."""


class Relation(StrEnum):
    """How a call continues the calls before it."""

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
    """A prompt that leaves the stream it shares most with, and what that costs in tokens."""

    where: str
    position: int
    stream_length: int
    explained: Break | None
    """Why, as the tokens show; None without a tokenizer."""
    history: Finding | None
    """What became of the messages, if both requests are known."""
    recorded: str
    """Why the record itself says that the history was rewritten."""
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


@dataclass(slots=True, eq=False)
class CheckedRollout:
    """What one rollout came to. `tokens` counts shared tokens once; `trained` is None without masks."""

    name: str
    steps: list[Relation] = field(default_factory=list)
    breaks: list[RolloutBreak] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    tips: list[Tip] = field(default_factory=list)
    tokens: int = 0
    sampled: int = 0
    prompts: list[int] = field(default_factory=list)
    trained: int | None = None
    proven: bool = True
    """False if nothing but the masks tells what was sampled."""

    def add_trained(self, mask: Mask) -> None:
        self.trained = (self.trained or 0) + int(mask.sum())


def check_rollout(rollout: Rollout, model: Tokenizer | Renderer | None = None) -> CheckedRollout:
    """Check one rollout. `model` is its tokenizer or, better, its renderer; without one, breaks have no cause."""
    return _Checker(rollout, model).result


class _Checker:
    def __init__(self, rollout: Rollout, model: Any) -> None:
        self.rollout, self.model = rollout, model
        tokenizer = model if model is None or isinstance(model, Tokenizer) else model.tokenizer
        self.vocabulary = None if tokenizer is None else tokenizer.vocabulary
        self.result = CheckedRollout(rollout.name)
        self.tips: list[Tip] = self.result.tips
        self.seen: dict[tuple[int, bytes], Call] = {}
        self.prompts: set[bytes] = set()
        derived = any(not row.independent for row in rollout.rows)
        for call in rollout.calls if rollout.ordered or derived else in_order(rollout.calls):
            self.add_call(call, derived)
        for row in rollout.rows:
            self.add_row(row)

    # -- calls

    def add_call(self, call: Call, derived: bool) -> None:
        """Add a call. Rows share beginnings, so calls that were `derived` from rows may come twice."""
        result = self.result
        earlier = self.seen.setdefault((call.start, call.stream.tobytes()), call)
        if earlier is not call and derived:
            return
        if earlier is not call and not self.rollout.ordered and _same_logprobs(earlier, call):
            words = f"the same as {earlier.where}"
            result.findings.append(Finding(Cause.DUPLICATE_CALL, call.where, words=words, tokens=len(call.stream)))
            result.steps.append(Relation.TWICE)
            return
        result.findings += [*call.findings, *self.id_findings(call)]
        step, tip, shared = self.place(call)
        result.steps.append(step)
        sampled = np.zeros(len(call.stream), np.bool_)
        if tip is not None:
            sampled[:shared] = tip.sampled[:shared]
        sampled[call.start :] = True
        result.tokens += len(call.stream) - shared
        result.sampled += len(call.stream) - call.start
        result.prompts.append(call.start)
        if call.mask is not None:
            mask = np.where(np.arange(len(call.mask)) < shared, False, call.mask)  # the rest was counted before
            result.add_trained(mask)
            self.compare_masks(call.where, mask, sampled, shared)
        self.prompts.add(call.prompt.tobytes())
        new = Tip(call.stream, sampled, call.request, [len(call.stream)], [])
        if step is Relation.EXTENDS and tip is not None and shared == len(tip.stream):
            self.tips.remove(tip)
            new.ends, new.logprobs = [*tip.ends, len(call.stream)], [*tip.logprobs]
        if call.logprobs is not None:
            new.logprobs.append((call.start, call.logprobs, call.temperature))
        self.tips.append(new)

    def id_findings(self, call: Call) -> Iterator[Finding]:
        if call.start == len(call.stream):
            yield Finding(Cause.NOTHING_SAMPLED, call.where, words="the completion is empty")
        if self.vocabulary is not None and len(call.stream) and int(call.stream.max()) >= self.vocabulary.size:
            outside = call.stream >= self.vocabulary.size
            words = f"id {int(call.stream[outside][0])}, and the vocabulary has {self.vocabulary.size:,}"
            yield Finding(Cause.NO_TOKEN, call.where, words=words, tokens=int(outside.sum()))

    def place(self, call: Call) -> tuple[Relation, Tip | None, int]:
        """How a call continues the earlier ones, its closest tip, and how much they share."""
        if not self.tips:
            return Relation.FIRST, None, 0
        prompt = call.prompt
        shares = [common_prefix(tip.stream, prompt) for tip in self.tips]
        whole = [at for at, tip in enumerate(self.tips) if shares[at] == len(tip.stream)]
        if whole:
            best = max(whole, key=lambda at: (shares[at], at))
            return Relation.EXTENDS, self.tips[best], shares[best]
        best = max(range(len(shares)), key=lambda at: (shares[at], at))
        tip, shared = self.tips[best], shares[best]
        if prompt.tobytes() in self.prompts:
            return Relation.REPEATS, tip, shared
        ends = [end for one, share in zip(self.tips, shares, strict=True) for end in one.ends if end <= share]
        if ends and not _goes_on(tip, prompt, shared, max(ends)):
            return Relation.EXTENDS, tip, shared
        history = self.history(tip.request, call.request)
        if history is not None and _is_other_conversation(history):
            return Relation.OTHER, tip, shared
        if history is not None and history.cause is Cause.RETRY:
            return Relation.REPEATS, tip, shared
        self.result.breaks.append(self.explain(call, tip, shared, history))
        return Relation.BREAKS, tip, shared

    def explain(self, call: Call, tip: Tip, shared: int, history: Finding | None) -> RolloutBreak:
        prompt = call.prompt
        requests = {} if tip.request is None or call.request is None else _requests(tip.request, call.request)
        explained = None
        if self.model is not None:
            explained = explain_break(tip.stream, prompt, self.model, sampled=tip.sampled, **requests)
        ranges = [] if explained is None else [explained.stream_range]
        after = (shared, shared) if explained is None else (explained.stream_range[1], explained.prompt_range[1])
        ranges += [(hunk.start, hunk.stop) for hunk in hunks(tip.stream, prompt, *after)]
        lost = sum(int(tip.sampled[start:stop].sum()) for start, stop in ranges)
        where = f"{call.where}, call {len(self.result.steps) + 1} of {self.rollout.name}"
        reprefilled = min(len(tip.stream), len(prompt)) - shared
        size = len(tip.stream)
        return RolloutBreak(where, shared, size, explained, history, call.recorded, reprefilled, lost)

    def history(self, before: Request | None, after: Request | None) -> Finding | None:
        """What became of the messages between two requests; None if unknown, or nothing did."""
        if before is None or after is None or before.reply is None:
            return None
        requests = (tip.request for tip in itertools.islice(reversed(self.tips), _RECENT))
        recent = [[*one.messages, one.reply] for one in requests if one is not None and one.reply and one is not before]
        return conversation_change(**_requests(before, after), recent=recent)

    # -- masks

    def add_row(self, row: Row) -> None:
        """Compare a row's mask with what was sampled, as its calls or the row itself say."""
        self.result.findings += row.findings
        self.result.add_trained(row.mask)
        if row.independent:
            sampled = np.zeros(len(row.ids), np.bool_)
            for call in self.rollout.calls:
                if common_prefix(call.stream, row.ids) == len(call.stream):
                    sampled[call.start : len(call.stream)] = True
            self.compare_masks(row.where, row.mask, sampled, 0)
        elif row.sampled is not None:  # what another row of the rollout trains is sampled here, and not trained
            self.compare_masks(row.where, row.mask, row.mask & row.sampled, 0)
        else:
            self.result.proven = False

    def compare_masks(self, where: str, mask: Mask, sampled: Mask, first: int) -> None:
        """Report tokens from `first` on that are trained and not sampled, and the other way round."""
        for cause, wrong in (
            (Cause.TRAINED_UNSAMPLED, mask & ~sampled),
            (Cause.SAMPLED_UNTRAINED, sampled & ~mask),
        ):
            wrong[:first] = False
            if wrong.any():
                at = int(wrong.argmax())
                words = f"the first is token {at:,}"
                self.result.findings.append(Finding(cause, where, words=words, position=at, tokens=int(wrong.sum())))


def in_order(calls: Sequence[Call]) -> list[Call]:
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


def _requests(before: Request, after: Request) -> dict[str, Any]:
    messages = [*before.messages, *([before.reply] if before.reply is not None else [])]
    return {
        "before": {"messages": messages, "tools": before.tools},
        "after": {"messages": list(after.messages), "tools": after.tools},
    }


def _is_other_conversation(history: Finding) -> bool:
    """True for a sub-agent; with the same instructions only if a call gave it its task."""
    return history.cause is Cause.SUB_AGENT and (not history.message or TASK_OF_A_CALL in history.words)


def _goes_on(tip: Tip, prompt: Ids, shared: int, end: int) -> bool:
    """True if a prompt has something of what was sampled after its first `end` tokens."""
    if shared == len(prompt):
        return False
    if tip.sampled[end : shared + 1].any():
        return True
    start, stop = next(iter(runs(tip.sampled[shared:])), (0, 0))
    answer = tip.stream[shared + start : shared + stop]
    return any(_contains(prompt[shared:], part) for part in (answer[:_TRACE], answer[-_TRACE:]))


def _contains(ids: Ids, part: Ids) -> bool:
    places = len(ids) - len(part) + 1
    if places < 1 or not len(part):
        return False
    return bool(np.logical_and.reduce([ids[at : at + places] == one for at, one in enumerate(part)]).any())


def _same_logprobs(one: Call, other: Call) -> bool:
    if one.logprobs is None or other.logprobs is None:
        return one.logprobs is other.logprobs
    return np.array_equal(one.logprobs, other.logprobs, equal_nan=True)
