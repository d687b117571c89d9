"""Guides whose code runs: the blocks of a page in `docs/guides/`, one after another, in an empty folder.

````
```python                 run, all blocks of a page in one namespace
```console                lines that begin with "$ " are run by a shell; others are what it may print
```yaml file=tools.yaml   written to that file; any language
<!-- not run: why -->     on the line before a block: it is left alone
````

Other blocks (json, text) are for people to read.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GUIDES = Path(__file__).parents[1] / "docs" / "guides"
_BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run: \S.*-->\s*$")


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    language: str
    file: str | None
    code: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    """What a page wants to be run or written, in order."""
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        if _NOT_RUN.search(text[: found.start()]):
            continue
        named = re.search(r"\bfile=(\S+)", found[2])
        yield Block(found[1], named[1] if named else None, found[3], text.count("\n", 0, found.start()) + 2)


def run_guide(name: str, folder: Path) -> dict[str, Any]:
    """Run a page of `docs/guides/` in a folder, which becomes the working directory; what its Python defined."""
    page = GUIDES / f"{name}.md"
    names: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    before = Path.cwd()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        for block in blocks(page):
            if block.file is not None:
                (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
                (folder / block.file).write_text(block.code, encoding="utf-8")
            elif block.language == "python":
                count += 1
                padded = "\n" * (block.line - 1) + block.code  # tracebacks then name the line of the page
                exec(compile(padded, str(page), "exec"), names)
            elif block.language == "console":
                for command in re.findall(r"^\$ (.*(?:\\\n.*)*)$", block.code, re.MULTILINE):
                    count += 1
                    _run(command, page, block.line)
    finally:
        os.chdir(before)
        sys.path.remove(str(folder))
    assert count, f"{page.name} has no code to run"
    return names


def _run(command: str, page: Path, line: int) -> None:
    paths = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    made = subprocess.run(
        command,
        shell=True,
        env={**os.environ, "PATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, f"{page.name}, line {line}: {command}\n{made.stdout[-2000:]}\n{made.stderr[-4000:]}"
