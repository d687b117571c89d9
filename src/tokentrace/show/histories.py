"""The views of a history report: for terminals, for browsers, for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..compare.histories.differences import PAIRS, Comparison, Difference, Run, Shown, View
from ..tokens.tokenizer import Tokenizer
from ..tokens.visible import counted, listed, visible
from .page import Card, Row, Stretch, Token, make_fragment, make_page
from .pieces import kind_of, texts_of
from .terminal import flat, laid_out, plain_lines

if TYPE_CHECKING:
    from ..compare.histories.differences import Step
    from ..compare.histories.report import HistoryReport

PAGE_LIMIT: Final = 6_000
FRAGMENT_LIMIT: Final = 1_500
"""Tokens shown of one step before a view stops and says so."""

_AROUND: Final = 24
"""Equal tokens shown before and after a difference."""
_PART: Final = 48
"""Tokens shown of one part of a difference in a terminal."""


@dataclass(frozen=True, slots=True)
class Contrast:
    """A comparison that is worth showing: who holds its left side, who its right."""

    left: tuple[View, ...]
    right: tuple[View, ...]
    compared: Comparison


def contrasts(step: Step) -> list[Contrast]:
    """The fewest comparisons that tell all that differs at a step; views that are equal stand together."""
    pairs = {(found.left, found.right): found for found in step.comparisons}
    equal = {pair for pair, found in pairs.items() if found.equal}
    production, rollout, training = View
    if not [pair for pair in pairs if pair not in equal]:
        return []
    if (production, rollout) in equal:
        return [Contrast((production, rollout), (training,), pairs[production, training])]
    if (production, training) in equal:
        return [Contrast((production, training), (rollout,), pairs[production, rollout])]
    if (rollout, training) in equal:
        return [Contrast((production,), (rollout, training), pairs[production, rollout])]
    return [Contrast((left,), (right,), pairs[left, right]) for left, right in pairs if rollout in (left, right)]


# -- for programs


def json_view(report: HistoryReport) -> dict[str, Any]:
    """A report as plain data. See `HistoryReport.to_json`."""
    return {
        "equal": report.equal,
        "summary": report.sentences(),
        "settings": dict(report.settings),
        "roles": list(report.roles),
        "branches": [ids.tolist() for ids in report.branches],
        "row": report.row.token_ids,
        "steps": [_json_step(step) for step in report.steps],
        "findings": [
            {
                "views": [str(view) for view in found.views],
                "agrees": [str(view) for view in found.agrees],
                "verb": str(found.verb),
                "what": found.what,
                "in": "turn" if found.in_turn else "prompt",
                "once": found.once,
                "messages": list(found.messages),
                "tokens": found.tokens,
                "scaffold": found.scaffold,
                "steps": list(found.steps),
                "text": str(found),
            }
            for found in report.findings
        ],
        "notes": list(report.notes),
    }


def _json_step(step: Step) -> dict[str, Any]:
    refusal = step.refusal
    shown = {view: step.shown(view) for view in View}
    return {
        "step": step.index,
        "message": step.message,
        "equal": step.equal,
        "branch": step.branch,
        "break": None if refusal is None else {"reason": str(refusal.reason), "detail": refusal.detail},
        "prompt_tokens": {str(view): None if found is None else found.prompt for view, found in shown.items()},
        "tokens": {str(view): None if found is None else len(found) for view, found in shown.items()},
        "comparisons": [
            {
                "left": str(found.left),
                "right": str(found.right),
                "equal": found.equal,
                "first": found.first,
                "left_tokens": found.left_tokens,
                "right_tokens": found.right_tokens,
                "fields": found.lines(),
                "differences": [
                    {
                        "in": "turn" if difference.in_turn else "prompt",
                        "left": _json_run(difference.left),
                        "right": _json_run(difference.right),
                    }
                    for difference in found.differences
                ],
            }
            for found in step.comparisons
        ],
    }


def _json_run(run: Run) -> dict[str, Any]:
    parts = [asdict(part) for part in run.parts]
    return {"start": run.start, "stop": run.stop, "token_ids": list(run.ids), "text": run.text, "parts": parts}


# -- for terminals


def plain_view(report: HistoryReport, *, step: int | None = None) -> str:
    """A report as plain lines: a summary, a table of the steps, and what differs at each, or at one."""
    return plain_lines(text_view(report, step=step))


def text_view(report: HistoryReport, *, step: int | None = None) -> Text:
    """The same in colours."""
    return laid_out(*_parts(report, step))


def _parts(report: HistoryReport, only: int | None) -> Iterator[RenderableType]:
    if only is None:
        for sentence in report.sentences():
            yield Text.assemble(("• ", "dim"), (flat(sentence), "bold"))
        for note in report.notes:
            yield Text(f"note: {flat(note)}", "yellow")
        if report.steps:
            yield Text()
            yield _table(report)
    before: set[tuple[View, View, Run, Run]] = set()
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


def _table(report: HistoryReport) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("step", justify="right")
    table.add_column("asks for")
    for view in View:
        table.add_column(str(view), justify="right")
    for left, right in PAIRS:
        table.add_column(f"{left} → {right}")
    table.add_column("", style="yellow")
    for step in report.steps:
        deltas = [_delta(step.compare(*pair)) for pair in PAIRS]
        table.add_row(
            str(step.index),
            report.place(step),
            *_sizes(step),
            *(Text(delta, "dim" if delta == "=" else "red") for delta in deltas),
            f"break: {step.refusal.reason}" if step.refusal is not None else "",
        )
    return table


def _sizes(step: Step) -> list[str]:
    return ["none" if (found := step.shown(view)) is None else f"{len(found):,}" for view in View]


def _delta(compared: Comparison | None) -> str:
    if compared is None:
        return "?"
    return "=" if compared.equal else f"−{compared.left_tokens:,} +{compared.right_tokens:,}"


def _contrast_head(report: HistoryReport, step: Step, contrast: Contrast, known: int) -> Text:
    return Text.assemble(
        (f"step {step.index}, {report.place(step)}: ", "bold"),
        (f"− {listed(contrast.left)}", "red"),
        "   ",
        (f"+ {listed(contrast.right)}", "green"),
        (f"   and {known} as at the step before" if known else "", "dim"),
    )


def _differences(report: HistoryReport, fresh: Sequence[Difference]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(justify="right", min_width=9)
    for _ in ("whose", "field", "in the turn"):
        grid.add_column(style="dim", min_width=4)
    for difference in fresh:
        for sign, run, style in (("−", difference.left, "red"), ("+", difference.right, "green")):
            texts = _texts(report.tokenizer, np.asarray(run.ids, np.int32))
            for part in run.parts:
                shown = texts[part.start - run.start : part.stop - run.start]
                said = "│".join(repr(visible(text))[1:-1] for text in shown[:_PART])
                more = f" … {len(shown) - _PART} more" if len(shown) > _PART else ""
                who = "-" if part.role is None else f"{part.message} {part.role}"
                grid.add_row(
                    Text(f"{part.start} {sign}", style),
                    Text(flat(who)),
                    Text(flat(part.field)),
                    "turn" if difference.in_turn else "",
                    Text(said + more, style),
                )
    return grid


def _texts(tokenizer: Tokenizer, ids: Any) -> list[str]:
    return texts_of(ids, lambda chosen: tokenizer.decode(ids[chosen].tolist()))


# -- for browsers


def html_fragment(report: HistoryReport, *, limit: int = FRAGMENT_LIMIT) -> str:
    """A report for a notebook's cell: styles inline, no scripts."""
    return make_fragment("histories_fragment.html", **_contents(report, limit, None))


