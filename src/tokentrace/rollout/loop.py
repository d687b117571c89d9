"""The agent loop: render once, then sample, parse, run tools and bridge, until it is done or a budget ends it.

Each prompt is the trajectory's stream, id for id. Sampled tokens are parsed, and never rendered again.
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
from ..engines.errors import Backoff, EngineError
from ..engines.protocol import Completion, Engine, FinishReason, SamplingParams
from ..errors import InputError, brief
from ..parsing.response import ParsedResponse
from ..rendering.lost import LostPolicy
from ..rendering.renderer import Renderer
from ..settings import instance
from ..study.seams import BridgeRefusal
from ..tokens.table import message_spans
from ..tokens.tokenizer import Ids
from ..trajectory.trajectory import Trajectory
from .calling import TooLong, called, noted, within
from .cutting import cut_text
from .ends import FAILED_ENDS, End
from .interactions import BaseInteraction, as_interactions, as_reply, choose_interaction
from .patience import EngineDown, Patience
from .record import Budget, Rollout, Task, TurnMetrics, call_id, checked_reward, instance_name, result_message
from .resuming import OpenTurn, check_continues, check_resumable, cut_at_stop, resume
from .toolbox import Toolbox
from .tools import BaseTool, as_tools

__all__ = ["Agent", "Budget", "End", "Messages", "Reward", "Rollout", "Task"]

Reward = Callable[[Rollout], float | Awaitable[float | None] | None]
"""The reward of a finished rollout. A plain function runs in a thread of its own."""

_ABORTS: Final = 100
"""How often a turn may be aborted without a token in between."""
_BACKOFF: Final = Backoff(0.1, 5.0)
_PART_SEED: Final = 10_007
"""How far the seeds of a turn's parts are apart, per token before."""
_FAILURES: Final = ((EngineError, End.ENGINE), (TooLong, End.HUNG))


@dataclass(slots=True)
class _Progress:
    grown: Callable[[Rollout], None]
    seed: int | None
    patience: Patience | None
    open_turn: OpenTurn | None
    """The turn that a recorded trajectory ends with, until it is continued."""
    user: BaseInteraction | None = None
    box: Toolbox = dataclasses.field(init=False)
    limit: asyncio.Timeout | None = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Stop the rollout's clock while the engine is down."""
        limit = self.limit
        end = None if limit is None else limit.when()
        if limit is None or end is None:
            yield
            return
        now = asyncio.get_running_loop().time
        remaining = end - now()
        limit.reschedule(None)
        try:
            yield
        finally:
            limit.reschedule(now() + remaining)


