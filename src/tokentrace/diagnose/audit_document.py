"""Documents of audits: one in full, several as a table, and the differences between two."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from ..show.document import Cell, Document, Table
from ..show.visible import counted, listed
from .appends import AppendBreak, AppendCell
from .audit_report import AppendFinding, AuditReport
from .cases import Append, Style
from .verdicts import USES, Grade, Use, grade

SIGNS: Final[Mapping[Grade | None, str]] = {Grade.HOLDS: "✓", Grade.PARTLY: "◐", Grade.FAILS: "✗", None: "−"}
TONES: Final[Mapping[Grade | None, str]] = {Grade.HOLDS: "good", Grade.PARTLY: "poor", Grade.FAILS: "bad", None: "dim"}
_KEY: Final = "✓ holds   ◐ for some turns   ✗ for none   − refused by the template"
_COLUMNS: Final = {
    "content": (False, True, Style.PLAIN),
    "reasoning + content": (True, True, Style.PLAIN),
    "calls alone": (False, False, Style.PLAIN),
    "reasoning + calls": (True, False, Style.PLAIN),
    "spaces around content": (False, True, Style.SPACED),
    "reasoning in content": (False, True, Style.INLINE),
}
"""What a turn has beside its calls: reasoning, content, and the style of its content."""

_Row = Sequence[str | Cell]


def audit_document(reports: Sequence[AuditReport]) -> Document:
    """Return the document of one audit in full, or of several as a table with their findings."""
    names = [report.name for report in reports]
    title = f"Audit of {counted(len(names), 'template') if len(names) > 3 else listed(names)}"
    if len(reports) > 1:
        findings: list[_Row] = []
        for one in reports:
            findings += [[one.name], [one.conclusion.text], *([finding.why] for finding in one.findings)]
        tables = [_overview(reports), Table("What goes wrong", ["", " "], findings, words=2, code=True)]
        return Document(title, "tokentrace audit", tables=tables)
    (report,) = reports
    settings = [f"{name}={value!r}" for name, value in report.settings.items()]
    findings = [row for number, one in enumerate(report.findings, 1) for row in _finding(number, one)]
    return Document(
        title,
        "tokentrace audit",
        lead=" · ".join([f"family {report.family}", f"template {report.digest[:12]}", *settings]),
        summary=[report.conclusion.text, *(f"$ {command}" for command in report.conclusion.commands)],
        notes=report.notes,
        tables=[
            Table("What it is safe for", ["", " "], list(_verdict_rows(report)), words=2, code=True),
            _matrix(report),
            *([Table("What goes wrong", ["", " "], findings, words=2, code=True)] if findings else []),
            Table("What else is known", ["", " "], [list(row) for row in fact_rows(report)], words=2),
        ],
    )


def differences_document(before: AuditReport, now: AuditReport) -> Document:
    """Return the document of what differs between two audits."""
    changed = list(before.differences(now))
    verdicts = [
        f"{one.use}: {one.grade} → {other.grade}"
        for one, other in zip(before.verdicts, now.verdicts, strict=True)
        if one.grade is not other.grade
    ]
    words = counted(len(changed), "difference") if changed else "nothing differs"
    summary = [f"{before.name} → {now.name}: {words}", *(verdicts or ["all verdicts are the same"] * bool(changed))]
    rows: list[_Row] = [[what, Cell(old or "−", "bad"), Cell(new or "−", "good")] for what, old, new in changed]
    tables = [Table("Differences", ["", "before", "now"], rows, words=3)] if rows else []
    return Document(f"{before.name} and {now.name}", "tokentrace audit", summary=summary, tables=tables)


def _verdict_rows(report: AuditReport) -> Iterator[_Row]:
    for one in report.verdicts:
        yield [Cell(f"{SIGNS[one.grade]} {one.use}", TONES[one.grade]), f"{USES[one.use]}: {one.grade}"]
        yield from (["", words] for words in one.against)
        if one.holds_with:
            yield ["", Cell(f"holds with {' or '.join(one.holds_with)}", "good")]


def _matrix(report: AuditReport) -> Table:
    """Grade each kind of turn for each append; in brackets what verdicts do not count."""
    counting = {cell.turn for cell in report.judged}
    rows: list[_Row] = []
    for append in Append:
        row: list[str | Cell] = [str(append)]
        for form in _COLUMNS.values():
            cells = [
                cell
                for cell in report.cells
                if cell.append is append and (cell.turn.reasoning, cell.turn.content, cell.turn.style) == form
            ]
            outcome = grade(cells) if cells else None
            counts = any(cell.turn in counting for cell in cells)
            sign = Cell(SIGNS[outcome], TONES[outcome]) if counts else Cell(f"({SIGNS[outcome]})", "dim")
            row.append(sign if cells else "")
        rows.append(row)
    key = f"{_KEY}   ( ) does not count: reasoning that the template neither writes nor asks for"
    return Table("What is appended, after which turn", ["", *_COLUMNS], rows, key)


def _overview(reports: Sequence[AuditReport]) -> Table:
    rows: list[_Row] = [[report.name, *(Cell(SIGNS[one], TONES[one]) for one in grades(report))] for report in reports]
    return Table("All", ["", *Append, *Use], rows, _KEY)


def grades(report: AuditReport) -> list[Grade | None]:
    """Return the grade of each append and each use."""
    return [*(report.outcome(append) for append in Append), *(one.grade for one in report.verdicts)]


def _finding(number: int, finding: AppendFinding) -> Iterator[_Row]:
    yield [f"{number}.", finding.why]
    for one in finding.breaks:
        yield from ([label, words] for label, words in _break_rows(one))
    yield ["", Cell("the smallest conversation that shows it:", "dim")]
    for role, words, tone in _conversation(finding.smallest):
        yield [role, Cell(words, tone)]


def _break_rows(one: AppendBreak) -> Iterator[tuple[str, str]]:
    blame = one.blame
    if blame is not None:
        yield f"line {blame.line}", blame.source
        if blame.condition:
            proof = "" if blame.proven else " (not proven to be the cause)"
            yield "", f"`{blame.condition}` is {'true, then false' if blame.before else 'false, then true'}{proof}"
        for line, name, before, after in blame.because:
            yield "", f"line {line} sets {name}: {before}, then {after}"
    yield from (("", words) for words in one.fields)
    yield "had", repr(one.before)
    yield "has", repr(one.after)


def _conversation(cell: AppendCell) -> Iterator[tuple[str, str, str]]:
    """Yield the role and the text of each message; appended ones have a plus."""
    first = len(cell.messages) - len(cell.case.appended)
    for at, message in enumerate(cell.messages):
        parts = [f"reasoning {message['reasoning_content']!r}"] if message.get("reasoning_content") else []
        if content := message.get("content"):
            parts.append(repr(content) if isinstance(content, str) else json.dumps(content))
        for one in message.get("tool_calls") or ():
            arguments = one["function"]["arguments"]
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            parts.append(f"calls {one['function']['name']}({text})")
        yield f"{'+' if at >= first else ' '} {message['role']}", ", ".join(parts), "good" if at >= first else ""


def fact_rows(report: AuditReport) -> Iterator[tuple[str, str]]:
    """Yield a label and a sentence for each fact."""
    stops = [
        f"{one.text} ({one.id}{', the head of the next turn' if one.is_next_head else ''}"
        f"{'' if one.from_template else ', from the configuration only'}{'' if one.trained else ', not trained'})"
        for one in report.stops.tokens
    ]
    end = "; the last turn of a row has none, unless final_stop adds it" if report.stops.untrained_end else ""
    yield "stop tokens", (", ".join(stops) or "none") + end
    opens = ", which opens reasoning" if report.prompting.opens_reasoning else ""
    prefill = f"; it prefills {report.prompting.prefill!r}{opens}" if report.prompting.prefill else ""
    yield "prompt", f"{report.prompting.prompt!r}{prefill}"
    forgeable = " ".join(report.forgeable) or "nothing of the scaffold"
    yield "users can forge", f"{forgeable} under plain rendering; nothing with tokentrace"
    reading, grammar, changes = report.reading, report.grammar, report.changes
    for outcome in ("written", "rewritten", "dropped", "refused"):
        if roles := [role for role, one in reading.roles.items() if one == outcome]:
            yield f"roles {outcome}", ", ".join(roles)
    yield "content read as", "; ".join(f"{role}: {' or '.join(forms)}" for role, forms in reading.content.items())
    yield "arguments read as", " or ".join(reading.arguments) or "nothing: it writes no calls"
    yield "reasoning", f"{'written' if reading.reasoning else 'not written'}; inside content {reading.inline_reasoning}"
    calls = f": {grammar.calls.outline}" if grammar.calls is not None else ""
    yield "calls", f"{report.dialect or 'of no known dialect'}{calls}"
    yield from (("", note) for note in grammar.notes)
    yield "added by template", repr(report.system) if report.system else "nothing"
    bridging = report.bridging
    if bridging.broken:
        why = "".join(f"; {reason} ({count})" for reason, count in bridging.refused)
        yield "bridge", f"appends to the sampled ids in {bridging.bridged} of {bridging.broken} cases that break{why}"
    dates = [f"the date{changes.by}"] if changes.clock else []
    yield "changes between runs", " and ".join([*dates, *(["chance"] if changes.random else [])]) or "no"
    for one in report.switches:
        verdicts = ", ".join(f"{verdict.use} {verdict.grade}" for verdict in one.verdicts)
        yield f"with {one.name}", verdicts or "everything is refused"
    if report.without_effect:
        yield "has no effect", ", ".join(report.without_effect)
