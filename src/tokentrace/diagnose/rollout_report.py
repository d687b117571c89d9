"""`check_rollouts`: counts over rollouts, and a few examples of each finding."""

from __future__ import annotations

import asyncio
import contextlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..show.document import Card, Cell, Contrasts, Document, Table
from ..show.visible import counted
from ..showing import ShowsItself
from ..tokens.tokenizer import Tokenizer
from .finding import Cause, Finding
from .record_files import Progress, read_rollouts
from .records import Unreadable
from .rollouts import CheckedRollout, Relation, RolloutBreak, Tip, check_rollout

_EXAMPLES: Final = 3
"""Examples of each cause."""
_UNREADABLE: Final = 20
"""Unreadable lines that are listed."""


@dataclass(slots=True)
class Tally:
    """How often a cause was seen, in how many rollouts, with the first few examples."""

    places: int = 0
    tokens: int = 0
    rollouts: int = 0
    examples: list[Any] = field(default_factory=list)


def _count(tallies: dict[Cause, Tally], items: Sequence[Any]) -> None:
    for item in items:
        tally = tallies.setdefault(item.cause, Tally())
        tally.places += 1
        tally.tokens += getattr(item, "tokens", 0)
        if len(tally.examples) < _EXAMPLES:
            tally.examples.append(item)
    for cause in {item.cause for item in items}:
        tallies[cause].rollouts += 1


@dataclass(slots=True)
class Scores:
    """Logprobs of an engine less those of the record, over sampled tokens."""

    differences: array[float] = field(default_factory=lambda: array("f"))
    completions: int = 0
    skipped: int = 0
    """Completions sampled at another temperature: an engine scores at 1."""

    async def add(self, tips: Sequence[Tip], engine: Any) -> None:
        for tip in tips:
            usable = [one for one in tip.logprobs if one[2] in (None, 1.0) and np.isfinite(one[1]).all()]
            self.skipped += len(tip.logprobs) - len(usable)
            scores = await engine.score(tip.stream) if usable else ()
            for start, logprobs, _ in usable:
                values = np.asarray(scores[start : start + len(logprobs)], np.float64)
                self.differences.extend((values - logprobs).astype(np.float32).tolist())
                self.completions += 1

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"tokens": len(self.differences)}
        out |= {"completions": self.completions, "skipped": self.skipped}
        if not self.differences:
            return out
        values = np.asarray(self.differences, np.float64)
        sizes = np.abs(values)
        shares = np.percentile(sizes, [50, 95, 99, 100]).tolist()
        out |= {"mean": float(sizes.mean()), **dict(zip(("median", "p95", "p99", "most"), shares, strict=True))}
        ratio = float(np.exp(np.clip(values, -60, 60)).mean())
        return out | {"mean_difference": float(values.mean()), "mean_ratio": ratio}


