"""The views of the comparison of client paths: numbers for programs, a table for terminals, and a page: what each path
comes to, why and where streams broke, and the tokens of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..compare.breaks import Break, Cause
from ..pocket import NOISE
from ..rendering.renderer import Renderer
from ..rollout.loop import Rollout
from ..show.contrasts import Differences
from ..show.documents import document_of
from ..tokens.alignment import Hunk, align
from ..tokens.ids import runs
from ..tokens.tokenizer import Ids
from ..tokens.visible import counted, visible
from ..viewer.document import HUES, Cell, Document, StreamBars, Track, token_columns
from ..viewer.document import Table as PageTable
from ..viewer.page import page_html
from .paths import ABOUT, TEMPERATURE, ClientPath, PathReport
from .trials import PRETRAINED, WORDS, Demo, Trial, remarks

NO_GAP: Final = 1e-4
"""Below this, two logprobs of one token are one number, computed in another order."""
_SHOWN: Final = 4
"""Breaks that the page shows."""


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
    return WORDS.get(Cause(cause), "docs/check.md tells what that is")


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


# -- for browsers


def demo_page(demo: Demo, renderer: Renderer) -> str:
    """The demo as a page that needs nothing but itself."""
    return page_html(demo_document(demo, renderer))


def demo_document(demo: Demo, renderer: Renderer) -> Document:
    reports = demo.paths
    differences = Differences()
    for found, place in _page_examples(demo):
        differences.add_break(f"{found.cause}: {place}", found, renderer.tokenizer)
    _add_whole(reports, renderer, differences)
    rollouts = counted(len(reports[0].rollouts), "rollout")
    return Document(
        "Three ways to the next turn",
        "tokentrace demo",
        lead=f"{rollouts} of the pocket model on held-back questions, at temperature {TEMPERATURE:g}, by "
        f"{len(reports)} client paths: the same questions, tools, weights and seeds (--seed {demo.seed}). All numbers "
        "of the tables were counted in this run. A request that two paths make alike, same prompt and same seed, was "
        "computed once.",
        tables=[_measures_table(reports), _causes_table(demo)],
        lanes=[_lanes(report) for report in reports],
        notes=remarks(demo),
        **differences.shown(),
    )


def _measures_table(reports: Sequence[PathReport]) -> PageTable:
    head: list[str | Cell] = ["", *(Cell(str(report.path), small=ABOUT[report.path]) for report in reports)]
    rows: list[list[str | Cell]] = [
        [Cell(measure.label, small=measure.about), *(Cell(measure.value(one), measure.tone(one)) for one in reports)]
        for measure in MEASURES
    ]
    return PageTable("What each path comes to", head, rows)


def _causes_table(demo: Demo) -> PageTable:
    rows: list[list[str | Cell]] = []
    for trial in demo.trials:
        rows.append([Cell(trial.name, small=trial.about)])
        rows += [[Cell(label, small=words), *numbers] for label, words, numbers in cause_lines(trial)]
    about = (
        "Breaks by cause, on the same questions: with the noise that pocket was trained on, without it, and under a "
        "template that drops past reasoning."
    )
    return PageTable("Why streams broke", ["", *(str(report.path) for report in demo.paths)], rows, about)


def _lanes(report: PathReport) -> StreamBars:
    """The streams of a path: the last prompt of each rollout and what was sampled after it."""
    streams = []
    for rollout in report.rollouts:
        trajectory = rollout.trajectory
        sampled = runs(trajectory.loss_mask(once=False))
        streams.append((len(trajectory), sampled, [one.start for one in trajectory.branches[1:]]))
    return StreamBars(
        str(report.path), f"{counted(report.num_breaks, 'break')}, {counted(report.samples, 'sample')}", streams
    )


def _page_examples(demo: Demo) -> list[tuple[Break, str]]:
    """For a few causes a break, and where it is."""
    shown: dict[str, tuple[Break, str]] = {}
    for trial in demo.trials:
        for path, name, found in examples_of(trial):
            if found.cause not in shown and len(shown) < _SHOWN:
                shown[found.cause] = found, f"{trial.name}, {path}, {name}"
    return list(shown.values())


# -- one rollout


def _add_whole(reports: Sequence[PathReport], renderer: Renderer, differences: Differences) -> None:
    """A rollout of tokentrace, and where a render of its final messages has other tokens; one that has, if any does."""
    ours = [one for report in reports if report.path is ClientPath.TOKENTRACE for one in report.rollouts]
    if not ours:
        return
    found = ((one, *_encoded_again(one, renderer)) for one in ours)
    chosen, ids, hunks = min(found, key=lambda each: (not each[2], each[0].turns < 3, len(each[0].trajectory)))
    made = document_of(chosen.trajectory, tokenizer=renderer).tracks[0]
    name = f"{chosen.task.name} by tokentrace, whole"
    whole = replace(made, name=name, roles=[str(message["role"]) for message in chosen.messages])
    if not hunks:
        differences.tracks.append(whole)
        return
    again = Track("", ids, np.full(len(ids), HUES["scaffold"], np.uint8), **token_columns(renderer.tokenizer, ids))
    about = "what encoding its text again would replace"
    differences.add(f"{name}, and encoded again", whole, again, hunks, ("sampled", "encoded again"), about)


def _encoded_again(rollout: Rollout, renderer: Renderer) -> tuple[Ids, list[Hunk]]:
    """The ids of a render of its final messages, and where its stream has others."""
    ids = renderer.render(rollout.messages, tools=rollout.schemas).ids
    return ids, list(align(rollout.trajectory.stream(), ids))
