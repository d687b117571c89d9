"""docs/certified.md is what an audit says with real tokenizers: of some families in each run, or of all."""

from __future__ import annotations

import pytest

from tests.assets import FAMILIES
from tests.diagnose import certified
from tests.support import per_family, rotating

audit_of = per_family(certified.audit_of)
PAGE = certified.PAGE.read_text(encoding="utf-8")
FIRST = ["qwen3.5"]
"""Its ids differ where its text does not."""


def test_every_family_is_on_the_page() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[2:]] == list(FAMILIES)
    assert PAGE.startswith(certified.HEAD)


@pytest.mark.parametrize("family", dict.fromkeys([*FIRST, *rotating(FAMILIES, "certified", 32)]))
def test_the_page_is_up_to_date(family: str) -> None:
    report = audit_of(family)
    assert certified.row(report) in PAGE.splitlines()


def test_a_token_that_spans_the_end_of_the_prompt_is_a_break_of_ids_alone() -> None:
    cells = [cell for cell in audit_of("qwen3.5").cells if cell.append == "tool" and not cell.turn.reasoning]
    assert {one.where for cell in cells for one in cell.breaks} == {"seam"}