@dataclass(slots=True)
class RolloutReport(ShowsItself):
    """Counts over all rollouts, and the first few examples of each finding.

    `causes` are of breaks, `faults` of findings in ids, masks and logprobs; `histories` says what
    became of messages at breaks, `recorded` why records say that a history was rewritten.
    `samples` are rows that train each sampled token once, `row_tokens` theirs; the other numbers
    are those of `CheckedRollout`. `stopped` is True if a limit left rollouts unchecked.
    """

    explained: bool = False
    notes: list[str] = field(default_factory=list)
    steps: Counter[Relation] = field(default_factory=Counter)
    causes: dict[Cause, Tally] = field(default_factory=dict)
    histories: Counter[str] = field(default_factory=Counter)
    recorded: Counter[str] = field(default_factory=Counter)
    faults: dict[Cause, Tally] = field(default_factory=dict)
    rollouts: int = 0
    broken: int = 0
    samples: int = 0
    row_tokens: int = 0
    tokens: int = 0
    sampled: int = 0
    prompted: int = 0
    trained: int = 0
    masked: int = 0
    unproven: int = 0
    reprefilled: int = 0
    lost: int = 0
    unreadable: int = 0
    unread: list[Unreadable] = field(default_factory=list)
    stopped: bool = False
    scores: Scores | None = None

    def add(self, one: CheckedRollout | Unreadable) -> None:
        if isinstance(one, Unreadable):
            self.unreadable += 1
            self.unread += [one] if len(self.unread) < _UNREADABLE else []
            return
        counts = one.counts + Counter(rollouts=1, broken=bool(one.breaks), samples=len(one.tips))
        counts.update(row_tokens=sum(len(tip.stream) for tip in one.tips))
        for broken in one.breaks:
            counts.update(reprefilled=broken.reprefilled, lost=broken.lost)
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)
        self.steps.update(one.steps)
        self.histories.update(broken.history.cause.value for broken in one.breaks if broken.history is not None)
        self.recorded.update(broken.recorded.partition(":")[0] for broken in one.breaks if broken.recorded)
        _count(self.causes, one.breaks)
        _count(self.faults, one.findings)

    @property
    def calls(self) -> int:
        return self.steps.total()

    @property
    def breaks(self) -> int:
        return self.steps[Relation.BREAKS]

    @property
    def compared(self) -> int:
        """Prompts that follow another call of their rollout."""
        return self.calls - self.steps[Relation.FIRST]

    def problems(self) -> set[str]:
        """What is wrong, as ``--allow`` names it. Missing logprobs alone are not a problem."""
        groups = {cause.group for cause in self.faults if cause is not Cause.NO_LOGPROBS}
        return groups | {name for name in ("breaks", "unreadable") if getattr(self, name)}

    @property
    def verdict(self) -> str:
        rollouts = counted(self.rollouts, "rollout")
        if not self.rollouts:
            return "there are no rollouts"
        if self.broken:
            verb, share = "breaks" if self.broken == 1 else "break", 100 * self.broken / self.rollouts
            return f"{self.broken:,} of {rollouts} {verb} ({share:.1f} %), {counted(self.breaks, 'time')}"
        if self.problems():
            return f"no prompt breaks in {rollouts}, but other things are wrong"
        if not self.compared:
            return (
                f"no prompt was compared with another: each of {rollouts} has one call; calls on lines of their own "
                "belong together by rollout_id (or session_id, trajectory_id, …)"
            )
        return f"every prompt extends its stream, in {rollouts} of {counted(self.calls, 'call')}"

    def ranked_causes(self) -> list[tuple[Cause, Tally]]:
        """Causes of breaks, the most frequent first."""
        return sorted(self.causes.items(), key=lambda item: (-item[1].places, item[0]))

    def to_json(self) -> dict[str, Any]:
        causes = [
            {"cause": cause if self.explained else None, "places": tally.places, "rollouts": tally.rollouts}
            | {"examples": list(map(_plain, tally.examples))}
            for cause, tally in self.ranked_causes()
        ]
        return _plain(self) | {
            **{name: getattr(self, name) for name in ("verdict", "calls", "compared", "breaks")},
            "unread": list(map(asdict, self.unread)),
            "trained": self.trained if self.masked else None,
            "causes": causes,
            "faults": [{"cause": cause, "group": cause.group, **asdict(tally)} for cause, tally in self.faults.items()],
        }

    # -- as a document

    def document(self, tokenizer: Tokenizer | None = None) -> Document:
        contrasts = Contrasts()
        breaks = [_break_row(one, contrasts) for _, tally in self.ranked_causes() for one in tally.examples]
        causes: list[list[str | Cell]] = [
            [
                Cell(str(cause), small=cause.advice) if self.explained else "not explained: no tokenizer was given",
                f"{tally.places:,}",
                f"{tally.rollouts:,}",
                f"{100 * tally.rollouts / self.rollouts:.1f} %",
            ]
            for cause, tally in self.ranked_causes()
        ]
        faults = [
            [one.where, f"{cause}: {counted(tally.places, 'place')}, {counted(tally.tokens)}", one.words]
            for cause, tally in self.faults.items()
            for one in tally.examples
        ]
        unread = [[one.where, one.problem] for one in self.unread]
        tables = [
            Table("What there is", ["", ""], list(self._figures()), words=2),
            Table("Why prompts broke off", ["", "breaks", "rollouts", "of all"], causes),
            Table("Ids, masks and logprobs", ["where", "fault", "what"], faults, words=3),
            Table("Breaks", ["where", "what", "cost"], breaks, words=3),
            Table(f"Could not be read: {self.unreadable:,}", ["where", "why"], unread, words=2),
        ]
        good = self.compared > 0 and not self.problems()
        return Document(
            "What happened to the tokens",
            "tokentrace check",
            summary=[self.verdict],
            tone="good" if good else "bad" if self.problems() else "poor",
            cards=[
                Card("Rollouts", f"{self.rollouts:,}", f"{self.broken:,} with a break"),
                Card("Rows", f"{self.samples:,}", f"{self.samples / max(1, self.rollouts):.2f} a rollout"),
                Card("Tokens", f"{self.tokens:,}", f"{self.sampled:,} sampled"),
            ],
            notes=[*self.notes, *(["the limit was reached"] if self.stopped else [])],
            tables=[table for table in tables if table.rows],
            **contrasts.content(),
        )

    def _figures(self) -> Iterator[tuple[str, str]]:
        if self.rollouts:
            yield "calls", f"{self.calls:,} ({_listed(self.steps)})"
            yield "tokens", f"{self.tokens:,} recorded, {self.sampled:,} sampled, {self.row_tokens:,} in rows"
        if self.breaks:
            repeated = self.row_tokens - self.tokens
            again = f"{counted(self.reprefilled)} read again, {repeated:,} repeated in rows"
            yield "cost of breaks", f"{again}, {counted(self.lost, 'sampled token')} gone"
        if self.histories:
            yield "what became of messages", _listed(self.histories)
        if self.recorded:
            yield "recorded causes", _listed(self.recorded)
        if self.masked:
            yield "trained by the masks", f"{self.trained:,}"
            for cause in (Cause.TRAINED_UNSAMPLED, Cause.SAMPLED_UNTRAINED):
                tally = self.faults.get(cause, Tally())
                unknown = self.unproven and not tally.places
                yield str(cause), f"not known in {self.unproven:,} rollouts" if unknown else f"{tally.tokens:,}"
        if self.scores is not None:
            items = self.scores.to_json().items()
            figures = ", ".join(f"{name} {value:,.5g}" for name, value in items if name != "tokens")
            yield "scored tokens", f"{len(self.scores.differences):,}"
            yield "logprobs, engine less record", figures


