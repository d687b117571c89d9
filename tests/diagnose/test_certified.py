"""docs/certified.md lists audits with real tokenizers; ``python -m tests.diagnose.test_certified`` writes it."""

import pytest

from tests.assets import FAMILIES
from tests.guides import ROOT
from tests.support import PYTHON_FORMATS, load_family, per_family, rotating
from tokentrace.diagnose import AuditReport, Use, audit_template
from tokentrace.diagnose.appends import Append
from tokentrace.diagnose.certify import SIGNS

PAGE = ROOT / "docs" / "certified.md"
HEAD = """# Templates, certified

What `tokentrace audit` says of every family whose tokenizer and template our tests have, with the settings that each
has by default. [audit.md](audit.md) says what is tried and what the words mean. Columns are first what is appended
after an assistant's turn, then uses. ✓ holds, ◐ for some turns, ✗ for none, − refused by the template.
`tokentrace audit MODEL` prints what goes wrong and by which line of the template.

"""


@per_family
def audit_of(family: str) -> AuditReport:
    return audit_template(load_family(family), chat_template=PYTHON_FORMATS.get(family))


def row(report: AuditReport) -> str:
    """The row of a family in the table: grades, stop tokens, prefill and calls."""
    facts = report.facts
    stops = " ".join(f"`{one.text}`" for one in facts.stop_tokens if one.from_template)
    words = f"stops at {stops or 'no token'}" + (f"; the prompt prefills `{facts.prefill!r}`" * bool(facts.prefill))
    words += f"; calls are {report.dialect or ('in no known dialect' if facts.calls else 'not written')}"
    words += "; contains the current date" * bool(facts.date)
    cells = [report.name, *(SIGNS[one].text for one in report.grades), words.replace("|", "\\|")]
    return f"| {' | '.join(cells)} |"


def test_every_family_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[2:]] == list(FAMILIES)
    assert page.startswith(HEAD)


@pytest.mark.parametrize("family", dict.fromkeys(["qwen3.5", *rotating(FAMILIES, "certified", 32)]))
def test_the_page_is_up_to_date(family: str) -> None:
    assert row(audit_of(family)) in PAGE.read_text(encoding="utf-8").splitlines()


def test_a_token_that_spans_the_end_of_the_prompt_is_a_break_of_ids_alone() -> None:
    cells = [cell for cell in audit_of("qwen3.5").cells if cell.append == "tool" and not cell.turn.reasoning]
    assert {one.where for cell in cells for one in cell.breaks} == {"seam"}


if __name__ == "__main__":
    heads = ["", *Append, *Use, "stops, prefill, calls"]
    lines = [f"| {' | '.join(heads)} |", f"| --- |{' :-: |' * (len(heads) - 2)} --- |"]
    lines += [row(audit_of(family)) for family in FAMILIES]
    PAGE.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")
