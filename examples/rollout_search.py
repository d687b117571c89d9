"""A search tool over a small corpus: it matches words and returns the best passage."""

import asyncio
import re

from tokentrace import create_renderer
from tokentrace.engines import EmbeddedEngine, SamplingParams
from tokentrace.pocket import POCKET
from tokentrace.rollout import Agent, Budget, Rollout, Task, as_tools, run_rollouts

CORPUS = [
    "The price of the green lamp is 48.",
    "The price of the round clock is 678.",
    "The price of the old chair is 120.",
    "The price of the red kettle is 35.",
]


def words(text: str) -> set[str]:
    """The words of a text, except those that every passage has."""
    return set(re.findall(r"\w+", text.lower())) - {"the", "price", "of", "is"}


def search(query: str) -> str:
    """Search the price list for a name.

    Args:
        query: What to look for.
    """
    best = max(CORPUS, key=lambda passage: len(words(passage) & words(query)))
    return best if words(best) & words(query) else f"Error: no entry for {query!r}"


def show(rollout: Rollout) -> None:
    """Print the question, the search queries and the answer."""
    calls = [call["function"]["arguments"] for one in rollout.messages for call in one.get("tool_calls") or ()]
    print(f"{rollout.messages[0]['content']} {calls} -> {rollout.answer}")


async def main() -> None:
    """Three questions at once."""
    texts = ["What does the round clock cost?", "What is the price of the green lamp?", "What does the old chair cost?"]
    tasks = [Task([{"role": "user", "content": text}], name=f"question-{at}") for at, text in enumerate(texts)]
    engine = EmbeddedEngine()
    sampling, budget = SamplingParams(256, temperature=0), Budget(turns=6, result_tokens=64)
    agent = Agent(engine, create_renderer(POCKET), tools=as_tools([search]), sampling=sampling, budget=budget)
    summary = await run_rollouts(agent, tasks, done=show)
    await engine.close()
    print(f"{summary.rollouts} rollouts, {summary.turns} turns, {summary.breaks} breaks, {summary.samples} rows")


asyncio.run(main())
