"""One rollout looked at: which call goes on from which, where a prompt breaks off and why, and what that costs.

A prompt that begins with the stream of an earlier call, id for id, extends it, unless it has something of what a later
call sampled after that stream: then it should have begun with the stream of that call. One that is the prompt of an
earlier call asks for another answer. Everything else is a break, unless the messages show another conversation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import numpy as np

from ..diagnose.breaks import Break, explain_break
from ..diagnose.conversation_diff import TASK_OF_A_CALL, changed_tools, find_cause
from ..diagnose.finding import Cause, Finding
from ..diagnose.message_keys import chain, meaning
from ..diagnose.resync import hunks
from ..diagnose.texts import spell
from ..tokens.ids import common_prefix, runs
from ..tokens.tokenizer import Ids, Tokenizer
from .dumps.calls import Call, DumpedRequest, DumpedRollout, DumpedRow, DumpFault, Floats, FoundFault, Mask
from .shown_turns import ShownTurns
from .streams import Streams, digest, in_order

_OTHERS: Final = 3
"""Among so many of the last conversations the one is looked for that a request was made of."""
_TRACE: Final = 8
"""Sampled tokens in a row, the first or the last of a completion, by which it is looked for in a later prompt."""


class Relation(StrEnum):
    """How a call stands to those before it."""

    FIRST = "first"
    EXTENDS = "extends"
    REPEATS = "repeats"
    """The prompt of an earlier call again, or one that goes back to an earlier point."""
    TWICE = "there twice"
    """The same call again, in a file whose lines may be there twice: nothing is made of it."""
    OTHER = "another conversation"
    """As the messages show: a sub-agent, a title."""
    BREAKS = "breaks"


@dataclass(frozen=True, slots=True, eq=False)
class FoundBreak:
    """A prompt that does not go on with the stream that it has most in common with."""

    rollout: str
    where: str
    call: int
    """Which call of the rollout, counted from 1."""
    position: int
    """The first id that differs."""
    stream: Ids
    prompt: Ids
    sampled: Mask
    """Which tokens of the stream were sampled."""
    explained: Break | None
    """Why, as the tokens show; None where no tokenizer was given."""
    history: Finding | None
    """What became of the messages, where both requests are known."""
    recorded: str
    """Why the record itself says that the history was rewritten."""
    reprefilled: int
    """Tokens of the prompt after the break that a cache had held."""
    lost: int
    """Sampled tokens of the stream that the prompt does not have."""
    respelled: int
    """Tokens of the prompt in their place that spell the same text."""
    rewritten: int
    """Tokens of the prompt in their place that spell another."""

    @property
    def cause(self) -> Cause:
        return Cause.UNKNOWN if self.explained is None else self.explained.cause

    def to_json(self) -> dict[str, Any]:
        names = ("rollout", "where", "call", "position", "reprefilled", "lost", "respelled", "rewritten")
        out: dict[str, Any] = {name: getattr(self, name) for name in names}
        out |= {"stream_length": len(self.stream), "prompt_length": len(self.prompt)}
        out["cause"] = str(self.cause) if self.explained is not None else None
        if self.explained is not None:
            out["explained"] = self.explained.to_json()
        if self.history is not None:
            out["history"] = {"cause": self.history.cause.value, "detail": self.history.words}
        return out | ({"recorded": self.recorded} if self.recorded else {})


@dataclass(slots=True, eq=False)
class Tip:
    """The end of a stream: what the next prompt should begin with."""

    stream: Ids
    sampled: Mask
    request: DumpedRequest | None
    logprobs: list[tuple[int, Floats, float | None]] = field(default_factory=list)
    """Where completions of its own begin, their logprobs, and the temperature that they were sampled with."""


@dataclass(frozen=True, slots=True, eq=False)
class InspectedRollout:
    """What was found in one rollout."""

    name: str
    where: str
    steps: Sequence[Relation]
    breaks: Sequence[FoundBreak]
    findings: Sequence[FoundFault]
    tips: Sequence[Tip]
    """The streams that nothing goes on from: each makes a training row."""
    tokens: int
    """Tokens of all streams; one that streams share counts once."""
    sampled: int
    prompts: Sequence[int]
    """The length of each call's prompt."""
    trained: int | None
    """Tokens that masks train; None where nobody says."""
    witnessed: bool = True
    """Whether something beside the masks tells what was sampled: calls, kinds, or the turns that the ids show."""

    @property
    def samples(self) -> int:
        return len(self.tips)

    @property
    def row_tokens(self) -> int:
        """Tokens of the rows that train each sampled token once."""
        return sum(len(tip.stream) for tip in self.tips)


