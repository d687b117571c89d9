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
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from ..compare.breaks import Break, explain_break
from ..compare.incremental import SYSTEM, USER, IncrementalMode, SanityCheck, tokenize_incrementally
from ..conversation.messages import Messages
from ..engines.embedded import EmbeddedEngine
from ..engines.protocol import Completion, Engine, GenerateRequest, SamplingParams
from ..pocket.model import Floats, PocketModel, TokenIds, load_pocket
from ..rendering.history import parsed_arguments
from ..rendering.renderer import Renderer
from ..rollout.batch import run_rollouts
from ..rollout.loop import Agent, Budget, End, Rollout, Task
from ..samples.sample import Sample
from ..samples.trajectories import owned_turns, report_rollouts, trajectory_samples
from ..tokens.alignment import align
from ..tokens.ids import runs
from ..tokens.tokenizer import Ids
from .rollouts import FollowUps, question_reward, question_tasks

Mask = npt.NDArray[np.bool_]
Row = tuple[Ids, Mask]
"""What a trainer is given: ids, and True for each that carries loss."""

BUDGET: Final = Budget(turns=16, turn_tokens=256)
TEMPERATURE: Final = 1.0
"""At 1 an engine's logprobs are the model's own: a trainer that scores the same ids gets the same numbers."""


class ClientPath(StrEnum):
    """How the next prompt is made. The value is its name for people."""

    RERENDER = "re-render"
    FIXED_BASE = "fixed base"
    TOKENTRACE = "tokentrace"


ABOUT: Final[Mapping[ClientPath, str]] = {
    ClientPath.RERENDER: "parse what was sampled, render all messages, encode all of it again",
    ClientPath.FIXED_BASE: "parse what was sampled, encode message by message after a fixed conversation",
    ClientPath.TOKENTRACE: "keep what was sampled, bridge to the next turn",
}


# -- how messages become ids


def rerendered(renderer: Renderer, messages: Messages, tools: Any, *, asks: bool) -> Row:
    """The whole conversation through the template."""
    rendered = renderer.render(messages, tools=tools, add_generation_prompt=asks)
    return rendered.ids, rendered.mask


def fixed_base(renderer: Renderer, messages: Messages, tools: Any, *, asks: bool) -> Row:
    """Message by message, each after the fixed base, assistants' among them; then what asks for a turn."""
    off, mode = SanityCheck.OFF, IncrementalMode.FIXED_BASE
    found = tokenize_incrementally(renderer, messages, tools=tools, mode=mode, sanity_check=off)
    if not asks:
        return found.ids, found.mask
    base = [SYSTEM, USER]
    without = renderer.render_ids(base, tools=tools)
    prompt = np.asarray(renderer.render_ids(base, tools=tools, add_generation_prompt=True)[len(without) :], np.int32)
    return np.concatenate((found.ids, prompt)), np.concatenate((found.mask, np.zeros(len(prompt), np.bool_)))


Client = Callable[..., Row]

CLIENTS: Final[Mapping[ClientPath, Client]] = {ClientPath.RERENDER: rerendered, ClientPath.FIXED_BASE: fixed_base}
"""The paths that keep messages: what they make of a conversation."""


# -- the loop of a client that keeps messages


class MessageAgent(Agent):
    """The same loop for a client that keeps messages and makes every prompt from them.

    Where a prompt does not begin with the stream, the trajectory gets a branch, and `breaks` the reason.
    """

    def __init__(self, engine: Engine, renderer: Renderer, client: Client, **settings: Any) -> None:
        super().__init__(engine, renderer, **settings)
        self._client = client
        self.breaks: dict[str, list[Break]] = {}

    def go_on(self, rollout: Rollout, prompt: Ids, completion: Ids, new: list[Mapping[str, Any]]) -> End | None:
        """Make the next prompt from the messages, and record whether it extends the stream."""
        trajectory = rollout.trajectory
        rollout.messages += new
        made, _ = self._client(self.renderer, parsed_arguments(rollout.messages), rollout.schemas, asks=True)
        if not self.has_room(len(made)):
            return End.CONTEXT
        found = explain_break(trajectory.stream(), made, self.renderer, kinds=trajectory.kinds())
        count = len(rollout.messages)
        if found is None:
            trajectory.extend_to(made, messages=count)
        else:
            trajectory.branch(made, messages=count, cause=str(found.cause), from_branch=trajectory.current)
            self.breaks.setdefault(rollout.task.name, []).append(found)
        return None


# -- nothing is computed twice

# The paths make many of the same requests, and get many of the same rows. Greedy decoding, and sampling with a seed,
# depend on the prompt and the parameters alone. So a path that makes the request of an earlier one is given its
# completion.


class RememberingEngine(EmbeddedEngine):
    """The embedded engine; a request with the prompt and parameters of an earlier one is answered from memory."""

    def __init__(self, model: PocketModel) -> None:
        super().__init__(model)
        self._known: dict[tuple[bytes, SamplingParams], Completion] = {}

    async def _generate(self, request: GenerateRequest) -> Completion:
        """Sample a completion, or return the known one, with no count of cached tokens."""
        if request.sampling.seed is None and request.sampling.temperature > 0:
            return await super()._generate(request)
        key = _bytes(request.prompt_ids), request.sampling
        if key in self._known:
            return replace(self._known[key], cached_tokens=None)
        self._known[key] = found = await super()._generate(request)
        return found


