"""The demo's measurements as data and as a document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final, NamedTuple

from ..diagnose.breaks import Break
from ..diagnose.finding import Cause
from ..pocket import NOISE
from ..show.document import Cell, Contrasts, Document, StreamBars, Table
from ..show.visible import counted
from ..tokens.ids import runs
from .paths import ClientPath, Demo, PathReport

PRETRAINED: Final = {"model": "SmolLM2-135M", "rollouts": 384, "broken_rollouts": 6, "cause": str(Cause.BPE_REMERGE)}
"""A model without noise in its training, on the same tasks. Measured once, not in a run of the demo."""
ROUNDING: Final = 1e-4
"""A smaller gap between two logprobs is rounding."""

PATHS: Final[Mapping[ClientPath, str]] = {
    ClientPath.RERENDER: "parse the completion, render all messages, encode everything again",
    ClientPath.FIXED_BASE: "parse the completion, encode message by message after a fixed conversation",
    ClientPath.TOKENTRACE: "keep the sampled ids, bridge to the next turn",
}
CAUSES: Final[Mapping[str, str]] = {
    str(Cause.BPE_REMERGE): "the same text, encoded again, is other tokens",
    str(Cause.JSON_FORMAT): "the same call, written again, has other spacing",
    str(Cause.STRIPPED_REASONING): "the template drops reasoning that was sampled",
}


class Measure(NamedTuple):
    """A row of the table: a number of `PathReport`, its label and meaning, and the largest good value."""

    name: str
    label: str
    about: str
    good: float | None = None

    def cell(self, report: PathReport) -> Cell:
        number, rollouts = report.numbers()[self.name], len(report.rollouts)
        tone = "" if self.good is None else "good" if number <= self.good else "bad"
        if self.name == "samples":
            return Cell(f"{number:,} from {rollouts:,}", "good" if number == rollouts else "bad")
        if self.name.endswith("gap"):
            return Cell("0" if number == 0 else f"{number:.1e}" if number < ROUNDING else f"{number:.4f}", tone)
        texts = {"broken_rollouts": f"{number:,} of {rollouts:,}", "solved": f"{100 * number:.1f} %"}
        return Cell(texts.get(self.name, f"{number:,}"), tone)


MEASURES: Final = (
    Measure("breaks", "breaks", "prompts that do not start with the stream so far, id for id", 0),
    Measure("broken_rollouts", "rollouts with a break", "those with at least one"),
    Measure("samples", "samples", "rows that train each sampled token once, after the prompt it was sampled from"),
    Measure("tokens_in_samples", "tokens in the samples", "their total length; shared prefixes count in every row"),
    Measure("mismatched_tokens", "mismatched tokens", "sampled, and missing if a rollout is one row", 0),
    Measure("never_sampled_tokens", "tokens never sampled", "they carry loss there, and were not sampled", 0),
    Measure("mean_logprob_gap", "logprob gap, mean", "|engine's logprob - the same weights' in that row|", ROUNDING),
    Measure("largest_logprob_gap", "logprob gap, largest", "of the token where it is largest", ROUNDING),
    Measure("solved", "solved", "questions answered correctly; one more or less means nothing"),
    Measure("sampled_tokens", "sampled tokens", "of all turns, including stop tokens"),
)


def remarks(demo: Demo) -> list[str]:
    """Say what the numbers mean, and what they do not."""
    sampled, greedy, dropped = (trial.of(ClientPath.RERENDER).numbers() for trial in demo.trials)
    count = len(demo.paths[0].rollouts)
    return [
        f"Pocket was trained on noise that breaks streams: {100 * NOISE.resegmented:g} % of the assistant's tokens "
        f"that can be split were split in two, and {100 * NOISE.compact:g} % of its calls have no space after the "
        "colon. The first question was chosen because streams break on it. So how often they break here says nothing "
        f"about other models: re-render broke {sampled['broken_rollouts']} of {count} rollouts at temperature 1, and "
        f"{greedy['broken_rollouts']} of {count} greedily, where the noise hardly ever shows.",
        "A pretrained model without such noise, {model}, broke in {broken_rollouts} of {rollouts} rollouts on the same "
        "tasks, each time by a {cause}. That was measured separately.".format(**PRETRAINED),
        "No noise is needed where a template drops past reasoning: the next user message removes sampled "
        f"reasoning. Re-render broke at {dropped['breaks']} of {dropped['later_user_turns']} such messages.",
        "The other two paths do not break there, because they keep showing the model its past reasoning. A server that "
        "renders each conversation again shows it another history than it was trained on (docs/audit.md).",
    ]


def demo_json(demo: Demo) -> dict[str, Any]:
    """Return the measurements as plain data."""
    trials = [
        {name: getattr(trial, name) for name in ("name", "about", "temperature", "drops_reasoning")}
        | {
            "paths": {
                str(one.path): {"rollouts": len(one.rollouts), "causes": one.causes, **one.numbers()}
                for one in trial.reports
            }
        }
        for trial in demo.trials
    ]
    about = {"noise": asdict(NOISE), "pretrained": PRETRAINED, "paths": trials[0]["paths"]}
    return {"seed": demo.seed, "remarks": remarks(demo), **about, "trials": trials}


def demo_document(demo: Demo) -> Document:
    """Return streams as bars, both tables, and the shortest break of each cause."""
    differences = Contrasts()
    for place, broken in _examples(demo):
        broken.add_to(differences, f"{broken.cause}: {place}")
    head: list[str | Cell] = ["", *(Cell(str(one.path), small=PATHS[one.path]) for one in demo.paths)]
    rows = [[Cell(one.label, small=one.about), *map(one.cell, demo.paths)] for one in MEASURES]
    return Document(
        "Three ways to the next turn",
        "tokentrace demo",
        "pocket",
        lead=f"{counted(len(demo.paths[0].rollouts), 'rollout')} by each path: the same questions, tools, weights and "
        f"seeds (--seed {demo.seed}).",
        tables=[Table("What each path comes to", head, rows), _causes(demo)],
        bars=[_bars(report) for report in demo.paths],
        notes=remarks(demo),
        **differences.content(),
    )


def _causes(demo: Demo) -> Table:
    rows: list[list[str | Cell]] = []
    for trial in demo.trials:
        rows.append([Cell(trial.name, small=trial.about)])
        for cause in dict.fromkeys(cause for one in trial.reports for cause in one.causes):
            about = CAUSES.get(cause, "see docs/check.md")
            rows.append([Cell(cause, small=about), *(f"{one.causes.get(cause, 0):,}" for one in trial.reports)])
        if not any(one.causes for one in trial.reports):
            rows.append(["no break", *("0" for _ in trial.reports)])
        if trial.drops_reasoning:
            turns = [f"{one.numbers()['later_user_turns']:,}" for one in trial.reports]
            rows.append(["user messages after an answer", *turns])
    return Table("Why streams broke", ["", *(str(one.path) for one in demo.paths)], rows)


def _examples(demo: Demo) -> Iterator[tuple[str, Break]]:
    shortest: dict[Cause, tuple[int, str, Break]] = {}
    for trial in demo.trials:
        for report in trial.reports:
            for name, breaks in report.breaks.items():
                for broken in breaks:
                    size = sum(stop - start for start, stop in (broken.stream_range, broken.prompt_range))
                    if broken.cause not in shortest or size < shortest[broken.cause][0]:
                        shortest[broken.cause] = size, f"{trial.name}, {report.path}, {name}", broken
    yield from ((place, broken) for _, place, broken in shortest.values())


def _bars(report: PathReport) -> StreamBars:
    breaks, samples = (int(report.numbers()[name]) for name in ("breaks", "samples"))
    records = [rollout.trajectory for rollout in report.rollouts]
    streams = [
        (len(one), runs(one.loss_mask(once=False)), [branch.start for branch in one.branches[1:]]) for one in records
    ]
    return StreamBars(str(report.path), f"{counted(breaks, 'break')}, {counted(samples, 'sample')}", streams)
