"""Views of training rows in a terminal: each as `tokentrace render` shows it; and statistics of a file of them."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..data.statistics import Statistics
from ..rendering.rendered import RenderedTokens
from ..tokens.visible import counted, visible
from .terminal import plain_view, text_view

Shown = tuple[str, RenderedTokens]
"""A title, and the tokens of a row with its loss mask as their mask."""


def rows_text(rows: Iterable[Shown]) -> RenderableType:
    """Rows for a terminal."""
    parts: list[RenderableType] = []
    for title, rendered in rows:
        parts += [Text(f"── {visible(title)} ──", "bold"), text_view(rendered), Text()]
    return Group(*parts)


def rows_plain(rows: Iterable[Shown]) -> str:
    """Rows as plain lines."""
    return "\n\n".join(f"## {visible(title)}\n{plain_view(rendered)}" for title, rendered in rows)


def statistics_text(statistics: Statistics) -> RenderableType:
    """Counts and quantiles."""
    share = 100 * statistics.trained / statistics.tokens if statistics.tokens else 0
    head = Text()
    head.append(counted(statistics.samples, "sample"), "bold").append(f"   {counted(statistics.tokens)}   ")
    head.append(f"{statistics.trained:,} trained", "bold underline").append(
        f" ({share:.1f} %)   {statistics.messages:,} messages"
    )
    names = {0.0: "least", 0.5: "median", 1.0: "most"}
    table = Table(box=None, padding=(0, 2), header_style="dim")
    table.add_column("a sample", style="dim")
    for quantile in statistics.lengths:
        table.add_column(names.get(quantile, f"{100 * quantile:.0f} %"), justify="right")
    for label, quantiles in (("tokens", statistics.lengths), ("trained", statistics.trained_lengths)):
        table.add_row(label, *(f"{value:,}" for value in quantiles.values()))
    notes = [Text(f"{count:,} sample{'' if count == 1 else 's'}: {note}", "yellow") for note, count in statistics.notes]
    return Group(head, Text(), table, *([Text(), *notes] if notes else []))
