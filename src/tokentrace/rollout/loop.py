"""The agent loop: render once, then sample, parse, run tools and bridge, until it is done or a budget ends it.

The trajectory is the only history that the engine ever sees: each prompt is its stream, id for id. What was sampled is
parsed to find out what to do next, and never rendered again.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, overload

import numpy as np

from ..engines.protocol import Completion, Engine, EngineError, FinishReason, SamplingParams
from ..errors import TokentraceError
from ..parsing.response import ParsedResponse, ParsedToolCall
from ..rendering.renderer import Renderer
from ..study.seams import BridgeRefusal
from ..tokens.tokenizer import Ids
from ..trajectory.trajectory import Trajectory
from .cutting import Keep, cut_text
from .interactions import BaseInteraction, as_reply
from .tools import BaseTool, Toolbox, ToolResult, ToolUse, as_tools

Messages = Sequence[Mapping[str, Any]]


class End(StrEnum):
    """Why a rollout ended."""

    ANSWER = "answer"
    """The model answered without calling anything, and nobody had more to say."""
    USER = "user"
    """The simulated user had heard enough."""
    LENGTH = "length"
    """A turn ran out of tokens."""
    TURNS = "turns"
    TOKENS = "tokens"
    CONTEXT = "context"
    """There is no room for another turn."""
    TOOL_TIME = "tool time"
    ABORT = "abort"
    """The engine was told to end a request."""
    BRIDGE = "bridge"
    """The next prompt could not be proven to extend the stream; the notes say why."""
    ENGINE = "engine"
    """The engine failed; the notes say how."""
    FAILED = "failed"
    """Something else failed: a tool's `create`, the template; the notes say what."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What ends a rollout, and what is cut."""

    turns: int = 16
    turn_tokens: int = 1024
    """The most tokens of one turn."""
    tokens: int | None = None
    """The most sampled tokens of all turns."""
    context: int | None = None
    """The most tokens of a stream; the engine's own limit if it is smaller."""
    tool_timeout: float | None = 60.0
    """Seconds for one call."""
    tool_seconds: float | None = None
    """Seconds for all calls of a rollout."""
    result_tokens: int = 2048
    """Longer tool results are cut."""
    result_keep: Keep = Keep.MIDDLE


@dataclass(frozen=True, slots=True)
class Task:
    """What a rollout is about."""

    messages: Messages
    name: str = ""
    tools: Sequence[BaseTool] | None = None
    """Its own tools, in place of the agent's."""
    tool_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """For each tool by its name, what `create` is given."""
    interaction_settings: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Rollout:
    """A rollout, done or under way."""

    task: Task
    trajectory: Trajectory
    tools: Sequence[BaseTool]
    messages: list[Mapping[str, Any]]
    """The conversation as it was parsed, for people and for rewards; the trajectory is what was sampled."""
    end: End | None = None
    reward: float | None = None
    use: ToolUse = field(default_factory=ToolUse)
    turns: int = 0
    malformed: int = 0
    """Turns with a call that could not be read."""
    seconds: float = 0.0
    engine_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def schemas(self) -> list[dict[str, Any]] | None:
        """The schemas of its tools, as the template is shown them."""
        return [tool.tool_schema for tool in self.tools] or None

    @property
    def last(self) -> Mapping[str, Any]:
        """The last message."""
        return self.messages[-1]

    def metrics(self) -> dict[str, Any]:
        """What is known of it in numbers."""
        return {
            "end": None if self.end is None else str(self.end),
            "reward": self.reward,
            "turns": self.turns,
            "tokens": len(self.trajectory),
            "sampled": self.trajectory.num_sampled,
            "samples": self.trajectory.num_samples,
            "breaks": max(0, self.trajectory.num_branches - 1),
            "tool_calls": self.use.calls,
            "tool_errors": self.use.failed,
            "tool_seconds": self.use.seconds,
            "malformed_turns": self.malformed,
            "seconds": self.seconds,
            "engine_seconds": self.engine_seconds,
        }


Reward = Callable[[Rollout], float | Awaitable[float | None] | None]
"""Gives a finished rollout its reward, in place of what tools and interaction say."""


