"""The views of a history report: for terminals, for browsers, for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from rich.console import RenderableType
from rich.table import Table as Grid
from rich.text import Text

from ..show.document import Card, Cell, Contrast, Document, Table, Track, token_columns
from ..show.results import hue_of, template_name
from ..show.terminal import flat, grid, layout, plain
from ..tokens.alignment import Hunk
from ..tokens.ids import common_prefix
from ..tokens.visible import counted, listed, visible
from .history_differences import PAIRS, Comparison, Difference, DifferenceSide, Shown, View

if TYPE_CHECKING:
    from .history_differences import Step
    from .history_report import HistoryReport

_PART: Final = 48
"""Tokens shown of one part of a difference in a terminal."""


@dataclass(frozen=True, slots=True)
class ViewPair:
    """A comparison that is worth showing: who holds its left side, who its right."""

    left: tuple[View, ...]
    right: tuple[View, ...]
    compared: Comparison


def contrasts(step: Step) -> list[ViewPair]:
    """The fewest comparisons that tell all that differs at a step; views that are equal stand together."""
    pairs = {(found.left, found.right): found for found in step.comparisons}
    equal = {pair for pair, found in pairs.items() if found.equal}
    production, rollout, training = View
    if not [pair for pair in pairs if pair not in equal]:
        return []
    if (production, rollout) in equal:
        return [ViewPair((production, rollout), (training,), pairs[production, training])]
    if (production, training) in equal:
        return [ViewPair((production, training), (rollout,), pairs[production, rollout])]
    if (rollout, training) in equal:
        return [ViewPair((production,), (rollout, training), pairs[production, rollout])]
    return [ViewPair((left,), (right,), pairs[left, right]) for left, right in pairs if rollout in (left, right)]


# -- for terminals


def text_view(report: HistoryReport, *, step: int | None = None) -> Text:
    """A report for a terminal: a summary, a table of the steps, and what differs at each, or at one."""
    return layout(*_parts(report, step))


plain_view = plain(text_view)


def _parts(report: HistoryReport, only: int | None) -> Iterator[RenderableType]:
    if only is None:
        for sentence in report.sentences():
            yield Text.assemble(("• ", "dim"), (flat(sentence), "bold"))
        for note in report.notes:
            yield Text(f"note: {flat(note)}", "yellow")
        if report.steps:
            yield Text()
            yield grid(_steps(report, {}))
    before: set[tuple[View, View, DifferenceSide, DifferenceSide]] = set()
    for step in report.steps:
        seen = set()
        for contrast in contrasts(step):
            compared = contrast.compared
            keys = [(compared.left, compared.right, d.left, d.right) for d in compared.differences]
            seen.update(keys)
            fresh = [
                d for d, key in zip(compared.differences, keys, strict=True) if only is not None or key not in before
            ]
            if only in (None, step.index) and fresh:
                yield Text()
                yield _contrast_head(report, step, contrast, known=len(keys) - len(fresh))
                yield _differences(report, fresh)
        before = seen
        if only == step.index and step.equal:
            yield Text(f"step {step.index}, {report.place(step)}: all hold the same {counted(len(step.rollout))}")


def _steps(report: HistoryReport, links: Mapping[tuple[int, View], str]) -> Table:
    """How many tokens each view holds at each step, and how many differ; `links` are what clicks show."""
    rows: list[list[str | Cell]] = []
    for step in report.steps:
        sizes = ["none" if (found := step.shown(view)) is None else f"{len(found):,}" for view in View]
        row: list[str | Cell] = [str(step.index), report.place(step), *sizes]
        for left, right in PAIRS:
            compared = step.compare(left, right)
            other = right if left is View.ROLLOUT else left
            link = links.get((step.index, other), "") if View.ROLLOUT in (left, right) else ""
            equal = compared is not None and compared.equal
            row.append(Cell("=" if equal else _changed(compared), "dim" if equal else "bad", link=link))
        rows.append([*row, Cell("" if step.refusal is None else f"break: {step.refusal.reason}", "poor")])
    head = ["step", "asks for", *map(str, View), *(f"{left} → {right}" for left, right in PAIRS), ""]
    return Table("Steps", head, rows, "A difference with the rollout can be clicked.", words=2)


def _changed(compared: Comparison | None) -> str:
    return "?" if compared is None else f"−{compared.left_tokens:,} +{compared.right_tokens:,}"


def _contrast_head(report: HistoryReport, step: Step, contrast: ViewPair, known: int) -> Text:
    return Text.assemble(
        (f"step {step.index}, {report.place(step)}: ", "bold"),
        (f"− {listed(contrast.left)}", "red"),
        "   ",
        (f"+ {listed(contrast.right)}", "green"),
        (f"   and {known} as at the step before" if known else "", "dim"),
    )


def _differences(report: HistoryReport, fresh: Sequence[Difference]) -> Grid:
    rows = Grid.grid(padding=(0, 2, 0, 0))
    rows.add_column(justify="right", min_width=9)
    for _ in ("whose", "field", "in the turn"):
        rows.add_column(style="dim", min_width=4)
    for difference in fresh:
        for sign, run, style in (("−", difference.left, "red"), ("+", difference.right, "green")):
            texts = token_columns(report.tokenizer, np.asarray(run.ids, np.int32))["texts"]
            for part in run.parts:
                shown = texts[part.start - run.start : part.stop - run.start]
                said = "│".join(repr(visible(text))[1:-1] for text in shown[:_PART])
                more = f" … {len(shown) - _PART} more" if len(shown) > _PART else ""
                who = "-" if part.role is None else f"{part.message} {part.role}"
                rows.add_row(
                    Text(f"{part.start} {sign}", style),
                    Text(flat(who)),
                    Text(flat(part.field)),
                    "turn" if difference.in_turn else "",
                    Text(said + more, style),
                )
    return rows


# -- for browsers


def history_document(report: HistoryReport, title: str = "Histories", *, step: int | None = None) -> Document:
    """A report as a document: the rollout's streams, the training row, and what differs from them at each step.
    `step` is shown first.

    A step is the beginning of a stream. What production shows is that, but for what differs, which is kept once for all
    the steps at which it differs in the same way.
    """
    streams = {step.branch: step.rollout for step in report.steps}
    places = {branch: at for at, branch in enumerate(streams)}
    row = Shown(report.row.ids, report.row.messages, np.array(report.row.fields, object), len(report.row))
    tracks: list[Track] = []
    before: Shown | None = None
    for at, shown in enumerate(streams.values()):
        shared = _shared(before, shown)
        name = f"rollout, stream {at}" if at else "rollout"
        own = _history_track(name, shown.cut(shared, len(shown)), report)
        tracks.append(replace(own, parent=at - 1, shared=shared, roles=() if at else report.roles))
        before = shown
    tracks.append(_history_track("training row", row, report, report.row.mask))
    pool = _Pool()
    contrasts: list[Contrast] = []
    links: dict[tuple[int, View], str] = {}
    for one in report.steps:
        for view in (View.PRODUCTION, View.TRAINING):
            compared = one.compare(View.ROLLOUT, view)
            if compared is not None and not compared.equal:
                links[one.index, view] = f"diff={len(contrasts)}"
                contrasts.append(_side_by_side(report, one, compared, places[one.branch], len(tracks), pool))
    shown_first = [link for (index, _), link in links.items() if index == step] or list(links.values())
    if contrasts:
        tracks.append(_history_track("", pool.shown(), report))
    return Document(
        title,
        "tokentrace audit --on",
        template_name(report.tokenizer),
        summary=report.sentences(),
        cards=_cards(report),
        notes=report.notes,
        tables=[_steps(report, links)] if report.steps else [],
        tracks=tracks,
        contrasts=contrasts,
        start=shown_first[0] if shown_first else "track=0",
    )


class _Pool:
    """Tokens that production shows instead of the rollout's, each stretch of them once."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.messages: list[int] = []
        self.fields: list[str] = []
        self._known: dict[tuple[Any, ...], int] = {}

    def place(self, run: DifferenceSide) -> int:
        """Where the tokens of one side of a difference are."""
        whose = tuple((part.start - run.start, part.message, part.field) for part in run.parts)
        start = self._known.setdefault((run.ids, whose), len(self.ids))
        if start == len(self.ids):
            self.ids += run.ids
            for part in run.parts:
                self.messages += [part.message] * len(part)
                self.fields += [part.field] * len(part)
        return start

    def shown(self) -> Shown:
        return Shown(np.array(self.ids, np.int32), np.array(self.messages, np.int32), np.array(self.fields, object), 0)


