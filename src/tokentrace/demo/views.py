"""The views of the comparison of client paths: a table for terminals, numbers for programs; `page.py` has the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..compare.breaks import Break, Cause
from ..pocket import NOISE
from ..tokens.visible import visible
from .paths import ClientPath, PathReport
from .trials import PRETRAINED, WORDS, Demo, Trial, remarks

NO_GAP: Final = 1e-4
"""Below this, two logprobs of one token are one number, computed in another order."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One line of the table, and what it counts. `name` is its key in JSON."""

    name: str
    label: str
    about: str
    number: Callable[[PathReport], float]
    key: bool = False
    show: Callable[[float, int], str] = lambda number, _: f"{number:,}"
    """The number for people, given how many rollouts there are."""
    good: Callable[[float, int], bool] | None = None

    def value(self, report: PathReport) -> str:
        return self.show(self.number(report), len(report.rollouts))

    def tone(self, report: PathReport) -> str:
        """``"good"``, ``"bad"``, or ``""`` where it is neither."""
        if self.good is None:
            return ""
        return "good" if self.good(self.number(report), len(report.rollouts)) else "bad"


def _gap(value: float, _: int) -> str:
    return "0" if value == 0 else f"{value:.1e}" if value < 1e-4 else f"{value:.4f}"


def _none(number: float, _: int) -> bool:
    return number == 0


def _no_gap(number: float, _: int) -> bool:
    return number < NO_GAP


MEASURES: Final = (
    Measure(
        "breaks",
        "breaks",
        "prompts that do not begin with the stream so far, id for id",
        lambda one: one.num_breaks,
        key=True,
        good=_none,
    ),
    Measure(
        "samples",
        "samples",
        "rows that it takes to train each sampled token after the very prompt it was sampled from",
        lambda one: one.samples,
        key=True,
        show=lambda number, rollouts: f"{number:,} from {rollouts:,}",
        good=lambda number, rollouts: number == rollouts,
    ),
    Measure(
        "mismatched_tokens",
        "mismatched tokens",
        "sampled tokens that are not in the row, where a rollout is trained as one row",
        lambda one: one.mismatched,
        key=True,
        good=_none,
    ),
    Measure(
        "never_sampled_tokens",
        "tokens never sampled",
        "tokens of those rows that carry loss, and that no engine returned",
        lambda one: one.foreign,
        good=_none,
    ),
    Measure(
        "mean_logprob_gap",
        "logprob gap, mean",
        "|engine's logprob - that of the same weights in one pass over the row|, over sampled tokens still in the row",
        lambda one: one.mean_gap,
        key=True,
        show=_gap,
        good=_no_gap,
    ),
    Measure(
        "largest_logprob_gap",
        "logprob gap, largest",
        "the same, of the token where it is largest",
        lambda one: one.largest_gap,
        key=True,
        show=_gap,
        good=_no_gap,
    ),
    Measure(
        "broken_rollouts",
        "rollouts with a break",
        "those with at least one",
        lambda one: one.broken,
        show=lambda number, rollouts: f"{number:,} of {rollouts:,}",
    ),
    Measure(
        "tokens_in_samples",
        "tokens in the samples",
        "the length of those rows together; what two rows share is in both",
        lambda one: one.tokens_in_samples,
    ),
    Measure(
        "cache_lost",
        "cache lost",
        "tokens of streams after the place of a break: what a prefix cache held and could not serve",
        lambda one: one.cache_lost,
    ),
    Measure(
        "solved",
        "solved",
        "questions answered rightly; one more or less is no finding",
        lambda one: one.solved,
        show=lambda number, _: f"{100 * number:.1f} %",
    ),
    Measure("turns", "turns", "completions that were sampled, calls and answers alike", lambda one: one.turns),
    Measure("sampled_tokens", "sampled tokens", "of all turns, stop tokens among them", lambda one: one.sampled),
)


# -- for programs


def demo_json(demo: Demo) -> dict[str, Any]:
    """The tables as plain data, and what has to be known to read them."""
    return {
        "seed": demo.seed,
        "remarks": remarks(demo),
        "noise": asdict(NOISE),
        "pretrained": {
            "model": PRETRAINED.model,
            "rollouts": PRETRAINED.rollouts,
            "broken_rollouts": PRETRAINED.broken,
            "cause": str(PRETRAINED.cause),
            "measured": "apart, not in this run",
        },
        "paths": {
            str(one.path): {**_json_breaks(one), **{measure.name: measure.number(one) for measure in MEASURES}}
            for one in demo.paths
        },
        "trials": [
            {
                "name": trial.name,
                "about": trial.about,
                "temperature": trial.temperature,
                "drops_past_reasoning": trial.drops_reasoning,
                "paths": {str(one.path): _json_breaks(one) for one in trial.reports},
            }
            for trial in demo.trials
        ],
    }


