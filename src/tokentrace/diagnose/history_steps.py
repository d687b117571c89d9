"""What production, rollout and training hold at one step, and how they differ."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from ..show.alignment import Hunk, align
from ..study.seams import BridgeRefusal
from ..tokens.ids import common_prefix, common_suffix
from ..tokens.tokenizer import Ids, Tokenizer


class View(StrEnum):
    """Who sees the conversation: an API's engine, a sampled policy, or a trainer of one row."""

    PRODUCTION = "production"
    ROLLOUT = "rollout"
    TRAINING = "training"


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
    def of(cls, ids: Iterable[int], message: int = -1, field: str = "") -> ViewTokens:
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


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a difference: tokens `start` to `stop` of its view, perhaps none.

    `parts` are runs of tokens of one field: message, field and count.
    """

    start: int
    stop: int
    ids: tuple[int, ...]
    parts: tuple[tuple[int, str, int], ...]
    text: str

    @classmethod
    def of(cls, tokens: ViewTokens, start: int, stop: int, tokenizer: Tokenizer) -> Side:
        part = tokens.cut(start, stop)
        runs = itertools.groupby(zip(part.messages.tolist(), part.fields.tolist(), strict=True))
        parts = tuple((message, field, sum(1 for _ in run)) for (message, field), run in runs)
        ids = part.ids.tolist()
        return cls(start, stop, tuple(ids), parts, tokenizer.decode(ids))


@dataclass(frozen=True, slots=True)
class Difference:
    """One view has `left` where another has `right`. `in_turn`: not in the prompt."""

    left: Side
    right: Side
    in_turn: bool


@dataclass(frozen=True, slots=True)
class Step:
    """What each view holds up to the end of a turn, or up to its prompt for the turn to come (`message` is None).

    Training may hold no such turn. `refusal`: why the rollout could not go on, and starts another `branch`. Outside of
    the `differences` of two views their ids are equal.
    """

    index: int
    message: int | None
    views: Mapping[View, ViewTokens]
    refusal: BridgeRefusal | None
    branch: int
    differences: Mapping[tuple[View, View], tuple[Difference, ...]]

    @property
    def rollout(self) -> ViewTokens:
        return self.views[View.ROLLOUT]

    @property
    def equal(self) -> bool:
        """True if all views are equal."""
        return View.TRAINING in self.views and not any(self.differences.values())

    @property
    def place(self) -> str:
        return "the turn to come" if self.message is None else f"message {self.message}"

    def compare(self, left: View | str, right: View | str) -> list[Difference] | None:
        """Return what differs between two views; None if one of them lacks the turn."""
        if (View(left), View(right)) in self.differences:
            return list(self.differences[View(left), View(right)])
        differences = self.differences.get((View(right), View(left)))
        return None if differences is None else [Difference(one.right, one.left, one.in_turn) for one in differences]


def compare_views(
    views: Mapping[View, ViewTokens], tokenizer: Tokenizer
) -> dict[tuple[View, View], tuple[Difference, ...]]:
    """Compare each pair of views."""
    return {
        (left, right): tuple(
            Difference(
                Side.of(views[left], hunk.start, hunk.stop, tokenizer),
                Side.of(views[right], hunk.other_start, hunk.other_stop, tokenizer),
                in_turn,
            )
            for in_turn, hunk in differing(views[left], views[right])
        )
        for left, right in PAIRS
        if left in views and right in views
    }


def differing(one: ViewTokens, other: ViewTokens) -> Iterator[tuple[bool, Hunk]]:
    """Yield what differs, in order, and whether in the turn: message against message."""
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
