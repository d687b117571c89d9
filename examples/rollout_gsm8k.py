"""Word problems with a reward tool: created with each rollout's ground truth, read at the end, then released."""

import asyncio
from typing import Any

from tokentrace import create_renderer
from tokentrace.demo.calculator import calculate
from tokentrace.demo.questions import pick_questions
from tokentrace.engines import EmbeddedEngine
from tokentrace.pocket import POCKET
from tokentrace.rollout import Agent, BaseTool, Task, as_tools, function_schema, grouped, run_rollouts


def calculator(expression: str) -> int:
    """Evaluate an arithmetic expression."""
    return calculate(expression)


def calc_gsm8k_reward(answer: str) -> None:
    """Calculate the reward of an answer: 1.0 if it is correct, else 0.0."""


class Gsm8kTool(BaseTool):
    """Checks answers. The reward of the trajectory is that of the last answer."""

    def __init__(self) -> None:
        super().__init__(tool_schema=function_schema(calc_gsm8k_reward))
        self.truths: dict[str, int] = {}
        self.rewards: dict[str, float] = {}

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        self.truths[instance_id], self.rewards[instance_id] = kwargs["ground_truth"], 0.0

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        self.rewards[instance_id] = float(str(parameters["answer"]).strip() == str(self.truths[instance_id]))
        return f"Current parsed answer={parameters['answer']!r} reward={self.rewards[instance_id]}"

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return self.rewards[instance_id]

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.truths[instance_id], self.rewards[instance_id]


async def main() -> None:
    """Four questions in groups of two."""
    questions = pick_questions(4, kinds=["checked"])
    tasks = [Task(q.prompt, q.id, tool_settings={"calc_gsm8k_reward": {"ground_truth": q.answer}}) for q in questions]
    engine = EmbeddedEngine()
    agent = Agent(engine, create_renderer(POCKET), tools=as_tools([calculator, Gsm8kTool()]))
    done = lambda rollout: print(f"{rollout.task.name}: {rollout.answer!r} reward {rollout.reward}")  # noqa: E731
    summary = await run_rollouts(agent, grouped(tasks, 2), done=done, seed=0)
    await engine.close()
    print(f"{summary.rollouts} rollouts, {summary.tool_calls} calls, mean reward {summary.reward:.2f}")


asyncio.run(main())
