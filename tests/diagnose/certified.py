"""docs/certified.md, written by ``python -m tests.diagnose.certified``."""

from __future__ import annotations

from collections.abc import Iterable

from tests.assets import FAMILIES
from tests.guides import ROOT
from tests.support import PYTHON_FORMATS, load_family
from tokentrace.diagnose import AuditReport, Use, audit_template
from tokentrace.diagnose.audit_report import SIGNS
from tokentrace.diagnose.cases import Append

PAGE = ROOT / "docs" / "certified.md"
HEAD = """# Templates, certified

What `tokentrace audit` says of every family whose tokenizer and template our tests have, with the settings that each
has by default. [audit.md](audit.md) says what is tried and what the words mean. Columns are first what is appended
after an assistant's turn, then uses. ✓ holds, ◐ for some turns, ✗ for none, − refused by the template.
`tokentrace audit MODEL` prints what goes wrong and by which line of the template.

"""


def audit_of(family: str) -> AuditReport:
    return audit_template(load_family(family), chat_template=PYTHON_FORMATS.get(family))


def row(report: AuditReport) -> str:
    """The row of a family in the table."""
    signs = " | ".join(SIGNS[one].text for one in report.grades)
    return f"| {report.name} | {signs} | {facts(report)} |"


def facts(report: AuditReport) -> str:
    """The stop tokens, the prefill and the calls of a family."""
    known = report.facts
    stops = " ".join(f"`{one.text}`" for one in known.stop_tokens if one.from_template)
    prefill = known.prefill
    words = f"stops at {stops or 'no token'}" + (f"; the prompt prefills `{prefill!r}`" if prefill else "")
    words += f"; calls are {report.dialect or ('in no known dialect' if known.calls else 'not written')}"
    words += "; holds the date of the day" if known.date else ""
    return words.replace("|", "\\|")


def page_of(families: Iterable[str]) -> str:
    reports = [audit_of(family) for family in families]
    heads = ["", *Append, *Use, "stops, prefill, calls"]
    lines = [f"| {' | '.join(heads)} |", f"| --- |{' :-: |' * (len(heads) - 2)} --- |", *map(row, reports)]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page_of(FAMILIES), encoding="utf-8")
