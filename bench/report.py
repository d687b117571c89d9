"""Results as Markdown: printed, and written between markers in the docs.

A marker is a pair of comments, `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`; the text between them is replaced.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = ("docs/benchmarks.md", "README.md")
MEASURED_WITH = ("fastokens", "tokenizers", "transformers", "renderers", "tml-renderers", "trl")


@dataclass(frozen=True, slots=True)
class Block:
    """The text between the markers of a name."""

    name: str
    text: str


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table whose first `left` columns are left-aligned."""
    lines = ["| " + " | ".join(heads) + " |"]
    lines.append("| " + " | ".join("---" if at < left else "---:" for at in range(len(heads))) + " |")
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def milli(seconds: float) -> str:
    """Milliseconds, with at least three significant digits."""
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def micro(seconds: float) -> str:
    """Microseconds."""
    value = seconds * 1e6
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def times(ratio: float) -> str:
    """A ratio, such as ``2.5x``."""
    return f"{ratio:,.0f}x" if ratio >= 20 else f"{ratio:.1f}x" if ratio >= 2 else f"{ratio:.2f}x"


def where(load: float) -> str:
    """The machine and versions that were measured. `load` is the load average before."""
    versions = ", ".join(f"{name} {version(name)}" for name in MEASURED_WITH)
    return (
        f"Measured on {os.cpu_count()} cores ({platform.machine()}, Python {platform.python_version()}), load average "
        f"{load:.1f} before and {os.getloadavg()[0]:.1f} after; {versions}."
    )


def write(blocks: Sequence[Block], root: Path = ROOT) -> None:
    """Write each block between its markers, in all files that have them. Raises ValueError if none has."""
    texts = {root / name: (root / name).read_text(encoding="utf-8") for name in FILES}
    for block in blocks:
        pattern = re.compile(rf"(<!-- bench:{block.name} -->\n).*?(<!-- /bench:{block.name} -->)", re.DOTALL)
        if not any(pattern.search(text) for text in texts.values()):
            raise ValueError(f"no <!-- bench:{block.name} --> in {' or '.join(FILES)}: add the pair of markers")
        for path, text in texts.items():
            texts[path] = pattern.sub(lambda match, text=block.text: f"{match[1]}{text}\n{match[2]}", text)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
