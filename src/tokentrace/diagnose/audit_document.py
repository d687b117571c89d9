"""Views of audits: a report for a terminal, a table of many, the same as Markdown, and a page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from ..show.document import HUES, Card, Cell, Contrasts, Document, Table, Track, token_columns
from ..show.terminal import TONES, flat, grid, layout, plain
from ..tokens.alignment import align
from ..tokens.visible import counted, listed, visible
from .appends import AppendBreak, AppendCell
from .audit_report import AppendFinding, AuditReport, grade
from .cases import Append, Said
from .readback import Writing
from .verdicts import USES, Grade, Use, Verdict

SIGNS: Final[Mapping[Grade | None, str]] = {Grade.HOLDS: "✓", Grade.PARTLY: "◐", Grade.FAILS: "✗", None: "−"}
_TONES: Final[Mapping[Grade | None, str]] = {
    Grade.HOLDS: "good",
    Grade.PARTLY: "poor",
    Grade.FAILS: "bad",
    None: "dim",
}
KEY: Final = "✓ holds   ◐ for some turns   ✗ for none   − refused by the template"
_MATRIX_KEY: Final = f"{KEY}   ( ) does not count: reasoning that the template neither writes nor asks for"


def text_view(reports: Sequence[AuditReport]) -> Text:
    """Audits for a terminal: one in full, several as a table with what goes wrong below."""
    return layout(*(_parts(reports[0]) if len(reports) == 1 else _many(reports)))


plain_view = plain(text_view)


# -- one


def _parts(report: AuditReport) -> Iterator[RenderableType]:
    head = Text(visible(report.name), "bold")
    told = [f"family {report.family}", f"template {report.digest[:12]}"]
    told += [f"{name}={value!r}" for name, value in report.settings.items()]
    yield head.append(f"   {visible(' · '.join(told))}", "dim")
    yield Text(f"\n{flat(report.conclusion.text)}", "bold")
    for command in report.conclusion.commands:
        yield Text(f"  $ {flat(command)}", "cyan")
    yield Text()
    for one in report.verdicts:
        tone = TONES[_TONES[one.grade]]
        line = Text(f"{SIGNS[one.grade]} ", f"bold {tone}").append(f"{USES[one.use]}: ", "bold")
        yield line.append(str(one.grade), tone).append(f"   {one.use}", "dim")
        for words in one.against:
            yield Text(f"    {flat(words)}")
        if one.holds_with:
            yield Text(f"    holds with {flat(' or '.join(one.holds_with))}", "green")
        if one.grade is not Grade.HOLDS:
            yield Text(f"    tokentrace: {flat(one.remedy)}", "dim")
    matrix = _matrix(report)
    yield Text(f"\n{matrix.title}", "bold")
    yield grid(matrix, symbols=True)
    yield Text(f"  {matrix.about}", "dim")
    if report.findings:
        yield Text("\nWhat goes wrong", "bold")
    for number, found in enumerate(report.findings, 1):
        yield from _finding(number, found)
    yield Text("\nWhat else is known", "bold")
    for label, words in fact_rows(report):
        yield Text(f"  {label:<20} ", "dim").append(flat(words))
    for note in report.notes:
        yield Text(f"  note: {flat(note)}", "yellow")


COLUMNS: Final = {
    "content": (False, True, Said.PLAIN),
    "reasoning + content": (True, True, Said.PLAIN),
    "calls alone": (False, False, Said.PLAIN),
    "reasoning + calls": (True, False, Said.PLAIN),
    "spaces around content": (False, True, Said.SPACED),
    "reasoning in content": (False, True, Said.INLINE),
}
"""What a turn has beside its calls: reasoning, content, and how that is given."""


def _sign(known: Grade | None, counts: bool = True) -> Cell:
    """A grade as a cell; in brackets where it does not count."""
    return Cell(SIGNS[known], _TONES[known]) if counts else Cell(f"({SIGNS[known]})", "dim")


def matrix_rows(report: AuditReport) -> Iterator[tuple[str, list[Cell]]]:
    """For each append the grade of each kind of turn; nothing where there are no such turns."""
    counting = {cell.turn for cell in report.judged}
    for append in Append:
        signs = []
        for kind in COLUMNS.values():
            cells = [
                cell
                for cell in report.cells
                if cell.append is append and (cell.turn.reasoning, cell.turn.content, cell.turn.said) == kind
                if cell.turn.arguments != "JSON text"
            ]
            counts = any(cell.turn in counting for cell in cells)
            signs.append(_sign(grade(cells), counts) if cells else Cell(""))
        yield str(append), signs


def _matrix(report: AuditReport) -> Table:
    rows: list[list[str | Cell]] = [[append, *signs] for append, signs in matrix_rows(report)]
    return Table("What is appended, after which turn", ["", *COLUMNS], rows, _MATRIX_KEY)


def _finding(number: int, found: AppendFinding) -> Iterator[Text]:
    yield Text(f"  {number}. ", "bold").append(flat(found.why))
    for one in found.breaks:
        yield from (Text(f"     {words}") for words in _told(one))
    yield Text("     the smallest conversation that shows it:", "dim")
    for sign, role, said in conversation_lines(found.smallest):
        yield Text(f"     {sign} {role:<10} {said}", "green" if sign == "+" else "")


def _told(one: AppendBreak) -> Iterator[str]:
    blame = one.blame
    if blame is not None:
        yield f"line {blame.line}:  {flat(blame.source)}"
        if blame.condition:
            proof = "" if blame.proven else " (not proven to be the cause)"
            yield f"`{flat(blame.condition)}` is {'true, then false' if blame.before else 'false, then true'}{proof}"
        for line, name, before, after in blame.because:
            yield f"line {line} sets {name}: {before}, then {after}"
    for words in one.fields:
        yield flat(words)
    yield f"had  {one.had!r}"
    yield f"has  {one.has!r}"


def conversation_lines(cell: AppendCell) -> Iterator[tuple[str, str, str]]:
    """The messages of a cell, a line each; what is appended has a plus."""
    first = len(cell.messages) - len(cell.case.appended)
    for at, message in enumerate(cell.messages):
        said = []
        if message.get("reasoning_content"):
            said.append(f"reasoning {message['reasoning_content']!r}")
        content = message.get("content")
        if content:
            said.append(repr(content) if isinstance(content, str) else json.dumps(content))
        for one in message.get("tool_calls") or ():
            function = one["function"]
            given = function["arguments"]
            said.append(f"calls {function['name']}({given if isinstance(given, str) else json.dumps(given)})")
        yield "+" if at >= first else " ", str(message["role"]), flat(", ".join(said))


def fact_rows(report: AuditReport) -> Iterator[tuple[str, str]]:
    """What is known beside the matrix: a label and a sentence each."""
    stops = [
        f"{one.text} ({one.id}{', the head of the next turn' if one.is_next_head else ''}"
        f"{'' if one.from_template else ', from the configuration only'}{'' if one.trained else ', not trained'})"
        for one in report.stops.tokens
    ]
    end = "; the last turn of a row has none, unless final_stop adds it" if report.stops.untrained_end else ""
    yield "stop tokens", (", ".join(stops) or "none") + end
    prefill = report.prompting.prefill
    opened = ", which opens reasoning" if report.prompting.opens_reasoning else ""
    yield "prompt", f"{report.prompting.prompt!r}" + (f"; it prefills {prefill!r}{opened}" if prefill else "")
    forging = report.forging
    yield (
        "users can forge",
        f"{' '.join(forging.control) or 'nothing of the scaffold'} under plain rendering"
        + (f", and {forging.other:,} other control tokens" if forging.other else "")
        + "; nothing with tokentrace",
    )
    if forging.words:
        yield "looks in texts for", ", ".join(map(repr, forging.words))
    reading = report.reading
    rows = {"roles written": ("written", "rewritten"), "content altered": ("rewritten",)}
    for label, outcomes in {**rows, "roles dropped": ("dropped",), "roles refused": ("refused",)}.items():
        roles = [role for role, outcome in reading.roles.items() if outcome in outcomes]
        if roles:
            yield label, ", ".join(roles)
    forms = [f"{role}: {' or '.join(names) or 'none'}" for role, names in reading.content.items()]
    yield "content read as", "; ".join(forms)
    yield "arguments read as", " or ".join(reading.arguments) or "nothing: it writes no calls"
    yield "reasoning", f"{'written' if reading.reasoning else 'not written'}; inside content {reading.inline_reasoning}"
    writing = report.writing
    frame = "" if writing.reasoning is None else f"; reasoning in {writing.reasoning[0]} … {writing.reasoning[1]}"
    yield (
        "grammar",
        (writing.dialect or "of no known dialect") + (f": {_indented(writing)}" if writing.calls else "") + frame,
    )
    if writing.indent is not None:
        yield "", str(writing.indent)
    for note in writing.notes:
        yield "", note
    yield (
        "read back",
        f"{writing.tried} kinds of turns written and parsed; {counted(len(writing.unreadable), 'difference')}",
    )
    for loss in writing.unreadable:
        yield "", loss
    defaults = report.defaults
    yield "added by template", repr(defaults.system) if defaults.system else "nothing"
    for name, text in defaults.variables.items():
        yield f"  {name}", f"{text!r} unless it is given"
    itself = defaults.changes
    changes = [*([f"the date{itself.by}"] if itself.clock else []), *(["chance"] if itself.random else [])]
    yield "changes between runs", " and ".join(changes) or "no"
    for one in report.switches:
        changed = (
            "everything is refused"
            if one.cells is None
            else ", ".join(f"{verdict.use} {verdict.grade}" for verdict in one.verdicts)
        )
        yield f"with {one.name}", changed
    if report.without_effect:
        yield "has no effect", ", ".join(report.without_effect)
    cost = report.cost
    power = None if cost.growth is None else f"{cost.growth:.1f}"
    how = "linearly with messages" if power == "1.0" else f"with messages to the power of {power}"
    growth = "" if power is None else f"; cost grows {how}"
    yield (
        "cost",
        f"{counted(cost.lines, 'line')}; runs of the template: {cost.first_prompt} to the first prompt, "
        f"{cost.first_answer} to the first row, {cost.first_bridge} to the first bridge, "
        f"{cost.later_bridge} for each later one{growth}",
    )


def _indented(writing: Writing) -> str:
    """How calls are written, arguments with their indentation."""
    hole, indent = "⟨arguments⟩", writing.indent
    return writing.calls.replace(hole, f"{{⏎{'␣' * indent.width}⟨arguments⟩⏎}}") if indent else writing.calls


# -- many


def _overview(reports: Sequence[AuditReport]) -> Table:
    rows: list[list[str | Cell]] = [[report.name, *_grades(report)] for report in reports]
    return Table("All", ["", *Append, *Use], rows, KEY)


def _grades(report: AuditReport) -> list[Cell]:
    grades = [*(report.outcome(append) for append in Append), *(one.grade for one in report.verdicts)]
    return [_sign(known) for known in grades]


def _many(reports: Sequence[AuditReport]) -> Iterator[RenderableType]:
    yield grid(_overview(reports), symbols=True)
    yield Text(f"\n{KEY}", "dim")
    for report in reports:
        yield Text(f"\n{visible(report.name)}", "bold")
        yield Text(f"  {flat(report.conclusion.text)}")
        for found in report.findings:
            yield Text(f"  {flat(found.why)}")


def markdown(reports: Sequence[AuditReport]) -> str:
    """A table of many, and below it what goes wrong with each."""
    heads = _overview(reports).head
    lines = [f"| {' | '.join(map(str, heads))} |", f"| --- |{' :-: |' * (len(heads) - 1)}"]
    lines += [markdown_row(report) for report in reports]
    for report in reports:
        lines += ["", f"### {report.name}", "", *markdown_findings(report)]
    return "\n".join(lines) + "\n"


def markdown_row(report: AuditReport) -> str:
    """The row of a table of many."""
    return f"| {report.name} | {' | '.join(cell.text for cell in _grades(report))} |"


def markdown_findings(report: AuditReport) -> list[str]:
    """What goes wrong, a line each."""
    stops = " ".join(f"`{one.text}`" for one in report.stops.tokens if one.from_template)
    prefill = report.prompting.prefill
    known = f"Stops at {stops or 'no token'}" + (f"; the prompt prefills `{prefill!r}`" if prefill else "")
    unnamed = "in no known dialect" if report.reading.calls else "not written"
    known += f"; calls are {report.writing.dialect or unnamed}"
    known += "; holds the date of the day" if report.defaults.changes.clock else ""
    found = [f"- {_escaped(flat(one.why))}" for one in report.findings]
    return [f"{known}.", "", *(found or ["- Nothing goes wrong."])]


def _escaped(text: str) -> str:
    """Text in Markdown: nothing in it is markup, outside of what is set as code."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([<>*_\[\]|])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


