"""The agent loop: render once, then sample, parse, run tools and bridge, until the rollout ends.

Each prompt is the trajectory's stream, id for id. Sampled tokens are parsed, but never rendered
again.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ..engines.answers import StopFinder, check_logprobs
from ..engines.errors import EngineError, backoff
from ..engines.protocol import Completion, Engine, FinishReason, SamplingParams
from ..errors import ContinuationError, InputError, brief
from ..parsing.response import ParsedResponse
from ..rendering.lost import LostPolicy
from ..rendering.renderer import Renderer
from ..settings import instance
from ..study.seams import BridgeRefusal
from ..tokens.table import message_spans
from ..tokens.tokenizer import Ids
from ..trajectory.trajectory import Trajectory
from .calling import TooLong, called, describe_error, noted, within
from .ends import FAILED_ENDS, End
from .interactions import BaseInteraction, as_interactions, as_reply, choose_user
from .patience import EngineDown, Patience
from .record import Budget, Rollout, Task, TurnMetrics, call_id, checked_reward, instance_name
from .tools import BaseTool, Toolbox, as_tools, cut_text

__all__ = ["Agent", "Budget", "End", "Reward", "Rollout", "Task"]

Reward = Callable[[Rollout], float | Awaitable[float | None] | None]

_ABORTS = 100
"""How often in a row a turn may be aborted without a new token."""
_PART_SEED = 10_007
"""Added to the seed for each token of the turn so far: no part repeats random numbers."""
_COUNTED = ("presence_penalty", "frequency_penalty", "structure")
"""Settings whose state starts over with each request to an engine."""


class Agent:
    """Runs rollouts of one model with one set of tools, many at once in one event loop.

    An aborted request ends its rollout, or with `resume_aborted` continues the turn.
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
        if reward is not None and not callable(reward):
            raise InputError(f"reward must be a function of a rollout, not {brief(reward)}")
        self.engine = instance("engine", engine, Engine, InputError)
        self.renderer = instance("renderer", renderer, Renderer, InputError)
        self.tools = as_tools(tools)
        self.interactions = as_interactions(interaction)
        self.reward = reward
        self.budget = instance("budget", Budget() if budget is None else budget, Budget, InputError)
        self.resume_aborted = instance("resume_aborted", resume_aborted, bool, InputError)
        self._unnamed = itertools.count()
        most = self.budget.turn_tokens
        sampling = instance(
            "sampling", sampling or SamplingParams(max_tokens=most), SamplingParams, InputError
        )
        check_logprobs(sampling, engine.capabilities)
        if self.resume_aborted:
            check_resumable(sampling)
        stops = tuple(dict.fromkeys([*sampling.stop_token_ids, *renderer.get_stop_token_ids()]))
        self.sampling = replace(sampling, max_tokens=min(sampling.max_tokens, most), stop_token_ids=stops)
        limits = [self.budget.context, engine.capabilities.max_length]
        self.context = min((limit for limit in limits if limit is not None), default=None)

    async def run(
        self,
        task: Task,
        *,
        resumed: Rollout | None = None,
        started: Callable[[Rollout], None] = lambda _: None,
        seed: int | None = None,
        patience: Patience | None = None,
    ) -> Rollout:
        """Run one rollout. Calls `started` with it before its first turn.

        A failure ends the rollout, which keeps its sampled tokens. Only EngineDown is raised,
        if the engine does not answer for longer than `patience` allows. `resumed` continues an
        earlier rollout of the task: answered calls do not run again. Raises ContinuationError
        if that is impossible.
        """
        if not isinstance(task, Task):
            raise InputError(f"{brief(task)} is not a Task; row_task makes one from a row")
        if not task.name:
            name = f"task-{next(self._unnamed):05d}" if resumed is None else resumed.task.name
            task = replace(task, name=name)
        tools = self.tools if task.tools is None else task.tools
        if resumed is None:
            size, metadata = self.renderer.tokenizer.vocabulary.size, {**task.metadata, "task": task.name}
            trajectory = Trajectory(name=task.name, vocab_size=size, metadata=metadata)
            rollout = Rollout(task, trajectory, tools, list(task.messages))
        else:
            rollout = replace(instance("resumed", resumed, Rollout, InputError), task=task, tools=tools)
        run, began = _Run(self, rollout, seed, patience), time.monotonic()
        if resumed is not None:
            run.resume()
        started(rollout)
        with instance_name(task.name) as rollout.instance:
            try:
                await run.run()
            finally:
                rollout.seconds = time.monotonic() - began
        return rollout

    def go_on(
        self, rollout: Rollout, prompt: Ids, completion: Ids, new: list[Mapping[str, Any]]
    ) -> End | None:
        """Append new messages and bridge. If that fails, returns why."""
        bridge = partial(self.renderer.bridge, prompt, completion, new, tools=rollout.schemas)
        bridged = bridge()
        if isinstance(bridged, BridgeRefusal):  # all messages may help, but they cost more
            bridged = bridge(messages=rollout.messages[:-1])
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
        return self.context is None or length < self.context


