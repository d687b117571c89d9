"""Three ways to get from one turn to the next, run on the same questions with the same seeds, and what each costs.

`RERENDER` renders the parsed conversation anew for every turn. `FIXED_BASE` encodes it message by message, each after
a small conversation that never changes. `TOKENTRACE` is the loop of `Agent`: what was sampled stays, and the bridge
adds what is new. docs/demo.md says what the numbers mean.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..conversation.forms import with_parsed_arguments
from ..conversation.messages import Messages
from ..diagnose.breaks import Break, explain_break
from ..diagnose.incremental import SYSTEM, USER, IncrementalMode, SanityCheck, tokenize_incrementally
from ..engines.embedded import EmbeddedEngine
from ..engines.protocol import Completion, Engine, GenerateRequest, SamplingParams
from ..pocket import POCKET
from ..pocket.model import Floats, PocketModel, TokenIds, load_pocket
from ..rendering.factory import create_renderer
from ..rendering.renderer import Renderer
from ..rollout.batch import run_rollouts
from ..rollout.loop import Agent, Budget, End, Rollout, Task
from ..samples.trajectories import owned_turns, report_rollouts
from ..tokens.alignment import align
from ..tokens.ids import runs
from ..tokens.tokenizer import Ids
from .questions import FollowUps, pick_questions, question_reward, question_task

Mask = npt.NDArray[np.bool_]
Row = tuple[Ids, Mask]
"""What a trainer gets: ids, and True for each that carries loss."""
Client = Callable[..., Row]
Score = Callable[[TokenIds], Floats]
Progress = Callable[[str, int, int], None]
"""Called with what runs, how many of its rollouts are done, and how many there are."""

BUDGET: Final = Budget(turns=16, turn_tokens=256)


class ClientPath(StrEnum):
    """How the next prompt is made. The value is its name for people."""

    RERENDER = "re-render"
    FIXED_BASE = "fixed base"
    TOKENTRACE = "tokentrace"


def rerendered(renderer: Renderer, messages: Messages, tools: Any, *, asks: bool) -> Row:
    """The whole conversation through the template."""
    rendered = renderer.render(messages, tools=tools, add_generation_prompt=asks)
    return rendered.ids, rendered.mask


def fixed_base(renderer: Renderer, messages: Messages, tools: Any, *, asks: bool) -> Row:
    """Message by message, each after the fixed base; then what asks for a turn."""
    settings: dict[str, Any] = {"mode": IncrementalMode.FIXED_BASE, "sanity_check": SanityCheck.OFF}
    whole = tokenize_incrementally(renderer, messages, tools=tools, **settings)
    if not asks:
        return whole.ids, whole.mask
    base = renderer.render_ids([SYSTEM, USER], tools=tools)
    prompted = renderer.render_ids([SYSTEM, USER], tools=tools, add_generation_prompt=True)
    prompt = np.asarray(prompted[len(base) :], np.int32)
    return np.concatenate((whole.ids, prompt)), np.concatenate((whole.mask, np.zeros(len(prompt), np.bool_)))


CLIENTS: Final[Mapping[ClientPath, Client]] = {ClientPath.RERENDER: rerendered, ClientPath.FIXED_BASE: fixed_base}
"""The paths that keep messages: what they make of a conversation."""


class MessageAgent(Agent):
    """The loop of a client that keeps messages and makes every prompt from them.

    If a prompt does not begin with the stream, the trajectory gets a branch, and `breaks` the reason.
    """

    def __init__(self, engine: Engine, renderer: Renderer, client: Client, **settings: Any) -> None:
        super().__init__(engine, renderer, **settings)
        self._client = client
        self.breaks: dict[str, list[Break]] = {}

    def go_on(self, rollout: Rollout, prompt: Ids, completion: Ids, new: list[Mapping[str, Any]]) -> End | None:
        """Make the next prompt from the messages, and record whether it extends the stream."""
        trajectory = rollout.trajectory
        rollout.messages += new
        ids, _ = self._client(self.renderer, with_parsed_arguments(rollout.messages), rollout.schemas, asks=True)
        if not self.has_room(len(ids)):
            return End.CONTEXT
        broken = explain_break(trajectory.stream(), ids, self.renderer, kinds=trajectory.kinds())
        count = len(rollout.messages)
        if broken is None:
            trajectory.extend_to(ids, messages=count)
        else:
            trajectory.branch(ids, messages=count, cause=str(broken.cause))
            self.breaks.setdefault(rollout.task.name, []).append(broken)
        return None


class RememberingEngine(EmbeddedEngine):
    """The embedded engine. Paths make many of the same requests: each is computed once."""

    def __init__(self, model: PocketModel) -> None:
        super().__init__(model)
        self._known: dict[tuple[bytes, SamplingParams], Completion] = {}

    async def _generate(self, request: GenerateRequest) -> Completion:
        """Sample a completion. Greedy and seeded ones depend on prompt and parameters alone, and are remembered."""
        if request.sampling.seed is None and request.sampling.temperature > 0:
            return await super()._generate(request)
        key = np.asarray(request.prompt_ids, np.int32).tobytes(), request.sampling
        if key in self._known:
            return replace(self._known[key], cached_tokens=None)
        self._known[key] = completion = await super()._generate(request)
        return completion


# -- what a trainer makes of it


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """The one row that a trainer of a path gets of a rollout, compared with what was sampled."""

    sampled: int
    """How many tokens were sampled."""
    mismatched: int
    """How many of them are not in the row."""
    foreign: int
    """How many tokens of the row carry loss that were not sampled."""
    gaps: npt.NDArray[np.float64]
    """For each sampled token in the row: the distance between the engine's logprob and its score in the row."""


