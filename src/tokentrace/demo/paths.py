"""The same questions on three client paths, and what each path costs."""

import math
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import SequenceMatcher
from enum import StrEnum
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..conversation.forms import with_parsed_arguments
from ..diagnose.breaks import Break, explain_break
from ..diagnose.finding import Cause
from ..diagnose.incremental import SYSTEM, USER, IncrementalMode, SanityCheck, tokenize_incrementally
from ..engines.embedded import EmbeddedEngine
from ..engines.protocol import Completion, Engine, GenerateRequest, SamplingParams
from ..pocket import NOISE, POCKET
from ..pocket.model import Floats, TokenIds, load_pocket
from ..rendering.factory import create_renderer
from ..rendering.renderer import Renderer
from ..rollout.batch import run_rollouts
from ..rollout.loop import Agent, Budget, End, Rollout, Task
from ..samples.trajectories import owned_turns
from ..show.document import Cell, Document, StreamBars, Table
from ..show.visible import counted
from ..tokens.ids import runs
from ..tokens.tokenizer import Ids
from .questions import FollowUps, pick_questions, question_reward, question_task

Row = tuple[Ids, npt.NDArray[np.bool_]]
"""What a trainer gets: ids, and True for each that carries loss."""
NamedBreak = tuple[str, Break]
Score = Callable[[TokenIds], Floats]
Progress = Callable[[str, int, int], None]
BUDGET = Budget(turns=16, turn_tokens=256)
_FILES = resources.files(__package__)
_REPORT: dict[str, Any] = tomllib.loads(_FILES.joinpath("report.toml").read_text("utf-8"))


class ClientPath(StrEnum):
    """How a client makes the next prompt."""

    RERENDER = "re-render"
    FIXED_BASE = "fixed base"
    TOKENTRACE = "tokentrace"


def path_row(path: ClientPath, renderer: Renderer, rollout: Rollout, *, prompt: bool = False) -> Row:
    """A rollout's row on a path: its stream, or its messages encoded again."""
    if path is ClientPath.TOKENTRACE:
        return rollout.trajectory.stream(), rollout.trajectory.loss_mask()
    messages, tools = with_parsed_arguments(rollout.messages), rollout.schemas
    if path is ClientPath.RERENDER:
        rendered = renderer.render(messages, tools=tools, add_generation_prompt=prompt)
        return rendered.ids, rendered.mask
    mode, check = IncrementalMode.FIXED_BASE, SanityCheck.OFF
    whole = tokenize_incrementally(renderer, messages, tools=tools, mode=mode, sanity_check=check)
    base = renderer.render_ids([SYSTEM, USER], tools=tools)
    asking = renderer.render_ids([SYSTEM, USER], tools=tools, add_generation_prompt=prompt)
    new = np.asarray(asking[len(base) :], np.int32)
    return np.concatenate((whole.ids, new)), np.concatenate((whole.mask, np.zeros(len(new), np.bool_)))


class PathAgent(Agent):
    """An agent that prompts as a client path does, and explains breaks."""

    def __init__(self, engine: Engine, renderer: Renderer, path: ClientPath, **settings: Any) -> None:
        super().__init__(engine, renderer, **settings)
        self._path = path
        self.breaks: list[NamedBreak] = []

    def go_on(
        self, rollout: Rollout, prompt: Ids, completion: Ids, new: list[Mapping[str, Any]]
    ) -> End | None:
        if self._path is ClientPath.TOKENTRACE:
            return super().go_on(rollout, prompt, completion, new)
        trajectory = rollout.trajectory
        rollout.messages += new
        ids, _ = path_row(self._path, self.renderer, rollout, prompt=True)
        if not self.has_room(len(ids)):
            return End.CONTEXT
        broken = explain_break(trajectory.stream(), ids, self.renderer, sampled=trajectory.table().mask)
        if broken is None:
            trajectory.extend_to(ids, messages=len(rollout.messages))
        else:
            trajectory.branch(ids, messages=len(rollout.messages), cause=str(broken.cause))
            self.breaks.append((rollout.task.name, broken))
        return None


class CachedEngine(EmbeddedEngine):
    """The embedded engine with a cache that the paths share."""

    def __init__(self) -> None:
        super().__init__()
        self._cache: dict[tuple[bytes, SamplingParams], Completion] = {}

    async def _generate(self, request: GenerateRequest) -> Completion:
        key = np.asarray(request.prompt_ids, np.int32).tobytes(), request.sampling
        if key in self._cache:
            return replace(self._cache[key], cached_tokens=None)
        self._cache[key] = completion = await super()._generate(request)
        return completion


class Scored(NamedTuple):
    """A trainer's row, compared with the sampled tokens."""

    sampled: int
    mismatched: int
    foreign: int
    gaps: npt.NDArray[np.float64]


