"""How a question is written: what the user asks, and each reply of the expert, its thought and its calls.

The tools are not run here; the values that a script uses are those that the tools will give.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from tokentrace.demo.calculator import calculate
from tokentrace.show.visible import listed
from training.pocket.purpose import Purpose
from training.pocket.words import Topic, names


@dataclass(frozen=True, slots=True)
class ExpertReply:
    """One reply of the expert: a thought and what it says, one of several each, and its calls."""

    thoughts: tuple[str, ...]
    says: tuple[str, ...] = ("",)
    calls: tuple[tuple[Purpose, str], ...] = ()


def capital(text: str) -> str:
    """The text with a capital first."""
    return text[:1].upper() + text[1:]


@dataclass(slots=True)
class Script:
    """A question while it is written."""

    rng: random.Random
    held_back: bool
    asked: list[str] = field(default_factory=list)
    steps: list[list[ExpertReply]] = field(default_factory=list)
    table: dict[str, int] = field(default_factory=dict)
    field_name: str = "value"
    """What the table is of."""
    uses: tuple[Purpose, ...] = (Purpose.CALCULATE, Purpose.LOOK_UP)
    answer: int | None = None
    """None: the expert has to say that it does not know."""
    mentions: str = ""
    """What the answer has to name besides its number."""
    known: Topic | None = None
    """What the first question was about, for questions that follow."""

    def ask(self, *texts: str, **values: object) -> None:
        """The user's next question."""
        self.asked.append(capital(self.rng.choice(texts).format(**values)))
        self.steps.append([])

    def step(self, thoughts: Sequence[str], says: Sequence[str] = ("",), *calls: tuple[Purpose, str]) -> None:
        """The expert's next reply."""
        self.steps[-1].append(ExpertReply(tuple(map(capital, thoughts)), tuple(map(capital, says)), calls))

    def calculate(self, expression: str, *thoughts: str) -> int:
        """A call of the calculator; `thoughts` can name the expression as ``{e}``."""
        plain = ("{e}.", "Now {e}.", "I calculate {e}.", "That is {e}.")
        self.step(
            [text.format(e=expression) for text in thoughts or plain], CALCULATING, (Purpose.CALCULATE, expression)
        )
        value = calculate(expression)
        if value.denominator != 1:
            raise ValueError(f"{expression} is not a whole number")
        return value.numerator

    def look_up(self, topic: Topic, *wanted: str, together: bool) -> None:
        """Look names up, each in a reply of its own or all in one. What the last told is left to the next thought."""
        if together:
            said = listed([topic.the(name) for name in wanted])
            thoughts = [f"I need the {topic.key} of {said}.", f"I look up {said}.", f"{said}: I look them up."]
            self.step(thoughts, LOOKING, *[(Purpose.LOOK_UP, name) for name in wanted])
            return
        for at, name in enumerate(wanted):
            the = topic.the(name)
            thoughts = [f"I look up {the} first.", f"I need the {topic.key} of {the}."]
            if at:
                told = self.told(topic, wanted[at - 1])
                thoughts = [f"{told} Now {the}.", f"{told} Next I look up {the}."]
            self.step(thoughts, LOOKING, (Purpose.LOOK_UP, name))

    def told(self, topic: Topic, *found: str) -> str:
        """What look-ups told, as a sentence."""
        facts = [topic.fact.format(n=topic.the(name), v=self.table[name]) for name in found]
        return capital(listed(facts)) + "."

    def tell(self, value: int, thoughts: Sequence[str], says: Sequence[str], **values: object) -> None:
        """The answer to the user's last question."""
        shown = [text.format(v=value, **values) for text in thoughts]
        self.step(shown, [text.format(v=value, **values) for text in says])
        self.answer = value

    def draw_names(self, sort: str, count: int) -> list[str]:
        """Different names of this side."""
        return self.rng.sample(names(sort, self.held_back), count)

    def fill(self, topic: Topic, wanted: Sequence[str]) -> list[int]:
        """Values for names, and a few rows beside them."""
        self.field_name, self.known = topic.key, topic
        others = [name for name in self.draw_names(topic.sort, 3) if name not in wanted]
        for name in [*wanted, *others]:
            self.table[name] = spread(self.rng, topic.low, topic.high)
        return [self.table[name] for name in wanted]


LOOKING: Final = ("", "", "", "", "Let me look that up.", "One moment.")
CALCULATING: Final = ("", "", "", "", "", "Let me calculate that.")
GIVES: Final = ("That gives {v}.", "The result is {v}.", "{v} it is.")


def spread(rng: random.Random, low: int, high: int) -> int:
    """A number whose length varies, where an even draw would nearly always give a long one."""
    return rng.randint(low, rng.choice([top for top in (10, 100, 1000, 10000, 100000) if low < top < high] + [high]))
