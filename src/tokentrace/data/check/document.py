"""Views of a check: a verdict, the outcomes of rows and their causes, and the places where they differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import RenderableType
from rich.text import Text

from ...diagnose.break_document import Differences
from ...show.document import Card, Cell, Document, Table
from ...show.terminal import TONES, counts_view, flat, layout, plain
from ...tokens.visible import counted, visible
from .deviations import Deviation
from .report import CheckedRow, CheckReport, Outcome

_TONE: Final = {Outcome.SAME: "good", Outcome.CUT: "poor", Outcome.UNCHECKED: "poor"}
"""How an outcome looks; the others are bad."""
_REASONS: Final = 20
"""Reasons that are listed."""
_PLACES: Final = 3
"""Differences that are shown of a row in a terminal."""


def _tables(report: CheckReport) -> list[Table]:
    """The counts, those that there are."""
    outcomes = [(one, report.outcomes[one]) for one in Outcome if report.outcomes[one]]
    reasons = [[why, f"{n:,}"] for why, n in report.reasons.most_common(_REASONS)]
    if len(report.reasons) > _REASONS:
        reasons.append([f"and {len(report.reasons) - _REASONS:,} more reasons", ""])
    tables = [
        Table(
            "Outcomes",
            ["outcome", "rows", ""],
            [[_outcome(one), f"{n:,}", f"{100 * n / report.rows:.1f} %"] for one, n in outcomes],
        ),
        Table("Why", ["", "rows"], [[str(why), f"{n:,}"] for why, n in report.causes.most_common()]),
        Table(
            "Masks",
            ["role", "part", "mask", "tokens", "turns", "rows"],
            [
                [role, part, _MASK[trained], f"{count.tokens:,}", f"{count.messages:,}", f"{count.rows:,}"]
                for (role, part, trained), count in report.ranked_masks()
            ],
            words=3,
        ),
        Table("Bad, unchecked, and other remarks", ["", "rows"], reasons),
    ]
    return [table for table in tables if table.rows]


_MASK: Final = {True: "trained, and should not be", False: "not trained, and should be"}


def _outcome(outcome: Outcome) -> Cell:
    return Cell(str(outcome), _TONE.get(outcome, "bad"))


def _examples(report: CheckReport) -> Sequence[CheckedRow]:
    """A few rows of each outcome that is not as it should be."""
    outcomes = [one for one in Outcome if one not in (Outcome.SAME, Outcome.UNCHECKED)]
    return [row for one in outcomes for row in report.examples.get(one, ())]


# -- for terminals


def text_view(report: CheckReport) -> Text:
    """A report for a terminal. Tokens are parted by ``│``; what differs stands in ``⟦⟧``."""
    return layout(*_parts(report))


plain_view = plain(text_view)


def _parts(report: CheckReport) -> Iterator[RenderableType]:
    more = [Text(f"  {visible(found)}", "yellow") for found in report.findings]
    more.append(Text(f"  {_totals(report)}", "dim"))
    if report.stopped:
        more.append(Text(f"  stopped after {counted(report.rows, 'row')}, as the limit says", "yellow"))
    fine = report.rows > 0 and report.clean
    yield from counts_view(report.verdict, fine, report.differing > 0, more, _tables(report))
    for row in _examples(report):
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


def _example(row: CheckedRow) -> Iterator[Text]:
    line = f", line {row.line}" if row.line is not None and row.line != row.row else ""
    head = Text(f"\n{visible(row.source)}, row {row.row}{line}: ", "bold")
    yield head.append(str(row.outcome), f"bold {TONES[_outcome(row.outcome).tone]}")
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


# -- for browsers


def check_document(report: CheckReport) -> Document:
    """A check on a page: the same tables, and the rows that differ."""
    differences = Differences()
    rows: list[list[str | Cell]] = []
    for row in _examples(report):
        name = f"{row.source}, row {row.row}"
        links = []
        for found in row.deviations:
            lead, expected, other, rest = (
                [(-1, text) for text in texts] for texts in (found.lead, found.expected, found.found, found.rest)
            )
            parts = [(lead, None), (expected, other), (rest, None)]
            names = ("expected", "found")
            links.append(differences.add_parts(f"{name}: {found.cause}", parts, names, found.detail))
        said = row.reason or "; ".join(map(str, (*row.deviations, *row.mask)))
        rows.append([Cell(name, link=links[0] if links else ""), _outcome(row.outcome), said])
    differing = Table("Rows that differ", ["row", "outcome", "what"], rows, "A few of each outcome.", words=3)
    cards = [Card("Rows", f"{report.rows:,}", "clean" if report.clean else "", "good" if report.clean else "")]
    if report.differing:
        cards.append(Card("Differ", f"{report.differing:,}", f"of {counted(report.rows, 'row')}", "bad"))
    wanted = [f"{n:,} expected" if report.compared else "" for n in (report.expected_tokens, report.expected_trained)]
    cards += [
        Card("Tokens", f"{report.tokens:,}", wanted[0]),
        Card("Trained", f"{report.trained:,}" if report.masks else "–", wanted[1]),
        Card("Padding", f"{report.padding:,}", "taken off"),
    ]
    return Document(
        "Rows against their template",
        "tokentrace check",
        summary=[report.verdict, *report.findings, *report.mask_words()],
        cards=cards,
        tables=[*_tables(report), *([differing] if rows else ())],
        **differences.content(),
    )
