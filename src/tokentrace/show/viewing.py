"""A result on a page: to look at in a notebook, to save, or to open in a browser."""

from __future__ import annotations

import tempfile
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..tokens.visible import counted
from ..viewer.document import Document
from ..viewer.page import frame_html, page_html
from .documents import document_of


@dataclass(frozen=True, slots=True, repr=False)
class Page:
    """What `show` returns: a notebook shows it, and `html` is the whole page, which needs nothing but itself."""

    document: Document

    @property
    def html(self) -> str:
        return page_html(self.document)

    def save(self, path: str | Path) -> Path:
        """Write the page to a file."""
        path = Path(path)
        path.write_text(self.html, encoding="utf-8")
        return path

    def open(self) -> Path:
        """Show the page in a browser, from a file that is returned."""
        path = self.save(Path(tempfile.mkdtemp(prefix="tokentrace-")) / "page.html")
        webbrowser.open(path.as_uri())
        return path

    def __repr__(self) -> str:
        return f"Page({self.document.title!r}, {counted(self.document.tokens)})"

    def _repr_html_(self) -> str:
        return frame_html(self.document)


def show(value: Any, other: Any = None, *, tokenizer: Any = None, title: str = "") -> Page:
    """Any result on a page; with `other`, two renderings side by side, aligned by token.

    `tokenizer`, a tokenizer or a renderer, tells the texts of tokens where the result does not know them. InputError
    for what is not a result.

    >>> from tokentrace import create_renderer
    >>> from tokentrace.pocket import POCKET
    >>> page = show(create_renderer(POCKET).render([{"role": "user", "content": "2+2?"}]))
    >>> page.document.tokens
    9
    """
    return Page(document_of(value, other, tokenizer=tokenizer, title=title))


def html_page(value: Any, title: str = "", *, tokenizer: Any = None) -> str:
    """A result as a page of its own."""
    return show(value, tokenizer=tokenizer, title=title).html


def html_fragment(value: Any, *, tokenizer: Any = None) -> str:
    """A result for a notebook's cell."""
    return frame_html(document_of(value, tokenizer=tokenizer))
