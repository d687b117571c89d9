"""How pocket's questions are put: topics that can be looked up, word problems, facts that need no tool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Topic:
    """Something that is known of every name in a table, and how one speaks of it.

    In the texts ``{n}`` is the name with its article, ``{v}`` the value, ``{all}`` several names.
    """

    key: str
    sort: str
    """Of which names: see `names.names`."""
    low: int
    high: int
    ask: tuple[str, ...]
    fact: str
    """What a look-up told, as a thought."""
    tell: tuple[str, ...]
    ask_sum: tuple[str, ...]
    tell_sum: tuple[str, ...]
    less: tuple[str, ...]
    """The words for having less of it, and for having more."""
    more: tuple[str, ...]
    ask_less: tuple[str, ...]
    """``{word}`` is one of the words above, ``{a}`` and ``{b}`` the names."""
    tell_less: tuple[str, ...]
    unit: str

    def the(self, name: str) -> str:
        """The name as it stands in a sentence."""
        return f"the {name}" if self.sort == "item" else name


PRICE: Final = Topic(
    key="price",
    sort="item",
    low=2,
    high=999,
    ask=("What does {n} cost?", "What is the price of {n}?", "How much is {n}?", "Tell me the price of {n}."),
    fact="{n} costs {v}",
    tell=("{n} costs {v} coins.", "The price of {n} is {v} coins."),
    ask_sum=("What do {all} cost together?", "How much are {all} in total?", "I want {all}. What do I pay?"),
    tell_sum=("Together they cost {v} coins.", "The total price is {v} coins."),
    less=("cheaper",),
    more=("more expensive",),
    ask_less=("Which is {word}, {a} or {b}, and by how much?", "Is {a} or {b} {word}, and by how many coins?"),
    tell_less=("The {word} one is {n}, by {v} coins.",),
    unit="coins",
)
WEIGHT: Final = Topic(
    key="weight",
    sort="item",
    low=2,
    high=500,
    ask=("How heavy is {n}?", "What does {n} weigh?", "What is the weight of {n}?"),
    fact="{n} weighs {v}",
    tell=("{n} weighs {v} kg.", "The weight of {n} is {v} kg."),
    ask_sum=("What do {all} weigh together?", "What is the total weight of {all}?"),
    tell_sum=("Together they weigh {v} kg.", "The total weight is {v} kg."),
    less=("lighter",),
    more=("heavier",),
    ask_less=("Which is {word}, {a} or {b}, and by how much?", "Is {a} or {b} {word}, and by how many kg?"),
    tell_less=("The {word} one is {n}, by {v} kg.",),
    unit="kg",
)
DISTANCE: Final = Topic(
    key="distance",
    sort="town",
    low=3,
    high=2000,
    ask=("How far is {n}?", "What is the distance to {n}?", "How many km is it to {n}?"),
    fact="{n} is {v} km away",
    tell=("{n} is {v} km away.", "The distance to {n} is {v} km."),
    ask_sum=("What is the sum of the distances to {all}?", "Add up the distances to {all}."),
    tell_sum=("The sum is {v} km.", "Together that is {v} km."),
    less=("closer", "nearer"),
    more=("farther",),
    ask_less=("Which is {word}, {a} or {b}, and by how many km?", "Is {a} or {b} {word}, and by how much?"),
    tell_less=("The {word} one is {n}, by {v} km.",),
    unit="km",
)
PEOPLE: Final = Topic(
    key="population",
    sort="town",
    low=100,
    high=99999,
    ask=("How many people live in {n}?", "What is the population of {n}?", "How large is the population of {n}?"),
    fact="{n} has {v} people",
    tell=("{n} has {v} people.", "The population of {n} is {v}."),
    ask_sum=("How many people live in {all} together?", "What is the total population of {all}?"),
    tell_sum=("Together they have {v} people.", "The total population is {v}."),
    less=("smaller",),
    more=("larger", "bigger"),
    ask_less=("Which is {word}, {a} or {b}, and by how many people?", "Is {a} or {b} {word}, and by how much?"),
    tell_less=("The {word} one is {n}, by {v} people.",),
    unit="people",
)
AGE: Final = Topic(
    key="age",
    sort="person",
    low=3,
    high=99,
    ask=("How old is {n}?", "What is the age of {n}?", "Tell me the age of {n}."),
    fact="{n} is {v}",
    tell=("{n} is {v}.", "The age of {n} is {v}."),
    ask_sum=("What is the sum of the ages of {all}?", "How old are {all} together?"),
    tell_sum=("Together they are {v}.", "The sum of their ages is {v}."),
    less=("younger",),
    more=("older",),
    ask_less=("Who is {word}, {a} or {b}, and by how many years?", "Is {a} or {b} {word}, and by how much?"),
    tell_less=("The {word} one is {n}, by {v} years.",),
    unit="years",
)
TOPICS: Final = (PRICE, WEIGHT, DISTANCE, PEOPLE, AGE)

ASK_STOCK: Final = (
    "How many {n} are in stock?",
    "How many {n} do we have in stock?",
    "Tell me how many {n} are in stock.",
)
TELL_STOCK: Final = ("There are {v} in stock.", "The stock is {v}.")

FACTS: Final = (
    ("days are there in a week", 7),
    ("months are there in a year", 12),
    ("hours are there in a day", 24),
    ("minutes are there in an hour", 60),
    ("seconds are there in a minute", 60),
    ("letters are there in the English alphabet", 26),
    ("legs does a spider have", 8),
    ("legs does a cat have", 4),
    ("sides does a triangle have", 3),
    ("sides does a square have", 4),
    ("sides does a hexagon have", 6),
    ("things are there in a dozen", 12),
    ("wheels does a car have", 4),
    ("wheels does a bicycle have", 2),
    ("planets are there in the solar system", 8),
    ("centimeters are there in a meter", 100),
    ("meters are there in a kilometer", 1000),
    ("grams are there in a kilogram", 1000),
    ("strings does a violin have", 4),
    ("seasons are there in a year", 4),
    ("fingers are there on one hand", 5),
    ("weeks are there in a year", 52),
    ("days are there in a normal year", 365),
    ("years are there in a century", 100),
    ("years are there in a decade", 10),
)
ASK_FACT: Final = (
    "How many {f}?",
    "Do you know how many {f}?",
    "Tell me how many {f}.",
    "Quick question: how many {f}?",
)

SYSTEMS: Final = (
    "You are a helpful assistant.",
    "You are a careful assistant. Think step by step, then answer briefly.",
    "Answer the question. Use the tools where they help; do not guess what a tool can tell you.",
    "Look facts up; do not guess them.",
    "Be brief.",
)
OPENINGS: Final = ("Hi! ", "Hello. ", "Please help me. ", "A question: ")
CLOSINGS: Final = (" Thanks!", " Please be brief.", " Thank you.")
