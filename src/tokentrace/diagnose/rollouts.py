"""Does each prompt of a recorded rollout continue the stream, and if not, why?

A prompt extends the call whose stream it begins with. The same prompt again asks for another
answer. Everything else is a break, or another conversation.
"""

import asyncio
import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from ..show.alignment import hunks
from ..show.visible import counted
from ..tokens.ids import common_prefix, runs
from ..tokens.tokenizer import Ids
from .breaks import conversation_change, explain_break
from .conversation_diff import TASK_OF_A_CALL
from .finding import Cause, Finding
from .record_files import Progress, read_rollouts
from .records import Call, Line, Mask, Rollout, TrainingRow
from .report import Entry, Example, Report, Tallies, Tally

_RECENT = 3
_TRACE = 8
"""Tokens at either end of a completion to search for in a later prompt."""
_DIGEST = re.compile("[0-9a-f]{16,}")
_OTHER_TOKENIZER = "rollouts were recorded with another tokenizer, so the causes of breaks may be wrong"


class Relation(StrEnum):
    FIRST = "first"
    EXTENDS = "extends"
    REPEATS = "repeats"
    TWICE = "recorded twice"
    OTHER = "another conversation"
    BREAKS = "breaks"


@dataclass(frozen=True, slots=True, eq=False)
class Tip:
    """Calls that each extend the one before. `numbers` counts sampled tokens; others are -1."""

    calls: list[Call]
    numbers: npt.NDArray[np.int64]

    @property
    def sampled(self) -> Mask:
        return self.numbers >= 0

    @property
    def stream(self) -> Ids:
        return self.calls[-1].stream


