"""HistoryReport: where histories differ, as data, in sentences and as a document."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np

from ..rendering.rendered import RenderedTokens
from ..show.alignment import Hunk
from ..show.document import Cell, Contrast, Document, Table, Track, token_columns
from ..show.results import hue_of, template_name
from ..show.visible import counted, listed
from ..showing import ShowsItself
from ..template.chat_template import REASONING_FIELDS
from ..tokens.tokenizer import Ids, Tokenizer
from .history_steps import PAIRS, Difference, Side, Step, View

_SCAFFOLD: Final = ("scaffold", "generation prompt")
_NAMES: Final = {
    "tool_calls": "tool calls",
    "generation_prompt": "generation prompt",
    "role": "scaffold",
    **dict.fromkeys(REASONING_FIELDS, "reasoning"),
}
_SHORT: Final = 40
"""Longer texts are not quoted."""


@dataclass(frozen=True, slots=True)
class HistoryFinding:
    """What `views` do differently from the rollout: they drop, add or change (`verb`) text of `messages` at `steps`.

    `tokens` counts each message once. `in_turn`: not in its prompt. `texts` are those of the views and of the rollout,
    if short and the same everywhere.
    """

    views: tuple[View, ...]
    verb: str
    what: str
    messages: tuple[int, ...]
    tokens: int
    steps: tuple[int, ...]
    in_turn: bool
    texts: tuple[str, str] | None

    def __str__(self) -> str:
        verb = self.verb if len(self.views) == 1 else self.verb.removesuffix("s")
        where = " in the turn itself" if self.in_turn else ""
        how = "{!r} instead of {!r}, ".format(*self.texts) if self.texts else ""
        numbers = [number for number in self.messages if number >= 0]
        of = f" of message{'s' * (len(numbers) > 1)} {listed(numbers)}" if numbers else ""
        if len(numbers) > 8:
            of = f" of {len(numbers)} messages ({numbers[0]} to {numbers[-1]})"
        return f"{listed(self.views).capitalize()} {verb} the {self.what}{of}{where}: {how}{counted(self.tokens)}."


@dataclass(frozen=True, slots=True, eq=False)
class HistoryReport(ShowsItself):
    """Where histories differ, step by step. `row` is the training row."""

    steps: tuple[Step, ...]
    findings: tuple[HistoryFinding, ...]
    roles: tuple[str, ...]
    row: RenderedTokens
    notes: tuple[str, ...]
    settings: Mapping[str, Any]
    tokenizer: Tokenizer = field(repr=False)

    @property
    def equal(self) -> bool:
        """True if all three agree at every step, and the rollout never breaks."""
        return all(step.equal and step.refusal is None for step in self.steps)

    @property
    def branches(self) -> tuple[Ids, ...]:
        """The streams of the rollout: one, and one more for every break."""
        return tuple({step.branch: step.rollout.ids for step in self.steps}.values())

    @property
    def breaks(self) -> list[Step]:
        """The steps at which the rollout could not continue."""
        return [step for step in self.steps if step.refusal is not None]

    def differing(self, left: View | str, right: View | str) -> list[Step]:
        """Return the steps at which two views differ."""
        return [step for step in self.steps if step.compare(left, right) != []]

    @property
    def summary(self) -> str:
        """The conclusions, one sentence a line."""
        return "\n".join(self.sentences())

    def sentences(self) -> list[str]:
        """Return the conclusions."""
        if not self.steps:
            return ["There is no turn to compare: the model is never asked for one."]
        out = [str(one) for one in self.findings]
        for step in self.steps:
            if step.refusal is not None:
                out.append(f"The rollout breaks at {step.place}: {step.refusal}.")
            if View.TRAINING not in step.views:
                out.append(f"The training row holds no turn for {step.place}.")
        steps = f"all {len(self.steps)} steps" if len(self.steps) > 1 else "the one step there is"
        size = len(self.steps[-1].rollout)
        return out or [f"Production, rollout and training hold the same tokens at {steps}: {size:,} at the last."]

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data for ``json.dumps``.

        A step's rollout is the beginning of its branch, its training the beginning of the row, and its production
        follows from either by the differences.
        """
        return {
            "equal": self.equal,
            "summary": self.sentences(),
            "settings": dict(self.settings),
            "roles": list(self.roles),
            "branches": [ids.tolist() for ids in self.branches],
            "row": self.row.token_ids,
            "steps": [_step_json(step) for step in self.steps],
            "findings": [asdict(one) | {"text": str(one)} for one in self.findings],
            "notes": list(self.notes),
        }

    def document(self, _: Any = None, *, step: int | None = None) -> Document:
        """Return the report as a document; with `step`, what differs at that step only.

        The tokens that production has instead are stored once for all steps.
        """
        streams = list({one.branch: one.rollout for one in self.steps}.values())
        tracks = [
            self._track(f"rollout, stream {at}" if at else "rollout", one.ids, one.messages, one.fields.tolist())
            for at, one in enumerate(streams)
        ]
        row, mask = self.row, self.row.mask
        tracks.append(self._track("training row", row.ids, row.messages, row.fields, mask))
        pool: dict[tuple[Any, ...], int] = {}
        """Where each stretch of tokens is in the last track: those of production that the rollout lacks."""
        size = 0
        contrasts: list[Contrast] = []
        links: dict[tuple[Any, ...], str] = {}
        for one in self.steps if step is None else [self.steps[step]]:
            for view in (View.PRODUCTION, View.TRAINING):
                hunks = []
                for rollout, other in ((each.left, each.right) for each in one.compare(View.ROLLOUT, view) or ()):
                    start, key = other.start, (other.ids, other.parts)
                    if view is View.PRODUCTION:
                        start = pool.setdefault(key, size)
                        size += len(other.ids) * (start == size)
                    hunks.append(Hunk(rollout.start, rollout.stop, start, start + len(other.ids)))
                if hunks:
                    links[one.index, view] = f"diff={len(contrasts)}"
                    name = f"step {one.index}, {one.place}: rollout → {view}"
                    base, track = (one.branch, len(one.rollout)), len(streams) + (view is View.PRODUCTION)
                    contrasts.append(Contrast(name, *base, track, hunks, (str(View.ROLLOUT), str(view))))
        if contrasts:
            parts = [part for _, some in pool for part in some]
            messages = np.array([message for message, _, count in parts for _ in range(count)], np.int32)
            fields = [name for _, name, count in parts for _ in range(count)]
            ids = np.array([index for some, _ in pool for index in some], np.int32)
            tracks.append(self._track("", ids, messages, fields))
        summary = self.sentences()
        if step is not None:
            words = f"step {step}: all hold the same {counted(len(self.steps[step].rollout))}"
            summary = [words] if self.steps[step].equal else []
        return Document(
            "Histories",
            "tokentrace audit --on",
            template_name(self.tokenizer),
            summary=summary,
            notes=self.notes if step is None else [],
            tables=[_step_table(self.steps, links)] if self.steps and step is None else [],
            tracks=tracks,
            contrasts=contrasts,
            start=next(iter(links.values()), "track=0"),
        )

    def _track(self, name: str, ids: Ids, messages: Any, fields: Sequence[str], mask: Any = None) -> Track:
        owners = [self.roles[message] if message >= 0 else None for message in messages.tolist()]
        hues = np.array([hue_of(*pair) for pair in zip(owners, fields, strict=True)], np.uint8)
        columns = token_columns(self.tokenizer, ids)
        return Track(name, ids, hues, messages, **columns, fields=list(fields), mask=mask, roles=self.roles)

    def __repr__(self) -> str:
        differ = sum(not step.equal for step in self.steps)
        return f"HistoryReport({len(self.steps)} steps, {differ} differ, {len(self.breaks)} breaks)"

    def __str__(self) -> str:
        from ..show.terminal import plain_view

        return plain_view(self)