def trained_row(rollout: Rollout, path: ClientPath, renderer: Renderer) -> Row:
    """The stream, or what the client makes of the final messages."""
    if path in CLIENTS:
        return CLIENTS[path](renderer, with_parsed_arguments(rollout.messages), rollout.schemas, asks=False)
    return rollout.trajectory.stream(), rollout.trajectory.loss_mask()


def score_row(rollout: Rollout, row: Row, score: Score) -> Scored:
    """Align the n-th sampled turn with the n-th run of tokens that carry loss, and score the row."""
    (ids, mask), trajectory = row, rollout.trajectory
    turns = owned_turns(trajectory)
    positions: list[int] = []
    logprobs: list[float] = []
    for turn, (start, stop) in zip(turns, runs(mask), strict=False):
        sampled, engine = trajectory.completion(turn), trajectory.completion_logprobs(turn)
        at, other = 0, start
        for hunk in [*align(sampled, ids[start:stop]), None]:
            until = len(sampled) if hunk is None else hunk.start
            logprobs += engine[at:until].tolist()
            positions += range(other, other + until - at)
            if hunk is not None:
                at, other = hunk.stop, start + hunk.other_stop
    count = sum(len(trajectory.completion(turn)) for turn in turns)
    scores = score(ids)[np.array(positions) - 1] if positions else np.zeros(0)
    missing, foreign = count - len(positions), int(np.count_nonzero(mask)) - len(positions)
    return Scored(count, missing, foreign, np.abs(np.array(logprobs) - scores))


@dataclass(frozen=True, slots=True, eq=False)
class PathReport:
    """What was measured of one path. docs/demo.md says what each number counts."""

    path: ClientPath
    rollouts: list[Rollout]
    """In the order of the questions."""
    found: Mapping[str, Sequence[Break]]
    """Breaks by the name of the rollout."""
    scored: list[Scored] = field(default_factory=list)
    """For each rollout; empty if rows were not scored."""

    @property
    def breaks(self) -> int:
        return sum(rollout.trajectory.num_branches - 1 for rollout in self.rollouts)

    @property
    def broken_rollouts(self) -> int:
        return sum(rollout.trajectory.num_branches > 1 for rollout in self.rollouts)

    @property
    def samples(self) -> int:
        return sum(rollout.trajectory.num_samples for rollout in self.rollouts)

    @property
    def tokens_in_samples(self) -> int:
        return report_rollouts(rollout.trajectory for rollout in self.rollouts).tokens_in_rows

    @property
    def sampled_tokens(self) -> int:
        return sum(one.sampled for one in self.scored)

    @property
    def mismatched_tokens(self) -> int:
        return sum(one.mismatched for one in self.scored)

    @property
    def never_sampled_tokens(self) -> int:
        return sum(one.foreign for one in self.scored)

    @property
    def mean_logprob_gap(self) -> float:
        gaps = np.concatenate([np.zeros(0), *(one.gaps for one in self.scored)])
        return float(gaps.mean()) if len(gaps) else 0.0

    @property
    def largest_logprob_gap(self) -> float:
        return max((float(one.gaps.max(initial=0.0)) for one in self.scored), default=0.0)

    @property
    def solved(self) -> float:
        return sum(rollout.reward or 0.0 for rollout in self.rollouts) / max(1, len(self.rollouts))

    @property
    def later_user_turns(self) -> int:
        """How often a user spoke again after an answer."""
        roles = [message["role"] for rollout in self.rollouts for message in rollout.messages]
        return roles.count("user") - len(self.rollouts)

    @property
    def causes(self) -> dict[str, int]:
        """Why streams broke, the most frequent first."""
        return dict(Counter(str(one.cause) for some in self.found.values() for one in some).most_common())


