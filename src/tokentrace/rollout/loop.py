"""The agent loop: render once, then sample, parse, run tools and bridge, until it is done or a budget ends it.

The trajectory is the only history that the engine ever sees: each prompt is its stream, id for id. What was sampled is
parsed to find out what to do next, and never rendered again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..conversation.messages import Messages
from ..engines.answers import check_logprobs
from ..engines.protocol import Completion, Engine, EngineError, FinishReason, SamplingParams
from ..errors import InputError, shown
from ..parsing.response import ParsedResponse, ParsedToolCall
from ..rendering.lost import LostPolicy
from ..rendering.renderer import Renderer
from ..settings import instance
from ..study.seams import BridgeRefusal
from ..tokens.table import message_spans
from ..tokens.tokenizer import Ids
from ..trajectory.trajectory import Trajectory
from .calling import TooLong, called, noted, within
from .checks import metrics as checked_metrics
from .checks import reward as checked_reward
from .cutting import cut_text
from .ends import FAILED_ENDS, End
from .interactions import BaseInteraction, as_interactions, as_reply, choose_interaction
from .patience import EngineDown, Patience
from .record import Budget, Rollout, Task, TurnMetrics, call_id, instance_name, result_message
from .resuming import Begun, check_continues, check_goes_on, check_takes, cut_at_stop, take_up
from .toolbox import Toolbox
from .tools import BaseTool, ToolResult, as_tools

__all__ = ["Agent", "Budget", "End", "Messages", "Reward", "Rollout", "Task"]

Reward = Callable[[Rollout], float | Awaitable[float | None] | None]
"""Gives a finished rollout its reward, in place of what tools and interaction say. A plain function runs in a thread of
its own, beside others; a coroutine function is awaited."""


_ABORTS: Final = 100
"""A turn that is aborted this often without a token in between is not continued."""
_PAUSE: Final = 0.05
"""Seconds before a turn that was aborted without a token is asked for again; twice as many each time."""
_PIECE: Final = 10_007
"""What seeds of parts of a turn are apart, for each token before."""
_FAILURES: Final = ((EngineError, End.ENGINE), (TooLong, End.HUNG))


@dataclass(slots=True)
class _UnderWay:
    """What goes with a rollout for as long as it is under way."""

    box: Toolbox
    user: BaseInteraction | None
    grown: Callable[[Rollout], None]
    seed: int | None
    patience: Patience | None
    begun: Begun | None = None
    """The turn that a recorded trajectory ends with, until it is continued."""
    limit: asyncio.Timeout | None = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time that does not count: the engine is down."""
        limit = self.limit
        ends = None if limit is None else limit.when()
        if limit is None or ends is None:
            yield
            return
        now = asyncio.get_running_loop().time
        left = ends - now()
        limit.reschedule(None)
        try:
            yield
        finally:
            limit.reschedule(now() + left)