def score_row(rollout: Rollout, row: Row, score: Score) -> Scored:
    """Align sampled turns with runs that carry loss, and score the row."""
    ids, mask = row
    turns = owned_turns(rollout.trajectory)
    positions: list[int] = []
    logprobs: list[float] = []
    for turn, (start, stop) in zip(turns, runs(mask), strict=False):
        sampled, engine = turn.tokens.ids.tolist(), np.asarray(turn.tokens.logprobs)
        matcher = SequenceMatcher(None, sampled, ids[start:stop].tolist(), False)
        for at, other, size in matcher.get_matching_blocks():
            logprobs += engine[at : at + size].tolist()
            positions += range(start + other, start + other + size)
    count = sum(map(len, turns))
    scores = score(ids)[np.array(positions) - 1] if positions else np.zeros(0)
    missing, foreign = count - len(positions), int(np.count_nonzero(mask)) - len(positions)
    return Scored(count, missing, foreign, np.abs(np.array(logprobs) - scores))


@dataclass(frozen=True, slots=True, eq=False)
class PathReport:
    """The measurements of one path."""

    path: ClientPath
    rollouts: list[Rollout]
    breaks: Sequence[NamedBreak]
    scored: Sequence[Scored] = ()

    def numbers(self) -> dict[str, float]:
        trajectories = [rollout.trajectory for rollout in self.rollouts]
        branches = [branch for one in trajectories for branch in one.branches]
        gaps = np.concatenate([np.zeros(0), *(one.gaps for one in self.scored)])
        roles = [message["role"] for rollout in self.rollouts for message in rollout.messages]
        return {
            "breaks": sum(one.num_branches - 1 for one in trajectories),
            "broken_rollouts": sum(one.num_branches > 1 for one in trajectories),
            "samples": sum(one.num_samples for one in trajectories),
            "tokens_in_samples": sum(branch.stop for branch in branches if branch.sampled),
            "mismatched_tokens": sum(one.mismatched for one in self.scored),
            "never_sampled_tokens": sum(one.foreign for one in self.scored),
            "mean_logprob_gap": float(gaps.mean()) if len(gaps) else 0.0,
            "largest_logprob_gap": float(gaps.max(initial=0.0)),
            "solved": sum(rollout.reward or 0.0 for rollout in self.rollouts) / max(1, len(self.rollouts)),
            "sampled_tokens": sum(one.sampled for one in self.scored),
            "later_user_turns": roles.count("user") - len(self.rollouts),
        }

    @property
    def causes(self) -> Counter[Cause]:
        return Counter(broken.cause for _, broken in self.breaks)

    def described(self) -> dict[str, Any]:
        causes = {str(cause): count for cause, count in self.causes.most_common()}
        return {"rollouts": len(self.rollouts), "causes": causes, **self.numbers()}


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """All paths on the same questions, with one template and one temperature."""

    name: str
    about: str
    temperature: float
    drops_reasoning: bool
    reports: Sequence[PathReport] = ()
    """One for each `ClientPath`."""


TRIALS = [Trial(**entry) for entry in _REPORT["trials"]]
"""The trials of the demo. Rows can only be scored at temperature 1."""


def trial_renderer(trial: Trial) -> Renderer:
    forgetful = _FILES.joinpath("forgetful.jinja").read_text("utf-8")
    return create_renderer(POCKET, chat_template=forgetful if trial.drops_reasoning else None)


async def run_demo(
    *, rollouts: int = 64, seed: int = 0, progress: Progress = lambda *_: None
) -> list[Trial]:
    """Run all trials, and score the rows of the first."""
    tasks = [question_task(question) for question in pick_questions(rollouts, seed)]
    model, engine, trials = load_pocket(), CachedEngine(), list[Trial]()
    try:
        for trial in TRIALS:
            score = None if trials else model.score
            reports = [
                await run_path(path, tasks, trial, engine, seed, score, progress) for path in ClientPath
            ]
            trials.append(replace(trial, reports=reports))
    finally:
        await engine.close()
    return trials


async def run_path(
    path: ClientPath,
    tasks: Sequence[Task],
    trial: Trial,
    engine: Engine,
    seed: int = 0,
    score: Score | None = None,
    progress: Progress = lambda *_: None,
) -> PathReport:
    renderer = trial_renderer(trial)
    sampling = SamplingParams(max_tokens=BUDGET.turn_tokens, temperature=trial.temperature)
    settings = {"reward": question_reward, "budget": BUDGET, "interaction": FollowUps()}
    agent = PathAgent(engine, renderer, path, sampling=sampling, **settings)
    ended: dict[str, Rollout] = {}

    def end(rollout: Rollout) -> None:
        ended[rollout.task.name] = rollout
        progress(f"{trial.name}: {path}", len(ended), len(tasks))

    await run_rollouts(agent, tasks, done=end, seed=seed)
    rollouts = [ended[task.name] for task in tasks]
    scored = [score_row(one, path_row(path, renderer, one), score) for one in rollouts] if score else []
    return PathReport(path, rollouts, agent.breaks, scored)


