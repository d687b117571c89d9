"""How two views of one conversation differ, token by token, and which messages those tokens come from."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..show.alignment import Hunk, align
from ..study.seams import BridgeRefusal
from ..tokens.ids import common_prefix, common_suffix
from ..tokens.tokenizer import Ids, Tokenizer


class View(StrEnum):
    """Who sees the conversation."""

    PRODUCTION = "production"
    """The engine behind an API, which renders the shipped template anew at every turn."""
    ROLLOUT = "rollout"
    """The policy while it is sampled for training: an append-only stream."""
    TRAINING = "training"
    """One row over the whole conversation, as supervised fine-tuning renders it."""


PAIRS: Final = ((View.PRODUCTION, View.ROLLOUT), (View.PRODUCTION, View.TRAINING), (View.ROLLOUT, View.TRAINING))


@dataclass(frozen=True, slots=True, eq=False)
class ViewTokens:
    """The tokens of one view after a turn: `prompt` tokens of prompt, then the turn.

    `ids`, `messages` (-1 for none) and `fields` have one entry per token.
    """

    ids: Ids
    messages: npt.NDArray[np.int32]
    fields: npt.NDArray[np.object_]
    prompt: int = 0

    @classmethod
    def of(cls, ids: Iterable[int], message: int, field: str) -> ViewTokens:
        """Return tokens of one field."""
        array = np.asarray(list(ids), np.int32)
        return cls(array, np.full_like(array, message), np.full(len(array), field, np.object_))

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, start: int, stop: int, prompt: int = 0) -> ViewTokens:
        """Return tokens `start` to `stop`."""
        at = slice(start, stop)
        return ViewTokens(self.ids[at], self.messages[at], self.fields[at], prompt)

    def followed_by(self, turn: ViewTokens) -> ViewTokens:
        """Return these tokens as a prompt, and a turn after them."""
        return ViewTokens(
            np.concatenate([self.ids, turn.ids]),
            np.concatenate([self.messages, turn.messages]),
            np.concatenate([self.fields, turn.fields]),
            len(self),
        )


class Part(NamedTuple):
    """Tokens of one field of one message."""

    message: int
    field: str
    tokens: int


@dataclass(frozen=True, slots=True)
class DifferenceSide:
    """One side of a difference: tokens `start` to `stop` of its view, perhaps none."""

    start: int
    stop: int
    ids: tuple[int, ...]
    parts: tuple[Part, ...]
    text: str

    @classmethod
    def of(cls, tokens: ViewTokens, start: int, stop: int, tokenizer: Tokenizer) -> DifferenceSide:
        ids = tokens.ids[start:stop].tolist()
        messages, fields = tokens.messages[start:stop].tolist(), tokens.fields[start:stop].tolist()
        runs = itertools.groupby(zip(messages, fields, strict=True))
        parts = tuple(Part(*owner, sum(1 for _ in run)) for owner, run in runs)
        return cls(start, stop, tuple(ids), parts, tokenizer.decode(ids))

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Difference:
    """Two views differ: one has `left` where the other has `right`. `in_turn`: in the turn, not in its prompt."""

    left: DifferenceSide
    right: DifferenceSide
    in_turn: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two views at one step. Outside of `differences` their ids are equal."""

    left: View
    right: View
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def left_tokens(self) -> int:
        """Tokens of the left view that the right one lacks."""
        return sum(len(one.left) for one in self.differences)

    @property
    def right_tokens(self) -> int:
        """Tokens of the right view that the left one lacks."""
        return sum(len(one.right) for one in self.differences)

    def right_from(self, left_ids: Iterable[int]) -> list[int]:
        """Build the ids of the right view from those of the left."""
        ids, out, at = list(left_ids), list[int](), 0
        for one in self.differences:
            out += [*ids[at : one.left.start], *one.right.ids]
            at = one.left.stop
        return out + ids[at:]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The moment the model is asked for a message; `message` is None for the turn to come.

    `training` is None if the row has no such turn. `refusal` says why the rollout could not continue from the step
    before: it breaks, and `branch` counts its streams.
    """

    index: int
    message: int | None
    production: ViewTokens
    rollout: ViewTokens
    training: ViewTokens | None
    refusal: BridgeRefusal | None
    branch: int
    comparisons: tuple[Comparison, ...]

    def view(self, view: View | str) -> ViewTokens | None:
        """Return the tokens of a view."""
        tokens: ViewTokens | None = getattr(self, View(view).value)
        return tokens

    def compare(self, left: View | str, right: View | str) -> Comparison | None:
        """Return the comparison of two views, in the order of `PAIRS`; None if one of them lacks the turn."""
        views = {View(left), View(right)}
        return next((one for one in self.comparisons if {one.left, one.right} == views), None)

    @property
    def equal(self) -> bool:
        """True if all views are equal."""
        return self.training is not None and all(one.equal for one in self.comparisons)

    @property
    def place(self) -> str:
        return "the turn to come" if self.message is None else f"message {self.message}"


def compare_views(views: dict[View, ViewTokens], tokenizer: Tokenizer) -> Iterator[Comparison]:
    """Compare each pair of views."""
    for left, right in PAIRS:
        if left in views and right in views:
            one, other = views[left], views[right]
            differences = (
                Difference(
                    DifferenceSide.of(one, hunk.start, hunk.stop, tokenizer),
                    DifferenceSide.of(other, hunk.other_start, hunk.other_stop, tokenizer),
                    in_turn,
                )
                for in_turn, hunk in differing(one, other)
            )
            yield Comparison(left, right, tuple(differences))


def differing(one: ViewTokens, other: ViewTokens) -> Iterator[tuple[bool, Hunk]]:
    """Yield what differs, in order, and whether in the turn: prompt against prompt, message against message.

    Prompts are cut where the same message begins with the same id, except in what they begin and end with alike.
    """
    left, right = one.ids[: one.prompt], other.ids[: other.prompt]
    head = common_prefix(left, right)
    tail = common_suffix(left[head:], right[head:])
    starts, other_starts = _message_starts(one), _message_starts(other)
    cuts = [(head, head)]
    for message, at in sorted(starts.items(), key=lambda item: item[1]):
        there = other_starts.get(message, -1)
        if message < 0 or at <= cuts[-1][0] or there <= cuts[-1][1]:
            continue
        if at < one.prompt - tail and there < other.prompt - tail and left[at] == right[there]:
            cuts.append((at, there))
    blocks = list(itertools.pairwise([*cuts, (one.prompt, other.prompt), (len(one), len(other))]))
    for number, ((start, other_start), (stop, other_stop)) in enumerate(blocks, 1):
        for hunk in align(one.ids[start:stop], other.ids[other_start:other_stop]):
            yield number == len(blocks), hunk.moved(start, other_start)


def _message_starts(tokens: ViewTokens) -> dict[int, int]:
    """Map each message of the prompt to its first token."""
    messages, starts = np.unique(tokens.messages[: tokens.prompt], return_index=True)
    return dict(zip(messages.tolist(), starts.tolist(), strict=True))
