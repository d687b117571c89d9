"""What production, rollout and training hold at each step: how they differ, in sentences and as a document."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..rendering.rendered import RenderedTokens
from ..show.alignment import Hunk, align
from ..show.document import Cell, Contrast, Document, Table, Track, token_columns
from ..show.results import hue_of, template_name
from ..show.visible import counted, listed
from ..showing import ShowsItself
from ..study.seams import BridgeRefusal
from ..template.chat_template import REASONING_FIELDS
from ..tokens.tokenizer import Ids, Tokenizer

_SCAFFOLD: Final = ("scaffold", "generation prompt")
_NAMES: Final = {
    "tool_calls": "tool calls",
    "generation_prompt": "generation prompt",
    "role": "scaffold",
    **dict.fromkeys(REASONING_FIELDS, "reasoning"),
}
_SHORT: Final = 40
"""Longer texts are not quoted."""


class View(StrEnum):
    """Who sees the conversation: an API's engine, a sampled policy, or a trainer of one row."""

    PRODUCTION = "production"
    ROLLOUT = "rollout"
    TRAINING = "training"


PAIRS: Final = tuple(itertools.combinations(View, 2))


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
        return ViewTokens(self.ids[start:stop], self.messages[start:stop], self.fields[start:stop], prompt)

    def followed_by(self, turn: ViewTokens) -> ViewTokens:
        """Return these tokens as a prompt, and a turn after them."""
        ids = np.concatenate([self.ids, turn.ids])
        messages = np.concatenate([self.messages, turn.messages])
        return ViewTokens(ids, messages, np.concatenate([self.fields, turn.fields]), len(self))


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
        parts = tuple((*owner, sum(1 for _ in run)) for owner, run in runs)
        return cls(start, stop, tuple(part.ids.tolist()), parts, tokenizer.decode(part.ids.tolist()))


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
    differences: Mapping[tuple[View, View], Sequence[Difference]]

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

    def compare(self, left: View | str, right: View | str) -> Sequence[Difference] | None:
        """Return what differs between two views; None if one of them lacks the turn."""
        return self.differences.get((View(left), View(right)))

    def to_json(self) -> dict[str, Any]:
        refusal, pairs = self.refusal, [pair for pair in PAIRS if pair in self.differences]
        return {
            "step": self.index,
            "message": self.message,
            "equal": self.equal,
            "branch": self.branch,
            "break": None if refusal is None else {"reason": str(refusal.reason), "detail": refusal.detail},
            "tokens": {view: len(self.views[view]) if view in self.views else None for view in View},
            "comparisons": [
                {"left": pair[0], "right": pair[1], "differences": [asdict(one) for one in self.differences[pair]]}
                for pair in pairs
            ],
        }


def compare_views(
    views: Mapping[View, ViewTokens], tokenizer: Tokenizer
) -> dict[tuple[View, View], Sequence[Difference]]:
    """Compare each view with each other."""
    out: dict[tuple[View, View], Sequence[Difference]] = {}
    for one, other in itertools.combinations(views, 2):
        sides = [
            (
                Side.of(views[one], hunk.start, hunk.stop, tokenizer),
                Side.of(views[other], hunk.other_start, hunk.other_stop, tokenizer),
                in_turn,
            )
            for in_turn, hunk in differing(views[one], views[other])
        ]
        out[one, other] = [Difference(left, right, in_turn) for left, right, in_turn in sides]
        out[other, one] = [Difference(right, left, in_turn) for left, right, in_turn in sides]
    return out


