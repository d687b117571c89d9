"""What the differences between three histories come to: a few findings, each a plain sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from ..template.chat_template import REASONING_FIELDS
from ..tokens.visible import counted, listed
from .history_differences import Comparison, Difference, Step, View

_SCAFFOLD: Final = frozenset({"scaffold", "generation prompt"})
_SHORT: Final = 40
"""Characters up to which a text is quoted."""


class Verb(StrEnum):
    """What a view does that the rollout does not."""

    DROPS = "drops"
    ADDS = "adds"
    CHANGES = "changes"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that `views` do differently from the rollout, to `messages`, at `steps`; those in `agrees` do not.

    `tokens` counts every message once: tokens of the rollout, or for `adds` those of the views. `scaffold` of them are
    scaffold. `in_turn`: in the turn that is asked for, not in its prompt. `once`: what has to follow first. `texts` is
    what the views and the rollout have there, where it is short, the same everywhere, and not text that is gone.
    """

    views: tuple[View, ...]
    verb: Verb
    what: str
    messages: tuple[int, ...]
    tokens: int
    scaffold: int
    steps: tuple[int, ...]
    in_turn: bool
    once: str
    texts: tuple[str, str] | None
    agrees: tuple[View, ...]

    def __str__(self) -> str:
        whose = f" of {_messages(self.messages)}" if self.messages[-1] >= 0 else ""
        what = f"the {self.what}{whose}"
        many = counted(self.tokens)
        if self.scaffold and self.what not in _SCAFFOLD:
            many += ", scaffold included"
        return self._of_turn(what, many) if self.in_turn else self._of_prompt(what, many)

    def _of_prompt(self, what: str, many: str) -> str:
        subject = listed(self.views).capitalize()
        s = "s" if len(self.views) == 1 else ""
        rest, one = listed(self.agrees), len(self.agrees) == 1
        once = f" once {self.once}" if self.once else ""
        if self.verb is Verb.CHANGES:
            how = f"{self.texts[0]!r} where {rest} {'has' if one else 'have'} {self.texts[1]!r}, " if self.texts else ""
            return f"{subject} write{s} {what} otherwise{once}: {how}{many}."
        if self.verb is Verb.ADDS:
            how = f"{self.texts[0]!r}, " if self.texts else ""
            return f"{subject} add{s} {what}{once}: {how}{many}; {rest} {'does' if one else 'do'} not."
        how = f"{self.texts[1]!r}, " if self.texts else ""
        return f"{subject} drop{s} {what}{once}: {how}{many}; {rest} keep{'s' if one else ''} it."

    def _of_turn(self, what: str, many: str) -> str:
        if self.verb is Verb.CHANGES:
            how = f"{self.texts[0]!r} where the model samples {self.texts[1]!r}, " if self.texts else ""
            return f"Training writes {what} otherwise than it is sampled: {how}{many}."
        if self.verb is Verb.ADDS:
            how = f"{self.texts[0]!r}, " if self.texts else ""
            return f"Training adds {what} to the turn itself, where the model samples no such thing: {how}{many}."
        how = f"{self.texts[1]!r}, " if self.texts else ""
        return f"Training leaves {what} out of the turn itself, though the model samples it: {how}{many}."


Place = tuple[int, str, bool]
"""A message, the kind of field, and whether it is in the turn itself."""


@dataclass(slots=True)
class _Change:
    """What one view does at one place, in tokens of the rollout and of its own."""

    rollout: int = 0
    view: int = 0
    scaffold: int = 0
    texts: list[tuple[str, str]] = field(default_factory=list)

    @property
    def verb(self) -> Verb:
        if self.rollout and self.view:
            return Verb.CHANGES
        return Verb.DROPS if self.rollout else Verb.ADDS

    def __add__(self, more: _Change) -> _Change:
        texts = [*self.texts, *more.texts]
        return _Change(self.rollout + more.rollout, self.view + more.view, self.scaffold + more.scaffold, texts)


@dataclass(slots=True)
class _Gathered:
    """What is known of one finding so far, by message."""

    tokens: dict[int, tuple[int, int]] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)
    texts: set[tuple[str, str]] = field(default_factory=set)