class Agent:
    """Runs rollouts of one model with one set of tools. Safe to run many at once in one event loop.

    A request that the engine was told to end (a pause with abort, before new weights) ends its rollout with
    `End.ABORT`; with `resume_aborted` the same turn is sampled on as soon as the engine takes requests again.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        *,
        sampling: SamplingParams | None = None,
        tools: Sequence[BaseTool | Callable[..., Any]] = (),
        interaction: BaseInteraction | Mapping[str, BaseInteraction] | None = None,
        reward: Reward | None = None,
        budget: Budget | None = None,
        resume_aborted: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check_settings(engine, renderer, sampling, reward, budget)
        self.engine = engine
        self.renderer = renderer
        self.tools = as_tools(tools)
        self.interactions = as_interactions(interaction)
        self.reward = reward
        self.budget = budget or Budget()
        self.resume_aborted = instance("resume_aborted", resume_aborted, bool, InputError)
        self._clock = clock
        self._unnamed = itertools.count()
        given = sampling or SamplingParams(max_tokens=self.budget.turn_tokens)
        check_logprobs(given, engine.capabilities)
        if self.resume_aborted:
            check_goes_on(given)
        self._sampling = dataclasses.replace(
            given,
            max_tokens=min(given.max_tokens, self.budget.turn_tokens),
            stop_token_ids=tuple(dict.fromkeys([*given.stop_token_ids, *renderer.get_stop_token_ids()])),
        )
        limits = [self.budget.context, engine.capabilities.max_length]
        self._context = min((limit for limit in limits if limit is not None), default=None)

    def __repr__(self) -> str:
        return f"Agent({self.engine!r}, {len(self.tools)} tools, {self.budget!r})"

    async def run(
        self,
        task: Task,
        *,
        trajectory: Trajectory | None = None,
        grown: Callable[[Rollout], None] | None = None,
        seed: int | None = None,
        patience: Patience | None = None,
    ) -> Rollout:
        """One rollout, from its first prompt to its reward.

        `grown` is called after every write to the trajectory: to have it on disk. Engine failures, refused bridges,
        failing tools and rewards end a rollout with what was sampled kept; nothing is raised but cancellation, and
        `EngineDown` where `patience` waits for an engine that does not answer. `seed` overrides that of the sampling
        parameters. A task without a name is called by its number among those that this agent was given.

        With a `trajectory` the rollout goes on with what that has recorded, which is added to: a turn that was aborted
        is sampled on, one that is finished is answered, a prompt is sampled from. Tools and simulated user are created
        anew, and calls that were answered are not run again. `ContinuationError` where it cannot go on: the prompt of
        the task is not the one recorded, its last turn ran out of tokens, its history was rewritten.
        """
        if not isinstance(task, Task):
            raise InputError(f"{shown(task)} is not a Task; row_task makes one of a row of a dataset")
        if trajectory is not None:
            instance("trajectory", trajectory, Trajectory, InputError)
        if not task.name:
            name = f"task-{next(self._unnamed):05d}" if trajectory is None else trajectory.name
            task = dataclasses.replace(task, name=name)
        if trajectory is None:
            trajectory = Trajectory(
                name=task.name,
                vocab_size=self.renderer.tokenizer.vocabulary.size,
                metadata={**task.metadata, "task": task.name},
            )
        rollout = Rollout(task, trajectory, self.tools if task.tools is None else task.tools, list(task.messages))
        begun = self._taken_up(rollout)
        began = self._clock()
        with instance_name(task.name) as rollout.instance:
            try:
                await self._run(rollout, grown or (lambda _: None), seed, patience, begun)
            finally:
                rollout.seconds = self._clock() - began
        return rollout

    def _taken_up(self, rollout: Rollout) -> Begun | None:
        """Fill a rollout with what its trajectory has recorded already; the turn that it ends with."""
        trajectory, task = rollout.trajectory, rollout.task
        check_takes(trajectory, self.renderer, task.name)
        if not trajectory.num_writes:
            return None
        rendered = self.renderer.render(task.messages, tools=rollout.schemas, add_generation_prompt=True)
        check_continues(trajectory, rendered.ids)
        return take_up(rollout, self.renderer, self._sampling)

    async def _run(
        self,
        rollout: Rollout,
        grown: Callable[[Rollout], None],
        seed: int | None,
        patience: Patience | None,
        begun: Begun | None,
    ) -> None:
        try:
            if not rollout.trajectory.num_writes:
                self._begin(rollout)
                grown(rollout)
            user = choose_interaction(self.interactions, rollout.task.interaction_settings)
            box = Toolbox(
                rollout.tools,
                rollout.instance,
                timeout=self.budget.tool_timeout,
                settings=rollout.task.tool_settings,
                parallel=self.budget.parallel_calls,
                messages=rollout.messages,
            )
            box.use = rollout.use
            try:
                async with box:
                    await self._lead(rollout, _UnderWay(box, user, grown, seed, patience, begun))
            finally:
                rollout.notes += box.use.notes
        except EngineDown:
            raise
        except Exception as error:
            rollout.end = next((end for kind, end in _FAILURES if isinstance(error, kind)), End.FAILED)
            is_told = isinstance(error, EngineError | TooLong | InputError)
            rollout.notes.append(str(error) if is_told else f"{type(error).__name__}: {error}")
        if rollout.end in FAILED_ENDS:
            rollout.reward = None
        if rollout.reward is not None:
            rollout.trajectory.set_reward(rollout.reward)

    def _begin(self, rollout: Rollout) -> None:
        """Render the first prompt."""
        messages = rollout.task.messages
        rendered = self.renderer.render(messages, tools=rollout.schemas, add_generation_prompt=True)
        rollout.notes += rendered.notes
        if self.renderer.lost is not LostPolicy.IGNORE:
            rollout.notes += map(str, rendered.lost)
        spans = message_spans(rendered.messages)
        rollout.trajectory.begin(rendered.ids, messages=len(messages), message_spans=spans)

    async def _lead(self, rollout: Rollout, under: _UnderWay) -> None:
        """All turns, and the reward."""
        user, budget = under.user, self.budget
        started = False
        try:
            try:
                async with asyncio.timeout(budget.seconds) as under.limit:
                    if user is not None:
                        begun = user.start_interaction(rollout.instance, **rollout.task.interaction_settings)
                        await within(begun, budget.interaction_timeout, "start_interaction")
                        started = True
                    while rollout.end is None:
                        rollout.end = await self._turn(rollout, under)
            except TimeoutError:
                if under.limit is None or not under.limit.expired():  # not our limit
                    raise
                rollout.end = End.TIME
                rollout.notes.append(f"the rollout took longer than {budget.seconds:g} s")
            under.limit = None
            if rollout.end not in FAILED_ENDS:
                await self._score(rollout, under)
        finally:
            if user is not None and started:
                step = functools.partial(user.finalize_interaction, rollout.instance)
                await noted(step, budget.interaction_timeout, "finalize_interaction", rollout.notes)

    async def _turn(self, rollout: Rollout, under: _UnderWay) -> End | None:
        """Sample a turn, and put what answers it after it. Says why the rollout ends, if it does."""
        begun, under.begun = under.begun, None
        start = len(rollout.trajectory) if begun is None else begun.start
        reason = None
        if begun is None:
            room, limit = self._room(rollout, start, begun=False)
            if room < 1:
                return limit
        if begun is None or begun.aborted:
            reason = await self._speak(rollout, start, under, begun=begun is not None)
        stream = rollout.trajectory.stream()
        prompt, said = stream[:start], stream[start:]
        parsed = self.renderer.parse_response(said, tools=rollout.schemas, prompt_ids=prompt)
        rollout.messages.append(parsed.to_message(call_id=functools.partial(call_id, rollout.turns)))
        turn = rollout.per_turn[-1]
        turn.malformed = any(not call.ok for call in (*parsed.tool_calls, *parsed.attempts))
        if reason is not None:
            return reason
        new, reason = await self._answers(rollout, parsed, turn, under)
        if turn.reward:
            rollout.trajectory.set_reward(turn.reward, rollout.trajectory.turns()[-1])
        if reason is None:
            reason = self.go_on(rollout, prompt, said, new)
        if reason is None:
            under.grown(rollout)
        return reason

    async def _speak(self, rollout: Rollout, start: int, under: _UnderWay, *, begun: bool) -> End | None:
        """Sample a turn that begins at `start` of the stream: in one completion, or in several where it is aborted and
        goes on. Says why the rollout ends with it, if it does."""
        aborts = 0
        while True:
            room, limit = self._room(rollout, start, begun=begun)
            if room < 1:
                return limit
            before = rollout.engine_seconds
            completion = await self._sample(rollout, room, under, start, begun=begun)
            if begun:
                said = rollout.trajectory.stream()[start:]
                completion = cut_at_stop(completion, said, self._sampling.stop, self.renderer)
            aborted = completion.finish_reason is FinishReason.ABORT
            goes_on = aborted and self.resume_aborted and aborts < _ABORTS
            if len(completion.ids) or not goes_on:
                self._record(rollout, completion, room, rollout.engine_seconds - before, continues=begun)
                under.grown(rollout)
                begun, aborts = True, 0
            elif goes_on:
                aborts += 1
                await asyncio.sleep(min(_PAUSE * 2**aborts, 5.0))
            if not goes_on:
                return End.ABORT if aborted else limit if completion.finish_reason is FinishReason.LENGTH else None

    def _record(self, rollout: Rollout, completion: Completion, room: int, seconds: float, *, continues: bool) -> None:
        """Put what was sampled into the trajectory and among the metrics."""
        start = len(rollout.trajectory)
        rollout.trajectory.append_completion(
            completion.ids,
            completion.logprobs,
            finish_reason=str(completion.finish_reason),
            version=completion.versions or None,
            sampling=self._sampling.described() | {"max_tokens": room},
            continues=continues,
            logprobs_kind=completion.logprobs_kind,
            cached_tokens=completion.cached_tokens,
            channels=completion.channels,
        )
        rollout.per_turn.append(
            TurnMetrics(
                prompt_tokens=start,
                sampled=len(completion.ids),
                finish_reason=str(completion.finish_reason),
                cached_tokens=completion.cached_tokens,
                engine_seconds=seconds,
                continues=continues,
            )
        )

    def go_on(self, rollout: Rollout, prompt: Ids, completion: Ids, new: list[Mapping[str, Any]]) -> End | None:
        """Put new messages after a turn: the stream is bridged to the next one. Says why not, where it cannot be.

        This is where ways of keeping history differ; `demo.paths` has those of other libraries.
        """
        bridged = self.renderer.bridge(prompt, completion, new, tools=rollout.schemas)
        if isinstance(bridged, BridgeRefusal):  # the whole conversation may help, but the cost grows with its length
            bridged = self.renderer.bridge(
                prompt, completion, new, tools=rollout.schemas, messages=rollout.messages[:-1]
            )
        if isinstance(bridged, BridgeRefusal):
            rollout.notes.append(str(bridged))
            return End.BRIDGE
        if not self.has_room(len(bridged)):
            return End.CONTEXT
        rollout.messages += new
        rollout.notes += bridged.notes
        rollout.trajectory.append_bridge(bridged)
        return None

    def has_room(self, length: int) -> bool:
        """Whether a turn can follow a prompt of this length."""
        return self._context is None or length < self._context

    def _room(self, rollout: Rollout, start: int, *, begun: bool) -> tuple[int, End]:
        """How many more tokens the turn at `start` may have, and what it is that allows no more."""
        budget = self.budget
        if rollout.turns - begun >= budget.turns:
            return 0, End.TURNS
        if budget.tool_seconds is not None and rollout.use.seconds > budget.tool_seconds:
            return 0, End.TOOL_TIME
        limits = [(self._sampling.max_tokens - len(rollout.trajectory) + start, End.LENGTH)]
        if budget.tokens is not None:
            limits.append((budget.tokens - rollout.trajectory.num_sampled, End.TOKENS))
        if self._context is not None:
            limits.append((self._context - len(rollout.trajectory), End.CONTEXT))
        return min(limits, key=lambda limit: limit[0])

    async def _sample(self, rollout: Rollout, room: int, under: _UnderWay, start: int, *, begun: bool) -> Completion:
        turn = rollout.turns - begun
        seed = self._sampling.seed if under.seed is None else under.seed + turn
        if seed is not None:  # the rest of a turn is not drawn with the random numbers of its beginning
            seed += _PIECE * (len(rollout.trajectory) - start)
        sampling = dataclasses.replace(self._sampling, seed=seed, max_tokens=room)

        async def request() -> Completion:
            began = self._clock()
            try:
                asked = self.engine.generate(
                    rollout.trajectory.prompt(),
                    sampling,
                    request_id=f"{rollout.instance}-{turn}",
                    session=rollout.instance,
                    wire=rollout.trajectory.wire_parts,
                    **_group(rollout.task),
                )
                return await within(asked, None, "the engine")
            finally:
                rollout.engine_seconds += self._clock() - began

        async def probe() -> Completion:
            return await self.engine.generate(rollout.trajectory.prompt()[:1], SamplingParams(1))

        if under.patience is None:
            return await request()
        return await under.patience.ask(request, probe, waiting=under.waiting)

    async def _answers(
        self, rollout: Rollout, parsed: ParsedResponse, turn: TurnMetrics, under: _UnderWay
    ) -> tuple[list[Mapping[str, Any]], End | None]:
        """What follows a turn: the results of its calls, or what the simulated user says."""
        user, most = under.user, self.budget.user_turns
        has_calls = bool(parsed.tool_calls and rollout.tools)
        if (has_calls or user is not None) and most is not None and rollout.turns > most:
            return [], End.TURNS
        if has_calls:
            results = await self._called(parsed.tool_calls, turn, under.box)
            answered = zip(parsed.tool_calls, results, strict=True)
            return [result_message(call, rollout.turns, self._cut(one.content)) for call, one in answered], None
        if user is None:
            return [], End.ANSWER
        said = user.generate_response(rollout.instance, [dict(message) for message in rollout.messages])
        reply = as_reply(await within(said, self.budget.interaction_timeout, "generate_response"))
        turn.reward = rollout.use.add_reward(checked_reward(reply.reward, "the reward of a reply"))
        if reply.metrics:
            measured, note = checked_metrics(reply.metrics, user.name)
            turn.metrics.append({"interaction": user.name, **measured})
            rollout.notes += [note] if note else []
        if reply.done:
            return [], End.USER
        return [{"role": "user", "content": self._cut(reply.content)}], None

    async def _called(self, calls: Sequence[ParsedToolCall], turn: TurnMetrics, box: Toolbox) -> list[ToolResult]:
        """The results of a turn's calls, counted among the turn's metrics."""
        seconds, measured = box.use.seconds, len(box.use.metrics)
        results = await box.run(calls)
        turn.tool_calls = len(results)
        turn.tool_errors = sum(result.failed for result in results)
        turn.tool_seconds = box.use.seconds - seconds
        turn.reward = checked_reward(sum(result.reward or 0.0 for result in results), "the reward of a turn") or 0.0
        turn.metrics += box.use.metrics[measured:]
        return results

    def _cut(self, text: str) -> str:
        return cut_text(text, self.budget.result_tokens, self.renderer.tokenizer, self.budget.result_keep)

    async def _score(self, rollout: Rollout, under: _UnderWay) -> None:
        limit = self.budget.reward_timeout
        if self.reward is not None:
            found = await within(called(self.reward, rollout), limit, "the reward")
            rollout.reward = checked_reward(found, "the reward")
            return
        scores = [await under.box.rewards()]
        if under.user is not None:
            score = await within(under.user.calculate_score(rollout.instance), limit, "calculate_score")
            scores.append(checked_reward(score, "calculate_score"))
        told = [score for score in scores if score is not None]
        total = sum(told) + rollout.use.reward if told or rollout.use.is_rewarded else None
        rollout.reward = checked_reward(total, "the sum of all rewards")


def _check_settings(engine: Any, renderer: Any, sampling: Any, reward: Any, budget: Any) -> None:
    """InputError for the first setting of an agent that is not what it must be."""
    if not hasattr(engine, "generate") or not hasattr(engine, "capabilities"):
        raise InputError(f"engine must be an Engine, not {shown(engine)}")
    if not hasattr(renderer, "bridge"):
        raise InputError(f"renderer must be a Renderer: create_renderer makes one, not {shown(renderer)}")
    if reward is not None and not callable(reward):
        raise InputError(f"reward must be a function of a rollout, not {shown(reward)}")
    for name, value, kind in (("sampling", sampling, SamplingParams), ("budget", budget, Budget)):
        if value is not None:
            instance(name, value, kind, InputError)


def _group(task: Task) -> dict[str, str]:
    """What tells the engine that several rollouts begin with the same prompt."""
    group = task.metadata.get("group")
    return {} if group is None else {"group": str(group)}