def inspect_rollout(rollout: DumpedRollout, known: Any = None, shown: ShownTurns | None = None) -> InspectedRollout:
    """Look at one rollout. `known` is its tokenizer or, better, its renderer: without one, breaks have no cause.

    `shown` reads the turns of rows that do not say what was sampled: without it, nothing is known of these.
    """
    return _Inspector(rollout, known, shown).result()


class _Inspector:
    """The streams of a rollout so far."""

    def __init__(self, rollout: DumpedRollout, known: Any, shown: ShownTurns | None) -> None:
        self._rollout, self._known, self._shown = rollout, known, shown
        tokenizer = known if known is None or isinstance(known, Tokenizer) else known.tokenizer
        self._vocabulary = None if tokenizer is None else tokenizer.vocabulary
        self._tips: dict[Tip, None] = {}
        """The streams that nothing goes on from. A stream that something does is the beginning of one of these."""
        self._streams: Streams[Tip] = Streams(np.zeros(0, np.int32))
        self._prompts: set[bytes] = set()
        self._calls: dict[tuple[int, bytes], Call] = {}
        self._breaks: list[FoundBreak] = []
        self._findings: list[FoundFault] = []
        self._tokens = self._trained = 0
        self._masked = False
        self._witnessed = True

    def result(self) -> InspectedRollout:
        calls = self._each_once()
        steps = [self._take(number, call) for number, call in enumerate(calls, 1)]
        own = [call for call, step in zip(calls, steps, strict=True) if step is not Relation.TWICE]
        for row in self._rollout.rows:
            self._check_row(row)
        return InspectedRollout(
            self._rollout.name,
            self._rollout.where,
            steps,
            self._breaks,
            self._findings,
            list(self._tips),
            self._tokens,
            sum(len(call.stream) - call.start for call in own),
            [call.start for call in own],
            self._trained if self._masked else None,
            self._witnessed,
        )

    # -- calls

    def _each_once(self) -> Sequence[Call]:
        """The calls; of those that were read from rows, what rows have in common counts once."""
        calls = self._rollout.calls
        if not any(row.own_calls for row in self._rollout.rows):
            return calls if self._rollout.ordered else in_order(calls)
        found: dict[tuple[int, bytes], Call] = {}
        for call in calls:
            found.setdefault((call.start, digest(call.stream)), call)
        return list(found.values())

    def _take(self, number: int, call: Call) -> Relation:
        before = call if self._rollout.ordered else self._calls.setdefault((call.start, digest(call.stream)), call)
        if before is not call and _same(before.logprobs, call.logprobs):
            self._findings.append(
                FoundFault(DumpFault.TWICE, call.where, f"the same as {before.where}", len(call.stream))
            )
            return Relation.TWICE
        self._findings += call.findings
        if call.start == len(call.stream):
            self._findings.append(FoundFault(DumpFault.NOTHING_SAMPLED, call.where, "the completion is empty"))
        if self._vocabulary is not None and len(call.stream) and int(call.stream.max()) >= self._vocabulary.size:
            outside = call.stream >= self._vocabulary.size
            said = f"id {int(call.stream[outside][0])}, and the vocabulary has {self._vocabulary.size:,}"
            self._findings.append(FoundFault(DumpFault.NO_TOKEN, call.where, said, int(outside.sum())))
        step, tip, shared = self._placed(number, call)
        sampled = np.zeros(len(call.stream), np.bool_)
        if tip is not None:
            sampled[:shared] = tip.sampled[:shared]
        sampled[call.start :] = True
        self._tokens += len(call.stream) - shared
        self._check_mask(call, sampled, shared)
        self._prompts.add(digest(call.prompt))
        told = []
        if step is Relation.EXTENDS and tip is not None and shared == len(tip.stream):
            del self._tips[tip]
            self._streams.extended(tip.stream, tip)
            told = tip.logprobs
        if call.logprobs is not None:
            told = [*told, (call.start, call.logprobs, call.temperature)]
        made = Tip(call.stream, sampled, call.request, told)
        self._tips[made] = None
        self._streams.add(call.stream, made)
        return step

    def _placed(self, number: int, call: Call) -> tuple[Relation, Tip | None, int]:
        """How a call stands to those before it, the stream it has most in common with, and how many tokens of it."""
        prompt = call.prompt
        shared, tip, end, whole = self._streams.meet(prompt)
        if tip is None:
            return Relation.FIRST, None, 0
        if whole is not None:
            return Relation.EXTENDS, whole, len(whole.stream)
        if digest(prompt) in self._prompts:
            return Relation.REPEATS, tip, shared
        if end and not _goes_on(tip, prompt, shared, end):
            return Relation.EXTENDS, tip, shared
        history = self._history(tip.request, call.request)
        if history is not None and _is_another(history):
            return Relation.OTHER, tip, shared
        if history is not None and history.cause is Cause.RETRY:
            return Relation.REPEATS, tip, shared
        self._breaks.append(self._break(number, call, tip, shared, history))
        return Relation.BREAKS, tip, shared

    def _break(self, number: int, call: Call, tip: Tip, shared: int, history: Finding | None) -> FoundBreak:
        prompt = call.prompt
        explained = None if self._known is None else self._explain(tip, prompt, call.request)
        lost, respelled, rewritten = self._replaced(tip, prompt, shared, explained)
        return FoundBreak(
            self._rollout.name,
            call.where,
            number,
            shared,
            tip.stream,
            prompt,
            tip.sampled,
            explained,
            history,
            call.recorded,
            min(len(tip.stream), len(prompt)) - shared,
            lost,
            respelled,
            rewritten,
        )

    def _explain(self, tip: Tip, prompt: Ids, request: DumpedRequest | None) -> Break | None:
        before = tip.request
        if before is not None and request is not None:
            both: dict[str, Any] = {"before": before.as_mapping(), "after": request.as_mapping()}
            found = explain_break(tip.stream, prompt, self._known, sampled=tip.sampled, **both)
            told = before.tools is not None and request.tools is not None
            if told or found is None or found.cause is not Cause.UNKNOWN:
                return found
        # messages without tools cannot disprove that the tools changed
        return explain_break(tip.stream, prompt, self._known, sampled=tip.sampled)

    def _replaced(self, tip: Tip, prompt: Ids, shared: int, explained: Break | None) -> tuple[int, int, int]:
        """Sampled tokens that the prompt does not have, and tokens in their place that spell the same, or another text.

        What comes in place of a tail that never meets the prompt again is not counted: it may be all that is new.
        """
        lost = respelled = rewritten = 0
        for start, stop, other, until in self._differing(tip.stream, prompt, shared, explained):
            gone = int(tip.sampled[start:stop].sum())
            lost += gone
            if gone and until < len(prompt):
                count = until - other
                if self._vocabulary is not None and (
                    spell(self._vocabulary, tip.stream[start:stop]) == spell(self._vocabulary, prompt[other:until])
                ):
                    respelled += count
                else:
                    rewritten += count
        return lost, respelled, rewritten

    @staticmethod
    def _differing(
        stream: Ids, prompt: Ids, shared: int, explained: Break | None
    ) -> Iterator[tuple[int, int, int, int]]:
        at, other = shared, shared
        if explained is not None:
            at, other = explained.stream_range[1], explained.prompt_range[1]
            yield shared, at, shared, other
        for hunk in hunks(stream, prompt, at, other):
            if hunk.start < len(stream):
                yield hunk

    # -- conversations

    def _history(self, before: DumpedRequest | None, after: DumpedRequest | None) -> Finding | None:
        """What became of the messages between two requests; None where they are not known, or nothing did."""
        if before is None or after is None or before.reply is None:
            return None
        recorded = [*before.messages, before.reply]
        try:
            ours, theirs = (chain(b"", rows, meaning)[1:] for rows in (after.messages, recorded))
            same = zip(ours, theirs, strict=False)
            shared = next((at for at, (one, other) in enumerate(same) if one != other), min(len(ours), len(theirs)))
            if shared == len(recorded):
                if list(before.tools or ()) != list(after.tools or ()):
                    return changed_tools(after.tools, before.tools)
                return None
            others = [
                [*tip.request.messages, tip.request.reply]
                for tip in itertools.islice(reversed(self._tips), _OTHERS)
                if tip.request is not None and tip.request.reply is not None and tip.request is not before
            ]
            return find_cause(after.messages, recorded, shared, others=others)
        except (AttributeError, TypeError, ValueError, RecursionError):  # messages of others may hold anything
            return None

    # -- masks

    def _check_mask(self, call: Call, sampled: Mask, shared: int) -> None:
        if call.mask is None:
            return
        self._masked = True
        mask = call.mask.copy()
        mask[:shared] = False  # which an earlier call has told
        self._trained += int(mask.sum())
        self._compare(call.where, mask, sampled, shared)

    def _check_row(self, row: DumpedRow) -> None:
        self._findings += row.findings
        self._masked = True
        self._trained += int(row.mask.sum())
        if not row.own_calls:
            sampled = np.zeros(len(row.ids), np.bool_)
            for call in self._rollout.calls:
                if common_prefix(call.stream, row.ids) == len(call.stream):
                    sampled[call.start : len(call.stream)] = True
            self._compare(row.where, row.mask, sampled, 0)
        elif row.sampled is None:
            self._check_turns(row)
        else:  # what another row of the rollout trains is sampled here, and not trained
            self._compare(row.where, row.mask, row.mask & row.sampled, 0)

    def _check_turns(self, row: DumpedRow) -> None:
        """A row of which its mask alone says what was sampled: what it trains outside the turns of its ids."""
        if self._shown is None:
            self._witnessed = False
            return
        wrong = row.mask & ~self._shown.mask(row.ids)
        if wrong.any():
            said = f"the first is token {int(wrong.argmax()):,}, which is in no turn of the assistant"
            self._findings.append(FoundFault(DumpFault.TRAINED_UNSAMPLED, row.where, said, int(wrong.sum())))

    def _compare(self, where: str, mask: Mask, sampled: Mask, first: int) -> None:
        """Tokens that are trained and were not sampled, and the other way round, from a token on."""
        for fault, wrong in (
            (DumpFault.TRAINED_UNSAMPLED, mask & ~sampled),
            (DumpFault.SAMPLED_UNTRAINED, sampled & ~mask),
        ):
            wrong = wrong[first:]
            if wrong.any():
                at = first + int(wrong.argmax())
                self._findings.append(FoundFault(fault, where, f"the first is token {at:,}", int(wrong.sum())))


