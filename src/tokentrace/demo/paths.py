"""The same questions by three client paths, and what each costs."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..conversation.forms import with_parsed_arguments
from ..diagnose.breaks import Break, explain_break
from ..diagnose.finding import Cause
from ..diagnose.incremental import SYSTEM, USER, IncrementalMode, SanityCheck, tokenize_incrementally
from ..engines.embedded import EmbeddedEngine
from ..engines.protocol import Completion, Engine, GenerateRequest, SamplingParams
from ..pocket import NOISE, POCKET
from ..pocket.model import Floats, PocketModel, TokenIds, load_pocket
from ..rendering.factory import create_renderer
from ..rendering.renderer import Renderer
from ..rollout.batch import run_rollouts
from ..rollout.loop import Agent, Budget, End, Rollout, Task
from ..samples.trajectories import owned_turns
from ..show.alignment import align
from ..show.document import Cell, Document, StreamBars, Table
from ..show.visible import counted
from ..tokens.ids import runs
from ..tokens.tokenizer import Ids
from .questions import FollowUps, pick_questions, question_reward, question_task

Row = tuple[Ids, npt.NDArray[np.bool_]]
"""What a trainer gets: ids, and True for each that carries loss."""
Score = Callable[[TokenIds], Floats]
Progress = Callable[[str, int, int], None]
BUDGET: Final = Budget(turns=16, turn_tokens=256)


class ClientPath(StrEnum):
    """How a client makes the next prompt."""

    RERENDER = "re-render"
    FIXED_BASE = "fixed base"
    TOKENTRACE = "tokentrace"


def path_row(path: ClientPath, renderer: Renderer, rollout: Rollout, *, prompt: bool = False) -> Row:
    """Return the stream, or what a client that keeps messages makes of them."""
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
    """An agent that makes prompts by a path, and explains breaks."""

    def __init__(self, engine: Engine, renderer: Renderer, path: ClientPath, **settings: Any) -> None:
        super().__init__(engine, renderer, **settings)
        self._path = path
        self.breaks: dict[str, list[Break]] = {}

    def go_on(self, rollout: Rollout, prompt: Ids, completion: Ids, new: list[Mapping[str, Any]]) -> End | None:
        """Bridge to the next prompt, or make it from the messages."""
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
            self.breaks.setdefault(rollout.task.name, []).append(broken)
        return None


class CachedEngine(EmbeddedEngine):
    """The embedded engine with a cache: paths share requests."""

    def __init__(self, model: PocketModel) -> None:
        super().__init__(model)
        self._cache: dict[tuple[bytes, SamplingParams], Completion] = {}

    async def _generate(self, request: GenerateRequest) -> Completion:
        key = np.asarray(request.prompt_ids, np.int32).tobytes(), request.sampling
        if key in self._cache:
            return replace(self._cache[key], cached_tokens=None)
        self._cache[key] = completion = await super()._generate(request)
        return completion


# -- what a trainer gets


class Scored(NamedTuple):
    """A trainer's row, compared with what was sampled."""

    sampled: int
    mismatched: int
    foreign: int
    gaps: npt.NDArray[np.float64]


def score_row(rollout: Rollout, row: Row, score: Score) -> Scored:
    """Align sampled turns with runs that carry loss; score the row."""
    (ids, mask), trajectory = row, rollout.trajectory
    turns = owned_turns(trajectory)
    positions: list[int] = []
    logprobs: list[float] = []
    for turn, (start, stop) in zip(turns, runs(mask), strict=False):
        sampled, engine = turn.tokens.ids, np.asarray(turn.tokens.logprobs)
        at, other = 0, start
        for hunk in [*align(sampled, ids[start:stop]), None]:
            until = len(sampled) if hunk is None else hunk.start
            logprobs += engine[at:until].tolist()
            positions += range(other, other + until - at)
            if hunk is not None:
                at, other = hunk.stop, start + hunk.other_stop
    count = sum(map(len, turns))
    scores = score(ids)[np.array(positions) - 1] if positions else np.zeros(0)
    missing, foreign = count - len(positions), int(np.count_nonzero(mask)) - len(positions)
    return Scored(count, missing, foreign, np.abs(np.array(logprobs) - scores))


