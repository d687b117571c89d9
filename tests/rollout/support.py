"""What the tests of rollouts share: an engine that says given turns, an agent on it, and one rollout."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.engines.faults import FaultyEngine
from tokentrace import create_renderer
from tokentrace.engines.protocol import Completion, SamplingParams
from tokentrace.pocket import POCKET
from tokentrace.rollout.loop import Agent, Rollout, Task

RENDERER = create_renderer(POCKET)
SIZE = RENDERER.tokenizer.vocabulary.size
QUESTION = ({"role": "user", "content": "What is 6 * 7?"},)
TASK = Task(QUESTION, name="one")
ANSWER = "It is 42.<|end|>"
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


def look() -> str:
    """Look."""
    return "42"


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
