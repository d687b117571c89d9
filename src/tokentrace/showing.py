"""Results that show themselves in notebooks."""

from __future__ import annotations


class ShowsItself:
    """A result that a notebook shows as a page in a frame; `show` knows how, and is loaded when it is asked."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        from .show import html_fragment

        return html_fragment(self)
