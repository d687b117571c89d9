"""What differs between two audits: of a template before and after a change, of a model and its fine-tune."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from .audit_report import AuditReport
from .verdicts import cause


def differences(before: AuditReport, now: AuditReport) -> Iterator[tuple[str, str, str]]:
    """Each thing that is not the same: what it is, what it was, and what it is now."""
    one, other = dict(_told(before)), dict(_told(now))
    for what in dict.fromkeys((*one, *other)):
        if one.get(what, "") != other.get(what, ""):
            yield what, one.get(what, ""), other.get(what, "")


def _told(report: AuditReport) -> Iterator[tuple[str, str]]:
    """What a report says, each thing by itself; lines of templates are not compared."""
    for verdict in report.verdicts:
        yield f"verdict on {verdict.use}", str(verdict.grade)
    for cell in report.cells:
        what = f"{cell.append} after {cell.turn.words}"
        why = cell.reason or (cause(cell) if cell.lost else "")
        yield what, f"{cell.outcome}: {why}" if why else str(cell.outcome)
    for name in ("stops", "prompting", "forging", "reading", "writing", "defaults"):
        section = report.to_json()[name]
        for key, value in section.items():
            yield f"{name}, {key}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    yield "texts that are not written as given", "; ".join(str(replace(one, line=None)) for one in report.altered)
    for one in report.switches:
        grades = ", ".join(f"{verdict.use} {verdict.grade}" for verdict in one.verdicts)
        yield f"with {one.name}", grades or "refused"
