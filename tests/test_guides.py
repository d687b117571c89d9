"""Every guide's code runs: here, or in the environment of the package that it is about."""

import re
from pathlib import Path

import pytest

from tests.guides import GUIDES, run_guide


def where_it_runs(page: Path) -> str:
    """The environment in a page's first line: ``<!-- runs in: here -->``, or a folder of `tests/apart/`."""
    marker = re.match(r"<!-- runs in: ([\w-]+) -->\n", page.read_text(encoding="utf-8"))
    assert marker, f"{page.name} does not say where its code runs"
    return marker[1]


PAGES = {page.stem: where_it_runs(page) for page in sorted(GUIDES.glob("*.md")) if page.stem != "index"}


@pytest.mark.parametrize("name", [name for name, where in PAGES.items() if where != "here"])
def test_guide_is_run_by_tests_of_another_environment(name: str) -> None:
    tests = (Path(__file__).parent / "apart" / PAGES[name]).glob("test_*.py")
    assert any(f'run_guide("{name}"' in test.read_text(encoding="utf-8") for test in tests)


@pytest.mark.parametrize("name", [name for name, where in PAGES.items() if where == "here"])
def test_guide_runs(name: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    run_guide(name, tmp_path)
