"""What the tests of rollouts share: an engine that says given turns, an agent on it, and one rollout."""

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
    """A call as the pocket model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CALL = call("look")


def look() -> str:
    """Look."""
    return "42"


class Table(BaseTool):
    """Has a value for each trajectory."""

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
    """Says these turns of each rollout one after another, then the last again."""

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
    """A rollout of a model that says these turns."""
    return asyncio.run(agent(*turns, **options).run(task))


def results(rollout: Rollout) -> list[str]:
    """What the tools returned, as the model saw it."""
    return [message["content"] for message in rollout.messages if message["role"] == "tool"]


class Deadly(BaseInteraction):
    """The process ends, as for lack of memory, when one rollout begins; the others have nothing said to them."""

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        if instance_id == "q3-1":
            os._exit(1)

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        return None


def run_at(clock: Callable[[], float], work: Coroutine[Any, Any, Rollout]) -> Rollout:
    """What comes of a coroutine in an event loop whose time is a clock's."""

    def loop() -> asyncio.AbstractEventLoop:
        new = asyncio.new_event_loop()
        new.time = clock  # type: ignore[method-assign]
        return new

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(work)