def html_page(
    report: HistoryReport, title: str = "Histories", *, step: int | None = None, limit: int = PAGE_LIMIT
) -> str:
    """A report as a page of its own: no link to anything outside, every text escaped. `step` is shown unfolded."""
    return make_page("histories.html", title, "tokentrace histories", **_contents(report, limit, step))


def _contents(report: HistoryReport, limit: int, step: int | None) -> dict[str, Any]:
    first = next((found.index for found in report.steps if not found.equal), None) if step is None else step
    return {
        "report": report,
        "cards": _cards(report),
        "views": [str(view) for view in View],
        "pairs": PAIRS,
        "steps": [
            {
                "step": found,
                "place": report.place(found),
                "sizes": _sizes(found),
                "compared": [found.compare(*pair) for pair in PAIRS],
                "unfolded": found.index == first,
                "held": counted(len(found.rollout)),
                "contrasts": [_contrast(report, found, contrast, limit) for contrast in contrasts(found)],
            }
            for found in report.steps
        ],
    }


def _cards(report: HistoryReport) -> list[Card]:
    total = len(report.steps)
    cards = [Card("Steps", str(total), counted(len(report.breaks), "break") if report.breaks else "no breaks")]
    for left, right in PAIRS:
        differ = len(report.differing(left, right))
        name = f"{str(left).capitalize()} and {right}"
        cards.append(
            Card(name, "differ", f"at {differ} of {total} steps", "differs")
            if differ
            else Card(name, "equal", "at every step", "same")
        )
    return cards