class Scorer(Protocol):
    """What gives ids their logprobs, as `PocketModel` does."""

    def score(self, ids: TokenIds) -> Floats: ...


class RememberingScorer:
    """A model's scores; those of a row that was scored before come from memory."""

    def __init__(self, model: PocketModel) -> None:
        self._model = model
        self._known: dict[bytes, Floats] = {}

    def score(self, ids: TokenIds) -> Floats:
        """The log-probability of each id given all before it."""
        key = _bytes(ids)
        if key not in self._known:
            self._known[key] = self._model.score(ids)
        return self._known[key]


def _bytes(ids: TokenIds) -> bytes:
    return np.asarray(ids, np.int32).tobytes()


# -- what a trainer makes of it


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """The row that a trainer of a path gets, compared with what was sampled."""

    ids: Ids
    mask: Mask
    sampled: int
    """How many tokens were sampled."""
    mismatched: int
    """How many of them are not in the row."""
    foreign: int
    """How many tokens of the row carry loss that were not sampled."""
    positions: npt.NDArray[np.int64]
    """Where in the row the others are."""
    gaps: npt.NDArray[np.float64]
    """Of each of those: how far the engine's logprob is from the one that the same weights give it in the row."""


def score_row(rollout: Rollout, row: Row, model: Scorer) -> Scored:
    """Align the sampled turns of a rollout with the turns of a row, and score the row.

    The n-th turn is aligned with the n-th run of tokens that carry loss. Tokens without a partner are mismatched on
    one side, foreign on the other.
    """
    ids, mask = row
    turns = sampled_turns(rollout)
    sampled = sum(len(turn) for turn, _ in turns)
    found: list[tuple[int, float]] = []
    for (turn, logprobs), (start, stop) in zip(turns, runs(mask), strict=False):
        found += [(start + theirs, float(logprobs[ours])) for ours, theirs in _paired(turn, ids[start:stop])]
    positions = np.asarray([position for position, _ in found], np.int64)
    engine = np.asarray([logprob for _, logprob in found], np.float64)
    scores = model.score(ids) if len(ids) > 1 else np.zeros(0, np.float32)
    gaps = np.abs(engine - scores[positions - 1]) if len(positions) else engine
    missing, foreign = sampled - len(positions), int(np.count_nonzero(mask)) - len(positions)
    return Scored(ids, mask, sampled, missing, foreign, positions, gaps)


def sampled_turns(rollout: Rollout) -> list[tuple[Ids, npt.NDArray[np.float32]]]:
    """Ids and logprobs of every turn that was sampled, in order, each once."""
    trajectory = rollout.trajectory
    return [(trajectory.completion(one), trajectory.completion_logprobs(one)) for one in owned_turns(trajectory)]


def _paired(one: Ids, other: Ids) -> list[tuple[int, int]]:
    """The places of tokens that two runs have in common, in order."""
    pairs: list[tuple[int, int]] = []
    at, other_at = 0, 0
    for start, stop, other_start, other_stop in align(one, other):
        pairs += zip(range(at, start), range(other_at, other_start), strict=True)
        at, other_at = stop, other_stop
    pairs += zip(range(at, len(one)), range(other_at, len(other)), strict=True)
    return pairs


# -- the comparison


