"""Results that show themselves: in notebooks, and as text. `show` knows how, and is loaded when it is asked."""

from __future__ import annotations

from typing import Any


class ShowsItself:
    """A result that a notebook shows as a page in a frame."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        from .show import html_fragment

        return html_fragment(self)


def history_text(report: Any) -> str:
    """A `HistoryReport`, as a terminal shows it."""
    from .show.histories import plain_view

    return plain_view(report)