def _is_another(history: Finding) -> bool:
    """Whether a request is of another conversation. One with the same instructions, unless a call gave it its task, may
    as well be a history that was cut down to one message."""
    return history.cause is Cause.SUB_AGENT and (not history.message or TASK_OF_A_CALL in history.words)


def _goes_on(tip: Tip, prompt: Ids, shared: int, end: int) -> bool:
    """Whether a prompt that begins with a stream of `end` tokens has something of what was sampled next, on to a tip.

    It shares so many tokens with that. A prompt that has the answer to another tool result, or to a generation prompt
    that the template writes differently in the past, is not made of the shorter stream.
    """
    if shared == len(prompt):
        return False
    if tip.sampled[end : shared + 1].any():
        return True
    start, stop = next(iter(runs(tip.sampled[shared:])), (0, 0))
    answer = tip.stream[shared + start : shared + stop]
    return any(_holds(prompt[shared:], trace) for trace in (answer[:_TRACE], answer[-_TRACE:]))


def _holds(ids: Ids, few: Ids) -> bool:
    """Whether some ids stand among others, in a row."""
    places = len(ids) - len(few) + 1
    if places < 1 or not len(few):
        return False
    return bool(np.logical_and.reduce([ids[at : at + places] == one for at, one in enumerate(few)]).any())


def _same(one: Floats | None, other: Floats | None) -> bool:
    return one is other if one is None or other is None else np.array_equal(one, other, equal_nan=True)
