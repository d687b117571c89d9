"""docs/certified.md is what the command says with real tokenizers: of some families in each run, or of all."""

from __future__ import annotations

import pytest

from tests.assets import FAMILIES
from tests.diagnose.certified import PAGE, page_of
from tests.support import PYTHON_FORMATS, load_family, per_family, rotating
from tokentrace.diagnose import AuditReport, audit_template
from tokentrace.diagnose.audit_document import markdown_findings, markdown_row
from tokentrace.diagnose.cases import Append

FIRST = ["qwen3.5"]
"""Whose ids differ where its text does not."""


@per_family
def audit_of(family: str) -> AuditReport:
    return audit_template(load_family(family), chat_template=PYTHON_FORMATS.get(family))


def test_every_family_is_on_the_page() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[2:]] == list(FAMILIES)


def test_the_page_is_what_the_command_writes() -> None:
    """All of it, for two families of one vocabulary: the head, the table, what is below."""
    few = ["qwen3-instruct-2507", "qwen3-vl"]
    top, *sections = PAGE.read_text(encoding="utf-8").split("\n### ")
    others = tuple(f"| {name} |" for name in FAMILIES if name not in few)
    kept = [line for line in top.splitlines() if not line.startswith(others)]
    mine = [section.rstrip("\n") for section in sections if section.split("\n")[0] in few]
    assert page_of(few) == "\n### ".join(["\n".join(kept) + "\n", *(f"{section}\n" for section in mine)])


@pytest.mark.parametrize("family", dict.fromkeys([*FIRST, *rotating(FAMILIES, "certified", 32)]))
def test_the_page_says_what_the_command_says(family: str) -> None:
    report = audit_of(family)
    page = PAGE.read_text(encoding="utf-8")
    assert markdown_row(report) in page.splitlines()
    section = page.split(f"\n### {family}\n", 1)[1].split("\n### ", 1)[0]
    assert section.strip().splitlines() == markdown_findings(report)


def test_tokens_that_reach_over_the_prompt_are_a_break_of_ids_alone() -> None:
    report = audit_of("qwen3.5")
    cells = [cell for cell in report.cells if cell.append is Append.TOOL and not cell.turn.reasoning]
    seams = {one.where for cell in cells for one in cell.breaks}
    assert seams == {"seam"}
    for cell in cells:
        for one in cell.breaks:
            before, now = one.ids
            assert now[: len(before)] != before
