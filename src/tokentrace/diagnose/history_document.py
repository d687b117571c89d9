"""The document of three histories: the steps, the rollout's streams, the training row, and what differs from them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..show.alignment import Hunk
from ..show.document import Cell, Contrast, Document, Table, Track, token_columns
from ..show.results import hue_of, template_name
from ..show.visible import counted
from .histories import HistoryReport
from .history_differences import PAIRS, Comparison, DifferenceSide, Step, View, ViewTokens


def history_document(report: HistoryReport, only: int | None = None) -> Document:
    """Return the document of a report; with `only`, the differences of one step.

    A step is the beginning of a stream. The tokens that production has instead are stored once for all steps.
    """
    streams = list({step.branch: step.rollout for step in report.steps}.values())
    tracks = [_track(f"rollout, stream {at}" if at else "rollout", one, report) for at, one in enumerate(streams)]
    row = ViewTokens(report.row.ids, report.row.messages, np.array(report.row.fields, object))
    tracks.append(_track("training row", row, report, report.row.mask))
    pool = _Pool()
    contrasts: list[Contrast] = []
    links: dict[tuple[int, View], str] = {}
    for step in report.steps:
        for view in (View.PRODUCTION, View.TRAINING):
            comparison = step.compare(View.ROLLOUT, view)
            if comparison is not None and not comparison.equal and only in (None, step.index):
                links[step.index, view] = f"diff={len(contrasts)}"
                contrasts.append(_contrast(step, comparison, view, len(streams), pool))
    if contrasts:
        tracks.append(_track("", pool.tokens(), report))
    summary = report.sentences()
    if only is not None:
        words = f"step {only}: all hold the same {counted(len(report.steps[only].rollout))}"
        summary = [words] if report.steps[only].equal else []
    return Document(
        "Histories",
        "tokentrace audit --on",
        template_name(report.tokenizer),
        summary=summary,
        notes=report.notes if only is None else [],
        tables=[_step_table(report, links)] if report.steps and only is None else [],
        tracks=tracks,
        contrasts=contrasts,
        start=next(iter(links.values()), "track=0"),
    )


def _contrast(step: Step, comparison: Comparison, view: View, row: int, pool: _Pool) -> Contrast:
    """Contrast the rollout at a step with another view: training is a track, production is in the pool."""
    rollout_left = comparison.left is View.ROLLOUT
    hunks = []
    for one in comparison.differences:
        rollout, other = (one.left, one.right) if rollout_left else (one.right, one.left)
        start = other.start if view is View.TRAINING else pool.add(other)
        hunks.append(Hunk(rollout.start, rollout.stop, start, start + len(other)))
    return Contrast(
        f"step {step.index}, {step.place}: rollout → {view}",
        step.branch,
        len(step.rollout),
        row if view is View.TRAINING else row + 1,
        hunks,
        (str(View.ROLLOUT), str(view)),
    )


class _Pool:
    """Tokens of production that the rollout lacks, each stretch once."""

    def __init__(self) -> None:
        self._places: dict[tuple[Any, ...], int] = {}
        self._sides: list[DifferenceSide] = []
        self._size = 0

    def add(self, side: DifferenceSide) -> int:
        """Return where the tokens of a side are."""
        key = (side.ids, side.parts)
        if key not in self._places:
            self._places[key] = self._size
            self._sides.append(side)
            self._size += len(side)
        return self._places[key]

    def tokens(self) -> ViewTokens:
        ids = [index for side in self._sides for index in side.ids]
        parts = [part for side in self._sides for part in side.parts]
        messages = [part.message for part in parts for _ in range(part.tokens)]
        fields = [part.field for part in parts for _ in range(part.tokens)]
        return ViewTokens(np.array(ids, np.int32), np.array(messages, np.int32), np.array(fields, object))


def _track(name: str, tokens: ViewTokens, report: HistoryReport, mask: Any = None) -> Track:
    owners = [report.roles[message] if message >= 0 else None for message in tokens.messages.tolist()]
    hues = np.array([hue_of(*pair) for pair in zip(owners, tokens.fields.tolist(), strict=True)], np.uint8)
    columns = token_columns(report.tokenizer, tokens.ids)
    fields = tokens.fields.tolist()
    return Track(name, tokens.ids, hues, tokens.messages, **columns, fields=fields, mask=mask, roles=report.roles)


def _step_table(report: HistoryReport, links: dict[tuple[int, View], str]) -> Table:
    """Count the tokens of each view at each step, and those that differ."""
    rows: list[list[str | Cell]] = []
    for step in report.steps:
        sizes = ["none" if (tokens := step.view(view)) is None else f"{len(tokens):,}" for view in View]
        row: list[str | Cell] = [str(step.index), step.place, *sizes]
        for left, right in PAIRS:
            comparison = step.compare(left, right)
            other = right if left is View.ROLLOUT else left
            link = links.get((step.index, other), "") if View.ROLLOUT in (left, right) else ""
            equal = comparison is not None and comparison.equal
            row.append(Cell("=" if equal else _counts(comparison), "dim" if equal else "bad", link=link))
        rows.append([*row, Cell("" if step.refusal is None else f"break: {step.refusal.reason}", "poor")])
    head = ["step", "asks for", *map(str, View), *(f"{left} → {right}" for left, right in PAIRS), ""]
    return Table("Steps", head, rows, words=2)


def _counts(comparison: Comparison | None) -> str:
    return "?" if comparison is None else f"−{comparison.left_tokens:,} +{comparison.right_tokens:,}"