class CheckedRollout:
    """One rollout. Without a `model`, breaks have no cause."""

    def __init__(self, rollout: Rollout, model: Any = None) -> None:
        self.rollout, self.model = rollout, model
        tokenizer = getattr(model, "tokenizer", model)
        self.size = 1 << 31 if tokenizer is None else tokenizer.vocabulary.size
        self.counts: Counter[str] = Counter(rollouts=1)
        self.steps: list[Relation] = []
        self.tips: list[Tip] = []
        self.breaks: list[Finding] = []
        self.findings, self._derived = [*rollout.findings], not rollout.calls
        self.entries: list[Entry] = []
        self._calls: list[Call] = []
        self._gone: set[int] = set()
        calls = rollout.calls if rollout.ordered else sorted_calls(rollout.calls)
        for call in calls or [call for row in rollout.rows for call in row.calls]:
            self._add_call(call)
        for row in rollout.rows:
            self._check_mask(row)
        self.counts.update(broken=bool(self.breaks), samples=len(self.tips))
        self.counts.update(row_tokens=sum(len(tip.stream) for tip in self.tips))
        self.entries += [Entry("outcomes", step) for step in self.steps]
        for one in self.findings:
            self.entries.append(
                Entry("faults", one.cause, one.tokens, Example(one.where, one.words, [one]))
            )

    def _report(self, cause: Cause, where: str, words: str, tokens: int, at: int | None = None) -> None:
        self.findings.append(Finding(cause, where, words=words, position=at, tokens=tokens))

    def _train(self, where: str, mask: Mask, sampled: Mask | None) -> None:
        """Count what a mask trains. Report where it is not what was sampled."""
        self.counts |= Counter(masked=1, unproven=int(sampled is None))
        self.counts["trained"] += int(mask.sum())
        sampled = mask if sampled is None else sampled
        differing = {Cause.TRAINED_UNSAMPLED: mask & ~sampled, Cause.SAMPLED_UNTRAINED: sampled & ~mask}
        for cause, wrong in differing.items():
            for at in np.flatnonzero(wrong)[:1].tolist():
                self._report(cause, where, f"the first is token {at:,}", int(wrong.sum()), at)

    def _add_call(self, call: Call) -> None:
        stream, size = call.stream, len(call.stream)
        alike = (one for one in self._calls if one.start == call.start)
        same = (one for one in alike if np.array_equal(one.stream, stream))
        if (earlier := next(same, None)) is not None:
            if self._derived:  # rows share prefixes
                return
            before, logprobs = (np.asarray(one.logprobs, np.float64) for one in (earlier, call))
            if not self.rollout.ordered and np.array_equal(before, logprobs, equal_nan=True):
                self._report(Cause.DUPLICATE_CALL, call.where, f"the same as {earlier.where}", size)
                self.steps.append(Relation.TWICE)
                return
        if call.start == size:
            self._report(Cause.NOTHING_SAMPLED, call.where, "the completion is empty", 0)
        step, tip, shared = self._place(call)
        for at in (outside := np.flatnonzero(stream[shared:] >= self.size) + shared)[:1].tolist():
            words = f"id {stream[at]} at {at:,}, but the vocabulary has {self.size:,} ids"
            self._report(Cause.NO_TOKEN, call.where, words, len(outside), at)
        self.steps.append(step)
        numbers = np.arange(size) - call.start + self.counts["sampled"]
        numbers[: call.start] = -1
        if tip is not None:
            numbers[:shared] = tip.numbers[:shared]
        self.counts.update(tokens=size - shared, sampled=size - call.start, prompted=call.start)
        if call.mask is not None:
            new_tokens = np.arange(size) >= shared  # earlier ones were counted before
            self._train(call.where, call.mask & new_tokens, (numbers >= 0) & new_tokens)
        self._calls.append(call)
        calls = [call]
        if step is Relation.EXTENDS and tip is not None and shared == len(tip.stream):
            self.tips.remove(tip)
            calls = [*tip.calls, call]
        self.tips.append(Tip(calls, numbers))

    def _check_mask(self, row: TrainingRow) -> None:
        sampled = np.zeros(len(row.ids), np.bool_)
        if self._derived and row.sampled is not None:
            sampled |= row.sampled
        for call in self.rollout.calls:
            if common_prefix(row.ids, call.stream) == len(call.stream):
                sampled[call.start : len(call.stream)] = True
        for other in self.rollout.rows if self._derived else ():
            if not (sampled & ~row.mask).any():
                break
            shared = common_prefix(row.ids, other.ids)  # what another row trains there is not missing
            sampled[:shared] &= row.mask[:shared] | ~other.mask[:shared]
        self._train(row.where, row.mask, None if self._derived and row.sampled is None else sampled)

    def _place(self, call: Call) -> tuple[Relation, Tip | None, int]:
        """How a call continues, its closest tip, and what they share."""
        if not self.tips:
            return Relation.FIRST, None, 0
        prompt = call.prompt
        pairs = [(tip, common_prefix(tip.stream, prompt)) for tip in self.tips]
        # the last stream that the prompt begins with, else the one it shares most with
        tip, shared = max(reversed(pairs), key=lambda pair: (pair[1] == len(pair[0].stream), pair[1]))
        if shared == len(tip.stream):
            return Relation.EXTENDS, tip, shared
        if any(np.array_equal(one.prompt, prompt) for one in self._calls):
            return Relation.REPEATS, tip, shared
        ends = [
            len(one.stream) for other, share in pairs for one in other.calls if len(one.stream) <= share
        ]
        if ends and not _goes_on(tip, prompt, shared, max(ends)):
            return Relation.EXTENDS, tip, shared
        last, requests, history = tip.calls[-1], {}, None
        if last.conversation is not None and call.request is not None:
            requests = {"before": last.conversation, "after": call.request}
            recent = (one.calls[-1] for one in self.tips[: -_RECENT - 1 : -1] if one is not tip)
            recorded = [one.conversation["messages"] for one in recent if one.reply and one.conversation]
            history = conversation_change(**requests, recent=recorded) if last.reply is not None else None
        if history is not None and history.cause is Cause.RETRY:
            return Relation.REPEATS, tip, shared
        cause = call.recorded.partition(":")[0] if history is None else history.cause
        # if the instructions are the same, a call must have given the task
        other = history is None or not history.message or TASK_OF_A_CALL in history.words
        if cause == Cause.SUB_AGENT and other:
            return Relation.OTHER, tip, shared
        self._explain(call, tip, shared, requests, history)
        return Relation.BREAKS, tip, shared

    def _explain(self, call: Call, tip: Tip, shared: int, requests: Line, history: Finding | None) -> None:
        stream, cause, why, region = tip.stream, Cause.UNKNOWN, "", ""
        ranges, after, contrasts, broken = [], (shared, shared), [], None
        if self.model is not None:
            broken = explain_break(stream, call.prompt, self.model, sampled=tip.sampled, **requests)
        if broken is not None:
            cause, why, region = broken.cause, broken.words, f" ({broken.region})"
            ranges, after = [broken.stream_range], (broken.stream_range[1], broken.prompt_range[1])
            contrasts = [broken.contrast()]
        ranges += [(hunk.start, hunk.stop) for hunk in hunks(stream, call.prompt, *after)]
        gone = {number for start, stop in ranges for number in tip.numbers[start:stop].tolist()}
        gone -= self._gone | {-1}
        self._gone |= gone
        lost, again = len(gone), min(len(stream), call.start) - shared
        self.counts.update(reprefilled=again, lost=lost)
        named, _, detail = call.recorded.partition(": ")
        if cause is Cause.UNKNOWN and named in list(Cause):
            cause, why = Cause(named), why.removeprefix(f"{Cause.UNKNOWN.meaning}: ")
        sentences = [why, history.words if history else ""]
        if named and detail not in filter(None, sentences):
            sentences.append(f"recorded: {call.recorded}")
        sentences.append(f"{counted(again)} prefilled again, {counted(lost, 'sampled token')} lost")
        reasons = "; ".join(dict.fromkeys(filter(None, sentences)))
        words = f"token {shared:,} of {len(stream):,}{region}: {reasons}"
        where = f"{call.where}, call {len(self.steps) + 1} of {self.rollout.name!r}"
        finding = Finding(cause, where, words=words, position=shared, tokens=lost)
        self.breaks.append(finding)
        self.entries.append(Entry("causes", cause, lost, Example(where, words, [finding], contrasts)))
        self.entries += [Entry("histories", history.cause)] if history is not None else []
        self.entries += [Entry("recorded", named)] * bool(call.recorded)