def _step_json(step: Step) -> dict[str, Any]:
    refusal = step.refusal
    return {
        "step": step.index,
        "message": step.message,
        "equal": step.equal,
        "branch": step.branch,
        "break": None if refusal is None else {"reason": str(refusal.reason), "detail": refusal.detail},
        "tokens": {view: len(step.views[view]) if view in step.views else None for view in View},
        "comparisons": [
            {"left": left, "right": right, "differences": [asdict(one) for one in differences]}
            for (left, right), differences in step.differences.items()
        ],
    }


def _step_table(steps: Sequence[Step], links: Mapping[tuple[Any, ...], str]) -> Table:
    """Count the tokens of each view at each step, and those that differ."""
    rows: list[list[str | Cell]] = []
    for step in steps:
        sizes = [f"{len(step.views[view]):,}" if view in step.views else "none" for view in View]
        row: list[str | Cell] = [str(step.index), step.place, *sizes]
        for left, right in PAIRS:
            differences = step.differences.get((left, right))
            link = links.get((step.index, *({left, right} - {View.ROLLOUT})), "")
            removed = sum(len(one.left.ids) for one in differences or ())
            added = sum(len(one.right.ids) for one in differences or ())
            counts = "?" if differences is None else f"−{removed:,} +{added:,}"
            row.append(Cell("=", "dim") if differences == () else Cell(counts, "bad", link=link))
        rows.append([*row, Cell("" if step.refusal is None else f"break: {step.refusal.reason}", "poor")])
    head = ["step", "asks for", *map(str, View), *(f"{left} → {right}" for left, right in PAIRS), ""]
    return Table("Steps", head, rows, words=2)


