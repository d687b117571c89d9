"""Findings about three histories: what production or training do differently from the rollout, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from ..template.chat_template import REASONING_FIELDS
from ..tokens.visible import counted, listed
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
    """What `views` do differently from the rollout to `messages` at `steps`; the views in `agrees` do not.

    `tokens` counts each message once. `in_turn`: in the turn itself, not in its prompt. `once`: what must follow first.
    `texts` are those of the views and the rollout, if short and the same everywhere.
    """

    views: tuple[View, ...]
    verb: Verb
    what: str
    messages: tuple[int, ...]
    tokens: int
    steps: tuple[int, ...]
    in_turn: bool
    once: str
    texts: tuple[str, str] | None
    agrees: tuple[View, ...]

    def __str__(self) -> str:
        what = f"the {self.what}{_message_words(self.messages)}"
        many = counted(self.tokens)
        theirs, ours = (f"{self.texts[0]!r}", f"{self.texts[1]!r}") if self.texts else ("", "")
        if self.in_turn:
            changed = f"{theirs} where the model samples {ours}, " if self.texts else ""
            return {
                Verb.CHANGES: f"Training writes {what} otherwise than it is sampled: {changed}{many}.",
                Verb.ADDS: f"Training adds {what} to the turn itself, which the model does not sample: {many}.",
                Verb.DROPS: f"Training leaves {what} out of the turn itself, though the model samples it: {many}.",
            }[self.verb]
        one, s = len(self.agrees) == 1, "s" if len(self.views) == 1 else ""
        subject, others = listed(self.views).capitalize(), listed(self.agrees)
        once = f" once {self.once}" if self.once else ""
        changed = f"{theirs} where {others} {'has' if one else 'have'} {ours}, " if self.texts else ""
        return {
            Verb.CHANGES: f"{subject} write{s} {what} otherwise{once}: {changed}{many}.",
            Verb.ADDS: f"{subject} add{s} {what}{once}: {many}; {others} {'does' if one else 'do'} not.",
            Verb.DROPS: f"{subject} drop{s} {what}{once}: {many}; {others} keep{'s' if one else ''} it.",
        }[self.verb]


@dataclass(slots=True)
class _Change:
    """What one view does at one place, in tokens of the view and of the rollout."""

    view: int = 0
    rollout: int = 0
    texts: set[tuple[str, str]] = field(default_factory=set)

    @property
    def verb(self) -> Verb:
        return Verb.CHANGES if self.rollout and self.view else Verb.DROPS if self.rollout else Verb.ADDS

    @property
    def tokens(self) -> int:
        return self.rollout or self.view


_Place = tuple[int, str, bool]
"""A message, the kind of field, and whether it is in the turn itself."""


def find_changes(steps: Sequence[Step], roles: Sequence[str]) -> list[HistoryFinding]:
    """Gather the differences from the rollout: the same views doing the same to the same kind of field."""
    once: dict[_Place, str] = {}
    groups: dict[tuple[tuple[View, ...], Verb, str, bool, str, tuple[View, ...]], list[tuple[int, int, _Change]]] = {}
    before = 0
    for step in steps:
        asked = len(roles) if step.message is None else step.message
        changes = {
            view: _changes(comparison.differences, comparison.left is View.ROLLOUT)
            for view in (View.PRODUCTION, View.TRAINING)
            if (comparison := step.compare(view, View.ROLLOUT)) is not None
        }
        for place in dict.fromkeys(place for places in changes.values() for place in places):
            message, what, in_turn = place
            by_view = {view: places[place] for view, places in changes.items() if place in places}
            agrees = tuple(view for view in View if view is View.ROLLOUT or (view in changes and view not in by_view))
            if View.PRODUCTION in by_view and 0 <= message < asked:
                once.setdefault(place, _followed(roles[max(message, before) : asked]))
            for views, change in _equal_views(by_view):
                follows = once.get(place, "") if View.PRODUCTION in views else ""
                key = (views, change.verb, what, in_turn, follows, agrees)
                groups.setdefault(key, []).append((step.index, message, change))
        before = asked
    findings = []
    for (views, verb, what, in_turn, follows, agrees), entries in groups.items():
        tokens: dict[int, int] = {}
        for _, message, change in entries:
            tokens[message] = max(tokens.get(message, 0), change.tokens)
        texts = set().union(*(change.texts for _, _, change in entries))
        short = len(texts) == 1 and verb is Verb.CHANGES and max(map(len, *texts)) <= _SHORT
        index = tuple(sorted({step for step, _, _ in entries}))
        quoted = next(iter(texts)) if short else None
        messages, total = tuple(sorted(tokens)), sum(tokens.values())
        findings.append(HistoryFinding(views, verb, what, messages, total, index, in_turn, follows, quoted, agrees))
    return sorted(findings, key=lambda one: (View.PRODUCTION not in one.views, one.in_turn, one.steps))


def _equal_views(changes: dict[View, _Change]) -> Iterator[tuple[tuple[View, ...], _Change]]:
    """Yield views that change the same together, others alone."""
    if len(changes) == 2 and changes[View.PRODUCTION] == changes[View.TRAINING]:
        yield (View.PRODUCTION, View.TRAINING), changes[View.PRODUCTION]
    else:
        yield from (((view,), change) for view, change in changes.items())


def _changes(differences: Sequence[Difference], rollout_left: bool) -> dict[_Place, _Change]:
    """Return what a view does differently. Scaffold counts with the text that it encloses, if any."""
    changes: dict[_Place, _Change] = {}
    for one in differences:
        view, rollout = (one.right, one.left) if rollout_left else (one.left, one.right)
        sizes: dict[tuple[int, str], int] = {}
        for part in (*view.parts, *rollout.parts):
            key = (part.message, _field_name(part.field))
            sizes[key] = sizes.get(key, 0) + len(part)
        texts = [key for key in sizes if key[1] not in _SCAFFOLD]
        main = max(texts or sizes, key=sizes.__getitem__)
        for side in (view, rollout):
            for part in side.parts:
                key = (part.message, _field_name(part.field))
                change = changes.setdefault((*(key if key in texts else main), one.in_turn), _Change())
                change.view += len(part) * (side is view)
                change.rollout += len(part) * (side is rollout)
        changes[*main, one.in_turn].texts.add((view.text, rollout.text))
    return changes


def _field_name(name: str) -> str:
    first = name.split(".", maxsplit=1)[0]
    return _NAMES.get(first, first)


def _followed(roles: Sequence[str]) -> str:
    """Say who spoke between the last step at which production equals the rollout and the first at which it does not."""
    new = [role for role in dict.fromkeys(roles) if role != "assistant"]
    if len(new) > 1:
        return f"messages of {listed(new)} follow"
    words = {"tool": "a tool result follows", "": "another turn follows"}
    return words.get("".join(new), f"a {''.join(new)} message follows")


def _message_words(messages: Sequence[int]) -> str:
    numbers = [number for number in messages if number >= 0]
    if not numbers:
        return ""
    if len(numbers) > 8:
        return f" of {len(numbers)} messages ({numbers[0]} to {numbers[-1]})"
    return f" of message{'' if len(numbers) == 1 else 's'} {listed(numbers)}"
