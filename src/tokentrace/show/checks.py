"""The view of a check: a verdict, the outcomes of rows and their causes, and the places where they differ."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..data.check.deviations import Deviation
from ..data.check.report import CheckedRow, CheckReport, Outcome
from ..tokens.visible import counted, visible
from .terminal import flat, laid_out, plain_lines

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


def text_view(report: CheckReport) -> Text:
    """A report for a terminal. Tokens are parted by ``│``; what differs stands in ``⟦⟧``."""
    return laid_out(*_parts(report))


def plain_view(report: CheckReport) -> str:
    """The same without colours."""
    return plain_lines(text_view(report))


def _parts(report: CheckReport) -> Iterator[RenderableType]:
    fine = report.rows and report.clean
    tone = "green" if fine else "red" if report.differing else "yellow"
    yield Text(f"{'✓' if fine else '✗' if report.differing else '•'} {report.verdict}", f"bold {tone}")
    for found in report.findings:
        yield Text(f"  {visible(found)}", "yellow")
    yield Text(f"  {_totals(report)}", "dim")
    if report.stopped:
        yield Text(f"  stopped after {counted(report.rows, 'row')}, as the limit says", "yellow")
    if not report.rows:
        return
    yield Text()
    yield _outcomes(report)
    if report.causes:
        yield Text()
        yield word_table(["why"], ["rows"], [(str(why), f"{rows:,}") for why, rows in report.causes.most_common()])
    if report.mask:
        yield Text()
        yield _masks(report)
    if report.reasons:
        yield Text("\nbad, unchecked, and what else is to be known", "bold")
        for reason, count in report.reasons.most_common(_REASONS):
            yield Text(f"  {count:>6,}  {visible(reason)}")
        if len(report.reasons) > _REASONS:
            yield Text(f"          and {len(report.reasons) - _REASONS:,} more reasons", "dim")
    for outcome, examples in sorted(report.examples.items(), key=lambda item: list(Outcome).index(item[0])):
        for row in examples if outcome not in (Outcome.SAME, Outcome.UNCHECKED) else ():
            yield from _example(row)


def _totals(report: CheckReport) -> str:
    said = [counted(report.tokens)]
    if report.compared:
        said.append(f"{report.expected_tokens:,} expected of {counted(report.compared, 'row')}")
    if report.masks:
        said.append(f"{report.trained:,} trained")
        if report.compared:
            said.append(f"{report.expected_trained:,} to be trained")
    else:
        said.append("no masks")
    if report.padding:
        said.append(f"{report.padding:,} of padding taken off")
    return " · ".join(said)


def _outcomes(report: CheckReport) -> Table:
    occurring = [one for one in Outcome if report.outcomes[one]]
    rows = [
        (str(one), f"{report.outcomes[one]:,}", f"{100 * report.outcomes[one] / report.rows:.1f} %")
        for one in occurring
    ]
    return word_table(["outcome"], ["rows", ""], rows, [COLOURS[one] for one in occurring])


def _masks(report: CheckReport) -> Table:
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
    return word_table(["role", "part", "mask"], ["tokens", "turns", "rows"], rows)


def word_table(
    words: Sequence[str], numbers: Sequence[str], rows: Sequence[Sequence[str]], tones: Sequence[str] = ()
) -> Table:
    """Columns of words, then columns of numbers."""
    table = Table(box=None, padding=(0, 0, 0, 2), header_style="bold")
    for head in words:
        table.add_column(head)
    for head in numbers:
        table.add_column(head, justify="right")
    for cells, tone in itertools.zip_longest(rows, tones, fillvalue=""):
        table.add_row(*cells, style=tone)
    return table


def _example(row: CheckedRow) -> Iterator[Text]:
    line = f", line {row.line}" if row.line is not None and row.line != row.row else ""
    head = Text(f"\n{visible(row.source)}, row {row.row}{line}: ", "bold")
    yield head.append(str(row.outcome), f"bold {COLOURS[row.outcome]}")
    if row.reason is not None:
        yield Text(f"  {visible(row.reason)}")
    for found in row.deviations[:_PLACES]:
        yield Text(f"  {flat(str(found))}")
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