def differing(one: ViewTokens, other: ViewTokens) -> Iterator[tuple[bool, Hunk]]:
    """Yield what differs, in order, and whether in the turn: message against message."""
    starts, other_starts = (
        dict(zip(*np.unique(side.messages[: side.prompt], return_index=True), strict=True)) for side in (one, other)
    )
    cuts = [(0, 0)]
    for message, at in sorted(starts.items(), key=lambda item: item[1]):
        there = other_starts.get(message, -1)
        if message >= 0 and at > cuts[-1][0] and there > cuts[-1][1] and one.ids[at] == other.ids[there]:
            cuts.append((int(at), int(there)))
    blocks = itertools.pairwise([*cuts, (one.prompt, other.prompt), (len(one), len(other))])
    for (start, other_start), (stop, other_stop) in blocks:
        in_turn = (start, other_start) == (one.prompt, other.prompt)
        for hunk in align(one.ids[start:stop], other.ids[other_start:other_stop]):
            yield in_turn, hunk.moved(start, other_start)


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
    def findings(self) -> tuple[HistoryFinding, ...]:
        """The differences from the rollout, by views, verb and kind of field."""
        return tuple(_find_changes(self.steps))

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
            "steps": [step.to_json() for step in self.steps],
            "findings": [asdict(one) | {"text": str(one)} for one in self.findings],
            "notes": list(self.notes),
        }

    def document(self, _: Any = None, *, step: int | None = None) -> Document:
        """Return the report as a document; with `step`, what differs at that step only.

        Of production there are only the tokens that it has instead.
        """
        streams = list({one.branch: one.rollout for one in self.steps}.values())
        tracks = [
            self._track(f"rollout, stream {at}" if at else "rollout", one.ids, one.messages, one.fields.tolist())
            for at, one in enumerate(streams)
        ]
        row = self.row
        tracks.append(self._track("training row", row.ids, row.messages, row.fields, row.mask))
        contrasts: list[Contrast] = []
        links: dict[tuple[Any, ...], str] = {}
        chosen = self.steps if step is None else [self.steps[step]]
        for one, view in itertools.product(chosen, (View.PRODUCTION, View.TRAINING)):
            sides = [(each.left, each.right) for each in one.compare(View.ROLLOUT, view) or ()]
            if not sides:
                continue
            base, track, starts = (one.branch, len(one.rollout)), len(streams), [other.start for _, other in sides]
            if view is View.PRODUCTION:
                track, starts = len(tracks), [0, *itertools.accumulate(len(other.ids) for _, other in sides)]
                tokens = one.views[view]
                at = np.concatenate([np.arange(other.start, other.stop) for _, other in sides])
                tracks.append(self._track("", tokens.ids[at], tokens.messages[at], tokens.fields[at].tolist()))
            hunks = [
                Hunk(rollout.start, rollout.stop, start, start + len(other.ids))
                for (rollout, other), start in zip(sides, starts, strict=False)
            ]
            links[one.index, view] = f"diff={len(contrasts)}"
            name = f"step {one.index}, {one.place}: rollout → {view}"
            contrasts.append(Contrast(name, *base, track, hunks, (str(View.ROLLOUT), str(view))))
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


def _step_table(steps: Sequence[Step], links: Mapping[tuple[Any, ...], str]) -> Table:
    """Count the tokens of each view at each step, and those that differ."""
    rows: list[list[str | Cell]] = []
    for step in steps:
        sizes = [f"{len(step.views[view]):,}" if view in step.views else "none" for view in View]
        row: list[str | Cell] = [str(step.index), step.place, *sizes]
        for left, right in PAIRS:
            differences = step.compare(left, right)
            link = links.get((step.index, *({left, right} - {View.ROLLOUT})), "")
            removed = sum(len(one.left.ids) for one in differences or ())
            added = sum(len(one.right.ids) for one in differences or ())
            counts = "?" if differences is None else f"−{removed:,} +{added:,}"
            row.append(Cell("=", "dim") if differences == [] else Cell(counts, "bad", link=link))
        rows.append([*row, Cell("" if step.refusal is None else f"break: {step.refusal.reason}", "poor")])
    head = ["step", "asks for", *map(str, View), *(f"{left} → {right}" for left, right in PAIRS), ""]
    return Table("Steps", head, rows, words=2)


# -- findings


@dataclass(slots=True)
class _Change:
    """Tokens of a view and of the rollout in one field of a message, and the texts that differ."""

    view: int = 0
    rollout: int = 0
    texts: set[tuple[str, str]] = field(default_factory=set)

    @property
    def verb(self) -> str:
        return "drops" if not self.view else "changes" if self.rollout else "adds"


def _find_changes(steps: Sequence[Step]) -> list[HistoryFinding]:
    groups = defaultdict[Any, list[tuple[int, int, _Change]]](list)
    for step in steps:
        changes = {view: _changes(step.compare(view, View.ROLLOUT) or ()) for view in (View.PRODUCTION, View.TRAINING)}
        for place in dict.fromkeys(itertools.chain(*changes.values())):
            each = {view: some[place] for view, some in changes.items() if place in some}
            one, *more = each.values()
            for views in [tuple(each)] if more == [one] else [(view,) for view in each]:
                change, (message, what, in_turn) = each[views[0]], place
                groups[views, change.verb, what, in_turn].append((step.index, message, change))
    findings = []
    for (views, verb, what, in_turn), group in groups.items():
        tokens = Counter[int]()
        for _, message, change in group:
            tokens[message] = max(tokens[message], change.rollout or change.view)
        pairs = {pair for *_, change in group for pair in change.texts}
        texts = pairs.pop() if len(pairs) == 1 and verb == "changes" else None
        texts = texts if texts is not None and max(map(len, texts)) <= _SHORT else None
        numbers = tuple(sorted({number for number, *_ in group}))
        findings.append(
            HistoryFinding(views, verb, what, tuple(sorted(tokens)), tokens.total(), numbers, in_turn, texts)
        )
    return sorted(findings, key=lambda one: (View.PRODUCTION not in one.views, one.in_turn, one.steps))


def _changes(differences: Sequence[Difference]) -> dict[tuple[int, str, bool], _Change]:
    """Map message, field and `in_turn` to a change. Scaffold counts with the text in it."""
    changes = defaultdict[tuple[int, str, bool], _Change](_Change)
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
