"""Findings about three histories: what production or training do differently from the rollout, in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from ..show.visible import counted, listed
from ..template.chat_template import REASONING_FIELDS
from .history_differences import Difference, Step, View

_SCAFFOLD: Final = ("scaffold", "generation prompt")
_NAMES: Final = {
    "tool_calls": "tool calls",
    "generation_prompt": "generation prompt",
    "role": "scaffold",
    **dict.fromkeys(REASONING_FIELDS, "reasoning"),
}
_SHORT: Final = 40
"""Longer texts are not quoted."""


class Verb(StrEnum):
    """What a view does unlike the rollout."""

    DROPS = "drops"
    ADDS = "adds"
    CHANGES = "changes"


@dataclass(frozen=True, slots=True)
class HistoryFinding:
    """What `views` do differently from the rollout to `messages` at `steps`.

    `tokens` counts each message once. `in_turn`: in the turn itself, not in its prompt. `texts` are those of the views
    and of the rollout, if short and the same everywhere.
    """

    views: tuple[View, ...]
    verb: Verb
    what: str
    messages: tuple[int, ...]
    tokens: int
    steps: tuple[int, ...]
    in_turn: bool
    texts: tuple[str, str] | None

    def __str__(self) -> str:
        verb = str(self.verb) if len(self.views) == 1 else str(self.verb).removesuffix("s")
        where = " in the turn itself" if self.in_turn else ""
        how = "{!r} instead of {!r}, ".format(*self.texts) if self.texts else ""
        what = f"the {self.what}{_message_words(self.messages)}"
        return f"{listed(self.views).capitalize()} {verb} {what}{where}: {how}{counted(self.tokens)}."


@dataclass(slots=True)
class _Change:
    """What one view does to one field of a message, in tokens of the view and of the rollout."""

    view: int = 0
    rollout: int = 0
    texts: set[tuple[str, str]] = field(default_factory=set)

    @property
    def verb(self) -> Verb:
        return Verb.CHANGES if self.rollout and self.view else Verb.DROPS if self.rollout else Verb.ADDS


_Place = tuple[int, str, bool]
"""A message, the kind of field, and whether it is in the turn itself."""


def find_changes(steps: Sequence[Step]) -> list[HistoryFinding]:
    """Gather the differences from the rollout: the same views doing the same to the same kind of field."""
    groups: dict[tuple[tuple[View, ...], Verb, str, bool], list[tuple[int, int, _Change]]] = {}
    for step in steps:
        places: dict[_Place, dict[View, _Change]] = {}
        for view in (View.PRODUCTION, View.TRAINING):
            comparison = step.compare(view, View.ROLLOUT)
            differences = () if comparison is None else comparison.differences
            for place, change in _changes(differences, view is View.TRAINING).items():
                places.setdefault(place, {})[view] = change
        for (message, what, in_turn), changes in places.items():
            equal = len(changes) == 2 and changes[View.PRODUCTION] == changes[View.TRAINING]
            for views in [tuple(changes)] if equal else [(view,) for view in changes]:
                change = changes[views[0]]
                groups.setdefault((views, change.verb, what, in_turn), []).append((step.index, message, change))
    findings = [_finding(*key, entries) for key, entries in groups.items()]
    return sorted(findings, key=lambda one: (View.PRODUCTION not in one.views, one.in_turn, one.steps))


def _finding(
    views: tuple[View, ...], verb: Verb, what: str, in_turn: bool, entries: Sequence[tuple[int, int, _Change]]
) -> HistoryFinding:
    tokens: dict[int, int] = {}
    for _, message, change in entries:
        tokens[message] = max(tokens.get(message, 0), change.rollout or change.view)
    texts = set().union(*(change.texts for _, _, change in entries))
    short = len(texts) == 1 and verb is Verb.CHANGES and max(map(len, *texts)) <= _SHORT
    messages, steps = tuple(sorted(tokens)), tuple(sorted({step for step, _, _ in entries}))
    quoted = next(iter(texts)) if short else None
    return HistoryFinding(views, verb, what, messages, sum(tokens.values()), steps, in_turn, quoted)


def _changes(differences: Sequence[Difference], rollout_left: bool) -> dict[_Place, _Change]:
    """Return what a view does differently. Scaffold counts with the text that it encloses, if any."""
    changes: dict[_Place, _Change] = {}
    for one in differences:
        view, rollout = (one.right, one.left) if rollout_left else (one.left, one.right)
        sizes: dict[tuple[int, str], int] = {}
        for part in (*view.parts, *rollout.parts):
            key = (part.message, _field_name(part.field))
            sizes[key] = sizes.get(key, 0) + part.tokens
        texts = [key for key in sizes if key[1] not in _SCAFFOLD]
        main = max(texts or sizes, key=sizes.__getitem__)
        for side in (view, rollout):
            for part in side.parts:
                key = (part.message, _field_name(part.field))
                change = changes.setdefault((*(key if key in texts else main), one.in_turn), _Change())
                change.view += part.tokens * (side is view)
                change.rollout += part.tokens * (side is rollout)
        changes[*main, one.in_turn].texts.add((view.text, rollout.text))
    return changes


def _field_name(name: str) -> str:
    first = name.split(".", maxsplit=1)[0]
    return _NAMES.get(first, first)


def _message_words(messages: Sequence[int]) -> str:
    numbers = [number for number in messages if number >= 0]
    if len(numbers) > 8:
        return f" of {len(numbers)} messages ({numbers[0]} to {numbers[-1]})"
    return f" of message{'s' * (len(numbers) > 1)} {listed(numbers)}" if numbers else ""