# -- the runs


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """The paths on the same questions, under one template and one temperature."""

    name: str
    about: str
    temperature: float
    drops_reasoning: bool
    reports: Sequence[PathReport] = ()

    def of(self, path: ClientPath) -> PathReport:
        """The report of one path."""
        return next(report for report in self.reports if report.path is path)


TRIALS: Final = (
    Trial("temperature 1, pocket's template", "the noise shows; the rollouts of the first table", 1.0, False),
    Trial("greedy, pocket's template", "always the likeliest token, which the noise hardly ever is", 0.0, False),
    Trial("greedy, past reasoning dropped", "no reasoning before the last user message, as by Qwen3", 0.0, True),
)
"""What the demo runs. At temperature 1 an engine's logprobs are the model's own, so that rows can be scored."""


@dataclass(frozen=True, slots=True, eq=False)
class Demo:
    """All that the demo measured."""

    seed: int
    trials: Sequence[Trial]

    @property
    def paths(self) -> Sequence[PathReport]:
        """Those of the first trial, whose rows are scored."""
        return self.trials[0].reports


def forgetful(template: str) -> str:
    """Pocket's template, changed to leave out the reasoning of all turns before the last message of a user."""
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


def trial_renderer(trial: Trial) -> Renderer:
    """Pocket's renderer, with the template of a trial."""
    template = (POCKET / "chat_template.jinja").read_text(encoding="utf-8")
    return create_renderer(POCKET, chat_template=forgetful(template) if trial.drops_reasoning else template)


async def run_demo(*, rollouts: int = 64, seed: int = 0, progress: Progress | None = None) -> Demo:
    """All trials on the same questions and seeds; the rows of the first are scored."""
    tasks = [question_task(question) for question in pick_questions(rollouts, seed)]
    model, scores = load_pocket(), dict[bytes, Floats]()

    def score(ids: TokenIds) -> Floats:  # rows that paths share are scored once
        key = np.asarray(ids, np.int32).tobytes()
        if key not in scores:
            scores[key] = model.score(ids)
        return scores[key]

    engine = RememberingEngine(model)
    try:
        trials = []
        for at, trial in enumerate(TRIALS):
            reports = [
                await run_path(path, tasks, trial, engine, seed=seed, score=None if at else score, progress=progress)
                for path in ClientPath
            ]
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
    progress: Progress | None = None,
) -> PathReport:
    """Run tasks by a path, `seed` for the sampling; with `score` the row of each rollout is scored."""
    renderer = trial_renderer(trial)
    sampling = SamplingParams(max_tokens=BUDGET.turn_tokens, temperature=trial.temperature)
    settings: dict[str, Any] = {"sampling": sampling, "interaction": FollowUps(), "reward": question_reward}
    settings["budget"] = BUDGET
    agent = Agent(engine, renderer, **settings)
    if path in CLIENTS:
        agent = MessageAgent(engine, renderer, CLIENTS[path], **settings)
    ended: dict[str, Rollout] = {}

    def end(rollout: Rollout) -> None:
        ended[rollout.task.name] = rollout
        if progress is not None:
            progress(f"{trial.name}: {path}", len(ended), len(tasks))

    await run_rollouts(agent, tasks, done=end, seed=seed)
    rollouts = [ended[task.name] for task in tasks]
    rows = [] if score is None else [(one, trained_row(one, path, renderer), score) for one in rollouts]
    scored = [await asyncio.to_thread(score_row, *row) for row in rows]
    return PathReport(path, rollouts, agent.breaks if isinstance(agent, MessageAgent) else {}, scored)