class Agent:
    """Runs rollouts of one model with one set of tools. Safe to run many at once in one event loop."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        *,
        sampling: SamplingParams | None = None,
        tools: Sequence[BaseTool | Callable[..., Any]] = (),
        interaction: BaseInteraction | None = None,
        reward: Reward | None = None,
        budget: Budget | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.renderer = renderer
        self.tools = as_tools(tools)
        self.interaction = interaction
        self.reward = reward
        self.budget = budget or Budget()
        self._clock = clock
        given = sampling or SamplingParams(max_tokens=self.budget.turn_tokens)
        self._turn_tokens = min(given.max_tokens, self.budget.turn_tokens)
        stops = tuple(dict.fromkeys([*given.stop_token_ids, *renderer.get_stop_token_ids()]))
        self._sampling = {name: getattr(given, name) for name in ("temperature", "top_p", "top_k", "seed")} | {
            "stop_token_ids": stops
        }
        limits = [self.budget.context, engine.capabilities.max_length]
        self._context = min((limit for limit in limits if limit is not None), default=None)

    async def run(
        self, task: Task, *, grown: Callable[[Rollout], None] | None = None, seed: int | None = None
    ) -> Rollout:
        """One rollout, from its first prompt to its reward.

        `grown` is called after every write to the trajectory: to have it on disk. Engine failures, refused bridges,
        failing tools and rewards end a rollout with what was sampled kept; nothing is raised but cancellation. `seed`
        overrides that of the sampling parameters.
        """
        metadata = {**task.metadata, "task": task.name}
        vocab = self.renderer.tokenizer.vocabulary.size
        trajectory = Trajectory(name=task.name, vocab_size=vocab, metadata=metadata)
        tools = self.tools if task.tools is None else task.tools
        rollout = Rollout(task, trajectory, tools, list(task.messages))
        began = self._clock()
        try:
            await self._run(rollout, grown or (lambda _: None), seed)
        finally:
            rollout.seconds = self._clock() - began
        return rollout

    async def _run(self, rollout: Rollout, grown: Callable[[Rollout], None], seed: int | None) -> None:
        task = rollout.task
        try:
            rendered = self.renderer.render(task.messages, tools=rollout.schemas, add_generation_prompt=True)
            rollout.notes += rendered.notes
            rollout.trajectory.begin(rendered.ids, messages=len(task.messages), message_spans=_spans(rendered.messages))
            grown(rollout)
        except TokentraceError as error:
            rollout.end, rollout.notes = End.FAILED, [*rollout.notes, str(error)]
            return
        box = Toolbox(rollout.tools, task.name, timeout=self.budget.tool_timeout, settings=task.tool_settings)
        rollout.use = box.use
        try:
            async with box:
                if self.interaction is not None:
                    await self.interaction.start_interaction(task.name, **task.interaction_settings)
                try:
                    while rollout.end is None:
                        rollout.end = await self._turn(rollout, box, grown, seed)
                    await self._score(rollout, box)
                finally:
                    if self.interaction is not None:
                        await self.interaction.finalize_interaction(task.name)
        except EngineError as error:
            rollout.end, rollout.notes = End.ENGINE, [*rollout.notes, str(error)]
        except Exception as error:
            rollout.end = End.FAILED
            rollout.notes.append(f"{type(error).__name__}: {error}")

    async def _turn(
        self, rollout: Rollout, box: Toolbox, grown: Callable[[Rollout], None], seed: int | None
    ) -> End | None:
        """Sample a turn, and put what answers it after it. Says why the rollout ends, if it does."""
        room, limit = self._room(rollout)
        if room < 1:
            return limit
        trajectory = rollout.trajectory
        completion = await self._sample(rollout, room, seed)
        start = len(trajectory)
        trajectory.append_completion(
            completion.ids,
            completion.logprobs,
            finish_reason=str(completion.finish_reason),
            version=_version(completion),
            sampling={**self._sampling, "stop_token_ids": list(self._sampling["stop_token_ids"]), "max_tokens": room},
        )
        rollout.turns += 1
        grown(rollout)
        prompt = trajectory.stream()[:start]
        parsed = self.renderer.parse_response(completion.ids, tools=rollout.schemas, prompt_ids=prompt)
        rollout.messages.append(parsed.to_message(call_id=functools.partial(_call_id, rollout.turns)))
        if any(not call.ok for call in parsed.tool_calls):
            rollout.malformed += 1
        if completion.finish_reason is FinishReason.ABORT:
            return End.ABORT
        if completion.finish_reason is FinishReason.LENGTH:
            return limit
        new, reason = await self._answers(rollout, parsed, box)
        if reason is not None:
            return reason
        reason = self.go_on(rollout, prompt, completion.ids, new)
        if reason is None:
            grown(rollout)
        return reason

    def go_on(self, rollout: Rollout, prompt: Ids, completion: Ids, new: list[Mapping[str, Any]]) -> End | None:
        """Put new messages after a turn: the stream is bridged to the next one. Says why not, where it cannot be.

        What sets one way of keeping history apart from another; `rollout.paths` has those of others.
        """
        bridged = self.renderer.bridge(prompt, completion, new, tools=rollout.schemas)
        if isinstance(bridged, BridgeRefusal):  # the whole conversation may help: to check it costs what it is long
            bridged = self.renderer.bridge(
                prompt, completion, new, tools=rollout.schemas, messages=rollout.messages[:-1]
            )
        if isinstance(bridged, BridgeRefusal):
            rollout.notes.append(str(bridged))
            return End.BRIDGE
        if not self.has_room(len(bridged)):
            return End.CONTEXT
        rollout.messages += new
        rollout.trajectory.append_bridge(bridged)
        return None

    def has_room(self, length: int) -> bool:
        """Whether a turn can follow a prompt of so many tokens."""
        return self._context is None or length < self._context

    def _room(self, rollout: Rollout) -> tuple[int, End]:
        """How many tokens the next turn may have, and what it is that allows no more."""
        budget = self.budget
        if rollout.turns >= budget.turns:
            return 0, End.TURNS
        if budget.tool_seconds is not None and rollout.use.seconds > budget.tool_seconds:
            return 0, End.TOOL_TIME
        limits = [(self._turn_tokens, End.LENGTH)]
        if budget.tokens is not None:
            limits.append((budget.tokens - rollout.trajectory.num_sampled, End.TOKENS))
        if self._context is not None:
            limits.append((self._context - len(rollout.trajectory), End.CONTEXT))
        return min(limits, key=lambda limit: limit[0])

    async def _sample(self, rollout: Rollout, room: int, seed: int | None) -> Completion:
        own = self._sampling["seed"] if seed is None else seed + rollout.turns
        sampling = SamplingParams(**{**self._sampling, "seed": own, "max_tokens": room})
        began = self._clock()
        try:
            return await self.engine.generate(
                rollout.trajectory.prompt(),
                sampling,
                request_id=f"{rollout.task.name}-{rollout.turns}",
                session=rollout.task.name,
                wire=_Wire(rollout.trajectory),
            )
        finally:
            rollout.engine_seconds += self._clock() - began

    async def _answers(
        self, rollout: Rollout, parsed: ParsedResponse, box: Toolbox
    ) -> tuple[list[Mapping[str, Any]], End | None]:
        """What follows a turn: the results of its calls, or what the simulated user says."""
        if parsed.tool_calls and rollout.tools:
            results = await box.run(parsed.tool_calls)
            answered = zip(parsed.tool_calls, results, strict=True)
            return [self._result(call, rollout.turns, result) for call, result in answered], None
        if self.interaction is None:
            return [], End.ANSWER
        reply = as_reply(await self.interaction.generate_response(rollout.task.name, rollout.messages))
        rollout.use.reward += reply.reward
        if reply.done:
            return [], End.USER
        return [{"role": "user", "content": self._cut(reply.content)}], None

    def _result(self, call: ParsedToolCall, turn: int, result: ToolResult) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "tool", "content": self._cut(result.content)}
        message["tool_call_id"] = call.id or _call_id(turn, call.index)
        return {**message, "name": call.name} if call.name else message

    def _cut(self, text: str) -> str:
        return cut_text(text, self.budget.result_tokens, self.renderer.tokenizer, self.budget.result_keep)

    async def _score(self, rollout: Rollout, box: Toolbox) -> None:
        if self.reward is not None:
            found = self.reward(rollout)
            rollout.reward = await found if isinstance(found, Awaitable) else found
        else:
            scores = [await box.rewards()]
            if self.interaction is not None:
                scores.append(await self.interaction.calculate_score(rollout.task.name))
            told = [score for score in scores if score is not None]
            rollout.reward = sum(told) + rollout.use.reward if told or rollout.use.reward else None
        if rollout.reward is not None and not math.isfinite(rollout.reward):
            odd, rollout.reward = rollout.reward, None
            raise ValueError(f"the reward is {odd}")


class _Wire(Sequence[bytes]):
    """The stream as JSON text, made when an engine reads it: one that is not sent JSON never does."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._trajectory: Final = trajectory

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[bytes, ...]: ...
    def __getitem__(self, at: int | slice) -> bytes | tuple[bytes, ...]:
        return self._trajectory.wire_parts()[at]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._trajectory.wire_parts())

    def __len__(self) -> int:
        return len(self._trajectory.wire_parts())


def _call_id(turn: int, index: int) -> str:
    """An id for a call to which the model gave none: nine letters and digits, unique in a rollout."""
    return f"c{turn:04d}{index:04d}"


def _version(completion: Completion) -> Any:
    return [tuple(span) for span in completion.versions] or None


def _spans(messages: Any) -> list[tuple[int, int, int]]:
    """Runs of one message, as a trajectory records them."""
    cuts = [0, *(np.flatnonzero(np.diff(messages)) + 1).tolist(), len(messages)]
    pairs = itertools.pairwise(cuts)
    return [(start, stop, int(messages[start])) for start, stop in pairs if start < stop and messages[start] >= 0]