def _shared(before: Shown | None, shown: Shown) -> int:
    """How many tokens a stream has in common with the one before it."""
    if before is None:
        return 0
    columns = ((one.ids, one.messages, one.fields) for one in (before, shown))
    return min(common_prefix(one, other) for one, other in zip(*columns, strict=True))


def _history_track(name: str, shown: Shown, report: HistoryReport, mask: Any = None) -> Track:
    hues = np.zeros(len(shown), np.uint8)
    for start, stop, message, field in shown.parts(0, len(shown)):
        hues[start:stop] = hue_of(report.roles[message] if message >= 0 else None, field)
    columns = token_columns(report.tokenizer, shown.ids)
    return Track(name, shown.ids, hues, shown.messages, **columns, fields=shown.fields, mask=mask, roles=report.roles)


def _side_by_side(
    report: HistoryReport, step: Step, compared: Comparison, base: int, row: int, pool: _Pool
) -> Contrast:
    """What one view has otherwise than the rollout at a step. `row` is the track of the training row."""
    left = compared.left is View.ROLLOUT
    hunks = []
    for found in compared.differences:
        ours, theirs = (found.left, found.right) if left else (found.right, found.left)
        start = pool.place(theirs) if not left else theirs.start
        hunks.append(Hunk(ours.start, ours.stop, start, start + len(theirs)))
    return Contrast(
        f"step {step.index}: {compared.left} → {compared.right}",
        base,
        len(step.rollout),
        row - 1 if left else row,
        hunks,
        (str(compared.left), str(compared.right)),
        flipped=not left,
        about=f"{report.place(step)}: {_changed(compared)} tokens",
    )


def _cards(report: HistoryReport) -> list[Card]:
    total = len(report.steps)
    cards = [Card("Steps", str(total), counted(len(report.breaks), "break") if report.breaks else "no breaks")]
    for left, right in PAIRS:
        differ = len(report.differing(left, right))
        name = f"{str(left).capitalize()} and {right}"
        cards.append(
            Card(name, "differ", f"at {differ} of {total} steps", "bad")
            if differ
            else Card(name, "equal", "at every step", "good")
        )
    return cards