# -- two


Compared = tuple[AuditReport, AuditReport, Sequence[tuple[str, str, str]]]
"""The one before, the one now, and what differs: what it is, before, and now."""


def differences_view(compared: Compared) -> Text:
    """What differs between two audits, for a terminal."""
    before, now, changed = compared
    told = f"{visible(before.name)} → {visible(now.name)}: "
    lines = [Text(told + (counted(len(changed), "difference") if changed else "nothing differs"), "bold")]
    verdicts = [
        f"{one.use}: {one.grade} → {other.grade}"
        for one, other in zip(before.verdicts, now.verdicts, strict=True)
        if one.grade is not other.grade
    ]
    if changed:
        lines += [Text(f"  {words}", "bold") for words in verdicts or ["all verdicts are the same"]]
    alike: dict[tuple[str, str], list[str]] = {}
    for what, old, new in changed:
        if not what.startswith("verdict on "):
            alike.setdefault((old, new), []).append(what)
    for (old, new), names in alike.items():
        lines += [Text(f"  {flat(what)}") for what in names]
        lines.append(Text(f"    − {flat(old) or 'nothing'}", "red"))
        lines.append(Text(f"    + {flat(new) or 'nothing'}", "green"))
    return layout(*lines)


plain_differences = plain(differences_view)