# -- findings


def find_changes(steps: Sequence[Step]) -> list[HistoryFinding]:
    """Gather the differences from the rollout by views, verb and kind of field."""
    groups: dict[tuple[tuple[View, ...], str, str, bool], _Group] = defaultdict(_Group)
    for step in steps:
        changes = {view: _changes(step.compare(view, View.ROLLOUT) or ()) for view in (View.PRODUCTION, View.TRAINING)}
        for place in dict.fromkeys(place for some in changes.values() for place in some):
            each = {view: some[place] for view, some in changes.items() if place in some}
            one, *more = each.values()
            for views in [tuple(each)] if more == [one] else [(view,) for view in each]:
                change, (message, what, in_turn) = each[views[0]], place
                verb = "drops" if not change.view else "changes" if change.rollout else "adds"
                groups[views, verb, what, in_turn].add(step.index, message, change)
    findings = [group.finding(*key) for key, group in groups.items()]
    return sorted(findings, key=lambda one: (View.PRODUCTION not in one.views, one.in_turn, one.steps))


@dataclass(slots=True)
class _Change:
    """Tokens of a view and of the rollout in one field of a message."""

    view: int = 0
    rollout: int = 0
    texts: set[tuple[str, str]] = field(default_factory=set)


@dataclass(slots=True)
class _Group:
    """Changes of one kind: the tokens of each message, the steps, and the texts."""

    tokens: dict[int, int] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)
    texts: set[tuple[str, str]] = field(default_factory=set)

    def add(self, step: int, message: int, change: _Change) -> None:
        self.tokens[message] = max(self.tokens.get(message, 0), change.rollout or change.view)
        self.steps.add(step)
        self.texts |= change.texts

    def finding(self, views: tuple[View, ...], verb: str, what: str, in_turn: bool) -> HistoryFinding:
        texts = next(iter(self.texts)) if len(self.texts) == 1 and verb == "changes" else None
        texts = texts if texts is not None and max(map(len, texts)) <= _SHORT else None
        messages, steps = tuple(sorted(self.tokens)), tuple(sorted(self.steps))
        return HistoryFinding(views, verb, what, messages, sum(self.tokens.values()), steps, in_turn, texts)


def _changes(differences: Sequence[Difference]) -> dict[tuple[int, str, bool], _Change]:
    """Map message, field and `in_turn` to a change. Scaffold counts with the text in it."""
    changes: dict[tuple[int, str, bool], _Change] = defaultdict(_Change)
    for one in differences:
        view, rollout = _sizes(one.left), _sizes(one.right)
        total = view + rollout
        texts = [key for key in total if key[1] not in _SCAFFOLD]
        main = max(texts or total, key=total.__getitem__)
        for key in total:
            change = changes[*(key if key in texts else main), one.in_turn]
            change.view += view[key]
            change.rollout += rollout[key]
        changes[*main, one.in_turn].texts.add((one.left.text, one.right.text))
    return changes


def _sizes(side: Side) -> Counter[tuple[int, str]]:
    """Count the tokens of each message and field."""
    sizes = Counter[tuple[int, str]]()
    for message, path, count in side.parts:
        name = path.split(".", maxsplit=1)[0]
        sizes[message, _NAMES.get(name, name)] += count
    return sizes
