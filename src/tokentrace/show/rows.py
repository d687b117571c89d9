"""Views of training rows in a terminal: each as `tokentrace render` shows it; and statistics of a file of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

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


_BLOCKS: Final = " ▏▎▍▌▋▊▉█"


def statistics_text(found: Statistics, *, width: int = 36) -> RenderableType:
    """Counts, quantiles and a histogram."""
    share = 100 * found.trained / found.tokens if found.tokens else 0
    head = Text()
    head.append(counted(found.samples, "sample"), "bold").append(f"   {counted(found.tokens)}   ")
    head.append(f"{found.trained:,} trained", "bold underline").append(
        f" ({share:.1f} %)   {found.messages:,} messages"
    )
    names = {0.0: "least", 0.5: "median", 1.0: "most"}
    table = Table(box=None, padding=(0, 2), header_style="dim")
    table.add_column("a sample", style="dim")
    for quantile in found.lengths():
        table.add_column(names.get(quantile, f"{100 * quantile:.0f} %"), justify="right")
    for label, quantiles in (("tokens", found.lengths()), ("trained", found.trained_lengths())):
        table.add_row(label, *(f"{value:,}" for value in quantiles.values()))
    bars = found.histogram()
    most = max((bar.samples for bar in bars), default=1) or 1
    chart = Table(box=None, padding=(0, 1), header_style="dim")
    chart.add_column("tokens", justify="right")
    chart.add_column("samples", justify="right")
    chart.add_column("")
    chart.add_column("of all tokens", justify="right", style="dim")
    for bar in bars:
        tokens = 100 * bar.tokens / found.tokens if found.tokens else 0
        drawn = Text(_bar(bar.samples / most, width), "#34d399")
        chart.add_row(f"{bar.low:,} – {bar.high:,}", f"{bar.samples:,}", drawn, f"{tokens:.1f} %")
    notes = [Text(f"{count:,} sample{'' if count == 1 else 's'}: {note}", "yellow") for note, count in found.notes]
    return Group(head, Text(), table, Text(), chart, *([Text(), *notes] if notes else []))


def _bar(share: float, width: int) -> str:
    eighths = round(share * width * 8)
    if share and not eighths:
        eighths = 1
    full, rest = divmod(eighths, 8)
    return "█" * full + (_BLOCKS[rest] if rest else "")