# -- a page


def audit_document(reports: Sequence[AuditReport]) -> Document:
    """Audits on a page: verdicts, the matrix, what goes wrong with the tokens of it, and what else is known."""
    differences = Contrasts()
    found = [_page_findings(report, differences) for report in reports]
    one, names = reports[0] if len(reports) == 1 else None, [report.name for report in reports]
    tables = [] if one is not None else [_overview(reports)]
    for report, rows in zip(reports, found, strict=True):
        named = "" if one is not None else f": {report.name}"
        verdicts = [_page_verdict(verdict) for verdict in report.verdicts]
        tables.append(Table(f"What it is safe for{named}", ["use", "", "why"], verdicts, words=3, code=True))
        matrix = _matrix(report)
        tables.append(replace(matrix, title=f"{matrix.title}{named}"))
        if rows:
            tables.append(Table(f"What goes wrong{named}", ["what", "shown by"], rows, words=2, code=True))
        facts = [list(row) for row in fact_rows(report)]
        tables.append(Table(f"What else is known{named}", ["", ""], facts, words=2))
    cards = [] if one is None else [Card(USES[v.use], str(v.grade), str(v.use), _TONES[v.grade]) for v in one.verdicts]
    return Document(
        f"Audit of {counted(len(names), 'template') if len(names) > 3 else listed(names)}",
        "tokentrace audit",
        lead="" if one is None else f"family {one.family} · template {one.digest[:12]}",
        summary=[
            report.conclusion.text if one is not None else f"{report.name}: {report.conclusion.text}"
            for report in reports
        ],
        cards=cards,
        notes=[note for report in reports for note in report.notes],
        tables=tables,
        **differences.content(),
    )


