"""The questions for every agent, and its tool. It runs in the agents' environments: standard library only."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

SYSTEM = "You tell the weather."
QUESTIONS = ["What is the weather in Zürich?", "And in Bern and Basel?", "Thank you!"]


@dataclass
class Run:
    url: str
    dialect: str
    stream: bool
    key: str = "none"
    sittings: list[list[str]] = field(default_factory=lambda: [QUESTIONS])
    """The questions, for agents that can be closed and reopened between sittings."""

    @property
    def openai(self) -> str:
        return f"{self.url}/v1"


def runs() -> Iterator[Run]:
    for run in json.loads(sys.argv[1]):
        yield Run(**run)


def run_all(talk: Callable[[Run], Awaitable[None]]) -> None:
    async def main() -> None:
        for run in runs():
            await talk(run)

    asyncio.run(main())


def weather(city: str, days: int) -> str:
    """Tells the weather.

    Args:
        city: The name of the city.
        days: How many days ahead.
    """
    return f"sunny in {city}, {days} days  \n"
