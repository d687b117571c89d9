"""A document as a page: one file without external resources, in which no text can execute.

The page holds the document as JSON, and its script inserts every string as text. The content
security policy allows only its own script and style sheet, by hash.
"""

import base64
import functools
import hashlib
import json
import re
import tempfile
import webbrowser
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from markupsafe import escape

from .document import Document
from .results import document_of
from .visible import counted, visible

SCRIPTS = ("dom.js", "tracks.js", "tokens.js", "tree.js", "parts.js", "viewer.js")
"""The page's modules in import order. It inlines them as one script."""
SHARED = (*SCRIPTS[:-1], "viewer.css")  # the gateway's page uses them, too
_IMPORT = re.compile(r"^import .*\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


@dataclass(frozen=True, slots=True, repr=False)
class Page:
    """A document as a page. Notebooks display it."""

    document: Document

    @property
    def html(self) -> str:
        style, script = asset("viewer.css"), _script()
        parts = {
            "title": str(escape(visible(self.document.heading))),
            "style-source": _source(style),
            "script-source": _source(script),
            "style": style,
            "script": script,
            "data": _json(self.document),
        }
        return re.sub(r"\{\{ ([a-z-]+) \}\}", lambda match: parts[match[1]], asset("page.html"))

    def save(self, path: str | Path) -> Path:
        path = Path(path)
        path.write_text(self.html, encoding="utf-8")
        return path

    def open(self) -> Path:
        """Open the page in a browser; returns the path of its temporary file."""
        path = self.save(Path(tempfile.mkdtemp(prefix="tokentrace-")) / "page.html")
        webbrowser.open(path.as_uri())
        return path

    def __repr__(self) -> str:
        return f"Page({self.document.title!r}, {counted(self.document.tokens)})"

    def _repr_html_(self) -> str:
        document = self.document
        rows = sum(len(table.rows) for table in document.tables)
        notes = len(document.notes) + sum(len(track.notes) for track in document.tracks[:1])
        height = min(760, 300 + document.tokens // 3 + 40 * rows + 80 * (notes > 0) + 32 * notes)
        style = f"width:100%;height:{height}px;border:1px solid #8884;border-radius:10px"
        source = f'srcdoc="{escape(self.html)}" sandbox="allow-scripts"'
        return f'<iframe {source} style="{style}" title="tokentrace"></iframe>'


def show(value: Any, other: Any = None, *, tokenizer: Any = None, title: str = "") -> Page:
    """Show any result on a page; with `other`, two results side by side, aligned by token.

    `tokenizer`, a tokenizer or a renderer, has the texts of tokens that the result does not
    carry. Raises InputError for a value that is not a result.

    >>> from tokentrace import create_renderer
    >>> from tokentrace.pocket import POCKET
    >>> page = show(create_renderer(POCKET).render([{"role": "user", "content": "2+2?"}]))
    >>> page.document.tokens
    9
    """
    return Page(document_of(value, other, tokenizer=tokenizer, title=title))


@functools.cache
def asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


@functools.cache
def _script() -> str:
    """All modules as one script. No two define the same name, so imports can go."""
    modules = (_EXPORT.sub("", _IMPORT.sub("", asset(name))) for name in SCRIPTS)
    return '"use strict";\n(() => {\n' + "\n".join(modules) + "\nshowPage();\n})();\n"


def _json(document: Document) -> str:
    """JSON that cannot end its script element."""
    text = json.dumps(document.to_json(), separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