def sorted_calls(calls: Sequence[Call]) -> list[Call]:
    """Order calls: prompts before longer ones."""

    def comes_before(call: Call, one: Call) -> bool:
        return call is one or (
            call.start < one.start and common_prefix(one.prompt, call.prompt) == call.start
        )

    def place(call: Call) -> tuple[int, int]:
        return next(at for at, one in enumerate(calls) if comes_before(call, one)), call.start

    return sorted(calls, key=place)


def _goes_on(tip: Tip, prompt: Ids, shared: int, end: int) -> bool:
    """True if a prompt still has what was sampled after position `end`."""
    if shared == len(prompt):
        return False
    if tip.sampled[end : shared + 1].any():
        return True
    start, stop = next(iter(runs(tip.sampled[shared:])), (0, 0))
    answer = tip.stream[shared + start : shared + stop]
    size = min(_TRACE, len(answer))
    places = sliding_window_view(prompt[shared:], size) if 0 < size <= len(prompt) - shared else answer[:0]
    return any((places == trace).all(-1).any() for trace in (answer[:size], answer[-size:]) if len(places))


class RolloutReport(Report):
    """Counts over all rollouts. `scores` has the engine's logprobs minus the recorded ones.

    In `counts`, `tokens` has shared tokens once; `samples` are rows that train each sampled token
    once, with `row_tokens`. `unproven`: only masks show what was sampled.
    """

    unit, title = "rollout", "What happened to the tokens"
    tables: ClassVar = {
        "outcomes": "Calls",
        "causes": "Why prompts break",
        "histories": "What happened to messages",
        "recorded": "Recorded causes",
        "faults": "Ids, masks and logprobs",
        "unread": "Unreadable",
    }
    faults: Tallies
    histories: Tallies
    recorded: Tallies
    unread: Tallies
    scores: dict[str, float] | None = None

    @property
    def calls(self) -> int:
        return sum(tally.places for tally in self.outcomes.values())

    @property
    def breaks(self) -> int:
        return self.count(Relation.BREAKS)

    def problems(self) -> set[str]:
        """What is wrong, as ``--allow`` names it."""
        groups = {cause.group for cause in self.faults if cause is not Cause.NO_LOGPROBS}
        return groups | ({"breaks"} if self.breaks else set()) | ({"unreadable"} if self.unread else set())

    def judge(self) -> tuple[str, str]:
        rollouts, broken = counted(self.total, "rollout"), self.counts["broken"]
        tone = "bad" if self.problems() else "poor"
        if not self.total:
            return tone, "there are no rollouts"
        if broken:
            verb, share = "breaks" if broken == 1 else "break", 100 * broken / self.total
            return tone, f"{broken:,} of {rollouts} {verb} ({share:.1f} %), {counted(self.breaks, 'time')}"
        if self.problems():
            return tone, f"no prompt breaks in {rollouts}, but other things are wrong"
        if self.calls > self.count(Relation.FIRST):
            calls = counted(self.calls, "call")
            return "good", f"every prompt extends its stream, in {rollouts} with {calls}"
        why = f"no prompt was compared with another: each of {rollouts} has one call"
        how = "to join calls on separate lines, give them the same rollout_id (or session_id, …)"
        return tone, f"{why}; {how}"

    def figures(self) -> Iterator[str]:
        counts = self.counts
        samples = f"{counts['samples']:,} rows ({counts['samples'] / max(1, self.total):.2f} per rollout)"
        yield f"{counted(counts['tokens'])}, {counts['sampled']:,} sampled, {counts['row_tokens']:,} in {samples}"
        if self.breaks:
            again = f"{counted(counts['reprefilled'])} prefilled again"
            repeated = f"{counts['row_tokens'] - counts['tokens']:,} repeated in rows"
            yield f"cost of breaks: {again}, {repeated}, {counted(counts['lost'], 'sampled token')} lost"
        if counts["masked"]:
            yield f"trained by the masks: {counts['trained']:,}"
            for cause in (Cause.TRAINED_UNSAMPLED, Cause.SAMPLED_UNTRAINED):
                tally = self.faults.get(cause, Tally())
                unknown = f"not known in {counts['unproven']:,} rollouts"
                yield f"{cause}: {unknown if counts['unproven'] and not tally.places else f'{tally.tokens:,}'}"
        if self.scores is not None:
            figures = ", ".join(f"{name} {value:,.5g}" for name, value in self.scores.items())
            yield f"logprobs, engine minus recorded: {figures}"


