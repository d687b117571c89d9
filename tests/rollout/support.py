"""Helpers for rollout tests: an engine with scripted turns, an agent that uses it, and single rollouts."""

import asyncio
import json
import os
from collections.abc import Callable, Coroutine
from typing import Any

from tests.engines.faults import FaultyEngine
from tokentrace import create_renderer
from tokentrace.engines.protocol import Completion, SamplingParams
from tokentrace.pocket import POCKET
from tokentrace.rollout.interactions import BaseInteraction
from tokentrace.rollout.loop import Agent, Rollout, Task
from tokentrace.rollout.tools import BaseTool, function_schema

RENDERER = create_renderer(POCKET)
SIZE = RENDERER.tokenizer.vocabulary.size
QUESTION = ({"role": "user", "content": "What is 6 * 7?"},)
TASK = Task(QUESTION, name="one")
ANSWER = "It is 42.<|end|>"


def call(name: str, /, **arguments: Any) -> str:
    """A tool call in the format of the pocket model."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CALL = call("look")


def look() -> str:
    """Look."""
    return "42"


class Table(BaseTool):
    """A tool with one value per trajectory."""

    def __init__(self) -> None:
        super().__init__(tool_schema=function_schema(look))
        self.values: dict[str, Any] = {}

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        assert instance_id not in self.values, "two trajectories share an instance"
        self.values[instance_id] = kwargs["value"]

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        return f"{self.values[instance_id]}", 0.5, {"depth": 1}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(self.values[instance_id])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.values[instance_id]


class Turns(FaultyEngine):
    """An engine that samples these turns in order in each rollout, and then repeats the last."""

    def __init__(self, *turns: str, **options: Any) -> None:
        super().__init__(lambda *_: (), vocab_size=SIZE, **options)
        texts = [f"{turn.removesuffix('<|end|>')}<|end|>" for turn in turns or (ANSWER,)]
        self._turns = [RENDERER.tokenizer.encode(text) for text in texts]
        self.counts: dict[str, int] = {}

    async def generate(self, prompt_ids: Any, sampling: SamplingParams, **options: Any) -> Completion:
        session = str(options.get("session"))
        at = self.counts[session] = self.counts.get(session, -1) + 1
        ids = self._turns[min(at, len(self._turns) - 1)]
        self._script = lambda *_: ids  # type: ignore[misc]
        return await super().generate(prompt_ids, sampling, **options)


def agent(*turns: str, **options: Any) -> Agent:
    return Agent(Turns(*turns), RENDERER, **options)


def run(*turns: str, task: Task = TASK, **options: Any) -> Rollout:
    """Run a rollout of a model with these turns."""
    return asyncio.run(agent(*turns, **options).run(task))


def results(rollout: Rollout) -> list[str]:
    """The tool results as the model sees them."""
    return [message["content"] for message in rollout.messages if message["role"] == "tool"]


class Deadly(BaseInteraction):
    """Ends the process when one rollout starts, as if out of memory; gives no replies in the others."""

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        if instance_id == "q3-1":
            os._exit(1)

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        return None


def run_at(clock: Callable[[], float], work: Coroutine[Any, Any, Rollout]) -> Rollout:
    """Run a coroutine in an event loop that takes its time from a clock."""

    def loop() -> asyncio.AbstractEventLoop:
        event_loop = asyncio.new_event_loop()
        event_loop.time = clock  # type: ignore[method-assign]
        return event_loop

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(work)