class Measure(NamedTuple):
    """A row of the table: its texts, its number format, and its largest good value."""

    name: str
    label: str
    about: str
    form: str = "{number:,}"
    good: float | None = None

    def cell(self, report: PathReport) -> Cell:
        number, rollouts = report.numbers()[self.name], len(report.rollouts)
        good = rollouts if self.name == "samples" else self.good
        tone = "" if good is None else "good" if number <= good else "bad"
        gap = "0" if number == 0 else f"{number:.1e}" if number < (self.good or 0) else f"{number:.4f}"
        return Cell(self.form.format(number=number, rollouts=rollouts, percent=100 * number, gap=gap), tone)


MEASURES = [Measure(**entry) for entry in _REPORT["measures"]]


def remarks(trials: Sequence[Trial]) -> list[str]:
    """Say what the numbers mean, and what they do not."""
    sampled, greedy, dropped = (trial.reports[0].numbers() for trial in trials)
    rollouts, measured = counted(len(trials[0].reports[0].rollouts), "rollout"), _REPORT["pretrained"]
    return [
        f"Pocket was trained on noise that breaks streams: {100 * NOISE.resegmented:g} % of the assistant's "
        f"tokens that can be split were split in two, and {100 * NOISE.compact:g} % of its calls have no space "
        "after the colon. The first question was chosen because streams break on it. So the number of breaks "
        f"says nothing about other models. Here re-render broke {sampled['broken_rollouts']} of {rollouts} at "
        f"temperature 1, and {greedy['broken_rollouts']} of {rollouts} greedily, where noise hardly ever shows.",
        "A pretrained model without such noise, {model}, broke in {broken_rollouts} of {rollouts} rollouts on "
        "the same tasks, each time because of a {cause}. That was measured separately.".format(**measured),
        "No noise is needed where a template drops past reasoning: the next user message removes sampled "
        f"reasoning. Re-render broke at {dropped['breaks']} of {dropped['later_user_turns']} such messages.",
        "The other two paths do not break there, because they keep showing the model its past reasoning. A "
        "server that renders each conversation again shows it a history that it was not trained on.",
    ]


def demo_json(trials: Sequence[Trial], seed: int) -> dict[str, Any]:
    names, rows = ("name", "about", "temperature", "drops_reasoning"), list[dict[str, Any]]()
    for trial in trials:
        paths = {str(one.path): one.described() for one in trial.reports}
        rows.append({name: getattr(trial, name) for name in names} | {"paths": paths})
    about = {"noise": asdict(NOISE), "pretrained": _REPORT["pretrained"], "paths": rows[0]["paths"]}
    return {"seed": seed, "remarks": remarks(trials), **about, "trials": rows}


def demo_document(trials: Sequence[Trial], seed: int) -> Document:
    paths = trials[0].reports
    head: list[str | Cell] = ["", *(Cell(str(one.path), small=_REPORT["paths"][one.path]) for one in paths)]
    rows = [[Cell(one.label, small=one.about), *map(one.cell, paths)] for one in MEASURES]
    return Document(
        "Three ways to the next turn",
        "tokentrace demo",
        "pocket",
        lead=f"{counted(len(paths[0].rollouts), 'rollout')} on each path: the same questions (--seed {seed}).",
        tables=[Table("What each path comes to", head, rows), _causes(trials)],
        bars=[_bars(report) for report in paths],
        notes=remarks(trials),
        contrasts=[broken.contrast(f"{broken.cause}: {place}") for place, broken in _examples(trials)],
    )


def _causes(trials: Sequence[Trial]) -> Table:
    rows: list[list[str | Cell]] = []
    for trial in trials:
        rows.append([Cell(trial.name, small=trial.about)])
        for cause in dict.fromkeys(cause for one in trial.reports for cause, _ in one.causes.most_common()):
            counts = [f"{one.causes[cause]:,}" for one in trial.reports]
            rows.append([Cell(str(cause), small=cause.meaning), *counts])
        if not any(one.causes for one in trial.reports):
            rows.append(["no break", *("0" for _ in trial.reports)])
        if trial.drops_reasoning:
            turns = (f"{one.numbers()['later_user_turns']:,}" for one in trial.reports)
            rows.append(["user messages after an answer", *turns])
    return Table("Why streams broke", ["", *ClientPath], rows)


def _examples(trials: Sequence[Trial]) -> Iterable[NamedBreak]:
    shortest: dict[Cause, tuple[int, NamedBreak]] = {}
    for trial in trials:
        for report in trial.reports:
            for name, broken in report.breaks:
                size = sum(stop - start for start, stop in (broken.stream_range, broken.prompt_range))
                if size < shortest.get(broken.cause, (math.inf,))[0]:
                    shortest[broken.cause] = size, (f"{trial.name}, {report.path}, {name}", broken)
    return [example for _, example in shortest.values()]


def _bars(report: PathReport) -> StreamBars:
    numbers = report.numbers()
    breaks, samples = int(numbers["breaks"]), int(numbers["samples"])
    records = [rollout.trajectory for rollout in report.rollouts]
    streams = [
        (len(one), runs(one.table().mask), [part.start for part in one.branches[1:]]) for one in records
    ]
    return StreamBars(
        str(report.path), f"{counted(breaks, 'break')}, {counted(samples, 'sample')}", streams
    )