def check_rollouts(
    inputs: Sequence[str] | str,
    model: Any = None,
    *,
    limit: int | None = None,
    engine: Callable[[], Coroutine[Any, Any, Any]] | None = None,
    progress: Progress = lambda *_: None,
) -> RolloutReport:
    """Check the rollouts in `inputs`: does each prompt extend the stream, and if not, why?

    - `inputs`: what `read_rollouts` takes, or one name.
    - `model`: the model's tokenizer or, better, a renderer. Without one, breaks have no cause.
    - `limit`: the most rollouts to check.
    - `engine`: connects to an `Engine` to compare logprobs with.

    Reports lines that cannot be read. Raises InputError if an input cannot be read at all.
    """
    report, tokenizer = RolloutReport(), getattr(model, "tokenizer", model)
    differences, skipped = [np.zeros(0, np.float32)], 0
    with contextlib.ExitStack() as stack:
        runner = asyncio.Runner()
        connected: Any = None
        if engine is not None:
            connected = stack.enter_context(runner).run(engine())
            stack.callback(lambda: runner.run(connected.close()))
        names = [inputs] if isinstance(inputs, str) else inputs
        for rollout in read_rollouts(names, progress=progress, note=report.notes.append):
            if limit is not None and report.total == limit:
                report.stopped = True
                break
            if rollout.problem:
                example = Example(rollout.where, rollout.problem)
                report.add({"unreadable": 1}, [Entry("unread", "could not be read", 0, example)])
                continue
            digest = _DIGEST.fullmatch(rollout.tokenizer or "")  # a dump may have the tokenizer's name
            misread = tokenizer is not None and digest and not tokenizer.digest.startswith(digest[0])
            if misread and _OTHER_TOKENIZER not in report.notes:
                report.notes.append(_OTHER_TOKENIZER)
            checked = CheckedRollout(rollout, model)
            report.add(checked.counts, checked.entries)
            for tip in checked.tips if connected is not None else ():
                pairs = [(call, call.logprobs) for call in tip.calls if call.logprobs is not None]
                # an engine scores at temperature 1
                plain = (one for one in pairs if one[0].temperature in (None, 1))
                fits = tip.stream.max(initial=0) < checked.size
                usable = [one for one in plain if fits and np.isfinite(one[1]).all()]
                skipped += len(pairs) - len(usable)
                scores = np.asarray(runner.run(connected.score(tip.stream)) if usable else [], np.float64)
                for call, logprobs in usable:
                    difference = scores[call.start : len(call.stream)] - logprobs
                    differences.append(difference.astype(np.float32))
    if engine is not None:
        report.scores = {"completions": len(differences) - 1, "skipped": skipped, **_summary(differences)}
    return report


def _summary(differences: Sequence[Any]) -> dict[str, float]:
    values = np.concatenate(differences).astype(np.float64)
    if not len(values):
        return {"tokens": 0}
    ratio, sizes = float(np.exp(np.clip(values, -60, 60)).mean()), np.abs(values)
    figures = {"mean": np.mean(sizes), "median": np.median(sizes), "most": np.max(sizes)}
    return {"tokens": len(values), "mean_ratio": ratio, **{name: float(figures[name]) for name in figures}}


def recorded_tokenizer(inputs: Sequence[str]) -> str | None:
    """The tokenizer that a run names, if an input is its output folder."""
    from ..pocket import POCKET

    for name in inputs:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            settings = json.loads((Path(name).expanduser() / "run.json").read_bytes())
            if isinstance(settings.get("tokenizer"), str):
                return str(settings["tokenizer"])
            if settings["engine"]["kind"] == "embedded":
                return str(POCKET)
    return None