def _json_breaks(report: PathReport) -> dict[str, Any]:
    return {
        "rollouts": len(report.rollouts),
        "later_user_turns": report.later_user_turns,
        "breaks": report.num_breaks,
        "broken_rollouts": report.broken,
        "causes": report.causes,
    }


# -- why streams broke: the same lines for terminals and browsers


def cause_lines(trial: Trial) -> list[tuple[str, str, list[str]]]:
    """For each line of a trial its label, what it is, and a number for each path."""
    lines = [
        (cause, _words(cause), [f"{one.causes.get(cause, 0):,}" for one in trial.reports]) for cause in trial.causes
    ]
    if not lines:
        lines.append(("no break", "", ["0" for _ in trial.reports]))
    broken = [f"{one.broken:,} of {len(one.rollouts):,}" for one in trial.reports]
    lines.append(("rollouts with a break", "", broken))
    if trial.drops_reasoning:
        asked = [f"{one.later_user_turns:,}" for one in trial.reports]
        lines.append(("user messages after an answer", "where past reasoning is dropped", asked))
    return lines


def _words(cause: str) -> str:
    return WORDS.get(Cause(cause), "docs/breaks.md tells what that is")


# -- for terminals

_LABEL, _NUMBER = 32, 13
"""How wide the columns are, so that one table stands below the other."""


def demo_text(demo: Demo) -> RenderableType:
    """The table, what its lines are, why streams broke and one example, and what has to be known to read it."""
    table = _columns([str(one.path) for one in demo.paths])
    for measure in MEASURES:
        cells = [Text(measure.value(one), _STYLES[measure.tone(one)]) for one in demo.paths]
        table.add_row(Text(measure.label, "bold" if measure.key else "dim"), *cells)
    parts: list[RenderableType] = [table, Text()]
    parts += [Text.assemble(f"  {measure.label}: ", (measure.about, "dim")) for measure in MEASURES]
    parts += [
        Text(),
        Text("Why streams broke: breaks by cause, with the noise in pocket's training and without", "bold"),
    ]
    for trial in demo.trials:
        parts += [Text(), Text.assemble(f"  {trial.name}", (f": {trial.about}", "dim")), _trial_table(trial)]
    told = {label: words for trial in demo.trials for label, words, _ in cause_lines(trial) if words}
    parts += [Text(), *(Text.assemble(f"  {label}: ", (words, "dim")) for label, words in told.items())]
    shown = [(trial, *found) for trial in demo.trials for found in examples_of(trial)]
    if shown:
        trial, path, name, found = shown[0]
        parts += [Text(), Text(f"For example, {found.cause} ({trial.name}, {path}, {visible(name)})", "bold")]
        parts += [Text(f"  {line}") for line in str(found).splitlines()]
    parts += [Text(), Text("What to know when reading this", "bold")]
    parts += [Text(f"- {remark}") for remark in remarks(demo)]
    return Group(*parts)


def _columns(heads: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 0, 0, 2), header_style="bold")
    table.add_column("", width=_LABEL)
    for head in heads:
        table.add_column(head, justify="right", width=_NUMBER)
    return table


def _trial_table(trial: Trial) -> Table:
    table = _columns([str(one.path) for one in trial.reports])
    table.show_header = False
    for label, _, numbers in cause_lines(trial):
        table.add_row(Text(f"  {label}"), *numbers)
    return table


_STYLES: Final = {"": "", "good": "bold green", "bad": "bold red"}


# -- examples


def examples_of(trial: Trial) -> list[tuple[ClientPath, str, Break]]:
    """For each cause the shortest break of the first path that has one, with the name of its rollout."""
    found: dict[str, tuple[ClientPath, str, Break]] = {}
    for report in trial.reports:
        for cause, (name, one) in report.examples.items():
            found.setdefault(cause, (report.path, name, one))
    return list(found.values())


__all__ = ["MEASURES", "Measure", "cause_lines", "demo_json", "demo_text", "examples_of"]
