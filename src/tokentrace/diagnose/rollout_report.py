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
from .finding import Cause
from .record_files import Progress, read_rollouts
from .records import Rollout, Unreadable
from .rollouts import CheckedRollout, Relation, RolloutBreak, Tip, check_rollout

_EXAMPLES: Final = 3
"""Examples of each cause."""
_UNREADABLE: Final = 20
"""Unreadable lines that are listed."""
_GROUPS: Final = ("masks", "logprobs", "ids")


@dataclass(slots=True)
class Tally:
    """How often something was seen, with the first few examples."""

    places: int = 0
    tokens: int = 0
    rollouts: int = 0
    examples: list[Any] = field(default_factory=list)

    def add(self, example: Any, tokens: int = 0) -> None:
        self.places += 1
        self.tokens += tokens
        if len(self.examples) < _EXAMPLES:
            self.examples.append(example)


@dataclass(slots=True)
class Scores:
    """Logprobs of an engine less those of the record, over sampled tokens."""

    differences: array[float] = field(default_factory=lambda: array("f"))
    completions: int = 0
    skipped: int = 0
    """Completions sampled at another temperature: an engine scores at 1."""

    async def add(self, tips: Sequence[Tip], engine: Any) -> None:
        """Score each stream once."""
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
        if self.differences:
            values = np.asarray(self.differences, np.float64)
            sizes = np.abs(values)
            median, p95, p99 = np.percentile(sizes, [50, 95, 99]).tolist()
            out |= {"mean": float(sizes.mean()), "median": median, "p95": p95, "p99": p99, "most": float(sizes.max())}
            out["mean_difference"] = float(values.mean())
            out["mean_ratio"] = float(np.exp(np.clip(values, -60, 60)).mean())
        return out