class Agent:
    """Runs rollouts of one model with one set of tools. Safe to run many at once in one event loop.

    An aborted request ends its rollout; with `resume_aborted` the same turn is sampled on.
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
    ) -> None:
        if not hasattr(engine, "generate") or not hasattr(engine, "capabilities"):
            raise InputError(f"engine must be an Engine, not {brief(engine)}")
        if not hasattr(renderer, "bridge"):
            raise InputError(f"renderer must be a Renderer: create_renderer makes one, not {brief(renderer)}")
        if reward is not None and not callable(reward):
            raise InputError(f"reward must be a function of a rollout, not {brief(reward)}")
        for name, value, kind in (("sampling", sampling, SamplingParams), ("budget", budget, Budget)):
            if value is not None:
                instance(name, value, kind, InputError)
        self.engine = engine
        self.renderer = renderer
        self.tools = as_tools(tools)
        self.interactions = as_interactions(interaction)
        self.reward = reward
        self.budget = budget or Budget()
        self.resume_aborted = instance("resume_aborted", resume_aborted, bool, InputError)
        self._unnamed = itertools.count()
        sampling = sampling or SamplingParams(max_tokens=self.budget.turn_tokens)
        check_logprobs(sampling, engine.capabilities)
        if self.resume_aborted:
            check_resumable(sampling)
        self._sampling = dataclasses.replace(
            sampling,
            max_tokens=min(sampling.max_tokens, self.budget.turn_tokens),
            stop_token_ids=tuple(dict.fromkeys([*sampling.stop_token_ids, *renderer.get_stop_token_ids()])),
        )
        limits = [self.budget.context, engine.capabilities.max_length]
        self._context = min((limit for limit in limits if limit is not None), default=None)

    def __repr__(self) -> str:
        return f"Agent({self.engine!r}, {len(self.tools)} tools, {self.budget!r})"

    async def run(
        self,
        task: Task,
        *,
        resumed: Rollout | None = None,
        grown: Callable[[Rollout], None] | None = None,
        seed: int | None = None,
        patience: Patience | None = None,
    ) -> Rollout:
        """Run one rollout, from its first prompt to its reward.

        Calls `grown` after every write to the trajectory. Failures end a rollout and keep what was sampled; it raises
        only cancellation, and EngineDown where `patience` waits for an engine that does not answer.

        `resumed` continues an earlier rollout of the task, whose trajectory grows. Tools and simulated user are created
        anew; answered calls do not run again. Raises ContinuationError if that cannot be done.
        """
        if not isinstance(task, Task):
            raise InputError(f"{brief(task)} is not a Task; row_task makes one of a row of a dataset")
        if resumed is not None:
            instance("resumed", resumed, Rollout, InputError)
        if not task.name:
            name = f"task-{next(self._unnamed):05d}" if resumed is None else resumed.task.name
            task = dataclasses.replace(task, name=name)
        tools = self.tools if task.tools is None else task.tools
        open_turn = None
        if resumed is None:
            size = self.renderer.tokenizer.vocabulary.size
            trajectory = Trajectory(name=task.name, vocab_size=size, metadata={**task.metadata, "task": task.name})
            rollout = Rollout(task, trajectory, tools, list(task.messages))
        else:
            rollout = dataclasses.replace(resumed, task=task, tools=tools)
            rendered = self.renderer.render(task.messages, tools=rollout.schemas, add_generation_prompt=True)
            check_continues(rollout, self.renderer, rendered.ids)
            open_turn = resume(rollout, self._sampling)
        began = time.monotonic()
        with instance_name(task.name) as rollout.instance:
            try:
                await self._run(rollout, _Progress(grown or (lambda _: None), seed, patience, open_turn))
            finally:
                rollout.seconds = time.monotonic() - began
        return rollout

    async def _run(self, rollout: Rollout, progress: _Progress) -> None:
        try:
            if not rollout.trajectory.num_writes:
                self._begin(rollout)
                progress.grown(rollout)
            progress.user = choose_interaction(self.interactions, rollout.task.interaction_settings)
            progress.box = Toolbox(
                rollout.tools,
                rollout.instance,
                timeout=self.budget.tool_timeout,
                settings=rollout.task.tool_settings,
                parallel=self.budget.parallel_calls,
                messages=rollout.messages,
                notes=rollout.notes,
            )
            async with progress.box:
                await self._lead(rollout, progress)
        except EngineDown:
            raise
        except Exception as error:
            rollout.end = next((end for kind, end in _FAILURES if isinstance(error, kind)), End.FAILED)
            is_ours = isinstance(error, EngineError | TooLong | InputError)
            rollout.notes.append(str(error) if is_ours else f"{type(error).__name__}: {error}")
        if rollout.end in FAILED_ENDS:
            rollout.reward = None
        if rollout.reward is not None:
            rollout.trajectory.set_reward(rollout.reward)

    def _begin(self, rollout: Rollout) -> None:
        messages = rollout.task.messages
        rendered = self.renderer.render(messages, tools=rollout.schemas, add_generation_prompt=True)
        rollout.notes += rendered.notes
        if self.renderer.lost is not LostPolicy.IGNORE:
            rollout.notes += map(str, rendered.lost)
        spans = message_spans(rendered.messages)
        rollout.trajectory.begin(rendered.ids, messages=len(messages), message_spans=spans)

    async def _lead(self, rollout: Rollout, progress: _Progress) -> None:
        user, budget = progress.user, self.budget
        started = False
        try:
            try:
                async with asyncio.timeout(budget.seconds) as progress.limit:
                    if user is not None:
                        start = user.start_interaction(rollout.instance, **rollout.task.interaction_settings)
                        await within(start, budget.interaction_timeout, "start_interaction")
                        started = True
                    if rollout.pending:
                        rollout.end = self._continue_pending(rollout)
                    while rollout.end is None:
                        rollout.end = await self._turn(rollout, progress)
            except TimeoutError:
                if progress.limit is None or not progress.limit.expired():
                    raise
                rollout.end = End.TIME
                rollout.notes.append(f"the rollout took longer than {budget.seconds:g} s")
            progress.limit = None
            if rollout.end not in FAILED_ENDS:
                await self._score(rollout, progress)
        finally:
            if user is not None and started:
                step = functools.partial(user.finalize_interaction, rollout.instance)
                await noted(step, budget.interaction_timeout, "finalize_interaction", rollout.notes)

    def _continue_pending(self, rollout: Rollout) -> End | None:
        """Bridge to the messages that answered the last turn of a recorded rollout."""
        parts, stream = rollout.trajectory.turns(), rollout.trajectory.stream()
        start = next(part for part in reversed(parts) if not part.continues).start
        pending, rollout.pending = rollout.pending, []
        return self.go_on(rollout, stream[:start], stream[start:], pending)

    async def _turn(self, rollout: Rollout, progress: _Progress) -> End | None:
        """Sample a turn and append what answers it. Returns why the rollout ends, if it does."""
        open_turn, progress.open_turn = progress.open_turn, None
        start = len(rollout.trajectory) if open_turn is None else open_turn.start
        reason = None
        if open_turn is None:
            room, limit = self._room(rollout, start, continues=False)
            if room < 1:
                return limit
        if open_turn is None or open_turn.aborted:
            reason = await self._sample_turn(rollout, start, progress, continues=open_turn is not None)
        stream = rollout.trajectory.stream()
        prompt, completion = stream[:start], stream[start:]
        parsed = self.renderer.parse_response(completion, tools=rollout.schemas, prompt_ids=prompt)
        rollout.messages.append(parsed.to_message(call_id=functools.partial(call_id, rollout.turns)))
        turn = rollout.per_turn[-1]
        turn.malformed = any(not call.ok for call in (*parsed.tool_calls, *parsed.attempts))
        if reason is not None:
            return reason
        new, reason = await self._answers(rollout, parsed, turn, progress)
        if turn.reward:
            rollout.trajectory.set_reward(turn.reward, rollout.trajectory.turns()[-1])
        if reason is None:
            reason = self.go_on(rollout, prompt, completion, new)
        if reason is None:
            progress.grown(rollout)
        return reason

    async def _sample_turn(self, rollout: Rollout, start: int, progress: _Progress, *, continues: bool) -> End | None:
        """Sample a turn, in several parts if it is aborted and resumed. Returns why the rollout ends, if it does."""
        aborts = 0
        while True:
            room, limit = self._room(rollout, start, continues=continues)
            if room < 1:
                return limit
            before = rollout.engine_seconds
            completion = await self._sample(rollout, room, progress, start, continues=continues)
            if continues:
                earlier = rollout.trajectory.stream()[start:]
                completion = cut_at_stop(completion, earlier, self._sampling.stop, self.renderer)
            aborted = completion.finish_reason is FinishReason.ABORT
            again = aborted and self.resume_aborted and aborts < _ABORTS
            if len(completion.ids) or not again:
                self._record(rollout, completion, room, rollout.engine_seconds - before, continues=continues)
                progress.grown(rollout)
                continues, aborts = True, 0
            else:
                aborts += 1
                await asyncio.sleep(_BACKOFF.after(aborts))
            if not again:
                return End.ABORT if aborted else limit if completion.finish_reason is FinishReason.LENGTH else None

    def _record(self, rollout: Rollout, completion: Completion, room: int, seconds: float, *, continues: bool) -> None:
        """Add a completion to the trajectory and to the metrics."""
        metrics = TurnMetrics(
            prompt_tokens=len(rollout.trajectory),
            sampled=len(completion.ids),
            finish_reason=str(completion.finish_reason),
            cached_tokens=completion.cached_tokens,
            engine_seconds=seconds,
            continues=continues,
        )
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
        rollout.per_turn.append(metrics)

    def go_on(self, rollout: Rollout, prompt: Ids, completion: Ids, new: list[Mapping[str, Any]]) -> End | None:
        """Append new messages after a turn: bridge the stream to the next one. Returns why not, if it cannot."""
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
        """True if a turn can follow a prompt of this length."""
        return self._context is None or length < self._context

    def _room(self, rollout: Rollout, start: int, *, continues: bool) -> tuple[int, End]:
        """Return how many more tokens the turn at `start` may have, and the limit that allows no more."""
        budget = self.budget
        if rollout.turns - continues >= budget.turns:
            return 0, End.TURNS
        if budget.tool_seconds is not None and rollout.tool_seconds > budget.tool_seconds:
            return 0, End.TOOL_TIME
        limits = [(self._sampling.max_tokens - len(rollout.trajectory) + start, End.LENGTH)]
        if budget.tokens is not None:
            limits.append((budget.tokens - rollout.trajectory.num_sampled, End.TOKENS))
        if self._context is not None:
            limits.append((self._context - len(rollout.trajectory), End.CONTEXT))
        return min(limits, key=lambda limit: limit[0])

    async def _sample(
        self, rollout: Rollout, room: int, progress: _Progress, start: int, *, continues: bool
    ) -> Completion:
        turn = rollout.turns - continues
        seed = self._sampling.seed if progress.seed is None else progress.seed + turn
        if seed is not None:  # a later part must not repeat the random numbers of the first
            seed += _PART_SEED * (len(rollout.trajectory) - start)
        sampling = dataclasses.replace(self._sampling, seed=seed, max_tokens=room)
        group = rollout.task.metadata.get("group")

        async def request() -> Completion:
            began = time.monotonic()
            try:
                answer = self.engine.generate(
                    rollout.trajectory.prompt(),
                    sampling,
                    request_id=f"{rollout.instance}-{turn}",
                    session=rollout.instance,
                    wire=rollout.trajectory.wire_parts,
                    **({} if group is None else {"group": str(group)}),
                )
                return await within(answer, None, "the engine")
            finally:
                rollout.engine_seconds += time.monotonic() - began

        async def probe() -> Completion:
            return await self.engine.generate(rollout.trajectory.prompt()[:1], SamplingParams(1))

        if progress.patience is None:
            return await request()
        return await progress.patience.ask(request, probe, waiting=progress.waiting)

    async def _answers(
        self, rollout: Rollout, parsed: ParsedResponse, turn: TurnMetrics, progress: _Progress
    ) -> tuple[list[Mapping[str, Any]], End | None]:
        """Return what follows a turn: the results of its calls, or the simulated user's message."""
        user, most = progress.user, self.budget.user_turns
        has_calls = bool(parsed.tool_calls and rollout.tools)
        if (has_calls or user is not None) and most is not None and rollout.turns > most:
            return [], End.TURNS
        if has_calls:
            results = await progress.box.run(parsed.tool_calls, turn)
            pairs = zip(parsed.tool_calls, results, strict=True)
            return [result_message(call, rollout.turns, self._cut(one.content)) for call, one in pairs], None
        if user is None:
            return [], End.ANSWER
        response = user.generate_response(rollout.instance, [dict(message) for message in rollout.messages])
        reply = as_reply(await within(response, self.budget.interaction_timeout, "generate_response"))
        turn.add_reward(checked_reward(reply.reward, "the reward of a reply"))
        rollout.notes += turn.add_metrics("interaction", user.name, reply.metrics)
        if reply.done:
            return [], End.USER
        return [{"role": "user", "content": self._cut(reply.content)}], None

    def _cut(self, text: str) -> str:
        return cut_text(text, self.budget.result_tokens, self.renderer.tokenizer, self.budget.result_keep)

    async def _score(self, rollout: Rollout, progress: _Progress) -> None:
        limit = self.budget.reward_timeout
        if self.reward is not None:
            reward = await within(called(self.reward, rollout), limit, "the reward")
            rollout.reward = checked_reward(reward, "the reward")
            return
        scores = [*(turn.reward for turn in rollout.per_turn), await progress.box.rewards()]
        if progress.user is not None:
            score = await within(progress.user.calculate_score(rollout.instance), limit, "calculate_score")
            scores.append(checked_reward(score, "calculate_score"))
        present = [score for score in scores if score is not None]
        rollout.reward = checked_reward(sum(present) if present else None, "the sum of all rewards")