@dataclass(frozen=True, slots=True, eq=False)
class PathReport:
    """The measurements of one path."""

    path: ClientPath
    rollouts: list[Rollout]
    breaks: Mapping[str, Sequence[Break]]
    scored: Sequence[Scored] = ()

    def numbers(self) -> dict[str, float]:
        """Return every measurement by its name in `MEASURES`."""
        trajectories = [rollout.trajectory for rollout in self.rollouts]
        gaps = np.concatenate([np.zeros(0), *(one.gaps for one in self.scored)])
        roles = [message["role"] for rollout in self.rollouts for message in rollout.messages]
        return {
            "breaks": sum(one.num_branches - 1 for one in trajectories),
            "broken_rollouts": sum(one.num_branches > 1 for one in trajectories),
            "samples": sum(one.num_samples for one in trajectories),
            "tokens_in_samples": sum(one.stop for record in trajectories for one in record.branches if one.sampled),
            "mismatched_tokens": sum(one.mismatched for one in self.scored),
            "never_sampled_tokens": sum(one.foreign for one in self.scored),
            "mean_logprob_gap": float(gaps.mean()) if len(gaps) else 0.0,
            "largest_logprob_gap": float(gaps.max(initial=0.0)),
            "solved": sum(rollout.reward or 0.0 for rollout in self.rollouts) / max(1, len(self.rollouts)),
            "sampled_tokens": sum(one.sampled for one in self.scored),
            "later_user_turns": roles.count("user") - len(self.rollouts),
        }

    @property
    def causes(self) -> dict[Cause, int]:
        """Count breaks by cause, the most frequent first."""
        return dict(Counter(one.cause for breaks in self.breaks.values() for one in breaks).most_common())

    def described(self) -> dict[str, Any]:
        causes = {str(cause): count for cause, count in self.causes.items()}
        return {"rollouts": len(self.rollouts), "causes": causes, **self.numbers()}


# -- the runs


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """All paths on the same questions, with one template and one temperature."""

    name: str
    about: str
    temperature: float
    drops_reasoning: bool
    reports: Sequence[PathReport] = ()

    def of(self, path: ClientPath) -> PathReport:
        """The report of a path."""
        return next(report for report in self.reports if report.path is path)


TRIALS: Final = (
    Trial("temperature 1, pocket's template", "the noise shows; the rollouts of the first table", 1.0, False),
    Trial("greedy, pocket's template", "always the likeliest token, which the noise hardly ever is", 0.0, False),
    Trial("greedy, past reasoning dropped", "no reasoning before the last user message, as by Qwen3", 0.0, True),
)
"""What the demo runs. Rows can be scored at temperature 1."""


class Demo(NamedTuple):
    """The measurements; `paths` are those of the first trial."""

    seed: int
    trials: Sequence[Trial]

    @property
    def paths(self) -> Sequence[PathReport]:
        return self.trials[0].reports


_FORGETFUL: Final = {
    "message.reasoning_content": "reasoning",
    "{{- bos_token -}}": "{%- set user = namespace(last=-1) -%}{%- for message in messages -%}"
    "{%- if message.role == 'user' -%}{%- set user.last = loop.index0 -%}{%- endif -%}{%- endfor -%}{{- bos_token -}}",
    "{%- if message.role == 'assistant' -%}": "{%- if message.role == 'assistant' -%}"
    "{%- set reasoning = message.reasoning_content if loop.index0 > user.last else '' -%}",
}
"""What to replace in pocket's template to drop reasoning before the last user message."""


def trial_renderer(trial: Trial) -> Renderer:
    """Return pocket's renderer with the template of a trial."""
    template = (POCKET / "chat_template.jinja").read_text(encoding="utf-8")
    for old, new in _FORGETFUL.items() if trial.drops_reasoning else ():
        template = template.replace(old, new)
    return create_renderer(POCKET, chat_template=template)


async def run_demo(*, rollouts: int = 64, seed: int = 0, progress: Progress = lambda *_: None) -> Demo:
    """Run all trials; the rows of the first are scored."""
    tasks = [question_task(question) for question in pick_questions(rollouts, seed)]
    model = load_pocket()
    engine, trials = CachedEngine(model), list[Trial]()
    try:
        for trial in TRIALS:
            options: dict[str, Any] = {"seed": seed, "score": None if trials else model.score, "progress": progress}
            reports = [await run_path(path, tasks, trial, engine, **options) for path in ClientPath]
            trials.append(replace(trial, reports=reports))
    finally:
        await engine.close()
    return Demo(seed, trials)


