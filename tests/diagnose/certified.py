"""docs/certified.md, made anew by the command: ``python -m tests.diagnose.certified``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.assets import FAMILIES, family_dir
from tests.guides import ROOT
from tokentrace.cli import main

PAGE = ROOT / "docs" / "certified.md"
HEAD = """# Templates, certified

What `tokentrace audit` says of every family whose tokenizer and template our tests have, with the settings that each
has by default. [audit.md](audit.md) says what is tried and what the words mean. Columns are first what is appended
after an assistant's turn, then uses. ✓ holds, ◐ for some turns, ✗ for none, − refused by the template. Lines are those
of the template.

This page is made by the command, `tokentrace audit FAMILIES… --markdown`, and tests compare it with what the command
says now.

"""


def page_of(families: Iterable[str]) -> str:
    """The page of these families, as the command writes it."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table.md"
        paths = [str(family_dir(name)) for name in families]
        main(["audit", *paths, "--markdown", str(table)], standalone_mode=False)
        return HEAD + table.read_text(encoding="utf-8")


if __name__ == "__main__":
    PAGE.write_text(page_of(FAMILIES), encoding="utf-8")
