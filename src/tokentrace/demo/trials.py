"""Why streams break, with the noise that pocket was trained on and without it; and the whole of the demo.

Pocket was taught to write as no tokenizer and no template would (`pocket.NOISE`), so that a small model shows in a
minute what large ones do now and then. A trial is the three client paths on the same questions under one template and
one temperature; side by side they tell which breaks need the noise and which do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..compare.breaks import Cause
from ..pocket import NOISE, POCKET
from ..pocket.model import load_pocket
from ..rendering.factory import create_renderer
from ..rendering.renderer import Renderer
from .paths import TEMPERATURE, ClientPath, PathReport, Progress, RememberingEngine, compare_paths


@dataclass(frozen=True, slots=True)
class Pretrained:
    """What a model without such noise did. Measured once, by hand; never part of a run of the demo."""

    model: str
    rollouts: int
    broken: int
    cause: Cause


PRETRAINED: Final = Pretrained("SmolLM2-135M", 384, 6, Cause.BPE_REMERGE)
"""A small model on these tasks that was trained on text as its tokenizer encodes it, with no noise added."""

WORDS: Final[Mapping[Cause, str]] = {
    Cause.BPE_REMERGE: "the same text, encoded again, is other tokens",
    Cause.JSON_FORMAT: "the same call, written again, has other spacing",
    Cause.STRIPPED_REASONING: "the template leaves out reasoning that was sampled",
}
"""Causes that the demo is about, for people; docs/check.md tells the others."""


# -- the second template


def forgetful(template: str) -> str:
    """Pocket's template, but it leaves out the reasoning of all turns before the last message of a user."""
    begin, turn = "{{- bos_token -}}", "{%- if message.role == 'assistant' -%}"
    if template.count(begin) != 1 or template.count(turn) != 1:
        raise ValueError("this is not pocket's template: the places to change are not there")
    find_last = (
        "{%- set asked = namespace(last=-1) -%}{%- for message in messages -%}"
        "{%- if message.role == 'user' -%}{%- set asked.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    )
    keep = "{%- set reasoning = message.reasoning_content if loop.index0 > asked.last else '' -%}"
    changed = template.replace("message.reasoning_content", "reasoning")
    return changed.replace(begin, find_last + begin).replace(turn, turn + keep)


def forgetful_renderer() -> Renderer:
    """Pocket's renderer with the template that drops past reasoning."""
    template = (POCKET / "chat_template.jinja").read_text(encoding="utf-8")
    return create_renderer(POCKET, chat_template=forgetful(template))


# -- the trials

SAMPLED: Final = f"temperature {TEMPERATURE:g}, pocket's template"
GREEDY: Final = "greedy, pocket's template"
FORGETFUL: Final = "greedy, past reasoning dropped"

ABOUT_TRIALS: Final[Mapping[str, str]] = {
    SAMPLED: "the noise shows; these are the rollouts of the first table",
    GREEDY: "always the likeliest token, which the noise hardly ever is",
    FORGETFUL: "the same, and the template drops reasoning before the last user message, as Qwen3's does",
}


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """The client paths on the same questions, and under what."""

    name: str
    about: str
    temperature: float
    drops_reasoning: bool
    reports: Sequence[PathReport]

    @property
    def causes(self) -> list[str]:
        """All causes of breaks, by any path, the most frequent first."""
        totals: dict[str, int] = {}
        for report in self.reports:
            for cause, count in report.causes.items():
                totals[cause] = totals.get(cause, 0) + count
        return sorted(totals, key=lambda cause: (-totals[cause], cause))

    def of(self, path: ClientPath) -> PathReport:
        """The report of one path."""
        return next(report for report in self.reports if report.path is path)


@dataclass(frozen=True, slots=True, eq=False)
class Demo:
    """All that the demo found."""

    seed: int
    paths: Sequence[PathReport]
    """At temperature 1 with pocket's template, rows scored: the table."""
    trials: Sequence[Trial]
    """The first is of these same rollouts."""


async def run_demo(renderer: Renderer, *, rollouts: int = 64, seed: int = 0, progress: Progress | None = None) -> Demo:
    """The comparison, then the same questions with the noise out of the way, under both templates."""
    engine = RememberingEngine(load_pocket())

    async def compare(name: str, other: Renderer, temperature: float) -> Trial:
        def tell(label: str, done: int, total: int) -> None:
            if progress is not None:
                progress(f"{name}: {label}", done, total)

        reports = await compare_paths(
            other,
            rollouts=rollouts,
            seed=seed,
            temperature=temperature,
            score=name == SAMPLED,
            engine=engine,
            progress=tell,
        )
        return Trial(name, ABOUT_TRIALS[name], temperature, name == FORGETFUL, reports)

    try:
        sampled = await compare(SAMPLED, renderer, TEMPERATURE)
        greedy = await compare(GREEDY, renderer, 0.0)
        dropped = await compare(FORGETFUL, forgetful_renderer(), 0.0)
    finally:
        await engine.close()
    return Demo(seed, sampled.reports, (sampled, greedy, dropped))


# -- what has to be said with the numbers


def remarks(demo: Demo) -> list[str]:
    """What the numbers mean and what they do not, one sentence or a few each."""
    return [_of_noise(demo), _of_pretrained(), *_of_reasoning(demo)]


def _of_noise(demo: Demo) -> str:
    sampled, greedy = (trial.of(ClientPath.RERENDER) for trial in demo.trials[:2])
    return (
        f"Pocket was trained on noise that breaks streams: {_percent(NOISE.resegmented)} of the assistant's tokens "
        f"that can be split were written as two that spell the same, and {_percent(NOISE.compact)} of its calls with "
        f"no space after the colon. At temperature {TEMPERATURE:g} it samples such things, too. So how often streams "
        "break here is our choice, and says nothing about other models: by re-render "
        f"{sampled.broken} of {len(sampled.rollouts)} rollouts broke at temperature {TEMPERATURE:g}, and "
        f"{greedy.broken} of {len(greedy.rollouts)} greedily, where the noise hardly ever shows."
    )


def _of_pretrained() -> str:
    return (
        f"A pretrained model with no such noise, {PRETRAINED.model}, broke in {PRETRAINED.broken} of "
        f"{PRETRAINED.rollouts} rollouts on the same tasks, each time by a {PRETRAINED.cause}. That was measured "
        "apart, and is not part of this run."
    )


def _of_reasoning(demo: Demo) -> list[str]:
    trial = next(trial for trial in demo.trials if trial.drops_reasoning)
    report = trial.of(ClientPath.RERENDER)
    asked, broke = report.later_user_turns, report.causes.get(Cause.STRIPPED_REASONING, 0)
    if not asked:
        return [
            "No noise is needed where a template drops past reasoning, but none of these questions goes on after its "
            "first answer; one in twelve does (-n 12)."
        ]
    return [
        "No noise is needed where a template drops past reasoning: the next user message takes reasoning away that "
        f"was sampled, and re-render broke at {broke} of {asked} user messages that came after an answer.",
        "The other two paths do not break there, because they go on showing the model its past reasoning. That is not "
        "what the template would show it: a server that renders each conversation anew gives the model another history "
        "than it was trained on (docs/audit.md).",
    ]


def _percent(share: float) -> str:
    return f"{100 * share:g} %"
