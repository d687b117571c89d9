"""The script of a question: the user's messages, and the thoughts and calls of each of the expert's replies.

The tools are not run here; a script uses the values that the tools will return.
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
    """One reply of the expert: alternatives for its thought and its text, and its calls."""

    thoughts: tuple[str, ...]
    says: tuple[str, ...] = ("",)
    calls: tuple[tuple[Purpose, str], ...] = ()


def capital(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


@dataclass(slots=True)
class Script:
    """A question under construction."""

    rng: random.Random
    held_back: bool
    user_messages: list[str] = field(default_factory=list)
    steps: list[list[ExpertReply]] = field(default_factory=list)
    table: dict[str, int] = field(default_factory=dict)
    field_name: str = "value"
    """What the values of the table are."""
    uses: tuple[Purpose, ...] = (Purpose.CALCULATE, Purpose.LOOK_UP)
    answer: int | None = None
    """None if the expert must say that it does not know."""
    mentions: str = ""
    """What the answer must mention besides its number."""
    topic: Topic | None = None
    """The topic of the last values in the table; follow-up questions use it."""

    def ask(self, *texts: str, **values: object) -> None:
        """Add the user's next question."""
        self.user_messages.append(capital(self.rng.choice(texts).format(**values)))
        self.steps.append([])

    def step(self, thoughts: Sequence[str], says: Sequence[str] = ("",), *calls: tuple[Purpose, str]) -> None:
        """Add the expert's next reply."""
        self.steps[-1].append(ExpertReply(tuple(map(capital, thoughts)), tuple(map(capital, says)), calls))

    def calculate(self, expression: str, *thoughts: str) -> int:
        """Add a call of the calculator; ``{e}`` in `thoughts` is the expression. Raises ValueError for a fraction."""
        plain = ("{e}.", "Now {e}.", "I calculate {e}.", "That is {e}.")
        self.step(
            [text.format(e=expression) for text in thoughts or plain], CALCULATING, (Purpose.CALCULATE, expression)
        )
        value = calculate(expression)
        if value.denominator != 1:
            raise ValueError(f"{expression} is not a whole number")
        return value.numerator

    def look_up(self, topic: Topic, *names: str, together: bool) -> None:
        """Look names up, in one reply each or all in one. The next thought has to state the last result."""
        if together:
            listing = listed([topic.the(name) for name in names])
            thoughts = [f"I need the {topic.key} of {listing}.", f"I look up {listing}.", f"{listing}: I look them up."]
            self.step(thoughts, LOOKING, *[(Purpose.LOOK_UP, name) for name in names])
            return
        for at, name in enumerate(names):
            the = topic.the(name)
            thoughts = [f"I look up {the} first.", f"I need the {topic.key} of {the}."]
            if at:
                fact = self.facts(topic, names[at - 1])
                thoughts = [f"{fact} Now {the}.", f"{fact} Next I look up {the}."]
            self.step(thoughts, LOOKING, (Purpose.LOOK_UP, name))

    def facts(self, topic: Topic, *names: str) -> str:
        """The results of look-ups, as a sentence."""
        sentences = [topic.fact.format(n=topic.the(name), v=self.table[name]) for name in names]
        return capital(listed(sentences)) + "."

    def tell(self, value: int, thoughts: Sequence[str], says: Sequence[str], **values: object) -> None:
        """Add the answer to the user's last question."""
        filled = [text.format(v=value, **values) for text in thoughts]
        self.step(filled, [text.format(v=value, **values) for text in says])
        self.answer = value

    def draw_names(self, sort: str, count: int) -> list[str]:
        """Different names of this side of the split."""
        return self.rng.sample(names(sort, self.held_back), count)

    def fill(self, topic: Topic, names: Sequence[str]) -> list[int]:
        """Add values for names to the table, and a few other rows; returns the values."""
        self.field_name, self.topic = topic.key, topic
        other_names = [name for name in self.draw_names(topic.sort, 3) if name not in names]
        for name in [*names, *other_names]:
            self.table[name] = spread(self.rng, topic.low, topic.high)
        return [self.table[name] for name in names]


LOOKING: Final = ("", "", "", "", "Let me look that up.", "One moment.")
CALCULATING: Final = ("", "", "", "", "", "Let me calculate that.")
GIVES: Final = ("That gives {v}.", "The result is {v}.", "{v} it is.")


def spread(rng: random.Random, low: int, high: int) -> int:
    """A number of varying length; a uniform draw would nearly always give a long one."""
    return rng.randint(low, rng.choice([top for top in (10, 100, 1000, 10000, 100000) if low < top < high] + [high]))
