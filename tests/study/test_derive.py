"""The grammar that is read off a template: what it is for each family, and that it finds out what it has to.

Families are written out here as a person would read them off the template. What derivation must be able to find out is
tested one by one, on small templates that no model has.
"""

from __future__ import annotations

import pytest

from tests.formats.small import made_up_renderer
from tests.study.cases import (
    CASES,
    CONTROLS,
)
from tokentrace.parsing.proof import MISREAD

# -- what derivation has to find out, each on a template of its own


@pytest.mark.parametrize("name", CASES)
def test_derivation_finds_out(name: str) -> None:
    found = made_up_renderer(CASES[name].source, *CONTROLS).grammar()
    notes = tuple(note for note in found.notes if MISREAD not in note)
    assert found.replace(notes=notes) == CASES[name].grammar


def test_a_grammar_that_does_not_read_its_template_back_says_so() -> None:
    notes = {name: made_up_renderer(case.source, *CONTROLS).grammar().notes for name, case in CASES.items()}
    assert {name for name, said in notes.items() if any(MISREAD in note for note in said)} == {
        "reasoning that the prompt opens and the turn closes",  # its own past turns do not show the opening
        "reasoning that nothing opens",
        "reasoning that nothing closes",
        "several messages in a turn",
        "Python calls with nothing around them",
        "calls that cannot be taken apart",
    }
    said = notes["Python calls with nothing around them"][-1]
    assert said == f"{MISREAD}: content of an answer and a call, calls of an answer and a call"
