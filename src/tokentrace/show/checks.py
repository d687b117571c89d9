"""The view of a check: a verdict, what rows came to and why, and the places where they differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from ..data.check.deviations import Deviation
from ..data.check.report import CheckedRow, CheckReport, Outcome
from ..tokens.visible import visible

COLOURS: Final = {
    Outcome.SAME: "green",
    Outcome.IDS: "red",
    Outcome.MASK: "red",
    Outcome.BOTH: "red",
    Outcome.CUT: "yellow",
    Outcome.UNCHECKED: "yellow",
    Outcome.BAD: "magenta",
}
_REASONS: Final = 8
"""Reasons that are listed."""
_PLACES: Final = 3
"""Differences that are shown of a row."""


def text_view(report: CheckReport) -> RenderableType:
    """A report for a terminal."""
    return Group(*_lines(report))


def plain_view(report: CheckReport) -> str:
    """The same without colours. Tokens are parted by ``│``; what differs stands in ``⟦⟧``."""
    return "\n".join(line.plain.rstrip() for line in _lines(report))


def _lines(report: CheckReport) -> Iterator[Text]:
    tone = "green" if report.clean else "red" if report.differing else "yellow"
    yield Text(f"{'✓' if report.clean else '✗' if report.differing else '•'} {report.verdict}", f"bold {tone}")
    for found in report.findings:
        yield Text(f"  {visible(found)}", "yellow")
    yield Text(f"  {_totals(report)}", "dim")
    if report.stopped:
        yield Text(f"  only the first {report.rows:,} rows were looked at", "yellow")
    if report.rows:
        yield from _outcomes(report)
        yield from _causes(report)
        yield from _masks(report)
        yield from _reasons(report)
        yield from _examples(report)


def _totals(report: CheckReport) -> str:
    said = [f"{report.tokens:,} tokens"]
    if report.compared:
        said.append(f"{report.expected_tokens:,} expected of {report.compared:,} rows")
    if report.masks:
        said.append(f"{report.trained:,} trained")
        if report.compared:
            said.append(f"{report.expected_trained:,} to be trained")
    else:
        said.append("no masks")
    if report.padding:
        said.append(f"{report.padding:,} of padding taken off")
    return " · ".join(said)


def _outcomes(report: CheckReport) -> Iterator[Text]:
    yield Text()
    rows = [
        (str(one), f"{report.outcomes[one]:,}", f"{100 * report.outcomes[one] / report.rows:.1f} %")
        for one in Outcome
        if report.outcomes[one]
    ]
    tones = [COLOURS[one] for one in Outcome if report.outcomes[one]]
    yield from _table(("outcome", "rows", ""), rows, tones)


def _causes(report: CheckReport) -> Iterator[Text]:
    if report.causes:
        yield Text()
        rows = [(str(cause), f"{count:,}") for cause, count in report.causes.most_common()]
        yield from _table(("why", "rows"), rows)


def _masks(report: CheckReport) -> Iterator[Text]:
    if not report.mask:
        return
    yield Text()
    ranked = sorted(report.mask.items(), key=lambda item: (-item[1].tokens, item[0]))
    rows = [
        (
            visible(role),
            part,
            "trained, and should not be" if trained else "not trained, and should be",
            f"{count.tokens:,}",
            f"{count.messages:,}",
            f"{count.rows:,}",
        )
        for (role, part, trained), count in ranked
    ]
    yield from _table(("role", "part", "mask", "tokens", "turns", "rows"), rows, words=3)


def _reasons(report: CheckReport) -> Iterator[Text]:
    if report.reasons:
        yield Text()
        yield Text("bad, unchecked, and what else is to be known", "bold")
        for reason, count in report.reasons.most_common(_REASONS):
            yield Text(f"  {count:>6,}  {visible(reason)}")
        if len(report.reasons) > _REASONS:
            yield Text(f"          and {len(report.reasons) - _REASONS:,} more reasons", "dim")


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], tones: Iterable[str] | None = None, *, words: int = 1
) -> Iterator[Text]:
    """Columns that are as wide as they have to be; all but the first `words` of them are numbers."""
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if at < words else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded)

    yield Text(f"  {line(head)}", "bold")
    styles = list(tones) if tones is not None else [""] * len(rows)
    for cells, style in zip(rows, styles, strict=True):
        yield Text(f"  {line(cells)}", style)


def _examples(report: CheckReport) -> Iterator[Text]:
    for outcome in Outcome:
        for row in report.examples.get(outcome, ()) if outcome not in (Outcome.SAME, Outcome.UNCHECKED) else ():
            yield Text()
            yield from _example(row)


def _example(row: CheckedRow) -> Iterator[Text]:
    line = f", line {row.line}" if row.line is not None and row.line != row.row else ""
    head = Text(f"{visible(row.source)}, row {row.row}{line}: ", "bold")
    yield head.append(str(row.outcome), f"bold {COLOURS[row.outcome]}")
    if row.reason is not None:
        yield Text(f"  {visible(row.reason)}")
    for found in row.deviations[:_PLACES]:
        yield Text(f"  {visible(str(found))}".replace("\n", "⏎"))
        yield from _sides(found)
    if len(row.deviations) > _PLACES:
        yield Text(f"  and {len(row.deviations) - _PLACES} more places", "dim")
    if row.shifted:
        yield Text(f"  the mask is moved by one token to the {'right' if row.shifted > 0 else 'left'}")
    for wrong in row.mask:
        yield Text(f"  token {wrong.position:,}: {wrong}")


def _sides(found: Deviation) -> Iterator[Text]:
    for name, tokens, style in (("expected", found.expected, "green"), ("found", found.found, "red")):
        line = Text(f"    {name:<9} ", "dim")
        line.append("│".join((*found.lead, "")))
        line.append(f"⟦{'│'.join(tokens)}⟧", style)
        yield line.append("│".join(("", *found.rest)))
