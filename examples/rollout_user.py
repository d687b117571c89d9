"""A simulated user: it asks follow-up questions, scores the last answer and ends the rollout."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from tokentrace import create_renderer
from tokentrace.demo.questions import follow_up, pick_questions, question_task, reward
from tokentrace.engines import EmbeddedEngine, SamplingParams
from tokentrace.pocket import POCKET
from tokentrace.rollout import Agent, BaseInteraction, Reply


class User(BaseInteraction):
    """Asks the remaining follow-ups of a question."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: dict[str, float] = {}

    async def generate_response(self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Reply:
        question = kwargs["question"]
        text = follow_up(question, messages)
        self.scores[instance_id] = reward(question, messages)
        return Reply(done=True) if text is None else Reply(text)

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        return self.scores.get(instance_id)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self.scores.pop(instance_id, None)


async def main() -> None:
    """One conversation of two questions."""
    (question,) = pick_questions(1, seed=1, kinds=["follow_up"])
    engine = EmbeddedEngine()
    sampling = SamplingParams(256, temperature=0)
    agent = Agent(engine, create_renderer(POCKET), interaction=User(), sampling=sampling)
    rollout = await agent.run(question_task(question))
    await engine.close()
    for message in rollout.messages:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        print(f"{message['role']:>9}: {message.get('content') or ''}{calls or ''}")
    print(f"ended by the {rollout.end}, reward {rollout.reward}, {rollout.trajectory.num_samples} row")


asyncio.run(main())
