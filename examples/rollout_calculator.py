"""A rollout with a plain function as its tool: the embedded model calls it, and the row has loss on the sampled ids."""

import asyncio

from tokentrace import create_renderer, trajectory_samples
from tokentrace.demo.calculator import calculate
from tokentrace.engines import EmbeddedEngine, SamplingParams
from tokentrace.pocket import POCKET
from tokentrace.rollout import Agent, Task, as_tools


def calculator(expression: str) -> int:
    """Evaluate an arithmetic expression."""
    return calculate(expression)


async def main() -> None:
    """One question, from its prompt to the training row."""
    renderer = create_renderer(POCKET)
    engine = EmbeddedEngine()
    agent = Agent(engine, renderer, tools=as_tools([calculator]), sampling=SamplingParams(256, temperature=0))
    rollout = await agent.run(Task([{"role": "user", "content": "What is 17 * 23 + 4?"}], name="example"))
    await engine.close()
    for message in rollout.messages:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        print(f"{message['role']:>9}: {message.get('content') or ''}{calls or ''}")
    (row,) = trajectory_samples(rollout.trajectory)
    print(f"ended by {rollout.end}; a row of {len(row)} tokens, {row.trained} of them sampled and trained:")
    print(repr(renderer.tokenizer.decode(row.ids[row.mask])))


asyncio.run(main())
