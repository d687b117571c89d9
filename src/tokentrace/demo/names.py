"""The names in pocket's questions, and which of them are held back from training."""

from __future__ import annotations

import functools
import hashlib
from typing import Final

ADJECTIVES: Final = (
    *("red", "green", "blue", "white", "black", "small", "large", "old", "new", "round", "wooden", "plastic"),
    *("golden", "silver", "cheap", "heavy", "light", "soft", "warm", "plain"),
)
NOUNS: Final = (
    *("lamp", "chair", "book", "table", "clock", "basket", "blanket", "bottle", "candle", "carpet", "cushion", "drum"),
    *("guitar", "hammer", "jacket", "kettle", "ladder", "lantern", "mirror", "mug", "pillow", "pot", "radio", "ribbon"),
    *("rope", "saddle", "shirt", "shovel", "spoon", "stool", "tent", "towel", "tray", "umbrella", "vase", "violin"),
    *("wallet", "wheel", "whistle", "kite", "bell", "boat", "bag", "hat", "ring", "box", "brush", "bench", "dish"),
)
PLACES: Final = (
    *("Oak", "Mill", "Ash", "Stone", "River", "Lake", "North", "South", "West", "East", "Green", "Black", "White"),
    *("Red", "Spring", "Winter", "Summer", "Fair", "High", "Low", "Long", "Clear", "Cold", "Bright", "Silver"),
    *("Elm", "Pine", "Fox", "Wolf", "Swan", "Crow", "Hawk", "Bear", "King", "Queen", "Moon", "Sun", "Star", "Iron"),
)
ENDINGS: Final = (
    *("ford", "bury", "ton", "field", "wood", "dale", "port", "mouth", "bridge", "view", "haven", "brook", "hill"),
    *("ville", "stead", "gate", "land", "ham", "cliff", "marsh", "well", "ridge", "crest", "bay", "falls", "moor"),
)
ONSETS: Final = (
    *("Ba", "Bel", "Ca", "Co", "Da", "Del", "Fa", "Fi", "Ga", "Gor", "Ha", "Hel", "Ja", "Ka", "Kir", "La", "Lo"),
    *("Ma", "Mor", "Na", "Nu", "Or", "Pa", "Pel", "Qui", "Ra", "Ro", "Sa", "Tal", "Ti", "Ul", "Va", "Wen", "Ya", "Zu"),
)
MIDDLES: Final = (
    *("ba", "ci", "da", "fe", "go", "ha", "ji", "ka", "li", "lo", "ma", "ne", "no", "pu", "ra", "ri", "sa", "te"),
    *("tu", "va", "wi", "xa", "yo", "za"),
)
CODAS: Final = ("", "n", "r", "l", "s", "th", "nd", "sk", "va", "mo", "ra", "no")
"""The last three make up towns that nobody has heard of: a model has to learn to copy any name."""
FIRST: Final = (
    *("Ada", "Alan", "Grace", "Emmy", "Kurt", "Sofia", "Omar", "Mei", "Ivan", "Nora", "Paul", "Ruth", "Hugo", "Lena"),
    *("Max", "Zoe", "Tim", "Eva", "Sam", "Ida", "Anna", "Ben", "Clara", "David", "Ella", "Frank", "Gita", "Henry"),
    *("Irene", "Jack", "Karl", "Lucy", "Maria", "Nils", "Olga", "Peter", "Rosa", "Simon", "Tara", "Victor"),
)
LAST: Final = (
    *("Stone", "Brown", "Field", "King", "Young", "Hill", "Moore", "Clark", "Lane", "Wood", "Bell", "Cook", "Marsh"),
    *("Reed", "West", "Banks", "Page", "Ford", "Hart", "Long", "Adams", "Baker", "Carter", "Evans", "Foster", "Gray"),
    *("Hughes", "Jones", "Knight", "Lopez", "Meyer", "Nolan", "Owens", "Price", "Quinn", "Rossi", "Silva", "Turner"),
)
GOODS: Final = (
    *("apples", "pears", "books", "coins", "stamps", "tickets", "bottles", "cards", "pencils", "lamps", "chairs"),
    *("keys", "stones", "eggs", "cups", "flowers", "shells", "marbles", "stickers", "cookies"),
)

SHARE: Final = 8
"""One in so many names, and one in so many questions, is held back."""


def is_held_back(text: str) -> bool:
    """Whether a name, or what identifies a question, belongs to the held-back side: one in `SHARE` does.

    >>> is_held_back("green lamp"), is_held_back("red chair")
    (False, False)
    """
    return hashlib.sha256(text.encode()).digest()[0] % SHARE == 0


@functools.cache
def names(sort: str, held_back: bool) -> tuple[str, ...]:
    """All ``"item"``, ``"town"`` or ``"person"`` names of one side."""
    match sort:
        case "item":
            made = [f"{first} {second}" for first in ADJECTIVES for second in NOUNS]
        case "person":
            made = [f"{first} {last}" for first in FIRST for last in LAST]
        case _:
            made = [f"{first}{second}" for first in PLACES for second in ENDINGS]
            made += [first + second + third for first in ONSETS for second in MIDDLES for third in CODAS]
    return tuple(name for name in dict.fromkeys(made) if is_held_back(name) is held_back)


def plural(name: str) -> str:
    """The plural of an item.

    >>> plural("red box"), plural("old lamp")
    ('red boxes', 'old lamps')
    """
    return name + ("es" if name.endswith(("x", "sh", "ch")) else "s")