def _listed(counts: Counter[Any]) -> str:
    return ", ".join(f"{str(name).replace('_', ' ')} {count:,}" for name, count in counts.most_common())


def _break_row(broken: RolloutBreak, contrasts: Contrasts) -> list[str | Cell]:
    link, why = "", f"token {broken.position:,} of {broken.stream_length:,}"
    if broken.explained is not None:
        why = broken.explained.headline
        link = broken.explained.add_to(contrasts, f"{broken.where}: {broken.cause}", broken.explained.words)
    more = [broken.history.words if broken.history is not None else "", broken.recorded]
    costs = f"{counted(broken.reprefilled)} read again, {counted(broken.lost, 'sampled token')} gone"
    return [Cell(broken.where, link=link), Cell(why, small="; ".join(filter(None, more))), f"costs {costs}"]


def _plain(value: Any) -> dict[str, Any]:
    plain = {one.name: getattr(value, one.name) for one in fields(value)}
    plain |= {name: one.to_json() for name, one in plain.items() if hasattr(one, "to_json")}
    return plain | {name: asdict(one) for name, one in plain.items() if isinstance(one, Finding)}


def check_rollouts(
    inputs: Sequence[str],
    model: Any = None,
    *,
    limit: int | None = None,
    engine: Callable[[], Any] | None = None,
    progress: Progress | None = None,
) -> RolloutReport:
    """Check the rollouts in `inputs`: does each prompt extend the stream, and if not, why?

    - `inputs` are what `read_rollouts` takes.
    - `model` is the model's tokenizer or, better, a renderer. Without one, breaks have no cause.
    - `limit` stops after so many rollouts.
    - `engine` returns an `Engine`, or an awaitable of one, to compare logprobs with.

    Reports lines that cannot be read. Raises InputError if an input cannot be read at all.
    """
    report = RolloutReport(model is not None)
    digest = None if model is None else (model if isinstance(model, Tokenizer) else model.tokenizer).digest
    with contextlib.ExitStack() as stack:
        runner, connected = None, None
        if engine is not None:
            runner, report.scores = stack.enter_context(asyncio.Runner()), Scores()
            connected = runner.run(_connect(engine))
            stack.callback(lambda: runner.run(connected.close()))
        for rollout in read_rollouts(inputs, progress=progress, note=report.notes.append):
            if limit is not None and report.rollouts == limit:
                report.stopped = True
                break
            if isinstance(rollout, Unreadable):
                report.add(rollout)
                continue
            notes = [rollout.note] if rollout.note else []
            if digest is not None and rollout.tokenizer is not None and not digest.startswith(rollout.tokenizer):
                notes.append("rollouts were recorded with another tokenizer than the one given: breaks are misread")
            report.notes += [note for note in notes if note not in report.notes]
            checked = check_rollout(rollout, model)
            report.add(checked)
            if runner is not None and report.scores is not None:
                runner.run(report.scores.add(checked.tips, connected))
    return report


async def _connect(connect: Callable[[], Any]) -> Any:
    engine = connect()
    return await engine if hasattr(engine, "__await__") else engine


def recorded_tokenizer(inputs: Sequence[str]) -> str | None:
    """The tokenizer that the output folder of a run names, if an input is one."""
    from ..pocket import POCKET

    for name in inputs:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            settings = json.loads((Path(name).expanduser() / "run.json").read_bytes())
            if isinstance(settings.get("tokenizer"), str):
                return str(settings["tokenizer"])
            engine = settings["engine"]
            if engine.get("kind", engine.get("type")) == "embedded":
                return str(POCKET)
    return None