def find(steps: Sequence[Step], roles: Sequence[str]) -> list[Finding]:
    """The differences from the rollout, gathered: the same views doing the same to the same kind of field."""
    told: dict[int, dict[Place, _Change]] = {}  # what each difference changes: steps share them
    once: dict[Place, str] = {}
    before = 0
    gathered: dict[tuple[tuple[View, ...], Verb, str, bool, str, tuple[View, ...]], _Gathered] = {}
    for step in steps:
        asked = len(roles) if step.message is None else step.message
        compared = {view: step.compare(view, View.ROLLOUT) for view in (View.PRODUCTION, View.TRAINING)}
        done = {view: _changes(found, told) for view, found in compared.items() if found is not None}
        for place in dict.fromkeys(place for of_view in done.values() for place in of_view):
            message, what, in_turn = place
            made = {view: of_view.get(place) for view, of_view in done.items()}
            agrees = tuple(view for view in View if view is View.ROLLOUT or (view in made and made[view] is None))
            follows = ""
            if made[View.PRODUCTION] is not None and 0 <= message < asked:
                if place not in once:
                    once[place] = _followed(roles[max(message, before) : asked])
                follows = once[place]
            for views, change in _groups(made):
                key = (views, change.verb, what, in_turn, follows if View.PRODUCTION in views else "", agrees)
                found = gathered.setdefault(key, _Gathered())
                count = change.view if change.verb is Verb.ADDS else change.rollout
                found.tokens[message] = max(found.tokens.get(message, (0, 0)), (count, change.scaffold))
                found.steps.add(step.index)
                found.texts.update(change.texts)
        before = asked
    out = []
    for (views, verb, what, in_turn, follows, agrees), found in gathered.items():
        telling = len(found.texts) == 1 and (verb is Verb.CHANGES or what in _SCAFFOLD)
        texts = next(iter(found.texts)) if telling else None
        out.append(
            Finding(
                views=views,
                verb=verb,
                what=what,
                messages=tuple(sorted(found.tokens)),
                tokens=sum(count for count, _ in found.tokens.values()),
                scaffold=sum(scaffold for _, scaffold in found.tokens.values()),
                steps=tuple(sorted(found.steps)),
                in_turn=in_turn,
                once=follows,
                texts=texts if texts is not None and max(map(len, texts)) <= _SHORT else None,
                agrees=agrees,
            )
        )
    return sorted(out, key=lambda found: (View.PRODUCTION not in found.views, found.in_turn, found.steps))


def _groups(made: dict[View, _Change | None]) -> Iterator[tuple[tuple[View, ...], _Change]]:
    """The views that do the same, together; others on their own."""
    production, training = made.get(View.PRODUCTION), made.get(View.TRAINING)
    if production is not None and production == training:
        yield (View.PRODUCTION, View.TRAINING), production
        return
    for view, change in made.items():
        if change is not None:
            yield (view,), change


def _changes(compared: Comparison, told: dict[int, dict[Place, _Change]]) -> dict[Place, _Change]:
    """What a view does differently from the rollout. `told` is what is known of single differences."""
    out: dict[Place, _Change] = {}
    for difference in compared.differences:
        if id(difference) not in told:
            told[id(difference)] = _changed(difference, compared.left is View.ROLLOUT)
        for place, change in told[id(difference)].items():
            out[place] = out[place] + change if place in out else change
    return out


def _changed(found: Difference, rollout_first: bool) -> dict[Place, _Change]:
    """What a view does there differently from the rollout. Scaffold counts with the text that it encloses, if any."""
    out: dict[Place, _Change] = {}
    view, rollout = (found.right, found.left) if rollout_first else (found.left, found.right)
    sizes: dict[tuple[int, str], int] = {}
    for part in (*view.parts, *rollout.parts):
        place = (part.message, _what(part.field))
        sizes[place] = sizes.get(place, 0) + len(part)
    told = {place: size for place, size in sizes.items() if place[1] not in _SCAFFOLD}
    main = max(told or sizes, key=(told or sizes).__getitem__)
    told = told or {main: sizes[main]}
    for run in (view, rollout):
        for part in run.parts:
            place = (part.message, _what(part.field))
            change = out.setdefault((*(place if place in told else main), found.in_turn), _Change())
            change.scaffold += len(part) if place[1] in _SCAFFOLD else 0
            if run is view:
                change.view += len(part)
            else:
                change.rollout += len(part)
    if len(told) == 1:
        out[*main, found.in_turn].texts.append((view.text, rollout.text))
    return out


def _what(name: str) -> str:
    """A field as a reader would call it."""
    first = name.split(".", maxsplit=1)[0]
    if first in REASONING_FIELDS:
        return "reasoning"
    return {"tool_calls": "tool calls", "generation_prompt": "generation prompt", "role": "scaffold"}.get(first, first)


def _followed(roles: Sequence[str]) -> str:
    """Who spoke between the last step at which production was as the rollout, and the first at which it was not."""
    came = [role for role in dict.fromkeys(roles) if role != "assistant"]
    if len(came) > 1:
        return f"messages of {listed(came)} follow"
    known = {"tool": "a tool result follows", "": "another turn follows"}
    return known.get("".join(came), f"a {''.join(came)} message follows")


def _messages(numbers: Sequence[int]) -> str:
    shown = [number for number in numbers if number >= 0]
    if len(shown) > 8:
        return f"{len(shown)} messages ({shown[0]} to {shown[-1]})"
    return f"message{'' if len(shown) == 1 else 's'} {listed(shown)}"
