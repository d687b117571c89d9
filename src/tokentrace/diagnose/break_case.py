"""What a check is given, a `Case`, and what it gives back, `Evidence`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..tokens.alignment import Hunk
from ..tokens.ids import runs
from ..tokens.tokenizer import Ids
from ..tokens.vocabulary import Vocabulary
from .break_markup import Markup
from .finding import Cause
from .resync import next_hunk
from .texts import TextWindow, text_of
from .turn_heads import TurnHeads


@dataclass(frozen=True, slots=True)
class Region:
    """The part of a stream that a token lies in."""

    name: str
    completion: tuple[int, int] | None
    """The completion it lies in, if it does."""
    last: tuple[int, int] | None
    """The stream's last completion."""
    first_prompt: bool

    @classmethod
    def at(cls, mask: npt.NDArray[np.bool_] | None, position: int) -> Region | None:
        """The region of a token; None where nobody knows what was sampled."""
        if mask is None:
            return None
        completions = runs(mask)
        number = sum(start <= position for start, _ in completions)
        last = completions[-1] if completions else None
        if not number:
            return cls("first prompt", None, last, True)
        if position < completions[number - 1][1]:
            return cls(f"completion {number}", completions[number - 1], last, False)
        return cls(f"context after completion {number}", None, last, False)


@dataclass(frozen=True, slots=True)
class Case:
    """One difference between a stream and the next prompt, and all that is known about it."""

    stream: Ids
    prompt: Ids
    markup: Markup
    hunk: Hunk
    text: TextWindow
    region: Region | None
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None

    @classmethod
    def at(cls, position: int, stream: Ids, prompt: Ids, markup: Markup, mask: npt.NDArray[np.bool_] | None) -> Case:
        """The difference at the first token that is not the same; `mask` says which of the stream were sampled."""
        hunk = next_hunk(stream, prompt, position, position)
        text = TextWindow.around(markup.vocabulary, stream, prompt, hunk)
        return cls(stream, prompt, markup, hunk, text, Region.at(mask, position))

    @property
    def vocabulary(self) -> Vocabulary:
        return self.markup.vocabulary

    @property
    def turns(self) -> TurnHeads:
        return self.markup.turns

    @property
    def in_completion(self) -> bool | None:
        """Whether it begins in what was sampled; None where nobody knows."""
        return None if self.region is None else self.region.completion is not None

    def sides(self) -> tuple[str, str, int]:
        """Both texts with what is before them, and the first character that differs."""
        lead = self.text.lead
        return lead + self.text.stream, lead + self.text.prompt, len(lead) + self.text.shared

    def hunk_texts(self) -> tuple[str, str]:
        """The text of the difference alone (of a long one, its beginning)."""
        ours, theirs = self.hunk.sides(self.stream, self.prompt)
        return text_of(self.vocabulary, ours[:4096]), text_of(self.vocabulary, theirs[:4096])

    def roles(self) -> tuple[str | None, str | None]:
        """Whose turn it begins in, in the stream and in the prompt."""
        return self.turns.role(self.stream, self.hunk.start), self.turns.role(self.prompt, self.hunk.other_start)

    def token_after(self, characters: int) -> int:
        """The stream's token that begins so many characters after the difference."""
        return self._reaching(self.stream, self.hunk.start, self.text.stream[: max(0, characters)])

    def tokens_of(self, start: int, stop: int, *, prompt: bool = False) -> Ids:
        """The tokens of characters `start` to `stop` of one of the `sides`; `start` is before the difference."""
        lead, ids = self.text.lead, self.prompt if prompt else self.stream
        at = self.hunk.other_start if prompt else self.hunk.start
        text = (lead + (self.text.prompt if prompt else self.text.stream))[len(lead) : stop]
        size, first = len(lead[start:].encode("utf-8", "surrogatepass")), at
        while size > 0 and first > 0:
            first -= 1
            size -= len(self.vocabulary.token_bytes(int(ids[first])))
        return ids[first : self._reaching(ids, at, text)]

    def _reaching(self, ids: Ids, at: int, text: str) -> int:
        """Where the tokens from `at` on have spelled as much as the text."""
        size, seen = len(text.encode("utf-8", "surrogatepass")), 0
        while seen < size and at < len(ids):
            seen += len(self.vocabulary.token_bytes(int(ids[at])))
            at += 1
        return at


@dataclass(frozen=True, slots=True)
class Evidence:
    """A cause and what shows it."""

    cause: Cause
    detail: str
    hunk: Hunk | None = None
    """A better idea of what differs than that of the alignment."""
    until: int = 0
    """Where the value or the call ends that was compared as a whole, as a character of `Case.sides`."""


def counted(tokens: int) -> str:
    """A number of tokens in words."""
    return "one token" if tokens == 1 else f"{tokens:,} tokens"
