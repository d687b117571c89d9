"""What the demo measured: as data, for a terminal, and as a page that begins with a picture of the streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, Final, NamedTuple

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from ..diagnose.breaks import Break
from ..diagnose.finding import Cause
from ..pocket import NOISE
from ..rendering.renderer import Renderer
from ..show.document import HUES, Cell, Contrasts, Document, StreamBars, Table, Track, token_columns
from ..show.results import document_of
from ..show.terminal import grid
from ..tokens.alignment import align
from ..tokens.ids import runs
from ..tokens.visible import counted, visible
from .paths import ClientPath, Demo, PathReport, Trial

PRETRAINED: Final = {"model": "SmolLM2-135M", "rollouts": 384, "broken_rollouts": 6, "cause": str(Cause.BPE_REMERGE)}
"""What a model without noise in its training did on the same tasks. Measured once, not in a run of the demo."""
NO_GAP: Final = 1e-4
"""Below this, two logprobs of one token are one number, computed in another order."""

PATHS: Final[Mapping[ClientPath, str]] = {
    ClientPath.RERENDER: "parse what was sampled, render all messages, encode all of it again",
    ClientPath.FIXED_BASE: "parse what was sampled, encode message by message after a fixed conversation",
    ClientPath.TOKENTRACE: "keep what was sampled, bridge to the next turn",
}
CAUSES: Final[Mapping[str, str]] = {
    Cause.BPE_REMERGE: "the same text, encoded again, is other tokens",
    Cause.JSON_FORMAT: "the same call, written again, has other spacing",
    Cause.STRIPPED_REASONING: "the template leaves out reasoning that was sampled",
}


class Measure(NamedTuple):
    """A line of the table: a property of `PathReport`, its label, what it counts, and up to where it is good."""

    name: str
    label: str
    about: str
    good: float | None = None

    def cell(self, report: PathReport) -> Cell:
        number, rollouts = getattr(report, self.name), len(report.rollouts)
        match self.name:
            case "samples":
                return Cell(f"{number:,} from {rollouts:,}", "good" if number == rollouts else "bad")
            case "broken_rollouts":
                text = f"{number:,} of {rollouts:,}"
            case "solved":
                text = f"{100 * number:.1f} %"
            case "mean_logprob_gap" | "largest_logprob_gap":
                text = "0" if number == 0 else f"{number:.1e}" if number < NO_GAP else f"{number:.4f}"
            case _:
                text = f"{number:,}"
        return Cell(text, "" if self.good is None else "good" if number <= self.good else "bad")


MEASURES: Final = (
    Measure("breaks", "breaks", "prompts that do not begin with the stream so far, id for id", 0),
    Measure("broken_rollouts", "rollouts with a break", "those with at least one"),
    Measure("samples", "samples", "rows that train each sampled token once, after the prompt it was sampled from"),
    Measure("tokens_in_samples", "tokens in the samples", "their length together; what two rows share is in both"),
    Measure("mismatched_tokens", "mismatched tokens", "sampled, and not in the row if a rollout is one row", 0),
    Measure("never_sampled_tokens", "tokens never sampled", "they carry loss there, and no engine returned them", 0),
    Measure("mean_logprob_gap", "logprob gap, mean", "|engine's logprob - the same weights' in that row|", NO_GAP),
    Measure("largest_logprob_gap", "logprob gap, largest", "of the token where it is largest", NO_GAP),
    Measure("solved", "solved", "questions answered rightly; one more or less is no finding"),
    Measure("sampled_tokens", "sampled tokens", "of all turns, stop tokens among them"),
)


def remarks(demo: Demo) -> list[str]:
    """What the numbers mean, and what they do not."""
    sampled, greedy, dropped = (trial.of(ClientPath.RERENDER) for trial in demo.trials)
    count, later = len(sampled.rollouts), dropped.later_user_turns
    return [
        f"Pocket was trained on noise that breaks streams: {100 * NOISE.resegmented:g} % of the assistant's tokens "
        f"that can be split were written as two that spell the same, and {100 * NOISE.compact:g} % of its calls with "
        "no space after the colon. At temperature 1 it samples such things, too; and the first question was chosen "
        "because streams break on it. So how often they break here is our choice, and says nothing about other models: "
        f"re-render broke {sampled.broken_rollouts} of {count} rollouts at temperature 1, and "
        f"{greedy.broken_rollouts} of {count} greedily, where the noise hardly ever shows.",
        "A pretrained model with no such noise, {model}, broke in {broken_rollouts} of {rollouts} rollouts on the same "
        "tasks, each time by a {cause}. That was measured apart, and is not part of this run.".format(**PRETRAINED),
        "No noise is needed where a template drops past reasoning: the next user message takes away reasoning that "
        f"was sampled. Re-render broke at {dropped.breaks} of {later} user messages that came after an answer.",
        "The other two paths do not break there, because they go on showing the model its past reasoning. A server "
        "that renders each conversation anew shows it another history than it was trained on (docs/audit.md).",
    ]


def demo_json(demo: Demo) -> dict[str, Any]:
    """The tables as plain data, and what has to be known to read them."""
    return {
        "seed": demo.seed,
        "remarks": remarks(demo),
        "noise": asdict(NOISE),
        "pretrained": PRETRAINED | {"measured": "apart, not in this run"},
        "paths": {
            str(one.path): _json_breaks(one) | {measure.name: getattr(one, measure.name) for measure in MEASURES}
            for one in demo.paths
        },
        "trials": [
            {
                **{name: getattr(trial, name) for name in ("name", "about", "temperature", "drops_reasoning")},
                "paths": {str(one.path): _json_breaks(one) for one in trial.reports},
            }
            for trial in demo.trials
        ],
    }


def _json_breaks(one: PathReport) -> dict[str, Any]:
    names = ("later_user_turns", "breaks", "broken_rollouts", "causes")
    return {"rollouts": len(one.rollouts)} | {name: getattr(one, name) for name in names}


# -- the same tables for terminals and browsers


def _numbers(demo: Demo) -> Table:
    head: list[str | Cell] = ["", *(Cell(str(one.path), small=PATHS[one.path]) for one in demo.paths)]
    rows: list[list[str | Cell]] = [
        [Cell(measure.label, small=measure.about), *map(measure.cell, demo.paths)] for measure in MEASURES
    ]
    return Table("What each path comes to", head, rows)


def _causes(demo: Demo) -> Table:
    rows: list[list[str | Cell]] = []
    for trial in demo.trials:
        rows.append([Cell(trial.name, small=trial.about)])
        for cause in dict.fromkeys(cause for one in trial.reports for cause in one.causes):
            about = CAUSES.get(cause, "docs/check.md says what that is")
            rows.append([Cell(cause, small=about), *(f"{one.causes.get(cause, 0):,}" for one in trial.reports)])
        if not any(one.breaks for one in trial.reports):
            rows.append(["no break", *("0" for _ in trial.reports)])
        if trial.drops_reasoning:
            rows.append(["user messages after an answer", *(f"{one.later_user_turns:,}" for one in trial.reports)])
    return Table("Why streams broke", ["", *(str(one.path) for one in demo.paths)], rows)


def _examples(demo: Demo) -> Iterator[tuple[str, Break]]:
    """For each cause the shortest break, and where it is."""
    shortest: dict[str, tuple[int, str, Break]] = {}
    for trial in demo.trials:
        for report in trial.reports:
            for name, broken in ((name, one) for name, some in report.found.items() for one in some):
                size = sum(stop - start for start, stop in (broken.stream_range, broken.prompt_range))
                if broken.cause not in shortest or size < shortest[broken.cause][0]:
                    shortest[broken.cause] = size, f"{trial.name}, {report.path}, {name}", broken
    yield from ((place, broken) for _, place, broken in shortest.values())


def demo_text(demo: Demo) -> RenderableType:
    """Both tables, one example, and what has to be known to read them."""
    parts: list[RenderableType] = []
    for table in (_numbers(demo), _causes(demo)):
        firsts = {cell.text: cell.small for cell, *_ in table.rows if isinstance(cell, Cell)}
        parts += [grid(table), Text()]
        parts += [*(Text.assemble(f"  {name}: ", (about, "dim")) for name, about in firsts.items()), Text()]
    for place, broken in list(_examples(demo))[:1]:
        parts += [Text(f"For example, {broken.cause} ({visible(place)})", "bold")]
        parts += [*(Text(f"  {line}") for line in str(broken).splitlines()), Text()]
    return Group(*parts, Text("What to know when reading this", "bold"), *(Text(f"- {one}") for one in remarks(demo)))


# -- the page


def demo_document(demo: Demo, renderer: Renderer) -> Document:
    """Streams as bars, both tables, a break of each cause, and one rollout token by token."""
    differences = Contrasts()
    for place, broken in _examples(demo):
        broken.add_to(differences, f"{broken.cause}: {place}")
    _add_rollout(demo.trials[0], renderer, differences)
    return Document(
        "Three ways to the next turn",
        "tokentrace demo",
        "pocket",
        lead=f"{counted(len(demo.paths[0].rollouts), 'rollout')} by each path: the same questions, tools, weights and "
        f"seeds (--seed {demo.seed}). A line is the stream of one rollout.",
        tables=[_numbers(demo), _causes(demo)],
        bars=[_bars(one) for one in demo.paths],
        notes=remarks(demo),
        **differences.content(),
    )


def _bars(one: PathReport) -> StreamBars:
    """For each rollout its last stream, what was sampled of it, and where prompts broke off."""
    records = [rollout.trajectory for rollout in one.rollouts]
    about = f"{counted(one.breaks, 'break')}, {counted(one.samples, 'sample')}"
    streams = [
        (len(record), runs(record.loss_mask(once=False)), [branch.start for branch in record.branches[1:]])
        for record in records
    ]
    return StreamBars(str(one.path), about, streams)


def _add_rollout(trial: Trial, renderer: Renderer, differences: Contrasts) -> None:
    """A rollout of tokentrace's path beside a render of its messages; one that differs from it, if any does."""
    pairs = []
    for rollout in trial.of(ClientPath.TOKENTRACE).rollouts:
        ids = renderer.render(rollout.messages, tools=rollout.schemas).ids
        pairs.append((rollout, ids, list(align(rollout.trajectory.stream(), ids))))
    rollout, ids, hunks = min(pairs, key=lambda pair: (not pair[2], pair[0].turns < 3, len(pair[1])))
    name, roles = f"{rollout.task.name} by tokentrace", [str(message["role"]) for message in rollout.messages]
    track = replace(document_of(rollout.trajectory, tokenizer=renderer).tracks[0], name=name, roles=roles)
    again = Track("", ids, np.full(len(ids), HUES["scaffold"], np.uint8), **token_columns(renderer.tokenizer, ids))
    about = "what encoding its text again would replace"
    differences.add(f"{name}, and encoded again", track, again, hunks, ("sampled", "encoded again"), about)
