"""The words of pocket's questions, read from words.toml, and which names are held back from training."""

from __future__ import annotations

import functools
import hashlib
import itertools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Topic:
    """A property that every name in a table has, and the wording of questions and answers about it.

    In the texts, ``{n}`` is the name with its article, ``{v}`` the value, ``{all}`` several names.
    """

    key: str
    sort: str
    """The kind of names that have it, see `names`."""
    low: int
    high: int
    ask: list[str]
    fact: str
    """The result of a look-up, as a thought."""
    tell: list[str]
    ask_sum: list[str]
    tell_sum: list[str]
    less: list[str]
    """The words for having less of it, and for having more."""
    more: list[str]
    ask_less: list[str]
    """``{word}`` is one of the words above, ``{a}`` and ``{b}`` the names."""
    tell_less: list[str]
    unit: str

    def the(self, name: str) -> str:
        """The name as used in a sentence."""
        return f"the {name}" if self.sort == "item" else name


WORDS: Final[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "words.toml").read_text(encoding="utf-8"))
TOPICS: Final = {key: Topic(key, **fields) for key, fields in WORDS["topics"].items()}

SHARE: Final = 8
"""One name in this many is held back, and one question in this many."""


def is_held_back(text: str) -> bool:
    """Whether a name, or the text of a question, is held back: one in `SHARE` is.

    >>> is_held_back("green lamp"), is_held_back("red chair")
    (False, False)
    """
    return hashlib.sha256(text.encode()).digest()[0] % SHARE == 0


def words(kind: str) -> list[str]:
    """The words of one list of ``[names]``."""
    entries = WORDS["names"][kind]
    return entries.split() if isinstance(entries, str) else list(entries)


@functools.cache
def names(sort: str, held_back: bool) -> tuple[str, ...]:
    """All ``"item"``, ``"town"`` or ``"person"`` names of one side of the split."""
    match sort:
        case "item":
            candidates = [f"{first} {second}" for first in words("adjectives") for second in words("nouns")]
        case "person":
            candidates = [f"{first} {last}" for first in words("first") for last in words("last")]
        case _:
            candidates = [f"{first}{second}" for first in words("places") for second in words("endings")]
            candidates += map("".join, itertools.product(words("onsets"), words("middles"), words("codas")))
    return tuple(name for name in dict.fromkeys(candidates) if is_held_back(name) is held_back)


def plural(name: str) -> str:
    """The plural of an item.

    >>> plural("red box"), plural("old lamp")
    ('red boxes', 'old lamps')
    """
    return name + ("es" if name.endswith(("x", "sh", "ch")) else "s")