@dataclass(slots=True)
class RolloutReport(ShowsItself):
    """Counts over all rollouts, and the first few examples of each finding."""

    notes: list[str] = field(default_factory=list)
    rollouts: int = 0
    broken: int = 0
    """Rollouts with a break."""
    steps: Counter[Relation] = field(default_factory=Counter)
    causes: dict[Cause, Tally] = field(default_factory=dict)
    """Breaks."""
    histories: Counter[str] = field(default_factory=Counter)
    """What became of the messages at breaks."""
    recorded: Counter[str] = field(default_factory=Counter)
    """Why records say that a history was rewritten."""
    faults: dict[Cause, Tally] = field(default_factory=dict)
    """Findings in ids, masks and logprobs."""
    samples: int = 0
    """Rows that train each sampled token once."""
    tokens: int = 0
    sampled: int = 0
    row_tokens: int = 0
    prompted: int = 0
    """Tokens of all prompts: what an engine without a cache reads."""
    trained: int = 0
    masked: int = 0
    """Rollouts with masks."""
    proven: int = 0
    """Rollouts with masks in which something else tells what was sampled."""
    reprefilled: int = 0
    lost: int = 0
    unreadable: int = 0
    unread: list[Unreadable] = field(default_factory=list)
    stopped: bool = False
    """True if a limit left rollouts unchecked."""
    explained: bool = False
    """True if there was a tokenizer to find causes with."""
    scores: Scores | None = None

    def add(self, one: CheckedRollout | Unreadable) -> None:
        """Count a rollout, or what could not be read."""
        if isinstance(one, Unreadable):
            self.unreadable += 1
            self.unread += [one] if len(self.unread) < _UNREADABLE else []
            return
        self.rollouts += 1
        self.steps.update(one.steps)
        rows = [len(tip.stream) for tip in one.tips]
        self.samples += len(rows)
        self.row_tokens += sum(rows)
        self.tokens += one.tokens
        self.sampled += one.sampled
        self.prompted += sum(one.prompts)
        if one.trained is not None:
            self.trained += one.trained
            self.masked += 1
            self.proven += one.proven
        self.broken += bool(one.breaks)
        for broken in one.breaks:
            self.causes.setdefault(broken.cause, Tally()).add(broken)
            self.histories.update([broken.history.cause.value] if broken.history is not None else [])
            self.recorded.update([broken.recorded.partition(":")[0]] if broken.recorded else [])
            self.reprefilled += broken.reprefilled
            self.lost += broken.lost
        for finding in one.findings:
            self.faults.setdefault(finding.cause, Tally()).add(finding, finding.tokens)
        for cause in {broken.cause for broken in one.breaks}:
            self.causes[cause].rollouts += 1
        for cause in {finding.cause for finding in one.findings}:
            self.faults[cause].rollouts += 1

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
        return groups | ({"breaks"} if self.breaks else set()) | ({"unreadable"} if self.unreadable else set())

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
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
                "belong together by rollout_id (or session_id, conversation_id, episode_id)"
            )
        return f"every prompt extends its stream, in {rollouts} of {counted(self.calls, 'call')}"

    def ranked_causes(self) -> list[tuple[Cause, Tally]]:
        """Causes of breaks, the most frequent first."""
        return sorted(self.causes.items(), key=lambda item: (-item[1].places, item[0]))

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        names = (
            *("rollouts", "broken", "calls", "compared", "breaks", "samples", "tokens", "sampled", "row_tokens"),
            *("prompted", "reprefilled", "lost", "unreadable", "stopped", "explained"),
            *("steps", "histories", "recorded", "notes"),
        )
        return {
            "verdict": self.verdict,
            **{name: getattr(self, name) for name in names},
            "causes": [
                {"cause": cause if self.explained else None, "places": tally.places, "rollouts": tally.rollouts}
                | {"examples": [_break_json(one) for one in tally.examples]}
                for cause, tally in self.ranked_causes()
            ],
            "trained": self.trained if self.masked else None,
            "unproven": self.masked - self.proven,
            "faults": [{"cause": cause, "group": cause.group, **asdict(tally)} for cause, tally in self.faults.items()],
            "scores": None if self.scores is None else self.scores.to_json(),
            "unread": [asdict(one) for one in self.unread],
        }

    # -- as a document

    def document(self, tokenizer: Tokenizer | None = None) -> Document:
        """The document of the report."""
        contrasts = Contrasts()
        examples: list[list[str | Cell]] = []
        for broken in (one for _, tally in self.ranked_causes() for one in tally.examples):
            link, why = "", f"token {broken.position:,} of {broken.stream_length:,}"
            if broken.explained is not None:
                why = str(broken.explained).partition("\n")[0]
                link = broken.explained.add_to(contrasts, f"{broken.where}: {broken.cause}")
            more = [broken.history.words if broken.history is not None else "", broken.recorded]
            small = "; ".join(filter(None, more))
            costs = f"{counted(broken.reprefilled)} read again, {counted(broken.lost, 'sampled token')} gone"
            examples.append([Cell(broken.where, link=link), Cell(why, small=small), f"costs {costs}"])
        causes = [
            [
                Cell(str(cause), small=cause.advice) if self.explained else "not explained: no tokenizer was given",
                *(f"{tally.places:,}", f"{tally.rollouts:,}", f"{100 * tally.rollouts / self.rollouts:.1f} %"),
            ]
            for cause, tally in self.ranked_causes()
        ]
        histories = [[f"messages: {name.replace('_', ' ')}", f"{n:,}"] for name, n in self.histories.most_common()]
        histories += [[f"recorded: {name}", f"{n:,}"] for name, n in self.recorded.most_common()]
        faults = [
            [str(cause), cause.group, f"{tally.places:,}", f"{tally.tokens:,}", f"{tally.rollouts:,}"]
            for cause, tally in self.faults.items()
        ]
        places = [[one.where, str(cause), one.words] for cause, tally in self.faults.items() for one in tally.examples]
        unread = [[one.where, one.problem] for one in self.unread]
        tables = [
            Table("What there is", ["", ""], list(self._figures()) if self.rollouts else [], words=2),
            Table("Why prompts broke off", ["", "breaks", "rollouts", "of all"], causes),
            Table("What became of the history", ["", "breaks"], histories),
            Table("What was trained", ["", "tokens"], list(self._training()), words=1),
            Table("Ids, masks and logprobs", ["", "in", "places", "tokens", "rollouts"], faults, words=2),
            Table("Where", ["", "fault", "what"], places, words=3),
            Table("Breaks", ["where", "what", "cost"], examples, words=3),
            Table("Logprobs beside an engine's", ["", ""], list(self._score_rows()), words=2),
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
        steps = ", ".join(f"{step} {self.steps[step]:,}" for step in Relation if self.steps[step])
        yield "calls", f"{self.calls:,} ({steps})"
        yield "tokens", f"{self.tokens:,} recorded, {self.sampled:,} sampled, {self.row_tokens:,} in rows"
        if self.breaks:
            repeated = self.row_tokens - self.tokens
            yield "cost of breaks", f"{counted(self.reprefilled)} read again, {repeated:,} repeated in rows"

    def _training(self) -> Iterator[tuple[str, str]]:
        if self.masked:
            yield "trained by the masks", f"{self.trained:,}"
        for cause in (Cause.TRAINED_UNSAMPLED, Cause.SAMPLED_UNTRAINED) if self.masked else ():
            proven = cause in self.faults or self.proven == self.masked
            tokens = self.faults[cause].tokens if cause in self.faults else 0
            yield str(cause), f"{tokens:,}" if proven else f"not known in {self.masked - self.proven:,} rollouts"
        if self.breaks:
            yield "sampled, and gone from the later prompt", f"{self.lost:,}"

    def _score_rows(self) -> Iterator[tuple[str, str]]:
        if self.scores is None:
            return
        scores = self.scores.to_json()
        skipped = f", {scores['skipped']:,} sampled at another temperature" if scores["skipped"] else ""
        yield "compared", f"{counted(scores['tokens'])} of {counted(scores['completions'], 'completion')}{skipped}"
        if scores["tokens"]:
            names = ("mean", "median", "p95", "p99", "most")
            yield "absolute", ", ".join(f"{name} {scores[name]:.4g}" for name in names)
            yield "engine less record", f"{scores['mean_difference']:+.4g}, ratio {scores['mean_ratio']:.4f}"


def _break_json(broken: RolloutBreak) -> dict[str, Any]:
    plain = {one.name: getattr(broken, one.name) for one in fields(broken)}
    explained, history = broken.explained, broken.history
    plain["explained"] = None if explained is None else explained.to_json()
    return plain | {"history": None if history is None else asdict(history)}


def check_rollouts(
    inputs: Sequence[str],
    model: Any = None,
    *,
    limit: int | None = None,
    engine: Callable[[], Any] | None = None,
    progress: Progress | None = None,
) -> RolloutReport:
    """Check the rollouts in `inputs`: does each prompt extend the stream, and if not, why and at what cost.

    - `inputs` are what `read_rollouts` takes.
    - `model` is the model's tokenizer or, better, a renderer. Without one, breaks are counted and not explained.
    - `limit` stops after so many rollouts.
    - `engine` returns an `Engine`, or an awaitable of one, whose logprobs are compared with the recorded ones.

    Lines that cannot be read are in the report. Raises InputError if an input cannot be read at all.
    """
    report = RolloutReport(explained=model is not None)
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
            notes = [rollout.note, *_other_tokenizer(rollout, digest)]
            report.notes += [one for one in notes if one and one not in report.notes]
            checked = check_rollout(rollout, model)
            report.add(checked)
            if runner is not None and report.scores is not None:
                runner.run(report.scores.add(checked.tips, connected))
    return report


async def _connect(connect: Callable[[], Any]) -> Any:
    engine = connect()
    return await engine if hasattr(engine, "__await__") else engine


def _other_tokenizer(rollout: Rollout, digest: str | None) -> Iterator[str]:
    if digest is not None and rollout.tokenizer is not None and not digest.startswith(rollout.tokenizer):
        yield "rollouts were recorded with another tokenizer than the one given: their breaks are misread"


def recorded_tokenizer(inputs: Sequence[str]) -> str | None:
    """The tokenizer that the output folder of a run names, if an input is one."""
    from ..pocket import POCKET

    for name in inputs:
        path = Path(name).expanduser() / "run.json"
        if "://" in name or not path.is_file():
            continue
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
            engine = settings["engine"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(settings.get("tokenizer"), str):
            return str(settings["tokenizer"])
        if isinstance(engine, dict) and engine.get("kind", engine.get("type")) == "embedded":
            return str(POCKET)
    return None
