"""A document as a page: one file that needs nothing but itself, and in which no text can act.

The page is one template. The document is in it as JSON, and the scripts put every text of it into the page as text.
Should one slip through all the same, the page's policy lets a browser run and apply nothing but the script and the
style sheet of the page, by their hashes, and load nothing at all.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from importlib import resources
from typing import Final

from markupsafe import escape

from ..tokens.visible import visible
from .document import Document

SCRIPTS: Final = ("dom.js", "tracks.js", "tokens.js", "tree.js", "parts.js", "viewer.js")
"""The modules of the page, each after those that it imports. A page has them as one script."""

SHARED: Final = (*SCRIPTS[:-1], "viewer.css")
"""What a gateway's page, which is served as files, has of it."""

_IMPORT: Final = re.compile(r"^import .*\n", re.MULTILINE)
_EXPORT: Final = re.compile(r"^export ", re.MULTILINE)


def page_html(document: Document) -> str:
    """The document as a page of its own."""
    style, script = asset("viewer.css"), _script()
    parts = {
        "title": str(escape(visible(document.heading))),
        "style-source": _source(style),
        "script-source": _source(script),
        "style": style,
        "script": script,
        "data": _json(document),
    }
    return re.sub(r"\{\{ ([a-z-]+) \}\}", lambda found: parts[found[1]], asset("page.html"))


def frame_html(document: Document) -> str:
    """The document for a notebook's cell: the page in a frame of its own, which can reach nothing around it."""
    rows = sum(len(table.rows) for table in document.tables)
    notes = len(document.notes) + sum(len(track.notes) for track in document.tracks[:1])  # above the tokens
    tall = min(760, 300 + document.tokens // 3 + 40 * rows + 80 * (notes > 0) + 32 * notes)
    page = str(escape(page_html(document)))
    style = f"width:100%;height:{tall}px;border:1px solid #8884;border-radius:10px"
    return f'<iframe srcdoc="{page}" sandbox="allow-scripts" style="{style}" title="tokentrace"></iframe>'


@functools.cache
def asset(name: str) -> str:
    """A file of the page."""
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


@functools.cache
def _script() -> str:
    """The modules as one script: each name is used once in all of them, so they need no imports."""
    modules = (_EXPORT.sub("", _IMPORT.sub("", asset(name))) for name in SCRIPTS)
    return '"use strict";\n(() => {\n' + "\n".join(modules) + "\nshowPage();\n})();\n"


def _json(document: Document) -> str:
    """JSON that can stand in a page: nothing in it ends the element that it is in."""
    text = json.dumps(document.to_json(), separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _source(text: str) -> str:
    """How a policy names a script or a style sheet."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
