"""What the differences between three histories come to: a few findings, each a plain sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from ...template.chat_template import REASONING_FIELDS
from ...tokens.visible import counted, listed
from .differences import Comparison, Difference, Step, View

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


Key = tuple[tuple[View, ...], Verb, str, bool, str, tuple[View, ...]]
"""What makes differences one finding: views, verb, what, in the turn, once, and who agrees with the rollout."""


class Findings:
    """The differences from the rollout, gathered step by step: the same views doing the same to the same kind of field.

    What differs as it did at the step before is not looked at again.
    """

    def __init__(self, roles: Sequence[str]) -> None:
        self._roles = roles
        self._views = {view: _OneView() for view in (View.PRODUCTION, View.TRAINING)}
        self._has_training = True
        self._asked = 0
        self._once: dict[Place, str] = {}
        self._found: dict[Key, _Gathered] = {}
        self._keys: dict[Place, list[Key]] = {}
        """What each place that differs now counts for."""
        self._counts: Counter[Key] = Counter()

    def add(self, step: Step) -> None:
        """The next step."""
        asked = len(self._roles) if step.message is None else step.message
        comparisons = {view: step.compare(view, View.ROLLOUT) for view in self._views}
        changed = dict.fromkeys(place for view, own in self._views.items() for place in own.change(comparisons[view]))
        has_training = comparisons[View.TRAINING] is not None
        if has_training is not self._has_training:  # who agrees is another matter now, everywhere
            self._has_training = has_training
            changed |= dict.fromkeys(self._keys)
        changed |= {place: None for place in self._keys if place[0] >= self._asked}  # `once` was not known
        for place in changed:
            self._settle(place, asked)
        for key in self._counts:
            self._found[key].steps.add(step.index)
        self._asked = asked

    def _settle(self, place: Place, asked: int) -> None:
        """What a place counts for at this step."""
        message, what, in_turn = place
        self._counts -= Counter(self._keys.pop(place, ()))
        made = {
            view: own.changes.get(place)
            for view, own in self._views.items()
            if view is View.PRODUCTION or self._has_training
        }
        once = ""
        if made[View.PRODUCTION] is not None and 0 <= message < asked:
            if place not in self._once:
                self._once[place] = _followed(self._roles[max(message, self._asked) : asked])
            once = self._once[place]
        agrees = tuple(view for view in View if view is View.ROLLOUT or (view in made and made[view] is None))
        keys = []
        for views, change in _groups(made):
            keys.append((views, change.verb, what, in_turn, once if View.PRODUCTION in views else "", agrees))
            found = self._found.setdefault(keys[-1], _Gathered())
            count = change.view if change.verb is Verb.ADDS else change.rollout
            found.tokens[message] = max(found.tokens.get(message, (0, 0)), (count, change.scaffold))
            found.texts.update(change.texts)
        if keys:
            self._keys[place] = keys
            self._counts.update(keys)

    def gathered(self) -> list[Finding]:
        """What they come to, production's first."""
        out = []
        for (views, verb, what, in_turn, once, agrees), found in self._found.items():
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
                    once=once,
                    texts=texts if texts is not None and max(map(len, texts)) <= _SHORT else None,
                    agrees=agrees,
                )
            )
        return sorted(out, key=lambda found: (View.PRODUCTION not in found.views, found.in_turn, found.steps))


class _OneView:
    """What one view does differently from the rollout at a step, by place."""

    def __init__(self) -> None:
        self.changes: dict[Place, _Change] = {}
        self._told: list[dict[Place, _Change]] = []
        """What each difference changes."""
        self._where: dict[Place, list[int]] = {}
        """The differences that change a place."""

    def change(self, compared: Comparison | None) -> list[Place]:
        """The next step: the places at which it is not as it was, in order."""
        kept, own = (0, ()) if compared is None else (compared.kept, compared.own)
        gone, self._told = self._told[kept:], self._told[:kept]
        for told in gone:
            for place in told:
                self._where[place].pop()
        for difference in own:
            assert compared is not None
            for place in (told := _changes(difference, compared.left is View.ROLLOUT)):
                self._where.setdefault(place, []).append(len(self._told))
            self._told.append(told)
        changed = dict.fromkeys(place for told in (*gone, *self._told[kept:]) for place in told)
        for place in changed:
            numbers = self._where[place]
            self.changes.pop(place, None)
            if numbers:
                self.changes[place] = sum((self._told[number][place] for number in numbers), _Change())
            else:
                del self._where[place]
        return sorted(changed, key=lambda place: self._where.get(place, [-1])[0])


def _groups(made: dict[View, _Change | None]) -> Iterator[tuple[tuple[View, ...], _Change]]:
    """The views that do the same, together; others on their own."""
    production, training = made.get(View.PRODUCTION), made.get(View.TRAINING)
    if production is not None and production == training:
        yield (View.PRODUCTION, View.TRAINING), production
        return
    for view, change in made.items():
        if change is not None:
            yield (view,), change


def _changes(found: Difference, rollout_first: bool) -> dict[Place, _Change]:
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