def _page_verdict(one: Verdict) -> list[str | Cell]:
    with_them = f" Holds with {' or '.join(one.holds_with)}." if one.holds_with else ""
    marked = [f"· {words}" for words in one.against] if len(one.against) > 1 else one.against
    why = "\n".join(marked) or "everything that was tried holds"
    return [
        USES[one.use],
        Cell(str(one.grade), _TONES[one.grade]),
        Cell(why, small=f"tokentrace: {one.remedy}.{with_them}"),
    ]


def _page_findings(report: AuditReport, differences: Contrasts) -> list[list[str | Cell]]:
    """A row for each finding; tokens that differ are added, side by side."""
    rows: list[list[str | Cell]] = []
    for found in report.findings:
        said = "\n".join(f"{sign} {role}: {text}" for sign, role, text in conversation_lines(found.smallest))
        told = "\n".join(words for one in found.breaks for words in _told(one))
        links = []
        for one in found.breaks:
            before, now = (_track(report, ids) for ids in one.ids)
            names = ("prompt", "with the turn") if one.at_turn else ("stream", "next prompt")
            hunks = align(before.ids, now.ids)
            links.append(differences.add(f"{report.name}: {found.why}", before, now, hunks, names, str(one)))
        rows.append([Cell(found.why, "bad", told, links[0] if links else ""), said])
    return rows


def _track(report: AuditReport, given: Sequence[int]) -> Track:
    ids = np.array(given, np.int32)
    known = {} if report.tokenizer is None else token_columns(report.tokenizer, ids)
    return Track("", ids, np.full(len(ids), HUES["plain"], np.uint8), **known)