async def run_path(
    path: ClientPath,
    tasks: Sequence[Task],
    trial: Trial,
    engine: Engine,
    *,
    seed: int = 0,
    score: Score | None = None,
    progress: Progress = lambda *_: None,
) -> PathReport:
    """Run tasks by a path; `score` scores the row of each rollout."""
    renderer = trial_renderer(trial)
    sampling = SamplingParams(max_tokens=BUDGET.turn_tokens, temperature=trial.temperature)
    settings = {"sampling": sampling, "reward": question_reward, "budget": BUDGET, "interaction": FollowUps()}
    agent = PathAgent(engine, renderer, path, **settings)
    ended: dict[str, Rollout] = {}

    def end(rollout: Rollout) -> None:
        ended[rollout.task.name] = rollout
        progress(f"{trial.name}: {path}", len(ended), len(tasks))

    await run_rollouts(agent, tasks, done=end, seed=seed)
    rollouts = [ended[task.name] for task in tasks]
    rows = [] if score is None else [(one, path_row(path, renderer, one), score) for one in rollouts]
    scored = [await asyncio.to_thread(score_row, *row) for row in rows]
    return PathReport(path, rollouts, agent.breaks, scored)


# -- the report

PRETRAINED: Final = {"model": "SmolLM2-135M", "rollouts": 384, "broken_rollouts": 6, "cause": str(Cause.BPE_REMERGE)}
"""A model without noise in its training, measured once."""
ROUNDING: Final = 1e-4
"""A smaller gap between two logprobs is rounding."""

PATHS: Final[Mapping[ClientPath, str]] = {
    ClientPath.RERENDER: "parse the completion, render all messages, encode everything again",
    ClientPath.FIXED_BASE: "parse the completion, encode message by message after a fixed conversation",
    ClientPath.TOKENTRACE: "keep the sampled ids, bridge to the next turn",
}


class Measure(NamedTuple):
    """A row of the table, and its largest good value."""

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
    trials = []
    for trial in demo.trials:
        values = {name: getattr(trial, name) for name in ("name", "about", "temperature", "drops_reasoning")}
        trials.append(values | {"paths": {str(one.path): one.described() for one in trial.reports}})
    about = {"noise": asdict(NOISE), "pretrained": PRETRAINED, "paths": trials[0]["paths"]}
    return {"seed": demo.seed, "remarks": remarks(demo), **about, "trials": trials}


def demo_document(demo: Demo) -> Document:
    """Return streams as bars, both tables, and the shortest break of each cause."""
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
        contrasts=[broken.contrast(f"{broken.cause}: {place}") for place, broken in _examples(demo)],
    )


def _causes(demo: Demo) -> Table:
    rows: list[list[str | Cell]] = []
    for trial in demo.trials:
        rows.append([Cell(trial.name, small=trial.about)])
        for cause in dict.fromkeys(cause for one in trial.reports for cause in one.causes):
            counts = [f"{one.causes.get(cause, 0):,}" for one in trial.reports]
            rows.append([Cell(str(cause), small=cause.meaning), *counts])
        if not any(one.causes for one in trial.reports):
            rows.append(["no break", *("0" for _ in trial.reports)])
        if trial.drops_reasoning:
            turns = [f"{one.numbers()['later_user_turns']:,}" for one in trial.reports]
            rows.append(["user messages after an answer", *turns])
    return Table("Why streams broke", ["", *(str(one.path) for one in demo.paths)], rows)


def _examples(demo: Demo) -> Iterator[tuple[str, Break]]:
    """Yield the shortest break of each cause, and where it is."""
    all_breaks = [
        (f"{trial.name}, {report.path}, {name}", broken)
        for trial in demo.trials
        for report in trial.reports
        for name, breaks in report.breaks.items()
        for broken in breaks
    ]
    for cause in dict.fromkeys(broken.cause for _, broken in all_breaks):
        yield min((one for one in all_breaks if one[1].cause is cause), key=lambda one: _size(one[1]))


def _size(broken: Break) -> int:
    return sum(stop - start for start, stop in (broken.stream_range, broken.prompt_range))


def _bars(report: PathReport) -> StreamBars:
    breaks, samples = (int(report.numbers()[name]) for name in ("breaks", "samples"))
    records = [rollout.trajectory for rollout in report.rollouts]
    streams = [(len(one), runs(one.table().mask), [branch.start for branch in one.branches[1:]]) for one in records]
    return StreamBars(str(report.path), f"{counted(breaks, 'break')}, {counted(samples, 'sample')}", streams)