@dataclass(frozen=True, slots=True, eq=False)
class PathReport:
    """What was measured of one path."""

    path: ClientPath
    rollouts: list[Rollout]
    """In the order of the questions."""
    breaks: Mapping[str, Sequence[Break]]
    """By the name of the rollout."""
    scored: list[Scored] = field(default_factory=list)
    """The row of each rollout as a trainer of this path gets it; empty where rows were not scored."""

    @property
    def num_breaks(self) -> int:
        """How many prompts did not begin with the stream so far."""
        return sum(max(0, rollout.trajectory.num_branches - 1) for rollout in self.rollouts)

    @property
    def broken(self) -> int:
        """How many rollouts have a break."""
        return sum(rollout.trajectory.num_branches > 1 for rollout in self.rollouts)

    @property
    def samples(self) -> int:
        """How many rows it takes to train every sampled token after the very prompt that it was sampled from."""
        return sum(rollout.trajectory.num_samples for rollout in self.rollouts)

    @property
    def turns(self) -> int:
        return sum(rollout.turns for rollout in self.rollouts)

    @property
    def sampled(self) -> int:
        return sum(scored.sampled for scored in self.scored)

    @property
    def mismatched(self) -> int:
        return sum(scored.mismatched for scored in self.scored)

    @property
    def foreign(self) -> int:
        return sum(scored.foreign for scored in self.scored)

    @property
    def gaps(self) -> npt.NDArray[np.float64]:
        """Of all sampled tokens that are in the rows: how far engine and trainer are apart."""
        return np.concatenate([np.zeros(0), *(scored.gaps for scored in self.scored)])

    @property
    def mean_gap(self) -> float:
        return float(self.gaps.mean()) if len(self.gaps) else 0.0

    @property
    def largest_gap(self) -> float:
        return float(self.gaps.max(initial=0.0))

    @property
    def solved(self) -> float:
        """The share of questions that were answered rightly."""
        return sum(rollout.reward or 0.0 for rollout in self.rollouts) / len(self.rollouts) if self.rollouts else 0.0

    @property
    def later_user_turns(self) -> int:
        """How often a user spoke again after an answer."""
        said = [message["role"] for rollout in self.rollouts for message in rollout.messages]
        return said.count("user") - len(self.rollouts)

    @property
    def tokens_in_samples(self) -> int:
        return report_rollouts(rollout.trajectory for rollout in self.rollouts).tokens_in_rows

    @property
    def cache_lost(self) -> int:
        """How many tokens of streams come after the place of a break."""
        return sum(found.stream_length - found.position for some in self.breaks.values() for found in some)

    @property
    def causes(self) -> dict[str, int]:
        """Why streams broke, the most frequent first."""
        counts = Counter(branch.cause for rollout in self.rollouts for branch in rollout.trajectory.branches[1:])
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    @property
    def examples(self) -> dict[str, tuple[str, Break]]:
        """For each cause the rollout and the break that is shortest to tell."""
        found: dict[str, tuple[str, Break]] = {}
        for rollout in self.rollouts:
            for one in self.breaks.get(rollout.task.name, ()):
                known = found.get(str(one.cause))
                if known is None or _size(one) < _size(known[1]):
                    found[str(one.cause)] = rollout.task.name, one
        return {cause: found[cause] for cause in self.causes if cause in found}


def _size(found: Break) -> int:
    return found.stream_range[1] - found.stream_range[0] + found.prompt_range[1] - found.prompt_range[0]


Progress = Callable[[str, int, int], None]
"""Called with what runs, how many of its rollouts are done, and how many there are."""


async def roll_out(
    path: ClientPath,
    tasks: Sequence[Task],
    *,
    seed: int = 0,
    temperature: float = TEMPERATURE,
    renderer: Renderer,
    engine: Engine,
    progress: Progress | None = None,
) -> PathReport:
    """Run tasks by a path, `seed` for the sampling."""
    settings: dict[str, Any] = {
        "sampling": SamplingParams(max_tokens=BUDGET.turn_tokens, temperature=temperature),
        "interaction": FollowUps(),
        "reward": question_reward,
        "budget": BUDGET,
    }
    client = CLIENTS.get(path)
    agent = Agent(engine, renderer, **settings)
    if client is not None:
        agent = MessageAgent(engine, renderer, client, **settings)
    ended: dict[str, Rollout] = {}

    def end(rollout: Rollout) -> None:
        ended[rollout.task.name] = rollout
        if progress is not None:
            progress(str(path), len(ended), len(tasks))

    await run_rollouts(agent, tasks, done=end, seed=seed)
    rollouts = [ended[task.name] for task in tasks]
    return PathReport(path, rollouts, agent.breaks if isinstance(agent, MessageAgent) else {})


async def score_path(report: PathReport, renderer: Renderer, model: Scorer) -> PathReport:
    """The report with the row of each rollout, scored by `model`."""
    rows = [(one, trained_row(one, report.path, renderer)) for one in report.rollouts]
    return replace(report, scored=[await asyncio.to_thread(score_row, one, row, model) for one, row in rows])


def trained_row(rollout: Rollout, path: ClientPath, renderer: Renderer) -> Row:
    """The one row that a trainer gets of a rollout: the stream, or what the client makes of the final messages."""
    if path in CLIENTS:
        return CLIENTS[path](renderer, parsed_arguments(rollout.messages), rollout.schemas, asks=False)
    return rollout.trajectory.stream(), rollout.trajectory.loss_mask()


def path_samples(report: PathReport) -> list[Sample]:
    """The rows of all rollouts, each sampled token trained once after the prompt that it was sampled from."""
    return [row for one in report.rollouts for row in trajectory_samples(one.trajectory, reward=one.reward)]


async def compare_paths(
    renderer: Renderer,
    *,
    rollouts: int = 64,
    seed: int = 0,
    temperature: float = TEMPERATURE,
    score: bool = True,
    model: PocketModel | None = None,
    engine: Engine | None = None,
    progress: Progress | None = None,
) -> list[PathReport]:
    """All paths, one after another, on the same held-back questions and seeds; with `score` their rows are scored.

    Where two paths make the same request (same prompt, same seed), or get the same row, it is computed once.
    """
    known = model or load_pocket()
    scorer, own = RememberingScorer(known), engine or RememberingEngine(known)
    tasks = question_tasks(seed, rollouts)
    reports = []
    try:
        for path in ClientPath:
            report = await roll_out(
                path,
                tasks,
                seed=seed,
                temperature=temperature,
                renderer=renderer,
                engine=own,
                progress=progress,
            )
            reports.append(await score_path(report, renderer, scorer) if score else report)
    finally:
        if engine is None:
            await own.close()
    return reports