def check_resumable(sampling: SamplingParams) -> None:
    """Raise ContinuationError for settings whose state starts over with each request."""
    if names := " and ".join(name for name in _COUNTED if getattr(sampling, name)):
        raise ContinuationError(f"an aborted turn cannot be resumed with {names}: leave that setting out")


@dataclass(slots=True)
class _Run:
    agent: Agent
    rollout: Rollout
    seed: int | None
    patience: Patience | None
    is_open: bool = False
    """True if the trajectory ends with a recorded turn to continue or to answer."""
    user: BaseInteraction | None = None
    box: Toolbox = field(init=False)
    limit: asyncio.Timeout = field(init=False)

    def resume(self) -> None:
        rollout, renderer, trajectory = self.rollout, self.agent.renderer, self.rollout.trajectory
        if not trajectory.num_writes:
            raise ContinuationError("the rollout has no prompt yet: start it again")
        prompt = renderer.render(
            rollout.task.messages, tools=rollout.schemas, add_generation_prompt=True
        ).ids
        first, parts = trajectory.writes()[0].tokens.ids, trajectory.turns()
        size, recorded = renderer.tokenizer.vocabulary.size, trajectory.vocab_size
        ends_with_turn = bool(parts) and parts[-1].stop == len(trajectory)
        changed = "the messages, the tools, the template or the tokenizer have changed"
        problems = {
            f"its task is called {rollout.task.name!r}": trajectory.name != rollout.task.name,
            f"it has {trajectory.num_branches} branches": trajectory.num_branches > 1,
            "it has no logprobs": not trajectory.has_logprobs,
            f"its vocabulary has {recorded} ids, not {size}": recorded not in (None, size),
            f"its prompt differs: {changed}": not np.array_equal(first, prompt),
            "its last turn ran out of tokens": ends_with_turn and parts[-1].finish_reason == "length",
        }
        if problem := next((problem for problem, applies in problems.items() if applies), ""):
            raise ContinuationError(f"trajectory {trajectory.name!r} cannot be continued: {problem}")
        self.is_open = ends_with_turn and not rollout.pending
        if self.is_open:
            if parts[-1].finish_reason == "abort" and len(trajectory) > self._start():
                check_resumable(self.agent.sampling)
            del rollout.messages[parts[-1].message :]
            if parts[-1].reward is not None:
                trajectory.set_reward(None, parts[-1])
            last = rollout.per_turn[-1]
            last.reward, last.tool_calls, last.malformed = None, 0, False
        rollout.end, rollout.reward = None, None
        if trajectory.reward is not None:
            trajectory.set_reward(None)

    async def run(self) -> None:
        rollout, agent = self.rollout, self.agent
        try:
            if not rollout.trajectory.num_writes:
                messages, renderer = rollout.task.messages, agent.renderer
                rendered = renderer.render(messages, tools=rollout.schemas, add_generation_prompt=True)
                rollout.notes += rendered.notes
                rollout.notes += map(str, () if renderer.lost is LostPolicy.IGNORE else rendered.lost)
                spans = message_spans(rendered.messages)
                rollout.trajectory.begin(rendered.ids, messages=len(messages), message_spans=spans)
            self.user = choose_user(agent.interactions, rollout.task.interaction_settings)
            async with AsyncExitStack() as stack:
                self.box = Toolbox(rollout, agent.budget)
                await self.box.create(stack)
                try:
                    async with asyncio.timeout(agent.budget.seconds) as self.limit:
                        await self._lead(stack)
                except TimeoutError:
                    if not self.limit.expired():
                        raise
                    rollout.end = End.TIME
                    rollout.notes.append(f"the rollout took longer than {agent.budget.seconds:g} s")
                if rollout.end not in FAILED_ENDS:
                    await self._score()
        except EngineDown:
            raise
        except Exception as error:
            ends = {EngineError: End.ENGINE, TooLong: End.HUNG, Exception: End.FAILED}
            rollout.end = next(end for kind, end in ends.items() if isinstance(error, kind))
            rollout.notes.append(describe_error(error))
        if rollout.end in FAILED_ENDS:
            rollout.reward = None
        if rollout.reward is not None:
            rollout.trajectory.set_reward(rollout.reward)

    async def _lead(self, stack: AsyncExitStack) -> None:
        rollout, user, timeout = self.rollout, self.user, self.agent.budget.interaction_timeout
        if user is not None:
            start = user.start_interaction(rollout.instance, **rollout.task.interaction_settings)
            await within(start, timeout, "start_interaction")
            finalize = partial(user.finalize_interaction, rollout.instance)
            stack.push_async_callback(noted, finalize, timeout, "finalize_interaction", rollout.notes)
        if rollout.pending:  # of a recorded rollout: they answered its last turn
            stream, first = rollout.trajectory.stream(), self._start()
            pending, rollout.pending = rollout.pending, []
            rollout.end = self.agent.go_on(rollout, stream[:first], stream[first:], pending)
        while rollout.end is None:
            rollout.end = await self._turn()

    def _start(self) -> int:
        """Where the first part of the last turn begins."""
        return next(part for part in reversed(self.rollout.trajectory.turns()) if not part.continues).start

    async def _turn(self) -> End | None:
        """Sample a turn and append what answers it. Returns why the rollout ends."""
        rollout, agent, trajectory = self.rollout, self.agent, self.rollout.trajectory
        is_open, self.is_open, reason = self.is_open, False, None
        start = self._start() if is_open else len(trajectory)
        if not is_open or trajectory.turns()[-1].finish_reason == "abort":
            sampled, reason = await self._sample_turn(start, continues=is_open)
            if not sampled:
                return reason
        stream = trajectory.stream()
        prompt, completion = stream[:start], stream[start:]
        parsed = agent.renderer.parse_response(completion, tools=rollout.schemas, prompt_ids=prompt)
        rollout.messages.append(parsed.to_message(call_id=partial(call_id, rollout.turns)))
        turn = rollout.per_turn[-1]
        turn.malformed = any(not call.ok for call in (*parsed.tool_calls, *parsed.attempts))
        if reason is not None:
            return reason
        new = await self._answers(parsed, turn)
        if turn.reward:
            trajectory.set_reward(turn.reward, trajectory.turns()[-1])
        return new if isinstance(new, End) else agent.go_on(rollout, prompt, completion, new)

    async def _sample_turn(self, start: int, *, continues: bool) -> tuple[bool, End | None]:
        """Sample a turn in parts. Returns if there is any, and why the run ends."""
        aborts, rollout, agent = 0, self.rollout, self.agent
        while True:
            room, limit = self._room(start, continues=continues)
            if room < 1:
                return continues, limit
            before = rollout.engine_seconds
            completion = await self._sample(room, start, continues=continues)
            if continues:
                completion = self._cut_at_stop(completion, rollout.trajectory.stream()[start:])
            aborted = completion.finish_reason is FinishReason.ABORT
            again = aborted and agent.resume_aborted and aborts < _ABORTS
            if len(completion.ids) or not again:
                self._record(completion, room, rollout.engine_seconds - before, continues=continues)
                continues, aborts = True, 0
            else:
                aborts += 1
                await asyncio.sleep(backoff(aborts, 0.1, 5.0))
            if not again:
                length = limit if completion.finish_reason is FinishReason.LENGTH else None
                return True, End.ABORT if aborted else length

    def _cut_at_stop(self, part: Completion, before: Ids) -> Completion:
        """Cut a later part of a turn at a stop text, which may begin `before` it."""
        finder = StopFinder(self.agent.sampling.stop, self.agent.renderer.tokenizer.vocabulary.token_bytes)
        for one in before.tolist():
            finder.feed(one)
        for end, one in enumerate(part.ids.tolist(), 1):
            if (text := finder.feed(one)) is not None:
                return replace(part.head(end), finish_reason=FinishReason.STOP, stopped_by=text)
        return part

    def _record(self, completion: Completion, room: int, seconds: float, *, continues: bool) -> None:
        rollout = self.rollout
        rollout.trajectory.append_completion(
            completion.ids,
            completion.logprobs,
            finish_reason=str(completion.finish_reason),
            version=completion.versions or None,
            sampling=self.agent.sampling.described() | {"max_tokens": room},
            continues=continues,
            logprobs_kind=completion.logprobs_kind,
            cached_tokens=completion.cached_tokens,
            channels=completion.channels,
        )
        rollout.per_turn.append(TurnMetrics(seconds))

    def _room(self, start: int, *, continues: bool) -> tuple[int, End]:
        """How many more tokens the turn at `start` may have, and which limit that is."""
        budget, rollout, context = self.agent.budget, self.rollout, self.agent.context
        if rollout.turns - continues >= budget.turns:
            return 0, End.TURNS
        if budget.tool_seconds is not None and rollout.tool_seconds > budget.tool_seconds:
            return 0, End.TOOL_TIME
        limits = [(self.agent.sampling.max_tokens - len(rollout.trajectory) + start, End.LENGTH)]
        if budget.tokens is not None:
            limits.append((budget.tokens - rollout.trajectory.num_sampled, End.TOKENS))
        if context is not None:
            limits.append((context - len(rollout.trajectory), End.CONTEXT))
        return min(limits, key=lambda limit: limit[0])

    async def _sample(self, room: int, start: int, *, continues: bool) -> Completion:
        rollout, engine, sampling = self.rollout, self.agent.engine, self.agent.sampling
        turn, group = rollout.turns - continues, rollout.task.metadata.get("group")
        seed = sampling.seed if self.seed is None else self.seed + turn
        if seed is not None:
            seed += _PART_SEED * (len(rollout.trajectory) - start)

        async def request() -> Completion:
            began = time.monotonic()
            try:
                answer = engine.generate(
                    rollout.trajectory.prompt(),
                    replace(sampling, seed=seed, max_tokens=room),
                    request_id=f"{rollout.instance}-{turn}",
                    session=rollout.instance,
                    group=None if group is None else str(group),
                )
                return await within(answer, None, "the engine")
            finally:
                rollout.engine_seconds += time.monotonic() - began

        async def probe() -> Completion:
            return await engine.generate(rollout.trajectory.prompt()[:1], SamplingParams(1))

        if self.patience is None:
            return await request()
        return await self.patience.ask(request, probe, waiting=self._waiting)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Stop the clock of the rollout."""
        end = self.limit.when()
        if end is None:
            yield
            return
        now = asyncio.get_running_loop().time
        remaining = end - now()
        self.limit.reschedule(None)
        try:
            yield
        finally:
            self.limit.reschedule(now() + remaining)

    async def _answers(self, parsed: ParsedResponse, turn: TurnMetrics) -> list[Mapping[str, Any]] | End:
        rollout, user, budget = self.rollout, self.user, self.agent.budget
        has_calls, most = bool(parsed.tool_calls and rollout.tools), budget.user_turns
        if (has_calls or user is not None) and most is not None and rollout.turns > most:
            return End.TURNS
        if has_calls:
            messages: list[Mapping[str, Any]] = []
            results = await self.box.run(parsed.tool_calls, turn)
            for call, result in zip(parsed.tool_calls, results, strict=True):
                message = {"role": "tool", "content": self._cut(result.content)}
                message["tool_call_id"] = call.id or call_id(rollout.turns, call.index)
                messages.append({**message, "name": call.name} if call.name else message)
            return messages
        if user is None:
            return End.ANSWER
        conversation = [dict(message) for message in rollout.messages]
        response = user.generate_response(
            rollout.instance, conversation, **rollout.task.interaction_settings
        )
        reply = as_reply(await within(response, budget.interaction_timeout, "generate_response"))
        turn.add("interaction", user.name, reply.reward, reply.metrics)
        if reply.done:
            return End.USER
        return [{"role": "user", "content": self._cut(reply.content)}]

    def _cut(self, text: str) -> str:
        budget = self.agent.budget
        return cut_text(text, budget.result_tokens, self.agent.renderer.tokenizer, budget.result_keep)

    async def _score(self) -> None:
        rollout, limit = self.rollout, self.agent.budget.reward_timeout
        if self.agent.reward is not None:
            reward = await within(called(self.agent.reward, rollout), limit, "the reward")
            rollout.reward = checked_reward(reward, "the reward")
            return
        scores: dict[str, Any] = {f"turn {at}": turn.reward for at, turn in enumerate(rollout.per_turn)}
        scores |= await self.box.rewards()
        if self.user is not None:
            score = self.user.calculate_score(rollout.instance)
            scores["calculate_score"] = await within(score, limit, "calculate_score")
        numbers = [checked_reward(score, name) for name, score in scores.items()]
        present = [number for number in numbers if number is not None]
        rollout.reward = checked_reward(sum(present) if present else None, "the sum of all rewards")