def _contrast(report: HistoryReport, step: Step, contrast: Contrast, limit: int) -> dict[str, Any]:
    compared = contrast.compared
    left, right = step.shown(compared.left), step.shown(compared.right)
    assert left is not None and right is not None  # noqa: PT018 they were compared
    rows, cut = _merged(report, compared, left, right, limit)
    return {
        "left": listed(contrast.left),
        "right": listed(contrast.right),
        "band": _band(compared, len(left)),
        "total": len(left) + compared.right_tokens,
        "rows": rows,
        "cut": cut,
        "fields": compared.lines(),
    }


def _band(compared: Comparison, left: int) -> list[tuple[int, int, str]]:
    """Both sides as one band of (start, width, class): what they share, what only the left has, what only the right."""
    rects, at, x = [], 0, 0
    for found in compared.differences:
        for width, name in ((found.left.start - at, ""), (len(found.left), "out"), (len(found.right), "in")):
            if width:
                rects.append((x, width, name))
                x += width
        at = found.left.stop
    return [*rects, (x, left - at, "")]


class _Cut(NamedTuple):
    """Tokens `start` to `stop` of one side: shown inside of an element ``del`` or ``ins``, as they are, or left out."""

    how: str
    side: Shown
    start: int
    stop: int


def _merged(
    report: HistoryReport, compared: Comparison, left: Shown, right: Shown, limit: int
) -> tuple[list[Row], str]:
    """Both sides in one text, message by message, equal tokens far from a difference left out; and what to say then."""
    rows: list[Row] = []
    used = 0
    control = report.tokenizer.vocabulary.is_control

    def row(message: int) -> Row:
        if not rows or rows[-1].message != message:
            rows.append(Row(message, "template" if message < 0 else report.roles[message]))
        return rows[-1]

    for how, side, start, end in _cuts(compared, left, right):
        if how == "skip":
            last = rows[-1] if rows else row(int(side.messages[start]))
            last.parts.append(counted(end - start, "equal token"))
            continue
        stop = min(end, start + limit - used)
        ids = side.ids[start:stop]
        tokens = list(map(Token, _texts(report.tokenizer, ids), control[ids].tolist()))
        for first, past, message, name in side.parts(start, stop):
            role = report.roles[message] if message >= 0 else None
            whose = "no message" if role is None else f"message {message} ({role})"
            title = f"{whose} · {name} · tokens {first}–{past - 1}"
            shown = tokens[first - start : past - start]
            row(message).parts.append(Stretch(kind_of(role, name), first, shown, title=title, tag=how))
        used += stop - start
        if stop < end:
            return rows, f"Showing the first {limit:,} tokens. The table and the band above cover all of them."
    return rows, ""


def _cuts(compared: Comparison, left: Shown, right: Shown) -> Iterator[_Cut]:
    at = 0
    for number, found in enumerate(compared.differences):
        yield from _shared(left, at, found.left.start, before=number > 0, after=True)
        if len(found.left):
            yield _Cut("del", left, found.left.start, found.left.stop)
        if len(found.right):
            yield _Cut("ins", right, found.right.start, found.right.stop)
        at = found.left.stop
    yield from _shared(left, at, len(left), before=True, after=False)


def _shared(side: Shown, start: int, stop: int, *, before: bool, after: bool) -> Iterator[_Cut]:
    """Equal tokens: those next to a difference, and how many were left out."""
    head = start + _AROUND if before else start
    tail = stop - _AROUND if after else stop
    while after and head < tail and stop - tail < 2 * _AROUND and side.messages[tail - 1] == side.messages[tail]:
        tail -= 1  # back to where the message begins, if that is near
    if tail - head <= 8:
        yield _Cut("", side, start, stop)
        return
    yield _Cut("", side, start, head)
    yield _Cut("skip", side, head, tail)
    yield _Cut("", side, tail, stop)
